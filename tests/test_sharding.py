"""Windows spread over devices: the values of one device, by one reduction."""

from __future__ import annotations

import functools
import itertools
import re
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compilations, compile_for, cost, raising, temp_bytes
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layers import assert_close, label, layered, layered_problem, masked

import accum_jax
from accum_jax import (
    accumulate,
    collectives,
    dynamic_loss_scale,
    has_updated,
    loss_scale,
    multi_steps,
    thread,
    value_and_grad,
)
from accum_jax._targets import find_target
from benchmarks.models import plain_transformer

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SLOW = pytest.mark.slow
WHOLE = P()
# Sums over devices and microbatches round in another order than those of the whole batch.
ROUNDING = 2e-6


def make_mesh(types: Any = AUTO, devices: Any = None, **axes: int) -> Mesh:
    """A mesh of the named axes, on the first devices of the backend or of `devices`."""
    types = types if isinstance(types, tuple) else (types,) * len(axes)
    size = int(np.prod(list(axes.values())))
    devices = np.array((devices or jax.devices())[:size]).reshape(*axes.values())
    return Mesh(devices, tuple(axes), axis_types=types)


def place(tree: Any, mesh: Any, specs: Any) -> Any:
    """Arrays put, or `jax.ShapeDtypeStruct`s described, by a prefix of specs."""

    def leaf(x, spec):
        sharding = NamedSharding(mesh, spec)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.device_put(x, sharding)

    def subtree(spec, tree):
        return jax.tree.map(lambda x: leaf(x, spec), tree)

    return jax.tree.map(subtree, specs, tree, is_leaf=lambda x: isinstance(x, P))


def shapes(tree: Any) -> Any:
    return jax.eval_shape(lambda: tree)


def mapped(
    fn: Any, size: int, *in_specs: Any, out_specs: Any = WHOLE, check_vma: bool = True
) -> Any:
    """`fn` under `jax.shard_map` over an axis "data" of `size` devices."""
    mesh = make_mesh(data=size)
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def kept(batch: Any) -> jax.Array:
    return jnp.sum(batch["mask"])


@functools.cache
def masked_problem() -> Any:
    """Parameters, a batch of 32 uneven rows, and the whole batch's loss and gradient."""
    params, batch = layered_problem(32)
    return params, batch, jax.jit(jax.value_and_grad(masked))(params, batch)


# One reduction


def perceptron(params, batch):
    h = jnp.tanh(batch["x"] @ params["w1"])
    return jnp.mean(jnp.square((h @ params["w2"]).astype(jnp.float32) - batch["y"]))


def perceptron_problem(num_rows, dtype=np.float32, width=16):
    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(size=(width, width)), "w2": rng.normal(size=(width,))}
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    return params, {"x": jnp.ones((num_rows, width), dtype), "y": jnp.ones(num_rows)}


@functools.cache
def attentive(dtype: Any = np.float32) -> Any:
    """A transformer: attention, an embedding, scanned layers that compute in `dtype`."""
    return plain_transformer(
        layers=2, width=8, heads=2, length=6, microbatch_size=1, dtype=jnp.dtype(dtype)
    )


def attention(params, batch):
    return attentive().loss_fn(params, batch)


def narrow_attention(params, batch):
    return attentive("bfloat16").loss_fn(params, batch)


def attention_problem(num_rows, dtype=np.float32):
    rng = np.random.default_rng(0)
    params, _ = attentive().shapes(1)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 3, dtype), params)
    return params, jax.tree.map(jnp.asarray, attentive().batch(num_rows))


PROBLEMS = {
    perceptron: perceptron_problem,
    layered: layered_problem,
    attention: attention_problem,
    narrow_attention: attention_problem,
}


def check_one_reduction(program: Any, params: Any) -> None:
    """P float32 bytes and the loss, by all-reduces outside every loop; nothing else."""
    size = sum(4 * x.size for x in jax.tree.leaves(params))
    found = collectives(program)
    assert {(c.kind, c.dtype, c.inside_loop) for c in found} == {("all-reduce", "float32", False)}
    assert sum(c.bytes for c in found) == size + 4


def compile_on(mesh: Mesh, fn: Any, params: Any, batch: Any, specs: Any = WHOLE) -> Any:
    args = place(shapes(params), mesh, specs), place(shapes(batch), mesh, P(mesh.axis_names))
    return compile_for(fn, *args)


@functools.cache
def whole_batch(loss: Any) -> Any:
    return jax.jit(jax.value_and_grad(loss))(*PROBLEMS[loss](64))


@pytest.mark.parametrize(
    ("loss", "k"),
    [
        *itertools.product((perceptron, layered), (1, 8)),
        *((perceptron, 2), (attention, 8)),
        *(pytest.param(*row, marks=SLOW) for row in ((layered, 2), (attention, 1), (attention, 2))),
    ],
    ids=label,
)
def test_one_float32_reduction_outside_every_loop(loss, k):
    params, batch = PROBLEMS[loss](64)
    mesh = make_mesh(data=8)
    program = compile_on(mesh, value_and_grad(loss, k=k, mesh=mesh), params, batch)
    check_one_reduction(program, params)
    got = program(place(params, mesh, WHOLE), place(batch, mesh, P("data")))
    assert_close(got, whole_batch(loss), ROUNDING)


@pytest.mark.parametrize(
    ("loss", "k", "dtype", "in_place"),
    [
        (layered, 8, "float32", False),
        (layered, 8, "bfloat16", False),
        (layered, 2, "bfloat16", True),
        (perceptron, 8, "bfloat16", True),
        pytest.param(narrow_attention, 8, "float32", True, marks=SLOW),
    ],
    ids=label,
)
def test_one_float32_reduction_of_narrow_and_finished_gradients(loss, k, dtype, in_place):
    params, batch = PROBLEMS[loss](64, dtype=jnp.dtype(dtype))
    mesh = make_mesh(data=8)
    fn = (
        value_and_grad(loss, k=k, mesh=mesh)
        if in_place
        else accumulate(jax.value_and_grad(loss), k, mesh=mesh)
    )
    check_one_reduction(compile_on(mesh, fn, params, batch), params)


@pytest.mark.parametrize(
    "loss",
    [
        *(perceptron, layered),
        *(pytest.param(loss, marks=SLOW) for loss in (attention, narrow_attention)),
    ],
    ids=label,
)
def test_one_reduction_on_machines_that_are_not_here(loss, eight):
    mesh = make_mesh(devices=eight, data=8)
    dtypes = ("float32",) if loss is narrow_attention else ("float32", "bfloat16")
    for k, dtype in itertools.product((1, 2, 8), dtypes):
        params, batch = PROBLEMS[loss](64, dtype=jnp.dtype(dtype))
        program = compile_on(mesh, value_and_grad(loss, k=k, mesh=mesh), params, batch)
        check_one_reduction(program, params)


