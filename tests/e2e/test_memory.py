"""A device that is full says who holds what; one that is only busy makes the next program wait."""

FILL = """
import jax, jax.numpy as jnp
make = jax.jit(lambda: jnp.ones((4 << 20,), jnp.float32))     # 16 MiB
def hold_the_big_one(): return jax.jit(lambda: jnp.ones((6 << 20,), jnp.float32))()
kept = [hold_the_big_one()]
jax.block_until_ready(kept)
said = ""
for _ in range(10):
    try:
        kept.append(jax.block_until_ready(make()))
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
        break
held = len(kept)
del kept[1:]
after = float(jax.block_until_ready(make())[0])
result({"said": said, "held": held, "after": after})
"""


def test_a_full_device_names_the_holders_biggest_first(run_local):
    got = run_local(1, 1, FILL, "--device-memory", "64MiB", PATHWAYS_NAME="greedy").value
    assert "RESOURCE_EXHAUSTED" in got["said"]
    assert got["held"] == 3  # 24 + 16 + 16 MiB; another 16 do not fit into 64
    holder, big, small = "56 MiB held by 'greedy' in 3 arrays", "32 MiB in 2 × f32[4194304]", "24 MiB in 1 × f32[6291456]"
    assert -1 < got["said"].find(holder) < got["said"].find(big) < got["said"].find(small)
    assert got["after"] == 1.0


TEMPORARIES = """
import jax, jax.numpy as jnp, numpy as np
# About 40 MiB of temporaries and a result of four bytes: two of these never fit side by side.
step = jax.jit(lambda x: jax.lax.optimization_barrier(jnp.sin(jnp.arange(10_000_000, dtype=jnp.float32) + x)).max())
compiled = step.lower(jnp.float32(0)).compile()
results = [step(jnp.float32(i)) for i in range(6)]
result({"values": [round(float(r), 3) for r in results], "temp": compiled.memory_analysis().temp_size_in_bytes})
"""


def test_temporaries_of_queued_programs_make_the_next_one_wait(run_local):
    got = run_local(1, 1, TEMPORARIES, "--device-memory", "64MiB").value
    assert got["values"] == [1.0] * 6
    assert 32 << 20 < got["temp"] <= 64 << 20, "the program does not test what it should"
