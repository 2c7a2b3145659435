"""Lets stock JAX use a pathways-rs cluster.

A user sets two variables and changes no line of a program:

    JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://HOST:29000 python train.py

JAX finds this package through its `jax_plugins` entry point and calls `initialize()` before it first looks for devices.
A process that has neither of our platforms in JAX_PLATFORMS nor a JAX_BACKEND_TARGET is left exactly as it is.

Five parts, each harmless without the others, each with a switch (0 turns it off; PATHWAYS_RS=0 turns off all):

* PATHWAYS_RS_CONNECT: every connection of this process gets the PATHWAYS_* options of the environment, a time limit, and errors
  that say what to do. It wraps the one function through which every factory connects, so it works whoever registered `proxy`:
  JAX itself, `pathwaysutils.initialize()` in any order, or this package.
* PATHWAYS_RS_REGISTER: the platform names `proxy` and, where JAX_PLATFORMS names it, `pathways`, are known to JAX.
* PATHWAYS_RS_ADD_CPU: the local `cpu` platform is kept beside ours, which `jax.devices("cpu")` and JAX's callbacks need.
* PATHWAYS_RS_CALLBACKS: `pure_callback`, `io_callback`, `jax.debug.print` and their like work inside programs on a cluster.
  It replaces one private function of JAX, for programs on pathways-rs only; a JAX that it does not know stays as it is.
* PATHWAYS_RS_QUIET_EXIT: when the interpreter exits, programs are given back before the session ends, as a jaxlib that still
  waits for an answer then may abort; and its warning with a stack trace about the closed session is dropped.

A program that sets these through `jax.config` after it has used JAX calls `pathways_rs.initialize()` itself, then
`jax.extend.backend.clear_backends()`.
"""

import atexit
import functools
import logging
import threading

from pathways_rs import _callbacks, _connect, _settings

__version__ = "0.1.0"

_log = logging.getLogger("pathways_rs")

_refused = set()  # parts that this JAX does not take, each said once
PROXY, ALIAS = "proxy", "pathways"


def initialize():
    """Installs the parts that this process asks for. May be called any number of times."""
    import jax

    platforms = _listed(jax)
    if not (platforms & {PROXY, ALIAS}) and not jax.config.read("jax_backend_target"):
        return
    for switch, part in _PARTS:
        if switch in _refused or not (_settings.switch("") and _settings.switch(f"_{switch}")):
            continue
        try:
            part(jax)
        except Exception as error:  # a new JAX may have moved a name: the other parts still help
            _refused.add(switch)
            _log.warning("this JAX (%s) does not take our part %s, so it is off: %s", jax.__version__, switch, error)


def is_ours(client):
    """Whether a JAX backend client is a session on a pathways-rs controller. Other servers also show as `proxy/…`."""
    return getattr(client, "runtime_type", None) == "proxy/pathways-rs"


def _listed(jax):
    return {name.strip() for name in (jax.config.jax_platforms or "").split(",")} - {""}


def _wrap_connect(_jax):
    from jax.extend.backend import ifrt_proxy

    ifrt_proxy.get_client = _connect.wrapped(ifrt_proxy.get_client)


def _register(jax):
    from jax._src import xla_bridge
    from jax.extend import backend

    # A second factory for a name would silently win over the first, so one that is there stays (pathwaysutils', JAX's own).
    # The alias is registered only on demand: with JAX_PLATFORMS unset JAX tries every factory, and two would open two sessions.
    for name in [PROXY, *({ALIAS} & _listed(jax))]:
        if name not in xla_bridge._backend_factories:
            backend.register_backend_factory(name, _connect.make_client, priority=-1)


def _add_cpu(jax):
    listed = _listed(jax)
    if listed & {PROXY, ALIAS} and "cpu" not in listed:
        jax.config.update("jax_platforms", jax.config.jax_platforms + ",cpu")


def _call_back(jax):
    _callbacks.install(jax, is_ours)


@functools.cache  # once per process
def _quiet_exit(_jax):
    from jaxlib import utils

    errors_only = 2
    atexit.register(utils.absl_set_min_log_level, errors_only)
    atexit.register(_settle)


_SETTLE_SECONDS = 2.0


def _settle():
    """Gives programs back, and waits until the controller has answered everything: answers come in the order of requests.

    Runs before JAX's own end. jaxlib destroys the session there, and aborts now and then if the answer to the end of a
    program meets that.
    """
    import jax
    import numpy as np
    from jax._src import xla_bridge

    def round_trip():
        for client in [c for c in xla_bridge._backends.values() if is_ours(c)]:
            try:
                client.buffer_from_pyval(np.int8(0), client.local_devices()[0]).is_deleted()
            except Exception as error:  # the session is over: nothing is left to be answered
                _log.debug("no round trip at the end: %s", error)

    jax.clear_caches()
    thread = threading.Thread(target=round_trip, name="pathways-settle", daemon=True)
    thread.start()
    thread.join(_SETTLE_SECONDS)


_PARTS = (
    ("CONNECT", _wrap_connect),
    ("REGISTER", _register),
    ("ADD_CPU", _add_cpu),
    ("CALLBACKS", _call_back),
    ("QUIET_EXIT", _quiet_exit),
)
