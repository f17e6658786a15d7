from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, compile_for, mse, mse_problem
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from accum_jax import accumulate


def _microbatches(batch, **options):
    """Every microbatch of ``batch``, stacked along a new leading axis."""
    return accumulate(lambda _, batch: batch, reduce="stack", **options)(None, batch)


# Rows


@pytest.mark.parametrize(("num_rows", "k"), [(8, 1), (8, 2), (6, 3), (5, 5)])
def test_microbatch_i_holds_rows_i_plus_multiples_of_k(run, num_rows, k):
    batch = jnp.arange(num_rows)
    actual = run(lambda batch: _microbatches(batch, k=k))(batch)
    assert_same(actual, jnp.stack([batch[i::k] for i in range(k)]))


def test_all_leaves_are_split_alike(run):
    """The same rows reach every leaf, whatever its rank or dtype."""
    row = np.arange(8)
    batch = {
        "x": jnp.asarray(row, jnp.int32),
        "nested": [jnp.asarray(np.stack([row, -row], axis=1), jnp.float32)],
        "deep": jnp.asarray(np.broadcast_to(row[:, None, None], (8, 2, 3)), jnp.bfloat16),
        "mask": jnp.asarray(row % 3 == 0),
    }
    actual = run(lambda batch: _microbatches(batch, k=4))(batch)
    assert_same(actual["x"], jnp.array([[0, 4], [1, 5], [2, 6], [3, 7]], jnp.int32))
    expected = jax.tree.map(lambda x: jnp.stack([x[i::4] for i in range(4)]), batch)
    assert_same(actual, expected)


def test_concat_restores_the_order_of_the_caller(run):
    batch = {"x": jnp.arange(12).reshape(6, 2), "y": jnp.arange(6.0)}
    for options in (dict(k=1), dict(k=2), dict(k=6), dict(k=4, remainder="tail")):
        accumulated = accumulate(lambda _, batch: batch, reduce="concat", **options)
        assert_same(run(accumulated)(None, batch), batch)


def test_concat_is_along_axis_zero_whatever_the_batch_axis(run):
    batch = jnp.arange(12.0).reshape(2, 6)
    accumulated = accumulate(
        lambda _, x: jnp.moveaxis(x, 1, 0) * 2, 3, batch_axes=1, reduce="concat"
    )
    assert_same(run(accumulated)(None, batch), batch.T * 2)


# Batch axes


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_one_axis_for_every_leaf(run, axis):
    rows = jnp.arange(36.0).reshape(6, 2, 3)  # Row first, moved where `axis` says.
    batch = {"x": jnp.moveaxis(rows, 0, axis)}
    actual = run(lambda batch: _microbatches(batch, k=3, batch_axes=axis))(batch)
    expected = jnp.stack([jnp.moveaxis(rows[i::3], 0, axis) for i in range(3)])
    assert_same(actual, {"x": expected})


def test_axes_are_a_prefix_of_the_argument(run):
    batch = {
        "image": jnp.arange(12.0).reshape(3, 4),
        "text": (jnp.arange(4), {"ids": jnp.arange(8).reshape(4, 2)}),
        "table": {"a": jnp.arange(4.0), "b": jnp.float32(3)},
    }
    axes = {"image": -1, "text": 0, "table": None}
    actual = run(lambda batch: _microbatches(batch, k=2, batch_axes=axes))(batch)
    text = jax.tree.map(lambda x: jnp.stack([x[0::2], x[1::2]]), batch["text"])
    expected = {
        "image": jnp.stack([batch["image"][:, 0::2], batch["image"][:, 1::2]]),
        "text": text,
        "table": jax.tree.map(lambda x: jnp.stack([x, x]), batch["table"]),
    }
    assert_same(actual, expected)


def test_none_in_a_prefix_of_leaves(run):
    batch = (jnp.arange(4.0), jnp.arange(4.0))
    actual = run(lambda batch: _microbatches(batch, k=2, batch_axes=(0, None)))(batch)
    assert_same(actual, (jnp.array([[0.0, 2.0], [1.0, 3.0]]), jnp.stack([batch[1]] * 2)))


