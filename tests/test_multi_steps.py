"""One update step per window: the same updates as the whole batch, at one update's cost."""

from __future__ import annotations

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counted, compilations, compile_for, mse, mse_problem, num_instructions, quick
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from windows import drive, flush_at

from accum_jax._loss_scale import dynamic_loss_scale
from accum_jax._multi_steps import (
    from_optax_multi_steps,
    has_updated,
    microstep_schedule,
    multi_steps,
)
from accum_jax._opt_state import MultiStepsState, telemetry

SGD = optax.sgd(1.0)
NAN, INF = float("nan"), float("inf")


# The same trajectory as the whole batch


NUM_ROWS = 12
SPLITS = {  # rows of each microbatch
    1: (12,),
    2: (6, 6),
    5: (1, 3, 2, 5, 1),
    8: (1, 1, 1, 1, 1, 1, 1, 5),
}


def row_loss(params, x, y, mask):
    """Mean squared error over the rows of the mask."""
    row = jnp.square(jnp.tanh(x @ params["w1"]) @ params["w2"] + params["b"] - y)
    return jnp.sum(mask * row) / jnp.sum(mask)


def problem():
    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(size=(4, 6)), "w2": rng.normal(size=(6,)), "b": rng.normal()}
    x, y = rng.normal(size=(20, NUM_ROWS, 4)), rng.normal(size=(20, NUM_ROWS))
    return jax.tree.map(jnp.float32, (params, x, y))


def optimizers():
    rate = optax.linear_schedule(0.0, 0.02, 5)
    bases = {
        "adam": optax.adam(rate),
        "adamw": optax.adamw(rate, weight_decay=0.1),
        "adafactor": optax.adafactor(rate, min_dim_size_to_factor=4),
        "lion": optax.lion(rate),
        "muon": optax.contrib.muon(rate),
        "schedule_free": optax.contrib.schedule_free_adamw(0.02, warmup_steps=5),
    }
    clipped = {n: optax.chain(optax.clip_by_global_norm(0.5), tx) for n, tx in bases.items()}
    return clipped | {
        "masked": optax.chain(
            optax.masked(optax.add_decayed_weights(0.1), {"w1": True, "w2": True, "b": False}),
            optax.sgd(rate, momentum=0.9),
        ),
        "partition": optax.partition(
            {"slow": optax.sgd(0.01), "fast": optax.adam(rate)},
            {"w1": "slow", "w2": "fast", "b": "fast"},
        ),
        "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=rate),
        "apply_if_finite": optax.apply_if_finite(optax.adam(rate), 3),
    }


