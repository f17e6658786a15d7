"""Flax Linen: a training loop with its log and a checkpoint that goes on in mid-epoch.

Float16 layers with a loss scale, dropout keys split over the microbatches, one log line for each
update. Stop it and run it again: it takes the next rows of the same epoch.

    python examples/linen.py [DIRECTORY]
"""

import functools
import sys
import time
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from rich.progress import Progress
from sklearn.datasets import load_digits

import accum_jax

K, BATCH = 8, 256
IMAGES, LABELS = load_digits(return_X_y=True)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.gelu(nn.LayerNorm()(nn.Dense(64, dtype=jnp.float16)(x)))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(10, dtype=jnp.float16)(x).astype(jnp.float32)


def loss_fn(params, batch, key):
    logits = Net().apply({"params": params}, batch["x"], train=True, rngs={"dropout": key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@functools.partial(jax.jit, donate_argnames="state")
def update(state, batch):
    value_and_grad = accum_jax.value_and_grad(
        loss_fn,
        k=K,
        key_argnums=2,
        loss_scale=accum_jax.loss_scale(state.opt_state),
        stats="norms",  # the noise scale, for a second gradient's memory
    )
    key = jax.random.fold_in(jax.random.key(1), state.step)
    (loss, grads), stats = value_and_grad(state.params, batch, key)
    state = state.apply_gradients(grads=grads)
    log = {"loss": loss, "norm": stats.global_norm, "noise": stats.noise_scale}
    return state, log | accum_jax.telemetry(state.opt_state)


def rows(step):
    """The rows of an update are a function of its number, so its number is all there is to save."""
    epoch, index = divmod(step, len(IMAGES) // BATCH)
    order = np.random.default_rng(epoch).permutation(len(IMAGES))
    mine = order[index * BATCH : (index + 1) * BATCH]
    return {"x": np.float32(IMAGES[mine] / 16), "y": np.int32(LABELS[mine])}


def main(directory, updates=100, save_every=10, log=print):
    schedule = optax.cosine_decay_schedule(3e-3, updates)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    tx = accum_jax.dynamic_loss_scale(tx)
    init = jax.jit(Net().init, static_argnames="train")
    params = init(jax.random.key(0), rows(0)["x"], train=False)["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    options = ocp.CheckpointManagerOptions(max_to_keep=1, save_interval_steps=save_every)
    with ocp.CheckpointManager(directory, options=options) as manager, Progress() as progress:
        if manager.latest_step() is not None:
            saved = ocp.args.StandardRestore(state)
            state = manager.restore(manager.latest_step(), args=saved)
        start = int(state.step)
        bar = progress.add_task("update", total=updates, completed=start)
        for step in range(start, updates):
            began = time.perf_counter()
            state, values = update(state, rows(step))
            values = {name: float(value) for name, value in values.items()}
            values["rows/s"] = BATCH / (time.perf_counter() - began)
            progress.advance(bar)
            log(step + 1, " ".join(f"{name} {x:.4g}" for name, x in values.items()))
            if manager.save(step + 1, args=ocp.args.StandardSave(state)):
                manager.wait_until_finished()  # the next update takes the state's memory
    return state


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "linen-checkpoint").absolute())
