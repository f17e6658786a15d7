"""What follows from a plan's numbers, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ._memory_text import show_bytes

if TYPE_CHECKING:
    from ._plan import Plan


def advice(plan: Plan) -> Iterator[str]:
    """What to do, what it costs, and what would help where accumulation does not."""
    best = plan.best
    if best is None:
        yield from _too_large(plan)
        return
    if plan.memory_limit is None:
        yield (
            f"{plan.target} names no memory, so everything fits. Give memory_limit=, or target= "
            "for a machine that is not here."
        )
    if best.k == 1:
        yield "The whole batch fits: accumulation is not needed."
    else:
        yield (
            f"Use accum_jax.value_and_grad(loss_fn, k={best.k}): microbatches of "
            f"{best.microbatch_size} rows on each device."
        )
    if best.gather_bytes:
        yield (
            "Parameters that are sharded over the devices of the batch are gathered in every "
            f"microbatch: {best.k} x {show_bytes(best.gather_bytes / best.k)} = "
            f"{show_bytes(best.gather_bytes)} in the forward pass, and again in the backward pass."
        )


def _too_large(plan: Plan) -> Iterator[str]:
    assert plan.memory_limit is not None
    fixed = plan.params_bytes + plan.optimizer_bytes + plan.gradient_bytes
    if plan.verdict == "accumulation_cannot_help":
        yield (
            f"Parameters of {show_bytes(plan.params_bytes)}, optimizer state of "
            f"{show_bytes(plan.optimizer_bytes)} and one gradient of "
            f"{show_bytes(plan.gradient_bytes)} are {show_bytes(fixed)}, above the limit of "
            f"{show_bytes(plan.memory_limit)} whatever the microbatch. Accumulation and "
            "jax.checkpoint save activations only."
        )
    else:
        least = plan.rows[0]
        size = f"{least.microbatch_size} row{'s' if least.microbatch_size > 1 else ''}"
        if least.peak_bytes is None or least.activation_bytes is None:
            yield f"The compiler refuses even microbatches of {size}."
        else:
            yield (
                f"Microbatches of {size} need {show_bytes(least.peak_bytes)}, of which activations "
                f"are {show_bytes(least.activation_bytes)}."
            )
        yield "Rematerialise layers (jax.checkpoint, flax.linen.remat) to hold fewer activations."
    if plan.optimizer_bytes >= plan.params_bytes:
        yield (
            f"Keep less optimizer state than {show_bytes(plan.optimizer_bytes)}: a first moment in "
            "bfloat16 (optax.adam(..., mu_dtype=jnp.bfloat16)), or optax.adafactor."
        )
    devices = math.ceil(fixed / (plan.memory_limit * (1 - plan.headroom)))
    yield (
        "Shard parameters and optimizer state over more devices (FSDP): give the shapes a "
        f".sharding. Alone they and a gradient fill {devices} times this one."
    )
