"""`accum_jax.nnx`: what `flax.nnx` gives, called on one microbatch after another."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import Counted, assert_same, compilations, rows, weighted_mean
from jax.sharding import PartitionSpec as P
from layers import assert_close, uses_in_place

import accum_jax
import accum_jax.nnx

PyTree = Any


# The oracle


@functools.cache
def _jit_value_and_grad(f: Callable[..., Any], argnums: Any) -> Callable[..., Any]:
    return nnx.jit(nnx.value_and_grad(f, argnums=argnums))


def in_turn(
    f: Callable[..., Any], k: int, *args: PyTree, argnums: Any = 0, batch_argnum: int = 1
) -> Any:
    """The mean of `nnx.value_and_grad` on one microbatch after another.

    The modules among the arguments are left as the last microbatch leaves them.
    """
    outputs = []
    for i in range(k):
        own = [rows(x, k, i) if n == batch_argnum else x for n, x in enumerate(args)]
        outputs.append(_jit_value_and_grad(f, argnums)(*own))
    return weighted_mean(outputs)


def assert_state_close(actual: Any, expected: Any, rtol: float = 1e-6) -> None:
    """Of two modules, keys of random streams included."""

    def numbers(module):
        return jax.tree.map(
            lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
            nnx.to_pure_dict(nnx.state(module)),
        )

    assert_close(numbers(actual), numbers(expected), rtol)


# Models


class Net(nnx.Module):
    """Batch norm, dropout, a counter and a tied weight."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.5):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.second = nnx.Linear(4, 3, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.limit = nnx.Variable(jnp.full((), 5.0))
        self.tied = self.first

    def __call__(self, x):
        self.calls[...] += 1
        h = self.dropout(self.norm(self.first(x)))
        return jnp.minimum(self.tied(self.second(h)).sum(1), self.limit[...])


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def plain_loss(model, batch):
    return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.norm(self.linear(x)))


