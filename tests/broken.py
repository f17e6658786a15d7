"""Broken losses and steps, each with one known fault of gradient accumulation, and right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any
ROWS, K = 12, 4


# Losses of a two-layer network: rows [b, 5] to one number each


def problem(seed: int = 0, num_rows: int = ROWS, dtype: Any = jnp.float32) -> tuple[PyTree, PyTree]:
    """Parameters and a batch with a mask over rows, tokens padded with 0, and labels."""
    rng = np.random.default_rng(seed)
    lengths = rng.permutation(np.arange(num_rows) % 6 + 1)
    tokens = rng.integers(1, 9, (num_rows, 7)) * (np.arange(7) < lengths[:, None])
    params = {"w": rng.normal(size=(5, 4)) / 2, "b": np.zeros(4), "v": rng.normal(size=4)}
    batch = {
        "x": rng.normal(size=(num_rows, 5)),
        "y": rng.normal(size=num_rows),
        "mask": 1.0 * (rng.permutation(num_rows) % 3 > 0),
        "tokens": tokens,
        "labels": np.where(tokens[:, 1:] > 0, tokens[:, 1:], -100),
    }
    batch = {n: jnp.asarray(x, dtype if x.dtype == float else jnp.int32) for n, x in batch.items()}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), params), batch


def net(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def square(params, batch):
    return jnp.square(net(params, batch["x"]) - batch["y"])


def mean(params, batch):
    return jnp.mean(square(params, batch))


def decayed(params, batch):
    return mean(params, batch) + 0.1 * jnp.sum(params["w"] ** 2)


def summed(params, batch):
    return jnp.sum(square(params, batch))


def summed_and_decayed(params, batch):
    return summed(params, batch) + jnp.sum(params["w"] ** 2)


def masked(params, batch):
    return jnp.sum(square(params, batch) * batch["mask"]) / (jnp.sum(batch["mask"]) + 1e-8)


def over_tokens(params, batch):
    real = batch["tokens"] != 0
    return (
        jnp.sum(jnp.square(net(params, batch["x"])[:, None] - batch["tokens"]) * real) / real.sum()
    )


def over_labels(params, batch):
    real = batch["labels"] >= 0
    off = jnp.square(net(params, batch["x"])[:, None] - batch["labels"] / 4) * real
    return jnp.sum(off) / jnp.sum(real)


def over_hidden_weight(params, batch):
    weight = jnp.abs(batch["x"][:, 0]) + 0.1
    return jnp.sum(square(params, batch) * weight) / jnp.sum(weight)


def layer_norm(params, batch):
    h = batch["x"] @ params["w"]
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-3)
    return jnp.mean(jnp.square(jnp.tanh(h) @ params["v"] - batch["y"]))


def batch_norm(params, batch):
    h = batch["x"] @ params["w"]
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)
    return jnp.mean(jnp.square(jnp.tanh(h) @ params["v"] - batch["y"]))


def batch_norm_with_state(params, batch):
    return batch_norm(params, batch), {"batch_stats": {"mean": (batch["x"] @ params["w"]).mean(0)}}


def in_batch_negatives(params, batch):
    h = batch["x"] @ params["w"]
    other = h + 0.3 * batch["y"][:, None]
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(h @ other.T)))


def balance(params, batch):
    gate = jax.nn.softmax(batch["x"] @ params["w"])
    used = jax.nn.one_hot(jnp.argmax(gate, -1), 4)
    return mean(params, batch) + 4 * jnp.sum(gate.mean(0) * used.mean(0))


def balance_of_window(params, batch, used):
    """The same with the window's use of the experts as an argument: a mean over rows."""
    gate = jax.nn.softmax(batch["x"] @ params["w"])
    return mean(params, batch) + 4 * jnp.sum(gate.mean(0) * used)


def two_denominators(params, batch):
    return masked(params, batch) + 0.5 * over_tokens(params, batch)


def fixed_key(params, batch):
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, batch["x"].shape)
    return mean(params, {**batch, "x": batch["x"] * keep})


def dropout(params, batch, key):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return mean(params, {**batch, "x": batch["x"] * keep})


def unused_key(params, batch, key):
    return mean(params, batch)


def dropout_and_batch_norm(params, batch, key):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return batch_norm(params, {**batch, "x": batch["x"] * keep})


def cast(dtype: Any) -> Callable[[PyTree, PyTree], jax.Array]:
    """The mean loss, computed in `dtype` whatever comes in."""

    def loss(params, batch):
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        return mean(params, {**batch, "x": batch["x"].astype(dtype)}).astype(jnp.float32)

    return loss


