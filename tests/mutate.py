"""Breaks the code on purpose, one way at a time, and shows that tests fail: `tests/mutate.py`.

Each mutation is a fault that implementations of gradient accumulation are known for. The tests that
should notice it run on a copy of the project; a mutation that none notices makes the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutation:
    """One way to break a file of `accum_jax`: `old`, which stands there once, becomes `new`."""

    fault: str
    file: str
    old: str
    new: str
    tests: str  # the files that have to notice, without test_ and .py


MUTATIONS = (
    Mutation(
        "the mean is not divided",
        "_reduce.py",
        'if self.name != "sum":\n            carry = divide',
        "if False:\n            carry = divide",
        "accumulate",
    ),
    Mutation(
        "summed in the gradient's dtype",
        "_reduce.py",
        "if requested is None and real.itemsize < 4:",
        "if False:",
        "faults reduce",
    ),
    Mutation(
        "contiguous rows",
        "_split.py",
        "return x.reshape(*x.shape[:axis], self.rows, self.num_full, *x.shape[axis + 1 :])",
        "x = x.reshape(*x.shape[:axis], self.num_full, self.rows, *x.shape[axis + 1 :])\n"
        "            return x.swapaxes(axis, axis + 1)",
        "split",
    ),
    Mutation(
        "one key for all microbatches",
        "_window.py",
        "return function(key, index)",
        "return function(key, 0)",
        "accumulate",
    ),
    Mutation(
        "one key for all devices",
        "_window.py",
        "keys = jax.tree.map(lambda key: fold(key, self.axes.index), keys)",
        "pass",
        "sharding",
    ),
    Mutation(
        "a microbatch left out by a product",
        "_reduce.py",
        "select(microbatch.kept, carry + x, carry), self.spec",
        "carry + x, self.spec",
        "reduce",
    ),
    Mutation(
        "reduced over devices inside the loop",
        "_reduce.py",
        "x = x.astype(carry.dtype)\n",
        "x = match(self.window.axes.sum(x.astype(carry.dtype), self.spec), carry)\n"
        "        x = x / self.window.axes.size\n",
        "sharding",
    ),
    Mutation(
        "not reduced over devices",
        "_reduce.py",
        "return self.window.axes.sum(carry, self.spec)",
        "return match(self.window.axes.sum(carry * 0, self.spec), carry) + carry",
        "sharding",
    ),
    Mutation(
        "the tail counts as a full microbatch",
        "_window.py",
        "microbatch = Microbatch(index, weight, rows / self.split.unit,",
        "microbatch = Microbatch(index, weight, self.split.rows / self.split.unit,",
        "accumulate",
    ),
    Mutation(
        "divided by all microbatches where only some ran",
        "_window.py",
        "num_rows = jnp.minimum(real * split.rows, split.num_rows)",
        "pass",
        "accumulate",
    ),
    Mutation(
        "a mean of means in place",
        "_window.py",
        "factor = microbatch.share if microbatch.weight is None else microbatch.weight\n"
        "        cotangent",
        "factor = 1\n        cotangent",
        "value_and_grad",
    ),
    Mutation(
        "a second gradient in memory",
        "_window.py",
        "return not (reasons or options.stats)",
        "return False",
        "value_and_grad memory",
    ),
    Mutation(
        "a loop unrolled",
        "_window.py",
        "(body(index, carry), None), carry, indices)",
        "(body(index, carry), None), carry, indices, unroll=True)",
        "memory",
    ),
    Mutation(
        "values scaled with the loss",
        "_window.py",
        "(output[0] if has_aux else output), (output, weight)",
        "(output[0] if has_aux else output) * 2, (output, weight)",
        "value_and_grad",
    ),
    Mutation(
        "the noise scale of a sum taken for that of a mean",
        "_window.py",
        'if self.reducer == "mean":\n            return gradient',
        "if True:\n            return gradient",
        "stats",
    ),
    Mutation(
        "reset by a product",
        "_multi_steps.py",
        "jnp.where(outcome.closed, jnp.zeros_like(a), a)",
        "a * (1 - outcome.closed.astype(a.real.dtype))",
        "optimizer_faults multi_steps",
    ),
    Mutation(
        "an update one micro step early",
        "_multi_steps.py",
        "closes = (mini_step >=",
        "closes = (mini_step + 1 >=",
        "optimizer_faults",
    ),
    Mutation(
        "a short window divided as if full",
        "_multi_steps.py",
        "_mean(a, total_weight)",
        "_mean(a, jnp.maximum(total_weight, k_at(state.gradient_step)))",
        "optimizer_faults",
    ),
    Mutation(
        "the last window's weight carried over",
        "_multi_steps.py",
        "jnp.where(state.mini_step == 0, 0, state.total_weight)",
        "state.total_weight",
        "optimizer_faults",
    ),
    Mutation(
        "a window of weight 0 updates",
        "_multi_steps.py",
        "closes & (total_weight != 0)",
        "closes",
        "multi_steps",
    ),
    Mutation(
        "clipped while still scaled",
        "_loss_scale.py",
        "lambda: run(_unscale(grads, state.scale))",
        "lambda: run(jax.tree.map(lambda g: g.astype(wide_dtype(g.dtype)), grads))",
        "loss_scale",
    ),
    Mutation(
        "a scale that never falls",
        "_loss_scale.py",
        "state.scale), shrunk)",
        "state.scale), state.scale)",
        "loss_scale",
    ),
    Mutation(
        "unscaled in float16",
        "_loss_scale.py",
        "divide(g.astype(wide_dtype(g.dtype)), scale)",
        "(g / scale.astype(g.dtype)).astype(wide_dtype(g.dtype))",
        "loss_scale",
    ),
    Mutation(
        "state of a skipped microbatch kept",
        "_reduce.py",
        "finite = microbatch.finite\n",
        "finite = None\n",
        "reduce accumulate",
    ),
    Mutation(
        "cotangents of other rows",
        "_coupled.py",
        "(*args, cotangents),",
        "(*args, [x[::-1] for x in cotangents]),",
        "coupled",
    ),
    Mutation(
        "the coupled loss's own gradient left out",
        "_coupled.py",
        "total += match(rows.axes.shard(own, spec).astype(total.dtype), total)",
        "pass",
        "coupled",
    ),
    Mutation(
        "modules not written back",
        "nnx.py",
        "for name, x in new.items()}",
        "for name, x in new.items() if False}",
        "nnx",
    ),
)


def fails(mutation: Mutation, copy: Path) -> str | None:
    """The test that fails on the broken code, or None where all pass."""
    file = copy / "accum_jax" / mutation.file
    original = file.read_text()
    if original.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.fault}: the text to break is not there once: {mutation.old}")
    file.write_text(original.replace(mutation.old, mutation.new))
    tests = [f"tests/test_{name}.py" for name in mutation.tests.split()]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
    finally:
        file.write_text(original)
    found = re.search(r"^(?:FAILED|ERROR) tests/test_(\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or (done.returncode == 1 and not found):
        raise SystemExit(f"{mutation.fault}: pytest itself failed\n{done.stdout}{done.stderr}")
    return found[1] if found else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="words of the faults to try (default: all)")
    only = parser.parse_args().only
    chosen = [m for m in MUTATIONS if all(word in m.fault for word in only)]
    table = Table("fault", "file", "noticed by")
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "results")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for mutation in track(chosen, console=Console(stderr=True), description="Breaking"):
            test = fails(mutation, copy)
            survivors += test is None
            table.add_row(mutation.fault, mutation.file, test or "[bold red]no test[/]")
    Console().print(table)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
