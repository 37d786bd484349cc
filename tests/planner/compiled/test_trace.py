"""Tracing takes next to nothing, and finds what does not fit."""

import dataclasses
import resource
import time

import jax
import pytest
from plans import RECIPE, TINY_TRAIN, plan_tiny

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.planner.trace_plan import trace_plan


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
