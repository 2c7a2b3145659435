"""Every way by which a program calls functions of its own process; prints `callbacks ok` and the JAX release.

    python callbacks.py [--devices N]

Each check stands alone and asserts the values that it must give. They use the first N devices of one worker, or all of them.
"""

import argparse
import contextlib
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify, io_callback
from jax.sharding import NamedSharding, PartitionSpec as P

CHECKS = []
SCALAR = jax.ShapeDtypeStruct((), np.float32)


def check(function):
    CHECKS.append(function)
    return function


def like(x):
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def same(got, expected):
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@contextlib.contextmanager
def printed(*lines, ordered=True):
    """What was printed inside must be these lines."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        yield
        jax.effects_barrier()
    got = text.getvalue().splitlines()
    assert (got if ordered else sorted(got)) == list(lines), got


@functools.cache
def mesh():
    return jax.sharding.Mesh(np.array(DEVICES), ("i",))


def spread(values):
    """Over all devices."""
    return jax.device_put(np.asarray(values, np.float32), NamedSharding(mesh(), P("i")))


def double(a):
    return np.asarray(a) * 2


# --- pure_callback


@check
def pure_in_jit():
    f = jax.jit(lambda x: jax.pure_callback(lambda a: np.cumsum(a, dtype=np.float32), like(x), x) + 1)
    same(f(jnp.arange(4.0)), [1, 2, 4, 7])
    same(f(jnp.ones(4)), [2, 3, 4, 5])


@check
def pure_eager():
    same(jax.pure_callback(double, SCALAR, jnp.float32(21)), 42)


@check
def pure_of_several_types():
    def swap(a, b, c):
        return np.asarray(c), np.asarray(a), ~np.asarray(b)

    a, b, c = jnp.arange(6, dtype=jnp.int8).reshape(2, 3), jnp.array([True, False]), jnp.full((0, 5), 2, jnp.bfloat16)
    got = jax.jit(lambda *x: jax.pure_callback(swap, (like(c), like(a), like(b)), *x))(a, b, c)
    assert [g.dtype.name for g in got] == ["bfloat16", "int8", "bool"] and got[0].shape == (0, 5)
    same(got[1], a)
    same(got[2], [False, True])


@check
def pure_one_by_one_under_vmap():
    seen = []

    def note(a):
        seen.append(np.shape(a))
        return double(a)

    f = jax.vmap(lambda x: jax.pure_callback(note, SCALAR, x, vmap_method="sequential"))
    same(jax.jit(f)(jnp.arange(3.0)), [0, 2, 4])
    assert seen == [()] * 3, seen


@check
def pure_all_at_once_under_vmap():
    seen = []

    def note(a, b):
        seen.append((np.shape(a), np.shape(b)))
        return np.asarray(a + b, np.float32)

    f = jax.vmap(lambda x, y: jax.pure_callback(note, like(x), x, y, vmap_method="expand_dims"), in_axes=(0, None))
    same(jax.jit(f)(jnp.zeros((3, 2)), jnp.arange(2.0)), [[0, 1]] * 3)
    assert seen == [((3, 2), (1, 2))], seen


@check
def pure_in_grad():
    @jax.custom_vjp
    def cube(x):
        return jax.pure_callback(lambda a: np.asarray(a) ** 3, like(x), x)

    def forward(x):
        return cube(x), x

    def backward(x, g):
        return (jax.pure_callback(lambda a, b: 3 * np.asarray(a) ** 2 * np.asarray(b), like(x), x, g),)

    cube.defvjp(forward, backward)
    same(jax.jit(jax.grad(lambda x: cube(x).sum()))(jnp.array([1.0, 2.0])), [3, 12])


# --- io_callback


@check
def io_unordered():
    seen = []

    def note(a):
        seen.append(float(a))
        return double(a)

    f = jax.jit(lambda x: io_callback(note, SCALAR, x))
    same([f(jnp.float32(i)) for i in range(3)], [0, 2, 4])
    assert sorted(seen) == [0, 1, 2], seen


@check
def io_ordered():
    seen = []

    def note(name, a):
        seen.append((name, float(a)))
        return double(a)

    @jax.jit
    def f(x):
        first = io_callback(functools.partial(note, "first"), SCALAR, x, ordered=True)
        second = io_callback(functools.partial(note, "second"), SCALAR, x + 1, ordered=True)
        return first - second

    same([f(jnp.float32(i)) for i in range(3)], [-2] * 3)
    assert seen == [(name, i + (name == "second")) for i in range(3) for name in ("first", "second")], seen


@check
def io_without_result():
    seen = []
    jax.jit(lambda x: io_callback(lambda a: seen.append(float(a)), None, x))(jnp.float32(5))
    jax.effects_barrier()
    assert seen == [5], seen


@check
def io_ordered_without_result():
    seen = []

    @jax.jit
    def f(x):
        for k in range(4):
            io_callback(lambda a: seen.append(float(a)), None, x + k, ordered=True)

    f(jnp.float32(1))
    jax.effects_barrier()
    assert seen == [1, 2, 3, 4], seen


@check
def io_ordered_in_scan():
    seen = []

    def body(carry, x):
        carry = io_callback(lambda a, b: (seen.append(float(b)), np.float32(a + b))[1], SCALAR, carry, x, ordered=True)
        return carry, carry

    last, all_ = jax.jit(lambda xs: jax.lax.scan(body, jnp.float32(0), xs))(jnp.arange(1.0, 6.0))
    same(last, 15)
    same(all_, [1, 3, 6, 10, 15])
    assert seen == [1, 2, 3, 4, 5], seen


# --- jax.debug


@check
def print_in_jit():
    with printed("x = 3.0, y = [0 1]"):
        jax.jit(lambda x, y: jax.debug.print("x = {}, y = {y}", x, y=y))(3.0, jnp.arange(2))


@check
def print_ordered():
    @jax.jit
    def f(x):
        for k in range(3):
            jax.debug.print("{}", x + k, ordered=True)

    with printed("1", "2", "3", "10", "11", "12"):
        f(1)
        f(10)


@check
def print_in_grad():
    def f(x):
        jax.debug.print("at {}", x)
        return x**2

    with printed("at 3.0"):
        same(jax.jit(jax.grad(f))(3.0), 6)


@check
def print_in_vmap():
    with printed("0", "1", "2", ordered=False):
        jax.jit(jax.vmap(lambda x: jax.debug.print("{}", x)))(jnp.arange(3))


@check
def print_eager():
    with printed("now 7"):
        jax.debug.print("now {}", jnp.int32(7))


@check
def debug_callback():
    seen = []

    @jax.jit
    def f(x):
        jax.debug.callback(lambda a, name: seen.append((name, float(a))), x, name="it")
        return x + 1

    same(f(1.0), 2)
    jax.effects_barrier()
    assert seen == [("it", 1.0)], seen


@check
def breakpoint_in_jit():
    answers = io.StringIO("p x\nc\n")
    shown = io.StringIO()

    @jax.jit
    def f(x):
        y = x * 2
        jax.debug.breakpoint(stdin=answers, stdout=shown, backend="cli")
        return y

    same(f(jnp.float32(4)), 8)
    jax.effects_barrier()
    assert "4." in shown.getvalue(), shown.getvalue()


# --- several devices


@check
def pure_on_a_mesh():
    x = spread(np.arange(2 * len(DEVICES)))
    seen = []

    def note(a):
        seen.append(np.shape(a))
        return np.asarray(a)[::-1]

    f = jax.jit(lambda v: jax.pure_callback(note, like(v), v) + v.sum())
    for _ in range(2):
        same(f(x), np.arange(x.size)[::-1] + x.size * (x.size - 1) // 2)
    assert seen == [(x.size,)] * 2, seen


@check
def io_ordered_on_a_mesh():
    seen = []

    def note(a):
        seen.append(float(a))
        return double(a)

    @jax.jit
    def f(v):
        first = io_callback(note, SCALAR, v.sum(), ordered=True)
        return v + io_callback(note, SCALAR, first, ordered=True)

    x = spread(np.ones(len(DEVICES)))
    for _ in range(2):
        same(f(x), np.full(x.size, 1 + 4 * x.size))
    assert seen == [x.size, 2 * x.size] * 2, seen


@check
def io_without_result_on_a_mesh():
    seen = []
    jax.jit(lambda v: io_callback(lambda a: seen.append(np.asarray(a).tolist()), None, v))(spread(np.arange(len(DEVICES))))
    jax.effects_barrier()
    assert seen == [list(range(len(DEVICES)))], seen


@check
def print_on_a_mesh():
    with printed(f"sum {float(len(DEVICES))}"):
        jax.jit(lambda v: jax.debug.print("sum {}", v.sum()))(spread(np.ones(len(DEVICES))))


def shard_map(function):
    return jax.jit(jax.shard_map(function, mesh=mesh(), in_specs=P("i"), out_specs=P("i")))


@check
def pure_in_shard_map():
    seen = []

    def note(a):
        seen.append(np.asarray(a).tolist())
        return double(a)

    f = shard_map(lambda v: jax.pure_callback(note, like(v), v) + jax.lax.axis_index("i").astype(np.float32))
    same(f(spread(np.arange(len(DEVICES)))), 3 * np.arange(len(DEVICES)))
    assert sorted(seen) == [[i] for i in range(len(DEVICES))], seen


@check
def debug_callback_in_shard_map():
    seen = []

    def body(v):
        jax.debug.callback(lambda a: seen.append(np.asarray(a).tolist()), v)
        return v + 1

    same(shard_map(body)(spread(np.arange(len(DEVICES)))), np.arange(1, len(DEVICES) + 1))
    jax.effects_barrier()
    assert sorted(seen) == [[i] for i in range(len(DEVICES))], seen


# --- checkify


@check
def checkify_functional():
    def f(x):
        checkify.check(x > 0, "{x} is not positive", x=x)
        return jnp.log(x)

    checked = jax.jit(checkify.checkify(f))
    error, value = checked(jnp.float32(1))
    assert error.get() is None and float(value) == 0
    error, _ = checked(jnp.float32(-1))
    assert "-1.0 is not positive" in error.get()


@check
def checkify_debug_check():
    @jax.jit
    def f(x):
        checkify.debug_check(x > 0, "{x} is not positive", x=x)
        return x + 1

    same(f(jnp.float32(1)), 2)
    jax.effects_barrier()


# --- the local CPU in the same process is left alone


@check
def pure_on_the_local_cpu():
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        same(jax.jit(lambda x: jax.pure_callback(double, like(x), x) + 1)(jnp.arange(3.0)), [1, 3, 5])


@check
def io_ordered_on_the_local_cpu():
    seen = []
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        f = jax.jit(lambda x: io_callback(lambda a: (seen.append(int(a)), np.int32(a))[1], like(x), x, ordered=True))
        same([f(jnp.int32(i)) for i in range(3)], [0, 1, 2])
    assert seen == [0, 1, 2], seen


@check
def print_on_the_local_cpu():
    with printed("local 1"), jax.default_device(jax.local_devices(backend="cpu")[0]):
        jax.jit(lambda x: jax.debug.print("local {}", x))(jnp.int32(1))


# --- what fails


@check
def what_it_raises_is_told():
    def fail(_):
        raise ValueError("user bug")

    f = jax.jit(lambda x: jax.pure_callback(fail, like(x), x))
    for _ in range(2):
        try:
            f(jnp.float32(1)).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            assert "ValueError: user bug" in str(error), error
        else:
            raise AssertionError("a callback that raises gave a value")
    same(jax.jit(lambda x: x + 1)(jnp.float32(1)), 2)


def main():
    global DEVICES
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int)
    devices = jax.devices()
    DEVICES = [d for d in devices if getattr(d, "host_slot", 0) == getattr(devices[0], "host_slot", 0)][: parser.parse_args().devices]
    failed = []
    for function in CHECKS:
        try:
            function()
        except Exception as error:
            failed.append(f"{function.__name__}: {type(error).__name__}: {error}")
    for line in failed:
        print(line)
    if failed:
        raise SystemExit(f"{len(failed)} of {len(CHECKS)} callback checks failed")
    print(f"callbacks ok, {len(CHECKS)} checks, {len(DEVICES)} devices, jax", jax.__version__, flush=True)


if __name__ == "__main__":
    main()
