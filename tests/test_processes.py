"""Several processes train together, over gloo on this machine."""

from __future__ import annotations

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

HERE = Path(__file__).parent
UPDATES = 6
REPLICATED, HYBRID = {"data": 8}, {"replica": 2, "fsdp": 4}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(axes: dict[str, int], *options: str, timeout: float = 100) -> list[tuple[int, str, str]]:
    """Runs two processes of four devices each; returns code, output and errors of both."""
    shared = [
        *(sys.executable, HERE / "worker.py", "--port", str(free_port()), "--processes", "2"),
        *("--devices", "4", "--axes", json.dumps(axes), "--updates", str(UPDATES), *options),
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    running = [
        subprocess.Popen(
            [*shared, "--process", str(i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for i in range(2)
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
