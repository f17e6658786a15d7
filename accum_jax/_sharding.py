"""Data axes: what the devices of a window add up, once, after the loop."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ._errors import check_axis_names, check_int, leaf_name
from ._split import Batch, is_array


@dataclasses.dataclass(frozen=True)
class DataAxes:
    """The mapped axes over which the rows of a batch are spread; none for one device.

    `alone`: they have one device between them, and the map around it does not ask for reductions.
    XLA cannot partition a collective over one device of what other axes shard.
    """

    names: tuple[Any, ...] = ()
    alone: bool = False

    @property
    def size(self) -> int:
        """How many devices share the window."""
        return math.prod(lax.axis_size(name) for name in self.names)

    @property
    def index(self) -> jax.Array:
        """This device's number."""
        return lax.axis_index(self.names)

    def vary(self, tree: Any) -> Any:
        """Marks arrays as differing between the devices of the data axes.

        A gradient with respect to an array that `jax.shard_map` knows to be equal on all devices is
        summed over them at once: in every microbatch, and a second time after the loop.
        """
        names = frozenset(name for name in self.names if name in _manual_axes())
        return jax.tree.map(lambda x: _vary_over(x, names), tree) if names else tree

    def settle(self, body: Any, index: Any, carry: Any, args: Any) -> Any:
        """The carry of a loop with the types that it has after `body(index, carry)`.

        Axes of the caller's `jax.shard_map` that are no data axes, and explicit shardings, come in
        through the outputs.
        """
        if not (_manual_axes() or any(map(_is_explicit, jax.tree.leaves(args)))):
            return carry
        return match(carry, jax.eval_shape(body, index, carry))

    def sum(self, x: Any, spec: Any = None) -> Any:
        """The sum over devices, in float32 or wider; each device keeps its shard by `spec`."""
        if not self.names or self.alone:
            return x
        if isinstance(x, int):
            return x * self.size
        if jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize < 4:
            x = x.astype(jnp.float32)
        # A compiler may add up float32 that it saw widened from bfloat16 as bfloat16.
        x, mapped = lax.optimization_barrier(self.vary(x)), []
        for dim, names in self._mapped(spec):
            x = lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)
            mapped += names
        rest = tuple(name for name in self.names if name not in mapped)
        return lax.psum(x, rest) if rest else x

    def gather(self, x: Any, spec: Any, to: str = "varying") -> Any:
        """The whole of an array of which each device of the data axes holds a shard.

        With `to="invarying"` it is known to be equal on all devices.
        """
        for dim, names in self._mapped(spec):
            manual = all(name in _manual_axes() for name in names)
            x = lax.all_gather(x, names, axis=dim, tiled=True, to=to if manual else "varying")
        return x

    def shard(self, x: Any, spec: Any) -> Any:
        """This device's shard of an array that all devices hold whole: undoes `gather`."""
        for dim, names in self._mapped(spec):
            size = x.shape[dim] // math.prod(lax.axis_size(name) for name in names)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, dim)
        return x

    def sum_shards(self, x: jax.Array, spec: Any) -> jax.Array:
        """The sum over the shards of an array sharded by `spec`, of one number of each."""
        names = tuple(name for _, names in self._mapped(spec) for name in names)
        return lax.psum(x, names) if names else x

    def _mapped(self, spec: Any) -> list[tuple[int, tuple[Any, ...]]]:
        """The dimensions of a spec that data axes shard, with those axes."""
        entries = enumerate(map(_names, keep_axes(spec, () if self.alone else self.names)))
        return [(dim, entry) for dim, entry in entries if entry]

    def _free(self, spec: Any) -> tuple[Any, list[Any]]:
        """The mesh of a spec, and its axes that are left to the compiler."""
        mesh = jax.sharding.get_abstract_mesh()
        if isinstance(spec, NamedSharding):
            mesh, spec = spec.mesh, spec.spec
        mapped = (*self.names, *_manual_axes())
        return mesh, [name for name in spec_axes(spec) if name not in mapped]

    def check_spec(self, fn: str, spec: Any) -> None:
        """Refuses a spec of axes for which there is no mesh."""
        mesh, free = self._free(spec)
        if free and mesh.empty:
            raise ValueError(
                f"{fn}: arg_specs has {spec}, which speaks of a mesh, but there is none here. Give "
                "mesh=, NamedShardings, or call under jax.set_mesh(mesh)."
            )

    def check_shards(self, fn: str, name: str, x: Any, spec: Any, mesh: Any) -> None:
        """Refuses a spec by which some devices would hold more of an array than others."""
        for dim, names in self._mapped(spec):
            shards = math.prod(mesh.shape[axis] for axis in names)
            if x.shape[dim] % shards:
                raise ValueError(
                    f"{fn}: arg_specs shards axis {dim} of {name}, of size {x.shape[dim]}, over "
                    f"{shards} devices (axes {', '.join(map(repr, names))} of the mesh), which do "
                    "not divide it. Shard another axis, or leave this leaf whole with "
                    "PartitionSpec()."
                )

    def constrain(self, x: jax.Array, spec: Any) -> jax.Array:
        """Keeps an array sharded by `spec` over the axes that are left to the compiler."""
        mesh, free = self._free(spec)
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True)) if free else {}
        auto = [name for name in free if types.get(name) == AxisType.Auto]
        if not auto:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(mesh, keep_axes(spec, auto)))

    def check_divides(self, fn: str, batch: Batch, mesh: Any) -> None:
        """Refuses a batch of which some devices would get more rows than others."""
        devices = math.prod(mesh.shape[name] for name in self.names)
        rows = batch.microbatch_rows if batch.stacked else batch.size
        if rows % devices:
            low = rows // devices * devices
            near = f"{low} or {low + devices}" if low else f"{devices}"
            what = "a stacked microbatch" if batch.stacked else "the effective batch"
            raise ValueError(
                f"{fn}: {what} of {rows} rows ({batch.where}) does not divide over {devices} "
                f"devices (axes {', '.join(map(repr, self.names))} of the mesh). Use {near} rows."
            )

    def on_each(self, batch: Batch) -> Batch:
        """The batch of one device, described as such."""
        if self.size == 1:
            return batch
        return dataclasses.replace(batch, where=f"{batch.where}, on each of {self.size} devices")

    def batch_specs(self, batch: Batch) -> list[PartitionSpec]:
        """How the leaves of the batch are spread over the data axes: by rows."""
        specs = []
        for x, axis in zip(batch.leaves, batch.axes, strict=True):
            if axis is None or (batch.stacked and x.ndim == 1):
                specs.append(PartitionSpec())
            else:
                specs.append(PartitionSpec(*[None] * (axis + batch.stacked), self.names))
        return specs

    def arrange(self, arrays: list[Any], specs: list[PartitionSpec], mesh: Any) -> list[Any]:
        """Arrays with their rows where the data axes want them, on a mesh of explicit types."""
        types = zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = [name for name, kind in types if kind == AxisType.Explicit]
        if not any(name in self.names for name in explicit):
            return arrays
        kept = [name for name in explicit if name not in self.names]
        arranged = []
        for x, spec in zip(arrays, specs, strict=True):
            now, new = keep_axes(jax.typeof(x).sharding.spec, kept), keep_axes(spec, explicit)
            now = [*now, *[()] * (x.ndim - len(now))]
            new = [*new, *[()] * (x.ndim - len(new))]
            both = PartitionSpec(*((*_names(a), *_names(b)) for a, b in zip(now, new, strict=True)))
            arranged.append(jax.reshard(x, NamedSharding(mesh, both)))
        return arranged

    def extreme(self, name: str, x: jax.Array) -> jax.Array:
        """The largest or smallest over devices."""
        if not self.names or self.alone:
            return x
        extreme = lax.pmax if name == "max" else lax.pmin
        if x.dtype == jnp.bool_:
            return self.extreme(name, x.astype(jnp.int32)).astype(jnp.bool_)
        x = self.vary(x)
        found = extreme(x, self.names)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return found
        # Whether a NaN wins over other devices' numbers is up to the machine.
        return jnp.where(self.extreme("max", jnp.isnan(x)), jnp.nan, found).astype(x.dtype)

    def agree(self, x: jax.Array) -> jax.Array:
        """A value that is the same on all devices, known to be so."""
        if not self.names:
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = self.agree(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return lax.complex(self.agree(x.real), self.agree(x.imag))
        return self.extreme("max", x)


def check_mesh(fn: str, mesh: Any, data_axes: Any, axis_name: Any) -> tuple[Any, ...]:
    """Returns the data axes of a mesh as a tuple; none where there is no mesh.

    Raises:
      TypeError: when built: `mesh` is no mesh, or stands beside `axis_name`.
      ValueError: when built: the mesh lacks a data axis.
    """
    names = check_axis_names(fn, "data_axes", data_axes)
    if mesh is None:
        return ()
    if axis_name is not None:
        raise TypeError(
            f"{fn}: give mesh (under jax.jit) or axis_name (inside jax.shard_map, jax.vmap or "
            f"jax.pmap), not both, got a mesh and axis_name={axis_name!r}."
        )
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(
            f"{fn}: mesh must be a jax.sharding.Mesh, got {mesh!r} of type {type(mesh).__name__}."
        )
    _check_in_mesh(fn, "data_axes", names, mesh)
    if not names:
        raise ValueError(f"{fn}: data_axes is empty; name the axes over which the batch is spread.")
    return names


def check_arg_specs(fn: str, arg_specs: Any, mesh: Any) -> dict[int, Any]:
    """Returns `arg_specs` with PartitionSpecs for leaves.

    Raises:
      TypeError: when built: not a dict from argument numbers, or a leaf that is no PartitionSpec or
        NamedSharding.
      ValueError: when built: the mesh lacks an axis.
    """
    if arg_specs is None:
        return {}
    if not isinstance(arg_specs, dict):
        raise TypeError(
            f"{fn}: arg_specs must be a dict from argument numbers to PartitionSpecs, got "
            f"{arg_specs!r} of type {type(arg_specs).__name__}. For parameters: {{0: specs}}."
        )

    def leaf(argnum, path, spec):
        name = leaf_name(f"arg_specs[{argnum}]", path)
        if spec is None:
            return None
        if not is_spec(spec):
            raise TypeError(
                f"{fn}: {name} must be a PartitionSpec or NamedSharding, got {spec!r} of type "
                f"{type(spec).__name__}."
            )
        if mesh is not None:
            spec = spec.spec if isinstance(spec, NamedSharding) else spec
            _check_in_mesh(fn, name, spec_axes(spec), mesh)
        return spec

    return {
        check_int(fn, "a key of arg_specs", argnum, "the position of an argument", 0): (
            jax.tree_util.tree_map_with_path(
                lambda path, spec, argnum=argnum: leaf(argnum, path, spec), specs, is_leaf=is_spec
            )
        )
        for argnum, specs in arg_specs.items()
    }


def check_rank(fn: str, name: str, x: Any, spec: Any) -> None:
    """Refuses a spec with more entries than the array has axes."""
    entries = len(spec.spec if isinstance(spec, NamedSharding) else spec or ())
    rank = getattr(x, "ndim", 0)
    if entries > rank:
        raise ValueError(
            f"{fn}: arg_specs gives {name}, of rank {rank}, a spec of {entries} entries: "
            f"{spec}. Give this leaf a spec of its own, PartitionSpec() to leave it whole."
        )


def _check_in_mesh(fn: str, argument: str, names: Any, mesh: Any) -> None:
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(
                f"{fn}: {argument} names axis {name!r}, which the mesh lacks; its axes are "
                f"{', '.join(map(repr, mesh.axis_names))}."
            )


def is_spec(x: Any) -> bool:
    return x is None or isinstance(x, (PartitionSpec, NamedSharding))


def _names(entry: Any) -> tuple[Any, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def spec_axes(spec: Any) -> list[Any]:
    """The mesh axes in a PartitionSpec."""
    return [name for entry in spec or () for name in _names(entry)]


def keep_axes(spec: Any, names: Any) -> PartitionSpec:
    """The part of a PartitionSpec that speaks of some axes."""
    spec = spec.spec if isinstance(spec, NamedSharding) else spec
    kept = [tuple(name for name in _names(entry) if name in names) for entry in spec or ()]
    return PartitionSpec(*(entry or None for entry in kept))


def match(tree: Any, like: Any) -> Any:
    """`tree` with the device types of `like`: where it varies, and how it is explicitly sharded."""

    def leaf(x, y):
        if _is_explicit(y):
            sharding: Any = (y if isinstance(y, jax.ShapeDtypeStruct) else jax.typeof(y)).sharding
            if _spec(x) != sharding.spec:
                x = jax.reshard(x, sharding)
        return _vary_over(x, _varying(y)) if _manual_axes() else x

    return jax.tree.map(leaf, tree, like)


def _spec(x: Any) -> PartitionSpec:
    return jax.typeof(x).sharding.spec


def _is_explicit(x: Any) -> bool:
    if not isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return False
    sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).sharding
    types = sharding.mesh.axis_types if isinstance(sharding, NamedSharding) else ()
    return AxisType.Explicit in types


def _vary_over(x: Any, names: frozenset[Any]) -> Any:
    if not is_array(x) or x.dtype == jax.dtypes.float0:
        return x
    missing = tuple(sorted(names - _varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def _varying(x: Any) -> frozenset[Any]:
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return aval.manual_axis_type.varying if aval.manual_axis_type else frozenset()


def _manual_axes() -> tuple[Any, ...]:
    """The axes that an enclosing `jax.shard_map` maps; `jax.vmap`'s are not among them."""
    return jax.sharding.get_abstract_mesh().manual_axes
