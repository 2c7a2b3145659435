"""The Python package without a controller: jaxlib's own `get_client` is replaced by one that takes notes and opens a local CPU client.

So JAX really starts, through its plug-in discovery, and what reaches jaxlib is known.
"""

import socket
import threading

import pytest

# Stands in for jaxlib: what `get_client` was called with goes to `calls`.
NOTES = """
from jax._src.lib import xla_client
from jax.extend.backend import ifrt_proxy
import os
calls = []
def note(address, options):
    calls.append({
        "address": address,
        "data": {k: (v.decode() if isinstance(v, bytes) else v) for k, v in (options.initialization_data or {}).items()},
        "timeout": options.connection_timeout_in_seconds,
        "insecure": os.environ.get("IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"),
    })
    return xla_client.make_cpu_client()
ifrt_proxy.get_client = note
import jax
"""
USE = """
jax.devices()
result({"calls": calls, "platforms": jax.config.jax_platforms, "backends": sorted(jax.extend.backend.backends())})
"""
IMPORT_BACKEND = "import jax.extend.backend\n"


class Listener:
    """Accepts connections on a free port; answers each with `greeting` and keeps it open."""

    def __init__(self, greeting):
        self.greeting = greeting
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.target = f"grpc://127.0.0.1:{self.socket.getsockname()[1]}"
        self.kept = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            connection.sendall(self.greeting)
            self.kept.append(connection)


HTTP2_SETTINGS = b"\0\0\0\4\0\0\0\0\0"


@pytest.fixture
def listen():
    listeners = []

    def start(greeting=HTTP2_SETTINGS):
        listeners.append(Listener(greeting))
        return listeners[-1].target

    yield start
    for listener in listeners:
        listener.socket.close()


@pytest.mark.parametrize("name", ["proxy", "pathways"])
def test_two_variables_are_enough(run_python, listen, name):
    target = listen()
    got = run_python(NOTES + IMPORT_BACKEND + USE, JAX_PLATFORMS=name, JAX_BACKEND_TARGET=target).value
    assert got["calls"] == [{"address": target, "data": {}, "timeout": 10, "insecure": "true"}]
    assert got["platforms"] == f"{name},cpu"
    assert got["backends"] == ["cpu", name] if name > "cpu" else [name, "cpu"]


def test_the_order_of_platforms_stays(run_python, listen):
    got = run_python(NOTES + IMPORT_BACKEND + USE, JAX_PLATFORMS="cpu,proxy", JAX_BACKEND_TARGET=listen()).value
    assert got["platforms"] == "cpu,proxy"


@pytest.mark.parametrize("platforms", [None, "cpu"])
def test_nothing_set_leaves_jax_alone(run_python, platforms):
    script = NOTES + IMPORT_BACKEND + """
before = sorted(jax._src.xla_bridge._backend_factories)
jax.devices()
result({
    "same function": ifrt_proxy.get_client is note, "calls": calls, "platforms": jax.config.jax_platforms,
    "new factories": sorted(set(jax._src.xla_bridge._backend_factories) - set(before)),
    "insecure": os.environ.get("IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"),
    "backends": sorted(jax.extend.backend.backends()),
})
"""
    got = run_python(script, JAX_PLATFORMS=platforms, PATHWAYS_NAME="unused").value
    assert got == {
        "same function": True, "calls": [], "platforms": platforms, "new factories": [], "insecure": None, "backends": ["cpu"],
    }


def test_only_listed_variables_travel(run_python, listen):
    sent = {"NAME": "train", "WEIGHT": "4", "PRIORITY": "2", "MEMORY": "1GiB", "SLICE": "2x4", "TOKEN": "secret"}
    more = {"PATHWAYS_PLUGIN": "x", "PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS": "7", "PATHWAYS_RS_UNKNOWN": "1"}
    got = run_python(
        NOTES + IMPORT_BACKEND + USE, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=listen(),
        **{f"PATHWAYS_{k}": v for k, v in sent.items()}, **more,
    ).value
    assert got["calls"][0]["data"] == {f"pathways.{k.lower()}": v for k, v in sent.items()}


def test_an_empty_option_is_not_sent(run_python, listen):
    got = run_python(NOTES + IMPORT_BACKEND + USE, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=listen(), PATHWAYS_NAME="").value
    assert got["calls"][0]["data"] == {}


def test_options_that_do_not_fit_are_refused(run_python, listen):
    got = run_python(NOTES + IMPORT_BACKEND + USE, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=listen(), PATHWAYS_TOKEN="x" * 5000)
    assert got.code != 0
    assert "the longest is PATHWAYS_TOKEN" in got.err and "xxxx" not in got.err


