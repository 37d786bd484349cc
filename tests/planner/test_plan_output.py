"""The table of a dry run: what is summed, and how it is printed."""

import dataclasses
import functools
import io

import jax
import pytest
from plans import buffers_named, plan_32b, pod_plan
from rich.console import Console

from jaxrl.planner import plan_output
from jaxrl.planner.compiled.ahead import CompiledProgram, Seconds
from jaxrl.planner.compiled.traffic import Traffic
from jaxrl.planner.hardware.accelerators import accelerator
from jaxrl.planner.hardware.cluster import Topology
from jaxrl.planner.plan import Plan, seconds_text


def text_of(plan: Plan) -> str:
    out = io.StringIO()
    plan_output.show(plan, Console(file=out))
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
    plan_output.show(recipe, Console(file=out, force_terminal=True, width=90))
    assert "╭" in out.getvalue()


@pytest.mark.parametrize(
    ("share", "phrase"), [(0.4, "too much for v5e; leaves"), (9.0, "too much for b200 or less")]
)
def test_says_which_devices_are_too_small(share, phrase):
    plan = plan_32b()
    held = tuple(
        dataclasses.replace(h, bytes_per_device=int(share * h.bytes_per_device))
        for h in plan.pools[0].resident_buffers
    )
    pool = dataclasses.replace(plan.pools[0], resident_buffers=held)
    assert phrase in text_of(dataclasses.replace(plan, pools=(pool,)))


@functools.cache
def compiled_32b() -> Plan:
    """The recipe on its devices, with a program that a compiler described."""
    topology = Topology("h100:16x8", accelerator("h100"), tuple(jax.devices()), 8)
    plan = pod_plan()
    gb = 10**9
    traffic = (
        Traffic("reduce-scatter", ("fsdp", "tensor_gen"), 14_241.0, 1_162.84e9, 1_162.84e9),
        Traffic("all-reduce", ("fsdp",), 51_782.0, 0.34e6, 0.34e6),
    )
    update = CompiledProgram(
        *("actor", "update", "learning", 4 * gb, 20 * gb, 23 * gb, 9 * gb, 85 * gb),
        *(11e18, 4e11, traffic, Seconds(87.0, 0.1, 23.0), 20.0, False),
    )
    pool = dataclasses.replace(plan.pools[0], programs=(update,))
    return dataclasses.replace(plan, pools=(pool,), target=topology)


@pytest.mark.parametrize(("width", "terminal"), [(50, True), (50, False), (120, True)])
def test_tables_fit_the_width_that_there_is(width, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for plan in (plan_32b(), compiled_32b()):
        out = io.StringIO()
        plan_output.show(plan, Console(file=out, force_terminal=terminal, color_system=None))
        text = out.getvalue()
        assert max(map(len, text.splitlines())) <= width
        # Long texts are folded, not cut off.
        assert "…" not in text and "optim" in text


def test_a_wide_table_has_every_column():
    text = text_of(compiled_32b())
    assert "co-resident" in text and "traffic" in text and "bound by" in text
    assert "1,162.84 GB" in text and " 0.34 MB" in text
    assert max(map(len, text.splitlines())) > 200


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((1_127.87, "1,127.9 s"), (-77.24, "-77.2 s"), (1.325, "1.32 s"), (0.0, "0 s")),
        *((0.52, "520 ms"), (0.00125, "1.25 ms"), (9.9e-5, "99 us"), (-6.6e-6, "-6.6 us")),
    ],
)
def test_seconds_have_a_unit_of_their_size(seconds, text):
    assert seconds_text(seconds) == text


def test_the_verdict_says_what_is_rented_for_how_long():
    plan = pod_plan()
    text, times = text_of(plan), plan.times
    assert times is not None
    chip_hours = times.step_s * 400 / 3600 * 128
    assert f"{chip_hours:,.0f} chip-hours for 400 steps" in text
    assert "1,536 prompts x 16 answers = 24,576 are sampled, 8,192 are kept" in text
    assert times.load.lengths_text in " ".join(text.split())


def test_the_use_of_slots_is_in_text_and_json():
    """All tokens of the lengths are decoded in the busy slots."""
    plan = pod_plan()
    times = plan.times
    assert times is not None
    (sampling,) = times.of_stage("generation")
    use, work = sampling.costs.slot_use, times.load.work
    assert use is not None and 0 < use.busy < use.slots
    tokens = times.load.prompts * times.load.samples * work.response_lengths.mean
    steps = tokens / use.busy
    assert use.dispatches * work.tokens_per_dispatch == pytest.approx(steps, rel=1e-3)
    assert use.text in text_of(plan)
    found = plan.as_json()["predicted"]["tasks"][0]["costs"]["slot_use"]
    assert found == dataclasses.asdict(use)
