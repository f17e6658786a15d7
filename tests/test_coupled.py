"""Losses that couple rows: value and gradient of the whole batch, at a microbatch's memory."""

from __future__ import annotations

import functools
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    Counted,
    assert_same,
    compilations,
    compile_for,
    num_equations,
    rows,
    temp_bytes,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import accum_jax
from accum_jax import accumulate, collectives, coupled_value_and_grad
from accum_jax._audit import audit

ROWS, FEATURES, WIDTH, SIZE = 16, 5, 6, 4


# Losses of the whole batch


def normalised(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def logits_of(params, z):
    return normalised(z["a"]) @ normalised(z["b"]).T * jnp.exp(params["t"])


def picked(log_p, weights):
    return -jnp.sum(jnp.diagonal(log_p) * weights) / jnp.sum(weights)


def info_nce(params, z, batch):
    return picked(jax.nn.log_softmax(logits_of(params, z)), batch["weight"])


def clip(params, z, batch):
    logits, ones = logits_of(params, z), jnp.ones_like(batch["weight"])
    both = (picked(jax.nn.log_softmax(logits, axis), ones) for axis in (0, 1))
    return sum(both) / 2


def siglip(params, z, batch):
    logits = logits_of(params, z) + params["bias"]
    signs = 2 * jnp.eye(len(logits), dtype=logits.dtype) - 1
    return -jnp.sum(jax.nn.log_sigmoid(signs * logits)) / len(logits)


def triplet(params, z, batch):
    """The farthest row of the same label, and the nearest of another, for each row."""
    squares = jnp.sum(jnp.square(z["a"][:, None] - z["b"]), -1)
    same = batch["label"][:, None] == batch["label"]
    positive = jnp.max(jnp.where(same, squares, -jnp.inf), 1)
    negative = jnp.min(jnp.where(same, jnp.inf, squares), 1)
    return jnp.mean(jax.nn.relu(positive - negative + 1))


def nt_xent(params, z, batch):
    both = normalised(jnp.concatenate([z["a"], z["b"]]))
    n = len(z["a"])
    logits = both @ both.T * jnp.exp(params["t"])
    logits = jnp.where(jnp.eye(2 * n, dtype=bool), -jnp.inf, logits)
    other = (jnp.arange(2 * n) + n) % (2 * n)
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(2 * n), other])


def supervised(params, z, batch):
    same = batch["label"][:, None] == batch["label"]
    log_p = jax.nn.log_softmax(logits_of(params, z))
    return -jnp.mean(jnp.sum(jnp.where(same, log_p, 0), 1) / jnp.sum(same, 1))


def standardised(z):
    return (z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-3)


def barlow_twins(params, z, batch):
    correlation = standardised(z["a"]).T @ standardised(z["b"]) / len(z["a"])
    eye = jnp.eye(len(correlation), dtype=correlation.dtype)
    return jnp.sum(jnp.square(correlation - eye) * (eye + 0.1 * (1 - eye)))


def vicreg(params, z, batch):
    def spread(z):
        centred = z - z.mean(0)
        covariance = centred.T @ centred / (len(z) - 1)
        off = covariance - jnp.diag(jnp.diagonal(covariance))
        hinge = jax.nn.relu(1 - jnp.sqrt(z.var(0) + 1e-3))
        return jnp.mean(hinge) + jnp.sum(jnp.square(off)) / len(covariance)

    return jnp.mean(jnp.square(z["a"] - z["b"])) + spread(z["a"]) + spread(z["b"])


def balance(params, z, batch):
    """The product of how often and how surely each expert is chosen, both over the batch."""
    p = jax.nn.softmax(z["a"])
    used = jax.nn.one_hot(jnp.argmax(p, -1), SIZE, dtype=p.dtype).mean(0)
    return SIZE * jnp.sum(used * p.mean(0)) + jnp.mean(z["b"] ** 2)


def pairs(params, z, batch):
    """Small, for what does not depend on the loss."""
    return jnp.mean(batch["weight"] * jnp.square(z["a"] @ z["b"].T) * params["t"])


LOSSES = (
    info_nce,
    clip,
    siglip,
    triplet,
    nt_xent,
    supervised,
    barlow_twins,
    vicreg,
    balance,
)


# The encoder


def encode(params, batch):
    """Two towers that share their first layer."""

    def tower(x, w):
        return jnp.tanh(x @ params["first"]) @ w

    return {"a": tower(batch["a"], params["wa"]), "b": tower(batch["b"], params["wb"])}


