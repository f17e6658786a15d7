"""A byte-level transformer whose layers are one scanned, rematerialised body."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen


class _Layer(linen.Module):
    """Causal self-attention and a hidden layer, each on a normalised residual stream."""

    heads: int
    dtype: Any
    param_dtype: Any

    @linen.compact
    def __call__(self, x, _):
        width = x.shape[-1]
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}

        y = linen.LayerNorm(use_bias=False, **types)(x)
        qkv = linen.DenseGeneral((3, self.heads, width // self.heads), use_bias=False, **types)(y)
        y = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, -3, 0), is_causal=True)
        x += linen.DenseGeneral(width, axis=(-2, -1), use_bias=False, **types)(y)

        y = linen.LayerNorm(use_bias=False, **types)(x)
        y = linen.gelu(linen.Dense(4 * width, use_bias=False, **types)(y))
        return x + linen.Dense(width, use_bias=False, **types)(y), None


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
        position = linen.Embed(self.length, self.width, **types)(jnp.arange(tokens.shape[1]))
        x = linen.Embed(256, self.width, **types)(tokens) + position
        # Rematerialised: the loop over layers keeps each layer's input and nothing else.
        body = linen.scan(
            linen.remat(_Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = body(self.heads, **types)(x, None)
        x = linen.LayerNorm(use_bias=False, **types)(x)
        return linen.Dense(256, use_bias=False, **types)(x)


def mean_over_tokens(model: Transformer, params: Any, batch: Any) -> jax.Array:
    """Mean cross entropy over the tokens that count, in nats.

    Args:
        model: the model.
        params: its parameters.
        batch: `"tokens"` integers [b, t + 1] and `"mask"` [b, t], 1 for targets that count.
    """
    tokens, mask = batch["tokens"], batch["mask"]
    logits = model.apply({"params": params}, tokens[:, :-1])
    log_p = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
    picked = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    return -(picked * mask).sum() / mask.sum()
