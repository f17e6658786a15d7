"""Whether an accumulated training step makes the whole batch's update; if not, which fault."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from ._audit import SAFETY, audit, inconclusive, too_small
from ._errors import check_callable, check_int, leaf_name
from ._findings import AuditReport, Finding, ordered
from ._probe import (
    Probe,
    Unrunnable,
    as_arrays,
    check_batch,
    check_loss,
    check_params,
    check_weight,
    flatten,
    pieces,
    running,
    split,
    widen,
)

EPS32 = float(np.finfo(np.float32).eps)
# The mean of the microbatches' own gradients: what differs from the whole batch is the loss.
_LOSS = "the loss"
_TICKING = ("schedule_per_microbatch", "optimizer_per_microbatch")

ADVICE = {
    "sum_reduction": "Divide the accumulated gradient once, by the total weight (k for equal "
    "microbatches of a mean loss).",
    "double_division": "Divide once: the loss or its gradient is a mean already.",
    "unequal_weights": "Accumulate Σ w·g and divide by Σ w: pass weight= to accum_jax, or sum the "
    "loss and divide by the window's count.",
    "wrong_tail_divisor": "Divide a short microbatch or window by what is really in it: "
    'remainder="tail", or flush=True with multi_steps.',
    "dropped_tail": 'Rows left over reach no update: use remainder="tail".',
    "last_microbatch_only": "Add to the accumulator instead of overwriting it.",
    "clip_per_microbatch": "Clip once, the mean: put the clip in front of the optimizer, not "
    "inside the loop.",
    "clip_before_mean": "Divide first and clip the mean, not the sum.",
    "optimizer_per_microbatch": "Call the optimizer once per window, on the mean gradient.",
    "schedule_per_microbatch": "Let the schedule count updates; microstep_schedule turns one "
    "written in microbatches.",
    "decay_per_microbatch": "Apply weight decay once per window, with the optimizer.",
    "low_precision_accumulator": "Keep the accumulator in float32, also for bfloat16 gradients.",
    "shared_key": "Give microbatch i its own key: jax.random.fold_in(key, i).",
    "accumulator_not_cleared": "Start each window from a zero accumulator.",
    "mutable_state": "Keep all state in params and opt_state: the step is no pure function.",
    "nonfinite": "Look at weights of zero (0/0), and at float16 sums: accumulate in float32 and "
    "scale the loss.",
}


def audit_step(
    step: Callable[[Any, Any, Any], tuple[Any, Any]],
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    params: Any,
    batch: Any,
    *,
    k: int,
    weight: Callable[[Any], Any] | None = None,
    key: jax.Array | None = None,
    updates: int = 3,
    make_step: Callable[[optax.GradientTransformation], Callable[..., Any]] | None = None,
    opt_state: Any = None,
    has_aux: bool = False,
) -> AuditReport:
    """Tells whether a step makes the updates of the whole batch, else which known fault it has.

    Runs the step `updates` times on one batch, in its own dtypes and, where it allows, in float64.
    Each update is compared with that of `tx` on the whole batch's gradient at the step's own
    parameters, so that differences do not grow from update to update. Where they differ, every
    known fault is carried out on the microbatches' gradients G_i, with contiguous and strided
    microbatches, and those that reproduce all updates are named.

    "Equal", relative to the norm of the update, is 10 times the noise. In the float64 run noise is
    what rounding the whole gradient to float32 does to the update (through Adam it does more),
    at least one eps of float32; in the step's own dtypes it is the change of the whole batch's
    update under reordering of its rows and against float64, at least one eps of the parameters'
    dtype relative to the update. A fault "reproduces" within the same.

    Cost: 3 * `updates` whole-batch gradients where all is well; where not, a few microbatch
    gradients more for each layout and update. All gradients of one window are held in float64.

    Args:
      step: `step(params, opt_state, batch) -> (params, opt_state)`, one effective batch. May
        donate its arguments.
      loss_fn: `loss_fn(params, batch)`, or `loss_fn(params, batch, key)` where `key` is given.
      tx: the optimizer that the whole batch's gradient goes through.
      params: pytree of float arrays.
      batch: pytree of arrays, the rows of the effective batch on axis 0 of every leaf.
      k: microbatches per update, a Python int.
      weight: `weight(batch)`, what the loss is a mean over; None for rows.
      key: the key that `step` closes over; microbatch i of the reference gets `fold_in(key, i)`.
      updates: how many updates to follow.
      make_step: builds a step from an optimizer. It is then run under plain sgd too, which shows
        the factors that Adam and clipping hide.
      opt_state: the step's initial state, where that is not `tx.init(params)`.
      has_aux: whether `loss_fn` returns `(loss, aux)`.

    Returns:
      An `AuditReport`; "inconclusive" with the reason where loss or step cannot be run.

    Raises:
      TypeError, ValueError: an argument does not fit; the message names it. Before anything runs.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from accum_jax import audit_step
      >>> tx = optax.sgd(0.1)
      >>> def loss(w, x):
      ...     return jnp.mean((x @ w - 1) ** 2)
      >>> def step(w, state, x):
      ...     grads = sum(jax.grad(loss)(w, part) for part in jnp.split(x, 4))
      ...     updates, state = tx.update(grads, state, w)
      ...     return optax.apply_updates(w, updates), state
      >>> x = jnp.sin(jnp.arange(24.0)).reshape(8, 3)
      >>> report = audit_step(step, loss, tx, jnp.zeros(3), x, k=4)
      >>> report.verdict, report.causes
      ('not_equivalent', {'sum_reduction'})
    """
    for name, value in (("step", step), ("loss_fn", loss_fn)):
        check_callable("audit_step", name, value)
    for name, value in (("weight", weight), ("make_step", make_step)):
        if value is not None:
            check_callable("audit_step", name, value)
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"audit_step: tx must be an optax.GradientTransformation, got {tx!r} of type "
            f"{type(tx).__name__}."
        )
    check_params("audit_step", params)
    num_rows = check_batch("audit_step", batch)
    k = check_int("audit_step", "k", k, "microbatches per update")
    updates = check_int("audit_step", "updates", updates, "updates to follow")
    if reason := too_small("audit_step", num_rows, k):
        return inconclusive("step", num_rows, k, reason)
    problem = _Problem(loss_fn, params, batch, k, weight, key, updates, has_aux)
    try:
        args = (as_arrays(params), as_arrays(batch)) + (() if key is None else (key,))
        check_loss("audit_step", loss_fn, args, has_aux)
        return _Comparison(problem, step, tx, opt_state, make_step).report()
    except Unrunnable as error:
        return inconclusive("step", num_rows, k, str(error))


@dataclass(frozen=True)
class _Problem:
    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    k: int
    weight: Callable[[Any], Any] | None
    key: Any
    updates: int
    has_aux: bool


@functools.lru_cache(maxsize=16)
def _compiled(tx: optax.GradientTransformation) -> Callable[..., Any]:
    @jax.jit
    def update(grads, state, params):
        updates, new_state = tx.update(grads, state, params)
        return updates, new_state, optax.apply_updates(params, updates)

    return update


class _World:
    """The problem in one precision: gradients as flat float64 vectors, one optimizer."""

    def __init__(self, problem: _Problem, tx: optax.GradientTransformation, wide: bool):
        self.problem, self.tx, self.wide = problem, tx, wide
        self.probe = Probe(
            problem.loss_fn, problem.params, problem.batch, problem.key, problem.has_aux, wide
        )
        self.context = self.probe.context
        self.params = self.probe.params
        self.all = np.arange(self.probe.num_rows)
        self.leaves, self.treedef = jax.tree.flatten(self.params)
        self.ends = np.cumsum([_size(x) for x in self.leaves])
        self.layouts = _layouts(self.probe.num_rows, problem.k)
        self._update = _compiled(tx)
        self._norm_of_weights: dict[str, np.ndarray] = {}
        with self.context(), running("tx.init"):
            self.state = tx.init(self.params)

    def weights(self, layout: str) -> np.ndarray:
        if layout not in self._norm_of_weights:
            with self.context():
                rows = [self.probe.rows(index) for index in self.layouts[layout]]
                weigh = self.problem.weight
                found = [check_weight("audit_step", weigh, part) for part in rows]
            self._norm_of_weights[layout] = np.array(found)
        return self._norm_of_weights[layout]

    def grad(self, params: Any, index: np.ndarray, key: Any = None) -> np.ndarray:
        return flatten(self.probe.grads(index, key, params))

    def tree(self, flat: np.ndarray) -> Any:
        """A flat vector with the parameters' structure and dtypes."""
        with self.context():
            parts = np.split(flat, self.ends[:-1])
            return jax.tree.unflatten(
                self.treedef,
                [_like(part, leaf) for part, leaf in zip(parts, self.leaves, strict=True)],
            )

    def update(self, grads: np.ndarray, state: Any, params: Any) -> tuple[np.ndarray, Any, Any]:
        """Flat updates, new state, new parameters."""
        with self.context(), running("tx.update"):
            updates, state, params = self._update(self.tree(grads), state, params)
            return flatten(updates), state, params

    def moved(self, params: Any, updates: np.ndarray) -> Any:
        with self.context():
            return optax.apply_updates(params, self.tree(updates))

    def key(self, i: int, mode: str, n: int) -> Any:
        """The key of microbatch i of n, by one of the rules that steps follow."""
        if self.problem.key is None:
            return None
        if mode == "split":
            return jax.random.split(self.problem.key, n)[i]
        if mode == "same":
            return self.problem.key
        return jax.random.fold_in(self.problem.key, i if mode == "fold" else 0)

    def follow(self, step: Callable[..., Any], opt_state: Any) -> list[tuple[Any, Any]]:
        """Parameters and optimizer state before and after each of the step's updates."""
        path = [(self.params, opt_state)]
        with self.context():
            for t in range(self.problem.updates):
                # Copies: the step may donate what it is given.
                params, state = jax.tree.map(_copy, path[-1])
                batch = jax.tree.map(_copy, self.probe.batch)
                with running(f"step, at update {t + 1},"):
                    out = step(params, state, batch)
                if not isinstance(out, (tuple, list)) or len(out) != 2:
                    came = f"{len(out)} values" if isinstance(out, tuple) else type(out).__name__
                    raise Unrunnable(f"step returned {came}, expected (params, opt_state)")
                _check_like(out[0], self.params)
                path.append((out[0], out[1]))
        return path


