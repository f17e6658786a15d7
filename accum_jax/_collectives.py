"""The collectives of a compiled program, and which of them run in loops."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

_KINDS = (
    "all-reduce|reduce-scatter|all-gather|all-to-all|ragged-all-to-all|collective-permute|"
    "collective-broadcast"
)
_COLLECTIVE = re.compile(rf"({_KINDS})(?:-start)?")
_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
# The type may hold parentheses, as in f32[8,128]{1,0:T(8,128)}, but never " name(".
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?)\s([a-z][\w-]*)\((.*)")
_OPERANDS = re.compile(r"(.*?)\)(?:,|$)")
_SHAPE = re.compile(r"\b([a-z]+(\d*)\w*)\[([^\]]*)\]")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|called_computations|body|condition|branch_computations|"
    r"true_computation|false_computation)=(\{[^}]*\}|%?[\w.-]+)"
)
# A TPU writes an asynchronous collective into every fusion that it runs beside; the first has -1.
_CONTINUED = re.compile(r'"async_collective_fusion_config":\{"flag_start":"\d')
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LOOP = re.compile(r"\b(?:condition|body)=%?([\w.-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_DTYPE = re.compile(r"(pred|bf|[sufc])(\d*)(\w*)")
_KIND_OF_NUMBER = {"s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex"}


class Collective(NamedTuple):
    """One collective operation in a compiled program.

    Attributes:
      kind: `"all-reduce"`, `"reduce-scatter"`, `"all-gather"`, `"all-to-all"`,
        `"collective-permute"`, or a rarer one by XLA's name.
      dtype: what is sent, by JAX's name, as `"float32"`.
      bytes: size of the whole array on one device: of what goes in, but for `"all-gather"` of what
        comes out. So a gradient of P bytes has P whether it is reduced or reduce-scattered.
      inside_loop: whether it stands in the body of a loop.
      trip_count: how often a call of the program runs it: the product over the loops around it, 1
        outside loops, None where the compiler does not know.
    """

    kind: str
    dtype: str
    bytes: int
    inside_loop: bool
    trip_count: int | None


class _Instruction(NamedTuple):
    shape: str
    opcode: str
    operands: list[str]
    rest: str  # the operands as text, and the attributes


def collectives(compiled: Any) -> list[Collective]:
    """Reads off a compiled program what its devices exchange, and how often.

    Loops are found by following the calls between the program's computations, fusions and
    asynchronous ones included. An operation that the compiler has combined of several is one entry
    for each dtype, with their bytes together; the two halves of an asynchronous one are one entry.
    A branch of a conditional counts as if it ran. Programs for CPU, GPU and TPU are understood.

    Cost: reads text; compiles and runs nothing.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, or its `as_text()`.

    Returns:
      The collectives in the order of the program.

    Raises:
      TypeError: neither a compiled program nor text.
      ValueError: no text of a compiled program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import accum_jax
      >>> mesh, n = jax.make_mesh((jax.device_count(),), ("data",)), jax.device_count()
      >>> f = accum_jax.grad(lambda w, x: jnp.mean((x @ w) ** 2), k=4, mesh=mesh)
      >>> compiled = jax.jit(f).lower(jnp.ones(3), jnp.ones((8 * n, 3))).compile()
      >>> [c for c in accum_jax.collectives(compiled) if c.inside_loop]
      []
    """
    text = compiled
    if not isinstance(compiled, str):
        if not hasattr(compiled, "as_text") or hasattr(compiled, "compile"):
            raise TypeError(
                "collectives: expected a compiled program or its text, got "
                f"{compiled!r} of type {type(compiled).__name__}. Use "
                "jax.jit(f).lower(...).compile()."
            )
        text = compiled.as_text()
    computations, entry = _parse(text or "")
    if entry is None:
        raise ValueError(
            "collectives: the text is no compiled program: it has no line that starts with ENTRY. "
            "Use jax.jit(f).lower(...).compile().as_text()."
        )
    return list(_walk(computations, entry, False, 1))


def _parse(text: str) -> tuple[dict[str, dict[str, _Instruction]], str | None]:
    """The computations of a program with their instructions, by name; and which one it starts."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, current = None, {}
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            name, shape, opcode, rest = found.groups()
            listed = _OPERANDS.match(rest)
            operands = re.findall(r"%([\w.-]+)", listed[1]) if listed else []
            current[name] = _Instruction(shape, opcode, operands, rest)
        elif found := _HEAD.match(line):
            computations[found[2]] = current = {}
            entry = found[2] if found[1] else entry
    return computations, entry


