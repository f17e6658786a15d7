"""The engine: runs the microbatches of one window in one loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from . import _in_place
from ._errors import (
    broadcast_prefix,
    check_dtype_enabled,
    check_no_modules,
    leaf_name,
    positions,
)
from ._options import Options, is_text
from ._reduce import (
    Microbatch,
    Part,
    Totals,
    Window,
    all_finite,
    averages,
    check_reduce,
    divide,
    is_reducer,
    select,
    wide_dtype,
)
from ._sharding import DataAxes, check_rank, is_spec, keep_axes, match, spec_axes
from ._split import Batch, find_rows, is_array, split_batch
from ._stats import (
    AccumulationStats,
    Squares,
    find_gradient,
    is_inexact,
    norms,
    parts_like,
    square_norm,
)
from ._trace import (
    SCALARS,
    Staged,
    hide,
    is_key,
    is_traced,
    numbers_to_arrays,
    show,
    surrounding_trace,
)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """What is to be differentiated, where the engine knows the loss."""

    argnums: tuple[int, ...]
    has_aux: bool
    reduction: str
    loss_scale: Any
    in_place: bool | None
    allow_int: bool
    output_dtype: Any
    leaves: tuple[tuple[bool, ...], ...] | None = None  # which of each argument's; None for all

    def excluded_by(self, options: Options) -> list[str]:
        """Why the gradient cannot be added up in place, as far as static arguments tell."""
        reasons = []
        if not _in_place.available():
            reasons.append("this jax has no jax.vjp(...).with_refs, a newer one has")
        if options.nonfinite == "skip":
            reasons.append(
                'nonfinite="skip" must see a microbatch\'s gradient before it is added. Use '
                "accum_jax.dynamic_loss_scale, which skips the window"
            )
        if options.stats == "norms":
            reasons.append(
                'stats="norms" measures every microbatch\'s gradient. Use stats="counts"'
            )
        return reasons

    def raise_excluded(self, fn: str, reasons: list[str]) -> None:
        if reasons:
            raise ValueError(
                f"{fn}: in_place=True is not possible: {'; '.join(reasons)}. Or use in_place=None."
            )

    def check_in_place(self, options: Options) -> None:
        """Refuses `in_place=True` with an option that excludes it."""
        if self.in_place:
            self.raise_excluded(options.fn, self.excluded_by(options))


class Counts(NamedTuple):
    """Sums over the microbatches of a window; None where nothing asks for them."""

    weight: Any  # float32 or wider, of those that count
    rows: Any  # int32, of those that count
    nonfinite: Any  # int32
    squares: Squares | None

    def add(self, name: str, term: Any, kept: Any) -> Counts:
        """Adds a microbatch's term to the sum of that name, where it is asked for."""
        total = getattr(self, name)
        if total is None:
            return self
        new = total + jnp.asarray(term).astype(total.dtype)
        return self._replace(**{name: select(kept, new, total)})


def run_window(
    options: Options,
    reduce: Any,
    function: Callable[..., Any],
    gradient: Gradient | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Any, AccumulationStats | None]:
    """Splits the batch, runs `function` on every microbatch in one loop and reduces its outputs.

    Returns the reduced output, the gradient of each differentiated argument (None without
    `gradient`) and the statistics (None where none are asked for).

    Raises:
      TypeError, ValueError: when traced, for all that `accumulate` names.
    """
    check_no_modules(options.arguments, args, kwargs)
    if options.mesh is not None:
        return _run_mapped(options, reduce, function, gradient, args, kwargs)
    axes = DataAxes(options.axis_names)
    loop = _Loop(options, reduce, function, gradient, axes, args, kwargs)
    results, gradients, stats = loop.run()
    return loop.output(results), loop.gradients(gradients), stats