@pytest.fixture(scope="module", params=["v5e:2x4", "h100:8"])
def eight(request):
    """Eight devices to compile for, where their compiler is installed."""
    try:
        return find_target("tests", request.param).devices
    except ImportError as error:
        pytest.skip(str(error))


def test_one_reduction_of_a_loss_that_others_differentiate():
    params, batch = layered_problem(32)
    mesh = make_mesh(data=8)
    fn = jax.value_and_grad(accum_jax.accumulated_loss(layered, 4, mesh=mesh))
    check_one_reduction(compile_on(mesh, fn, params, batch), params)


def test_bfloat16_gradients_are_added_over_devices_in_float32():
    # 1/256 is lost beside 1 in bfloat16 (8 bits), whichever way eight of them are added.
    rows = jnp.array([1.0] + 7 * [2.0**-8], jnp.bfloat16)
    fn = accumulate(
        jax.grad(lambda w, x: jnp.mean(w * x)),
        1,
        mesh=make_mesh(data=8),
        reduce="sum",
        output_dtype="accumulator",
    )
    total = jax.jit(fn)(jnp.bfloat16(1), rows)
    assert total.dtype == jnp.float32
    assert float(total) == 1 + 7 * 2.0**-8


def test_flops_of_a_device_are_its_share():
    params, batch = perceptron_problem(4096, width=32)
    whole = cost(compile_for(jax.value_and_grad(perceptron), params, batch), "flops")
    mesh = make_mesh(data=8)
    for k in (1, 8):
        fn = value_and_grad(perceptron, k=k, mesh=mesh)
        once = cost(compile_on(mesh, fn, params, batch), "flops")  # a loop's body counts once
        assert k * once == pytest.approx(whole / 8, rel=0.02)


# Values


@pytest.mark.parametrize(
    ("size", "in_place"),
    [
        (1, None),
        (2, False),
        (4, None),
        (8, False),
        *(pytest.param(*row, marks=SLOW) for row in ((1, False), (2, None), (4, False), (8, None))),
    ],
)
def test_every_mesh_agrees_with_the_whole_batch(size, in_place):
    loss, problem = (masked, masked_problem) if size == 8 else (two_layers, two_layers_problem)
    params, batch, expected = problem()
    fn = value_and_grad(loss, k=2, weight=kept, mesh=make_mesh(data=size), in_place=in_place)
    assert_close(jax.jit(fn)(params, batch), expected, ROUNDING)


@pytest.mark.parametrize("in_place", [None, False])
def test_one_device_of_the_data_axis_beside_sharded_parameters(in_place):
    """XLA cannot reduce over one device what another axis shards: nothing is to be reduced."""
    params, batch = PROBLEMS[perceptron](64)
    mesh = make_mesh(replica=1, fsdp=4)
    specs = {"w1": P(None, "fsdp"), "w2": P("fsdp")}
    step = value_and_grad(
        perceptron,
        k=2,
        in_place=in_place,
        weight=lambda batch: jnp.sum(batch["y"]),
        stats="counts",
        mesh=mesh,
        data_axes="replica",
        arg_specs={0: specs},
    )
    out, stats = jax.jit(step)(place(params, mesh, specs), batch)
    assert_close(out, whole_batch(perceptron), ROUNDING)
    assert jax.tree.map(lambda x: x.sharding.spec, out[1]) == specs
    assert (int(stats.num_examples), float(stats.total_weight)) == (64, 64.0)


def test_eagerly():
    params, batch, expected = two_layers_problem()
    fn = value_and_grad(two_layers, k=2, weight=kept, mesh=make_mesh(data=4))
    with compilations() as before:
        assert_close(fn(params, batch), expected, ROUNDING)
    with compilations() as after:
        fn(params, batch)
    assert before and not after


OPTIONS = {
    "k": {"k": 2},
    "tail": {"k": 3, "remainder": "tail"},
    "microbatch_size": {"microbatch_size": 4},
    "skip": {"k": 2, "nonfinite": "skip"},
    "real": {"k": 4, "num_real_microbatches": 4},
    "counts": {"k": 2, "stats": "counts"},
}


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [
        *((name, True) for name in OPTIONS),
        *(("k", False), ("skip", False)),
        *(pytest.param(n, False, marks=SLOW) for n in OPTIONS if n not in ("k", "skip")),
    ],
)
def test_inside_shard_map(name, check_vma):
    params, batch, expected = two_layers_problem()
    options = OPTIONS[name]
    fn = value_and_grad(two_layers, weight=kept, axis_name="data", **options)
    got = jax.jit(mapped(fn, 4, P(), P("data"), check_vma=check_vma))(params, batch)
    if "stats" in options:
        got, stats = got
        assert int(stats.total_weight) == int(batch["mask"].sum())
        assert (int(stats.num_microbatches), int(stats.num_examples)) == (8, 32)
    assert_close(got, expected, ROUNDING)


@pytest.mark.parametrize("check_vma", [True, False])
def test_accumulate_and_parameters_that_vary_already(check_vma):
    params, batch, expected = masked_problem()

    def fn(params, batch):
        if check_vma:
            params = lax.pcast(params, "data", to="varying")
        run = accumulate(jax.value_and_grad(masked), 2, weight=kept, axis_name="data")
        return run(params, batch)

    got = jax.jit(mapped(fn, 4, P(), P("data"), check_vma=check_vma))(params, batch)
    assert_close(got, expected, ROUNDING)


def by_device(batch, size):
    return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), batch)


def test_inside_vmap():
    params, batch, expected = two_layers_problem()
    fn = value_and_grad(two_layers, k=2, weight=kept, axis_name="data")
    each = jax.vmap(fn, (None, 0), axis_name="data")
    got = jax.jit(each)(params, by_device(batch, 4))
    for device in range(4):
        assert_close(jax.tree.map(lambda x, i=device: x[i], got), expected, ROUNDING)


def test_inside_pmap():
    params, batch, expected = two_layers_problem()
    fn = value_and_grad(two_layers, k=2, weight=kept, axis_name="data")
    got = jax.pmap(fn, "data", in_axes=(None, 0))(params, by_device(batch, 4))
    assert_close(jax.tree.map(lambda x: x[0], got), expected, ROUNDING)
    assert_close(jax.tree.map(lambda x: x[3], got), expected, ROUNDING)


