"""`audit_step`: right steps are equivalent, and each broken one is named by its fault."""

from __future__ import annotations

import functools

import broken
import jax
import jax.numpy as jnp
import optax
import pytest
from broken import (
    K,
    by_gradient,
    clipped_each,
    clipped_sum,
    contiguous,
    mask_weight,
    mean,
    mean_of,
    strided,
    token_weight,
)

import accum_jax
from accum_jax._audit_step import audit_step

KEY = jax.random.key(3)
SGD = optax.sgd(0.125)
ADAM = optax.adam(1e-2)
ADAMW = optax.adamw(1e-2, weight_decay=0.1)
CLIP_SGD = optax.chain(optax.clip_by_global_norm(0.5), SGD)
CLIP_ADAM = optax.chain(optax.clip_by_global_norm(0.5), ADAM)
DECAY = optax.chain(optax.add_decayed_weights(0.1), SGD)
SCHEDULE = optax.sgd(lambda count: 0.1 / (1 + count))


@pytest.fixture(scope="module")
def problem():
    return broken.problem()


@pytest.fixture(scope="module")
def ragged():
    return broken.problem(num_rows=10)


def accumulated(tx, loss, keys=(), **options):
    """A step with the library."""
    options = {"k": K, **options}
    value_and_grad = accum_jax.value_and_grad(loss, **options)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        _, grads = value_and_grad(params, batch, *keys)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def micro_steps(tx, loss, cut=contiguous, **options):
    """A step that calls a wrapped optimizer with each microbatch."""

    @jax.jit
    def step(params, state, batch):
        for part in cut(batch):
            grads = jax.grad(loss)(params, part)
            updates, state = tx.update(grads, state, params, **options)
            params = optax.apply_updates(params, updates)
        return params, state

    return step


def causes(report):
    return report.verdict, report.causes


# Right steps


def right(name, params):
    """Step, loss, optimizer and options of `audit_step`."""
    if name == "by hand":
        return by_gradient(SGD, mean, mean_of), mean, SGD, {}
    if name == "strided by hand":
        return by_gradient(ADAM, mean, mean_of, cut=strided), mean, ADAM, {}
    if name == "adamw":
        return accumulated(ADAMW, mean), mean, ADAMW, {}
    if name == "clip":
        return accumulated(CLIP_ADAM, mean), mean, CLIP_ADAM, {}
    if name == "schedule":
        return accumulated(SCHEDULE, mean), mean, SCHEDULE, {}
    if name == "adafactor":
        tx = optax.adafactor(1e-2)
        return accumulated(tx, mean), mean, tx, {}
    if name == "weights":
        step = accumulated(ADAM, broken.over_tokens, weight=token_weight)
        return step, broken.over_tokens, ADAM, {"weight": token_weight}
    if name == "sum":
        return accumulated(SGD, broken.summed, reduction="sum"), broken.summed, SGD, {}
    if name == "keys":
        step = accumulated(SGD, broken.dropout, keys=(KEY,), key_argnums=2)
        return step, broken.dropout, SGD, {"key": KEY}
    if name == "multi_steps":
        tx = accum_jax.multi_steps(ADAM, K)
        return micro_steps(tx, mean), mean, ADAM, {"opt_state": tx.init(params)}
    if name == "loss scaling":
        tx = accum_jax.multi_steps(accum_jax.static_loss_scale(ADAM, 1024.0), K)

        def scaled(params, batch):
            return mean(params, batch) * 1024

        return micro_steps(tx, scaled), mean, ADAM, {"opt_state": tx.init(params)}
    if name == "optax.MultiSteps":
        tx = optax.MultiSteps(CLIP_SGD, K)
        return micro_steps(tx, mean), mean, CLIP_SGD, {"opt_state": tx.init(params)}
    if name == "window denominators":
        return balance_step(SGD), broken.balance, SGD, {}
    if name == "coupled":
        return coupled_step(ADAM), broken.balance, ADAM, {}
    raise ValueError(name)


def balance_step(tx):
    """The use of the experts by the whole window first, then a mean over microbatches."""

    @jax.jit
    def step(params, state, batch):
        gate = batch["x"] @ params["w"]
        used = jax.nn.one_hot(jnp.argmax(gate, -1), 4).mean(0)
        loss = functools.partial(broken.balance_of_window, used=used)
        grads = accum_jax.grad(loss, k=K)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def coupled_step(tx):
    """The gates of all rows first, then the loss of the whole window."""

    def gates(params, batch):
        return jax.nn.softmax(batch["x"] @ params["w"])

    def loss(params, gate, batch):
        used = jax.nn.one_hot(jnp.argmax(gate, -1), 4)
        return mean(params, batch) + 4 * jnp.sum(gate.mean(0) * used.mean(0))

    value_and_grad = accum_jax.coupled_value_and_grad(gates, loss, k=K)

    @jax.jit
    def step(params, state, batch):
        _, grads = value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