def _run_mapped(
    options: Options,
    reduce: Any,
    function: Callable[..., Any],
    gradient: Gradient | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Any, AccumulationStats | None]:
    """The same on every device of the data axes, with its own rows; other axes stay automatic."""
    mesh = options.mesh
    alone = math.prod(mesh.shape[name] for name in options.data_axes) == 1
    axes = DataAxes(options.data_axes, alone)
    batch = find_batch(options, args)
    axes.check_divides(options.fn, batch, mesh)
    at = positions(options.batch_argnums, len(args))
    specs = [jax.tree.map(lambda x: PartitionSpec(), arg) for arg in args]
    for position, leaf_specs in _leaf_specs(options, args).items():
        paths = jax.tree_util.tree_leaves_with_path(args[position])
        for (path, x), spec in zip(paths, leaf_specs, strict=True):
            name = leaf_name(options.arguments.name(position), path)
            axes.check_shards(options.fn, name, x, spec, mesh)
        kept = [keep_axes(spec, axes.names) for spec in leaf_specs]
        specs[position] = jax.tree.unflatten(jax.tree.structure(args[position]), kept)
    batch_specs = jax.tree.unflatten(batch.treedef, axes.batch_specs(batch))
    for position, spec in zip(at, batch_specs, strict=True):
        specs[position] = spec
    whole = (kwargs, options.num_real_microbatches, gradient and gradient.loss_scale)
    arrays, treedef = jax.tree.flatten(hide((args, whole)))
    each = zip(jax.tree.leaves(args), jax.tree.leaves(specs), strict=True)
    in_specs = [spec for x, spec in each if is_traced(x)]
    in_specs += [PartitionSpec()] * (len(arrays) - len(in_specs))
    out_specs = [
        PartitionSpec(axes.names) if reducer == "concat" else PartitionSpec()
        for reducer in jax.tree.leaves(reduce, is_leaf=is_reducer)
    ]
    if gradient is None:
        _shard_output(options, reduce, function, args, kwargs, axes, out_specs)
    loops = []

    def run(arrays):
        args, (kwargs, real, loss_scale) = show(jax.tree.unflatten(treedef, arrays))
        inner = dataclasses.replace(options, num_real_microbatches=real)
        scaled = gradient and dataclasses.replace(gradient, loss_scale=loss_scale)
        loops.append(_Loop(inner, reduce, function, scaled, axes, args, kwargs))
        return hide(loops[-1].run())

    gradient_specs: Any = PartitionSpec()
    if gradient is not None:
        inputs = Inputs(options, gradient, args)
        gradient_specs = [keep_axes(spec, axes.names) for spec in inputs.specs]
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(in_specs,),
        out_specs=(out_specs, gradient_specs, PartitionSpec()),
        axis_names=set(axes.names),
        check_vma=not alone,
    )
    results, gradients, stats = show(mapped(axes.arrange(arrays, in_specs, mesh)))
    return loops[-1].output(results), loops[-1].gradients(gradients), stats


def _shard_output(
    options: Options,
    reduce: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axes: DataAxes,
    out_specs: list[Any],
) -> None:
    """Gives the gradient in an output the specs of argument 0, as far as data axes shard it."""
    if not any(map(averages, jax.tree.leaves(reduce, is_leaf=is_reducer))):
        return  # rows and state, and no gradient
    specs = [keep_axes(spec, axes.names) for spec in _leaf_specs(options, args).get(0, [])]
    if not any(map(spec_axes, specs)):
        return
    struct = show(jax.eval_shape(lambda: hide(numbers_to_arrays(function(*args, **kwargs)))))
    name = options.arguments.name(0)
    option = "arg_specs with a data axis"
    numbers = find_gradient(options.fn, option, name, args[0], struct)
    each = zip(jax.tree.leaves(args[0]), specs, strict=True)
    by_leaf = dict(zip(numbers, [spec for x, spec in each if is_inexact(x)], strict=True))
    _, parts, _ = broadcast_prefix(options.fn, "reduce", reduce, struct, is_reducer, "the output")
    counted = iter(range(len(jax.tree.leaves(struct))))
    for number, part in enumerate(parts):
        leaf_numbers = [next(counted) for _ in jax.tree.leaves(part)]
        if any(leaf in by_leaf for leaf in leaf_numbers):
            leaves = [by_leaf.get(leaf, PartitionSpec()) for leaf in leaf_numbers]
            tree = jax.tree.unflatten(jax.tree.structure(part), leaves)
            out_specs[number] = jax.tree.map(
                lambda x, spec: spec if isinstance(x, jax.ShapeDtypeStruct) else hide(x), part, tree
            )


def _leaf_specs(options: Options, args: tuple[Any, ...]) -> dict[int, list[Any]]:
    """The PartitionSpec of every leaf of the arguments in `arg_specs`."""
    specs = {}
    for argnum, prefix in options.arg_specs.items():
        if argnum >= len(args):
            raise ValueError(
                f"{options.fn}: arg_specs has argument {argnum}, but the call gave {len(args)} "
                "positional arguments."
            )
        name = options.arguments.name(argnum)
        leaves, subtrees, _ = broadcast_prefix(
            options.fn, f"arg_specs[{argnum}]", prefix, args[argnum], is_spec, f"argument {name}"
        )
        each = zip(leaves, subtrees, strict=True)
        specs[argnum] = [spec for spec, tree in each for _ in jax.tree.leaves(tree)]
        paths = jax.tree_util.tree_leaves_with_path(args[argnum])
        for (path, x), spec in zip(paths, specs[argnum], strict=True):
            check_rank(options.fn, leaf_name(name, path), x, spec)
    return specs


