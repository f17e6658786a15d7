"""`accum_jax.nnx.coupled_value_and_grad`: modules whose state moves on once, by the first pass."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same, rows
from jax.sharding import AxisType
from layers import assert_close

import accum_jax.nnx

ROWS, K, SIZE = 8, 4, 3
NARROW = 1e-5  # some ten roundings of 24 bits


class Tower(nnx.Module):
    """Dropout and a counter in the encoder, batch norm for the loss."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        self.linear = nnx.Linear(4, SIZE, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.norm = nnx.BatchNorm(SIZE, momentum=0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))


def encode(model, batch):
    model.calls[...] += 1
    return model.dropout(model.linear(batch["x"]))


def loss(model, z, batch):
    gram = model.norm(z) @ z.T
    return jnp.mean(jnp.square(gram - batch["y"])), gram.sum(1)


def make_batch():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 4)), rng.normal(size=ROWS)
    return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32)}


def whole_batch(model, batch):
    """The same with microbatches encoded in turn, then put together."""
    parts = [encode(model, rows(batch, K, i)) for i in range(K)]
    return loss(model, jnp.stack(parts, 1).reshape(ROWS, SIZE), batch)


def numbers(module):
    state = nnx.to_pure_dict(nnx.state(module))
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        state,
    )


@pytest.mark.parametrize("rate", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_value_gradient_and_state_of_microbatches_in_turn(rate):
    ours, oracle, batch = Tower(nnx.Rngs(0), rate), Tower(nnx.Rngs(0), rate), make_batch()
    step = accum_jax.nnx.coupled_value_and_grad(encode, loss, k=K, has_aux=True)
    expected_step = nnx.jit(nnx.value_and_grad(whole_batch, has_aux=True))
    for _ in range(2):
        assert_close(step(ours, batch), expected_step(oracle, batch), NARROW)
        assert_close(numbers(ours), numbers(oracle), NARROW)
    assert int(ours.calls[...]) == 2 * K
    assert float(jnp.abs(ours.norm.mean[...]).max()) > 0


@pytest.mark.slow
def test_batch_norm_in_the_loss_has_the_whole_batch_s_statistics():
    model, batch = Tower(nnx.Rngs(0)), make_batch()
    accum_jax.nnx.coupled_value_and_grad(encode, loss, k=K, has_aux=True)(model, batch)
    z = model.linear(batch["x"])
    np.testing.assert_allclose(model.norm.mean[...], 0.5 * z.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.norm.var[...], 0.5 + 0.5 * z.var(0), rtol=1e-5)


def test_two_modules_one_of_them_frozen_and_a_filter():
    mine, frozen, batch = Tower(nnx.Rngs(0)), Tower(nnx.Rngs(1)), make_batch()

    def both(frozen, batch, mine):
        return {"a": mine.linear(batch["x"]), "b": frozen.linear(batch["x"])}

    def clip(mine, z, batch):
        return jnp.mean(jnp.square(z["a"] @ z["b"].T)) + jnp.sum(mine.linear.bias[...])

    def whole(frozen, batch, mine):
        return clip(mine, both(frozen, batch, mine), batch)

    argnums = nnx.DiffState(2, nnx.PathContains("linear"))
    fn = accum_jax.nnx.coupled_value_and_grad(both, clip, k=2, argnums=argnums)
    expected = nnx.jit(nnx.value_and_grad(whole, argnums=argnums))(frozen, batch, mine)
    assert_close(fn(frozen, batch, mine), expected, NARROW)


def test_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    model, oracle, batch = Tower(nnx.Rngs(0)), Tower(nnx.Rngs(0)), make_batch()
    step = accum_jax.nnx.coupled_value_and_grad(encode, loss, k=K // 2, mesh=mesh, has_aux=True)
    expected = nnx.jit(nnx.value_and_grad(whole_batch, has_aux=True))(oracle, batch)
    assert_close(nnx.jit(step)(model, batch), expected, NARROW)
    assert_close(model.norm.mean[...], oracle.norm.mean[...], NARROW)
    assert_same(model.calls[...], jnp.int32(K // 2))  # as on one of the devices


def test_errors():
    model, batch = Tower(nnx.Rngs(0)), make_batch()

    def raising(error, message, encode_fn=encode, loss_fn=loss, **options):
        options = {"k": K, "has_aux": True, **options}
        with pytest.raises(error, match=re.escape("nnx.coupled_value_and_grad") + ".*" + message):
            accum_jax.nnx.coupled_value_and_grad(encode_fn, loss_fn, **options)(model, batch)

    def assign(model, z, batch):
        model.linear.bias[...] = jnp.zeros(SIZE)
        return loss(model, z, batch)

    def grow(model, z, batch):
        model.more = nnx.Variable(jnp.ones(2))
        return loss(model, z, batch)

    raising(TypeError, "is bound to a Linear", encode_fn=model.linear)
    raising(TypeError, "unexpected keyword argument 'state'", state=())
    raising(ValueError, "assigns to model.linear.bias", loss_fn=assign)
    raising(ValueError, "with a new more", loss_fn=grow)
    raising(TypeError, "the loss must be a real float scalar", has_aux=False)
    raising(ValueError, "embeddings is a scalar", encode_fn=lambda m, b: encode(m, b).sum())