def _layouts(num_rows: int, k: int) -> dict[str, list[np.ndarray]]:
    """Ways to cut the rows: the library's, contiguous, and for ragged batches the usual others."""
    rows, floor = np.arange(num_rows), max(1, num_rows // k)
    ways = {
        "strided": split(num_rows, k),
        "contiguous": pieces(num_rows, -(-num_rows // k)),
        "contiguous, floor": pieces(num_rows, floor),
        "contiguous, even": np.array_split(rows, k),
        "strided, even": [rows[i::k] for i in range(k)],
    }
    seen: dict[str, tuple[str, list[np.ndarray]]] = {}
    for name, parts in ways.items():
        seen.setdefault(str([part.tolist() for part in parts]), (name, parts))
    return dict(seen.values())


@dataclass
class _Window:
    """Gradients of one window at one point, each computed once."""

    world: _World
    params: Any

    def __post_init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def whole(self, index: np.ndarray | None = None) -> np.ndarray:
        index = self.world.all if index is None else index
        known = index.tobytes()
        if known not in self._known:
            self._known[known] = self.world.grad(self.params, index, self.world.key(0, "fold", 1))
        return self._known[known]

    def parts(self, layout: str, mode: str = "fold") -> list[np.ndarray]:
        if (layout, mode) not in self._known:
            indices = self.world.layouts[layout]
            self._known[layout, mode] = [
                self.world.grad(self.params, index, self.world.key(i, mode, len(indices)))
                for i, index in enumerate(indices)
            ]
        return self._known[layout, mode]


Advance = Callable[[_Window, Any], tuple[Any, Any]]


@dataclass
class _Hypothesis:
    """What a step may do instead: from a window and a state to parameters and a state."""

    cause: str | None
    what: str
    advance: Advance
    state: Any = None
    rank: int = 0  # named only where none of a lower rank makes the same updates
    worst: float = 0.0


def _by_gradient(
    world: _World, cause: str | None, what: str, combine: Callable[[_Window], Any]
) -> _Hypothesis:
    """One call of the optimizer, on another gradient."""

    def advance(window, state):
        _, state, params = world.update(combine(window), state, window.params)
        return params, state

    return _Hypothesis(cause, what, advance, world.state)


def _references(world: _World) -> list[_Hypothesis]:
    """What is right: the whole batch or, with keys, its microbatches under distinct keys."""
    if world.problem.key is None:
        return [_by_gradient(world, None, "whole batch", lambda window: window.whole())]
    return [
        _by_gradient(
            world,
            None,
            f"whole batch, {layout} microbatches, keys by {mode}",
            lambda window, layout=layout, mode=mode: _mean(
                window.parts(layout, mode), world.weights(layout)
            ),
        )
        for mode in ("fold", "split")
        for layout in world.layouts
    ]


def _mean(parts: list[np.ndarray], weights: np.ndarray) -> np.ndarray:
    kept = [(w, g) for w, g in zip(weights, parts, strict=True) if w]
    return sum((w / weights.sum() * g for w, g in kept), np.zeros_like(parts[0]))


def _total(parts: Iterable[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.add, parts)


def _faults(world: _World, clip: Callable[[np.ndarray], np.ndarray] | None) -> list[_Hypothesis]:
    """Every known fault, for every layout of the microbatches."""
    return [
        fault
        for layout in world.layouts
        for fault in (
            *_wrong_gradients(world, layout),
            *_low_precision(world, layout),
            *(_clips(world, layout, clip) if clip else ()),
            *_wrong_cadence(world, layout),
        )
    ]


def _wrong_gradients(world: _World, layout: str) -> Iterator[_Hypothesis]:
    indices, w = world.layouts[layout], world.weights(layout)
    n, k, lengths = len(indices), world.problem.k, np.array([len(i) for i in indices])

    def fault(cause, what, combine, mode="fold"):
        return _by_gradient(
            world, cause, f"{what}, {layout}", lambda window: combine(window.parts(layout, mode))
        )

    def mean(g):
        return _mean(g, w)

    if world.problem.key is None:
        right = fault(_LOSS, "ΣwG/Σw", mean)
        right.rank = 1
        yield right
        # Of a loss that is a sum, or that couples rows, these are not the mean of G times k or 1/k.
        for cause, what, factor in (("sum_reduction", "k G", n), ("double_division", "G/k", 1 / n)):
            yield _by_gradient(
                world,
                cause,
                f"{what} of the whole batch",
                lambda window, f=factor: window.whole() * f,
            )
    else:
        yield fault("shared_key", "the key itself for all", mean, "same")
        yield fault("shared_key", "fold_in(key, 0) for all", mean, "fold0")
    yield fault("sum_reduction", "ΣG", _total)
    yield fault("sum_reduction", "k ΣwG/Σw", lambda g: n * mean(g))
    yield fault("sum_reduction", "ΣwG", lambda g: w.sum() * mean(g))
    yield fault("double_division", "(ΣwG/Σw)/k", lambda g: mean(g) / n)
    yield fault("double_division", "(ΣG/k)/k", lambda g: _total(g) / n**2)
    yield fault("double_division", "(ΣwG/Σw)/Σw", lambda g: mean(g) / w.sum())
    if np.ptp(w):
        yield fault("unequal_weights", "ΣG/k", lambda g: _total(g) / n)
    if n != k:
        yield fault("wrong_tail_divisor", f"ΣG/{k}, {n} summed", lambda g: _total(g) / k)
        yield fault("wrong_tail_divisor", f"(ΣwG/Σw) {n}/{k}", lambda g: mean(g) * n / k)
    if np.ptp(lengths):
        full = lengths == lengths.max()
        as_full = lengths / lengths.max()
        if full[:-1].all() and world.problem.weight is None:
            yield fault("wrong_tail_divisor", "short one counted full", lambda g: _total(g) / n)
        for d in {n, k}:
            yield fault(
                "wrong_tail_divisor",
                "short one divided as if full",
                lambda g, d=d: _total(a * x for a, x in zip(as_full, g, strict=True)) / d,
            )
        yield fault("dropped_tail", "full ones only", lambda g: _mean(g, np.where(full, w, 0.0)))
    last = "last_microbatch_only"
    yield fault(last, "G_k", lambda g: g[-1])
    yield fault(last, "G_k/k", lambda g: g[-1] / n)
    yield fault(last, "w_k G_k/Σw", lambda g: g[-1] * w[-1] / w.sum())

    for name, scale in (("mean", 1.0), ("sum", float(n))):

        def not_cleared(window, state, scale=scale):
            inner, kept = state
            kept = kept + mean(window.parts(layout)) * scale
            _, inner, params = world.update(kept, inner, window.params)
            return params, (inner, kept)

        yield _Hypothesis(
            "accumulator_not_cleared",
            f"{name} of all windows so far, {layout}",
            not_cleared,
            (world.state, np.zeros(world.ends[-1])),
        )


def _low_precision(world: _World, layout: str) -> Iterator[_Hypothesis]:
    w = world.weights(layout)
    n, even = len(w), not np.ptp(w)
    for dtype in (ml_dtypes.bfloat16, np.float16):

        def rounded(x, dtype=dtype):
            return np.asarray(x, np.float32).astype(dtype)

        def add(terms, cast, rounded=rounded):
            kept = rounded(np.zeros_like(terms[0]))
            for term in terms:
                term = rounded(term) if cast else np.asarray(term, np.float32)
                kept = rounded(kept.astype(np.float32) + term.astype(np.float32))
            return kept

        def running_mean(g, add=add, rounded=rounded):
            kept = rounded(np.zeros_like(g[0]))
            for i, x in enumerate(g):
                change = rounded(rounded(x).astype(np.float32) - kept.astype(np.float32))
                change = rounded(change.astype(np.float32) / (i + 1))
                kept = rounded(kept.astype(np.float32) + change.astype(np.float32))
            return kept

        def scaled(g):
            return [x * v for x, v in zip(g, w, strict=True)]

        for cast in (True, False):
            for narrow in (True, False):
                out = rounded if narrow else lambda x: x
                ways = {
                    "sum, then divided": lambda g, c=cast, a=add: (a(g, c), n),
                    "sum of G/k": lambda g, c=cast, a=add: (a([x / n for x in g], c), 1),
                }
                if not even:
                    ways = {
                        "ΣwG, then divided": lambda g, c=cast, a=add: (a(scaled(g), c), w.sum()),
                        "sum of wG/Σw": lambda g, c=cast, a=add: (
                            a([x / w.sum() for x in scaled(g)], c),
                            1,
                        ),
                    }
                for what, way in ways.items():

                    def combine(window, way=way, out=out):
                        kept, divisor = way(window.parts(layout))
                        return np.asarray(
                            out(kept.astype(np.float32) / np.float32(divisor)), np.float64
                        )

                    yield _by_gradient(
                        world,
                        "low_precision_accumulator",
                        f"{what} in {np.dtype(dtype).name}, {layout}",
                        combine,
                    )
        yield _by_gradient(
            world,
            "low_precision_accumulator",
            f"running mean in {np.dtype(dtype).name}, {layout}",
            lambda window, f=running_mean: np.asarray(f(window.parts(layout)), np.float64),
        )


def _clips(
    world: _World, layout: str, clip: Callable[[np.ndarray], np.ndarray]
) -> Iterator[_Hypothesis]:
    w = world.weights(layout)
    n = len(w)

    def clipped_sums(g):
        return functools.reduce(lambda kept, x: clip(kept + x), g, np.zeros_like(g[0]))

    ways = [
        ("clip_per_microbatch", "mean of clipped G", lambda g: _mean([clip(x) for x in g], w)),
        ("clip_per_microbatch", "Σ clip(G)", lambda g: _total(clip(x) for x in g)),
        ("clip_per_microbatch", "sum clipped each time", clipped_sums),
        ("clip_per_microbatch", "sum clipped each time, / k", lambda g: clipped_sums(g) / n),
        ("clip_before_mean", "clip(ΣG)/k", lambda g: clip(_total(g)) / n),
    ]
    if np.ptp(w):
        ways += [
            ("clip_per_microbatch", "Σ clip(G)/k", lambda g: _total(clip(x) for x in g) / n),
            ("clip_before_mean", "clip(ΣwG)/Σw", lambda g: clip(w.sum() * _mean(g, w)) / w.sum()),
        ]
    for cause, what, way in ways:
        yield _by_gradient(
            world, cause, f"{what}, {layout}", lambda window, way=way: way(window.parts(layout))
        )


def _wrong_cadence(world: _World, layout: str) -> Iterator[_Hypothesis]:
    indices, w = world.layouts[layout], world.weights(layout)
    n = len(indices)

    def moving_grad(params, i):
        return world.grad(params, indices[i], world.key(i, "fold", n))

    # The optimizer k times: on gradients at the moving or the old parameters, moving them or
    # adding the updates up.
    for scale in (1.0, 1.0 / n):

        def sequential(window, state, scale=scale):
            params = window.params
            for i in range(n):
                grads = moving_grad(params, i) if i else window.parts(layout)[0]
                _, state, params = world.update(grads * scale, state, params)
            return params, state

        def stale(window, state, scale=scale):
            params = window.params
            for grads in window.parts(layout):
                _, state, params = world.update(grads * scale, state, params)
            return params, state

        def summed(window, state, scale=scale):
            total = 0.0
            for grads in window.parts(layout):
                updates, state, _ = world.update(grads * scale, state, window.params)
                total = total + updates
            return world.moved(window.params, np.asarray(total)), state

        # With a linear optimizer the second and third are another gradient and one update.
        for what, way, rank in (
            ("each at the parameters before it", sequential, 0),
            ("all at the old parameters", stale, 1),
            ("added up", summed, 1),
        ):
            yield _Hypothesis(
                "optimizer_per_microbatch",
                f"{n} optimizer updates on {scale:.3g} G, {what}, {layout}",
                way,
                world.state,
                rank,
            )

    def averaged(window, state):
        total = 0.0
        for grads in window.parts(layout):
            updates, state, _ = world.update(grads, state, window.params)
            total = total + updates / n
        return world.moved(window.params, np.asarray(total)), state

    yield _Hypothesis(
        "optimizer_per_microbatch",
        f"mean of {n} optimizer updates, {layout}",
        averaged,
        world.state,
        rank=1,
    )

    # Counts that advance k per update: all of them, or one.
    counts = _count_positions(world.state)
    for before in (0, n - 1):
        for chosen in (
            [counts, *([c] for c in counts)] if len(counts) > 1 else [counts] * len(counts)
        ):

            def ticking(window, state, before=before, chosen=chosen):
                state = _tick(state, chosen, before, world)
                grads = _mean(window.parts(layout), w)
                _, state, params = world.update(grads, state, window.params)
                return params, _tick(state, chosen, n - 1 - before, world)

            yield _Hypothesis(
                "schedule_per_microbatch",
                f"counts that advance {n} per update, {layout}",
                ticking,
                world.state,
            )

    def decay(params, state):
        """The part of an update that is due to the parameters alone."""
        zero = np.zeros(world.ends[-1])
        with_params = world.update(zero, state, params)[0]
        return with_params - world.update(zero, state, world.tree(zero))[0]

    if not np.any(decay(world.params, world.state)):
        return

    def decayed_first(window, state, moving):
        params, parts = window.params, []
        for i in range(n):
            parts.append(moving_grad(params, i) if moving else window.parts(layout)[i])
            params = world.moved(params, decay(params, state)) if i < n - 1 else params
        _, state, params = world.update(_mean(parts, w), state, params)
        return params, state

    def decayed_last(window, state):
        old = state
        _, state, params = world.update(_mean(window.parts(layout), w), state, window.params)
        for _ in range(n - 1):
            params = world.moved(params, decay(params, old))
        return params, state

    def decays_added(window, state):
        updates, new, _ = world.update(_mean(window.parts(layout), w), state, window.params)
        updates = updates + (n - 1) * decay(window.params, state)
        return world.moved(window.params, updates), new

    for what, way in (
        ("before, gradients at the old parameters", functools.partial(decayed_first, moving=False)),
        ("before, gradients at the moving ones", functools.partial(decayed_first, moving=True)),
        ("after", decayed_last),
        ("added up", decays_added),
    ):
        yield _Hypothesis(
            "decay_per_microbatch", f"decay {n} times {what}, {layout}", way, world.state
        )


def _count_positions(state: Any) -> list[int]:
    """Which leaves of a state are integer scalars."""
    return [
        i
        for i, x in enumerate(jax.tree.leaves(state))
        if jnp.ndim(x) == 0 and jnp.issubdtype(jnp.asarray(x).dtype, jnp.integer)
    ]


def _tick(state: Any, chosen: list[int], by: int, world: _World) -> Any:
    leaves, treedef = jax.tree.flatten(state)
    with world.context():
        for i in chosen:
            leaves[i] = (leaves[i] + by).astype(leaves[i].dtype)
    return jax.tree.unflatten(treedef, leaves)


def _find_clip(world: _World) -> Callable[[np.ndarray], np.ndarray] | None:
    """The clip inside an optimizer, from its response to gradients of two sizes.

    Whatever it does linearly with a gradient (an update of sgd, a first moment of Adam) saturates
    beyond the clip: c = |response to a huge gradient| / (|response to a tiny one| / its norm).
    """
    direction = np.random.default_rng(0).normal(size=world.ends[-1])
    direction /= np.linalg.norm(direction)

    def response(size):
        updates, state, _ = world.update(direction * size, world.state, world.params)
        leaves = [np.asarray(x) for x in jax.tree.leaves(state)]
        floats = [np.float64(x).ravel() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        return [*np.split(updates, world.ends[:-1]), *floats]

    none, tiny, double, huge, larger = map(response, (0.0, 1e-4, 2e-4, 1e8, 2e8))
    parts = np.split(direction, world.ends[:-1])
    candidates = []
    for i, (zero, a, b, c, d) in enumerate(zip(none, tiny, double, huge, larger, strict=True)):
        part = parts[i % len(parts)]
        a, b, c, d = a - zero, b - zero, c - zero, d - zero
        linear = np.linalg.norm(b - 2 * a) <= 1e-3 * np.linalg.norm(b)
        flat = np.linalg.norm(d - c) <= 1e-4 * np.linalg.norm(d)
        if not np.any(a) or not linear or not flat or a.shape != part.shape:
            continue
        slope = np.median(a / part) / 1e-4
        candidates.append((c / slope, part))
    if not candidates:
        return None
    clipped = np.concatenate([c for c, _ in candidates])
    part = np.concatenate([p for _, p in candidates])
    size = float(np.median(clipped / part))
    if np.allclose(clipped, size * part, rtol=1e-2):
        return lambda g: _clip_norm(g, size)
    size = float(np.median(np.abs(clipped)))
    if np.allclose(np.abs(clipped), size, rtol=1e-2):
        return lambda g: np.clip(g, -size, size)
    return None


def _clip_norm(g: np.ndarray, c: float) -> np.ndarray:
    return g * min(1.0, c / max(float(np.linalg.norm(g)), np.finfo(float).tiny))


@dataclass
class _Run:
    """A step's path in one world, compared with the reference."""

    world: _World
    path: list[tuple[Any, Any]]

    def __post_init__(self) -> None:
        self.windows = [_Window(self.world, params) for params, _ in self.path[:-1]]
        with self.world.context():
            self.points = [flatten(params) for params, _ in self.path]
        self.finite = all(np.isfinite(p).all() for p in self.points)
        self.tolerances: list[float] = []

    def test(self, hypotheses: list[_Hypothesis], tolerances: list[float]) -> list[_Hypothesis]:
        """Those that make all of the step's updates, from the step's own parameters."""
        alive = hypotheses
        for t, window in enumerate(self.windows):
            left = []
            for h in alive:
                try:
                    params, h.state = h.advance(window, h.state)
                except Unrunnable:  # the loss or the optimizer refuses such a microbatch
                    continue
                h.worst = max(h.worst, self.difference(t, flatten(params)))
                if h.worst <= tolerances[t]:
                    left.append(h)
            alive = left
        best = min((h.worst for h in alive), default=0.0)
        # Where one matches to the last digits, those that are merely near are others.
        alive = [h for h in alive if h.worst <= max(100 * best, 1e-9)]
        return [h for h in alive if h.rank == min(h.rank for h in alive)]

    def difference(self, t: int, after: np.ndarray) -> float:
        """Between the step's update t and one that ends at `after`, relative to the larger."""
        old, new = self.points[t], self.points[t + 1]
        size = max(np.linalg.norm(new - old), np.linalg.norm(after - old))
        far = np.linalg.norm(after - new)
        return 0.0 if far == 0 else float(far / size) if np.isfinite(far) else math.inf


class _Comparison:
    """One step against the whole batch."""

    def __init__(self, problem, step, tx, opt_state, make_step):
        self.problem, self.step, self.tx = problem, step, tx
        self.opt_state, self.make_step = opt_state, make_step
        self.findings: list[Finding] = []
        self.not_tested: list[str] = []

    def report(self) -> AuditReport:
        native = _World(self.problem, self.tx, wide=False)
        native_run = _Run(native, native.follow(self.step, self.initial(native)))
        self.num_rows = native.probe.num_rows
        self.purity(native, native_run)
        whole = native.probe.at(native.all, native.key(0, "fold", 1))
        if not whole.finite:
            reason = (
                f"the whole batch's loss is {whole.value:.3g} and its gradient's norm "
                f"{whole.norm:.3g}"
            )
            return inconclusive("step", self.num_rows, self.problem.k, reason, "nonfinite")
        if not native_run.finite:
            self.nonfinite(native_run)
            return self.close("not_equivalent", native, native_run, 0.0)

        wide_run = self.widen(self.step, self.tx)
        self.precision = "float64" if wide_run else jnp.asarray(native.leaves[0]).dtype.name
        main = wide_run or native_run
        tolerances = self.tolerances(native_run, wide_run)
        equal = True
        if wide_run:
            wide_tolerances = self.wide_tolerances(wide_run)
            equal = self.compare(wide_run, wide_tolerances, "math", "your optimizer, in float64")
        hidden = False
        if equal:
            dtype = native.leaves[0].dtype
            group = "numerics" if wide_run else "math"
            equal = self.compare(native_run, tolerances, group, f"your optimizer, in {dtype}")
            if equal and self.make_step is not None:
                equal = self.under_sgd()
                hidden = not equal
            elif equal:
                self.hides_factors(main)
        elif self.make_step is not None:
            self.under_sgd()
        self.cadence(native, native_run)
        tolerance = self.wide_tolerances(wide_run)[0] if wide_run else tolerances[0]
        if hidden:
            self.findings.append(
                Finding(
                    "equivalence",
                    "the optimizer hides nothing",
                    False,
                    measured="only the run under plain sgd shows the fault",
                    expected="the same verdict under both",
                    advice="Your optimizer does not notice a constant factor now; clipping, "
                    "weight decay or another optimizer would.",
                )
            )
        broken = any(f.ok is False for f in self.findings)
        return self.close(
            "not_equivalent" if broken else "equivalent", native, native_run, tolerance
        )

    def close(self, verdict, native, run, tolerance) -> AuditReport:
        distances = self.distances(native, run)
        last = distances[-1]
        self.findings.append(
            Finding(
                "equivalence",
                f"{self.problem.updates} updates follow the whole batch's",
                verdict == "equivalent",
                measured=f"parameters are {last:.1e} apart, relative to how far they moved",
                expected="rounding",
            )
        )
        self.not_tested.append("faults that this batch, optimizer and few updates cannot show")
        return AuditReport(
            verdict,
            ordered(self.findings),
            "step",
            self.num_rows,
            self.problem.k,
            getattr(self, "precision", native.leaves[0].dtype.name),
            tolerance,
            tuple(self.not_tested),
            tuple(distances),
        )

    # Runs

    def initial(self, world: _World) -> Any:
        if self.opt_state is None:
            return world.state
        return self.opt_state

    def widen(self, step: Any, tx: Any, opt_state: Any = None) -> _Run | None:
        """The step in float64, where both it and the loss run in it."""
        if all(x.dtype == jnp.float64 for x in jax.tree.leaves(as_arrays(self.problem.params))):
            return None  # the caller's own dtypes are float64
        opt_state = self.opt_state if opt_state is None else opt_state
        try:
            world = _World(self.problem, tx, wide=True)
            world.grad(world.params, world.all, world.key(0, "fold", 1))
        except Unrunnable as error:
            self.not_tested.append(f"float64, which the loss refuses ({error})")
            return None
        tries = [world.state]
        if opt_state is not None:
            with world.context():
                large = jax.tree.map(lambda x: widen(x) if jnp.ndim(x) else x, opt_state)
                tries = [widen(opt_state), large, opt_state]
        reason = ""
        for state in tries:
            try:
                return _Run(world, world.follow(step, state))
            except Unrunnable as error:
                reason = str(error)
        self.not_tested.append(f"float64, which the step refuses ({reason})")
        return None

    def under_sgd(self) -> bool:
        """The step that `make_step` builds around plain sgd."""
        world = _World(self.problem, optax.sgd(1.0), wide=False)
        grads = _Window(world, world.params).whole()
        rate = (
            0.01 * (1 + np.linalg.norm(flatten(world.params))) / max(np.linalg.norm(grads), 1e-30)
        )
        tx = optax.sgd(2.0 ** round(math.log2(rate)))
        world = _World(self.problem, tx, wide=False)
        try:
            with running("make_step"):
                made = self.make_step(tx)
            step, state = made if isinstance(made, tuple) else (made, world.state)
            native_run = _Run(world, world.follow(step, state))
        except Unrunnable as error:
            self.not_tested.append(f"a run under plain sgd: {error}")
            return True
        wide_run = self.widen(step, tx, state) if native_run.finite else None
        what = "plain sgd"
        if wide_run:
            return self.compare(wide_run, self.wide_tolerances(wide_run), "math", what)
        return self.compare(native_run, self.tolerances(native_run, None), "math", what)

    # What rounding does

    def wide_tolerances(self, run: _Run) -> list[float]:
        """10 times what rounding the gradient to float32 does to each update, by the reference."""
        if not run.tolerances:
            world, states = run.world, [run.world.state] * 2
            for t, window in enumerate(run.windows):
                exact = self.reference_gradient(window)
                after, states[0] = self.advance(world, exact, states[0], window)
                rounded = np.float64(np.float32(exact))
                other, states[1] = self.advance(world, rounded, states[1], window)
                far = self.relative(run, t, after, other, np.finfo(float).eps)
                run.tolerances.append(SAFETY * max(EPS32, far))
        return run.tolerances

    def tolerances(self, run: _Run, wide_run: _Run | None) -> list[float]:
        """10 times what reordering the rows and rounding the parameters do to each update."""
        if run.tolerances:
            return run.tolerances
        world, rng = run.world, np.random.default_rng(0)
        eps = max(float(jnp.finfo(x.dtype).eps) for x in world.leaves)
        eps = max(eps, float(jnp.finfo(world.probe.narrowest()).eps))
        states = [world.state] * 3
        for t, window in enumerate(run.windows):
            ends = []
            for i in range(3):
                if i and self.problem.key is None:
                    grads = window.whole(rng.permutation(world.all))
                else:
                    grads = self.reference_gradient(window)
                    grads = grads * (1 + i * eps * rng.choice([-0.5, 0.5], len(grads)))
                end, states[i] = self.advance(world, grads, states[i], window)
                ends.append(end)
            noise = max(eps, *(self.relative(run, t, ends[0], end, eps) for end in ends[1:]))
            run.tolerances.append(SAFETY * noise)
        return run.tolerances

    def reference_gradient(self, window: _Window) -> np.ndarray:
        if self.problem.key is None:
            return window.whole()
        return _mean(window.parts("strided"), window.world.weights("strided"))

    def advance(self, world, grads, state, window) -> tuple[np.ndarray, Any]:
        _, state, params = world.update(grads, state, window.params)
        return flatten(params), state

    def relative(self, run: _Run, t: int, a: np.ndarray, b: np.ndarray, eps: float) -> float:
        """How far two ends of update t are apart, and what rounding the parameters does."""
        old = run.points[t]
        size = max(np.linalg.norm(a - old), np.linalg.norm(b - old))
        if not size:
            return 1.0
        # Each entry rounds by up to half an eps, at random.
        return float(max(np.linalg.norm(a - b), eps / 4 * np.linalg.norm(old)) / size)

    # Questions

    def purity(self, world: _World, run: _Run) -> None:
        """The first update again, from the same start."""
        with world.context():
            params, state = jax.tree.map(_copy, run.path[0])
            with running("step, called a second time,"):
                again = flatten(self.step(params, state, jax.tree.map(_copy, world.probe.batch))[0])
        same = np.array_equal(again, run.points[1], equal_nan=True)
        self.findings.append(
            Finding(
                "math",
                "the step is a pure function",
                same,
                cause=None if same else "mutable_state",
                measured="the first update comes out the same twice"
                if same
                else "the first update comes out different the second time",
                expected="the same result from the same arguments",
                advice="" if same else ADVICE["mutable_state"],
            )
        )

    def nonfinite(self, run: _Run) -> None:
        t = next(t for t, point in enumerate(run.points) if not np.isfinite(point).all())
        index = int(np.flatnonzero(~np.isfinite(run.points[t]))[0])
        self.findings.append(
            Finding(
                "numerics",
                "parameters stay finite, as the whole batch's do",
                False,
                cause="nonfinite",
                measured=f"{self.leaf(run.world, index)} is not finite after update {t}",
                expected="finite parameters: the whole batch's gradient is finite",
                advice=ADVICE["nonfinite"],
            )
        )

    def leaf(self, world: _World, entry: int) -> str:
        """The parameter that holds an entry of the flat vector."""
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(world.params)]
        return leaf_name("params", paths[int(np.searchsorted(world.ends, entry, side="right"))])

    def compare(self, run: _Run, tolerances: list[float], group: str, what: str) -> bool:
        """Whether all updates are the reference's; where not, finds the faults that make them."""
        world = run.world
        references = _references(world)
        if right := run.test(references, tolerances):
            self.findings.append(
                Finding(
                    group,
                    f"each update is the whole batch's: {what}",
                    True,
                    measured=f"relative difference {right[0].worst:.1e}",
                    expected=f"at most {max(tolerances):.1e}",
                )
            )
            return True
        where = self.parting(run, tolerances)
        expected = f"at most {min(tolerances):.1e}"
        check = f"each update is the whole batch's: {what}"
        faults = run.test(_faults(world, _find_clip(world)), tolerances)
        if self.ticks(run):  # what explains the counts too explains more
            faults = [f for f in faults if f.cause in _TICKING] or faults
        if not faults:
            faults = self.solve_clip(run, tolerances)
        named: dict[str, _Hypothesis] = {}
        for fault in sorted(faults, key=lambda fault: fault.worst):
            named.setdefault(fault.cause or "", fault)
        if _LOSS in named:
            named.pop(_LOSS)
            self.loss_fault(check, where)
            if not named or all(f.cause for f in self.findings[-1:]):
                return False
        for cause, fault in named.items():
            self.findings.append(
                Finding(
                    group if cause != "low_precision_accumulator" else "numerics",
                    check,
                    False,
                    cause=cause,
                    measured=f"{where}; {fault.what} reproduces it to {fault.worst:.1e}",
                    expected=expected,
                    advice=ADVICE[cause],
                )
            )
        if not named:
            self.findings.append(
                Finding(
                    group,
                    check,
                    False,
                    measured=where,
                    expected=expected,
                    advice="No known fault reproduces it: compare the two gradients at that leaf.",
                )
            )
        return False

    def ticks(self, run: _Run) -> bool:
        """Whether some count of the optimizer's state advanced k times per update."""
        wanted, (before, after) = self.counts(run.world, run), _counted(run.path)
        return any(
            after[name] - before.get(name, 0) == self.problem.k * wanted[path] != wanted[path]
            for path in wanted
            for name in after
            if name.endswith(path)
        )

    def parting(self, run: _Run, tolerances: list[float]) -> str:
        """Where step and reference first part: update, size, leaf."""
        reference = _references(run.world)[0]
        for t, window in enumerate(run.windows):
            params, reference.state = reference.advance(window, reference.state)
            after = flatten(params)
            far = run.difference(t, after)
            if far > tolerances[t]:
                by_leaf = [
                    float(np.linalg.norm(x))
                    for x in np.split(after - run.points[t + 1], run.world.ends[:-1])
                ]
                entry = int(run.world.ends[int(np.argmax(by_leaf))]) - 1
                leaf = self.leaf(run.world, entry)
                return f"parts at update {t + 1} by {far:.1e}, most at {leaf}"
        return "parts within rounding"

    def loss_fault(self, check: str, where: str) -> None:
        """The step accumulates rightly: the loss is what does not add up."""
        p = self.problem
        report = audit(
            p.loss_fn, p.params, p.batch, k=p.k, weight=p.weight, key=p.key, has_aux=p.has_aux
        )
        causes = [f for f in report.findings if f.cause]
        for finding in causes:
            self.findings.append(
                Finding(
                    "math",
                    check,
                    False,
                    cause=finding.cause,
                    measured=f"{where}; the step is the mean of its microbatches, and "
                    f"{finding.measured}",
                    expected=finding.expected,
                    advice=finding.advice,
                )
            )

    def solve_clip(self, run: _Run, tolerances: list[float]) -> list[_Hypothesis]:
        """Clips inside the step, whose size is unknown: the one that makes the first update.

        One unknown number is fitted to all entries of the first update, and must then make the
        other updates as well; with fewer than three entries it would always fit.
        """
        world, window = run.world, run.windows[0]
        if world.ends[-1] < 3 or len(run.windows) < 2:
            return []
        found = []
        for layout in world.layouts:
            parts = window.parts(layout)
            largest = max(np.linalg.norm(_total(parts)), *(np.linalg.norm(g) for g in parts))
            if not np.isfinite(largest) or not largest:
                continue
            for i in range(len(list(_clips(world, layout, lambda g: g)))):

                def hypothesis(log_c, i=i, layout=layout):
                    clip = functools.partial(_clip_norm, c=math.exp(log_c))
                    return list(_clips(world, layout, clip))[i]

                def far(log_c, hypothesis=hypothesis):
                    h = hypothesis(log_c)
                    return run.difference(0, flatten(h.advance(window, h.state)[0]))

                top = math.log(largest)
                grid = np.linspace(top - 9, top, 37)
                best = int(np.argmin([far(x) for x in grid]))
                log_c = _minimize(far, grid[max(best - 1, 0)], grid[min(best + 1, 36)])
                if far(log_c) <= tolerances[0] and log_c < top - 1e-6:
                    found.append(hypothesis(log_c))
        return run.test(found, tolerances)

    def hides_factors(self, run: _Run) -> None:
        """Says so where the optimizer makes the same update of half the gradient."""
        world, window = run.world, run.windows[0]
        grads = self.reference_gradient(window)
        ends = [self.advance(world, s * grads, world.state, window)[0] for s in (1.0, 0.5)]
        moved = np.linalg.norm(ends[0] - run.points[0])
        if moved and np.linalg.norm(ends[0] - ends[1]) <= 1e-3 * moved:
            self.not_tested.append(
                "a constant factor in the gradient, which this optimizer hides (Adam, clipping): "
                "pass make_step for a run under plain sgd"
            )

    def cadence(self, world: _World, run: _Run) -> None:
        """Integer counts in the optimizer's state against those of one update per window."""
        wanted = self.counts(world, run)
        if not wanted:
            self.not_tested.append("counts: the optimizer's state has none")
            return
        named = {f.cause for f in self.findings} - {None}
        before, after = _counted(run.path)
        for path, expected in wanted.items():
            ends = [name for name in after if name.endswith(path)]
            for name in ends[:1]:
                got = after[name] - before.get(name, 0)
                ok = got == expected
                cause = None
                if not ok and got == expected * self.problem.k:
                    # k updates of everything say more than k ticks.
                    wider = "optimizer_per_microbatch"
                    cause = wider if wider in named else "schedule_per_microbatch"
                self.findings.append(
                    Finding(
                        "cadence",
                        f"opt_state{name} advances once per update",
                        ok,
                        cause=cause,
                        measured=f"{got} after {self.problem.updates} updates",
                        expected=f"{expected}",
                        advice=""
                        if ok
                        else ADVICE.get(cause or "", "Call the optimizer once per window."),
                    )
                )
            if not ends:
                self.not_tested.append(f"opt_state{path}: not found in the step's state")

    def counts(self, world: _World, run: _Run) -> dict[str, int]:
        """How far each integer scalar of the reference's own state moves."""
        state = world.state
        for window in run.windows:
            _, state = self.advance(world, self.reference_gradient(window), state, window)
        before, after = _integers(world.state), _integers(state)
        return {path: after[path] - before[path] for path in after if after[path] != before[path]}

    def distances(self, world: _World, run: _Run) -> list[float]:
        """Distance from a reference that goes its own way, relative to how far it has moved."""
        params, state, found = world.params, world.state, [0.0]
        start = run.points[0]
        for point in run.points[1:]:
            grads = self.reference_gradient(_Window(world, params))
            _, state, params = world.update(grads, state, params)
            here = flatten(params)
            moved = float(np.linalg.norm(here - start))
            far = float(np.linalg.norm(point - here))
            found.append(0.0 if far == 0 else far / moved if moved else math.inf)
        return found


def _minimize(f: Callable[[float], float], low: float, high: float) -> float:
    """Golden section search: |error| has a kink at its zero, so that all digits are found."""
    golden = (math.sqrt(5) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    fa, fb = f(a), f(b)
    for _ in range(64):
        if fa < fb:
            high, b, fb = b, a, fa
            a = high - golden * (high - low)
            fa = f(a)
        else:
            low, a, fa = a, b, fb
            b = low + golden * (high - low)
            fb = f(b)
    return a if fa < fb else b


def _counted(path: list[tuple[Any, Any]]) -> tuple[dict[str, int], dict[str, int]]:
    """Integer scalars of the optimizer's state before the first and after the last update."""
    return _integers(path[0][1]), _integers(path[-1][1])


def _integers(state: Any) -> dict[str, int]:
    """Integer scalars of a state by path."""
    return {
        jax.tree_util.keystr(path): int(x)
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if jnp.ndim(x) == 0 and hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.integer)
    }


def _copy(x: Any) -> Any:
    return jnp.array(x, copy=True) if isinstance(x, (jax.Array, np.ndarray)) else x


def _size(x: Any) -> int:
    return x.size * (2 if jnp.issubdtype(x.dtype, jnp.complexfloating) else 1)


def _like(part: np.ndarray, leaf: Any) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        real, imag = np.split(part, 2)
        part = real + 1j * imag
    return jnp.asarray(part.reshape(leaf.shape), leaf.dtype)


def _check_like(got: Any, wanted: Any) -> None:
    """Whether a step returned parameters of the same kind as it was given."""
    if jax.tree.structure(got) != jax.tree.structure(wanted):
        raise Unrunnable("step returned parameters of another structure, expected that of params")
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True
    ):
        if jnp.shape(x) != y.shape or jnp.asarray(x).dtype != y.dtype:
            raise Unrunnable(
                f"step returned {leaf_name('params', path)} as {jnp.asarray(x).dtype}"
                f"{list(jnp.shape(x))}, expected {y.dtype}{list(y.shape)}"
            )
