"""The multi-layer perceptron of `benchmarks.models` in PyTorch, which adds up in `.grad`."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from benchmarks.models import Model


class TorchRunner:
    """k backward passes and one step of Adam; `update()` is the seconds of an update.

    Args:
        model: what `benchmarks.models.mlp` makes.
        k: microbatches per update.
    """

    def __init__(self, model: Model, k: int):
        params = jax.jit(model.init)(jax.random.key(0))
        self.params = [
            (_tensor(layer["w"]).requires_grad_(), _tensor(layer["b"]).requires_grad_())
            for layer in params
        ]
        batch = {n: _tensor(x) for n, x in model.batch(model.microbatch_size * k).items()}
        self._batches = [{name: x[i::k] for name, x in batch.items()} for i in range(k)]
        self.cost: dict[str, float] = {}  # PyTorch does not count
        self._adam = torch.optim.Adam([x for layer in self.params for x in layer], lr=1e-3)

    def update(self) -> float:
        start = time.perf_counter()
        self._adam.zero_grad()
        for batch in self._batches:
            x = batch["x"]
            for w, b in self.params:
                x = torch.nn.functional.gelu(x @ w + b, approximate="tanh")
            loss = torch.mean((x - batch["y"]) ** 2)
            (loss / len(self._batches)).backward()
        self._adam.step()
        return time.perf_counter() - start


def _tensor(x: Any) -> Any:
    return torch.from_numpy(np.array(x))
