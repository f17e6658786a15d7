"""What a compiled program exchanges, read off its text."""

from __future__ import annotations

import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from accum_jax import Collective, collectives


def compiled(fn, *args, size=4):
    """`fn` mapped over `size` devices, its arguments sharded by rows."""
    mesh = jax.make_mesh((size,), ("i",), (AxisType.Auto,), devices=jax.devices()[:size])
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    return jax.jit(mapped).lower(*args).compile()


KINDS = {  # the bytes of 4 x 8 float32 on each of 4 devices
    "all-reduce": (lambda x: lax.psum(x, "i"), 128),
    "reduce-scatter": (lambda x: lax.psum_scatter(x, "i", tiled=True), 128),
    "all-gather": (lambda x: lax.all_gather(x, "i", tiled=True), 512),
    "all-to-all": (lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True), 128),
    "collective-permute": (lambda x: lax.ppermute(x, "i", [(0, 1), (1, 0)]), 128),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind_and_bytes(kind):
    fn, size = KINDS[kind]
    program = compiled(fn, jnp.ones((16, 8)))
    assert collectives(program) == [Collective(kind, "float32", size, False, 1)]
    assert collectives(program.as_text()) == collectives(program)


@pytest.mark.parametrize(
    ("dtype", "size"), [("int32", 128), ("uint8", 32), ("complex64", 256), ("bool", 32)]
)
def test_dtypes(dtype, size):
    program = compiled(lambda x: lax.all_gather(x, "i", tiled=True), jnp.ones((4, 8), dtype))
    assert [(c.dtype, c.bytes) for c in collectives(program)] == [(dtype, size)]


def test_a_combined_collective_is_one_for_each_dtype():
    def total(x):
        return lax.psum((x, x[:, :1], x.astype(jnp.int32)), "i")

    found = collectives(compiled(total, jnp.ones((16, 8))))
    assert {(c.kind, c.dtype): c.bytes for c in found} == {
        ("all-reduce", "float32"): 128 + 16,
        ("all-reduce", "int32"): 128,
    }


def test_loops_are_followed_through_calls_and_branches():
    def inner(x):
        return lax.fori_loop(0, 3, lambda _, x: jnp.sin(lax.psum(x, "i")), x)

    def branch(x):
        return lax.cond(x[0, 0] > 0, inner, jnp.cos, x)

    def nested(x):
        x = lax.scan(lambda x, _: (branch(x), None), lax.pmax(x, "i"), length=5)[0]
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: lax.pmin(x, "i") + 1, x)

    found = collectives(compiled(nested, jnp.ones((16, 8))))
    assert [(c.inside_loop, c.trip_count) for c in found] == [(False, 1), (True, 15), (True, None)]


def test_automatic_sharding_reduces_in_every_microbatch():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))

    def gradient(w, rows):
        split = rows.reshape(-1, 4, 3)
        grad = jax.grad(lambda w, x: jnp.mean((x @ w) ** 2))
        step = lambda total, i: (total + grad(w, split[:, i]), None)  # noqa: E731
        return lax.scan(step, jnp.zeros(3), jnp.arange(4))[0]

    args = [
        jax.ShapeDtypeStruct((3,), jnp.float32, sharding=NamedSharding(mesh, P())),
        jax.ShapeDtypeStruct((64, 3), jnp.float32, sharding=NamedSharding(mesh, P("data"))),
    ]
    found = collectives(jax.jit(gradient).lower(*args).compile())
    assert found == [Collective("all-reduce", "float32", 12, True, 4)]


def test_one_device_exchanges_nothing():
    assert collectives(jax.jit(jnp.sin).lower(1.0).compile()) == []


# Forms that the CPU's compiler does not write

GPU = """\
    HloModule jit_f, is_scheduled=true

    %add.1 (x.1: f32[], y.1: f32[]) -> f32[] {
      %x.1 = f32[] parameter(0)
      %y.1 = f32[] parameter(1)
      ROOT %sum.1 = f32[] add(%x.1, %y.1)
    }

    %wrapped_all_to_all (p: bf16[8,4]) -> bf16[8,4] {
      %p = bf16[8,4]{1,0} parameter(0)
      ROOT %all-to-all.1 = bf16[8,4]{1,0} all-to-all(%p), channel_id=4, dimensions={0}
    }

    ENTRY %main.9 (a: f32[2,4], b: bf16[8,4]) -> (f32[2,4], bf16[8,4]) {
      %a = f32[2,4]{1,0} parameter(0), metadata={op_name="a"}
      %b = bf16[8,4]{1,0} parameter(1), metadata={op_name="b"}
      %all-reduce-start = f32[2,4]{1,0} all-reduce-start(%a), channel_id=1, to_apply=%add.1
      %all-reduce-done = f32[2,4]{1,0} all-reduce-done(%all-reduce-start)
      %all-gather-start.1 = ((f32[2,4]{1,0}, bf16[8,4]{1,0}), (f32[16,4]{1,0}, bf16[64,4]{1,0})) \
all-gather-start(%a, %b), channel_id=2, dimensions={0}
      %all-gather-done.1 = (f32[16,4]{1,0}, bf16[64,4]{1,0}) all-gather-done(%all-gather-start.1)
      %permute-start = (f32[2,4]{1,0}, f32[2,4]{1,0}, u32[], u32[]) \
collective-permute-start(%a), channel_id=3, source_target_pairs={{0,1},{1,0}}
      %permute-done = f32[2,4]{1,0} collective-permute-done(%permute-start)
      %async-start = ((bf16[8,4]{1,0}), bf16[8,4]{1,0}) async-start(%b), \
calls=%wrapped_all_to_all
      %async-done = bf16[8,4]{1,0} async-done(%async-start)
      ROOT %result = (f32[2,4]{1,0}, bf16[8,4]{1,0}) tuple(%permute-done, %async-done)
    }
"""

