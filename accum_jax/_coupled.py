"""Losses that couple rows: the gradient of the whole batch at the memory of one microbatch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ._accumulate import check_loss
from ._errors import check_argnums, check_callable, leaf_name, positions
from ._options import Options
from ._reduce import cast_sum, wide_dtype
from ._sharding import DataAxes, match
from ._split import is_array
from ._stats import is_inexact
from ._trace import SCALARS, compile_once, hide, is_traced, show
from ._window import Gradient, Inputs, check_value, find_batch, run_window

_Params = TypeVar("_Params")
_Rest = ParamSpec("_Rest")
_Aux = TypeVar("_Aux")


class CoupledKeywords(TypedDict, total=False):
    """What functions with coupled losses share; `coupled_value_and_grad` says what it means."""

    k: int | None
    microbatch_size: int | None
    batch_argnums: int | tuple[int, ...]
    key_argnums: int | tuple[int, ...]
    stacked: bool
    remainder: Literal["error", "tail"]
    accumulator_dtype: Any
    output_dtype: Any
    loss_scale: Any
    axis_name: Any
    mesh: Any
    data_axes: Any
    arg_specs: dict[int, Any] | None


@overload
def coupled_value_and_grad(
    encode_fn: Callable[Concatenate[_Params, _Rest], Any],
    loss_fn: Callable[..., Any],
    *,
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    **keywords: Unpack[CoupledKeywords],
) -> Callable[Concatenate[_Params, _Rest], tuple[jax.Array, _Params]]: ...


@overload
def coupled_value_and_grad(
    encode_fn: Callable[Concatenate[_Params, _Rest], Any],
    loss_fn: Callable[..., tuple[Any, _Aux]],
    *,
    argnums: Literal[0] = 0,
    has_aux: Literal[True],
    **keywords: Unpack[CoupledKeywords],
) -> Callable[Concatenate[_Params, _Rest], tuple[tuple[jax.Array, _Aux], _Params]]: ...


@overload
def coupled_value_and_grad(
    encode_fn: Callable[..., Any],
    loss_fn: Callable[..., Any],
    *,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    **keywords: Unpack[CoupledKeywords],
) -> Callable[..., Any]: ...


def coupled_value_and_grad(
    encode_fn: Callable[..., Any],
    loss_fn: Callable[..., Any],
    *,
    k: int | None = None,
    microbatch_size: int | None = None,
    argnums: int | tuple[int, ...] = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    key_argnums: int | tuple[int, ...] = (),
    has_aux: bool = False,
    stacked: bool = False,
    remainder: Literal["error", "tail"] = "error",
    accumulator_dtype: Any = None,
    output_dtype: Any = None,
    loss_scale: Any = None,
    axis_name: Any = None,
    mesh: Any = None,
    data_axes: Any = "data",
    arg_specs: dict[int, Any] | None = None,
) -> Callable[..., Any]:
    """Value and gradient of a loss in which the rows of the whole batch act on one another.

    Contrastive and ranking losses, products of batch means and batch statistics are not sums over
    microbatches. Here the model comes in two parts: `encode_fn` treats every row by itself, and
    `loss_fn` sees the encoded rows of the whole batch. With z = encode_fn(params, batch), the
    gradient of L(params, z) is

      ∂L/∂params + Σ_i (∂z_i/∂params)ᵀ ∂L/∂z_i

    over the microbatches i: all rows are encoded without keeping activations, L is differentiated
    with respect to them, and each microbatch is encoded again and given its part of ∂L/∂z. The
    value and the gradient are the whole batch's, to rounding. This is the gradient cache of Gao et
    al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup".

    An `encode_fn` that itself couples rows (batch norm in training mode) is not mended: it sees one
    microbatch, as under `value_and_grad`. `accum_jax.audit` of a mean over its output finds it.

    Cost: one forward pass of the encoder more than `value_and_grad`; in memory the activations of
    one microbatch, the gradient's accumulator, all encoded rows with their cotangents, and what
    `loss_fn` needs for the whole batch. Parameters that both functions use have a second gradient
    beside the accumulator.

    Args:
      encode_fn: `encode_fn(params, batch, ...)` returns the rows' embeddings: an array
        [rows, ...], or a pytree of such (one for each tower; several views of a row on a further
        axis). They are kept in the dtype in which it returns them. Arrays of integers are handed on
        and have no gradient. Traced once for each pass.
      loss_fn: `loss_fn(params, embeddings, batch)` of the whole batch returns a real scalar, or
        `(scalar, aux)`. It gets the differentiated arguments, in the order of `argnums`, the
        embeddings, and all batch arguments, with their rows in the same order. Temperatures and
        biases among the parameters get their gradient.
      k: microbatches per update, a Python int. Give it or `microbatch_size`.
      microbatch_size: rows of a microbatch, a Python int.
      argnums: positions, among the arguments of `encode_fn`, of those that are differentiated; a
        frozen tower is an argument that is not.
      batch_argnums: positions of the arguments that hold the batch, the rows on axis 0 of each of
        their arrays.
      key_argnums: positions of random keys, typed or raw. Microbatch i gets
        `jax.random.fold_in(key, i)`, the same in both passes.
      has_aux: whether `loss_fn` returns `(loss, aux)`. Aux is the whole batch's already.
      stacked: True for a batch whose leaves are [k, m, ...] already. `loss_fn` then sees them as
        [k·m, ...], one microbatch after another (over devices: all rows of the first device, then
        those of the next), and leaves [k] as they are.
      remainder: as in `accumulate`.
      accumulator_dtype: as in `accumulate`.
      output_dtype: as in `accumulate`, of the gradient. The value is what `loss_fn` returns.
      loss_scale: real scalar, may be traced, by which the loss is multiplied before it is
        differentiated. The gradient comes back scaled, the value does not. A float16 gradient may
        not hold the scaled sums: `output_dtype="accumulator"`, as in `value_and_grad`.
      axis_name: one mapped axis or several, as in `accumulate`. Embeddings, and the leaves of the
        batch that the loss reads, are gathered once, and every device evaluates the loss of all
        rows: `mesh` spreads that out. Gradients are reduced once, after the loop.
      mesh: as in `accumulate`: the encoder's loops are mapped over `data_axes`. The loss between
        them is left to the compiler with the embeddings spread by rows, and so is what it computes
        for each pair of rows: a sigmoid loss of 4096 rows of 512 features on 8 CPU devices gathers
        one tower (8 MB), reduces its gradient, and takes 25 MB on each. A ring of permutes moves as
        many bytes in 16 steps and takes 14 MB, for sums over pairs alone, so there is none here;
        `loss_fn` may map over the mesh itself.
      data_axes: as in `accumulate`.
      arg_specs: as in `accumulate`.

    Returns:
      A function of `encode_fn`'s arguments that returns `(value, grads)` or
      `((value, aux), grads)`, of the types that `jax.value_and_grad` of the whole batch's loss
      would give. Keyword arguments go to `encode_fn`.

    Raises:
      TypeError: as `value_and_grad`. When traced: embeddings without a float array.
      ValueError: as `value_and_grad`. When traced: embeddings that do not have the microbatch's
        rows on axis 0.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import accum_jax
      >>> def encode(w, batch):
      ...     return {"image": batch["image"] * w, "text": batch["text"] * w}
      >>> def info_nce(w, embeddings, batch):
      ...     logits = embeddings["image"] @ embeddings["text"].T
      ...     return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))
      >>> batch = {"image": jnp.eye(4), "text": jnp.eye(4)}
      >>> whole = jax.grad(lambda w: info_nce(w, encode(w, batch), batch))
      >>> value, grad = accum_jax.coupled_value_and_grad(encode, info_nce, k=2)(1.0, batch)
      >>> print(f"{whole(1.0):.4f} {grad:.4f}")
      -1.0493 -1.0493
    """
    fn = "coupled_value_and_grad"
    options, gradient = check_coupled(
        fn,
        encode_fn,
        loss_fn,
        argnums,
        has_aux,
        k=k,
        microbatch_size=microbatch_size,
        batch_argnums=batch_argnums,
        key_argnums=key_argnums,
        stacked=stacked,
        remainder=remainder,
        accumulator_dtype=accumulator_dtype,
        output_dtype=output_dtype,
        loss_scale=loss_scale,
        axis_name=axis_name,
        mesh=mesh,
        data_axes=data_axes,
        arg_specs=arg_specs,
    )

    def encode(*args, **kwargs):
        return encode_fn(*args, **kwargs), None

    def loss(given, embeddings, batch, _):
        return loss_fn(*given, embeddings, *batch)

    def run(args, kwargs):
        output, grads = run_coupled(options, gradient, encode, "concat", loss, args, kwargs)
        return output, tuple(grads) if isinstance(argnums, (tuple, list)) else grads[0]

    return compile_once(encode_fn, run)


def check_coupled(
    fn: str,
    encode_fn: Callable[..., Any],
    loss_fn: Callable[..., Any],
    argnums: Any,
    has_aux: Any,
    **keywords: Unpack[CoupledKeywords],
) -> tuple[Options, Gradient]:
    """Checks what is asked of a coupled loss; positions are those of `encode_fn`'s arguments."""
    check_callable(fn, "encode_fn", encode_fn)
    check_callable(fn, "loss_fn", loss_fn)
    options, _, gradient = check_loss(fn, encode_fn, has_aux, **keywords)
    gradient = dataclasses.replace(gradient, argnums=check_argnums(fn, "argnums", argnums))
    options.arguments.roles({**options.roles([]), "argnums": gradient.argnums})
    return options, gradient


