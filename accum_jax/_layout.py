"""The shapes of one update, on the devices to compile for."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ._errors import leaf_name
from ._reduce import wide_dtype
from ._sharding import spec_axes
from ._split import divisors, near
from ._stats import is_inexact
from ._targets import find_target, target_of


class Layout:
    """What an update is called with, as shapes on the devices to compile for.

    Attributes:
      target: those devices.
      mesh: theirs, where shapes are sharded; None for one device.
      params, opt_state, batch, key: shapes with shardings; the batch of one device where none of
        its own says how it is shared.
      num_rows: rows of the effective batch, over all devices.
      rows: of one device.
      data_parallel: devices that share the batch.
      batch_axes: the mesh axes that do.
      params_bytes, optimizer_bytes, batch_bytes, gradient_bytes, accumulator_bytes: on one device.
      gathered_bytes: whole size of the parameters that are sharded over `batch_axes`.
    """

    def __init__(self, tx: Any, params: Any, batch: Any, key: Any, target: Any, data_parallel: int):
        params, batch = structs("params", params), structs("batch", batch)
        self.mesh = _find_mesh((params, batch))
        if target is None and isinstance(self.mesh, Mesh):
            self.target = target_of(tuple(self.mesh.devices.flat))
        else:
            self.target = find_target("plan", target)
        self._lay_out_mesh()
        self._single = target is not None and self.mesh is None
        self.num_rows, where = _find_rows(batch)
        self.batch_axes = _row_axes(batch)
        if self.batch_axes:
            assert self.mesh is not None
            shared = math.prod(self.mesh.shape[axis] for axis in self.batch_axes)
            if data_parallel not in (1, shared):
                raise ValueError(
                    f"plan: data_parallel={data_parallel}, but the batch is sharded over {shared} "
                    "devices. Leave data_parallel out."
                )
            data_parallel = shared
        self.data_parallel = data_parallel
        if self.num_rows % data_parallel:
            low = self.num_rows // data_parallel * data_parallel
            raise ValueError(
                f"plan: data_parallel={data_parallel} does not divide the effective batch of "
                f"{self.num_rows} rows ({where}). Use data_parallel in "
                f"{near(divisors(self.num_rows), data_parallel)}, or "
                f"{f'{low} or ' if low else ''}{low + data_parallel} rows."
            )
        self.rows = self.num_rows // data_parallel
        if not self.batch_axes:  # one device's part
            batch = with_rows(batch, self.rows)
        self.params, self.batch = self.place(params), self.place(batch)
        self.opt_state = () if tx is None else self.place(_optimizer_state(tx, params))
        self.key = None if key is None else self.place(structs("key", key))

        self.params_bytes, self.batch_bytes = _bytes(self.params), _bytes(self.batch)
        self.optimizer_bytes = _bytes(self.opt_state)
        trained = [x for x in jax.tree.leaves(self.params) if is_inexact(x)]
        self.gradient_bytes = _bytes(trained)
        self.accumulator_bytes = sum(
            _bytes(x) // x.dtype.itemsize * wide_dtype(x.dtype).itemsize for x in trained
        )
        gathered = [x for x in trained if set(mesh_axes(x)) & set(self.batch_axes)]
        self.gathered_bytes = sum(x.size * x.dtype.itemsize for x in gathered)

    def _lay_out_mesh(self) -> None:
        """Puts the target's devices in the mesh, unless its own are such devices already."""
        mesh, devices = self.mesh, self.target.devices
        if mesh is None:
            return
        if isinstance(mesh, Mesh) and mesh.devices.flat[0].device_kind == devices[0].device_kind:
            return
        if mesh.size > len(devices):
            raise ValueError(
                f"plan: the mesh of the shapes has {mesh.size} devices, target {self.target.name} "
                f"has {len(devices)}. Use a larger target or a smaller mesh."
            )
        laid_out = np.asarray(devices[: mesh.size]).reshape(mesh.axis_sizes)
        self.mesh = Mesh(laid_out, mesh.axis_names, axis_types=mesh.axis_types)

    def place(self, tree: Any) -> Any:
        """The shapes in a pytree on their devices; other leaves as they are."""

        def leaf(x):
            if not hasattr(x, "shape") or not hasattr(x, "dtype"):
                return x
            sharding = getattr(x, "sharding", None)
            if self.mesh is not None:
                named = isinstance(sharding, NamedSharding)
                sharding = NamedSharding(self.mesh, sharding.spec if named else PartitionSpec())
            else:
                sharding = SingleDeviceSharding(self.target.devices[0]) if self._single else None
            return jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False)
            )

        return jax.tree.map(leaf, tree)

    @property
    def num_devices(self) -> int:
        """Devices that one compiled update runs on."""
        return 1 if self.mesh is None else self.mesh.size


