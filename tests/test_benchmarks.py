"""The benchmarks' own parts, and what must hold of memory and time."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

from accum_jax import Collective
from benchmarks import accuracy, collectives, coupled, memory, models, report, speed, ways
from benchmarks.__main__ import main
from benchmarks.targets import Target


def _tiny_mlp():
    return models.mlp(layers=2, width=8, microbatch_size=2)


def _updated(model, way, k):
    """Parameters after one update from the same start on the same rows."""
    params = jax.jit(model.init)(jax.random.key(0))
    batch, calls = model.batch(model.microbatch_size * k), 1 if way.one_call else k
    state, step = jax.jit(way.optimizer(k).init)(params), jax.jit(way.step(model, k))
    for i in range(calls):
        params, state, _ = step(params, state, jax.tree.map(lambda x, i=i: x[i::calls], batch))
    return params


@pytest.mark.parametrize(
    ("model", "selected"),
    [
        (_tiny_mlp(), ways.WAYS),
        # Its rows differ in length: only with weights is it the whole batch's update.
        pytest.param(
            models.transformer(layers=2, width=64, length=6, microbatch_size=2),
            (ways.WHOLE_BATCH, ways.IN_PLACE_WEIGHTED),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["mlp", "transformer"],
)
def test_ways_make_the_same_update(model, selected):
    """What is compared with one another does the same work."""
    first, *rest = (_updated(model, way, k=4) for way in selected)
    for other in rest:
        # Adam divides by the gradient's size: the rounding of small gradients grows.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), first, other)


def test_coupled_ways_compute_the_same_loss():
    problem = coupled.problem(64)
    whole, ours, _ = (jax.jit(way)(*problem) for way in coupled.WAYS.values())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), whole, ours)


def test_claims():
    exact = report.Claim("temp", 1.2, limit=1.15, least=1.2)
    noisy = report.Claim("time", 1.03, limit=1.02, least=0.99)
    assert [exact.verdict, noisy.verdict] == ["fails", "not clear"]
    assert report.Claim("time", 1.02, limit=1.02, least=1.0).verdict == "holds"


def test_interval_of_a_median_covers_it():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        lower, upper = speed.median_interval(rng.exponential(size=40))
        covered += lower <= np.log(2) <= upper
    assert 0.93 <= covered / 400 <= 1.0


def test_a_suite_is_saved_in_three_forms(tmp_path):
    rows = speed.measure(_tiny_mlp(), [ways.HAND_WRITTEN, ways.OPTAX_MULTI_STEPS], 2, seconds=0)
    assert [row["rounds"] for row in rows] == [8, 8]
    assert rows[0]["ratio"] == 1.0
    table = report.Table("Times", ("way", "ratio"), [("ours", "1.0")], "A caption.")
    claim = report.Claim("ratio", 1.0, limit=1.0, least=1.0)

    def draw(figure: Figure) -> None:
        report.bars(figure.subplots(), ["ours"], [1.0], [True])

    report.save(tmp_path, {"speed": report.Result(rows, [table], [claim], draw)})
    saved = json.loads((tmp_path / "speed.json").read_text())
    assert saved["rows"][1]["way"] == ways.OPTAX_MULTI_STEPS.name
    assert saved["claims"][0]["verdict"] == "holds"
    assert saved["environment"]["jax"] == jax.__version__
    text = (tmp_path / "report.md").read_text()
    assert "| ours | 1.0 |" in text and "![speed](speed.png)" in text
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_memory_counts_what_the_state_holds():
    target, model = Target(None), _tiny_mlp()
    alone = memory.microbatch_temp(target, model)
    loop = memory.measure(target, model, alone, ways.OPTAX_MULTI_STEPS, 4)
    once = memory.measure(target, model, alone, ways.ACCUMULATE, 4)
    counters = 32
    assert loop["params"] <= loop["held"] <= loop["params"] + counters
    assert once["held"] == 0


def test_what_is_sent_is_told_apart():
    each = [
        Collective("all-reduce", "float32", 4, True, 8),  # a scalar
        Collective("all-reduce", "bfloat16", 100, True, 8),
        Collective("reduce-scatter", "float32", 1000, False, 1),
        Collective("all-gather", "float32", 200, True, 4),
        Collective("all-gather", "int32", 300, False, 1),
    ]
    row = {"collectives": [c._asdict() for c in each]}
    sent = collectives.sent
    assert sent(row, "reduced", True) == collectives.Sent(8, 800, ("bfloat16",))
    assert sent(row, "reduced") == collectives.Sent(9, 1800, ("bfloat16", "float32"))
    assert sent(row, "moved", False) == collectives.Sent(0, 0, ())
    assert sent(row, "batch") == collectives.Sent(1, 300, ("int32",))
    assert sent(row, "all", False) == collectives.Sent(2, 1300, ("float32", "int32"))


@pytest.mark.slow
def test_every_way_to_spread_a_transformer():
    """Each compiles, and what has to hold of it holds, for a small model on the CPU."""
    for way in collectives.WAYS:
        row = collectives.measure(collectives.CPU, jax.devices(), way, 2, layers=2, width=64)
        claims = collectives.claims(row)
        assert [claim.text for claim in claims if claim.verdict != "holds"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "memory,colour"], "no suite 'colour'; there are memory, "),
        (["--target", "v0:1x1"], "unknown target 'v0:1x1'"),
    ],
)
def test_bad_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_pytorch_makes_the_same_update():
    pytest.importorskip("torch")
    from benchmarks.torch_loop import TorchRunner

    model = _tiny_mlp()
    runner = TorchRunner(model, k=4)
    runner.update()
    expected = _updated(model, ways.WHOLE_BATCH, k=4)
    found = [{"w": w.detach().numpy(), "b": b.detach().numpy()} for w, b in runner.params]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


@pytest.mark.slow
def test_memory_must_hold():
    """A layer-scanned transformer of 200 MB: in place needs no second gradient, at any k."""
    claims = memory.run(quick=True, targets=[], announce=lambda text: None).claims
    assert [claim.text for claim in claims if claim.verdict != "holds"] == []
    assert len(claims) == 3


@pytest.mark.slow
def test_collectives_must_hold():
    """One reduction of P float32 bytes with `mesh=`, in a process that has eight devices."""
    result = collectives.run(quick=True, targets=[], announce=lambda text: None)
    assert [claim.text for claim in result.claims if claim.verdict != "holds"] == []
    assert {row["k"] for row in result.rows} == {1, 2, 8}


@pytest.mark.slow
def test_speed_is_measured():
    """What the times should be is the benchmark's to say: a test shares its machine."""
    result = speed.run(quick=True, targets=[], announce=lambda text: None)
    assert len(result.claims) == 7
    assert all(0 < claim.least <= claim.measured < np.inf for claim in result.claims)


@pytest.mark.slow
def test_accuracy_must_hold():
    """Sums no worse than the whole batch's own, in every dtype; weights as exact as rows."""
    claims = accuracy.run(quick=True, targets=[], announce=lambda text: None).claims
    assert [claim.text for claim in claims if claim.verdict != "holds"] == []
    assert len(claims) == 10


@pytest.mark.slow
def test_coupled_must_hold():
    """More rows cost their embeddings and the loss of their pairs."""
    result = coupled.run(quick=True, targets=[], announce=lambda text: None)
    assert [claim.verdict for claim in result.claims] == ["holds"]
    assert len(result.rows) == 8
