"""Plans: the microbatch that fits, from the compiler's own numbers."""

from __future__ import annotations

import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compilations
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plan_models import BASE, CASES, LORA, LORA_BATCH, lora_loss, mlp_loss, shape

from accum_jax import AccumulationStats, plan, value_and_grad
from accum_jax._memory_text import parse_bytes, show_bytes
from accum_jax._plan import PlanRow, _search
from accum_jax.cli import main

LIMIT = "320KiB"  # the whole batch of `problem` needs more
# Their two compilations take seconds.
SLOW = {"cnn", "transformer", "tied embeddings", "remat"}


def peak_of(step, *args):
    """What a CPU program holds at most, by the compiler."""
    memory = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile().memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + results


def parts(row):
    return (
        row.params_bytes
        + row.optimizer_bytes
        + row.accumulator_bytes
        + row.batch_bytes
        + row.activation_bytes
    )


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def problem(width=64, rows=256, depth=2):
    """An MLP whose activations outweigh its parameters."""
    params = [{"w": shape(width, width), "b": shape(width)}] * depth
    return params, {"x": shape(rows, width), "y": shape(rows, width)}


def make(memory_limit=None, **options):
    params, batch = problem()
    given = {"loss_fn": mlp_loss, "tx": optax.sgd(0.1), "params": params, "batch": batch}
    return plan(**{**given, "memory_limit": memory_limit, **options})


@pytest.fixture(scope="module")
def planned():
    """A plan within `LIMIT` and the seconds of each of its compilations."""
    with compilations() as compiled:
        return make(LIMIT), compiled


# The numbers


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in CASES]
)
def test_peak_is_that_of_the_step_compiled_by_hand(name):
    case = CASES[name]
    options = {"weight": case.weight, "has_aux": case.has_aux}
    given = (case.loss_fn, case.tx, case.params, case.batch)
    made = plan(*given, microbatch_sizes=[4], key=case.key, **options)
    best = made.best
    assert (best.microbatch_size, best.k, made.verdict) == (4, 4, "accumulate")

    keys = () if case.key is None else (case.key,)
    if case.has_aux:
        options["aux"] = {"loss": "mean", "kept": "sum"}
    if keys:
        options["key_argnums"] = 2
    grad_fn = value_and_grad(case.loss_fn, microbatch_size=best.microbatch_size, **options)

    def step(params, opt_state, *args):
        value, grads = grad_fn(params, *args)
        updates, opt_state = case.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    state = jax.eval_shape(case.tx.init, case.params)
    assert best.peak_bytes == peak_of(step, case.params, state, case.batch, *keys)
    assert best.peak_bytes == parts(best)
    assert best.params_bytes == size(case.params)
    assert best.optimizer_bytes == size(state)
    assert best.accumulator_bytes == 4 * sum(x.size for x in jax.tree.leaves(case.params))


def test_a_step_of_ones_own_with_a_frozen_base():
    tx = optax.adam(1e-3)
    state = jax.eval_shape(tx.init, LORA)

    def step(microbatch_size):
        grad_fn = value_and_grad(lora_loss, microbatch_size=microbatch_size, batch_argnums=2)

        def update(adapters, opt_state, base, batch):
            _, grads = grad_fn(adapters, base, batch)
            updates, opt_state = tx.update(grads, opt_state, adapters)
            return optax.apply_updates(adapters, updates), opt_state

        return jax.jit(update, donate_argnums=(0, 1)), (LORA, state, BASE, LORA_BATCH)

    best = plan(None, tx, LORA, LORA_BATCH, step=step, microbatch_sizes=[2]).best
    function, args = step(2)
    assert best.peak_bytes == peak_of(function, *args) == parts(best)
    assert (best.optimizer_bytes, best.accumulator_bytes) == (size(state), 0)
    assert best.flops > 0


