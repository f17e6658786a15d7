"""One update step per window, for loops that see one microbatch a call."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from ._errors import (
    check_callable,
    check_choice,
    check_dtype_enabled,
    check_inexact_dtype,
    check_int,
    leaf_name,
)
from ._loss_scale import is_dynamic, skipped_update
from ._opt_state import LossScaleState, MultiStepsState, find_state, find_states
from ._opt_state import made_update as _made_update
from ._reduce import all_finite, divide, scale, wide_dtype
from ._split import is_array
from ._trace import SCALARS, numbers_to_arrays
from ._wrap import (
    check_transformation,
    cond,
    init_inner,
    make_outcomes,
)

_K = "microbatches per update"
_POLICIES = ("propagate", "skip_microbatch", "skip_window")


def multi_steps(
    tx: optax.GradientTransformation,
    k: int | Callable[[jax.Array], Any],
    *,
    accumulator_dtype: Any = None,
    nonfinite: Literal["propagate", "skip_microbatch", "skip_window"] = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` once per window of `k` microbatches, on the mean gradient of the window.

    With g_i the gradient and w_i the weight of microbatch i, `tx` sees Σ w_i·g_i / Σ w_i over the
    microbatches that were really in the window, divided once, in the accumulator dtype. In between
    the updates are exact zeros, and `tx` (moments, weight decay, clipping, schedule) does not run.
    With g_i the mean gradient over w_i rows (or tokens) this is the whole batch's gradient.

    Memory: one accumulator of the parameters' size. A micro step that makes no update reads and
    writes gradient and accumulator, and writes the zeros; with a donated state it moves nothing
    of `tx`'s state. The conditional has a price: gradient and updates are whole beside the
    accumulator. For P bytes of parameters that is 1.7 to 3.1 P of temporaries, against 0.7 to 2.1 P
    for `optax.MultiSteps`, which computes `tx` in every micro step. `value_and_grad` needs least.

    Use it as `multi_steps(dynamic_loss_scale(chain(clip, optimizer)), k)`. A transformation put
    outside (`chain(multi_steps(tx, k), decay)`) runs at every micro step.

    Inside `shard_map` either reduce the gradients before each call, or keep local accumulators and
    put one reduction first in `tx`; then, `nonfinite` must be `"propagate"`, `weight` and `flush`
    the same on all devices, or they would disagree on when to reduce.

    Args:
      tx: the transformation to run once per window. It sees gradients in the accumulator dtype,
        float32 at least, and its updates and state keep the dtypes that they have without
        `multi_steps`. Where `tx` cannot run on wider gradients than the loss gives (a conditional
        inside it fixes dtypes, as in `optax.apply_if_finite`), it sees them rounded once.
      k: microbatches per update: a Python int, or a function of the update step (int32 scalar)
        that returns an integer; values below 1 count as 1.
      accumulator_dtype: dtype of Σ w·g; None is float32, or the parameter's where that is wider,
        and the complex counterpart for complex parameters.
      nonfinite: what a NaN or infinity in w·g does. `"propagate"`: it reaches `tx`, and the next
        window starts clean. `"skip_microbatch"`: the microbatch is left out and is no micro step.
        `"skip_window"`: the window ends without an update.

    Returns:
      A transformation. `init(params)` gives a `MultiStepsState` whose accumulators are sharded as
      concrete `params` are (under `jit`, say so with `out_shardings`, as for any optimizer).
      `update(grads, state, params=None, *, weight=1.0, flush=False, **extra)`:

      - weight: scalar, not negative: what this microbatch counts. At 0 it adds nothing, whatever
        its values, and is a micro step. A window of total weight 0 is no update: parameters and
        the state of `tx` stay.
      - flush: bool scalar. True closes the window with this microbatch, however short it is: for
        the end of an epoch. Without it a short window goes on in the next epoch.
      - extra: reaches `tx`, with the values of the window's last call.

    Raises:
      TypeError: when built, if `tx` is not a transformation, `accumulator_dtype` no floating
        dtype, or `k` no integer and gives none; when `init` runs, if a skipping policy would hide
        overflows from a `dynamic_loss_scale` inside; when traced, if gradients do not fit the
        parameters.
      ValueError: when built, if `k` (or the schedule at update 0) is below 1, or the policy is
        unknown; when traced, if `weight` is a negative number or no scalar.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from accum_jax import has_updated, multi_steps
      >>> tx = multi_steps(optax.sgd(1.0), k=3)
      >>> params = jnp.zeros(())
      >>> state = tx.init(params)
      >>> for grads, rows in ((3.0, 2), (6.0, 2), (9.0, 4)):
      ...     updates, state = tx.update(jnp.float32(grads), state, params, weight=rows)
      ...     params = optax.apply_updates(params, updates)
      ...     print(float(params), bool(has_updated(state)))
      0.0 False
      0.0 False
      -6.75 True
    """
    tx = check_transformation("multi_steps", tx)
    k_at = _check_k(k)
    check_choice("multi_steps", "nonfinite", nonfinite, _POLICIES)
    if accumulator_dtype is not None:
        accumulator_dtype = check_inexact_dtype(
            "multi_steps", "accumulator_dtype", accumulator_dtype
        )
        check_dtype_enabled("multi_steps", "accumulator_dtype", accumulator_dtype)

    def init(params: Any) -> MultiStepsState:
        inner = init_inner(tx, params)
        if nonfinite != "propagate":
            _refuse_hidden_overflow(inner, nonfinite)
        # Gradients are with respect to the fast half.
        like = params.fast if isinstance(params, optax.LookaheadParams) else params
        acc = jax.tree.map(lambda p: jnp.zeros_like(p, _acc_dtype(p, accumulator_dtype)), like)
        # One array each: a donated state must not hold a buffer twice.
        return MultiStepsState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=jnp.zeros((), jnp.int32),
            inner_opt_state=inner,
            acc_grads=acc,
            total_weight=jnp.zeros((), _weight_dtype(acc)),
            num_skipped=jnp.zeros((), jnp.int32),
        )

    def update(
        grads: Any,
        state: MultiStepsState,
        params: Any = None,
        *,
        weight: Any = 1.0,
        flush: Any = False,
        **extra: Any,
    ) -> tuple[Any, MultiStepsState]:
        if not isinstance(state, MultiStepsState):
            raise TypeError(
                f"multi_steps: update takes a MultiStepsState, got {type(state).__name__}. Pass "
                "what init or the last update returned; from_optax_multi_steps converts Optax's."
            )
        grads = numbers_to_arrays(grads)
        _check_grads(grads, state.acc_grads)
        weight = _check_weight(weight, state.total_weight.dtype)
        flush = _check_flush(flush)

        counted = jnp.bool_(True)
        if nonfinite == "skip_microbatch":
            counted = all_finite(_weigh(grads, weight, state.acc_grads))
            weight = jnp.where(counted, weight, jnp.zeros_like(weight))
        mini_step = state.mini_step + counted.astype(jnp.int32)
        # At least: a window restored under a smaller k closes at once.
        closes = (mini_step >= jnp.asarray(k_at(state.gradient_step), jnp.int32)) | flush
        # Between windows the state still holds the last one's weight.
        before = jnp.where(state.mini_step == 0, 0, state.total_weight)
        total_weight = before + weight

        run, hold = make_outcomes(
            "multi_steps", tx, grads, state.inner_opt_state, params, extra, fall_back=True
        )

        # The sum is written twice, here for `tx` and below for the state, so that XLA adds to the
        # accumulator in place: as an operand or a result of the conditional it would be copied.
        def accumulated() -> Any:
            terms = _weigh(grads, weight, state.acc_grads)
            return jax.tree.map(
                lambda a, t: a if t is None else (a.astype(t.dtype) + t).astype(a.dtype),
                state.acc_grads,
                terms,
            )

        def step() -> _Outcome:
            mean = jax.tree.map(
                lambda a, g: None if g is None else _mean(a, total_weight), accumulated(), grads
            )
            updates, inner = run(mean)
            made = jnp.logical_not(skipped_update(state.inner_opt_state, inner))
            return _Outcome(updates, inner, closed=jnp.bool_(True), updated=made)

        def step_if_finite() -> _Outcome:
            return cond(
                all_finite(accumulated()),
                step,
                lambda: _Outcome(*hold(), closed=jnp.bool_(True), updated=jnp.bool_(False)),
            )

        outcome = cond(
            closes & (total_weight != 0),
            step_if_finite if nonfinite == "skip_window" else step,
            lambda: _Outcome(*hold(), closed=jnp.bool_(False), updated=jnp.bool_(False)),
        )
        # `closed` rather than the predicate: the addition must come after the conditional, which
        # reads the old accumulator. A window of weight 0 has nothing to clear.
        acc_grads = jax.tree.map(
            lambda a: jnp.where(outcome.closed, jnp.zeros_like(a), a), accumulated()
        )
        num_skipped = state.num_skipped
        if nonfinite == "skip_microbatch":
            num_skipped = num_skipped + jnp.logical_not(counted).astype(jnp.int32)
        elif nonfinite == "skip_window":
            num_skipped = num_skipped + (outcome.closed & ~outcome.updated).astype(jnp.int32)
        new_state = MultiStepsState(
            mini_step=jnp.where(closes, 0, mini_step),
            gradient_step=jnp.where(
                outcome.updated, optax.safe_increment(state.gradient_step), state.gradient_step
            ),
            inner_opt_state=outcome.inner_opt_state,
            acc_grads=acc_grads,
            total_weight=jnp.where(closes & ~outcome.updated, 0, total_weight),
            num_skipped=num_skipped,
        )
        return outcome.updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