TPU = """\
    HloModule jit_f, is_scheduled=true

    %fused.1 (q.1: bf16[1,64,256]) -> bf16[1,256,256] {
      %q.1 = bf16[1,64,256]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
      %all-gather.23 = bf16[1,256,256]{2,1,0:T(8,128)(2,1)} all-gather(%q.1), channel_id=12, \
dimensions={1}, backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
      ROOT %start = bf16[1,256,256]{2,1,0:T(8,128)} custom-call(%all-gather.23)
    }

    %async_collective_fusion.29 (q.2: bf16[1,64,256]) -> bf16[1,256,256] {
      %q.2 = bf16[1,64,256]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
      ROOT %all-gather.25 = bf16[1,256,256]{2,1,0:T(8,128)(2,1)} all-gather(%q.2), \
channel_id=12, backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
    }

    %all-reduce-scatter.1 (input.2: f32[256,256]) -> f32[256,64] {
      %input.2 = f32[256,256]{0,1:T(8,128)} parameter(0)
      %all-reduce.16 = f32[256,256]{0,1:T(8,128)} all-reduce(%input.2), channel_id=7
      ROOT %slice = f32[256,64]{0,1:T(8,128)} dynamic-slice(%all-reduce.16)
    }

    ENTRY %main.9 (g: f32[256,256], p: bf16[1,64,256]) -> f32[256,64] {
      %g = f32[256,256]{0,1:T(8,128)} parameter(0)
      %p = bf16[1,64,256]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
      %a = bf16[1,256,256]{2,1,0:T(8,128)} fusion(%p), kind=kCustom, calls=%fused.1
      %b = bf16[1,256,256]{2,1,0} fusion(%p), kind=kOutput, calls=%async_collective_fusion.29
      ROOT %c = f32[256,64]{0,1:T(8,128)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
    }
"""


# A TPU's loops do not say how often they run.
LOOPS = """\
    HloModule jit_f, is_scheduled=true

    %test.1 (p.1: (s32[], f32[4])) -> pred[] {
      %p.1 = (s32[]{:T(128)}, f32[4]{0:T(128)}) parameter(0)
      %limit.1 = s32[]{:T(128)} constant(LIMIT)
      %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
      ROOT %lt.1 = pred[]{:T(512)} compare(%i.1, %limit.1), direction=LT
    }

    %body.1 (p.2: (s32[], f32[4])) -> (s32[], f32[4]) {
      %p.2 = (s32[]{:T(128)}, f32[4]{0:T(128)}) parameter(0)
      %step.1 = s32[]{:T(128)} constant(STEP)
      %i.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=0
      %x.2 = f32[4]{0:T(128)} get-tuple-element(%p.2), index=1
      %all-reduce.1 = f32[4]{0:T(128)} all-reduce(%x.2), channel_id=1
      %next.1 = s32[]{:T(128)} add(%i.2, %step.1)
      ROOT %out.1 = (s32[]{:T(128)}, f32[4]{0:T(128)}) tuple(%next.1, %all-reduce.1)
    }

    ENTRY %main.9 (x: f32[4]) -> (s32[], f32[4]) {
      %x = f32[4]{0:T(128)} parameter(0)
      %start = s32[]{:T(128)} constant(START)
      %copy.1 = s32[]{:T(128)} copy(%start)
      %tuple.1 = (s32[]{:T(128)}, f32[4]{0:T(128)}) tuple(%copy.1, %x)
      ROOT %while.1 = (s32[]{:T(128)}, f32[4]{0:T(128)}) while(%tuple.1), condition=%test.1, \
body=%body.1
    }
"""


@pytest.mark.parametrize(
    ("start", "limit", "step", "times"),
    [("0", "8", "1", 8), ("1", "14", "2", 7), ("5", "5", "1", 0), ("0", "8", "0", None)],
)
def test_a_loop_whose_trip_count_only_its_counter_tells(start, limit, step, times):
    text = LOOPS.replace("START", start).replace("LIMIT", limit).replace("STEP", step)
    assert collectives(textwrap.dedent(text)) == [
        Collective("all-reduce", "float32", 16, True, times)
    ]


def test_a_loop_whose_trip_count_nobody_knows():
    text = LOOPS.replace("constant(LIMIT)", "parameter(1)").replace("START", "0")
    (found,) = collectives(textwrap.dedent(text.replace("STEP", "1")))
    assert (found.inside_loop, found.trip_count) == (True, None)


def test_asynchronous_forms():
    assert collectives(textwrap.dedent(GPU)) == [
        Collective("all-reduce", "float32", 32, False, 1),
        Collective("all-gather", "float32", 256, False, 1),
        Collective("all-gather", "bfloat16", 512, False, 1),
        Collective("collective-permute", "float32", 32, False, 1),
        Collective("all-to-all", "bfloat16", 64, False, 1),
    ]


def test_fusions_of_a_tpu():
    assert collectives(textwrap.dedent(TPU)) == [
        Collective("all-gather", "bfloat16", 2 * 256 * 256, False, 1),
        Collective("reduce-scatter", "float32", 4 * 256 * 256, False, 1),
    ]


# Errors


def test_what_is_no_compiled_program_is_refused():
    lowered = jax.jit(jnp.sin).lower(1.0)
    with pytest.raises(
        TypeError, match=r"collectives: expected a compiled .* Lowered.*compile\(\)"
    ):
        collectives(lowered)
    with pytest.raises(TypeError, match="of type int"):
        collectives(3)
    with pytest.raises(ValueError, match=r"collectives: .*ENTRY.*compile\(\)\.as_text\(\)"):
        collectives(lowered.as_text())