def test_the_whole_batch_is_a_candidate():
    made = make()
    assert (made.verdict, made.best.k, len(made.rows)) == ("fits_without_accumulation", 1, 1)
    assert made.memory_limit is None and "names no memory" in made.advice[0]
    assert made.best.accumulator_bytes == 0 and parts(made.best) == made.best.peak_bytes


def test_flops_count_every_pass_of_every_loop():
    """Of a matrix product: forward, and backward by the weights and, but for the first, by x."""
    params, _ = problem(width=64, rows=256, depth=2)
    product = 2 * 256 * 64 * 64
    made = [make(microbatch_sizes=[m]).best.flops for m in (256, 64)]
    assert made == [5 * product, 5 * product]

    scanned = {name: shape(2, *x.shape) for name, x in params[0].items()}

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]), None), batch["x"], params)
        return jnp.mean((x - batch["y"]) ** 2)

    # A scan's backward pass has the same body for every layer: by x for the first, too.
    assert make(loss_fn=loss, params=scanned, microbatch_sizes=[64]).best.flops == 6 * product


def test_flops_of_a_convolution():
    """A kernel that covers the image is a matrix product of the flattened image."""

    def loss(kernel, x):
        return jnp.mean(jax.lax.conv(x, kernel, (1, 1), "VALID") ** 2)

    row = plan(loss, optax.sgd(0.1), shape(5, 3, 4, 4), shape(8, 3, 4, 4)).best
    assert row.flops == 2 * (2 * 8 * 5 * 3 * 4 * 4)


# The search


@pytest.mark.parametrize("curve", ["linear", "steep", "flat", "unknown"])
def test_few_compilations_find_the_boundary(curve):
    for count in range(1, 70):
        candidates = [3 * n + 1 for n in range(count)]
        for boundary in range(-1, count):
            tried = []

            def compile_row(done, most, size, boundary=boundary, tried=tried):
                tried.append(size)
                assert done < most
                at = size // 3
                fits = at <= boundary
                peak = {
                    "linear": 100 + size,
                    "steep": 100 + 1.5**at,
                    "flat": 100 + fits,
                    "unknown": None,
                }[curve]
                rest = None if peak is None else peak - 100
                return PlanRow(size, 1, peak, 0, 0, 0, 0, rest, 0, fits)

            budget = 100 + 3 * boundary + 1
            rows = _search(candidates, compile_row, budget)
            fitting = [row.microbatch_size for row in rows if row.fits]
            assert fitting[-1:] == candidates[: boundary + 1][-1:]
            assert set(candidates[boundary + 1 :][:1]) <= {row.microbatch_size for row in rows}
            assert len(tried) == len(set(tried)) <= 2 + math.log2(count)
            assert [row.microbatch_size for row in rows] == sorted(tried)


def test_largest_that_fits_and_the_next_are_compiled(planned):
    made, compiled = planned
    assert made.verdict == "accumulate" and len(compiled) == len(made.rows)
    assert len(made.rows) <= 2 + math.log2(9)
    rows = {row.microbatch_size: row for row in made.rows}
    best, larger = made.best, rows[2 * made.best.microbatch_size]
    assert best.peak_bytes <= 0.9 * 320 * 1024 < larger.peak_bytes and not larger.fits
    assert all(row.microbatch_size * row.k == made.num_rows == 256 for row in made.rows)
    assert all(parts(row) == row.peak_bytes for row in made.rows)


def test_headroom_is_kept_free(planned):
    best = planned[0].best
    given = {"memory_limit": best.peak_bytes, "microbatch_sizes": [best.microbatch_size]}
    assert make(**given, headroom=0).best == best
    assert make(**given, headroom=0.01).verdict == "nothing_fits"