def find_batch(options: Options, args: tuple[Any, ...]) -> Batch:
    """The batch arguments of a call."""
    at = positions(options.batch_argnums, len(args))
    names = [options.arguments.name(position) for position in at]
    batch = tuple(args[position] for position in at)
    return find_rows(options.fn, names, batch, options.batch_axes, options.stacked)


class _Loop:
    """One call: the arguments by role, the traced microbatch, and what becomes of its output."""

    def __init__(
        self,
        options: Options,
        reduce: Any,
        function: Callable[..., Any],
        gradient: Gradient | None,
        axes: DataAxes,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        fn, names = options.fn, options.arguments
        self.axes, args, kwargs = axes, axes.vary(args), axes.vary(kwargs)
        for position, specs in _leaf_specs(options, args).items():
            for spec in specs:
                axes.check_spec(fn, spec)
            leaves, treedef = jax.tree.flatten(args[position])
            leaves = [axes.gather(x, spec) for x, spec in zip(leaves, specs, strict=True)]
            gathered = jax.tree.unflatten(treedef, leaves)
            args = (*args[:position], gathered, *args[position + 1 :])
        threads = check_reduce(fn, "reduce", reduce)
        roles = options.roles(threads)
        if gradient is not None:
            roles["argnums"] = gradient.argnums
        names.roles(roles, len(args))
        check_dtype_enabled(fn, "accumulator_dtype", options.accumulator_dtype)
        if not is_text(options.output_dtype, "accumulator"):
            check_dtype_enabled(fn, "output_dtype", options.output_dtype)
        self.options, self.function, self.gradient = options, function, gradient
        self.args, self.kwargs = args, kwargs
        self.batch_at = positions(options.batch_argnums, len(args))
        self.key_at = positions(options.key_argnums, len(args))
        self.thread_at = positions([thread.argnum for thread in threads], len(args))
        for position in self.key_at:
            _check_keys(fn, names.name(position), args[position])
        self.split = split_batch(
            fn,
            axes.on_each(find_batch(options, args)),
            k=options.k,
            microbatch_size=options.microbatch_size,
            remainder=options.remainder,
        )
        self.states = [axes.vary(numbers_to_arrays(args[position])) for position in self.thread_at]
        self.inputs = Inputs(options, gradient, args)

        blocks, first = self.split.blocks(), jnp.zeros((), jnp.int32)
        self.microbatch = self._stage(lambda index: self.split.take(blocks, index), first)
        struct, weight = self.microbatch.struct
        self.weight_dtype = jnp.float32 if weight is None else weight.dtype
        self.window = Window(self.split, axes, options.accumulator_dtype, options.output_dtype)
        if gradient is not None:
            self.value = check_value(fn, gradient.has_aux, struct)
            if gradient.has_aux:
                what = "the auxiliary output"
                broadcast_prefix(fn, "aux", reduce[1], struct[1], is_reducer, what)
        self._make_parts(reduce, struct)
        if self.split.num_rows > self.split.rows and not self.split.stacked:
            whole = self.split.whole()
            self._check_no_rows(lambda: self._stage(lambda index: whole, first).struct[0])
        self.gradient_part = None
        if gradient is None and 0 in options.arg_specs:
            self._shard_gradient(struct)
        if gradient is not None:
            structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.inputs.arrays]
            window = self.window._replace(output_dtype=gradient.output_dtype)
            self.gradient_part = Part(fn, "gradient", gradient.reduction, structs, window)
            for reducer, spec in zip(self.gradient_part.leafwise, self.inputs.specs, strict=True):
                reducer.spec = spec
        self.norms = None
        if options.stats == "norms":
            self.norms = _Norms(self, struct)

    def _stage(self, take: Callable[[Any], Any], index: Any) -> Staged:
        """Traces the function on the microbatch that `take(index)` gives, with its weight."""

        def call(arrays, index, states):
            full, batch = list(self.args), take(index)
            for position, value in self.inputs.fill(arrays):
                full[position] = value
            for position, value in zip(self.batch_at, batch, strict=True):
                full[position] = value
            for position in self.key_at:
                full[position] = self._fold_in(self.args[position], index)
            for position, value in zip(self.thread_at, states, strict=True):
                full[position] = value
            output = self.function(*full, **self.kwargs)
            return output, self._weight(batch, output)

        return Staged(call, self.inputs.arrays, index, self.states)

    def _fold_in(self, keys: Any, index: Any) -> Any:
        """Every key of a pytree for one microbatch on this device; arrays of keys one by one."""

        def fold(key, index):
            function = jax.random.fold_in
            for _ in range(key.ndim - (0 if is_key(key) else 1)):
                function = jax.vmap(function, (0, None))
            return function(key, index)

        keys = jax.tree.map(lambda key: fold(key, index), keys)
        if self.axes.names:
            keys = jax.tree.map(lambda key: fold(key, self.axes.index), keys)
        return keys

    def _weight(self, batch: Any, output: Any) -> Any:
        """The weight of a microbatch as a float32 scalar, or wider; None without weights."""
        options = self.options
        if options.weight is not None:
            argument, weight = "weight", options.weight(*batch)
        elif options.weight_from_output is not None:
            argument, weight = "weight_from_output", options.weight_from_output(output)
        else:
            return None
        if not (is_array(weight) or isinstance(weight, SCALARS)):
            raise TypeError(f"{options.fn}: {argument} must return a scalar, got {weight!r}.")
        weight = jnp.asarray(weight)
        if weight.shape != () or jnp.issubdtype(weight.dtype, jnp.complexfloating):
            raise ValueError(
                f"{options.fn}: {argument} must return one real, non-negative scalar for a "
                f"microbatch, got {weight.dtype}{list(weight.shape)}. Sum it over the rows, as in "
                "mask.sum()."
            )
        return weight.astype(jnp.float64 if weight.dtype == jnp.float64 else jnp.float32)

    def _make_parts(self, reduce: Any, struct: Any) -> None:
        fn = self.options.fn
        _, structs, self.treedef = broadcast_prefix(
            fn, "reduce", reduce, struct, is_reducer, "the output"
        )
        leaves = jax.tree_util.tree_leaves_with_path(reduce, is_leaf=is_reducer)
        states = iter(self.states)
        self.parts = []
        for (path, reducer), part in zip(leaves, structs, strict=True):
            self.parts.append(Part(fn, leaf_name("output", path), reducer, part, self.window))
            if self.parts[-1].is_thread:
                self.parts[-1].start_from(fn, next(states))

    def _shard_gradient(self, struct: Any) -> None:
        """Gives the gradient in the output, where there is one, the specs of argument 0."""
        specs = _leaf_specs(self.options, self.args)[0]
        each = zip(jax.tree.leaves(self.args[0]), specs, strict=True)
        specs = [spec for x, spec in each if is_inexact(x)]
        reducers = [r for part in self.parts for r in part.by_leaf()]
        for _, numbers in parts_like(self.args[0], struct)[:1]:
            for number, spec in zip(numbers, specs, strict=True):
                if reducers[number] is not None:
                    reducers[number].spec = spec

    def _check_no_rows(self, whole: Callable[[], Any]) -> None:
        """Refuses to add rows of different examples to one another.

        A leaf with as many entries as the microbatch has rows may hold rows. Whether it does, the
        shapes of the whole batch tell: one more trace, nothing computed, and only then.
        """
        split = self.split
        suspects = any(
            isinstance(leaf, jax.ShapeDtypeStruct) and split.rows in leaf.shape
            for part in self.parts
            if part.mixes_rows
            for leaf in jax.tree.leaves(part.struct)
        )
        if not suspects:
            return
        try:
            struct = whole()
        except Exception:  # it runs on microbatches of this size only: nothing to compare with
            return
        leaves = iter(jax.tree.leaves(struct))
        for part in self.parts:
            for path, leaf in jax.tree_util.tree_leaves_with_path(part.struct):
                expected = next(leaves)
                if not part.mixes_rows or not isinstance(leaf, jax.ShapeDtypeStruct):
                    continue
                if leaf.shape != expected.shape:
                    raise ValueError(
                        f"{self.options.fn}: {leaf_name(part.where, path)} has shape {leaf.shape} "
                        f"on a microbatch of {split.rows} rows and {expected.shape} on the whole "
                        f'batch of {split.num_rows}, so "{part.reducer}" would mix rows of '
                        'different examples. Use "concat" to get the rows back in order, "stack" '
                        "to keep the microbatches apart, or reduce it over the rows inside."
                    )

    # --- the loop --------------------------------------------------------------------------------

    def run(self) -> tuple[Any, Any, AccumulationStats | None]:
        """Runs all microbatches and divides once; the output as a list, one entry for each part."""
        split, real = self.split, self.options.num_real_microbatches
        zero = jnp.zeros((), jnp.int32)
        may_leave_out = self.options.weighted or self.options.nonfinite == "skip"
        counts = Counts(
            weight=jnp.zeros((), self.weight_dtype) if self.options.weighted else None,
            rows=zero if may_leave_out else None,
            nonfinite=zero if self.options.stats is not None else None,
            squares=Squares.zeros() if self.norms is not None else None,
        )
        self.accumulators = None
        sums = [] if self.gradient_part is None else self.gradient_part.init()
        if self._use_in_place():
            scale = self.gradient.loss_scale if self.gradient is not None else None
            read = (self.args, self.kwargs, self.microbatch.constants, scale, real)
            zeros = match(sums, self.inputs.arrays)
            self.accumulators = _in_place.new_accumulators(
                zeros, self.inputs.arrays, jax.tree.leaves(read)
            )
            sums = []
        carry = (counts, [part.init() for part in self.parts], sums)
        if real is not None:
            limit = split.num_full + (split.tail > 0)
            real = jnp.asarray(real if is_array(real) else min(int(real), limit))
            if real.dtype.itemsize < 4:  # which may not hold the limit
                real = real.astype(jnp.int32)
            real = jnp.clip(real, 0, limit).astype(jnp.int32)

        def body(index, carry):
            return self._run_one(self.microbatch, split.rows, False, index, carry)

        carry = self.axes.settle(body, zero, self.axes.vary(carry), self.args)
        if real is None:
            indices = jnp.arange(split.num_full, dtype=jnp.int32)
            carry, _ = lax.scan(lambda carry, index: (body(index, carry), None), carry, indices)
        else:
            carry = lax.fori_loop(zero, jnp.minimum(real, split.num_full), body, carry)
        if split.tail:
            carry = self._run_tail(real, carry)

        num_run = split.num_full + (split.tail > 0) if real is None else real
        num_rows = split.num_rows
        if real is not None:
            num_rows = jnp.minimum(real * split.rows, split.num_rows)
        return self._finish(carry, num_run, num_rows)

    def _run_tail(self, real: Any, carry: Any) -> Any:
        split, batch = self.split, self.split.take_tail()
        index = jnp.full((), split.num_full, jnp.int32)
        microbatch = self._stage(lambda index: batch, index)

        def run(carry):
            return self._run_one(microbatch, split.tail, True, index, carry)

        if real is None:
            return run(carry)
        return lax.cond(real > split.num_full, run, lambda carry: carry, carry)

    def _run_one(self, staged: Staged, rows: int, is_tail: bool, index: Any, carry: Any) -> Any:
        """Runs one microbatch and adds it to the carry."""
        counts, carries, sums = carry
        states = [c for part, c in zip(self.parts, carries, strict=True) if part.is_thread]
        if self.gradient is None:
            (output, weight), pull = staged([], index, states), None
        else:
            output, weight, pull = self._differentiate(staged, index, states)
        gradient = []
        if pull is not None and self.accumulators is None:
            (gradient,) = pull(self._cotangent(output, 1))
        values = self.treedef.flatten_up_to(output)

        finite = kept = None
        if counts.nonfinite is not None or self.options.nonfinite == "skip":
            each = zip(self.parts, values, strict=True)
            summed = [part.arrays(value) for part, value in each if part.averages]
            finite = all_finite((summed, gradient))
            if weight is not None:
                finite &= jnp.isfinite(weight)
            counts = counts.add("nonfinite", ~finite, None)
        if self.options.nonfinite == "propagate":
            finite = None
        if weight is not None:
            kept = weight != 0
        if finite is not None:
            kept = finite if kept is None else finite & kept
        microbatch = Microbatch(index, weight, rows / self.split.unit, is_tail, finite, kept)
        counts = counts.add("weight", weight, kept).add("rows", rows, kept)
        if self.norms is not None:
            squares = self.norms.add(counts.squares, output, gradient, weight, rows, kept)
            counts = counts._replace(squares=squares)
        carries = [
            part.update(c, value, microbatch)
            for part, c, value in zip(self.parts, carries, values, strict=True)
        ]
        if self.accumulators is not None:
            self._add_in_place(pull, output, microbatch)
        elif self.gradient_part is not None:
            sums = self.gradient_part.update(sums, gradient, microbatch)
        return counts, carries, sums

    def _finish(
        self, carry: Any, num_run: Any, num_rows: Any
    ) -> tuple[Any, Any, AccumulationStats | None]:
        counts, carries, sums = carry
        if self.accumulators is not None:
            sums = _in_place.read_accumulators(self.accumulators)
        rows = num_rows if counts.rows is None else counts.rows
        weight = counts.weight if self.options.weighted else jnp.asarray(rows, jnp.float32)
        carries = [part.merge(c, weight) for part, c in zip(self.parts, carries, strict=True)]
        if self.gradient_part is not None:
            sums = self.gradient_part.merge(sums, weight)
        counts = jax.tree.map(self.axes.sum, counts)
        rows, num_run, num_rows = map(self.axes.sum, (rows, num_run, num_rows))
        if isinstance(rows, int):
            scaled = rows / self.split.unit
        else:
            scaled = rows.astype(jnp.float32) / self.split.unit
        totals = Totals(
            weight=counts.weight if self.options.weighted else rows,
            scaled=counts.weight if self.options.weighted else scaled,
            any_kept=None if isinstance(rows, int) else rows > 0,
        )
        results = [part.finalize(c, totals) for part, c in zip(self.parts, carries, strict=True)]
        each = zip(self.parts, results, strict=True)
        output = [part.cast(result) for part, result in each]
        gradient = wide_gradient = None
        if self.gradient_part is not None:
            wide_gradient = self.gradient_part.finalize(sums, totals)
            gradient = self.gradient_part.cast(wide_gradient)
        if self.options.stats is None:
            return output, gradient, None
        stats = AccumulationStats(
            num_microbatches=jnp.asarray(num_run, jnp.int32),
            num_examples=jnp.asarray(num_rows, jnp.int32),
            total_weight=jnp.asarray(totals.weight).astype(self.weight_dtype),
            num_nonfinite=counts.nonfinite,
        )
        if self.norms is not None:
            stats = self.norms.finish(stats, counts.squares, results, wide_gradient, rows)
        return output, gradient, stats

    def output(self, results: list[Any]) -> Any:
        """The function's output, of what `run` returned."""
        return self.treedef.unflatten(results)

    def gradients(self, gradients: Any) -> Any:
        """The gradient of each differentiated argument, of what `run` returned."""
        return gradients if gradients is None else self.inputs.trees(gradients)

    # --- the gradient, where the loss is known ---------------------------------------------------

    def _use_in_place(self) -> bool:
        """Whether the backward pass adds to the accumulator itself; a named error for `True`."""
        gradient, options = self.gradient, self.options
        if gradient is None or gradient.in_place is False:
            return False
        dtypes = {
            str(x.dtype)
            for x in self.inputs.arrays
            if x.dtype != wide_dtype(x.dtype, options.accumulator_dtype)
            or jnp.issubdtype(x.dtype, jnp.complexfloating)
        }
        reasons = gradient.excluded_by(options)
        if dtypes:
            reasons.append(
                f"parameters of dtype {', '.join(sorted(dtypes))} would need a real accumulator of "
                "that dtype. Keep parameters in float32 and cast them inside the layers, or set "
                "accumulator_dtype"
            )
        if surrounding_trace() not in ("EvalTrace", "DynamicJaxprTrace"):
            reasons.append("the call is under jax.vmap or differentiation")
        if self.value.dtype.itemsize < 4 and (options.weighted or self.split.tail > 0):
            reasons.append(
                f"the loss has dtype {self.value.dtype}, in which the weights of microbatches "
                "would be rounded. Return it as float32"
            )
        if gradient.in_place:
            gradient.raise_excluded(options.fn, reasons)
            return True
        return not (reasons or options.stats)

    def _differentiate(self, staged: Staged, index: Any, states: Any) -> Any:
        """Output and weight of a microbatch, and the function from cotangent to gradient."""
        assert self.gradient is not None
        has_aux = self.gradient.has_aux

        def loss(arrays):
            output, weight = staged(arrays, index, states)
            return (output[0] if has_aux else output), (output, weight)

        _, pull, (output, weight) = jax.vjp(loss, self.inputs.arrays, has_aux=True)
        return output, weight, pull

    def _cotangent(self, output: Any, factor: Any) -> jax.Array:
        assert self.gradient is not None
        value = output[0] if self.gradient.has_aux else output
        scale = self.gradient.loss_scale
        cotangent = jnp.asarray(factor, self.weight_dtype)
        if scale is not None:
            cotangent *= jnp.asarray(scale).astype(cotangent.dtype)
        return match(cotangent.astype(value.dtype), value)

    def _add_in_place(self, pull: Any, output: Any, microbatch: Microbatch) -> None:
        factor: Any = 1
        if self.gradient is not None and self.gradient.reduction == "mean":
            factor = microbatch.share if microbatch.weight is None else microbatch.weight
        cotangent = self._cotangent(output, factor)

        def add():
            _in_place.add_gradient(pull, cotangent, self.accumulators or [])

        if microbatch.kept is None:
            add()
        else:
            lax.cond(microbatch.kept, add, lambda: None)


