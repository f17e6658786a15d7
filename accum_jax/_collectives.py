"""What a compiled program sends between devices."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ([\w\-]+)\(")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}


class Collective(NamedTuple):
    """One instruction of a compiled program that moves data between devices.

    Attributes:
      kind: `"all-reduce"`, `"reduce-scatter"`, `"all-gather"`, `"all-to-all"` or
        `"collective-permute"`.
      dtype: the compiler's name of what is moved, `"f32"` or `"bf16"` say; several are joined by
        `"+"`.
      bytes: size of the result on one device.
      inside_loop: whether it runs in a loop.
      trip_count: how often it runs, all loops around it multiplied; 1 outside of loops, None where
        the compiler does not know.
    """

    kind: str
    dtype: str
    bytes: int
    inside_loop: bool
    trip_count: int | None


def collectives(compiled: Any) -> list[Collective]:
    """Lists what a compiled program sends between devices, in the order of its text.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, for any backend, or its text.

    Returns:
      One `Collective` for each instruction; the halves of an asynchronous one count once.

    Raises:
      TypeError: when called: neither a compiled program nor a text.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from accum_jax import collectives
      >>> collectives(jax.jit(jnp.sin).lower(1.0).compile())
      []
    """
    text = compiled if isinstance(compiled, str) else getattr(compiled, "as_text", lambda: None)()
    if not isinstance(text, str):
        raise TypeError(
            "collectives: give a compiled program, jax.jit(f).lower(...).compile(), got "
            f"{type(compiled).__name__}."
        )
    computations: dict[str, list[str]] = {}
    entry = name = None
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name = header[1]
            computations[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name is not None:
            computations[name].append(line)
    found: list[Collective] = []
    if entry is not None:
        _walk(computations, entry, False, 1, found)
    return found


def _walk(
    computations: dict[str, list[str]],
    name: str,
    inside_loop: bool,
    trips: int | None,
    found: list[Collective],
) -> None:
    for line in computations.get(name, ()):
        if not (instruction := _INSTRUCTION.match(line)):
            continue
        result, operation = instruction.groups()
        kind = operation.removesuffix("-start")
        if kind in _KINDS:
            # the start of an asynchronous one carries its operands beside its results
            half = operation != kind and kind in ("all-gather", "collective-permute")
            found.append(_read(kind, result, half, inside_loop, trips))
            continue
        called = _CALLED.findall(line)
        for branches in _BRANCHES.findall(line):
            called += [branch.strip().lstrip("%") for branch in branches.split(",")]
        loop, times = operation == "while", trips
        if loop:
            known = _TRIPS.search(line)
            times = None if trips is None or known is None else trips * int(known[1])
        for inner in called:
            _walk(computations, inner, inside_loop or loop, times, found)


def _read(kind: str, result: str, half: bool, inside_loop: bool, trips: int | None) -> Collective:
    arrays = [
        (dtype, math.prod(int(n) for n in shape.split(",") if n) * _bits(dtype) // 8)
        for dtype, shape in _ARRAY.findall(result)
    ]
    if half:
        data = [array for array in arrays if array[0] not in ("u32", "s32")] or arrays
        arrays = data[len(data) // 2 :]
    dtypes = dict.fromkeys(dtype for dtype, _ in arrays)
    return Collective(kind, "+".join(dtypes), sum(size for _, size in arrays), inside_loop, trips)


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0