def test_too_large_at_any_microbatch_compiles_nothing():
    fixed = 4 * size(problem()[0])  # parameters, two moments, a gradient; and a count
    with compilations() as compiled:
        made = make(fixed + 3, tx=optax.adam(1e-3))
    assert (made.verdict, made.rows, made.best) == ("accumulation_cannot_help", (), None)
    assert not compiled
    assert made.params_bytes + made.optimizer_bytes + made.gradient_bytes == fixed + 4
    text = " ".join(made.advice)
    for remedy in ("adafactor", "mu_dtype", "FSDP", "jax.checkpoint save activations only"):
        assert remedy in text


def test_a_limit_of_parameters_state_and_gradient_is_tried():
    made = make(2 * size(problem()[0]), microbatch_sizes=[1])
    assert (made.verdict, len(made.rows)) == ("nothing_fits", 1)


def test_nothing_fits_says_what_activations_take():
    made = make("150kB", microbatch_sizes=[1, 256])
    assert (made.verdict, made.best, made.rows[0].microbatch_size) == ("nothing_fits", None, 1)
    assert "Rematerialise" in " ".join(made.advice)
    assert show_bytes(made.rows[0].activation_bytes) in made.advice[0]


# Faults that others' planners had


def test_fault_retry_keeps_the_batch():
    """A batch of 16 of which only single rows fit: k is 16, and 16 rows count."""

    def loss(w, x):
        return jnp.mean(jnp.sin(jnp.sin(w * x)) ** 2)

    given = {"loss_fn": loss, "params": shape(), "batch": shape(16, 1000), "headroom": 0}
    two = make(**given, microbatch_sizes=[2]).best.peak_bytes
    best = make(two - 1, **given).best
    assert (best.microbatch_size, best.k) == (1, 16)


def test_fault_fixed_cost():
    """One float32 copy, whatever k; none for the whole batch."""
    w, x = shape(1000), shape(8, 1000)

    def loss(w, x):
        return jnp.mean((x @ w) ** 2)

    rows = [
        plan(loss, optax.sgd(0.1), w, x, microbatch_sizes=[m]).best.accumulator_bytes
        for m in (8, 4, 2)
    ]
    assert rows == [0, 4000, 4000]


def _sharded(spec, size=(1000, 1000), devices=4):
    mesh = AbstractMesh((devices,), ("d",), axis_types=(AxisType.Auto,))
    w = jax.ShapeDtypeStruct(size, jnp.float32, sharding=NamedSharding(mesh, spec))
    x = jax.ShapeDtypeStruct((16, size[0]), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    return w, x


@pytest.mark.parametrize(
    ("spec", "shards"), [(P(), 1), (P(None, "d"), 4)], ids=["replicated", "FSDP"]
)
def test_faults_memory_modes_and_gather_cost(spec, shards):
    """4 MB of parameters on 4 devices: 4 MB more to reduce once, 1 MB to reduce each."""
    made = plan(
        lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2),
        optax.adam(1e-3),
        *_sharded(spec),
        microbatch_sizes=[2],
    )
    best = made.best
    assert (best.microbatch_size, best.k, made.data_parallel, made.num_rows) == (2, 2, 4, 16)
    assert best.accumulator_bytes == best.params_bytes == 4_000_000 // shards
    assert best.optimizer_bytes == 2 * best.params_bytes + 4
    assert best.batch_bytes == 4 * 4 * 1000
    assert parts(best) == best.peak_bytes
    assert best.flops == 2 * (2 * 16 * 1000 * 1000) // 4
    assert best.gather_bytes == (0 if shards == 1 else 2 * 4_000_000)
    assert ("gathered in every microbatch: 2 x" in str(made)) == (shards > 1)


def test_data_parallel_plans_one_device():
    whole, shared = make(microbatch_sizes=[8]), make(microbatch_sizes=[8], data_parallel=8)
    assert (shared.num_rows, shared.data_parallel, shared.best.k) == (256, 8, 4)
    assert shared.best.batch_bytes == whole.best.batch_bytes // 8
    assert make(data_parallel=8).best.microbatch_size == 32


