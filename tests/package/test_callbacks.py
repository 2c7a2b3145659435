"""Host callbacks without a controller: what is replaced in JAX and when it is left alone, and the channel against a scripted server."""

import socket
import struct
import threading
import time

import numpy as np
import pytest

from pathways_rs import _channel

INSTALL = """
import jax, pathways_rs
from jax._src import callback
from jax._src.interpreters import mlir
stock = callback.emit_python_callback
"""
INSTALLED = """
for _ in range(2):
    pathways_rs.initialize()
import jax.interpreters.mlir as public
result([f is stock for f in (callback.emit_python_callback, vars(public).get("emit_python_callback", callback.emit_python_callback))])
"""
WARNING = "does not take our part CALLBACKS"
OURS = {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": "grpc://127.0.0.1:1"}


def test_the_function_is_replaced_where_our_platform_is_listed(run_python):
    got = run_python(INSTALL + INSTALLED, **OURS)
    assert got.value == [False, False] and WARNING not in got.err
    assert run_python(INSTALL + INSTALLED, JAX_PLATFORMS="cpu").value == [True, True]
    assert run_python(INSTALL + INSTALLED, PATHWAYS_RS_CALLBACKS="0", **OURS).value == [True, True]


CHANGED = {
    "function": """
def stock(ctx, callback, everything_else): ...
callback.emit_python_callback = stock
""",
    "sharding": "mlir.set_sharding = lambda where, op, sharding: None\n",
    "gone": "from jax._src import core; del core.abstract_token\n",
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_jax_that_has_changed_stays_as_it_is_and_this_is_said_once(run_python, what):
    got = run_python(INSTALL + CHANGED[what] + INSTALLED, **OURS)
    assert got.value[0] is True
    assert got.err.count(WARNING) == 1, got.err


def test_what_fails_later_leaves_stock_jax_too(run_python):
    text = INSTALL + """
import jax.numpy as jnp, numpy as np
jax.config.update("jax_platforms", "cpu")
from pathways_rs import _callbacks
_callbacks.install(jax, lambda client: True)  # takes every client for ours; this one has no channel
f = lambda: jax.jit(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), np.float32), x))(jnp.float32(0))
result([float(f()), float(f())])
"""
    got = run_python(text, JAX_PLATFORMS="cpu")
    assert got.value == [0, 0]
    assert got.err.count("host callbacks are off") == 1, got.err


class Server:
    """The controller's end of one channel."""

    def __init__(self, code=0, text=b""):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.answer = b"PWCALLS1" + struct.pack("<II", code, len(text)) + text
        self.ready = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        self.socket, _ = self.listener.accept()
        self.socket.settimeout(20)
        self.file = self.socket.makefile("rb")
        head = self.file.read(20)
        self.hello = head[:8], *struct.unpack("<QI", head[8:]), self.file.read(struct.unpack("<I", head[16:])[0])
        self.socket.sendall(self.answer)
        self.ready.set()

    def send(self, kind, call, body):
        self.socket.sendall(struct.pack("<IIQ", kind, len(body), call) + body)

    def call(self, call, body, first=1 << 20):
        self.send(1, call, struct.pack("<Q", len(body)) + body[:first])
        for at in range(first, len(body), 1 << 20):
            self.send(2, call, body[at : at + (1 << 20)])

    def frame(self):
        kind, length, call = struct.unpack("<IIQ", self.file.read(16))
        return kind, call, self.file.read(length)

    def result(self, call):
        """The bytes of the answer to a call, or the text of its error."""
        kind, of, body = self.frame()
        assert of == call
        if kind == 5:
            return body.decode()
        (total,), got = struct.unpack("<Q", body[:8]), body[8:]
        while len(got) < total:
            kind, of, body = self.frame()
            assert (kind, of) == (2, call)
            got += body
        return got


def encode(function, *operands):
    """A call as a worker writes it."""
    codes = {"float32": 11, "int8": 2, "bool": 1, "bfloat16": 16}
    out = struct.pack("<QQ", function, len(operands))
    for x in operands:
        out += struct.pack(f"<II{x.ndim}q", codes[x.dtype.name], x.ndim, *x.shape)
    for x in operands:
        out += bytes(-len(out) % 16) + x.tobytes()
    return out


@pytest.fixture
def connect():
    servers = []

    def start(serve):
        server = Server()
        servers.append(server)
        channel = _channel.Channel("127.0.0.1", server.port, 2**64 - 5, b"secret", serve)
        assert server.ready.wait(20)
        return server, channel

    yield start
    for server in servers:
        server.listener.close()
        server.socket.close()


def test_calls_come_with_their_operands_and_answers_go_back(connect):
    import ml_dtypes

    seen = []

    def serve(function, operands):
        seen.append((function, [(x.dtype.name, x.shape) for x in operands]))
        return [np.asarray(x)[::-1].copy() for x in operands]

    server, _ = connect(serve)
    assert server.hello == (b"PWCALLS1", 2**64 - 5, 6, b"secret")
    small = [np.arange(3, dtype=np.int8), np.zeros((0, 4), np.float32), np.arange(4).astype(ml_dtypes.bfloat16), np.array([True, False])]
    server.call(7, encode(1, *small))
    assert server.result(7) == b"".join(x[::-1].tobytes() for x in small)
    large = np.arange(3 << 20, dtype=np.float32)
    server.call(8, encode(2, large), first=1000)
    assert server.result(8) == large[::-1].tobytes()
    assert seen == [(1, [("int8", (3,)), ("float32", (0, 4)), ("bfloat16", (4,)), ("bool", (2,))]), (2, [("float32", (3 << 20,))])]


def test_errors_go_back_as_text_and_a_cancelled_call_is_forgotten(connect):
    def serve(function, _):
        if function == 1:
            raise ValueError("user bug")
        if function == 2:
            raise SystemExit(3)
        return [np.float32(function)]

    server, _ = connect(serve)
    server.call(1, encode(1))
    assert server.result(1) == "ValueError: user bug"
    server.call(2, encode(2))
    assert server.result(2) == "SystemExit: 3"
    server.send(1, 3, struct.pack("<Q", 100) + b"begun")
    server.send(3, 3, b"")
    server.call(4, encode(9))
    assert np.frombuffer(server.result(4), np.float32) == 9
    unknown = bytearray(encode(9, np.zeros(1, np.float32)))
    unknown[16] = 99
    server.call(5, bytes(unknown))
    assert "number 99" in server.result(5)


def test_a_call_may_wait_for_another_one(connect):
    inner = threading.Event()

    def serve(function, _):
        if function == 1:
            assert inner.wait(20)
        else:
            inner.set()
        return []

    server, _ = connect(serve)
    server.call(1, encode(1))
    server.call(2, encode(2))
    assert [server.frame()[1] for _ in range(2)] in ([2, 1], [1, 2])


def test_what_ends_waits_for_calls_under_way_and_takes_no_more(connect):
    inside, leave = threading.Event(), threading.Event()

    def serve(*_):
        inside.set()
        leave.wait(20)
        return []

    server, channel = connect(serve)
    server.call(1, encode(1))
    assert inside.wait(20)
    channel.end(0.01)  # it is not done: given up
    server.call(2, encode(1))
    assert "is ending" in server.result(2)
    leave.set()
    channel.end(20)
    assert server.result(1) == b""


def test_the_end_of_a_channel_is_noticed(connect):
    server, channel = connect(lambda *_: [])
    server.file.close()
    server.socket.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 20
    while channel.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not channel.alive


def test_a_channel_that_is_refused_says_why():
    server = Server(16, b"PATHWAYS_TOKEN is not the token of this server")
    with pytest.raises(_channel.ChannelError, match="PATHWAYS_TOKEN"):
        _channel.Channel("127.0.0.1", server.port, 1, b"", None)
    server.listener.close()
    with pytest.raises(_channel.ChannelError, match="does not answer"):
        _channel.Channel("127.0.0.1", server.port, 1, b"", None)