class Scanned(nnx.Module):
    """Two layers made by `nnx.vmap` and run by `nnx.scan`, each rematerialised."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def make(rngs):
            return Layer(rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return layer(x)

        return run(x, self.layers)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    made = {"x": rng.normal(size=(8, 3)), "y": rng.normal(size=(8,))}
    made = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), made)
    return made | {"mask": jnp.arange(8) % 3 != 1}


# One microbatch after another


@pytest.mark.parametrize(
    ("make", "how"),
    [
        *((Net, how) for how in ("eager", "nnx.jit", "jax.jit")),
        (Scanned, "jax.jit"),
        pytest.param(Scanned, "eager", marks=pytest.mark.slow),
    ],
)
def test_result_and_model_are_those_of_one_microbatch_after_another(make, how, batch):
    f = loss if make is Net else plain_loss
    model, reference = make(nnx.Rngs(0)), make(nnx.Rngs(0))
    grad_fn = accum_jax.nnx.value_and_grad(f, k=4)

    @jax.jit
    def step(state, batch):
        model = nnx.merge(graphdef, state)
        out = grad_fn(model, batch)
        return out, nnx.state(model)

    for _ in range(2):  # the second window goes on where the first ended
        if how == "jax.jit":
            graphdef, state = nnx.split(model)
            actual, state = step(state, batch)
            nnx.update(model, state)
        else:
            actual = (nnx.jit(grad_fn) if how == "nnx.jit" else grad_fn)(model, batch)
        assert_close(actual, in_turn(f, 4, reference, batch), 1e-5)
        assert_state_close(model, reference, 1e-5)
    if make is Net:
        assert model.calls[...] == 8
        assert model.dropout.rngs.count[...] == 8


def test_batch_statistics_with_the_numbers_of_the_known_fault():
    """x = [0, 0 | 2, 2], k = 2, momentum 0.9 from 0: 0.2, where the whole batch gives 0.1."""
    norm = nnx.BatchNorm(1, momentum=0.9, rngs=nnx.Rngs(0))
    x = jnp.array([[0.0], [2.0], [0.0], [2.0]])  # rows 0, 2 | 1, 3
    accum_jax.nnx.grad(lambda norm, x: norm(x).mean(), k=2)(norm, x)
    np.testing.assert_allclose(norm.mean[...], 0.2, rtol=1e-6)


def draws(model, x):
    """No gradient, and the dropout mask of every row."""
    out = model.dropout(jnp.ones((x.shape[0], 32)))
    return jnp.sum(model.w[...]), out > 0


class Draws(nnx.Module):
    def __init__(self, seed):
        self.w = nnx.Param(jnp.ones(2))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))


def test_each_microbatch_draws_its_own_masks():
    def masks(model, x):
        (_, out), _ = grad_fn(model, x)
        return out.reshape(2, 4, 32).swapaxes(0, 1)

    grad_fn = accum_jax.nnx.value_and_grad(draws, has_aux=True, k=4, aux="concat")
    model, x = Draws(0), jnp.zeros(8)
    first, second = masks(model, x), masks(model, x)
    assert len({m.tobytes() for m in map(np.asarray, (*first, *second))}) == 8
    assert model.dropout.rngs.count[...] == 8
    other = Draws(0)
    other.w[...] = jnp.full(2, 3.0)
    assert_same(masks(other, x + 1), first)
    assert_same(masks(other, x), second)


def test_streams_as_an_argument_and_streams_that_are_reseeded():
    def f(w, x, rngs):
        value = jnp.mean(w[...] * x * rngs.noise.normal(x.shape))
        rngs.noise.key[...] = jax.random.fold_in(rngs.noise.key[...], 7)
        return value

    w, rngs, reference = nnx.Param(jnp.ones(())), nnx.Rngs(noise=0), nnx.Rngs(noise=0)
    x = jnp.arange(4.0)
    actual = accum_jax.nnx.value_and_grad(f, k=2)(w, x, rngs)
    assert_close(actual, in_turn(f, 2, w, x, reference), 1e-6)
    assert_state_close(rngs, reference)
    assert rngs.noise.count[...] == 2


@pytest.mark.parametrize("how", [{"remainder": "tail", "k": 3}, {"nonfinite": "skip", "k": 4}])
def test_a_ragged_batch_and_a_skipped_microbatch(how, batch):
    """Seven rows as 3 + 3 + 1; of four microbatches one is skipped, with the state it leaves."""
    x = batch["x"][:7] if how["k"] == 3 else batch["x"].at[2].set(jnp.nan)
    parts = [x[0:6:2], x[1:6:2], x[6:]] if how["k"] == 3 else [x[i::4] for i in (0, 1, 3)]

    def f(model, x):
        return jnp.mean(jnp.exp(model(x)))

    model, reference = (nnx.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0)) for _ in range(2))
    actual = accum_jax.nnx.value_and_grad(f, **how)(model, x)
    outputs = [_jit_value_and_grad(f, 0)(reference, part) for part in parts]
    assert_close(actual, weighted_mean(outputs, [len(part) for part in parts]), 1e-5)
    assert_state_close(model, reference)


# Arguments


def adversarial(generator, discriminator, batch, sign):
    return jnp.mean(sign * discriminator(generator(batch["x"])) * batch["y"][:, None])


@pytest.mark.parametrize("argnums", [0, 1, (1, 0), (0, nnx.DiffState(1, nnx.PathContains("bias")))])
def test_several_modules(argnums, batch):
    def make():
        return nnx.Linear(3, 4, rngs=nnx.Rngs(0)), Layers(nnx.Rngs(1))

    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
            self.out = nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x):
            return self.out(self.norm(x))

    models, references = make(), make()
    grad_fn = accum_jax.nnx.value_and_grad(adversarial, argnums, k=2, batch_argnums=2)
    actual = nnx.jit(grad_fn)(*models, batch, jnp.float32(-1))
    expected = in_turn(
        adversarial, 2, *references, batch, jnp.float32(-1), argnums=argnums, batch_argnum=2
    )
    assert_close(actual, expected, 1e-5)
    assert_state_close(list(models), list(references))


def distill(student, batch, teacher, temperature=1.0):
    return jnp.mean((student(batch["x"]) - temperature * teacher(batch["x"])) ** 2)


def test_a_teacher_stays_as_it_is(batch):
    """A module that is not differentiated, by keyword; nothing of it is written to."""
    student, teacher = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1))
    kernel = teacher.kernel.get_value()
    grad_fn = accum_jax.nnx.value_and_grad(distill, k=4)
    actual = grad_fn(student, batch, temperature=2.0, teacher=teacher)
    expected = nnx.value_and_grad(distill)(student, batch, teacher, 2.0)
    assert_close(actual, expected, 1e-5)
    assert teacher.kernel.get_value() is kernel
    assert uses_in_place(
        lambda state: grad_fn(nnx.merge(nnx.graphdef(student), state), batch, teacher)[1],
        nnx.state(student),
    )


def test_modules_that_the_function_reads_from_outside_are_read_at_each_call(batch):
    """Flax reads a captured teacher as it is now; a compiled function would as it was."""
    student, teacher = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1))
    functions = (
        lambda model, batch: distill(model, batch, teacher),
        functools.partial(distill, teacher=teacher),
    )
    weight = {"weight": lambda batch: batch["mask"].sum() * 0 + 1.0}
    grad_fns = [accum_jax.nnx.value_and_grad(f, k=4, **weight) for f in functions]
    for _ in range(2):
        expected = nnx.value_and_grad(distill)(student, batch, teacher)
        for grad_fn in grad_fns:
            assert_close(grad_fn(student, batch), expected, 1e-5)
        teacher.kernel[...] *= 2


def test_containers_variables_and_arrays_are_differentiated_as_in_flax(batch):
    def f(parts, scale, batch, w):
        out = parts["a"](batch["x"]) + parts["b"][0](batch["x"])
        return jnp.mean(out[:, 0] * scale * parts["c"] * w[...] * batch["y"])

    def make():
        a, b = (nnx.Linear(3, 1, rngs=nnx.Rngs(i)) for i in range(2))
        return {"a": a, "b": [b], "c": jnp.float32(2)}, jnp.float32(3), batch, nnx.BatchStat(2.0)

    argnums = (0, 1, 3)
    actual = accum_jax.nnx.value_and_grad(f, argnums, k=2, batch_argnums=2)(*make())
    expected = nnx.value_and_grad(f, argnums=argnums)(*make())
    assert_close(actual, expected, 1e-5)
    # A negative position, and a function without any module.
    negative = accum_jax.nnx.grad(f, -1, k=2, batch_argnums=-2)(*make())
    assert_close(negative, expected[1][2], 1e-5)
    plain = accum_jax.nnx.grad(lambda w, x: jnp.mean(w * x), k=2)(1.0, jnp.arange(4.0))
    assert_same(plain, jnp.float32(1.5))


def test_variables_shared_between_arguments(batch):
    """Their gradient is in the first, as in Flax, and their state moves on once."""

    def make():
        a = nnx.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0))
        b = nnx.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0))
        b.scale, b.mean = a.scale, a.mean
        return a, batch, b

    def f(a, batch, b):
        return jnp.mean((a(batch["x"]) * b(batch["x"])).sum(1) * batch["y"])

    models, references = make(), make()
    actual = accum_jax.nnx.value_and_grad(f, (0, 2), k=2)(*models)
    assert_close(actual, in_turn(f, 2, *references, argnums=(0, 2)), 1e-5)
    assert_state_close((models[0], models[2]), (references[0], references[2]))
    assert "scale" not in actual[1][1] and models[2].mean is models[0].mean
    with pytest.raises(ValueError, match=r"a\.scale is differentiated, b\.scale is the same"):
        accum_jax.nnx.value_and_grad(f, k=2)(*make())


def test_lora_trains_the_adapters_alone(batch):
    """Frozen parameters are neither differentiated nor carried by the loop."""

    def make():
        return nnx.Sequential(
            nnx.LoRALinear(3, 3, lora_rank=2, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1))
        )

    model, reference = make(), make()
    wrt = nnx.DiffState(0, nnx.LoRAParam)
    f = Counted(plain_loss)
    grad_fn = accum_jax.nnx.value_and_grad(f, wrt, k=4)
    kernel = model.layers[0].kernel.get_value()
    actual = grad_fn(model, batch)
    assert_close(actual, nnx.value_and_grad(plain_loss, argnums=wrt)(reference, batch), 1e-5)
    assert f.calls == 1
    assert jax.tree.leaves(actual[1])[0].shape == (3, 2)
    assert model.layers[0].kernel.get_value() is kernel
    graphdef, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda s: grad_fn(nnx.merge(graphdef, s), batch))(state)
    (scan,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    carried = [v.aval.shape for v in scan.outvars]
    assert (3, 3) not in carried and (3, 1) not in carried
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    optimizer.update(model, actual[1])
    assert optimizer.step[...] == 1


def test_optimizers_and_metrics_take_what_comes_out(batch):
    """`ModelAndOptimizer` without `wrt`; a `MultiMetric` fed once with the values of the window."""

    def f(model, batch):
        out = model(batch["x"])[:, 0]
        return jnp.mean((out - batch["y"]) ** 2), out

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.ModelAndOptimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average(), size=nnx.metrics.Average("size"))
    grad_fn = accum_jax.nnx.value_and_grad(
        f, has_aux=True, k=4, aux="concat", nonfinite="skip", stats="norms"
    )

    @nnx.jit
    def step(optimizer, metrics, batch):
        ((value, out), grads), stats = grad_fn(optimizer.model, batch)
        optimizer.update(grads)
        metrics.update(values=value, size=jnp.abs(out))
        return value, out, stats

    (value, expected), _ = nnx.value_and_grad(f, has_aux=True)(model, batch)
    loss, out, stats = step(optimizer, metrics, batch)
    assert_close((loss, out), (value, expected), 1e-5)
    np.testing.assert_allclose(metrics.compute()["loss"], value, rtol=1e-6)
    np.testing.assert_allclose(metrics.compute()["size"], np.abs(expected).mean(), rtol=1e-6)
    assert stats.num_microbatches == 4 and np.isfinite(stats.noise_scale)


def test_loss_scale_and_multi_steps_in_an_nnx_optimizer(batch):
    """It holds each array of a state in a Variable, which `==` compares as an object."""

    def make(tx):
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def window(model, optimizer, batch):
        scale = accum_jax.loss_scale(optimizer.opt_state)
        _, grads = accum_jax.nnx.value_and_grad(plain_loss, k=4, loss_scale=scale)(model, batch)
        optimizer.update(model, grads)
        return accum_jax.telemetry(optimizer.opt_state)

    @nnx.jit
    def microbatch(model, optimizer, batch):
        optimizer.update(model, nnx.grad(plain_loss)(model, batch), weight=2.0)
        return accum_jax.has_updated(optimizer.opt_state)

    norm = optax.snapshot("norm", optax.tree.norm)
    scaled = make(accum_jax.dynamic_loss_scale(optax.chain(norm, optax.sgd(0.1)), init_scale=8.0))
    turns = make(accum_jax.multi_steps(optax.sgd(0.1), 4))
    log = window(*scaled, batch)
    updated = [microbatch(*turns, rows(batch, 4, i)) for i in range(4)]
    assert_same(updated, [jnp.array(i == 3) for i in range(4)])
    assert_state_close(scaled[0], turns[0])
    expected = optax.tree.norm(nnx.grad(plain_loss)(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), batch))
    np.testing.assert_allclose(log["snapshot/norm"], expected, rtol=1e-6)
    assert_same(log["loss_scale/scale"], jnp.float32(8.0))


def test_weights_see_the_loss_and_its_auxiliary_output(batch):
    def f(model, batch):
        square = (model(batch["x"])[:, 0] - batch["y"]) ** 2
        count = batch["mask"].sum()
        return jnp.sum(square * batch["mask"]) / count, count

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    expected = nnx.value_and_grad(f, has_aux=True)(model, batch)
    for weight in (
        {"weight": lambda batch: batch["mask"].sum()},
        {"weight_from_output": lambda out: out[1]},
    ):
        grad_fn = accum_jax.nnx.value_and_grad(f, has_aux=True, k=4, aux="sum", **weight)
        assert_close(grad_fn(model, batch), expected, 1e-5)


# State that is combined another way


class Amax(nnx.Variable):
    """The largest magnitudes of the last calls, newest first."""


class Scaled(nnx.Module):
    """Keeps an amax history as float8 layers do."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))
        self.amax = Amax(jnp.array([1.0, 7.0, 3.0]))
        self.total = nnx.BatchStat(jnp.array(5.0))

    def __call__(self, x):
        history = self.amax[...]
        self.amax[...] = jnp.roll(history, 1).at[0].set(jnp.abs(x).max())
        self.total[...] = x.sum()
        return self.w * x


