"""Which microbatch fits, by the compiler's own numbers."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

from ._accumulate import value_and_grad
from ._advice import advice
from ._errors import check_callable, check_choice, check_int
from ._flops import count_flops
from ._layout import Layout, mesh_axes
from ._memory_text import parse_bytes
from ._split import divisors, near
from ._stats import AccumulationStats, is_inexact
from ._targets import Machine, refused_bytes

Verdict = Literal[
    "fits_without_accumulation", "accumulate", "accumulation_cannot_help", "nothing_fits"
]


@dataclass(frozen=True)
class PlanRow:
    """One microbatch that was compiled; numbers are of one device.

    The five parts add up to `peak_bytes`. A part that a program does not hold whole (an optimizer
    state that nothing reads) is as large as what it can hold of it.

    Attributes:
      microbatch_size: rows of a microbatch.
      k: microbatches per update.
      peak_bytes: the most that the update holds at any time; None where the compiler refused it
        without a number.
      params_bytes: parameters.
      optimizer_bytes: optimizer state.
      accumulator_bytes: sums of the gradient, in float32 or wider; 0 where k is 1, and where the
        step is the caller's own.
      batch_bytes: this device's rows of the effective batch.
      activation_bytes: all else: activations, gradients beside the accumulator, padding; None where
        the peak is.
      flops: of an update, in matrix products and convolutions; those of a sharded update are spread
        evenly over its devices.
      fits: whether the peak is at most `memory_limit * (1 - headroom)`.
      traffic_bytes: an estimate of what an update moves between memory and cores: for each
        microbatch parameters, accumulator and activations twice, once for all of them parameters
        and optimizer state read and written; None where the peak is.
      gather_bytes: what one pass of an update gathers of parameters that are sharded over the
        devices that share the batch: k times their whole size. The backward pass gathers again.
      estimated_seconds: the roofline at the machine's published peaks, the larger of flops and
        traffic over theirs: a lower bound that no program reaches; None for an unknown machine.
    """

    microbatch_size: int
    k: int
    peak_bytes: int | None
    params_bytes: int
    optimizer_bytes: int
    accumulator_bytes: int
    batch_bytes: int
    activation_bytes: int | None
    flops: int
    fits: bool
    traffic_bytes: int | None = None
    gather_bytes: int = 0
    estimated_seconds: float | None = None


@dataclass(frozen=True)
class Plan:
    """Answer of `plan`; `str()` lays it out in at most 100 columns.

    Attributes:
      verdict: "fits_without_accumulation", "accumulate", "accumulation_cannot_help" (parameters,
        optimizer state and one gradient exceed the limit by themselves; nothing was compiled) or
        "nothing_fits".
      rows: the candidates that were compiled, by size; `best` and the next larger are among them.
      target: what was compiled for.
      num_rows: rows of the effective batch, over all devices.
      data_parallel: devices that share it.
      memory_limit: bytes of one device; None where there is no limit.
      headroom: the part of it that stays free.
      params_bytes: parameters on one device.
      optimizer_bytes: optimizer state on one device.
      gradient_bytes: one gradient, in the parameters' dtypes, on one device.
      rates: where the peaks behind `estimated_seconds` are published; None where there are none.
      advice: what follows, in sentences.
    """

    verdict: Verdict
    rows: tuple[PlanRow, ...]
    target: str
    num_rows: int
    data_parallel: int
    memory_limit: int | None
    headroom: float
    params_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    rates: str | None = None
    advice: tuple[str, ...] = ()

    @property
    def best(self) -> PlanRow | None:
        """The largest microbatch that fits; None where none does."""
        return next((row for row in reversed(self.rows) if row.fits), None)

    def advise(self, stats: AccumulationStats) -> str:
        """Whether the effective batch is above or below the gradient noise scale that was measured.

        Below it, twice the batch makes nearly the progress of twice the updates; above it, more
        rows buy little (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018).

        Args:
          stats: what `value_and_grad(..., stats="norms")` measured in one window. Windows are
            noisy: replace `noise_scale` by the average of several.

        Returns:
          A sentence or two with the numbers.

        Raises:
          ValueError: it has no noise scale.
        """
        if stats.noise_scale is None:
            raise ValueError(
                'Plan.advise: the stats have no noise_scale. Use stats="norms" in value_and_grad.'
            )
        scale, rows = float(stats.noise_scale), self.num_rows
        if not 0 < scale < math.inf:
            return (
                f"The noise scale came out as {scale:g}: nothing can be told of it. Average over "
                "more windows of at least two microbatches."
            )
        where = f"The effective batch of {rows} is {{}} the noise scale of about {scale:.3g} rows: "
        if rows < scale:
            return where.format("below") + "a larger one would need about as many fewer updates."
        return where.format("above") + "a smaller one would make about the same progress an update."

    def to_dict(self) -> dict[str, Any]:
        """Everything in the plan as values that JSON can hold."""
        best = self.best
        return {**dataclasses.asdict(self), "best": best and dataclasses.asdict(best)}

    def __str__(self) -> str:
        from ._report import plan_text

        return plan_text(self)


def plan(
    loss_fn: Callable[..., Any] | None,
    tx: optax.GradientTransformation | None,
    params: Any,
    batch: Any,
    *,
    memory_limit: int | str | None = None,
    headroom: float = 0.1,
    target: str | None = None,
    microbatch_sizes: Iterable[int] | None = None,
    data_parallel: int = 1,
    weight: Callable[..., Any] | None = None,
    key: Any = None,
    has_aux: bool = False,
    step: Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]] | None = None,
) -> Plan:
    """Finds the largest microbatch whose update fits in memory, without running anything.

    The whole update is compiled: `accum_jax.value_and_grad(loss_fn, k=...)`, `tx.update` and
    `optax.apply_updates` in one jit, with parameters and optimizer state donated. The compiler says
    what it needs. Memory grows with the microbatch, so few candidates have to be compiled to find
    the largest that fits: of n at most 2 + log2(n), the whole batch (k = 1) first.
    `plan.best.microbatch_size` is what `value_and_grad` takes; the effective batch never changes.

    Cost: the compilations. Only shapes are used, so a model larger than this machine can be
    planned, and for a machine that is not here.

    Args:
      loss_fn: `loss_fn(params, batch)`, or `loss_fn(params, batch, key)` where there is a key.
        None where there is a `step`.
      tx: the optimizer. With a `step` it may be None; its state is then among the activations.
      params: pytree of arrays or `jax.ShapeDtypeStruct`s.
      batch: the same, the rows of the effective batch on axis 0 of every leaf.
      memory_limit: of one device: bytes, or text such as `"16GiB"` or `"80GB"`. None is the
        target's own memory; where a device names none, as a CPU, everything fits. (JAX takes three
        quarters of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.)
      headroom: the part of the limit that stays free, from 0 on, below 1.
      target: None for the current backend, or a machine that is not here: `"v5e"` or `"h100"` for
        one device, `"v5e:2x4"`, `"v5p:2x2x1"`, `"v6e:2x2"`, `"h100:8"` for several. TPUs need
        libtpu, the H100 the CUDA plugin; neither needs the hardware.
      microbatch_sizes: the candidates, rows of a microbatch on one device. None is every divisor
        of a device's rows.
      data_parallel: how many devices share the batch; what is compiled is one device's part, with
        `len(batch) / data_parallel` rows, without the reduction between them. Leave it out where
        the shapes are sharded.
      weight: as `value_and_grad`'s.
      key: a random key, or the shape of one.
      has_aux: whether `loss_fn` returns auxiliary output too; float leaves of it are averaged,
        others summed. For other reducers give a `step`.
      step: `step(microbatch_size)` returns `(function, args)`: an update that is not ours, jitted
        with its donation (or plain, then nothing is donated), and arrays or shapes to call it with.

    Shapes may be sharded: where a `ShapeDtypeStruct` has a NamedSharding, everything is laid out on
    that mesh (an AbstractMesh will do), on the target's devices. Axes that shard the batch and no
    parameter are `value_and_grad`'s `data_axes`; the parameters' own specs are its `arg_specs`, so
    axes that shard both (FSDP) are left to the compiler. Then `k=plan.best.k` is what
    `value_and_grad` takes in every case.

    Returns:
      A `Plan`.

    Raises:
      TypeError: an argument of the wrong type; neither `loss_fn` with `tx` nor `step`.
      ValueError: a limit that cannot be read or is 0, a number out of range, a batch without rows,
        or one that `data_parallel` or a candidate does not divide, an unknown target, a loss that
        does not trace on these shapes.
      ImportError: the target's compiler is not installed; the message says what to install.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import accum_jax
      >>> def loss(w, x):
      ...     return jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
      >>> x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
      >>> plan = accum_jax.plan(loss, optax.adam(1e-3), w, x, memory_limit="500kB")
      >>> plan.verdict, plan.best.k
      ('accumulate', 8)
    """
    return make_plan(
        lambda done, most, microbatch_size: None,
        loss_fn,
        tx,
        params,
        batch,
        memory_limit=memory_limit,
        headroom=headroom,
        target=target,
        microbatch_sizes=microbatch_sizes,
        data_parallel=data_parallel,
        weight=weight,
        key=key,
        has_aux=has_aux,
        step=step,
    )


def make_plan(
    announce: Callable[[int, int, int], None],
    loss_fn: Any,
    tx: Any,
    params: Any,
    batch: Any,
    *,
    memory_limit: Any = None,
    headroom: Any = 0.1,
    target: Any = None,
    microbatch_sizes: Any = None,
    data_parallel: Any = 1,
    weight: Any = None,
    key: Any = None,
    has_aux: Any = False,
    step: Any = None,
) -> Plan:
    """`plan`, telling `announce(done, most, microbatch_size)` of each compilation before it."""
    if step is None:
        check_callable("plan", "loss_fn", loss_fn)
        if tx is None:
            raise TypeError("plan: tx=None: give the optimizer, or your own update as step=.")
    else:
        check_callable("plan", "step", step)
    if tx is not None and not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"plan: tx must be an optax.GradientTransformation, got {tx!r}.")
    if weight is not None:
        check_callable("plan", "weight", weight)
    check_choice("plan", "has_aux", has_aux, (False, True))
    limit = None if memory_limit is None else parse_bytes("plan", "memory_limit", memory_limit)
    _check_headroom(headroom)
    data_parallel = check_int("plan", "data_parallel", data_parallel, "devices sharing the batch")

    layout = Layout(tx, params, batch, key, target, data_parallel)
    candidates = _candidates(microbatch_sizes, layout)
    if limit is None:
        limit = layout.target.memory
    fixed = layout.params_bytes + layout.optimizer_bytes + layout.gradient_bytes
    rows: tuple[PlanRow, ...] = ()
    if step is None:
        make = _library_step(loss_fn, tx, weight, has_aux, layout)
    else:
        make = _own_step(step, layout)
    if step is None and limit is not None and fixed > limit:
        verdict: Verdict = "accumulation_cannot_help"
    else:
        budget = math.inf if limit is None else limit * (1 - headroom)
        accumulator = layout.accumulator_bytes if step is None else 0

        def compile_row(done: int, most: int, microbatch_size: int) -> PlanRow:
            announce(done, most, microbatch_size)
            return _compile_row(layout, make, microbatch_size, accumulator, budget)

        rows = _search(candidates, compile_row, budget)
        verdict = _verdict(rows)
    machine = layout.target.machine
    made = Plan(
        verdict=verdict,
        rows=rows,
        target=layout.target.name,
        num_rows=layout.num_rows,
        data_parallel=layout.data_parallel,
        memory_limit=limit,
        headroom=headroom,
        params_bytes=layout.params_bytes,
        optimizer_bytes=layout.optimizer_bytes,
        gradient_bytes=layout.gradient_bytes,
        rates=machine and machine.source,
    )
    return dataclasses.replace(made, advice=tuple(advice(made)))


_Step = Callable[[int], tuple[Any, tuple[Any, ...]]]  # what is lowered for a microbatch size


def _library_step(loss_fn: Any, tx: Any, weight: Any, has_aux: bool, layout: Layout) -> _Step:
    """The update as this library makes it."""
    keys = () if layout.key is None else (layout.key,)
    args = (layout.params, layout.opt_state, layout.batch, *keys)
    try:
        output = jax.eval_shape(loss_fn, layout.params, layout.batch, *keys)
    except Exception as error:
        raise ValueError(
            "plan: loss_fn does not trace on the shapes of params, batch"
            f"{' and key' if keys else ''}: {type(error).__name__}: {error}"
        ) from error
    keywords: dict[str, Any] = {"weight": weight, "has_aux": has_aux}
    if has_aux and isinstance(output, tuple) and len(output) == 2:
        keywords["aux"] = jax.tree.map(lambda x: "mean" if is_inexact(x) else "sum", output[1])
    if keys:
        keywords["key_argnums"] = 2
    sharded = {axis for x in jax.tree.leaves(layout.params) for axis in mesh_axes(x)}
    if sharded:
        keywords["arg_specs"] = {0: jax.tree.map(lambda x: x.sharding, layout.params)}
    mapped = tuple(axis for axis in layout.batch_axes if axis not in sharded)
    if mapped:
        keywords |= {"mesh": layout.mesh, "data_axes": mapped}
    options: dict[str, Any] = {"donate_argnums": (0, 1)}
    if layout.mesh is not None:  # what is donated comes back as it was sharded
        kept = jax.tree.map(lambda x: x.sharding, args[:2])
        options["out_shardings"] = (*kept, None)

    def make(microbatch_size):
        grad_fn = value_and_grad(loss_fn, k=layout.rows // microbatch_size, **keywords)

        def update(params, opt_state, *args):
            value, grads = grad_fn(params, *args)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        return jax.jit(update, **options), args

    return make


def _own_step(step: Any, layout: Layout) -> _Step:
    """The caller's own update."""

    def make(microbatch_size):
        made = step(microbatch_size)
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
            raise TypeError(
                f"plan: step({microbatch_size}) must return a pair of a function and its "
                f"arguments, got {made!r}."
            )
        function, args = made
        if not isinstance(args, (tuple, list)):
            raise TypeError(
                f"plan: step({microbatch_size}) must return the arguments as a tuple, got {args!r}."
            )
        function = function if hasattr(function, "trace") else jax.jit(function)
        return function, layout.place(tuple(args))

    return make


