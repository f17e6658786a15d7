"""Value and gradient of a loss, added up in place and by the scan, against plain JAX."""

from __future__ import annotations

import functools
from typing import NamedTuple

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
    cost,
    float64_gradient,
    linear,
    microbatch_outputs,
    mse,
    mse_problem,
    num_equations,
    num_instructions,
    quick,
    rms_error,
    rows,
    temp_bytes,
    weighted_mean,
)
from layers import assert_close, label, layered, layered_problem, masked, uses_in_place

import accum_jax
from accum_jax import thread

_WAYS = pytest.mark.parametrize("in_place", [True, False])  # None is one of them, see below


@pytest.fixture
def run(request):
    """Eager in place, jitted by the scan: how a function is called is not what it does inside."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    return (lambda fn: fn) if params.get("in_place") else jax.jit


def _tokens(batch):
    return jnp.sum(batch["mask"])


def _fit(params, batch):
    """Mean squared error, quick to compile; the layer-scanned model stands where it matters."""
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return jnp.mean(jnp.square(hidden @ params["out"] - batch["y"]))


def _fit_tokens(params, batch):
    square = jnp.square(jnp.tanh(batch["x"] @ params["w"]) @ params["out"] - batch["y"])
    return jnp.sum(square * batch["mask"]) / jnp.sum(batch["mask"])


def _fit_problem(num_rows, dtype=np.float32):
    params, batch = layered_problem(num_rows, dtype=dtype)
    return {"w": params["layers"]["w"][0], "out": params["out"]}, batch


# In the place of jax.grad and jax.value_and_grad


def _three(params, batch, shift):
    return _fit(params, batch) * shift["a"] + jnp.mean(batch["x"]) * shift["b"]


def _three_with_aux(params, batch, shift):
    value = _three(params, batch, shift)
    return value, {"double": 2 * value, "nothing": None, "name": "aux"}


_SHIFT = {"a": jnp.float32(1.5), "b": jnp.float32(-2)}


@pytest.mark.parametrize(
    "name, argnums, has_aux",
    [
        ("value_and_grad", 0, False),
        ("value_and_grad", (0,), False),
        ("value_and_grad", [0], True),
        ("value_and_grad", -1, True),
        ("value_and_grad", (2, 0), False),
        ("grad", 0, True),
        ("grad", (0, -1), False),
        ("grad", (-1,), True),
    ],
    ids=label,
)
def test_result_is_that_of_jax(name, argnums, has_aux):
    loss = _three_with_aux if has_aux else _three
    args = (*_fit_problem(8), _SHIFT)
    actual = getattr(accum_jax, name)(loss, argnums, has_aux, k=4)(*args)
    expected = getattr(jax, name)(loss, argnums, has_aux)(*args)
    if has_aux:  # chex compares arrays only
        aux_of = (lambda out: out[1]) if name == "grad" else (lambda out: out[0][1])
        assert aux_of(actual).pop("name") == aux_of(expected).pop("name")
    # Two summation orders of 8 float32 rows.
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize(
    "params",
    [
        2.0,
        jnp.float32(2),
        np.float32(2),
        np.ones((2, 3), np.float32),
        jnp.ones((0, 3)),
        (),
        {},
        None,
        {"a": 1.0, "n": None, "e": {}},
        [jnp.ones(2), (jnp.ones((2, 2)), None)],
    ],
    ids=label,
)
@pytest.mark.parametrize("in_place", [None, False])
def test_parameters_of_every_kind(params, in_place):
    def loss(params, batch):
        total = sum((jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(params)), jnp.float32(0))
        return total * jnp.mean(batch)

    batch = jnp.arange(8.0)
    actual = accum_jax.value_and_grad(loss, k=4, in_place=in_place)(params, batch)
    expected = jax.value_and_grad(loss)(params, batch)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert_close(actual, expected, 1e-6)


def test_named_tuples_and_keyword_arguments(run):
    class Params(NamedTuple):
        w: jax.Array
        b: jax.Array | None = None

    def loss(params, batch, *, power, scale):
        assert power == "square"  # not an array: as it was passed
        return scale * jnp.mean(jnp.square(params.w * batch))

    fn = accum_jax.value_and_grad(loss, k=4)
    call = run(functools.partial(fn, power="square"))
    actual = call(Params(jnp.float32(2)), jnp.arange(8.0), scale=jnp.float32(3))
    assert_same(actual, (jnp.float32(210), Params(jnp.float32(210))))


@pytest.mark.parametrize("in_place", [True, None, False])
def test_integer_leaves_have_no_gradient(run, in_place):
    def loss(params, batch):
        return jnp.mean(params["w"] * batch) * params["i"].sum()

    params = {"i": jnp.arange(3), "t": jnp.array(True), "n": None, "w": jnp.float32(2)}
    options = dict(k=4, allow_int=True, in_place=in_place)
    actual = run(accum_jax.grad(loss, **options))(params, jnp.arange(8.0))
    expected = run(jax.grad(loss, allow_int=True))(params, jnp.arange(8.0))
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert_same(actual["w"], expected["w"])
    for name in ("i", "t"):
        assert actual[name].dtype == jax.dtypes.float0
        assert actual[name].shape == expected[name].shape


def test_float64(x64, run):
    problem = _fit_problem(12, dtype=np.float64)
    for in_place in (True, False):
        actual = run(accum_jax.value_and_grad(_fit, k=4, in_place=in_place))(*problem)
        assert_close(actual, jax.value_and_grad(_fit)(*problem), 1e-13)


def test_strict_promotion(strict_promotion):
    problem = _fit_problem(12)
    weighted = dict(weight=lambda batch: jnp.sum(batch["mask"]), loss_scale=jnp.float16(4))
    for options in ({}, weighted, dict(in_place=False, **weighted)):
        jax.eval_shape(accum_jax.value_and_grad(_fit, k=4, **options), *problem)


def test_complex_parameters(run):
    def loss(params, batch):
        return jnp.mean(jnp.abs(params["w"] * batch - (1 + 2j)) ** 2) * params["r"]

    params = {"w": jnp.complex64(2 - 1j), "r": jnp.float32(3)}
    fn = accum_jax.value_and_grad(loss, k=4)
    actual = run(fn)(params, jnp.arange(8.0))
    assert_close(actual, jax.value_and_grad(loss)(params, jnp.arange(8.0)), 1e-6)
    assert not uses_in_place(fn, params, jnp.arange(8.0))


def test_types_are_those_of_the_whole_batch():
    params, batch = mse_problem(8)
    params = {**params, "w1": params["w1"].astype(jnp.bfloat16)}

    def loss(params, batch):
        value = mse(params, batch)
        return value, {
            "low": value.astype(jnp.float16),
            "per_row": batch["y"],
            "rows": jnp.int32(2),
        }

    aux = {"low": "mean", "per_row": "concat", "rows": "sum"}
    actual = jax.eval_shape(accum_jax.value_and_grad(loss, 0, True, k=4, aux=aux), params, batch)
    assert actual == jax.eval_shape(jax.value_and_grad(loss, 0, True), params, batch)


# In place, by the scan, and whichever is chosen: the same


def _dropout(params, batch, key):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    loss = layered if "layers" in params else _fit
    return loss(params, {**batch, "x": batch["x"] * keep})


def _with_count(params, batch):
    loss = masked if "layers" in params else _fit_tokens
    return loss(params, batch), {"tokens": jnp.sum(batch["mask"])}


def _with_state(params, batch, state):
    value = layered(params, batch) * (1 + state["mean"])
    state = {"mean": 0.9 * state["mean"] + 0.1 * jnp.mean(batch["x"]), "count": state["count"] + 1}
    return value, state


def _with_everything(params, batch, key, state):
    value, state = _with_state(params, batch, state)
    noise = jax.random.normal(key, ())
    aux = {
        "rows": batch["y"],
        "count": jnp.sum(batch["mask"]),
        "largest": jnp.max(batch["x"]),
        "noise": noise,
        "state": state,
    }
    return value * (1 + 0.1 * noise), aux


_EVERYTHING = {
    "rows": "concat",
    "count": "sum",
    "largest": "max",
    "noise": "stack",
    "state": thread(3),
}
_STATE = {"mean": jnp.float32(0.25), "count": jnp.int32(0)}


def _layered_three(params, batch, shift):
    return layered(params, batch) * shift["a"]


_CASES = {
    "tail": (layered, dict(k=None, microbatch_size=4, remainder="tail"), ()),
    "weighted tail": (masked, dict(weight=_tokens, remainder="tail"), ()),
    "sum_over_weight": (layered, dict(reduction="sum_over_weight", weight=_tokens), ()),
    "weight_from_output": (
        _with_count,
        dict(has_aux=True, aux={"tokens": "sum"}, weight_from_output=lambda out: out[1]["tokens"]),
        (),
    ),
    "keys": (_dropout, dict(key_argnums=2, remainder="tail"), (jax.random.key(3),)),
    "everything": (
        _with_everything,
        dict(has_aux=True, aux=_EVERYTHING, key_argnums=2, weight=_tokens, loss_scale=8.0),
        (jax.random.key(0), _STATE),
    ),
    "loss_scale": (layered, dict(loss_scale=1024.0), ()),
    "tuple argnums": (_layered_three, dict(argnums=(2, 0)), (_SHIFT,)),
    "num_real": (masked, dict(num_real_microbatches=3, weight=_tokens, remainder="tail"), ()),
}


@pytest.mark.parametrize(
    "case", quick(_CASES, "tail", "sum_over_weight", "everything", "tuple argnums", "num_real")
)
def test_in_place_equals_the_scan(case):
    loss, options, extra = _CASES[case]
    options = {"k": 4, **options}
    args = (*layered_problem(14 if "remainder" in options else 12), *extra)
    ways = (True, None, False)
    fns = [accum_jax.value_and_grad(loss, in_place=way, **options) for way in ways]
    in_place, chosen, scan = (str(jax.make_jaxpr(fn)(*args)) for fn in fns)
    assert in_place == chosen != scan
    assert "Ref{" in in_place and "Ref{" not in scan
    assert_close(fns[0](*args), fns[2](*args), 1e-6)


def _by_hand(loss, k, *args, weights=None, argnums=0, has_aux=False, key_argnums=()):
    """Value and gradient averaged over microbatches, one plain call each."""
    fn = jax.value_and_grad(loss, argnums, has_aux)
    return weighted_mean(microbatch_outputs(fn, k, *args, key_argnums=key_argnums), weights)


@_WAYS
def test_means_are_those_of_the_whole_batch(run, in_place):
    problem = _fit_problem(12)
    actual = run(accum_jax.value_and_grad(_fit, k=4, in_place=in_place))(*problem)
    assert_close(actual, jax.value_and_grad(_fit)(*problem), 1e-5)


@_WAYS
@pytest.mark.parametrize("weighing", ["weight", "weight_from_output"])
def test_token_means_are_those_of_the_whole_batch(run, in_place, weighing):
    params, batch = _fit_problem(14)
    options = dict(k=4, in_place=in_place, remainder="tail")
    if weighing == "weight":
        actual = run(accum_jax.value_and_grad(_fit_tokens, weight=_tokens, **options))(
            params, batch
        )
    else:
        options |= dict(weight_from_output=lambda out: out[1]["tokens"])
        fn = accum_jax.value_and_grad(_with_count, 0, True, aux={"tokens": "sum"}, **options)
        (value, aux), grads = run(fn)(params, batch)
        assert_same(aux["tokens"], jnp.sum(batch["mask"]))
        actual = value, grads
    assert_close(actual, jax.value_and_grad(_fit_tokens)(params, batch), 1e-5)


@_WAYS
def test_sums_over_weight_are_those_of_the_whole_batch(run, in_place):
    def total(params, batch):
        return jnp.sum(jnp.square(batch["x"] @ params["w"] @ params["out"]) * batch["mask"])

    params, batch = _fit_problem(12)
    options = dict(k=4, reduction="sum_over_weight", weight=_tokens, in_place=in_place)
    actual = run(accum_jax.value_and_grad(total, **options))(params, batch)
    expected = jax.value_and_grad(lambda *args: total(*args) / _tokens(batch))(params, batch)
    assert_close(actual, expected, 1e-5)


@_WAYS
def test_sums(run, in_place):
    """Weights leave out and do not multiply."""
    batch = jnp.array([1, 2, 3, 5, 7, 11], jnp.float32)
    options = dict(k=3, reduction="sum", in_place=in_place, weight=lambda b: 9.0 * (b[0] != 2))
    actual = run(accum_jax.value_and_grad(linear, **options))(jnp.float32(2), batch)
    assert_same(actual, (jnp.float32(2 * 10), jnp.float32(10)))  # (1 + 5) / 2 + (3 + 11) / 2


@_WAYS
def test_dropout_is_that_of_folded_keys(run, in_place):
    args = (*_fit_problem(12), jax.random.key(7))
    actual = run(accum_jax.value_and_grad(_dropout, k=4, key_argnums=2, in_place=in_place))(*args)
    assert_close(actual, _by_hand(_dropout, 4, *args, key_argnums=(2,)), 1e-5)


@_WAYS
def test_state_moves_on(run, in_place):
    def loss(w, batch, state):
        return jnp.mean(w * batch) * state, state + jnp.sum(batch)

    batch = jnp.array([1, 2, 3, 4], jnp.float32)
    fn = accum_jax.value_and_grad(loss, 0, True, k=2, aux=thread(2), in_place=in_place)
    actual = run(fn)(jnp.float32(2), batch, jnp.float32(1))
    # rows (1, 3) with state 1, then (2, 4) with state 5
    assert_same(actual, ((jnp.float32(17), jnp.float32(11)), jnp.float32(8.5)))


@_WAYS
def test_auxiliary_reducers(run, in_place):
    def loss(w, batch):
        aux = {
            "rows": batch * w,
            "count": jnp.sum(batch > 2),
            "largest": jnp.max(batch),
            "first": batch[0],
            "mean": jnp.mean(batch),
        }
        return jnp.mean(w * batch), aux

    reducers = dict(rows="concat", count="sum", largest="max", first="stack", mean="mean")
    batch = jnp.array([3, 1, 4, 1, 5, 9, 2, 6], jnp.float32)
    fn = accum_jax.value_and_grad(loss, 0, True, k=4, aux=reducers, in_place=in_place)
    (value, aux), grad = run(fn)(jnp.float32(2), batch)
    assert_same((value, grad), (jnp.float32(7.75), jnp.float32(3.875)))
    expected = {
        "rows": batch * 2,
        "count": jnp.int32(5),
        "largest": jnp.float32(9),
        "first": batch[:4],
        "mean": jnp.float32(3.875),
    }
    assert_same(aux, expected)


@_WAYS
def test_stacked_batches(run, in_place):
    batch = jnp.array([[1, 3], [2, 6]], jnp.float32)  # weights 1 and 2
    options = dict(stacked=True, in_place=in_place, weight=lambda b: b[0])
    actual = run(accum_jax.value_and_grad(linear, **options))(jnp.float32(3), batch)
    assert_same(actual, (jnp.float32(10), jnp.float32(10 / 3)))


@_WAYS
def test_batch_axes(run, in_place):
    def loss(w, x, table):
        return jnp.mean(w * x[0]) + jnp.sum(table)

    x, table = jnp.arange(8.0).reshape(1, 8), jnp.ones(8)
    options = dict(k=4, batch_argnums=(1, 2), batch_axes=(-1, None), in_place=in_place)
    actual = run(accum_jax.value_and_grad(loss, **options))(jnp.float32(2), x, table)
    assert_same(actual, (jnp.float32(15), jnp.float32(3.5)))


@_WAYS
@pytest.mark.parametrize("options", [{}, dict(weight=lambda b: jnp.sum(b > 0))], ids=label)
def test_number_of_real_microbatches_is_traced(in_place, options):
    counted = Counted(linear)

    @jax.jit
    def fn(w, batch, real):
        return accum_jax.value_and_grad(
            counted, stacked=True, in_place=in_place, num_real_microbatches=real, **options
        )(w, batch)

    batch = jnp.array([[2, 4], [4, 6], [1, jnp.nan], [jnp.nan, 1]], jnp.float32)
    grads = [fn(jnp.float32(2), batch, jnp.int32(real))[1] for real in (0, 1, 2)]
    assert_same(grads, [jnp.float32(0), jnp.float32(3), jnp.float32(4)])
    assert counted.calls == 1


@_WAYS
def test_real_microbatches_of_a_ragged_batch(run, in_place):
    batch = jnp.array([1, 2, 3, 4, 12], jnp.float32)  # (1, 3), (2, 4) and the rest (12)

    def fn(real):
        options = dict(k=3, remainder="tail", num_real_microbatches=real, in_place=in_place)
        return accum_jax.grad(linear, **options)(jnp.float32(0), batch)

    grads = [run(fn)(jnp.int32(real)) for real in (1, 2, 3, 9)]
    assert_same(grads, [jnp.float32(x) for x in (2, 2.5, 22 / 5, 22 / 5)])


# Weight 0 and values that are not finite


@_WAYS
@pytest.mark.parametrize("reduction", ["mean", "sum", "sum_over_weight"])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_weight_zero_adds_nothing(run, in_place, reduction, bad):
    batch = jnp.array([2, bad, 4, 6, bad, 8], jnp.float32)  # rows (2, 6), (bad, bad), (4, 8)

    def weight(batch):
        return 2.0 * jnp.all(jnp.isfinite(batch))

    options = dict(k=3, weight=weight, reduction=reduction, in_place=in_place)
    value, grad = run(accum_jax.value_and_grad(linear, **options))(jnp.float32(2), batch)
    expected = {"mean": 5, "sum": 10, "sum_over_weight": 2.5}[reduction]
    assert_same((value, grad), (jnp.float32(2 * expected), jnp.float32(expected)))


@_WAYS
def test_total_weight_zero_gives_zeros(run, in_place):
    options = dict(k=2, weight=lambda b: 0.0, in_place=in_place)
    fn = accum_jax.value_and_grad(linear, **options)
    assert_same(run(fn)(jnp.float32(2), jnp.full(4, jnp.nan)), (jnp.float32(0), jnp.float32(0)))


@_WAYS
def test_nonfinite_values_propagate_without_weights(run, in_place):
    value, grad = run(accum_jax.value_and_grad(linear, k=2, in_place=in_place))(
        jnp.float32(2), jnp.array([1, jnp.nan, 3, 4], jnp.float32)
    )
    assert jnp.isnan(value) and jnp.isnan(grad)


@pytest.mark.parametrize("where", ["value", "gradient"])
def test_skipped_microbatches(run, where):
    """A finite value whose gradient is not, too."""

    def loss(w, batch):
        bad = jnp.sqrt(jnp.where(batch[0] < 0, 0.0, 1.0) * w) * 0  # 0 with gradient inf * 0
        return jnp.mean(w * batch) + (jnp.log(jnp.min(batch)) * 0 if where == "value" else bad)

    batch = jnp.array([1, -1, 4], jnp.float32)
    fn = accum_jax.value_and_grad(loss, k=3, nonfinite="skip", stats="counts")
    (value, grad), stats = run(fn)(jnp.float32(2), batch)
    assert_same((value, grad), (jnp.float32(5), jnp.float32(2.5)))
    assert_same(stats.num_nonfinite, jnp.int32(1))


# Loss scale


@_WAYS
@pytest.mark.parametrize("options", [{}, dict(weight=_tokens), dict(reduction="sum")], ids=label)
def test_loss_scale_is_on_the_gradient_alone(run, in_place, options):
    problem = _fit_problem(12)
    options = dict(k=4, in_place=in_place, **options)
    value, grads = run(accum_jax.value_and_grad(_fit, **options))(*problem)
    scaled = run(accum_jax.value_and_grad(_fit, loss_scale=1024.0, **options))(*problem)
    # A power of two changes no digit.
    assert_same(scaled, (value, jax.tree.map(lambda g: 1024 * g, grads)))


@_WAYS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16, jnp.int32])
def test_loss_scale_is_traced(in_place, dtype):
    @jax.jit
    def fn(scale):
        options = dict(k=2, loss_scale=scale, in_place=in_place)
        return accum_jax.value_and_grad(linear, **options)(jnp.float32(3), jnp.arange(4.0))

    with compilations() as compiled:
        results = [fn(jnp.asarray(scale, dtype)) for scale in (1, 4)]
    assert_same(results, [(jnp.float32(4.5), jnp.float32(g)) for g in (1.5, 6)])
    assert len(compiled) <= 1 + 2  # the scales are arrays made by programs of their own


def test_loss_scale_keeps_half_precision_gradients(run):
    """A gradient below float16's smallest number survives where it is scaled inside."""
    w, batch = jnp.float16(1), jnp.full(4, 2.0**-13, jnp.float16)

    def loss(w, batch):
        return jnp.mean(w * batch) * 2.0**-13

    options = dict(k=2, output_dtype="accumulator")
    plain = run(accum_jax.grad(loss, **options))(w, batch)
    scaled = run(accum_jax.grad(loss, loss_scale=2.0**10, **options))(w, batch)
    assert_same(plain, jnp.float32(0))
    assert_same(scaled, jnp.float32(2.0**-16))


