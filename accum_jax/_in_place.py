"""Gradients added to an accumulator during the backward pass: all that needs a recent jax.

The cotangent of a parameter is added to a mutable array as soon as a layer has made it, so that the
backward pass holds no gradient of its own, not even that of a scan over layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from ._split import is_array

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr


@functools.cache
def available() -> bool:
    """Whether this jax can do it."""
    _, pull = jax.vjp(lambda x: x, 0.0)
    return hasattr(pull, "with_refs") and hasattr(jax, "new_ref") and hasattr(jax, "freeze")


@functools.cache
def _slices_fail() -> bool:
    """Whether this jax cannot add the gradient of a sliced parameter (jax before 0.11)."""

    def add(x):
        _, pull = jax.vjp(lambda x: x[:1].sum(), x)
        pull.with_refs(jax.new_ref(x))(jnp.ones(()))  # pyright: ignore[reportFunctionMemberAccess]

    try:
        jax.make_jaxpr(add)(jnp.zeros(2))
    except TypeError:
        return True
    return False


def mend_slices(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Writes out the unit strides of slices, where this jax stumbles over their absence."""
    if not (available() and _slices_fail()):
        return closed
    return closed.replace(jaxpr=_with_strides(closed.jaxpr))


def _with_strides(x: Any) -> Any:
    from jax.extend.core import ClosedJaxpr, Jaxpr  # it imports Pallas: not before it is needed

    if isinstance(x, ClosedJaxpr):
        return x.replace(jaxpr=_with_strides(x.jaxpr))
    if isinstance(x, (tuple, list)) and any(isinstance(y, (Jaxpr, ClosedJaxpr)) for y in x):
        return type(x)(map(_with_strides, x))
    if not isinstance(x, Jaxpr):
        return x
    eqns = []
    for eqn in x.eqns:
        params = {name: _with_strides(value) for name, value in eqn.params.items()}
        if eqn.primitive is lax.slice_p and params["strides"] is None:
            params["strides"] = (1,) * len(params["start_indices"])
        eqns.append(eqn.replace(params=params))
    return x.replace(eqns=eqns)


def new_accumulators(zeros: list[jax.Array], params: list[jax.Array], read: list[Any]) -> list[Any]:
    """Mutable arrays for the gradients of `params` in a loop that reads the arrays among `read`.

    The zeros are made to depend on all that the loop depends on. Otherwise jax, differentiating a
    `lax.scan` around the loop, takes the new accumulators for invariants of that scan, hoists them
    out of it, leaves the additions inside, and reads zeros. They are made of the parameters, too:
    `jax.checkpoint` refuses accumulators that no differentiated value went into. Neither costs
    anything in the compiled program.
    """
    arrays = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in read
        if is_array(x) and x.dtype != jax.dtypes.float0
    ]
    zeros, _ = lax.optimization_barrier((zeros, arrays))
    each = zip(params, zeros, strict=True)
    return [jax.new_ref(jnp.where(False, param, zero)) for param, zero in each]


def add_gradient(pull: Callable[..., Any], cotangent: jax.Array, accumulators: list[Any]) -> None:
    """Adds what `pull(cotangent)` would return to the accumulators."""
    pull.with_refs(accumulators)(cotangent)  # pyright: ignore[reportFunctionMemberAccess]


def read_accumulators(accumulators: list[Any]) -> list[jax.Array]:
    """The sums; the accumulators are used up."""
    return [jax.freeze(x) for x in accumulators]
