"""Shows runs: progress while they train, a table and a plot afterwards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from accum_jax._demo.task import Task
from accum_jax._demo.training import Run, largest_difference, relative_error

# Okabe and Ito's colours, told apart by colour-blind readers too. The curves lie on each other:
# the first is broad and pale, the others are dashes on top of it.
_STYLES = (
    {"color": "#56B4E9", "linewidth": 6, "alpha": 0.55},
    {"color": "#D55E00", "linewidth": 1.8, "linestyle": (0, (6, 6))},
    {"color": "#222222", "linewidth": 1.8, "linestyle": (6, (6, 6))},
    {"color": "#009E73", "linewidth": 1.8, "linestyle": ":"},
)


def progress() -> Progress:
    """A progress display on standard error, which leaves standard output to the results."""
    return Progress(
        TextColumn("{task.description:<17}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


def log_line(metrics: dict[str, float | None]) -> str:
    """The metrics of an update in one line, for standard error beside `progress`."""
    line = (
        "loss {loss:.4f} norm {global_norm:.3f} scale {loss_scale:g} skipped {num_skipped} "
        "{examples_per_second:.0f} rows/s"
    ).format(**metrics)
    if metrics["tokens_per_second"] is not None:
        line += f" {metrics['tokens_per_second']:.0f} tokens/s"
    if metrics["noise_scale"] is not None:
        line += f" noise {metrics['noise_scale']:.0f}"
    return line


def to_dict(task: Task, runs: list[Run]) -> dict[str, Any]:
    """The comparison as plain numbers; the first run is the one compared with."""
    return {
        "effective_batch": task.effective_batch,
        "microbatch_size": task.microbatch_size,
        "k": task.k,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(runs[0].params)),
        "ways": [
            {
                "name": run.name,
                "test_accuracy": run.test_accuracy,
                "test_loss": run.test_loss,
                "first_update_error": relative_error(run.first_change, runs[0].first_change),
                "largest_parameter_difference": largest_difference(run.params, runs[0].params),
                "temp_bytes": run.temp_bytes,
                "median_update_ms": run.update_ms,
                "optimizer_updates": run.optimizer_updates,
                "last_update": run.last_metrics,
            }
            for run in runs
        ],
    }


def table(comparison: dict[str, Any]) -> Table:
    """The comparison that `to_dict` gives, as a table."""
    result = Table(
        title="{effective_batch} rows an update: {k} microbatches of {microbatch_size}".format(
            **comparison
        ),
        caption="Off by, against the whole batch: relative error of the first update, largest "
        "difference of the parameters in the end. Memory: temporaries of the compiled program. "
        "Median: time of an update.",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    result.add_column("way", no_wrap=True)
    for heading in (
        "test hits, %",
        "test loss",
        "first update off by",
        "in the end off by",
        "memory MB",
        "median ms",
        "updates",
    ):
        result.add_column(heading, justify="right")
    for way in comparison["ways"]:
        result.add_row(
            way["name"],
            f"{100 * way['test_accuracy']:.2f}",
            f"{way['test_loss']:.4f}",
            f"{way['first_update_error']:.1e}",
            f"{way['largest_parameter_difference']:.1e}",
            f"{way['temp_bytes'] / 1e6:.2f}",
            f"{way['median_update_ms']:.1f}",
            str(way["optimizer_updates"]),
        )
    return result


def save_plot(runs: list[Run], path: Path) -> None:
    """Writes a PNG: the loss curves over each other, and a bar of temporary memory for each."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(2, 1))
    for run, style in zip(runs, _STYLES, strict=False):
        curves.plot(range(1, len(run.losses) + 1), run.losses, label=run.name, **style)
    curves.set(
        title="Loss of each effective batch", xlabel="optimizer update", ylabel="loss", yscale="log"
    )
    curves.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    curves.yaxis.set_major_formatter("{x:g}")
    curves.yaxis.set_minor_formatter(NullFormatter())
    curves.legend(frameon=False, handlelength=5)
    curves.grid(alpha=0.25)

    heights = [run.temp_bytes / 1e6 for run in runs]
    names = [re.sub("([ ._])", r"\1\n", run.name, count=1) for run in runs]
    drawn = bars.bar(
        names, heights, color=[style["color"] for style in _STYLES[: len(runs)]], width=0.6
    )
    bars.bar_label(drawn, fmt="%.2f", padding=2)
    bars.set(title="Temporary memory of one update", ylabel="MB")
    bars.margins(y=0.12)
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=150)
