"""Trains a small character-level GPT, data-parallel over all devices, on the source of Python's own standard library.

Plain JAX and optax: nothing here knows where the devices are. Run it as it is, or under `pathways local`.
pipeline_gpt.py trains the same model in two stages.
"""

import argparse
import functools
import glob
import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

CONTEXT, WIDTH, HEADS, LAYERS = 48, 96, 4, 2
BATCH = 16
LEARNING_RATE = 3e-3
TEMPERATURE, SAMPLE = 0.7, 400
TEXT_BYTES_MAX = 2_000_000
INDENT = "    "
ALPHABET = "\n\t" + "".join(map(chr, range(32, 127)))  # a tab stands for four spaces


def load_text():
    """The interpreter's own modules in a fixed order, reduced to printable ASCII."""
    keep, parts, size = set(ALPHABET), [], 0
    for path in sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py"))):
        with open(path, encoding="utf-8", errors="ignore") as file:
            part = "".join(c for c in file.read().replace(INDENT, "\t") if c in keep)
        parts.append(part)
        size += len(part)
        if size >= TEXT_BYTES_MAX:
            break
    return "".join(parts)[:TEXT_BYTES_MAX]


def init_weights(key):
    keys = iter(jax.random.split(key, 3 + 4 * LAYERS))

    def normal(*shape, scale=1.0):
        return jax.random.normal(next(keys), shape) * scale / shape[0] ** 0.5

    def block():
        return {
            "qkv": normal(WIDTH, 3 * WIDTH),
            "out": normal(WIDTH, WIDTH, scale=0.5),
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH, scale=0.5),
        }

    return {
        "tokens": normal(len(ALPHABET), WIDTH, scale=5.0),
        "places": normal(CONTEXT, WIDTH, scale=2.0),
        "blocks": [block() for _ in range(LAYERS)],
        "head": normal(WIDTH, len(ALPHABET), scale=0.1),
    }


def normalize(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)


def embed(weights, tokens):
    return weights["tokens"][tokens] + weights["places"][: tokens.shape[1]]


def run_blocks(blocks, x):
    batch, length, width = x.shape
    past = jnp.tril(jnp.ones((length, length), bool))
    for block in blocks:
        q, k, v = jnp.split((normalize(x) @ block["qkv"]).reshape(batch, length, HEADS, -1), 3, axis=-1)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        attention = jax.nn.softmax(jnp.where(past, scores, -1e9))
        x += jnp.einsum("bhts,bshd->bthd", attention, v).reshape(batch, length, width) @ block["out"]
        x += jax.nn.gelu(normalize(x) @ block["up"]) @ block["down"]
    return x


def score(weights, x):
    return normalize(x) @ weights["head"]


def forward(weights, tokens):
    """Scores of the next character at every place of `tokens` (batch, CONTEXT)."""
    return score(weights, run_blocks(weights["blocks"], embed(weights, tokens)))


def cross_entropy(scores, targets):
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()


def loss_of(weights, inputs, targets):
    return cross_entropy(forward(weights, inputs), targets)


def make_optimizer(steps):
    rate = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, steps // 20, steps, LEARNING_RATE / 10)
    return optax.adamw(rate, b2=0.99, eps=1e-5)  # this eps keeps rounding from deciding updates of unused characters


def make_update(optimizer):
    def update(weights, state, gradient):
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    return update


def make_step(optimizer):
    update = make_update(optimizer)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, state, inputs, targets):
        loss, gradient = jax.value_and_grad(loss_of)(weights, inputs, targets)
        return *update(weights, state, gradient), loss

    return step