def test_several_data_axes():
    params, batch, expected = two_layers_problem()
    mesh = make_mesh(replica=2, data=4)
    axes = ("replica", "data")
    fn = value_and_grad(two_layers, k=2, weight=kept, mesh=mesh, data_axes=axes)
    assert_close(jax.jit(fn)(params, batch), expected, ROUNDING)
    inner = value_and_grad(two_layers, k=2, weight=kept, axis_name=axes)
    fn = jax.shard_map(inner, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P())
    assert_close(jax.jit(fn)(params, batch), expected, ROUNDING)


@pytest.mark.parametrize("in_place", [None, False])
def test_devices_of_weight_zero_add_nothing_even_where_their_values_are_nan(in_place):
    def loss(w, b):
        return jnp.sum(w * b["x"] * b["m"]) / jnp.sum(b["m"])

    batch = {"x": jnp.arange(16.0), "m": jnp.where(jnp.arange(16) < 4, jnp.arange(16), 0)}
    batch = {**batch, "m": batch["m"].astype(jnp.float32)}  # devices 2 to 7 divide 0 by 0
    fn = value_and_grad(
        loss, k=2, weight=lambda b: b["m"].sum(), mesh=make_mesh(data=8), in_place=in_place
    )
    value, grad = jax.jit(fn)(jnp.float32(2), batch)
    np.testing.assert_allclose((value, grad), (28 / 6, 14 / 6), rtol=ROUNDING)
    empty = {**batch, "m": jnp.zeros(16)}
    assert jax.tree.map(float, jax.jit(fn)(jnp.float32(2), empty)) == (0.0, 0.0)


def test_leaves_of_other_rank_and_without_a_batch():
    def fn(w, batch, offset):
        rows = batch["x"].sum(0) * batch["scalar"] + batch["table"].sum() + batch["y"]
        return jnp.mean(w * rows + offset)

    batch = {
        "x": jnp.arange(48.0).reshape(3, 16),  # rows on axis 1
        "y": jnp.arange(16.0),
        "scalar": jnp.float32(2),
        "table": jnp.ones((16, 2)),  # as many entries as rows, but not rows
    }
    axes = {"x": -1, "y": 0, "scalar": None, "table": None}
    mesh = make_mesh(data=4)
    expected = jax.grad(fn)(jnp.float32(1), batch, jnp.float32(3))
    for placed in (batch, {**batch, "y": jax.device_put(batch["y"], NamedSharding(mesh, P()))}):
        got = accumulate(jax.grad(fn), 2, batch_axes=(axes), mesh=mesh)(
            jnp.float32(1), placed, jnp.float32(3)
        )
        assert_close(got, expected, ROUNDING)


def test_stacked_microbatches():
    params, batch, expected = two_layers_problem()
    stacked = jax.tree.map(lambda x: x.reshape(4, 8, *x.shape[1:]), batch)
    fn = value_and_grad(two_layers, weight=kept, stacked=True, mesh=make_mesh(data=4))
    assert_close(jax.jit(fn)(params, stacked), expected, ROUNDING)


def test_repeated_ids_of_an_embedding_are_added_exactly():
    # Integers: any duplicate that is dropped or counted twice shows.
    ids = jnp.array([0, 1, 1, 1, 2, 0, 0, 1] * 4)
    rows = {"id": ids, "x": jnp.arange(32.0)}

    def loss(table, batch):
        return jnp.sum(table[batch["id"], 0] * batch["x"])

    table = jnp.ones((4, 2))
    expected = jax.grad(loss)(table, rows)
    for in_place in (None, False):
        fn = accum_jax.grad(loss, k=4, reduction="sum", mesh=make_mesh(data=4), in_place=in_place)
        chex.assert_trees_all_equal(jax.jit(fn)(table, rows), expected)


@pytest.mark.parametrize("reduction", ["sum", "sum_over_weight"])
def test_other_reductions(reduction):
    def loss(w, b):
        return jnp.sum(w * b["x"] * b["m"])

    batch = {"x": jnp.arange(16.0), "m": (jnp.arange(16) % 3 > 0).astype(jnp.float32)}
    expected = jax.value_and_grad(loss)(jnp.float32(2), batch)
    weight = lambda b: b["m"].sum()  # noqa: E731
    if reduction == "sum_over_weight":
        expected = jax.tree.map(lambda x: x / batch["m"].sum(), expected)
    fn = value_and_grad(loss, k=2, reduction=reduction, weight=weight, mesh=make_mesh(data=4))
    chex.assert_trees_all_equal(jax.jit(fn)(jnp.float32(2), batch), expected)


def test_only_so_many_microbatches_of_each_device_are_real():
    fn = lambda w, x, real: value_and_grad(  # noqa: E731
        lambda w, x: jnp.mean(w * x),
        k=4,
        mesh=make_mesh(data=2),
        num_real_microbatches=real,
        stats="counts",
    )(w, x)
    fn = jax.jit(fn)
    rows = jnp.arange(16.0)
    for real in (0, 1, 3):
        ran = [x for device in by_device(rows, 2) for i in range(real) for x in device[i::4]]
        (value, grad), stats = fn(jnp.float32(1), rows, real)
        assert float(grad) == float(value) == (np.mean(ran) if ran else 0)
        assert (int(stats.num_microbatches), int(stats.num_examples)) == (2 * real, len(ran))
    assert fn._cache_size() == 1


def test_other_values_of_the_window_are_global():
    params, batch = layered_problem(32)
    one = jax.jit(value_and_grad(layered, k=8, stats="norms"))(params, batch)
    # Microbatch i of 8 is then row set i, i + 8, ...: give four devices the same ones.
    order = jnp.arange(32).reshape(4, 8).T.reshape(4, 2, 4).transpose(0, 2, 1).reshape(-1)
    batch = jax.tree.map(lambda x: x[order], batch)
    mesh = make_mesh(data=4)
    specs = {"layers": P(None, "data"), "out": P("data")}
    for fn in (
        value_and_grad(layered, k=2, stats="norms", mesh=mesh, arg_specs={0: specs}),
        accumulate(jax.value_and_grad(layered), 2, stats="norms", mesh=mesh),
    ):
        got = jax.jit(fn)(params, batch)
        chex.assert_trees_all_close(got, one, rtol=1e-4, atol=1e-6)


# Keys


