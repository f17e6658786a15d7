"""Accumulation as a function transformation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    get_type_hints,
    overload,
)

import jax

from ._errors import check_argnums, check_choice, check_keywords, check_real_scalar
from ._options import Options
from ._reduce import check_reduce
from ._stats import AccumulationStats
from ._trace import compile_once
from ._window import Gradient, run_window

_Params = TypeVar("_Params")
_Rest = ParamSpec("_Rest")
_Output = TypeVar("_Output")
_Aux = TypeVar("_Aux")


class _Shared(TypedDict, total=False):
    """What every accumulating function takes; `accumulate` says what it means."""

    microbatch_size: int | None
    batch_argnums: int | tuple[int, ...]
    batch_axes: Any
    key_argnums: int | tuple[int, ...]
    weight: Callable[..., Any] | None
    weight_from_output: Callable[[Any], Any] | None
    accumulator_dtype: Any
    output_dtype: Any
    stacked: bool
    remainder: Literal["error", "tail"]
    nonfinite: Literal["propagate", "skip"]
    num_real_microbatches: Any
    axis_name: Any
    mesh: Any
    data_axes: Any
    arg_specs: dict[int, Any] | None


class _Reduced(_Shared, total=False):
    """The keywords of `accumulate` but for `stats`, which changes the result's type."""

    reduce: Any


class UnmeasuredLossKeywords(_Shared, total=False):
    """What functions of a loss take but for `stats`; `value_and_grad` says what it means."""

    reduction: Literal["mean", "sum", "sum_over_weight"]
    aux: Any
    loss_scale: Any
    in_place: bool | None


class LossKeywords(UnmeasuredLossKeywords, total=False):
    """What `value_and_grad` and `accumulated_loss` share."""

    stats: Literal["counts", "norms"] | None


class _Unmeasured(UnmeasuredLossKeywords, total=False):
    """The keywords of `value_and_grad` but for `stats`."""

    k: int | None
    allow_int: bool


class Keywords(_Unmeasured, LossKeywords, total=False):
    """The keywords of `value_and_grad`."""


@overload
def accumulate(
    grad_fn: Callable[_Rest, _Output],
    k: int | None = None,
    *,
    stats: None = None,
    **keywords: Unpack[_Reduced],
) -> Callable[_Rest, _Output]: ...


@overload
def accumulate(
    grad_fn: Callable[_Rest, _Output],
    k: int | None = None,
    *,
    stats: Literal["counts", "norms"],
    **keywords: Unpack[_Reduced],
) -> Callable[_Rest, tuple[_Output, AccumulationStats]]: ...


