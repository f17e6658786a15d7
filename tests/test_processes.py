"""Several processes train together, over gloo on this machine."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from layers import assert_close, layered_problem, masked
from test_readme import BLOCKS

HERE = Path(__file__).parent
UPDATES = 6
REPLICATED, HYBRID = {"data": 8}, {"replica": 2, "fsdp": 4}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(axes: dict[str, int], *options: str, timeout: float = 100) -> list[tuple[int, str, str]]:
    """Runs two workers of four devices each; returns code, output and errors of both."""
    shared = [
        *(sys.executable, str(HERE / "worker.py"), "--port", str(free_port()), "--processes", "2"),
        *("--devices", "4", "--axes", json.dumps(axes), "--updates", str(UPDATES), *options),
    ]
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    return run_both(
        [([*shared, "--process", str(i)], {"PYTHONPATH": path}) for i in range(2)], timeout
    )


def run_both(
    commands: list[tuple[list[str], dict[str, str]]], timeout: float
) -> list[tuple[int, str, str]]:
    """Runs commands side by side, each with its variables; returns code, output and errors."""
    running = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        for command, variables in commands
    ]
    deadline, ended = time.monotonic() + timeout, []
    try:
        for process in running:
            out, err = process.communicate(timeout=max(deadline - time.monotonic(), 1))
            ended.append((process.returncode, out, err))
    finally:
        for process in running:
            process.kill()
            process.wait()
    return ended


def results(ended: list[tuple[int, str, str]]) -> list[dict[str, Any]]:
    for code, _, err in ended:
        assert code == 0, err
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


def expected() -> tuple[list[float], Any]:
    """Losses and last parameters of one device with the whole batch."""
    params, batch = layered_problem(32)
    tx = optax.adam(0.1)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(masked)(params, batch)
        updates, state = tx.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    state, values = tx.init(params), []
    for _ in range(UPDATES):
        value, params, state = step(params, state)
        values.append(float(value))
    return values, params


@pytest.mark.parametrize(
    "axes", [REPLICATED, pytest.param(HYBRID, marks=pytest.mark.slow)], ids=str
)
def test_two_processes_agree_with_one_device(axes):
    values, params = expected()
    first, second = results(launch(axes))
    assert first == second
    assert first["values"] == pytest.approx(values, rel=1e-5)
    # Adam divides by the root of a sum of squares: rounding of small gradients is amplified.
    got = jax.tree.map(jnp.float32, first["params"], is_leaf=lambda x: isinstance(x, list))
    assert_close(got, params, 1e-4)
    if axes == REPLICATED:
        assert first["collectives"] == [["all-reduce", "float32", False]]


@pytest.mark.slow  # three launches, and the wait for the process that is gone
def test_a_process_dies_and_the_run_is_taken_up_again(tmp_path):
    axes = HYBRID
    whole, _ = results(launch(axes))
    before = time.monotonic()
    options = ("--folder", str(tmp_path), "--save-after", "3")
    survivor, dead = launch(axes, *options, "--die-after", "4")
    assert dead[0] == 3
    assert survivor[0] not in (0, None)  # an error, no result of one process alone
    assert '"params"' not in survivor[1]
    assert time.monotonic() - before < 90

    first, second = results(launch(axes, *options))
    assert first == second
    assert first["start"] == 3
    assert first["values"] == whole["values"][3:]
    assert first["params"] == whole["params"]


@pytest.mark.slow
def test_recipe_of_the_readme_on_two_hosts_and_taken_up_again(tmp_path):
    blocks = [block["code"] for _, block in (case.values for case in BLOCKS)]
    (code,) = [code for code in blocks if "jax.distributed.initialize" in code]
    code += "print([x.hex() for x in np.asarray(params.addressable_data(0)).tolist()])\n"

    def run(updates, folder, hosts=2):
        variables = {
            "PYTHONPATH": str(HERE.parent),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // hosts}",
            "JAX_PLATFORMS": "cpu",
            "FOLDER": str(folder),
        }
        if hosts > 1:
            variables["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
            variables["COORDINATOR"] = f"127.0.0.1:{free_port()}"
            variables["HOSTS"] = str(hosts)
        script = code.replace('"count")), 4)', f'"count")), {updates})')
        commands = [
            ([sys.executable, "-c", script], variables | ({"HOST": str(i)} if hosts > 1 else {}))
            for i in range(hosts)
        ]
        ended = run_both(commands, timeout=100)
        for status, _, err in ended:
            assert status == 0, err
        return [out.splitlines()[-2:] for _, out, _ in ended]

    first, second = run(2, tmp_path / "two")
    assert first[0] == second[0] == "2 True"
    first, second = run(4, tmp_path / "two")
    assert first == second
    (alone,) = run(4, tmp_path / "one", hosts=1)
    assert alone[0] == first[0] == "4 True"
    each = [[float.fromhex(x) for x in ast.literal_eval(end[1])] for end in (alone, first)]
    assert each[1] == pytest.approx(each[0], rel=1e-5)
