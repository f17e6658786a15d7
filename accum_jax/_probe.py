"""A loss and its gradient on any rows of a batch, in a chosen precision."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import leaf_name

# Gradients are compared through this many random signed sums of their entries: sums over rows stay
# sums, a difference anywhere shows, and memory does not depend on the model.
SKETCH = 4096


class Unrunnable(Exception):
    """The caller's own function raised; the message is the reason in one line."""


@contextlib.contextmanager
def running(what: str):
    """Turns whatever the caller's code raises into `Unrunnable`."""
    try:
        yield
    except Unrunnable:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{what} raised {type(error).__name__}" + (f": {lines[0]}" if lines else "")
        raise Unrunnable(reason) from error


@dataclass(frozen=True)
class Measure:
    """The loss and its gradient on some rows.

    Attributes:
      value: the loss.
      norm: global norm of the gradient.
      vector: the loss, then `SKETCH` signed sums of the gradient, in float64.
      aux: the arrays of the auxiliary output by their paths.
    """

    value: float
    norm: float
    vector: np.ndarray
    aux: dict[str, np.ndarray]

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.value) and np.isfinite(self.norm))


class Probe:
    """Calls a loss and its gradient on chosen rows.

    With `wide`, floats are cast to float64 and everything is traced with 64-bit types on, in a
    context that leaves the caller's setting alone.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        batch: Any,
        key: Any,
        has_aux: bool,
        wide: bool,
    ):
        self.loss_fn, self.key, self.has_aux, self.wide = loss_fn, key, has_aux, wide
        try:
            self._run = _compiled(loss_fn, has_aux, key is not None)
        except TypeError:  # not hashable: compiled anew for every probe
            self._run = _compiled.__wrapped__(loss_fn, has_aux, key is not None)
        with self.context():
            self.params = widen(params) if wide else as_arrays(params)
            self.batch = widen(batch) if wide else as_arrays(batch)
        self.num_rows = len(jax.tree.leaves(batch)[0])

    def context(self) -> Any:
        return jax.enable_x64(True) if self.wide else contextlib.nullcontext()

    def rows(self, index: np.ndarray) -> Any:
        """Rows of the batch outside any trace; by numpy, which compiles nothing."""
        return jax.tree.map(
            lambda x: x[index] if _is_extended(x) else np.asarray(x)[index], self.batch
        )

    def micro_key(self, i: int) -> Any:
        return None if self.key is None else jax.random.fold_in(self.key, i)

    def raw(self, index: np.ndarray, key: Any = None, params: Any = None) -> tuple[Any, Any, Any]:
        """Value, gradient and auxiliary arrays on the device."""
        with self.context(), running(f"loss_fn on {len(index)} of {self.num_rows} rows"):
            params = self.params if params is None else params
            return self._run(params, self.batch, np.asarray(index, np.int32), key)

    def grads(self, index: np.ndarray, key: Any = None, params: Any = None) -> Any:
        return self.raw(index, key, params)[1]

    def at(self, index: np.ndarray, key: Any = None, params: Any = None) -> Measure:
        value, grads, aux = self.raw(index, key, params)
        flat = flatten(grads)
        with np.errstate(invalid="ignore", over="ignore"):
            return Measure(
                value=float(value),
                norm=float(np.linalg.norm(flat)),
                vector=np.concatenate([[float(value)], sketch(flat)]),
                aux={name: np.asarray(leaf) for name, leaf in aux.items()},
            )

    def narrowest(self) -> Any:
        """The narrowest float dtype in which the loss or its gradient computes anything."""
        index = np.arange(self.num_rows, dtype=np.int32)
        with self.context(), running("loss_fn"):
            jaxpr = jax.make_jaxpr(self._run)(self.params, self.batch, index, self.key)
        found = {v.aval.dtype for v in _outputs(jaxpr.jaxpr)}
        return min(found, key=lambda dtype: jnp.finfo(dtype).bits, default=jnp.dtype("float64"))


@functools.lru_cache(maxsize=16)
def _compiled(loss_fn: Callable[..., Any], has_aux: bool, has_key: bool) -> Callable[..., Any]:
    @jax.jit
    def run(params, batch, index, key):
        args = (params, take_rows(batch, index)) + ((key,) if has_key else ())
        out, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(*args)
        value, aux = out if has_aux else (out, None)
        leaves = jax.tree_util.tree_leaves_with_path(aux)
        arrays = {jax.tree_util.keystr(path): x for path, x in leaves if isinstance(x, jax.Array)}
        plain = {
            n: x for n, x in arrays.items() if not jnp.issubdtype(x.dtype, jax.dtypes.extended)
        }
        return value, grads, plain

    return run


def _outputs(jaxpr: Any):
    """Yields the float outputs of every equation, those inside loops and branches included."""
    for eqn in jaxpr.eqns:
        for variable in eqn.outvars:
            if jnp.issubdtype(getattr(variable.aval, "dtype", jnp.int32), jnp.floating):
                yield variable
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _outputs(getattr(inner, "jaxpr", inner))


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def signature(loss_fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """A trace of the loss as text, with the values that it closes over.

    Two of a pure function are the same; addresses in it are not values.
    """
    # A function new to jax at each call, or its cache would answer.
    closed = jax.make_jaxpr(lambda *args: loss_fn(*args))(*args)
    text = re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr))
    consts = [np.asarray(c).tobytes() for c in closed.consts if not _is_extended(c)]
    return text + repr(hash(tuple(consts)))


def _is_extended(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", jnp.int32), jax.dtypes.extended)


def take_rows(batch: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], batch)


def as_arrays(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


def widen(tree: Any) -> Any:
    """Floats as float64 and complex numbers as complex128; to be called with 64-bit types on."""

    def wide(x):
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return x.astype(jnp.float64)
        return x.astype(jnp.complex128) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x

    return jax.tree.map(wide, tree)


def flatten(tree: Any) -> np.ndarray:
    """All entries of the float and complex leaves of a tree in float64."""
    parts = []
    for leaf in jax.tree.leaves(tree):
        flat: Any = np.asarray(leaf).reshape(-1)
        if jnp.issubdtype(flat.dtype, jnp.complexfloating):
            flat = np.concatenate([flat.real, flat.imag])
        parts.append(flat.astype(np.float64))
    return np.concatenate(parts) if parts else np.zeros(0)


@functools.lru_cache(maxsize=4)
def _signs(size: int) -> np.ndarray:
    return np.random.default_rng(0).choice(np.array([-1, 1], np.int8), size)


def sketch(flat: np.ndarray) -> np.ndarray:
    if flat.size <= SKETCH:
        return flat
    signed = np.zeros(-(-flat.size // SKETCH) * SKETCH)
    signed[: flat.size] = flat * _signs(flat.size)
    return signed.reshape(-1, SKETCH).sum(axis=0)


def check_batch(fn: str, batch: Any) -> int:
    """Returns the number of rows.

    Raises:
      TypeError: a leaf is no array.
      ValueError: there is no leaf, a leaf has no axis 0, or leaves disagree on it.
    """
    sizes: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = leaf_name("batch", path)
        if not isinstance(leaf, (jax.Array, np.ndarray)):
            raise TypeError(
                f"{fn}: {name} must be an array, got {leaf!r} of type {type(leaf).__name__}. "
                "Let loss_fn close over what is not split into rows."
            )
        if leaf.ndim == 0:
            raise ValueError(
                f"{fn}: {name} is a scalar; every leaf needs the rows of the batch on axis 0. "
                "Let loss_fn close over what is not split into rows."
            )
        sizes[name] = leaf.shape[0]
    if not sizes:
        raise ValueError(f"{fn}: batch has no array leaf; expected the rows of one update.")
    first = next(iter(sizes))
    for name, size in sizes.items():
        if size != sizes[first]:
            raise ValueError(
                f"{fn}: batch leaves disagree on axis 0: {first} has {sizes[first]}, {name} has "
                f"{size}."
            )
    return sizes[first]


def check_params(fn: str, params: Any) -> None:
    """Refuses leaves that have no gradient, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError(f"{fn}: params has no leaf; expected a pytree of float arrays.")
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        if isinstance(leaf, float):
            continue
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            what = f"has dtype {dtype}" if dtype is not None else f"is {leaf!r}"
            raise TypeError(
                f"{fn}: {leaf_name('params', path)} {what}; gradients need float leaves. Let "
                "loss_fn close over what is not trained."
            )