def accumulate(
    grad_fn: Callable[..., Any],
    k: int | None = None,
    *,
    microbatch_size: int | None = None,
    batch_argnums: int | tuple[int, ...] = 1,
    batch_axes: Any = 0,
    key_argnums: int | tuple[int, ...] = (),
    reduce: Any = "mean",
    weight: Callable[..., Any] | None = None,
    weight_from_output: Callable[[Any], Any] | None = None,
    accumulator_dtype: Any = None,
    output_dtype: Any = None,
    stacked: bool = False,
    remainder: Literal["error", "tail"] = "error",
    nonfinite: Literal["propagate", "skip"] = "propagate",
    num_real_microbatches: Any = None,
    stats: Literal["counts", "norms"] | None = None,
    axis_name: Any = None,
    mesh: Any = None,
    data_axes: Any = "data",
    arg_specs: dict[int, Any] | None = None,
) -> Callable[..., Any]:
    """Makes a function of a batch run as `k` microbatches in one loop.

    `grad_fn(params, batch, ...)` is any pure function whose result over a batch is made of its
    results over parts of the batch: what `jax.grad` or `jax.value_and_grad` return, a gradient with
    auxiliary output, an evaluation. With x_i its output on microbatch i and w_i the weight of that
    microbatch (rows by default), `"mean"` gives Σ w_i·x_i / Σ w_i, divided once after the loop.
    This is the whole batch's result where the loss is a mean over what the weights count, and rows
    do not act on one another (batch norm and in-batch negatives do).

    Microbatch i holds rows i, i + k, i + 2k, ... of every leaf, so that a batch that is sharded
    over devices stays where it is.

    Cost: one forward and backward pass over the rows in all, the activations of one microbatch, one
    accumulator of the size of each reduced output, and one gradient beside it
    (`accum_jax.value_and_grad` does without the second). The program's size does not depend on k.

    Args:
      grad_fn: function of positional arguments, traced once. Keyword arguments and leaves that are
        no arrays are handed to it as they are.
      k: microbatches per update, a Python int. Give it or `microbatch_size`.
      microbatch_size: rows of a microbatch, a Python int.
      batch_argnums: positions of the arguments that hold the batch.
      batch_axes: the batch's axis in them, as `jax.vmap`'s `in_axes`: an int, or a pytree prefix of
        the argument (of the tuple of arguments where `batch_argnums` is a tuple); None for what is
        passed whole; negative axes count from the end.
      key_argnums: positions of arguments that are random keys, typed or raw, or pytrees of keys.
        Microbatch i gets `jax.random.fold_in(key, i)`.
      reduce: how outputs are put together, a pytree prefix of the output of

        - `"mean"`, `"sum"` (Σ x) and `"sum_over_weight"` (Σ x / Σ w, for losses that are sums);
        - `"concat"`: rows on axis 0, in the caller's order;
        - `"stack"`: a new axis 0 of size k;
        - `"last"`, `"max"`, `"min"`;
        - `thread(argnum)`: state that the next microbatch gets as argument `argnum`;
        - an object with `init(struct)`, `update(carry, value, index)` and `finalize(carry)`, such
          as `optax.microbatching.Accumulator`, that gets its whole part of the output, of every
          microbatch.

        None, float0 and leaves that are no numbers pass through.
      weight: `weight(*batch_args)` of one microbatch, a real, non-negative scalar: the number of
        tokens, say. A microbatch of weight 0 adds nothing, whatever its values; a total weight of 0
        gives zeros.
      weight_from_output: the same, of `grad_fn`'s output for one microbatch.
      accumulator_dtype: float dtype of the sums; None is float32, or the leaf's own where that is
        wider, and its complex counterpart for complex leaves. Integers and booleans are summed as
        integers; sums of booleans, and of integers narrower than 32 bits, come out with 32.
      output_dtype: None gives results in the dtypes of `grad_fn`'s, `"accumulator"` hands on the
        sums unrounded (scaled float16 gradients must not be rounded before they are unscaled), a
        dtype is taken as it is. It speaks of float sums and means; other results keep their dtype.
      stacked: True for a batch whose leaves are [k, m, ...] already; microbatch i is `leaf[i]`.
        `batch_axes` then speaks of `leaf[i]`.
      remainder: what happens where k does not divide the batch of B rows. `"error"` says which k
        do. `"tail"`: microbatches have m = ceil(B / k) rows (or `microbatch_size`), and the last
        B mod m rows run as a smaller one after the loop, at most k in all; exact.
      nonfinite: `"propagate"`, or `"skip"`: a microbatch with a NaN or infinity in a leaf reduced
        by mean, sum or sum_over_weight (or in its weight) is left out, and means are over the
        others.
      num_real_microbatches: integer scalar, may be traced: only the first so many run and count.
        Another value does not compile again. Not differentiable.
      stats: `"counts"` or `"norms"`: the result is then `(out, AccumulationStats)`. `"norms"`
        measures the part of the output that has the structure and shapes of argument 0.
      axis_name: one mapped axis or several, for callers inside `jax.shard_map`, `jax.vmap` or
        `jax.pmap`, over which the rows (or the tokens of a row) are spread. Numerators and total
        weights are summed over it once, after the loop, in the accumulator's dtype and never
        narrower than float32; max and min are taken over all devices, concat keeps each device its
        rows, thread averages float state by weight (other state must agree), last and stack are
        refused on more than one device. Keys become `fold_in(fold_in(key, i), device index)`.
        `k` and `microbatch_size` are per device.
      mesh: a mesh, for callers under plain `jax.jit`: the function maps itself over `data_axes`, to
        the same effect, and leaves the other axes to the compiler. `grad_fn` then sees one device's
        rows: batch statistics and in-batch losses become per device. An ambient mesh is not read.
      data_axes: the mesh axis, or axes, over which the batch is spread.
      arg_specs: how unbatched arguments are sharded, by position: `{0: specs}`, specs a pytree
        prefix of the argument of PartitionSpecs (or NamedShardings). Gradient and accumulator of
        argument 0 (in `value_and_grad`, of each differentiated argument) are sharded like it. Axes
        that are no data axes are constraints for the compiler, also without `mesh`: it gathers
        layer by layer, with the least memory. An axis of `data_axes` is mapped by hand: the
        argument is gathered once before the loop and its gradient reduce-scattered once after it,
        with the least traffic and the whole argument in memory.

    Returns:
      A function of the same arguments. Structure, shapes and dtypes of its result are those of
      `grad_fn` on the whole batch, for mean, sum and concat. It runs under `jax.jit`, `jax.vmap`
      and differentiation; called outside of them, it is compiled once for each structure and types
      of its arguments and each value of those that are no arrays, and what `grad_fn` closes over is
      read then, as under `jax.jit`.

    Raises:
      TypeError: when built: an argument of the wrong type, both or neither of `k` and
        `microbatch_size`, an argument with two roles. When traced: a key that is none, a dtype that
        its reducer cannot take.
      ValueError: when built: a number out of range, an unknown name. When traced: no rows, leaves
        that disagree about their number, a k that does not fit, `reduce` or `batch_axes` that fit
        not, a weight that is no scalar, an output whose rows would be mixed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from accum_jax import accumulate
      >>> def loss(w, batch):
      ...     return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
      >>> batch = {"x": jnp.eye(8, 2), "y": jnp.arange(8.0)}
      >>> grad_fn = jax.value_and_grad(loss)
      >>> print(grad_fn(jnp.ones(2), batch))
      (Array(17.5, dtype=float32), Array([0.25, 0.  ], dtype=float32))
      >>> print(accumulate(grad_fn, k=4)(jnp.ones(2), batch))
      (Array(17.5, dtype=float32), Array([0.25, 0.  ], dtype=float32))
    """
    options = Options.check(
        "accumulate",
        grad_fn,
        k=k,
        microbatch_size=microbatch_size,
        batch_argnums=batch_argnums,
        batch_axes=batch_axes,
        key_argnums=key_argnums,
        weight=weight,
        weight_from_output=weight_from_output,
        accumulator_dtype=accumulator_dtype,
        output_dtype=output_dtype,
        stacked=stacked,
        remainder=remainder,
        nonfinite=nonfinite,
        num_real_microbatches=num_real_microbatches,
        stats=stats,
        axis_name=axis_name,
        mesh=mesh,
        data_axes=data_axes,
        arg_specs=arg_specs,
    )
    threads = check_reduce("accumulate", "reduce", reduce)
    options.arguments.roles(options.roles(threads))

    def run(args, kwargs):
        output, _, stats = run_window(options, reduce, grad_fn, None, args, kwargs)
        return output if stats is None else (output, stats)

    return compile_once(grad_fn, run)