def test_the_callers_own_data_and_time_limit_win(run_python, listen):
    script = NOTES + IMPORT_BACKEND + """
def mine():
    options = ifrt_proxy.ClientConnectionOptions()
    options.initialization_data = {"pathways.name": b"mine", "job": 7}
    options.connection_timeout_in_seconds = 33
    return ifrt_proxy.get_client(jax.config.read("jax_backend_target"), options)
jax.extend.backend.register_backend_factory("proxy", mine, priority=-1)
""" + USE
    got = run_python(
        script, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=listen(), PATHWAYS_NAME="theirs", PATHWAYS_SLICE="4",
    ).value
    assert got["calls"][0]["data"] == {"pathways.name": "mine", "pathways.slice": "4", "job": 7}
    assert got["calls"][0]["timeout"] == 33


def test_a_users_credentials_setting_stays(run_python, listen):
    got = run_python(
        NOTES + IMPORT_BACKEND + USE, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=listen(),
        IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS="false",
    ).value
    assert got["calls"][0]["insecure"] == "false"


ORDERS = {
    "pathwaysutils first": "pathwaysutils.initialize()\n",
    "discovery first": "jax._src.xla_bridge.discover_pjrt_plugins()\npathwaysutils.initialize()\n",
    "twice": "pathwaysutils.initialize()\npathwaysutils.initialize()\n",
    "ours by hand first": "import pathways_rs\npathways_rs.initialize()\npathwaysutils.initialize()\n",
    "ours by hand last": "import pathways_rs\npathwaysutils.initialize()\npathways_rs.initialize()\npathways_rs.initialize()\n",
    "not called": "",
}


@pytest.mark.parametrize("order", ORDERS)
def test_pathwaysutils_in_every_order(run_python, listen, order):
    pytest.importorskip("pathwaysutils")
    script = NOTES + IMPORT_BACKEND + "import pathwaysutils\n" + ORDERS[order] + USE
    target = listen()
    got = run_python(script, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=target, PATHWAYS_NAME="n").value
    assert got["calls"] == [{"address": target, "data": {"pathways.name": "n"}, "timeout": 10, "insecure": "true"}]
    assert got["platforms"] == "proxy,cpu"


def test_pathwaysutils_own_time_limit_stays(run_python, listen):
    pytest.importorskip("pathwaysutils")
    script = NOTES + IMPORT_BACKEND + "import pathwaysutils\npathwaysutils.initialize()\n" + USE
    got = run_python(
        script, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=listen(), PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS="45",
    ).value
    assert got["calls"][0]["timeout"] == 45


def test_pathwaysutils_after_first_use_is_refused_by_jax_not_by_us(run_python, listen):
    pytest.importorskip("pathwaysutils")
    script = NOTES + IMPORT_BACKEND + """
import pathwaysutils
jax.devices()
try:
    pathwaysutils.initialize()
    result("accepted")
except RuntimeError as error:
    result(str(error))
"""
    got = run_python(script, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=listen()).value
    assert "already initialized" in got


def test_two_backends_in_one_process(run_python, listen):
    script = NOTES + IMPORT_BACKEND + """
def second():
    return ifrt_proxy.get_client(os.environ["SECOND"], ifrt_proxy.ClientConnectionOptions())
jax.extend.backend.register_backend_factory("second", second)
""" + USE
    first, second = listen(), listen()
    got = run_python(script, JAX_PLATFORMS="proxy,second", JAX_BACKEND_TARGET=first, SECOND=second).value
    assert sorted(c["address"] for c in got["calls"]) == sorted([first, second])
    assert got["backends"] == ["cpu", "proxy", "second"]


