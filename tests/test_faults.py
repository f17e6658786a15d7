"""Known faults of gradient accumulation, each by name with the smallest case that shows it.

Unless said otherwise the parameter is a scalar w = 0, the gradient of microbatch i is g_i, and
the optimizer is plain sgd without clipping: Adam hides factors.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counted, assert_same, compile_for, linear, raising, temp_bytes, train_step

from accum_jax import accumulate, thread

NAN = float("nan")


def _token_loss(w, batch):
    """Mean over the tokens that count; the gradient of a token is its ``g``."""
    return jnp.sum(w * batch["g"] * batch["mask"]) / jnp.sum(batch["mask"])


def _num_tokens(batch):
    return jnp.sum(batch["mask"])


# Normalisation


def test_fault_mean_of_means(run):
    """Microbatches of different lengths: Σ/Σ, not the mean of their means."""
    fn = run(accumulate(jax.grad(_token_loss), stacked=True, weight=_num_tokens))
    one_and_three = {
        "g": jnp.array([[6.0, 9, 9], [2, 2, 2]]),
        "mask": jnp.array([[1.0, 0, 0], [1, 1, 1]]),
    }
    two_and_two = {
        "g": jnp.array([[6.0, 2, 9], [2, 2, 9]]),
        "mask": jnp.array([[1.0, 1, 0], [1, 1, 0]]),
    }
    for batch in (one_and_three, two_and_two):
        assert_same(fn(jnp.float32(0), batch), jnp.float32(3))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_fault_factor_k(run, k):
    def loss(w, batch):
        return jnp.mean((w + 2.5) * batch)

    actual = run(accumulate(jax.value_and_grad(loss), k))(jnp.float32(0), jnp.ones(4))
    assert_same(actual, (jnp.float32(2.5), jnp.float32(1)))


@pytest.mark.parametrize("k", [1, 4])
def test_fault_second_loss_path(run, k):
    """Label smoothing goes through the same mean as everything else."""

    def loss(w, batch):
        logits = jnp.stack([jnp.full(batch.shape, w), jnp.zeros(batch.shape)], axis=-1)
        labels = jnp.array([0.95, 0.05])
        return jnp.mean(optax.softmax_cross_entropy(logits, labels))

    actual = run(accumulate(jax.grad(loss), k))(jnp.float32(0), jnp.ones(4))
    assert_same(actual, jnp.float32(-0.45), rtol=1e-6)  # 0.5 − 0.95 in float32.


def test_fault_double_division(run):
    """A loss that is already divided by the window's count is summed, not averaged."""
    batch = jnp.array([1.0, 2.0, 3.0, 6.0])

    def loss(w, rows, count):
        return jnp.sum(w * rows) / count

    actual = run(accumulate(jax.grad(loss), 4, reduce="sum"))(jnp.float32(0), batch, jnp.float32(4))
    assert_same(actual, jnp.float32(3))


@pytest.mark.parametrize("stacked", [False, True])
def test_fault_two_denominators(run, stacked):
    """Two terms with counts of their own: denominators first, then plain sums."""
    batch = {"main": jnp.full(4, 2.0), "aux": jnp.full(4, 2.0), "mask": jnp.array([1.0, 1, 1, 0])}

    def loss(batch, counts):
        main = jnp.sum(batch["main"]) / counts["main"]
        return main + 0.5 * jnp.sum(batch["aux"] * batch["mask"]) / counts["aux"]

    counts = {"main": jnp.float32(4), "aux": jnp.sum(batch["mask"])}
    if stacked:  # Microbatches of 2+1 and 2+2 positions.
        batch = jax.tree.map(lambda x: x.reshape(2, 2), batch)
    size = dict(stacked=True) if stacked else dict(k=1)
    accumulated = accumulate(loss, batch_argnums=0, reduce="sum", **size)
    assert_same(run(accumulated)(batch, counts), jnp.float32(3), rtol=1e-6)  # Thirds are rounded.


def test_fault_sum_vs_mean():
    tx = optax.sgd(0.1)
    step = train_step(tx, accumulate(jax.grad(linear), 4))
    w, _ = step(jnp.float32(0), tx.init(jnp.float32(0)), jnp.ones(4))
    assert_same(w, jnp.float32(-0.1))


