"""A small regression with Flax NNX; prints the first and the last loss."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 32, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
x = jax.random.normal(jax.random.key(1), (256, 4))
y = jnp.sin(x.sum(-1, keepdims=True))
x, y = jax.device_put((x, y), NamedSharding(mesh, P("d")))


@nnx.jit
def step(model, optimizer, x, y):
    loss, gradient = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, gradient)
    return loss


losses = [step(model, optimizer, x, y) for _ in range(200)]
print(f"first {float(losses[0]):.4f} last {float(losses[-1]):.4f}", flush=True)
