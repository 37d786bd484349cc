"""What a step is told as."""

import dataclasses

import numpy as np
import pytest

from jaxrl.dataflows.step_metrics import (
    advantage_metrics,
    batch_metrics,
    timing_per_token,
    value_metrics,
)
from jaxrl.types import PackedBatch, TrainBatch, ValueBatch


def targets(value, target, mask) -> ValueBatch:
    shape = (1, 1, 1, len(value))
    mask = np.array(mask, np.float32).reshape(shape)
    ints = np.ones(shape, np.int32)
    packing = PackedBatch(ints, ints, ints, 0 * ints, mask, np.ones(1, np.int32))
    values = (np.array(x, np.float32).reshape(shape) for x in (value, target))
    return ValueBatch(
        **packing.packing(), **dict(zip(("old_value", "target"), values, strict=True))
    )


def test_what_a_critic_said_and_how_much_of_the_returns_it_saw():
    # Returns 0 and 2 of variance 1, errors 1 and 0 of variance 1/4; what is not trained does not count.
    metrics = value_metrics("critic", targets([-1, 2, 99, np.nan], [0, 2, -99, 5], [1, 1, 0, 0]))
    assert {name: float(x) for name, x in metrics.items()} == pytest.approx(
        {
            "critic/vf_explained_var": 0.75,
            "critic/values/mean": 0.5,
            "critic/values/min": -1,
            "critic/values/max": 2,
            "critic/returns/mean": 1,
            "critic/returns/min": 0,
            "critic/returns/max": 2,
        }
    )


@pytest.mark.parametrize("mask", [[1, 1], [0, 0]])
def test_returns_without_variance_leave_nothing_to_explain(mask):
    metrics = value_metrics("cost_critic", targets([1, 2], [3, 3], mask))
    assert float(metrics["cost_critic/vf_explained_var"]) == 0
    assert all(np.isfinite(float(x)) for x in metrics.values())


@pytest.mark.parametrize(("mask", "expected"), [([1, 1, 0], (0.5, 2, -1, 2)), ([0] * 3, [0] * 4)])
def test_advantages_of_trained_tokens(mask, expected):
    batch = targets([0] * 3, [0] * 3, mask)
    advantage = np.float32([-1, 2, np.nan]).reshape(batch.tokens.shape)
    found = advantage_metrics(TrainBatch.of(batch, advantage=advantage))
    names = [f"critic/advantages/{kind}" for kind in ("mean", "max", "min")]
    names.append("train/num_trained_tokens")
    assert {name: float(x) for name, x in found.items()} == dict(zip(names, expected, strict=True))


def test_turns_are_the_prompts_the_models_and_the_environments(make_scored):
    scored = make_scored([0], num_samples=3)
    completions = dataclasses.replace(
        scored.completions,
        tokens=tuple(np.zeros(6, np.int32) for _ in range(3)),
        # One answer, one answer that a tool replied to at its end, and two of these that went on.
        mask=tuple(
            np.array(m, np.float32) for m in ([1] * 6, [1] * 4 + [0] * 2, [1, 0, 1, 1, 0, 1])
        ),
    )
    metrics = batch_metrics(scored.replace(completions=completions), max_prompt_tokens=9)
    assert (metrics["num_turns/min"], metrics["num_turns/max"]) == (2, 6)
    assert metrics["num_turns/mean"] == pytest.approx((2 + 3 + 6) / 3)
    assert (metrics["tool_call_counts/min"], metrics["tool_call_counts/max"]) == (0, 2)
    assert metrics["perf/response_num_tokens"] == 18


def test_time_a_token():
    metrics = {
        "timing_s/gen": 2.0,
        "timing_s/update_actor": 3.0,
        "timing_s/testing": 9.0,
        "perf/total_num_tokens": 1000.0,
        "perf/response_num_tokens": 400.0,
    }
    assert timing_per_token(metrics) == {
        "timing_per_token_ms/gen": 5.0,
        "timing_per_token_ms/update_actor": 3.0,
    }
    # What dynamic sampling drops was sampled too.
    assert timing_per_token(metrics | {"train/num_response_tokens_sampled": 800.0})[
        "timing_per_token_ms/gen"
    ] == pytest.approx(2.5)
    assert timing_per_token({"timing_s/gen": 2.0}) == {}