def _compile_row(
    layout: Layout, make: _Step, microbatch_size: int, accumulator: int, budget: float
) -> PlanRow:
    """Compiles one candidate and asks what it needs."""
    k = layout.rows // microbatch_size
    function, args = make(microbatch_size)
    traced = function.trace(*args)
    flops = count_flops(traced.jaxpr) // layout.num_devices
    try:
        memory = traced.lower().compile().memory_analysis()
        peak = layout.target.peak_bytes(memory)
        fits = peak <= budget
    except jax.errors.JaxRuntimeError as error:
        peak, fits = refused_bytes(error), False
    parts, rest = [], peak
    for size in (
        layout.params_bytes,
        layout.optimizer_bytes,
        layout.batch_bytes,
        accumulator if k > 1 else 0,
    ):
        parts.append(size if rest is None else min(size, rest))
        rest = None if rest is None else rest - parts[-1]
    params, optimizer, batch, accumulator = parts
    traffic = None if rest is None else 2 * (k * (params + accumulator + rest) + params + optimizer)
    return PlanRow(
        microbatch_size=microbatch_size,
        k=k,
        peak_bytes=peak,
        params_bytes=params,
        optimizer_bytes=optimizer,
        accumulator_bytes=accumulator,
        batch_bytes=batch,
        activation_bytes=rest,
        flops=flops,
        fits=fits,
        traffic_bytes=traffic,
        gather_bytes=k * layout.gathered_bytes,
        estimated_seconds=_roofline(layout.target.machine, flops, traffic),
    )