class _Outcome(NamedTuple):
    updates: Any
    inner_opt_state: Any
    closed: jax.Array
    updated: jax.Array


def has_updated(opt_state: Any) -> jax.Array:
    """Whether the call that gave `opt_state` made an update.

    False for a fresh state, inside a window, and after a call that emptied or skipped one. A
    wrapper around `multi_steps` that leaves out the whole call (`optax.apply_if_finite`) leaves
    the answer as it was: use `nonfinite=` instead.

    Args:
      opt_state: any nesting of optimizer states with one `MultiStepsState` in it.

    Returns:
      A bool scalar (batched where the state is), traced under `jit`.

    Raises:
      ValueError: when called, if there is no `MultiStepsState` or several.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from accum_jax import has_updated, multi_steps
      >>> tx = optax.chain(multi_steps(optax.sgd(1.0), k=1))
      >>> state = tx.init(jnp.zeros(2))
      >>> _, new_state = tx.update(jnp.ones(2), state)
      >>> bool(has_updated(state)), bool(has_updated(new_state))
      (False, True)
    """
    return _made_update(find_state("has_updated", opt_state, MultiStepsState, "multi_steps"))


def microstep_schedule(schedule: optax.Schedule, k: int) -> optax.Schedule:
    """Turns a schedule written in micro steps into one for an optimizer that counts update steps.

    Update step s uses `schedule(s * k)`: the value at the first micro step of its window.

    Args:
      schedule: function of a micro step.
      k: microbatches per update, a Python int.

    Returns:
      A function of an update step.

    Raises:
      TypeError: when built, if `schedule` is not callable or `k` not an integer.
      ValueError: when built, if `k` is below 1.

    Example:
      >>> import optax
      >>> from accum_jax import microstep_schedule
      >>> schedule = microstep_schedule(optax.linear_schedule(0.0, 1.0, 100), k=10)
      >>> round(float(schedule(3)), 6)
      0.3
    """
    check_callable("microstep_schedule", "schedule", schedule)
    k = check_int("microstep_schedule", "k", k, _K)
    return lambda count: schedule(count * k)


