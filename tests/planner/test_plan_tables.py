"""The table of a dry run: what is summed, and how it is printed."""

import io

import pytest
from plans import RECIPE, buffers_named, plan_32b
from rich.console import Console

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.planner import plan_tables
from jaxrl.planner.plan import Plan
from jaxrl.planner.trace_plan import trace_plan


def text_of(plan: Plan) -> str:
    out = io.StringIO()
    plan_tables.show(plan, Console(file=out))
    return out.getvalue()


def test_totals_leave_out_what_is_not_there():
    recipe = plan_32b()
    (pool,) = recipe.pools
    total = sum(h.bytes_per_device for h in pool.resident_buffers)
    # While the actor learns there is neither the cache nor what it samples with.
    names = ("KV cache and slots", "actor in generation")
    gone = sum(buffers_named(recipe, name).bytes_per_device for name in names)
    assert pool.bytes_in("learning") == total - gone
    assert pool.bytes_in("sampling") < total
    assert max(pool.bytes_in("sampling"), pool.bytes_in("learning")) < 95e9


def test_plain_text_is_one_table_without_control_characters():
    recipe = plan_32b()
    text = text_of(recipe)
    assert text.isascii() and "\x1b" not in text
    assert text.count("role or event") == 1
    assert "128 devices, training 1-8-16 fsdp 16, generation 1-8-1-16" in text.splitlines()[0]
    # Not wrapped: every line of the table is as wide as the first.
    assert len({len(line.rstrip()) for line in text.splitlines()[1:] if line.strip()}) == 1


def test_a_terminal_gets_the_table_in_its_own_width():
    recipe = plan_32b()
    out = io.StringIO()
    plan_tables.show(recipe, Console(file=out, force_terminal=True, width=90))
    assert "╭" in out.getvalue()


@pytest.mark.parametrize(
    ("slots", "phrase"),
    [(16 * 12, "too much for v5e; leaves"), (16 * 400, "too much for b200 or less")],
)
def test_says_which_devices_are_too_small(slots, phrase):
    config = load_config(Config, str(RECIPE), {"rollout.slots": str(slots)})
    assert phrase in text_of(trace_plan(config))
