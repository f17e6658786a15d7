"""The models that are measured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from accum_jax._demo.transformer import Transformer, mean_over_tokens


@dataclass(frozen=True)
class Model:
    """A model with its loss and made-up data.

    Attributes:
        name: as tables show it.
        init: `init(key)`, the parameters.
        loss_fn: `loss_fn(params, batch)`, a mean over what `weight` counts.
        batch: `batch(rows)`, as many rows of random data, as numpy arrays.
        weight: `weight(batch)`, what the loss is a mean over.
        microbatch_size: rows of one microbatch.
    """

    name: str
    init: Callable[[jax.Array], Any]
    loss_fn: Callable[[Any, Any], jax.Array]
    batch: Callable[[int], Any]
    weight: Callable[[Any], Any]
    microbatch_size: int

    def shapes(self, rows: int) -> tuple[Any, Any]:
        """Shapes of the parameters and of a batch: nothing is allocated."""
        params = jax.eval_shape(self.init, jax.random.key(0))
        return params, jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.batch(rows)
        )


def mlp(layers: int, width: int, microbatch_size: int) -> Model:
    """A multi-layer perceptron written as a Python loop over its layers."""

    def init(key):
        keys = jax.random.split(key, layers)
        return [
            {"w": jax.random.normal(k, (width, width)) * width**-0.5, "b": jnp.zeros(width)}
            for k in keys
        ]

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params:
            x = jax.nn.gelu(x @ layer["w"] + layer["b"])
        return jnp.mean((x - batch["y"]) ** 2)

    def batch(rows):
        rng = np.random.default_rng(0)
        return {name: rng.normal(size=(rows, width)).astype(np.float32) for name in ("x", "y")}

    return Model(
        "MLP, Python layers", init, loss_fn, batch, lambda batch: len(batch["x"]), microbatch_size
    )


def transformer(layers: int, width: int, length: int, microbatch_size: int, **dtypes: Any) -> Model:
    """A transformer of scanned layers in Flax, on rows of different lengths."""
    model = Transformer(layers, width, width // 64, length, **dtypes)

    def batch(rows):
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, length + 1, size=(rows, 1))
        return {
            "tokens": rng.integers(0, 256, size=(rows, length + 1), dtype=np.int32),
            "mask": (np.arange(length) < lengths).astype(np.float32),
        }

    return Model(
        "transformer, scanned layers",
        lambda key: model.init(key, jnp.zeros((1, length), jnp.int32))["params"],
        lambda params, batch: mean_over_tokens(
            functools.partial(model.apply, {"params": params}), batch
        ),
        batch,
        lambda batch: batch["mask"].sum(),
        microbatch_size,
    )
