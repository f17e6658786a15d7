from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, linear, mse, mse_problem, weighted_mean
from optax import microbatching

from accum_jax import accumulate, thread

NAN, INF = float("nan"), float("inf")


def _stacked(fn, reduce, **options):
    """Accumulates ``fn(microbatch)`` over microbatches stacked on the leading axis."""
    accumulated = accumulate(lambda _, batch: fn(batch), stacked=True, reduce=reduce, **options)
    return functools.partial(accumulated, None)


def _single(fn, reduce, **options):
    """Accumulates ``fn(row)`` over microbatches of one row."""
    accumulated = accumulate(
        lambda _, batch: fn(jax.tree.map(lambda x: x[0], batch)),
        microbatch_size=1,
        reduce=reduce,
        **options,
    )
    return functools.partial(accumulated, None)


def _values(batch):
    """One scalar a microbatch."""
    return jnp.sum(batch["x"])


def _weights(batch):
    return jnp.sum(batch["w"])


def _batch(values, weights):
    """Microbatches of one row with the given values and weights."""
    return {"x": jnp.asarray(values)[:, None], "w": jnp.asarray(weights, jnp.float32)[:, None]}


# Reducers

_SCALARS = [5.0, -2.0, 7.0, 2.0]


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        ("mean", 3.0),
        ("sum", 12.0),
        ("sum_over_weight", 1.5),
        ("last", 2.0),
        ("max", 7.0),
        ("min", -2.0),
        ("stack", _SCALARS),
    ],
)
def test_reducers(run, reduce, expected):
    """Four microbatches of two rows each; rows are the default weight."""
    batch = jnp.stack([jnp.asarray(_SCALARS, jnp.float32), jnp.zeros(4)], axis=1)
    accumulated = run(_stacked(jnp.sum, reduce))
    assert_same(accumulated(batch), jnp.asarray(expected, jnp.float32))


@pytest.mark.parametrize(
    ("reduce", "expected"), [("sum", 8), ("last", 3), ("max", 9), ("min", -4), ("stack", None)]
)
def test_integers_stay_integers(run, reduce, expected):
    values = jnp.array([9, -4, 0, 3])
    actual = run(_stacked(lambda x: x, reduce))(values[:, None])
    assert_same(actual, values[:, None] if expected is None else jnp.array([expected]))


def test_integer_sums_are_exact(run):
    big = 2**24 + 1  # Not a float32.
    actual = run(_stacked(jnp.sum, "sum"))(jnp.array([[big], [big], [-big], [1]]))
    assert_same(actual, jnp.int32(big + 1))


def test_boolean_sums_count(run):
    actual = run(_stacked(lambda x: x > 1, "sum"))(jnp.array([[1, 2], [2, 2], [3, 0]]))
    assert jnp.issubdtype(actual.dtype, jnp.integer)
    np.testing.assert_array_equal(actual, [2, 2])


def test_max_and_min_of_one_sign_and_of_infinities(run):
    """The start of the loop is no candidate."""
    fn = run(_single(lambda x: (x, x), ("max", "min")))
    x = jnp.array([-3.0, -1.0, -2.0])
    assert_same(fn(x), (jnp.float32(-1), jnp.float32(-3)))
    assert_same(fn(-x), (jnp.float32(3), jnp.float32(1)))
    x = jnp.full(3, -INF)
    assert_same(fn(x), (jnp.float32(-INF), jnp.float32(-INF)))
    i = jnp.full(3, jnp.iinfo(jnp.int32).min)
    assert_same(run(_single(lambda x: x, "max"))(i), i[0])


def test_max_and_min_propagate_nan(run):
    actual = run(_single(lambda x: (x, x), ("max", "min")))(jnp.array([1.0, NAN, 2.0]))
    assert np.isnan(actual).all()


def test_prefix_of_reducers(run):
    def fn(batch):
        return {"a": (batch, {"b": batch + 1}), "c": [batch, batch], "d": None}

    reduce = {"a": "sum", "c": ["max", "stack"], "d": "mean"}
    actual = run(_single(fn, reduce))(jnp.array([1.0, 5.0]))
    expected = {
        "a": (jnp.float32(6), {"b": jnp.float32(8)}),
        "c": [jnp.float32(5), jnp.array([1.0, 5.0])],
        "d": None,
    }
    assert_same(actual, expected)