def problem(num_rows=ROWS, dtype=np.float32):
    rng = np.random.default_rng(0)
    params = {
        "first": rng.normal(size=(FEATURES, WIDTH)),
        "wa": rng.normal(size=(WIDTH, SIZE)),
        "wb": rng.normal(size=(WIDTH, SIZE)),
        "t": np.array(0.5),
        "bias": np.array(-1.0),
    }
    batch = {
        "a": rng.normal(size=(num_rows, FEATURES)),
        "b": rng.normal(size=(num_rows, FEATURES)),
        "weight": rng.uniform(size=num_rows),
    }
    params, batch = jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, batch))
    return params, {**batch, "label": jnp.arange(num_rows) % 3}


def jitted(fn):
    """For values alone: the time of these tests is the compiler's."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def on_whole_batch(loss, encode=encode, **options):
    def whole(params, batch):
        return loss(params, encode(params, batch), batch)

    return jax.value_and_grad(whole, **options)


def whole_batch(*args, **options):
    return jitted(on_whole_batch(*args, **options))


def assert_close(actual, expected, tolerance):
    """Trees of the same types; leaves agree relative to the largest element of the tree."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    largest = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(expected))
    chex.assert_trees_all_close(actual, expected, rtol=0, atol=tolerance * largest)


# 53 bits and some ten roundings; 24 bits and as many.
WIDE, NARROW = 1e-13, 1e-5

SPLITS = ({"k": 1}, {"k": 2}, {"k": 8}, {"k": 3, "remainder": "tail"})


def check_splits(loss, splits):
    params, batch = problem(dtype=np.float64)
    expected = whole_batch(loss)(params, batch)
    assert float(optax.tree.norm(expected[1])) > 1e-3
    for split in splits:
        fn = jitted(coupled_value_and_grad(encode, loss, **split))
        assert_close(fn(params, batch), expected, WIDE)


def test_a_loss_of_each_kind(x64):
    kinds = siglip, triplet, barlow_twins, balance
    check_splits(lambda *args: sum(loss(*args) for loss in kinds), SPLITS[-1:])


def test_eight_microbatches(x64):
    check_splits(info_nce, SPLITS[2:3])


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_the_whole_batch(loss, x64):
    check_splits(loss, SPLITS)


@pytest.mark.slow
def test_equals_the_whole_batch_to_float32_rounding():
    with jax.enable_x64(True):
        expected = whole_batch(clip)(*problem(dtype=np.float64))
        expected = jax.tree.map(lambda x: np.asarray(x, np.float32), expected)
    actual = jitted(coupled_value_and_grad(encode, clip, k=8))(*problem())
    assert_close(actual, expected, NARROW)


def test_plain_accumulation_does_not():
    params, batch = problem()
    expected = whole_batch(pairs)(params, batch)
    plain = jitted(accumulate(on_whole_batch(pairs), k=4))(params, batch)
    assert abs(float(plain[0] / expected[0] - 1)) > 0.1


@pytest.mark.parametrize("k", [1, 2])
def test_fault_contrastive(run, k):
    """Embeddings t·I: rows of one microbatch alone would have no negatives and no gradient."""

    def dots(t, z, batch):
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(z @ batch["other"].T)))

    batch = {"x": jnp.eye(2), "other": jnp.eye(2)}
    fn = coupled_value_and_grad(lambda t, batch: t * batch["x"], dots, k=k)
    value, grad = run(fn)(jnp.float32(1), batch)
    np.testing.assert_allclose([value, grad], [0.313262, -0.268941], atol=1e-6)


# Arguments


def test_several_differentiated_and_batch_arguments_and_a_frozen_tower():
    params, batch = problem()
    mine, other = {"w": params["wa"]}, params["first"]

    def encode(frozen, mine, a, b, other):
        return {"a": jnp.tanh(a @ other) @ mine["w"], "b": jnp.tanh(b @ frozen["first"])}

    def loss(other, mine, z, a, b):
        logits = z["a"] @ mine["w"].T @ z["b"].T
        return clip({"t": other[0, 0]}, {"a": logits, "b": a[:, :1] * logits}, {"weight": b[:, 0]})

    def whole(frozen, mine, a, b, other):
        return loss(other, mine, encode(frozen, mine, a, b, other), a, b)

    args = params, mine, batch["a"], batch["b"], other
    expected = jitted(jax.value_and_grad(whole, argnums=(4, 1)))(*args)
    fn = coupled_value_and_grad(encode, loss, k=4, argnums=(-1, 1), batch_argnums=(2, -2))
    actual = jitted(fn)(*args)
    assert isinstance(actual[1], tuple)
    assert_close(actual, expected, NARROW)