# What is refused


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory_limit": 0}, ValueError, "memory_limit must be at least 1"),
        ({"memory_limit": "0GB"}, ValueError, "memory_limit must be at least 1"),
        ({"memory_limit": "16"}, ValueError, "memory_limit='16' is no amount.*\"16GiB\""),
        ({"memory_limit": "16G"}, ValueError, "memory_limit='16G' is no amount"),
        ({"memory_limit": "-1GB"}, ValueError, "memory_limit='-1GB' is no amount"),
        ({"memory_limit": 1e9}, TypeError, "memory_limit must be a Python int"),
        ({"headroom": 1.0}, ValueError, "headroom=1.0 must be from 0 on and below 1"),
        ({"headroom": "10%"}, TypeError, "headroom must be a Python number, got '10%'"),
        ({"data_parallel": 0}, ValueError, "data_parallel must be at least 1"),
        ({"data_parallel": 3}, ValueError, "data_parallel=3 does not divide .* 256 rows"),
        ({"microbatch_sizes": []}, ValueError, "microbatch_sizes is empty"),
        ({"microbatch_sizes": [0]}, ValueError, "microbatch_sizes must be at least 1"),
        ({"microbatch_sizes": [2.0]}, TypeError, "microbatch_sizes must be a Python int"),
        (
            {"microbatch_sizes": [4, 3]},
            ValueError,
            r"microbatch_sizes has 3, which does not divide the 256 rows of a device.*Use \[1, 2",
        ),
        ({"target": "v5e:banana"}, ValueError, "no topology 'banana'.*v5e:2x4 for several"),
        ({"target": "a100"}, ValueError, "unknown target 'a100'.*v4, v4:2x2x1.*h100, h100:8"),
        ({"target": 5}, TypeError, "target must be a string"),
        ({"tx": None}, TypeError, "tx=None: give the optimizer"),
        ({"tx": jnp.sin}, TypeError, "tx must be an optax.GradientTransformation"),
        ({"loss_fn": None}, TypeError, "loss_fn must be callable"),
        ({"weight": 3}, TypeError, "weight must be callable"),
        ({"has_aux": 1}, TypeError, "has_aux must be one of"),
        ({"batch": {}}, ValueError, "batch has no arrays"),
        ({"batch": {"x": shape()}}, ValueError, r"batch\['x'\] has shape \(\), .* no rows"),
        ({"batch": {"x": shape(0, 2)}}, ValueError, r"batch\['x'\] has shape \(0, 2\)"),
        ({"batch": {"x": shape(2), "y": shape(3)}}, ValueError, "leaves disagree on axis 0"),
        ({"params": {"w": "text"}}, TypeError, r"params\['w'\] must be an array"),
        ({"step": lambda m: m}, TypeError, r"step\(256\) must return a pair"),
        ({"step": lambda m: (jnp.sin, m)}, TypeError, "the arguments as a tuple, got 256"),
    ],
)
def test_errors_name_what_to_change(options, error, message):
    with pytest.raises(error, match=f"(?s)plan: .*{message}"):
        make(**options)


def test_effective_batch_of_60_over_8_devices():
    _, batch = problem(rows=60)
    with pytest.raises(ValueError, match=r"data_parallel=8 .* 60 rows .*6, 10.*, or 56 or 64 rows"):
        make(batch=batch, data_parallel=8)


def test_a_loss_that_does_not_trace_is_named():
    def loss(params, batch):
        return batch["x"] @ params["missing"]

    with pytest.raises(ValueError, match="loss_fn does not trace on the shapes of params, batch"):
        make(loss_fn=loss)


def test_data_parallel_beside_a_sharded_batch():
    w, x = _sharded(P())
    with pytest.raises(ValueError, match="data_parallel=2, but the batch is sharded over 4"):
        make(loss_fn=lambda w, x: jnp.mean(x @ w), params=w, batch=x, data_parallel=2)


