"""Handwritten digits for a convolutional network."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from sklearn.datasets import load_digits

from accum_jax._demo.task import Batch, Task, as_nnx


def _shifted(x: jax.Array) -> jax.Array:
    """The nine shifts of images [b, h, w, c], beside each other, [b, h, w, 9c].

    Times a matrix they are a 3 by 3 convolution. XLA for CPU runs the weight gradient of its own
    about twenty times slower inside a loop than outside one; a product of matrices runs at the same
    speed in both.
    """
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifts = [x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return jnp.concatenate(shifts, axis=-1)


def _cnn(image: jax.Array, first: Any, second: Any, hidden: Any, head: Any) -> jax.Array:
    """Two convolutions and a hidden layer: [b, 8, 8, 1] images to [b, 10] logits.

    Smooth throughout: the kink of a ReLU turns rounding, by which any two orders of summation
    differ, into differences a thousand times larger within a hundred updates.
    """
    x = jax.nn.gelu(first(_shifted(image)))
    x = linen.avg_pool(x, (2, 2), strides=(2, 2))
    x = jax.nn.gelu(second(_shifted(x)))
    return head(jax.nn.gelu(hidden(x.reshape(len(x), -1))))


class _LinenCnn(linen.Module):
    @linen.compact
    def __call__(self, image):
        sizes = {"first": 16, "second": 32, "hidden": 64, "head": 10}
        return _cnn(image, **{name: linen.Dense(size, name=name) for name, size in sizes.items()})


class _NnxCnn(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(9, 16, rngs=rngs)
        self.second = nnx.Linear(9 * 16, 32, rngs=rngs)
        self.hidden = nnx.Linear(4 * 4 * 32, 64, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, image):
        return _cnn(image, self.first, self.second, self.hidden, self.head)


def _loss(model: Callable[..., Any], batch: Batch) -> jax.Array:
    return optax.losses.softmax_cross_entropy_with_integer_labels(
        model(batch["image"]), batch["label"]
    ).mean()


def _accuracy(model: Callable[..., Any], batch: Batch) -> jax.Array:
    return jnp.mean(model(batch["image"]).argmax(-1) == batch["label"])


@functools.cache
def digits_linen() -> Task:
    """Handwritten digits, 8 by 8 pixels, that scikit-learn carries, and a Flax Linen CNN."""
    pixels, labels = load_digits(return_X_y=True)
    rows = {
        "image": np.asarray(pixels / 16, np.float32).reshape(-1, 8, 8, 1),
        "label": np.asarray(labels, np.int32),
    }
    order = np.random.default_rng(0).permutation(len(rows["label"]))
    num_test = len(order) // 5
    model = _LinenCnn()
    return Task(
        init=jax.jit(lambda: model.init(jax.random.key(0), rows["image"][:1])["params"]),
        merge=lambda params: functools.partial(model.apply, {"params": params}),
        loss=_loss,
        weight=None,
        accuracy=_accuracy,
        train=jax.tree.map(lambda leaf: leaf[order[num_test:]], rows),
        test=jax.tree.map(lambda leaf: leaf[order[:num_test]], rows),
        microbatch_size=32,
        k=8,
        learning_rate=0.1,
        steps=200,
        ways=("whole batch", "value_and_grad", "optax.MultiSteps"),
        stats="norms",
    )


def digits_nnx() -> Task:
    """The same with the same CNN in Flax NNX, which starts from the same parameters."""
    return as_nnx(digits_linen(), _NnxCnn)