def test_mean_then_sum_over_weight_of_the_same_tokens(run):
    """A mean over tokens and a sum over tokens name one quantity in two ways."""
    mask = jnp.array([[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]], jnp.float32)
    batch = {"x": jnp.arange(12.0).reshape(4, 3), "mask": mask}

    def loss(reduction, w, batch):
        total = jnp.sum(w * batch["x"] * batch["mask"])
        if reduction == "sum":
            return total
        return total / jnp.maximum(jnp.sum(batch["mask"]), 1)

    def tokens(batch):
        return jnp.sum(batch["mask"])

    for k in (1, 2, 4):
        for reduction, reduce in [("mean", "mean"), ("sum", "sum_over_weight")]:
            fn = jax.value_and_grad(functools.partial(loss, reduction))
            actual = run(accumulate(fn, k, reduce=reduce, weight=tokens))(jnp.float32(1), batch)
            expected = jnp.float32((0 + 3 + 4 + 5 + 6 + 7) / 6)
            assert_same(actual, (expected, expected), rtol=1e-6)  # A mean of thirds is rounded.


# Weights


def test_weighted_mean(run):
    batch = _batch([4.0, 2.0, 8.0], [1.0, 3.0, 0.5])
    actual = run(_stacked(_values, "mean", weight=_weights))(batch)
    assert_same(actual, jnp.float32((4 + 6 + 4) / 4.5), rtol=1e-7)


def test_weight_from_output(run):
    batch = _batch([4.0, 2.0, 8.0], [1.0, 3.0, 4.0])
    fn = run(
        _stacked(
            lambda b: {"value": _values(b), "w": _weights(b)},
            {"value": "mean", "w": "sum"},
            weight_from_output=lambda out: out["w"],
        )
    )
    assert_same(fn(batch), {"value": jnp.float32(42 / 8), "w": jnp.float32(8)})


def test_weight_sees_the_batch_arguments_of_one_microbatch(run):
    seen = []

    def weight(x, mask):
        seen.append((x.shape, mask.shape))
        return jnp.sum(mask)

    def fn(params, x, scale, mask):
        return params * jnp.sum(x * mask) * scale / jnp.sum(mask)

    x, mask = jnp.arange(6.0), jnp.array([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    accumulated = accumulate(fn, 2, batch_argnums=(1, 3), weight=weight)
    actual = run(accumulated)(jnp.float32(1), x, jnp.float32(2), mask)
    assert set(seen) == {((3,), (3,))}
    assert_same(actual, jnp.float32(2 * (0 + 1 + 2 + 4) / 4), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.bfloat16, jnp.float16, jnp.uint8])
def test_weights_of_any_real_dtype(run, dtype):
    batch = _batch([4.0, 2.0, 8.0], [1, 0, 1])
    fn = _stacked(_values, "mean", weight=lambda b: _weights(b).astype(dtype))
    assert_same(run(fn)(batch), jnp.float32(6))


def test_python_number_as_weight(run):
    fn = _stacked(_values, "mean", weight=lambda batch: batch["x"].size)
    assert_same(run(fn)(_batch([4.0, 2.0], [0, 0])), jnp.float32(3))


def test_narrow_weights_are_summed_wide(run):
    """A total of 512 in bfloat16 steps of one would stop at 256."""
    fn = _stacked(_values, "mean", weight=lambda b: jnp.sum(b["w"]).astype(jnp.bfloat16))
    assert_same(run(fn)(_batch(np.ones(512, np.float32), np.ones(512))), jnp.float32(1))


def test_weights_of_low_precision_values(run):
    """w·x is formed in the accumulator dtype: 3 * 1.0078125 is not a bfloat16."""
    x = jnp.asarray([1.0078125, 1.0], jnp.bfloat16)
    batch = {"x": x[:, None], "w": jnp.array([[3.0], [1.0]])}
    actual = run(_stacked(_values, "mean", weight=_weights, output_dtype=jnp.float32))(batch)
    assert_same(actual, jnp.float32((3 * 1.0078125 + 1) / 4))


_EXCLUSION = {
    "mean": "mean",
    "sum": "sum",
    "over": "sum_over_weight",
    "max": "max",
    "min": "min",
    "last": "last",
    "concat": "concat",
    "stack": "stack",
}


def _everything(batch):
    value = jnp.sum(batch["x"])
    return dict.fromkeys(_EXCLUSION, value) | {"concat": batch["x"]}


def _state(_, batch, state):
    """A mean that may be non-finite beside a state that counts in powers of ten."""
    return jnp.sum(batch["x"]), state * 10 + jnp.sum(batch["w"]).astype(jnp.int32)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 100.0])