@pytest.mark.parametrize("form", ["mesh", "axis_name"])
def test_every_microbatch_of_every_device_has_its_own_key(form):
    def draw(w, batch, keys):
        return jnp.broadcast_to(jax.random.bits(keys["a"]), batch.shape), w

    key, k, size = jax.random.key(7), 2, 4
    options = {"k": k, "key_argnums": 2, "reduce": ("concat", "mean")}
    args = jnp.float32(1), jnp.zeros(16), {"a": key}
    if form == "mesh":
        mesh = make_mesh(replica=2, data=2)
        fn = accumulate(draw, mesh=mesh, data_axes=("replica", "data"), **options)
    else:
        out_specs = (P("data"), P())
        fn = accumulate(draw, axis_name="data", **options)
        fn = mapped(fn, size, P(), P("data"), P(), out_specs=out_specs)
    bits, _ = jax.jit(fn)(*args)
    fold = jax.random.fold_in
    expected = [
        jax.random.bits(fold(fold(key, row % k), device))
        for device in range(size)
        for row in range(4)
    ]
    assert bits.tolist() == [int(x) for x in expected]
    assert len(set(bits.tolist())) == k * size


# Reducers


def test_reducers_over_devices():
    def fn(w, batch):
        x = batch["x"]
        out = {"mean": x.mean(), "sum": x.sum(), "max": x.max(), "min": x.min()}
        return {**out, "any": (x > 30).any(), "count": jnp.int32(x.size), "rows": w * x}

    reducers = {"mean": "mean", "sum": "sum", "max": "max", "min": "min"}
    reducers |= {"any": "max", "count": "sum", "rows": "concat"}
    x = jnp.roll(jnp.arange(32.0), 5)
    mesh = make_mesh(data=4)
    got = jax.jit(accumulate(fn, 2, reduce=reducers, mesh=mesh))(jnp.float32(2), {"x": x})
    expected = fn(jnp.float32(2), {"x": x})
    chex.assert_trees_all_equal(got, expected)
    assert got["rows"].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)
    assert got["mean"].sharding.is_fully_replicated


@pytest.mark.parametrize("row", [0, 15])  # of the first device, and of the last
def test_an_extreme_of_one_nan_is_nan_as_on_one_device(row):
    fn = accumulate(
        lambda w, x: (x.max(), x.min()), 2, reduce=("max", "min"), mesh=make_mesh(data=4)
    )
    got = jax.jit(fn)(jnp.float32(1), jnp.arange(16.0).at[row].set(jnp.nan))
    assert np.isnan(got).all()


def test_concatenated_rows_of_a_ragged_batch_keep_their_order():
    fn = accumulate(
        lambda w, x: w * x, 3, remainder="tail", reduce="concat", mesh=make_mesh(data=2)
    )
    rows = jnp.arange(16.0)  # 8 a device: 3, 3 and 2
    chex.assert_trees_all_equal(jax.jit(fn)(jnp.float32(2), rows), 2 * rows)


def test_threaded_state_is_averaged_by_weight():
    def fn(w, x, state):
        state = {"mean": 0.5 * state["mean"] + 0.5 * x.mean(), "count": state["count"] + 1}
        return w * x.sum(), state

    x = jnp.array([2.0, 2.0, 8.0, 8.0])
    state = {"mean": jnp.float32(0), "count": jnp.int32(5)}
    for weight, expected in ((lambda x: x.sum(), (1.5 * 4 + 6 * 16) / 20), (None, 3.75)):
        run = accumulate(fn, 2, reduce=("sum", thread(2)), weight=weight, mesh=make_mesh(data=2))
        _, got = jax.jit(run)(jnp.float32(1), x, state)
        assert float(got["mean"]) == pytest.approx(expected, rel=ROUNDING)
        assert (int(got["count"]), got["count"].dtype) == (7, jnp.int32)


def test_threaded_keys_and_states_of_devices_without_weight():
    def fn(w, x, state):
        return w * x.sum(), {**state, "mean": state["mean"] + x.mean()}

    state = {"key": jax.random.key(3), "mean": jnp.float32(1)}
    run = accumulate(
        fn, 1, reduce=("sum", thread(2)), weight=lambda x: x.sum() * 0, mesh=make_mesh(data=2)
    )
    _, got = jax.jit(run)(jnp.float32(1), jnp.array([2.0, 4.0]), state)
    assert float(got["mean"]) == 4.0  # all weights 0: the plain mean
    assert jax.random.key_data(got["key"]).tolist() == jax.random.key_data(state["key"]).tolist()


@pytest.mark.parametrize("reducer", ["last", "stack"])
def test_last_and_stack_are_refused_on_more_than_one_device(reducer):
    fn = lambda w, x: w * x.sum()  # noqa: E731
    rows = jnp.arange(8.0)
    with raising(ValueError, f'"{reducer}"', "2 devices", "'data'", '"concat"'):
        accumulate(fn, 2, reduce=reducer, mesh=make_mesh(data=2))(jnp.float32(1), rows)
    one = accumulate(fn, 2, reduce=reducer, mesh=make_mesh(data=1))(jnp.float32(1), rows)
    chex.assert_trees_all_equal(one, accumulate(fn, 2, reduce=reducer)(jnp.float32(1), rows))


def test_own_reducers_are_refused_on_more_than_one_device():
    own = SimpleNamespace(init=lambda x: 0.0, update=lambda c, x, i: c + x, finalize=lambda c: c)
    fn = accumulate(lambda w, x: w * x.sum(), 2, reduce=own, mesh=make_mesh(data=2))
    with raising(ValueError, "cannot combine the results of 2 devices"):
        fn(jnp.float32(1), jnp.arange(8.0))


# Non-finite values


def test_one_microbatch_of_one_device_is_left_out():
    x = jnp.arange(16.0).at[5].set(jnp.nan)  # device 1 of 4, its microbatch 1: rows 5 and 7
    left = jnp.delete(jnp.arange(16.0), jnp.array([5, 7]))
    for fn in (
        value_and_grad(lambda w, x: jnp.mean(w * x), k=2, nonfinite="skip", mesh=make_mesh(data=4)),
        accumulate(
            jax.value_and_grad(lambda w, x: jnp.mean(w * x)),
            2,
            nonfinite="skip",
            mesh=make_mesh(data=4),
        ),
    ):
        value, grad = jax.jit(fn)(jnp.float32(1), x)
        assert float(value) == float(grad) == pytest.approx(float(left.mean()), rel=ROUNDING)
    stats = jax.jit(
        accumulate(
            jax.grad(lambda w, x: jnp.mean(w * x)),
            2,
            nonfinite="skip",
            stats="counts",
            mesh=make_mesh(data=4),
        )
    )(jnp.float32(1), x)[1]
    assert (int(stats.num_nonfinite), int(stats.num_microbatches), int(stats.total_weight)) == (
        1,
        8,
        14,
    )