def _walk(
    computations: dict[str, dict[str, _Instruction]],
    name: str,
    inside_loop: bool,
    trip_count: int | None,
) -> Iterator[Collective]:
    """The collectives that one run of a computation in its place runs."""
    instructions = computations[name]
    for instruction in instructions.values():
        if found := _COLLECTIVE.fullmatch(instruction.opcode):
            if _CONTINUED.search(instruction.rest):
                continue
            # A TPU writes a reduce-scatter as a fusion of that name that holds an all-reduce.
            kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else found[1]
            for dtype, size in _sizes(kind, instruction, instructions).items():
                yield Collective(kind, dtype, size, inside_loop, trip_count)
            continue
        inside, times = inside_loop, trip_count
        if instruction.opcode == "while":
            trips = _trips(computations, instructions, instruction)
            inside, times = True, None if times is None or trips is None else times * trips
        for called in _CALLED.findall(instruction.rest):
            for callee in re.findall(r"[\w.-]+", called):
                yield from _walk(computations, callee, inside, times)


def _trips(
    computations: dict[str, dict[str, _Instruction]],
    instructions: dict[str, _Instruction],
    loop: _Instruction,
) -> int | None:
    """How often a loop runs, None where that cannot be told."""
    if known := _TRIP_COUNT.search(loop.rest):
        return int(known[1])
    # A TPU's program does not say: what its counter starts from, is compared with and grows by.
    condition, body = (computations[name] for name in _LOOP.findall(loop.rest))
    test, after = list(condition.values())[-1], list(body.values())[-1]
    before = instructions[loop.operands[0]]
    if test.opcode != "compare" or "direction=LT" not in test.rest or before.opcode != "tuple":
        return None
    counter = _INDEX.search(condition[test.operands[0]].rest)
    limit = _constant(condition, test.operands[1])
    if counter is None or limit is None or after.opcode != "tuple":
        return None
    start = _constant(instructions, before.operands[int(counter[1])])
    grown = body[after.operands[int(counter[1])]]
    step = _constant(body, grown.operands[1]) if grown.opcode == "add" else None
    return None if start is None or not step else max(-((start - limit) // step), 0)


def _constant(instructions: dict[str, _Instruction], name: str) -> int | None:
    """The integer of that name, copied or not, None where it is no constant."""
    found = instructions[name]
    while found.opcode == "copy":
        found = instructions[found.operands[0]]
    number = re.match(r"-?\d+\)", found.rest) if found.opcode == "constant" else None
    return int(number[0][:-1]) if number else None


def _sizes(
    kind: str, instruction: _Instruction, instructions: dict[str, _Instruction]
) -> Counter[str]:
    """The bytes of a collective by dtype."""
    given = Counter[str]()
    for operand in instruction.operands:
        given += _bytes(instructions[operand].shape)
    if kind != "all-gather":
        return given
    result = _bytes(instruction.shape)
    if instruction.opcode.endswith("-start"):  # its result holds the operands, too
        result -= given
    return result


def _bytes(shape: str) -> Counter[str]:
    """The bytes of a type, which may be a tuple, by dtype."""
    sizes = Counter[str]()
    for dtype, bits, dims in _SHAPE.findall(shape):
        number = int(bits or 8 * (dtype == "pred"))
        for dim in re.findall(r"\d+", dims):
            number *= int(dim)
        sizes[_dtype(dtype)] += -(-number // 8)
    return sizes


def _dtype(name: str) -> str:
    """JAX's name of XLA's dtype."""
    found = _DTYPE.fullmatch(name)
    if found is None:
        return name
    kind, bits, rest = found.groups()
    return "bool" if kind == "pred" else f"{_KIND_OF_NUMBER[kind]}{bits}{rest and '_' + rest}"