# Statistics


@_WAYS
def test_counts(run, in_place):
    batch = jnp.array([1, 2, 3, jnp.nan, 5, 6], jnp.float32)  # rows (1, nan), (2, 5), (3, 6)
    options = dict(k=3, stats="counts", in_place=in_place)
    _, stats = run(accum_jax.value_and_grad(linear, **options))(jnp.float32(1), batch)
    assert stats.global_norm is None
    assert_same(stats[:4], (jnp.int32(3), jnp.int32(6), jnp.float32(6), jnp.int32(1)))


@pytest.mark.parametrize("reduction", ["mean", "sum_over_weight"])
def test_norms_are_of_unscaled_gradients(run, reduction):
    batch = jnp.array([3, 9, 5, 7], jnp.float32)  # rows (3, 5) and (9, 7): gradients 4 and 8

    def total(w, batch):
        return w * jnp.sum(batch) / (1 if reduction == "sum_over_weight" else 2)

    options = dict(k=2, reduction=reduction, stats="norms", loss_scale=16.0)
    (_, grad), stats = run(accum_jax.value_and_grad(total, **options))(jnp.float32(1), batch)
    assert_same(grad, jnp.float32(96))
    assert_same(stats.global_norm, jnp.float32(6))
    assert_same(stats.mean_microbatch_square_norm, jnp.float32(40))
    # tr / 2 = 40 - |g|^2 and tr / 4 = 36 - |g|^2
    np.testing.assert_allclose(stats.noise_scale, 16 / 32, rtol=1e-6)


