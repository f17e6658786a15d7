"""The same small models in Flax Linen and NNX, with the same names for the same weights."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

PyTree = Any


class LinenCnn(nn.Module):
    """Two convolutions over 4 x 4 images, group norm between them."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(2, name="norm")(nn.Conv(4, (3, 3), name="first")(x)))
        x = nn.relu(nn.Conv(4, (2, 2), strides=2, name="second")(x))
        return nn.Dense(3, name="head")(x.reshape(x.shape[0], -1))


class NnxCnn(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(4, 2, rngs=rngs)
        self.second = nnx.Conv(4, 4, (2, 2), strides=2, rngs=rngs)
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.first(x)))
        x = nnx.relu(self.second(x))
        return self.head(x.reshape(x.shape[0], -1))


class LinenMixer(nn.Module):
    """One block that mixes 4 tokens, then 4 channels."""

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(name="norm")(x).swapaxes(1, 2)
        x = x + nn.Dense(4, name="tokens")(nn.gelu(h)).swapaxes(1, 2)
        x = x + nn.Dense(4, name="channels")(nn.gelu(x))
        return nn.Dense(3, name="head")(x.mean(1))


class NnxMixer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.tokens = nnx.Linear(4, 4, rngs=rngs)
        self.channels = nnx.Linear(4, 4, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x).swapaxes(1, 2)
        x = x + self.tokens(nnx.gelu(h)).swapaxes(1, 2)
        x = x + self.channels(nnx.gelu(x))
        return self.head(x.mean(1))


class LinenTransformer(nn.Module):
    """One causal layer over 4 tokens of 3 kinds; the embedding is the output layer too."""

    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(3, 8, name="embed")
        h = embed(x)
        mask = nn.make_causal_mask(x)
        a = nn.LayerNorm(name="before")(h)
        h = h + nn.MultiHeadDotProductAttention(2, name="attention")(a, mask=mask)
        h = h + nn.Dense(8, name="mlp")(nn.gelu(nn.LayerNorm(name="after")(h)))
        return embed.attend(h)


def attention(query, key, value, mask, **_):
    """NNX's own takes its softmax in float32, whatever the dtype of its inputs."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


class NnxTransformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(3, 8, dtype=jnp.result_type(float), rngs=rngs)
        self.before = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, 8, decode=False, attention_fn=attention, rngs=rngs
        )
        self.after = nnx.LayerNorm(8, rngs=rngs)
        self.mlp = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        h = self.embed(x)
        h = h + self.attention(self.before(h), mask=nnx.make_causal_mask(x))
        h = h + self.mlp(nnx.gelu(self.after(h)))
        return self.embed.attend(h)


PAIRS = {
    "cnn": (LinenCnn, NnxCnn),
    "mixer": (LinenMixer, NnxMixer),
    "transformer": (LinenTransformer, NnxTransformer),
}


def make_batch(name: str, num_rows: int = 8) -> PyTree:
    """Inputs, labels, and a mask over what the labels count, different for each row."""
    rng = np.random.default_rng(0)
    shape = {"cnn": (4, 4, 1), "mixer": (4, 4), "transformer": (4,)}[name]
    if name == "transformer":
        x, y = rng.integers(0, 3, (2, num_rows, *shape))
    else:
        x, y = rng.normal(size=(num_rows, *shape)), rng.integers(0, 3, num_rows)
    mask = rng.uniform(size=y.shape) < 0.7
    mask.reshape(num_rows, -1)[:, 0] = True
    return {"x": jnp.asarray(x), "y": jnp.asarray(y), "mask": jnp.asarray(mask)}


def cross_entropy(logits: jax.Array, batch: PyTree) -> jax.Array:
    """The mean over what the mask keeps."""
    log_probability = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], -1)
    return -jnp.sum(log_probability[..., 0] * batch["mask"]) / jnp.sum(batch["mask"])


def count(batch: PyTree) -> jax.Array:
    return batch["mask"].sum()
