"""`audit`: which losses add up over rows, why others do not, and what the report says."""

from __future__ import annotations

import functools
import json
import sys
import textwrap

import broken
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from broken import K, mask_weight, token_weight
from layers import layered, layered_problem, masked

from accum_jax._audit import audit
from accum_jax._audit_step import audit_step
from accum_jax._problem import Problem
from accum_jax.cli import main

KEY = jax.random.key(5)


@pytest.fixture(scope="module")
def problem():
    return broken.problem()


def advice(report):
    return " ".join(finding.advice for finding in report.findings)


# Right losses

used = jax.nn.one_hot(jnp.arange(4), 4).mean(0)
RIGHT = {
    "mean": (broken.mean, {}),
    "weight decay in the loss": (broken.decayed, {}),
    "mean over a mask": (broken.masked, {"weight": mask_weight}),
    "mean over tokens": (broken.over_tokens, {"weight": token_weight}),
    "sum": (broken.summed, {"reduction": "sum"}),
    "window denominators": (functools.partial(broken.balance_of_window, used=used), {}),
    "layer norm": (broken.layer_norm, {}),
    "remat": (broken.remat, {}),
    "bfloat16 inside": (broken.cast(jnp.bfloat16), {}),
    "float32 inside": (broken.cast(jnp.float32), {}),
    "refuses float64": (broken.refuses_float64, {}),
    "key that is not used": (broken.unused_key, {"key": KEY}),
    "remainder": (broken.mean, {"k": 5}),
    "weights and remainder": (broken.over_tokens, {"weight": token_weight, "k": 5}),
    "one microbatch": (broken.mean, {"k": 1}),
    "single rows": (broken.mean, {"k": 12}),
}


# Kin of others here, each a compilation or ten more.
SLOW = {
    "remat",
    "one microbatch",
    "single rows",
    "remainder",
    "window denominators",
    "sum and weight decay",
    "labels",
    "wrong weight",
    "two denominators",
}


def marked(names):
    return [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in names]


@pytest.mark.parametrize("name", marked(RIGHT))
def test_right_loss_is_equivalent(name, problem):
    loss, options = RIGHT[name]
    report = audit(loss, *problem, **{"k": K, **options})
    assert (report.verdict, report.causes) == ("equivalent", set()), str(report)
    assert {f.group for f in report.findings} >= {"math", "equivalence"}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_of_any_width(dtype):
    report = audit(broken.mean, *broken.problem(dtype=dtype), k=K)
    assert (report.verdict, report.precision) == ("equivalent", "float64"), str(report)


def test_float64_parameters(x64):
    report = audit(broken.mean, *broken.problem(dtype=jnp.float64), k=K)
    assert report.verdict == "equivalent"
    assert 1e-12 <= report.tolerance < 1e-11


def test_scanned_layers():
    params, batch = layered_problem(12)
    assert audit(layered, params, batch, k=3).verdict == "equivalent"
    report = audit(masked, params, batch, k=3)
    assert report.causes == {"unequal_weights"}
    assert "weight=lambda batch: jnp.sum(batch['mask'])" in advice(report)


def test_precision_is_said(problem):
    assert audit(broken.mean, *problem, k=K).precision == "float64"
    assert audit(broken.cast(jnp.float32), *problem, k=K).precision == "float32"
    bfloat16 = audit(broken.cast(jnp.bfloat16), *problem, k=K)
    assert bfloat16.precision == "bfloat16"
    assert any("bfloat16" in line for line in bfloat16.not_tested)
    refused = audit(broken.refuses_float64, *problem, k=K)
    assert refused.precision == "float32"
    assert any("the loss refuses" in line for line in refused.not_tested)


def test_64_bit_types_stay_as_they_were(problem):
    audit(broken.mean, *problem, k=K)
    assert not jax.config.jax_enable_x64
    assert jnp.zeros(()).dtype == jnp.float32


# Broken losses

