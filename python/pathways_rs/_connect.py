"""Connecting to a controller: what is added to jaxlib's own `get_client`.

jaxlib repeats a failed attempt for two minutes and then reports a line of gRPC. So we first look for ourselves, with a plain
socket, whether something that speaks HTTP/2 answers at the target, and say what to do if not. Once that is so jaxlib takes over.
The controller may hold the session open until its workers are there: nothing here limits that.
"""

import functools
import logging
import math
import os
import re
import select
import socket
import time
from typing import NamedTuple

from pathways_rs import _settings

_log = logging.getLogger("pathways_rs")

_INSECURE = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"
_RETRY_SECONDS = 0.25
_SAY_WAITING_AFTER_SECONDS = 2.0
# By session, where one was opened through us.
_peers = {}
_START = "`pathways local --workers 1 --devices 4` or `pathways controller`"


class ConnectError(RuntimeError):
    """No session could be opened; the text says why and what to do."""


class Target(NamedTuple):
    """A JAX_BACKEND_TARGET: as written, and the address behind it (no host: one that only gRPC can look up)."""

    text: str
    host: str | None
    port: int | None


def make_client():
    """The backend factory for JAX: a session on the controller at `jax_backend_target`."""
    import jax
    from jax.extend.backend import ifrt_proxy

    target = jax.config.read("jax_backend_target")
    if not target:
        raise ConnectError(
            "JAX_BACKEND_TARGET is not set: it says where the controller is, e.g. grpc://127.0.0.1:29000. "
            "Set it, or start the program under `pathways local --workers 1 --devices 4 -- CMD`, which does"
        )
    return ifrt_proxy.get_client(target, ifrt_proxy.ClientConnectionOptions())


def wrapped(get_client):
    """`get_client` of jaxlib with our options, time limit and messages; a wrapped one is returned as it is."""
    if getattr(get_client, "pathways_rs", False):
        return get_client

    @functools.wraps(get_client)
    def connect(proxy_server_address, options):
        target = parse(proxy_server_address)
        os.environ.setdefault(_INSECURE, "true")  # jaxlib's default credentials exist only inside one company's cloud
        given = options.initialization_data or {}
        options.initialization_data = {**_settings.initialization_data(), **given}
        limit = options.connection_timeout_in_seconds
        if limit is None:
            limit = _settings.connect_seconds()
            options.connection_timeout_in_seconds = max(1, math.ceil(limit))
        wait_for_server(target, limit)
        client = get_client(proxy_server_address, options)
        session = getattr(client, "pw_session", None)
        if session is not None:
            token = options.initialization_data.get("pathways.token", b"")
            _peers[session] = (target.host, token if isinstance(token, bytes) else str(token).encode())
        return client

    connect.pathways_rs = True
    return connect


def peer_of(session):
    """The host and the token with which a session was opened."""
    import jax

    if session in _peers:
        return _peers[session]
    host = parse(jax.config.read("jax_backend_target")).host  # not opened through us
    return host, _settings.initialization_data().get("pathways.token", b"")


def parse(text):
    """The Target that `text` names; ConnectError with the right spelling where it names none."""
    scheme, found, address = text.partition("://")
    if not found:
        raise ConnectError(f"JAX_BACKEND_TARGET is {text!r}, which has no scheme: write grpc://{text}")
    if scheme != "grpc":
        raise ConnectError(f"JAX_BACKEND_TARGET is {text!r}: the scheme {scheme!r} is not known, write grpc://{address}")
    dns = re.fullmatch(r"dns:(?://[^/]*/)?(.*)", address)
    ip = re.fullmatch(r"ipv[46]:([^,]*)", address)
    if dns or ip:
        address = (dns or ip)[1]
    elif re.match(r"[a-z][a-z0-9+.-]*:(?!\d+$)", address):
        return Target(text, None, None)  # unix:…, xds:…, several addresses: for gRPC to look up
    host, colon, port = address.rpartition(":")
    host = host.strip("[]") if host.startswith("[") else host
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConnectError(f"JAX_BACKEND_TARGET is {text!r}, which has no port: a controller listens on 29000 unless told otherwise")
    if not host or (":" in host and f"[{host}]" not in address):
        raise ConnectError(f"JAX_BACKEND_TARGET is {text!r}, which has no host: write grpc://HOST:{port}")
    return Target(text, host, int(port))


def wait_for_server(target, limit_seconds):
    """Returns once a server answers at `target`; ConnectError when none has within the limit."""
    if target.host is None:
        return
    start = time.monotonic()
    said = False
    while True:
        elapsed = time.monotonic() - start
        reason = _try_once(target, max(1.0, limit_seconds - elapsed))
        if reason is None:
            return
        elapsed = time.monotonic() - start
        if elapsed + _RETRY_SECONDS > limit_seconds:
            raise ConnectError(
                f"no controller answers at {target.text} ({reason}; tried for {elapsed:.0f} s). "
                f"Start one ({_START}), or set JAX_BACKEND_TARGET to the address that it prints"
            )
        if not said and elapsed > _SAY_WAITING_AFTER_SECONDS:
            said = True
            _log.warning("waiting up to %.0f s for a controller at %s (%s)", limit_seconds, target.text, reason)
        time.sleep(_RETRY_SECONDS)


def _try_once(target, seconds):
    """None if an HTTP/2 server answers, else the reason in words."""
    try:
        with socket.create_connection((target.host, target.port), timeout=seconds) as sock:
            if os.environ.get(_INSECURE) != "true":
                return None  # an encrypted server would not answer a plain greeting
            return _greet(sock, seconds)
    except ConnectionRefusedError:
        return "connection refused"
    except socket.gaierror as error:
        return f"the name {target.host} is not known: {error.strerror}"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)


def _greet(sock, seconds):
    """Opens an HTTP/2 connection and waits for the server's first frame, which every gRPC server sends at once."""
    settings = b"\0\0\0\4\0\0\0\0\0"
    sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
    answer = b""
    deadline = time.monotonic() + seconds
    while len(answer) < 9:
        if not select.select([sock], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return "it accepts the connection but says nothing"
        got = sock.recv(9 - len(answer))
        if not got:
            break
        answer += got
    if len(answer) < 9 or answer[3] != settings[3]:
        return "what listens there is not a gRPC server"
    sock.sendall(b"\0\0\x08\7\0\0\0\0\0" + bytes(8))  # GOAWAY, no error
    return None