# Sequence sharding


@pytest.mark.parametrize("k", [1, 2])
def test_tokens_of_a_row_spread_over_devices(k):
    tokens = jnp.array([[2.0, 4, 6, 8]] * 2)  # as many rows as microbatches can have
    mask = jnp.array([[1.0, 1, 1, 1], [1, 1, 1, 0]])

    def loss(w, b):
        return jnp.sum(w * b["x"] * b["m"])

    mesh = make_mesh(data=1, seq=2)
    fn = accum_jax.grad(
        loss,
        k=k,
        reduction="sum_over_weight",
        weight=lambda b: b["m"].sum(),
        axis_name=("data", "seq"),
    )
    fn = jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("data", "seq")), out_specs=P())
    full = jax.jit(fn)(jnp.float32(1), {"x": tokens, "m": jnp.ones((2, 4))})
    assert float(full) == 5.0  # 10.0 where only one shard's tokens are counted
    assert float(jax.jit(fn)(jnp.float32(1), {"x": tokens, "m": mask})) == pytest.approx(32 / 7)


def test_a_loss_may_use_collectives_over_an_axis_of_its_own():
    # Every row's tokens are spread over "seq", whose devices hold the whole result.
    mesh = make_mesh(data=2, seq=2)
    x = jnp.arange(32.0).reshape(8, 4)

    def loss(w, x):
        return jnp.mean(jnp.square(lax.psum(w * x.sum(1), "seq")))

    fn = accum_jax.grad(loss, k=2, axis_name="data", in_place=False)
    fn = jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("data", "seq")), out_specs=P())
    expected = jax.grad(lambda w: jnp.mean(jnp.square(w * x.sum(1))))(jnp.float32(2))
    assert_close(jax.jit(fn)(jnp.float32(2), x), expected, ROUNDING)


# Kinds of meshes


TYPES = [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (EXPLICIT, AUTO), (AUTO, EXPLICIT)]


def two_layers(params, batch):
    h = jnp.tanh(batch["x"] @ params["w1"])
    # No contraction over "model": with explicit types it would want an out_sharding.
    square = jnp.square(jnp.sum(h * params["w2"], axis=1) - batch["y"])
    return jnp.sum(square * batch["mask"]) / jnp.sum(batch["mask"])


@functools.cache
def two_layers_problem():
    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(size=(3, 8)), "w2": rng.normal(size=(8,))}
    batch = {"x": rng.normal(size=(32, 3)), "y": rng.normal(size=32), "mask": np.arange(32) % 5 > 0}
    params, batch = jax.tree.map(
        lambda x: jnp.asarray(x, bool if x.dtype == bool else jnp.float32), (params, batch)
    )
    return params, batch, jax.value_and_grad(two_layers)(params, batch)


TENSOR = {"w1": P(None, "model"), "w2": P("model")}


@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(t.name for t in types))
def test_tensor_parallelism_on_every_kind_of_mesh(types):
    params, batch, expected = two_layers_problem()
    mesh = make_mesh(types, data=4, model=2)
    placed = place(params, mesh, TENSOR), place(batch, mesh, P("data"))
    options = {"k": 2, "weight": kept, "mesh": mesh, "arg_specs": {0: TENSOR}}
    fns = [value_and_grad(two_layers, **options)]
    if types in (TYPES[0], TYPES[1]):
        fns.append(accumulate(jax.value_and_grad(two_layers), **options))
    for fn in fns:
        got = jax.jit(fn)(*placed)
        assert_close(got, expected, ROUNDING)
        if types != (AUTO, EXPLICIT):  # there jax.shard_map itself forgets the explicit axis
            check_sharded_like(jax.tree.map(lambda x: x.sharding, got[1]), placed[0])


def test_explicit_parameters_without_a_mesh():
    params, batch, expected = two_layers_problem()
    mesh = make_mesh(EXPLICIT, model=2)
    placed = place(params, mesh, TENSOR), place(batch, mesh, P())
    for options in ({}, {"in_place": False}):
        fn = jax.jit(value_and_grad(two_layers, k=2, weight=kept, **options))
        got = fn(*placed)
        assert_close(got, expected, ROUNDING)
        check_sharded_like(jax.tree.map(lambda x: x.sharding, got[1]), placed[0])


@pytest.mark.parametrize(
    "types",
    [TYPES[0], TYPES[1], *(pytest.param(types, marks=SLOW) for types in TYPES[2:])],
    ids=lambda types: "-".join(t.name for t in types),
)
def test_arrays_that_are_not_placed_and_no_specs(types):
    params, batch, expected = two_layers_problem()
    mesh = make_mesh(types, data=4, model=2)
    fn = value_and_grad(two_layers, k=2, weight=kept, mesh=mesh)
    assert_close(fn(params, batch), expected, ROUNDING)
    assert_close(jax.jit(fn)(place(params, mesh, TENSOR), batch), expected, ROUNDING)


@pytest.mark.parametrize(
    "types",
    [pytest.param((AUTO,), marks=SLOW), (EXPLICIT,)],
    ids=["Auto", "Explicit"],
)
def test_under_set_mesh(types):
    params, batch, expected = two_layers_problem()
    mesh = make_mesh(types, data=4)
    fn = value_and_grad(two_layers, k=2, weight=kept, mesh=mesh)
    with jax.set_mesh(mesh):
        fn = jax.jit(fn)
        assert_close(fn(params, batch), expected, ROUNDING)
        assert_close(fn(params, place(batch, mesh, P("data"))), expected, ROUNDING)
        # An ambient mesh alone means nothing.
        alone = jax.jit(value_and_grad(two_layers, k=2, weight=kept))
        assert collectives(alone.lower(params, batch).compile()) == []
        assert_close(alone(params, batch), expected, ROUNDING)


def test_an_abstract_mesh():
    params, batch, expected = two_layers_problem()
    mesh = make_mesh(data=4)
    abstract = AbstractMesh((4,), ("data",), axis_types=(AUTO,))
    fn = value_and_grad(two_layers, k=2, weight=kept, mesh=abstract)
    placed = place(params, mesh, P()), place(batch, mesh, P("data"))
    assert_close(jax.jit(fn)(*placed), expected, ROUNDING)


