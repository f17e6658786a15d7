"""Loss scaling inside the optimizer: unscale, check, update or skip, adjust."""

from __future__ import annotations

import math
import numbers
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from ._errors import check_int, check_real_scalar
from ._opt_state import LossScaleState, MultiStepsState, find_state, find_states
from ._reduce import all_finite, divide, wide_dtype
from ._trace import numbers_to_arrays
from ._wrap import (
    check_transformation,
    cond,
    init_inner,
    make_outcomes,
)


def dynamic_loss_scale(
    tx: optax.GradientTransformation,
    *,
    init_scale: float = 2.0**15,
    growth_interval: int = 2000,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on unscaled gradients, or skips it where they overflowed; adjusts the scale.

    The loss is multiplied by `loss_scale(opt_state)` before it is differentiated. Given those
    gradients g, one call does, once each and in this order: g / scale in float32; check that all
    of it is finite; run `tx` (clip, optimizer, schedule), or give zeros and leave its state;
    adjust: scale · `backoff_factor` after an overflow, scale · `growth_factor` after
    `growth_interval` updates in a row without one, within [`min_scale`, `max_scale`].

    The order is `multi_steps(dynamic_loss_scale(chain(clip, optimizer)), k)`: one scale for a
    whole window. A window with an overflow is skipped whole, and is no update for `has_updated`.
    Gradients are checked as they arrive: reduced over devices by then, all devices agree.

    Cost: one more read of the gradients; no parameter-sized memory of its own.

    Args:
      tx: the transformation to run on float32 gradients. Its updates and state keep the dtypes
        that they have without a scale.
      init_scale: scale at the start.
      growth_interval: updates, not microbatches, without overflow before the scale grows.
      growth_factor: above 1.
      backoff_factor: between 0 and 1.
      min_scale: floor of the scale.
      max_scale: cap of the scale.

    Returns:
      A transformation with a `LossScaleState`. Extra arguments reach `tx`.

    Raises:
      TypeError: when built, if `tx` is not a transformation or a number has the wrong type; when
        `init` runs, if `tx` contains `multi_steps`, whose windows a skipped call would tear.
      ValueError: when built, if a number is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from accum_jax import dynamic_loss_scale, loss_scale
      >>> tx = dynamic_loss_scale(optax.sgd(0.5), init_scale=1024.0)
      >>> params = jnp.float16(1.0)
      >>> state = tx.init(params)
      >>> def loss(params, scale):
      ...     return (params**2).astype(jnp.float32) * scale
      >>> grads = jax.grad(loss)(params, loss_scale(state))
      >>> updates, state = tx.update(grads, state, params)
      >>> float(grads), float(updates), float(loss_scale(state))
      (2048.0, -1.0, 1024.0)
      >>> updates, state = tx.update(jnp.float16(jnp.inf), state, params)
      >>> float(updates), float(loss_scale(state))
      (0.0, 512.0)
    """
    name = "dynamic_loss_scale"
    tx = check_transformation(name, tx)
    interval = check_int(name, "growth_interval", growth_interval, "updates")
    min_scale = _check_number(name, "min_scale", min_scale, above=0.0)
    max_scale = _check_number(name, "max_scale", max_scale, above=0.0)
    init_scale = _check_number(name, "init_scale", init_scale, above=0.0)
    growth_factor = _check_number(name, "growth_factor", growth_factor, above=1.0)
    backoff_factor = _check_number(name, "backoff_factor", backoff_factor, above=0.0, below=1.0)
    if not min_scale <= init_scale <= max_scale:
        raise ValueError(
            f"{name}: min_scale <= init_scale <= max_scale must hold, got min_scale={min_scale}, "
            f"init_scale={init_scale}, max_scale={max_scale}."
        )

    def init(params: Any) -> LossScaleState:
        inner = init_inner(tx, params)
        if find_states(inner, MultiStepsState):
            raise TypeError(
                f"{name}: tx contains multi_steps, so the scale would move inside a window and a "
                "skipped call, its flush included, would be lost to the window. "
                "Use multi_steps(dynamic_loss_scale(chain(clip, optimizer)), k)."
            )
        return LossScaleState(
            scale=jnp.asarray(init_scale, jnp.float32),
            good_steps=jnp.zeros((), jnp.int32),
            num_skipped=jnp.zeros((), jnp.int32),
            inner_state=inner,
        )

    def update(
        grads: Any, state: LossScaleState, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaleState]:
        assert state.good_steps is not None and state.num_skipped is not None
        grads = numbers_to_arrays(grads)
        run, hold = make_outcomes(
            name, tx, grads, state.inner_state, params, extra, fall_back=False
        )
        finite = all_finite(_unscale(grads, state.scale))
        # Unscaled again inside: an operand of the conditional would be a buffer of its own.
        updates, inner = cond(finite, lambda: run(_unscale(grads, state.scale)), hold)

        good_steps = jnp.where(finite, state.good_steps + 1, 0)
        grows = good_steps >= interval
        grown = jnp.minimum(state.scale * growth_factor, max_scale)
        shrunk = jnp.maximum(state.scale * backoff_factor, min_scale)
        return updates, LossScaleState(
            scale=jnp.where(finite, jnp.where(grows, grown, state.scale), shrunk),
            good_steps=jnp.where(grows, 0, good_steps),
            num_skipped=state.num_skipped + jnp.logical_not(finite).astype(jnp.int32),
            inner_state=inner,
        )

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def static_loss_scale(
    tx: optax.GradientTransformation, scale: float | jax.Array
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on gradients divided once, in float32, by a constant `scale`.

    It neither checks nor skips: what overflowed reaches `tx`. Inside or outside `multi_steps` it
    gives the same.

    Args:
      tx: the transformation to run on float32 gradients. Its updates and state keep the dtypes
        that they have without a scale.
      scale: what the loss is multiplied by, a positive scalar.

    Returns:
      A transformation with a `LossScaleState` whose counters are None. Extra arguments reach `tx`.

    Raises:
      TypeError: when built, if `tx` is not a transformation or `scale` not a number.
      ValueError: when built, if `scale` is a number that is not positive and finite.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from accum_jax import static_loss_scale
      >>> tx = static_loss_scale(optax.sgd(1.0), scale=1024.0)
      >>> state = tx.init(jnp.zeros(()))
      >>> updates, _ = tx.update(jnp.float32(4096.0), state)
      >>> float(updates)
      -4.0
    """
    name = "static_loss_scale"
    tx = check_transformation(name, tx)
    check_real_scalar(name, "scale", scale)
    if not isinstance(scale, Tracer):
        scale = _check_number(name, "scale", float(scale), above=0.0)

    def init(params: Any) -> LossScaleState:
        return LossScaleState(jnp.asarray(scale, jnp.float32), None, None, init_inner(tx, params))

    def update(
        grads: Any, state: LossScaleState, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaleState]:
        grads = numbers_to_arrays(grads)
        run, _ = make_outcomes(name, tx, grads, state.inner_state, params, extra, fall_back=False)
        updates, inner = run(_unscale(grads, state.scale))
        return updates, state._replace(inner_state=inner)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def loss_scale(opt_state: Any) -> jax.Array:
    """Returns the scale to multiply the next loss by.

    Constant over a window where the scale is inside `multi_steps`.

    Args:
      opt_state: any nesting of optimizer states with one `LossScaleState` in it.

    Returns:
      A float32 scalar, traced under `jit`.

    Raises:
      ValueError: when called, if there is no `LossScaleState` or several.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from accum_jax import dynamic_loss_scale, loss_scale, multi_steps
      >>> tx = multi_steps(dynamic_loss_scale(optax.adam(1e-3)), k=4)
      >>> float(loss_scale(tx.init(jnp.zeros(2))))
      32768.0
    """
    made_by = "dynamic_loss_scale or static_loss_scale"
    return find_state("loss_scale", opt_state, LossScaleState, made_by).scale


def is_dynamic(state: LossScaleState) -> bool:
    """Whether `state` is of `dynamic_loss_scale`."""
    return state.num_skipped is not None


def skipped_update(before: Any, after: Any) -> jax.Array:
    """Whether a `dynamic_loss_scale` that gave the updates skipped them.

    Of a chain the last transformation decides: what follows a skip may still change parameters.
    Wrappers around one transformation (masked, inject_hyperparams) are looked through.
    """
    while not isinstance(before, LossScaleState):
        if type(before) is tuple and before:
            before, after = before[-1], after[-1]
        elif isinstance(before, OrderedDict) and before:  # optax.named_chain
            before, after = list(before.values())[-1], list(after.values())[-1]
        elif (inner := getattr(before, "inner_state", None)) is not None:
            before, after = inner, after.inner_state
        else:
            break
    if isinstance(before, LossScaleState) and is_dynamic(before):
        return after.num_skipped != before.num_skipped
    return jnp.bool_(False)


def _unscale(grads: Any, scale: jax.Array) -> Any:
    return jax.tree.map(lambda g: divide(g.astype(wide_dtype(g.dtype)), scale), grads)


def _check_number(
    function: str, name: str, value: Any, *, above: float, below: float = math.inf
) -> float:
    """Returns `value` as a float that is strictly between the bounds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{function}: {name} must be a number, got {value!r} of type {type(value).__name__}."
        )
    value = float(value)
    if not above < value < below:
        bounds = f"above {above:g}" + ("" if math.isinf(below) else f" and below {below:g}")
        raise ValueError(f"{function}: {name} must be finite, {bounds}, got {value}.")
    return value