def run_coupled(
    options: Options,
    gradient: Gradient,
    encode: Callable[..., Any],
    reduce: Any,
    loss: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, list[Any]]:
    """Runs both passes.

    Args:
      options: of both passes.
      gradient: what is differentiated of `loss`, and how its output looks.
      encode: `encode(*args, **kwargs)` returns `(embeddings, state)`.
      reduce: reducers of `state`, which is the same in both passes.
      loss: `loss(differentiated arguments, embeddings, batch arguments, state)`, of all rows.
      args: arguments of `encode`.
      kwargs: keyword arguments of `encode`.

    Returns:
      The output of `loss`, and the gradient of each differentiated argument.
    """
    fn, count = options.fn, len(args)
    options.arguments.roles({**options.roles([]), "argnums": gradient.argnums}, count)
    batch_at = positions(options.batch_argnums, count)
    options = dataclasses.replace(
        options, batch_argnums=batch_at, key_argnums=positions(options.key_argnums, count)
    )
    gradient = dataclasses.replace(gradient, argnums=positions(gradient.argnums, count))

    def checked(*args, **kwargs):
        embeddings, state = encode(*args, **kwargs)
        _check_embeddings(fn, embeddings, [args[position] for position in batch_at])
        return embeddings, state

    (embeddings, state), _, _ = run_window(options, ("concat", reduce), checked, None, args, kwargs)

    inputs, rows = Inputs(options, gradient, args), _Rows(options, args)
    leaves, treedef = jax.tree.flatten(embeddings)

    def differentiate(params, leaves, batch, state, scale):
        leaves, batch, state = map(show, (leaves, batch, state))
        leaves, batch = list(map(rows.gather, leaves)), rows.of_batch(batch)
        each = zip(params, inputs.specs, strict=True)
        # All that the loss sees is the same on all devices: so is its gradient, and not summed.
        params = [rows.axes.gather(x, spec, to="invarying") for x, spec in each]

        def of_floats(params, floats):
            given, remaining = [tree for _, tree in inputs.fill(params)], iter(floats)
            filled = [next(remaining) if is_inexact(z) else z for z in leaves]
            output = loss(given, jax.tree.unflatten(treedef, filled), batch, state)
            value = jnp.asarray(check_value(fn, gradient.has_aux, output))
            return value, hide(output[1]) if gradient.has_aux else None

        floats = list(filter(is_inexact, leaves))
        value, pull, aux = jax.vjp(of_floats, params, floats, has_aux=True)
        grads, cotangents = pull(match(scale.astype(value.dtype), value))
        return value, aux, grads, list(map(rows.split, cotangents))

    value, aux, direct, cotangents = rows.automatic(differentiate, inputs.arrays)(
        inputs.arrays,
        *map(hide, (leaves, rows.batch.leaves, state)),
        jnp.asarray(1 if gradient.loss_scale is None else gradient.loss_scale),
    )

    # The cotangents are one more batch argument, and split as the rows are.
    def replay(*inputs, **kwargs):
        *args, cotangents = inputs
        embeddings, state = encode(*args, **kwargs)
        floats = filter(is_inexact, jax.tree.leaves(embeddings))
        return sum(map(_dot, floats, cotangents)), state

    _, sums, _ = run_window(
        dataclasses.replace(options, batch_argnums=(*batch_at, count), batch_axes=0),
        ("sum", reduce),
        replay,
        dataclasses.replace(
            gradient, has_aux=True, reduction="sum", loss_scale=None, output_dtype="accumulator"
        ),
        (*args, cotangents),
        kwargs,
    )
    grads = []
    each = zip(inputs.arrays, inputs.specs, direct, jax.tree.leaves(sums), strict=True)
    for x, spec, own, total in each:
        total += match(rows.axes.shard(own, spec).astype(total.dtype), total)
        total = cast_sum(total, x.dtype, options.accumulator_dtype, options.output_dtype)
        grads.append(rows.constrain(total, spec))
    return (value, show(aux)) if gradient.has_aux else value, inputs.trees(grads)