def masks(sizes):
    """The rows of each microbatch, as masks over the whole batch."""
    edges = np.cumsum((0, *sizes))
    row = np.arange(NUM_ROWS)
    return [jnp.float32((row >= a) & (row < b)) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("name", quick(optimizers(), "adam", "adafactor", "partition"))
def test_trajectory_of_20_updates_is_that_of_the_whole_batch(name):
    tx = optimizers()[name]
    start, x, y = problem()

    @jax.jit
    def whole(params, state, x, y):
        updates, state = tx.update(
            jax.grad(row_loss)(params, x, y, jnp.ones(NUM_ROWS)), state, params
        )
        return optax.apply_updates(params, updates), state

    @jax.jit
    def micro(params, state, x, y, mask, k, flush):
        wrapped = multi_steps(tx, lambda _: k)
        updates, state = wrapped.update(
            jax.grad(row_loss)(params, x, y, mask), state, params, weight=mask.sum(), flush=flush
        )
        return optax.apply_updates(params, updates), state

    expected, state, want = start, tx.init(start), []
    for update in range(20):
        expected, state = whole(expected, state, x[update], y[update])
        want.append(expected)

    for k, sizes in SPLITS.items():
        params, state = start, multi_steps(tx, k).init(start)
        for update in range(20):
            # The last window ends one microbatch early.
            last = update == 19 and k > 1
            rows = (*sizes[:-2], sum(sizes[-2:])) if last else sizes
            for index, mask in enumerate(masks(rows)):
                flush = jnp.bool_(last and index == len(rows) - 1)
                params, state = micro(params, state, x[update], y[update], mask, k, flush)
            # Sums in another order, through Adam's division: 20 updates of rounding.
            chex.assert_trees_all_close(params, want[update], rtol=2e-5, atol=2e-6)
        assert int(state.gradient_step) == 20
    assert micro._cache_size() == 1


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_sgd_is_exact_on_exact_numbers(run, k):
    # Powers of two as total weight and integers as gradients: nothing rounds.
    rng = np.random.default_rng(k)
    weights = {1: [8], 2: [3, 5], 5: [1, 2, 1, 3, 1], 8: [1] * 8}[k]
    grads = rng.integers(-8, 8, size=(20, k))
    calls = [{"weight": jnp.float32(w)} for w in weights] * 20
    seen, state = drive(multi_steps(optax.sgd(0.5), k), grads.ravel(), run=run, calls=calls)
    means = grads @ np.array(weights) / 8
    assert seen[k - 1 :: k] == (-0.5 * np.cumsum(means)).tolist()
    assert float(state.total_weight) == 8.0


def test_lookahead_runs_on_its_own_clock():
    tx = optax.lookahead(optax.sgd(0.5), sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(jnp.ones(2))
    wrapped = multi_steps(tx, 2)
    state, alone, expected = wrapped.init(params), tx.init(params), params
    for _ in range(4):
        for gradient in (0.0, 2.0):
            updates, state = wrapped.update(jnp.full(2, gradient), state, params)
            params = optax.apply_updates(params, updates)
        updates, alone = tx.update(jnp.full(2, 1.0), alone, expected)
        expected = optax.apply_updates(expected, updates)
        chex.assert_trees_all_equal(params, expected)


def test_extra_arguments_are_those_of_the_last_call(run):
    def update(grads, state, params=None, *, value, **extra):
        return jax.tree.map(lambda g: g * value, grads), value

    tx = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)
    calls = [{"value": jnp.float32(v)} for v in (3.0, 5.0)]
    seen, state = drive(multi_steps(tx, 2), [1.0, 3.0], run=run, calls=calls)
    assert (seen, float(state.inner_opt_state)) == ([0.0, 10.0], 5.0)
    polyak = multi_steps(optax.polyak_sgd(), 2)
    assert drive(polyak, [1.0, 1.0], 1.0, run=run, calls=calls)[0] == [1.0, 0.0]


def test_inside_other_wrappers(run):
    inner = multi_steps(optax.sgd(1.0), 2)
    params, grads = {"a": 0.0, "b": 0.0}, [{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 4.0}]
    labels = {"a": "x", "b": "y"}
    for tx, last in (
        (optax.chain(optax.identity(), inner, optax.scale(2.0)), {"a": -4.0, "b": -6.0}),
        (optax.masked(inner, {"a": True, "b": False}), {"a": -2.0, "b": 6.0}),
        (
            optax.partition({"x": inner, "y": optax.set_to_zero()}, labels),
            {"a": -2.0, "b": 0.0},
        ),
        (optax.apply_if_finite(inner, 2), {"a": -2.0, "b": -3.0}),
    ):
        seen, state = drive(tx, grads, params, run=run)
        assert seen[-1] == last
        assert bool(has_updated(state))
        assert int(telemetry(state)["multi_steps/gradient_step"]) == 1


# Weights, short windows


def test_weight_zero_adds_nothing_and_is_a_micro_step(run):
    calls = [{"weight": w} for w in (1.0, 0.0, 3.0)]
    for worst in (NAN, INF, -INF):
        for policy in ("propagate", "skip_microbatch", "skip_window"):
            tx = multi_steps(SGD, 3, nonfinite=policy)
            seen, state = drive(tx, [4.0, worst, 8.0], run=run, calls=calls)
            assert seen == [0.0, 0.0, -7.0]
            assert (int(state.num_skipped), float(state.total_weight)) == (0, 4.0)


def test_window_of_weight_zero_is_no_update(run):
    tx = multi_steps(optax.adamw(0.1, weight_decay=0.5), 2)
    calls = [{"weight": w} for w in (0.0, 0.0, 1.0, 1.0)]
    seen, state = drive(tx, [NAN, 1.0], 1.0, run=run, calls=calls[:2])
    assert seen == [1.0, 1.0]
    assert (int(state.mini_step), int(state.gradient_step)) == (0, 0)
    assert int(optax.tree.get(state, "count")) == 0
    assert not has_updated(state)
    _, state = drive(tx, [1.0, 1.0], 1.0, run=run, calls=calls[2:], state=state)
    assert int(state.gradient_step) == 1


def test_flush_of_an_empty_window_is_nothing(run):
    tx = multi_steps(optax.adam(0.1), 4)
    for kwargs in ({"weight": 0.0, "flush": True},):
        seen, state = drive(tx, [NAN], run=run, calls=[kwargs])
        chex.assert_trees_all_equal(state, tx.init(jnp.float32(0.0)))
        assert seen == [0.0]


def test_total_weight_and_has_updated_call_by_call(run):
    tx, state, log = multi_steps(SGD, 2), None, []
    calls = [(3.0, False), (1.0, False), (5.0, False), (0.0, True), (0.0, True), (2.0, True)]
    assert not has_updated(tx.init(0.0))
    for weight, flush in calls:
        kwargs = {"weight": weight, "flush": jnp.bool_(flush)}
        _, state = drive(tx, [1.0], run=run, calls=[kwargs], state=state)
        log.append((float(state.total_weight), bool(has_updated(state))))
    assert log == [(3, False), (4, True), (5, False), (5, True), (0, False), (2, True)]


# Non-finite gradients


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_policies_at_every_position_leave_the_next_window_clean(run, bad, position):
    grads = [1.0, 2.0, 3.0]
    grads[position] = bad
    keep = optax.sgd(1.0, momentum=0.0)

    seen, state = drive(multi_steps(keep, 3), [*grads, 6.0, 6.0, 6.0], run=run)
    assert not np.isfinite(seen[2])
    assert float(state.acc_grads) == 0.0
    assert float(jnp.squeeze(optax.tree.get(state, "trace"))) == 6.0 or np.isnan(seen[5])
    assert int(state.num_skipped) == 0

    tx = multi_steps(SGD, 3, nonfinite="skip_window")
    seen, state = drive(tx, [*grads, 6.0, 6.0, 6.0], run=run)
    assert seen == [0.0] * 5 + [-6.0]
    assert (int(state.num_skipped), int(state.gradient_step)) == (1, 1)

    tx = multi_steps(SGD, 3, nonfinite="skip_microbatch")
    rest = [g for g in grads if g is not bad]
    seen, state = drive(tx, [*grads, 6.0, 6.0, 6.0], run=run)
    mean = (sum(rest) + 6.0) / 3
    assert seen == [0.0] * 3 + [-np.float32(mean)] * 3
    assert (int(state.mini_step), int(state.num_skipped)) == (2, 1)


def test_has_updated_is_false_after_a_skip(run):
    tx = multi_steps(SGD, 2, nonfinite="skip_microbatch")
    _, state = drive(tx, [1.0, 1.0], run=run)
    assert has_updated(state)
    _, state = drive(tx, [NAN], run=run, state=state)
    assert not has_updated(state)
    assert float(state.total_weight) == 0.0


def test_flush_on_a_skipped_microbatch_still_closes(run):
    tx = multi_steps(SGD, 4, nonfinite="skip_microbatch")
    seen, state = drive(tx, [2.0, 4.0, NAN], run=run, calls=flush_at(2, of=3))
    assert seen == [0.0, 0.0, -3.0]
    assert (int(state.mini_step), int(state.gradient_step)) == (0, 1)
    seen, state = drive(tx, [NAN], run=run, calls=[{"flush": True}])
    assert (seen, int(state.gradient_step), int(state.num_skipped)) == ([0.0], 0, 1)


def test_a_weight_that_overflows_the_product_is_non_finite(run):
    tx = multi_steps(SGD, 2, nonfinite="skip_microbatch")
    calls = [{"weight": 1.0}, {"weight": jnp.float32(1e38)}, {"weight": jnp.float32(NAN)}]
    _, state = drive(tx, [1.0, 1e4, 1.0], run=run, calls=calls)
    assert (int(state.num_skipped), float(state.total_weight)) == (2, 1.0)


# Dtypes


def test_complex_and_wide_parameters(x64):
    params = {"z": jnp.ones(2, jnp.complex64), "d": jnp.ones(2, jnp.float64)}
    tx = multi_steps(SGD, 2)
    state = tx.init(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state.acc_grads, params)
    assert state.total_weight.dtype == jnp.float64
    for factor in (1 + 2j, 3 - 4j):
        grads = {"z": params["z"] * factor, "d": params["d"] * 0.1}
        updates, state = tx.update(grads, state, params, weight=0.1)
    np.testing.assert_allclose(updates["z"], np.full(2, -2 + 1j), rtol=1e-6)  # complex64
    np.testing.assert_allclose(updates["d"], np.full(2, -0.1), rtol=1e-15)  # float64


def test_accumulator_dtype(run):
    params = jnp.zeros(2, jnp.float32)
    state = multi_steps(SGD, 2, accumulator_dtype=jnp.bfloat16).init(params)
    assert state.acc_grads.dtype == jnp.bfloat16
    state = multi_steps(SGD, 2, accumulator_dtype=jnp.bfloat16).init(params + 0j)
    assert state.acc_grads.dtype == jnp.complex64
    # The weight is not rounded to the accumulator: bfloat16 has no 257.
    tx = multi_steps(SGD, 1, accumulator_dtype=jnp.bfloat16)
    seen, _ = drive(tx, [1.0], run=run, calls=[{"weight": 257.0}])
    assert seen[-1] == float(-np.float32(256) / np.float32(257))


def test_weight_is_not_rounded_to_the_gradient(run):
    # bfloat16 has no 257, and no 257 * 3.
    tx = multi_steps(SGD, 2)
    params = jnp.zeros((), jnp.bfloat16)
    state = tx.init(params)
    for weight in (257, 1):
        _, state = run(tx.update)(params + 3, state, params, weight=weight, flush=False)
    _, open_window = run(tx.update)(params + 3, state, params, weight=257)
    assert float(open_window.acc_grads) == 771.0


def mixed():
    return {
        "half": jnp.ones((4, 4), jnp.bfloat16),
        "f16": jnp.ones(4, jnp.float16),
        "single": jnp.ones(4, jnp.float32),
    }


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-2),
        optax.lion(1e-2),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9)),
        optax.apply_if_finite(optax.adam(1e-2), 2),
        dynamic_loss_scale(optax.adam(1e-2)),
    ],
    ids=["adamw", "lion", "clip", "apply_if_finite", "dynamic_loss_scale"],
)
def test_updates_have_the_dtypes_of_tx_alone(tx):
    params = mixed()
    alone, _ = tx.update(params, tx.init(params), params)
    wrapped = multi_steps(tx, 2)
    state = wrapped.init(params)
    update = jax.jit(wrapped.update)
    for _ in range(4):
        updates, state = update(params, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, alone)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, wrapped.init(params))
    assert update._cache_size() == 1


