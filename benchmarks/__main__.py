"""Runs suites: `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import accuracy, collectives, coupled, memory, plan, report, speed
from benchmarks.targets import Target

SUITES = {
    "memory": memory.run,
    "speed": speed.run,
    "accuracy": accuracy.run,
    "collectives": collectives.run,
    "coupled": coupled.run,
    "plan": plan.run,
}


def main(argv: list[str] | None = None) -> int:
    """Returns 1 where a claim fails, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--suite",
        type=_suites,
        default=list(SUITES),
        metavar="A,B",
        help=f"suites to run (default: {','.join(SUITES)})",
    )
    parser.add_argument("--quick", action="store_true", help="what has to hold, within 3 minutes")
    parser.add_argument(
        "--target",
        type=_target,
        action="append",
        default=[],
        metavar="NAME",
        help="compile for this machine rather than the device at hand, as v5e or h100; may be "
        "repeated; needs its compiler, and only suites that run nothing use it",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="folder to write (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)

    results = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for name in arguments.suite:
            bar = progress.add_task(name)

            def announce(text: str, bar=bar) -> None:
                progress.update(bar, description=text)

            results[name] = SUITES[name](arguments.quick, arguments.target, announce)
            progress.remove_task(bar)
    report.save(arguments.out, results)

    console = Console()
    for result in results.values():
        for table in result.all_tables():
            console.print(table.rich())
    console.print(f"Report: {arguments.out / 'report.md'}", highlight=False)
    failed = any(claim.verdict == "fails" for r in results.values() for claim in r.claims)
    return int(failed)


def _suites(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SUITES:
            raise argparse.ArgumentTypeError(f"no suite {name!r}; there are {', '.join(SUITES)}")
    return names


def _target(name: str) -> Target:
    try:
        return Target(name)
    except (ImportError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