def test_aux_is_the_whole_batch_s():
    params, batch = problem()

    def loss(params, z, batch):
        logits = logits_of(params, z)
        return pairs(params, z, batch), (jnp.argmax(logits, 1), "clip", None)

    fn = coupled_value_and_grad(encode, loss, k=4, has_aux=True)
    (value, (best, name, none)), grads = fn(params, batch)
    assert_close((value, grads), whole_batch(pairs)(params, batch), NARROW)
    assert_same(best, jnp.argmax(logits_of(params, encode(params, batch)), 1))
    assert (name, none) == ("clip", None)


@pytest.mark.slow
def test_keyword_arguments_go_to_the_encoder():
    params, batch = problem()

    def scaled(params, batch, *, factor, name):
        assert name == "text"
        return jax.tree.map(lambda z: z * factor, encode(params, batch))

    fn = coupled_value_and_grad(scaled, vicreg, k=2)
    expected = whole_batch(vicreg, functools.partial(scaled, factor=2.0, name="text"))
    actual = fn(params, batch, factor=2.0, name="text")
    assert_close(actual, expected(params, batch), NARROW)


def test_both_passes_draw_the_same_masks_and_microbatches_others():
    params, batch = problem()
    key, k = jax.random.key(7), 4

    def dropped(params, batch, key):
        z = encode(params, batch)
        keep = jax.random.bernoulli(key, 0.5, z["a"].shape)
        return {**z, "a": z["a"] * keep, "keep": keep}

    def loss(params, z, batch):
        return pairs(params, z, batch), z["keep"]

    def whole(params, batch):
        parts = [dropped(params, rows(batch, k, i), jax.random.fold_in(key, i)) for i in range(k)]
        z = jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(ROWS, -1), *parts)
        return loss(params, z, batch)

    fn = coupled_value_and_grad(dropped, loss, k=k, key_argnums=2, has_aux=True)
    (value, keep), grads = jitted(fn)(params, batch, key)
    expected = jitted(jax.value_and_grad(whole, has_aux=True))(params, batch)
    assert_same(keep, expected[0][1])
    assert_close((value, grads), (expected[0][0], expected[1]), NARROW)
    masks = {np.asarray(rows(keep, k, i)).tobytes() for i in range(k)}
    assert len(masks) == k


def test_loss_scale_multiplies_the_gradient_before_it_can_vanish():
    """A gradient of 2^-26 is below what float16 can hold, and 2^-11 is not."""

    def tiny(w, z, batch):
        return jnp.mean(z * batch["small"])

    def half(w, batch):
        return w * batch["x"]

    w, small = jnp.float16(1), jnp.full(8, 2.0**-23, jnp.float32)
    batch = {"x": jnp.ones(8, jnp.float16), "small": small}
    scale = 2.0**15

    @jax.jit
    def fn(scale):
        return coupled_value_and_grad(half, tiny, k=2, loss_scale=scale)(w, batch)

    value, grad = fn(scale)
    assert_same((value, grad), (jnp.float32(2.0**-23), jnp.float16(2.0**-8)))
    assert float(fn(1.0)[1]) == 0


def test_scaled_sums_that_float16_cannot_hold():
    def gradient(output_dtype):
        fn = coupled_value_and_grad(
            lambda w, x: w * x,
            lambda w, z, x: jnp.sum(z.astype(jnp.float32)),
            k=8,
            loss_scale=2.0**12,
            output_dtype=output_dtype,
        )
        return fn(jnp.float16(1), jnp.ones(64, jnp.float16))[1]

    assert_same(gradient(None), jnp.float16(jnp.inf))
    for output_dtype in ("accumulator", jnp.float32):
        assert_same(gradient(output_dtype), jnp.float32(2.0**18))


def test_types_are_those_of_the_whole_batch():
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        params, batch = problem(dtype=dtype)
        fn = coupled_value_and_grad(encode, vicreg, k=4)
        expected = jax.eval_shape(whole_batch(vicreg), params, batch)
        chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(fn, params, batch), expected)


