"""The keywords that all accumulating functions share, checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ._errors import (
    Arguments,
    check_argnums,
    check_axis_names,
    check_callable,
    check_choice,
    check_exactly_one,
    check_inexact_dtype,
    check_int,
)
from ._reduce import Thread
from ._sharding import check_arg_specs, check_mesh
from ._split import check_batch_axes


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked keywords of one accumulating function.

    Raises:
      TypeError, ValueError: when built, for each static argument that is wrong by itself.
    """

    fn: str
    arguments: Arguments
    batch_argnums: tuple[int, ...]
    batch_axes: Any  # a prefix of the tuple of batch arguments
    key_argnums: tuple[int, ...]
    k: int | None
    microbatch_size: int | None
    stacked: bool
    remainder: str
    weight: Callable[..., Any] | None
    weight_from_output: Callable[[Any], Any] | None
    accumulator_dtype: Any
    output_dtype: Any
    nonfinite: str
    num_real_microbatches: Any
    stats: str | None
    axis_names: tuple[Any, ...]  # mapped by the caller
    mesh: Any
    data_axes: tuple[Any, ...]  # of the mesh
    arg_specs: dict[int, Any]

    @classmethod
    def check(
        cls,
        fn: str,
        function: Callable[..., Any],
        *,
        k: Any = None,
        microbatch_size: Any = None,
        batch_argnums: Any = 1,
        batch_axes: Any = 0,
        key_argnums: Any = (),
        weight: Any = None,
        weight_from_output: Any = None,
        accumulator_dtype: Any = None,
        output_dtype: Any = None,
        stacked: Any = False,
        remainder: Any = "error",
        nonfinite: Any = "propagate",
        num_real_microbatches: Any = None,
        stats: Any = None,
        axis_name: Any = None,
        mesh: Any = None,
        data_axes: Any = "data",
        arg_specs: Any = None,
    ) -> Options:
        check_callable(fn, "grad_fn" if fn == "accumulate" else "loss_fn", function)
        check_choice(fn, "stacked", stacked, (False, True))
        check_choice(fn, "remainder", remainder, ("error", "tail"))
        check_choice(fn, "nonfinite", nonfinite, ("propagate", "skip"))
        check_choice(fn, "stats", stats, (None, "counts", "norms"))
        if stacked:
            if k is not None or microbatch_size is not None:
                raise TypeError(
                    f"{fn}: stacked=True takes k and the microbatch from the leaves [k, m, ...], "
                    f"got k={k!r}, microbatch_size={microbatch_size!r}. Leave both out."
                )
        else:
            check_exactly_one(fn, "k", "microbatch_size", (k, microbatch_size))
            if k is not None:
                k = check_int(fn, "k", k, "microbatches per update")
            else:
                microbatch_size = check_int(
                    fn, "microbatch_size", microbatch_size, "rows of a microbatch"
                )
        batch = check_argnums(fn, "batch_argnums", batch_argnums)
        if not batch:
            raise ValueError(
                f"{fn}: batch_argnums is empty, so there are no rows to split. Name the argument "
                "that holds the batch."
            )
        axes = check_batch_axes(fn, batch_axes, several=isinstance(batch_argnums, (tuple, list)))
        if not isinstance(batch_argnums, (tuple, list)):
            axes = (axes,)
        for argument, value in (("weight", weight), ("weight_from_output", weight_from_output)):
            if value is not None:
                check_callable(fn, argument, value)
        if weight is not None and weight_from_output is not None:
            raise TypeError(f"{fn}: give weight or weight_from_output, not both.")
        if accumulator_dtype is not None:
            accumulator_dtype = check_inexact_dtype(fn, "accumulator_dtype", accumulator_dtype)
        if output_dtype is not None and not is_text(output_dtype, "accumulator"):
            output_dtype = check_inexact_dtype(fn, "output_dtype", output_dtype)
        keys = check_argnums(fn, "key_argnums", key_argnums)
        _check_num_real(fn, num_real_microbatches)
        data_axes = check_mesh(fn, mesh, data_axes, axis_name)
        arg_specs = check_arg_specs(fn, arg_specs, mesh)
        for argnum in arg_specs:
            if argnum in (*batch, *keys):
                raise TypeError(
                    f"{fn}: arg_specs names argument {argnum}, which is in batch_argnums or "
                    "key_argnums. It is for unbatched arguments; data_axes shards the batch."
                )
        return cls(
            fn=fn,
            arguments=Arguments(fn, function),
            batch_argnums=batch,
            batch_axes=axes,
            key_argnums=keys,
            k=k,
            microbatch_size=microbatch_size,
            stacked=stacked,
            remainder=remainder,
            weight=weight,
            weight_from_output=weight_from_output,
            accumulator_dtype=accumulator_dtype,
            output_dtype=output_dtype,
            nonfinite=nonfinite,
            num_real_microbatches=num_real_microbatches,
            stats=stats,
            axis_names=check_axis_names(fn, "axis_name", axis_name),
            mesh=mesh,
            data_axes=data_axes,
            arg_specs=arg_specs,
        )

    def roles(self, threads: list[Thread]) -> dict[str, tuple[int, ...]]:
        """Which arguments have a role."""
        return {
            "batch_argnums": self.batch_argnums,
            "key_argnums": self.key_argnums,
            "thread": tuple(thread.argnum for thread in threads),
        }

    @property
    def weighted(self) -> bool:
        return self.weight is not None or self.weight_from_output is not None


def is_text(value: Any, text: str) -> bool:
    return isinstance(value, str) and value == text


def _check_num_real(fn: str, value: Any) -> None:
    if value is None:
        return
    dtype = getattr(value, "dtype", None)
    if isinstance(value, bool) or not (
        isinstance(value, int)
        or (dtype is not None and jnp.issubdtype(dtype, jnp.integer) and value.shape == ())
    ):
        raise TypeError(
            f"{fn}: num_real_microbatches must be an integer scalar (how many microbatches run), "
            f"got {value!r} of type {type(value).__name__}."
        )