class Inputs:
    """The float and complex arrays of the differentiated arguments, as one list.

    Raises:
      TypeError: when traced: a leaf that cannot be differentiated.
    """

    def __init__(self, options: Options, gradient: Gradient | None, args: tuple[Any, ...]):
        fn, names = options.fn, options.arguments
        self.arrays: list[jax.Array] = []
        self.specs: list[Any] = []  # beside the arrays
        self.at: tuple[int, ...] = ()
        if gradient is None:
            return
        self.at = positions(gradient.argnums, len(args))
        self.given = [args[position] for position in self.at]
        self.wanted = []
        specs = _leaf_specs(options, args)
        for number, (position, tree) in enumerate(zip(self.at, self.given, strict=True)):
            for index, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
                if gradient.leaves is not None and not gradient.leaves[number][index]:
                    self.wanted.append(False)
                    continue
                name = leaf_name(names.name(position), path)
                self.wanted.append(_is_differentiable(fn, name, x, gradient.allow_int))
                if self.wanted[-1]:
                    self.arrays.append(jnp.asarray(x))  # a weak type stays weak, as in jax.grad
                    self.specs.append(specs[position][index] if position in specs else None)

    def _rebuild(self, arrays: list[Any], other: Callable[[Any], Any]) -> list[Any]:
        wanted, remaining = iter(self.wanted), iter(arrays)
        return jax.tree.map(lambda x: next(remaining) if next(wanted) else other(x), self.given)

    def fill(self, arrays: list[Any]) -> list[tuple[int, Any]]:
        """The differentiated arguments with `arrays` in place of theirs, with their positions."""
        if not self.at:
            return []
        return list(zip(self.at, self._rebuild(arrays, lambda x: x), strict=True))

    def trees(self, arrays: list[Any]) -> list[Any]:
        """Gradients with the structure of the arguments; float0 where there is none."""
        return self._rebuild(arrays, _no_gradient)


