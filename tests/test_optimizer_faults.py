"""Known faults of accumulation in optimizers, each with the smallest numbers that show it."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from windows import drive, flush_at

from accum_jax._loss_scale import dynamic_loss_scale, static_loss_scale
from accum_jax._multi_steps import has_updated, microstep_schedule, multi_steps

SGD = optax.sgd(1.0)
NAN = float("nan")


def count_calls() -> optax.GradientTransformation:
    """Counts its own calls in its state and passes gradients on."""
    return optax.GradientTransformation(
        lambda params: jnp.zeros((), jnp.int32), lambda g, n, params=None: (g, n + 1)
    )


def look() -> optax.GradientTransformation:
    """Keeps the gradient that it saw last."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
        lambda g, seen, params=None: (g, g),
    )


@pytest.mark.parametrize(("grads", "rows"), [((6.0, 2.0), (1, 3)), ((4.0, 2.0), (2, 2))])
def test_fault_mean_of_means(run, grads, rows):
    # The same four tokens, 6 + 2 + 2 + 2, split in two ways.
    seen, _ = drive(multi_steps(SGD, 2), grads, run=run, calls=[{"weight": w} for w in rows])
    assert seen[-1] == -3.0


def test_fault_factor_k_and_sum_for_mean(run):
    for k in (1, 2, 4):
        seen, _ = drive(multi_steps(optax.sgd(0.125), k), [1.0] * 4, run=run)
        assert seen[-1] == -0.125 * 4 / k


def test_fault_short_tail_divisor(run):
    tx = multi_steps(SGD, 4)
    seen, _ = drive(tx, [1.0] * 5, run=run, calls=flush_at(4, of=5))
    assert seen[-1] == -2.0
    calls = [{"weight": 8.0, "flush": False}] * 4 + [{"weight": 1.0, "flush": True}]
    assert drive(tx, [1.0] * 5, run=run, calls=calls)[0][-1] == -2.0


def test_fault_dropped_tail(run):
    seen, state = drive(multi_steps(SGD, 4), [1.0] * 6, run=run, calls=flush_at(5, of=6))
    assert (seen[-1], int(state.gradient_step)) == (-2.0, 2)


def test_fault_carried_leftovers(run):
    tx, grads = multi_steps(SGD, 2), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    carry, _ = drive(tx, grads, run=run)
    assert carry == [0.0, -1.5, -1.5, -5.0, -5.0, -10.5]
    flush, _ = drive(tx, grads, run=run, calls=flush_at(2, 5, of=6))
    assert flush == [0.0, -1.5, -4.5, -4.5, -9.0, -15.0]


def test_fault_epoch_shorter_than_k(run):
    tx = multi_steps(SGD, 4)
    carry, state = drive(tx, [1.0] * 12, run=run)
    assert (carry[-1], int(state.gradient_step)) == (-3.0, 3)
    flush, state = drive(tx, [1.0] * 12, run=run, calls=flush_at(2, 5, 8, 11, of=12))
    assert (flush[-1], int(state.gradient_step)) == (-4.0, 4)


def test_fault_schedule_unit(run):
    seen, _ = drive(multi_steps(optax.sgd(lambda s: 1 / (1 + s)), 3), [1.0] * 6, run=run)
    assert seen[-1] == -1.5
    # A warm-up of 2 updates is over at the 7th microbatch, not at the 3rd.
    warm_up = optax.sgd(optax.linear_schedule(0.0, 1.0, 2))
    seen, _ = drive(multi_steps(warm_up, 3), [1.0] * 9, run=run)
    assert (seen[2], seen[5], seen[8]) == (0.0, -0.5, -1.5)
    # The same warm-up written in microbatches.
    written = optax.sgd(microstep_schedule(optax.linear_schedule(0.0, 1.0, 6), 3))
    assert drive(multi_steps(written, 3), [1.0] * 9, run=run)[0] == seen


