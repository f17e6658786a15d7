"""Checks of what a caller gave; every message names function, argument, number and remedy."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr


def check_callable(fn: str, argument: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{fn}: {argument} must be callable, got {value!r} of type {_type(value)}.")


def check_int(fn: str, argument: str, value: Any, meaning: str, minimum: int = 1) -> int:
    """Returns `value` as a Python int; refuses booleans, floats, arrays and too small numbers."""
    refused = (bool, np.bool_, jax.Array, np.ndarray)
    if isinstance(value, refused) or not hasattr(value, "__index__"):
        raise TypeError(
            f"{fn}: {argument} must be a Python int ({meaning}), got {value!r} of type "
            f"{_type(value)}."
        )
    value = operator.index(value)
    if value < minimum:
        raise ValueError(
            f"{fn}: {argument} must be at least {minimum} ({meaning}), got {value}. Use {minimum} "
            "or more."
        )
    return value


def check_choice(fn: str, argument: str, value: Any, choices: Collection[Any]) -> None:
    if not any(type(value) is type(c) and value == c for c in choices):
        error = ValueError if type(value) in map(type, choices) else TypeError
        raise error(
            f"{fn}: {argument} must be one of {', '.join(map(repr, choices))}, got {value!r}."
        )


def check_keywords(fn: str, keywords: Collection[str], known: Collection[str]) -> None:
    for name in keywords:
        if name not in known:
            raise TypeError(
                f"{fn}() got an unexpected keyword argument {name!r}. Known: "
                f"{', '.join(sorted(known))}."
            )


def check_exactly_one(fn: str, first: str, second: str, values: tuple[Any, Any]) -> None:
    if (values[0] is None) == (values[1] is None):
        came = "neither" if values[0] is None else f"{first}={values[0]!r}, {second}={values[1]!r}"
        raise TypeError(f"{fn}: give exactly one of {first} and {second}, got {came}.")


def check_argnums(fn: str, argument: str, value: Any) -> tuple[int, ...]:
    """Returns argument numbers as a tuple of ints; negative ones count from the end."""
    numbers: tuple[Any, ...] = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(n, bool) or not hasattr(n, "__index__") for n in numbers):
        raise TypeError(
            f"{fn}: {argument} must be an int or a tuple of ints (positions of arguments), got "
            f"{value!r}."
        )
    return tuple(map(operator.index, numbers))


def check_axis_names(fn: str, argument: str, value: Any) -> tuple[Any, ...]:
    """Returns one axis name or several as a tuple; None as no axis."""
    names = () if value is None else tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(name, (int, float)) or not hasattr(name, "__hash__") for name in names):
        raise TypeError(f"{fn}: {argument} must be an axis name or a tuple of them, got {value!r}.")
    if len(set(names)) < len(names):
        raise ValueError(f"{fn}: {argument}={value!r} names an axis twice.")
    return names


def check_inexact_dtype(fn: str, argument: str, value: Any) -> jnp.dtype:
    """Returns `value` as a dtype; refuses what is no float or complex dtype."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise TypeError(f"{fn}: {argument} must be a dtype, got {value!r}.") from None
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"{fn}: {argument} must be a float or complex dtype, got {dtype}; integer sums are "
            "always kept as exact integers."
        )
    return dtype


def check_dtype_enabled(fn: str, argument: str, dtype: jnp.dtype | None) -> None:
    if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{fn}: {argument}={dtype} needs 64-bit types, which are off. Set "
            'jax.config.update("jax_enable_x64", True), or use float32.'
        )


def check_real_scalar(fn: str, argument: str, value: Any) -> None:
    """Refuses what is no real number: a Python or numpy number or a scalar array, traced or not."""
    dtype = jnp.result_type(value) if isinstance(value, (int, float, np.generic)) else None
    if isinstance(value, (jax.Array, np.ndarray)) and value.shape == ():
        dtype = value.dtype
    if dtype is None or not (
        jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    ):
        raise TypeError(
            f"{fn}: {argument} must be a real scalar, got {value!r} of type {_type(value)}. Use a "
            "Python number or an array of shape ()."
        )


