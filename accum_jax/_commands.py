"""The command `accum-jax audit`: loads a problem, audits it, prints the report."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """What the caller has to change, in one line."""


def add_audit(
    commands: Any,
    parents: list[argparse.ArgumentParser],
    positive_int: Callable[[str], int],
    png_path: Callable[[str], Path],
) -> None:
    """Adds the command to the subparsers of the program."""
    summary = "tell whether an accumulated loss or step equals the whole batch, and if not, why"
    audit = commands.add_parser("audit", parents=parents, help=summary, description=summary)
    audit.add_argument(
        "problem", metavar="MODULE:FACTORY", help="a function that returns an accum_jax.Problem"
    )
    audit.add_argument(
        "--k", type=positive_int, default=4, help="microbatches per update (default: %(default)s)"
    )
    audit.add_argument(
        "--step",
        metavar="MODULE:FUNCTION",
        help="step(params, opt_state, batch) -> (params, opt_state), to compare with Problem.tx",
    )
    audit.add_argument(
        "--out",
        type=png_path,
        metavar="FILE.png",
        help="with --step: plot the distance from the whole batch's parameters here",
    )
    audit.set_defaults(run=run_audit)


def run_audit(arguments: argparse.Namespace) -> int:
    """Prints the report; 0 where the verdict is "equivalent", else 1."""
    if arguments.out is not None and arguments.step is None:
        raise UsageError("--out plots the updates of a step: give --step MODULE:FUNCTION too")
    if arguments.out is not None and not importlib.util.find_spec("matplotlib"):
        raise UsageError("matplotlib not installed; run: pip install 'accum-jax[demo]'")
    # What the caller's modules print is no JSON.
    with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        report = _audit(arguments)
    if arguments.out is not None and report.distances:
        from ._report import save_audit_plot

        save_audit_plot(report, arguments.out)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)
        if arguments.out is not None and report.distances:
            print(f"Plot: {arguments.out}")
    return 0 if report.verdict == "equivalent" else 1


def _audit(arguments: argparse.Namespace) -> Any:
    from ._audit import audit
    from ._audit_step import audit_step

    problem = load_problem(arguments.problem)
    given = {
        "k": arguments.k,
        "weight": problem.weight,
        "key": problem.key,
        "has_aux": problem.has_aux,
    }
    step = None if arguments.step is None else load(arguments.step)
    if step is not None and problem.tx is None:
        raise UsageError(f"--step needs the optimizer: {arguments.problem} gave tx=None")
    try:
        if step is None:
            return audit(problem.loss_fn, problem.params, problem.batch, **given)
        return audit_step(step, problem.loss_fn, problem.tx, problem.params, problem.batch, **given)
    except (TypeError, ValueError) as error:
        raise UsageError(one_line(error)) from error


def _print(report: Any) -> None:
    """In colour where rich is installed and the output is a terminal."""
    if importlib.util.find_spec("rich") is None:
        print(report)
        return
    from rich.console import Console

    from ._report import rich_text

    Console(highlight=False, soft_wrap=True).print(rich_text(report))


def load(name: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION names; modules of the working directory come first."""
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise UsageError(f"expected MODULE:FUNCTION, got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(f"cannot import {module_name!r}: {one_line(error)}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{module_name!r} has no {path!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{name} is {type(found).__name__}, expected a function")
    return found


def load_problem(name: str) -> Any:
    """Calls the factory that MODULE:FACTORY names."""
    from ._problem import Problem

    factory = load(name)
    try:
        problem = factory()
    except Exception as error:
        raise UsageError(f"{name} raised {type(error).__name__}: {one_line(error)}") from error
    if not isinstance(problem, Problem):
        raise UsageError(f"{name} returned {type(problem).__name__}, expected an accum_jax.Problem")
    return problem


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