def test_tx_sees_the_mean_unrounded():
    # 3 - 1/256 is no bfloat16; what tx makes of it is rounded once.
    params = jnp.zeros((), jnp.bfloat16)
    tx = multi_steps(optax.chain(optax.scale(256.0), optax.scale(1.0)), 256)
    grads = jnp.full(256, 3.0, jnp.bfloat16).at[0].set(2.0)
    _, updates = lax.scan(lambda s, g: tx.update(g, s)[::-1], tx.init(params), grads)
    assert (float(updates[-1]), updates.dtype) == (768.0, jnp.bfloat16)  # 767 rounded


def test_strict_promotion(strict_promotion):
    tx = multi_steps(optax.scale(-1.0), 2, nonfinite="skip_window")
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2)}
    state = tx.init(params)
    for weight in (1.0, jnp.int32(3)):
        updates, state = jax.jit(tx.update)(params, state, params, weight=weight)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.negative, params))


# Gradients with holes


def test_none_in_place_of_a_gradient(run):
    tx = multi_steps(optax.stateless(lambda g, _: g), 2)
    params = {"a": jnp.zeros(2), "frozen": jnp.ones(2, jnp.int32)}
    state = tx.init(params)
    for _ in range(2):
        updates, state = run(tx.update)({"a": jnp.ones(2), "frozen": None}, state, params)
    chex.assert_trees_all_equal(updates, {"a": jnp.ones(2), "frozen": None})


