"""A loss that accumulates its own gradient, differentiated by others."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from helpers import (
    Counted,
    assert_same,
    compilations,
    compile_for,
    cost,
    linear,
    num_equations,
    temp_bytes,
)
from layers import assert_close, label, layered, layered_problem, uses_in_place

import accum_jax
from accum_jax import accumulated_loss, thread

_BATCH = jnp.arange(8.0)


@pytest.fixture
def run():
    """Under jit: others call the loss eagerly below, and it then compiles itself."""
    return jax.jit


def _square(w, batch):
    return jnp.mean(jnp.square(w * batch))


def _fit(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ params["w"]) @ params["out"] - batch["y"]))


def _fit_problem(num_rows):
    params, batch = layered_problem(num_rows)
    return {"w": params["layers"]["w"][0], "out": params["out"]}, batch


def _tokens(batch):
    return jnp.sum(batch["mask"])


# Value and gradient


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(weight=_tokens),
        dict(reduction="sum"),
        dict(reduction="sum_over_weight", weight=_tokens),
        dict(loss_scale=8.0),
        dict(in_place=False),
        dict(in_place=True),
        dict(remainder="tail", k=5, weight=_tokens),
        dict(num_real_microbatches=2),
        dict(nonfinite="skip"),
    ],
    ids=label,
)
def test_gradient_is_that_of_value_and_grad(run, options):
    problem = _fit_problem(12)
    options = {"k": 4, **options}
    loss = accumulated_loss(_fit, **options)
    expected = accum_jax.value_and_grad(_fit, **options)(*problem)
    assert_close(run(jax.value_and_grad(loss))(*problem), expected, 1e-6)
    assert_close(loss(*problem), expected[0], 1e-6)


def test_gradient_of_the_whole_batch(run):
    problem = layered_problem(12)
    actual = run(jax.value_and_grad(accumulated_loss(layered, 4)))(*problem)
    assert_close(actual, jax.value_and_grad(layered)(*problem), 1e-5)


@pytest.mark.parametrize("argnums", [0, 2, -1, (0, 2), (2, 0)], ids=label)
def test_gradients_of_several_arguments(run, argnums):
    def loss(params, batch, shift):
        return _fit(params, batch) * shift["a"]

    args = (*_fit_problem(8), {"a": jnp.float32(1.5), "n": None})
    actual = run(jax.grad(accumulated_loss(loss, 4), argnums))(*args)
    assert_close(actual, jax.grad(loss, argnums)(*args), 1e-5)


def test_auxiliary_output():
    def loss(w, batch, key, state):
        aux = {"rows": batch, "key": jax.random.uniform(key), "state": state + 1, "name": "aux"}
        return _square(w, batch), aux

    reducers = {"rows": "concat", "key": "stack", "state": thread(3), "name": "mean"}
    options = dict(has_aux=True, aux=reducers, key_argnums=2)
    args = jnp.float32(2), _BATCH, jax.random.key(0), jnp.int32(0)
    fn = jax.value_and_grad(accumulated_loss(loss, 4, **options), has_aux=True)
    (value, aux), grad = fn(*args)
    assert aux.pop("name") == "aux"
    assert_same((value, grad), (jnp.float32(70), jnp.float32(70)))
    draws = [jax.random.uniform(jax.random.fold_in(args[2], i)) for i in range(4)]
    assert_same(aux, {"rows": _BATCH, "key": jnp.stack(draws), "state": jnp.int32(4)})


def test_statistics(run):
    loss = accumulated_loss(linear, 4, stats="norms", loss_scale=4.0)
    (value, stats), grad = run(jax.value_and_grad(loss, has_aux=True))(jnp.float32(2), _BATCH)
    assert_same((value, grad), (jnp.float32(7), jnp.float32(14)))
    assert_same(stats[:5], tuple(map(jnp.asarray, (4, 8, 8.0, 0, 3.5))))
    value, stats = run(accumulated_loss(linear, 4, stats="counts"))(jnp.float32(2), _BATCH)
    assert_same((value, *stats[:4]), tuple(map(jnp.asarray, (7.0, 4, 8, 8.0, 0))))


def test_cotangents_multiply_the_gradient(run):
    loss = accumulated_loss(linear, 4)

    def outer(w):
        return jnp.sin(loss(2 * w, _BATCH)) * 3

    w = jnp.float32(0.25)
    expected = jax.grad(lambda w: jnp.sin(linear(2 * w, _BATCH)) * 3)(w)
    assert_close(run(jax.grad(outer))(w), expected, 1e-6)
    value, pull = jax.vjp(lambda w: loss(w, _BATCH), w)
    gradients = (jnp.float32(3.5),), (jnp.float32(7),)
    assert_same((value, pull(1.0), pull(2.0)), (jnp.float32(0.875), *gradients))


def test_gradients_have_the_dtypes_of_their_arguments(run):
    params = {"low": jnp.bfloat16(1), "half": jnp.float16(2), "w": jnp.float32(3), "n": None}

    def loss(params, batch):
        return jnp.mean(batch) * sum(x.astype(jnp.float32) ** 2 for x in jax.tree.leaves(params))

    actual = run(jax.grad(accumulated_loss(loss, 4)))(params, _BATCH)
    assert_same(actual, jax.grad(loss)(params, _BATCH))


def test_python_numbers_and_static_leaves():
    def loss(params, batch, n, name):
        assert (n, name) == (3, "square")
        return _square(params, batch) * n

    grad = jax.grad(accumulated_loss(loss, 4))(2.0, _BATCH, 3, "square")
    assert_same(grad, jnp.float32(210))


def test_integer_leaves_have_no_gradient():
    def loss(params, batch):
        return _square(params["w"], batch) * params["i"].sum()

    params = {"w": jnp.float32(2), "i": jnp.arange(3), "n": None}
    actual = jax.grad(accumulated_loss(loss, 4), allow_int=True)(params, _BATCH)
    assert_same(actual["w"], jnp.float32(210))
    assert actual["i"].dtype == jax.dtypes.float0


# Whose gradients are taken


def test_only_perturbed_leaves_get_gradients():
    """A frozen leaf costs no accumulator and no backward pass."""

    def loss(params, batch):
        return _square(params["w"] * params["frozen"].sum(), batch)

    accumulated = accumulated_loss(loss, 4)
    frozen = jnp.ones(1234)

    def partly(w):
        return accumulated({"w": w, "frozen": frozen}, _BATCH)

    def all_of_it(params):
        return accumulated(params, _BATCH)

    w = jnp.float32(2)
    assert "Ref{f32[1234]}" not in str(jax.make_jaxpr(jax.grad(partly))(w))
    everything = {"w": w, "frozen": frozen}
    assert "Ref{f32[1234]}" in str(jax.make_jaxpr(jax.grad(all_of_it))(everything))
    assert_close(
        jax.grad(partly)(w), jax.grad(lambda w: loss({"w": w, "frozen": frozen}, _BATCH))(w), 1e-6
    )


def test_a_frozen_leaf_may_be_of_any_type():
    def loss(params, batch):
        return _square(params["w"], batch) * params["i"] * jnp.real(params["c"])

    accumulated = accumulated_loss(loss, 4)

    def partly(w):
        return accumulated({"w": w, "i": jnp.int32(2), "c": jnp.complex64(1j + 1)}, _BATCH)

    assert_same(jax.grad(partly)(jnp.float32(2)), jnp.float32(140))


def test_integer_arguments_before_the_differentiated_one():
    loss = accumulated_loss(lambda n, batch, w: _square(w, batch) * n, 4)
    assert_same(jax.grad(loss, 2)(jnp.int32(3), _BATCH, jnp.float32(2)), jnp.float32(210))


# Under other transformations


@pytest.mark.parametrize("options", [{}, dict(weight=jnp.sum)], ids=label)
def test_vmap(run, options):
    loss = accumulated_loss(_square, 4, **options)
    ws = jnp.arange(3.0)
    expected = jnp.stack([jax.grad(loss)(w, _BATCH) for w in ws])
    assert_close(run(jax.vmap(jax.grad(loss), (0, None)))(ws, _BATCH), expected, 1e-6)
    summed = jax.grad(lambda ws: jnp.sum(jax.vmap(loss, (0, None))(ws, _BATCH)))
    assert_close(run(summed)(ws), expected, 1e-6)


_TWO = jnp.stack([_BATCH, _BATCH[::-1] / 2])


@pytest.mark.parametrize(
    "around",
    [
        lambda loss, w: jax.lax.scan(lambda c, b: (c + loss(w, b), None), 0.0, _TWO)[0],
        lambda loss, w: jax.lax.scan(lambda w, b: (w - 1e-2 * loss(w, b), None), w, _TWO)[0],
        lambda loss, w: jnp.sum(jax.lax.map(lambda b: loss(w, b), _TWO)),
        lambda loss, w: jax.lax.fori_loop(0, 2, lambda i, c: c + loss(w, _TWO[i]), 0.0),
        lambda loss, w: jax.lax.cond(jnp.sum(_BATCH) > 0, lambda w: loss(w, _BATCH), jnp.sin, w),
        lambda loss, w: jax.checkpoint(loss)(w, _BATCH),
        lambda loss, w: jax.jit(loss)(w, _BATCH) + loss(w, _BATCH),
    ],
    ids=["scan", "carry", "map", "fori", "cond", "checkpoint", "jit"],
)
def test_inside_of_control_flow(run, around):
    loss, w = accumulated_loss(_square, 4), jnp.float32(2)
    assert_close(
        run(jax.grad(lambda w: around(loss, w)))(w), jax.grad(lambda w: around(_square, w))(w), 1e-6
    )


# Whoever differentiates


def test_line_search_of_optax(run):
    """L-BFGS with its zoom line search, which differentiates the loss itself."""

    def minimise(loss, params):
        tx = optax.lbfgs()
        value_and_grad = optax.value_and_grad_from_state(loss)

        def step(_, carry):
            params, state = carry
            value, grad = value_and_grad(params, state=state)
            updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss)
            return optax.apply_updates(params, updates), state

        return jax.lax.fori_loop(0, 5, step, (params, tx.init(params)))[0]

    batch = {"x": jnp.linspace(-1, 1, 8), "y": jnp.linspace(0, 3, 8)}

    def loss(params, batch):
        return jnp.mean(jnp.square(params["a"] * batch["x"] + params["b"] - batch["y"]))

    accumulated = accumulated_loss(loss, 4)
    params = {"a": jnp.float32(0), "b": jnp.float32(0)}
    actual = run(lambda p: minimise(lambda p: accumulated(p, batch), p))(params)
    # y is a line through 1.5 with slope 1.5
    assert_same(actual, {"a": jnp.float32(1.5), "b": jnp.float32(1.5)}, rtol=1e-4)


def test_equinox():
    model = eqx.nn.MLP(4, 1, 4, 1, key=jax.random.key(0))
    batch = _fit_problem(8)[1]

    def loss(model, batch):
        return jnp.mean(jnp.square(jax.vmap(model)(batch["x"])[:, 0] - batch["y"]))

    accumulated = accumulated_loss(loss, 4)
    expected = eqx.filter_value_and_grad(loss)(model, batch)
    for transform in (lambda fn: fn, eqx.filter_jit):
        value, grads = transform(eqx.filter_value_and_grad(accumulated))(model, batch)
        assert jax.tree.structure(grads) == jax.tree.structure(expected[1])
        assert_close((value, grads), expected, 1e-5)
        assert_close(transform(eqx.filter_grad(accumulated))(model, batch), expected[1], 1e-5)


def test_dynamic_scale_of_flax(run):
    loss = accumulated_loss(linear, 4)

    def step(w, batch):
        _, is_finite, value, grad = DynamicScale(scale=1024.0).value_and_grad(loss)(w, batch)
        return is_finite, value, grad

    actual = run(step)(jnp.float32(2), _BATCH)
    assert_same(actual, (jnp.array(True), jnp.float32(7), jnp.float32(3.5)))
    assert not run(step)(jnp.float32(2), _BATCH.at[3].set(jnp.inf))[0]


def test_optimizers_reach_the_minimum():
    loss = accumulated_loss(lambda w, batch: jnp.mean(jnp.square(w - batch)), 4)
    tx = optax.sgd(0.25)

    @jax.jit
    def step(w, state):
        updates, state = tx.update(jax.grad(loss)(w, _BATCH), state)
        return optax.apply_updates(w, updates), state

    w = jnp.float32(0)
    state = tx.init(w)
    for _ in range(20):
        w, state = step(w, state)
    assert_same(w, jnp.float32(3.5), rtol=1e-5)


# Errors


def _refuses(error, *fragments):
    return pytest.raises(error, match="(?s)^accumulated_loss: .*" + ".*".join(fragments))


@pytest.mark.parametrize("options", [{}, dict(batch_argnums=-1)], ids=label)
def test_the_batch_has_no_derivative(run, options):
    loss = accumulated_loss(_square, 4, **options)
    with _refuses(TypeError, "batch", "batch_argnums", "accumulate"):
        run(jax.grad(loss, 1))(jnp.float32(2), _BATCH)
    with _refuses(TypeError, "batch", "batch_argnums"):
        run(jax.grad(loss, (0, 1)))(jnp.float32(2), _BATCH)


def test_threaded_state_has_no_derivative(run):
    def loss(w, batch, state):
        return _square(w, batch) + state, state * 0.9

    accumulated = accumulated_loss(loss, 4, has_aux=True, aux=thread(2))
    with _refuses(TypeError, "state", "thread"):
        run(jax.grad(accumulated, 2, has_aux=True))(jnp.float32(2), _BATCH, jnp.float32(0))


def test_keyword_arguments_have_no_derivative(run):
    def loss(w, batch, *, factor):
        return _square(w, batch) * factor["a"]

    accumulated = accumulated_loss(loss, 4)
    with _refuses(TypeError, "keyword", r"\['factor'\]\['a'\]", "position"):
        run(jax.grad(lambda c: accumulated(jnp.float32(2), _BATCH, factor={"a": c})))(3.0)
    grad = run(jax.grad(lambda w: accumulated(w, _BATCH, factor={"a": 3.0})))(2.0)
    assert_same(grad, jnp.float32(210))


def test_aux_has_no_derivative(run):
    def loss(w, batch):
        return _square(w, batch), linear(w, batch)

    accumulated = accumulated_loss(loss, 4, has_aux=True)
    for pick in (lambda out: out[1], lambda out: out[0] + out[1]):
        with _refuses(TypeError, "aux"):
            run(jax.grad(lambda w, pick=pick: pick(accumulated(w, _BATCH))))(2.0)


@pytest.mark.parametrize(
    "second",
    [
        lambda loss: jax.grad(jax.grad(loss)),
        lambda loss: jax.grad(jax.jit(jax.grad(loss))),
        lambda loss: jax.grad(jax.grad(jax.jit(loss))),
        jax.hessian,
        lambda loss: jax.jacrev(jax.jacfwd(loss)),
        lambda loss: lambda w, b: jax.jvp(jax.grad(lambda w: loss(w, b)), (w,), (w,)),
    ],
    ids=["grad", "jit inside", "jitted loss", "hessian", "jacrev", "jvp"],
)
def test_second_derivatives(run, second):
    with _refuses(TypeError, "first", "value_and_grad", "in_place=False"):
        run(second(accumulated_loss(_square, 4)))(jnp.float32(2), _BATCH)


def test_second_derivatives_by_the_advice(run):
    fn = jax.grad(accum_jax.grad(_square, k=4, in_place=False))
    assert_same(run(fn)(jnp.float32(2), _BATCH), jnp.float32(35))


def test_values_that_are_closed_over(run):
    """No derivative, and not silently none."""

    def loss(c):
        return accumulated_loss(lambda w, batch: _square(w * c, batch), 4)(jnp.float32(2), _BATCH)

    assert_same(run(loss)(3.0), jnp.float32(630))
    assert_same(run(jax.vmap(loss))(jnp.array([1.0, 3.0])), jnp.array([70, 630], jnp.float32))
    with pytest.raises(Exception, match=r"(?i)closed|tracer"):
        run(jax.grad(loss))(3.0)


@pytest.mark.parametrize(
    "error, options, fragments",
    [
        (TypeError, dict(aux="sum"), ("aux='sum'", "has_aux=True")),
        (TypeError, dict(microbatch_size=2), ("k", "microbatch_size")),
        (ValueError, dict(loss_scale=8.0, nonfinite="skip"), ("loss_scale", "dynamic_loss_scale")),
        (ValueError, dict(in_place=True, nonfinite="skip"), ("in_place=True", 'nonfinite="skip"')),
        (TypeError, dict(batch_argnums=1, key_argnums=1), ("batch", "key_argnums")),
        ((TypeError, ValueError), dict(reduction="max"), ("reduction", "max")),
    ],
    ids=label,
)
def test_static_arguments_are_checked_when_built(error, options, fragments):
    with _refuses(error, *fragments):
        accumulated_loss(linear, 4, **options)


def test_unknown_keywords():
    for name in ("reduce", "argnums", "allow_int"):
        with pytest.raises(TypeError, match=name):
            accumulated_loss(linear, 4, **{name: 0})


@pytest.mark.parametrize(
    "output", [lambda w, b: w * b, lambda w, b: jnp.int32(1), lambda w, b: None], ids=label
)
def test_losses_that_are_no_scalar(run, output):
    with _refuses(TypeError, "loss"):
        run(jax.grad(accumulated_loss(output, 4)))(jnp.float32(2), _BATCH)
    with _refuses(TypeError, "loss"):
        run(accumulated_loss(output, 4))(jnp.float32(2), _BATCH)


# Cost


def test_undifferentiated_it_is_one_forward_pass():
    problem = layered_problem(32, num_layers=8, width=64)
    loss = accumulated_loss(layered, 8)
    one = compile_for(layered, problem[0], jax.tree.map(lambda x: x[:4], problem[1]))
    forward = compile_for(loss, *problem)
    assert cost(forward, "flops") <= 1.1 * cost(one, "flops")  # a loop body counts once
    assert not uses_in_place(loss, *problem)
    both = compile_for(jax.value_and_grad(loss), *problem)
    assert cost(both, "flops") >= 2 * cost(forward, "flops")


def test_each_pass_traces_the_loss_once(run):
    counted = Counted(layered)
    loss = run(accumulated_loss(counted, 3))
    for _ in range(2):
        loss(*layered_problem(12))
    assert counted.calls <= 2
    counted = Counted(layered)
    grad = run(jax.grad(accumulated_loss(counted, 3)))
    for _ in range(2):
        grad(*layered_problem(12))
    assert counted.calls <= 4


@pytest.mark.parametrize("has_aux", [False, True])
def test_second_eager_call_compiles_nothing(has_aux):
    def loss(params, batch):
        return (_fit(params, batch), batch["y"]) if has_aux else _fit(params, batch)

    loss = accumulated_loss(loss, 4, has_aux=has_aux, **(dict(aux="concat") if has_aux else {}))
    problem = _fit_problem(8)
    for fn in (loss, jax.value_and_grad(loss, has_aux=has_aux)):
        fn(*problem)
        with compilations() as compiled:
            fn(*problem)
        assert not compiled


def test_program_size_is_independent_of_k():
    sizes = [
        num_equations(jax.grad(accumulated_loss(layered, k)), *layered_problem(4 * k))
        for k in (2, 64)
    ]
    assert sizes[0] == sizes[1]


def test_memory_is_that_of_one_microbatch():
    problem = layered_problem(4096, num_layers=8, width=64)
    loss = accumulated_loss(layered, 64)
    ours = temp_bytes(compile_for(jax.value_and_grad(loss), *problem))
    theirs = temp_bytes(compile_for(accum_jax.value_and_grad(layered, k=64), *problem))
    whole = temp_bytes(compile_for(jax.value_and_grad(layered), *problem))
    params = 4 * sum(np.size(x) for x in jax.tree.leaves(problem[0]))
    assert ours <= theirs + 1.1 * params  # the gradient, multiplied by the cotangent
    assert ours <= whole / 4


def test_chosen_way():
    problem = layered_problem(8)
    assert uses_in_place(jax.grad(accumulated_loss(layered, 4)), *problem)
    assert uses_in_place(jax.jit(jax.grad(jax.jit(accumulated_loss(layered, 4)))), *problem)
    for options in (dict(in_place=False), dict(nonfinite="skip"), dict(stats="norms")):
        has_aux = "stats" in options
        grad = jax.grad(accumulated_loss(layered, 4, **options), has_aux=has_aux)
        assert not uses_in_place(grad, *problem)