def test_statistics_stand_beside_the_result():
    params, batch = _fit_problem(8)
    fn = accum_jax.grad(_with_count, 0, True, k=4, aux="sum", stats="counts")
    (grads, aux), stats = fn(params, batch)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert_same(aux, {"tokens": jnp.sum(batch["mask"])})
    assert_same(stats.num_microbatches, jnp.int32(4))


# Narrow parameters


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_parameters_are_summed_in_float32(run, dtype):
    params, batch = _fit_problem(64, dtype=dtype)
    chosen = accum_jax.grad(_fit, k=16, output_dtype="accumulator")
    scan = accum_jax.grad(_fit, k=16, output_dtype="accumulator", in_place=False)
    assert not uses_in_place(chosen, params, batch)
    exact = float64_gradient(_fit, params, batch)
    errors = [rms_error(run(fn)(params, batch), exact) for fn in (chosen, scan)]
    assert errors[0] <= errors[1]
    assert errors[0] < 20 * float(jnp.finfo(dtype).eps)


def test_an_accumulator_as_narrow_as_the_parameters_is_in_place(run):
    """It was asked for: 1 + 256 is 256 in bfloat16."""
    fn = accum_jax.grad(linear, k=512, accumulator_dtype=jnp.bfloat16, reduction="sum")
    args = jnp.bfloat16(1), jnp.ones(512, jnp.bfloat16)
    assert uses_in_place(fn, *args)
    assert_same(run(fn)(*args), jnp.bfloat16(256))