def test_more_devices_than_the_target_has():
    w, x = _sharded(P(), size=(8, 8), devices=64)
    with pytest.raises(ValueError, match="the mesh of the shapes has 64 devices, target cpu has 8"):
        make(loss_fn=lambda w, x: jnp.mean(x @ w), params=w, batch=x)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16GiB", 2**34),
        ("80GB", 80 * 10**9),
        (" 1.5 mib ", 3 * 2**19),
        (".5kB", 500),
        ("12B", 12),
        (np.int64(7), 7),
    ],
)
def test_amounts_of_memory(text, number):
    assert parse_bytes("plan", "memory_limit", text) == number


def test_amounts_are_shown_with_three_digits():
    shown = [show_bytes(n) for n in (0, 1023, 16 * 2**30, 15.75 * 2**30, 999.6 * 2**20, 2**52)]
    assert shown == ["0 B", "0.999 KiB", "16 GiB", "15.8 GiB", "0.976 GiB", "4096 TiB"]


# What is told


def test_report_adds_up_and_is_json(planned):
    made, _ = planned
    text = str(made)
    assert text.startswith(f"ACCUMULATE: microbatches of {made.best.microbatch_size} rows")
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "256" in text and "cpu" in text and "320 KiB less 10%" in text
    loaded = json.loads(json.dumps(made.to_dict()))
    assert loaded["best"] == loaded["rows"][[r.fits for r in made.rows].index(False) - 1]
    assert loaded["verdict"] == "accumulate" and loaded["num_rows"] == 256


@pytest.mark.parametrize(
    ("noise_scale", "says"),
    [
        (jnp.float32(1000.0), "below the noise scale of about 1e+03 rows"),
        (jnp.float32(10.0), "above the noise scale of about 10 rows"),
        (jnp.float32(-3.0), "came out as -3"),
        (jnp.float32(jnp.nan), "came out as nan"),
    ],
)
def test_advice_from_the_measured_noise_scale(noise_scale, says, planned):
    stats = AccumulationStats(4, 256, 256.0, 0, 1.0, 2.0, noise_scale)
    assert says in planned[0].advise(stats)
    with pytest.raises(ValueError, match='Use stats="norms"'):
        planned[0].advise(stats._replace(noise_scale=None))


def test_nothing_is_allocated():
    """A model of 7 billion parameters, whose shapes alone are here."""
    params = {"layers": shape(32, 4096, 53_248), "out": shape(4096, 8192)}

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w.T, None), x, params["layers"])
        return jnp.mean((x @ params["out"]) ** 2)

    made = plan(loss, optax.adam(1e-3), params, shape(512, 4096), memory_limit="80GB")
    assert made.verdict == "accumulation_cannot_help" and made.params_bytes > 4 * 7e9
    best = plan(
        loss, optax.adam(1e-3), params, shape(512, 4096), memory_limit="200GB", microbatch_sizes=[8]
    ).best
    assert best.k == 64 and best.peak_bytes > 4 * 4 * 7e9


# The command


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Factories of problems in a module of the working directory."""
    (tmp_path / "to_plan.py").write_text(
        """
import jax, jax.numpy as jnp, optax
from accum_jax import Problem

def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)

w, x = jnp.ones((64, 64)), jax.ShapeDtypeStruct((8, 64), jnp.float32)

def good():
    print("not JSON")
    return Problem(loss, w, x, optax.sgd(0.1))

def no_optimizer():
    return Problem(loss, w, x)
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("to_plan", None)


