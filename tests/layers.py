"""A layer-scanned model, and whether a function adds its gradients in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


def uses_in_place(fn: Callable[..., PyTree], *args: PyTree) -> bool:
    """Whether the traced function holds a mutable accumulator."""
    return "Ref{" in str(jax.make_jaxpr(fn)(*args))


def assert_close(actual: PyTree, expected: PyTree, rtol: float) -> None:
    """Types are equal, and each leaf differs by `rtol` of its largest entry: sums cancel."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for got, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        largest = np.max(np.abs(wanted), initial=0)
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=rtol * largest)


def predict(params: PyTree, x: jax.Array) -> jax.Array:
    """A residual stack under `lax.scan`, every layer rematerialised; one number for each row."""

    @jax.checkpoint
    def layer(h, p):
        return h + jnp.tanh(h @ p["w"] + p["b"]), None

    h, _ = jax.lax.scan(layer, x, params["layers"])
    return h @ params["out"]


def layered(params: PyTree, batch: PyTree) -> jax.Array:
    """Mean squared error over the rows of the batch."""
    return jnp.mean(jnp.square(predict(params, batch["x"]) - batch["y"]))


def masked(params: PyTree, batch: PyTree) -> jax.Array:
    """Mean squared error over the rows of the batch that its mask keeps."""
    square = jnp.square(predict(params, batch["x"]) - batch["y"])
    return jnp.sum(square * batch["mask"]) / jnp.sum(batch["mask"])


def layered_problem(
    num_rows: int, *, num_layers: int = 3, width: int = 4, dtype: Any = np.float32
) -> tuple[PyTree, PyTree]:
    """Parameters and batch for `layered` and `masked`."""
    rng = np.random.default_rng(0)
    params = {
        "layers": {
            "w": rng.normal(size=(num_layers, width, width)) / width**0.5,
            "b": rng.normal(size=(num_layers, width)),
        },
        "out": rng.normal(size=(width,)) / width**0.5,
    }
    batch = {
        "x": rng.normal(size=(num_rows, width)),
        "y": rng.normal(size=(num_rows,)),
        "mask": np.arange(num_rows) % 5 != 1,
    }
    cast = {**batch, "x": jnp.asarray(batch["x"], dtype), "y": jnp.asarray(batch["y"], dtype)}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), params), jax.tree.map(jnp.asarray, cast)


def label(value) -> str:
    """The id of a parametrised test: the same in every process, functions by their names."""
    return re.sub(r"<function (\S+) at 0x[0-9a-f]+>", r"\1", str(value))