class _Rows:
    """The rows of a batch between the loops, which see microbatches, and the loss, which sees all.

    Over devices the rows of each stay together, also where they are stacked.
    """

    def __init__(self, options: Options, args: tuple[Any, ...]):
        self.batch = find_batch(options, args)
        self.axes, self.mesh = DataAxes(options.axis_names), options.mesh
        self.data_axes = options.data_axes  # of the mesh
        self.devices = math.prod(self.mesh.shape[name] for name in self.data_axes)

    def automatic(self, function: Callable[..., Any], params: list[Any]) -> Callable[..., Any]:
        """Leaves the rows to the compiler also where the mesh has data axes of explicit types.

        `function` returns two results that are no rows, gradients of `params`, and split rows.
        """
        if self.mesh is None:
            return function
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        explicit = tuple(name for name in self.data_axes if types[name] == AxisType.Explicit)
        if not explicit:
            return function
        specs = [PartitionSpec(), PartitionSpec(), [jax.typeof(x).sharding.spec for x in params]]
        specs.append(PartitionSpec(*[None] * self.batch.stacked, explicit))
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), tuple(specs))
        return jax.sharding.auto_axes(function, axes=explicit, out_sharding=shardings)

    def of_batch(self, leaves: list[Any]) -> list[Any]:
        """The batch arguments as the loss sees them."""

        def leaf(x, axis):
            if axis is None or (self.batch.stacked and x.ndim == 1):
                return x
            if self.batch.stacked:  # [k, m, ...]
                k, m, *rest = x.shape
                x = x.reshape(k, self.devices, m // self.devices, *rest).swapaxes(0, 1)
                x = x.reshape(k * m, *rest)
            return self.gather(x)

        return jax.tree.unflatten(self.batch.treedef, map(leaf, leaves, self.batch.axes))

    def gather(self, x: Any) -> Any:
        """The rows of all devices, on each of them, where the caller maps over them."""
        spec = PartitionSpec(self.axes.names)
        return self.axes.gather(self.axes.vary(x), spec, to="invarying") if is_traced(x) else x

    def split(self, x: jax.Array) -> jax.Array:
        """What belongs to the rows of this device, for the loop over microbatches."""
        x = self.axes.shard(x, PartitionSpec(self.axes.names))
        if not self.batch.stacked:
            return x
        rows, *rest = x.shape
        k = self.batch.size
        x = x.reshape(self.devices, k, rows // (k * self.devices), *rest).swapaxes(0, 1)
        return x.reshape(k, rows // k, *rest)

    def constrain(self, x: jax.Array, spec: Any) -> jax.Array:
        """Keeps a gradient sharded as its argument is."""
        if self.mesh is not None and isinstance(spec, PartitionSpec):
            spec = NamedSharding(self.mesh, spec)
        return self.axes.constrain(x, spec)


def _dot(z: jax.Array, cotangent: jax.Array) -> jax.Array:
    """A real number whose derivative with respect to `z` is the cotangent."""
    dtype = wide_dtype(z.dtype)
    return jnp.sum(z.astype(dtype) * cotangent.astype(dtype)).real


def _check_embeddings(fn: str, embeddings: Any, batch: list[Any]) -> None:
    """Refuses what is no rows, of one microbatch."""
    arrays = [x for x in jax.tree.leaves(batch) if is_array(x) and x.ndim]
    num_rows = arrays[0].shape[0] if arrays else 1  # stacked numbers: one for each microbatch
    leaves = jax.tree_util.tree_leaves_with_path(embeddings)
    for path, z in leaves:
        if not (is_array(z) or isinstance(z, SCALARS)):
            continue
        if jnp.shape(z)[:1] != (num_rows,):
            what = f"has shape {jnp.shape(z)}" if jnp.ndim(z) else "is a scalar"
            raise ValueError(
                f"{fn}: {leaf_name('embeddings', path)} {what}, where the microbatch has "
                f"{num_rows} rows. encode_fn must return one entry for each row on axis 0, as in "
                "[rows, features], or [rows, views, features] for several views of a row; reduce "
                "over rows in loss_fn."
            )
    if not any(is_inexact(z) for _, z in leaves):
        came = ", ".join(str(z.dtype) for _, z in leaves if is_array(z)) or "no array"
        raise TypeError(
            f"{fn}: encode_fn must return a float array with the embeddings of the rows, got "
            f"{came}. Without one the loss has no gradient through it."
        )
