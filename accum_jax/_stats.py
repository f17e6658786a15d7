"""What one window measured of itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path

from ._errors import leaf_name
from ._reduce import wide_dtype


class AccumulationStats(NamedTuple):
    """Counts and norms of one window; scalars.

    The gradient noise scale is that of McCandlish et al., "An Empirical Model of Large-Batch
    Training" (2018), appendix A: with G_i the mean gradient of microbatch i over b_i rows, G the
    accumulated one and w_i the weights, E|G_i|² = |g|² + tr(Σ) / b_i and
    E|G|² = |g|² + tr(Σ) Σ(w_i / Σw)² / b_i; solved for tr(Σ) / |g|². One window's estimate is
    noisy and may be negative: average `global_norm`² and `mean_microbatch_square_norm` over
    windows before you divide.

    Attributes:
      num_microbatches: int32, microbatches that ran.
      num_examples: int32, rows in them.
      total_weight: float32, sum of the weights that count (rows where there are no weights).
      num_nonfinite: int32, microbatches with a NaN or infinity in their weight or in a leaf reduced
        by mean, sum or sum_over_weight. Those left out by `nonfinite="skip"` are in the first two
        counts and not in `total_weight`.
      global_norm: float32, L2 norm of the accumulated gradient; None without `stats="norms"`.
      mean_microbatch_square_norm: float32, mean of |G_i|² over the microbatches that count; None
        without `stats="norms"`.
      noise_scale: float32, in examples; NaN where fewer than two microbatches count; None without
        `stats="norms"`.
    """

    num_microbatches: Any
    num_examples: Any
    total_weight: Any
    num_nonfinite: Any
    global_norm: Any = None
    mean_microbatch_square_norm: Any = None
    noise_scale: Any = None


class Squares(NamedTuple):
    """Running sums over the microbatches that count, from which the norms are made."""

    count: Any  # microbatches
    square_norm: Any  # sum of |G_i|²
    inverse_rows: Any  # sum of 1 / b_i
    weight: Any  # sum of w_i
    square_weight: Any  # sum of w_i² / b_i

    @classmethod
    def zeros(cls) -> Squares:
        return cls(*[jnp.zeros((), jnp.float32)] * 5)

    def add(self, gradient: Any, weight: Any, rows: int, kept: Any) -> Squares:
        """Adds a microbatch's mean gradient; `weight` is a float32 scalar or number."""
        weight = jnp.asarray(weight).astype(jnp.float32)
        terms = (1.0, square_norm(gradient), 1 / rows, weight, weight * weight / rows)
        new = Squares(*(total + term for total, term in zip(self, terms, strict=True)))
        if kept is None:
            return new
        return Squares(*(jnp.where(kept, n, old) for n, old in zip(new, self, strict=True)))


def square_norm(tree: Any) -> jax.Array:
    """Σ|x|² over all elements of all arrays, as float32."""
    wide = [x.astype(wide_dtype(x.dtype)) for x in jax.tree.leaves(tree) if is_inexact(x)]
    squares = [optax.tree.norm(x, squared=True).astype(jnp.float32) for x in wide]
    return sum(squares, jnp.zeros((), jnp.float32))


def norms(squares: Squares, whole: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`mean_microbatch_square_norm` and `noise_scale`; `whole` is |G|² of the mean gradient."""
    micro = squares.square_norm / jnp.maximum(squares.count, 1)
    rows_micro = squares.inverse_rows / jnp.maximum(squares.count, 1)
    rows_all = squares.square_weight / jnp.where(squares.weight == 0, 1, squares.weight) ** 2
    trace = (micro - whole) / (rows_micro - rows_all)
    noise_scale = trace / (whole - rows_all * trace)
    return micro, jnp.where(squares.count > 1, noise_scale, jnp.nan)


def parts_like(params: Any, output: Any) -> list[tuple[str, list[int]]]:
    """The parts of `output` with the structure and shapes of `params`: path and leaf numbers.

    Only float and complex leaves are compared, so a gradient may have None or float0 elsewhere.
    """
    wanted = [(path, x.shape) for path, x in tree_leaves_with_path(params) if is_inexact(x)]
    parts: dict[Any, list[tuple[int, Any]]] = {}
    for number, (path, x) in enumerate(tree_leaves_with_path(output)):
        if is_inexact(x):
            for depth in range(len(path) + 1):
                part = parts.setdefault(path[:depth], [])
                part.append((number, (path[depth:], x.shape)))
    return [
        (leaf_name("output", path), [number for number, _ in part])
        for path, part in parts.items()
        if [leaf for _, leaf in part] == wanted
    ]


def find_gradient(fn: str, option: str, name: str, params: Any, output: Any) -> list[int]:
    """Which leaves of `output` are the gradient of `params`.

    Raises:
      ValueError: when traced: no part fits, or several do.
    """
    found = parts_like(params, output)
    if len(found) != 1:
        fits = f"several fit: {', '.join(path for path, _ in found)}" if found else "no part fits"
        raise ValueError(
            f"{fn}: {option} needs the one part of the output with the structure and shapes of "
            f"{name}, the gradient, but {fits}. Use accum_jax.value_and_grad, which knows it, or "
            "leave it out."
        )
    return found[0][1]


def is_inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
