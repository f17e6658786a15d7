from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, linear, mse, mse_problem, raising

from accum_jax import AccumulationStats, accumulate

NAN = float("nan")


def _loss(params, batch):
    return jnp.mean(jnp.sum(params["w"] * batch, axis=-1)) + 0 * jnp.sum(params["b"])


_PARAMS = {"w": jnp.zeros(2), "b": jnp.zeros(())}


def _counts(stats):
    return [
        float(x)
        for x in (
            stats.num_microbatches,
            stats.num_examples,
            stats.total_weight,
            stats.num_nonfinite,
        )
    ]


# Counts


@pytest.mark.parametrize("kind", ["counts", "norms"])
def test_output_is_that_without_stats(run, kind):
    problem = mse_problem(8)
    plain = run(accumulate(jax.value_and_grad(mse), 4))(*problem)
    out, stats = run(accumulate(jax.value_and_grad(mse), 4, stats=kind))(*problem)
    assert isinstance(stats, AccumulationStats)
    assert_same(out, plain, rtol=1e-6)  # Fused differently, rounded differently.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(k=1), [1, 10, 10, 0]),
        (dict(k=5), [5, 10, 10, 0]),
        (dict(microbatch_size=4, remainder="tail"), [3, 10, 10, 0]),
        (dict(k=6, remainder="tail"), [5, 10, 10, 0]),
        (dict(k=5, weight=lambda batch: jnp.sum(batch)), [5, 10, 45, 0]),
        (dict(k=5, num_real_microbatches=2), [2, 4, 4, 0]),
        (dict(k=5, num_real_microbatches=0), [0, 0, 0, 0]),
    ],
    ids=["one", "five", "tail", "unused", "weight", "real", "none real"],
)
def test_counts(run, options, expected):
    accumulated = accumulate(jax.grad(linear), stats="counts", **options)
    _, stats = run(accumulated)(jnp.float32(1), jnp.arange(10.0))
    assert _counts(stats) == expected


def test_counts_of_stacked_microbatches(run):
    accumulated = accumulate(jax.grad(linear), stacked=True, stats="counts")
    _, stats = run(accumulated)(jnp.float32(1), jnp.ones((3, 5)))
    assert _counts(stats) == [3, 15, 15, 0]


def test_counts_are_integers_and_weights_floats():
    accumulated = accumulate(jax.grad(linear), 2, stats="counts")
    _, stats = jax.eval_shape(accumulated, jnp.float32(1), jnp.ones(4))
    for count in (stats.num_microbatches, stats.num_examples, stats.num_nonfinite):
        assert count.shape == ()
        assert jnp.issubdtype(count.dtype, jnp.integer)
    assert stats.total_weight.shape == ()
    assert stats.total_weight.dtype == jnp.float32


def test_skipped_microbatches_ran_and_have_no_weight(run):
    batch = jnp.array([[1.0, 3.0], [NAN, 0.0], [5.0, 7.0], [np.inf, 0.0]])
    accumulated = accumulate(jax.grad(linear), stacked=True, nonfinite="skip", stats="counts")
    out, stats = run(accumulated)(jnp.float32(1), batch)
    assert_same(out, jnp.float32(4))
    assert _counts(stats) == [4, 8, 4, 2]


def test_propagated_microbatches_are_counted(run):
    batch = jnp.array([[1.0, 3.0], [NAN, 0.0], [5.0, 7.0], [np.inf, 0.0]])
    out, stats = run(accumulate(jax.grad(linear), stacked=True, stats="counts"))(
        jnp.float32(1), batch
    )
    assert np.isnan(out)
    assert _counts(stats) == [4, 8, 8, 2]


def test_stats_pass_through_transformations():
    accumulated = accumulate(jax.grad(_loss), 2, stats="norms")
    batch = jnp.arange(8.0).reshape(4, 2)
    _, stats = accumulated(_PARAMS, batch)
    assert_same(jax.tree.unflatten(jax.tree.structure(stats), jax.tree.leaves(stats)), stats)
    _, batched = jax.vmap(accumulated, in_axes=(None, 0))(_PARAMS, jnp.stack([batch, batch]))
    assert_same(batched.num_microbatches, jnp.stack([stats.num_microbatches] * 2))


# Norms

# Microbatches of two rows: gradients (3, 4) and (1, 0), whose mean is (2, 2).
_ROWS = jnp.array([[[2.0, 4.0], [4.0, 4.0]], [[1.0, 1.0], [1.0, -1.0]]])


def test_norms_by_hand(run):
    accumulated = accumulate(jax.value_and_grad(_loss), stacked=True, stats="norms")
    _, stats = run(accumulated)(_PARAMS, _ROWS)
    np.testing.assert_allclose(stats.global_norm, np.sqrt(8), rtol=1e-6)
    np.testing.assert_allclose(stats.mean_microbatch_square_norm, 13, rtol=1e-6)
    # Unbiased, with B = 4 rows in microbatches of b = 2:
    # |G|² = (4·8 − 2·13) / (4 − 2) = 3 and tr Σ = (13 − 8) / (1/2 − 1/4) = 20.
    np.testing.assert_allclose(stats.noise_scale, 20 / 3, rtol=1e-6)