def test_fault_logged_loss(run):
    losses = jnp.array([[4.0], [2.0], [6.0], [8.0]])
    fn = run(accumulate(lambda _, x: jnp.mean(x), stacked=True))
    assert_same(fn(None, losses), jnp.float32(5))
    batch = {"loss": jnp.array([[4.0], [2.0]]), "weight": jnp.array([[1.0], [3.0]])}
    weighted = accumulate(
        lambda _, b: jnp.mean(b["loss"]), stacked=True, weight=lambda b: jnp.sum(b["weight"])
    )
    assert_same(run(weighted)(None, batch), jnp.float32(2.5))


def test_fault_per_example_aux(run):
    """Losses of single rows come back in the caller's order, not added up across microbatches."""
    losses = jnp.array([1.0, 2.0, 3.0, 4.0])
    fn = accumulate(lambda _, x: (jnp.mean(x), x), 2, reduce=("mean", "concat"))
    assert_same(run(fn)(None, losses), (jnp.float32(2.5), losses))


# The tail


def test_fault_short_tail_divisor():
    """Five rows in microbatches of one, four to an update: the last update has one row."""
    tx = optax.sgd(1.0)
    step = train_step(tx, accumulate(jax.grad(linear), microbatch_size=1))
    w = jnp.float32(0)
    state = tx.init(w)
    for batch in (jnp.ones(4), jnp.ones(1)):
        w, state = step(w, state, batch)
    assert_same(w, jnp.float32(-2))


def test_fault_short_tail_divisor_within_a_call(run):
    """One of the usual eight rows is left for the short microbatch: still a mean over rows."""
    accumulated = run(accumulate(jax.grad(linear), microbatch_size=8, remainder="tail"))
    assert_same(accumulated(jnp.float32(0), jnp.ones(17)), jnp.float32(1))
    rows = jnp.zeros(9).at[8].set(9.0)
    assert_same(accumulated(jnp.float32(0), rows), jnp.float32(1))


def test_fault_dropped_tail():
    with raising(ValueError, "k=4", "6", "remainder"):
        accumulate(jax.grad(linear), 4)(jnp.float32(0), jnp.ones(6))
    actual = accumulate(jax.grad(linear), 4, remainder="tail")(
        jnp.float32(0), jnp.array([0.0, 0, 0, 0, 0, 6])
    )
    assert_same(actual, jnp.float32(1))


# State and cadence


def test_fault_cleared_buffer(run):
    actual = run(accumulate(jax.grad(linear), 3))(jnp.float32(0), jnp.array([1.0, 2.0, 6.0]))
    assert_same(actual, jnp.float32(3))


def test_fault_doubling(run):
    """b = 2b + g over four ones gives 15."""
    actual = run(accumulate(jax.grad(linear), 4, reduce="sum"))(jnp.float32(0), jnp.ones(4))
    assert_same(actual, jnp.float32(4))


def test_fault_per_microbatch_decay():
    tx = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))
    step = train_step(tx, accumulate(jax.grad(linear), 3))
    w, _ = step(jnp.float32(1), tx.init(jnp.float32(1)), jnp.zeros(3))
    assert_same(w, jnp.float32(0.99))

    adam = optax.adam(0.1)
    step = train_step(adam, accumulate(jax.grad(linear), 3))
    _, state = step(jnp.float32(1), adam.init(jnp.float32(1)), jnp.zeros(3))
    assert optax.tree.get(state, "count") == 1


def test_fault_schedule_unit():
    tx = optax.sgd(lambda count: 1 / (1 + count))
    step = train_step(tx, accumulate(jax.grad(linear), 3))
    w = jnp.float32(0)
    state = tx.init(w)
    for _ in range(2):
        w, state = step(w, state, jnp.ones(3))
    assert_same(w, jnp.float32(-1.5))


def test_fault_inner_before_outer():
    """Everything in the optimizer runs once an update."""
    counter = optax.GradientTransformation(
        lambda params: jnp.int32(0), lambda updates, state, params=None: (updates, state + 1)
    )
    tx = optax.chain(counter, optax.sgd(1.0))
    step = train_step(tx, accumulate(jax.grad(linear), 5))
    w = jnp.float32(0)
    state = tx.init(w)
    for _ in range(2):
        w, state = step(w, state, jnp.ones(5))
    assert state[0] == 2
    assert_same(w, jnp.float32(-2))


