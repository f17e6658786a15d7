"""The states of the optimizer wrappers, found anywhere in a nested optimizer state."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from ._errors import leaf_name


class MultiStepsState(NamedTuple):
    """State of `multi_steps`, all that is needed to go on from any micro step.

    It does not hold k: a state saved in the middle of a window and restored under a smaller k
    closes that window at the next call, with the weight that is really in it. To go on without
    accumulation, take `inner_opt_state`.

    Attributes:
      mini_step: int32 scalar, microbatches counted in the open window; 0 between windows.
      gradient_step: int32 scalar, updates made; a scheduled k is a function of it.
      inner_opt_state: state of the wrapped transformation.
      acc_grads: as the gradients, in the accumulator dtype: Σ w·g of the open window.
      total_weight: float32 (or wider) scalar: Σ w of the open window; between windows that of the
        update just made, or 0 where the last call emptied or skipped a window.
      num_skipped: int32 scalar, non-finite microbatches or windows left out so far, by policy.
    """

    mini_step: jax.Array
    gradient_step: jax.Array
    inner_opt_state: Any
    acc_grads: Any
    total_weight: jax.Array
    num_skipped: jax.Array


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale` or `static_loss_scale`.

    Attributes:
      scale: float32 scalar that the next loss is to be multiplied by.
      good_steps: int32 scalar, updates since the scale last changed; None where it is static.
      num_skipped: int32 scalar, updates skipped so far; None where the scale is static.
      inner_state: state of the wrapped transformation.
    """

    scale: jax.Array
    good_steps: jax.Array | None
    num_skipped: jax.Array | None
    inner_state: Any


_State = TypeVar("_State", MultiStepsState, LossScaleState, optax.SnapshotState)


def find_states(opt_state: Any, kind: type[_State]) -> list[tuple[tuple[Any, ...], _State]]:
    """Returns path and state of every `kind` in `opt_state`, also of one inside another."""
    found = []
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=lambda x: isinstance(x, kind))
    for path, leaf in leaves:
        if isinstance(leaf, kind):
            found.append((path, _unwrap(leaf)))
            for name in leaf._fields:
                inside = find_states(getattr(leaf, name), kind)
                here = (*path, jax.tree_util.GetAttrKey(name))
                found += [((*here, *rest), state) for rest, state in inside]
    return found


def _unwrap(state: Any) -> Any:
    """A state of plain arrays: nnx.Optimizer holds each in a Variable, which compares otherwise."""

    def is_wrapped(x):
        return hasattr(x, "__jax_array__")

    return jax.tree.map(lambda x: jnp.asarray(x) if is_wrapped(x) else x, state, is_leaf=is_wrapped)


def find_state(function: str, opt_state: Any, kind: type[_State], made_by: str) -> _State:
    """Returns the one `kind` in `opt_state`; none or several is a ValueError that says which."""
    found = find_states(opt_state, kind)
    if len(found) == 1:
        return found[0][1]
    if not found:
        raise ValueError(
            f"{function}: no {kind.__name__} in opt_state, of type {type(opt_state).__name__}. "
            f"Pass the state of an optimizer that contains {made_by}."
        )
    paths = " and ".join(leaf_name("opt_state", path) for path, _ in found)
    raise ValueError(
        f"{function}: opt_state holds {len(found)} of {kind.__name__}: {paths}. "
        "Pass the one that is meant."
    )


def telemetry(opt_state: Any) -> dict[str, jax.Array]:
    """Collects what a log needs from a nested optimizer state: a flat dict of scalars.

    ======================================  =====================================================
    `multi_steps/mini_step`                 position in the window
    `multi_steps/gradient_step`             updates made
    `multi_steps/total_weight`              denominator so far, or of the update just made
    `multi_steps/num_skipped`               microbatches or windows skipped, by policy
    `multi_steps/has_updated`               whether the last call made an update
    `loss_scale/scale`                      loss scale for the next window
    `loss_scale/good_steps`                 updates since the scale last changed
    `loss_scale/num_skipped`                updates skipped for an overflow
    `snapshot/NAME`                         each scalar taken by `optax.snapshot(NAME, ...)`
    ======================================  =====================================================

    Norms before and after clipping come from `optax.snapshot` around the clip, inside the window,
    so that they are of the mean, unscaled gradient. Where a wrapper occurs several times, its
    path in `opt_state` stands between its name and the slash. Reads only: no arithmetic on
    parameter-sized arrays.

    Args:
      opt_state: any nesting of optimizer states, or a structure that holds one.

    Returns:
      A dict of scalar arrays; empty where there is nothing to report. Works under `jit`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from accum_jax import multi_steps, telemetry
      >>> clip = optax.chain(
      ...     optax.snapshot("norm", optax.tree.norm),
      ...     optax.clip_by_global_norm(1.0),
      ...     optax.snapshot("clipped_norm", optax.tree.norm),
      ... )
      >>> tx = multi_steps(optax.chain(clip, optax.sgd(0.1)), k=2)
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> for grads in (jnp.array([6.0, 0.0]), jnp.array([0.0, 8.0])):
      ...     _, state = tx.update(grads, state, params)
      >>> log = telemetry(state)
      >>> float(log["snapshot/norm"]), float(log["snapshot/clipped_norm"])
      (5.0, 1.0)
      >>> int(log["multi_steps/gradient_step"]), float(log["multi_steps/total_weight"])
      (1, 2.0)
    """
    log = {}
    for name, state in _labelled("multi_steps", find_states(opt_state, MultiStepsState)):
        for field in ("mini_step", "gradient_step", "total_weight", "num_skipped"):
            log[f"{name}/{field}"] = getattr(state, field)
        log[f"{name}/has_updated"] = made_update(state)
    for name, state in _labelled("loss_scale", find_states(opt_state, LossScaleState)):
        for field in ("scale", "good_steps", "num_skipped"):
            if getattr(state, field) is not None:
                log[f"{name}/{field}"] = getattr(state, field)
    taken: dict[str, list[Any]] = {}
    for path, state in find_states(opt_state, optax.SnapshotState):
        for key, value in state.measurement.items():
            if jnp.ndim(value) == 0:
                taken.setdefault(key, []).append((path, value))
    for key, found in taken.items():
        log |= {f"{name}/{key}": value for name, value in _labelled("snapshot", found)}
    return log


def _labelled(name: str, found: list[tuple[Any, Any]]) -> list[tuple[str, Any]]:
    if len(found) == 1:
        return [(name, found[0][1])]
    return [(leaf_name(name, path), state) for path, state in found]


def made_update(state: MultiStepsState) -> jax.Array:
    """Whether the call that gave this state made an update."""
    # A window that closed without an update leaves total weight 0; NaN is not 0.
    return jnp.logical_and(state.mini_step == 0, state.total_weight != 0)
