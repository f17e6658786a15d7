"""Memory of programs, compiled for the device at hand or for one that is not here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from accum_jax._targets import find_target, target_of


@dataclass(frozen=True)
class Memory:
    """What a compiled program needs on one device, in bytes.

    Attributes:
        temp: temporaries.
        beyond_arguments: the most held at any time beside the arguments.
        total: the same with the arguments.
    """

    temp: int
    beyond_arguments: int
    total: int

    @classmethod
    def of(cls, compiled: Any, device: Any) -> Memory:
        """Reads what a program compiled for a kind of device needs."""
        found = compiled.memory_analysis()
        assert found is not None  # CPU, GPU and TPU all have it.
        total = target_of([device]).peak_bytes(found)
        return cls(found.temp_size_in_bytes, total - found.argument_size_in_bytes, total)


class Target:
    """A device to compile for; nothing is allocated on it.

    Args:
        name: None for the backend at hand, or a machine as `accum_jax.plan` names it, of which the
            first device is taken.

    Raises:
        ValueError: there is no such machine.
        ImportError: its compiler is not installed.
    """

    def __init__(self, name: str | None):
        found = find_target("benchmarks", name)
        self.name, self.platform, self._device = found.name, found.platform, found.devices[0]

    def memory(self, fn: Any, *args: Any, donate: tuple[int, ...] = ()) -> Memory:
        """Compiles `fn` for arguments of these shapes and reads what it needs."""
        sharding = SingleDeviceSharding(self._device)
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
        )
        compiled = jax.jit(fn, donate_argnums=donate).lower(*args).compile()
        return Memory.of(compiled, self._device)