@overload
def value_and_grad(
    loss_fn: Callable[Concatenate[_Params, _Rest], Any],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    **keywords: Unpack[_Unmeasured],
) -> Callable[Concatenate[_Params, _Rest], tuple[jax.Array, _Params]]: ...


@overload
def value_and_grad(
    loss_fn: Callable[Concatenate[_Params, _Rest], tuple[Any, _Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    **keywords: Unpack[_Unmeasured],
) -> Callable[Concatenate[_Params, _Rest], tuple[tuple[jax.Array, _Aux], _Params]]: ...


@overload
def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    **keywords: Unpack[Keywords],
) -> Callable[..., Any]: ...


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    k: int | None = None,
    reduction: Literal["mean", "sum", "sum_over_weight"] = "mean",
    aux: Any = "mean",
    loss_scale: Any = None,
    in_place: bool | None = None,
    allow_int: bool = False,
    microbatch_size: int | None = None,
    batch_argnums: int | tuple[int, ...] = 1,
    batch_axes: Any = 0,
    key_argnums: int | tuple[int, ...] = (),
    weight: Callable[..., Any] | None = None,
    weight_from_output: Callable[[Any], Any] | None = None,
    accumulator_dtype: Any = None,
    output_dtype: Any = None,
    stacked: bool = False,
    remainder: Literal["error", "tail"] = "error",
    nonfinite: Literal["propagate", "skip"] = "propagate",
    num_real_microbatches: Any = None,
    stats: Literal["counts", "norms"] | None = None,
    axis_name: Any = None,
    mesh: Any = None,
    data_axes: Any = "data",
    arg_specs: dict[int, Any] | None = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` run as `k` microbatches in one loop, added up in place.

    With L_i the loss of microbatch i and w_i its weight (rows by default), `reduction="mean"` gives
    Σ w_i·L_i / Σ w_i and its gradient, which is the whole batch's where the loss is a mean over
    what the weights count. Weights and `loss_scale` enter through the cotangent of the loss; the
    gradient is divided once, after the loop.

    Memory: knowing the loss, the backward pass adds each layer's gradient to the accumulator as
    soon as it is there, so the accumulator is the only memory of the gradients' size. A loop around
    `jax.grad` holds a finished gradient beside it, as large as the parameters where layers run
    under `lax.scan`. Weights keep a conditional around the backward pass: for a transformer with P
    bytes of parameters, 1.06 P without and 1.09 P with them on CPU, 1.16 P and 1.50 P on TPU v5e,
    against 2.0 P and 2.2 P for the loop. In mixed precision the gain needs float32 parameters that
    are cast inside each layer (inside the scanned body); a cast before the loss gains nothing, and
    parameters in bfloat16 run the loop, with their sums in float32.

    Args:
      loss_fn: `loss_fn(params, batch, ...)` returns a real scalar, or `(scalar, aux)`.
      argnums: as `jax.value_and_grad`'s.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      k: microbatches per update, a Python int. Give it or `microbatch_size`.
      reduction: reducer of value and gradient: `"mean"`, `"sum"`, or `"sum_over_weight"` for losses
        that are sums over what the weights count.
      aux: reducers of the auxiliary output, a pytree prefix as `accumulate`'s `reduce`.
      loss_scale: real scalar, may be traced, by which the gradient is multiplied inside the
        backward pass so that float16 gradients do not vanish. The gradient comes back scaled, the
        value does not. `static_loss_scale` and `dynamic_loss_scale` unscale; hand them the sums
        with `output_dtype="accumulator"`, which a float16 gradient could not hold.
      in_place: None adds in place wherever that is exact and possible, and else runs the loop
        around the finished gradient. It is not possible under `jax.vmap` or differentiation, for
        complex parameters, where the accumulator's dtype is not the parameter's, with
        `nonfinite="skip"` or `stats` (both look at each gradient), where a loss narrower than
        float32 would round its weights, and with a jax that cannot. True raises where it cannot;
        with `stats="counts"` it sees non-finite losses and not non-finite gradients. False runs the
        loop. What is done to a jitted function afterwards cannot be seen from inside: mapping or
        differentiating it may need False, with weights above all, and jax then says that it does
        not support a state effect there. Weights and `loss_scale` multiply the cotangent, so a
        backward rule that is not linear (gradient clipping inside the loss) needs False too.
      allow_int: as `jax.value_and_grad`'s.
      microbatch_size: as in `accumulate`, like all that follow.
      batch_argnums: see `accumulate`.
      batch_axes: see `accumulate`.
      key_argnums: see `accumulate`.
      weight: see `accumulate`.
      weight_from_output: of what `loss_fn` returns.
      accumulator_dtype: see `accumulate`.
      output_dtype: see `accumulate`.
      stacked: see `accumulate`.
      remainder: see `accumulate`.
      nonfinite: see `accumulate`. `"skip"` is refused together with `loss_scale`: the scale must
        see the overflow, so let `dynamic_loss_scale` skip the update.
      num_real_microbatches: see `accumulate`.
      stats: see `accumulate`. Of unscaled gradients.
      axis_name: see `accumulate`.
      mesh: see `accumulate`.
      data_axes: see `accumulate`.
      arg_specs: see `accumulate`.

    Returns:
      A function of the same arguments that returns what `jax.value_and_grad(loss_fn, argnums,
      has_aux)` would: `(value, grads)` or `((value, aux), grads)`; with `stats`, a pair of that and
      `AccumulationStats`.

    Raises:
      TypeError: as `accumulate`; when traced: a loss that is no real scalar, a differentiated leaf
        that is no float (integers: `allow_int`).
      ValueError: as `accumulate`; when traced: `in_place=True` with an option that excludes it.

    Example:
      >>> import jax.numpy as jnp
      >>> import accum_jax
      >>> def loss(w, batch):
      ...     return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
      >>> batch = {"x": jnp.eye(8, 2), "y": jnp.arange(8.0)}
      >>> value, grad = accum_jax.value_and_grad(loss, k=4)(jnp.ones(2), batch)
      >>> print(value, grad)
      17.5 [0.25 0.  ]
    """
    run = _differentiate(
        "value_and_grad",
        loss_fn,
        argnums,
        has_aux,
        k=k,
        reduction=reduction,
        aux=aux,
        loss_scale=loss_scale,
        in_place=in_place,
        allow_int=allow_int,
        microbatch_size=microbatch_size,
        batch_argnums=batch_argnums,
        batch_axes=batch_axes,
        key_argnums=key_argnums,
        weight=weight,
        weight_from_output=weight_from_output,
        accumulator_dtype=accumulator_dtype,
        output_dtype=output_dtype,
        stacked=stacked,
        remainder=remainder,
        nonfinite=nonfinite,
        num_real_microbatches=num_real_microbatches,
        stats=stats,
        axis_name=axis_name,
        mesh=mesh,
        data_axes=data_axes,
        arg_specs=arg_specs,
    )

    def with_value(args, kwargs):
        output, grads, stats = run(args, kwargs)
        return (output, grads) if stats is None else ((output, grads), stats)

    return compile_once(loss_fn, with_value)


@overload
def grad(
    loss_fn: Callable[Concatenate[_Params, _Rest], Any],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    **keywords: Unpack[_Unmeasured],
) -> Callable[Concatenate[_Params, _Rest], _Params]: ...


@overload
def grad(
    loss_fn: Callable[Concatenate[_Params, _Rest], tuple[Any, _Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    **keywords: Unpack[_Unmeasured],
) -> Callable[Concatenate[_Params, _Rest], tuple[_Params, _Aux]]: ...


@overload
def grad(
    loss_fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    **keywords: Unpack[Keywords],
) -> Callable[..., Any]: ...


def grad(
    loss_fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    **keywords: Unpack[Keywords],
) -> Callable[..., Any]:
    """`jax.grad` run as `k` microbatches in one loop: `value_and_grad` without the value.

    Args:
      loss_fn: see `value_and_grad`.
      argnums: see `value_and_grad`.
      has_aux: see `value_and_grad`.
      **keywords: those of `value_and_grad`, with the same meaning.

    Returns:
      A function of the same arguments that returns what `jax.grad(loss_fn, argnums, has_aux)`
      would: `grads` or `(grads, aux)`; with `stats`, a pair of that and `AccumulationStats`.

    Raises:
      TypeError, ValueError: as `value_and_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> import accum_jax
      >>> print(accum_jax.grad(lambda w, x: jnp.mean(w * x), k=2)(1.0, jnp.arange(4.0)))
      1.5
    """
    check_keywords("grad", keywords, get_type_hints(Keywords))
    run = _differentiate("grad", loss_fn, argnums, has_aux, **keywords)

    def without_value(args, kwargs):
        output, grads, stats = run(args, kwargs)
        result = (grads, output[1]) if has_aux else grads
        return result if stats is None else (result, stats)

    return compile_once(loss_fn, without_value)


def _differentiate(
    fn: str,
    loss_fn: Callable[..., Any],
    argnums: Any,
    has_aux: Any,
    *,
    allow_int: Any = False,
    **keywords: Any,
) -> Callable[[Any, Any], tuple[Any, Any, Any]]:
    """Checks the arguments; returns the function that gives output, gradients and statistics."""
    check_choice(fn, "allow_int", allow_int, (False, True))
    options, reduce, gradient = check_loss(fn, loss_fn, has_aux, **keywords)
    gradient = dataclasses.replace(
        gradient, argnums=check_argnums(fn, "argnums", argnums), allow_int=allow_int
    )
    threads = check_reduce(fn, "reduce", reduce)
    options.arguments.roles({**options.roles(threads), "argnums": gradient.argnums})

    def run(args, kwargs):
        output, grads, stats = run_window(options, reduce, loss_fn, gradient, args, kwargs)
        several = isinstance(argnums, (tuple, list))
        return output, tuple(grads) if several else grads[0], stats

    return run


def check_loss(
    fn: str,
    loss_fn: Callable[..., Any],
    has_aux: Any,
    *,
    reduction: Any = "mean",
    aux: Any = "mean",
    loss_scale: Any = None,
    in_place: Any = None,
    **shared: Any,
) -> tuple[Options, Any, Gradient]:
    """Checks what is asked of a loss; returns options, reducers and a gradient of no argument."""
    options = Options.check(fn, loss_fn, **shared)
    check_choice(fn, "has_aux", has_aux, (False, True))
    check_choice(fn, "reduction", reduction, ("mean", "sum", "sum_over_weight"))
    check_choice(fn, "in_place", in_place, (None, False, True))
    check_reduce(fn, "aux", aux)
    if not has_aux and aux != "mean":
        raise TypeError(f"{fn}: aux={aux!r} reduces an auxiliary output; set has_aux=True.")
    if loss_scale is not None:
        check_real_scalar(fn, "loss_scale", loss_scale)
        if options.nonfinite == "skip":
            raise ValueError(
                f'{fn}: loss_scale with nonfinite="skip" would hide the overflow from the scale. '
                'Use nonfinite="propagate" and accum_jax.dynamic_loss_scale, which skips the '
                "update and lowers the scale."
            )
    gradient = Gradient(
        argnums=(),
        has_aux=has_aux,
        reduction=reduction,
        loss_scale=loss_scale,
        in_place=in_place,
        allow_int=False,
        output_dtype=options.output_dtype,
    )
    gradient.check_in_place(options)
    return options, (reduction, aux) if has_aux else reduction, gradient
