"""Flax Linen: `value_and_grad` in a step on a `TrainState`, with everything that Linen threads."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors as nn_errors
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from flax_models import PAIRS, count, cross_entropy, make_batch
from helpers import assert_same, microbatch_outputs, quick, rows, weighted_mean
from layers import assert_close

import accum_jax
import accum_jax.nnx

TX = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.add_decayed_weights(0.01),
    optax.sgd(optax.exponential_decay(0.3, 5, 0.8), momentum=0.9),
)


# Whole batch, Linen and NNX: the same numbers


@pytest.mark.parametrize("name", quick(PAIRS, "mixer"))
def test_twenty_updates_equal_the_whole_batch_in_linen_and_nnx(name, x64):
    linen, nnx_model = PAIRS[name][0](), PAIRS[name][1](nnx.Rngs(0))
    batch = make_batch(name)
    params = jax.jit(linen.init)(jax.random.key(0), batch["x"])["params"]
    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)

    def loss(params, batch):
        return cross_entropy(linen.apply({"params": params}, batch["x"]), batch)

    def train(grad_fn):
        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, batch):
            loss, grads = grad_fn(state.params, batch)
            return state.apply_gradients(grads=grads), loss

        copy = jax.tree.map(jnp.copy, params)
        state, losses = TrainState.create(apply_fn=linen.apply, params=copy, tx=TX), []
        for _ in range(20):
            state, value = step(state, batch)
            losses.append(value)
        return state.params, jnp.stack(losses)

    expected = train(jax.value_and_grad(loss))
    actual = train(accum_jax.value_and_grad(loss, k=4, weight=count))
    # float64: sums in another order, 20 times; the bias of keys has no gradient but rounding.
    close = {"rtol": 1e-10, "atol": 1e-12}
    assert_same(actual, expected, **close)
    assert float(actual[1][-1]) < 0.9 * float(actual[1][0])

    nnx.update(nnx_model, params)
    optimizer = nnx.Optimizer(nnx_model, TX, wrt=nnx.Param)
    grad_fn = accum_jax.nnx.value_and_grad(
        lambda model, batch: cross_entropy(model(batch["x"]), batch), k=4, weight=count
    )

    @nnx.jit
    def nnx_step(model, optimizer, batch):
        loss, grads = grad_fn(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = jnp.stack([nnx_step(nnx_model, optimizer, batch) for _ in range(20)])
    assert_same((nnx.to_pure_dict(nnx.state(nnx_model)), losses), expected, **close)


# State, keys, metrics


class Net(nn.Module):
    """Batch norm, two kinds of dropout draws and a counter in a collection of its own."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(not train, momentum=0.9, name="norm")(nn.Dense(4, name="first")(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        if train:
            x += 0.1 * jax.random.normal(self.make_rng("noise"), x.shape)
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        calls.value += train
        return nn.Dense(1, name="head")(x)[:, 0]


class State(TrainState):
    mutable: Any
    keys: Any


def net_loss(params, mutable, batch, keys):
    out, mutable = Net().apply(
        {"params": params, **mutable}, batch["x"], True, rngs=keys, mutable=list(mutable)
    )
    loss = jnp.mean((out - batch["y"]) ** 2)
    return loss, (mutable, {"loss": loss, "out": out})


@pytest.fixture(scope="module")
def net():
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 3)), "y": rng.normal(size=(8,))}
    batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch)
    variables = jax.jit(Net().init, static_argnums=2)(jax.random.key(0), batch["x"], False)
    params = variables.pop("params")
    return params, variables, batch, {"dropout": jax.random.key(1), "noise": jax.random.key(2)}


def accumulated(**keywords):
    return accum_jax.value_and_grad(
        net_loss,
        has_aux=True,
        k=4,
        batch_argnums=2,
        key_argnums=3,
        aux=(accum_jax.thread(1), {"loss": "mean", "out": "concat"}),
        **keywords,
    )


def test_mutable_collections_move_on_and_each_microbatch_has_its_own_keys(net):
    params, mutable, batch, keys = net
    (loss, (after, metrics)), grads = jax.jit(accumulated())(*net)

    losses, gradients = [], []
    grad_fn = jax.jit(jax.value_and_grad(net_loss, has_aux=True))
    for i in range(4):
        own = {name: jax.random.fold_in(key, i) for name, key in keys.items()}
        (value, (mutable, _)), grad = grad_fn(params, mutable, rows(batch, 4, i), own)
        losses.append(value)
        gradients.append(grad)
    assert_close((loss, grads), (weighted_mean(losses), weighted_mean(gradients)), 1e-5)
    assert_close(after, mutable, 1e-6)
    assert after["counters"]["calls"] == 4
    assert_close(metrics["loss"], loss, 1e-6)
    # Every microbatch draws anew; another key draws anew; the same key draws the same.
    out = metrics["out"].reshape(2, 4)
    assert len(np.unique(np.round(out, 5))) == 8
    again = jax.jit(accumulated())(*net)
    assert_same(again, ((loss, (after, metrics)), grads))


