"""Flax NNX: a training loop with its log and a checkpoint that goes on in mid-epoch.

Documents of different lengths, so the loss is a mean over tokens and microbatches are weighted;
dropout and its random stream are in the model. One log line for each update. Stop it and run it
again: it takes the next rows of the same epoch.

    python examples/nnx.py [DIRECTORY]
"""

import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from rich.progress import Progress

import accum_jax.nnx

K, BATCH, LENGTH = 8, 64, 64
LINES = Path(optax.__file__).with_name("_src").joinpath("alias.py").read_bytes().splitlines()
LINES = [line[:LENGTH] for line in LINES if line]


class Net(nnx.Module):
    """The next byte, from the last two."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(256, 64, rngs=rngs)
        self.mix = nnx.Linear(128, 64, rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        x = x + self.dropout(nnx.gelu(self.mix(jnp.concatenate([before, x], -1))))
        return self.embed.attend(self.norm(x))


def loss_fn(model, batch):
    logits = model(batch["tokens"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


value_and_grad = accum_jax.nnx.value_and_grad(
    loss_fn, k=K, weight=lambda batch: jnp.sum(batch["mask"]), stats="counts"
)


@nnx.jit(donate_argnames=("model", "optimizer"))
def update(model, optimizer, batch):
    (loss, grads), stats = value_and_grad(model, batch)
    optimizer.update(model, grads)
    log = {"loss": loss, "tokens": stats.total_weight, "non-finite": stats.num_nonfinite}
    return log | accum_jax.telemetry(optimizer.opt_state)


def rows(step):
    """The rows of an update are a function of its number, so its number is all there is to save."""
    epoch, index = divmod(step, len(LINES) // BATCH)
    order = np.random.default_rng(epoch).permutation(len(LINES))
    tokens = np.zeros((BATCH, LENGTH + 1), np.int32)  # a zero, the line, zeros
    for row, n in zip(tokens, order[index * BATCH :], strict=False):
        row[1 : 1 + len(LINES[n])] = np.frombuffer(LINES[n], np.uint8)
    return {"tokens": tokens, "mask": np.float32(tokens[:, 1:] > 0)}


def main(directory, updates=100, save_every=10, log=print):
    schedule = optax.cosine_decay_schedule(1e-2, updates)
    norm = optax.snapshot("norm", optax.tree.norm)
    tx = optax.chain(norm, optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    options = ocp.CheckpointManagerOptions(max_to_keep=1, save_interval_steps=save_every)
    with ocp.CheckpointManager(directory, options=options) as manager, Progress() as progress:
        if manager.latest_step() is not None:
            saved = ocp.args.StandardRestore(nnx.state((model, optimizer)))
            nnx.update((model, optimizer), manager.restore(manager.latest_step(), args=saved))
        start = int(optimizer.step[...])
        bar = progress.add_task("update", total=updates, completed=start)
        for step in range(start, updates):
            began = time.perf_counter()
            values = update(model, optimizer, rows(step))
            values = {name: float(value) for name, value in values.items()}
            seconds = time.perf_counter() - began
            values |= {"rows/s": BATCH / seconds, "tokens/s": values["tokens"] / seconds}
            progress.advance(bar)
            log(step + 1, " ".join(f"{name} {x:.4g}" for name, x in values.items()))
            state = nnx.state((model, optimizer))
            if manager.save(step + 1, args=ocp.args.StandardSave(state)):
                manager.wait_until_finished()  # the next update takes the state's memory
    return model, optimizer


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "nnx-checkpoint").absolute())