def batches(data, steps, seed):
    """Inputs and targets for every step: places of the text that are drawn at random."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        rows = rng.integers(0, len(data) - CONTEXT - 1, BATCH)
        batch = data[rows[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
        yield batch[:, :-1], batch[:, 1:]


def over(devices):
    """How to keep an array on every one of the devices, and how to split it over them."""
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    return NamedSharding(mesh, P()), NamedSharding(mesh, P("d"))


def train(data, steps, seed, progress):
    """The weights, and the loss of every step."""
    everywhere, split = over(jax.devices())
    optimizer = make_optimizer(steps)
    weights = jax.jit(init_weights, out_shardings=everywhere)(jax.random.key(seed))
    state = jax.jit(optimizer.init, out_shardings=everywhere)(weights)
    step, losses = make_step(optimizer), []
    for i, batch in enumerate(batches(data, steps, seed)):
        inputs, targets = jax.device_put(batch, split)
        weights, state, loss = step(weights, state, inputs, targets)
        losses.append(loss)
        if i % 10 == 0 or i + 1 == steps:
            progress.show(i + 1, float(loss))
    return weights, [float(x) for x in jax.device_get(losses)]


@functools.partial(jax.jit, static_argnames="count")
def generate(weights, prompt, count, key):
    """Draws `count` characters that follow `prompt`, CONTEXT of them, one after the other."""

    def draw(window, key):
        character = jax.random.categorical(key, forward(weights, window[None])[0, -1] / TEMPERATURE)
        return jnp.append(window[1:], character), character

    return jax.lax.scan(draw, prompt, jax.random.split(key, count))[1]


def decode(numbers):
    return "".join(ALPHABET[i] for i in numbers).replace("\t", INDENT)


def encode(text):
    table = np.zeros(128, np.uint8)
    for i, c in enumerate(ALPHABET):
        table[ord(c)] = i
    return table[np.frombuffer(text.encode("ascii"), np.uint8)]


class Progress:
    """One line that is rewritten on a terminal, else a plain line every few seconds."""

    def __init__(self, steps):
        self.steps, self.start, self.said, self.tty = steps, None, 0.0, sys.stdout.isatty()

    def show(self, step, loss):
        now = time.perf_counter()
        if self.start is None:  # the first step compiles: the rate counts from its end
            self.start, self.first = now, step
        elapsed = now - self.start
        if step < self.steps and now - self.said < (0.2 if self.tty else 5.0):
            return
        self.said = now
        rate = (step - self.first) * BATCH * CONTEXT / elapsed if elapsed else 0.0
        line = f"step {step:4d}/{self.steps}  loss {loss:.4f}  {rate:8,.0f} tokens/s"
        if self.tty:
            done = 30 * step // self.steps
            print(f"\r[{'#' * done}{'.' * (30 - done)}] {line}", end="\n" if step == self.steps else "", flush=True)
        else:
            print(line, flush=True)
        self.rate = rate


def plot(curves, path):
    """`curves`: losses by the name of their run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, losses in curves.items():
        axes.plot(range(1, len(losses) + 1), losses, linewidth=1, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per character)", title="Training on the standard library's source")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def make_parser(description, out):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--out", default=out, metavar="DIR", help="where the results go (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the losses here")
    return parser


def write_json(path, progress, losses, **more):
    if path:
        with open(path, "w", encoding="ascii") as file:
            json.dump({"devices": jax.device_count(), "tokens_per_second": progress.rate, "losses": losses, **more}, file)


def main():
    args = make_parser(__doc__.splitlines()[0], "out").parse_args()
    os.makedirs(args.out, exist_ok=True)
    text = load_text()
    data = encode(text)
    print(f"{jax.device_count()} devices, first {jax.devices()[0]}; {len(text):,} characters of text", flush=True)
    progress = Progress(args.steps)
    weights, losses = train(data, args.steps, args.seed, progress)

    plot({"training": losses}, os.path.join(args.out, "loss.png"))
    prompt = data[text.index("\ndef ") :][:CONTEXT].astype(np.int32)
    drawn = generate(weights, prompt, SAMPLE, jax.random.key(args.seed))
    sample = f"{decode(prompt)}|{decode(np.asarray(drawn))}"
    with open(os.path.join(args.out, "sample.txt"), "w", encoding="ascii") as file:
        file.write(sample + "\n")
    print(f"\nloss {losses[0]:.4f} -> {losses[-1]:.4f}; after the bar the model writes:\n{sample}\n", flush=True)
    write_json(args.json, progress, losses, sample=sample)


if __name__ == "__main__":
    main()
