"""What a type checker knows of the public functions: pyright reads these, pytest runs them."""

from __future__ import annotations

from typing import Any, TypedDict, assert_type

import jax
import jax.numpy as jnp

import accum_jax
from accum_jax import AccumulationStats


class Params(TypedDict):
    w: jax.Array


class Metrics(TypedDict):
    hits: jax.Array


def loss(params: Params, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch * params["w"]) ** 2)


def loss_with_aux(params: Params, batch: jax.Array) -> tuple[jax.Array, Metrics]:
    return loss(params, batch), {"hits": jnp.sum(batch)}


PARAMS: Params = {"w": jnp.ones(())}
BATCH = jnp.arange(4.0)


def test_value_and_grad():
    value, grads = accum_jax.value_and_grad(loss, k=2)(PARAMS, BATCH)
    assert_type(value, jax.Array)
    assert_type(grads, Params)
    assert (float(value), float(grads["w"])) == (3.5, 7.0)


def test_value_and_grad_with_aux():
    out = accum_jax.value_and_grad(loss_with_aux, has_aux=True, k=2, aux="sum")(PARAMS, BATCH)
    assert_type(out, tuple[tuple[jax.Array, Metrics], Params])
    (_, metrics), _ = out
    assert float(metrics["hits"]) == 6.0


def test_grad():
    grads = accum_jax.grad(loss, k=2)(PARAMS, BATCH)
    assert_type(grads, Params)
    assert float(grads["w"]) == 7.0
    out = accum_jax.grad(loss_with_aux, has_aux=True, k=2)(PARAMS, BATCH)
    assert_type(out, tuple[Params, Metrics])
    assert float(out[1]["hits"]) == 3.0


def test_other_arguments_are_not_promised():
    grads = accum_jax.grad(
        lambda scale, params, batch: scale * loss(params, batch), 1, k=2, batch_argnums=2
    )
    assert_type(grads(2.0, PARAMS, BATCH), Any)


def test_accumulate_keeps_the_type():
    mean = accum_jax.accumulate(loss, 2)
    assert_type(mean(PARAMS, BATCH), jax.Array)
    measured = accum_jax.accumulate(loss, 2, stats="counts")(PARAMS, BATCH)
    assert_type(measured, tuple[jax.Array, AccumulationStats])
    assert int(measured[1].num_examples) == 4


def test_accumulated_loss_keeps_the_type():
    assert_type(accum_jax.accumulated_loss(loss, k=2)(PARAMS, BATCH), jax.Array)
    out = accum_jax.accumulated_loss(loss_with_aux, k=2, has_aux=True)(PARAMS, BATCH)
    assert_type(out, tuple[jax.Array, Metrics])


def encode(params: Params, batch: jax.Array) -> jax.Array:
    return batch * params["w"]


def spread(params: Params, embeddings: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.var(embeddings)


def spread_with_aux(
    params: Params, embeddings: jax.Array, batch: jax.Array
) -> tuple[jax.Array, Metrics]:
    return spread(params, embeddings, batch), {"hits": jnp.sum(batch)}


def test_coupled_value_and_grad():
    value, grads = accum_jax.coupled_value_and_grad(encode, spread, k=2)(PARAMS, BATCH)
    assert_type(value, jax.Array)
    assert_type(grads, Params)
    assert (float(value), float(grads["w"])) == (1.25, 2.5)
    fn = accum_jax.coupled_value_and_grad(encode, spread_with_aux, k=2, has_aux=True)
    out = fn(PARAMS, BATCH)
    assert_type(out, tuple[tuple[jax.Array, Metrics], Params])
    assert float(out[0][1]["hits"]) == 6.0
    several = accum_jax.coupled_value_and_grad(encode, spread, k=2, argnums=(0,))
    assert_type(several(PARAMS, BATCH), Any)
