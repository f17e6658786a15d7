"""Drives an optimizer one microbatch a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any


def drive(
    tx: optax.GradientTransformation,
    grads: Sequence[Any],
    params: PyTree = 0.0,
    *,
    run: Callable[..., Any] = jax.jit,
    calls: Sequence[dict[str, Any]] | None = None,
    state: PyTree = None,
) -> tuple[list[PyTree], PyTree]:
    """Parameters after each call, as float lists, and the last state.

    `calls` holds the keyword arguments of each call. Leaves become float32 arrays.
    """
    params = jax.tree.map(jnp.float32, params)
    state = tx.init(params) if state is None else state
    update = run(tx.update)
    seen = []
    for index, gradient in enumerate(grads):
        gradient = jax.tree.map(jnp.float32, gradient)
        updates, state = update(gradient, state, params, **(calls[index] if calls else {}))
        params = optax.apply_updates(params, updates)
        seen.append(jax.tree.map(lambda p: p.tolist(), params))
    return seen, state


def flush_at(*indices: int, of: int) -> list[dict[str, Any]]:
    """Keyword arguments of `of` calls, of which those at `indices` flush."""
    return [{"flush": jnp.bool_(i in indices)} for i in range(of)]
