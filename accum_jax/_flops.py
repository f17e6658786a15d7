"""Arithmetic of a traced program."""

from __future__ import annotations

import math
from typing import Any


def count_flops(jaxpr: Any) -> int:
    """Operations of the matrix products and convolutions, 2 for a multiply-add, on all devices.

    Unlike a compiler's count, which takes the body of a loop once, a scan counts as often as it
    runs; a conditional as its longest branch; other loops once. What `jax.checkpoint` computes
    again counts again. Kernels written by hand (Pallas, foreign calls) do not count.
    """
    return sum(_equation(eqn) for inner in _jaxprs(jaxpr) for eqn in inner.eqns)


def _equation(eqn: Any) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        contracted, _ = params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * eqn.outvars[0].aval.size * math.prod(lhs[dim] for dim in contracted[0])
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        return 2 * eqn.outvars[0].aval.size * kernel.size // max(features, 1)
    inner = [count_flops(x) for x in _jaxprs(tuple(params.values()))]
    if name == "cond":
        return max(inner)
    times = 1
    if name == "scan":
        times = params["length"]
    elif name == "shard_map":  # the same on each of the devices that it maps over
        axes = params.get("manual_axes", params.get("newly_manual_axes"))  # by jax's version
        times = math.prod(params["mesh"].shape[axis] for axis in axes)
    return times * sum(inner)


def _jaxprs(value: Any) -> list[Any]:
    if hasattr(value, "eqns"):  # a jaxpr, open or closed
        return [value]
    if isinstance(value, (tuple, list)):
        return [jaxpr for part in value for jaxpr in _jaxprs(part)]
    return []
