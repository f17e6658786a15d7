"""Amounts of memory as text."""

from __future__ import annotations

import re
from typing import Any

from ._errors import check_int

_UNITS = {
    f"{prefix}{infix}B".lower(): base**power
    for base, infix in ((1000, ""), (1024, "i"))
    for power, prefix in enumerate("kMGTP", 1)
} | {"b": 1}


def parse_bytes(fn: str, argument: str, value: Any) -> int:
    """Bytes from a number of them, or from text with a unit.

    Raises:
      TypeError: neither an int nor a string.
      ValueError: not a number with a known unit, or less than one byte.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*", value)
        if found is None or found[2].lower() not in _UNITS:
            raise ValueError(
                f"{fn}: {argument}={value!r} is no amount of memory. Use a number and a unit, such "
                'as "16GiB" (of 2**30 bytes) or "80GB" (of 10**9), or an int in bytes.'
            )
        value = int(float(found[1]) * _UNITS[found[2].lower()])
    return check_int(fn, argument, value, 'bytes, or text such as "16GiB"')


def show_bytes(number: float) -> str:
    """Bytes with three digits and a unit of 1024."""
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while number >= 999.5 and len(units) > 1:
        number /= 1024
        units.pop()
    whole = units[-1] == "B" or number >= 99.95
    return f"{number:.0f} {units[-1]}" if whole else f"{number:.3g} {units[-1]}"