def test_weight_zero_adds_nothing(run, bad):
    values = [3.0, 5.0, bad]
    batch = _batch(values, [1.0, 3.0, 0.0])
    actual = run(_stacked(_everything, _EXCLUSION, weight=_weights))(batch)
    expected = {
        "mean": 18 / 4,
        "sum": 8.0,
        "over": 2.0,
        "max": 5.0,
        "min": 3.0,
        "last": 5.0,
        "concat": values,
        "stack": values,
    }
    assert_same(actual, jax.tree.map(np.float32, expected, is_leaf=lambda x: isinstance(x, list)))


@pytest.mark.parametrize("bad", [NAN, INF])
def test_weight_zero_first(run, bad):
    batch = _batch([bad, 3.0, 5.0], [0.0, 1.0, 3.0])
    actual = run(_stacked(_everything, _EXCLUSION, weight=_weights))(batch)
    scalars = [actual[name] for name in ("mean", "sum", "over", "max", "min", "last")]
    assert_same(scalars, [jnp.float32(x) for x in (4.5, 8, 2, 5, 3, 5)])


def test_total_weight_zero_gives_zeros(run):
    batch = _batch([NAN, 3.0, INF], [0.0, 0.0, 0.0])
    actual = run(_stacked(_everything, _EXCLUSION, weight=_weights))(batch)
    scalars = [actual[name] for name in ("mean", "sum", "over", "max", "min", "last")]
    assert_same(scalars, [jnp.float32(0)] * 6)


def test_tiny_total_weight_is_a_weight(run):
    """No floor under the denominator: only zero is zero."""
    batch = _batch([3.0, 5.0], [2.0**-60, 2.0**-60])
    assert_same(run(_stacked(_values, "mean", weight=_weights))(batch), jnp.float32(4))


def test_state_moves_on_at_weight_zero(run):
    accumulated = accumulate(
        _state,
        stacked=True,
        reduce=("mean", thread(2)),
        weight=lambda b: jnp.where(jnp.sum(b["w"]) == 2, 0.0, 1.0),
    )
    actual = run(accumulated)(None, _batch([1.0, NAN, 3.0], [1, 2, 3]), jnp.int32(0))
    assert_same(actual, (jnp.float32(2), jnp.int32(123)))


# Accumulator and output dtype


@pytest.mark.parametrize(
    ("dtype", "accumulator_dtype", "wide"),
    [
        (jnp.bfloat16, None, jnp.float32),
        (jnp.float16, None, jnp.float32),
        (jnp.float8_e4m3fn, None, jnp.float32),
        (jnp.float32, None, jnp.float32),
        (jnp.complex64, None, jnp.complex64),
        (jnp.float32, jnp.bfloat16, jnp.bfloat16),
        (jnp.float32, "bfloat16", jnp.bfloat16),
        (jnp.float16, jnp.float16, jnp.float16),
        (jnp.complex64, jnp.float32, jnp.complex64),
    ],
)
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_accumulator_dtype(dtype, accumulator_dtype, wide, reduce):
    batch = jnp.ones((2, 3), dtype)
    fn = _stacked(
        lambda x: x,
        reduce,
        accumulator_dtype=accumulator_dtype,
        output_dtype="accumulator",
    )
    assert jax.eval_shape(fn, batch) == jax.ShapeDtypeStruct((3,), wide)
    narrow = _stacked(lambda x: x, reduce, accumulator_dtype=accumulator_dtype)
    assert jax.eval_shape(narrow, batch) == jax.ShapeDtypeStruct((3,), dtype)