def test_fault_off_by_one(run):
    seen, _ = drive(multi_steps(SGD, 3), [3.0, 3.0, 3.0, 6.0, 6.0, 6.0], run=run)
    assert seen == [0.0, 0.0, -3.0, -3.0, -3.0, -9.0]


def test_fault_cleared_buffer(run):
    assert drive(multi_steps(SGD, 3), [1.0, 2.0, 6.0], run=run)[0] == [0.0, 0.0, -3.0]


def test_fault_decay_per_microbatch(run):
    tx = multi_steps(optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)), 3)
    seen, _ = drive(tx, [0.0] * 3, 1.0, run=run)
    assert seen == [1.0, 1.0, pytest.approx(0.99, abs=1e-7)]  # one float32 rounding
    _, state = drive(multi_steps(optax.adam(0.1), 3), [1.0] * 3, run=run)
    assert int(optax.tree.get(state, "count")) == 1


def test_fault_inner_before_outer(run):
    _, state = drive(multi_steps(optax.chain(count_calls(), SGD), 5), [1.0] * 10, run=run)
    assert int(state.inner_opt_state[0]) == 2


def test_fault_counters(run):
    tx, state, events = multi_steps(SGD, 2), None, []
    for microbatch in range(1, 8):
        _, state = drive(tx, [1.0], run=run, state=state)
        if has_updated(state) and state.gradient_step % 2 == 0:
            events.append(microbatch)
    assert (int(state.gradient_step), int(state.mini_step)) == (3, 1)
    assert 2 * int(state.gradient_step) + int(state.mini_step) == 7
    assert events == [4]


def test_fault_clip_per_microbatch(run):
    tx = multi_steps(optax.chain(optax.clip_by_global_norm(1.0), SGD), 2)
    seen, _ = drive(tx, [[2.0, 0.0], [0.0, 2.0]], [0.0, 0.0], run=run)
    np.testing.assert_allclose(seen[-1], [-0.70711, -0.70711], atol=5e-6)  # digits given


@pytest.mark.parametrize("scaler", [dynamic_loss_scale, static_loss_scale])
def test_fault_unscale(run, scaler):
    clipped = optax.chain(optax.clip_by_global_norm(10.0), SGD)
    if scaler is dynamic_loss_scale:
        tx = multi_steps(dynamic_loss_scale(clipped, init_scale=1024.0), 2)
    else:
        tx = multi_steps(static_loss_scale(clipped, 1024.0), 2)
    seen, _ = drive(tx, [3.0 * 1024, 5.0 * 1024], run=run)
    assert seen == [0.0, -4.0]


def test_fault_nonfinite_microbatch_in_the_divisor(run):
    tx = multi_steps(SGD, 3, nonfinite="skip_microbatch")
    seen, state = drive(tx, [1.0, NAN, 4.0, 7.0], run=run)
    assert seen == [0.0, 0.0, 0.0, -4.0]
    assert (int(state.num_skipped), float(state.total_weight)) == (1, 3.0)
    # The same window cut off where its three microbatches end.
    seen, _ = drive(tx, [1.0, NAN, 4.0], run=run, calls=flush_at(2, of=3))
    assert seen[-1] == -2.5

    tx = multi_steps(SGD, 3, nonfinite="skip_window")
    seen, state = drive(tx, [1.0, NAN, 4.0], run=run)
    assert seen == [0.0, 0.0, 0.0]
    assert (int(state.num_skipped), int(state.gradient_step)) == (1, 0)


def test_fault_nan_reset(run):
    tx = multi_steps(optax.chain(optax.zero_nans(), SGD), 2)
    seen, state = drive(tx, [NAN, 1.0, 2.0, 2.0, 2.0, 2.0], run=run)
    assert seen == [0.0, 0.0, 0.0, -2.0, -2.0, -4.0]
    assert float(state.acc_grads) == 0.0


def test_fault_update_inside_a_window_is_zero_whatever_tx_returns(run):
    infinite = optax.stateless(lambda g, _: jax.tree.map(lambda x: x / 0.0, g))
    seen, _ = drive(multi_steps(infinite, 3), [1.0, 1.0], run=run)
    assert seen == [0.0, 0.0]


