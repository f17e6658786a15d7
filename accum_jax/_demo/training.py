"""Trains a task one way and measures it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import accum_jax
from accum_jax._demo.tasks import Task


@dataclass(frozen=True)
class Way:
    """One way to make an update of k microbatches.

    Attributes:
        grad_fn: `grad_fn(params, batch)`, the value and gradient of one call.
        tx: the transformation that takes each call's gradient.
        calls: calls per update; call i sees rows i, i + calls, i + 2 calls, ... of the batch.
    """

    grad_fn: Callable[..., Any]
    tx: optax.GradientTransformation
    calls: int


def whole_batch(loss_fn, tx, k) -> Way:
    """All rows in one backward pass: what accumulation has to equal."""
    return Way(jax.value_and_grad(loss_fn), tx, calls=1)


def accumulated(loss_fn, tx, k) -> Way:
    """All k microbatches in one compiled call."""
    return Way(accum_jax.accumulate(jax.value_and_grad(loss_fn), k), tx, calls=1)


def optax_multi_steps(loss_fn, tx, k) -> Way:
    """One microbatch a call, with the accumulator in the optimizer state."""
    steps = optax.MultiSteps(tx, every_k_schedule=k).gradient_transformation()
    return Way(jax.value_and_grad(loss_fn), steps, calls=k)


WAYS: dict[str, Callable[..., Way]] = {
    "whole batch": whole_batch,
    "accumulate": accumulated,
    "optax.MultiSteps": optax_multi_steps,
}


@dataclass(frozen=True)
class Run:
    """What training one way gave.

    Attributes:
        name: the way.
        params: the parameters after the last update.
        losses: mean loss of each effective batch, one per update.
        test_accuracy: share of the held-out rows predicted right, in [0, 1].
        temp_bytes: temporary memory of the compiled program, in bytes.
        update_ms: median wall time of one update, in milliseconds.
        optimizer_updates: updates that the optimizer itself counted.
    """

    name: str
    params: Any
    losses: list[float]
    test_accuracy: float
    temp_bytes: int
    update_ms: float
    optimizer_updates: int


def optimizer(steps: int) -> optax.GradientTransformation:
    """Clipping, momentum and a schedule: each goes wrong where it runs per microbatch.

    Plain momentum rather than Adam, which hides a gradient that is a constant factor off.
    """
    schedule = optax.schedules.cosine_decay_schedule(0.1, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(schedule, momentum=0.9))


def train(task: Task, name: str, steps: int, on_update: Callable[[float], None]) -> Run:
    """Trains `task` for `steps` updates in the way called `name`.

    Args:
        task: what to train.
        name: a key of `WAYS`.
        steps: updates to make.
        on_update: called with the loss after each update.
    """
    way = WAYS[name](task.loss_fn, optimizer(steps), task.k)

    def step(params, opt_state, batch):
        loss, grads = way.grad_fn(params, batch)
        updates, opt_state = way.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def rows_of_call(i, batch):
        return jax.tree.map(lambda leaf: leaf[i :: way.calls], batch)

    params = task.init()
    opt_state = way.tx.init(params)
    compiled = (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(params, opt_state, rows_of_call(0, next(task.batches(1))))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory is not None  # CPU, GPU and TPU all have it.

    losses, seconds = [], []
    for batch in task.batches(steps):
        parts = []
        start = time.perf_counter()
        for i in range(way.calls):
            params, opt_state, loss = compiled(params, opt_state, rows_of_call(i, batch))
            parts.append(loss)
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - start)
        losses.append(float(np.mean(parts)))
        on_update(losses[-1])

    return Run(
        name=name,
        params=params,
        losses=losses,
        test_accuracy=float(jax.jit(task.accuracy)(params, task.test)),
        temp_bytes=memory.temp_size_in_bytes,
        update_ms=1e3 * statistics.median(seconds),
        optimizer_updates=int(optax.tree.get(opt_state, "count")),
    )


def largest_difference(params: Any, reference: Any) -> float:
    """The largest absolute difference between two trees of parameters."""
    differences = jax.tree.map(lambda a, b: abs(a - b).max(), params, reference)
    return float(max(jax.tree.leaves(differences)))