# Transformations of JAX


def test_one_trace_for_many_calls():
    tx = multi_steps(optax.adamw(optax.linear_schedule(0.0, 1e-2, 3)), 3)
    step = Counted(tx.update)
    params = jnp.ones(3)
    state = tx.init(params)
    update = jax.jit(step, donate_argnums=1)
    for weight in (1.0, 2.0, 0.0, 4.0):
        _, state = update(jnp.ones(3), state, params, weight=weight, flush=False)
    assert step.calls == 1


def test_python_numbers_in_the_state_of_tx_do_not_retrace():
    tx = optax.GradientTransformation(
        lambda params: {"n": 0, "x": jnp.asarray(1.0)}, lambda g, s, p=None: (g, {**s, "n": 1})
    )
    wrapped = multi_steps(tx, 1)
    state, update = wrapped.init(jnp.ones(2)), jax.jit(wrapped.update)
    for _ in range(2):
        _, state = update(jnp.ones(2), state)
    assert update._cache_size() == 1


def test_eager_calls_compile_once():
    tx = multi_steps(optax.adam(0.1), 2)
    _, state = drive(tx, [1.0] * 4, run=lambda f: f)
    with compilations() as durations:
        drive(tx, [1.0] * 4, run=lambda f: f, state=state)
    assert durations == []