@pytest.mark.parametrize(
    ("dtype", "accumulator_dtype", "wide"),
    [
        (jnp.float64, None, jnp.float64),
        (jnp.complex128, None, jnp.complex128),
        (jnp.float32, jnp.float64, jnp.float64),
        (jnp.complex64, jnp.float64, jnp.complex128),
        (jnp.float64, jnp.float32, jnp.float32),
    ],
)
@pytest.mark.usefixtures("x64")
def test_accumulator_dtype_in_64_bits(dtype, accumulator_dtype, wide):
    fn = _stacked(
        lambda x: x, "mean", accumulator_dtype=accumulator_dtype, output_dtype="accumulator"
    )
    assert_same(fn(jnp.ones((2, 3), dtype)), jnp.ones(3, wide))


def test_sums_in_bfloat16_only_where_asked(run):
    batch = _batch(np.ones(512, np.float32), np.ones(512))
    assert_same(run(_stacked(_values, "mean"))(batch), jnp.float32(1))
    low = run(_stacked(_values, "mean", accumulator_dtype=jnp.bfloat16))
    assert_same(low(batch), jnp.float32(0.5))  # 256 + 1 is 256 in bfloat16.


def test_float16_does_not_overflow_on_the_way(run):
    batch = _batch(np.full(8, 30000, np.float16), np.ones(8))
    actual = run(_stacked(lambda b: (_values(b), _values(b)), ("mean", "sum")))(batch)
    assert_same(actual, (jnp.float16(30000), jnp.float16(INF)))
    wide = run(_stacked(_values, "sum", output_dtype="accumulator"))
    assert_same(wide(batch), jnp.float32(240000))


@pytest.mark.parametrize("output_dtype", [jnp.float16, jnp.float32, "bfloat16"])
def test_output_dtype_is_taken_as_given(run, output_dtype):
    batch = jnp.asarray([[1.0, 2.0], [3.0, 6.0]], jnp.bfloat16)
    actual = run(_stacked(lambda x: x, "mean", output_dtype=output_dtype))(batch)
    assert_same(actual, jnp.asarray([2, 4], output_dtype))


def test_accumulator_dtype_is_not_for_integers(run):
    fn = _single(
        lambda x: (x, x.astype(jnp.float32)),
        "sum",
        accumulator_dtype=jnp.bfloat16,
        output_dtype="accumulator",
    )
    actual = run(fn)(jnp.array([257, 1]))
    assert_same(actual[0], jnp.int32(258))
    assert actual[1].dtype == jnp.bfloat16


def test_complex_values(run):
    batch = jnp.array([[1 + 2j], [3 - 4j]], jnp.complex64)
    actual = run(_stacked(lambda x: (x, x, x), ("mean", "sum", "concat")))(batch)
    expected = jnp.array([2 - 1j]), jnp.array([4 - 2j]), batch[:, 0]
    assert_same(actual, jax.tree.map(lambda x: x.astype(jnp.complex64), expected))


# Non-finite values


def test_propagate_is_the_default(run):
    batch = _batch([1.0, NAN, 4.0], [1, 1, 1])
    actual = run(_stacked(lambda b: (_values(b), b["w"]), ("mean", "concat")))(batch)
    assert np.isnan(actual[0])
    assert_same(actual[1], jnp.ones(3))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_skip_leaves_the_microbatch_out(run, bad, position):
    values, weights = [3.0, 5.0], [1.0, 3.0]
    values.insert(position, bad)
    weights.insert(position, 7.0)
    fn = run(_stacked(_everything, _EXCLUSION, weight=_weights, nonfinite="skip"))
    actual = fn(_batch(values, weights))
    scalars = [actual[name] for name in ("mean", "sum", "over", "max", "min", "last")]
    assert_same(scalars, [jnp.float32(x) for x in (18 / 4, 8, 2, 5, 3, 5)])
    np.testing.assert_array_equal(actual["stack"], values)
    np.testing.assert_array_equal(actual["concat"], values)


def test_skip_in_any_leaf_leaves_out_all(run):
    """One bad gradient leaf takes the loss of its microbatch with it."""
    x = jnp.array([[1.0, 1.0], [2.0, NAN], [3.0, 5.0]])
    actual = run(_stacked(lambda x: (x[0], {"b": x[1]}), "mean", nonfinite="skip"))(x)
    assert_same(actual, (jnp.float32(2), {"b": jnp.float32(3)}))