def test_fault_clip_per_microbatch():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    grad_fn = jax.grad(lambda w, batch: jnp.mean(batch @ w))
    step = train_step(tx, accumulate(grad_fn, 2))
    params = jnp.zeros(2)
    w, _ = step(params, tx.init(params), jnp.array([[2.0, 0.0], [0.0, 2.0]]))
    assert_same(w, jnp.full(2, -np.sqrt(0.5), jnp.float32), rtol=1e-6)


def test_fault_batch_norm(run):
    """Running statistics move once a microbatch, in order, where that is asked for."""

    def fn(_, batch, mean):
        return jnp.mean(batch), 0.9 * mean + 0.1 * jnp.mean(batch)

    batch = jnp.array([[0.0, 0.0], [2.0, 2.0]])
    accumulated = accumulate(fn, stacked=True, reduce=("mean", thread(2)))
    assert_same(
        run(accumulated)(None, batch, jnp.float32(0)),
        (jnp.float32(1), jnp.float32(0.2)),
        rtol=1e-6,  # 0.1 is rounded.
    )


# Numerics


def test_fault_unscale():
    """Scaled gradients are unscaled once, wide, after the mean and before the clip."""

    def scaled_loss(w, batch):
        return 1024 * jnp.mean(w * batch)

    tx = optax.chain(optax.scale(1 / 1024), optax.clip_by_global_norm(10.0), optax.sgd(1.0))
    step = train_step(tx, accumulate(jax.grad(scaled_loss), 2))
    w, _ = step(jnp.float32(0), tx.init(jnp.float32(0)), jnp.array([3.0, 5.0]))
    assert_same(w, jnp.float32(-4))


def test_fault_wide_sum_overflows_again(run):
    """Two microbatches of 2.5 * 2^15 / 2 in float16: their sum fits only unrounded."""
    batch = jnp.full((4,), 1.25 * 2**14, jnp.float16)
    grad_fn = jax.grad(lambda w, x: jnp.sum(w * x))
    args = jnp.float16(0), batch
    narrow = run(accumulate(grad_fn, 4, reduce="sum"))(*args)
    assert np.isinf(narrow)
    wide = run(accumulate(grad_fn, 4, reduce="sum", output_dtype="accumulator"))(*args)
    assert_same(wide, jnp.float32(2.5 * 2**15))


def test_fault_nonfinite_policy(run):
    batch = jnp.array([1.0, NAN, 4.0])
    skipping = accumulate(jax.grad(linear), 3, nonfinite="skip", stats="counts")
    grad, stats = run(skipping)(jnp.float32(0), batch)
    assert_same(grad, jnp.float32(2.5))
    assert stats.num_nonfinite == 1
    propagating = run(accumulate(jax.grad(linear), 3))(jnp.float32(0), batch)
    assert np.isnan(propagating)


def test_fault_nan_reset():
    """A bad window leaves nothing behind."""
    tx = optax.chain(optax.zero_nans(), optax.sgd(1.0))
    step = train_step(tx, accumulate(jax.grad(linear), 2))
    w = jnp.float32(0)
    state, seen = tx.init(w), []
    for batch in ([NAN, 1], [2, 2], [2, 2]):
        w, state = step(w, state, jnp.array(batch, jnp.float32))
        seen.append(float(w))
    assert seen == [0, -2, -4]


def test_fault_stagnation(run):
    fn = accumulate(lambda _, x: jnp.mean(x), 512)
    assert_same(run(fn)(None, jnp.ones(512, jnp.bfloat16)), jnp.bfloat16(1))
    wide = accumulate(lambda _, x: jnp.mean(x), 512, output_dtype="accumulator")
    values = jnp.full(512, 3, jnp.bfloat16).at[0].set(1)
    assert_same(run(wide)(None, values), jnp.float32(2.99609375))


