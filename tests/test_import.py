"""What `import accum_jax` brings with it."""

from __future__ import annotations

import subprocess
import sys


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