class _Norms:
    """Measures the gradient: the part that the engine differentiates, or one part of the output."""

    def __init__(self, loop: _Loop, struct: Any):
        fn, self.parts, self.numbers = loop.options.fn, loop.parts, None
        self.axes = loop.axes
        if loop.gradient is not None:
            assert loop.gradient_part is not None
            self.reducer, self.loss_scale = loop.gradient.reduction, loop.gradient.loss_scale
            self.reducers = loop.gradient_part.leafwise
            return
        self.loss_scale = None
        name = loop.options.arguments.name(0)
        params = numbers_to_arrays(loop.args[0])
        self.numbers = find_gradient(fn, 'stats="norms"', name, params, struct)
        owners = [part for part in self.parts for _ in jax.tree.leaves(part.struct)]
        reducers = {owners[number].reducer for number in self.numbers}
        if len(reducers) > 1 or not all(owners[number].averages for number in self.numbers):
            raise ValueError(
                f'{fn}: stats="norms" needs the whole gradient reduced by one of "mean", "sum" or '
                f'"sum_over_weight", got {", ".join(sorted(map(str, reducers)))}. Use '
                'stats="counts".'
            )
        (self.reducer,) = reducers
        by_leaf = [r for part in self.parts for r in part.by_leaf()]
        self.reducers = [by_leaf[number] for number in self.numbers]

    def _pick(self, leaves: list[Any], gradient: list[Any]) -> list[Any]:
        """The gradient, unscaled."""
        if self.numbers is not None:
            gradient = [leaves[number] for number in self.numbers]
        if self.loss_scale is None:
            return gradient
        return [divide(x, jnp.asarray(self.loss_scale)) for x in gradient]

    def _mean(self, gradient: list[Any], weight: Any, rows: Any) -> list[Any]:
        """The gradient as a mean over rows: a sum is divided by what it is a sum of."""
        if self.reducer == "mean":
            return gradient
        total = rows if self.reducer == "sum" or weight is None else weight
        return [divide(x, total) for x in gradient]

    def add(
        self, squares: Any, output: Any, gradient: list[Any], weight: Any, rows: int, kept: Any
    ) -> Squares:
        picked = self._pick(jax.tree.leaves(output), gradient)
        mean = self._mean(picked, weight, rows)
        return squares.add(mean, rows if weight is None else weight, rows, kept)

    def finish(
        self, stats: AccumulationStats, squares: Any, results: list[Any], gradient: Any, rows: Any
    ) -> AccumulationStats:
        leaves: list[Any] = []
        for part, result in zip(self.parts, results, strict=True):
            # other reducers may return another structure
            leaves += jax.tree.leaves(result if part.averages else part.struct)
        picked = self._pick(leaves, gradient)
        # "mean" and "sum_over_weight" are means by now; a sum is one over all rows
        mean = self._mean(picked, None, rows) if self.reducer == "sum" else picked
        square, noise_scale = norms(squares, self._square_norm(mean))
        return stats._replace(
            global_norm=jnp.sqrt(self._square_norm(picked)),
            mean_microbatch_square_norm=square,
            noise_scale=noise_scale,
        )

    def _square_norm(self, gradient: list[Any]) -> jax.Array:
        """Of the whole gradient, where devices hold shards of it."""
        each = zip(gradient, self.reducers, strict=True)
        return sum(
            (self.axes.sum_shards(square_norm(x), reducer.spec) for x, reducer in each),
            jnp.zeros((), jnp.float32),
        )


