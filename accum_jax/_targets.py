"""Machines to compile for: the one at hand, and those that are not here."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

_GIB = 2**30
# Without these libtpu asks the network what machine this is, and runs only once.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# The plugin compiles without the CUDA libraries, whose versions it would check.
_CUDA = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_CHIPS_PER_HOST = (2, 2, 1)  # at most, unless libtpu is told otherwise
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000
  device_memory_size: 84929347584
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclass(frozen=True)
class Machine:
    """A kind of accelerator; its numbers are those of one device, as JAX counts devices.

    Attributes:
      name: how targets name it.
      kind: what JAX calls its devices.
      memory: bytes that a program can have: on TPU what the compiler allows.
      flops: published peak of dense bfloat16 operations a second.
      bandwidth: published peak of bytes a second between memory and cores.
      source: where both are published.
      one: the topology of the fewest devices, taken where a target names none.
      example: the name of a target of several devices.
      options: for the description of its topology.
    """

    name: str
    kind: str
    memory: int
    flops: float
    bandwidth: float
    source: str
    one: str
    example: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_tpu(self) -> bool:
        return self.kind.startswith("TPU")


_TPU_DOCS = "https://cloud.google.com/tpu/docs/"
MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            name="v4",
            kind="TPU v4",
            memory=int(30.75 * _GIB),
            flops=275e12,
            bandwidth=1228e9,
            source=_TPU_DOCS + "v4",
            one="1x1x1",
            example="v4:2x2x1",
            options={"chip_config_name": "megacore"},  # both cores one device, as on the machine
        ),
        Machine(
            name="v5e",
            kind="TPU v5 lite",
            memory=int(15.75 * _GIB),
            flops=197e12,
            bandwidth=819e9,
            source=_TPU_DOCS + "v5e",
            one="1x1",
            example="v5e:2x4",
        ),
        Machine(
            name="v5p",
            kind="TPU v5",
            memory=int(95.74 * _GIB),
            flops=459e12,
            bandwidth=2765e9,
            source=_TPU_DOCS + "v5p",
            one="1x1x1",
            example="v5p:2x2x1",
        ),
        Machine(
            name="v6e",
            kind="TPU v6 lite",
            memory=int(31.25 * _GIB),
            flops=918e12,
            bandwidth=1640e9,
            source=_TPU_DOCS + "v6e",
            one="1x1",
            example="v6e:2x2",
        ),
        Machine(  # two devices a chip
            name="tpu7x",
            kind="TPU7x",
            memory=int(94.75 * _GIB),
            flops=2307e12 / 2,
            bandwidth=7380e9 / 2,
            source=_TPU_DOCS + "tpu7x",
            one="1x1x1",
            example="tpu7x:2x2x1",
        ),
        Machine(
            name="h100",
            kind="NVIDIA H100 80GB HBM3",
            memory=84929347584,
            flops=989e12,
            bandwidth=3352e9,
            source="https://www.nvidia.com/en-us/data-center/h100/",
            one="1",
            example="h100:8",
            options={"target_config": _H100},
        ),
    )
}


@dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Attributes:
      name: as it was asked for; of the machine at hand what JAX calls its devices.
      devices: they need not be here.
      memory: bytes of one device, None where a device does not say.
      machine: what is published of them, None where it is not known here.
    """

    name: str
    devices: tuple[Any, ...]
    memory: int | None
    machine: Machine | None

    @property
    def platform(self) -> str:
        """`"cpu"`, `"gpu"` or `"tpu"`."""
        return self.devices[0].platform

    def peak_bytes(self, memory: Any) -> int:
        """The most that a program holds at any time, by its `memory_analysis()`."""
        if self.platform != "cpu":
            return memory.peak_memory_in_bytes
        # The CPU's own peak leaves out most of the program.
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes + results


def find_target(fn: str, name: str | None) -> Target:
    """The machine at hand, or one that is not here, by name: `"v5e:2x4"`, `"h100"`.

    Raises:
      TypeError: the name is no string.
      ValueError: there is no such machine, or its compiler knows no such topology.
      ImportError: its compiler is not installed; the message says what to install.
    """
    if name is None:
        return target_of(jax.devices())
    if not isinstance(name, str):
        raise TypeError(
            f"{fn}: target must be a string such as 'v5e:2x4', or None for the machine at hand, "
            f"got {name!r} of type {type(name).__name__}."
        )
    kind, _, topology = name.partition(":")
    if kind not in MACHINES:
        known = ", ".join(f"{m.name}, {m.example}" for m in MACHINES.values())
        raise ValueError(
            f"{fn}: unknown target {name!r}. Use a machine's name for one device, or name and "
            f"topology for several: {known}; or None for the machine at hand."
        )
    machine = MACHINES[kind]
    topology = topology or machine.one
    numbers = r"\d+(x\d+){1,2}" if machine.is_tpu else r"[1-9]\d*"
    known = f"{machine.name} for one device, {machine.example} for several"
    if not re.fullmatch(numbers, topology):
        raise ValueError(f"{fn}: target {name!r} has no topology {topology!r}. Use {known}.")
    _check_installed(fn, machine)
    try:
        devices = _tpus(machine, topology) if machine.is_tpu else _gpus(machine, topology)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"{fn}: the compiler knows no target {name!r}: {error} Use {known}."
        ) from error
    return Target(name, tuple(devices), machine.memory, machine)


def target_of(devices: Any) -> Target:
    """Devices that are here, or that the caller has made to compile for."""
    device = devices[0]
    machine = next((m for m in MACHINES.values() if m.kind == device.device_kind), None)
    try:
        memory = (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # one that is not here has no allocator to ask
        memory = machine and machine.memory
    return Target(device.device_kind, tuple(devices), memory, machine)


def refused_bytes(error: Exception) -> int | None:
    """The bytes that a program would need, by a compiler that refuses it for that.

    Raises:
      Exception: `error` itself, where it is no such refusal.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        raise error
    needs = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available|Used ([\d.]+)([KMGT]?) of ", text)
    if needs is None:
        return None
    number, unit = (x for x in needs.groups() if x is not None)
    return round(float(number) * 1024 ** " KMGT".index(unit or " "))


def _check_installed(fn: str, machine: Machine) -> None:
    if machine.is_tpu:
        compilers, install = ("libtpu",), "pip install 'accum-jax[aot]'"
    else:
        compilers = ("jax_cuda12_plugin", "jax_cuda13_plugin")
        version = importlib.metadata.version("jaxlib")
        install = (
            f"pip install --no-deps jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version} (no "
            "driver is needed)"
        )
    if not any(importlib.util.find_spec(name) for name in compilers):
        raise ImportError(
            f"{fn}: the compiler for {machine.name}, {compilers[0]}, is not installed. Run: "
            f"{install}."
        )


def _tpus(machine: Machine, topology: str) -> Any:
    dims = [int(n) for n in topology.split("x")]
    bounds = tuple(map(min, _CHIPS_PER_HOST, [*dims, 1][:3]))
    name = f"{machine.name}:{topology}"
    found = _describe(_LIBTPU, "tpu", name, chips_per_host_bounds=bounds, **machine.options)
    return found.devices


def _gpus(machine: Machine, count: str) -> Any:
    return _describe(_CUDA, "cuda", "", topology=f"1x1x{count}", **machine.options).devices


def _describe(variables: dict[str, str], platform: str, name: str, **options: Any) -> Any:
    from jax.experimental import topologies  # not before it is needed

    with _environment(variables):
        return topologies.get_topology_desc(platform=platform, topology_name=name, **options)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets what is not set for the length of a block."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