def from_optax_multi_steps(state: optax.MultiStepsState, *, use_grad_mean: bool = True) -> Any:
    """Turns the state of `optax.MultiSteps` into that of `multi_steps`, in mid-window too.

    Optax keeps the mean of the m gradients so far, here it is their sum m·mean with total weight
    m. `inner_opt_state` and the counters are taken as they are; what `should_skip_update_fn` kept
    is dropped. `has_updated` of the result is False until the next update.

    Args:
      state: an `optax.MultiStepsState`.
      use_grad_mean: what `optax.MultiSteps` was built with; the state does not tell. False is the
        sum already. `multi_steps` divides it by the window's weight all the same.

    Returns:
      A `MultiStepsState` for `multi_steps` around the same transformation. Its accumulators keep
      their dtype, which is also that of a new state unless parameters are wider than float32.

    Raises:
      TypeError: when called, if `state` is not an `optax.MultiStepsState`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from accum_jax import from_optax_multi_steps, multi_steps
      >>> old = optax.MultiSteps(optax.sgd(1.0), 3)
      >>> state = old.init(jnp.zeros(()))
      >>> for grads in (1.0, 2.0):
      ...     _, state = old.update(jnp.float32(grads), state)
      >>> new = multi_steps(optax.sgd(1.0), 3)
      >>> updates, _ = new.update(jnp.float32(6.0), from_optax_multi_steps(state))
      >>> float(updates)
      -3.0
    """
    if not isinstance(state, optax.MultiStepsState):
        raise TypeError(
            "from_optax_multi_steps: state must be an optax.MultiStepsState, got "
            f"{type(state).__name__}. Pass the part of a nested state that optax.MultiSteps made."
        )
    mini_step = jnp.asarray(state.mini_step, jnp.int32)

    def to_sum(mean: jax.Array) -> jax.Array:
        return scale(mean.astype(wide_dtype(mean.dtype)), mini_step).astype(mean.dtype)

    return MultiStepsState(
        mini_step=mini_step,
        gradient_step=jnp.asarray(state.gradient_step, jnp.int32),
        inner_opt_state=state.inner_opt_state,
        acc_grads=jax.tree.map(to_sum, state.acc_grads) if use_grad_mean else state.acc_grads,
        total_weight=mini_step.astype(_weight_dtype(state.acc_grads)),
        num_skipped=jnp.zeros((), jnp.int32),
    )