def test_a_train_state_with_everything_donated(net):
    params, mutable, batch, keys = net

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        keys = jax.tree.map(lambda key: jax.random.fold_in(key, state.step), state.keys)
        (loss, (mutable, _)), grads = accumulated(loss_scale=1024.0)(
            state.params, state.mutable, batch, keys
        )
        grads = jax.tree.map(lambda g: g / 1024, grads)
        return state.apply_gradients(grads=grads, mutable=mutable), (loss, grads)

    copies = jax.tree.map(jnp.copy, (params, mutable, keys))
    tx = optax.adam(1e-2)
    fields = {"apply_fn": Net().apply, "tx": tx, "mutable": copies[1], "keys": copies[2]}
    state = State.create(params=copies[0], **fields)
    state, (first, grads) = step(state, batch)
    keys = jax.tree.map(lambda key: jax.random.fold_in(key, 0), keys)
    (loss, _), expected = jax.jit(accumulated())(params, mutable, batch, keys)
    assert_close((first, grads), (loss, expected), 1e-6)
    state, (second, _) = step(state, batch)
    assert state.step == 2 and state.mutable["counters"]["calls"] == 8
    assert first != second


def test_dynamic_scale_takes_the_accumulated_loss(net):
    """`DynamicScale` differentiates by itself: once, over the window's loss."""
    x, y = net[2]["x"], net[2]["y"]

    def loss(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    params, batch = {"w": jnp.ones(3)}, {"x": x, "y": y}
    whole = jax.jit(lambda p, b: DynamicScale().value_and_grad(loss)(p, b))(params, batch)
    window = accum_jax.accumulated_loss(loss, k=4)
    ours = jax.jit(lambda p, b: DynamicScale().value_and_grad(window)(p, b))(params, batch)
    assert_close((ours.aux, ours.grad), (whole.aux, whole.grad), 1e-5)
    assert ours.finite and ours.dynamic_scale.scale == whole.dynamic_scale.scale

    overflow = DynamicScale(scale=jnp.float32(2.0**127))
    skipped = jax.jit(lambda s, p, b: s.value_and_grad(window)(p, b))(overflow, params, batch)
    assert not skipped.finite and skipped.dynamic_scale.scale == 2.0**126


def test_batch_statistics_are_those_of_one_microbatch_after_another():
    """x = [0, 0 | 2, 2], k = 2, momentum 0.9 from 0: 0.2, where the whole batch gives 0.1."""
    norm = nn.BatchNorm(False, momentum=0.9)
    x = jnp.array([[0.0], [2.0], [0.0], [2.0]])  # rows 0, 2 | 1, 3
    variables = norm.init(jax.random.key(0), x)

    def loss(params, stats, x):
        out, new = norm.apply({"params": params, "batch_stats": stats}, x, mutable="batch_stats")
        return out.mean(), new["batch_stats"]

    args = variables["params"], variables["batch_stats"], x
    grad_fn = accum_jax.value_and_grad(
        loss, has_aux=True, k=2, batch_argnums=2, aux=accum_jax.thread(1)
    )
    (_, stats), _ = grad_fn(*args)
    np.testing.assert_allclose(stats["mean"], 0.2, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(loss)(*args)[1]["mean"], 0.1, rtol=1e-6)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x += nn.Dropout(0.5, deterministic=False)(nn.tanh(nn.Dense(3)(x)))
        return x, None


class Stack(nn.Module):
    """Three layers under `nn.scan`, each rematerialised, each with its own dropout key."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        return layers(name="layers")(x, None)[0]


def test_scanned_and_rematerialised_layers(net):
    stack, batch, key = Stack(), net[2], jax.random.key(3)
    rngs = {"params": key, "dropout": key}
    params = jax.jit(stack.init)(rngs, batch["x"])["params"]

    def loss(params, batch, key):
        out = stack.apply({"params": params}, batch["x"], rngs={"dropout": key})
        return jnp.mean((out.sum(1) - batch["y"]) ** 2)

    grad_fn = accum_jax.value_and_grad(loss, k=2, key_argnums=2, in_place=True)
    actual = jax.jit(grad_fn)(params, batch, key)
    each = microbatch_outputs(
        jax.jit(jax.value_and_grad(loss)), 2, params, batch, key, key_argnums=(2,)
    )
    assert_close(actual, weighted_mean(each), 1e-5)


def test_flax_says_what_a_call_lacks(net):
    """A missing key, and mutable state that the mode needs: named, never a wrong number."""
    params, mutable, batch, keys = net
    with pytest.raises(nn_errors.InvalidRngError, match="dropout"):
        accumulated()(params, mutable, batch, {"noise": keys["noise"]})

    def forgets(params, mutable, batch, keys):
        out = Net().apply({"params": params, **mutable}, batch["x"], True, rngs=keys)
        return jnp.mean(out), None

    with pytest.raises(nn_errors.ModifyScopeVariableError, match="batch_stats"):
        accum_jax.value_and_grad(forgets, has_aux=True, k=4, batch_argnums=2, key_argnums=3)(*net)


def test_state_that_changes_its_structure_is_refused(net):
    def grows(params, mutable, batch, keys):
        loss, (new, _) = net_loss(params, mutable, batch, keys)
        return loss, {**new, "more": jnp.zeros(())}

    with pytest.raises(ValueError, match=r"threaded into argument 1.*structures differ"):
        accum_jax.value_and_grad(
            grows, has_aux=True, k=4, batch_argnums=2, key_argnums=3, aux=accum_jax.thread(1)
        )(*net)


def test_amax_histories_are_combined_by_max():
    """Float8 scaling: each microbatch starts from the window's history, which keeps the largest."""
    history, x = jnp.array([1.0, 7.0, 3.0]), jnp.arange(4.0)

    def loss(w, x, history):
        return jnp.mean(w * x), jnp.roll(history, 1).at[0].set(jnp.abs(x).max())

    grad_fn = accum_jax.value_and_grad(loss, has_aux=True, k=2, aux="max")
    (_, new), _ = grad_fn(jnp.float32(1), x, history)
    assert_same(new, jnp.array([3.0, 1.0, 7.0]))
