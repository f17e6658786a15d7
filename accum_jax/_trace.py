"""Functions traced once, whatever their leaves are."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._in_place import mend_slices
from ._split import is_array

SCALARS = (bool, int, float, complex, np.number, np.bool_)


@jax.tree_util.register_pytree_node_class
class _Hidden:
    """A leaf that is no array, carried through a trace as structure."""

    def __init__(self, value: Any):
        self.value = value

    def tree_flatten(self):
        return (), self

    @classmethod
    def tree_unflatten(cls, aux, _):
        return aux

    def _key(self) -> Any:
        value = self.value
        if isinstance(value, np.ndarray):
            return np.ndarray, value.dtype, value.shape, value.tobytes()
        if isinstance(value, (float, complex)):  # -0.0 is not 0.0, NaN is NaN
            return type(value), repr(value)
        return type(value), value

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _Hidden) and self.value is other.value
        return same or (isinstance(other, _Hidden) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())


def is_hidden(x: Any) -> bool:
    return isinstance(x, _Hidden)


def hide(tree: Any) -> Any:
    """Makes the leaves that are no arrays part of the structure."""

    def leaf(x):
        if is_traced(x):
            return x
        # jax may hold float0, which has no values, as a tracer
        return _Hidden(np.zeros(x.shape, x.dtype) if is_array(x) and _is_float0(x) else x)

    return jax.tree.map(leaf, tree)


def is_traced(x: Any) -> bool:
    """Whether a leaf is handed over as an array."""
    return is_array(x) and not _is_float0(x)


def show(tree: Any) -> Any:
    """Undoes `hide`."""
    return jax.tree.map(lambda x: x.value if is_hidden(x) else x, tree, is_leaf=is_hidden)


def _is_float0(x: Any) -> bool:
    return x.dtype == jax.dtypes.float0


def numbers_to_arrays(tree: Any) -> Any:
    """Python and numpy numbers as arrays of a strong type; other leaves as they are."""

    def leaf(x):
        if isinstance(x, SCALARS) or (is_array(x) and not _is_float0(x) and not is_key(x)):
            x = jnp.asarray(x)
            return lax.convert_element_type(x, x.dtype)  # drops a weak type
        return x

    return jax.tree.map(leaf, tree)


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def surrounding_trace() -> str:
    """What happens to operations here: "EvalTrace" runs them, "DynamicJaxprTrace" stages them.

    Any other trace maps or differentiates, be it only what a function closes over.
    """
    from jax.extend.core import take_current_trace  # it imports Pallas: not before it is needed

    with take_current_trace() as trace:
        return type(trace).__name__


def compile_once(
    function: Callable[..., Any], run: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """A function like `function` that calls `run(args, kwargs)`.

    Outside a trace it is compiled once for each structure of its arguments: a loop whose body is a
    new closure at every call would compile at every call.
    """

    @jax.jit
    def compiled(args, kwargs):
        return hide(run(*show((args, kwargs))))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if surrounding_trace() != "EvalTrace":
            return run(args, kwargs)
        hidden = hide((args, kwargs))
        try:
            hash(jax.tree.structure(hidden))
        except TypeError:  # a leaf that is neither array nor hashable
            return run(args, kwargs)
        return show(compiled(*hidden))

    # Equinox takes what stands in __wrapped__ for a part of the module that holds the function.
    with contextlib.suppress(TypeError, ValueError):
        call.__signature__ = inspect.signature(function)  # pyright: ignore
    del call.__wrapped__
    return call


class Staged:
    """A function traced once on arguments of some types, to be run on others of the same types.

    Attributes:
      struct: the structure of the result, with a `jax.ShapeDtypeStruct` for each array or number;
        other leaves as they are.
      constants: the arrays that the function closes over.
    """

    def __init__(self, function: Callable[..., Any], *args: Any):
        closed, struct = jax.make_jaxpr(
            lambda *args: hide(numbers_to_arrays(function(*show(args)))), return_shape=True
        )(*hide(args))
        self._jaxpr = mend_slices(closed)
        self._treedef = jax.tree.structure(struct)
        self.constants: list[Any] = closed.consts
        self.struct: Any = show(struct)

    def __call__(self, *args: Any) -> Any:
        leaves = jax.tree.leaves(hide(args))
        results = jax.core.eval_jaxpr(self._jaxpr.jaxpr, self._jaxpr.consts, *leaves)
        return show(jax.tree.unflatten(self._treedef, results))
