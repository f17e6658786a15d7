"""What a suite found, as tables, JSON and pictures."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure
from rich import box
from rich.table import Table as RichTable

# Okabe and Ito's colours, told apart by colour-blind readers too: ours, then peers.
OURS, PEER = "#D55E00", "#56B4E9"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under headings; the first column names the row, the others hold numbers."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def rich(self) -> RichTable:
        table = RichTable(title=self.title, caption=self.caption or None, box=box.SIMPLE_HEAD)
        for i, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [self.headings, ["---"] + ["---:"] * (len(self.headings) - 1), *self.rows]
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"### {self.title}\n\n{text}\n" + (f"\n{self.caption}\n" if self.caption else "")


@dataclasses.dataclass(frozen=True)
class Claim:
    """A number that has to stay at or below a limit.

    Attributes:
        text: what is claimed.
        measured: the number.
        limit: what it may not exceed.
        least: the lower end of a 95 % confidence interval; the number itself where it is exact.
    """

    text: str
    measured: float
    limit: float
    least: float

    @property
    def verdict(self) -> str:
        if self.measured <= self.limit:
            return "holds"
        return "not clear" if self.least <= self.limit else "fails"


@dataclasses.dataclass(frozen=True)
class Result:
    """What a suite found.

    Attributes:
        rows: one measurement each, for JSON.
        tables: the same for people.
        claims: what has to hold.
        draw: draws it on a figure.
    """

    rows: list[dict[str, Any]]
    tables: list[Table]
    claims: list[Claim]
    draw: Callable[[Figure], None]

    def all_tables(self) -> list[Table]:
        claims = [
            [claim.text, f"{claim.measured:.3f}", f"{claim.limit:g}", claim.verdict]
            for claim in self.claims
        ]
        headings = ("what has to hold", "measured", "at most", "")
        return [*self.tables, Table("Claims", headings, claims)] if claims else list(self.tables)


def environment() -> dict[str, str]:
    """Where, when and with what the numbers were made."""
    device = jax.devices()[0]
    found = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }
    for name in ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "optax", "flax"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # compilers for machines that are not here are optional
            continue
    return found


def save(out: Path, results: dict[str, Result]) -> None:
    """Writes a JSON and a PNG for each suite, and one report of all."""
    out.mkdir(parents=True, exist_ok=True)
    where = environment()
    lines = ["# Benchmarks", "", *(f"- {name}: {text}" for name, text in where.items()), ""]
    for name, result in results.items():
        content = {
            "environment": where,
            "rows": result.rows,
            "claims": [
                {**dataclasses.asdict(claim), "verdict": claim.verdict} for claim in result.claims
            ],
        }
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        result.draw(figure)
        figure.savefig(out / f"{name}.png", dpi=150)
        lines += [f"## {name.capitalize()}", "", f"![{name}]({name}.png)", ""]
        lines += [table.markdown() for table in result.all_tables()]
    (out / "report.md").write_text("\n".join(lines))


def bars(
    axes: Any,
    names: Sequence[str],
    values: Sequence[float],
    ours: Sequence[bool],
    label: str = "%.2f",
) -> None:
    """One horizontal bar for each name, ours in another colour; the caller inverts the axis."""
    colours = [OURS if own else PEER for own in ours]
    drawn = axes.barh(names, values, color=colours, height=0.65)
    axes.bar_label(drawn, fmt=label, label_type="center")
    axes.spines[["top", "right"]].set_visible(False)
