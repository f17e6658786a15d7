"""Python's own source, byte by byte, for a transformer."""

from __future__ import annotations

import functools
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from accum_jax._demo.task import Batch, Task
from accum_jax._demo.transformer import Transformer, mean_over_tokens

_LENGTH = 96  # longer documents are left out
# Layers and width: about 1, 11 and 86 million parameters.
SIZES = {"small": (5, 128), "medium": (6, 384), "large": (12, 768)}


def chars_linen(size: str = "small") -> Task:
    """The standard library's source files, blocks of lines as documents, and a Flax transformer.

    The loss is a mean over bytes, and documents differ in length, so that microbatches do not
    weigh the same.
    """
    layers, width = SIZES[size]
    model = Transformer(layers, width, heads=width // 32, length=_LENGTH)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    # Whole files are held out: blocks of one file resemble each other.
    held_out = files[::10]
    test = _rows(held_out)

    def accuracy(params, batch) -> Any:
        tokens, mask = batch["tokens"], batch["mask"]
        logits = model.apply({"params": params}, tokens[:, :-1])
        right = jnp.argmax(jnp.asarray(logits), axis=-1) == tokens[:, 1:]
        return (right * mask).sum() / mask.sum()

    return Task(
        init=jax.jit(lambda: model.init(jax.random.key(0), test["tokens"][:1, 1:])["params"]),
        loss_fn=functools.partial(mean_over_tokens, model),
        weight=lambda batch: batch["mask"].sum(),
        accuracy=accuracy,
        train=_rows(file for file in files if file not in held_out),
        test=jax.tree.map(lambda leaf: leaf[:: len(leaf) // 256][:256], test),
        microbatch_size=2,
        k=8,
        learning_rate=0.1,
        steps=50,
        ways=("whole batch", "value_and_grad", "multi_steps", "mean of means"),
    )


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