BROKEN = {
    "sum": (broken.summed, {}, {"sum_reduction"}, 'reduction="sum"'),
    "sum and weight decay": (broken.summed_and_decayed, {}, {"sum_reduction"}, "term outside"),
    "mean as sum": (broken.mean, {"reduction": "sum"}, {"sum_reduction"}, 'reduction="mean"'),
    "mask": (broken.masked, {}, {"unequal_weights"}, "jnp.sum(batch['mask'])"),
    "tokens": (broken.over_tokens, {}, {"unequal_weights"}, "jnp.sum(batch['tokens'] != 0)"),
    "labels": (broken.over_labels, {}, {"unequal_weights"}, "jnp.sum(batch['labels'] >= 0)"),
    "no leaf": (broken.over_hidden_weight, {}, {"unequal_weights"}, "own denominator"),
    "needless weight": (
        broken.mean,
        {"weight": mask_weight},
        {"unequal_weights"},
        "leave weight out",
    ),
    "wrong weight": (
        broken.over_tokens,
        {"weight": mask_weight},
        {"unequal_weights"},
        "jnp.sum(batch['tokens'] != 0)",
    ),
    "batch norm": (broken.batch_norm, {}, {"batch_coupled"}, "GroupNorm"),
    "batch norm and its state": (
        broken.batch_norm_with_state,
        {"has_aux": True},
        {"batch_coupled", "mutable_state"},
        "thread",
    ),
    "in-batch negatives": (
        broken.in_batch_negatives,
        {},
        {"batch_coupled"},
        "coupled_value_and_grad",
    ),
    "balance": (broken.balance, {}, {"batch_coupled"}, "window's means or denominators"),
    "two denominators": (broken.two_denominators, {}, {"batch_coupled"}, "denominators"),
    "slightly coupled": (broken.slightly_coupled, {}, {"batch_coupled"}, "product of batch means"),
    "fixed key": (broken.fixed_key, {}, {"shared_key"}, "key_argnums"),
    "dropout and batch norm": (
        broken.dropout_and_batch_norm,
        {"key": KEY},
        {"stochastic", "batch_coupled"},
        "GroupNorm",
    ),
}


@pytest.mark.parametrize("name", marked(BROKEN))
def test_broken_loss_is_named(name, problem):
    loss, options, causes, says = BROKEN[name]
    report = audit(loss, *problem, k=K, **options)
    assert (report.verdict, report.causes) == ("not_equivalent", causes), str(report)
    assert says in advice(report)


def test_dropout_is_never_equivalent(problem):
    report = audit(broken.dropout, *problem, k=K, key=KEY)
    assert (report.verdict, report.causes) == ("inconclusive", {"stochastic"})


def test_state_of_the_process(problem):
    report = audit(broken.counting(), *problem, k=K)
    assert (report.verdict, report.causes) == ("not_equivalent", {"mutable_state"})


def test_product_of_means():
    # Whole batch 0.25, microbatches of one row 0.5 on average.
    batch = {"f": jnp.array([1.0, 0.0]), "p": jnp.array([1.0, 0.0])}
    report = audit(lambda w, b: jnp.mean(b["f"]) * jnp.mean(w * b["p"]), 1.0, batch, k=2)
    assert (report.verdict, report.causes) == ("not_equivalent", {"batch_coupled"})


def test_contrastive_of_two_rows():
    def loss(t, x):
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(t * x @ x.T)))

    report = audit(loss, 1.0, jnp.eye(2), k=2)
    assert (report.verdict, report.causes) == ("not_equivalent", {"batch_coupled"})


def test_a_millionth_of_the_gradient_is_found(problem):
    params, batch = problem
    whole = np.concatenate([x.ravel() for x in jax.tree.leaves(jax.grad(broken.mean)(*problem))])

    def loss(params, batch):
        # A product of batch means whose gradient is a millionth of the rest.
        h = broken.net(params, batch["x"])
        return broken.mean(params, batch) + scale * jnp.mean(h) * jnp.mean(batch["y"])

    scale = 1.0
    extra = jax.tree.map(jnp.subtract, jax.grad(loss)(*problem), jax.grad(broken.mean)(*problem))
    parts = [jax.tree.map(lambda x: x[i::K], batch) for i in range(K)]  # noqa: B023
    mean_of_parts = jax.tree.map(
        lambda *g: sum(g) / K,
        *(
            jax.tree.map(jnp.subtract, jax.grad(loss)(params, p), jax.grad(broken.mean)(params, p))
            for p in parts
        ),
    )
    difference = float(optax.tree.norm(jax.tree.map(jnp.subtract, extra, mean_of_parts)))
    scale = 1e-6 * float(np.linalg.norm(whole)) / difference
    report = audit(loss, *problem, k=K)
    assert (report.verdict, report.causes) == ("not_equivalent", {"batch_coupled"})


