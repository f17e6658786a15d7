"""What only a real GPU or TPU can show: `JAX_PLATFORMS=cuda,cpu python -m pytest -m accelerator`.

`JAX_PLATFORMS=tpu,cpu` on a TPU. One process at a time: the memory counter is the device's.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before jax starts

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import float64_gradient, rms_error
from jax.sharding import NamedSharding, PartitionSpec

import accum_jax
from accum_jax import dynamic_loss_scale, loss_scale, multi_steps, telemetry
from benchmarks import memory, models, speed, ways

K = 8

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs a GPU or a TPU"),
]


def peak_bytes() -> int:
    stats = jax.devices()[0].memory_stats()
    if not stats or "peak_bytes_in_use" not in stats:
        pytest.skip("this device counts no peak")
    return stats["peak_bytes_in_use"]


# First in the file: the counter never falls, so smaller peaks have to come before larger ones.
@pytest.mark.parametrize("way", [ways.IN_PLACE, ways.HAND_WRITTEN], ids=lambda way: way.name)
def test_the_compiler_tells_the_peak(way, record_property):
    model = memory.large_transformer()
    before = peak_bytes()
    params, batch = model.shapes(model.microbatch_size * K)
    state = jax.eval_shape(way.optimizer(K).init, params)
    step = jax.jit(way.step(model, K), donate_argnums=(0, 1)).lower(params, state, batch).compile()
    analysis = step.memory_analysis()
    assert analysis is not None
    told = analysis.peak_memory_in_bytes
    if before > told:
        pytest.skip(f"another program took {before} bytes before, this one takes {told}")
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    batch = jax.tree.map(jnp.asarray, model.batch(model.microbatch_size * K))
    for _ in range(2):
        params, state, _ = step(params, state, batch)
    jax.block_until_ready(params)
    measured = peak_bytes()
    record_property("told", told)
    record_property("measured", measured)
    np.testing.assert_allclose(measured, told, rtol=0.05)


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("in_place", [False, True])
def test_equals_the_whole_batch(precision, in_place):
    model = models.mlp(layers=3, width=256, microbatch_size=32)
    params = jax.jit(model.init)(jax.random.key(0))
    batch = jax.tree.map(jnp.asarray, model.batch(32 * K))
    accumulated = accum_jax.grad(model.loss_fn, k=K, in_place=in_place)
    with jax.default_device(jax.devices("cpu")[0]):
        exact = float64_gradient(model.loss_fn, *jax.device_get((params, batch)))
    with jax.default_matmul_precision(precision):
        whole = jax.jit(jax.grad(model.loss_fn))(params, batch)
        ours = jax.jit(accumulated)(params, batch)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, whole)
    # Both round their products as the device does; ours must not add to it.
    assert rms_error(ours, exact) <= 1.5 * rms_error(whole, exact)


def test_bfloat16_is_summed_in_float32():
    grads = jax.jit(accum_jax.grad(lambda w, x: jnp.mean(w * x), k=512))
    ones = jnp.ones(512, jnp.bfloat16)
    assert float(grads(jnp.ones((), jnp.bfloat16), ones)) == 1.0


def test_float16_with_a_loss_scale():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, 16)), jnp.float16)
    y = x @ jnp.asarray(rng.normal(size=16), jnp.float16)
    tx = multi_steps(dynamic_loss_scale(optax.adam(3e-2), init_scale=2.0**24), k=K)
    params = jnp.zeros(16, jnp.float16)
    state = tx.init(params)

    @jax.jit
    def micro_step(params, state, x, y):
        def scaled(params):
            loss = jnp.mean(jnp.square(x @ params - y).astype(jnp.float32))
            return loss * loss_scale(state), loss

        grads, loss = jax.grad(scaled, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for i in range(60 * K):
        params, state, loss = micro_step(params, state, x[i % K :: K], y[i % K :: K])
        losses.append(float(loss))
    log = telemetry(state)
    # 2^24 overflows at first: those windows are skipped whole and the scale falls to what fits.
    skipped = int(log["loss_scale/num_skipped"])
    assert skipped > 0
    assert float(log["loss_scale/scale"]) == 2.0 ** (24 - skipped)
    assert int(log["multi_steps/gradient_step"]) == 60 - skipped
    assert np.mean(losses[-K:]) < 0.2 * np.mean(losses[:K])


def test_time_against_the_hand_written_scan(record_property):
    """Records ratios of interleaved updates; how they should be is the benchmarks' to say."""
    selected = (ways.HAND_WRITTEN, ways.ACCUMULATE, ways.IN_PLACE)
    for row in speed.measure(speed.small_transformer(), selected, K, seconds=5):
        record_property(row["way"], row["ratio"])
        assert row["rounds"] >= 8


@pytest.mark.skipif(jax.device_count() == 1, reason="needs several devices")
def test_one_reduction_over_all_devices():
    model = models.mlp(layers=2, width=256, microbatch_size=8)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    params = jax.jit(model.init)(jax.random.key(0))
    batch = jax.tree.map(jnp.asarray, model.batch(8 * K * jax.device_count()))
    with jax.default_matmul_precision("highest"):
        whole = jax.jit(jax.grad(model.loss_fn))(params, batch)
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    with jax.default_matmul_precision("highest"):
        step = jax.jit(accum_jax.grad(model.loss_fn, k=K, mesh=mesh)).lower(params, batch).compile()
    found = accum_jax.collectives(step)
    assert {(c.kind, c.dtype, c.inside_loop) for c in found} == {("all-reduce", "float32", False)}
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    assert num_bytes <= sum(c.bytes for c in found) <= num_bytes + 64
    chex.assert_trees_all_close(step(params, batch), whole, rtol=1e-5, atol=1e-6)
