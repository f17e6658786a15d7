"""Gradient accumulation for Flax NNX: the module's state moves on as it would call by call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Unpack, get_type_hints

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxpr_as_fun

from ._accumulate import LossKeywords, check_loss
from ._coupled import CoupledKeywords, check_coupled, run_coupled
from ._errors import (
    broadcast_prefix,
    check_argnums,
    check_choice,
    check_keywords,
    leaf_name,
    positions,
)
from ._options import Options
from ._reduce import Thread, check_reduce, is_reducer, thread
from ._sharding import DataAxes
from ._trace import compile_once, hide, numbers_to_arrays, show
from ._window import run_window

try:
    from flax import nnx
except ImportError as error:
    raise ImportError('accum_jax.nnx needs Flax: pip install "accum-jax[flax]".') from error


def value_and_grad(
    f: Callable[..., Any],
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    *,
    k: int | None = None,
    state: Iterable[tuple[Any, str]] = (),
    allow_int: bool = False,
    **keywords: Unpack[LossKeywords],
) -> Callable[..., Any]:
    """`flax.nnx.value_and_grad` run as `k` microbatches in one loop.

    The result, and the modules afterwards, are what `nnx.value_and_grad` gives when it is called on
    microbatch 0, 1, ... k - 1 in turn and the values and gradients are averaged. Batch statistics,
    counts of random streams and variables of any other type that is not differentiated move on
    from microbatch to microbatch: each draws its own dropout masks, and the next window goes on
    where this one ended.

    Cost: that of `accum_jax.value_and_grad`, in place where that is. `f` is traced once, and once
    more where it leaves state alone that its type would let one expect to move, or the reverse.

    Args:
      f: `f(model, batch, ...)` returns a real scalar, or `(scalar, aux)`. Any argument may be a
        module, hold modules, or be an `nnx.Variable`; they may share variables.
      argnums: as `nnx.value_and_grad`'s: positions, each differentiated with respect to its
        `nnx.Param`s, or `nnx.DiffState(position, filter)`.
      has_aux: whether `f` returns `(loss, aux)`.
      k: microbatches per update, a Python int. Give it or `microbatch_size`.
      state: pairs of an `nnx` filter and `"max"`, `"min"`, `"mean"` or `"sum"`, for state that must
        not move on: every microbatch starts from the window's initial state, and the states that
        they end with are put together, as for the amax histories of float8 layers. Where no
        microbatch counts, the state stays as it was.
      allow_int: as `nnx.value_and_grad`'s.
      **keywords: those of `accum_jax.value_and_grad`, with the same meaning. Positions are those of
        the arguments of `f`. Under `axis_name` or `mesh`, every random stream's key is folded with
        the device index for the length of the window, counts advance as on one device, and float
        state is averaged over devices by weight.

    Returns:
      A function of the same arguments that returns what `nnx.value_and_grad(f, ...)` would, the
      gradient of a module as an `nnx.State` for `nnx.Optimizer.update`; with `stats`, a pair of
      that and `AccumulationStats`. It works under `nnx.jit`, under `jax.jit` between `nnx.merge`
      and `nnx.split`, and outside of them, where it is compiled once for each structure of modules
      and types of arguments (at every call where `f` reads modules that are not its arguments: pass
      a teacher as an argument).

    Raises:
      TypeError: as `accum_jax.value_and_grad`. When built: `f` is a bound method of a module. When
        traced: modules among the batch or the keys.
      ValueError: as `accum_jax.value_and_grad`. When built: a pair of `state` that is none. When
        traced: a filter of `state` that finds nothing, variables that are shared by arguments of
        which only some are differentiated, a module whose structure or differentiated variables `f`
        changes, state that changes its shape or dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import accum_jax.nnx
      >>> class Model(nnx.Module):
      ...     def __init__(self):
      ...         self.w, self.calls = nnx.Param(jnp.ones(2)), nnx.Variable(jnp.array(0))
      ...     def __call__(self, x):
      ...         self.calls[...] += 1
      ...         return x @ self.w
      >>> def loss(model, batch):
      ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
      >>> model, batch = Model(), {"x": jnp.eye(8, 2), "y": jnp.arange(8.0)}
      >>> value, grads = accum_jax.nnx.value_and_grad(loss, k=4)(model, batch)
      >>> print(value, grads["w"][...], model.calls[...])
      17.5 [0.25 0.  ] 4
    """
    call = _build("nnx.value_and_grad", f, argnums, has_aux, state, allow_int, k=k, **keywords)

    @functools.wraps(f)
    def with_value(*args: Any, **kwargs: Any) -> Any:
        value, aux, grads, stats = call(args, kwargs)
        result = ((value, aux) if has_aux else value), grads
        return result if stats is None else (result, stats)

    return with_value


def grad(
    f: Callable[..., Any],
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    *,
    k: int | None = None,
    state: Iterable[tuple[Any, str]] = (),
    allow_int: bool = False,
    **keywords: Unpack[LossKeywords],
) -> Callable[..., Any]:
    """`flax.nnx.grad` run as `k` microbatches in one loop: `value_and_grad` without the value.

    Args:
      f: see `value_and_grad`.
      argnums: see `value_and_grad`.
      has_aux: see `value_and_grad`.
      k: see `value_and_grad`.
      state: see `value_and_grad`.
      allow_int: see `value_and_grad`.
      **keywords: see `value_and_grad`.

    Returns:
      A function of the same arguments that returns what `nnx.grad(f, ...)` would: `grads` or
      `(grads, aux)`; with `stats`, a pair of that and `AccumulationStats`.

    Raises:
      TypeError, ValueError: as `value_and_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import accum_jax.nnx
      >>> w = nnx.Param(jnp.float32(1))
      >>> print(accum_jax.nnx.grad(lambda w, x: jnp.mean(w * x), k=2)(w, jnp.arange(4.0))[...])
      1.5
    """
    call = _build("nnx.grad", f, argnums, has_aux, state, allow_int, k=k, **keywords)

    @functools.wraps(f)
    def without_value(*args: Any, **kwargs: Any) -> Any:
        _, aux, grads, stats = call(args, kwargs)
        result = (grads, aux) if has_aux else grads
        return result if stats is None else (result, stats)

    return without_value


def coupled_value_and_grad(
    encode_fn: Callable[..., Any],
    loss_fn: Callable[..., Any],
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    **keywords: Unpack[CoupledKeywords],
) -> Callable[..., Any]:
    """`accum_jax.coupled_value_and_grad` for modules: a loss of the encoded rows of a whole batch.

    `encode_fn` runs twice, the second time from the state in which the first one began, so that
    dropout draws the same masks. The modules afterwards are what `encode_fn` on microbatch 0, 1,
    ... k - 1 in turn, and `loss_fn` after it, make of them once. Batch norm belongs into `loss_fn`,
    where it sees the whole batch; in `encode_fn` it would see a microbatch.

    Args:
      encode_fn: `encode_fn(model, batch, ...)` returns the rows' embeddings. Any argument may be a
        module, hold modules, or be an `nnx.Variable`.
      loss_fn: `loss_fn(model, embeddings, batch)` returns a real scalar, or `(scalar, aux)`. It
        gets the differentiated arguments in the order of `argnums`, the embeddings, and all batch
        arguments.
      argnums: as `accum_jax.nnx.value_and_grad`'s; positions of arguments of `encode_fn`.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      **keywords: those of `accum_jax.coupled_value_and_grad`, with the same meaning.

    Returns:
      A function of `encode_fn`'s arguments that returns `(value, grads)` or
      `((value, aux), grads)`, the gradient of a module as an `nnx.State`.

    Raises:
      TypeError, ValueError: as `accum_jax.coupled_value_and_grad` and
        `accum_jax.nnx.value_and_grad`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> import accum_jax.nnx
      >>> def encode(model, batch):
      ...     return model(batch)
      >>> def spread(model, z, batch):
      ...     return jnp.mean((z - z.mean(0)) ** 2)
      >>> model, batch = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), jnp.arange(8.0).reshape(4, 2)
      >>> step = accum_jax.nnx.coupled_value_and_grad(encode, spread, k=2)
      >>> value, grads = step(model, batch)
      >>> whole = nnx.grad(lambda model: spread(model, model(batch), batch))(model)
      >>> print(jnp.allclose(grads["kernel"][...], whole["kernel"][...]))
      True
    """
    fn = "nnx.coupled_value_and_grad"
    _check_unbound(fn, encode_fn)
    _check_unbound(fn, loss_fn)
    check_keywords(fn, keywords, get_type_hints(CoupledKeywords))
    filters = _check_filters(fn, argnums)
    numbers = tuple(number for number, _ in filters)
    options, gradient = check_coupled(fn, encode_fn, loss_fn, numbers, has_aux, **keywords)
    roles = {**options.roles([]), "argnums": numbers}
    axes = DataAxes(options.axis_names or options.data_axes)

    def run(inputs: Any, _: Any) -> Any:
        args, kwargs, rest, layout = inputs
        count = len(args)
        at = positions(numbers, count)
        static = dataclasses.replace(
            options,
            batch_argnums=positions(options.batch_argnums, count),
            key_argnums=positions(options.key_argnums, count),
        )
        differentiated = dataclasses.replace(gradient, argnums=at, has_aux=True)
        reducers = _Output("concat", [], "max", thread(count))
        microbatch = _Microbatch(fn, encode_fn, False, None, layout, axes)

        def loss(given, embeddings, batch, state):
            def of_modules(*args, **_):
                return loss_fn(*(args[position] for position in at), embeddings, *batch)

            full = list(args)
            for position, tree in zip(at, given, strict=True):
                full[position] = tree
            whole = _Microbatch(fn, of_modules, has_aux, "mean", layout, axes)
            before = {**rest, **state.moving}
            (value, aux), after, moved = whole.call(full, kwargs, before)
            return value, (aux, {name: after[name] for name in {*state.moving, *moved}})

        while True:
            names = microbatch.moving_of(rest)
            moving = {name: rest[name] for name in names}
            still = {name: x for name, x in rest.items() if name not in names}
            with contextlib.suppress(_Moves):
                (value, (aux, new)), grads = run_coupled(
                    static,
                    differentiated,
                    microbatch,
                    reducers,
                    loss,
                    (*args, moving, still),
                    kwargs,
                )
                return value, aux, grads, None, new

    call = _on_modules(options, encode_fn, argnums, filters, [], roles, run)

    @functools.wraps(encode_fn)
    def with_value(*args: Any, **kwargs: Any) -> Any:
        value, aux, grads, _ = call(args, kwargs)
        return ((value, aux) if has_aux else value), grads

    return with_value


class _Output(NamedTuple):
    """What `f` gives beside its loss, and its reducers. State is a dict from name to variable."""

    aux: Any
    state: list[Any]  # of the pairs of `state`
    counts: Any  # True where the microbatch counts; None without such pairs
    moving: Any


def _build(
    fn: str,
    f: Callable[..., Any],
    argnums: Any,
    has_aux: Any,
    state: Any,
    allow_int: Any,
    *,
    aux: Any = "mean",
    **keywords: Any,
) -> Callable[[Any, Any], tuple[Any, Any, Any, Any]]:
    """Checks the arguments; returns the function that gives value, aux, gradients, statistics."""
    _check_unbound(fn, f)
    check_choice(fn, "allow_int", allow_int, (False, True))
    options, _, gradient = check_loss(fn, f, has_aux, aux=aux, **keywords)
    threads = check_reduce(fn, "aux", aux)
    filters = _check_filters(fn, argnums)
    roles = {**options.roles(threads), "argnums": tuple(number for number, _ in filters)}
    options.arguments.roles(roles)
    state = _check_state(fn, state)
    axes = DataAxes(options.axis_names or options.data_axes)
    weigh = options.weight_from_output

    def weight(output: Any) -> Any:
        return weigh((output[0], output[1].aux) if has_aux else output[0])  # pyright: ignore

    def run(inputs: Any, _: Any) -> Any:
        args, kwargs, rest, layout = inputs
        count = len(args)
        static = dataclasses.replace(
            options,
            batch_argnums=positions(options.batch_argnums, count),
            key_argnums=positions(options.key_argnums, count),
            weight_from_output=weigh and weight,
        )
        differentiated = dataclasses.replace(
            gradient, argnums=positions(roles["argnums"], count), has_aux=True, allow_int=allow_int
        )
        own = jax.tree.map(
            lambda x: thread(x.argnum % count) if isinstance(x, Thread) else x,
            aux,
            is_leaf=is_reducer,
        )
        reducers = _Output(own, [reducer for _, reducer in state], "max", thread(count))
        microbatch = _Microbatch(fn, f, has_aux, aux, layout, axes)

        while True:
            names = microbatch.moving_of(rest)
            moving = {name: rest[name] for name in names}
            still = {name: x for name, x in rest.items() if name not in names}
            with contextlib.suppress(_Moves):
                (value, output), grads, stats = run_window(
                    static,
                    (gradient.reduction, reducers),
                    microbatch,
                    differentiated,
                    (*args, moving, still),
                    kwargs,
                )
                break
        new = dict(output.moving)
        for part in output.state:
            for name, variable in part.items():
                new[name] = jax.tree.map(
                    lambda new, old: jnp.where(output.counts, new, old).astype(old.dtype),
                    variable,
                    rest[name],
                )
        return value, output.aux, grads, stats, new

    return _on_modules(options, f, argnums, filters, state, roles, run)


def _on_modules(
    options: Options,
    f: Callable[..., Any],
    argnums: Any,
    filters: list[tuple[int, Callable[..., bool]]],
    state: list[tuple[Callable[..., bool], str]],
    roles: dict[str, tuple[int, ...]],
    run: Callable[[Any, Any], tuple[Any, Any, Any, Any, dict[str, Any]]],
) -> Callable[[Any, Any], tuple[Any, Any, Any, Any]]:
    """A function of modules, of `run(inputs, {})`, a pure one of what `_split` makes of them.

    `run` returns value, aux, gradients, statistics and the variables that are written back.
    """
    compiled = compile_once(f, run)

    def run_anew(*inputs: Any) -> Any:
        return run(inputs, {})

    def call(args: Any, kwargs: Any) -> tuple[Any, Any, Any, Any]:
        args, kwargs = _by_position(f, args, kwargs)
        options.arguments.roles(roles, len(args))
        for role in ("batch_argnums", "key_argnums"):
            _check_no_nodes(options, role, positions(roles[role], len(args)), args)
        at = positions(roles["argnums"], len(args))
        wanted = {number: want for number, (_, want) in zip(at, filters, strict=True)}
        nodes, args, kwargs, rest, layout = _split(options, wanted, state, args, kwargs)
        # Compiled, it would see the modules that it reads from outside as they were then.
        function = run_anew if _reads_modules(f) else compiled
        value, aux, grads, stats, new = function(args, kwargs, rest, layout)
        nnx.update(nodes, nnx.from_flat_state({layout.paths[name]: x for name, x in new.items()}))
        several = isinstance(argnums, (tuple, list))
        return value, aux, tuple(grads) if several else grads[0], stats

    return call


# --- modules and their state ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How the modules of a call were taken apart; hashable, so that it is part of a structure.

    Variables have names as in `model.layers[0].bias`.
    """

    treedef: Any  # of (args, kwargs), with a leaf for each module or variable
    nodes: tuple[int, ...]  # which leaves those are
    graphdef: Any  # of the tuple of them
    named: tuple[tuple[str, Any], ...]  # all their variables, with their paths in that tuple
    keys: frozenset[str]  # of the variables that are not differentiated: keys of random streams,
    frozen: frozenset[str]  # parameters,
    combined: tuple[tuple[str, ...], ...]  # and what each pair of `state` combines

    @functools.cached_property
    def paths(self) -> dict[str, Any]:
        return dict(self.named)

    @functools.cached_property
    def names(self) -> dict[Any, str]:
        return {path: name for name, path in self.named}

    def params(self, leaves: list[Any]) -> dict[str, Any]:
        """The differentiated variables among the leaves of (args, kwargs)."""
        named = {}
        for number, index in enumerate(self.nodes):
            part = leaves[index]
            flat = {(): part} if isinstance(part, nnx.Variable) else dict(nnx.to_flat_state(part))
            named |= {self.names[number, *path]: x for path, x in flat.items()}
        return named

    def merge(self, *variables: dict[str, Any]) -> tuple[Any, ...]:
        """The modules, of their variables by name."""
        states = [{self.paths[name]: x for name, x in part.items()} for part in variables]
        return nnx.merge(self.graphdef, *map(nnx.from_flat_state, states))


def _is_node(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def _split(
    options: Options,
    wanted: dict[int, Callable[..., bool]],
    state: list[tuple[Callable[..., bool], str]],
    args: Any,
    kwargs: Any,
) -> tuple[tuple[Any, ...], Any, Any, dict[str, Any], _Layout]:
    """Takes the modules of a call apart: `(modules, args, kwargs, other variables, layout)`.

    In `args` and `kwargs`, the differentiated variables of each module stand in its place. All
    modules are split at once: what they share appears in the first of them, as in Flax.
    """
    fn = options.fn
    leaves, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_is_node)
    at = tuple(index for index, (_, leaf) in enumerate(leaves) if _is_node(leaf))
    where = [leaves[index][0] for index in at]
    nodes = tuple(leaves[index][1] for index in at)

    def name(path: Any) -> str:
        kind, first, *outer = where[path[0]]
        start = str(first.key) if kind.idx else options.arguments.name(first.idx)
        inner = (f".{x}" if isinstance(x, str) else f"[{x!r}]" for x in path[1:])
        return leaf_name(start, outer) + "".join(inner)

    def is_wanted(path: Any, x: Any) -> bool:
        kind, first, *_ = where[path[0]]
        if kind.idx or first.idx not in wanted:
            return False
        return isinstance(nodes[path[0]], nnx.Variable) or wanted[first.idx](path[1:], x)

    seen: dict[int, tuple[bool, str]] = {}
    for number, node in enumerate(nodes):
        for path, x in nnx.iter_graph(node, graph=True):
            if isinstance(x, nnx.Variable):
                here = is_wanted((number, *path), x), name((number, *path))
                there = seen.setdefault(id(x), here)
                if here[0] != there[0]:
                    (_, no), (_, yes) = sorted((here, there))
                    raise ValueError(
                        f"{fn}: {yes} is differentiated, {no} is the same variable and is not. "
                        "Differentiate both (argnums, nnx.DiffState), or nnx.clone one of them."
                    )

    filters = [lambda path, x, match=match: match(path[1:], x) for match, _ in state]
    graphdef, *states = nnx.split(nodes, is_wanted, *filters, ..., graph=True)
    states = numbers_to_arrays(states)
    params, *others = [dict(nnx.to_flat_state(part)) for part in states]
    rest = {name(path): x for part in others for path, x in part.items()}
    for number, part in enumerate(others[:-1]):
        if not part:
            types = sorted({type(x).__name__ for x in rest.values()})
            raise ValueError(
                f"{fn}: the filter of state[{number}] matches no state that is not differentiated; "
                f"there is {', '.join(types) or 'none'}."
            )
    layout = _Layout(
        treedef=treedef,
        nodes=at,
        graphdef=graphdef,
        named=tuple((name(path), path) for part in (params, *others) for path in part),
        keys=frozenset(name for name, x in rest.items() if isinstance(x, nnx.RngKey)),
        frozen=frozenset(name for name, x in rest.items() if isinstance(x, nnx.Param)),
        combined=tuple(tuple(map(name, part)) for part in others[:-1]),
    )
    filled = [leaf for _, leaf in leaves]
    for number, index in enumerate(at):
        filled[index] = states[0].get(number, nnx.State({}))
    args, kwargs = jax.tree.unflatten(treedef, filled)
    return nodes, args, kwargs, rest, layout


class _Moves(Exception):
    """Other variables move on than the loop was built for."""


class _Microbatch:
    """`f` as a pure function: `(*args, moving state, other state) -> (loss, _Output)`.

    Attributes:
      moving: the names of the variables that move on from microbatch to microbatch. The others are
        neither carried by the loop nor averaged over devices.
    """

    def __init__(self, fn: str, f: Any, has_aux: bool, aux: Any, layout: _Layout, axes: DataAxes):
        self.fn, self.f, self.has_aux, self.aux = fn, f, has_aux, aux
        self.layout, self.axes = layout, axes
        combined = frozenset(name for part in layout.combined for name in part)
        self.fixed = combined | (layout.keys if axes.names else frozenset())
        self.moving: frozenset[str] | None = None  # unknown

    def moving_of(self, names: Iterable[str]) -> frozenset[str]:
        """Which of the other variables move on: at first, what their types let one expect."""
        if self.moving is None:
            return frozenset(names) - self.fixed - self.layout.frozen - self.layout.keys
        return self.moving

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        *args, moving, still = inputs
        rest, layout = {**moving, **still}, self.layout
        if self.axes.names:
            index = self.axes.index
            rest |= {
                name: jax.tree.map(lambda key: _fold_in(key, index), rest[name])
                for name in layout.keys
            }
        (loss, aux), rest, moved = self.call(args, kwargs, rest)
        self._expect(moved, frozenset(moving))
        return loss, _Output(
            aux=aux,
            state=[{name: rest[name] for name in part} for part in layout.combined],
            counts=jnp.array(True) if layout.combined else None,
            moving={name: rest[name] for name in moving},
        )

    def call(
        self, args: Sequence[Any], kwargs: Any, rest: dict[str, Any]
    ) -> tuple[Any, dict[str, Any], frozenset[str]]:
        """The output of `f`, its modules' state afterwards, and which of it moved on."""
        leaves = self.layout.treedef.flatten_up_to((tuple(args), kwargs))
        inputs = hide((leaves, self.layout.params(leaves), rest))
        trace = jax.make_jaxpr(lambda x: hide(self._run(*show(x))), return_shape=True)
        closed, struct = trace(inputs)
        moved = self._find_moves(inputs, struct, _passed_on(closed.jaxpr))
        flat = jaxpr_as_fun(closed)(*jax.tree.leaves(inputs))
        output, _, rest = show(jax.tree.unflatten(jax.tree.structure(struct), flat))
        return output, rest, moved

    def _run(self, leaves: list[Any], params: Any, rest: Any) -> Any:
        """Puts the modules together, calls `f` and takes them apart again."""
        layout = self.layout
        nodes = layout.merge(params, rest)
        for index, node in zip(layout.nodes, nodes, strict=True):
            leaves[index] = node
        args, kwargs = jax.tree.unflatten(layout.treedef, leaves)
        output = self.f(*args, **kwargs)
        if not self.has_aux:
            output = output, None
        elif not (isinstance(output, tuple) and len(output) == 2):
            raise TypeError(
                f"{self.fn}: with has_aux=True the function must return (loss, aux), got "
                f"{jax.tree.structure(output)}."
            )
        else:
            what = "the auxiliary output"
            broadcast_prefix(self.fn, "aux", self.aux, output[1], is_reducer, what)
        graphdef, state = nnx.split(nodes, graph=True)
        flat = dict(nnx.to_flat_state(state))
        what = [f"without {name}" for name, path in layout.named if path not in flat]
        what += [f"with a new {path[-1]}" for path in flat if path not in layout.names]
        if what or graphdef != layout.graphdef:
            self._raise_changed(", ".join(what) or "an attribute that is no array")
        new = [{name: flat[layout.paths[name]] for name in part} for part in (params, rest)]
        if jax.tree.structure(new) != jax.tree.structure([params, rest]):
            self._raise_changed("the metadata of a variable")
        return numbers_to_arrays((output, *new))

    def _raise_changed(self, what: str) -> None:
        raise ValueError(
            f"{self.fn}: the function changes the structure of its modules ({what}), but all "
            "microbatches run as one loop. Make that change before, or undo it inside the function "
            "(with nnx.pop)."
        )

    def _find_moves(self, inputs: Any, struct: Any, sources: list[int]) -> frozenset[str]:
        """The names of the variables that change; raises where they must not."""
        numbers = range(len(jax.tree.leaves(inputs)))
        before = jax.tree.unflatten(jax.tree.structure(inputs), numbers)
        after = jax.tree.unflatten(jax.tree.structure(struct), sources)
        (params, rest) = (
            {name for name in old if jax.tree.leaves(new[name]) != jax.tree.leaves(old[name])}
            for old, new in zip(before[1:], after[1:], strict=True)
        )
        if params:
            raise ValueError(
                f"{self.fn}: the function assigns to {min(params)}, which is differentiated. "
                "Assign to a variable of another type, or leave this one out of the gradient with "
                "nnx.DiffState(argnum, filter)."
            )
        for name in sorted(rest):
            types = (jax.tree.leaves(tree[2][name]) for tree in (inputs, struct))
            for old, new in zip(*types, strict=True):
                if (new.shape, new.dtype) != (old.shape, old.dtype):
                    raise ValueError(
                        f"{self.fn}: {name} must keep its type {old.dtype}{list(old.shape)} from "
                        f"microbatch to microbatch, got {new.dtype}{list(new.shape)}."
                    )
        return frozenset(rest)

    def _expect(self, moved: frozenset[str], moving: frozenset[str]) -> None:
        """Raises where other variables move on than the loop was built for."""
        names = moved - self.fixed
        if self.moving is None:
            self.moving = names
        else:  # a last microbatch of fewer rows may move others
            self.moving |= names
        if self.moving != moving:
            raise _Moves


def _fold_in(key: Any, index: Any) -> Any:
    """A key, or an array of keys one by one, folded with the device index."""
    function = jax.random.fold_in
    for _ in range(key.ndim):
        function = jax.vmap(function, (0, None))
    return function(key, index)


# --- which results of a function are its arguments, unchanged ------------------------------------


def _passed_on(jaxpr: Any) -> list[int]:
    """For each result the number of the argument that it is, -1 where it is computed.

    Modules that go through `nnx.jit`, `nnx.remat` or a loop come back in new arrays, changed or
    not. (`lax.cond` and `lax.while_loop` hand on what they leave alone.)
    """
    source = {variable: number for number, variable in enumerate(jaxpr.invars)}

    def find(variable: Any) -> int:
        return -1 if isinstance(variable, Literal) else source.get(variable, -1)

    for equation in jaxpr.eqns:
        each = zip(equation.outvars, _operands(equation), strict=True)
        source |= {out: find(equation.invars[n]) for out, n in each if n >= 0}
    return [find(variable) for variable in jaxpr.outvars]


def _operands(equation: Any) -> list[int]:
    """For each result of an equation the number of the operand that it is, or -1."""
    name, params = equation.primitive.name, equation.params
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if name in ("jit", "remat2", "checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call"):
        return _passed_on(_open(inner))
    if name == "scan":
        body = _open(inner)
        # Rows of xs and ys have a dimension less than the whole.
        carries = _count_alike(body.outvars, equation.outvars)
        first = _count_alike(body.invars, equation.invars) - carries
        # A carry stays in its place, a row of xs becomes a row of ys.
        return [
            n if n == first + i or (i >= carries and n >= first + carries) else -1
            for i, n in enumerate(_passed_on(body))
        ]
    return [-1] * len(equation.outvars)


def _count_alike(inner: Sequence[Any], outer: Sequence[Any]) -> int:
    return sum(x.aval.shape == y.aval.shape for x, y in zip(inner, outer, strict=True))


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


# --- checks --------------------------------------------------------------------------------------


def _check_unbound(fn: str, f: Any) -> None:
    bound = f
    while isinstance(bound, functools.partial):
        bound = bound.func
    if isinstance(owner := getattr(bound, "__self__", bound), nnx.Pytree):
        raise TypeError(
            f"{fn}: the function is bound to a {type(owner).__name__}, which would not be an "
            "argument. Pass a function of the module, such as lambda model, batch: ..."
        )


def _reads_modules(f: Any) -> bool:
    """Whether a function names modules or variables that are not among its arguments."""
    while isinstance(f, functools.partial):
        if any(map(_is_node, (*f.args, *f.keywords.values()))):
            return True
        f = f.func
    try:
        variables = inspect.getclosurevars(inspect.unwrap(f))
    except (TypeError, ValueError):  # no Python function
        return False
    return any(map(_is_node, (*variables.nonlocals.values(), *variables.globals.values())))


def _check_filters(fn: str, argnums: Any) -> list[tuple[int, Callable[..., bool]]]:
    """The positions of the differentiated arguments, each with what is differentiated in it."""
    several = isinstance(argnums, (tuple, list))
    given = list(argnums) if several else [argnums]
    states = [isinstance(x, nnx.DiffState) for x in given]
    numbers = tuple(x.argnum if isinstance(x, nnx.DiffState) else x for x in given)
    numbers = check_argnums(fn, "argnums", numbers if several else numbers[0])
    filters = [x.filter if state else nnx.Param for x, state in zip(given, states, strict=True)]
    return [(number, nnx.All(filter)) for number, filter in zip(numbers, filters, strict=True)]


def _check_state(fn: str, state: Any) -> list[tuple[Callable[..., bool], str]]:
    checked = []
    for number, pair in enumerate(state):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise ValueError(
                f"{fn}: state[{number}] must be a pair of an nnx filter and a reducer, as in "
                f'state=[(nnx.BatchStat, "mean")], got {pair!r}.'
            )
        check_choice(fn, f"the reducer of state[{number}]", pair[1], ("max", "min", "mean", "sum"))
        checked.append((nnx.All(pair[0]), pair[1]))
    return checked


def _check_no_nodes(options: Options, role: str, at: tuple[int, ...], args: Any) -> None:
    for position in at:
        for path, x in jax.tree_util.tree_leaves_with_path(args[position], is_leaf=_is_node):
            if _is_node(x):
                name = leaf_name(options.arguments.name(position), path)
                raise TypeError(
                    f"{options.fn}: {name} is in {role}, but is an nnx {type(x).__name__}. Pass "
                    "arrays there, and modules and streams in other arguments: they move on by "
                    "themselves."
                )


def _by_position(f: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Keyword arguments of `f` at their positions, where they have one."""
    if kwargs:
        with contextlib.suppress(ValueError):  # no signature
            bound = inspect.signature(f).bind(*args, **kwargs)
            return bound.args, bound.kwargs
    return args, kwargs
