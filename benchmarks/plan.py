"""Does a plan say what a step needs, and how long does it take to make?

The peak that `accum_jax.plan` predicts for the microbatch that it recommends, against what the
compiler says of the same update written out by hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

import accum_jax
from benchmarks import models
from benchmarks.models import Model
from benchmarks.report import Claim, Result, Table, bars
from benchmarks.targets import Target

_SECONDS = 180.0  # a 12-layer transformer on two cores
_LIMIT_OF_WHOLE = 0.4  # where a machine names no memory: of what the whole batch needs


def measure(name: str | None, target: Target, model: Model, rows: int) -> dict[str, Any]:
    """Plans an update of `rows` rows, then compiles it by hand."""
    params, batch = model.shapes(rows)
    tx = optax.adam(1e-3)
    limit = None
    whole = accum_jax.plan(model.loss_fn, tx, params, batch, target=name, microbatch_sizes=[rows])
    if whole.memory_limit is None:
        assert whole.rows[0].peak_bytes is not None  # a CPU refuses nothing
        limit = int(_LIMIT_OF_WHOLE * whole.rows[0].peak_bytes)
    start = time.perf_counter()
    plan = accum_jax.plan(model.loss_fn, tx, params, batch, target=name, memory_limit=limit)
    seconds = time.perf_counter() - start
    best = plan.best
    assert best is not None and best.peak_bytes is not None
    value_and_grad = accum_jax.value_and_grad(model.loss_fn, microbatch_size=best.microbatch_size)

    def step(params, opt_state, batch):
        value, grads = value_and_grad(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    state = jax.eval_shape(tx.init, params)
    compiled = target.memory(step, params, state, batch, donate=(0, 1)).total
    return {
        "target": target.name,
        "model": model.name,
        "rows": rows,
        "microbatch": best.microbatch_size,
        "k": best.k,
        "predicted": best.peak_bytes,
        "compiled": compiled,
        "compilations": len(plan.rows),
        "seconds": seconds,
    }


def run(quick: bool, targets: Sequence[Target], announce: Callable[[str], None]) -> Result:
    """Plans for `targets`; without any, for the device at hand."""
    cases = [(models.transformer(layers=12, width=256, length=64, microbatch_size=1), 256)]
    if not quick:
        cases += [
            (models.mlp(layers=12, width=1024, microbatch_size=1), 4096),
            (models.transformer(layers=12, width=768, length=512, microbatch_size=1), 512),
        ]
    rows = []
    for target in targets or [Target(None)]:
        for model, size in cases:
            announce(f"plan: {model.name}, {size} rows, for {target.name}")
            rows.append(measure(target.name if targets else None, target, model, size))
    table = Table(
        "Plans: the largest microbatch that fits",
        ("target, model, rows", "microbatch", "k", "predicted", "compiled", "compiles", "seconds"),
        [
            (
                _name(row),
                str(row["microbatch"]),
                str(row["k"]),
                f"{row['predicted'] / 1e6:.1f} MB",
                f"{row['compiled'] / 1e6:.1f} MB",
                str(row["compilations"]),
                f"{row['seconds']:.1f}",
            )
            for row in rows
        ],
        "predicted: the plan's peak. compiled: the compiler's, of the update written out by hand.",
    )
    claims = [claim for row in rows for claim in _claims(row)]
    return Result(rows, [table], claims, lambda figure: _draw(figure, rows))


def _name(row: dict[str, Any]) -> str:
    return f"{row['target']}, {row['model']}, {row['rows']}"


def _claims(row: dict[str, Any]) -> list[Claim]:
    ratio = row["predicted"] / row["compiled"]
    off = max(ratio, 1 / ratio)
    return [
        Claim(f"{_name(row)}: peak predicted / compiled, or its inverse", off, 1.0, off),
        Claim(f"{_name(row)}: seconds", row["seconds"], _SECONDS, row["seconds"]),
    ]


def _draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    axes = figure.subplots()
    names = [_name(row) for row in rows]
    bars(axes, names, [row["predicted"] / row["compiled"] for row in rows], [True] * len(rows))
    axes.axvline(1, color="#222222", linewidth=0.8, linestyle=":")
    axes.set(xlabel="peak predicted / compiled")
    axes.invert_yaxis()
