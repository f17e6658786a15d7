"""Eight CPU devices and the fixtures that the test files share."""

from __future__ import annotations

import os
from importlib.metadata import version

# Before jax starts: it reads them once. Most of the time goes into compiling small programs that
# run once; the last two flags change nothing that the tests read of a program.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        # Later ones do not know it.
        "--xla_cpu_use_fusion_emitters=false" if version("jax") < "0.11" else "",
    )
)

import jax
import pytest


@pytest.fixture(params=["eager", "jit"])
def run(request):
    """`run(fn)` is `fn` as it stands, then under `jax.jit`."""
    return jax.jit if request.param == "jit" else lambda fn: fn


@pytest.fixture
def x64():
    """float64 for the length of one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict_promotion():
    """float32 plus float64 raises rather than widens; optax and Flax cannot run under it."""
    with jax.numpy_dtype_promotion("strict"):
        yield
