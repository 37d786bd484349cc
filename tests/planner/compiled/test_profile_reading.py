"""Operations of compiled programs by hand, and a trace of a small one read back."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl.planner.compiled.operations import KINDS, operations_of
from jaxrl.planner.compiled.profile_reading import (
    PHASE,
    _own_times,
    compiled_operations,
    read_profile,
)

# As XLA writes programs; two layers of [4, 8, 8] weights are sliced inside the fusion.
TEXT = """HloModule jit_f, is_scheduled=true

%fused (param_0: f32[4,8], param_1: f32[2,8,8], param_2: s32[]) -> f32[4,8] {
  %param_0 = f32[4,8]{1,0} parameter(0)
  %param_1 = f32[2,8,8]{2,1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %slice = f32[1,8,8]{2,1,0} dynamic-slice(%param_1, %param_2, %zero, %zero), dynamic_slice_sizes={1,8,8}
  %matrix = f32[8,8]{1,0} bitcast(%slice)
  ROOT %dot.1 = f32[4,8]{1,0} dot(%param_0, %matrix), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[4,8], w: f32[2,8,8], i: s32[]) -> f32[8,4] {
  %x = f32[4,8]{1,0} parameter(0)
  %w = f32[2,8,8]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %dot_fusion = f32[4,8]{1,0} fusion(%x, %w, %i), kind=kLoop, calls=%fused
  %tanh.1 = f32[4,8]{1,0} tanh(%dot_fusion), metadata={op_name="jit(f)/mlp/tanh"}
  %exp.1 = f32[4,8]{1,0} exponential(%tanh.1), metadata={op_name="jit(f)/transpose(jvp(attend))/exp"}
  %ar = (f32[4,8]{1,0:T(8,128)}, f32[4,8]{1,0}) all-reduce-start(%exp.1), replica_groups={}
  ROOT %t = f32[8,4]{1,0} transpose(%exp.1), dimensions={1,0}
}
"""


def test_a_program_by_hand():
    found = operations_of(TEXT)
    assert found["dot_fusion"].kind == "dot"
    assert found["dot_fusion"].flops == 2 * 4 * 8 * 8
    # x, one of the two matrices, the index, and the result.
    assert found["dot_fusion"].nbytes == 4 * (32 + 64 + 1 + 32)
    kinds = {name: found[name].kind for name in ("tanh.1", "exp.1", "ar", "t", "x")}
    assert kinds == {
        "tanh.1": "elementwise",
        "exp.1": "attention",
        "ar": "collective",
        "t": "copy/transpose",
        "x": "control",
    }
    assert found["t"].nbytes == 2 * 4 * 32
    assert {operation.kind for operation in found.values()} <= set(KINDS)


def test_a_slice_that_is_updated_in_place_is_all_that_is_written():
    text = """HloModule jit_g
ENTRY %main (x: f32[100,8], y: f32[1,8], i: s32[]) -> f32[100,8] {
  %x = f32[100,8]{1,0} parameter(0)
  %y = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %update = f32[100,8]{1,0} dynamic-update-slice(%x, %y, %i, %i)
}
"""
    assert operations_of(text)["update"].nbytes == 2 * 4 * 8


def test_an_operation_that_runs_others_has_the_rest_of_its_time():
    events = [
        (0.0, 10.0, "p", "loop"),
        (1.0, 4.0, "p", "inner"),
        (2.0, 3.0, "p", "innermost"),
        (5.0, 6.0, "p", "inner"),
        (10.0, 12.0, "p", "after"),
    ]
    own = {(start, name): time for start, time, _, name in _own_times(events)}
    assert own == {
        (0.0, "loop"): 6.0,
        (1.0, "inner"): 2.0,
        (2.0, "innermost"): 1.0,
        (5.0, "inner"): 1.0,
        (10.0, "after"): 2.0,
    }


def test_compiled_programs_of_this_process_are_known():
    def twice_at_once(x):
        return (x @ x) @ x

    x = jnp.ones((32, 32))
    jax.block_until_ready(jax.jit(twice_at_once)(x))
    flops = sum(
        operation.flops
        for (program, _), operation in compiled_operations().items()
        if program == "jit_twice_at_once" and operation.kind == "dot"
    )
    # A product that is fused is listed twice, by itself and in its fusion; only one of them runs.
    assert flops in (2 * 2 * 32**3, 2 * 2 * 2 * 32**3)


def test_a_trace_read_back(tmp_path):
    """Products in a loop, in one phase inside another; what the loop takes is counted once."""
    sizes, steps = 128, 5

    def looped_products(x):
        def body(x, _):
            with jax.named_scope("attend"):
                scores = jax.nn.softmax(x @ x)
            return jnp.tanh(x @ scores), None

        return jax.lax.scan(body, x, None, length=steps)[0]

    program, x = jax.jit(looped_products), jnp.ones((sizes, sizes)) / sizes
    jax.block_until_ready(program(x))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(tmp_path), profiler_options=options)
    with jax.profiler.TraceAnnotation(f"{PHASE}outer"):
        with jax.profiler.TraceAnnotation(f"{PHASE}empty"):
            pass
        jax.block_until_ready(program(x))
        with jax.profiler.TraceAnnotation(f"{PHASE}inner"):
            jax.block_until_ready(program(x))
    jax.profiler.stop_trace()
    found = read_profile(tmp_path, compiled_operations())
    assert list(found.seconds) == ["outer", "empty", "inner"]
    flops = steps * 2 * 2 * sizes**3
    # Where an operation of one phase ends is a matter of threads; together they are all there.
    assert found.phase("outer").flops + found.phase("inner").flops == pytest.approx(2 * flops)
    assert found.phase("inner").flops == pytest.approx(flops)
    assert found.kind("attention").flops == pytest.approx(flops)
    assert found.kind("dot").flops == pytest.approx(flops)
    assert 0 < found.phase("inner").seconds <= 8 * found.seconds["inner"]
    assert found.phase("empty").seconds == 0
