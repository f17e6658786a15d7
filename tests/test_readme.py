"""Every Python block of the documents runs alone and prints the text block after it, if any."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n+^```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
BLOCKS = [
    pytest.param(file, block, id=f"{file}:{block.string.count(chr(10), 0, block.start()) + 2}")
    for file in ("README.md", "docs/recipes.md")
    for block in BLOCK.finditer((ROOT / file).read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("file", "block"), BLOCKS)
def test_block(file, block):
    # Blank lines in front, so that a traceback has the document's own line numbers.
    lines_before = block.string.count("\n", 0, block.start("code"))
    code = compile("\n" * lines_before + block["code"], str(ROOT / file), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    if block["output"] is not None:
        assert printed.getvalue() == block["output"]
