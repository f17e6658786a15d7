"""The command line: exit codes, standard output and the process itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

import accum_jax
from accum_jax.cli import main


def test_module_is_the_program():
    # Extras blocked: help has to work where only the dependencies are installed.
    blocked = "import sys; sys.modules.update(dict.fromkeys(['flax', 'rich', 'sklearn']))"
    code = f"{blocked}; import runpy; runpy.run_module('accum_jax', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, "--help"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo" in done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"accum-jax {accum_jax.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["demo", "--model", "mnist"], "invalid choice: 'mnist'"),
        (["demo", "--api", "haiku"], "invalid choice: 'haiku'"),
        (["demo", "--size", "tiny"], "invalid choice: 'tiny'"),
        (["demo", "--steps", "0"], "expected a whole number from 1 on, got '0'"),
        (["demo", "--steps", "2.5"], "expected a whole number from 1 on, got '2.5'"),
        (["demo", "--out", "demo.pdf"], "expected a file name that ends in .png, got 'demo.pdf'"),
        (["demo", "--out", "nowhere/demo.png"], "no folder 'nowhere'"),
    ],
)
def test_bad_usage(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    printed = capsys.readouterr()
    assert exit_.value.code == 2
    assert printed.out == ""
    assert message in printed.err


def test_demo_names_the_extra_that_is_missing(capsys, monkeypatch):
    for module in ("rich", "sklearn"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["demo"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "accum-jax demo: rich, scikit-learn not installed; run: pip install 'accum-jax[demo]'\n"
    )


def test_size_is_of_the_transformer(capsys):
    assert main(["demo", "--size", "medium"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "accum-jax demo: --size is for --model chars, got --model digits\n"