SWITCHES = {
    "PATHWAYS_RS": {"cpu": False, "wrapped": False},
    "PATHWAYS_RS_CONNECT": {"cpu": True, "wrapped": False},
    "PATHWAYS_RS_ADD_CPU": {"cpu": False, "wrapped": True},
    "PATHWAYS_RS_REGISTER": {"cpu": True, "wrapped": True},
    "PATHWAYS_RS_QUIET_EXIT": {"cpu": True, "wrapped": True},
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_part_can_be_turned_off(run_python, listen, switch):
    # The test's own factory keeps the platform there when ours is off.
    script = NOTES + IMPORT_BACKEND + """
def mine():
    return ifrt_proxy.get_client(jax.config.read("jax_backend_target"), ifrt_proxy.ClientConnectionOptions())
jax.extend.backend.register_backend_factory("proxy", mine, priority=-1)
""" + USE
    got = run_python(script, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=listen(), PATHWAYS_NAME="n", **{switch: "0"}).value
    assert (got["platforms"] == "proxy,cpu") == SWITCHES[switch]["cpu"]
    assert (got["calls"][0]["data"] == {"pathways.name": "n"}) == SWITCHES[switch]["wrapped"]


def test_a_part_that_breaks_leaves_the_others(run_python, listen):
    # Stands for a JAX that has moved the name: adding cpu still works, and what is off is said.
    script = NOTES + IMPORT_BACKEND + """
import pathways_rs._connect
def moved(_): raise AttributeError("moved away")
pathways_rs._connect.wrapped = moved
jax.extend.backend.register_backend_factory("proxy", lambda: note("direct", ifrt_proxy.ClientConnectionOptions()), priority=-1)
""" + USE
    got = run_python(script, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=listen())
    assert got.value["platforms"] == "proxy,cpu"
    assert "our part CONNECT, so it is off: moved away" in got.err


REACH = """
import time
import jax
start = time.monotonic()
try:
    jax.devices()
    result("connected")
except RuntimeError as error:
    result([str(error), time.monotonic() - start])
"""

BAD_TARGETS = {
    "127.0.0.1:29000": "has no scheme: write grpc://127.0.0.1:29000",
    "http://127.0.0.1:29000": "the scheme 'http' is not known, write grpc://127.0.0.1:29000",
    "grpc://127.0.0.1": "has no port: a controller listens on 29000",
    "grpc://127.0.0.1:": "has no port",
    "grpc://127.0.0.1:99999": "has no port",
    "grpc://dns:///somewhere": "has no port",
    "grpc://:29000": "has no host: write grpc://HOST:29000",
    "grpc:///somewhere": "has no port",
    "": "JAX_BACKEND_TARGET",
}


@pytest.mark.parametrize("target", BAD_TARGETS)
def test_a_bad_target_is_answered_at_once_with_the_right_spelling(run_python, target):
    message, _ = run_python(REACH, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=target).value
    assert BAD_TARGETS[target] in message


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def test_an_unreachable_target_says_what_to_do(run_python):
    target = f"grpc://127.0.0.1:{free_port()}"
    message, _ = run_python(REACH, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=target, seconds=30).value
    assert f"no controller answers at {target} (connection refused; tried for" in message
    assert "pathways local" in message and "pathways controller" in message and "JAX_BACKEND_TARGET" in message


def test_an_unknown_host_says_so(run_python):
    message, _ = run_python(
        REACH, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET="grpc://no-such-host.invalid:29000", PATHWAYS_RS_CONNECT_TIMEOUT="1",
    ).value
    assert "the name no-such-host.invalid is not known" in message


@pytest.mark.parametrize(
    "greeting, reason", [(b"", "it accepts the connection but says nothing"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not a gRPC server")],
)
def test_something_else_listens_there(run_python, listen, greeting, reason):
    message, _ = run_python(REACH, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=listen(greeting), PATHWAYS_RS_CONNECT_TIMEOUT="1").value
    assert reason in message


def test_a_controller_that_starts_a_little_later_is_found(run_python):
    port = free_port()
    script = NOTES + IMPORT_BACKEND + f"""
import socket, threading, time
def late():
    time.sleep(1.5)
    server = socket.create_server(("127.0.0.1", {port}))
    connection, _ = server.accept()
    connection.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    time.sleep(30)
threading.Thread(target=late, daemon=True).start()
""" + USE
    got = run_python(script, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=f"grpc://127.0.0.1:{port}").value
    assert len(got["calls"]) == 1


def test_a_bad_time_limit_says_so(run_python, listen):
    message, _ = run_python(REACH, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=listen(), PATHWAYS_RS_CONNECT_TIMEOUT="soon").value
    assert "PATHWAYS_RS_CONNECT_TIMEOUT is 'soon'; it takes a number of seconds" in message


def test_addresses_as_grpc_writes_them():
    from pathways_rs._connect import parse

    assert parse("grpc://localhost:1")[1:] == ("localhost", 1)
    assert parse("grpc://[::1]:29000")[1:] == ("::1", 29000)
    assert parse("grpc://dns:///host.example:29000")[1:] == ("host.example", 29000)
    assert parse("grpc://dns:host:29000")[1:] == ("host", 29000)
    assert parse("grpc://ipv4:10.0.0.1:5")[1:] == ("10.0.0.1", 5)
    assert parse("grpc://ipv6:[::1]:5")[1:] == ("::1", 5)
    assert parse("grpc://unix:/tmp/socket")[1:] == (None, None)
    assert parse("grpc://ipv4:10.0.0.1:5,10.0.0.2:5")[1:] == (None, None)


def test_ours_is_told_from_other_servers():
    import types

    import pathways_rs

    assert pathways_rs.is_ours(types.SimpleNamespace(runtime_type="proxy/pathways-rs"))
    assert not pathways_rs.is_ours(types.SimpleNamespace(runtime_type="proxy/pathways"))
    assert not pathways_rs.is_ours(object())