# Bad input


def test_too_few_rows(problem):
    params, batch = problem
    report = audit(broken.mean, params, jax.tree.map(lambda x: x[:1], batch), k=2)
    assert report.verdict == "inconclusive"
    assert "1 row;" in report.findings[0].measured


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"loss_fn": 3}, TypeError, "audit: loss_fn must be callable"),
        ({"loss_fn": broken.square}, TypeError, r"real scalar, got float32\[12\].*jnp.mean"),
        ({"loss_fn": broken.batch_norm_with_state}, TypeError, "has_aux=True"),
        ({"has_aux": True}, TypeError, r"must return \(loss, aux\)"),
        ({"k": 13}, ValueError, "k=13 is more than the 12 rows"),
        ({"k": 2.0}, TypeError, "k must be a Python int"),
        ({"weight": 3}, TypeError, "weight must be callable"),
        ({"weight": lambda b: b["mask"]}, TypeError, r"scalar, got float\d+\[3\]"),
        ({"weight": lambda b: -1.0}, ValueError, "non-negative, got -1.0"),
        ({"reduction": "max"}, ValueError, "reduction must be one of"),
        ({"params": {"n": jnp.arange(3)}}, TypeError, r"params\['n'\] has dtype int32"),
        ({"params": {}}, ValueError, "params has no leaf"),
        ({"batch": {"x": 3}}, TypeError, r"batch\['x'\] must be an array"),
        ({"batch": {"x": jnp.ones(())}}, ValueError, r"batch\['x'\] is a scalar"),
        ({"batch": [jnp.ones(3), jnp.ones(2)]}, ValueError, "disagree on axis 0"),
        ({"batch": ()}, ValueError, "batch has no array leaf"),
    ],
)
def test_bad_argument(change, error, message, problem):
    params, batch = problem
    given = {"loss_fn": broken.mean, "params": params, "batch": batch, "k": K, **change}
    with pytest.raises(error, match=message):
        audit(**given)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda p, b: 1 / 0, "loss_fn raised ZeroDivisionError"),
        (lambda p, b: jnp.mean(b["x"] @ p["w"]) + b["y"] @ jnp.ones(12), "loss_fn on 3 of 12 rows"),
        (lambda p, b: jnp.log(-broken.mean(p, b)), "loss is nan"),
        (lambda p, b: jnp.mean(b["y"]), "gradient of the whole batch is zero"),
    ],
)
def test_what_cannot_be_measured(loss, reason, problem):
    report = audit(loss, *problem, k=K)
    assert report.verdict == "inconclusive"
    assert reason in report.findings[0].measured
    assert reason in str(report)


# The report


@pytest.mark.parametrize("loss", [broken.mean, broken.balance])
def test_report_fits_100_columns(loss, problem):
    lines = str(audit(loss, *problem, k=K)).splitlines()
    assert max(map(len, lines)) <= 100
    assert not any(line != line.rstrip() for line in lines)