def _weigh(grads: Any, weight: jax.Array, acc_grads: Any) -> Any:
    """w·g in the accumulator's dtype, float32 at least; zeros at weight 0 whatever g holds."""

    def term(a: jax.Array, g: Any) -> jax.Array | None:
        if g is None:
            return None
        product = scale(g.astype(wide_dtype(a.dtype)), weight)
        return jnp.where(weight != 0, product, jnp.zeros_like(product))

    return jax.tree.map(term, acc_grads, grads)


def _mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    return divide(total.astype(wide_dtype(total.dtype)), weight)


def _acc_dtype(param: Any, requested: Any) -> Any:
    dtype = jnp.asarray(param).dtype
    return wide_dtype(dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32, requested)


def _weight_dtype(acc_grads: Any) -> Any:
    """The real dtype of the widest accumulator, float32 at least."""
    wide = [jnp.finfo(wide_dtype(leaf.dtype)).dtype for leaf in jax.tree.leaves(acc_grads)]
    return max([jnp.dtype(jnp.float32), *wide], key=lambda dtype: dtype.itemsize)


def _refuse_hidden_overflow(inner: Any, nonfinite: str) -> None:
    for path, state in find_states(inner, LossScaleState):
        if is_dynamic(state):
            raise TypeError(
                f"multi_steps: nonfinite={nonfinite!r} hides overflows from the dynamic_loss_scale "
                f"in tx ({leaf_name('inner_opt_state', path)}), so its scale would never fall. "
                'Use nonfinite="propagate": dynamic_loss_scale skips the window itself.'
            )