def test_skip_looks_only_at_summed_leaves(run):
    reduce = {"mean": "mean", "max": "max", "rows": "concat", "last": "last"}

    def fn(batch):
        x = jnp.sum(batch["x"])
        return {"mean": jnp.nan_to_num(x), "max": x, "rows": batch["x"], "last": x}

    actual = run(_stacked(fn, reduce, nonfinite="skip"))(_batch([2.0, NAN], [1, 1]))
    assert_same(actual["mean"], jnp.float32(1))
    assert np.isnan([actual["max"], actual["last"], actual["rows"][1]]).all()


def test_skip_sees_complex_and_narrow_values(run):
    def fn(x):
        return x, jnp.real(x).astype(jnp.float16), jnp.int32(1)

    x = jnp.array([2, complex(1, NAN), 1e6, 4], jnp.complex64)  # 1e6 overflows float16.
    actual = run(_single(fn, ("mean", "mean", "sum"), nonfinite="skip"))(x)
    assert_same(actual, (jnp.complex64(3), jnp.float16(3), jnp.int32(2)))


def test_skip_of_everything_gives_zeros(run):
    fn = run(_stacked(_everything, _EXCLUSION, nonfinite="skip"))
    actual = fn(_batch([NAN, INF], [1, 1]))
    scalars = [actual[name] for name in ("mean", "sum", "over", "max", "min", "last")]
    assert_same(scalars, [jnp.float32(0)] * 6)


def test_state_stays_when_the_microbatch_is_skipped(run):
    def fn(_, batch, state):
        mean, count = _state(None, batch, state["count"])
        return mean, {"count": count, "bad": state["bad"] + mean}

    accumulated = accumulate(fn, stacked=True, reduce=("mean", thread(2)), nonfinite="skip")
    state = {"count": jnp.int32(0), "bad": jnp.float32(0)}
    actual = run(accumulated)(None, _batch([1.0, NAN, 3.0], [1, 2, 3]), state)
    assert_same(actual, (jnp.float32(2), {"count": jnp.int32(13), "bad": jnp.float32(4)}))


def test_skip_of_the_short_microbatch(run):
    batch = jnp.array([1.0, 2.0, 3.0, 6.0, NAN])
    accumulated = accumulate(
        jax.grad(linear), microbatch_size=2, remainder="tail", nonfinite="skip"
    )
    assert_same(run(accumulated)(jnp.float32(0), batch), jnp.float32(3))


def test_gradients_of_finite_batches_do_not_depend_on_the_policy(run):
    problem = mse_problem(6)
    plain = run(accumulate(jax.grad(mse), 3))(*problem)
    skipping = run(accumulate(jax.grad(mse), 3, nonfinite="skip"))(*problem)
    assert_same(skipping, plain, rtol=1e-6)  # Fused differently, rounded differently.


# State


def test_state_is_threaded_in_order(run):
    def fn(_, batch, state):
        return state * 10 + batch[0], jnp.sum(batch)

    accumulated = accumulate(fn, 4, reduce=(thread(2), "sum"))
    actual = run(accumulated)(None, jnp.array([1, 2, 3, 4]), jnp.int32(0))
    assert_same(actual, (jnp.int32(1234), jnp.int32(10)))


def test_several_states_of_any_structure(run):
    def fn(params, batch, stats, rng_state):
        new = {"mean": 0.5 * stats["mean"] + 0.5 * jnp.mean(batch), "n": (stats["n"][0] + 1,)}
        return params * jnp.mean(batch), (new, rng_state + jnp.uint32(3))

    accumulated = accumulate(fn, 2, reduce=("mean", (thread(2), thread(3))))
    stats = {"mean": jnp.float32(0), "n": (jnp.int32(0),)}
    args = jnp.float32(2), jnp.array([1.0, 2.0, 3.0, 6.0]), stats, jnp.uint32(1)
    expected = (
        jnp.float32(6),
        ({"mean": jnp.float32(0.5 * (0.5 * 2) + 0.5 * 4), "n": (jnp.int32(2),)}, jnp.uint32(7)),
    )
    assert_same(run(accumulated)(*args), expected)


