"""The table of a dry run: what is summed, and how it is printed."""

import dataclasses
import io

import pytest
from plans import buffers_named, plan_32b, pod_plan
from rich.console import Console

from jaxrl_planner import plan_output
from jaxrl_planner.plan import Plan


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
