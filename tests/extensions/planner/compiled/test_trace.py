"""Tracing takes next to nothing, and finds what does not fit."""

import dataclasses
import resource
import time

import jax
import pytest
from plans import RECIPE, TINY_TRAIN, buffers_named, plan_tiny

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.layout import LayoutConfig
from jaxrl_planner.make_plan import trace_plan


def test_the_32b_recipe_takes_neither_memory_nor_time():
    config = load_config(Config, str(RECIPE), {})
    arrays = len(jax.live_arrays())
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s = time.process_time()
    trace_plan(config)
    assert len(jax.live_arrays()) == arrays
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 500_000
    assert time.process_time() - started_s < 50


def test_what_does_not_divide_is_refused():
    with pytest.raises(UserError, match="9"):
        plan_tiny(rollout__slots=9)
    with pytest.raises(UserError, match="3"):
        plan_tiny(train=dataclasses.replace(TINY_TRAIN, rows=3))


@pytest.mark.long
def test_a_stage_may_have_a_single_layer():
    # Four layers in four stages: a tick has no scan over layers. Seven ticks of a quarter of the rows keep
    # about as much as three ticks of half of them.
    one, two = (
        buffers_named(
            plan_tiny(
                mesh=LayoutConfig(train=f"{p}-1-2", generate=f"1-1-{p}-2", fsdp=2),
                train__rows=8,
                rollout__prefill_prompts=8,
            ),
            "kept of the layers",
        )
        for p in (4, 2)
    )
    assert 0.5 < one.num_values / two.num_values < 2