class Arguments:
    """Names and positions of a function's positional arguments, for checks and messages."""

    def __init__(self, fn: str, function: Callable[..., Any]):
        self.fn = fn
        self.names: list[str] = []
        self.limit: int | None = None
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.names = [p.name for p in parameters if p.kind in kinds]
        if not any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
            self.limit = len(self.names)

    def name(self, argnum: int) -> str:
        return self.names[argnum] if 0 <= argnum < len(self.names) else f"args[{argnum}]"

    def roles(self, roles: dict[str, tuple[int, ...]], count: int | None = None) -> None:
        """Checks that every position exists and that none has two roles.

        `count` is the number of positional arguments of a call; without it (when built) the
        function's own signature is the limit.
        """
        limit = self.limit if count is None else count
        seen: dict[int, str] = {}
        for role, argnums in roles.items():
            for number in argnums:
                if limit is not None and not -limit <= number < limit:
                    has = "the function takes" if count is None else "the call gave"
                    raise ValueError(
                        f"{self.fn}: {role} names argument {number}, but {has} {limit} positional "
                        f"argument{'s' if limit != 1 else ''}. Arguments with a role are passed "
                        "by position."
                    )
                position = number if limit is None or number >= 0 else number + limit
                if position in seen:
                    where = f"argument {self.name(position)} (position {position})"
                    raise TypeError(
                        f"{self.fn}: {where} has two roles, {seen[position]} and {role}. Give each "
                        "argument one role."
                    )
                seen[position] = role


def check_no_modules(names: Arguments, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuses Flax NNX modules, whose state would not move on from microbatch to microbatch."""
    nnx = sys.modules.get("flax.nnx")  # without it nobody can have made one
    if nnx is None:
        return
    named = [(names.name(position), arg) for position, arg in enumerate(args)]
    for name, arg in (*named, *kwargs.items()):
        leaves = jax.tree_util.tree_leaves_with_path(
            arg, is_leaf=lambda x: isinstance(x, nnx.Pytree)
        )
        for path, leaf in leaves:
            if isinstance(leaf, nnx.Pytree):
                raise TypeError(
                    f"{names.fn}: {leaf_name(name, path)} is an nnx {_type(leaf)}, whose state "
                    "would be lost between microbatches. Use accum_jax.nnx.value_and_grad or "
                    "accum_jax.nnx.grad, or nnx.split it into (graphdef, params, rest) and pass "
                    "those."
                )


def positions(argnums: Sequence[int], count: int) -> tuple[int, ...]:
    """Non-negative positions of argument numbers that `Arguments.roles` has checked."""
    return tuple(number % count for number in argnums)


def broadcast_prefix(
    fn: str, argument: str, prefix: Any, tree: Any, is_leaf: Callable[[Any], bool], what: str
) -> tuple[list[Any], list[Any], Any]:
    """Flattens `prefix` and cuts `tree` into the subtree under each of its leaves.

    Returns the prefix's leaves, the subtrees beside them and the prefix's treedef.

    Raises:
      ValueError: `prefix` is no tree prefix of `tree`; both are shown.
    """
    leaves, treedef = jax.tree.flatten(prefix, is_leaf=is_leaf)
    try:
        return leaves, treedef.flatten_up_to(tree), treedef
    except ValueError:
        raise ValueError(
            f"{fn}: {argument} does not fit {what}.\n  {argument}: {prefix!r}\n  {what}: "
            f"{jax.tree.structure(tree)}\nGive one entry, or one for each branch of {what}."
        ) from None


def leaf_name(name: str, path: Any) -> str:
    return name + keystr(path)


def _type(value: Any) -> str:
    return type(value).__name__
