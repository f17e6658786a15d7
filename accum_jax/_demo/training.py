"""Trains a task one way and measures it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from accum_jax import dynamic_loss_scale, loss_scale, multi_steps, telemetry
from accum_jax._demo.task import Batch, Task

if TYPE_CHECKING:
    from accum_jax._demo.checkpoint import Checkpoint


@dataclass(frozen=True)
class Way:
    """One way to make an update of k microbatches.

    Attributes:
        grad_fn: `grad_fn(params, batch, scale)`, the scaled loss and its gradient, of one call;
            with the statistics of `Task.stats` beside them where `measures`.
        tx: the transformation that takes each call's gradient.
        calls: calls per update; call i sees rows i, i + calls, i + 2 calls, ... of the batch.
        weight: of a call's batch, where `tx` takes it.
        measures: whether `grad_fn` returns statistics.
    """

    grad_fn: Callable[..., Any]
    tx: optax.GradientTransformationExtraArgs
    calls: int = 1
    weight: Callable[[Batch], jax.Array] | None = None
    measures: bool = False


def whole_batch(task: Task, tx) -> Way:
    """All rows in one backward pass: what accumulation has to equal."""
    return Way(task.value_and_grad(), tx)


def accumulated(task: Task, tx) -> Way:
    """All k microbatches in one compiled call."""
    grad_fn = task.value_and_grad(k=task.k, weight=task.weight, stats=task.stats)
    return Way(grad_fn, tx, measures=task.stats is not None)


def coupled(task: Task, tx) -> Way:
    """All rows encoded first, and each microbatch again with its part of the loss's gradient."""
    return Way(task.coupled_value_and_grad(k=task.k), tx)


def mean_of_means(task: Task, tx) -> Way:
    """Without weights: a byte in a short microbatch counts for more than one in a long one."""
    return Way(task.value_and_grad(k=task.k), tx)


def one_call_each(task: Task, tx) -> Way:
    """One microbatch a call, with the accumulator in the optimizer state."""
    return Way(task.value_and_grad(), multi_steps(tx, task.k), task.k, task.weight)


def optax_multi_steps(task: Task, tx) -> Way:
    """The same with Optax's own, which knows no weights."""
    steps = optax.MultiSteps(tx, every_k_schedule=task.k).gradient_transformation()
    return Way(task.value_and_grad(), optax.with_extra_args_support(steps), task.k)