def check_loss(fn: str, loss_fn: Any, args: tuple[Any, ...], has_aux: bool) -> None:
    """Refuses what is no real scalar, with a pair around it where there is auxiliary output.

    Raises:
      TypeError: the loss returns something else.
      Unrunnable: the loss itself raises.
    """
    with running("loss_fn"):
        out = jax.eval_shape(loss_fn, *args)
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"{fn}: loss_fn must return (loss, aux) with has_aux=True, got {_shape(out)}."
        )
    value: Any = out[0] if has_aux else out
    if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
        remedy = (
            "Pass has_aux=True if it returns (loss, aux)."
            if isinstance(value, tuple)
            else "Reduce it over the rows, for example with jnp.mean."
        )
        raise TypeError(f"{fn}: loss_fn must return a real scalar, got {_shape(value)}. {remedy}")


def _shape(out: Any) -> str:
    return str(
        jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else x, out)
    )


def check_weight(fn: str, weight: Callable[[Any], Any] | None, rows: Any) -> float:
    """Calls `weight` on rows and returns a float; None counts rows."""
    if weight is None:
        return float(len(jax.tree.leaves(rows)[0]))
    with running("weight"):
        got = np.asarray(weight(rows))
    if got.shape != () or (not np.issubdtype(got.dtype, np.number) and got.dtype != bool):
        raise TypeError(f"{fn}: weight must return a scalar, got {got.dtype}{list(got.shape)}.")
    if not got >= 0:
        raise ValueError(f"{fn}: weight must be non-negative, got {got}.")
    return float(got)


def split(num_rows: int, k: int) -> list[np.ndarray]:
    """Rows of the library's microbatches: strided, the rows left over last."""
    size = -(-num_rows // k)
    full = num_rows // size
    parts = [np.arange(i, full * size, full) for i in range(full)]
    return parts + ([np.arange(full * size, num_rows)] if num_rows % size else [])


def pieces(num_rows: int, size: int) -> list[np.ndarray]:
    """Contiguous microbatches of `size` rows, the rows left over last."""
    return np.split(np.arange(num_rows), range(size, num_rows, size))


def order(parts: Sequence[np.ndarray], permutation: np.ndarray) -> list[np.ndarray]:
    return [permutation[part] for part in parts]
