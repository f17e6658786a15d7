"""How much memory does an update of k microbatches need beyond one microbatch's gradient?

Read from the compiler, of programs compiled from shapes: nothing is allocated or run, and machines
that are not here can be asked too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import accum_jax
from benchmarks import models, ways
from benchmarks.models import Model
from benchmarks.report import Claim, Result, Table, bars
from benchmarks.targets import Target
from benchmarks.ways import Way

K = 8
_MORE = 64
_CONTRAST = (ways.HAND_WRITTEN, ways.ACCUMULATE, ways.IN_PLACE, ways.IN_PLACE_WEIGHTED)
# Peak beyond the arguments on TPU, (temp - A) / P elsewhere.
_LIMITS = {ways.IN_PLACE.name: (1.6, 1.15), ways.IN_PLACE_WEIGHTED.name: (1.6, 1.25)}


def large_mlp() -> Model:
    return models.mlp(layers=12, width=2048, microbatch_size=64)


def large_transformer(**dtypes: Any) -> Model:
    return models.transformer(layers=16, width=512, length=128, microbatch_size=4, **dtypes)


def microbatch_temp(target: Target, model: Model) -> int:
    """Temporaries of `jax.value_and_grad` on one microbatch, in bytes."""
    return target.memory(
        jax.value_and_grad(model.loss_fn), *model.shapes(model.microbatch_size)
    ).temp


def measure(target: Target, model: Model, alone: int, way: Way, k: int) -> dict[str, Any]:
    """Memory of one call of `way`: parameters and Adam's state donated, all in one jit.

    The bytes are of: `params`, what the parameters would be in float32 (P); `microbatch`, what
    `microbatch_temp` gave as `alone` (A); `held`, what the state keeps between calls beside Adam's;
    `temp`, `beyond_arguments` and `total`, as `Memory` has them.
    """
    params, batch = model.shapes(model.microbatch_size * (k if way.one_call else 1))
    state = jax.eval_shape(way.optimizer(k).init, params)
    found = target.memory(way.step(model, k), params, state, batch, donate=(0, 1))
    adam = jax.eval_shape(ways.HAND_WRITTEN.optimizer(k).init, params)
    return {
        "target": target.name,
        "model": model.name,
        "way": way.name,
        "k": k,
        "params": 4 * sum(x.size for x in jax.tree.leaves(params)),
        "microbatch": alone,
        "held": _bytes(state) - _bytes(adam),
        **dataclasses.asdict(found),
    }


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def excess(row: dict[str, Any]) -> float:
    """(temp - A) / P."""
    return (row["temp"] - row["microbatch"]) / row["params"]


def peak(row: dict[str, Any]) -> float:
    """Peak beyond the arguments, over P."""
    return row["beyond_arguments"] / row["params"]


def mixed_precision() -> list[tuple[Model, list[Way]]]:
    """The ways to compute in bfloat16 and add up in float32."""
    narrow = large_transformer(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)

    def cast(tree: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), tree)

    def before_loss(params, batch):
        return narrow.loss_fn(cast(params, jnp.bfloat16), batch)

    def view(model, k):
        in_place = accum_jax.value_and_grad(before_loss, k=k, in_place=True)
        return lambda params, batch: in_place(cast(params, jnp.float32), batch)

    both = [ways.ACCUMULATE, ways.IN_PLACE]
    rename = dataclasses.replace
    return [
        (
            rename(narrow, name="bfloat16 parameters"),
            [ways.ACCUMULATE, Way("in place on a float32 view", view)],
        ),
        (
            rename(large_transformer(), name="float32 cast before the loss", loss_fn=before_loss),
            both,
        ),
        (rename(large_transformer(dtype=jnp.bfloat16), name="float32 cast in each layer"), both),
    ]


def run(quick: bool, targets: Sequence[Target], announce: Callable[[str], None]) -> Result:
    """Measures the models for `targets`; without any, for the device at hand."""
    targets = targets or [Target(None)]
    if quick:
        plans = [(large_transformer(), [(way, K) for way in _CONTRAST] + [(ways.IN_PLACE, _MORE)])]
    else:
        every = [(way, K) for way in ways.WAYS]
        flat = [(way, _MORE) for way in (ways.ACCUMULATE, ways.IN_PLACE)]
        plans = [(large_transformer(), every + flat), (large_mlp(), every)]
        plans += [(model, [(way, K) for way in own]) for model, own in mixed_precision()]
    rows = []
    for target in targets:
        for model, calls in plans:
            announce(f"memory: {model.name}, one microbatch, for {target.name}")
            alone = microbatch_temp(target, model)
            for way, k in calls:
                announce(f"memory: {model.name}, {way.name}, k = {k}, for {target.name}")
                rows.append(measure(target, model, alone, way, k))
    panels = dict.fromkeys(map(_panel, rows))
    tables = [_table([row for row in rows if _panel(row) == panel]) for panel in panels]
    claims = [claim for target in targets for claim in _claims(target, rows)]
    return Result(rows, tables, claims, lambda figure: _draw(figure, rows))


def _panel(row: dict[str, Any]) -> tuple[str, str]:
    return row["target"], row["model"]


def _table(rows: list[dict[str, Any]]) -> Table:
    target, model = _panel(rows[0])
    params, alone = rows[0]["params"], rows[0]["microbatch"]
    return Table(
        f"Memory of an update: {model}, {target}",
        ("way", "k", "temp", "(temp - A) / P", "peak / P", "total / P"),
        [
            (
                row["way"],
                str(row["k"]),
                f"{row['temp'] / 1e6:.0f} MB",
                f"{excess(row):.2f}" + (" + 1 held" if row["held"] >= params else ""),
                f"{peak(row):.2f}",
                f"{row['total'] / params:.2f}",
            )
            for row in rows
        ],
        f"P = {params / 1e6:.0f} MB: parameters in float32. A = {alone / 1e6:.0f} MB: temporaries "
        "of jax.value_and_grad on one microbatch. temp: temporaries of the update with Adam, "
        "donated. peak: beyond the arguments. total: with them. held: an accumulator in the "
        "optimizer's state.",
    )


def _claims(target: Target, rows: list[dict[str, Any]]) -> list[Claim]:
    name = large_transformer().name
    found = {(row["way"], row["k"]): row for row in rows if _panel(row) == (target.name, name)}
    claims = []
    for way, (beyond, above) in _LIMITS.items():
        on_tpu = target.platform == "tpu"
        measured, limit = (peak if on_tpu else excess)(found[way, K]), beyond if on_tpu else above
        what = "peak beyond the arguments / P" if on_tpu else "(temp - A) / P"
        claims.append(Claim(f"{target.name}, {name}, {way}: {what}", measured, limit, measured))
    for way, k in found:
        if k == _MORE:
            growth = found[way, k]["temp"] / found[way, K]["temp"]
            claims.append(
                Claim(f"{target.name}, {way}: temp at k = {k} / k = {K}", growth, 1.02, growth)
            )
    return claims


def _draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    models_drawn = {large_transformer().name, large_mlp().name}
    shown = [row for row in rows if row["k"] == K and row["model"] in models_drawn]
    panels = list(dict.fromkeys(map(_panel, shown)))
    axes = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
    for axis, panel in zip(axes, panels, strict=True):
        own = [row for row in shown if _panel(row) == panel]
        names = [row["way"] for row in own]
        values = [(row["beyond_arguments"] + row["held"]) / row["params"] for row in own]
        bars(axis, names, values, [name in ways.OURS for name in names])
        axis.set(title=f"{panel[1]}\n{panel[0]}", xlabel="beside parameters and Adam's state, / P")
    axes[0].invert_yaxis()