@pytest.mark.parametrize(
    "tx", [optax.adafactor(0.1), optax.adam(0.1, mu_dtype=jnp.float32)], ids=["adafactor", "adam"]
)
def test_fault_dtype_parity(tx):
    """Accumulated gradients give updates of the dtypes that whole-batch gradients give."""
    params = {"w": jnp.ones((4, 4), jnp.bfloat16), "b": jnp.ones(4, jnp.float32)}
    batch = jnp.ones((4, 4), jnp.bfloat16)

    def loss(p, x):
        return jnp.mean((x @ p["w"]).astype(jnp.float32) + p["b"])

    results = []
    for grad_fn in (jax.grad(loss), accumulate(jax.grad(loss), 2)):
        counted = Counted(grad_fn)
        step = train_step(tx, counted)
        result = step(*step(params, tx.init(params), batch), batch)
        assert counted.calls == 1
        results.append(jax.eval_shape(lambda result: result, result))
    assert results[0] == results[1]


def test_fault_carry_dtype():
    params = {"w": jnp.zeros((2, 2), jnp.bfloat16), "b": jnp.zeros(2, jnp.bfloat16)}
    grad_fn = jax.grad(lambda p, x: jnp.mean(x @ p["w"] + p["b"]))
    accumulated = accumulate(grad_fn, 2, output_dtype="accumulator")
    shapes = jax.eval_shape(accumulated, params, jnp.ones((4, 2), jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("k", [1, 2, 4])
def test_fault_bfloat16_parameters(k):
    tx = optax.sgd(0.01)
    x = jnp.array([1.0, 2.0, 3.0, 4.0], jnp.bfloat16)

    def loss(w, batch):
        return jnp.mean(jnp.square(w * batch["x"] - batch["y"]))

    batch = {"x": x, "y": 2 * x}
    grad = accumulate(jax.grad(loss), k)(jnp.bfloat16(0), batch)
    assert_same(grad, jnp.bfloat16(-30))
    w, _ = train_step(tx, accumulate(jax.grad(loss), k))(
        jnp.bfloat16(0), tx.init(jnp.bfloat16(0)), batch
    )
    assert_same(w, jnp.bfloat16(0.30078125))


def test_fault_fixed_cost():
    """The accumulator is one float32 copy of the parameters, whatever k."""
    params = jnp.zeros(65536)

    def temp(k):
        fn = accumulate(jax.grad(lambda w, x: jnp.mean(w * x[:, None])), k)
        return temp_bytes(compile_for(fn, params, jnp.ones(k)))

    assert temp(2) == pytest.approx(temp(4), rel=0.01)


# Rows and keys


def test_fault_split(run):
    """Rows 0..7, two on each of four devices: a microbatch has one row of each device."""
    microbatches = run(accumulate(lambda _, x: x, 2, reduce="stack"))(None, jnp.arange(8))
    assert_same(microbatches, jnp.array([[0, 2, 4, 6], [1, 3, 5, 7]]))


def test_fault_aligned_leaves(run):
    """Leaves of one batch stay together; tables as long as the batch are passed by declaration."""
    x = jnp.arange(8)
    batch = {"x": x, "y": 10 * x, "nested": {"z": jnp.stack([x, x], axis=1)}}

    def fn(_, batch, table):
        aligned = jnp.all(batch["y"] == 10 * batch["x"])
        aligned &= jnp.all(batch["nested"]["z"] == batch["x"][:, None])
        return aligned & (table.shape == (8,))

    for options in (dict(k=2), dict(k=4), dict(k=3, remainder="tail")):
        actual = run(accumulate(fn, reduce="min", **options))(None, batch, x)
        assert_same(actual, jnp.bool_(True))


def test_fault_masks(run):
    """Every microbatch draws its own dropout mask, the same one whenever the key is the same."""

    def masks(_, batch, key):
        return jax.random.bernoulli(key, 0.5, (16,))

    fn = run(accumulate(masks, 4, key_argnums=2, reduce="stack"))
    key = jax.random.key(0)
    actual = fn(None, jnp.zeros(4), key)
    assert len(np.unique(actual, axis=0)) == 4
    assert_same(fn(None, jnp.zeros(4), key), actual)
    expected = [masks(None, None, jax.random.fold_in(key, i)) for i in range(4)]
    assert_same(actual, jnp.stack(expected))
    single = run(accumulate(masks, 1, key_argnums=2, reduce="stack"))(None, jnp.zeros(4), key)
    assert_same(single, actual[:1])