def test_narrow_gradients_are_summed_in_float32():
    """512 microbatches of gradient 1: a sum in bfloat16 stops at 256."""
    fn = coupled_value_and_grad(lambda w, x: w * x, lambda w, z, x: jnp.sum(z), k=512)
    _, grad = fn(jnp.bfloat16(0), jnp.ones(512, jnp.bfloat16))
    assert_same(grad, jnp.bfloat16(512))


@pytest.mark.slow
def test_an_accumulator_of_another_dtype():
    with jax.enable_x64(True):
        params, batch = problem(dtype=np.float32)
        fn = coupled_value_and_grad(encode, pairs, k=4, accumulator_dtype=jnp.float64)
        assert_close(fn(params, batch), whole_batch(pairs)(params, batch), NARROW)


def test_complex_embeddings_and_integers_beside_them(x64):
    params, batch = problem(dtype=np.float64)

    def rotated(params, batch):
        z = encode(params, batch)
        return {"z": jax.lax.complex(z["a"], z["b"]), "label": batch["label"], "none": None}

    def loss(params, z, batch):
        gram = z["z"] @ z["z"].T.conj()
        same = z["label"][:, None] == batch["label"]
        return jnp.mean(jnp.abs(gram) ** 2 * same) + jnp.mean((gram * params["t"]).imag ** 2)

    fn = jitted(coupled_value_and_grad(rotated, loss, k=4))
    assert_close(fn(params, batch), whole_batch(loss, rotated)(params, batch), WIDE)


@pytest.mark.slow
def test_under_strict_promotion(strict_promotion):
    params, batch = problem()
    assert_close(
        coupled_value_and_grad(encode, pairs, k=4)(params, batch),
        whole_batch(pairs)(params, batch),
        NARROW,
    )


def test_mapped_and_differentiated_again():
    def encode(w, batch):
        return jnp.tanh(w * batch)

    def loss(w, z, batch):
        return jnp.var(z)

    w, batch = jnp.array([0.5, 0.7]), jnp.arange(6.0) / 6
    fn, whole = coupled_value_and_grad(encode, loss, k=3), on_whole_batch(loss, encode)
    mapped = [jitted(jax.vmap(f, (0, None)))(w, batch) for f in (fn, whole)]
    assert_close(*mapped, NARROW)
    second = [jitted(jax.grad(lambda w, f=f: f(w, batch)[1]))(w[0]) for f in (fn, whole)]
    assert_close(*second, NARROW)


# Rows


def positional(params, z, batch):
    """Of the places of rows in the batch, and of rows and embeddings side by side."""
    place = jnp.arange(len(z["a"]), dtype=z["a"].dtype)
    return jnp.mean(place[:, None] * z["a"] * batch["weight"][:, None]) * jnp.mean(z["b"])


def stacked_rows(batch, k):
    return jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)


def test_stacked_microbatches_follow_one_another():
    params, batch = problem()
    each = jnp.arange(4.0)  # one number for each microbatch

    def encode_with(params, batch):
        return jax.tree.map(lambda z: z + batch["each"], encode(params, batch["rows"]))

    def loss(params, z, batch):
        return positional(params, z, batch["rows"]) + jnp.sum(batch["each"])

    def whole(params):
        z = jax.tree.map(lambda z: z + jnp.repeat(each, 4)[:, None], encode(params, batch))
        return positional(params, z, batch) + jnp.sum(each)

    fn = coupled_value_and_grad(encode_with, loss, stacked=True)
    actual = jitted(fn)(params, {"rows": stacked_rows(batch, 4), "each": each})
    assert_close(actual, jitted(jax.value_and_grad(whole))(params), NARROW)


@pytest.mark.slow
@pytest.mark.parametrize("split", [{"k": 4}, {"microbatch_size": 5, "remainder": "tail"}])
def test_rows_keep_their_order(split):
    params, batch = problem()
    fn = coupled_value_and_grad(encode, positional, **split)
    assert_close(fn(params, batch), whole_batch(positional)(params, batch), NARROW)


# Devices


def make_mesh(size, kind=AxisType.Auto):
    return jax.make_mesh((size,), ("data",), axis_types=(kind,), devices=jax.devices()[:size])


def two_axes(size, kinds=(AxisType.Auto,) * 2):
    devices = jax.devices()[: 2 * size]
    return jax.make_mesh((size, 2), ("data", "model"), axis_types=kinds, devices=devices)


def spread(tree, mesh, spec):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree)


@pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 8])
def test_every_mesh_agrees_with_the_whole_batch(size, x64):
    params, batch = problem(dtype=np.float64)
    expected = whole_batch(pairs)(params, batch)
    mesh = make_mesh(size)
    options = {"k": 2} if size < 8 else {"k": 1}
    fn = coupled_value_and_grad(encode, pairs, mesh=mesh, **options)
    assert_close(jitted(fn)(params, batch), expected, WIDE)
    fn = coupled_value_and_grad(encode, pairs, axis_name="data", **options)
    fn = jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    assert_close(jitted(fn)(params, batch), expected, WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [*LOSSES, positional])
def test_every_loss_on_devices_with_a_short_last_microbatch(loss, x64):
    params, batch = problem(num_rows=24, dtype=np.float64)
    expected = whole_batch(loss)(params, batch)
    options = {"microbatch_size": 4, "remainder": "tail"}  # 6 rows a device
    mesh = make_mesh(4)
    fn = coupled_value_and_grad(encode, loss, mesh=mesh, **options)
    assert_close(jitted(fn)(params, batch), expected, WIDE)
    for check_vma in (True, False):
        fn = coupled_value_and_grad(encode, loss, axis_name="data", **options)
        fn = jax.shard_map(
            fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
        )
        assert_close(jitted(fn)(params, batch), expected, WIDE)
    fn = coupled_value_and_grad(encode, loss, axis_name="i", **options)
    by_device = stacked_rows(batch, 4)
    results = jax.vmap(fn, (None, 0), axis_name="i")(params, by_device)
    assert_close(jax.tree.map(lambda x: x[-1], results), expected, WIDE)


AUTO_AND_EXPLICIT = [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit]
OVER_DATA = {"first": P(None, "data"), "wa": P("data"), "wb": P(), "t": P(), "bias": P()}


@pytest.mark.parametrize("kind", AUTO_AND_EXPLICIT)
def test_parameters_sharded_over_the_data_axis(kind):
    params, batch = problem()
    mesh = make_mesh(2, kind)
    fn = coupled_value_and_grad(encode, pairs, k=2, mesh=mesh, arg_specs={0: OVER_DATA})
    placed = jax.tree.map(lambda x, spec: spread(x, mesh, spec), params, OVER_DATA)
    actual = jitted(fn)(placed, spread(batch, mesh, P("data")))
    assert_close(actual, whole_batch(pairs)(params, batch), NARROW)
    for name in ("first", "wa"):
        assert actual[1][name].sharding.is_equivalent_to(placed[name].sharding, 2)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_parameters_sharded_over_a_mapped_axis(check_vma):
    params, batch = problem()
    fn = coupled_value_and_grad(encode, pairs, k=2, axis_name="data", arg_specs={0: OVER_DATA})
    specs = {"in_specs": (OVER_DATA, P("data")), "out_specs": (P(), OVER_DATA)}
    fn = jax.shard_map(fn, mesh=make_mesh(2), check_vma=check_vma, **specs)
    assert_close(jitted(fn)(params, batch), whole_batch(pairs)(params, batch), NARROW)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data")])
@pytest.mark.parametrize("kinds", [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto,) * 2])
def test_several_data_axes(axes, kinds):
    params, batch = problem()
    expected = whole_batch(positional)(params, batch)
    mesh = two_axes(2, kinds)
    fn = coupled_value_and_grad(encode, positional, k=2, mesh=mesh, data_axes=axes)
    placed = spread(params, mesh, P()), spread(batch, mesh, P(axes))
    assert_close(jitted(fn)(*placed), expected, NARROW)
    fn = coupled_value_and_grad(encode, positional, k=2, axis_name=axes)
    fn = jax.shard_map(fn, mesh=two_axes(2), in_specs=(P(), P(axes)), out_specs=P())
    assert_close(jitted(fn)(params, batch), expected, NARROW)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_parameters_sharded_over_an_axis_beside_the_data(size):
    """XLA cannot add up over the one device of an axis what the other axis shards."""
    params, batch = problem()
    specs = {"first": P(None, "model"), "wa": P("model"), "wb": P("model"), "t": P(), "bias": P()}
    mesh = two_axes(size)
    placed = jax.tree.map(lambda x, spec: spread(x, mesh, spec), params, specs)
    fn = coupled_value_and_grad(encode, pairs, k=2, mesh=mesh, arg_specs={0: specs})
    actual = jitted(fn)(placed, spread(batch, mesh, P("data")))
    assert_close(actual, whole_batch(pairs)(params, batch), NARROW)
    for name in ("first", "wa"):
        assert actual[1][name].sharding.is_equivalent_to(placed[name].sharding, 2)