def scaled_loss(model, x):
    return jnp.mean(model(x))


@pytest.mark.parametrize(
    ("reducer", "amax", "total"),
    [("max", [3.0, 1.0, 7.0], 4.0), ("mean", [2.5, 1.0, 7.0], 3.0), ("sum", [5.0, 2.0, 14.0], 6.0)],
)
def test_state_that_is_combined(reducer, amax, total, run):
    """Microbatches [0, 2] and [1, 3], each from the history [1, 7, 3]."""
    model, x = Scaled(), jnp.arange(4.0)
    grad_fn = accum_jax.nnx.grad(
        scaled_loss, k=2, state=[(Amax, reducer), (nnx.BatchStat, reducer)]
    )

    def step(state, x):
        model = nnx.merge(nnx.graphdef(Scaled()), state)
        return grad_fn(model, x), nnx.state(model)

    grads, state = run(step)(nnx.state(model), x)
    assert_same(grads["w"][...], jnp.float32(1.5))
    assert_same(state["amax"][...], jnp.array(amax))
    assert_same(state["total"][...], jnp.array(total))


def test_combined_state_stays_where_nothing_counts():
    model = Scaled()
    grad_fn = accum_jax.nnx.grad(
        scaled_loss, k=2, state=[(Amax, "max")], weight=lambda x: 0.0 * x.sum()
    )
    grads = grad_fn(model, jnp.arange(4.0))
    assert_same(grads["w"][...], jnp.float32(0))
    assert_same(model.amax[...], jnp.array([1.0, 7.0, 3.0]))
    assert_same(model.total[...], jnp.array(4.0))  # moved on, as at weight 0 all state does