def test_scan_over_micro_steps_is_the_loop():
    tx = multi_steps(optax.adam(0.1), 3)
    grads = jnp.arange(9.0)
    seen, state = drive(tx, grads)

    def step(carry, gradient):
        params, state = carry
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    start = jnp.float32(0.0)
    (_, final), path = jax.jit(lambda g: lax.scan(step, (start, tx.init(start)), g))(grads)
    np.testing.assert_array_equal(path, np.float32(seen))
    chex.assert_trees_all_equal(final, state)


@pytest.mark.parametrize("policy", ["propagate", "skip_microbatch", "skip_window"])
def test_vmap_over_states_at_different_positions(policy):
    tx = multi_steps(optax.adam(0.1), 2, nonfinite=policy)
    streams = np.float32([[1, 2, 3, 4], [NAN, 2, 3, 4], [1, 2, INF, 4]])
    flush = np.array([[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]], bool)

    def train(grads, flush):
        def step(carry, inputs):
            params, state = carry
            updates, state = tx.update(inputs[0], state, params, flush=inputs[1])
            return (optax.apply_updates(params, updates), state), has_updated(state)

        start = jnp.float32(1.0)
        return lax.scan(step, (start, tx.init(start)), (grads, flush))

    (params, state), updated = jax.jit(jax.vmap(train))(streams, flush)
    for lane in range(3):
        (expected, end), when = jax.jit(train)(streams[lane], flush[lane])
        # A vectorised division may round differently.
        np.testing.assert_allclose(params[lane], expected, rtol=1e-6)
        np.testing.assert_array_equal(updated[lane], when)
        counters = [
            jax.tree.map(lambda x, i=lane: x[i], getattr(state, name))
            for name in ("mini_step", "gradient_step", "total_weight", "num_skipped")
        ]
        assert counters == [end.mini_step, end.gradient_step, end.total_weight, end.num_skipped]


def test_flatten_round_trip():
    tx = multi_steps(dynamic_loss_scale(optax.adam(0.1)), 3)
    state = tx.init({"a": jnp.ones(2)})
    leaves, treedef = jax.tree.flatten(state)
    chex.assert_trees_all_equal(jax.tree.unflatten(treedef, leaves), state)
    chex.assert_trees_all_equal(jax.jit(lambda s: s)(state), state)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


# Devices


def mesh_of(count, kind=AxisType.Auto):
    return jax.make_mesh((count,), ("data",), (kind,), devices=jax.devices()[:count])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("count", [1, 4])
def test_accumulators_are_sharded_as_the_parameters(count, kind):
    mesh = mesh_of(count, kind)
    tx = multi_steps(optax.adam(0.1), 2)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("data", None))
        params = jax.device_put(jnp.ones((8, 4)), sharding)
        state = tx.init(params)
        update = jax.jit(tx.update, donate_argnums=1)
        for _ in range(3):
            assert state.acc_grads.sharding.is_equivalent_to(sharding, 2)
            updates, state = update(params, state, params)
        assert int(state.gradient_step) == 1
        assert updates.sharding.is_equivalent_to(sharding, 2) or kind is AxisType.Auto


@pytest.mark.parametrize("count", [1, 2])
def test_one_reduction_per_window_inside_shard_map(count):
    # Local accumulators, reduced by the transformation itself.
    reduce = optax.stateless(lambda g, _: lax.pmean(g, "data"))
    tx = multi_steps(optax.chain(reduce, SGD), 4)

    def train(params, grads):
        state = tx.init(params)
        state = state._replace(acc_grads=lax.pcast(state.acc_grads, "data", to="varying"))

        def step(carry, gradient):
            params, state = carry
            updates, state = tx.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, (params, state), grads[0])[0][0]

    mapped = jax.shard_map(train, mesh=mesh_of(count), in_specs=(P(), P("data")), out_specs=P())
    grads = jnp.arange(8.0 * count).reshape(count, 8)
    compiled = compile_for(mapped, jnp.float32(0.0), grads)
    expected = -(grads[:, :4].mean() + grads[:, 4:].mean())
    assert float(compiled(jnp.float32(0.0), grads)) == float(expected)
    text = compiled.as_text()
    branch = re.search(r"branch_computations=\{%([\w.]+), %([\w.]+)\}", text)
    if branch and "all-reduce(" in text:
        assert "all-reduce(" not in computation(text, branch[1])


# Cost


def computation(text, name):
    """The body of one computation of an optimized program."""
    start = re.search(rf"^%{re.escape(name)} \(", text, re.MULTILINE).start()
    return text[start : text.index("\n}", start)]


WIDTH = 128