def _no_gradient(x: Any) -> np.ndarray:
    return np.zeros(x.shape if is_array(x) else (), jax.dtypes.float0)


def _is_differentiable(fn: str, name: str, x: Any, allow_int: bool) -> bool:
    """Whether a leaf has a gradient; integers have none, and are allowed where said so."""
    if not (is_array(x) or isinstance(x, SCALARS)):
        raise TypeError(
            f"{fn}: {name} is differentiated, but is {x!r} of type {type(x).__name__}. "
            "Differentiate a tree of arrays (equinox.partition makes one) and pass the rest in "
            "another argument."
        )
    dtype = jnp.result_type(x)
    if jnp.issubdtype(dtype, jnp.inexact):
        return True
    if allow_int:
        return False
    raise TypeError(
        f"{fn}: {name} is differentiated, but has dtype {dtype}. Pass it in another argument, or "
        "set allow_int=True for a float0 gradient."
    )


def check_value(fn: str, has_aux: bool, output: Any) -> Any:
    """The loss in the output of the function that computes it, an array or its type.

    Raises:
      TypeError: when traced: no real float scalar.
    """
    if has_aux and not (isinstance(output, tuple) and len(output) == 2):
        raise TypeError(
            f"{fn}: with has_aux=True the function must return (loss, aux), got "
            f"{jax.tree.structure(output)}."
        )
    value: Any = output[0] if has_aux else output
    if isinstance(value, SCALARS):
        value = jnp.asarray(value)
    if hasattr(value, "dtype") and value.shape == () and jnp.issubdtype(value.dtype, jnp.floating):
        return value
    came = f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else f"{value!r}"
    raise TypeError(
        f"{fn}: the loss must be a real float scalar, got {came}. Reduce it over the rows, or set "
        "has_aux=True where the function returns (loss, aux)."
    )


def _check_keys(fn: str, name: str, keys: Any) -> None:
    raw = jax.eval_shape(jax.random.key_data, jax.eval_shape(jax.random.key, 0)).shape
    for path, key in jax.tree_util.tree_leaves_with_path(keys):
        if is_array(key) and (
            is_key(key) or (key.dtype == jnp.uint32 and key.ndim and key.shape[-1:] == raw)
        ):
            continue
        came = f"{key.dtype}{list(key.shape)}" if is_array(key) else f"{key!r}"
        raise TypeError(
            f"{fn}: {leaf_name(name, path)} is in key_argnums, but is no key: expected "
            f"jax.random.key(seed) or a raw uint32{list(raw)} key, got {came}."
        )