def test_norms_are_those_of_optax():
    problem = mse_problem(12)
    grads, stats = accumulate(jax.grad(mse), 3, stats="norms")(*problem)
    np.testing.assert_allclose(stats.global_norm, optax.tree.norm(grads), rtol=1e-6)
    parts = [
        jax.grad(mse)(problem[0], jax.tree.map(lambda x, i=i: x[i::3], problem[1]))
        for i in range(3)
    ]
    squares = [float(optax.tree.norm(part)) ** 2 for part in parts]
    np.testing.assert_allclose(stats.mean_microbatch_square_norm, np.mean(squares), rtol=1e-5)


def test_noise_scale_is_in_examples_whatever_k():
    """Rows drawn with mean (1, 0) and covariance diag(4, 4) have noise scale 8."""
    rng = np.random.default_rng(0)
    noise = jnp.asarray(rng.normal([1.0, 0.0], 2.0, size=(65536, 2)), jnp.float32)
    for k in (256, 1024):
        _, stats = accumulate(jax.grad(_loss), k, stats="norms")(_PARAMS, noise)
        # The relative error of a variance from k samples in two dimensions is about sqrt(1/k).
        np.testing.assert_allclose(stats.noise_scale, 8, rtol=4 / np.sqrt(k))


@pytest.mark.parametrize("reducer", ["sum", "sum_over_weight"])
def test_noise_scale_of_a_loss_that_is_a_sum_is_that_of_its_mean(run, reducer):
    params, batch = mse_problem(12)

    def total(params, batch):
        return mse(params, batch) * len(batch["x"])

    def norms_of(loss, **options):
        fn = accumulate(jax.value_and_grad(loss), 4, stats="norms", **options)
        return run(fn)(params, batch)[1]

    mean = norms_of(mse)
    summed = norms_of(total, reduce=reducer, weight=lambda batch: len(batch["x"]))
    rows = 12 if reducer == "sum" else 1
    np.testing.assert_allclose(summed.global_norm, rows * mean.global_norm, rtol=1e-5)
    for name in ("mean_microbatch_square_norm", "noise_scale"):
        np.testing.assert_allclose(getattr(summed, name), getattr(mean, name), rtol=1e-4)


def test_noise_scale_of_one_microbatch_is_nan(run):
    _, stats = run(accumulate(jax.grad(_loss), 1, stats="norms"))(_PARAMS, _ROWS[0])
    assert np.isnan(stats.noise_scale)
    np.testing.assert_allclose(stats.global_norm, 5, rtol=1e-6)
    np.testing.assert_allclose(stats.mean_microbatch_square_norm, 25, rtol=1e-6)


def test_noise_scale_is_nan_where_only_one_ran(run):
    rows = jnp.concatenate([_ROWS[:1], jnp.full((1, 2, 2), NAN)])
    accumulated = accumulate(jax.grad(_loss), stacked=True, stats="norms", num_real_microbatches=1)
    _, stats = run(accumulated)(_PARAMS, rows)
    assert np.isnan(stats.noise_scale)
    np.testing.assert_allclose(stats.mean_microbatch_square_norm, 25, rtol=1e-6)


def test_norms_of_skipped_microbatches_do_not_count(run):
    rows = jnp.concatenate([_ROWS, jnp.full((1, 2, 2), NAN)])
    accumulated = accumulate(jax.grad(_loss), stacked=True, stats="norms", nonfinite="skip")
    _, stats = run(accumulated)(_PARAMS, rows)
    np.testing.assert_allclose(stats.global_norm, np.sqrt(8), rtol=1e-6)
    np.testing.assert_allclose(stats.mean_microbatch_square_norm, 13, rtol=1e-6)
    np.testing.assert_allclose(stats.noise_scale, 20 / 3, rtol=1e-6)
    assert _counts(stats) == [3, 6, 4, 1]


def test_norms_of_narrow_gradients_are_wide(run):
    """300² is no float16."""
    params = {"w": jnp.zeros(1, jnp.float16)}
    accumulated = accumulate(
        jax.grad(lambda p, x: jnp.mean(p["w"] * x)), stacked=True, stats="norms"
    )
    _, stats = run(accumulated)(params, jnp.full((2, 1), 300, jnp.float16))
    assert_same(stats.global_norm, jnp.float32(300))
    assert_same(stats.mean_microbatch_square_norm, jnp.float32(90000))


def test_norms_of_complex_gradients(run):
    def grad_fn(params, batch):
        return {"w": jnp.sum(batch)[None] * params["w"]}

    params = {"w": jnp.array([3 + 4j], jnp.complex64)}
    batch = jnp.ones((2, 1), jnp.complex64)
    _, stats = run(accumulate(grad_fn, stacked=True, stats="norms"))(params, batch)
    assert_same(stats.global_norm, jnp.float32(5))


def test_norms_where_no_output_is_the_gradient():
    accumulated = accumulate(_loss, 2, stats="norms")
    with raising(ValueError, "stats", "norms"):
        accumulated(_PARAMS, jnp.ones((4, 2)))


def test_norms_where_several_outputs_could_be_the_gradient():
    def grad_fn(params, batch):
        grads = jax.grad(_loss)(params, batch)
        return grads, grads

    with raising(ValueError, "stats", "norms"):
        accumulate(grad_fn, 2, stats="norms")(_PARAMS, jnp.ones((4, 2)))
