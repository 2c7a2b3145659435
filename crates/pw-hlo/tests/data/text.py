"""Writes the modules whose text is compared: NAME.module as stock JAX compiles them for its CPU, NAME.txt as XLA prints them; and
NAME.txt of some of the NAME.bin that are there.

usage: text.py FOLDER
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib import _hlo

FOLDER = pathlib.Path(sys.argv[1])
jax.config.update("jax_traceback_in_locations_limit", 0)
x, k = np.ones((8, 8), np.float32), np.ones((3, 3, 3, 4), np.float32)

PROGRAMS = {
    "literals": (lambda x: x * np.array([1, 2.5, 1 / 3, -7e-9, 1e20, np.inf, np.nan, 0], np.float32) + (1 + 2j), x),
    "conv": (lambda x, k: lax.conv_general_dilated(x, k, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")), np.ones((2, 8, 8, 3), np.float32), k),
    "index": (lambda x, i: x.at[i].add(x[i][:, ::-1] + lax.pad(x, 0.0, ((1, 2, 0), (0, 0, 1)))[:2, 1:9]), x, np.array([1, 2])),
    "control": (lambda x, i: lax.fori_loop(0, 9, lambda _, c: lax.switch(i, [jnp.sin, jnp.cos, lambda v: v @ v], c), jnp.sort(x)), x, 1),
}

for name, (function, *arguments) in PROGRAMS.items():
    compiled = jax.jit(function).lower(*arguments).compile()
    raw = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    (FOLDER / f"{name}.module").write_bytes(raw)
    (FOLDER / f"{name}.txt").write_text(_hlo.HloModule.from_serialized_hlo_module_proto(raw).to_string())

for name in ("kinds8", "permute8", "reshard24"):
    (FOLDER / f"{name}.txt").write_text(_hlo.HloModule.from_serialized_hlo_module_proto((FOLDER / f"{name}.bin").read_bytes()).to_string())
