"""Which rows of a batch go into which microbatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import lax

from ._errors import broadcast_prefix, check_int, leaf_name


def is_array(x: Any) -> bool:
    """Whether a leaf is traced; every other leaf is passed to the function as it is."""
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind not in "OSUMm")


def check_batch_axes(fn: str, batch_axes: Any, several: bool) -> Any:
    """Returns `batch_axes` with Python ints; a list for several arguments becomes a tuple."""
    if several and isinstance(batch_axes, list):
        batch_axes = tuple(batch_axes)
    return jax.tree.map(
        lambda axis: (
            None
            if axis is None
            else check_int(fn, "batch_axes", axis, "the batch's axis, None for not split", -(2**31))
        ),
        batch_axes,
        is_leaf=lambda x: x is None,
    )


@dataclasses.dataclass(frozen=True)
class Batch:
    """The leaves of the batch arguments and the axis on which each has the rows of the batch."""

    leaves: tuple[Any, ...]
    axes: tuple[int | None, ...]  # of one microbatch's leaves; None for what is passed whole
    treedef: Any
    stacked: bool
    size: int  # rows; microbatches where they are stacked
    microbatch_rows: int  # where they are stacked
    where: str  # the leaf and axis that say so


@dataclasses.dataclass(frozen=True)
class Split:
    """A batch cut into `num_full` microbatches of `rows` rows and a last one of `tail` rows.

    Microbatch i holds rows i, i + num_full, i + 2 num_full, ...: the batch axis is reshaped to
    (rows, num_full) and indexed on its second part, so that an axis sharded over devices keeps
    its sharding. Reshaping to (num_full, rows) would move the whole batch between devices, and
    transposing first would copy it.
    """

    rows: int
    num_full: int
    tail: int
    batch: Batch

    @property
    def stacked(self) -> bool:
        return self.batch.stacked

    @property
    def num_rows(self) -> int:
        return self.rows * self.num_full + self.tail

    @property
    def unit(self) -> int:
        """Rows of a microbatch that counts 1 in a mean over rows.

        With a tail it is a power of two, so that rows / unit is exact and at most 1.
        """
        return 2 ** (self.rows - 1).bit_length() if self.tail else self.rows

    def blocks(self) -> list[Any]:
        """The leaves with the microbatches on an axis of their own, for `take`."""

        def block(x, axis):
            if axis is None or self.stacked:
                return x
            if self.tail:
                x = lax.slice_in_dim(x, 0, self.rows * self.num_full, axis=axis)
            return x.reshape(*x.shape[:axis], self.rows, self.num_full, *x.shape[axis + 1 :])

        return list(map(block, self.batch.leaves, self.batch.axes))

    def take(self, blocks: list[Any], index: Any) -> Any:
        """The batch arguments of full microbatch `index`."""

        def leaf(x, axis):
            if axis is None:
                return x
            at = 0 if self.stacked else axis + 1
            return lax.dynamic_index_in_dim(x, index, at, keepdims=False)

        return jax.tree.unflatten(self.batch.treedef, map(leaf, blocks, self.batch.axes))

    def take_tail(self) -> Any:
        """The batch arguments of the last, smaller microbatch."""

        def leaf(x, axis):
            if axis is None:
                return x
            return lax.slice_in_dim(x, self.rows * self.num_full, x.shape[axis], axis=axis)

        return jax.tree.unflatten(self.batch.treedef, map(leaf, self.batch.leaves, self.batch.axes))

    def whole(self) -> Any:
        """The batch arguments as they came."""
        return jax.tree.unflatten(self.batch.treedef, self.batch.leaves)


def find_rows(
    fn: str, names: list[str], batch: tuple[Any, ...], batch_axes: Any, stacked: bool
) -> Batch:
    """Finds the rows of the effective batch in the arguments.

    Raises:
      ValueError: when traced: no leaf has rows, leaves disagree, a leaf lacks the axis, or the
        batch is empty.
    """
    axes_of, subtrees, _ = broadcast_prefix(
        fn, "batch_axes", batch_axes, batch, lambda x: x is None, "the batch"
    )
    axes: list[int | None] = []
    for axis, subtree in zip(axes_of, subtrees, strict=True):
        axes += [axis] * len(jax.tree.leaves(subtree))
    with_path, treedef = jax.tree_util.tree_flatten_with_path(batch)
    found: list[tuple[str, int, int]] = []  # leaf name, axis, size
    per_microbatch: list[tuple[str, int, int]] = []
    for number, ((path, x), axis) in enumerate(zip(with_path, axes, strict=True)):
        if axis is None or not is_array(x):
            axes[number] = None
            continue
        name = leaf_name(names[path[0].idx], path[1:])
        rank = x.ndim - stacked
        if stacked and x.ndim:
            found.append((name, 0, x.shape[0]))
            if rank == 0:  # one number for each microbatch
                axes[number] = 0
                continue
        if not -rank <= axis < rank:
            raise ValueError(
                f"{fn}: {name} has shape {x.shape}, which has no batch axis {axis}"
                f"{' behind the microbatch axis' if stacked else ''}. Give the leaf a batch axis, "
                "or None for it in batch_axes to pass it whole."
            )
        axes[number] = axis % rank
        rows = (name, axis % rank + stacked, x.shape[axis % rank + stacked])
        (per_microbatch if stacked else found).append(rows)
    if not found:
        raise ValueError(
            f"{fn}: the batch ({', '.join(names)}) has no array with a batch axis, so there are "
            "no rows to split. Check batch_argnums and batch_axes."
        )
    _check_same(fn, found)
    _check_same(fn, per_microbatch)
    for name, axis, size in found[:1] + per_microbatch[:1]:
        if size == 0:
            raise ValueError(f"{fn}: the batch is empty: axis {axis} of {name} has size 0.")
    name, axis, size = found[0]
    return Batch(
        leaves=tuple(x for _, x in with_path),
        axes=tuple(axes),
        treedef=treedef,
        stacked=stacked,
        size=size,
        microbatch_rows=per_microbatch[0][2] if per_microbatch else 1,
        where=f"axis {axis} of {name}",
    )


def split_batch(
    fn: str, batch: Batch, *, k: int | None, microbatch_size: int | None, remainder: str
) -> Split:
    """Decides which rows run together.

    Raises:
      ValueError: when traced: the batch cannot be cut as asked.
    """
    if batch.stacked:
        return Split(batch.microbatch_rows, batch.size, 0, batch)
    rows = _rows(fn, batch.size, batch.where, k, microbatch_size, remainder)
    return Split(rows, batch.size // rows, batch.size % rows, batch)


def _check_same(fn: str, found: list[tuple[str, int, int]]) -> None:
    for name, axis, size in found[1:]:
        first, first_axis, first_size = found[0]
        if size != first_size:
            if axis == first_axis:
                text = f"on axis {axis}: {first} has {first_size}, {name} has {size}."
            else:
                text = (
                    f"on the number of rows: {first} has {first_size} (axis {first_axis}), {name} "
                    f"has {size} (axis {axis})."
                )
            raise ValueError(
                f"{fn}: batch leaves disagree {text} Use batch_axes to say which axis is the "
                "batch's, None for a leaf that is passed whole."
            )


def _rows(
    fn: str, size: int, where: str, k: int | None, microbatch_size: int | None, remainder: str
) -> int:
    """How many rows a full microbatch has."""
    if k is not None:
        if k > size:
            raise ValueError(
                f"{fn}: k={k} is more than the effective batch of {size} ({where}): a microbatch "
                f"has at least one row. Use k <= {size}."
            )
        rows, asked, choices = -(-size // k), f"k={k}", near(divisors(size), k)
    else:
        assert microbatch_size is not None
        rows, asked = microbatch_size, f"microbatch_size={microbatch_size}"
        if rows > size and remainder == "tail":  # a short last batch is one microbatch
            return size
        choices = near(divisors(size), microbatch_size)
    exact = size % (rows if k is None else k) == 0
    if not exact and remainder == "error":
        name = "k" if k is not None else "microbatch_size"
        tail = size % rows
        run = f"run the last {tail} rows as a smaller microbatch"
        if not tail:
            run = f"run {size // rows} microbatches of {rows} rows"
        raise ValueError(
            f"{fn}: {asked} does not divide the effective batch of {size} ({where}). Use {name} in "
            f'{choices}, or remainder="tail" to {run}.'
        )
    return rows


def divisors(size: int) -> list[int]:
    small = [d for d in range(1, int(size**0.5) + 1) if size % d == 0]
    return sorted({*small, *(size // d for d in small)})


def near(choices: list[int], wanted: int, limit: int = 12) -> list[int]:
    return sorted(sorted(choices, key=lambda c: abs(c - wanted))[:limit])