def test_layers_that_cast_master_parameters_are_in_place(run):
    def loss(params, batch):
        def layer(h, p):
            return jnp.tanh(h @ p["w"].astype(jnp.bfloat16) + p["b"].astype(jnp.bfloat16)), None

        h, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"].astype(jnp.bfloat16), params)
        return jnp.mean(jnp.square(h).astype(jnp.float32))

    params, batch = layered_problem(16)
    params = params["layers"]
    fns = [accum_jax.value_and_grad(loss, k=4, in_place=way) for way in (None, False)]
    assert [uses_in_place(fn, params, batch) for fn in fns] == [True, False]
    assert_close(*[run(fn)(params, batch) for fn in fns], 1e-6)


def test_weights_of_a_narrow_loss_are_not_rounded(run):
    """257 tokens are 256 in bfloat16, the dtype of the loss and of its cotangent."""

    def loss(w, batch):
        return jnp.mean(w * batch).astype(jnp.bfloat16)

    options = dict(k=2, weight=lambda b: 257.0)
    grad = run(accum_jax.grad(loss, **options))(jnp.float32(1), jnp.ones(4))
    assert_same(grad, jnp.float32(1))


# What the loss may hold


def _embedding(params, batch):
    hidden = params["table"][batch["i"]]
    return jnp.mean(jnp.square(hidden @ params["table"].T - 1))  # tied: used twice


def _recurrent(params, batch):
    def cell(h, x):  # the same weights at every step
        return jnp.tanh(h @ params["w"] + x), None

    h, _ = jax.lax.scan(cell, batch["x"], jnp.arange(3.0))
    return jnp.mean(jnp.square(h))


@jax.custom_vjp
def _halved(x):
    return x


_halved.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


def _custom(params, batch):
    return jnp.mean(jax.nn.relu(_halved(batch["x"] @ params["w"])) ** 2)


def _branching(params, batch):
    def branch(w):
        return jax.lax.cond(jnp.sum(batch["x"]) > 0, lambda w: w * 2, lambda w: -w, w)

    return jnp.mean(batch["x"] @ jax.jit(branch)(params["w"]))


def _looping(params, batch):
    return jnp.mean(jax.lax.fori_loop(0, 3, lambda i, h: jnp.sin(h @ params["w"]), batch["x"]))


def _mapped(params, batch):
    return jnp.mean(jax.vmap(lambda x: jax.lax.map(lambda c: c @ x, params["w"]))(batch["x"]) ** 2)