RIGHT = (
    "by hand",
    "strided by hand",
    "adamw",
    "clip",
    "schedule",
    "adafactor",
    "weights",
    "sum",
    "keys",
    "multi_steps",
    "loss scaling",
    "optax.MultiSteps",
    "window denominators",
    "coupled",
)


# Kin of others here, each a compilation or ten more.
SLOW = {
    "strided by hand",
    "schedule",
    "optax.MultiSteps",
    "loss scaling",
    "divided twice",
    "mean of means under adam",
    "last over k",
    "clip each under adam",
    "sgd each",
    "adam's count each",
    "decay each under adamw",
    "float16 under adam",
    "balance",
}


def marked(names):
    return [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in names]


@pytest.mark.parametrize("name", marked(RIGHT))
def test_right_step_is_equivalent(name, problem):
    step, loss, tx, options = right(name, problem[0])
    report = audit_step(step, loss, tx, *problem, k=K, **options)
    assert causes(report) == ("equivalent", set()), str(report)
    assert all(finding.ok for finding in report.findings)
    assert len(report.distances) == 4


def test_remainder(ragged):
    step = accumulated(ADAM, mean, remainder="tail")
    report = audit_step(step, mean, ADAM, *ragged, k=K)
    assert causes(report) == ("equivalent", set()), str(report)


def test_bfloat16_parameters():
    params, batch = broken.problem(dtype=jnp.bfloat16)
    report = audit_step(accumulated(SGD, mean), mean, SGD, params, batch, k=K)
    assert causes(report) == ("equivalent", set()), str(report)


def test_float32_accumulators_by_hand(problem):
    def combine(grads, parts):
        wide = [jax.tree.map(lambda g: g.astype(jnp.float32), g) for g in grads]
        return mean_of(wide, parts)

    report = audit_step(by_gradient(ADAM, mean, combine), mean, ADAM, *problem, k=K)
    assert causes(report) == ("equivalent", set()), str(report)


# Broken steps

BROKEN = {
    "sum": (by_gradient(SGD, mean, broken.sum_of), mean, SGD, {}, "sum_reduction"),
    "divided twice": (
        by_gradient(SGD, mean, broken.divided_twice),
        mean,
        SGD,
        {},
        "double_division",
    ),
    "mean of a sum": (accumulated(SGD, broken.summed), broken.summed, SGD, {}, "double_division"),
    "mean of means": (
        by_gradient(SGD, broken.over_tokens, mean_of),
        broken.over_tokens,
        SGD,
        {"weight": token_weight},
        "unequal_weights",
    ),
    "mean of means under adam": (
        accumulated(ADAM, broken.over_tokens),
        broken.over_tokens,
        ADAM,
        {"weight": token_weight},
        "unequal_weights",
    ),
    "weights that nobody gave": (
        accumulated(SGD, broken.over_tokens),
        broken.over_tokens,
        SGD,
        {},
        "unequal_weights",
    ),
    "last only": (
        by_gradient(SGD, mean, broken.last_of, cut=strided),
        mean,
        SGD,
        {},
        "last_microbatch_only",
    ),
    "last over k": (
        by_gradient(ADAM, mean, broken.last_over_k),
        mean,
        ADAM,
        {},
        "last_microbatch_only",
    ),
    "clip each": (
        by_gradient(CLIP_SGD, mean, clipped_each(0.5)),
        mean,
        CLIP_SGD,
        {},
        "clip_per_microbatch",
    ),
    "clip each under adam": (
        by_gradient(CLIP_ADAM, mean, clipped_each(0.5), cut=strided),
        mean,
        CLIP_ADAM,
        {},
        "clip_per_microbatch",
    ),
    "clip each by a size of its own": (
        by_gradient(SGD, mean, clipped_each(0.7)),
        mean,
        SGD,
        {},
        "clip_per_microbatch",
    ),
    "clip before the mean": (
        by_gradient(CLIP_SGD, mean, clipped_sum(0.5)),
        mean,
        CLIP_SGD,
        {},
        "clip_before_mean",
    ),
    "optimizer each": (
        broken.optimizer_each(ADAM, mean),
        mean,
        ADAM,
        {},
        "optimizer_per_microbatch",
    ),
    "sgd each": (
        broken.optimizer_each(SGD, mean, strided),
        mean,
        SGD,
        {},
        "optimizer_per_microbatch",
    ),
    "schedule each": (
        broken.schedule_each(SCHEDULE, mean),
        mean,
        SCHEDULE,
        {},
        "schedule_per_microbatch",
    ),
    "adam's count each": (
        broken.schedule_each(ADAM, mean, strided),
        mean,
        ADAM,
        {},
        "schedule_per_microbatch",
    ),
    "decay each": (
        broken.decay_each(DECAY, mean, 0.0125),
        mean,
        DECAY,
        {},
        "decay_per_microbatch",
    ),
    "decay each under adamw": (
        broken.decay_each(ADAMW, mean, 0.001),
        mean,
        ADAMW,
        {},
        "decay_per_microbatch",
    ),
    "bfloat16": (
        by_gradient(SGD, mean, broken.low_precision()),
        mean,
        SGD,
        {},
        "low_precision_accumulator",
    ),
    "float16 under adam": (
        by_gradient(ADAM, mean, broken.low_precision(jnp.float16)),
        mean,
        ADAM,
        {},
        "low_precision_accumulator",
    ),
    "batch norm": (
        accumulated(SGD, broken.batch_norm),
        broken.batch_norm,
        SGD,
        {},
        "batch_coupled",
    ),
    "balance": (accumulated(SGD, broken.balance), broken.balance, SGD, {}, "batch_coupled"),
    "one key": (
        by_gradient(SGD, broken.dropout, mean_of, keys=lambda n: [KEY] * n),
        broken.dropout,
        SGD,
        {"key": KEY},
        "shared_key",
    ),
}