def test_report_without_rich(problem, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert str(audit(broken.masked, *problem, k=K)).startswith("NOT EQUIVALENT")


def test_report_as_json(problem):
    report = audit(broken.masked, *problem, k=K)
    read = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert read["verdict"] == "not_equivalent"
    assert read["causes"] == ["unequal_weights"]
    groups = [finding["group"] for finding in read["findings"]]
    assert groups == sorted(groups, key=["math", "cadence", "numerics", "equivalence"].index)


# The command


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of factories in the working directory."""
    (tmp_path / "factories.py").write_text(
        textwrap.dedent("""
        import broken, optax
        from accum_jax._problem import Problem

        print("importing")
        tx = optax.adam(1e-2)
        step = broken.by_gradient(tx, broken.masked, broken.mean_of)

        def right():
            params, batch = broken.problem()
            return Problem(broken.masked, params, batch, tx, broken.mask_weight)

        def wrong():
            params, batch = broken.problem()
            return Problem(broken.masked, params, batch)

        def raises():
            raise RuntimeError("no\\ndata")

        def nothing():
            return None
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("factories", None)


def test_command_says_yes_and_no(module, capsys):
    assert main(["audit", "factories:right"]) == 0
    assert "EQUIVALENT" in capsys.readouterr().out
    assert main(["audit", "factories:wrong", "--k", "3"]) == 1
    assert "unequal_weights" in capsys.readouterr().out


def test_command_prints_nothing_but_json(module, capsys):
    assert main(["audit", "factories:wrong", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["causes"] == ["unequal_weights"]
    assert "importing" in printed.err


def test_command_on_a_step(module, capsys):
    arguments = ["audit", "factories:right", "--step", "factories:step", "--out", "far.png"]
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert "unequal_weights" in printed
    assert "Plot: far.png" in printed
    assert (module / "far.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["factories"], "expected MODULE:FUNCTION, got 'factories'"),
        (["nowhere:f"], "cannot import 'nowhere'"),
        (["factories:f"], "'factories' has no 'f'"),
        (["factories:tx"], "expected a function"),
        (["factories:raises"], "factories:raises raised RuntimeError: no data"),
        (["factories:nothing"], "returned NoneType, expected an accum_jax.Problem"),
        (["factories:right", "--k", "99"], "k=99 is more than the 12 rows"),
        (["factories:right", "--out", "far.png"], "give --step"),
        (["factories:wrong", "--step", "factories:step"], "gave tx=None"),
    ],
)
def test_command_of_bad_usage(arguments, message, module, capsys):
    assert main(["audit", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len([x for x in printed.err.splitlines() if x.startswith("accum-jax audit:")]) == 1
    assert "Traceback" not in printed.err


def test_problem_is_data():
    problem = Problem(broken.mean, *broken.problem())
    assert (problem.tx, problem.weight, problem.key, problem.has_aux) == (None, None, None, False)


# Many seeds

SEEDS = range(200)
SEEDED_RIGHT = {
    name: RIGHT[name]
    for name in ("mean", "mean over tokens", "sum", "layer norm", "bfloat16 inside")
}
SEEDED_BROKEN = {
    name: BROKEN[name]
    for name in ("sum", "tokens", "no leaf", "batch norm", "in-batch negatives", "fixed key")
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDED_RIGHT)
def test_no_false_alarm(name):
    loss, options = SEEDED_RIGHT[name]
    for seed in SEEDS:
        report = audit(loss, *broken.problem(seed), k=K, **options)
        assert report.verdict == "equivalent", f"seed {seed}\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDED_BROKEN)
def test_none_missed(name):
    loss, options, causes, _ = SEEDED_BROKEN[name]
    for seed in SEEDS:
        report = audit(loss, *broken.problem(seed), k=K, **options)
        assert report.causes == causes, f"seed {seed}\n{report}"


# Flax


@pytest.mark.slow
def test_digits():
    linen = pytest.importorskip("flax.linen")
    from accum_jax._demo.digits import digits_linen

    task = digits_linen()
    batch = next(task.batches(1))
    assert audit(task.loss_fn, task.init(), batch, k=task.k).verdict == "equivalent"

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Conv(8, (3, 3))(x)
            x = linen.relu(linen.BatchNorm(use_running_average=False)(x))
            return linen.Dense(10)(x.reshape(len(x), -1))

    net = Net()
    variables = net.init(jax.random.key(0), batch["image"][:1])

    def loss(params, batch):
        logits, new = net.apply(
            {**variables, "params": params}, batch["image"], mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), new

    report = audit(loss, variables["params"], batch, k=task.k, has_aux=True)
    assert (report.verdict, report.causes) == (
        "not_equivalent",
        {"batch_coupled", "mutable_state"},
    )
    assert "GroupNorm" in advice(report)


@pytest.mark.slow
def test_chars():
    pytest.importorskip("flax")
    from accum_jax._demo.chars import chars_linen

    task = chars_linen()
    params, batch = task.init(), next(task.batches(1))
    weight = task.weight
    assert audit(task.loss_fn, params, batch, k=task.k, weight=weight).verdict == "equivalent"
    report = audit(task.loss_fn, params, batch, k=task.k)
    assert (report.verdict, report.causes) == ("not_equivalent", {"unequal_weights"})
    assert "jnp.sum(batch['mask'])" in advice(report)


def test_a_step_on_the_same_batch_agrees(problem):
    tx = optax.sgd(0.1)
    step = broken.by_gradient(tx, broken.mean, broken.mean_of)
    assert audit_step(step, broken.mean, tx, *problem, k=K).verdict == "equivalent"