def structs(name: str, tree: Any) -> Any:
    """Shapes, dtypes and shardings over several devices; nothing is read or allocated."""

    def leaf(path, x):
        sharding = getattr(x, "sharding", None)
        try:
            struct = jax.eval_shape(lambda x: x, x)
        except TypeError:
            raise TypeError(
                f"plan: {leaf_name(name, path)} must be an array or a jax.ShapeDtypeStruct, got "
                f"{x!r} of type {type(x).__name__}."
            ) from None
        return jax.ShapeDtypeStruct(
            struct.shape,
            struct.dtype,
            sharding=sharding if isinstance(sharding, NamedSharding) else None,
            weak_type=struct.weak_type,
        )

    return jax.tree_util.tree_map_with_path(leaf, tree)


def _find_mesh(tree: Any) -> Mesh | AbstractMesh | None:
    """The one mesh of all shardings; None where nothing is sharded."""
    shardings = [x.sharding for x in jax.tree.leaves(tree) if x.sharding is not None]
    meshes = {sharding.mesh for sharding in shardings}
    if len(meshes) > 1:
        raise ValueError(f"plan: the shapes are sharded over several meshes: {meshes}. Use one.")
    return meshes.pop() if meshes else None


def _find_rows(batch: Any) -> tuple[int, str]:
    """The rows of the effective batch and where they were found."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError("plan: batch has no arrays, so there are no rows to split.")
    sizes = {}
    for path, x in leaves:
        name = leaf_name("batch", path)
        if not x.ndim or not x.shape[0]:
            raise ValueError(
                f"plan: {name} has shape {x.shape}, which has no rows on axis 0. Give every leaf "
                "of the batch its rows on axis 0, or your own update as step=."
            )
        sizes.setdefault(x.shape[0], name)
    if len(sizes) > 1:
        found = ", ".join(f"{name} has {size}" for size, name in sizes.items())
        raise ValueError(f"plan: batch leaves disagree on axis 0: {found}.")
    ((size, name),) = sizes.items()
    return size, f"axis 0 of {name}"


def _row_axes(batch: Any) -> tuple[Any, ...]:
    """The mesh axes that share the rows."""
    specs = [x.sharding.spec for x in jax.tree.leaves(batch) if x.sharding is not None]
    axes = {tuple(spec_axes(spec[:1])) for spec in specs}
    if len(axes) > 1:
        raise ValueError(f"plan: batch leaves disagree on the mesh axes of axis 0: {axes}.")
    return axes.pop() if axes else ()


def with_rows(batch: Any, rows: int) -> Any:
    """The shapes of a batch of as many rows."""
    batch = structs("batch", batch)
    _find_rows(batch)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=x.sharding), batch
    )


def _optimizer_state(tx: Any, params: Any) -> Any:
    """The optimizer's state; what repeats a parameter is sharded as that is."""
    sharded = [
        (path, x.shape, x.sharding)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if x.sharding is not None
    ]

    def leaf(path, x):
        found = (
            sharding
            for suffix, shape, sharding in sharded
            if shape == x.shape and path[len(path) - len(suffix) :] == suffix
        )
        sharding = next(found, None)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(tx.init, params))


def mesh_axes(x: Any) -> list[Any]:
    """The mesh axes that shard an array."""
    return spec_axes(x.sharding.spec) if isinstance(x.sharding, NamedSharding) else []


def _bytes(tree: Any) -> int:
    """Bytes of the arrays on one device."""
    return sum(
        math.prod(x.shape if x.sharding is None else x.sharding.shard_shape(x.shape))
        * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )
