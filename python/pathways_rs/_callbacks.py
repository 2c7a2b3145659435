"""Host callbacks: `pure_callback`, `io_callback`, `jax.debug.*` and checkify's checks inside programs that run on a cluster.

Stock JAX refuses them over a proxy. All of them come to one function of JAX, which writes the call into the program; ours
writes a call that the worker understands, and the worker calls back through a channel of this process. All else, such as
which device calls, the order of ordered effects and what vmap makes of a callback, is JAX's own.

The function is private to JAX. So its shape is checked when this part is installed, and what fails later leaves stock JAX
as it was; either is said once.
"""

import atexit
import dataclasses
import inspect
import itertools
import logging
import threading

import numpy as np

from pathways_rs import _channel, _connect

_log = logging.getLogger("pathways_rs")

TARGET = "pw.host_callback"
# On several devices XLA keeps the sharding, which says who calls, of no custom call that it does not know as a callback.
_KNOWN_TO_XLA = {"cpu": "xla_ffi_python_cpu_callback", "cuda": "xla_ffi_python_gpu_callback", "rocm": "xla_ffi_python_gpu_callback"}

# jaxlib 0.8.0, 0.10.2, 0.11.2 and 0.12.0.1 have been tried. What `emit_python_callback` may take, and what of it must be there.
_MUST_TAKE = {
    "ctx", "callback", "token", "operands", "operand_avals", "result_avals", "has_side_effect", "partitioned", "sharding",
}
_MAY_TAKE = _MUST_TAKE | {"returns_token"}
_SET_SHARDING = (("op", "sharding"), ("ctx", "op", "sharding"))

# By number: the function and what it has promised. Kept for good: a program may run long after JAX has forgotten it.
_functions = {}
_numbers = itertools.count(1)

_END_SECONDS = 2.0

# By session.
_channels = {}
_opening = threading.Lock()


class ChangedError(RuntimeError):
    """This JAX is not as we know it."""


def install(jax, is_ours):
    """Replaces JAX's function; ChangedError where it has another shape than it should."""
    from jax._src import callback

    if getattr(callback.emit_python_callback, "pathways_rs", False):
        return
    inside = _Inside()
    stock = inside.stock
    off = []

    def emit(ctx, *args, **kwargs):
        module = ctx.module_context
        backend = None if off else getattr(module, "backend", None)
        if len(module.platforms) != 1 or module.lowering_parameters.for_export or backend is None or not is_ours(backend):
            return stock(ctx, *args, **kwargs)
        given = inside.signature.bind(ctx, *args, **kwargs)
        given.apply_defaults()
        _refuse(given.arguments)
        try:
            _channel_of(backend)
            return inside.emit(ctx, given.arguments)
        except _channel.ChannelError as error:
            why = f"no channel to the controller: {error}"
        except (AttributeError, TypeError, KeyError, IndexError) as error:
            why = f"this JAX ({jax.__version__}) is not as expected: {type(error).__name__}: {error}"
        off.append(why)
        _log.warning("host callbacks are off, %s", why)
        return stock(ctx, *args, **kwargs)

    emit.pathways_rs = True
    inside.replace(emit)
    atexit.register(_end)


def _refuse(given):
    if given.get("partitioned"):
        raise NotImplementedError("partitioned callbacks are not served by a pathways-rs cluster: leave out `partitioned`, or map the call with shard_map")
    for aval in [*given["operand_avals"], *given["result_avals"]]:
        if getattr(aval.dtype, "name", "").startswith(("int2", "int4", "uint2", "uint4", "float4")):
            raise NotImplementedError(
                f"host callbacks with arrays of {aval.dtype.name} are not served by a pathways-rs cluster: "
                "convert to a type of 8 bits or more"
            )


class _Inside:
    """The parts of JAX that are private, looked up and checked once."""

    def __init__(self):
        from jax._src import callback, core, ffi
        from jax._src.interpreters import mlir
        from jax._src.sharding_impls import SdyArray, SdyArrayList

        self.core, self.ffi, self.mlir, self.SdyArray, self.SdyArrayList = core, ffi, mlir, SdyArray, SdyArrayList
        self.stock = callback.emit_python_callback
        self.signature = inspect.signature(self.stock)
        takes = set(self.signature.parameters)
        if not _MUST_TAKE <= takes <= _MAY_TAKE:
            raise ChangedError(f"emit_python_callback takes {', '.join(self.signature.parameters)}")
        set_sharding = tuple(inspect.signature(mlir.set_sharding).parameters)
        if set_sharding not in _SET_SHARDING:
            raise ChangedError(f"set_sharding takes {', '.join(set_sharding)}")
        self.sharding_takes_context = len(set_sharding) == 3
        missing = {"backend", "platforms", "lowering_parameters"} - {f for f in mlir.ModuleContext.__annotations__}
        if missing:
            raise ChangedError(f"a lowering has no {', '.join(sorted(missing))}")
        for owner, name in ((core, "abstract_token"), (ffi, "build_ffi_lowering_function"), (mlir.ModuleContext, "add_keepalive")):
            getattr(owner, name)

    def replace(self, emit):
        import jax.interpreters.mlir as public
        from jax._src import callback

        for module in (callback, self.mlir, public):
            if vars(module).get("emit_python_callback") is self.stock:
                module.emit_python_callback = emit

    def emit(self, ctx, given):
        """The call of `given["callback"]` in the program: its results, the token behind it, and nothing for the host."""
        module, token, sharding = ctx.module_context, given["token"], given["sharding"]
        operands, takes, gives = list(given["operands"]), list(given["operand_avals"]), list(given["result_avals"])
        bare = not gives  # a sharding needs a result to stand on
        if bare:
            gives = [self.core.ShapedArray((), np.dtype(np.int32))]
        promised = [(tuple(aval.shape), np.dtype(aval.dtype)) for aval in gives]
        if token:
            operands.insert(0, token)
            takes.insert(0, self.core.abstract_token)
            gives.insert(0, self.core.abstract_token)
            if isinstance(sharding, self.SdyArrayList):
                # Of each result one, and the token is a result: it goes where the others are.
                where = sharding.shardings[0].logical_device_ids
                of_token = self.SdyArray(mesh_shape=(), dim_shardings=(), logical_device_ids=where)
                sharding = self.SdyArrayList((of_token, *sharding.shardings))
        number = next(_numbers)
        _functions[number] = (given["callback"], promised, bare)
        target = TARGET if sharding is None else _KNOWN_TO_XLA.get(module.platforms[0], TARGET)
        lower = self.ffi.build_ffi_lowering_function(target, has_side_effect=given["has_side_effect"])
        call = lower(dataclasses.replace(ctx, avals_in=takes, avals_out=gives), *operands, id=np.int64(number))
        if sharding is not None:
            self.mlir.set_sharding(*([module] if self.sharding_takes_context else []), call, sharding)
        results = list(call.results)
        if token:
            token = results.pop(0)
        return ([] if bare else results), token, None


def _channel_of(client):
    """The open channel of a session; it is opened when the first callback is compiled."""
    session = client.pw_session % (1 << 64)
    with _opening:
        channel = _channels.get(session)
        if channel is None or not channel.alive:
            address = getattr(client, "pw_control", "")
            if not address:
                raise _channel.ChannelError("it serves no host callbacks")
            host, _, port = address.rpartition(":")
            host_of_server, token = _connect.peer_of(client.pw_session)
            host = host.strip("[]") or host_of_server or "localhost"
            for old in [key for key, value in _channels.items() if not value.alive]:
                del _channels[old]
            channel = _channels[session] = _channel.Channel(host, int(port), session, token, _serve)
    return channel


def _end():
    """Before JAX and then the interpreter end: what has been started with an effect still happens."""
    import jax

    try:
        jax.effects_barrier()
    finally:
        for channel in list(_channels.values()):
            channel.end(_END_SECONDS)


def _serve(number, operands):
    """Calls a function: its results, as it has promised them."""
    from jax._src import dtypes

    function, promised, bare = _functions[number]
    got = function(*operands)
    if bare:
        if got:
            raise RuntimeError(f"the callback gave {len(got)} results instead of none")
        return [np.zeros((), np.int32)]
    if len(got) != len(promised):
        raise RuntimeError(f"the callback gave {len(got)} results instead of {len(promised)}")
    results = []
    for index, (value, (shape, dtype)) in enumerate(zip(got, promised)):
        array = np.asarray(dtypes.canonicalize_value(np.asarray(value)))
        if array.shape != shape or array.dtype != dtype:
            raise RuntimeError(
                f"result {index} of the callback is {array.dtype.name}{list(array.shape)} instead of {dtype.name}{list(shape)}"
            )
        results.append(np.ascontiguousarray(array).reshape(shape))
    return results
