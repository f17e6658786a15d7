"""What the demo trains: a model, its loss and its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from sklearn.datasets import load_digits

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """A model and its data, the same for every way of training it.

    Attributes:
        init: returns the initial parameters, the same at every call.
        loss_fn: `loss_fn(params, batch)`, the mean loss over the rows of `batch`.
        accuracy: `accuracy(params, batch)`, the share of rows predicted right.
        train: training rows, every leaf with the rows on axis 0.
        test: rows held out.
        microbatch_size: rows of one forward and backward pass.
        k: microbatches per update.
    """

    init: Callable[[], Any]
    loss_fn: Callable[[Any, Batch], jax.Array]
    accuracy: Callable[[Any, Batch], jax.Array]
    train: Batch
    test: Batch
    microbatch_size: int
    k: int

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


class _Conv3x3(linen.Module):
    """A 3 by 3 convolution, written as the shifted images beside each other times a matrix.

    XLA for CPU runs the weight gradient of a convolution about twenty times slower inside a loop
    than outside one; a product of matrices runs at the same speed in both.
    """

    features: int

    @linen.compact
    def __call__(self, x):
        height, width = x.shape[1:3]
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        shifted = [x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
        return linen.Dense(self.features)(jnp.concatenate(shifted, axis=-1))


class _Cnn(linen.Module):
    """Two convolutions and a hidden layer: [b, 8, 8, 1] images to [b, 10] logits.

    Smooth throughout: the kink of a ReLU turns rounding, by which any two orders of summation
    differ, into differences a thousand times larger within a hundred updates.
    """

    @linen.compact
    def __call__(self, image):
        x = linen.gelu(_Conv3x3(16)(image))
        x = linen.avg_pool(x, (2, 2), strides=(2, 2))
        x = linen.gelu(_Conv3x3(32)(x))
        x = linen.gelu(linen.Dense(64)(x.reshape(len(x), -1)))
        return linen.Dense(10)(x)


def digits_linen() -> Task:
    """Handwritten digits, 8 by 8 pixels, that scikit-learn carries, and a Flax linen CNN."""
    pixels, labels = load_digits(return_X_y=True)
    rows = {
        "image": np.asarray(pixels / 16, np.float32).reshape(-1, 8, 8, 1),
        "label": np.asarray(labels, np.int32),
    }
    order = np.random.default_rng(0).permutation(len(rows["label"]))
    num_test = len(order) // 5
    model = _Cnn()

    def logits(params, batch) -> Any:
        return model.apply({"params": params}, batch["image"])

    def loss_fn(params, batch):
        return optax.losses.softmax_cross_entropy_with_integer_labels(
            logits(params, batch), batch["label"]
        ).mean()

    def accuracy(params, batch):
        return jnp.mean(logits(params, batch).argmax(-1) == batch["label"])

    return Task(
        init=lambda: model.init(jax.random.key(0), rows["image"][:1])["params"],
        loss_fn=loss_fn,
        accuracy=accuracy,
        train=jax.tree.map(lambda leaf: leaf[order[num_test:]], rows),
        test=jax.tree.map(lambda leaf: leaf[order[:num_test]], rows),
        microbatch_size=32,
        k=8,
    )


TASKS: dict[tuple[str, str], Callable[[], Task]] = {("digits", "linen"): digits_linen}