@pytest.mark.parametrize("name", marked(BROKEN))
def test_broken_step_is_named(name, problem):
    step, loss, tx, options, cause = BROKEN[name]
    report = audit_step(step, loss, tx, *problem, k=K, **options)
    assert causes(report) == ("not_equivalent", {cause}), str(report)
    assert any(f.cause == cause and f.advice for f in report.findings)
    assert max(map(len, str(report).splitlines())) <= 100


TAILS = {
    "short one counted full": (mean_of, {"wrong_tail_divisor", "unequal_weights"}),
    "short one divided as if full": (
        lambda grads, parts: broken.scale(
            broken.add(
                [broken.scale(g, len(p["y"]) / 3) for g, p in zip(grads, parts, strict=True)]
            ),
            1 / len(grads),
        ),
        {"wrong_tail_divisor"},
    ),
    "dropped": (
        lambda grads, parts: mean_of([g for g, p in zip(grads, parts, strict=True)][:3], parts),
        {"dropped_tail"},
    ),
}


@pytest.mark.parametrize("name", TAILS)
def test_short_microbatch(name, ragged):
    combine, expected = TAILS[name]
    report = audit_step(by_gradient(SGD, mean, combine), mean, SGD, *ragged, k=K)
    assert causes(report) == ("not_equivalent", expected), str(report)


def test_short_window():
    # 9 rows in microbatches of 3: three of them, divided by four.
    problem = broken.problem(num_rows=9)
    report = audit_step(by_gradient(SGD, mean, broken.divided_by(4)), mean, SGD, *problem, k=K)
    assert causes(report) == ("not_equivalent", {"wrong_tail_divisor"}), str(report)


def test_window_that_starts_where_the_last_ended(problem):
    @jax.jit
    def step(params, state, batch):
        grads = mean_of([jax.grad(mean)(params, part) for part in contiguous(batch)], None)
        state, kept = state
        kept = broken.add([kept, grads])
        updates, state = SGD.update(kept, state, params)
        return optax.apply_updates(params, updates), (state, kept)

    state = SGD.init(problem[0]), jax.tree.map(jnp.zeros_like, problem[0])
    report = audit_step(step, mean, SGD, *problem, k=K, opt_state=state)
    assert causes(report) == ("not_equivalent", {"accumulator_not_cleared"}), str(report)
    assert "update 2" in str(report)


def test_schedule_around_multi_steps(problem):
    halving = optax.scale_by_schedule(lambda count: 1 / (1.0 + count))
    tx = optax.chain(optax.MultiSteps(SGD, K).gradient_transformation(), halving)
    report = audit_step(
        micro_steps(tx, mean),
        mean,
        optax.chain(SGD, halving),
        *problem,
        k=K,
        opt_state=tx.init(problem[0]),
    )
    assert causes(report) == ("not_equivalent", {"schedule_per_microbatch"}), str(report)


def test_a_fault_that_adam_hides(problem):
    def make_step(tx):
        return by_gradient(tx, mean, broken.sum_of)

    report = audit_step(make_step(ADAM), mean, ADAM, *problem, k=K)
    assert causes(report) == ("equivalent", set())
    assert any("make_step" in line for line in report.not_tested)

    report = audit_step(make_step(ADAM), mean, ADAM, *problem, k=K, make_step=make_step)
    assert causes(report) == ("not_equivalent", {"sum_reduction"}), str(report)
    assert "only the run under plain sgd" in str(report)


def test_make_step_of_a_right_step(problem):
    report = audit_step(
        accumulated(CLIP_ADAM, mean),
        mean,
        CLIP_ADAM,
        *problem,
        k=K,
        make_step=lambda tx: accumulated(tx, mean),
    )
    assert causes(report) == ("equivalent", set()), str(report)


