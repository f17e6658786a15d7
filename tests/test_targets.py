"""The machines that programs can be compiled for."""

from __future__ import annotations

import importlib.util
import os
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from accum_jax._targets import _LIBTPU, MACHINES, find_target, refused_bytes, target_of

GIB = 2**30


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (94.99G) exceeds available HBM (15.75G).",
            94.99 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 16.50G of 15.75G hbm. Exceeded hbm capacity by 769.17M.",
            16.5 * GIB,
        ),
        ("RESOURCE_EXHAUSTED: ... required for HLO temporaries (512.5M) exceeds", None),
        ("RESOURCE_EXHAUSTED: Used 900.25M of 800M hbm.", 900.25 * 2**20),
    ],
)
def test_a_refusal_names_what_is_needed(message, needed):
    assert refused_bytes(RuntimeError(message)) == (needed and round(needed))


def test_another_error_is_no_refusal():
    with pytest.raises(RuntimeError, match="INTERNAL"):
        refused_bytes(RuntimeError("INTERNAL: Used 3G of 2G hbm"))


def test_the_machine_at_hand():
    target = find_target("plan", None)
    assert (target.platform, target.memory, target.machine) == ("cpu", None, None)
    assert len(target.devices) == jax.device_count()


@pytest.mark.parametrize(
    ("name", "install"),
    [
        ("v5e:2x4", r"libtpu, is not installed. Run: pip install 'accum-jax\[aot\]'"),
        ("h100", r"jax_cuda12_plugin, is not installed. Run: pip install --no-deps jax-cuda12-"),
    ],
)
def test_a_compiler_that_is_missing(name, install, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"^plan: the compiler for .*{install}"):
        find_target("plan", name)


def test_every_machine_says_where_its_rates_are_published():
    for name, machine in MACHINES.items():
        assert machine.name == name and machine.source.startswith("https://")
        # From a hundred to a few thousand operations for each byte.
        assert 100 < machine.flops / machine.bandwidth < 1000
        assert 8 * GIB < machine.memory < 256 * GIB


TPUS = [machine for machine in MACHINES.values() if machine.is_tpu]


@pytest.mark.parametrize("machine", TPUS, ids=lambda machine: machine.name)
def test_a_tpu_has_the_memory_that_its_compiler_allows(machine, monkeypatch):
    pytest.importorskip("libtpu")
    for name in _LIBTPU:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    target = find_target("plan", machine.name)
    assert dict(os.environ) == before
    assert {device.device_kind for device in target.devices} == {machine.kind}
    assert len(find_target("plan", machine.example).devices) > len(target.devices)

    x = jax.ShapeDtypeStruct(
        (2**19, 1024), jnp.float32, sharding=SingleDeviceSharding(target.devices[0])
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="exceeds available HBM") as error:
        jax.jit(lambda x: ((x @ x.T) @ (x @ x.T)).sum()).lower(x).compile()
    allowed = re.search(r"HBM \(([\d.]+)G\)", str(error.value))
    # Versions of libtpu differ by a hundredth of a GiB.
    assert machine.memory == pytest.approx(float(allowed[1]) * GIB, abs=0.02 * GIB)
    assert refused_bytes(error.value) > machine.memory
    # What a caller made to compile for is known by its kind.
    assert target_of(target.devices).memory == machine.memory


def test_a_topology_that_libtpu_does_not_know():
    pytest.importorskip("libtpu")
    with pytest.raises(ValueError, match="plan: the compiler knows no target 'v5e:3x5'"):
        find_target("plan", "v5e:3x5")


def test_an_h100():
    pytest.importorskip("jax_cuda12_plugin")
    target = find_target("plan", "h100:8")
    assert (len(target.devices), target.platform) == (8, "gpu")
    w = jax.ShapeDtypeStruct(
        (64, 64), jnp.float32, sharding=SingleDeviceSharding(target.devices[0])
    )
    memory = jax.jit(lambda w: w @ w).lower(w).compile().memory_analysis()
    assert target.peak_bytes(memory) == 2 * 64 * 64 * 4
