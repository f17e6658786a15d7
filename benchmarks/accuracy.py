"""How far is the accumulated gradient from the exact one?

Two questions: what rounding costs, by dtype and k, and what a wrong denominator costs where
microbatches weigh differently. The exact gradient is the whole batch's in float64, of the same
parameters and data.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import accum_jax
from benchmarks import models, ways
from benchmarks.models import Model
from benchmarks.report import Claim, Result, Table, bars
from benchmarks.targets import Target
from benchmarks.ways import Way

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_ROUNDING = (
    ways.WHOLE_BATCH,
    ways.HAND_WRITTEN,
    ways.ACCUMULATE,
    Way(
        "accumulate, sums in the gradient's dtype",
        lambda model, k: (
            lambda params, batch: accum_jax.accumulate(
                jax.value_and_grad(model.loss_fn),
                k,
                accumulator_dtype=jax.tree.leaves(params)[0].dtype,
            )(params, batch)
        ),
    ),
    ways.IN_PLACE,
    ways.OPTAX_MICROBATCH,
    ways.OPTAX_MULTI_STEPS,
    ways.MULTI_STEPS,
)
_WEIGHTS = (
    ways.WHOLE_BATCH,
    ways.ACCUMULATE_WEIGHTED,
    ways.IN_PLACE_WEIGHTED,
    ways.MULTI_STEPS,
    ways.HAND_WRITTEN,
    ways.OPTAX_MICROBATCH,
    ways.OPTAX_MULTI_STEPS,
)


def gradient_fn(way: Way, model: Model, k: int) -> Callable[[Any, Any], Any]:
    """`gradient(params, batch)`: the mean that the optimizer gets, after one call or k."""
    grad_fn = way.grad_fn(model, k)
    if way.wrap is None:
        one_call = jax.jit(grad_fn)
        return lambda params, batch: one_call(params, batch)[1]
    tx = optax.with_extra_args_support(way.wrap(optax.identity(), k))

    @jax.jit
    def call(params, state, rows):
        _, grads = grad_fn(params, rows)
        weight = {"weight": model.weight(rows)} if way is ways.MULTI_STEPS else {}
        return tx.update(grads, state, params, **weight)

    def k_calls(params, batch):
        state, updates = tx.init(params), None
        for i in range(k):
            updates, state = call(params, state, jax.tree.map(lambda x, i=i: x[i::k], batch))
        return updates

    return k_calls


def relative_error(found: Any, exact: Any) -> float:
    """|found - exact| / |exact| over all leaves, in float64."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b)) for a, b in pairs]
    square = sum(np.sum((a - b) ** 2) for a, b in pairs)
    return float(np.sqrt(square / sum(np.sum(b**2) for _, b in pairs)))


def measure(
    model: Model, selected: Sequence[Way], k: int, dtype: Any = jnp.float32
) -> list[dict[str, Any]]:
    """One row for each way: the median error over three draws of parameters and data."""
    init, exact_fn = jax.jit(model.init), jax.jit(jax.grad(model.loss_fn))
    gradient_fns = {way.name: gradient_fn(way, model, k) for way in selected}
    errors: dict[str, list[float]] = {name: [] for name in gradient_fns}
    batch = _cast(model.batch(model.microbatch_size * k), dtype)
    for seed in range(3):
        params = _cast(init(jax.random.key(seed)), dtype)
        with jax.enable_x64(True):
            exact = jax.device_get(exact_fn(*_cast((params, batch), np.float64)))
        for name, fn in gradient_fns.items():
            errors[name].append(relative_error(fn(params, batch), exact))
    return [
        {
            "model": model.name,
            "way": name,
            "dtype": jnp.dtype(dtype).name,
            "k": k,
            "error": statistics.median(found),
        }
        for name, found in errors.items()
    ]


