"""The scripts under `examples/` train, and go on where they were stopped."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


class Stopped(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_goes_on_with_the_same_numbers(name, tmp_path):
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    first, second = {}, {}

    def stop(step, text):
        first[step] = text.split(" rows/s")[0]
        if step == 4:
            raise Stopped

    with pytest.raises(Stopped):
        main(tmp_path, updates=5, save_every=3, log=stop)
    main(tmp_path, 5, 3, log=lambda step, text: second.update({step: text.split(" rows/s")[0]}))
    assert [*first] == [1, 2, 3, 4] and [*second] == [4, 5]
    assert second[4] == first[4]
    losses = [float(text.split()[1]) for text in (first[1], second[5])]
    assert losses[1] < losses[0]
