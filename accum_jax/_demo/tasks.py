"""The tasks by the names that the command line gives them."""

from __future__ import annotations

from collections.abc import Callable

from accum_jax._demo.chars import chars_linen, chars_nnx
from accum_jax._demo.contrastive import contrastive_linen, contrastive_nnx
from accum_jax._demo.digits import digits_linen, digits_nnx
from accum_jax._demo.task import Task

TASKS: dict[tuple[str, str], Callable[..., Task]] = {
    ("digits", "linen"): digits_linen,
    ("digits", "nnx"): digits_nnx,
    ("chars", "linen"): chars_linen,
    ("chars", "nnx"): chars_nnx,
    ("contrastive", "linen"): contrastive_linen,
    ("contrastive", "nnx"): contrastive_nnx,
}