def _search(
    candidates: list[int], compile_row: Callable[[int, int, int], PlanRow], budget: float
) -> tuple[PlanRow, ...]:
    """The rows of the largest candidate that fits, the next, and those that led there.

    The largest is tried first. Where it does not fit, the next to try is the one that would be the
    largest to fit if activations grew in proportion to the microbatch; or, where the compilations
    left could then not search the rest by halves, the nearest to it for which they can.
    """
    rows: dict[int, PlanRow] = {}
    most = 2 + int(math.log2(len(candidates)))
    low, high = -1, len(candidates) - 1  # the last known to fit, the first known not to
    at = high
    while True:
        row = rows[at] = compile_row(len(rows), most, candidates[at])
        low, high = (at, high) if row.fits else (low, at)
        if high - low <= 1:
            return tuple(rows[at] for at in sorted(rows))
        reach = 2 ** (most - len(rows) - 1)
        at = min(max(_guess(candidates, row, budget), low + 1, high - reach), high - 1, low + reach)


def _guess(candidates: list[int], row: PlanRow, budget: float) -> int:
    """The last candidate to fit, were activations in proportion to the microbatch of `row`."""
    if row.peak_bytes is None or not row.activation_bytes:
        return len(candidates) // 2
    room = budget - (row.peak_bytes - row.activation_bytes)
    size = row.microbatch_size * room / row.activation_bytes
    return bisect.bisect_right(candidates, size) - 1


