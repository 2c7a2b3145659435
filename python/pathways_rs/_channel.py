"""The channel on which a controller calls functions of this process: calls in, answers or errors out.

Everything is little-endian. A frame is a kind (4 bytes), the length of its body (4), the number of a call (8) and the body.
A call or an answer begins with the count of all its bytes (8), and as much of them as one frame takes; the rest follows in
`_DATA` frames. What is in a call: see `_operands`; an answer is the bytes of all results, one behind the other.

The thread that has read a call also runs it, and another one reads on meanwhile: a function may wait for work that calls
functions itself. All of them are daemons, so they keep no interpreter from ending; but one that is inside of jaxlib at that
moment would abort the process, so `end` waits a little for those that work.
"""

import logging
import socket
import struct
import threading

import ml_dtypes
import numpy as np

_log = logging.getLogger("pathways_rs")

_GREETING = b"PWCALLS1"
_GREETING_SECONDS = 10.0
_HEAD = struct.Struct("<IIQ")
_CALL, _DATA, _CANCEL, _ANSWER, _ERROR = range(1, 6)
_BODY_MAX = 1 << 20
_TEXT_MAX = 8 << 10
_ALIGNMENT = 16
_NOT_YET = object()
_THREADS_MAX = 64

# By xla.PrimitiveType; names as numpy and ml_dtypes have them.
_TYPES = {
    1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64",
    10: "float16", 11: "float32", 12: "float64", 15: "complex64", 16: "bfloat16", 18: "complex128",
    19: "float8_e5m2", 20: "float8_e4m3fn", 23: "float8_e4m3b11fnuz", 24: "float8_e5m2fnuz", 25: "float8_e4m3fnuz",
    28: "float8_e4m3", 29: "float8_e3m4", 33: "float8_e8m0fnu",
}


class ChannelError(RuntimeError):
    """There is no channel; the text says why."""


def dtype_of(code):
    """The numpy type with this number; ValueError where this Python has none."""
    name = _TYPES.get(code, f"number {code}")
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        raise ValueError(f"operands of the type {name} are not known to this Python") from None


class Channel:
    """A connection to the controller's port for callbacks. `serve(id, operands)` gives the results as a list of arrays."""

    def __init__(self, host, port, session, token, serve):
        self._serve = serve
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._counting = threading.Condition()
        self._threads, self._waiting, self._busy = 1, 0, 0
        self._ending = False
        self._calls = {}
        self.alive = True
        try:
            self._socket = socket.create_connection((host, port), timeout=_GREETING_SECONDS)
            self._greet(session, token)
        except OSError as error:
            raise ChannelError(f"{host}:{port} does not answer: {error.strerror or error}") from error
        threading.Thread(target=self._work, name="pathways-callbacks", daemon=True).start()

    def end(self, seconds):
        """From now on calls fail; waits for those under way, so long at most."""
        self._ending = True
        with self._counting:
            self._counting.wait_for(lambda: not self._busy, seconds)

    def _greet(self, session, token):
        sock = self._socket
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(_GREETING + struct.pack("<QI", session, len(token)) + token)
        self._file = sock.makefile("rb", buffering=1 << 16)
        answer = self._file.read(16)
        if len(answer) < 16 or answer[:8] != _GREETING:
            raise ChannelError("what answers there is no controller of pathways-rs")
        code, length = struct.unpack("<II", answer[8:])
        if code:
            raise ChannelError(self._file.read(length).decode(errors="replace"))
        sock.settimeout(None)

    def _work(self):
        while True:
            with self._counting:
                self._waiting += 1
            with self._reading:
                with self._counting:
                    self._waiting -= 1
                item = self._next() if self.alive else None
                if item is None:
                    return
                self._count_busy(1)
                self._let_another_read()
            self._run(*item)
            del item
            self._count_busy(-1)

    def _count_busy(self, more):
        with self._counting:
            self._busy += more
            self._counting.notify_all()

    def _let_another_read(self):
        with self._counting:
            if self._waiting or self._threads == _THREADS_MAX:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._work, name="pathways-callbacks", daemon=True).start()
        except RuntimeError:  # the interpreter is ending and takes no more threads: this one reads when it comes back
            with self._counting:
                self._threads -= 1

    def _next(self):
        """The next whole call as its number and its bytes; None at the end of the channel."""
        try:
            while (item := self._read()) is _NOT_YET:
                pass
        except OSError:
            item = None  # the session's end, seen from here
        except Exception as error:
            _log.warning("the channel for host callbacks broke: %s: %s", type(error).__name__, error)
            item = None
        if item is None:
            self.alive = False
            self._socket.close()
        return item

    def _read(self):
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        kind, length, call = _HEAD.unpack(head)
        if kind == _CANCEL:
            self._calls.pop(call, None)
            return _NOT_YET
        if kind == _CALL:
            (total,) = struct.unpack("<Q", self._file.read(8))
            self._calls[call] = (np.empty(total, np.uint8), 0)
            length -= 8
        body, start = self._calls[call]
        end = start + length
        if self._file.readinto(memoryview(body)[start:end]) != length:
            return None
        if end < len(body):
            self._calls[call] = (body, end)
            return _NOT_YET
        del self._calls[call]
        return call, body

    def _run(self, call, body):
        try:
            if self._ending:
                raise RuntimeError("the client's process is ending")
            results = self._serve(*_operands(body))
        except BaseException as error:  # also SystemExit: the program waits for an answer
            text = f"{type(error).__name__}: {error}"
            self._send(_ERROR, call, text.encode(errors="replace")[:_TEXT_MAX])
            return
        pieces = [memoryview(array.reshape(-1).view(np.uint8)) for array in results if array.nbytes]
        total = struct.pack("<Q", sum(len(piece) for piece in pieces))
        if sum(len(piece) for piece in pieces) <= 1 << 16:
            self._send(_ANSWER, call, total + b"".join(pieces))
            return
        with self._writing:
            self._send_locked(_ANSWER, call, total)
            for piece in pieces:
                for start in range(0, len(piece), _BODY_MAX):
                    self._send_locked(_DATA, call, piece[start : start + _BODY_MAX])

    def _send(self, kind, call, body):
        with self._writing:
            self._send_locked(kind, call, body)

    def _send_locked(self, kind, call, body):
        try:
            head = _HEAD.pack(kind, len(body), call)
            if len(body) <= 1 << 16:
                self._socket.sendall(head + bytes(body))
            else:
                self._socket.sendall(head)
                self._socket.sendall(body)
        except OSError:
            self.alive = False  # nobody waits for this answer any more


def _operands(body):
    """The function's number and the operands of a call: number (8 bytes), count (8); of each operand type (4), rank (4) and
    dimensions (8 each); then the operands' bytes, each at the next multiple of 16."""
    function, count = struct.unpack_from("<QQ", body)
    at = 16
    shapes = []
    for _ in range(count):
        code, rank = struct.unpack_from("<II", body, at)
        shapes.append((dtype_of(code), struct.unpack_from(f"<{rank}q", body, at + 8)))
        at += 8 + 8 * rank
    operands = []
    for dtype, dims in shapes:
        at += -at % _ALIGNMENT
        size = int(np.prod(dims, dtype=np.int64)) * dtype.itemsize
        operands.append(body[at : at + size].view(dtype).reshape(dims))
        at += size
    return function, operands