def test_unknown_fault_says_where_it_parts(problem):
    def combine(grads, parts):
        grads = mean_of(grads, parts)
        return {**grads, "v": 0.37 * grads["v"]}

    report = audit_step(by_gradient(SGD, mean, combine), mean, SGD, *problem, k=K)
    assert causes(report) == ("not_equivalent", set())
    assert "parts at update 1" in str(report)
    assert "params['v']" in str(report)


def test_faults_of_the_smallest_numbers():
    # Each microbatch is one row whose gradient is its number.
    def loss(w, g):
        return jnp.mean(g) * w

    tx = optax.sgd(1.0)
    grads = jnp.array([1.0, 2.0, 6.0])
    for combine, cause in [
        (broken.sum_of, "sum_reduction"),
        (broken.divided_twice, "double_division"),
        (broken.last_of, "last_microbatch_only"),
    ]:
        step = by_gradient(tx, loss, combine, cut=lambda g: list(g[:, None]))
        report = audit_step(step, loss, tx, jnp.zeros(()), grads, k=3)
        assert report.verdict == "not_equivalent"
        assert cause in report.causes, str(report)


def test_microbatch_without_weight_gives_nan(problem):
    params, batch = problem
    batch = {**batch, "mask": jnp.array([1.0] * 9 + [0.0] * 3)}

    def loss(params, batch):
        return jnp.sum(broken.square(params, batch) * batch["mask"]) / jnp.sum(batch["mask"])

    report = audit_step(
        by_gradient(SGD, loss, mean_of), loss, SGD, params, batch, k=K, weight=mask_weight
    )
    assert causes(report) == ("not_equivalent", {"nonfinite"})
    report = audit_step(
        accumulated(SGD, loss, weight=mask_weight, stacked=False),
        loss,
        SGD,
        params,
        batch,
        k=K,
        weight=mask_weight,
    )
    assert causes(report) == ("equivalent", set()), str(report)


def test_step_with_a_memory(problem):
    calls = []
    grad = jax.jit(jax.grad(mean))

    def step(params, state, batch):
        calls.append(None)
        return jax.tree.map(lambda p, g: p - g / len(calls), params, grad(params, batch)), state

    report = audit_step(step, mean, SGD, *problem, k=K)
    assert report.verdict == "not_equivalent"
    assert "mutable_state" in report.causes


# Bad input


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda params, state: None, "step, at update 1, raised TypeError"),
        (lambda params, state, batch: params, "step returned dict, expected"),
        (lambda params, state, batch: (params, state, 1), "step returned 3 values"),
        (lambda params, state, batch: (1.0, state), "another structure"),
        (
            lambda params, state, batch: (jax.tree.map(jnp.atleast_1d, params) | {"b": 1.0}, state),
            r"params['b'] as float32[], expected float32[4]",
        ),
    ],
)
def test_step_that_cannot_be_measured(step, reason, problem):
    report = audit_step(step, mean, SGD, *problem, k=K)
    assert report.verdict == "inconclusive"
    assert reason in report.findings[0].measured


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"step": 3}, TypeError, "audit_step: step must be callable"),
        ({"loss_fn": broken.square}, TypeError, "audit_step: loss_fn must return a real scalar"),
        ({"tx": "adam"}, TypeError, "tx must be an optax.GradientTransformation"),
        ({"k": 13}, ValueError, "k=13 is more than the 12 rows"),
        ({"updates": 0}, ValueError, "updates must be at least 1"),
        ({"make_step": 3}, TypeError, "make_step must be callable"),
    ],
)
def test_bad_argument(change, error, message, problem):
    params, batch = problem
    given = {"step": print, "loss_fn": mean, "tx": SGD, "params": params, "batch": batch, "k": K}
    with pytest.raises(error, match=message):
        audit_step(**{**given, **change})


def test_loss_that_is_not_finite(problem):
    def loss(params, batch):
        return jnp.log(-mean(params, batch))

    report = audit_step(by_gradient(SGD, loss, mean_of), loss, SGD, *problem, k=K)
    assert causes(report) == ("inconclusive", {"nonfinite"})


# Many seeds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["by hand", "clip", "weights"])
def test_no_false_alarm(name, problem):
    step, loss, tx, options = right(name, problem[0])
    for seed in range(200):
        report = audit_step(step, loss, tx, *broken.problem(seed), k=K, updates=2, **options)
        assert report.verdict == "equivalent", f"seed {seed}\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sum", "mean of means", "clip each", "bfloat16"])
def test_none_missed(name):
    step, loss, tx, options, cause = BROKEN[name]
    for seed in range(200):
        report = audit_step(step, loss, tx, *broken.problem(seed), k=K, updates=1, **options)
        assert cause in report.causes, f"seed {seed}\n{report}"
