"""Machines to compile for: the one at hand, and TPUs and GPUs that are not here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

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
    def of(cls, compiled: Any, platform: str) -> Memory:
        """Reads what a program compiled for a platform needs."""
        found = compiled.memory_analysis()
        assert found is not None  # CPU, GPU and TPU all have it.
        arguments = found.argument_size_in_bytes
        if platform == "cpu":  # its peak leaves out most of the program
            results = found.output_size_in_bytes - found.alias_size_in_bytes
            beyond = found.temp_size_in_bytes + results
        else:
            beyond = found.peak_memory_in_bytes - arguments
        return cls(found.temp_size_in_bytes, beyond, arguments + beyond)


def tpu_devices(topology: str) -> Sequence[Any]:
    """The TPUs of a topology, to compile for; they need not be here.

    Raises:
        RuntimeError, ValueError: there is no libtpu, or it does not know the topology.
    """
    # Without these libtpu asks the network what machine this is, and runs only once.
    for variable, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(variable, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def h100_devices(count: int) -> Sequence[Any]:
    """H100s of one host, to compile for; neither they nor a driver need be here.

    Raises:
        RuntimeError: there is no CUDA plugin.
    """
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # of libraries not needed here
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=_H100, topology=f"1x1x{count}"
    ).devices


class Target:
    """A device to compile for; nothing is allocated on it.

    Args:
        name: None for the backend at hand, or a topology as `"v5e:2x2"`, of which the first device
            is taken.

    Raises:
        RuntimeError, ValueError: there is no libtpu, or it does not know the topology.
    """

    def __init__(self, name: str | None):
        if name is None:
            device = jax.devices()[0]
        else:
            device = tpu_devices(name)[0]
        self.name = name or device.device_kind
        self.platform = device.platform
        self._sharding = SingleDeviceSharding(device)

    def memory(self, fn: Any, *args: Any, donate: tuple[int, ...] = ()) -> Memory:
        """Compiles `fn` for arguments of these shapes and reads what it needs."""
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), args
        )
        compiled = jax.jit(fn, donate_argnums=donate).lower(*args).compile()
        return Memory.of(compiled, self.platform)