WAYS: dict[str, Callable[..., Way]] = {
    "whole batch": whole_batch,
    "value_and_grad": accumulated,
    "coupled": coupled,
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
        last_metrics: what was logged of the last update.
        test_accuracy: share of the held-out predictions that are right, in [0, 1].
        test_loss: loss of the held-out rows as one batch.
        temp_bytes: temporary memory of the compiled program, in bytes.
        update_ms: median wall time of one update, in milliseconds.
        optimizer_updates: updates that the optimizer itself counted.
    """

    name: str
    params: Any
    first_change: Any
    losses: list[float]
    last_metrics: dict[str, float | None]
    test_accuracy: float
    test_loss: float
    temp_bytes: int
    update_ms: float
    optimizer_updates: int


def optimizer(learning_rate: float, steps: int) -> optax.GradientTransformationExtraArgs:
    """Clipping, momentum and a schedule: each goes wrong where it runs per microbatch.

    Plain momentum rather than Adam, which hides a gradient that is a constant factor off. The loss
    scale, a power of two, changes nothing in float32: it is there for what half precision needs,
    and to leave out an update that is not finite.
    """
    schedule = optax.schedules.cosine_decay_schedule(learning_rate, steps)
    return dynamic_loss_scale(
        optax.chain(
            optax.snapshot("global_norm", optax.tree.norm),
            optax.clip_by_global_norm(1.0),
            optax.sgd(schedule, momentum=0.9),
        )
    )


def train(
    task: Task,
    name: str,
    steps: int,
    on_update: Callable[[int, dict[str, float | None]], None],
    checkpoint: Checkpoint | None = None,
) -> Run:
    """Trains `task` for `steps` updates in the way called `name`.

    Args:
        task: what to train.
        name: a key of `WAYS`.
        steps: updates to make.
        on_update: called after each update with its number, from 1 on, and its metrics; also
            after the last of the updates that were made before.
        checkpoint: where to go on from, and to save to. Its position is the number of calls: a
            window may be open, of which the accumulator is in the optimizer state and the losses
            are in the log.
    """
    way = WAYS[name](task, optimizer(task.learning_rate, steps))

    def step(params, opt_state, batch):
        scale = loss_scale(opt_state)
        output = way.grad_fn(params, batch, scale)
        (loss, grads), stats = output if way.measures else (output, None)
        extra = {} if way.weight is None else {"weight": way.weight(batch)}
        updates, opt_state = way.tx.update(grads, opt_state, params, **extra)
        log = {"loss": loss / scale, "weight": jax.tree.leaves(batch)[0].shape[0]}
        if task.weight is not None:
            log["weight"] = task.weight(batch)
        if stats is not None:
            log["noise_scale"] = stats.noise_scale
        return optax.apply_updates(params, updates), opt_state, log

    def rows_of_call(i, batch):
        return jax.tree.map(lambda leaf: leaf[i :: way.calls], batch)

    params = task.init()
    first = jax.tree.map(np.array, params)  # copies: the step takes the parameters' own memory
    opt_state = jax.jit(way.tx.init)(params)
    compiled = (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(params, opt_state, rows_of_call(0, next(task.batches(1))))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory is not None  # CPU, GPU and TPU all have it.

    # Of each call, a row for each update.
    names = ("loss", "weight", "seconds", "noise_scale")
    logged = {name: np.full((steps, way.calls), np.nan) for name in names}
    first_change = jax.tree.map(np.zeros_like, first)
    state, done = (params, opt_state, first_change, logged), 0
    if checkpoint is not None:
        done, state = checkpoint.restore(state)
    params, opt_state, first_change, logged = state

    def metrics(update):
        of_update = {name: values[update] for name, values in logged.items()}
        return measure(task, of_update, telemetry(opt_state))

    start = done // way.calls
    if start:
        on_update(start, metrics(start - 1))
    for update, batch in enumerate(task.batches(steps, start), start):
        for i in range(done - update * way.calls, way.calls):
            began = time.perf_counter()
            params, opt_state, log = compiled(params, opt_state, rows_of_call(i, batch))
            for key, value in log.items():
                logged[key][update, i] = value
            logged["seconds"][update, i] = time.perf_counter() - began
            done += 1
            if done == way.calls:
                first_change = jax.tree.map(np.subtract, params, first)
            if checkpoint is not None:
                state = params, opt_state, first_change, logged
                checkpoint.save(done, state, last=done == steps * way.calls)
        on_update(update + 1, metrics(update))

    accuracy = jax.jit(lambda params, rows: task.accuracy(task.merge(params), rows))
    return Run(
        name=name,
        params=params,
        first_change=first_change,
        losses=np.average(logged["loss"], axis=1, weights=logged["weight"]).tolist(),
        last_metrics=metrics(steps - 1),
        test_accuracy=float(accuracy(params, task.test)),
        test_loss=float(jax.jit(task.loss_fn)(params, task.test)),
        temp_bytes=memory.temp_size_in_bytes,
        update_ms=1e3 * statistics.median(logged["seconds"].sum(axis=1)),
        optimizer_updates=int(optax.tree.get(opt_state, "count")),
    )


def measure(
    task: Task, logged: dict[str, np.ndarray], states: dict[str, jax.Array]
) -> dict[str, float | None]:
    """The metrics of one update.

    Args:
        task: what is trained.
        logged: of each of the update's calls, as `train` keeps it.
        states: `telemetry` after the update.

    Returns:
        The loss that was optimised, over all of its rows or tokens; rows and tokens per second of
        the whole update, whatever k is; the norm of the mean, unscaled gradient before it is
        clipped; loss scale; updates left out so far; noise scale in rows. None is not measured.
    """
    seconds, weight = logged["seconds"].sum(), logged["weight"].sum()
    return {
        "loss": float(np.average(logged["loss"], weights=logged["weight"])),
        "examples_per_second": float(task.effective_batch / seconds),
        "tokens_per_second": None if task.weight is None else float(weight / seconds),
        "global_norm": float(states["snapshot/global_norm"]),
        "loss_scale": float(states["loss_scale/scale"]),
        "num_skipped": int(states["loss_scale/num_skipped"]),
        "noise_scale": None if np.isnan(x := logged["noise_scale"][-1]) else float(x),
    }


def largest_difference(params: Any, reference: Any) -> float:
    """The largest absolute difference between two trees of parameters."""
    differences = jax.tree.map(lambda a, b: abs(a - b).max(), params, reference)
    return float(max(jax.tree.leaves(differences)))


def relative_error(change: Any, reference: Any) -> float:
    """Norm of the difference of two trees over the norm of the second."""
    difference = jax.tree.map(np.subtract, change, reference)
    return float(optax.tree.norm(difference) / optax.tree.norm(reference))