def refuses_float64(params, batch):
    def add(total, x):
        return total + x, None

    total, _ = jax.lax.scan(add, jnp.zeros((), jnp.float32), square(params, batch))
    return total / batch["y"].shape[0]


def remat(params, batch):
    return jax.checkpoint(mean)(params, batch)


def slightly_coupled(params, batch):
    """Off by a few millionths of the gradient."""
    return mean(params, batch) + 1e-5 * jnp.mean(net(params, batch["x"])) ** 2


def counting() -> Callable[[PyTree, PyTree], jax.Array]:
    calls = []

    def loss(params, batch):
        calls.append(None)
        return mean(params, batch) * (1 + 0.1 * len(calls))

    return loss


def mask_weight(batch):
    return jnp.sum(batch["mask"])


def token_weight(batch):
    return jnp.sum(batch["tokens"] != 0)


# Steps by hand: `combine` and the flags say what is done to the gradients of the microbatches


def strided(batch, k=K):
    return [jax.tree.map(lambda x: x[i::k], batch) for i in range(k)]  # noqa: B023


def contiguous(batch, k=K):
    rows = -(-len(jax.tree.leaves(batch)[0]) // k)
    starts = range(0, len(jax.tree.leaves(batch)[0]), rows)
    return [jax.tree.map(lambda x: x[i : i + rows], batch) for i in starts]  # noqa: B023


def scale(tree, by):
    return jax.tree.map(lambda x: x * by, tree)


def add(trees):
    return jax.tree.map(lambda *xs: sum(xs), *trees)


def clip(tree, c):
    norm = optax.tree.norm(tree)
    return scale(tree, jnp.minimum(1.0, c / norm))


def by_gradient(
    tx, loss, combine, *, cut=contiguous, keys=None
) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
    """One update from `combine(gradients, microbatches)`."""

    @jax.jit
    def step(params, state, batch):
        parts = cut(batch)
        extra = [()] * len(parts) if keys is None else [(key,) for key in keys(len(parts))]
        grads = [jax.grad(loss)(params, part, *key) for part, key in zip(parts, extra, strict=True)]
        updates, state = tx.update(combine(grads, parts), state, params)
        return optax.apply_updates(params, updates), state

    return step


def mean_of(grads, parts):
    return scale(add(grads), 1 / len(grads))


def sum_of(grads, parts):
    return add(grads)


def divided_twice(grads, parts):
    return scale(add(grads), 1 / len(grads) ** 2)


def weighted(weight):
    def combine(grads, parts):
        weights = [weight(part) for part in parts]
        return scale(add(map(scale, grads, weights)), 1 / sum(weights))

    return combine


def divided_by(d):
    return lambda grads, parts: scale(add(grads), 1 / d)


def last_of(grads, parts):
    return grads[-1]


def last_over_k(grads, parts):
    return scale(grads[-1], 1 / len(grads))


def clipped_each(c):
    return lambda grads, parts: mean_of([clip(g, c) for g in grads], parts)


def clipped_sum(c):
    return lambda grads, parts: scale(clip(add(grads), c), 1 / len(grads))


def low_precision(dtype=jnp.bfloat16):
    def combine(grads, parts):
        total = jax.tree.map(lambda g: jnp.zeros(g.shape, dtype), grads[0])
        for g in grads:
            total = jax.tree.map(lambda a, b: a + b.astype(dtype), total, g)
        return jax.tree.map(lambda a, g: (a / len(grads)).astype(g.dtype), total, grads[0])

    return combine


def optimizer_each(tx, loss, cut=contiguous):
    @jax.jit
    def step(params, state, batch):
        for part in cut(batch):
            updates, state = tx.update(jax.grad(loss)(params, part), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    return step


def schedule_each(tx, loss, cut=contiguous):
    """The optimizer once, on the mean, but its counts advance with the microbatches."""

    @jax.jit
    def step(params, state, batch):
        parts = cut(batch)
        grads = mean_of([jax.grad(loss)(params, part) for part in parts], parts)
        updates, state = tx.update(grads, state, params)

        def tick(x):
            return x + (len(parts) - 1) if jnp.issubdtype(x.dtype, jnp.integer) else x

        return optax.apply_updates(params, updates), jax.tree.map(tick, state)

    return step


def decay_each(tx, loss, rate, cut=contiguous):
    """Weights decay by `rate` with every microbatch, once of it inside `tx`."""

    @jax.jit
    def step(params, state, batch):
        parts = cut(batch)
        grads = mean_of([jax.grad(loss)(params, part) for part in parts], parts)
        for _ in parts[1:]:
            params = scale(params, 1 - rate)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step