def _differentiating(params, batch):
    def energy(x):
        return jnp.sum(jnp.tanh(params["w"] @ x))

    return jnp.mean(jax.vmap(jax.grad(energy))(batch["x"]) ** 2)


def test_losses_of_every_kind(run):
    """Tied, shared over time, custom rules, branches, loops, derivatives inside, unused."""
    kinds = _embedding, _recurrent, _custom, _branching, _looping, _mapped, _differentiating

    def loss(params, batch):
        return jnp.stack([kind(params, batch) for kind in kinds])

    _, batch = layered_problem(12)
    rng = np.random.default_rng(1)
    params = {"w": rng.normal(size=(4, 4)), "table": rng.normal(size=(6, 4)), "unused": np.ones(2)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    batch = {"x": jnp.abs(batch["x"]), "i": jnp.arange(12) % 5}  # one branch for all
    expected = jax.jit(jax.jacrev(loss))(params, batch)
    for number, kind in enumerate(kinds):
        wanted = jax.tree.map(lambda x, number=number: x[number], expected)
        assert_close(run(accum_jax.grad(kind, k=3, in_place=True))(params, batch), wanted, 1e-5)


@pytest.mark.parametrize(
    "pick",
    [lambda w: w[0, 0], lambda w: w[:2], lambda w: w[-1], lambda w: jax.vmap(lambda r: r[0])(w)],
    ids=["entry", "rows", "last", "mapped"],
)
def test_parts_of_a_parameter(run, pick):
    def loss(w, batch):
        return jnp.sum(pick(w)) * jnp.mean(batch)

    w, batch = jnp.ones((4, 3)), jnp.arange(8.0)
    assert_same(run(accum_jax.grad(loss, k=4))(w, batch), jax.grad(loss)(w, batch))


def test_a_loss_without_the_parameters(run):
    fn = run(accum_jax.value_and_grad(lambda w, b: jnp.mean(b), k=4, in_place=True))
    assert_same(fn(jnp.float32(2), jnp.arange(8.0)), (jnp.float32(3.5), jnp.float32(0)))


def test_one_array_in_two_places(run):
    """Each place has a gradient of its own."""
    w = jnp.float32(2)
    fn = accum_jax.grad(lambda p, b: jnp.mean(b) * p["a"] * p["b"] ** 2, k=2, in_place=True)
    actual = run(lambda w: fn({"a": w, "b": w}, jnp.arange(4.0)))(w)
    assert_same(actual, {"a": jnp.float32(6), "b": jnp.float32(12)})


# Which way is chosen


@pytest.mark.parametrize(
    "options, in_place",
    [
        (dict(), True),
        (dict(weight=_tokens), True),
        (dict(loss_scale=8.0), True),
        (dict(accumulator_dtype=jnp.float32), True),
        (dict(in_place=True, stats="counts"), True),
        (dict(in_place=False), False),
        (dict(accumulator_dtype=jnp.bfloat16), False),
        (dict(nonfinite="skip"), False),
        (dict(stats="norms"), False),
    ],
    ids=label,
)
def test_which_way_is_chosen(options, in_place):
    problem = layered_problem(8)
    for name in ("value_and_grad", "grad"):
        assert (
            uses_in_place(getattr(accum_jax, name)(layered, k=4, **options), *problem) is in_place
        )


def test_a_jax_without_it(run, monkeypatch):
    monkeypatch.setattr("accum_jax._in_place.available", lambda: False)
    problem = _fit_problem(8)
    fn = accum_jax.value_and_grad(_fit, k=4)
    assert not uses_in_place(fn, *problem)
    assert_close(run(fn)(*problem), jax.value_and_grad(_fit)(*problem), 1e-5)
    with pytest.raises(ValueError, match=r"value_and_grad: in_place=True .*jax.*newer"):
        accum_jax.value_and_grad(_fit, k=4, in_place=True)


# Under other transformations

_BATCH = jnp.arange(8.0)


def _square(w, batch):
    return jnp.mean(jnp.square(w * batch))


@pytest.mark.parametrize(
    "options", [{}, dict(weight=jnp.sum), dict(k=3, remainder="tail")], ids=label
)
def test_vmap(run, options):
    options = {"k": 4, **options}
    fn = accum_jax.value_and_grad(_square, **options)
    ws, batches = jnp.array([1.0, 2.0]), jnp.stack([_BATCH, _BATCH[::-1]])
    for axes, args in [((0, None), (ws, _BATCH)), ((None, 0), (2.0, batches)), (0, (ws, batches))]:
        mapped = jax.vmap(fn, axes)
        assert not uses_in_place(mapped, *args)
        in_axes = np.broadcast_to(axes, 2)
        one_by_one = [
            fn(*(a if axis is None else a[i] for a, axis in zip(args, in_axes, strict=True)))
            for i in range(2)
        ]
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *one_by_one)
        assert_close(run(mapped)(*args), stacked, 1e-6)


@pytest.mark.parametrize("options", [{}, dict(weight=jnp.sum, in_place=False)], ids=label)
def test_vmap_of_a_jitted_function(options):
    fn = accum_jax.value_and_grad(_square, k=4, **options)
    actual = jax.vmap(jax.jit(fn), (0, None))(jnp.array([1.0, 2.0]), _BATCH)
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *[fn(w, _BATCH) for w in (1.0, 2.0)])
    assert_close(actual, expected, 1e-6)


@pytest.mark.parametrize("what", ["loss", "weight", "loss_scale", "num_real_microbatches"])
def test_vmap_over_what_is_closed_over(run, what):
    def fn(c):
        options = {
            "loss": dict(weight=jnp.sum),
            "weight": dict(weight=lambda b: jnp.sum(b) * c),
            "loss_scale": dict(loss_scale=c, weight=jnp.sum),
            "num_real_microbatches": dict(num_real_microbatches=c.astype(jnp.int32)),
        }[what]

        def loss(w, batch):
            return _square(w, batch) * (c if what == "loss" else 1)

        return accum_jax.value_and_grad(loss, k=4, **options)(jnp.float32(2), _BATCH)

    expected = jax.tree.map(lambda *xs: jnp.stack(xs), fn(jnp.float32(1)), fn(jnp.float32(3)))
    assert_close(run(jax.vmap(fn))(jnp.array([1.0, 3.0])), expected, 1e-6)


