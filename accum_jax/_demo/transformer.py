"""A byte-level transformer whose layers are one scanned, rematerialised body, in both APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx


def _layer(parts: Any, x: jax.Array) -> jax.Array:
    """Causal self-attention and a hidden layer, each on a normalised residual stream."""
    qkv = jnp.moveaxis(parts.qkv(parts.before(x)), -3, 0)
    x += parts.out(jax.nn.dot_product_attention(*qkv, is_causal=True))
    return x + parts.down(jax.nn.gelu(parts.up(parts.after(x))))


class _LinenLayer(linen.Module):
    heads: int
    width: int
    dtype: Any
    param_dtype: Any

    def setup(self):
        options = {"use_bias": False, "dtype": self.dtype, "param_dtype": self.param_dtype}
        self.before = linen.LayerNorm(**options)
        self.qkv = linen.DenseGeneral((3, self.heads, self.width // self.heads), **options)
        self.out = linen.DenseGeneral(self.width, axis=(-2, -1), **options)
        self.after = linen.LayerNorm(**options)
        self.up = linen.Dense(4 * self.width, **options)
        self.down = linen.Dense(self.width, **options)

    def __call__(self, x, _):
        return _layer(self, x), None


class Transformer(linen.Module):
    """Bytes [b, t] to logits [b, t, 256] of the byte that comes next.

    Attributes:
        layers: applications of the scanned body.
        width: size of the residual stream, a multiple of `heads`.
        heads: attention heads.
        length: the longest t.
        dtype: of activations, and of parameters while a layer uses them.
        param_dtype: of parameters.
    """

    layers: int
    width: int
    heads: int
    length: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @linen.compact
    def __call__(self, tokens):
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        positions = linen.Embed(self.length, self.width, name="positions", **types)
        x = linen.Embed(256, self.width, name="bytes", **types)(tokens)
        x += positions(jnp.arange(tokens.shape[1]))
        # Rematerialised: the loop over layers keeps each layer's input and nothing else.
        body = linen.scan(
            linen.remat(_LinenLayer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = body(self.heads, self.width, name="body", **types)(x, None)
        x = linen.LayerNorm(use_bias=False, name="norm", **types)(x)
        return linen.Dense(256, use_bias=False, name="head", **types)(x)


class _NnxLayer(nnx.Module):
    def __init__(self, heads: int, width: int, rngs: nnx.Rngs):
        options: Any = {"use_bias": False, "rngs": rngs}
        self.before = nnx.LayerNorm(width, **options)
        self.qkv = nnx.LinearGeneral(width, (3, heads, width // heads), **options)
        self.out = nnx.LinearGeneral((heads, width // heads), width, axis=(-2, -1), **options)
        self.after = nnx.LayerNorm(width, **options)
        self.up = nnx.Linear(width, 4 * width, **options)
        self.down = nnx.Linear(4 * width, width, **options)


class NnxTransformer(nnx.Module):
    """The same with the same parameters, by the same names; see `Transformer`."""

    def __init__(self, layers: int, width: int, heads: int, length: int, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap
        def make(rngs):
            return _NnxLayer(heads, width, rngs)

        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.bytes = nnx.Embed(256, width, rngs=rngs)
        self.body = make(rngs)
        self.norm = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(width, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat(prevent_cse=False)
        def run(x, layer):
            return _layer(layer, x)

        x = self.bytes(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        return self.head(self.norm(run(x, self.body)))


def mean_over_tokens(model: Callable[..., Any], batch: Any) -> jax.Array:
    """Mean cross entropy over the tokens that count, in nats.

    Args:
        model: tokens [b, t] to logits [b, t, 256].
        batch: `"tokens"` integers [b, t + 1] and `"mask"` [b, t], 1 for targets that count.
    """
    tokens, mask = batch["tokens"], batch["mask"]
    log_p = jax.nn.log_softmax(jnp.asarray(model(tokens[:, :-1]), jnp.float32))
    picked = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    return -(picked * mask).sum() / mask.sum()
