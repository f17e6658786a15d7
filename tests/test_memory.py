"""What the compiled program costs, read from the compiler: never from a clock."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers import compile_for, cost, mse, mse_problem, strided_scan, temp_bytes

from accum_jax import accumulate

_GRAD = jax.value_and_grad(mse)


def _problem(num_rows):
    return mse_problem(num_rows, features=256, width=256)


@pytest.mark.parametrize("k", [2, 8])
def test_cost_is_that_of_a_scan_written_by_hand(k):
    problem = _problem(32)
    ours = compile_for(accumulate(_GRAD, k), *problem)
    by_hand = compile_for(strided_scan(_GRAD, k), *problem)
    assert cost(ours, "flops") == cost(by_hand, "flops")
    assert cost(ours, "bytes accessed") == pytest.approx(cost(by_hand, "bytes accessed"), rel=0.01)
    assert temp_bytes(ours) == pytest.approx(temp_bytes(by_hand), rel=0.01)


def test_cost_of_narrow_parameters_is_that_of_a_scan_written_by_hand():
    """bfloat16 parameters, summed in float32."""

    def by_hand(params, batch):
        def wide(params, batch):
            return jax.tree.map(lambda x: x.astype(jnp.float32), _GRAD(params, batch))

        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), strided_scan(wide, 4)(params, batch))

    problem = mse_problem(32, features=256, width=256, dtype=jnp.bfloat16)
    ours = compile_for(accumulate(_GRAD, 4), *problem)
    expected = compile_for(by_hand, *problem)
    assert cost(ours, "flops") == cost(expected, "flops")
    assert cost(ours, "bytes accessed") == pytest.approx(cost(expected, "bytes accessed"), rel=0.01)
    assert temp_bytes(ours) == pytest.approx(temp_bytes(expected), rel=0.01)


def test_memory_is_flat_in_k():
    """Microbatches of 8 rows: more of them need no more memory."""
    temps = [temp_bytes(compile_for(accumulate(_GRAD, k), *_problem(8 * k))) for k in (2, 4, 16)]
    assert max(temps) <= 1.01 * min(temps)


def test_short_microbatch_needs_no_more_memory():
    whole = temp_bytes(compile_for(accumulate(_GRAD, microbatch_size=8), *_problem(32)))
    tail = accumulate(_GRAD, microbatch_size=8, remainder="tail")
    # The short microbatch runs after the loop and may hold its gradient beside the accumulator.
    params = 4 * (256 * 256 + 256 + 256 + 1)
    assert temp_bytes(compile_for(tail, *_problem(35))) <= whole + 1.1 * params


def test_fault_memory_falls():
    """More microbatches of one batch of 32 need less memory; all 32 rows still count."""
    params, batch = mse_problem(32, features=16, width=256)
    accumulated = {k: accumulate(_GRAD, k, stats="counts") for k in (1, 4)}
    temps = {k: temp_bytes(compile_for(fn, params, batch)) for k, fn in accumulated.items()}
    assert temps[4] < temps[1]
    assert accumulated[4](params, batch)[1].num_examples == 32