def _cast(tree: Any, dtype: Any) -> Any:
    """The tree with its floats in `dtype`, as numpy arrays."""
    return jax.tree.map(
        lambda x: np.asarray(x).astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def run(quick: bool, targets: Sequence[Target], announce: Callable[[str], None]) -> Result:
    """Measures on the device at hand; nothing runs on `targets`, which are not here."""
    mlp = models.mlp(layers=3, width=64, microbatch_size=2)
    rounding: list[dict[str, Any]] = []
    for dtype in _DTYPES:
        for k in (64,) if quick else (4, 64, 512):
            announce(f"accuracy: {jnp.dtype(dtype).name}, k = {k}")
            # In place needs an accumulator of the parameters' own dtype, and float32 sums.
            own = [way for way in _ROUNDING if way is not ways.IN_PLACE or dtype == jnp.float32]
            rounding += measure(mlp, own, k, dtype)
    announce("accuracy: rows of unequal length")
    tokens = models.transformer(layers=2, width=64, length=32, microbatch_size=2)
    weights = measure(tokens, _WEIGHTS, 8)
    rows = [*rounding, *weights]
    tables = [_rounding_table(rounding), _weights_table(weights)]
    return Result(rows, tables, _claims(rounding, weights), lambda figure: _draw(figure, rows))


def _rounding_table(rows: list[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys((row["dtype"], row["k"]) for row in rows))
    found = {(row["way"], row["dtype"], row["k"]): row["error"] for row in rows}
    names = dict.fromkeys(way for way, _, _ in found)
    return Table(
        "Rounding: error of the gradient against float64",
        ("way", *(f"{dtype}, k = {k}" for dtype, k in columns)),
        [[name, *(_number(found.get((name, *column))) for column in columns)] for name in names],
        "|found - exact| / |exact| of an MLP in the dtype throughout, 2 rows a microbatch, median "
        "of three draws.",
    )


def _weights_table(rows: list[dict[str, Any]]) -> Table:
    return Table(
        "Denominators: error of the gradient of a mean over tokens",
        ("way", "error"),
        [[row["way"], _number(row["error"])] for row in rows],
        f"A transformer on rows of 1 to 32 tokens, 2 rows a microbatch, k = {rows[0]['k']}, "
        "float32. Ways without weights take the mean of the microbatches' means.",
    )


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _claims(rounding: list[dict[str, Any]], weights: list[dict[str, Any]]) -> list[Claim]:
    found = {(row["way"], row["dtype"], row["k"]): row["error"] for row in rounding}
    claims = []
    for (name, dtype, k), error in found.items():
        if name in (ways.ACCUMULATE.name, ways.IN_PLACE.name, ways.MULTI_STEPS.name):
            ratio = error / found[ways.WHOLE_BATCH.name, dtype, k]
            claims.append(Claim(f"{name}, {dtype}, k = {k}: / whole batch", ratio, 1.1, ratio))
    whole = weights[0]["error"]
    for row in weights:
        if row["way"] in ways.OURS:
            ratio = row["error"] / whole
            claims.append(Claim(f"{row['way']}, tokens: / whole batch", ratio, 4.0, ratio))
    return claims


def _draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    largest = max(row["k"] for row in rows)
    panels = {
        f"{dtype}, k = {largest}": [
            row for row in rows if (row["dtype"], row["k"]) == (dtype, largest)
        ]
        for dtype in dict.fromkeys(row["dtype"] for row in rows)
    }
    panels["mean over tokens, float32"] = [row for row in rows if row["model"] != rows[0]["model"]]
    names = list(dict.fromkeys(row["way"] for row in rows))
    figure.set_size_inches(16, 5)
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (title, own) in zip(axes, panels.items(), strict=True):
        errors = {row["way"]: row["error"] for row in own}
        values = [errors.get(name, np.nan) for name in names]
        bars(axis, names, values, [name in ways.OURS for name in names], "%.1e")
        spread = max(errors.values()) / min(errors.values())
        xscale = "log" if spread > 100 else "linear"
        axis.set(title=title, xlabel="relative error", xscale=xscale)
    axes[0].invert_yaxis()
