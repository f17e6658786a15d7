"""One of several processes that train together: `python worker.py --help`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--processes", type=int, required=True)
parser.add_argument("--process", type=int, required=True)
parser.add_argument("--devices", type=int, required=True, help="of each process")
parser.add_argument("--axes", type=json.loads, required=True, help="of the mesh, with their sizes")
parser.add_argument("--folder", type=Path, help="for checkpoints")
parser.add_argument("--updates", type=int, default=6)
parser.add_argument("--save-after", type=int, default=0)
parser.add_argument("--die-after", type=int, default=0, help="process 1, after so many updates")

LEARNING_RATE, K, ROWS = 0.1, 2, 32


def main(arguments: argparse.Namespace) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={arguments.devices}"
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{arguments.port}",
        arguments.processes,
        arguments.process,
        heartbeat_timeout_seconds=10,
    )
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P
    from layers import layered_problem, masked

    import accum_jax

    axes = arguments.axes
    mesh = Mesh(
        np.array(jax.devices()).reshape(*axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
    )
    # With one axis the parameters are on all devices, with two each process shards its own.
    (data_axes, *others) = axes
    params, batch = jax.tree.map(np.asarray, layered_problem(ROWS))
    params = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), params)
    if len(axes) > 1:
        layers = NamedSharding(mesh, P(None, *others))
        params["layers"] = jax.tree.map(lambda x: jax.device_put(x, layers), params["layers"])
    specs = jax.tree.map(lambda x: x.sharding.spec, params)

    share = ROWS // arguments.processes  # every process has rows of its own
    own = slice(arguments.process * share, (arguments.process + 1) * share)
    by_rows = NamedSharding(mesh, P(tuple(axes)))
    batch = jax.tree.map(lambda x: jax.make_array_from_process_local_data(by_rows, x[own]), batch)

    tx = accum_jax.multi_steps(optax.adam(LEARNING_RATE), 1)
    gradient = accum_jax.value_and_grad(
        masked,
        k=K,
        weight=lambda b: jnp.sum(b["mask"]),
        mesh=mesh,
        data_axes=data_axes,
        arg_specs={0: specs},
    )

    @jax.jit
    def step(params, state, batch):
        value, grads = gradient(params, batch)
        updates, state = tx.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    start, state = 0, jax.jit(tx.init)(params)
    checkpointer = saved = None
    if arguments.folder is not None:
        import orbax.checkpoint as ocp

        checkpointer, saved = ocp.StandardCheckpointer(), arguments.folder / "state"
        if saved.exists():
            everywhere = NamedSharding(mesh, P())

            def target(x):  # counters are on one device; restored, they would have to stay there
                sharding = x.sharding if isinstance(x.sharding, NamedSharding) else everywhere
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

            params, state = checkpointer.restore(saved, jax.tree.map(target, (params, state)))
            start = int(state.gradient_step)

    program = step.lower(params, state, batch).compile()
    values = []
    for update in range(start, arguments.updates):
        value, params, state = step(params, state, batch)
        values.append(float(value))
        if checkpointer is not None and update + 1 == arguments.save_after:
            checkpointer.save(saved, (params, state))
            checkpointer.wait_until_finished()
        if update + 1 == arguments.die_after and arguments.process == 1:
            os._exit(3)
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(params)
    found = [(c.kind, c.dtype, c.inside_loop) for c in accum_jax.collectives(program)]
    result = {
        "start": start,
        "values": values,
        "params": jax.tree.map(lambda x: np.asarray(x.addressable_data(0)).tolist(), whole),
        "collectives": sorted(set(found)),
    }
    jax.distributed.shutdown()
    print("\n" + json.dumps(result))  # on a line of its own: gloo writes to standard output, too


if __name__ == "__main__":
    main(parser.parse_args())