@pytest.mark.parametrize("weight", [None, jnp.sum], ids=["rows", "weighted"])
def test_derivatives(weight):
    def whole(w):
        if weight is None:
            return jnp.mean(jnp.sin(w * _BATCH))
        pairs = [_BATCH[i::4] for i in range(4)]
        return sum(jnp.sum(b) * jnp.mean(jnp.sin(w * b)) for b in pairs) / jnp.sum(_BATCH)

    def loss(w, batch):
        return jnp.mean(jnp.sin(w * batch))

    def grad(w, in_place=None):
        return accum_jax.grad(loss, k=4, weight=weight, in_place=in_place)(w, _BATCH)

    w = jnp.float32(0.3)
    second = jax.grad(jax.grad(whole))(w)
    jitted = jax.jit(functools.partial(grad, in_place=False))
    for derivative in (jax.grad(grad), jax.jacfwd(grad), jax.grad(jitted), jax.jacfwd(jitted)):
        assert_close(derivative(w), second, 1e-5)


def test_derivative_by_what_is_closed_over(run):
    def inner(c, in_place):
        def loss(w, batch):
            return c * _square(w, batch)

        return accum_jax.grad(loss, k=4, in_place=in_place)(jnp.float32(2), _BATCH)

    for in_place in (None, False):
        derivative = run(jax.grad(functools.partial(inner, in_place=in_place)))
        assert_same(derivative(jnp.float32(3)), jnp.float32(70))


_TWO = jnp.stack([_BATCH, _BATCH[::-1] / 2])


def _descend_by_scan(grad, w):
    return jax.lax.scan(lambda w, batch: (w - 1e-3 * grad(w, batch), None), w, _TWO)[0]


def _descend_by_fori(grad, w):
    return jax.lax.fori_loop(0, 2, lambda i, w: w - 1e-3 * grad(w, _TWO[i]), w)


def _sum_by_map(grad, w):
    return jnp.sum(jax.lax.map(lambda batch: grad(w, batch), _TWO))


def _by_cond(grad, w):
    return jax.lax.cond(jnp.sum(_BATCH) > 0, lambda w: grad(w, _BATCH), lambda w: 0 * w, w)


@pytest.mark.parametrize("around", [_descend_by_scan, _descend_by_fori, _sum_by_map, _by_cond])
def test_inside_of_control_flow(run, around):
    """What differentiates or maps the loop outside cannot be seen from inside."""
    expected_fn = functools.partial(around, jax.grad(_square))
    actual_fn = functools.partial(around, accum_jax.grad(_square, k=4))
    w = jnp.float32(2)
    assert_close(run(actual_fn)(w), expected_fn(w), 1e-6)
    assert_close(run(jax.grad(actual_fn))(w), jax.grad(expected_fn)(w), 1e-6)
    tangent = jax.jvp(actual_fn, (w,), (w,))
    assert_close(tangent, jax.jvp(expected_fn, (w,), (w,)), 1e-6)
    ws = jnp.array([1.0, 2.0])
    assert_close(run(jax.vmap(actual_fn))(ws), jax.vmap(expected_fn)(ws), 1e-6)


def test_inside_of_a_rematerialised_function(run):
    def grad(w):
        return accum_jax.grad(_square, k=4, in_place=False)(w, _BATCH)

    assert_close(run(jax.grad(jax.checkpoint(grad)))(jnp.float32(2)), jnp.float32(35), 1e-6)


# Errors


def _refuses(error, *fragments):
    """An error whose message starts with the function's name and holds the fragments in order."""
    return pytest.raises(error, match="(?s)^value_and_grad: .*" + ".*".join(fragments))


@pytest.mark.parametrize(
    "options, fragments",
    [
        (dict(nonfinite="skip"), ('nonfinite="skip"', "dynamic_loss_scale", "in_place=None")),
        (dict(stats="norms"), ('stats="norms"', 'stats="counts"', "in_place=None")),
    ],
    ids=label,
)
def test_in_place_is_refused_when_built(options, fragments):
    with _refuses(ValueError, "in_place=True", *fragments):
        accum_jax.value_and_grad(_fit, k=4, in_place=True, **options)


@pytest.mark.parametrize(
    "dtype, options, fragments",
    [
        (jnp.bfloat16, {}, ("bfloat16", "float32", "accumulator_dtype", "in_place=None")),
        (jnp.float16, {}, ("float16", "float32", "in_place=None")),
        (jnp.complex64, {}, ("complex64", "in_place=None")),
        (jnp.float32, dict(accumulator_dtype=jnp.bfloat16), ("accumulator_dtype",)),
    ],
    ids=label,
)
def test_in_place_is_refused_for_dtypes(run, dtype, options, fragments):
    def loss(w, batch):
        return jnp.mean(jnp.abs(w * batch)).astype(jnp.float32)

    with _refuses(ValueError, "in_place=True", *fragments):
        run(accum_jax.value_and_grad(loss, k=4, in_place=True, **options))(
            jnp.asarray(1, dtype), _BATCH
        )


@pytest.mark.parametrize("transform", [lambda f: jax.vmap(f, (0, None)), jax.jacfwd, jax.jacrev])
def test_in_place_is_refused_under_transformations(run, transform):
    fn = accum_jax.grad(_square, k=4, in_place=True)
    with pytest.raises(ValueError, match=r"^grad: in_place=True .*(vmap|differentiation)"):
        run(transform(fn))(jnp.array([1.0, 2.0]) if transform is not jax.jacfwd else 1.0, _BATCH)


def test_in_place_is_refused_where_weights_would_be_rounded():
    def loss(w, batch):
        return jnp.mean(w * batch).astype(jnp.bfloat16)

    fn = accum_jax.value_and_grad(loss, k=2, weight=lambda b: 257.0, in_place=True)
    with _refuses(ValueError, "in_place=True", "bfloat16", "in_place=None"):
        fn(jnp.float32(1), jnp.ones(4))


@pytest.mark.parametrize(
    "error, options, fragments",
    [
        (TypeError, dict(aux="sum"), ("aux='sum'", "has_aux=True")),
        (TypeError, dict(argnums=1), ("batch", "batch_argnums", "argnums", "one role")),
        (TypeError, dict(argnums=(0, 1)), ("batch", "batch_argnums", "argnums")),
        (TypeError, dict(argnums=0, key_argnums=0), ("w", "key_argnums", "argnums")),
        (
            TypeError,
            dict(argnums=0, has_aux=True, aux=thread(0)),
            ("w", "thread", "argnums"),
        ),
        (TypeError, dict(argnums=1.0), ("argnums", "1.0")),
        (TypeError, dict(argnums=True), ("argnums", "True")),
        (TypeError, dict(argnums="0"), ("argnums", "'0'")),
        ((TypeError, ValueError), dict(reduction="max"), ("reduction", "sum_over_weight", "max")),
        ((TypeError, ValueError), dict(reduction=None), ("reduction", "mean", "None")),
        ((TypeError, ValueError), dict(in_place="yes"), ("in_place", "True", "yes")),
        ((TypeError, ValueError), dict(in_place=1), ("in_place", "True", "1")),
        ((TypeError, ValueError), dict(has_aux="yes"), ("has_aux", "True", "yes")),
        ((TypeError, ValueError), dict(allow_int="yes"), ("allow_int", "True", "yes")),
        (TypeError, dict(loss_scale="8"), ("loss_scale", "'8'")),
        (TypeError, dict(loss_scale=1j), ("loss_scale",)),
        ((TypeError, ValueError), dict(loss_scale=np.ones(2)), ("loss_scale",)),
        (
            ValueError,
            dict(loss_scale=8.0, nonfinite="skip"),
            ("loss_scale", 'nonfinite="skip"', "dynamic_loss_scale"),
        ),
        (TypeError, dict(k=None), ("k", "microbatch_size")),
        (TypeError, dict(weight=jnp.sum, weight_from_output=jnp.sum), ("weight", "not both")),
    ],
    ids=label,
)
def test_static_arguments_are_checked_when_built(error, options, fragments):
    with _refuses(error, *fragments):
        accum_jax.value_and_grad(linear, **{"k": 4, **options})


