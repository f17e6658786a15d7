from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Counted,
    assert_same,
    compilations,
    compile_for,
    float64_gradient,
    linear,
    microbatch_outputs,
    mse,
    mse_problem,
    num_equations,
    num_instructions,
    rms_error,
    weighted_mean,
)

from accum_jax import accumulate, thread

# Values


@pytest.mark.parametrize("k", [1, 2, 3, 8, 64])
def test_error_against_float64_is_that_of_the_whole_batch(k):
    whole_fn = jax.jit(jax.grad(mse))
    accumulated_fn = jax.jit(accumulate(jax.grad(mse), k))
    errors = []
    for seed in range(16):
        problem = mse_problem(192, features=8, width=16, seed=seed)
        exact = float64_gradient(mse, *problem)
        errors.append([rms_error(fn(*problem), exact) for fn in (accumulated_fn, whole_fn)])
    # Root mean square over seeds: one lucky rounding of the whole batch must not decide.
    accumulated, whole = np.sqrt(np.mean(np.square(errors), axis=0))
    assert accumulated <= 1.5 * whole
    assert whole < 1e-6


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_value_and_gradient_of_the_whole_batch(run, k):
    problem = mse_problem(12)
    actual = run(accumulate(jax.value_and_grad(mse), k))(*problem)
    # Two summation orders of 12 float32 rows differ by a few units in the last place.
    assert_same(actual, jax.value_and_grad(mse)(*problem), rtol=1e-5, atol=1e-6)


def test_small_integers_are_exact(run):
    batch = jnp.array([3, -1, 4, 1, -5, 9, 2, -6], jnp.float32)
    actual = run(accumulate(jax.value_and_grad(linear), 4))(jnp.float32(2), batch)
    assert_same(actual, (jnp.float32(1.75), jnp.float32(0.875)))


def test_ones_in_bfloat16_stay_one(run):
    batch = jnp.ones(4096, jnp.bfloat16)
    actual = run(accumulate(jax.grad(linear), 4096))(jnp.bfloat16(0), batch)
    assert_same(actual, jnp.bfloat16(1))


def test_one_microbatch_is_the_function_itself(run):
    problem = mse_problem(5)
    actual = run(accumulate(jax.value_and_grad(mse), 1))(*problem)
    # Compiled and op by op, float32 sums of a few products differ in the last places.
    assert_same(actual, jax.value_and_grad(mse)(*problem), rtol=1e-5, atol=1e-6)


# Forms of k


@pytest.mark.parametrize(
    "size",
    [
        dict(k=4),
        dict(k=np.int64(4)),
        dict(k=np.uint8(4)),
        dict(microbatch_size=2),
        dict(microbatch_size=np.int32(2)),
    ],
    ids=str,
)
def test_k_and_microbatch_size_count_the_same(size):
    stack = accumulate(lambda params, x: x, reduce="stack", **size)(None, jnp.arange(8.0))
    assert_same(stack, jnp.array([[0, 4], [1, 5], [2, 6], [3, 7]], jnp.float32))


# Types


def _outputs(params, batch):
    """An output with everything a result may hold."""
    hidden = batch["x"] @ params["w"]
    return {
        "mean": {"loss": jnp.mean(hidden), "low": jnp.mean(hidden).astype(jnp.bfloat16)},
        "sum": (jnp.sum(hidden).astype(jnp.float16), jnp.sum(batch["n"]), None),
        "concat": [hidden, batch["n"], batch["n"] > 1, batch["x"].astype(jnp.bfloat16)],
        "empty": {},
        "complex": jax.lax.complex(jnp.sum(hidden), jnp.mean(hidden)),
    }


_OUTPUTS_REDUCE = {
    "mean": "mean",
    "sum": "sum",
    "concat": "concat",
    "empty": "mean",
    "complex": "mean",
}


