"""The ways to make an update of k microbatches: ours and its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import accum_jax
from benchmarks.models import Model


def hand_written_scan(grad_fn: Callable[..., Any], k: int, axis: int = 1) -> Callable[..., Any]:
    """What one writes without a library: a scan that adds up.

    Its microbatches are strided, or with `axis` 0 contiguous.
    """
    shape = (-1, k) if axis else (k, -1)

    def accumulated(params, batch):
        split = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch)

        def body(total, i):
            rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, axis, False), split)
            return jax.tree.map(jnp.add, total, grad_fn(params, rows)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(body, zeros, jnp.arange(k))
        return jax.tree.map(lambda x: x / k, total)

    return accumulated


@dataclass(frozen=True)
class Way:
    """One way to make an update.

    Attributes:
        name: as tables show it.
        grad_fn: `grad_fn(model, k)` gives the function that makes value and gradient in one call.
        wrap: where a call sees one microbatch, what makes the optimizer add up between the calls:
            `wrap(tx, k)`. None where a call sees the whole effective batch.
    """

    name: str
    grad_fn: Callable[[Model, int], Callable[..., Any]]
    wrap: Callable[[optax.GradientTransformation, int], optax.GradientTransformation] | None = None

    @property
    def one_call(self) -> bool:
        """Whether a call sees the whole effective batch."""
        return self.wrap is None

    def optimizer(self, k: int) -> optax.GradientTransformation:
        # Moments of narrow parameters in float32: they are below what bfloat16 can add up.
        tx = optax.adam(1e-3, mu_dtype=jnp.float32)
        return tx if self.wrap is None else self.wrap(tx, k)

    def step(self, model: Model, k: int) -> Callable[..., Any]:
        """`step(params, opt_state, batch)` of one call: new parameters, state and the loss."""
        tx, grad_fn = self.optimizer(k), self.grad_fn(model, k)

        def step(params, opt_state, batch):
            loss, grads = grad_fn(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        return step


def _mean(model, k):
    return jax.value_and_grad(model.loss_fn)


WHOLE_BATCH = Way("whole batch", _mean)
HAND_WRITTEN = Way("hand-written scan", lambda model, k: hand_written_scan(_mean(model, k), k))
ACCUMULATE = Way(
    "accumulate", lambda model, k: accum_jax.accumulate(jax.value_and_grad(model.loss_fn), k)
)
IN_PLACE = Way(
    "value_and_grad in place",
    lambda model, k: accum_jax.value_and_grad(model.loss_fn, k=k, in_place=True),
)
ACCUMULATE_WEIGHTED = Way(
    "accumulate, weights",
    lambda model, k: accum_jax.accumulate(
        jax.value_and_grad(model.loss_fn), k, weight=model.weight
    ),
)
IN_PLACE_WEIGHTED = Way(
    "value_and_grad in place, weights",
    lambda model, k: accum_jax.value_and_grad(
        model.loss_fn, k=k, in_place=True, weight=model.weight
    ),
)
OPTAX_MICROBATCH = Way(
    "optax.microbatch",
    lambda model, k: optax.microbatch(
        jax.value_and_grad(model.loss_fn),
        argnums=1,
        microbatch_size=model.microbatch_size,
        accumulator=optax.microbatching.AccumulationType.MEAN,
    ),
)
OPTAX_MULTI_STEPS = Way(
    "optax.MultiSteps loop",
    _mean,
    lambda tx, k: optax.MultiSteps(tx, k).gradient_transformation(),
)
MULTI_STEPS = Way("multi_steps loop", _mean, accum_jax.multi_steps)

WAYS = (
    WHOLE_BATCH,
    HAND_WRITTEN,
    ACCUMULATE,
    IN_PLACE,
    ACCUMULATE_WEIGHTED,
    IN_PLACE_WEIGHTED,
    OPTAX_MICROBATCH,
    OPTAX_MULTI_STEPS,
    MULTI_STEPS,
)
OURS = {
    way.name for way in (ACCUMULATE, IN_PLACE, ACCUMULATE_WEIGHTED, IN_PLACE_WEIGHTED, MULTI_STEPS)
}