@functools.cache
def compiled_step(policy, tx=None, num_steps=None):
    tx = multi_steps(tx or optax.adamw(1e-3), 4, nonfinite=policy)
    shapes = {"w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH + 1)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}

    def step(params, state, x):
        def loss(p):
            return jnp.sum(jnp.tanh(x @ p["w"]) @ p["v"])

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    def steps(params, state, x):
        return lax.scan(lambda c, x: (step(*c, x), None), (params, state), x)[0]

    fn, x = step, jnp.ones((2, WIDTH))
    if num_steps:
        fn, x = steps, jnp.ones((num_steps, 2, WIDTH))
    args = (params, tx.init(params), x)
    return jax.jit(fn, donate_argnums=(0, 1)).lower(*args).compile()


@pytest.mark.parametrize("num_steps", [None, 4], ids=["step", "scan"])
@pytest.mark.parametrize("policy", ["propagate", "skip_microbatch", "skip_window"])
def test_micro_step_holds_no_optimizer_arithmetic_and_no_copy(policy, num_steps):
    compiled = compiled_step(policy, num_steps=num_steps)
    text = compiled.as_text()
    hold, _ = re.search(
        r" conditional\(.*branch_computations=\{%([\w.]+), %([\w.]+)\}", text
    ).groups()
    body = computation(text, hold)
    assert "sqrt" in text and "sqrt" not in body
    # All that the branch makes are the zeros.
    made = re.findall(r"= f32\[128,\d+\]\S* ([\w-]+)\((.*?)\)", body)
    assert {op for op, _ in made} <= {"get-tuple-element", "broadcast", "fusion"}
    assert all("%constant" in operand for op, operand in made if op in ("broadcast", "fusion"))
    # Nowhere is a buffer of the parameters' size copied.
    assert not re.findall(r"= f32\[128,\d+\]\S* copy\(", text)
    # Temporaries: the gradient and the updates.
    size = 4 * WIDTH * (2 * WIDTH + 1)
    assert compiled.memory_analysis().temp_size_in_bytes < 2.2 * size


def test_program_size_does_not_depend_on_k():
    params = jnp.ones(4)
    sizes = set()
    for k in (2, 64):
        tx = multi_steps(optax.adam(0.1), k)
        sizes.add(num_instructions(compile_for(tx.update, params, tx.init(params), params)))
    assert len(sizes) == 1


# Schedules of k, restored states


def test_scheduled_k_below_one_counts_as_one(run):
    tx = multi_steps(SGD, lambda s: jnp.where(s == 0, 2, 0))
    assert drive(tx, [1.0] * 4, run=run)[0] == [0.0, -1.0, -2.0, -3.0]


def test_state_of_a_larger_k_closes_its_window_at_the_next_call(run):
    _, state = drive(multi_steps(SGD, 4), [1.0, 2.0, 3.0], run=run)
    seen, state = drive(multi_steps(SGD, 2), [6.0, 5.0, 5.0], run=run, state=state)
    assert seen == [-3.0, -3.0, -8.0]


def test_microstep_schedule(run):
    seen = []
    tx = optax.sgd(microstep_schedule(lambda s: seen.append(s) or 1.0 + s, 4))
    path, _ = drive(multi_steps(tx, 2), [1.0] * 4, run=run)
    assert path == [0.0, -1.0, -1.0, -6.0]


# Telemetry


def test_telemetry_finds_nothing_and_several():
    assert telemetry(optax.adam(0.1).init(0.0)) == {}
    tx = optax.partition({"x": multi_steps(SGD, 2), "y": multi_steps(SGD, 3)}, {"a": "x", "b": "y"})
    log = telemetry(tx.init({"a": 0.0, "b": 0.0}))
    assert len(log) == 10
    assert "multi_steps.inner_states['y'].inner_state/mini_step" in log


def test_telemetry_of_every_update_under_jit():
    norms = optax.chain(
        optax.snapshot("norm", optax.tree.norm),
        optax.clip_by_global_norm(2.0),
        optax.snapshot("clipped_norm", optax.tree.norm),
        optax.snapshot("not_a_scalar", lambda g: g),
    )
    tx = multi_steps(dynamic_loss_scale(optax.chain(norms, SGD), init_scale=4.0), 2)

    def step(state, gradient):
        _, state = tx.update(gradient, state)
        return state, telemetry(state)

    grads = jnp.float32([[12, 0], [12, 32], [NAN, 0], [1, 1], [0, 4], [0, 4]])
    _, log = jax.jit(lambda g: lax.scan(step, tx.init(jnp.zeros(2)), g))(grads)
    log = {name: np.asarray(values)[1::2].tolist() for name, values in log.items()}
    assert log == {
        "multi_steps/mini_step": [0, 0, 0],
        "multi_steps/gradient_step": [1, 1, 2],
        "multi_steps/total_weight": [2.0, 0.0, 2.0],
        "multi_steps/num_skipped": [0, 0, 0],
        "multi_steps/has_updated": [True, False, True],
        "loss_scale/scale": [4.0, 2.0, 2.0],
        "loss_scale/good_steps": [1, 0, 1],
        "loss_scale/num_skipped": [0, 1, 1],
        "snapshot/norm": [5.0, 5.0, 2.0],
        "snapshot/clipped_norm": [2.0, 2.0, 2.0],
    }


# From Optax


@pytest.mark.parametrize("num_calls", [0, 2, 3, 5])
def test_from_optax_goes_on_in_the_middle_of_a_window(num_calls):
    params, _ = mse_problem(4)
    grads = [jax.tree.map(lambda p, i=i: p * (i + 1), params) for i in range(9)]
    old, new = optax.MultiSteps(optax.adam(0.1), 3), multi_steps(optax.adam(0.1), 3)
    ours, theirs = params, params
    state = old.init(params)
    old_update, new_update = jax.jit(old.update), jax.jit(new.update)
    for g in grads[:num_calls]:
        updates, state = old_update(g, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
    converted, ours = from_optax_multi_steps(state), theirs
    assert jax.tree.structure(converted) == jax.tree.structure(new.init(params))
    chex.assert_trees_all_equal_shapes_and_dtypes(converted, new.init(params))
    for g in grads[num_calls:]:
        updates, state = old_update(g, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        updates, converted = new_update(g, converted, ours)
        ours = optax.apply_updates(ours, updates)
    # A running mean and a sum round differently.
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5)
    assert int(converted.gradient_step) == 3


def test_from_optax_sums():
    old = optax.MultiSteps(SGD, 3, use_grad_mean=False)
    state = old.init(jnp.float32(0.0))
    for g in (1.0, 2.0):
        _, state = old.update(jnp.float32(g), state)
    converted = from_optax_multi_steps(state, use_grad_mean=False)
    updates, _ = multi_steps(SGD, 3).update(jnp.float32(6.0), converted)
    assert float(updates) == -3.0


# Errors


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        ("adam", "multi_steps: tx must be an optax.GradientTransformation, got 'adam'"),
        (optax.adam, r"multi_steps: tx must be .* Call it first"),
        (optax.MultiSteps(SGD, 2), r"Pass MultiSteps\(\.\.\.\)\.gradient_transformation\(\)"),
    ],
)
def test_tx_that_is_no_transformation(tx, message):
    with pytest.raises(TypeError, match=message):
        multi_steps(tx, 2)