def test_inside_a_scan_and_differentiated():
    x = jnp.arange(16.0) / 16

    def loss(w, x):
        return jnp.mean(jnp.sin(w * x))

    def train(rate, grad):
        w, _ = lax.scan(lambda w, _: (w - rate * grad(w, x), None), jnp.float32(1), length=2)
        return loss(w, x)

    fn = accum_jax.grad(loss, k=2, mesh=make_mesh(data=4), in_place=False)
    got = jax.jit(jax.grad(functools.partial(train, grad=fn)))(0.1)
    assert_close(got, jax.grad(functools.partial(train, grad=jax.grad(loss)))(0.1), 1e-5)


# Sharded parameters


FSDP = {"layers": P(None, "fsdp"), "out": P("fsdp")}


def scanned(params, batch):
    """A residual stack of matrices, every layer rematerialised."""

    def layer(h, w):
        return h + jnp.tanh(h @ w), None

    h, _ = lax.scan(jax.checkpoint(layer), batch["x"], params["layers"])
    return jnp.mean(jnp.square(h @ params["out"] - batch["y"]))


def scanned_problem(num_rows, *, num_layers=8, width=64):
    rng = np.random.default_rng(0)
    params = {
        "layers": rng.normal(size=(num_layers, width, width)) / width,
        "out": rng.normal(size=width) / width,
    }
    batch = {"x": rng.normal(size=(num_rows, width)), "y": rng.normal(size=num_rows)}
    return jax.tree.map(jnp.float32, (params, batch))


@functools.cache
def small_scanned_problem() -> Any:
    params, batch = scanned_problem(64, num_layers=2, width=32)
    return params, batch, jax.jit(jax.value_and_grad(scanned))(params, batch)


def check_sharded_like(shardings: Any, placed: Any) -> None:
    each = zip(jax.tree.leaves(shardings), jax.tree.leaves(placed), strict=True)
    for sharding, x in each:
        assert sharding.is_equivalent_to(x.sharding, x.ndim), (sharding, x.sharding)


def local_bytes(placed: Any) -> int:
    """Of one device's shards."""
    return sum(4 * np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(placed))


def num_bytes(program: Any, **wanted: Any) -> int:
    """The bytes a call moves by collectives with such fields; small ones, of scalars, aside."""
    return sum(
        c.bytes * c.trip_count
        for c in collectives(program)
        if c.bytes > 64 and all(getattr(c, name) == value for name, value in wanted.items())
    )


@pytest.mark.parametrize(
    ("form", "api"),
    [
        ("fsdp", "value_and_grad"),
        ("hybrid", "accumulate"),
        pytest.param("fsdp", "accumulate", marks=SLOW),
        pytest.param("hybrid", "value_and_grad", marks=SLOW),
    ],
)
def test_fsdp_left_to_the_compiler_holds_one_local_gradient_more(form, api):
    axes = {"fsdp": 8} if form == "fsdp" else {"replica": 2, "fsdp": 4}
    mesh = make_mesh(**axes)
    params, batch = map(shapes, scanned_problem(512))
    params, batch = place(params, mesh, FSDP), place(batch, mesh, P(mesh.axis_names))
    shardings = jax.tree.map(lambda x: x.sharding, params)
    microbatch = place(shapes(scanned_problem(64)[1]), mesh, P(mesh.axis_names))

    def one(params, batch):  # laid out as the parameters are, as for an update
        return lax.with_sharding_constraint(jax.grad(scanned)(params, batch), shardings)

    held = temp_bytes(compile_for(one, params, microbatch)) + local_bytes(params)
    options = {"arg_specs": {0: shardings}}
    if form == "hybrid":
        options = {"arg_specs": {0: FSDP}, "mesh": mesh, "data_axes": "replica"}
    fn = (
        accum_jax.grad(scanned, k=8, **options)
        if api == "value_and_grad"
        else accumulate(jax.grad(scanned), 8, **options)
    )
    program = compile_for(fn, params, batch)
    check_sharded_like(program.output_shardings, params)
    assert temp_bytes(program) <= 1.1 * held
    if form == "hybrid":  # one reduction of a shard over the replicas
        assert num_bytes(program, kind="all-reduce", inside_loop=False) == local_bytes(params)


def test_fsdp_by_hand_gathers_once_and_scatters_once():
    mesh = make_mesh(fsdp=8)
    params, batch, expected = small_scanned_problem()
    params, batch = place(params, mesh, FSDP), place(batch, mesh, P("fsdp"))
    whole = 4 * sum(x.size for x in jax.tree.leaves(params))
    options = {"mesh": mesh, "data_axes": "fsdp", "arg_specs": {0: FSDP}}
    for fn in (
        value_and_grad(scanned, k=4, **options),
        accumulate(jax.value_and_grad(scanned), 4, **options),
    ):
        program = compile_for(fn, params, batch)
        assert num_bytes(program, inside_loop=True) == 0
        assert num_bytes(program, kind="all-gather") == whole
        assert num_bytes(program, kind="reduce-scatter") == whole
        assert num_bytes(program) == 2 * whole
        got = program(params, batch)
        assert_close(got, expected, ROUNDING)
        check_sharded_like(jax.tree.map(lambda x: x.sharding, got[1]), params)


@pytest.mark.parametrize(
    "data_axes", ["replica", pytest.param(("replica", "fsdp"), marks=SLOW)], ids=str
)
def test_hybrid_and_tensor_parallel_values(data_axes):
    params, batch, expected = small_scanned_problem()
    mesh = make_mesh(replica=2, fsdp=2, model=2)
    # Gathered by hand over "replica", left to the compiler over "model", and "fsdp" both ways.
    specs = {"layers": P(None, ("replica", "fsdp"), "model"), "out": P("model")}
    placed = place(params, mesh, specs)
    fn = value_and_grad(scanned, k=4, mesh=mesh, data_axes=data_axes, arg_specs={0: specs})
    got = jax.jit(fn)(placed, batch)
    assert_close(got, expected, ROUNDING)
    check_sharded_like(jax.tree.map(lambda x: x.sharding, got[1]), placed)


def test_specs_by_an_ambient_mesh():
    params, batch, expected = small_scanned_problem()
    mesh = make_mesh(fsdp=4)
    fn = jax.jit(value_and_grad(scanned, k=4, arg_specs={0: FSDP}))
    with jax.set_mesh(mesh):
        got = fn(params, batch)
    assert_close(got, expected, ROUNDING)
    check_sharded_like(jax.tree.map(lambda x: x.sharding, got[1]), place(params, mesh, FSDP))
    with pytest.raises(ValueError, match=r"(?s)arg_specs.*there is none here.*mesh="):
        jax.jit(accumulate(jax.grad(scanned), 4, arg_specs={0: FSDP}))(params, batch)


