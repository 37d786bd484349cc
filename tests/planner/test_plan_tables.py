"""The table of a dry run: what is summed, and how it is printed."""

import dataclasses
import functools
import io

import jax
import pytest
from plans import RECIPE, buffers_named, plan_32b
from rich.console import Console

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.mesh.hardware import accelerator
from jaxrl.planner import plan_tables
from jaxrl.planner.compiled.ahead import CompiledProgram
from jaxrl.planner.compiled.traffic import Traffic
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.hardware.topologies import Topology
from jaxrl.planner.plan import Plan, Target
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


@functools.cache
def compiled_32b() -> Plan:
    """The recipe on its devices, with a program that a compiler described."""
    topology = Topology("h100:16x8", accelerator("h100"), tuple(jax.devices()), 8)
    config = load_config(Config, f"{RECIPE}:h100-128", {})
    plan = trace_plan(config, Cluster.parse(topology.name))
    gb = 10**9
    traffic = Traffic("reduce-scatter", ("fsdp", "tensor_gen"), True, 14_241.0, 1_162.84e9)
    update = CompiledProgram(
        *("actor", "update", "learning", 4 * gb, 20 * gb, 23 * gb, 9 * gb, 85 * gb),
        *(11e18, 4e11, (traffic,), 128, 20.0, False),
    )
    pool = dataclasses.replace(plan.pools[0], programs=(update,))
    return dataclasses.replace(plan, pools=(pool,), target=Target(topology, "bfloat16"))


@pytest.mark.parametrize(("width", "terminal"), [(50, True), (50, False), (120, True)])
def test_tables_fit_the_width_that_there_is(width, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for plan in (plan_32b(), compiled_32b()):
        out = io.StringIO()
        plan_tables.show(plan, Console(file=out, force_terminal=terminal, color_system=None))
        text = out.getvalue()
        assert max(map(len, text.splitlines())) <= width
        # Long texts are folded, not cut off.
        assert "…" not in text and "optim" in text


def test_a_wide_table_has_every_column():
    text = text_of(compiled_32b())
    assert "co-resident" in text and "traffic" in text and "bound by" in text
    assert max(map(len, text.splitlines())) > 200


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((1_127.87, "1,127.9 s"), (-77.24, "-77.2 s"), (1.325, "1.32 s"), (0.0, "0 s")),
        *((0.52, "520 ms"), (0.00125, "1.25 ms"), (9.9e-5, "99 us"), (-6.6e-6, "-6.6 us")),
    ],
)
def test_seconds_have_a_unit_of_their_size(seconds, text):
    assert plan_tables.seconds_text(seconds) == text
