"""Plain JAX oracles that the tests compare accumulation with."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

PyTree = Any


# Comparison


def assert_same(actual: PyTree, expected: PyTree, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Structure, shapes and dtypes are equal; values are too, unless a tolerance is given."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    if rtol or atol:
        chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=atol)
    else:
        chex.assert_trees_all_equal(actual, expected)


def raising(error: type[Exception] | tuple[type[Exception], ...], *fragments: str) -> Any:
    """``pytest.raises`` whose message names `accumulate` and holds every fragment (a regex)."""
    lookaheads = "".join(f"(?=.*(?:{fragment}))" for fragment in ("accumulate", *fragments))
    return pytest.raises(error, match=re.compile(f"(?s){lookaheads}"))


def quick(cases: Iterable[Any], *names: Any) -> list[Any]:
    """Values to parametrize with; those that are not among `names` are slow tests."""
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(case, marks=marks[case in names]) for case in cases]


# Problems


def mse(params: PyTree, batch: PyTree) -> jax.Array:
    """Mean squared error of a two-layer perceptron."""
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    return jnp.mean(jnp.square(hidden @ params["w2"] + params["b2"] - batch["y"]))


def mse_problem(
    num_rows: int, *, features: int = 3, width: int = 4, seed: int = 0, dtype: Any = np.float32
) -> tuple[PyTree, PyTree]:
    """Parameters and batch for :func:`mse`, drawn in float64 and rounded to ``dtype``."""
    rng = np.random.default_rng(seed)
    params = {
        "w1": rng.normal(size=(features, width)),
        "b1": rng.normal(size=(width,)),
        "w2": rng.normal(size=(width,)),
        "b2": rng.normal(size=()),
    }
    batch = {"x": rng.normal(size=(num_rows, features)), "y": rng.normal(size=(num_rows,))}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, batch))


def linear(w: jax.Array, batch: jax.Array) -> jax.Array:
    """Mean over rows of ``w * batch``: the gradient of row r is ``batch[r]``."""
    return jnp.mean(w * batch)


def float64_gradient(loss: Callable[..., jax.Array], *args: PyTree) -> PyTree:
    """Whole-batch gradient in float64, as numpy arrays."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), args)
        return jax.tree.map(np.asarray, _jit_grad(loss)(*wide))


@functools.cache
def _jit_grad(loss: Callable[..., jax.Array]) -> Callable[..., PyTree]:
    return jax.jit(jax.grad(loss))


def rms_error(actual: PyTree, exact: PyTree) -> float:
    """Root mean square difference over all elements of the tree, in float64."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(exact), strict=True)
    square, count = 0.0, 0
    for leaf, reference in pairs:
        square += float(np.sum(np.square(np.asarray(leaf, np.float64) - reference)))
        count += np.size(reference)
    return float(np.sqrt(square / count))


# Accumulation, written out


def rows(batch: PyTree, k: int, index: int) -> PyTree:
    """Microbatch ``index`` of ``k``: rows ``index, index + k, ...`` of every leaf."""
    return jax.tree.map(lambda x: x[index::k], batch)


def microbatch_outputs(
    fn: Callable[..., PyTree],
    k: int,
    *args: PyTree,
    batch_argnums: Sequence[int] = (1,),
    key_argnums: Sequence[int] = (),
) -> list[PyTree]:
    """Outputs of ``fn`` on the ``k`` microbatches, one plain call each."""

    def argument(argnum: int, value: PyTree, index: int) -> PyTree:
        if argnum in batch_argnums:
            return rows(value, k, index)
        if argnum in key_argnums:
            return jax.tree.map(lambda key: jax.random.fold_in(key, index), value)
        return value

    return [fn(*(argument(n, a, i) for n, a in enumerate(args))) for i in range(k)]


def weighted_mean(trees: Sequence[PyTree], weights: Sequence[float] | None = None) -> PyTree:
    """Σ w·x / Σ w in float64, rounded to the dtype of the trees."""
    w = np.ones(len(trees)) if weights is None else np.asarray(weights, np.float64)

    def mean(*leaves: jax.Array) -> jax.Array:
        total = sum(wi * np.asarray(leaf, np.float64) for wi, leaf in zip(w, leaves, strict=True))
        return jnp.asarray(total / w.sum(), leaves[0].dtype)

    return jax.tree.map(mean, *trees)


def strided_scan(fn: Callable[..., PyTree], k: int) -> Callable[..., PyTree]:
    """The mean of ``fn(params, batch)`` over ``k`` microbatches, as one would write it by hand."""

    def accumulated(params: PyTree, batch: PyTree) -> PyTree:
        split = jax.tree.map(lambda x: x.reshape(x.shape[0] // k, k, *x.shape[1:]), batch)

        def microbatch(index: jax.Array | int) -> PyTree:
            return jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, index, 1, keepdims=False), split
            )

        def body(total: PyTree, index: jax.Array) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, total, fn(params, microbatch(index))), None

        struct = jax.eval_shape(fn, params, jax.eval_shape(microbatch, 0))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), struct)
        total, _ = jax.lax.scan(body, zeros, jnp.arange(k))
        return jax.tree.map(lambda x: x / k, total)

    return accumulated


def train_step(tx: optax.GradientTransformation, grad_fn: Callable[..., PyTree]) -> Any:
    """One optimizer update a call, under jit."""

    @jax.jit
    def step(params: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        grads = grad_fn(params, batch)
        with jax.numpy_dtype_promotion("standard"):  # Optax promotes counts to floats.
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

    return step


# Traces, compilations, program size


class Counted:
    """A function that counts its Python calls, which under a trace are its traces."""

    def __init__(self, fn: Callable[..., PyTree]):
        self._fn = fn
        self.calls = 0

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        self.calls += 1
        return self._fn(*args, **kwargs)


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """The duration of every backend compilation inside the block."""
    durations: list[float] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            durations.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield durations
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def num_equations(fn: Callable[..., PyTree], *args: PyTree) -> int:
    """Equations of the jaxpr, inner jaxprs included."""

    def count(jaxpr: Any) -> int:
        total = len(jaxpr.eqns)
        for equation in jaxpr.eqns:
            for leaf in jax.tree.leaves(equation.params):
                if isinstance(leaf, ClosedJaxpr | Jaxpr):
                    total += count(leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf)
        return total

    return count(jax.make_jaxpr(fn)(*args).jaxpr)


def num_instructions(compiled: jax.stages.Compiled) -> int:
    """Instructions of the optimized program, over all its computations."""
    text = compiled.as_text()
    assert text is not None
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE))


def compile_for(fn: Callable[..., PyTree], *args: PyTree) -> jax.stages.Compiled:
    return jax.jit(fn).lower(*args).compile()


def cost(compiled: jax.stages.Compiled, name: str) -> float:
    """An entry of XLA's cost analysis, in which a loop body counts once."""
    analysis = compiled.cost_analysis()
    return dict(analysis)[name]


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes
