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


def plain_transformer(
    layers: int,
    width: int,
    heads: int,
    length: int,
    microbatch_size: int,
    *,
    dtype: Any = jnp.float32,
    embed: Callable[[jax.Array, jax.Array], jax.Array] = lambda table, ids: table[ids],
    spread: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> Model:
    """A transformer of scanned layers in plain JAX, on rows of bytes.

    Its parameters can be sharded as one likes. `embed(table, ids)` may be one that a mesh of
    explicit types understands, and `spread(x)` may say how activations [b, ...] are sharded.
    """

    def init(key):
        each = width // heads
        shapes = {
            "qkv": (layers, width, 3, heads, each),
            "mixed": (layers, heads, each, width),
            "up": (layers, width, 4 * width),
            "down": (layers, 4 * width, width),
            "embedding": (256, width),
            "logits": (width, 256),
        }
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        return {n: jax.random.normal(keys[n], s) * width**-0.5 for n, s in shapes.items()}

    def normalised(x):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)

    @jax.checkpoint
    def layer(x, weights):
        # Cast here: the gradient of a parameter is wide again as soon as its layer has made it.
        w = jax.tree.map(lambda x: x.astype(dtype), weights)
        qkv = spread(jnp.einsum("btd,dnhe->btnhe", normalised(x), w["qkv"]))
        q, k, v = (qkv[:, :, i] for i in range(3))
        scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) * (heads / width) ** 0.5
        later = jnp.triu(jnp.full((length, length), -1e9, dtype), 1)
        seen = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores + later), v)
        x = spread(x + jnp.einsum("bqhe,hed->bqd", seen, w["mixed"]))
        hidden = spread(jax.nn.gelu(normalised(x) @ w["up"]))
        return spread(x + hidden @ w["down"]), None

    def loss_fn(params, batch):
        tokens = batch["tokens"]
        x = spread(embed(params["embedding"], tokens[:, :-1]).astype(dtype))
        names = ("qkv", "mixed", "up", "down")
        x, _ = jax.lax.scan(layer, x, {name: params[name] for name in names})
        logits = normalised(x).astype(jnp.float32) @ params["logits"]
        wanted = jax.nn.one_hot(tokens[:, 1:], 256)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * wanted, -1))

    def batch(rows):
        rng = np.random.default_rng(0)
        return {"tokens": rng.integers(0, 256, size=(rows, length + 1), dtype=np.int32)}

    return Model(
        "transformer, scanned layers, plain JAX",
        init,
        loss_fn,
        batch,
        lambda batch: batch["tokens"].shape[0],
        microbatch_size,
    )
