"""How long does an update of k microbatches take, against a scan written by hand?

The ways take turns, in an order drawn anew for each round, so that whatever slows the machine down
slows all of them; ratios are taken within rounds.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from benchmarks import models, ways
from benchmarks.models import Model
from benchmarks.report import Claim, Result, Table, bars
from benchmarks.targets import Target
from benchmarks.ways import Way

_BASELINE = ways.HAND_WRITTEN
# At most so many times the time of the hand-written scan. For the MLP the compiled loop in place is
# that scan's instruction by instruction, with the same FLOPs and bytes, in an order of XLA's that
# takes 2 to 7 % longer on a CPU.
_LIMITS = {
    "MLP, Python layers": {ways.ACCUMULATE: 1.02, ways.IN_PLACE: 1.05},
    "transformer, scanned layers": {ways.ACCUMULATE: 1.02, ways.IN_PLACE: 1.0},
}
# Of the MLP: how many times faster than the loop of calls ours must be.
_FASTER_THAN_MULTI_STEPS = 1.8
_MULTI_STEPS_LIMIT = 0.75  # of the time of the optax.MultiSteps loop


class Runner:
    """One way, compiled, with its parameters and state; `update()` is the seconds of an update."""

    def __init__(self, model: Model, way: Way, k: int):
        batch = jax.tree.map(jnp.asarray, model.batch(model.microbatch_size * k))
        calls = 1 if way.one_call else k
        self._batches = [jax.tree.map(lambda x, i=i: x[i::calls], batch) for i in range(calls)]
        self._params = jax.jit(model.init)(jax.random.key(0))
        self._state = way.optimizer(k).init(self._params)
        step = jax.jit(way.step(model, k), donate_argnums=(0, 1))
        self._step = step.lower(self._params, self._state, self._batches[0]).compile()
        self.cost = dict(self._step.cost_analysis() or {})

    def update(self) -> float:
        start = time.perf_counter()
        for batch in self._batches:
            self._params, self._state, _ = self._step(self._params, self._state, batch)
        jax.block_until_ready(self._params)
        return time.perf_counter() - start


class Timed(Protocol):
    def update(self) -> float:
        """Seconds of one call."""
        ...


def take_turns(runners: Sequence[Timed], seconds: float) -> list[list[float]]:
    """Seconds of each update of each runner, one a round, for about `seconds` (eight at least)."""
    for runner in runners:
        runner.update()
    times: list[list[float]] = [[] for _ in runners]
    order, rng = list(range(len(runners))), random.Random(0)
    end = time.perf_counter() + seconds
    while len(times[0]) < 8 or time.perf_counter() < end:
        rng.shuffle(order)
        for i in order:
            times[i].append(runners[i].update())
    return times


def median_interval(values: Iterable[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median, from order statistics: no distribution assumed."""
    ordered = sorted(values)
    n = len(ordered)
    reach = 0.98 * n**0.5
    return ordered[max(0, round(n / 2 - reach) - 1)], ordered[min(n - 1, round(n / 2 + reach))]


def measure(
    model: Model, selected: Sequence[Way], k: int, seconds: float, **others: Any
) -> list[dict[str, Any]]:
    """One row for each way; times in milliseconds for an update of k microbatches.

    `others` are runners that are no way to use JAX, by name.
    """
    runners = {way.name: Runner(model, way, k) for way in selected} | others
    times = take_turns(list(runners.values()), seconds)
    baseline = times[selected.index(_BASELINE)]
    rows = []
    for (name, runner), own in zip(runners.items(), times, strict=True):
        ratios = [a / b for a, b in zip(own, baseline, strict=True)]
        lower, middle, upper = statistics.quantiles(own, n=4)
        rows.append(
            {
                "model": model.name,
                "way": name,
                "k": k,
                "rounds": len(own),
                "lower_quartile_ms": 1e3 * lower,
                "median_ms": 1e3 * middle,
                "upper_quartile_ms": 1e3 * upper,
                "least_ms": 1e3 * min(own),
                "ratio": statistics.median(ratios),
                "ratio_interval": median_interval(ratios),
                "call_bytes": runner.cost.get("bytes accessed"),
                "call_flops": runner.cost.get("flops"),
                "times_ms": [round(1e3 * x, 4) for x in own],
            }
        )
    return rows


def small_mlp() -> Model:
    return models.mlp(layers=4, width=512, microbatch_size=8)


