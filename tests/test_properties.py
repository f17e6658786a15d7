"""Accumulated equals whole batch, over drawn trees, shapes, sizes, weights and dtypes.

Values are small integers, so every sum is exact whatever its order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from accum_jax import accumulate, thread

_SETTINGS = settings(max_examples=25, deadline=None, derandomize=True, database=None)

_SHAPES = st.lists(st.integers(0, 3), max_size=2).map(tuple)
_FLOATS = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])


def _trees(leaf):
    return st.recursive(
        leaf,
        lambda tree: st.one_of(
            st.lists(tree, max_size=2),
            st.lists(tree, max_size=2).map(tuple),
            st.dictionaries(st.sampled_from("abc"), tree, max_size=2),
        ),
        max_leaves=4,
    )


@st.composite
def _sizes(draw):
    """Rows of a batch and how it is split: always a plan that runs."""
    num_rows = draw(st.integers(1, 12))
    if draw(st.booleans()):
        return num_rows, dict(k=draw(st.integers(1, num_rows)), remainder="tail")
    return num_rows, dict(microbatch_size=draw(st.integers(1, num_rows)), remainder="tail")


def _integers(seed, shape, low=-4, high=5):
    return np.random.default_rng(seed).integers(low, high, shape)


@st.composite
def _params(draw):
    """A tree of (shape, dtype) pairs, filled with integers."""
    leaf = st.one_of(st.none(), st.tuples(_SHAPES, _FLOATS).map(lambda x: np.zeros(x[0], x[1])))
    tree = draw(_trees(leaf))
    return jax.tree.map(jnp.asarray, tree)


def _rows_like(params, num_rows, seed):
    """A batch in which every row is a tree like ``params``."""
    return jax.tree.map(
        lambda p: jnp.asarray(_integers(seed, (num_rows, *p.shape)), p.dtype), params
    )


def _sum_loss(params, batch):
    """Σ over rows of <params, row>: the gradient is the sum of the rows."""
    total = jnp.sum(batch["weight"]) * 0
    for p, x in zip(jax.tree.leaves(params), jax.tree.leaves(batch["rows"]), strict=True):
        weight = batch["weight"].reshape(-1, *[1] * p.ndim)
        total += jnp.sum((p * x).astype(jnp.float32) * weight)
    return total


@_SETTINGS
@given(params=_params(), sizes=_sizes(), seed=st.integers(0, 99), masked=st.booleans())
def test_sums_and_means(params, sizes, seed, masked):
    num_rows, size = sizes
    weight = _integers(seed + 1, num_rows, 0, 3) if masked else np.ones(num_rows)
    batch = {
        "rows": _rows_like(params, num_rows, seed),
        "weight": jnp.asarray(weight, jnp.float32),
    }

    def fn(params, batch):
        grads = jax.grad(_sum_loss)(params, batch)
        tokens = jnp.sum(batch["weight"])
        return grads, grads, tokens / jnp.maximum(tokens, 1)

    reduce = ("sum", "sum_over_weight", "mean")
    accumulated = accumulate(fn, reduce=reduce, weight=lambda b: jnp.sum(b["weight"]), **size)
    sums, means, ones = accumulated(params, batch)

    total = weight.sum()

    def exact(divisor):
        def leaf(p, rows):
            x = np.asarray(rows, np.float64) * weight.reshape(-1, *[1] * p.ndim)
            return jnp.asarray(np.float32(x.sum(0) / divisor), p.dtype)

        return jax.tree.map(leaf, params, batch["rows"])

    assert_same(sums, exact(1))
    # One division and one rounding to the leaf's dtype; 1/n may be formed first.
    assert_same(means, exact(max(total, 1)), rtol=1e-2 if _is_narrow(params) else 3e-7)
    np.testing.assert_allclose(ones, float(total > 0), rtol=1e-6)


def _is_narrow(params):
    return any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(params))


@_SETTINGS
@given(params=_params(), log_k=st.integers(0, 3), log_m=st.integers(0, 2), seed=st.integers(0, 99))
def test_means_of_powers_of_two_are_exact(params, log_k, log_m, seed):
    k, m = 2**log_k, 2**log_m
    batch = {"rows": _rows_like(params, k * m, seed), "weight": jnp.ones(k * m)}

    def loss(params, batch):
        return _sum_loss(params, batch) / batch["weight"].size

    grad_fn = jax.value_and_grad(loss)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), (params, batch))
    expected = grad_fn(*wide)
    actual = accumulate(grad_fn, k)(params, batch)
    # Microbatch means of integers below 5 with a denominator of at most 4 fit in bfloat16.
    rounded = jax.tree.map(lambda x, p: x.astype(p.dtype), expected[1], params)
    assert_same(actual, (expected[0], rounded))
    shapes = jax.eval_shape(grad_fn, params, batch)
    assert jax.eval_shape(accumulate(grad_fn, k), params, batch) == shapes


@st.composite
def _batches(draw, num_rows):
    """A tree of arrays with the batch anywhere, and the axes that say where."""
    leaves = st.tuples(_SHAPES, st.integers(-3, 2), st.sampled_from([np.float32, np.int32]))
    tree = draw(st.dictionaries(st.sampled_from("abc"), leaves, min_size=1, max_size=3))
    batch, axes = {}, {}
    for seed, (name, (shape, axis, dtype)) in enumerate(tree.items()):
        rank = len(shape) + 1
        axis = axis % rank - (rank if axis < 0 else 0)
        rows = _integers(seed, (num_rows, *shape)).astype(dtype)
        batch[name] = jnp.moveaxis(jnp.asarray(rows), 0, axis)
        axes[name] = axis
    if draw(st.booleans()):
        batch["whole"], axes["whole"] = (jnp.arange(3), None), None
    return batch, axes


@settings(_SETTINGS, max_examples=12)  # Every example is a program of many outputs.
@given(data=st.data(), sizes=_sizes())
def test_rows_of_every_layout(data, sizes):
    num_rows, size = sizes
    batch, axes = data.draw(_batches(num_rows))

    def fn(_, batch):
        split = {name: x for name, x in batch.items() if name != "whole"}
        rows = {name: jnp.moveaxis(x, axes[name], 0) for name, x in split.items()}
        first = jax.tree.map(lambda x: x[:1], rows)
        count = jnp.int32(len(jax.tree.leaves(rows)[0]))
        return {"rows": rows, "sum": jax.tree.map(lambda x: x.sum(0), rows)}, (first, count)

    reduce = ({"rows": "concat", "sum": "sum"}, ("last", "sum"))
    actual, (last, count) = accumulate(fn, batch_axes=axes, reduce=reduce, **size)(None, batch)
    expected, _ = fn(None, batch)
    assert_same(actual, expected)
    assert count == num_rows
    assert jax.tree.structure(last) == jax.tree.structure(expected["rows"])


@_SETTINGS
@given(
    values=st.lists(st.sampled_from([-3.0, 0.0, 1.0, 4.0, np.inf, np.nan]), min_size=1, max_size=6),
    data=st.data(),
    skip=st.booleans(),
)
def test_what_counts(values, data, skip):
    """Weights, skips and real counts against a loop over Python numbers."""
    k = len(values)
    weights = data.draw(st.lists(st.integers(0, 3), min_size=k, max_size=k))
    real = data.draw(st.integers(0, k))

    def fn(_, batch, state):
        x = batch["x"][0]
        return {"mean": x, "sum": x, "max": x, "min": x, "last": x, "state": state + 1}

    reduce = {name: name for name in ("mean", "sum", "max", "min", "last")} | {"state": thread(2)}

    @jax.jit
    def accumulated(batch, real):
        return accumulate(
            fn,
            stacked=True,
            reduce=reduce,
            weight=lambda batch: batch["w"][0],
            nonfinite="skip" if skip else "propagate",
            num_real_microbatches=real,
            stats="counts",
        )(None, batch, jnp.int32(0))

    batch = {"x": jnp.array(values)[:, None], "w": jnp.array(weights, jnp.float32)[:, None]}
    actual, stats = accumulated(batch, real)

    ran = list(zip(values, weights, strict=True))[:real]
    kept = [(x, w) for x, w in ran if np.isfinite(x) or not skip]
    counted = [(x, w) for x, w in kept if w > 0] or [(0.0, 1)]
    xs = np.array([x for x, _ in counted])
    with np.errstate(invalid="ignore"):
        expected = {
            "mean": sum(w * x for x, w in counted) / sum(w for _, w in counted),
            "sum": sum(xs),
            "max": xs.max(),
            "min": xs.min(),
            "last": xs[-1],
            "state": len(kept),
        }
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, err_msg=name)
    assert stats.num_microbatches == real
    assert stats.total_weight == sum(w for _, w in kept)