def test_keywords_of_accumulate_that_have_no_meaning_here():
    for name in ("grad", "value_and_grad"):
        with pytest.raises(TypeError, match="reduce"):
            getattr(accum_jax, name)(linear, k=2, reduce="mean")


@pytest.mark.parametrize(
    "error, options, fragments",
    [
        (TypeError, dict(argnums=-1), ("batch", "batch_argnums", "argnums")),
        (ValueError, dict(argnums=5), ("argnums", "5", "2")),
        (ValueError, dict(k=3), ("k=3", "8", "batch", "1, 2, 4, 8", "tail")),
    ],
    ids=label,
)
def test_arguments_are_checked_when_traced(run, error, options, fragments):
    with _refuses(error, *fragments):
        run(accum_jax.value_and_grad(linear, **{"k": 4, **options}))(jnp.float32(1), _BATCH)


@pytest.mark.parametrize(
    "leaf, fragments",
    [
        (jnp.arange(2), (r"params\['a'\]", "int32", "allow_int=True")),
        (3, (r"params\['a'\]", "int32", "allow_int=True")),
        (True, (r"params\['a'\]", "bool", "allow_int=True")),
        ("text", (r"params\['a'\]", "'text'", "str", "another argument")),
        (jax.random.key(0), (r"params\['a'\]", "key", "another argument")),
    ],
    ids=label,
)
def test_leaves_that_cannot_be_differentiated(leaf, fragments):
    def loss(params, batch):
        return jnp.mean(params["w"] * batch)

    with _refuses(TypeError, *fragments):
        accum_jax.value_and_grad(loss, k=4)({"a": leaf, "w": 1.0}, _BATCH)


@pytest.mark.parametrize(
    "output, fragments",
    [
        (lambda w, b: w * b, ("loss", "scalar", "float32", "2")),
        (lambda w, b: jnp.sum(w * b)[None], ("loss", "scalar", "float32")),
        (lambda w, b: jnp.int32(3), ("loss", "int32")),
        (lambda w, b: jnp.mean(b) > 0, ("loss", "bool")),
        (lambda w, b: jnp.mean(w * b) * 1j, ("loss", "complex64")),
        (lambda w, b: None, ("loss", "None")),
        (lambda w, b: "text", ("loss", "'text'")),
        (lambda w, b: (jnp.mean(w * b), {}), ("loss", "has_aux=True")),
        (lambda w, b: {"loss": jnp.mean(w * b)}, ("loss", "scalar")),
    ],
)
def test_losses_that_are_no_scalar(run, output, fragments):
    with _refuses(TypeError, *fragments):
        run(accum_jax.value_and_grad(output, k=4))(jnp.float32(1), _BATCH)


@pytest.mark.parametrize(
    "output",
    [
        lambda w, b: jnp.mean(w * b),
        lambda w, b: (jnp.mean(w * b), 1.0, 2.0),
        lambda w, b: {"loss": jnp.mean(w * b)},
    ],
    ids=["scalar", "triple", "dict"],
)
def test_functions_without_the_auxiliary_output(run, output):
    with _refuses((TypeError, ValueError), "has_aux"):
        run(accum_jax.value_and_grad(output, 0, True, k=4))(jnp.float32(1), _BATCH)


def test_aux_that_does_not_fit():
    with _refuses(ValueError, "aux"):
        accum_jax.value_and_grad(_with_count, 0, True, k=4, aux={"other": "sum"})(*_fit_problem(8))
    with _refuses(TypeError, r"tokens", "int32", '"sum"'):
        accum_jax.value_and_grad(_with_count, 0, True, k=4)(*_fit_problem(8))


def test_grad_names_itself():
    with pytest.raises(TypeError, match=r"^grad: .*argnums"):
        accum_jax.grad(linear, argnums=1, k=4)
    with pytest.raises(TypeError, match=r"^grad: "):
        accum_jax.grad(lambda w, b: None, k=4)(1.0, _BATCH)


# Traces, compilations, program size


@_WAYS
@pytest.mark.parametrize("options", [{}, dict(weight=_tokens), dict(loss_scale=2.0)], ids=label)
def test_the_loss_is_traced_once(run, in_place, options):
    counted = Counted(_fit)
    fn = run(accum_jax.value_and_grad(counted, k=3, in_place=in_place, **options))
    for _ in range(3):
        fn(*_fit_problem(12))
    assert counted.calls <= 2  # once for the loop, at most once more for types
    counted = Counted(_fit)
    fn = run(accum_jax.value_and_grad(counted, k=1, in_place=in_place, **options))
    fn(*_fit_problem(5))
    assert counted.calls == 1  # no leaf of the output could hold 5 rows


@_WAYS
def test_second_eager_call_compiles_nothing(in_place):
    fn = accum_jax.value_and_grad(_fit, k=4, in_place=in_place)
    params, batch = _fit_problem(12)
    jax.block_until_ready(fn(params, batch))
    with compilations() as compiled:
        jax.block_until_ready(fn(params, batch))
    assert not compiled


@_WAYS
@pytest.mark.parametrize("options", [{}, dict(weight=_tokens)], ids=label)
def test_program_size_is_independent_of_k(in_place, options):
    sizes = []
    for k in (2, 64):
        fn = accum_jax.value_and_grad(layered, k=k, in_place=in_place, **options)
        problem = layered_problem(4 * k)
        sizes.append((num_equations(fn, *problem), num_instructions(compile_for(fn, *problem))))
    (few_equations, few), (many_equations, many) = sizes
    assert many_equations == few_equations
    assert many == few


# Memory and work


_P = 4 * (8 * 512 * 512 + 8 * 512 + 512)


@functools.cache
def _compiled(k=8, **options):
    fn = accum_jax.value_and_grad(layered, k=k, **options)
    return compile_for(fn, *layered_problem(4 * k, num_layers=8, width=512))


