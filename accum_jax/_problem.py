"""What a training problem is to the command line: a loss, parameters and one effective batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax


@dataclass(frozen=True)
class Problem:
    """A loss, its parameters and one effective batch, as a factory returns them.

    Attributes:
      loss_fn: `loss_fn(params, batch)`, or `loss_fn(params, batch, key)` where there is a key;
        a real scalar, or a pair of one and auxiliary output where `has_aux`.
      params: pytree of float arrays; for a plan, `jax.ShapeDtypeStruct`s will do.
      batch: the same of arrays, the rows of the effective batch on axis 0 of every leaf.
      tx: the optimizer; None where only the loss is asked about.
      weight: `weight(batch)`, what the loss is a mean over, a non-negative scalar; None for rows.
      key: a `jax.random` key, or None.
      has_aux: whether `loss_fn` returns auxiliary output too.

    Example:
      >>> import jax.numpy as jnp
      >>> from accum_jax import Problem
      >>> def problem():
      ...     return Problem(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones(3), jnp.eye(8, 3))
      >>> problem().has_aux
      False
    """

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    tx: optax.GradientTransformation | None = None
    weight: Callable[[Any], Any] | None = None
    key: jax.Array | None = None
    has_aux: bool = False