def test_fault_stagnation(run):
    tx = multi_steps(look(), 512)
    state = tx.init(jnp.zeros((), jnp.bfloat16))
    assert state.acc_grads.dtype == jnp.float32
    for grads, mean in (([1.0] * 512, 1.0), ([1.0] + [3.0] * 511, 2.99609375)):
        grads = jnp.asarray(grads, jnp.bfloat16)
        step = run(lambda s, g: (tx.update(g, s)[1], None))
        final, _ = jax.lax.scan(step, tx.init(jnp.zeros((), jnp.bfloat16)), grads)
        assert float(final.inner_opt_state) == mean


@pytest.mark.parametrize("tx", [optax.adafactor(1e-2), optax.adam(1e-2, mu_dtype=jnp.float32)])
def test_fault_dtype_parity(tx):
    params = {"w": jnp.ones((4, 4), jnp.bfloat16), "b": jnp.ones(4, jnp.float32)}
    alone, _ = tx.update(params, tx.init(params), params)
    wrapped = multi_steps(tx, 2)
    update, state = jax.jit(wrapped.update), wrapped.init(params)
    for _ in range(4):
        updates, state = update(params, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, alone)
    assert update._cache_size() == 1


def test_fault_bf16_params(run):
    x = jnp.array([1.0, 2.0, 3.0, 4.0])

    def loss(w, x):
        return jnp.mean((w.astype(jnp.float32) * x - 2 * x) ** 2)

    for k in (1, 2, 4):
        tx, w = multi_steps(optax.sgd(0.01), k), jnp.zeros((), jnp.bfloat16)
        state = tx.init(w)
        for part in x.reshape(k, -1):
            updates, state = run(tx.update)(jax.grad(loss)(w, part), state, w)
            w = optax.apply_updates(w, updates)
        assert float(w) == 0.30078125


@pytest.mark.parametrize(
    ("ends", "updates"), [((), 37), ((99, 199, 299), 39)], ids=["carry", "flush"]
)
def test_fault_total_updates(ends, updates):
    tx = multi_steps(SGD, 8)
    flush = jnp.zeros(300, bool).at[jnp.array(ends, int)].set(True)

    def step(state, end):
        return tx.update(jnp.float32(1.0), state, flush=end)[1], None

    state, _ = jax.lax.scan(step, tx.init(jnp.float32(0.0)), flush)
    assert int(state.gradient_step) == updates


def test_fault_resume_position():
    # Saved at update 9 in epochs of 30 microbatches: 36 are consumed, epoch 1 goes on at 6.
    _, state = drive(multi_steps(SGD, 4), [1.0] * 36)
    consumed = 4 * int(state.gradient_step) + int(state.mini_step)
    assert divmod(consumed, 30) == (1, 6)


def ramp(step):
    return jnp.select([step < 2, step < 4], [1, 2], 4)


def test_fault_schedule_of_k(run):
    seen, state = drive(multi_steps(SGD, ramp), [1.0] * 4, run=run)
    assert (int(state.gradient_step), seen[-1]) == (3, -3.0)
    assert int(ramp(state.gradient_step)) == 2
    # A fresh transformation goes on from the state alone.
    seen, state = drive(multi_steps(SGD, ramp), [1.0] * 6, run=run, state=state)
    assert seen == [0.0, -1.0, -1.0, -1.0, -1.0, -2.0]


def test_fault_two_devices_count_as_one():
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    tx = multi_steps(optax.sgd(lambda s: 1 / (1 + s)), 3)

    def train(params, grads):
        state = tx.init(params)
        for gradient in grads[0]:
            updates, state = tx.update(jax.lax.pmean(gradient, "data"), state)
            params = optax.apply_updates(params, updates)
        return params

    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(train, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec())
    grads = jnp.stack([jnp.zeros(6), jnp.full(6, 2.0)])
    assert float(jax.jit(mapped)(jnp.float32(0.0), grads)) == -1.5