def _check_k(k: Any) -> Callable[[jax.Array], Any]:
    """Returns k as a function of the update step."""
    if not callable(k):
        count = check_int("multi_steps", "k", k, _K)
        return lambda _: count
    step = jax.ShapeDtypeStruct((), jnp.int32)
    try:
        out = jax.eval_shape(k, step)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError) as error:
        raise TypeError(
            "multi_steps: the schedule k needs the value of the update step, which is traced. "
            "Write it with jnp.where or jnp.select."
        ) from error
    except TypeError as error:
        raise TypeError(
            "multi_steps: the schedule k must take the update step and return one integer, but "
            f"failed: {error}."
        ) from error
    dtype, shape = getattr(out, "dtype", None), getattr(out, "shape", None)
    if dtype is None or shape != () or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"multi_steps: the schedule k must return one integer, got "
            f"{dtype or type(out).__name__} of shape {shape}. Round it: .astype(jnp.int32)."
        )
    first: Any = k(jnp.int32(0))
    if not isinstance(first, Tracer) and first < 1:
        raise ValueError(
            f"multi_steps: the schedule k must be at least 1, got {int(first)} at update step 0. "
            "A window has at least one microbatch."
        )
    return k


def _check_weight(weight: Any, dtype: Any) -> jax.Array:
    if isinstance(weight, numbers.Real) and float(weight) < 0:
        raise ValueError(
            f"multi_steps: weight must not be negative, got {weight}. Use 0 to leave the "
            "microbatch out."
        )
    if not (is_array(weight) or isinstance(weight, SCALARS)):
        raise TypeError(
            f"multi_steps: weight must be a real scalar, got {weight!r} of type "
            f"{type(weight).__name__}. Use 1.0, or the number of rows or tokens."
        )
    array = jnp.asarray(weight)
    if array.shape != ():
        raise ValueError(
            f"multi_steps: weight must be one scalar per microbatch, got shape {array.shape}. "
            "Sum it first: weight=mask.sum()."
        )
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"multi_steps: weight must be real, got {array.dtype}.")
    return array.astype(dtype)


def _check_flush(flush: Any) -> jax.Array:
    if isinstance(flush, (bool, np.bool_)) or (
        is_array(flush) and flush.shape == () and flush.dtype == jnp.bool_
    ):
        return jnp.asarray(flush)
    came = f"{flush!r} of type {type(flush).__name__}"
    if is_array(flush) or isinstance(flush, SCALARS):
        came = f"{jnp.result_type(flush)} of shape {jnp.shape(flush)}"
    raise TypeError(
        f"multi_steps: flush must be one bool, got {came}. Use True on the last microbatch of an "
        "epoch."
    )


def _check_grads(grads: Any, acc_grads: Any) -> None:
    expected, treedef = jax.tree_util.tree_flatten_with_path(acc_grads)
    try:
        leaves = treedef.flatten_up_to(grads)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "multi_steps: grads do not have the structure of the params given to init: expected "
            f"{treedef}, got {jax.tree.structure(grads)}. Pass gradients with respect to those."
        ) from error
    for (path, acc), grad in zip(expected, leaves, strict=True):
        if grad is None:
            continue
        name = leaf_name("grads", path)
        if jnp.shape(grad) != acc.shape:
            raise TypeError(
                f"multi_steps: {name} has shape {jnp.shape(grad)}, its parameter {acc.shape}. Pass "
                "gradients with respect to the params given to init."
            )
        if grad.dtype == jax.dtypes.float0:
            raise TypeError(
                f"multi_steps: {name} has no gradient (float0). Put None in its place, or leave "
                "the integer parameter out with optax.masked."
            )
        complex_grad = jnp.issubdtype(grad.dtype, jnp.complexfloating)
        if complex_grad and not jnp.issubdtype(acc.dtype, jnp.complexfloating):
            raise TypeError(
                f"multi_steps: {name} has dtype {grad.dtype}, its accumulator {acc.dtype}. Pass "
                "the gradient of a real parameter as a real array."
            )