# Devices


def test_devices_draw_their_own_masks_and_streams_advance_as_on_one():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model, x = Draws(0), jnp.zeros(8)
    key = jax.random.key_data(model.dropout.rngs.key[...])
    grad_fn = accum_jax.nnx.value_and_grad(
        draws, has_aux=True, k=2, aux="concat", mesh=mesh, batch_argnums=1
    )
    (_, masks), _ = grad_fn(model, x)
    assert len({mask.tobytes() for mask in np.asarray(masks)}) == 8
    assert model.dropout.rngs.count[...] == 2
    assert_same(jax.random.key_data(model.dropout.rngs.key[...]), key)

    def reseeds(model, x):
        out = draws(model, x)
        model.dropout.rngs.key[...] = jax.random.key(7)
        return out

    accum_jax.nnx.grad(reseeds, has_aux=True, k=2, aux="concat", mesh=mesh)(model, x)
    assert_same(jax.random.key_data(model.dropout.rngs.key[...]), key)
    assert model.dropout.rngs.count[...] == 4


def test_devices_average_state_and_leave_alone_what_does_not_move(batch):
    """Weighted shares such as 1/3 would round a state that no device changes."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = Net(nnx.Rngs(0), rate=0.0)
    model.limit[...] = jnp.float32(0.1)
    x = jnp.repeat(batch["x"], 2, 0)
    doubled = {"x": x, "y": jnp.repeat(batch["y"], 2), "n": jnp.arange(16.0)}
    grad_fn = accum_jax.nnx.value_and_grad(loss, k=2, mesh=mesh, weight=lambda b: b["n"].sum())
    value, _ = nnx.jit(grad_fn)(model, doubled)
    assert np.isfinite(value)
    assert_same(model.limit[...], jnp.float32(0.1))
    assert model.calls[...] == 2
    # Device d holds rows 2d and 2d + 1, its weight is 4d + 1 of 120; both rows are row d of x.
    mean = model.first(batch["x"])
    share = (4 * jnp.arange(8.0) + 1) / 120
    expected = (0.1 + 0.9 * 0.1) * (share[:, None] * mean).sum(0)
    assert_close(model.norm.mean[...], expected, 1e-5)


def test_inside_shard_map(batch):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model, reference = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    grad_fn = accum_jax.nnx.value_and_grad(plain_loss, k=2, axis_name="data")
    mapped = jax.shard_map(
        lambda state, batch: grad_fn(nnx.merge(graphdef, state), batch),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    expected = nnx.value_and_grad(plain_loss)(reference, batch)
    assert_close(jax.jit(mapped)(state, batch), expected, 1e-5)


def test_parameters_sharded_beside_the_data_axis_stay_sharded(batch):
    """Hybrid: rows over `replica`, parameters over `fsdp`, gradients as the parameters."""
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    expected = nnx.value_and_grad(plain_loss)(model, batch)
    specs = nnx.State({"kernel": P(None, "fsdp"), "bias": P("fsdp")})
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    nnx.update(model, jax.device_put(nnx.state(model), shardings))
    grad_fn = accum_jax.nnx.value_and_grad(
        plain_loss, k=2, mesh=mesh, data_axes="replica", arg_specs={0: specs}
    )
    step = nnx.jit(grad_fn)
    value, grads = step(model, jax.device_put(batch, jax.NamedSharding(mesh, P("replica"))))
    assert_close(jax.device_get((value, grads)), jax.device_get(expected), 1e-5)
    for name in ("kernel", "bias"):
        gradient, parameter = (tree[name].get_value() for tree in (grads, nnx.state(model)))
        assert gradient.sharding.is_equivalent_to(shardings[name], gradient.ndim)
        assert parameter.sharding.is_equivalent_to(shardings[name], gradient.ndim)


def test_combined_state_is_combined_over_devices_too():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = Scaled()
    state = [(Amax, "max"), (nnx.BatchStat, "sum")]
    accum_jax.nnx.grad(scaled_loss, k=2, mesh=mesh, state=state)(model, jnp.arange(16.0))
    assert_same(model.amax[...], jnp.array([15.0, 1.0, 7.0]))
    assert_same(model.total[...], jnp.array(120.0))


# Traces, memory, errors


def test_traced_once_and_compiled_once(batch):
    f = Counted(loss)
    grad_fn = accum_jax.nnx.value_and_grad(f, k=4)
    grad_fn(Net(nnx.Rngs(0)), batch)
    # `limit` might have moved, by its type, and did not: once more.
    assert f.calls == 2
    model = Net(nnx.Rngs(1))
    with compilations() as compiled:
        grad_fn(model, batch)
        grad_fn(model, batch)
    assert f.calls == 2 and not compiled

    f = Counted(plain_loss)
    accum_jax.nnx.value_and_grad(f, k=4)(Scanned(nnx.Rngs(0)), batch)
    assert f.calls == 1


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.remat, nnx.jit])
def test_what_only_passes_through_a_transform_has_not_moved(wrap, batch):
    """`nnx.remat` and `nnx.jit` give back all variables in new arrays, loops do too."""

    def f(model, batch):
        def whole(model, x):
            _, x = nnx.fori_loop(0, 2, lambda i, carry: (carry[0], carry[0](carry[1])), (model, x))
            *_, x = nnx.while_loop(
                lambda carry: carry[0] < 2,
                lambda carry: (carry[0] + 1, carry[1], jax.lax.stop_gradient(carry[1](carry[2]))),
                (jnp.int32(0), model, jax.lax.stop_gradient(x)),
            )
            return nnx.cond(x[0, 0] > 0, lambda m, x: m(x), lambda m, x: x, model, x)

        return jnp.mean(wrap(whole)(model, batch["x"]))

    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    kernel = model.kernel.get_value()
    accum_jax.nnx.value_and_grad(f, k=2, in_place=False)(model, batch)
    assert model.kernel.get_value() is kernel


def test_state_that_comes_and_goes_inside_the_function(batch):
    def f(model, batch):
        model.norm.seen = nnx.Intermediate(jnp.abs(batch["x"]).max())
        value = loss(model, batch)
        return value, nnx.pop(model, nnx.Intermediate)

    model = Net(nnx.Rngs(0))
    (_, seen), _ = accum_jax.nnx.value_and_grad(f, has_aux=True, k=4, aux="max")(model, batch)
    assert_same(seen["norm"]["seen"][...], jnp.abs(batch["x"]).max())


def test_errors_name_what_is_wrong(batch):
    x = batch["x"]

    def check(error, match, f, *args, **keywords):
        with pytest.raises(error, match=f"(?s)nnx.value_and_grad: .*{match}"):
            accum_jax.nnx.value_and_grad(f, **{"k": 2} | keywords)(*args)

    def grows(model, x):
        model.new = nnx.Variable(jnp.zeros(2))
        return jnp.mean(model(x))

    def switches(model, x):
        model.in_features += 1
        return jnp.mean(model(x))

    def assigns(model, x):
        model.kernel[...] *= 2
        return jnp.mean(model(x))

    def widens(model, x):
        model.total.set_value(jnp.zeros(3))
        return jnp.mean(model(x))

    def linear():
        return nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    check(ValueError, "with a new new", grows, linear(), x)
    check(ValueError, "an attribute that is no array", switches, linear(), x)
    check(ValueError, "assigns to model.kernel, which is differentiated", assigns, linear(), x)
    check(
        ValueError,
        r"model.total must keep its type float32\[\].*got float32\[3\]",
        widens,
        Scaled(),
        x,
    )
    matches = r"state\[0\] matches no state .* there is Amax, BatchStat"
    check(ValueError, matches, scaled_loss, Scaled(), x, state=[(nnx.RngKey, "max")])
    check(ValueError, r"reducer of state\[0\]", scaled_loss, state=[(Amax, "stack")])
    check(ValueError, r"state\[0\] must be a pair", scaled_loss, state=[Amax])
    check(TypeError, "batch is in batch_argnums, but is an nnx Linear", loss, linear(), linear())
    check(TypeError, "bound to a Linear", linear().__call__)
    check(TypeError, "has two roles", loss, linear(), x, argnums=(0, nnx.DiffState(0, nnx.Param)))
    check(ValueError, "argnums names argument 2", lambda m, x: x, linear(), x, argnums=2)
    check(TypeError, r"must return \(loss, aux\)", scaled_loss, Scaled(), x, has_aux=True)
    check(TypeError, "real float scalar", lambda m, x: x, Scaled(), x)
    check(ValueError, "k=3 does not divide", scaled_loss, Scaled(), x, k=3)
    check(TypeError, "k must be a Python int", scaled_loss, k=2.0)


@pytest.mark.parametrize(
    "transform", [accum_jax.accumulate, accum_jax.value_and_grad, accum_jax.accumulated_loss]
)
def test_the_core_refuses_modules(transform, batch):
    with pytest.raises(TypeError, match=r"model\[0\] is an nnx Linear, .* Use accum_jax.nnx"):
        transform(lambda model, x: jnp.mean(model[0](x)), k=2)(
            [nnx.Linear(3, 1, rngs=nnx.Rngs(0))], batch["x"]
        )


def test_modes_are_those_of_the_call(batch):
    """Compiled once for each: in evaluation nothing is drawn and no statistics move."""
    model = Net(nnx.Rngs(0))
    grad_fn = accum_jax.nnx.value_and_grad(loss, k=4)
    trained, _ = grad_fn(model, batch)
    mean, count = model.norm.mean[...], model.dropout.rngs.count[...]
    model.eval()
    value, grads = grad_fn(model, batch)
    assert_close((value, grads), nnx.value_and_grad(loss)(model, batch), 1e-5)
    assert_same((model.norm.mean[...], model.dropout.rngs.count[...]), (mean, count))
    assert value != trained


def test_flax_says_what_a_model_lacks(batch):
    """A missing random stream and a missing mode are Flax's to name; nothing is wrong silently."""
    dropout = nnx.Dropout(0.5)
    with pytest.raises(ValueError, match="rngs"):
        accum_jax.nnx.grad(lambda d, x: d(x).mean(), k=2)(dropout, batch["x"])
    with pytest.raises(KeyError, match="No RngStream named 'dropout'"):
        accum_jax.nnx.grad(lambda d, x, rngs: d(x, rngs=rngs).mean(), k=2)(
            dropout, batch["x"], nnx.Rngs(noise=0)
        )
    norm = nnx.BatchNorm(3, use_running_average=None, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="use_running_average"):
        accum_jax.nnx.grad(lambda norm, x: norm(x).mean(), k=2)(norm, batch["x"])
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    with pytest.raises(Exception, match="trace level"):  # captured, not passed

        def captured(w, x):
            model.bias[...] += 1
            return jnp.mean(model(x) * w)

        accum_jax.nnx.grad(captured, k=2)(jnp.ones(()), batch["x"])


def test_flax_is_optional():
    code = """
import sys
import accum_jax
print("flax" in sys.modules)
sys.modules["flax"] = None
try:
    import accum_jax.nnx
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = 'False\naccum_jax.nnx needs Flax: pip install "accum-jax[flax]".\n'
    assert done.stdout == expected
