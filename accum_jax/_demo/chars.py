"""Python's own source, byte by byte, for a transformer."""

from __future__ import annotations

import functools
import re
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from accum_jax._demo.task import Batch, Task, as_nnx
from accum_jax._demo.transformer import NnxTransformer, Transformer, mean_over_tokens

_LENGTH = 96  # longer documents are left out
# Layers and width: about 1, 11 and 86 million parameters.
SIZES = {"small": (5, 128), "medium": (6, 384), "large": (12, 768)}


def chars_linen(size: str = "small") -> Task:
    """The standard library's source files and a Flax Linen transformer.

    Blocks of lines are the documents. The loss is a mean over bytes, and documents differ in
    length, so that microbatches do not weigh the same.
    """
    model = Transformer(**_shape(size))
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    # Whole files are held out: blocks of one file resemble each other.
    held_out = files[::10]
    test = _rows(held_out)

    return Task(
        init=jax.jit(lambda: model.init(jax.random.key(0), test["tokens"][:1, 1:])["params"]),
        merge=lambda params: functools.partial(model.apply, {"params": params}),
        loss=mean_over_tokens,
        weight=lambda batch: batch["mask"].sum(),
        accuracy=_accuracy,
        train=_rows(file for file in files if file not in held_out),
        test=jax.tree.map(lambda leaf: leaf[:: len(leaf) // 256][:256], test),
        microbatch_size=2,
        k=8,
        learning_rate=0.1,
        steps=50,
        ways=("whole batch", "value_and_grad", "multi_steps", "mean of means"),
    )


def chars_nnx(size: str = "small") -> Task:
    """The same with the same transformer in Flax NNX, which starts from the same parameters."""
    return as_nnx(chars_linen(size), lambda rngs: NnxTransformer(rngs=rngs, **_shape(size)))


def _shape(size: str) -> dict[str, Any]:
    layers, width = SIZES[size]
    return {"layers": layers, "width": width, "heads": width // 32, "length": _LENGTH}


def _accuracy(model: Callable[..., Any], batch: Batch) -> Any:
    tokens, mask = batch["tokens"], batch["mask"]
    right = jnp.argmax(model(tokens[:, :-1]), axis=-1) == tokens[:, 1:]
    return (right * mask).sum() / mask.sum()


def _rows(files: Iterable[Path]) -> Batch:
    """Blocks of lines as rows: a zero, the bytes, zeros; the first zero after them counts too."""
    blocks = [
        block
        for file in files
        for block in re.split(rb"\n\s*\n", file.read_bytes())
        if block.strip() and len(block) < _LENGTH
    ]
    tokens = np.zeros((len(blocks), _LENGTH + 1), np.int32)
    for row, block in zip(tokens, blocks, strict=True):
        row[1 : 1 + len(block)] = np.frombuffer(block, np.uint8)
    lengths = np.array([len(block) + 1 for block in blocks])
    return {
        "tokens": tokens,
        "mask": (np.arange(_LENGTH) < lengths[:, None]).astype(np.float32),
    }
