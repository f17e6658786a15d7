"""The loss scale: read once, unscaled once, checked once and adjusted once per window."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from windows import drive

from accum_jax import accumulated_loss, value_and_grad
from accum_jax._loss_scale import dynamic_loss_scale, loss_scale, static_loss_scale
from accum_jax._multi_steps import has_updated, multi_steps
from accum_jax._opt_state import LossScaleState

SGD = optax.sgd(1.0)
NAN, INF = float("nan"), float("inf")


# The scale, to the step


def scales(tx, grads, run):
    """Scale, good steps and skips after each call."""
    state, log = tx.init(jnp.float32(0.0)), []
    for gradient in grads:
        _, state = run(tx.update)(jnp.float32(gradient), state)
        log.append((float(state.scale), int(state.good_steps), int(state.num_skipped)))
    return log


def test_growth_after_the_interval_and_backoff_at_once(run):
    tx = dynamic_loss_scale(SGD, init_scale=8.0, growth_interval=3)
    assert scales(tx, [1, 1, 1, 1, INF, 1, 1, 1, NAN], run) == [
        (8, 1, 0),
        (8, 2, 0),
        (16, 0, 0),
        (16, 1, 0),
        (8, 0, 1),
        (8, 1, 1),
        (8, 2, 1),
        (16, 0, 1),
        (8, 0, 2),
    ]


def test_floor_and_cap(run):
    tx = dynamic_loss_scale(
        SGD,
        init_scale=4.0,
        growth_interval=1,
        growth_factor=3.0,
        backoff_factor=0.125,
        min_scale=1.5,
        max_scale=10.0,
    )
    assert [s for s, _, _ in scales(tx, [1, 1, NAN, INF, 1], run)] == [10, 10, 1.5, 1.5, 4.5]


def test_an_overflow_leaves_tx_whole(run):
    tx = dynamic_loss_scale(optax.adamw(0.1, weight_decay=0.5))
    seen, state = drive(tx, [1.0], 1.0, run=run)
    after, skipped = drive(tx, [INF], seen[-1], run=run, state=state)
    assert after == seen
    chex.assert_trees_all_equal(skipped.inner_state, state.inner_state)
    assert float(skipped.scale) == float(state.scale) / 2


def test_one_bad_leaf_of_many_skips_all(run):
    tx = dynamic_loss_scale(SGD, init_scale=1.0)
    params = {"a": jnp.ones(3), "b": jnp.ones(())}
    grads = {"a": jnp.array([1.0, -INF, 1.0]), "b": jnp.ones(())}
    updates, _ = run(tx.update)(grads, tx.init(params), params)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))


# Order: unscale, check, clip, step


def test_tx_sees_unscaled_float32_gradients_once(run):
    keep = optax.GradientTransformation(
        lambda params: jnp.zeros(params.shape), lambda g, s, params=None: (g, g)
    )
    for tx in (
        dynamic_loss_scale(keep, init_scale=2.0**15),
        static_loss_scale(keep, 2.0**15),
        multi_steps(dynamic_loss_scale(keep, init_scale=2.0**15), 1),
    ):
        # Below the smallest float16 once unscaled.
        grads = jnp.full(2, 2.0**-10, jnp.float16)
        updates, state = run(tx.update)(grads, tx.init(jnp.zeros(2, jnp.float16)))
        seen = optax.tree.get(state, "inner_state")
        assert (seen.dtype, seen.tolist()) == (jnp.float32, [2.0**-25] * 2)
        assert updates.dtype == jnp.float16


def test_scaled_float16_sums_stay_wide_until_unscaled(run):
    # 2.5 * 2^15 is no float16; neither is the mean of the two smallest steps.
    tx = multi_steps(dynamic_loss_scale(SGD, init_scale=2.0**15), 2)
    grads = jnp.float16([1.0 * 2**15, 1.5 * 2**15])
    state = tx.init(jnp.float16(0.0))
    for gradient in grads:
        updates, state = run(tx.update)(gradient, state)
    assert float(updates) == -1.25


def test_clip_sees_the_unscaled_mean(run):
    clipped = optax.chain(optax.clip_by_global_norm(2.0), SGD)
    tx = multi_steps(dynamic_loss_scale(clipped, init_scale=64.0), 2)
    seen, _ = drive(tx, [64 * 1.0, 64 * 7.0], run=run)
    assert seen == [0.0, -2.0]


# In multi_steps


def test_window_with_an_overflow_is_no_update(run):
    tx = multi_steps(dynamic_loss_scale(SGD, init_scale=4.0, growth_interval=1), 2)
    seen, state = drive(tx, [4.0, INF], run=run)
    assert seen == [0.0, 0.0]
    assert float(loss_scale(state)) == 2.0
    assert (int(state.gradient_step), float(state.total_weight)) == (0, 0.0)
    assert not has_updated(state)
    seen, state = drive(tx, [2.0, 6.0], run=run, state=state)
    assert seen == [0.0, -2.0]
    assert (int(state.gradient_step), float(loss_scale(state))) == (1, 4.0)
    assert has_updated(state)


def test_scale_is_constant_over_a_window(run):
    tx = multi_steps(dynamic_loss_scale(SGD, init_scale=1.0, growth_interval=1), 3)
    state, log = None, []
    for _ in range(6):
        _, state = drive(tx, [1.0], run=run, state=state)
        log.append(float(loss_scale(state)))
    assert log == [1, 1, 2, 2, 2, 4]


def test_weights_and_flush(run):
    tx = multi_steps(dynamic_loss_scale(SGD, init_scale=8.0), 4)
    calls = [{"weight": 1.0, "flush": False}, {"weight": 3.0, "flush": True}]
    assert drive(tx, [8 * 1.0, 8 * 5.0], run=run, calls=calls)[0] == [0.0, -4.0]


def test_static_scale_is_the_same_inside_and_outside(run):
    grads = [8.0, 24.0, 16.0, 32.0]
    inside, a = drive(multi_steps(static_loss_scale(SGD, 8.0), 2), grads, run=run)
    outside, b = drive(static_loss_scale(multi_steps(SGD, 2), 8.0), grads, run=run)
    assert inside == outside == [0.0, -2.0, -2.0, -5.0]
    assert float(loss_scale(a)) == float(loss_scale(b)) == 8.0
    assert bool(has_updated(a)) and bool(has_updated(b))
    # A scale that nobody adjusts does not need to see overflows.
    skip = multi_steps(static_loss_scale(SGD, 8.0), 2, nonfinite="skip_microbatch")
    assert drive(skip, [INF, 8.0, 24.0], run=run)[0] == [0.0, 0.0, -2.0]


def test_with_optax_multi_steps(run):
    for tx in (
        optax.MultiSteps(dynamic_loss_scale(SGD, init_scale=8.0), 2).gradient_transformation(),
        dynamic_loss_scale(optax.MultiSteps(SGD, 2).gradient_transformation(), init_scale=8.0),
    ):
        seen, state = drive(tx, [8 * 1.0, 8 * 3.0], run=run)
        assert seen == [0.0, -2.0]
        assert float(loss_scale(state)) == 8.0


# Training in float16


def net(params, x, scale=1.0):
    """A loss whose float16 gradients are about 2^-26: below the smallest float16."""
    hidden = (x * params["w"]).astype(jnp.float16)
    return jnp.float32(scale) * jnp.mean(hidden.astype(jnp.float32)) * 2.0**-24


def test_float16_training_that_underflows_without_a_scale(run):
    params = {"w": jnp.ones((), jnp.float16)}
    x = jnp.float16([0.25, 0.5])
    assert float(jax.grad(net)(params, x)["w"]) == 0.0

    rate = optax.chain(optax.scale(2.0**12), optax.scale(-(2.0**12)))  # float16 ends at 2^16
    tx = multi_steps(dynamic_loss_scale(rate, init_scale=2.0**15), 2)
    state = tx.init(params)
    grad = run(jax.grad(net))
    for part in x:
        grads = grad(params, part[None], loss_scale(state))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert float(params["w"]) == 1 - 0.375


def test_float16_training_that_overflows_on_purpose(run):
    # Gradient 8 in float16: every scale above 2^12 overflows.
    tx = multi_steps(dynamic_loss_scale(SGD, init_scale=2.0**15, growth_interval=10), 2)
    w = jnp.zeros((), jnp.float16)
    state, log = tx.init(w), []
    grad = run(jax.grad(lambda w, scale: w.astype(jnp.float32) * 8 * scale))
    for _ in range(10):
        updates, state = tx.update(grad(w, loss_scale(state)), state, w)
        w = optax.apply_updates(w, updates)
        log.append((float(w), float(loss_scale(state))))
    assert log[1::2] == [(0, 2**14), (0, 2**13), (0, 2**12), (-8, 2**12), (-16, 2**12)]
    assert (int(state.gradient_step), int(state.inner_opt_state.num_skipped)) == (2, 3)


def test_same_as_flax_dynamic_scale_at_the_edge_of_the_window():
    # Flax counts from 0: it grows at the update after the interval.
    flax_scale = DynamicScale(scale=2.0**15, growth_interval=2)
    optimizer = optax.adam(0.1)
    ours = multi_steps(dynamic_loss_scale(optimizer, init_scale=2.0**15, growth_interval=3), 2)
    batches = jnp.float16([[1, 2], [0.5, 0.5], [0.25, 0.5], [1, 0.75], [2, 0.5], [0.5, 1]])

    def loss(w, x):
        return (w * x).astype(jnp.float32)

    @jax.jit
    def window(w, state, scale, xs):
        mean = accumulated_loss(lambda w, xs: jnp.mean(loss(w, xs)), 2)
        scale, finite, _, grads = scale.value_and_grad(lambda w: mean(w, xs))(w)
        updates, new_state = optimizer.update(grads, state, w)
        keep = functools.partial(jnp.where, finite)
        return (
            keep(optax.apply_updates(w, updates), w),
            jax.tree.map(keep, new_state, state),
            scale,
        )

    @jax.jit
    def micro(w, state, x):
        grads = jax.grad(lambda w: loss(w, x) * loss_scale(state))(w)
        updates, state = ours.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    theirs = w = jnp.float32(1.0)
    inner, state = optimizer.init(theirs), ours.init(w)
    for xs in batches:
        theirs, inner, flax_scale = window(theirs, inner, flax_scale, xs)
        for x in xs:
            w, state = micro(w, state, x)
        assert float(loss_scale(state)) == float(flax_scale.scale)
        np.testing.assert_allclose(w, theirs, rtol=1e-6)  # float32
    assert float(flax_scale.scale) != 2.0**15


def test_same_as_one_call_with_the_scale_in_value_and_grad(run):
    # The middle window overflows float16.
    xs = jnp.float16([[1, 2, 4, 5], [1, 2, 2**15, 5], [1, 3, 1, 3]])
    one_call = dynamic_loss_scale(SGD, init_scale=2.0**8, growth_interval=1)
    per_call = multi_steps(one_call, 4)

    def loss(w, x):
        return jnp.mean((w * x).astype(jnp.float32))

    def window(w, state, x):
        grad_fn = value_and_grad(loss, k=4, loss_scale=loss_scale(state))
        value, grads = grad_fn(w, x)
        updates, state = one_call.update(grads, state, w)
        return optax.apply_updates(w, updates), state, value

    def micro(w, state, row):
        grads = jax.grad(lambda w: loss(w, row) * loss_scale(state))(w)
        updates, state = per_call.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    a = b = jnp.float16(1.0)
    state_a, state_b = one_call.init(a), per_call.init(b)
    log = []
    for x in xs:
        unscaled = loss(a, x)
        a, state_a, value = run(window)(a, state_a, x)
        assert float(value) == float(unscaled)
        for row in x:
            b, state_b = run(micro)(b, state_b, row)
        assert (float(a), float(loss_scale(state_a))) == (float(b), float(loss_scale(state_b)))
        log.append((float(a), float(loss_scale(state_a)), bool(has_updated(state_b))))
    assert log == [(-2.0, 512.0, True), (-2.0, 256.0, False), (-4.0, 512.0, True)]


# Devices


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_non_finite_shard_skips_on_all_devices(kind):
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4])
    tx = multi_steps(dynamic_loss_scale(optax.adam(0.1), init_scale=4.0), 1)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("data"))
        params = jax.device_put(jnp.ones(8), sharding)
        grads = jax.device_put(jnp.ones(8).at[7].set(NAN), sharding)
        updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert not updates.any()
    assert (float(loss_scale(state)), int(optax.tree.get(state, "count"))) == (2.0, 0)


# Finding it


def nested():
    scaled = dynamic_loss_scale(SGD, init_scale=32.0)
    labels = {"a": "x", "b": "y"}
    mask = {"a": True, "b": False}
    return {
        "alone": scaled,
        "chain": optax.chain(optax.identity(), optax.chain(scaled)),
        "named_chain": optax.named_chain(("scaled", scaled)),
        "multi_steps": multi_steps(scaled, 2),
        "optax.MultiSteps": optax.MultiSteps(scaled, 2).gradient_transformation(),
        "masked": optax.masked(scaled, mask),
        "partition": optax.partition({"x": scaled, "y": SGD}, labels),
        "apply_if_finite": optax.apply_if_finite(scaled, 3),
        "inject_hyperparams": optax.inject_hyperparams(
            lambda rate: optax.chain(scaled, optax.scale(rate))
        )(rate=1.0),
        "static": multi_steps(static_loss_scale(SGD, 32.0), 2),
    }


@pytest.mark.parametrize("name", nested())
def test_loss_scale_anywhere(run, name):
    state = nested()[name].init({"a": jnp.ones(2), "b": jnp.ones(())})
    scale = run(loss_scale)(state)
    assert (float(scale), scale.dtype, scale.shape) == (32.0, jnp.float32, ())
    assert float(loss_scale({"params": 1, "opt": state})) == 32.0


def test_no_scale_and_several():
    with pytest.raises(ValueError, match="loss_scale: no LossScaleState in opt_state, of type tup"):
        loss_scale(optax.adam(0.1).init(0.0))
    twice = static_loss_scale(optax.chain(dynamic_loss_scale(SGD)), 2.0).init(0.0)
    both = r"loss_scale: .* 2 of LossScaleState: opt_state and opt_state\.inner_state\[0\]"
    with pytest.raises(ValueError, match=both):
        loss_scale(twice)


# State, types


def test_state_is_the_contract():
    assert LossScaleState._fields == ("scale", "good_steps", "num_skipped", "inner_state")
    state = dynamic_loss_scale(SGD).init(jnp.ones(2))
    assert [x.dtype for x in state[:3]] == [jnp.float32, jnp.int32, jnp.int32]
    assert static_loss_scale(SGD, 2.0).init(jnp.ones(2))[1:3] == (None, None)


def test_no_retrace_and_dtypes(run):
    params = {"h": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.bfloat16), "s": jnp.ones(2)}
    for tx in (optax.adamw(0.1), optax.sgd(0.1, momentum=0.9)):
        alone, _ = tx.update(params, tx.init(params), params)
        scaled = dynamic_loss_scale(tx, growth_factor=np.float64(2.0), growth_interval=np.int64(2))
        state, update = scaled.init(params), jax.jit(scaled.update, donate_argnums=1)
        for _ in range(3):
            updates, state = update(params, state, params)
            chex.assert_trees_all_equal_shapes_and_dtypes(updates, alone)
            chex.assert_trees_all_equal_shapes_and_dtypes(state, scaled.init(params))
        assert update._cache_size() == 1


def test_extra_arguments_reach_tx(run):
    tx = dynamic_loss_scale(optax.polyak_sgd(), init_scale=2.0)
    assert drive(tx, [2.0], 1.0, run=run, calls=[{"value": jnp.float32(0.5)}])[0] == [0.5]


def test_vmap_over_scales():
    tx = dynamic_loss_scale(optax.adam(0.1), init_scale=4.0)
    grads = jnp.float32([1.0, NAN, INF])
    states = jax.vmap(tx.init)(jnp.zeros(3))
    updates, states = jax.jit(jax.vmap(tx.update))(grads, states, jnp.zeros(3))
    assert (updates != 0).tolist() == [True, False, False]
    assert states.scale.tolist() == [4.0, 2.0, 2.0]


# Errors


def test_multi_steps_inside_is_refused():
    tx = dynamic_loss_scale(optax.chain(multi_steps(SGD, 2)))
    with pytest.raises(TypeError, match=r"Use multi_steps\(dynamic_loss_scale\(chain\(clip, opt"):
        tx.init(jnp.ones(2))


@pytest.mark.parametrize("make", [dynamic_loss_scale, lambda tx: static_loss_scale(tx, 2.0)])
def test_tx_that_is_no_transformation(make):
    with pytest.raises(TypeError, match=r"_loss_scale: tx must be an optax.* Call it first"):
        make(optax.adam)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"init_scale": NAN}, ValueError, "init_scale must be finite, above 0, got nan"),
        ({"init_scale": -1.0}, ValueError, "init_scale must be finite, above 0, got -1"),
        ({"init_scale": "big"}, TypeError, "init_scale must be a number, got 'big' of type str"),
        ({"init_scale": True}, TypeError, "init_scale must be a number, got True of type bool"),
        ({"growth_interval": 0}, ValueError, r"growth_interval must be at least 1 \(updates\)"),
        ({"growth_interval": 2.5}, TypeError, "growth_interval must be a Python int"),
        ({"growth_factor": 1.0}, ValueError, "growth_factor must be finite, above 1, got 1"),
        ({"backoff_factor": 1.0}, ValueError, "backoff_factor must be finite, above 0 and below 1"),
        ({"max_scale": INF}, ValueError, "max_scale must be finite, above 0, got inf"),
        ({"min_scale": 4.0, "max_scale": 2.0}, ValueError, r"got min_scale=4\.0, .*max_scale=2\.0"),
        ({"init_scale": 2.0**30}, ValueError, "min_scale <= init_scale <= max_scale must hold"),
    ],
)
def test_bad_numbers(kwargs, error, message):
    with pytest.raises(error, match=f"dynamic_loss_scale: .*{message}"):
        dynamic_loss_scale(SGD, **kwargs)


@pytest.mark.parametrize("scale", [0.0, NAN, INF, -1.0])
def test_bad_static_scale(scale):
    with pytest.raises(ValueError, match="static_loss_scale: scale must be finite, above 0"):
        static_loss_scale(SGD, scale)


def test_a_traced_static_scale():
    @jax.jit
    def step(scale):
        tx = static_loss_scale(SGD, scale)
        return tx.update(jnp.float32(6.0), tx.init(jnp.float32(0.0)))[0]

    assert float(step(3.0)) == -2.0