@pytest.mark.slow
@pytest.mark.parametrize("split", [{"k": 2}, {"microbatch_size": 3, "remainder": "tail"}])
def test_embeddings_of_explicit_sharding(split):
    params, batch = problem()

    def wide(params, batch):
        return jnp.tanh(batch["a"] @ params["first"])

    def variance(params, z, batch):
        return jnp.mean(jnp.square(z - z.mean(0)) * params["t"])

    specs = {"first": P(None, "model"), "t": P()}
    params = {name: params[name] for name in specs}
    mesh = two_axes(2, (AxisType.Explicit,) * 2)
    placed = jax.tree.map(lambda x, spec: spread(x, mesh, spec), params, specs)
    fn = coupled_value_and_grad(wide, variance, mesh=mesh, arg_specs={0: specs}, **split)
    actual = jitted(fn)(placed, spread(batch, mesh, P("data")))
    assert_close(actual, whole_batch(variance, wide)(params, batch), NARROW)
    assert actual[1]["first"].sharding.is_equivalent_to(placed["first"].sharding, 2)


@pytest.mark.slow
def test_a_loss_with_a_map_of_its_own():
    """A ring: each device sees the other rows in turn, and no device holds all pairs."""
    mesh, (params, batch) = make_mesh(4), problem()

    def on_each(params, z):
        a, b, place = *map(normalised, (z["a"], z["b"])), jax.lax.axis_index("data")

        def turn(b, step):
            logits = a @ b.T * jnp.exp(params["t"]) + params["bias"]
            signs = jnp.where(step == 0, 2 * jnp.eye(len(a)) - 1, -1.0)
            b = jax.lax.ppermute(b, "data", [(i, (i + 1) % 4) for i in range(4)])
            return b, jnp.sum(jax.nn.log_sigmoid(signs * logits))

        _, sums = jax.lax.scan(turn, b, place * 0 + jnp.arange(4))
        return -jax.lax.psum(jnp.sum(sums), "data") / ROWS

    def ring(params, z, batch):
        return jax.shard_map(on_each, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(
            params, z
        )

    fn = coupled_value_and_grad(encode, ring, k=2, mesh=mesh)
    assert_close(jitted(fn)(params, batch), whole_batch(siglip)(params, batch), NARROW)


def stacked_over_two_devices(params, batch):
    """Rows of a device stay together: the loss sees the first device's, then the next one's."""
    order = np.arange(ROWS).reshape(4, 2, 2).swapaxes(0, 1).reshape(-1)
    return whole_batch(positional)(params, jax.tree.map(lambda x: x[order], batch))


@pytest.mark.parametrize("kind", AUTO_AND_EXPLICIT)
def test_stacked_over_devices(kind):
    params, batch = problem()
    mesh = make_mesh(2, kind)
    fn = coupled_value_and_grad(encode, positional, stacked=True, mesh=mesh)
    placed = spread(stacked_rows(batch, 4), mesh, P(None, "data"))
    actual = jitted(fn)(spread(params, mesh, P()), placed)
    assert_close(actual, stacked_over_two_devices(params, batch), NARROW)


@pytest.mark.slow
def test_stacked_over_a_mapped_axis():
    params, batch = problem()
    fn = coupled_value_and_grad(encode, positional, stacked=True, axis_name="data")
    fn = jax.shard_map(fn, mesh=make_mesh(2), in_specs=(P(), P(None, "data")), out_specs=P())
    actual = jitted(fn)(params, stacked_rows(batch, 4))
    assert_close(actual, stacked_over_two_devices(params, batch), NARROW)


def on_shapes(fn, mesh, num_rows):
    params, batch = jax.eval_shape(lambda: problem(num_rows))

    def place(tree, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    return compile_for(fn, place(params, P()), place(batch, P("data")))


GRADIENT_BYTES = 4 * (FEATURES * WIDTH + 2 * WIDTH * SIZE + 2)


def test_one_gradient_reduction_and_each_read_leaf_gathered_once():
    mesh = make_mesh(8)
    fn = coupled_value_and_grad(encode, info_nce, k=2, axis_name="data")
    fn = jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    found = collectives(on_shapes(fn, mesh, 64))
    assert not any(c.inside_loop for c in found)
    assert [c.bytes for c in found if c.kind == "all-reduce"] == [GRADIENT_BYTES]
    gathered = [c.bytes for c in found if c.kind == "all-gather"]
    # Both embeddings and the weights; not the inputs and not the labels.
    assert sorted(gathered) == [4 * 64, 4 * 64 * SIZE, 4 * 64 * SIZE]


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (clip, AxisType.Auto),
        (siglip, AxisType.Explicit),
        *(pytest.param(loss, AxisType.Auto, marks=pytest.mark.slow) for loss in LOSSES[2:6]),
    ],
)
def test_pairs_are_spread_over_devices_by_rows(loss, kind):
    mesh, num_rows = make_mesh(8, kind), 512
    compiled = on_shapes(coupled_value_and_grad(encode, loss, k=2, mesh=mesh), mesh, num_rows)
    text, views = compiled.as_text(), 2 if loss is nt_xent else 1
    assert f"[{views * num_rows // 8},{views * num_rows}" in text
    assert f"[{views * num_rows},{views * num_rows}" not in text
    found = collectives(compiled)
    assert not any(c.inside_loop for c in found)
    # XLA leaves out zeros of the temperature and the bias, and adds scalars that are waiting.
    assert sum(abs(c.bytes - GRADIENT_BYTES) <= 8 for c in found) == 1
    largest = max(c.bytes for c in found)
    assert largest < 3 * 4 * num_rows * SIZE * views  # embeddings and no pairs