def python_branches(step):
    return 2 if step < 3 else 4


@pytest.mark.parametrize(
    ("k", "error", "message"),
    [
        (0, ValueError, r"multi_steps: k must be at least 1 \(microbatches per update\), got 0"),
        (2.0, TypeError, r"multi_steps: k must be a Python int .* got 2\.0 of type float"),
        (True, TypeError, "multi_steps: k must be a Python int"),
        (lambda s: s * 0, ValueError, "the schedule k must be at least 1, got 0 at update step 0"),
        (lambda s: s * 0.5, TypeError, "the schedule k must return one integer, got float32"),
        (lambda s: jnp.array([1, 2]), TypeError, r"must return one integer, .* of shape \(2,\)"),
        (lambda s: None, TypeError, "must return one integer, got NoneType"),
        (python_branches, TypeError, "needs the value of the update step, which is traced"),
    ],
)
def test_bad_k(k, error, message):
    with pytest.raises(error, match=message):
        multi_steps(SGD, k)


def test_bad_options():
    with pytest.raises(ValueError, match=r"multi_steps: nonfinite must be one of .* got 'skip'"):
        multi_steps(SGD, 2, nonfinite="skip")
    with pytest.raises(TypeError, match="multi_steps: accumulator_dtype must be a float"):
        multi_steps(SGD, 2, accumulator_dtype=jnp.int32)
    with pytest.raises(ValueError, match="accumulator_dtype=float64 needs 64-bit types"):
        multi_steps(SGD, 2, accumulator_dtype="float64")


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"weight": -1.0}, ValueError, "multi_steps: weight must not be negative, got -1.0"),
        ({"weight": np.float32(-2)}, ValueError, "weight must not be negative, got -2.0"),
        ({"weight": jnp.ones(3)}, ValueError, r"one scalar per microbatch, got shape \(3,\)"),
        ({"weight": 1j}, TypeError, "multi_steps: weight must be real, got complex64"),
        ({"flush": 1}, TypeError, "multi_steps: flush must be one bool, got int32"),
        ({"flush": jnp.zeros(2, bool)}, TypeError, r"one bool, got bool of shape \(2,\)"),
    ],
)
def test_bad_call(run, kwargs, error, message):
    tx = multi_steps(SGD, 2)
    static = {name: value for name, value in kwargs.items() if not isinstance(value, jax.Array)}
    update = run(functools.partial(tx.update, **static))
    kwargs = {name: value for name, value in kwargs.items() if name not in static}
    with pytest.raises(error, match=message):
        update(jnp.float32(1.0), tx.init(jnp.float32(0.0)), **kwargs)


