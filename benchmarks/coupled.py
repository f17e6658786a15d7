"""What does a loss that couples rows cost, as the batch grows, against the whole batch?

Plain accumulation stands beside it as the cost of one pass less, not as an equal: its rows see only
their microbatch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import accum_jax
from benchmarks.report import OURS, PEER, Claim, Result, Table
from benchmarks.speed import take_turns
from benchmarks.targets import Target

_MICROBATCH, _FEATURES, _LAYERS, _WIDTH, _SIZE = 32, 64, 8, 512, 64
_WHOLE, _COUPLED, _PLAIN, _LOSS = (
    "whole batch",
    "coupled_value_and_grad",
    "value_and_grad (other loss)",
    "loss of given embeddings",
)
# Of the growth of what the loss alone needs, for given embeddings.
_GROWTH_LIMIT = 1.25


def encode(params: Any, batch: Any) -> Any:
    """Two towers of the same layers, [rows, features] to [rows, size] each."""

    def tower(x):
        x = x @ params["first"]
        for w in params["layers"]:
            x += jax.nn.gelu(x @ w)
        return x @ params["last"]

    return {"a": tower(batch["a"]), "b": tower(batch["b"])}


def loss(params: Any, z: Any, batch: Any) -> jax.Array:
    """Symmetric cross entropy of finding a row's other tower among those of the batch."""
    a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (z["a"], z["b"]))
    logits = a @ b.T * jnp.exp(params["log_scale"])
    rows, columns = (jnp.diagonal(jax.nn.log_softmax(logits, axis)) for axis in (1, 0))
    return -jnp.mean(rows + columns) / 2


def whole(params: Any, batch: Any) -> jax.Array:
    return loss(params, encode(params, batch), batch)


WAYS: dict[str, Callable[..., Any]] = {
    _WHOLE: jax.value_and_grad(whole),
    _COUPLED: accum_jax.coupled_value_and_grad(encode, loss, microbatch_size=_MICROBATCH),
    _PLAIN: accum_jax.value_and_grad(whole, microbatch_size=_MICROBATCH),
}


def problem(num_rows: int) -> tuple[Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), _LAYERS + 4))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    params = {
        "first": normal(_FEATURES, _WIDTH),
        "layers": [normal(_WIDTH, _WIDTH) for _ in range(_LAYERS)],
        "last": normal(_WIDTH, _SIZE),
        "log_scale": jnp.zeros(()),
    }
    return params, {name: normal(num_rows, _FEATURES) for name in ("a", "b")}


def measure_memory(target: Target, name: str, num_rows: int) -> dict[str, Any]:
    params, batch = jax.eval_shape(lambda: problem(num_rows))
    if name == _LOSS:
        both = jax.value_and_grad(loss, argnums=(0, 1))
        found = target.memory(both, params, jax.eval_shape(encode, params, batch), batch)
    else:
        found = target.memory(WAYS[name], params, batch)
    return {"target": target.name, "way": name, "rows": num_rows, "temp": found.temp}


class _Call:
    """One way on a batch, compiled; `update()` is the seconds of a call."""

    def __init__(self, name: str, num_rows: int):
        self._args = problem(num_rows)
        self._compiled = jax.jit(WAYS[name]).lower(*self._args).compile()

    def update(self) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self._compiled(*self._args))
        return time.perf_counter() - start


def measure_time(num_rows: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of each call of each way, which take turns."""
    times = take_turns([_Call(name, num_rows) for name in WAYS], seconds)
    return dict(zip(WAYS, times, strict=True))


def run(quick: bool, targets: Sequence[Target], announce: Callable[[str], None]) -> Result:
    """Measures memory for `targets`; without any, memory and time of the device at hand."""
    sizes = (128, 2048) if quick else (128, 256, 512, 1024, 2048)
    timed = sizes[:1] if quick else sizes
    rows = []
    for target in targets or [Target(None)]:
        for num_rows in sizes:
            announce(f"coupled: {num_rows} rows, for {target.name}")
            own = [measure_memory(target, name, num_rows) for name in (*WAYS, _LOSS)]
            if not targets and num_rows in timed:
                times = measure_time(num_rows, seconds=5 if quick else 30)
                for row in own[: len(WAYS)]:
                    each = zip(times[row["way"]], times[_WHOLE], strict=True)
                    row["median_ms"] = 1e3 * statistics.median(times[row["way"]])
                    row["ratio"] = statistics.median(a / b for a, b in each)
            rows += own
    names = list(dict.fromkeys(row["target"] for row in rows))
    tables = [_table([row for row in rows if row["target"] == name]) for name in names]
    claims = [_claim(name, rows, sizes) for name in names]
    return Result(rows, tables, claims, lambda figure: _draw(figure, rows))


def _table(rows: list[dict[str, Any]]) -> Table:
    return Table(
        f"A loss that couples rows: {rows[0]['target']}",
        ("way", "rows", "temp", "median", "time / whole batch"),
        [
            (
                row["way"],
                str(row["rows"]),
                f"{row['temp'] / 1e6:.1f} MB",
                f"{row['median_ms']:.1f} ms" if "median_ms" in row else "",
                f"{row['ratio']:.2f}" if "ratio" in row else "",
            )
            for row in rows
        ],
        f"Two towers of {_LAYERS} layers of width {_WIDTH}, microbatches of {_MICROBATCH} rows, "
        f"embeddings of {_SIZE}. temp: temporaries of value and gradient. The last way computes "
        "another loss: each microbatch's own.",
    )


def _claim(target: str, rows: list[dict[str, Any]], sizes: Sequence[int]) -> Claim:
    """Memory grows by what the loss itself needs of the whole batch, and nothing else."""

    def growth(way: str) -> int:
        own = (row for row in rows if (row["target"], row["way"]) == (target, way))
        temp = {row["rows"]: row["temp"] for row in own}
        return temp[sizes[-1]] - temp[sizes[0]]

    measured = growth(_COUPLED) / growth(_LOSS)
    text = f"{target}: growth of temp from {sizes[0]} to {sizes[-1]} rows / of the loss alone"
    return Claim(text, measured, _GROWTH_LIMIT, measured)


def _draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    first = rows[0]["target"]
    axes = figure.subplots(1, 2)
    styles = {_WHOLE: (PEER, "-"), _COUPLED: (OURS, "-"), _PLAIN: ("#999999", ":")}
    for axis, key, scale, label in zip(
        axes, ("temp", "median_ms"), (1e-6, 1), ("temporaries, MB", "time, ms"), strict=True
    ):
        for name, (colour, line) in styles.items():
            own = [row for row in rows if (row["way"], row["target"]) == (name, first)]
            points = [(row["rows"], row[key] * scale) for row in own if key in row]
            if points:
                axis.plot(*zip(*points, strict=True), line, color=colour, marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel="rows of the batch", ylabel=label)
        axis.grid(alpha=0.25)
    axes[0].set_title(first)
    axes[0].legend(frameon=False)