# Cost


def deep(params, batch):
    z = batch
    for w in params:
        z = jnp.tanh(z @ w)
    return z[:, :8]


def spread_loss(params, z, batch):
    return jnp.mean(jnp.square(z.T @ z))


def test_memory_is_flat_in_k_but_for_the_embeddings():
    params = [jnp.zeros((64, 64))] * 4
    fn = coupled_value_and_grad(deep, spread_loss, microbatch_size=32)
    sizes = {n: temp_bytes(compile_for(fn, params, jnp.zeros((n, 64)))) for n in (64, 2048)}
    whole = compile_for(on_whole_batch(spread_loss, deep), params, jnp.zeros((2048, 64)))
    # Embeddings and cotangents, once more where they move from one loop to the other.
    assert sizes[2048] - sizes[64] <= 3 * 4 * 8 * (2048 - 64)
    assert temp_bytes(whole) > 6 * sizes[2048]


def test_gradient_is_added_in_place():
    """Layer-scanned parameters: no second gradient beside the accumulator."""
    params = jnp.zeros((16, 128, 128))

    def scanned(params, batch):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(layer, batch, params)[0]

    fn = coupled_value_and_grad(scanned, spread_loss, k=4)
    temp = temp_bytes(compile_for(fn, params, jnp.zeros((8, 128))))
    assert temp < 1.5 * params.nbytes


def test_program_does_not_grow_with_k():
    params, batch = problem(64)
    sizes = [
        num_equations(coupled_value_and_grad(encode, clip, k=k), params, batch) for k in (2, 32)
    ]
    assert sizes[0] == sizes[1]


def test_each_function_is_traced_once_for_each_pass():
    params, batch = problem()
    counted, loss = Counted(encode), Counted(clip)
    fn = coupled_value_and_grad(lambda p, b: counted(p, b), lambda *a: loss(*a), k=4)
    fn(params, batch)
    assert (counted.calls, loss.calls) == (2, 1)
    with compilations() as durations:
        fn(params, batch)
    assert (counted.calls, loss.calls, durations) == (2, 1, [])


# Flax Linen, and batch statistics


class Tower(nn.Module):
    norm: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=False, use_scale=False, use_bias=False)(x)
        return nn.Dense(SIZE)(nn.gelu(x))


def linen_encoder(norm):
    tower = Tower(norm)
    params = tower.init(jax.random.key(0), jnp.zeros((2, FEATURES)))["params"]

    def encode(params, batch):
        z, _ = tower.apply({"params": params["tower"]}, batch["a"], mutable=["batch_stats"])
        return {"a": z, "b": batch["b"][:, :SIZE] @ params["w"]}

    return encode, {"tower": params, "w": jnp.eye(SIZE), "t": jnp.zeros(()), "bias": jnp.ones(())}


@pytest.mark.slow  # the audit and the demo run Linen too
def test_linen():
    _, batch = problem()
    encode, params = linen_encoder(norm=False)
    fn = jitted(coupled_value_and_grad(encode, siglip, k=4))
    assert_close(fn(params, batch), whole_batch(siglip, encode)(params, batch), NARROW)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [False, True])
