"""Data axes: what the devices of a window add up, once, after the loop."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._split import is_array


@dataclasses.dataclass(frozen=True)
class DataAxes:
    """The mapped axes over which the rows of a batch are spread; none for one device."""

    names: tuple[Any, ...] = ()

    @property
    def size(self) -> int:
        """How many devices share the window."""
        return math.prod(lax.axis_size(name) for name in self.names)

    @property
    def index(self) -> jax.Array:
        """This device's number."""
        return lax.axis_index(self.names)

    def vary(self, tree: Any) -> Any:
        """Marks arrays as differing between the devices of the data axes.

        A gradient with respect to an array that `jax.shard_map` knows to be equal on all devices is
        summed over them at once: in every microbatch, and a second time after the loop.
        """
        names = frozenset(name for name in self.names if name in _manual_axes())
        return jax.tree.map(lambda x: _vary_over(x, names), tree) if names else tree

    def settle(self, body: Any, index: Any, carry: Any) -> Any:
        """The carry of a loop, marked as differing between devices as `body(index, carry)` is.

        Axes of the caller's `jax.shard_map` that are no data axes come in through the outputs.
        """
        if not _manual_axes():
            return carry
        return match(carry, jax.eval_shape(body, index, carry))

    def sum(self, x: Any) -> Any:
        """The sum over devices, in float32 or wider."""
        if not self.names:
            return x
        if isinstance(x, int):
            return x * self.size
        if jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize < 4:
            x = x.astype(jnp.float32)
        return lax.psum(self.vary(x), self.names)

    def extreme(self, name: str, x: jax.Array) -> jax.Array:
        """The largest or smallest over devices."""
        if not self.names:
            return x
        extreme = lax.pmax if name == "max" else lax.pmin
        if x.dtype == jnp.bool_:
            return self.extreme(name, x.astype(jnp.int32)).astype(jnp.bool_)
        return extreme(self.vary(x), self.names)

    def agree(self, x: jax.Array) -> jax.Array:
        """A value that is the same on all devices, known to be so."""
        if not self.names:
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = self.agree(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return lax.complex(self.agree(x.real), self.agree(x.imag))
        return self.extreme("max", x)


def match(tree: Any, like: Any) -> Any:
    """`tree` marked as differing between the devices between which `like` differs."""
    if not _manual_axes():
        return tree
    return jax.tree.map(lambda x, y: _vary_over(x, _varying(y)), tree, like)


def _vary_over(x: Any, names: frozenset[Any]) -> Any:
    if not is_array(x) or x.dtype == jax.dtypes.float0:
        return x
    missing = tuple(sorted(names - _varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def _varying(x: Any) -> frozenset[Any]:
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return aval.manual_axis_type.varying if aval.manual_axis_type else frozenset()


def _manual_axes() -> tuple[Any, ...]:
    """The axes that an enclosing `jax.shard_map` maps; `jax.vmap`'s are not among them."""
    return jax.sharding.get_abstract_mesh().manual_axes
