"""A tiny character-level GPT on the text of the `this` module; prints three losses."""

import codecs
import contextlib
import io

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

with contextlib.redirect_stdout(io.StringIO()):
    import this

TEXT = codecs.decode(this.s, "rot13")
CHARACTERS = sorted(set(TEXT))
DATA = jnp.array([CHARACTERS.index(c) for c in TEXT])
CONTEXT, WIDTH, HEADS, LAYERS = 32, 64, 4, 2

mesh = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("d"))


def init(key):
    keys = iter(jax.random.split(key, 50))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) * 0.05

    def block():
        return {"q": normal(WIDTH, 3 * WIDTH), "o": normal(WIDTH, WIDTH), "u": normal(WIDTH, 4 * WIDTH), "d": normal(4 * WIDTH, WIDTH)}

    embedding, places = normal(len(CHARACTERS), WIDTH), normal(CONTEXT, WIDTH)
    return {"e": embedding, "p": places, "b": [block() for _ in range(LAYERS)], "h": normal(WIDTH, len(CHARACTERS))}


def normalize(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def forward(weights, x):
    h, batch = weights["e"][x] + weights["p"], x.shape[0]
    for b in weights["b"]:
        q, k, v = jnp.split((normalize(h) @ b["q"]).reshape(batch, CONTEXT, HEADS, -1), 3, -1)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / 4.0
        scores = jnp.where(jnp.tril(jnp.ones((CONTEXT, CONTEXT))) > 0, scores, -1e9)
        h = h + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(batch, CONTEXT, WIDTH) @ b["o"]
        h = h + jax.nn.gelu(normalize(h) @ b["u"]) @ b["d"]
    return normalize(h) @ weights["h"]


optimizer = optax.adam(3e-3)


def step(weights, state, x, y):
    def loss_of(weights):
        return optax.softmax_cross_entropy_with_integer_labels(forward(weights, x), y).mean()

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(weights, updates), state, loss


step = jax.jit(step, donate_argnums=(0, 1))
weights = jax.device_put(init(jax.random.key(0)), replicated)
state = jax.device_put(optimizer.init(weights), replicated)
key = jax.random.key(1)
for i in range(200):
    key, draw = jax.random.split(key)
    starts = jax.random.randint(draw, (16,), 0, len(DATA) - CONTEXT - 1)
    rows = jnp.stack([DATA[j : j + CONTEXT + 1] for j in starts.tolist()])
    x, y = jax.device_put((rows[:, :-1], rows[:, 1:]), split)
    weights, state, loss = step(weights, state, x, y)
    if i in (0, 50, 199):
        print(f"step {i} loss {float(loss):.4f}", flush=True)
