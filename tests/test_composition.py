"""`accumulate` together with the rest of JAX, Optax and Equinox."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counted, assert_same, linear, mse, mse_problem, train_step

from accum_jax import accumulate, thread

# Another order of summing a dozen float32 rows.
_CLOSE = dict(rtol=1e-5, atol=1e-6)


def _whole_and_accumulated(run, grad_fn, *args, k=2, **options):
    return run(accumulate(grad_fn, k, **options))(*args), grad_fn(*args)


# jax.grad and jax.value_and_grad


def _loss_and_aux(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    error = hidden @ params["w2"] + params["b2"] - batch["y"]
    return jnp.mean(jnp.square(error)), {"error": error, "size": jnp.mean(jnp.abs(error))}


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad])
def test_gradients(run, transform):
    pair = _whole_and_accumulated(run, transform(mse), *mse_problem(12), k=3)
    assert_same(*pair, **_CLOSE)


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad])
def test_auxiliary_outputs(run, transform):
    aux = {"error": "concat", "size": "mean"}
    reduce = ("mean", aux) if transform is jax.grad else (("mean", aux), "mean")
    assert_same(
        *_whole_and_accumulated(
            run, transform(_loss_and_aux, has_aux=True), *mse_problem(12), k=3, reduce=reduce
        ),
        **_CLOSE,
    )


def test_gradients_of_several_arguments(run):
    def loss(layer, batch, scale):
        return jnp.mean(layer["w"] * batch * scale) + layer["b"]

    args = {"w": jnp.float32(2), "b": jnp.float32(1)}, jnp.arange(4.0), jnp.float32(3)
    grad_fn = jax.value_and_grad(loss, argnums=(0, 2))
    assert_same(*_whole_and_accumulated(run, grad_fn, *args))


def test_forward_mode_and_plain_functions(run):
    assert_same(*_whole_and_accumulated(run, mse, *mse_problem(8)), **_CLOSE)
    assert_same(*_whole_and_accumulated(run, jax.jacfwd(mse), *mse_problem(8)), **_CLOSE)


def test_hessians(run):
    args = jnp.array([1.0, 2.0]), jnp.arange(8.0).reshape(4, 2)
    hessian = jax.hessian(lambda w, x: jnp.mean(jnp.square(jnp.square(x @ w))))
    assert_same(*_whole_and_accumulated(run, hessian, *args), rtol=1e-6)


def test_jitted_functions(run):
    pair = _whole_and_accumulated(run, jax.jit(jax.grad(mse)), *mse_problem(8))
    assert_same(*pair, **_CLOSE)


def test_checkpoint_inside_the_loss(run):
    grad_fn = jax.value_and_grad(jax.checkpoint(mse))
    assert_same(*_whole_and_accumulated(run, grad_fn, *mse_problem(8), k=4), **_CLOSE)


def test_scan_and_cond_inside_the_loss(run):
    def loss(w, batch):
        def layer(h, _):
            return jnp.tanh(h * w), None

        h, _ = jax.lax.scan(layer, batch, None, length=3)
        return jax.lax.cond(w > 0, jnp.mean, jnp.sum, h)

    args = jnp.float32(0.5), jnp.arange(4.0)
    assert_same(*_whole_and_accumulated(run, jax.grad(loss), *args), **_CLOSE)


def test_custom_derivatives_inside_the_loss(run):
    """The rule is used as it stands, also where it is no true derivative."""

    @jax.custom_vjp
    def double_backward(x):
        return x

    double_backward.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))

    def loss(w, batch):
        return jnp.mean(jax.nn.relu(double_backward(w) * batch))

    args = jnp.float32(3), jnp.array([1.0, -2.0, 3.0, 4.0])
    assert_same(run(accumulate(jax.grad(loss), 2))(*args), jnp.float32(4))


# Transformations of the accumulated function


def test_vmap_over_tasks(run):
    problems = [mse_problem(6, seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)
    grad_fn = jax.value_and_grad(mse)
    actual = run(jax.vmap(accumulate(grad_fn, 3)))(*stacked)
    assert_same(actual, jax.vmap(grad_fn)(*stacked), **_CLOSE)


def test_vmap_over_parameters_with_every_option(run):
    """Weights, skips, state and keys differ from task to task."""

    def fn(w, batch, key, state):
        return jnp.mean(w * batch + jax.random.uniform(key)), state + 1

    accumulated = accumulate(
        fn,
        2,
        key_argnums=2,
        reduce=("mean", thread(3)),
        weight=lambda x: jnp.sum(x > 0),
        nonfinite="skip",
        stats="counts",
    )
    w = jnp.array([1.0, np.nan, 3.0])
    batch = jnp.array([1.0, 2.0, -1.0, 4.0])
    keys = jax.random.split(jax.random.key(0), 3)
    state = jnp.int32(0)
    actual = run(jax.vmap(accumulated, in_axes=(0, None, 0, None)))(w, batch, keys, state)
    singles = [accumulated(w[i], batch, keys[i], state) for i in range(3)]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *singles)
    assert_same(actual, expected, rtol=1e-6)


def test_jit_inside_and_outside_agree():
    problem = mse_problem(8)
    inside = accumulate(jax.jit(jax.grad(mse)), 4)(*problem)
    outside = jax.jit(accumulate(jax.grad(mse), 4))(*problem)
    assert_same(inside, outside, **_CLOSE)


@pytest.mark.parametrize("remainder", ["error", "tail"])
def test_accumulated_losses_can_be_differentiated(run, remainder):
    problem = mse_problem(9)
    accumulated = accumulate(mse, 3 if remainder == "error" else 2, remainder=remainder)
    actual = run(jax.value_and_grad(accumulated))(*problem)
    assert_same(actual, jax.value_and_grad(mse)(*problem), **_CLOSE)


def test_accumulated_gradients_can_be_differentiated(run):
    """A step of gradient descent inside a loss, as in meta-learning."""

    def outer(grad_fn, w, batch):
        return mse(jax.tree.map(lambda p, g: p - 0.1 * g, w, grad_fn(w, batch)), batch)

    params, batch = mse_problem(8)
    actual = run(jax.grad(lambda w: outer(accumulate(jax.grad(mse), 2), w, batch)))(params)
    expected = jax.grad(lambda w: outer(jax.grad(mse), w, batch))(params)
    assert_same(actual, expected, rtol=1e-4, atol=1e-5)  # Second derivatives: more roundings.


@pytest.mark.parametrize(("rows", "expected"), [([[1, 3], [0, 0]], 2), ([[0, 0], [0, 0]], 0)])
def test_derivatives_of_weighted_and_skipped_means_are_finite(run, rows, expected):
    """The division by a total weight of zero must not leak into the derivative."""
    accumulated = accumulate(
        linear, stacked=True, weight=lambda x: jnp.sum(x > 0), nonfinite="skip"
    )
    derivative = run(jax.grad(accumulated))(jnp.float32(1), jnp.array(rows, jnp.float32))
    assert_same(derivative, jnp.float32(expected))


def test_forward_mode_through_the_accumulated_function(run):
    args = jnp.float32(2), jnp.arange(4.0)
    accumulated = accumulate(lambda w, x: jnp.mean(jnp.square(w * x)), 2)
    primal, tangent = run(lambda *args: jax.jvp(accumulated, args, (jnp.float32(1), *args[1:])))(
        *args
    )
    assert_same(primal, jnp.float32(14))
    # d/dw of w²·3.5 is 14; d/dx along x itself is 2·14.
    assert_same(tangent, jnp.float32(14 + 28))


# Optax


def _train(tx, grad_fn, params, batches):
    step = train_step(tx, grad_fn)
    state = tx.init(params)
    for batch in batches:
        params, state = step(params, state, batch)
    return params, state


_OPTIMIZERS = {
    "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)),
    "decay": optax.adamw(0.01, weight_decay=0.1),
    "schedule": optax.sgd(optax.linear_schedule(0.1, 0.0, 3), momentum=0.9),
    "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=2),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_training_equals_that_on_whole_batches(name):
    tx = _OPTIMIZERS[name]
    params, batch = mse_problem(8)
    batches = [batch, mse_problem(8, seed=1)[1]]
    actual = _train(tx, accumulate(jax.grad(mse), 4), params, batches)
    expected = _train(tx, jax.grad(mse), params, batches)
    # Adaptive optimizers divide by the gradient's size and so magnify its rounding.
    assert_same(actual, expected, rtol=1e-3, atol=1e-5)


def test_clipping_sees_the_mean_once():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    grad_fn = accumulate(jax.grad(lambda w, x: jnp.mean(x @ w)), 2)
    rows = jnp.array([[6.0, 0.0], [0.0, 8.0]])  # Mean (3, 4), of norm 5.
    params, _ = _train(tx, grad_fn, jnp.zeros(2), [rows])
    assert_same(params, jnp.array([-0.6, -0.8]), rtol=1e-6)


def test_multi_steps_outside():
    """k1 = 2 microbatches a call, k2 = 3 calls an update: one update per six microbatches."""
    tx = optax.MultiSteps(optax.adam(0.1), 3)
    rows = jnp.arange(24.0)
    params, state = _train(tx, accumulate(jax.grad(linear), 2), jnp.float32(0), jnp.split(rows, 6))
    assert state.gradient_step == 2
    assert state.mini_step == 0
    assert optax.tree.get(state.inner_opt_state, "count") == 2
    expected, _ = _train(optax.adam(0.1), jax.grad(linear), jnp.float32(0), [rows[:12], rows[12:]])
    assert_same(params, expected, rtol=1e-6)  # A running mean is rounded otherwise.


# Parameters


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_parameters(run, dtype):
    params, batch = mse_problem(8, dtype=dtype)
    actual = run(accumulate(jax.value_and_grad(mse), 4))(params, batch)
    expected = jax.value_and_grad(mse)(
        *jax.tree.map(lambda x: x.astype(jnp.float32), (params, batch))
    )
    # Microbatch gradients come in the parameters' dtype: 8 bits of significand in bfloat16,
    # over a forward and backward pass of a dozen operations.
    tolerance = 16 * float(jnp.finfo(dtype).eps)
    narrow = jax.tree.map(lambda x: x.astype(dtype), expected)
    assert_same(actual, narrow, rtol=tolerance, atol=tolerance)


def test_mixed_dtypes(run):
    params = {"low": jnp.bfloat16(2), "high": jnp.float32(3)}

    def loss(params, x):
        return (
            jnp.mean((params["low"] * x.astype(jnp.bfloat16)).astype(jnp.float32))
            * (params["high"])
        )

    actual = run(accumulate(jax.grad(loss), 2))(params, jnp.array([1.0, 2.0, 3.0, 2.0]))
    assert_same(actual, {"low": jnp.bfloat16(6), "high": jnp.float32(4)})


def test_complex_parameters(run):
    def loss(w, z):
        return jnp.mean(jnp.square(jnp.abs(w * z - 1)))

    args = jnp.asarray(1 + 2j, jnp.complex64), jnp.array([1 + 1j, 2, -1j, 3 - 1j], jnp.complex64)
    pair = _whole_and_accumulated(run, jax.value_and_grad(loss), *args)
    assert_same(*pair, rtol=1e-6)


class _Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None
    activation: object
    name: str = eqx.field(static=True)
    width: int = 4

    def __call__(self, x):
        assert isinstance(self.width, int)
        return self.activation(x @ self.weight)


def test_equinox_modules_with_static_leaves():
    """Leaves that are no arrays are neither traced nor lost."""
    params, batch = mse_problem(8)
    model = _Layer(params["w1"][:, 0], None, jax.nn.tanh, "layer")

    def loss(model, batch):
        assert model.name == "layer"
        return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))

    grad_fn = eqx.filter_value_and_grad(loss)
    value, grads = accumulate(grad_fn, 4)(model, batch)
    expected_value, expected_grads = grad_fn(model, batch)
    assert_same(value, expected_value, **_CLOSE)
    assert isinstance(grads, _Layer)
    assert grads.bias is None
    assert grads.activation is None
    assert_same(grads, expected_grads, **_CLOSE)
    _, under_jit = eqx.filter_jit(accumulate(grad_fn, 4))(model, batch)
    assert_same(under_jit, expected_grads, **_CLOSE)


def test_equinox_networks():
    model = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0))
    _, batch = mse_problem(8)

    @eqx.filter_value_and_grad
    def grad_fn(model, batch):
        return jnp.mean(jnp.square(jax.vmap(model)(batch["x"]) - batch["y"]))

    calls = Counted(grad_fn)
    accumulated = accumulate(calls, 4)
    actual = accumulated(model, batch)
    assert_same(actual, grad_fn(model, batch), **_CLOSE)
    traced = calls.calls
    accumulated(model, batch)
    assert calls.calls == traced <= 2


def test_empty_subtrees_and_none(run):
    params = {"w": jnp.float32(2), "none": None, "empty": {}, "tuple": (), "list": [None]}

    def loss(params, batch):
        assert params["none"] is None
        assert params["list"] == [None]
        return linear(params["w"], batch)

    actual = run(accumulate(jax.grad(loss), 2))(params, jnp.array([1.0, 2.0, 3.0, 6.0]))
    assert_same(actual, dict(params, w=jnp.float32(3)))


def test_parameters_without_leaves(run):
    value, grads = run(accumulate(jax.value_and_grad(lambda p, x: jnp.mean(x)), 2))(
        {}, jnp.arange(4.0)
    )
    assert_same(value, jnp.float32(1.5))
    assert grads == {}


@pytest.mark.parametrize("w", [2.0, jnp.float32(2), np.float32(2)], ids=["python", "jax", "numpy"])
def test_scalar_parameters(w):
    value, grad = accumulate(jax.value_and_grad(linear), 2)(w, jnp.array([1.0, 2.0, 3.0, 6.0]))
    assert_same((jnp.float32(value), jnp.float32(grad)), (jnp.float32(6), jnp.float32(3)))
    assert (value.shape, grad.shape) == ((), ())


def test_batch_leaves_of_different_rank(run):
    batch = {
        "image": jnp.arange(4 * 2 * 2 * 3.0).reshape(4, 2, 2, 3),
        "tokens": jnp.arange(12).reshape(4, 3),
        "label": jnp.arange(4),
        "weight": jnp.arange(4.0),
    }

    def loss(w, batch):
        per_row = jnp.sum(batch["image"], axis=(1, 2, 3)) * batch["weight"]
        return jnp.mean(
            w * (per_row + (jnp.sum(batch["tokens"], 1) * batch["label"]).astype(float))
        )

    pair = _whole_and_accumulated(run, jax.value_and_grad(loss), jnp.float32(1), batch)
    assert_same(*pair)
