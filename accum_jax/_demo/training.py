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
from accum_jax import multi_steps
from accum_jax._demo.task import Batch, Task


@dataclass(frozen=True)
class Way:
    """One way to make an update of k microbatches.

    Attributes:
        grad_fn: `grad_fn(params, batch)`, the value and gradient of one call.
        tx: the transformation that takes each call's gradient.
        calls: calls per update; call i sees rows i, i + calls, i + 2 calls, ... of the batch.
        weight: of a call's batch, where `tx` takes it.
    """

    grad_fn: Callable[..., Any]
    tx: optax.GradientTransformation
    calls: int = 1
    weight: Callable[[Batch], jax.Array] | None = None


def whole_batch(task: Task, tx) -> Way:
    """All rows in one backward pass: what accumulation has to equal."""
    return Way(jax.value_and_grad(task.loss_fn), tx)


def accumulated(task: Task, tx) -> Way:
    """All k microbatches in one compiled call."""
    grad_fn = jax.value_and_grad(task.loss_fn)
    return Way(accum_jax.accumulate(grad_fn, task.k, weight=task.weight), tx)


def in_place(task: Task, tx) -> Way:
    """The same, added up in place."""
    return Way(accum_jax.value_and_grad(task.loss_fn, k=task.k, weight=task.weight), tx)


def mean_of_means(task: Task, tx) -> Way:
    """Without weights: a byte in a short microbatch counts for more than one in a long one."""
    return Way(accum_jax.value_and_grad(task.loss_fn, k=task.k), tx)


def one_call_each(task: Task, tx) -> Way:
    """One microbatch a call, with the accumulator in the optimizer state."""
    grad_fn = jax.value_and_grad(task.loss_fn)
    return Way(grad_fn, multi_steps(tx, task.k), task.k, task.weight)


def optax_multi_steps(task: Task, tx) -> Way:
    """The same with Optax's own, which knows no weights."""
    steps = optax.MultiSteps(tx, every_k_schedule=task.k).gradient_transformation()
    return Way(jax.value_and_grad(task.loss_fn), steps, task.k)


WAYS: dict[str, Callable[..., Way]] = {
    "whole batch": whole_batch,
    "accumulate": accumulated,
    "value_and_grad": in_place,
    "multi_steps": one_call_each,
    "optax.MultiSteps": optax_multi_steps,
    "mean of means": mean_of_means,
}


@dataclass(frozen=True)
class Run:
    """What training one way gave.

    Attributes:
        name: the way.
        params: the parameters after the last update.
        first_change: what the first update added to the parameters.
        losses: loss of each effective batch as this way reports it, one per update.
        test_accuracy: share of the held-out predictions that are right, in [0, 1].
        temp_bytes: temporary memory of the compiled program, in bytes.
        update_ms: median wall time of one update, in milliseconds.
        optimizer_updates: updates that the optimizer itself counted.
    """

    name: str
    params: Any
    first_change: Any
    losses: list[float]
    test_accuracy: float
    temp_bytes: int
    update_ms: float
    optimizer_updates: int


def optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Clipping, momentum and a schedule: each goes wrong where it runs per microbatch.

    Plain momentum rather than Adam, which hides a gradient that is a constant factor off.
    """
    schedule = optax.schedules.cosine_decay_schedule(learning_rate, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(schedule, momentum=0.9))


def train(task: Task, name: str, steps: int, on_update: Callable[[float], None]) -> Run:
    """Trains `task` for `steps` updates in the way called `name`.

    Args:
        task: what to train.
        name: a key of `WAYS`.
        steps: updates to make.
        on_update: called with the loss after each update.
    """
    way = WAYS[name](task, optimizer(task.learning_rate, steps))

    def step(params, opt_state, batch):
        loss, grads = way.grad_fn(params, batch)
        weight = 1.0 if way.weight is None else way.weight(batch)
        extra = {} if way.weight is None else {"weight": weight}
        updates, opt_state = way.tx.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state, (loss, weight)

    def rows_of_call(i, batch):
        return jax.tree.map(lambda leaf: leaf[i :: way.calls], batch)

    params = task.init()
    first = jax.tree.map(np.array, params)  # copies: the step takes the parameters' own memory
    opt_state = way.tx.init(params)
    compiled = (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(params, opt_state, rows_of_call(0, next(task.batches(1))))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory is not None  # CPU, GPU and TPU all have it.

    losses, seconds, first_change = [], [], None
    for batch in task.batches(steps):
        parts = []
        start = time.perf_counter()
        for i in range(way.calls):
            params, opt_state, part = compiled(params, opt_state, rows_of_call(i, batch))
            parts.append(part)
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - start)
        values, weights = zip(*parts, strict=True)
        losses.append(float(np.average(values, weights=weights)))
        if first_change is None:
            first_change = jax.tree.map(np.subtract, params, first)
        on_update(losses[-1])

    return Run(
        name=name,
        params=params,
        first_change=first_change,
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


def relative_error(change: Any, reference: Any) -> float:
    """Norm of the difference of two trees over the norm of the second."""
    difference = jax.tree.map(np.subtract, change, reference)
    return float(optax.tree.norm(difference) / optax.tree.norm(reference))
