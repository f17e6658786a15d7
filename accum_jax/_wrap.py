"""What a wrapper of an Optax transformation needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer

from ._reduce import wide_dtype


def check_transformation(function: str, tx: Any) -> optax.GradientTransformationExtraArgs:
    """Returns `tx` with support for extra arguments, or a TypeError where it is none."""
    if not isinstance(tx, optax.GradientTransformation):
        remedy = "Pass an optimizer such as optax.adam(1e-3)."
        if hasattr(tx, "gradient_transformation"):
            remedy = f"Pass {type(tx).__name__}(...).gradient_transformation()."
        elif callable(tx):
            remedy = "Call it first: optax.adam(1e-3), not optax.adam."
        raise TypeError(
            f"{function}: tx must be an optax.GradientTransformation, got {tx!r} "
            f"of type {type(tx).__name__}. {remedy}"
        )
    return optax.with_extra_args_support(tx)


def cond(predicate: Any, true_fun: Callable[[], Any], false_fun: Callable[[], Any]) -> Any:
    """`lax.cond` that takes the branch in Python where the predicate is known.

    Outside `jit` the branches are new closures at every call, which `lax.cond` would compile
    again each time.
    """
    if isinstance(predicate, Tracer):
        return lax.cond(predicate, true_fun, false_fun)
    return true_fun() if predicate else false_fun()


def init_inner(tx: optax.GradientTransformation, params: Any) -> Any:
    """Returns the state of `tx` as strongly typed arrays, so that the second call does not retrace.

    A Python number or a weakly typed array would come back from the conditional strongly typed.
    """
    return jax.tree.map(lambda x: _as_dtype(x, jnp.asarray(x).dtype), tx.init(params))


def make_outcomes(
    function: str,
    tx: optax.GradientTransformationExtraArgs,
    grads: Any,
    state: Any,
    params: Any,
    extra: dict[str, Any],
    *,
    fall_back: bool,
) -> tuple[Callable[[Any], tuple[Any, Any]], Callable[[], tuple[Any, Any]]]:
    """Makes the two outcomes of a wrapped `tx`: run it, or leave everything as it is.

    Both give updates of the dtypes that `tx` alone gives for `grads`, and a state of the dtypes
    of `state`, so that they can be the branches of one conditional.

    Args:
      function: name for errors.
      tx: the wrapped transformation; traced once abstractly for its types.
      grads: gradients as they came; only their structure, shapes and dtypes are used.
      state: state of `tx`.
      params: parameters, or None.
      extra: extra arguments for `tx`.
      fall_back: what to do where `tx` cannot run on gradients wider than its own (a conditional
        inside it may fix dtypes): round them once to the dtypes of `grads`, or fail.

    Returns:
      `run(wide_grads) -> (updates, state)` and `hold() -> (zeros, state)`.

    Raises:
      TypeError: when traced, if `tx` changes the structure of its state.
    """

    def update(grads: Any) -> tuple[Any, Any]:
        return tx.update(grads, state, params, **extra)

    own_updates, own_state = jax.eval_shape(update, grads)
    before, after = jax.tree.structure(state), jax.tree.structure(own_state)
    if before != after:
        raise TypeError(
            f"{function}: tx.update changes the structure of its state from {before} to {after}, "
            "which no conditional or loop can carry. If tx contains optax.monitor, use "
            "optax.snapshot instead."
        )

    narrow = False
    if fall_back:
        widened = jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape, wide_dtype(g.dtype)), grads)
        if jax.tree.map(lambda g: g.dtype, grads) != jax.tree.map(lambda g: g.dtype, widened):
            try:
                jax.eval_shape(update, widened)
            except (TypeError, ValueError):
                narrow = True

    def run(wide_grads: Any) -> tuple[Any, Any]:
        if narrow:
            wide_grads = jax.tree.map(_as_type_of, wide_grads, grads)
        updates, new_state = update(wide_grads)
        updates = jax.tree.map(_as_type_of, updates, own_updates)
        return updates, jax.tree.map(_as_type_of, new_state, state)

    def hold() -> tuple[Any, Any]:
        return jax.tree.map(jnp.zeros_like, own_updates), state

    return run, hold


def _as_type_of(x: Any, like: Any) -> jax.Array:
    return _as_dtype(x, like.dtype)


def _as_dtype(x: Any, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jax.dtypes.extended):  # random keys
        return x
    return lax.convert_element_type(x, dtype)