def test_audit_finds_an_encoder_that_couples_rows(norm):
    _, batch = problem(12)
    encode, params = linen_encoder(norm)
    report = audit(lambda p, b: jnp.mean(encode(p, b)["a"] ** 3), params, batch, k=3)
    expected = ("not_equivalent", {"batch_coupled"}) if norm else ("equivalent", set())
    assert (report.verdict, report.causes) == expected, str(report)


def test_batch_statistics_of_the_whole_batch():
    """A model split at its batch norm: what comes after it is part of the loss."""
    first, norm, last = nn.Dense(WIDTH), nn.BatchNorm(momentum=0.5), nn.Dense(1)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, FEATURES)), jnp.float32)
    batch = {"x": x, "y": x.sum(1) ** 2}
    keys, hidden = jax.random.split(jax.random.key(0), 3), jnp.zeros((1, WIDTH))

    @jitted
    def init():
        variables = norm.init(keys[1], hidden, use_running_average=True)
        params = {"first": first.init(keys[0], x), "last": last.init(keys[2], hidden)}
        return {**params, "norm": variables["params"]}, variables["batch_stats"]

    params, stats = init()

    def encode(params, batch):
        return first.apply(params["first"], batch["x"])

    def loss(params, h, batch):
        h, updated = norm.apply(
            {"params": params["norm"], "batch_stats": stats},
            h,
            use_running_average=False,
            mutable=["batch_stats"],
        )
        out = last.apply(params["last"], nn.gelu(h))[:, 0]
        return jnp.mean((out - batch["y"]) ** 2), updated["batch_stats"]

    fn = jitted(coupled_value_and_grad(encode, loss, k=8, has_aux=True))
    expected = whole_batch(loss, encode, has_aux=True)(params, batch)
    actual = fn(params, batch)
    assert_close(actual, expected, NARROW)
    mean = first.apply(params["first"], x).mean(0)
    np.testing.assert_allclose(actual[0][1]["mean"], 0.5 * mean, rtol=1e-5, atol=1e-6)


# Errors


@pytest.mark.parametrize(
    ("encoded", "error", "message"),
    [
        (lambda z: z[:2], ValueError, "embeddings has shape (2, 4), where the microbatch has 4"),
        (lambda z: {"z": z.sum()}, ValueError, "embeddings['z'] is a scalar, where the microbatch"),
        (lambda z: [z, 1.0], ValueError, "embeddings[1] is a scalar"),
        (lambda z: jnp.argmax(z, 1), TypeError, "a float array with the embeddings of the rows"),
        (lambda z: None, TypeError, "got no array"),
    ],
)
def test_embeddings_that_are_no_rows(encoded, error, message):
    params, batch = problem()
    fn = coupled_value_and_grad(lambda p, b: encoded(encode(p, b)["a"]), spread_loss, k=4)
    with pytest.raises(error, match=re.escape(message)) as raised:
        fn(params, batch)
    assert str(raised.value).startswith("coupled_value_and_grad: ")


def test_other_errors():
    params, batch = problem()

    def raising(error, message, encode_fn=encode, loss=clip, args=(params, batch), **options):
        with pytest.raises(error, match=re.escape(f"coupled_value_and_grad: {message}")):
            coupled_value_and_grad(encode_fn, loss, **{"k": 4, **options})(*args)

    raising(TypeError, "encode_fn must be callable", encode_fn=None)
    raising(TypeError, "loss_fn must be callable", loss=3)
    raising(TypeError, "the loss must be a real float scalar", loss=lambda p, z, b: z["a"])
    raising(TypeError, "with has_aux=True the function must return (loss, aux)", has_aux=True)
    raising(TypeError, "give exactly one of k and microbatch_size", microbatch_size=4)
    raising(ValueError, "k=3 does not divide the effective batch of 16", k=3)
    raising(TypeError, "argument batch (position 1) has two roles", argnums=1)
    raising(TypeError, "give mesh (under jax.jit) or axis_name", mesh=make_mesh(1), axis_name="i")
    raising(TypeError, "loss_scale must be", loss_scale="big")
    raising(ValueError, "batch_argnums names argument 5", args=(params, batch), batch_argnums=5)
    integers = {**params, "t": 1}
    raising(TypeError, "params['t'] is differentiated, but has dtype", args=(integers, batch))
    with pytest.raises(TypeError, match="weight"):
        coupled_value_and_grad(encode, clip, k=4, weight=len)


def test_exported():
    assert "coupled_value_and_grad" in accum_jax.__doc__
