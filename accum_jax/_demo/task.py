"""What a task is to those who train it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """A model and its data, the same for every way of training it.

    Attributes:
        init: returns the initial parameters, the same at every call.
        loss_fn: `loss_fn(params, batch)`, the mean loss over what `weight` counts.
        weight: `weight(batch)`, what the loss is a mean over, a scalar; None for rows.
        accuracy: `accuracy(params, batch)`, the share of predictions that are right.
        train: training rows, every leaf with the rows on axis 0.
        test: rows held out.
        microbatch_size: rows of one forward and backward pass.
        k: microbatches per update.
        learning_rate: of the first update; it falls to zero.
        steps: updates, unless told otherwise.
        ways: names of the ways to train it, the one to compare with first.
    """

    init: Callable[[], Any]
    loss_fn: Callable[[Any, Batch], jax.Array]
    weight: Callable[[Batch], jax.Array] | None
    accuracy: Callable[[Any, Batch], jax.Array]
    train: Batch
    test: Batch
    microbatch_size: int
    k: int
    learning_rate: float
    steps: int
    ways: tuple[str, ...]

    @property
    def effective_batch(self) -> int:
        """Rows of one update."""
        return self.microbatch_size * self.k

    def batches(self, steps: int, seed: int = 0) -> Iterator[Batch]:
        """Yields `steps` effective batches: epochs in an order that only `seed` decides."""
        rng = np.random.default_rng(seed)
        size = self.effective_batch
        num_rows = len(jax.tree.leaves(self.train)[0])
        order = rng.permutation(num_rows)
        for _ in range(steps):
            if len(order) < size:
                order = rng.permutation(num_rows)
            rows, order = order[:size], order[size:]
            yield jax.tree.map(lambda leaf, rows=rows: leaf[rows], self.train)