def _verdict(rows: tuple[PlanRow, ...]) -> Verdict:
    if not any(row.fits for row in rows):
        return "nothing_fits"
    return "fits_without_accumulation" if any(r.fits and r.k == 1 for r in rows) else "accumulate"


def _check_headroom(headroom: Any) -> None:
    if isinstance(headroom, bool) or not isinstance(headroom, (int, float)):
        raise TypeError(f"plan: headroom must be a Python number, got {headroom!r}.")
    if not 0 <= headroom < 1:
        raise ValueError(
            f"plan: headroom={headroom!r} must be from 0 on and below 1: the part of the memory "
            "limit that stays free."
        )


def _candidates(sizes: Any, layout: Layout) -> list[int]:
    """The microbatches to choose from, ascending."""
    choices = divisors(layout.rows)
    if sizes is None:
        return choices
    meaning = "rows of a microbatch on one device"
    given = sorted({check_int("plan", "microbatch_sizes", size, meaning) for size in sizes})
    if not given:
        raise ValueError("plan: microbatch_sizes is empty. Leave it out to try every divisor.")
    for size in given:
        if size not in choices:
            raise ValueError(
                f"plan: microbatch_sizes has {size}, which does not divide the {layout.rows} rows "
                f"of a device (effective batch {layout.num_rows} over {layout.data_parallel}). "
                f"Use {near(choices, size)}."
            )
    return given


def _roofline(machine: Machine | None, flops: int, traffic: int | None) -> float | None:
    if machine is None or traffic is None:
        return None
    return max(flops / machine.flops, traffic / machine.bandwidth)