@pytest.mark.parametrize(  # left to the compiler, and gathered once
    "data_axes", ["data", pytest.param(("data", "fsdp"), marks=SLOW)], ids=str
)
def test_adapters_over_a_frozen_sharded_base(data_axes):
    mesh = make_mesh(data=2, fsdp=4)
    base, batch = scanned_problem(64, num_layers=2, width=16)
    adapters = {"a": jnp.full((2, 16, 2), 0.1), "b": jnp.full((2, 2, 16), 0.1)}

    def loss(adapters, base, batch):
        layers = base["layers"] + adapters["a"] @ adapters["b"]
        return scanned({**base, "layers": layers}, batch)

    expected = jax.jit(jax.value_and_grad(loss))(adapters, base, batch)
    fn = value_and_grad(
        loss, k=4, batch_argnums=2, mesh=mesh, data_axes=data_axes, arg_specs={1: FSDP}
    )
    placed = place(base, mesh, FSDP)
    assert_close(jax.jit(fn)(adapters, placed, batch), expected, ROUNDING)


# Updates


def test_replicas_stay_equal_bit_for_bit():
    params, batch, _ = two_layers_problem()
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    fn = accum_jax.grad(two_layers, k=2, weight=kept, axis_name="data")

    def step(params, state, batch):
        updates, state = tx.update(fn(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    # Unchecked, so that each device keeps parameters of its own.
    train = jax.jit(mapped(step, 8, P(), P(), P("data"), out_specs=P(), check_vma=False))
    alone = jax.jit(
        lambda params, state, batch: optax_step(tx, jax.grad(two_layers), params, state, batch)
    )
    got = expected = params, tx.init(params)
    for _ in range(10):
        got, expected = train(*got, batch), alone(*expected, batch)
    for x in jax.tree.leaves(got):
        first, *others = [np.asarray(shard.data) for shard in x.addressable_shards]
        assert len(others) == 7
        for other in others:
            np.testing.assert_array_equal(first, other)
    chex.assert_trees_all_close(got[0], expected[0], rtol=1e-4, atol=1e-4)


def optax_step(tx, grad, params, state, batch):
    updates, state = tx.update(grad(params, batch), state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize(
    "form",
    [
        *("by hand", "axis_name"),
        *(pytest.param(form, marks=SLOW) for form in ("replicated", "left to the compiler")),
    ],
)
def test_all_devices_decide_alike_about_an_overflow(form):
    # One row of one device overflows in the second of three windows, in one parameter of four.
    tx = multi_steps(dynamic_loss_scale(optax.sgd(1.0), init_scale=4.0, growth_interval=100), 2)
    mesh = make_mesh(data=4)
    options = {
        "replicated": {"mesh": mesh},
        "left to the compiler": {"arg_specs": {0: NamedSharding(mesh, P("data"))}},
        "by hand": {"mesh": mesh, "arg_specs": {0: P("data")}},
        "axis_name": {"axis_name": "data"},
    }[form]

    def step(params, state, batch):
        loss = lambda w, x: jnp.mean(x @ w)  # noqa: E731
        grads = accum_jax.grad(loss, k=2, loss_scale=loss_scale(state), **options)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    if form == "axis_name":  # unchecked, so that each device keeps a state of its own
        step = mapped(step, 4, P(), P(), P("data"), out_specs=P(), check_vma=False)
    step = jax.jit(step)
    whole = form in ("replicated", "axis_name")
    params = place(jnp.zeros(4), mesh, P() if whole else P("data"))
    state, log = tx.init(params), []
    rows = jnp.tile(jnp.arange(16.0)[:, None], 4)
    for call in range(6):
        batch = rows.at[3, 2].set(jnp.inf) if call == 2 else rows
        params, state = step(params, state, place(batch, mesh, P("data")))
        log.append((params.tolist(), bool(has_updated(state)), float(loss_scale(state))))
    assert log == [
        ([0.0] * 4, False, 4.0),
        ([-7.5] * 4, True, 4.0),
        ([-7.5] * 4, False, 4.0),
        ([-7.5] * 4, False, 2.0),
        ([-7.5] * 4, False, 2.0),
        ([-15.0] * 4, True, 2.0),
    ]
    for x in jax.tree.leaves((params, state) if whole else loss_scale(state)):
        assert len({np.asarray(shard.data).tobytes() for shard in x.addressable_shards}) == 1


def test_multi_steps_inside_shard_map():
    tx = multi_steps(optax.adam(0.1), 2, nonfinite="skip_window")
    fn = accum_jax.grad(lambda w, x: jnp.mean(w * x), k=2, axis_name="data")

    def step(params, state, batch):
        updates, state = tx.update(fn(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    train = jax.jit(mapped(step, 4, P(), P(), P("data"), out_specs=P()))
    params, state = jnp.float32(0), tx.init(jnp.float32(0))
    for call in range(4):
        batch = jnp.arange(16.0).at[9].set(jnp.nan if call == 1 else 9)
        params, state = train(params, state, batch)
    assert (int(state.gradient_step), int(state.num_skipped)) == (1, 1)
    assert float(params) == pytest.approx(-0.1, rel=1e-5)


def test_accumulated_loss_is_differentiated_over_devices():
    params, batch, expected = masked_problem()
    for fn in (
        accum_jax.accumulated_loss(masked, 2, weight=kept, mesh=make_mesh(data=4)),
        mapped(
            accum_jax.accumulated_loss(masked, 2, weight=kept, axis_name="data"), 4, P(), P("data")
        ),
    ):
        assert_close(jax.jit(jax.value_and_grad(fn))(params, batch), expected, ROUNDING)
    inside = mapped(
        jax.value_and_grad(accum_jax.accumulated_loss(masked, 2, weight=kept, axis_name="data")),
        4,
        P(),
        P("data"),
    )
    assert_close(jax.jit(inside)(params, batch), expected, ROUNDING)


# Wrong use


def test_axes_that_the_mesh_lacks():
    mesh = make_mesh(data=4, model=2)
    fn = lambda w, x: w * x.sum()  # noqa: E731
    with raising(ValueError, "data_axes names axis 'batch'", "'data', 'model'"):
        accumulate(fn, 2, mesh=mesh, data_axes="batch")
    with raising(ValueError, re.escape("arg_specs[0]['w'] names axis 'fsdp'"), "'data', 'model'"):
        accumulate(fn, 2, mesh=mesh, arg_specs={0: {"w": P(None, "fsdp")}})
    with raising(ValueError, "data_axes is empty"):
        accumulate(fn, 2, mesh=mesh, data_axes=())
    with raising(ValueError, "names an axis twice"):
        accumulate(fn, 2, mesh=mesh, data_axes=("data", "data"))


def test_mesh_and_axis_name_together():
    with raising(TypeError, "mesh .*or axis_name", "not both", "'data'"):
        accumulate(lambda w, x: w, 2, mesh=make_mesh(data=2), axis_name="data")
    with raising(TypeError, "mesh must be a jax.sharding.Mesh", "of type str"):
        accumulate(lambda w, x: w, 2, mesh="data")
    with raising(TypeError, "axis_name must be an axis name", "3"):
        accumulate(lambda w, x: w, 2, axis_name=3)


def test_arg_specs_of_other_types():
    fn = lambda w, x: w * x.sum()  # noqa: E731
    with raising(TypeError, "arg_specs must be a dict"):
        accumulate(fn, 2, arg_specs=P("data"))
    with raising(TypeError, re.escape("arg_specs[0]"), "PartitionSpec or NamedSharding", "'data'"):
        accumulate(fn, 2, arg_specs={0: "data"})
    mesh = make_mesh(data=2)
    with raising(TypeError, "arg_specs names argument 1, which is in batch_argnums"):
        accumulate(fn, 2, mesh=mesh, arg_specs={1: P("data")})
    with raising(ValueError, "arg_specs has argument 5", "2 positional"):
        accumulate(fn, 2, mesh=mesh, arg_specs={5: P()})(jnp.float32(1), jnp.ones(8))
    with raising(ValueError, re.escape("arg_specs[0] does not fit argument w")):
        accumulate(fn, 2, mesh=mesh, arg_specs={0: {"a": P()}})(jnp.float32(1), jnp.ones(8))


def test_specs_that_do_not_fit_the_array():
    fn = accumulate(
        lambda w, x: w["a"] * x.sum(), 2, mesh=make_mesh(data=4), arg_specs={0: P("data")}
    )
    with raising(ValueError, re.escape("axis 0 of w['a'], of size 6"), "4 devices", "'data'"):
        fn({"a": jnp.ones(6)}, jnp.ones(8))
    with raising(ValueError, re.escape("w['a'], of rank 0"), "1 entries", "PartitionSpec"):
        fn({"a": jnp.float32(1)}, jnp.ones(8))


def test_rows_that_do_not_divide():
    fn, w = lambda w, x: w * x.sum(), jnp.float32(1)
    mesh = make_mesh(data=4)
    with raising(ValueError, "30 rows", "axis 0 of x", "4 devices", "'data'", "Use 28 or 32 rows"):
        accumulate(fn, 2, mesh=mesh)(w, jnp.ones(30))
    with raising(ValueError, "3 rows", "Use 4 rows"):
        accumulate(fn, 1, mesh=mesh)(w, jnp.ones(3))
    with raising(ValueError, "a stacked microbatch of 6 rows", "Use 4 or 8 rows"):
        accumulate(fn, stacked=True, mesh=mesh)(w, jnp.ones((2, 6)))
    # k is each device's own: 8 rows a device.
    with raising(ValueError, "k=3", "effective batch of 8", "on each of 4 devices", "1, 2, 4, 8"):
        accumulate(fn, 3, mesh=mesh)(w, jnp.ones(32))


def test_an_axis_that_is_not_bound():
    with pytest.raises(NameError, match="data"):
        accumulate(lambda w, x: w * x.sum(), 2, axis_name="data")(jnp.float32(1), jnp.ones(8))


# Known faults


def test_fault_total_count_per_shard():
    tokens = jnp.array([4.0, 2.0, 5.0, 1.0])  # two shards, each 6 over 2 tokens
    fn = accumulate(jax.grad(lambda w, x: jnp.sum(w * x)), 1, mesh=make_mesh(data=2), reduce="sum")
    total = jax.jit(fn)(jnp.float32(0), tokens)
    fn = accum_jax.grad(
        lambda w, x: jnp.sum(w * x),
        k=1,
        reduction="sum_over_weight",
        weight=lambda x: x.size,
        mesh=make_mesh(data=2),
    )
    assert (float(total), float(jax.jit(fn)(jnp.float32(0), tokens))) == (12.0, 3.0)


def test_fault_unsynced_replicas():
    tx = optax.sgd(1.0)
    fn = accum_jax.grad(lambda w, x: jnp.mean(w * x), k=1, axis_name="data")

    def step(w, state, batch):
        gradient = fn(w, batch)
        updates, state = tx.update(gradient, state)
        return gradient, optax.apply_updates(w, updates), state

    train = jax.jit(mapped(step, 2, P(), P(), P("data"), out_specs=P(), check_vma=False))
    w, state = jnp.float32(0), tx.init(jnp.float32(0))
    for _ in range(3):
        gradient, w, state = train(w, state, jnp.array([1.0, 3.0]))
        assert [float(shard.data) for shard in gradient.addressable_shards] == [2.0, 2.0]
    assert [float(shard.data) for shard in w.addressable_shards] == [-6.0, -6.0]


@pytest.mark.parametrize("size", [1, 2])
def test_fault_doubling(size):
    loss = lambda w, x: jnp.sum(w * x)  # noqa: E731
    rows = jnp.ones(4 * size)
    fn = accum_jax.grad(loss, k=4, reduction="sum", mesh=make_mesh(data=size))
    assert float(jax.jit(fn)(jnp.float32(0), rows)) == 4.0 * size
    fn = accum_jax.grad(loss, k=4, reduction="sum", axis_name="data")
    assert float(jax.jit(mapped(fn, size, P(), P("data")))(jnp.float32(0), rows)) == 4.0 * size


def test_fault_split():
    mesh = make_mesh(data=4)
    rows = place(jnp.arange(8.0), mesh, P("data"))

    def fn(w, x):
        return jnp.broadcast_to(x.sum(), x.shape), jax.grad(lambda w: jnp.mean(w * x))(w)

    run = accumulate(fn, 2, reduce=("concat", "mean"))  # left to the compiler
    program = compile_for(run, jnp.float32(0), rows)
    assert {c.kind for c in collectives(program)} == {"all-reduce"}
    sums, gradient = program(jnp.float32(0), rows)
    assert sums.tolist() == 4 * [0 + 2 + 4 + 6, 1 + 3 + 5 + 7]
    assert float(gradient) == 3.5
    mapped_fn = accumulate(fn, 1, reduce=("concat", "mean"), mesh=mesh)
    assert float(jax.jit(mapped_fn)(jnp.float32(0), rows)[1]) == 3.5
