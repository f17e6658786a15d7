"""Optimizer states that Orbax saved at any micro step go on bit for bit."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import quick
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from accum_jax._loss_scale import dynamic_loss_scale, loss_scale, static_loss_scale
from accum_jax._multi_steps import from_optax_multi_steps, has_updated, multi_steps

ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0.0, 20)))


def round_trip(path, state, target):
    """`state` saved to `path` and restored into the types of `target`."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state", target)


def step(tx):
    @jax.jit
    def step(params, state, index):
        grads = jax.tree.map(lambda p: jnp.sin(p * index + index), params)
        weight = 1.0 + index % 3
        updates, state = tx.update(grads, state, params, weight=weight)
        return optax.apply_updates(params, updates), state

    return step


def start():
    return {"w": jnp.arange(4.0), "b": jnp.ones(())}


def go(tx, params, state, first, last):
    advance = step(tx)
    for index in range(first, last):
        params, state = advance(params, state, index)
    return params, state


@pytest.mark.parametrize("at", quick([0, 1, 3, 4, 6], 3, 4))
def test_goes_on_bit_for_bit_from_any_micro_step(tmp_path, at):
    tx = multi_steps(dynamic_loss_scale(ADAM, init_scale=1.0, growth_interval=1), 4)
    params, state = go(tx, start(), tx.init(start()), 0, at)
    target = jax.eval_shape(lambda p: (p, tx.init(p)), start())
    restored = round_trip(tmp_path, (params, state), target)
    chex.assert_trees_all_equal(restored, (params, state))
    assert bool(has_updated(restored[1])) == (at == 4)
    expected = go(tx, params, state, at, 10)
    chex.assert_trees_all_equal(go(tx, *restored, at, 10), expected)


@pytest.mark.parametrize(
    "tx",
    [
        multi_steps(ADAM, 4, nonfinite="skip_window"),
        optax.inject_hyperparams(lambda rate: multi_steps(optax.adam(rate), 2))(rate=0.1),
        multi_steps(optax.masked(optax.adam(0.1), {"w": True, "b": False}), 2),
        static_loss_scale(multi_steps(optax.lion(0.1), 2), 8.0),
    ],
    ids=["skip_window", "inject_hyperparams", "masked", "static"],
)
def test_nested_states(tmp_path, tx):
    params, state = go(tx, start(), tx.init(start()), 0, 3)
    restored = round_trip(tmp_path, state, jax.eval_shape(tx.init, start()))
    chex.assert_trees_all_equal_shapes_and_dtypes(restored, state)
    chex.assert_trees_all_equal(go(tx, params, restored, 3, 6), go(tx, params, state, 3, 6))


def test_restored_into_a_smaller_k_closes_the_window_at_the_next_call(tmp_path):
    large, small = multi_steps(optax.sgd(1.0), 4), multi_steps(optax.sgd(1.0), 2)
    state = large.init(jnp.float32(0.0))
    for gradient in (1.0, 2.0, 3.0):
        _, state = large.update(jnp.float32(gradient), state)
    restored = round_trip(tmp_path, state, jax.eval_shape(small.init, jnp.float32(0.0)))
    updates, restored = small.update(jnp.float32(6.0), restored)
    assert (float(updates), float(restored.total_weight)) == (-3.0, 4.0)
    # From there on windows of two.
    log = []
    for gradient in (5.0, 7.0):
        updates, restored = small.update(jnp.float32(gradient), restored)
        log.append(float(updates))
    assert log == [0.0, -6.0]


def test_restored_into_no_accumulation_is_an_error_and_has_a_path(tmp_path):
    tx = multi_steps(ADAM, 4)
    params, state = go(tx, start(), tx.init(start()), 0, 4)
    target = jax.eval_shape(ADAM.init, start())
    with pytest.raises(ValueError, match="mismatch"):
        round_trip(tmp_path, state, target)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, start()))
    chex.assert_trees_all_equal_shapes_and_dtypes(restored.inner_opt_state, target)
    ADAM.update(params, restored.inner_opt_state, params)


def test_position_of_a_scheduled_k_comes_from_the_state(tmp_path):
    def ramp(update):
        return jnp.select([update < 2, update < 4], [1, 2], 4)

    tx = multi_steps(ADAM, ramp)
    params, state = go(tx, start(), tx.init(start()), 0, 5)
    assert (int(state.gradient_step), int(state.mini_step)) == (3, 1)
    restored = round_trip(tmp_path, state, jax.eval_shape(tx.init, start()))
    expected = go(multi_steps(ADAM, ramp), params, state, 5, 14)
    chex.assert_trees_all_equal(go(multi_steps(ADAM, ramp), params, restored, 5, 14), expected)


def test_sharded_accumulators_come_back_sharded(tmp_path):
    mesh = jax.make_mesh((4,), ("fsdp",), (AxisType.Auto,), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, P("fsdp"))
    params = jax.device_put(jnp.arange(8.0), sharding)
    tx = multi_steps(dynamic_loss_scale(optax.adam(0.1), init_scale=2.0), 3)
    state = tx.init(params)
    _, state = jax.jit(tx.update)(params, state, params)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restored = round_trip(tmp_path, state, target)
    assert restored.acc_grads.sharding.is_equivalent_to(sharding, 1)
    chex.assert_trees_all_equal(restored, state)
    assert float(loss_scale(restored)) == 2.0


def test_an_optax_checkpoint_goes_on_in_ours(tmp_path):
    old = optax.MultiSteps(ADAM, 4)
    state = old.init(start())
    for _ in range(6):
        _, state = jax.jit(old.update)(start(), state, start())
    restored = round_trip(tmp_path, state, jax.eval_shape(old.init, start()))
    converted = from_optax_multi_steps(restored)
    assert (int(converted.mini_step), int(converted.gradient_step)) == (2, 1)
    _, final = go(multi_steps(ADAM, 4), start(), converted, 6, 8)
    assert int(final.gradient_step) == 2
