"""Two views of each handwritten digit for contrastive learning, where rows are compared."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from sklearn.datasets import load_digits

from accum_jax._demo.task import Task, as_nnx


def _features(image: jax.Array, first: Any, second: Any) -> jax.Array:
    """[..., 8, 8] images to [..., 128] features."""
    return second(jax.nn.gelu(first(image.reshape(*image.shape[:-2], 64))))


class _LinenEncoder(linen.Module):
    """[..., 8, 8] images to [..., 32] embeddings."""

    def setup(self):
        self.first, self.second, self.last = map(linen.Dense, (128, 128, 32))
        self.log_scale = self.param("log_scale", lambda _: jnp.log(jnp.float32(5)))

    def features(self, image):
        return _features(image, self.first, self.second)

    def __call__(self, image):
        return self.last(jax.nn.gelu(self.features(image)))


class _NnxEncoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 128, rngs=rngs)
        self.second = nnx.Linear(128, 128, rngs=rngs)
        self.last = nnx.Linear(128, 32, rngs=rngs)
        self.log_scale = nnx.Param(jnp.log(jnp.float32(5)))

    def features(self, image):
        return _features(image, self.first, self.second)

    def __call__(self, image):
        return self.last(jax.nn.gelu(self.features(image)))


def two_views(batch, rng: np.random.Generator):
    """The images of a batch twice: moved by up to a pixel, brighter or darker, and noisy."""
    image = batch["image"]

    def view():
        padded = np.pad(image, ((0, 0), (1, 1), (1, 1)))
        shifts = [padded[:, i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
        moved = np.choose(rng.integers(9, size=(len(image), 1, 1)), shifts)
        gain = rng.uniform(0.6, 1.4, size=(len(image), 1, 1))
        return np.asarray(moved * gain + 0.1 * rng.normal(size=image.shape), np.float32)

    return {**batch, "views": np.stack([view(), view()], axis=1)}


def encode(model, batch):
    """Embeddings of both views of each row, [rows, 2, features]."""
    return model(batch["views"])


def nt_xent(model, z, batch):
    """Cross entropy of finding a view's other view among all other views of the batch.

    The NT-Xent loss of Chen et al. 2020, "A Simple Framework for Contrastive Learning of Visual
    Representations", with a temperature that is learned.

    Args:
        model: with `log_scale`, the logarithm of the inverse temperature.
        z: embeddings, [rows, 2, features].
        batch: not used.
    """
    n = len(z)
    z = z / jnp.sqrt(jnp.sum(jnp.square(z), axis=-1, keepdims=True) + 1e-6)
    z = jnp.concatenate([z[:, 0], z[:, 1]])
    logits = jnp.where(jnp.eye(2 * n, dtype=bool), -jnp.inf, z @ z.T * jnp.exp(model.log_scale))
    own = jnp.arange(2 * n)
    return -jax.nn.log_softmax(logits)[own, (own + n) % (2 * n)].mean()


@functools.cache
def contrastive_linen() -> Task:
    """scikit-learn's digits without their labels, an encoder and the NT-Xent loss.

    Accuracy is that of a linear classifier on the encoder's features of held-out digits, fitted by
    ridge regression to those of the others.
    """
    pixels, labels = load_digits(return_X_y=True)
    rows = {
        "image": np.asarray(pixels / 16, np.float32).reshape(-1, 8, 8),
        "label": np.asarray(labels, np.int32),
    }
    order = np.random.default_rng(0).permutation(len(rows["label"]))
    num_test = len(order) // 5
    train, test = (
        jax.tree.map(lambda leaf, part=part: leaf[part], rows)
        for part in (order[num_test:], order[:num_test])
    )
    module = _LinenEncoder()

    def accuracy(model, batch):
        known, asked = model.features(train["image"]), model.features(batch["image"])
        mean, deviation = known.mean(0), known.std(0) + 1e-6
        known, asked = (
            jnp.pad((x - mean) / deviation, ((0, 0), (0, 1)), constant_values=1)
            for x in (known, asked)
        )
        gram = known.T @ known + jnp.eye(known.shape[1])
        weights = jnp.linalg.solve(gram, known.T @ jax.nn.one_hot(train["label"], 10))
        return jnp.mean(jnp.argmax(asked @ weights, axis=-1) == batch["label"])

    return Task(
        init=jax.jit(lambda: module.init(jax.random.key(0), rows["image"][:1])["params"]),
        merge=lambda params: module.bind({"params": params}),
        loss=lambda model, batch: nt_xent(model, encode(model, batch), batch),
        weight=None,
        accuracy=accuracy,
        train=train,
        test=two_views(test, np.random.default_rng(0)),
        microbatch_size=32,
        k=16,
        learning_rate=0.3,
        steps=200,
        ways=("whole batch", "coupled", "value_and_grad"),
        augment=two_views,
        coupled=(encode, nt_xent),
    )


def contrastive_nnx() -> Task:
    """The same with the same encoder in Flax NNX, which starts from the same parameters."""
    return as_nnx(contrastive_linen(), _NnxEncoder)