@pytest.mark.parametrize("k", [1, 2, 3])
def test_result_has_the_type_of_the_whole_batch(k):
    params = {"w": jnp.ones((3, 2))}
    batch = {"x": jnp.ones((6, 3)), "n": jnp.arange(6)}
    accumulated = accumulate(_outputs, k, reduce=_OUTPUTS_REDUCE)
    expected = jax.eval_shape(_outputs, params, batch)
    assert jax.eval_shape(accumulated, params, batch) == expected
    # eval_shape is believed by callers, so the result must have those types too.
    chex.assert_trees_all_equal_shapes_and_dtypes(accumulated(params, batch), expected)


@pytest.mark.parametrize("reduce", ["mean", "sum", "sum_over_weight"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
def test_gradient_dtype_is_the_parameter_dtype(reduce, dtype):
    def loss(w, x):
        return jnp.sum(jnp.real(w)).astype(jnp.float32) * jnp.mean(x)

    w = jnp.ones((2,), dtype)
    shapes = jax.eval_shape(accumulate(jax.grad(loss), 2, reduce=reduce), w, jnp.ones(4))
    assert shapes.dtype == dtype


@pytest.mark.usefixtures("x64")
def test_wide_leaves_keep_their_width():
    batch = jnp.array([1.0, 1 + 2.0**-40, 1.0, 1 + 2.0**-40])
    actual = accumulate(jax.grad(linear), 2)(jnp.float64(0), batch)
    assert_same(actual, jnp.float64(1 + 2.0**-41))


def test_none_float0_and_other_leaves_pass_through():
    def fn(params, batch):
        grads = jax.grad(lambda p: jnp.mean(p["w"] * batch), allow_int=True)(params)
        return {"grads": grads, "none": None, "name": "linear", "fn": jnp.tanh, "empty": ()}

    params = {"w": jnp.float32(1), "step": jnp.int32(3)}
    actual = accumulate(fn, 2)(params, jnp.array([1.0, 2.0, 3.0, 6.0]))
    assert actual["grads"]["w"] == 3.0
    assert actual["grads"]["step"].dtype == jax.dtypes.float0
    assert actual["grads"]["step"].shape == ()
    assert actual["none"] is None
    assert actual["name"] == "linear"
    assert actual["fn"] is jnp.tanh
    assert actual["empty"] == ()


def test_float0_passes_through_under_jit():
    params = {"w": jnp.float32(1), "step": jnp.int32(3)}
    grad_fn = jax.grad(lambda p, x: linear(p["w"], x), allow_int=True)

    @jax.jit
    def step(params, batch):
        grads = accumulate(grad_fn, 2)(params, batch)
        assert grads["step"].dtype == jax.dtypes.float0
        return grads["w"]

    assert step(params, jnp.array([1.0, 2.0, 3.0, 6.0])) == 3.0


# Roles


def test_other_arguments_are_passed_whole(run):
    def fn(params, batch, table, scale):
        return jnp.sum(table[batch]) * scale * params

    table = jnp.arange(4.0)  # As long as the batch: only its role says it is not one.
    actual = run(accumulate(fn, 2, reduce="sum"))(
        jnp.float32(1), jnp.array([0, 1, 2, 3]), table, jnp.float32(2)
    )
    assert_same(actual, jnp.float32(12))


def test_keyword_arguments_are_passed_whole_and_untraced():
    seen = []

    def fn(params, batch, *, train, rate=0.5, table):
        seen.append((train, rate))
        return params * jnp.sum(batch) * (2.0 if train else 1.0) + jnp.sum(table) * rate

    accumulated = accumulate(fn, 2, reduce="sum")
    args = jnp.float32(1), jnp.arange(4.0)
    assert accumulated(*args, train=True, table=jnp.zeros(4)) == 12
    assert accumulated(*args, train=False, table=jnp.zeros(4)) == 6
    assert accumulated(*args, train=False, table=jnp.ones(4)) == 6 + 2 * 2
    assert accumulated(*args, train=False, table=jnp.ones(4), rate=0.25) == 6 + 2 * 1
    assert all(type(train) is bool and type(rate) is float for train, rate in seen)


def test_non_array_leaves_are_passed_whole_and_untraced(run):
    def fn(model, batch):
        assert model["activation"] is jnp.tanh
        assert batch["split"] == "train"
        return jnp.mean(model["activation"](model["w"] * batch["x"]))

    model = {"w": jnp.float32(0.5), "activation": jnp.tanh}
    x = jnp.arange(4.0)
    accumulated = accumulate(fn, 2)
    actual = run(
        lambda w, x: accumulated(dict(model, w=w), {"x": x, "split": "train"}),
    )(model["w"], x)
    # One rounding in the mean of four float32 values, one in the mean of means.
    assert_same(actual, jnp.mean(jnp.tanh(0.5 * x)), rtol=1e-6)


def test_batch_in_several_arguments(run):
    def fn(params, x, scale, y):
        return params * jnp.mean(x * y) * scale

    x, y = jnp.arange(4.0), jnp.array([1.0, 2.0, 4.0, 8.0])
    args = jnp.float32(1), x, jnp.float32(2), y
    actual = run(accumulate(fn, 2, batch_argnums=(1, 3)))(*args)
    assert_same(actual, fn(*args))


def test_batch_in_first_argument(run):
    x = jnp.arange(4.0)
    actual = run(accumulate(lambda batch: jnp.mean(batch), 2, batch_argnums=0))(x)
    assert_same(actual, jnp.float32(1.5))


def test_numpy_batches_are_accepted():
    batch = np.array([1, 2, 3, 6], np.float32)
    assert_same(accumulate(jax.grad(linear), 2)(jnp.float32(0), batch), jnp.float32(3))


# Keys


def _draw(params, batch, key):
    return jax.random.uniform(key, batch.shape) + params


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_microbatch_key_is_folded_with_its_index(run, make_key):
    args = jnp.float32(1), jnp.zeros(6), make_key(7)
    accumulated = run(accumulate(_draw, 3, key_argnums=2, reduce="stack"))
    actual = accumulated(*args)
    expected = microbatch_outputs(_draw, 3, *args, key_argnums=(2,))
    assert_same(actual, jnp.stack(expected))
    assert_same(accumulated(*args), actual)
    assert len(np.unique(np.asarray(actual))) == 6


def test_one_microbatch_folds_index_zero(run):
    args = jnp.float32(0), jnp.zeros(4), jax.random.key(0)
    actual = run(accumulate(_draw, 1, key_argnums=(2,), reduce="concat"))(*args)
    assert_same(actual, _draw(*args[:2], jax.random.fold_in(args[2], 0)))


def test_trees_of_keys_and_several_key_arguments(run):
    def fn(params, batch, keys, noise):
        return (
            _draw(params, batch, keys["dropout"])
            + _draw(params, batch, keys["sample"])
            + _draw(params, batch, noise)
        )

    keys = {"dropout": jax.random.key(1), "sample": jax.random.PRNGKey(2)}
    args = jnp.float32(0), jnp.zeros(4), keys, jax.random.key(3)
    actual = run(accumulate(fn, 2, key_argnums=(2, 3), reduce="stack"))(*args)
    expected = microbatch_outputs(fn, 2, *args, key_argnums=(2, 3))
    assert_same(actual, jnp.stack(expected), rtol=1e-6)  # Sums of three may be reassociated.


def test_key_does_not_depend_on_the_data():
    accumulated = accumulate(_draw, 2, key_argnums=2, reduce="concat")
    key = jax.random.key(0)
    actual = accumulated(jnp.float32(0), jnp.zeros(4), key)
    assert_same(accumulated(jnp.float32(0), jnp.arange(4.0), key), actual)


def test_short_microbatch_has_the_next_key_index(run):
    args = jnp.float32(0), jnp.zeros(8), jax.random.key(0)
    accumulated = accumulate(
        _draw, microbatch_size=3, key_argnums=2, reduce="concat", remainder="tail"
    )
    actual = run(accumulated)(*args)
    draw = [
        jax.random.uniform(jax.random.fold_in(args[2], i), (m,)) for i, m in enumerate([3, 3, 2])
    ]
    expected = jnp.concatenate([jnp.stack(draw[:2], axis=1).ravel(), draw[2]])
    assert_same(actual, expected)


# Stacked


def test_stacked_microbatches_are_the_leading_axis(run):
    batch = {"x": jnp.arange(24.0).reshape(4, 2, 3), "y": jnp.arange(8.0).reshape(4, 2)}

    def fn(params, batch):
        return {
            "mean": jnp.mean(batch["x"]) * params,
            "stack": batch["y"],
            "concat": batch["x"],
        }

    reduce = {"mean": "mean", "stack": "stack", "concat": "concat"}
    actual = run(accumulate(fn, stacked=True, reduce=reduce))(jnp.float32(2), batch)
    expected = {
        "mean": jnp.float32(23),
        "stack": batch["y"],
        "concat": batch["x"].reshape(8, 3),
    }
    assert_same(actual, expected)


def test_stacked_keeps_groups_together(run):
    groups = jnp.array([[1, 1], [2, 2], [3, 3]], jnp.float32)

    def spread(_, group):
        return jnp.max(group) - jnp.min(group)

    assert_same(run(accumulate(spread, stacked=True, reduce="max"))(None, groups), jnp.float32(0))


def test_stacked_leaves_that_are_not_split(run):
    batch = {"x": jnp.arange(4.0).reshape(2, 2), "table": jnp.arange(5.0)}
    actual = run(
        accumulate(
            lambda _, b: jnp.sum(b["x"]) + jnp.sum(b["table"]),
            stacked=True,
            batch_axes={"x": 0, "table": None},
            reduce="stack",
        )
    )(None, batch)
    assert_same(actual, jnp.array([11.0, 15.0], jnp.float32))


# Remainder


@pytest.mark.parametrize(
    ("size", "microbatches"),
    [
        (dict(k=4), [[0, 3, 6], [1, 4, 7], [2, 5, 8], [9]]),
        (dict(k=3), [[0, 2, 4, 6], [1, 3, 5, 7], [8, 9]]),
        (dict(k=6), [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]),  # Two rows each: only five of them.
        (dict(k=5), [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]),
        (dict(microbatch_size=7), [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9]]),
        (dict(microbatch_size=10), [list(range(10))]),
    ],
    ids=str,
)
def test_tail_is_one_smaller_microbatch(run, size, microbatches):
    """Each microbatch writes its members as bits, so the sum of squares tells the partition."""
    batch = jnp.arange(10)

    def fn(_, rows):
        bits = jnp.sum(jnp.left_shift(1, rows))
        return {"squares": jnp.square(bits), "rows": rows, "mean": jnp.mean(rows.astype(float))}

    reduce = {"squares": "sum", "rows": "concat", "mean": "mean"}
    actual = run(accumulate(fn, remainder="tail", reduce=reduce, **size))(None, batch)
    squares = sum(sum(1 << r for r in rows) ** 2 for rows in microbatches)
    assert actual["squares"] == squares
    assert_same(actual["rows"], batch)
    assert_same(actual["mean"], jnp.float32(4.5), rtol=1e-6)


def test_tail_gives_the_whole_batch(run):
    problem = mse_problem(11)
    actual = run(accumulate(jax.value_and_grad(mse), 3, remainder="tail"))(*problem)
    # Another order of summing 11 float32 rows.
    assert_same(actual, jax.value_and_grad(mse)(*problem), rtol=1e-5, atol=1e-6)


def test_tail_without_remainder_is_the_plain_loop(run):
    problem = mse_problem(8)
    plain = run(accumulate(jax.grad(mse), 4))(*problem)
    assert_same(run(accumulate(jax.grad(mse), 4, remainder="tail"))(*problem), plain)


# Number of real microbatches


def test_only_real_microbatches_run_and_count():
    batch = jnp.array([[1.0, 3.0], [5.0, 7.0], [11.0, 13.0], [np.nan, np.inf]])
    calls = Counted(jax.value_and_grad(linear))
    w, counts = jnp.float32(1), [jnp.int32(n) for n in range(4)]

    @jax.jit
    def step(w, batch, n):
        return accumulate(calls, stacked=True, num_real_microbatches=n)(w, batch)

    with compilations() as compiled:
        actual = [step(w, batch, n) for n in counts]
    assert len(compiled) == 1
    assert calls.calls <= 2
    for value, expected in zip(actual, [0, 2, 4, 40 / 6], strict=True):
        assert_same(value, (jnp.float32(expected),) * 2, rtol=1e-6)


def test_real_microbatches_of_strided_rows(run):
    batch = jnp.arange(8.0)
    accumulated = accumulate(jax.grad(linear), 4, num_real_microbatches=3)
    assert_same(run(accumulated)(jnp.float32(0), batch), jnp.float32((0 + 4 + 1 + 5 + 2 + 6) / 6))


def test_state_stops_at_the_last_real_microbatch():
    def fn(w, batch, count):
        return jnp.mean(w * batch), count + 1

    @jax.jit
    def step(n):
        reduce = ("mean", thread(2))
        accumulated = accumulate(fn, 4, reduce=reduce, num_real_microbatches=n)
        return accumulated(jnp.float32(1), jnp.arange(4.0), jnp.int32(10))

    for n in range(5):
        assert step(n)[1] == 10 + n


def test_short_microbatch_is_the_last_real_one():
    @jax.jit
    def step(n):
        accumulated = accumulate(
            jax.grad(linear), microbatch_size=2, remainder="tail", num_real_microbatches=n
        )
        return accumulated(jnp.float32(0), jnp.array([1.0, 2.0, 5.0, 8.0, 14.0]))

    # Microbatches (1, 5), (2, 8) and (14).
    assert_same([step(n) for n in range(4)], [jnp.float32(x) for x in (0, 3, 4, 6)])


def test_real_microbatches_under_vmap():
    def step(n, batch):
        accumulated = accumulate(jax.grad(linear), 4, num_real_microbatches=n)
        return accumulated(jnp.float32(0), batch)

    batch = jnp.arange(4.0)
    actual = jax.vmap(step, in_axes=(0, None))(jnp.arange(5), batch)
    assert_same(actual, jnp.array([0, 0, 0.5, 1, 1.5], jnp.float32))


# Traces, compilations, size of the program


def test_function_is_traced_once_for_the_loop():
    for size in (dict(k=1), dict(k=2), dict(k=64), dict(microbatch_size=4)):
        grad_fn = Counted(jax.value_and_grad(mse))
        step = jax.jit(accumulate(grad_fn, **size))
        problem = mse_problem(64)
        step(*problem)
        step(*problem)
        assert grad_fn.calls <= 2, size


def test_eager_calls_compile_once():
    grad_fn = Counted(jax.value_and_grad(mse))
    accumulated = accumulate(grad_fn, 4)
    problems = [jax.block_until_ready(mse_problem(8, seed=seed)) for seed in range(3)]
    accumulated(*problems[0])
    assert grad_fn.calls <= 2
    calls = grad_fn.calls
    with compilations() as compiled:
        for problem in problems:
            jax.block_until_ready(accumulated(*problem))
    assert compiled == []
    assert grad_fn.calls == calls
    accumulated(*mse_problem(16))  # Another shape is another program.
    assert calls < grad_fn.calls <= calls + 2


def test_eager_calls_with_keys_keywords_and_objects_compile_once():
    def fn(model, batch, key, state, *, train):
        noise = jax.random.normal(key, ()) if train else jnp.float32(0)
        value = jnp.mean(model["f"](model["w"] * batch)) + noise
        return value, (state + 1, batch)

    calls = Counted(fn)
    accumulated = accumulate(
        calls, 2, key_argnums=2, reduce=("mean", (thread(3), "concat")), remainder="tail"
    )
    model = {"w": jnp.float32(2), "f": jnp.tanh}
    args = model, jnp.arange(4.0), jax.random.key(0), jnp.int32(0)
    first = accumulated(*args, train=True)
    traced = calls.calls
    with compilations() as compiled:
        second = accumulated(*args, train=True)
    assert compiled == []
    assert calls.calls == traced
    assert_same(second, first)


def test_eager_calls_see_new_values():
    """A cached program must not hold on to values of an earlier call."""

    def fn(model, batch, table):
        return model["scale"] * jnp.mean(batch) + jnp.sum(table)

    accumulated = accumulate(fn, 2)
    x = jnp.arange(4.0)
    zero = jnp.zeros(2)
    assert accumulated({"scale": 2.0}, x, zero) == 3.0
    assert accumulated({"scale": 4.0}, x, zero) == 6.0
    assert accumulated({"scale": 4.0}, x, zero + 1) == 8.0


def test_output_feeds_the_next_call_without_a_new_trace():
    grad_fn = Counted(jax.grad(linear))
    accumulated = accumulate(grad_fn, 2)

    @jax.jit
    def step(w, batch):
        return w - accumulated(w, batch)

    w, batch = jnp.zeros((), jnp.bfloat16), jnp.ones(4, jnp.bfloat16)
    for _ in range(3):
        w = step(w, batch)
    assert grad_fn.calls <= 2
    assert_same(w, jnp.bfloat16(-3))


@pytest.mark.parametrize(
    "options",
    [{}, dict(weight=lambda batch: jnp.sum(batch["y"] > 0), nonfinite="skip", stats="norms")],
    ids=["default", "everything"],
)
def test_program_size_does_not_depend_on_k(options):
    # Microbatches of four rows: with other rows a microbatch is another program.
    programs = [
        (accumulate(jax.value_and_grad(mse), k, **options), *mse_problem(4 * k)) for k in (2, 64)
    ]
    equations = [num_equations(*program) for program in programs]
    assert equations[0] == equations[1]
    instructions = [num_instructions(compile_for(*program)) for program in programs]
    assert instructions[0] == instructions[1]
    assert instructions[0] > 20


# All options at once


def test_options_compose(run):
    """Keys, state, weights and every reducer in one call, against a Python loop."""

    def fn(params, batch, key, state):
        noise = jax.random.uniform(key, ()) + state
        value = jnp.sum(params * batch["x"]) + noise
        return (value, params * value), {
            "rows": batch["x"] + noise,
            "state": state * jnp.float32(0.5) + jnp.max(batch["x"]),
            "high": value,
            "weight": jnp.sum(batch["n"]),
        }

    reduce = (
        "mean",
        {"rows": "concat", "state": thread(3), "high": "max", "weight": "sum"},
    )
    params = jnp.float32(2)
    batch = {"x": jnp.arange(8.0) / 8, "n": jnp.arange(8)}
    key, state = jax.random.key(0), jnp.float32(1)
    accumulated = accumulate(
        fn, 4, key_argnums=2, reduce=reduce, weight_from_output=lambda out: out[1]["weight"]
    )
    actual = run(accumulated)(params, batch, key, state)

    outputs = []
    for i in range(4):
        rows = jax.tree.map(lambda x, i=i: x[i::4], batch)
        outputs.append(fn(params, rows, jax.random.fold_in(key, i), state))
        state = outputs[-1][1]["state"]
    weights = [float(out[1]["weight"]) for out in outputs]
    expected = (
        weighted_mean([out[0] for out in outputs], weights),
        {
            "rows": jnp.stack([out[1]["rows"] for out in outputs], axis=1).reshape(8),
            "state": state,
            "high": jnp.max(jnp.stack([out[1]["high"] for out in outputs])),
            "weight": jnp.int32(28),
        },
    )
    assert_same(actual, expected, rtol=1e-6)  # A few float32 roundings per value.
