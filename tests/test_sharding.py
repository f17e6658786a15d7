"""Data axes: one reduction after the loop, on meshes of 1, 2 and 8 devices."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import accum_jax
from accum_jax import collectives, dynamic_loss_scale, multi_steps, thread

ROWS = 64
PARAMS = {
    "w": jax.random.normal(jax.random.key(1), (3, 16)),
    "v": jax.random.normal(jax.random.key(2), (16, 8)),
}
BATCH = {
    "x": jax.random.normal(jax.random.key(0), (ROWS, 3)),
    "y": jnp.arange(ROWS, dtype=jnp.float32) / ROWS,
    "mask": (jnp.arange(ROWS) % 3 > 0).astype(jnp.float32),
}
NUM_BYTES = 4 * (3 * 16 + 16 * 8)


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
    errors = (hidden.sum(axis=-1) - batch["y"]) ** 2 * batch["mask"]
    return jnp.sum(errors) / jnp.maximum(jnp.sum(batch["mask"]), 1e-9)


def tokens(batch):
    return jnp.sum(batch["mask"])


def make_mesh(shape, names=("data",), types=None):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=types or (AxisType.Auto,) * len(names))


@pytest.fixture(scope="module")
def whole():
    return jax.value_and_grad(loss)(PARAMS, BATCH)


def assert_whole(actual, whole):
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, whole)
    # float32 sums of 64 rows in another order
    chex.assert_trees_all_close(actual, whole, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("options", [dict(k=4), dict(k=3, remainder="tail")], ids=["k", "tail"])
@pytest.mark.parametrize("in_place", [None, False])
def test_a_mesh_gives_the_whole_batch(devices, options, in_place, whole):
    step = accum_jax.value_and_grad(
        loss, weight=tokens, mesh=make_mesh((devices,)), in_place=in_place, **options
    )
    assert_whole(jax.jit(step)(PARAMS, BATCH), whole)


@pytest.mark.parametrize("data", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("model", [AxisType.Auto, AxisType.Explicit])
def test_axis_types(data, model, whole):
    types = (data, model)
    mesh = make_mesh((4, 2), ("data", "model"), types)
    batch = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
    step = accum_jax.accumulate(jax.value_and_grad(loss), 4, weight=tokens, mesh=mesh)
    assert_whole(jax.jit(step)(PARAMS, batch), whole)
    assert_whole(step(PARAMS, BATCH), whole)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("in_place", [None, False])
def test_axis_name_in_shard_map(check_vma, in_place, whole):
    step = accum_jax.value_and_grad(loss, k=2, weight=tokens, axis_name="data", in_place=in_place)
    mapped = jax.shard_map(
        step, mesh=make_mesh((4,)), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    assert_whole(jax.jit(mapped)(PARAMS, BATCH), whole)


def test_axis_name_in_vmap(whole):
    step = accum_jax.value_and_grad(loss, k=2, weight=tokens, axis_name="data")
    split = jax.tree.map(lambda x: x.reshape(4, ROWS // 4, *x.shape[1:]), BATCH)
    assert_whole(jax.vmap(step, (None, 0), out_axes=None, axis_name="data")(PARAMS, split), whole)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_one_reduction_after_the_loop(k):
    mesh = make_mesh((8,))
    batch = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
    step = accum_jax.value_and_grad(loss, k=k, mesh=mesh)
    found = collectives(jax.jit(step).lower(PARAMS, batch).compile())
    assert {c.kind for c in found} == {"all-reduce"}
    assert not any(c.inside_loop for c in found)
    assert {c.dtype for c in found} == {"float32"}
    assert sum(c.bytes for c in found) == NUM_BYTES + 4  # gradient and loss


def test_bfloat16_gradients_are_reduced_in_float32():
    mesh = make_mesh((8,))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    step = accum_jax.value_and_grad(loss, k=2, mesh=mesh)
    found = collectives(jax.jit(step).lower(params, BATCH).compile())
    reduced = [c for c in found if c.kind == "all-reduce"]
    assert {c.dtype for c in reduced} == {"float32"}
    assert sum(c.bytes for c in reduced) == NUM_BYTES + 4


def test_automatic_sharding_reduces_in_the_loop():
    """What the library is for, and that `collectives` sees it."""
    batch = jax.device_put(BATCH, NamedSharding(make_mesh((8,)), P("data")))
    params = jax.device_put(PARAMS, NamedSharding(make_mesh((8,)), P()))
    step = accum_jax.value_and_grad(loss, k=4, in_place=False)
    found = collectives(jax.jit(step).lower(params, batch).compile())
    inside = [c for c in found if c.inside_loop]
    assert inside
    assert {c.trip_count for c in inside} == {4}


SPECS = {
    "fsdp": (("data",), {"w": P(None, "data"), "v": P("data")}),
    "model axis": (("data",), {"w": P(None, "model"), "v": P("model")}),
    "both": (("data", "model"), {"w": P(None, ("data", "model")), "v": P("data", "model")}),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("knows_loss", [True, False])
def test_gradients_are_sharded_as_arguments(name, knows_loss, whole):
    data_axes, specs = SPECS[name]
    mesh = make_mesh((4, 2), ("data", "model"))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params = jax.device_put(PARAMS, shardings)
    keywords = dict(k=2, weight=tokens, mesh=mesh, data_axes=data_axes, arg_specs={0: specs})
    if knows_loss:
        step = accum_jax.value_and_grad(loss, **keywords)
    else:
        step = accum_jax.accumulate(jax.value_and_grad(loss), **keywords)
    value, grads = jax.jit(step)(params, BATCH)
    assert_whole((value, grads), whole)
    for leaf, sharding in zip(jax.tree.leaves(grads), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_fsdp_by_hand_gathers_once_and_scatters_once():
    mesh = make_mesh((8,))
    specs = {"w": P(None, "data"), "v": P("data")}
    params = jax.device_put(PARAMS, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))
    step = accum_jax.value_and_grad(loss, k=4, mesh=mesh, arg_specs={0: specs})
    found = collectives(jax.jit(step).lower(params, BATCH).compile())
    assert not any(c.inside_loop for c in found)
    gathered = sum(c.bytes for c in found if c.kind == "all-gather")
    assert gathered == NUM_BYTES


def test_specs_without_a_mesh_constrain_the_gradient(whole):
    mesh = make_mesh((4, 2), ("data", "model"))
    specs = {"w": NamedSharding(mesh, P(None, "model")), "v": NamedSharding(mesh, P("model"))}
    step = accum_jax.value_and_grad(loss, k=4, weight=tokens, arg_specs={0: specs})
    value, grads = jax.jit(step)(PARAMS, BATCH)
    assert_whole((value, grads), whole)
    assert grads["w"].sharding.is_equivalent_to(specs["w"], 2)


def test_norms_are_of_the_whole_gradient(whole):
    specs = {"w": P(None, "data"), "v": P("data")}
    for arg_specs in (None, {0: specs}):
        step = accum_jax.value_and_grad(
            loss, k=2, weight=tokens, mesh=make_mesh((4,)), stats="norms", arg_specs=arg_specs
        )
        _, stats = jax.jit(step)(PARAMS, BATCH)
        np.testing.assert_allclose(stats.global_norm, optax.tree.norm(whole[1]), rtol=1e-5)
        assert stats.num_microbatches == 8
        assert stats.num_examples == ROWS
        assert stats.total_weight == tokens(BATCH)


def test_fault_total_count_per_shard_and_unsynced_replicas():
    """Two shards of sum 6 over 2 tokens: 3.0, and equal on both."""
    step = accum_jax.grad(
        lambda w, x: jnp.sum(w * x),
        k=1,
        reduction="sum_over_weight",
        mesh=make_mesh((2,)),
        weight=lambda x: x.size,
    )
    grads = jax.jit(step)(jnp.float32(0), jnp.array([2.0, 4.0, 5.0, 1.0]))
    assert [float(shard.data) for shard in grads.addressable_shards] == [3.0, 3.0]


def test_fault_sequence_sharding():
    """One row of tokens 2, 4, 6, 8 on two devices: 5.0."""
    step = accum_jax.grad(
        lambda w, x: jnp.mean(w * x), k=1, weight=lambda x: x.size, axis_name=("data", "seq")
    )
    mapped = jax.shard_map(
        step,
        mesh=make_mesh((1, 2), ("data", "seq")),
        in_specs=(P(), P("data", "seq")),
        out_specs=P(),
    )
    assert jax.jit(mapped)(jnp.float32(0), jnp.array([[2.0, 4.0, 6.0, 8.0]])) == 5.0


@pytest.mark.parametrize("devices", [1, 2])
def test_fault_doubling(devices):
    step = accum_jax.grad(
        lambda w, x: jnp.sum(w * x), k=4, reduction="sum", mesh=make_mesh((devices,))
    )
    assert jax.jit(step)(jnp.float32(0), jnp.ones(4 * devices)) == 4.0 * devices


def test_weights_of_zero_on_some_devices(whole):
    order = jnp.argsort(-BATCH["mask"], stable=True)  # the last devices have padding alone
    batch = jax.tree.map(lambda x: x[order], BATCH)
    step = accum_jax.value_and_grad(loss, k=2, weight=tokens, mesh=make_mesh((8,)))
    assert_whole(jax.jit(step)(PARAMS, batch), whole)


def test_reducers_over_devices():
    def fn(w, x, state):
        mean = jnp.mean(x)
        return {"mean": mean, "max": jnp.max(x), "rows": w * x, "state": state + mean}

    reduce = {"mean": "mean", "max": "max", "rows": "concat", "state": thread(2)}
    step = accum_jax.accumulate(fn, 2, reduce=reduce, mesh=make_mesh((4,)))
    x = jnp.arange(16.0)
    out = jax.jit(step)(1.0, x, 0.0)
    assert out["mean"] == 7.5
    assert out["max"] == 15.0
    np.testing.assert_array_equal(out["rows"], x)
    assert out["state"] == 15.0  # the mean over devices of two microbatch means each


@pytest.mark.parametrize("reducer", ["last", "stack"])
def test_reducers_of_one_device_are_refused(reducer):
    step = accum_jax.accumulate(lambda w, x: x.mean(), 2, reduce=reducer, mesh=make_mesh((2,)))
    with pytest.raises(
        ValueError, match=rf'accumulate: "{reducer}" cannot reduce output .*2 devic'
    ):
        step(1.0, jnp.arange(8.0))


def test_keys_differ_between_devices_and_microbatches():
    def fn(w, x, key):
        return jnp.broadcast_to(jax.random.uniform(key), x.shape)

    step = accum_jax.accumulate(fn, 2, key_argnums=2, reduce="concat", mesh=make_mesh((2,)))
    key = jax.random.key(0)
    drawn = jax.jit(step)(1.0, jnp.arange(8.0), key)
    fold = jax.random.fold_in
    expected = [
        jax.random.uniform(fold(fold(key, i), device)) for device in range(2) for i in (0, 1, 0, 1)
    ]
    np.testing.assert_array_equal(drawn, jnp.array(expected))


def test_skip_renormalises_over_devices():
    x = jnp.array([1.0, jnp.nan, 4.0, 7.0])
    step = accum_jax.accumulate(
        lambda w, x: x.mean(), 2, nonfinite="skip", stats="counts", mesh=make_mesh((2,))
    )
    out, stats = jax.jit(step)(1.0, x)
    assert out == 4.0
    assert (int(stats.num_nonfinite), float(stats.total_weight)) == (1, 3.0)


def test_repeated_embedding_rows_are_exact():
    ids = jnp.array([0, 1, 0, 2, 0, 1, 3, 0] * 8)
    table = jnp.zeros((4, 2))
    step = accum_jax.grad(lambda t, i: jnp.sum(t[i]), k=4, reduction="sum", mesh=make_mesh((8,)))
    expected = jnp.repeat(jnp.bincount(ids, length=4).astype(jnp.float32)[:, None], 2, 1)
    np.testing.assert_array_equal(jax.jit(step)(table, ids), expected)


def test_replicas_stay_equal_under_loss_scaling():
    mesh = make_mesh((8,))
    tx = multi_steps(dynamic_loss_scale(optax.adam(1e-2)), k=2)

    @jax.jit
    def step(params, state, batch):
        grads = accum_jax.grad(
            loss,
            k=2,
            mesh=mesh,
            weight=tokens,
            loss_scale=accum_jax.loss_scale(state),
            output_dtype="accumulator",
        )(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(10):
        params, state = step(params, state, BATCH)
    assert state.gradient_step == 5
    for leaf in jax.tree.leaves(params):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(np.array_equal(shards[0], shard) for shard in shards)


def test_accumulated_loss_over_devices(whole):
    total = accum_jax.accumulated_loss(loss, 2, weight=tokens, mesh=make_mesh((4,)))
    assert_whole(jax.jit(jax.value_and_grad(total))(PARAMS, BATCH), whole)
    np.testing.assert_allclose(total(PARAMS, BATCH), whole[0], rtol=2e-5)


MESH = functools.partial(make_mesh, (4, 2), ("data", "model"))


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        (dict(axis_name="data", mesh=True), TypeError, "grad: give mesh .* or axis_name"),
        (dict(mesh=True, data_axes="rows"), ValueError, "data_axes names axis 'rows', which the"),
        (
            dict(mesh=True, arg_specs={0: P("rows")}),
            ValueError,
            r"arg_specs\[0\] names axis 'rows', which the mesh lacks; its axes are 'data', 'model'",
        ),
        (dict(mesh="data"), TypeError, "mesh must be a jax.sharding.Mesh, got 'data'"),
        (dict(mesh=True, arg_specs={1: P()}), TypeError, "arg_specs names argument 1, which is in"),
        (dict(mesh=True, arg_specs=P()), TypeError, "arg_specs must be a dict"),
        (dict(mesh=True, data_axes=()), ValueError, "data_axes is empty"),
    ],
)
def test_wrong_static_arguments(keywords, error, message):
    if keywords.get("mesh") is True:
        keywords = keywords | {"mesh": MESH()}
    with pytest.raises(error, match=message):
        accum_jax.grad(loss, k=2, **keywords)


def test_wrong_shapes():
    step = accum_jax.grad(lambda w, x: jnp.mean(w * x), k=2, mesh=MESH())
    with pytest.raises(ValueError, match=r"batch of 6 rows \(axis 0 of x\) does not divide over 4"):
        step(1.0, jnp.arange(6.0))
    with pytest.raises(ValueError, match=r"k=2 .* batch of 1 \(axis 0 of x, on each of 4 devices"):
        step(1.0, jnp.arange(4.0))


def test_collectives_refuses_what_is_not_compiled():
    with pytest.raises(TypeError, match="collectives: expected a compiled program"):
        collectives(lambda x: x)