def test_command_plans_the_effective_batch(module, capsys):
    arguments = ["plan", "to_plan:good", "--effective-batch", "2048", "--data-parallel", "8"]
    assert main([*arguments, "--memory-limit", "150kB", "--json", "--out", "plan.png"]) == 0
    printed = capsys.readouterr()
    made = json.loads(printed.out)
    assert (made["num_rows"], made["data_parallel"], made["verdict"]) == (2048, 8, "accumulate")
    assert made["best"]["microbatch_size"] * made["best"]["k"] == 256
    assert (module / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "not JSON" in printed.err


def test_command_says_no(module, capsys):
    assert main(["plan", "to_plan:good", "--memory-limit", "30KiB"]) == 1
    assert "ACCUMULATION CANNOT HELP" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["to_plan:no_optimizer"], "a plan needs the optimizer: to_plan:no_optimizer gave tx=None"),
        (["to_plan:good", "--memory-limit", "lots"], "memory_limit='lots' is no amount"),
        (["to_plan:good", "--target", "abacus"], "unknown target 'abacus'. Use"),
        (["to_plan:good", "--data-parallel", "3"], "data_parallel=3 does not divide"),
    ],
)
def test_command_of_bad_usage(arguments, message, module, capsys):
    assert main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("accum-jax plan:") == 1
    assert "ACCUM" not in printed.out


# TPUs and GPUs


def test_sharded_on_a_tpu_that_is_not_here():
    pytest.importorskip("libtpu")
    made = plan(
        lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2),
        optax.adam(1e-3),
        *_sharded(P(None, "d"), size=(4096, 4096), devices=8),
        target="v5e:2x4",
        microbatch_sizes=[1, 2],
    )
    best = made.best
    assert (made.data_parallel, best.microbatch_size, best.k) == (8, 2, 1)
    assert best.params_bytes == 4096 * 4096 * 4 // 8
    assert parts(best) == best.peak_bytes
    assert made.memory_limit == int(15.75 * 2**30)
    assert "cloud.google.com" in str(made) and "an estimate" in str(made)
    assert best.estimated_seconds > 0


def test_the_compiler_refuses_what_does_not_fit_a_tpu():
    pytest.importorskip("libtpu")

    def loss(w, x):
        return jnp.mean(jnp.sin(x @ w) ** 2)

    made = plan(
        loss,
        optax.sgd(0.1),
        shape(128, 2**20),
        shape(8192, 128),
        target="v5e:1x1",
        microbatch_sizes=[64, 8192],
        headroom=0.0,
    )
    best, refused = made.rows
    assert best.fits and not refused.fits
    assert refused.peak_bytes > made.memory_limit
    assert parts(refused) == refused.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:1x1", "v6e:1x1"])
def test_boundary_of_a_large_transformer(target):
    """More than 100 million parameters: what fits compiles, the next larger does not."""
    pytest.importorskip("libtpu")
    from benchmarks import models

    model = models.transformer(layers=16, width=768, length=512, microbatch_size=1)
    params, batch = model.shapes(1024)
    assert sum(x.size for x in jax.tree.leaves(params)) > 100e6
    made = plan(model.loss_fn, optax.adam(1e-3), params, batch, target=target, headroom=0.0)
    larger = made.rows[made.rows.index(made.best) + 1]
    assert made.verdict == "accumulate" and made.best.peak_bytes <= made.memory_limit
    assert not larger.fits and larger.peak_bytes > made.memory_limit


@pytest.mark.accelerator
def test_peak_on_a_gpu_is_that_of_its_own_counter():
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")
    from benchmarks import models

    model = models.mlp(layers=4, width=4096, microbatch_size=1)
    params, batch = model.shapes(4096)
    tx = optax.adam(1e-3)
    best = plan(model.loss_fn, tx, params, batch, microbatch_sizes=[1024]).best
    grad_fn = value_and_grad(model.loss_fn, microbatch_size=1024)

    def step(params, opt_state, batch):
        _, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, batch))
    state = jax.jit(tx.init)(zeros[0])
    jax.block_until_ready(jax.jit(step, donate_argnums=(0, 1))(zeros[0], state, zeros[1]))
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    assert best.peak_bytes == pytest.approx(peak, rel=0.05)
