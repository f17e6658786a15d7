"""Reducers: how the outputs of the microbatches become the output of the whole batch.

Numerators and denominators stay apart until `finalize`, where each result is divided once.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._errors import check_int, leaf_name
from ._sharding import DataAxes, match
from ._split import Split
from ._trace import hide, show


class Microbatch(NamedTuple):
    """What a reducer may know of the microbatch whose output it takes."""

    index: Any  # int32 scalar
    weight: Any  # float scalar; None where every row counts the same
    share: float  # its rows / `Split.unit`; 1 but for a ragged batch
    is_tail: bool
    finite: Any  # bool scalar; None where non-finite values are propagated
    kept: Any  # bool scalar: finite and of weight other than 0; None where always true


class Totals(NamedTuple):
    """The denominators of a window."""

    weight: Any  # sum of the weights; of the rows where there are none
    scaled: Any  # sum of the factors that a mean's terms were scaled by: its denominator
    any_kept: Any  # bool scalar; None where always true


def select(condition: Any, new: Any, old: Any) -> Any:
    """`new` where the condition holds (None: always). Never a product, which would keep NaN."""
    return new if condition is None else jnp.where(condition, new, match(old, new))


def _by_parts(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies a real-linear function to the real and the imaginary part."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(function(x.real), function(x.imag))
    return function(x)


def scale(x: jax.Array, factor: Any) -> jax.Array:
    """`x * factor` for a real scalar, in the dtype of `x`."""
    if isinstance(factor, (int, float)):
        return x if factor == 1 else _by_parts(lambda part: part * factor, x)
    return _by_parts(lambda part: part * factor.astype(part.dtype), x)


def divide(x: jax.Array, total: Any) -> jax.Array:
    """`x / total` in float32 or wider; zeros where the total is 0."""
    x = x.astype(wide_dtype(x.dtype))
    if isinstance(total, (int, float)):
        return _by_parts(lambda part: part / total, x)
    nonzero = jnp.where(total == 0, jnp.ones_like(total), total)
    quotient = _by_parts(lambda part: part / nonzero.astype(part.dtype), x)
    return jnp.where(total == 0, jnp.zeros_like(quotient), quotient)


def all_finite(tree: Any) -> jax.Array:
    """Whether every element of every float or complex leaf is finite."""
    finite = jnp.array(True)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            finite &= jnp.isfinite(leaf).all()
    return finite


def wide_dtype(dtype: Any, requested: Any = None) -> jnp.dtype:
    """The dtype in which values of `dtype` are summed.

    Floats: float32 or wider. Complex numbers: the counterpart of that. Integers and booleans: an
    integer of at least 32 bits. `requested` takes the place of float32 or wider.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
        return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.uint32 if unsigned else jnp.int32)
    real = jnp.finfo(dtype if requested is None else requested).dtype
    if requested is None and real.itemsize < 4:
        real = jnp.dtype(jnp.float32)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(jnp.complex128 if real == jnp.float64 else jnp.complex64)
    return jnp.dtype(real)


def cast_sum(x: jax.Array, dtype: Any, accumulator_dtype: Any, output_dtype: Any) -> jax.Array:
    """A finished sum of values of `dtype`, in the dtype in which it is handed on."""
    dtype = jnp.dtype(dtype)
    narrow = not jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize < 4
    if output_dtype == "accumulator" or narrow:  # a sum may not fit a narrow integer
        dtype = wide_dtype(dtype, accumulator_dtype)
    elif output_dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
        dtype = wide_dtype(dtype, output_dtype)
    return x.astype(dtype)


class Window(NamedTuple):
    """The static facts of one call that reducers need."""

    split: Split
    axes: DataAxes
    accumulator_dtype: Any
    output_dtype: Any

    def cast(self, x: jax.Array, dtype: Any) -> jax.Array:
        return cast_sum(x, dtype, self.accumulator_dtype, self.output_dtype)