def test_values_never_raise(run):
    tx = multi_steps(SGD, 1)
    for weight in (NAN, INF, jnp.float32(-1.0)):
        drive(tx, [1.0], run=run, calls=[{"weight": weight}])


def test_gradients_that_do_not_fit():
    tx = multi_steps(SGD, 2)
    state = tx.init({"a": jnp.ones(2), "b": jnp.ones((), jnp.int32)})
    one = jnp.ones(())
    with pytest.raises(TypeError, match=r"multi_steps: grads\['a'\] has shape \(3,\), .*\(2,\)"):
        tx.update({"a": jnp.ones(3), "b": one}, state)
    with pytest.raises(TypeError, match="multi_steps: grads do not have the structure"):
        tx.update({"a": jnp.ones(2)}, state)
    nothing = np.zeros((), jax.dtypes.float0)
    with pytest.raises(TypeError, match=r"multi_steps: grads\['b'\] has no gradient \(float0\)"):
        tx.update({"a": jnp.ones(2), "b": nothing}, state)


def test_tx_that_changes_its_structure():
    tx = multi_steps(optax.chain(optax.monitor({"norm": optax.tree.norm}), SGD), 2)
    with pytest.raises(TypeError, match=r"multi_steps: tx\.update changes .* optax\.snapshot"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


@pytest.mark.parametrize("policy", ["skip_microbatch", "skip_window"])
def test_a_policy_that_hides_overflows_from_the_scale(policy):
    tx = multi_steps(optax.chain(dynamic_loss_scale(SGD)), 2, nonfinite=policy)
    with pytest.raises(TypeError, match=rf"nonfinite='{policy}' hides .*inner_opt_state\[0\]"):
        tx.init(jnp.ones(2))


def test_has_updated_needs_exactly_one():
    with pytest.raises(ValueError, match="has_updated: no MultiStepsState in opt_state"):
        has_updated(optax.adam(0.1).init(0.0))
    with pytest.raises(ValueError, match="has_updated: no MultiStepsState"):
        has_updated(optax.MultiSteps(SGD, 2).init(0.0))
    state = multi_steps(multi_steps(SGD, 2), 2).init(0.0)
    both = r"holds 2 of MultiStepsState: opt_state and opt_state\.inner_opt_state"
    with pytest.raises(ValueError, match=both):
        has_updated(state)


def test_microstep_schedule_and_from_optax_errors():
    with pytest.raises(TypeError, match=r"microstep_schedule: schedule must be callable, got 0\.1"):
        microstep_schedule(0.1, 4)
    with pytest.raises(ValueError, match="microstep_schedule: k must be at least 1"):
        microstep_schedule(lambda s: s, 0)
    with pytest.raises(TypeError, match=r"from_optax_multi_steps: state must be an optax\.Multi"):
        from_optax_multi_steps(optax.adam(0.1).init(0.0))


def test_state_fields_are_the_contract():
    assert MultiStepsState._fields == (
        "mini_step",
        "gradient_step",
        "inner_opt_state",
        "acc_grads",
        "total_weight",
        "num_skipped",
    )


def test_accumulated_gradients_of_the_state_are_the_weighted_sum(run):
    params, batch = mse_problem(6)
    tx = multi_steps(optax.adam(0.1), 4)
    state = tx.init(params)
    for weight in (2.0, 3.0):
        _, state = run(tx.update)(jax.grad(mse)(params, batch), state, params, weight=weight)
    expected = jax.tree.map(lambda g: 5.0 * g, jax.grad(mse)(params, batch))
    chex.assert_trees_all_close(state.acc_grads, expected, rtol=1e-6)  # two roundings
    assert (float(state.total_weight), int(state.mini_step)) == (5.0, 2)
