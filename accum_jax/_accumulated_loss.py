"""A loss that accumulates its own gradient."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, Unpack, get_type_hints, overload

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ._accumulate import LossKeywords, UnmeasuredLossKeywords, check_loss
from ._errors import check_keywords
from ._reduce import check_reduce, scale
from ._stats import AccumulationStats
from ._trace import compile_once, hide, is_hidden, show
from ._window import check_value, run_window

_Arguments = ParamSpec("_Arguments")
_Output = TypeVar("_Output")

_NORMS = ("global_norm", "mean_microbatch_square_norm", "noise_scale")


@overload
def accumulated_loss(
    loss_fn: Callable[_Arguments, _Output],
    k: int | None = None,
    *,
    has_aux: bool = False,
    stats: None = None,
    **keywords: Unpack[UnmeasuredLossKeywords],
) -> Callable[_Arguments, _Output]: ...


@overload
def accumulated_loss(
    loss_fn: Callable[_Arguments, _Output],
    k: int | None = None,
    *,
    has_aux: bool = False,
    stats: Literal["counts", "norms"],
    **keywords: Unpack[UnmeasuredLossKeywords],
) -> Callable[_Arguments, tuple[_Output, AccumulationStats]]: ...


def accumulated_loss(
    loss_fn: Callable[..., Any],
    k: int | None = None,
    *,
    has_aux: bool = False,
    **keywords: Unpack[LossKeywords],
) -> Callable[..., Any]:
    """A loss over `k` microbatches that others can differentiate at the memory of one.

    Value and gradient are those of `value_and_grad` with the same keywords. Differentiating a loop
    over losses would keep every microbatch's activations until the end; this loss has a derivative
    rule of its own, which accumulates the gradient while it goes forward and multiplies it by the
    cotangent later. So `jax.grad`, `equinox.filter_grad`, the line searches of `optax.lbfgs` and
    `flax.training.dynamic_scale.DynamicScale` can be given it.

    Cost: undifferentiated, one forward pass. Differentiated, one forward and one backward pass, all
    of it in the forward pass, with the memory of `value_and_grad`.

    Under `jax.vmap` of a jitted function weights need `in_place=False`, as in `value_and_grad`.

    First derivatives only, in reverse mode (forward mode is jax's own error about `custom_vjp`),
    with respect to float arguments passed by position that are neither batch nor threaded state;
    anything else is an error. A factor on the loss, such as `DynamicScale`'s, reaches the gradient
    after the backward pass and comes too late against float16 underflow: give `loss_scale=` for
    that.

    Args:
      loss_fn: `loss_fn(params, batch, ...)` returns a real scalar, or `(scalar, aux)`.
      k: microbatches per update, a Python int. Give it or `microbatch_size`.
      has_aux: whether `loss_fn` returns `(loss, aux)`. Aux is not differentiated.
      **keywords: those of `value_and_grad`, `allow_int` apart. The gradient is handed on in the
        dtype of its argument, whatever `output_dtype` is. Norms in `stats` are NaN
        undifferentiated.

    Returns:
      A function of the same arguments that returns the loss, or `(loss, aux)`; with `stats`, a pair
      of that and `AccumulationStats`.

    Raises:
      TypeError, ValueError: as `value_and_grad`. When differentiated: TypeError for a derivative
        that it does not have, with the argument's name.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import accum_jax
      >>> loss = accum_jax.accumulated_loss(lambda w, x: jnp.mean((w * x) ** 2), k=2)
      >>> print(jax.grad(loss)(1.0, jnp.arange(4.0)))
      7.0
    """
    fn = "accumulated_loss"
    check_keywords(fn, keywords, get_type_hints(LossKeywords))
    options, reduce, gradient = check_loss(fn, loss_fn, has_aux, k=k, **keywords)
    gradient = dataclasses.replace(gradient, allow_int=True, output_dtype="accumulator")
    threads = check_reduce(fn, "reduce", reduce)
    options.arguments.roles(options.roles(threads))

    @functools.wraps(loss_fn)
    def checked(*args, **kwargs):
        output = loss_fn(*args, **kwargs)
        check_value(fn, has_aux, output)
        return output

    counting = dataclasses.replace(options, stats=options.stats and "counts")

    def forward(args, kwargs):
        output, _, stats = run_window(counting, reduce, checked, None, args, kwargs)
        if stats is not None and options.stats == "norms":  # there is no gradient to measure
            stats = stats._replace(**dict.fromkeys(_NORMS, jnp.full((), jnp.nan, jnp.float32)))
        return output if stats is None else (output, stats)

    @functools.cache
    def both(argnums, leaves):
        """Loss and gradients with respect to some leaves of some arguments."""
        wanted = dataclasses.replace(gradient, argnums=argnums, leaves=leaves)

        def run(args, kwargs):
            output, grads, stats = run_window(options, reduce, loss_fn, wanted, args, kwargs)
            return (output if stats is None else (output, stats)), grads

        return compile_once(loss_fn, run)

    def perturbed_leaves(args, kwargs):
        """Positions of the arguments that are differentiated, and which of their leaves are."""
        roles = {
            number % len(args): role
            for role, numbers in options.roles(threads).items()
            for number in numbers
        }
        argnums, leaves = [], []
        for position, tree in enumerate(args):
            perturbed = tuple(jax.tree.leaves(tree))
            if any(perturbed):
                if position in roles:
                    raise TypeError(
                        f"{fn}: argument {options.arguments.name(position)} is differentiated, but "
                        f"is in {roles[position]}. Only unbatched arguments have a derivative; "
                        "accum_jax.accumulate can be differentiated with respect to the others."
                    )
                argnums.append(position)
                leaves.append(perturbed)
        for path, perturbed in jax.tree_util.tree_leaves_with_path(kwargs):
            if perturbed:
                raise TypeError(
                    f"{fn}: keyword argument {jax.tree_util.keystr(path)} is differentiated. Pass "
                    "it by position."
                )
        return tuple(argnums), tuple(leaves)

    undifferentiated = compile_once(loss_fn, forward)

    @functools.wraps(undifferentiated)
    def loss(*args: Any, **kwargs: Any) -> Any:
        arrays, treedef = jax.tree.flatten(hide((args, kwargs)))

        @jax.custom_vjp
        def value(arrays):
            args, kwargs = show(jax.tree.unflatten(treedef, arrays))
            return hide(undifferentiated(*args, **kwargs))

        def value_forward(primals):
            marks = jax.tree.unflatten(treedef, [p.perturbed for p in primals])
            marks = jax.tree.map(lambda x: x is True, marks, is_leaf=is_hidden)
            argnums, leaves = perturbed_leaves(*marks)
            arrays = [_first_order(p.value) if p.perturbed else p.value for p in primals]
            args, kwargs = show(jax.tree.unflatten(treedef, arrays))
            output, grads = both(argnums, leaves)(*args, **kwargs)
            grads = iter([g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0])
            return hide(output), [next(grads) if p.perturbed else None for p in primals]

        def value_backward(residuals, cotangents):
            first, *rest = jax.tree.leaves(cotangents, is_leaf=_is_symbolic_zero)
            if not all(map(_is_symbolic_zero, rest)):
                raise TypeError(f"{fn}: only the loss can be differentiated, not its aux.")
            if _is_symbolic_zero(first):
                return (None,)
            each = zip(residuals, arrays, strict=True)
            return ([g if g is None else scale(g, first).astype(x.dtype) for g, x in each],)

        value.defvjp(value_forward, value_backward, symbolic_zeros=True)
        try:
            return show(value(arrays))
        except jax.errors.UnexpectedTracerError as error:
            error.add_note(
                f"{fn}: if loss_fn closes over a value that is differentiated, pass it to the loss "
                "as an argument instead."
            )
            raise

    return loss


def _is_symbolic_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


@jax.custom_jvp
def _first_order(x: jax.Array) -> jax.Array:
    """The identity, which cannot be differentiated."""
    return x


@_first_order.defjvp
def _second_order(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "accumulated_loss: it has first derivatives only. Differentiate "
        "accum_jax.value_and_grad(..., in_place=False) for second ones."
    )