def test_in_place_saves_a_gradient():
    """Temporary memory; the result itself is the accumulator."""
    scan, in_place = temp_bytes(_compiled(in_place=False)), temp_bytes(_compiled())
    assert in_place <= scan - 0.8 * _P
    weighted = [_compiled(in_place=way, weight=_tokens) for way in (False, True)]
    scan, in_place = map(temp_bytes, weighted)
    assert in_place <= scan - 0.7 * _P


@pytest.mark.parametrize("weight", [None, _tokens], ids=["rows", "weighted"])
def test_a_donated_step_holds_one_gradient(weight):
    params, batch = layered_problem(32, num_layers=8, width=512)
    tx = optax.adam(1e-3)

    def step(grad_fn, params, state, batch):
        _, grads = grad_fn(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    one = temp_bytes(compile_for(jax.value_and_grad(layered), params, rows(batch, 8, 0)))
    activations = one  # its gradient is an output
    fn = accum_jax.value_and_grad(layered, k=8, weight=weight)
    jitted = jax.jit(functools.partial(step, fn), donate_argnums=(0, 1))
    temp = temp_bytes(jitted.lower(params, tx.init(params), batch).compile())
    assert temp - activations <= (1.15 if weight is None else 1.25) * _P


@_WAYS
def test_memory_is_flat_in_k(in_place):
    few, many = (temp_bytes(_compiled(k=k, in_place=in_place)) for k in (8, 64))
    assert many <= 1.02 * few


def test_work_is_that_of_the_scan():
    """A loop body counts once."""
    in_place, scan = _compiled(), _compiled(in_place=False)
    assert cost(in_place, "flops") <= 1.01 * cost(scan, "flops")
    assert cost(in_place, "bytes accessed") <= 1.01 * cost(scan, "bytes accessed")


# Known faults


@_WAYS
@pytest.mark.parametrize("tokens", [[1, 3], [2, 2]], ids=label)
def test_fault_mean_of_means(run, in_place, tokens):
    grads, mask = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    flat = iter([6, 2, 2, 2])
    for row, count in enumerate(tokens):
        grads[row, :count] = [next(flat) for _ in range(count)]
        mask[row, :count] = 1

    def loss(w, batch):
        return jnp.sum(w * batch["g"]) / jnp.sum(batch["m"])

    options = dict(k=2, weight=lambda b: jnp.sum(b["m"]), in_place=in_place)
    grad = run(accum_jax.grad(loss, **options))(jnp.float32(0), {"g": grads, "m": mask})
    assert_same(grad, jnp.float32(3))


@_WAYS
@pytest.mark.parametrize("k", [1, 2, 4])
def test_fault_factor_k(run, in_place, k):
    actual = run(
        accum_jax.value_and_grad(lambda w, b: jnp.mean(2.5 + w * b), k=k, in_place=in_place)
    )(jnp.float32(0), jnp.ones(4))
    assert_same(actual, (jnp.float32(2.5), jnp.float32(1)))


@_WAYS
@pytest.mark.parametrize("k", [1, 4])
def test_fault_second_loss_path(run, in_place, k):
    def loss(w, batch):
        logits = jnp.stack([w, jnp.zeros_like(w)]) * batch[:, None]
        target = jnp.array([0.95, 0.05])
        return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(logits), -1))

    grad = run(accum_jax.grad(loss, k=k, in_place=in_place))(jnp.float32(0), jnp.ones(4))
    assert_same(grad, jnp.float32(-0.45), rtol=1e-6)


@_WAYS
def test_fault_logged_loss(run, in_place):
    def loss(w, batch):
        return jnp.mean(batch["loss"]) + 0 * w

    def value(losses, weights):
        batch = {"loss": jnp.array(losses, jnp.float32), "w": jnp.array(weights, jnp.float32)}
        options = dict(k=len(losses), weight=lambda b: b["w"][0], in_place=in_place)
        return run(accum_jax.value_and_grad(loss, **options))(jnp.float32(0), batch)[0]

    assert_same(value([4, 2, 6, 8], [1, 1, 1, 1]), jnp.float32(5))
    assert_same(value([4, 2], [1, 3]), jnp.float32(2.5))


@_WAYS
def test_fault_masks(run, in_place):
    def loss(w, batch, key):
        mask = jax.random.bernoulli(key, 0.5, (16,))
        return jnp.mean(w * mask) + 0 * jnp.mean(batch), mask

    options = dict(k=4, has_aux=True, aux="stack", key_argnums=2, in_place=in_place)
    fn, key = run(accum_jax.grad(loss, **options)), jax.random.key(5)
    grads, masks = fn(jnp.ones(16), jnp.ones(4), key)
    assert len({mask.tobytes() for mask in np.asarray(masks)}) == 4
    assert_same(grads, jnp.mean(masks, axis=0, dtype=jnp.float32) / 16)
    assert_same(fn(jnp.ones(16), jnp.ones(4), key), (grads, masks))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_fault_bfloat16_parameters(run, k):
    def loss(w, batch):
        return jnp.mean(jnp.square(w * batch - 2 * batch))

    x = jnp.array([1, 2, 3, 4], jnp.bfloat16)
    grad = run(accum_jax.grad(loss, k=k))(jnp.bfloat16(0), x)
    assert_same(grad, jnp.bfloat16(-30))
    assert_same(optax.apply_updates(jnp.bfloat16(0), -0.01 * grad), jnp.bfloat16(0.30078125))


@_WAYS
def test_fault_unscale(run, in_place):
    def step(scale, batch):
        options = dict(k=2, loss_scale=scale, in_place=in_place)
        grad = accum_jax.grad(linear, **options)(jnp.float32(0), batch)
        return optax.clip_by_global_norm(10).update(grad / scale, optax.EmptyState())[0]

    assert_same(run(step)(jnp.float32(1024), jnp.array([3, 5], jnp.float32)), jnp.float32(4))


def test_fault_nonfinite_policy(run):
    batch = jnp.array([1, jnp.nan, 4], jnp.float32)
    grad = run(accum_jax.grad(linear, k=3, nonfinite="skip"))(jnp.float32(0), batch)
    assert_same(grad, jnp.float32(2.5))


@_WAYS
def test_fault_doubling(run, in_place):
    options = dict(k=4, reduction="sum", in_place=in_place)
    assert_same(run(accum_jax.grad(linear, **options))(jnp.float32(0), jnp.ones(4)), jnp.float32(4))


@_WAYS
def test_fault_short_tail_divisor(run, in_place):
    options = dict(microbatch_size=8, remainder="tail", in_place=in_place)
    grad = run(accum_jax.grad(linear, **options))(jnp.float32(0), jnp.ones(33))
    assert_same(grad, jnp.float32(1))
