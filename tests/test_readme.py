"""Every Python block of the README runs alone and prints the text block after it, if one is."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n+^```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
BLOCKS = list(BLOCK.finditer(README.read_text(encoding="utf-8")))


def _line(block: re.Match) -> int:
    return block.string.count("\n", 0, block.start("code"))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line{_line(block) + 1}")
def test_block(block):
    # Blank lines in front, so that a traceback has the README's own line numbers.
    code = compile("\n" * _line(block) + block["code"], str(README), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    if block["output"] is not None:
        assert printed.getvalue() == block["output"]