def small_transformer() -> Model:
    # Larger than a cache and few tokens a pass, so that what is done with gradients shows.
    return models.transformer(layers=4, width=512, length=16, microbatch_size=1)


def run(quick: bool, targets: Sequence[Target], announce: Callable[[str], None]) -> Result:
    """Times the models on the device at hand; nothing runs on `targets`, which are not here."""
    claimed = (ways.HAND_WRITTEN, ways.ACCUMULATE, ways.IN_PLACE)
    rows = []
    for model, k, others in (
        (small_mlp(), 16, (ways.OPTAX_MULTI_STEPS, ways.MULTI_STEPS)),
        (small_transformer(), 8, ()),
    ):
        announce(f"speed: {model.name}, k = {k}")
        if quick:
            rows += measure(model, (*claimed, *others), k, seconds=12)
        else:
            rows += measure(model, ways.WAYS, k, seconds=120, **_beside_jax(model, k))
    names = dict.fromkeys(row["model"] for row in rows)
    tables = [_table([row for row in rows if row["model"] == name]) for name in names]
    return Result(rows, tables, _claims(rows), lambda figure: _draw(figure, rows))


def _beside_jax(model: Model, k: int) -> dict[str, Any]:
    """The same in PyTorch on a CPU, where it is installed: `pip install torch`."""
    if model.name != small_mlp().name or jax.default_backend() != "cpu" or not find_spec("torch"):
        return {}
    from benchmarks.torch_loop import TorchRunner

    return {"PyTorch loop": TorchRunner(model, k)}


def _table(rows: list[dict[str, Any]]) -> Table:
    return Table(
        f"Time of an update: {rows[0]['model']}, k = {rows[0]['k']}",
        ("way", "median (quartiles)", "least", "ratio (95 %)", "moves"),
        [
            (
                row["way"],
                "{median_ms:.1f} ({lower_quartile_ms:.1f} to {upper_quartile_ms:.1f}) ms".format(
                    **row
                ),
                f"{row['least_ms']:.1f} ms",
                "{:.2f} ({:.2f} to {:.2f})".format(row["ratio"], *row["ratio_interval"]),
                f"{row['call_bytes'] / 1e6:.1f} MB" if row["call_bytes"] else "",
            )
            for row in rows
        ],
        f"{rows[0]['rounds']} rounds in which the ways took turns. ratio: to the scan written by "
        "hand, the median of the ratios within rounds. moves: bytes read and written by one call, "
        "a loop's body counted once.",
    )


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    found = {(row["model"], row["way"]): row for row in rows}
    claims = []
    for model, limits in _LIMITS.items():
        for way, limit in limits.items():
            row = found[model, way.name]
            text = f"{model}, {way.name}: time / hand-written scan"
            claims.append(Claim(text, row["ratio"], limit, row["ratio_interval"][0]))
    mlp = small_mlp().name
    peer = found[mlp, ways.OPTAX_MULTI_STEPS.name]["times_ms"]
    for way, limit in (
        (ways.ACCUMULATE, 1 / _FASTER_THAN_MULTI_STEPS),
        (ways.IN_PLACE, 1 / _FASTER_THAN_MULTI_STEPS),
        (ways.MULTI_STEPS, _MULTI_STEPS_LIMIT),
    ):
        own = found[mlp, way.name]["times_ms"]
        ratios = [a / b for a, b in zip(own, peer, strict=True)]
        text = f"{mlp}, {way.name}: time / {ways.OPTAX_MULTI_STEPS.name}"
        claims.append(Claim(text, statistics.median(ratios), limit, median_interval(ratios)[0]))
    return claims


def _draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["model"] for row in rows))
    axes = figure.subplots(1, len(names), sharey=True)
    for axis, name in zip(axes, names, strict=True):
        own = [row for row in rows if row["model"] == name]
        labels = [row["way"] for row in own]
        bars(axis, labels, [row["ratio"] for row in own], [x in ways.OURS for x in labels])
        lower, upper = zip(*(row["ratio_interval"] for row in own), strict=True)
        axis.hlines(range(len(own)), lower, upper, color="#222222", linewidth=1.5)
        axis.axvline(1, color="#222222", linewidth=0.8, linestyle=":")
        axis.set(title=f"{name}, k = {own[0]['k']}", xlabel="time of an update / hand-written scan")
    axes[0].invert_yaxis()