class LeafReducer(abc.ABC):
    """Reduces one array of the output; `leaf` is its shape and dtype on a full microbatch."""

    averages = False  # one non-finite value spoils the result
    spec: Any = None  # how the leaf is sharded, where it is the gradient of an argument
    mixes_rows = True  # wrong for a leaf that holds rows

    def __init__(self, name: str, leaf: jax.ShapeDtypeStruct, window: Window):
        self.name, self.leaf, self.window = name, leaf, window

    def refusal(self) -> str | None:
        """Why this leaf cannot be reduced so, and what can be done."""
        return None

    def init(self) -> Any:
        return jnp.zeros(self.leaf.shape, self.leaf.dtype)

    @abc.abstractmethod
    def update(self, carry: Any, x: jax.Array, microbatch: Microbatch) -> Any:
        """The carry with a microbatch's leaf in it."""

    @abc.abstractmethod
    def merge(self, carry: Any) -> Any:
        """The carry of all devices together."""

    def finalize(self, carry: Any, totals: Totals) -> jax.Array:
        return carry


class _Sum(LeafReducer):
    """`mean` (of weighted terms), `sum` and `sum_over_weight`."""

    averages = True

    def refusal(self):
        if self.name != "sum" and not jnp.issubdtype(self.leaf.dtype, jnp.inexact):
            return (
                'a mean of integers is not an integer. Use "sum", "max", "min", "last", "stack" '
                'or "concat", or return it as a float'
            )
        return None

    def init(self):
        dtype = wide_dtype(self.leaf.dtype, self.window.accumulator_dtype)
        return self.window.axes.constrain(jnp.zeros(self.leaf.shape, dtype), self.spec)

    def update(self, carry, x, microbatch):
        x = x.astype(carry.dtype)
        if self.name == "mean":
            x = scale(x, microbatch.share if microbatch.weight is None else microbatch.weight)
        return self.window.axes.constrain(select(microbatch.kept, carry + x, carry), self.spec)

    def merge(self, carry):
        return self.window.axes.sum(carry, self.spec)

    def finalize(self, carry, totals):
        if self.name != "sum":
            carry = divide(carry, totals.scaled if self.name == "mean" else totals.weight)
        return self.window.axes.constrain(carry, self.spec)


class _Extreme(LeafReducer):
    """`max` and `min`."""

    def refusal(self):
        if jnp.issubdtype(self.leaf.dtype, jnp.complexfloating):
            return f'complex numbers have no {self.name}. Use "mean", "sum", "last" or "stack"'
        return None

    def init(self):
        dtype, largest = self.leaf.dtype, self.name == "min"
        if jnp.issubdtype(dtype, jnp.inexact):
            info = jnp.finfo(dtype)  # some of 8 bits have no infinity
            start = info.max if largest else info.min
            if dtype.itemsize > 1:
                start = jnp.inf if largest else -jnp.inf
        elif dtype == jnp.bool_:
            start = largest
        else:
            start = jnp.iinfo(dtype).max if largest else jnp.iinfo(dtype).min
        return jnp.full(self.leaf.shape, start, dtype)

    def update(self, carry, x, microbatch):
        extreme = jnp.maximum if self.name == "max" else jnp.minimum
        return select(microbatch.kept, extreme(carry, x), carry)

    def merge(self, carry):
        return self.window.axes.extreme(self.name, carry)

    def finalize(self, carry, totals):
        return select(totals.any_kept, carry, jnp.zeros_like(carry))


class _Last(LeafReducer):
    def refusal(self):
        return _one_device_only(self.window)

    def update(self, carry, x, microbatch):
        return select(microbatch.kept, x, carry)

    def merge(self, carry):
        return self.window.axes.agree(carry)


class _Stack(LeafReducer):
    mixes_rows = False

    def refusal(self):
        split = self.window.split
        if split.tail:
            return (
                f"its microbatches are unequal ({split.rows} rows, the last {split.tail}). Use "
                '"concat", or a k that divides the batch'
            )
        return _one_device_only(self.window)

    def init(self):
        return jnp.zeros((self.window.split.num_full, *self.leaf.shape), self.leaf.dtype)

    def update(self, carry, x, microbatch):
        return _write(carry, x, microbatch.index, 0)

    def merge(self, carry):
        return self.window.axes.agree(carry)


