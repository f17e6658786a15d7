"""The commands `accum-jax audit` and `accum-jax plan`, which ask about a problem."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """What the caller has to change, in one line."""


def _add(commands: Any, parents: list[argparse.ArgumentParser], name: str, summary: str) -> Any:
    parser = commands.add_parser(name, parents=parents, help=summary, description=summary)
    parser.add_argument(
        "problem", metavar="MODULE:FACTORY", help="a function that returns an accum_jax.Problem"
    )
    return parser


def add_audit(
    commands: Any,
    parents: list[argparse.ArgumentParser],
    positive_int: Callable[[str], int],
    png_path: Callable[[str], Path],
) -> None:
    """Adds the command to the subparsers of the program."""
    summary = "tell whether an accumulated loss or step equals the whole batch, and if not, why"
    audit = _add(commands, parents, "audit", summary)
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


def add_plan(
    commands: Any,
    parents: list[argparse.ArgumentParser],
    positive_int: Callable[[str], int],
    png_path: Callable[[str], Path],
) -> None:
    """Adds the command to the subparsers of the program."""
    summary = "find the largest microbatch that fits in memory, here or on another machine"
    plan = _add(commands, parents, "plan", summary)
    plan.add_argument(
        "--effective-batch",
        type=positive_int,
        metavar="N",
        help="rows of an update over all devices (default: those of Problem.batch)",
    )
    plan.add_argument(
        "--target",
        metavar="NAME",
        help="compile for this machine rather than the one at hand, as v5e:1x1, v5p:2x2x1 or h100",
    )
    plan.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="of one device, as 16GiB or 80GB (default: the memory of the target)",
    )
    plan.add_argument(
        "--data-parallel",
        type=positive_int,
        default=1,
        metavar="N",
        help="devices that share the effective batch (default: %(default)s)",
    )
    plan.add_argument(
        "--out", type=png_path, metavar="FILE.png", help="plot what each microbatch needs here"
    )
    plan.set_defaults(run=run_plan)


def run_audit(arguments: argparse.Namespace) -> int:
    """Prints the report; 0 where the verdict is "equivalent", else 1."""
    if arguments.out is not None and arguments.step is None:
        raise UsageError("--out plots the updates of a step: give --step MODULE:FUNCTION too")
    report = _ask(_audit, arguments)
    drawn = arguments.out is not None and report.distances
    if drawn:
        from ._report import save_audit_plot

        save_audit_plot(report, arguments.out)
    _show(report, arguments.json, arguments.out if drawn else None)
    return 0 if report.verdict == "equivalent" else 1


def run_plan(arguments: argparse.Namespace) -> int:
    """Prints the plan; 0 where a microbatch fits, else 1."""
    plan = _ask(_plan, arguments)
    drawn = arguments.out is not None and plan.rows
    if drawn:
        from ._report import save_plan_plot

        save_plan_plot(plan, arguments.out)
    _show(plan, arguments.json, arguments.out if drawn else None)
    return 0 if plan.best is not None else 1


def _ask(question: Callable[[argparse.Namespace], Any], arguments: argparse.Namespace) -> Any:
    """The report, with what the caller's modules print kept out of the JSON."""
    if arguments.out is not None and not importlib.util.find_spec("matplotlib"):
        raise UsageError("matplotlib not installed; run: pip install 'accum-jax[demo]'")
    with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        return question(arguments)


def _show(report: Any, as_json: bool, plot: Path | None) -> None:
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
        return
    _print(report)
    if plot is not None:
        print(f"Plot: {plot}")


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


def _plan(arguments: argparse.Namespace) -> Any:
    from ._layout import with_rows
    from ._plan import make_plan

    problem = load_problem(arguments.problem)
    if problem.tx is None:
        raise UsageError(f"a plan needs the optimizer: {arguments.problem} gave tx=None")
    batch = problem.batch
    try:
        if arguments.effective_batch is not None:
            batch = with_rows(batch, arguments.effective_batch)
        with _progress() as announce:
            return make_plan(
                announce,
                problem.loss_fn,
                problem.tx,
                problem.params,
                batch,
                memory_limit=arguments.memory_limit,
                target=arguments.target,
                data_parallel=arguments.data_parallel,
                weight=problem.weight,
                key=problem.key,
                has_aux=problem.has_aux,
            )
    except (TypeError, ValueError, ImportError) as error:
        raise UsageError(one_line(error)) from error


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, int], None]]:
    """A bar on standard error for `make_plan` to move, where rich is installed."""
    if importlib.util.find_spec("rich") is None:
        yield lambda done, most, microbatch_size: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("compiling")

        def announce(done: int, most: int, microbatch_size: int) -> None:
            text = f"compiling microbatches of {microbatch_size}"
            progress.update(bar, completed=done, total=most, description=text)

        yield announce


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
