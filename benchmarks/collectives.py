"""What do devices send one another in an update of k microbatches, and what of it in a loop?

Read off programs that are compiled from shapes: nothing is allocated or run, and TPUs and GPUs that
are not here are asked too, where their compiler is installed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import accum_jax
from accum_jax._targets import find_target
from benchmarks import models, ways
from benchmarks.models import Model
from benchmarks.report import Claim, Result, Table, bars
from benchmarks.targets import Memory, Target

CPU, TPU, GPU = "CPU x 8", "TPU v5e:2x4", "H100 x 8"
_MACHINES = {CPU: None, TPU: "v5e:2x4", GPU: "h100:8"}  # as accum_jax.plan names them
K, KS = 8, (1, 2, 8)
_SCALARS = 64  # bytes: the loss goes with the gradients


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to spread an update over devices.

    Attributes:
        name: as tables show it.
        axes: of the mesh, with their sizes.
        grad_fn: `grad_fn(model, k, mesh)` gives the function that makes value and gradient.
        specs: how parameters are sharded, by name; None where they are on all devices.
        rows: the axes over which the batch is spread.
        model: what the model has to know of the mesh.
        types: of the axes.
    """

    name: str
    axes: dict[str, int]
    grad_fn: Callable[[Model, int, Mesh], Callable[..., Any]]
    specs: dict[str, P] | None = None
    rows: tuple[str, ...] = ("data",)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    types: AxisType = AxisType.Auto


def transformer(layers: int = 16, width: int = 512, **options: Any) -> Model:
    return models.plain_transformer(
        layers, width, heads=8, length=128, microbatch_size=16, dtype=jnp.bfloat16, **options
    )


def _automatic(axis: int) -> Callable[[Model, int, Mesh], Callable[..., Any]]:
    return lambda model, k, mesh: ways.hand_written_scan(jax.value_and_grad(model.loss_fn), k, axis)


def _ours(
    specs: dict[str, P] | None = None, data_axes: str | None = "data"
) -> Callable[[Model, int, Mesh], Callable[..., Any]]:
    """`accum_jax.value_and_grad`, mapped over `data_axes`; None leaves all to the compiler."""

    def grad_fn(model, k, mesh):
        arg_specs = None if specs is None else {0: specs}
        if data_axes is None:
            return accum_jax.value_and_grad(model.loss_fn, k=k, arg_specs=arg_specs)
        return accum_jax.value_and_grad(
            model.loss_fn, k=k, mesh=mesh, data_axes=data_axes, arg_specs=arg_specs
        )

    return grad_fn


def _explicit(model: Model, k: int, mesh: Mesh) -> Callable[..., Any]:
    """What one writes on a mesh of explicit types: gradients stay unreduced until the end."""
    grad_fn = jax.value_and_grad(model.loss_fn)

    def accumulated(params, batch):
        reduced = jax.tree.map(lambda x: jax.reshard(x, P(reduced=frozenset({"data"}))), params)
        split = jax.tree.map(lambda x: x.reshape(-1, k, *x.shape[1:]), batch)

        def body(total, i):
            rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 1, False), split)
            return jax.tree.map(jnp.add, total, grad_fn(reduced, rows)), None

        unreduced = NamedSharding(mesh, P(unreduced=frozenset({"data"})))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=unreduced), params)
        (value, total), _ = jax.lax.scan(body, (jnp.zeros(()), zeros), jnp.arange(k))
        return value / k, jax.tree.map(lambda x: jax.reshard(x, P()) / k, total)

    return accumulated