class _Concat(LeafReducer):
    """Rows in the caller's order: row j of microbatch i is row i + j num_full of the batch."""

    mixes_rows = False

    def refusal(self):
        split = self.window.split
        if not self.leaf.shape:
            return 'it is a scalar and has no rows. Use "stack" for one value of each microbatch'
        if not split.stacked and self.leaf.shape[0] != split.rows:
            return (
                f"its axis 0 has size {self.leaf.shape[0]} where the microbatch has {split.rows} "
                "rows. Return one entry for each row on axis 0"
            )
        return None

    def init(self):
        split, (num_rows, *rest) = self.window.split, self.leaf.shape
        order = (split.num_full, num_rows) if split.stacked else (num_rows, split.num_full)
        dtype = self.leaf.dtype
        return jnp.zeros((*order, *rest), dtype), jnp.zeros((split.tail, *rest), dtype)

    def update(self, carry, x, microbatch):
        rows, tail = carry
        if microbatch.is_tail:
            return rows, x
        axis = 0 if self.window.split.stacked else 1
        return _write(rows, x, microbatch.index, axis), tail

    def merge(self, carry):
        return carry  # every device keeps its rows

    def finalize(self, carry, totals):
        rows, tail = carry
        rows = rows.reshape((rows.shape[0] * rows.shape[1], *rows.shape[2:]))
        return jnp.concatenate([rows, tail]) if self.window.split.tail else rows


def _write(whole: jax.Array, x: jax.Array, index: Any, axis: int) -> jax.Array:
    """Puts `x` at `index` of an axis of an array with its explicit sharding."""
    like = jax.eval_shape(lambda x: jnp.broadcast_to(jnp.expand_dims(x, axis), whole.shape), x)
    return lax.dynamic_update_index_in_dim(match(whole, like), x, index, axis)


def _one_device_only(window: Window) -> str | None:
    if window.axes.size > 1:
        names = ", ".join(map(repr, window.axes.names))
        return (
            f"its microbatches are spread over {window.axes.size} devices (axes {names}). Use "
            '"concat", "mean", "sum", "max" or "min"'
        )
    return None


REDUCERS: dict[str, type[LeafReducer]] = {
    "mean": _Sum,
    "sum": _Sum,
    "sum_over_weight": _Sum,
    "concat": _Concat,
    "stack": _Stack,
    "last": _Last,
    "max": _Extreme,
    "min": _Extreme,
}


def averages(reducer: Any) -> bool:
    """Whether one non-finite value spoils what the reducer makes, as it would a gradient."""
    return isinstance(reducer, str) and REDUCERS[reducer].averages


@dataclasses.dataclass(frozen=True)
class Thread:
    """The reducer that `thread` makes."""

    argnum: int


def thread(argnum: int) -> Thread:
    """A reducer for state: this part of the output is argument `argnum` of the next microbatch.

    The first microbatch gets the argument as it was passed, and the last value is returned, as if
    the microbatches had been run one after another: batch-norm statistics, counters, any state
    that a function takes and returns. State moves on at weight 0, and stays as it was where
    `nonfinite="skip"` leaves a microbatch out.

    Args:
      argnum: the position of the argument, which has the structure, shapes and dtypes of this part
        of the output.

    Returns:
      A leaf for `reduce` in `accumulate`, or for `aux` in `value_and_grad`.

    Raises:
      TypeError: when built, if `argnum` is not a Python int.

    Example:
      >>> import jax.numpy as jnp
      >>> from accum_jax import accumulate, thread
      >>> def step(params, batch, count):
      ...     return params * batch.mean(), count + 1
      >>> out, count = accumulate(step, k=2, reduce=("mean", thread(2)))(2.0, jnp.arange(4.0), 0)
      >>> print(out, count)
      3.0 2
    """
    return Thread(check_int("thread", "argnum", argnum, "the position of an argument", -(2**31)))


