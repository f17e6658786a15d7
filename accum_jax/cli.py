"""The command line: parses arguments, calls the library and prints what came back.

Each command imports what it needs when it runs, so that `--help` wants no extra.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accum_jax import __version__, _commands
from accum_jax._commands import UsageError as _UsageError

_DEMO_PACKAGES = {
    "flax": "flax",
    "matplotlib": "matplotlib",
    "rich": "rich",
    "sklearn": "scikit-learn",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name; `None` takes those of the process.

    Returns:
        The exit code: 0 fine, 1 the answer is no or not known, 2 bad usage.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except _UsageError as error:
        print(f"accum-jax {arguments.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accum-jax", description="Gradient accumulation that equals the whole batch."
    )
    parser.add_argument("--version", action="version", version=f"accum-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print JSON and nothing else")

    summary = "train a small Flax model whole-batch, accumulated and with one call a microbatch"
    demo = commands.add_parser("demo", parents=[shared], help=summary, description=summary)
    demo.add_argument(
        "--model",
        choices=["digits", "chars", "contrastive"],
        default="digits",
        help="digits: handwritten digits, a CNN; chars: Python's own source, a transformer, "
        "documents of different lengths; contrastive: two views of each digit, a loss that "
        "couples rows (default: %(default)s)",
    )
    demo.add_argument(
        "--api",
        choices=["linen", "nnx"],
        default="linen",
        help="Flax's API; the same parameters and numbers (default: %(default)s)",
    )
    demo.add_argument(
        "--size",
        choices=["small", "medium", "large"],
        help="of the transformer: about 1, 11 or 86 million parameters (default: small)",
    )
    demo.add_argument(
        "--steps",
        type=_positive_int,
        metavar="N",
        help="optimizer updates (default: 50 for chars, 200 for the others)",
    )
    demo.add_argument(
        "--out", type=_png_path, metavar="FILE.png", help="write loss curves and memory here"
    )
    demo.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="save here as it goes; the same command again goes on in the middle of the epoch",
    )
    demo.set_defaults(run=_demo)
    _commands.add_audit(commands, [shared], _positive_int, _png_path)
    _commands.add_plan(commands, [shared], _positive_int, _png_path)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    packages = _DEMO_PACKAGES
    if arguments.checkpoint is not None:
        packages = packages | {"orbax.checkpoint": "orbax-checkpoint"}
    _check_installed(packages, extra="demo")
    from rich.console import Console

    from accum_jax._demo import show, tasks, training

    if arguments.size is not None and arguments.model != "chars":
        raise _UsageError(f"--size is for --model chars, got --model {arguments.model}")
    options = {} if arguments.size is None else {"size": arguments.size}
    task = tasks.TASKS[arguments.model, arguments.api](**options)
    steps = arguments.steps or task.steps
    runs = []
    with show.progress() as progress:
        for name in task.ways:
            bar = progress.add_task(name, total=steps, loss=float("nan"))

            def advance(update: int, metrics: dict[str, Any], bar=bar, name=name) -> None:
                progress.update(bar, completed=update, loss=metrics["loss"])
                if update % math.ceil(steps / 5) == 0:
                    line = f"{name} {update}: {show.log_line(metrics)}"
                    progress.console.print(line, highlight=False, soft_wrap=True)

            checkpoint = _checkpoint(arguments, steps, name)
            runs.append(training.train(task, name, steps, advance, checkpoint))
    if arguments.out is not None:
        show.save_plot(runs, arguments.out)

    comparison = show.to_dict(task, runs)
    if arguments.json:
        print(json.dumps(comparison, indent=2))
    else:
        console = Console()
        console.print(show.table(comparison))
        if arguments.out is not None:
            console.print(f"Plot: {arguments.out}", highlight=False)
    return 0


def _checkpoint(arguments: argparse.Namespace, steps: int, way: str) -> Any:
    """Where a run is saved: apart from those of other models, and of other schedules."""
    if arguments.checkpoint is None:
        return None
    from accum_jax._demo.checkpoint import Checkpoint

    run = (arguments.model, arguments.size, arguments.api, str(steps), way)
    return Checkpoint(arguments.checkpoint / " ".join(filter(None, run)))


def _check_installed(packages: dict[str, str], *, extra: str) -> None:
    """Refuses to go on without `packages`, import name to distribution name."""
    missing = [name for module, name in packages.items() if not _is_installed(module)]
    if missing:
        raise _UsageError(
            f"{', '.join(missing)} not installed; run: pip install 'accum-jax[{extra}]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


def _positive_int(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return number


def _png_path(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".png" or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file name that ends in .png, got {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no folder {str(path.parent)!r} to write {text!r} in")
    return path