_FSDP = {
    "qkv": P(None, "fsdp"),
    "mixed": P(None, "fsdp"),
    "up": P(None, "fsdp"),
    "down": P(None, "fsdp"),
    "embedding": P(None, "fsdp"),
    "logits": P("fsdp"),
}
_TENSOR = {
    "qkv": P(None, None, None, "model"),
    "mixed": P(None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model"),
    "embedding": P(),
    "logits": P(),
}
# Without it the compiler may send activations rather than parameters.
_SPREAD = {"spread": lambda x: jax.lax.with_sharding_constraint(x, P("fsdp"))}
_EMBED = {"embed": lambda table, ids: table.at[ids].get(out_sharding=P("data"))}

CONTIGUOUS = Way("automatic, contiguous", {"data": 8}, _automatic(0))
STRIDED = Way("automatic, strided", {"data": 8}, _automatic(1))
EXPLICIT = Way("Explicit", {"data": 8}, _explicit, model=_EMBED, types=AxisType.Explicit)
MESH = Way("mesh=", {"data": 8}, _ours())
LEFT = Way(
    "FSDP, left to the compiler",
    {"fsdp": 8},
    _ours(_FSDP, None),
    _FSDP,
    ("fsdp",),
    _SPREAD,
)
HYBRID = Way(
    "hybrid, 2 x FSDP over 4",
    {"replica": 2, "fsdp": 4},
    _ours(_FSDP, "replica"),
    _FSDP,
    ("replica", "fsdp"),
    _SPREAD,
)
BY_HAND = Way(
    "FSDP, gathered once",
    {"fsdp": 8},
    _ours(_FSDP, "fsdp"),
    _FSDP,
    ("fsdp",),
)
TENSOR = Way(
    "mesh=, tensor parallel over 2",
    {"data": 4, "model": 2},
    _ours(_TENSOR),
    _TENSOR,
)
WAYS = (CONTIGUOUS, STRIDED, EXPLICIT, MESH, LEFT, HYBRID, BY_HAND, TENSOR)
_PEERS = {way.name for way in (CONTIGUOUS, STRIDED, EXPLICIT)}
_QUICK = [(STRIDED, K), *((MESH, k) for k in KS), (HYBRID, K), (BY_HAND, K)]


def measure(machine: str, devices: Sequence[Any], way: Way, k: int, **size: int) -> dict[str, Any]:
    """What one update by `way` sends and holds, on one device.

    The bytes are of: `params`, the parameters in float32 (P); `temp` and `beyond_arguments`, as
    `Memory` has them; of a collective, as `accum_jax.Collective` has them. `flops` are the
    compiler's, which counts what stands in a loop once; None where it does not count them.
    """
    model = transformer(**size, **way.model)
    mesh = Mesh(
        np.array(devices).reshape(*way.axes.values()),
        tuple(way.axes),
        axis_types=(way.types,) * len(way.axes),
    )
    params, batch = model.shapes(model.microbatch_size * k)

    def place(x: Any, spec: P) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    placed = {name: place(x, (way.specs or {}).get(name, P())) for name, x in params.items()}
    batch = jax.tree.map(lambda x: place(x, P(way.rows)), batch)
    with jax.set_mesh(mesh):
        compiled = jax.jit(way.grad_fn(model, k, mesh)).lower(placed, batch).compile()
    found = Memory.of(compiled, devices[0])
    return {
        "machine": machine,
        "way": way.name,
        "k": k,
        "params": 4 * sum(x.size for x in params.values()),
        "temp": found.temp,
        "beyond_arguments": found.beyond_arguments,
        "flops": (compiled.cost_analysis() or {}).get("flops"),
        "collectives": [c._asdict() for c in accum_jax.collectives(compiled)],
    }


@dataclasses.dataclass(frozen=True)
class Sent:
    """Several collectives together.

    Attributes:
        times: how often they run in an update.
        bytes: what they send in an update, of one device.
        dtypes: what they send.
    """

    times: int
    bytes: int
    dtypes: tuple[str, ...]


def sent(row: dict[str, Any], what: str, inside_loop: bool | None = None) -> Sent:
    """What an update sends beside scalars.

    Args:
        row: of `measure`.
        what: `"reduced"`, `"moved"` (gathered or exchanged), `"batch"` (integers: the rows are
            bytes), or `"all"`.
        inside_loop: only what is in a loop, or only what is not.
    """
    each = []
    for c in row["collectives"]:
        kind = "reduced" if c["kind"] in ("all-reduce", "reduce-scatter") else "moved"
        if "float" not in c["dtype"]:
            kind = "batch"
        where = inside_loop in (None, c["inside_loop"])
        if where and what in (kind, "all") and c["bytes"] > _SCALARS:
            each.append(c)
    return Sent(
        sum(c["trip_count"] for c in each),
        sum(c["trip_count"] * c["bytes"] for c in each),
        tuple(sorted({c["dtype"] for c in each})),
    )


def run(quick: bool, targets: Sequence[Target], announce: Callable[[str], None]) -> Result:
    """Measures eight CPUs, and unless `quick` the machines whose compilers are installed.

    In a process of its own, which has eight CPU devices. `targets` are of one device: not for this.
    """
    machines = list(filter(_installed, _MACHINES))
    plan = [
        (machine, way.name, k)
        for machine in (machines[:1] if quick else machines)
        for way, k in (_QUICK if quick else [(way, k) for way in WAYS for k in KS])
    ]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    rows = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.collectives", json.dumps(plan)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=errors,  # of which a compiler for a machine that is not here writes pages
            text=True,
        ) as child,
    ):
        assert child.stdout is not None
        for machine, way, k in plan:
            announce(f"collectives: {way}, k = {k}, for {machine}")
            line = child.stdout.readline()
            if not line:
                child.wait()
                errors.seek(0)
                raise RuntimeError(f"collectives: {way}, k = {k}, {machine}:\n{errors.read()}")
            rows.append(json.loads(line))
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    tables = [_table([row for row in rows if row["machine"] == name]) for name in machines]
    found = [claim for row in rows for claim in claims(row)]
    return Result(rows, tables, found, lambda figure: _draw(figure, rows))