def is_reducer(x: Any) -> bool:
    return isinstance(x, (str, Thread)) or (hasattr(x, "update") and hasattr(x, "finalize"))


def check_reduce(fn: str, argument: str, reduce: Any) -> list[Thread]:
    """Checks the leaves of a tree of reducers; returns the threads in it.

    Raises:
      ValueError: when built: a name that is no reducer; the known ones are listed.
      TypeError: when built: a leaf that is neither a name nor an object with `init`, `update` and
        `finalize`.
    """
    threads = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(reduce, is_leaf=is_reducer):
        where, known = leaf_name(argument, path), ", ".join(map(repr, REDUCERS))
        if isinstance(leaf, str):
            if leaf not in REDUCERS:
                raise ValueError(
                    f"{fn}: {where}={leaf!r} is no reducer. Known: {known}, thread(argnum)."
                )
        elif isinstance(leaf, Thread):
            threads.append(leaf)
        elif not all(callable(getattr(leaf, m, None)) for m in ("init", "update", "finalize")):
            raise TypeError(
                f"{fn}: {where} must be one of {known}, thread(argnum), or an object with init, "
                f"update and finalize, got {leaf!r} of type {type(leaf).__name__}."
            )
    return threads


class Part:
    """One reducer and the part of the output that it reduces.

    `struct` is that part with a `jax.ShapeDtypeStruct` for each array; every other leaf passes
    through.

    Raises:
      TypeError: when traced: a leaf whose dtype cannot be reduced so.
      ValueError: when traced: a leaf whose shape cannot be reduced so.
    """

    def __init__(self, fn: str, where: str, reducer: Any, struct: Any, window: Window):
        self.where, self.reducer, self.struct, self.window = where, reducer, struct, window
        self.state: Any = None  # what a thread starts from
        self.leafwise: list[LeafReducer] = []
        if not isinstance(reducer, (str, Thread)) and window.axes.size > 1:
            raise ValueError(
                f"{fn}: {where} is reduced by {reducer!r}, which cannot combine the results of "
                f"{window.axes.size} devices. Use a reducer that is named, or one device."
            )
        if isinstance(reducer, str):
            for path, leaf in jax.tree_util.tree_leaves_with_path(struct):
                if isinstance(leaf, jax.ShapeDtypeStruct):
                    self._add_leaf(fn, leaf_name(where, path), leaf)

    def _add_leaf(self, fn: str, name: str, leaf: jax.ShapeDtypeStruct) -> None:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"{fn}: {name} has dtype {leaf.dtype}, which only thread can take on.")
        reducer = REDUCERS[self.reducer](self.reducer, leaf, self.window)
        if reason := reducer.refusal():
            error = ValueError if jnp.issubdtype(leaf.dtype, jnp.inexact) else TypeError
            raise error(
                f'{fn}: "{self.reducer}" cannot reduce {name} of dtype {leaf.dtype} and shape '
                f"{leaf.shape}: {reason}."
            )
        self.leafwise.append(reducer)

    def start_from(self, fn: str, state: Any) -> None:
        """Gives a thread its first state, which must have the type of those that follow."""
        self.state = state
        came = jax.tree.structure(state)
        if came != jax.tree.structure(self.struct):
            raise ValueError(
                f"{fn}: {self.where} is threaded into argument {self.reducer.argnum}, but their "
                f"structures differ.\n  argument: {came}\n  {self.where}: "
                f"{jax.tree.structure(self.struct)}\nReturn the state with the structure in which "
                "it is passed."
            )
        leaves = jax.tree_util.tree_leaves_with_path(self.struct)
        for (path, new), old in zip(leaves, jax.tree.leaves(state), strict=True):
            if isinstance(new, jax.ShapeDtypeStruct) and (new.shape, new.dtype) != (
                old.shape,
                old.dtype,
            ):
                raise ValueError(
                    f"{fn}: {leaf_name(self.where, path)} is threaded into argument "
                    f"{self.reducer.argnum} and must keep its type {old.dtype}{list(old.shape)}, "
                    f"got {new.dtype}{list(new.shape)}."
                )

    @property
    def averages(self) -> bool:
        return averages(self.reducer)

    @property
    def mixes_rows(self) -> bool:
        return isinstance(self.reducer, str) and REDUCERS[self.reducer].mixes_rows

    @property
    def is_thread(self) -> bool:
        return isinstance(self.reducer, Thread)

    def init(self) -> Any:
        if isinstance(self.reducer, Thread):
            return hide(self.state)
        if isinstance(self.reducer, str):
            return [reducer.init() for reducer in self.leafwise]
        return self.reducer.init(self.struct)

    def update(self, carry: Any, value: Any, microbatch: Microbatch) -> Any:
        if isinstance(self.reducer, Thread):
            finite = microbatch.finite
            return jax.tree.map(lambda new, old: select(finite, new, old), hide(value), carry)
        if isinstance(self.reducer, str):
            return [
                reducer.update(c, x, microbatch)
                for reducer, c, x in zip(self.leafwise, carry, self.arrays(value), strict=True)
            ]
        return self.reducer.update(carry, value, microbatch.index)

    def merge(self, carry: Any, weight: Any) -> Any:
        """The carry of all devices together; `weight` is the total weight of this one's window."""
        if not self.window.axes.names:
            return carry
        if isinstance(self.reducer, Thread):
            return jax.tree.map(lambda x: self._average(x, weight), carry)
        if isinstance(self.reducer, str):
            each = zip(self.leafwise, carry, strict=True)
            return [reducer.merge(c) for reducer, c in each]
        return carry

    def _average(self, state: Any, weight: Any) -> Any:
        """Float state, averaged over devices by weight; other state agrees."""
        axes = self.window.axes
        if not jnp.issubdtype(state.dtype, jnp.inexact):
            return axes.agree(state)
        total = axes.sum(weight)
        share = jnp.where(total == 0, 1 / axes.size, weight / jnp.where(total == 0, 1, total))
        wide = scale(state.astype(wide_dtype(state.dtype)), share)
        return axes.sum(jnp.where(share == 0, 0, wide)).astype(state.dtype)

    def finalize(self, carry: Any, totals: Totals) -> Any:
        """The result, sums still in the dtype in which they were divided."""
        if isinstance(self.reducer, Thread):
            return show(carry)
        if isinstance(self.reducer, str):
            each = zip(self.leafwise, carry, strict=True)
            return self._fill([reducer.finalize(c, totals) for reducer, c in each])
        return self.reducer.finalize(carry)

    def cast(self, result: Any) -> Any:
        """The result of `finalize` in the dtypes in which it is handed on."""
        if not self.averages:
            return result
        each = zip(self.leafwise, self.arrays(result), strict=True)
        return self._fill([self.window.cast(x, reducer.leaf.dtype) for reducer, x in each])

    def by_leaf(self) -> list[LeafReducer | None]:
        """The reducer of every leaf of `struct`; None where it is not reduced by itself."""
        reducers = iter(self.leafwise)
        return [
            next(reducers, None) if isinstance(leaf, jax.ShapeDtypeStruct) else None
            for leaf in jax.tree.leaves(self.struct)
        ]

    def arrays(self, value: Any) -> list[Any]:
        """The leaves of `value` where `struct` has arrays."""
        return [
            x
            for x, leaf in zip(jax.tree.leaves(value), jax.tree.leaves(self.struct), strict=True)
            if isinstance(leaf, jax.ShapeDtypeStruct)
        ]

    def _fill(self, arrays: list[Any]) -> Any:
        filled = iter(arrays)
        return jax.tree.map(
            lambda leaf: next(filled) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf,
            self.struct,
        )
