"""Ten small models as shapes, for plans."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any
ROWS, WIDTH, LENGTH, VOCABULARY = 16, 8, 6, 32


class Case(NamedTuple):
    loss_fn: Any
    params: PyTree
    batch: PyTree
    tx: optax.GradientTransformation = optax.sgd(0.1, momentum=0.9)
    weight: Any = None
    key: Any = None
    has_aux: bool = False


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def _dense(dtype=jnp.float32, layers=None):
    dims = (WIDTH, WIDTH) if layers is None else (layers, WIDTH, WIDTH)
    return {"w": shape(*dims, dtype=dtype), "b": shape(*dims[:-1], dtype=dtype)}


def _rows(dtype=jnp.float32):
    return {"x": shape(ROWS, WIDTH, dtype=dtype), "y": shape(ROWS, WIDTH, dtype=dtype)}


def _layer(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def mlp_loss(params, batch):
    x = batch["x"]
    for p in params:
        x = _layer(p, x)
    return jnp.mean((x - batch["y"]) ** 2)


def _remat_loss(params, batch):
    x = batch["x"]
    for p in params:
        x = jax.checkpoint(_layer)(p, x)
    return jnp.mean((x - batch["y"]) ** 2)


def _dropout_loss(params, batch, key):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    loss = mlp_loss(params, {**batch, "x": batch["x"] * keep})
    return loss, {"loss": loss, "kept": jnp.sum(keep)}


def _masked_loss(params, batch):
    errors = jnp.sum((_layer(params, batch["x"]) - batch["y"]) ** 2, axis=-1)
    return jnp.sum(errors * batch["mask"]) / jnp.sum(batch["mask"])


def _cnn_loss(params, batch):
    x = batch["image"]
    for kernel in params["kernels"]:
        x = jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
    logits = x.mean((1, 2)) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def _attention_layer(x, p):
    q, k, v = jnp.moveaxis((x @ p["qkv"]).reshape(*x.shape[:2], 3, WIDTH), 2, 0)
    scores = jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2) / WIDTH**0.5)
    x = x + scores @ v
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def _transformer(layers):
    dims = () if layers is None else (layers,)
    return {
        "qkv": shape(*dims, WIDTH, 3 * WIDTH),
        "up": shape(*dims, WIDTH, 2 * WIDTH),
        "down": shape(*dims, 2 * WIDTH, WIDTH),
    }


def _tokens_loss(params, batch, out):
    x = params["embed"][batch["tokens"]]
    layers = params["layers"]
    if isinstance(layers, list):
        for p in layers:
            x = _attention_layer(x, p)
    else:
        x, _ = jax.lax.scan(lambda x, p: (_attention_layer(x, p), None), x, layers)
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ out, batch["targets"])
    return losses.mean()


def _untied_loss(params, batch):
    return _tokens_loss(params, batch, params["out"])


def _tied_loss(params, batch):
    return _tokens_loss(params, batch, params["embed"].T)


_TOKENS = {
    "tokens": shape(ROWS, LENGTH, dtype=jnp.int32),
    "targets": shape(ROWS, LENGTH, dtype=jnp.int32),
}
_EMBED = shape(VOCABULARY, WIDTH)
_BFLOAT16 = jnp.dtype("bfloat16")

CASES = {
    "mlp": Case(mlp_loss, [_dense(), _dense()], _rows(), optax.adam(1e-3)),
    "cnn": Case(
        _cnn_loss,
        {"kernels": [shape(3, 3, 3, 4), shape(3, 3, 4, 8)], "out": shape(8, 10)},
        {"image": shape(ROWS, 8, 8, 3), "label": shape(ROWS, dtype=jnp.int32)},
    ),
    "transformer": Case(
        _untied_loss,
        {
            "embed": _EMBED,
            "layers": [_transformer(None)] * 2,
            "out": shape(WIDTH, VOCABULARY),
        },
        _TOKENS,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    ),
    "scanned transformer": Case(
        _untied_loss,
        {"embed": _EMBED, "layers": _transformer(3), "out": shape(WIDTH, VOCABULARY)},
        _TOKENS,
    ),
    "tied embeddings": Case(_tied_loss, {"embed": _EMBED, "layers": [_transformer(None)]}, _TOKENS),
    "bfloat16": Case(mlp_loss, [_dense(_BFLOAT16)] * 2, _rows(_BFLOAT16), optax.sgd(0.1)),
    "adafactor": Case(
        mlp_loss, [_dense()], _rows(), optax.adafactor(1e-3, min_dim_size_to_factor=4)
    ),
    "remat": Case(_remat_loss, [_dense()] * 3, _rows()),
    "dropout, auxiliary output": Case(
        _dropout_loss,
        [_dense()],
        _rows(),
        key=jax.eval_shape(lambda: jax.random.key(0)),
        has_aux=True,
    ),
    "token weights": Case(
        _masked_loss,
        _dense(),
        {**_rows(), "mask": shape(ROWS)},
        weight=lambda batch: jnp.sum(batch["mask"]),
    ),
}


def lora_loss(adapters, base, batch):
    return mlp_loss([{"w": base["w"] + adapters["a"] @ adapters["b"], "b": base["b"]}], batch)


LORA = {"a": shape(WIDTH, 2), "b": shape(2, WIDTH)}
BASE, LORA_BATCH = _dense(), _rows()