def test_axes_are_a_prefix_of_the_tuple_of_arguments(run):
    x, y = jnp.arange(8.0).reshape(2, 4), {"a": jnp.arange(4), "b": jnp.arange(3)}

    def fn(x, scale, y):
        return x * scale, y

    for axes in [(1, {"a": 0, "b": None}), (-1, {"a": -1, "b": None})]:
        accumulated = accumulate(fn, 2, batch_argnums=(0, 2), batch_axes=axes, reduce="stack")
        actual = run(accumulated)(x, jnp.float32(2), y)
        expected = (
            jnp.stack([x[:, 0::2], x[:, 1::2]]) * 2,
            {"a": jnp.array([[0, 2], [1, 3]]), "b": jnp.stack([y["b"]] * 2)},
        )
        assert_same(actual, expected)


def test_one_axis_for_several_arguments(run):
    x, y = jnp.arange(4.0), jnp.arange(8.0).reshape(4, 2)
    accumulated = accumulate(
        lambda x, y: (x, y), 2, batch_argnums=(0, 1), batch_axes=0, reduce="concat"
    )
    assert_same(run(accumulated)(x, y), (x, y))


def test_none_leaves_of_the_batch(run):
    batch = {"x": jnp.arange(4.0), "mask": None, "extra": {}}

    def fn(_, batch):
        assert batch["mask"] is None
        assert batch["extra"] == {}
        return jnp.sum(batch["x"])

    for axes in (0, {"x": 0, "mask": 0, "extra": None}):
        actual = run(accumulate(fn, 2, batch_axes=axes, reduce="sum"))(None, batch)
        assert_same(actual, jnp.float32(6))


class Rows(NamedTuple):
    x: jax.Array | int
    y: jax.Array | int


def test_named_tuples(run):
    batch = Rows(jnp.arange(4.0), jnp.arange(8).reshape(2, 4))
    actual = run(lambda batch: _microbatches(batch, k=2, batch_axes=Rows(0, 1)))(batch)
    expected = Rows(
        jnp.array([[0.0, 2.0], [1.0, 3.0]]), jnp.stack([batch.y[:, 0::2], batch.y[:, 1::2]])
    )
    assert_same(actual, expected)


def test_key_leaves_in_the_batch_are_rows_like_others(run):
    """A key for every row is data, not the key of the microbatch."""
    keys = jax.random.split(jax.random.key(0), 4)
    actual = run(
        accumulate(lambda _, keys: jax.vmap(jax.random.uniform)(keys), 2, reduce="concat")
    )(None, keys)
    assert_same(actual, jax.vmap(jax.random.uniform)(keys))


# Stacked


def test_stacked_axes_are_those_of_a_microbatch(run):
    """`batch_axes` speaks of the leaf that the function sees, after the leading axis is gone."""
    batch = jnp.arange(24.0).reshape(2, 3, 4)
    for axis, size in ((0, 3), (1, 4), (-1, 4)):
        accumulated = accumulate(
            lambda _, x: jnp.sum(x), stacked=True, batch_axes=axis, reduce="mean", stats="counts"
        )
        value, stats = run(accumulated)(None, batch)
        assert_same(value, jnp.mean(jnp.sum(batch, axis=(1, 2))))
        assert stats.num_examples == 2 * size


# Sharded rows


def test_rows_stay_on_their_device():
    """Splitting a batch that is sharded over devices moves none of it."""
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, batch = mse_problem(16)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    compiled = compile_for(accumulate(jax.grad(mse), 2), params, batch)
    text = compiled.as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text
    # Devices add their parts of the sums in another order.
    expected = jax.grad(mse)(*mse_problem(16))
    actual = jax.tree.map(np.asarray, compiled(params, batch))
    assert_same(actual, jax.tree.map(np.asarray, expected), rtol=1e-5, atol=1e-6)
