"""Trains the GPT of train_gpt.py as a pipeline of two stages, each data-parallel over one half of the devices.

`jit` and `device_put`, nothing else: with two workers each stage has one to itself, and what passes between the stages goes from
worker to worker. A batch is cut into micro-batches, so that both stages have work at the same time; their gradients add up to that
of the batch, so the losses are those of train_gpt.py.
"""

import functools
import itertools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np

import train_gpt as gpt

MICRO_BATCHES = 4


def cut(weights):
    """The weights of each stage: embedding and the first half of the blocks; the second half and the head."""
    half = len(weights["blocks"]) // 2
    first = {name: weights[name] for name in ("tokens", "places")} | {"blocks": weights["blocks"][:half]}
    return first, {"blocks": weights["blocks"][half:], "head": weights["head"]}


def first_stage(weights, tokens):
    return gpt.run_blocks(weights["blocks"], gpt.embed(weights, tokens))


def second_stage(weights, x, targets):
    return gpt.cross_entropy(gpt.score(weights, gpt.run_blocks(weights["blocks"], x)), targets)


def add(a, b):
    return jax.tree.map(jnp.add, a, b)


def turn(gradients, weights, x, targets):
    """The end of the way forward and the begin of the way back."""
    loss, pull_back = jax.vjp(lambda w, x: second_stage(w, x, targets) / MICRO_BATCHES, weights, x)
    gradient, down = pull_back(jnp.ones_like(loss))
    return add(gradients, gradient), down, loss


def backward(gradients, weights, tokens, down):
    (gradient,) = jax.vjp(lambda w: first_stage(w, tokens), weights)[1](down)
    return add(gradients, gradient)


class Pipeline:
    """Weights and optimizer states on their devices, and the programs that run there."""

    def __init__(self, devices, optimizer, seed):
        half = len(devices) // 2
        self.kept, self.split = zip(*(gpt.over(part) for part in (devices[:half], devices[half:])))
        weights = cut(jax.jit(gpt.init_weights, out_shardings=self.kept[0])(jax.random.key(seed)))
        self.weights = [jax.device_put(w, kept) for w, kept in zip(weights, self.kept)]
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        begin = [jax.jit(lambda w: (optimizer.init(w), zeros(w)), out_shardings=kept) for kept in self.kept]
        self.state, self.gradients = map(list, zip(*(f(w) for f, w in zip(begin, self.weights))))
        self.forward = jax.jit(first_stage, out_shardings=self.split[0])
        self.turn = jax.jit(turn, donate_argnums=0, out_shardings=(self.kept[1], self.split[1], self.kept[1]))
        self.backward = jax.jit(backward, donate_argnums=0, out_shardings=self.kept[0])
        update = gpt.make_update(optimizer)
        # The sums of gradients begin again at zero.
        self.update = jax.jit(lambda w, s, gradient: (*update(w, s, gradient), zeros(gradient)), donate_argnums=(0, 1, 2))

    def step(self, inputs, targets):
        """Parts of the loss, one for each micro-batch. Nothing is waited for."""
        inputs = [jax.device_put(part, self.split[0]) for part in np.split(inputs, MICRO_BATCHES)]
        targets = [jax.device_put(part, self.split[1]) for part in np.split(targets, MICRO_BATCHES)]
        # The first stage is one micro-batch ahead, then goes forward and backward in turns.
        ahead, losses = self.forward(self.weights[0], inputs[0]), []
        for tokens, after, target in itertools.zip_longest(inputs, inputs[1:], targets):
            x = jax.device_put(ahead, self.split[1])
            if after is not None:
                ahead = self.forward(self.weights[0], after)
            self.gradients[1], down, loss = self.turn(self.gradients[1], self.weights[1], x, target)
            down = jax.device_put(down, self.split[0])
            self.gradients[0] = self.backward(self.gradients[0], self.weights[0], tokens, down)
            losses.append(loss)
        for stage in range(2):
            updated = self.update(self.weights[stage], self.state[stage], self.gradients[stage])
            self.weights[stage], self.state[stage], self.gradients[stage] = updated
        return losses


def train(data, steps, stop, seed, progress):
    """The losses of the first `stop` steps of a training of `steps` steps."""
    pipeline, losses = Pipeline(jax.devices(), gpt.make_optimizer(steps), seed), []
    for i, (inputs, targets) in enumerate(gpt.batches(data, stop, seed)):
        losses.append(pipeline.step(inputs, targets))
        if i % 10 == 0 or i + 1 == stop:
            progress.show(i + 1, float(sum(jax.device_get(losses[-1]))))
    return [float(sum(parts)) for parts in jax.device_get(losses)]


def main():
    parser = gpt.make_parser(__doc__.splitlines()[0], "out")
    parser.add_argument("--stop", type=int, metavar="N", help="end after the first N of the steps")
    parser.add_argument("--beside", metavar="FILE", help="losses that train_gpt.py has written, for the plot")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    stop = min(args.stop or args.steps, args.steps)
    half = jax.device_count() // 2
    if half == 0 or gpt.BATCH // MICRO_BATCHES % half:
        parser.error(f"the micro-batches of {gpt.BATCH // MICRO_BATCHES} cannot be split over one half of {jax.device_count()} devices")
    print(f"2 stages on {half} devices each, first {jax.devices()[0]} and {jax.devices()[half]}; {MICRO_BATCHES} micro-batches", flush=True)
    progress = gpt.Progress(stop)
    losses = train(gpt.encode(gpt.load_text()), args.steps, stop, args.seed, progress)

    curves = {}
    if args.beside:
        with open(args.beside, encoding="ascii") as file:
            curves["one stage"] = json.load(file)["losses"]
    gpt.plot(curves | {"two stages": losses}, os.path.join(args.out, "loss.png"))
    gpt.write_json(args.json, progress, losses)


if __name__ == "__main__":
    main()
