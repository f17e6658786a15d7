"""Handwritten digits for a convolutional network."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from sklearn.datasets import load_digits

from accum_jax._demo.task import Task


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
        weight=None,
        accuracy=accuracy,
        train=jax.tree.map(lambda leaf: leaf[order[num_test:]], rows),
        test=jax.tree.map(lambda leaf: leaf[order[:num_test]], rows),
        microbatch_size=32,
        k=8,
        learning_rate=0.1,
        steps=200,
        ways=("whole batch", "accumulate", "optax.MultiSteps"),
    )