def _installed(machine: str) -> bool:
    try:
        find_target("benchmarks", _MACHINES[machine])
    except ImportError:
        return False
    return True


def _table(rows: list[dict[str, Any]]) -> Table:
    machine, params = rows[0]["machine"], rows[0]["params"]
    flops = {row["k"]: row["flops"] for row in rows if row["way"] == MESH.name}

    def cell(row: dict[str, Any], what: str, inside_loop: bool | None = None) -> str:
        found = sent(row, what, inside_loop)
        if not found.times:
            return "-"
        dtypes = ", ".join(found.dtypes).replace("float", "f").replace("int", "i")
        return f"{found.times}: {found.bytes / params:.2f} P {dtypes}"

    return Table(
        f"What a device sends in an update: {transformer().name}, {machine}",
        (
            *("way", "k", "reduced in a loop", "reduced outside", "moved in a loop"),
            *("moved outside", "batch", "temp / P", "peak / P", "FLOPs"),
        ),
        [
            (
                row["way"],
                str(row["k"]),
                cell(row, "reduced", True),
                cell(row, "reduced", False),
                cell(row, "moved", True),
                cell(row, "moved", False),
                cell(row, "batch"),
                f"{row['temp'] / params:.2f}",
                f"{row['beyond_arguments'] / params:.2f}",
                f"{row['flops'] / flops[row['k']]:.2f}" if row["flops"] else "",
            )
            for row in rows
        ],
        f"P = {params / 1e6:.0f} MB: parameters in float32; layers compute in bfloat16. How often, "
        "bytes an update over P, dtypes. moved: gathered or exchanged. Reductions in a loop are of "
        "gradients, with tensor parallelism of activations. peak: beyond the arguments, with the "
        "gradient. FLOPs: of a device, over those of mesh=.",
    )


def claims(row: dict[str, Any]) -> list[Claim]:
    """What has to hold of our ways, in bytes."""
    params, name = row["params"], f"{row['machine']}, {row['way']}, k = {row['k']}"
    if row["way"] == MESH.name:
        found = {
            "sent in a loop": sent(row, "all", True).bytes,
            "batch sent": sent(row, "batch").bytes,
            "reduced, beside P": abs(sent(row, "reduced").bytes - params),
            "reduced narrower than float32": sum(
                c["bytes"] for c in row["collectives"] if c["dtype"] != "float32"
            ),
        }
    elif row["way"] == HYBRID.name and row["k"] > 1:  # the compiler's own stand outside at k = 1
        shard = params // HYBRID.axes["fsdp"]
        found = {"reduced outside loops, beside P / 4": sent(row, "reduced", False).bytes - shard}
    elif row["way"] == BY_HAND.name:
        found = {
            "sent in a loop": sent(row, "all", True).bytes,
            "reduced, beside P": abs(sent(row, "reduced").bytes - params),
            "sent, beyond 2 P": sent(row, "all").bytes - 2 * params,
        }
    else:
        return []
    return [Claim(f"{name}: {what}", x, _SCALARS, x) for what, x in found.items()]


def _draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    shown = [row for row in rows if row["k"] == K]
    machines = list(dict.fromkeys(row["machine"] for row in shown))
    axes = figure.subplots(1, len(machines), squeeze=False, sharex=True, sharey=True)[0]
    for axis, machine in zip(axes, machines, strict=True):
        own = [row for row in shown if row["machine"] == machine]
        names = [row["way"] for row in own]
        values = [sent(row, "all").bytes / row["params"] for row in own]
        bars(axis, names, values, [name not in _PEERS for name in names])
        axis.set(title=f"{machine}, k = {K}", xlabel="sent in an update, / P")
    axes[0].invert_yaxis()


def _main(plan: str) -> None:
    """Prints a row as a line of JSON for each entry of a plan."""
    by_name = {way.name: way for way in WAYS}
    for machine, way, k in json.loads(plan):
        devices = find_target("benchmarks", _MACHINES[machine]).devices
        row = measure(machine, devices, by_name[way], k)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
