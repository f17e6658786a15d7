"""What `import accum_jax` brings with it."""

from __future__ import annotations

import inspect
import subprocess
import sys

import accum_jax


def test_imports_nothing_that_jax_and_optax_have_not():
    code = """
import sys
import jax, optax
before = set(sys.modules)
import accum_jax
known = {"accum_jax", *sys.stdlib_module_names}
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] not in known))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_its_documentation_is_a_map():
    missing = [
        name
        for name, value in vars(accum_jax).items()
        if not name.startswith("_") and not inspect.ismodule(value)
        if f"`{name}`" not in accum_jax.__doc__
    ]
    assert not missing
