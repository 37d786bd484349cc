"""Detects divergence by metrics, and remembers the last sound steps."""

import dataclasses

import pytest

from jaxrl.tracking.run_config import DivergenceConfig
from jaxrl.tracking.stage_checkpoints import DivergenceDetector

ACCURACY = "val-core/sums/acc/mean@8"


def watched(rows, **config) -> DivergenceDetector:
    detector = DivergenceDetector(DivergenceConfig(**config))
    for step, metrics in rows.items():
        detector.observe(step, metrics)
    return detector


def test_a_healthy_run_is_sound_where_it_was_measured():
    detector = watched({0: {ACCURACY: 0.4}, 1: {"actor/ppo_kl": 0.01}, 2: {ACCURACY: 0.6}, 3: {}})
    assert detector.found == {}
    # Evaluation measures the end of its step, training the end of the step before.
    assert detector.sound_steps == [2]
    detector.observe(4, {"actor/ppo_kl": 0.02})
    assert detector.sound_steps == [2, 3]


def test_half_of_the_best_accuracy_is_a_divergence_until_it_recovers():
    detector = watched({0: {ACCURACY: 0.4}, 10: {ACCURACY: 0.8}, 11: {}, 12: {}})
    (fault,) = detector.observe(20, {ACCURACY: 0.39})
    assert fault == f"{ACCURACY} 0.39 has lost more than 50% of 0.8"
    assert detector.sound_steps == [10, 11]
    # It is reported once, and steps without faults in between do not count.
    assert detector.observe(21, {"actor/ppo_kl": 0.0}) == []
    assert detector.observe(30, {ACCURACY: 0.1}) == []
    assert detector.sound_steps == [10, 11]
    detector.observe(40, {ACCURACY: 0.5})
    assert detector.found == {} and detector.sound_steps == [40]


def test_a_metric_that_leaves_its_range():
    detector = watched({1: {"sft/loss": 2.0}, 2: {"sft/loss": 1.5}})
    assert detector.observe(3, {"sft/loss": 3e5}) == ["sft/loss 3e+05 is not between 0 and 20"]
    assert detector.sound_steps == [1]
    own = watched({1: {"actor/entropy": 0.3}}, ranges={"actor/entropy": (0.01, 2)})
    assert own.observe(2, {"actor/entropy": 0.001, "sft/loss": 1e9})


def test_a_reward_below_a_set_value():
    rows = {1: {"critic/score/mean": -0.5}, 2: {"critic/score/mean": 0.7}}
    assert watched(rows).observe(3, {"critic/score/mean": -1.0}) == []
    ranges = {"critic/score/mean": (-0.8, float("inf"))}
    (fault,) = watched(rows, ranges=ranges).observe(3, {"critic/score/mean": -1.0})
    assert fault == "critic/score/mean -1 is not between -0.8 and inf"


def test_a_run_that_starts_at_zero_has_not_diverged():
    detector = watched({0: {ACCURACY: 0.0}, 10: {ACCURACY: 0.0}, 20: {ACCURACY: 0.01}})
    assert detector.found == {} and detector.sound_steps == [20]


def test_a_resumed_run_decides_the_same():
    detector = watched({0: {ACCURACY: 0.8}, 9: {}})
    detector.observe(10, {ACCURACY: 0.1})
    again = DivergenceDetector(DivergenceConfig())
    again.restore(detector.record())
    for one in (detector, again):
        assert one.observe(20, {ACCURACY: 0.3}) == []
        assert one.sound_steps == [0, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accuracy_loss": 0}, "accuracy_loss 0 is not positive"),
        ({"accuracy_loss": float("nan")}, "accuracy_loss nan is not a number"),
        ({"ranges": {"a": 1}}, r"ranges\.a is 1; give two numbers"),
        ({"ranges": {"a": (2, 1)}}, r"ranges\.a is \(2, 1\)"),
        ({"ranges": {"a": (float("nan"), 1)}}, r"ranges\.a"),
    ],
)
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DivergenceConfig(), **changes)