def test_state_reaches_the_short_microbatch(run):
    def fn(_, batch, state):
        return state * 10 + batch.shape[0]

    accumulated = accumulate(fn, microbatch_size=2, remainder="tail", reduce=thread(2))
    assert_same(run(accumulated)(None, jnp.arange(5), jnp.int32(0)), jnp.int32(221))


def test_state_may_be_a_key(run):
    def fn(_, batch, key):
        key, draw = jax.random.split(key)
        return jax.random.uniform(draw), key

    accumulated = accumulate(fn, 3, reduce=("stack", thread(2)))
    draws, last = run(accumulated)(None, jnp.arange(3), jax.random.key(0))
    key, expected = jax.random.key(0), []
    for _ in range(3):
        draw, key = fn(None, None, key)
        expected.append(draw)
    assert_same(draws, jnp.stack(expected))
    assert last == key


# Custom reducers


class _Reducer:
    """Σ (index + 1)·x of a tree, doubled at the end; keeps what ``init`` was given."""

    def __init__(self):
        self.structs = []

    def init(self, struct):
        self.structs.append(struct)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), struct)

    def update(self, carry, value, index):
        return jax.tree.map(lambda c, v: c + v * jnp.asarray(index + 1, v.dtype), carry, value)

    def finalize(self, carry):
        return jax.tree.map(lambda c: 2 * c, carry)


def test_objects_reduce(run):
    reducer = _Reducer()
    fn = run(_single(lambda x: {"a": x, "b": x}, {"a": reducer, "b": "mean"}))
    actual = fn(jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    expected = {"a": jnp.array([44.0, 56.0]), "b": jnp.array([3.0, 4.0])}
    assert_same(actual, expected)
    struct = reducer.structs[0]
    assert (struct.shape, struct.dtype) == ((2,), jnp.float32)


def test_objects_reduce_subtrees(run):
    fn = run(_single(lambda x: {"a": x, "b": (x, x)}, _Reducer()))
    actual = fn(jnp.array([1.0, 3.0]))
    assert_same(actual, {"a": jnp.float32(14), "b": (jnp.float32(14),) * 2})


def test_carry_and_result_may_have_another_structure(run):
    @dataclasses.dataclass(frozen=True)
    class MeanAndVariance:
        def init(self, struct):
            zero = jnp.zeros(struct.shape, jnp.float32)
            return {"n": jnp.int32(0), "sum": zero, "square": zero}

        def update(self, carry, value, index):
            del index
            return {
                "n": carry["n"] + 1,
                "sum": carry["sum"] + value,
                "square": carry["square"] + jnp.square(value),
            }

        def finalize(self, carry):
            n = carry["n"].astype(jnp.float32)
            mean = carry["sum"] / n
            return mean, carry["square"] / n - jnp.square(mean)

    fn = run(_single(lambda x: (x, x), ("sum", MeanAndVariance())))
    actual = fn(jnp.array([1.0, 3.0, 1.0, 3.0]))
    assert_same(actual, (jnp.float32(8), (jnp.float32(2), jnp.float32(1))))


def test_optax_accumulator(run):
    running_max = microbatching.Accumulator(
        init=lambda struct: jnp.full(struct.shape, -jnp.inf, struct.dtype),
        update=lambda carry, value, index: jnp.where(index > 0, jnp.maximum(carry, value), carry),
        finalize=lambda carry: carry + 1,
        aggregate=lambda value: jnp.max(value, axis=0),
    )
    fn = run(_single(lambda x: (x, x), (running_max, "sum")))
    assert_same(fn(jnp.array([9.0, 4.0, 2.0])), (jnp.float32(5), jnp.float32(15)))


# Weighted means of real gradients


def test_weighted_gradients_of_a_model(run):
    params, batch = mse_problem(8)
    batch["w"] = jnp.array([1, 0, 2, 1, 0, 3, 1, 1], jnp.float32)
    grad_fn = jax.value_and_grad(mse)
    accumulated = accumulate(grad_fn, 4, weight=lambda b: jnp.sum(b["w"]))
    outputs = [grad_fn(params, jax.tree.map(lambda x, i=i: x[i::4], batch)) for i in range(4)]
    weights = [float(jnp.sum(batch["w"][i::4])) for i in range(4)]
    expected = weighted_mean(outputs, weights)
    assert_same(run(accumulated)(params, batch), expected, rtol=1e-5, atol=1e-6)
