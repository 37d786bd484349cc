"""Names and values of the metrics of an evaluation."""

import math

import numpy as np
import pytest

from jaxrl.rewards.evaluation_metrics import evaluation_metrics
from jaxrl.tracking.metrics import evaluation_accuracy


@pytest.fixture
def metrics(make_scored):
    """Metrics of a source with 2 of 4 right answers to its first problem and 0 of 4 to its second."""
    scored = make_scored([1, 3, 2], num_samples=4)
    right = np.array([1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1], bool)
    return evaluation_metrics(scored.replace(correct_B=right))


def test_accuracy_of_each_source(metrics):
    assert metrics["val-core/source 1/acc/mean@4"] == 2 / 8
    assert metrics["val-aux/source 1/acc/pass@4"] == 1 / 2
    assert metrics["val-core/source 0/acc/mean@4"] == metrics["val-aux/source 0/acc/pass@4"] == 1
    assert metrics["val-aux/source 1/response_length/mean"] > 0
    assert "val-aux/source 1/entropy/mean" in metrics


def test_other_statistics_have_verls_names(metrics):
    # One of two prompts has two of four right: two draws miss both with probability 1/4.
    assert metrics["val-aux/source 1/acc/best@2/mean"] == pytest.approx((1 - 1 / 4) / 2)
    assert metrics["val-aux/source 1/acc/best@2/std"] == pytest.approx(math.sqrt(3 / 16) / 2)
    assert metrics["val-aux/source 1/acc/worst@2/mean"] == pytest.approx(1 / 4 / 2)
    assert metrics["val-aux/source 1/acc/std@4"] == pytest.approx(1 / 4)
    assert metrics["val-aux/source 1/acc/mean@4/stderr"] == pytest.approx(1 / 4)
    assert metrics["val-aux/source 1/acc/best@2/stderr"] == pytest.approx(3 / 8)
    assert {n for n in metrics if "maj@" in n and "source 1" in n} == {
        f"val-aux/source 1/acc/maj@{k}/{what}" for k in (2, 4) for what in ("mean", "std", "stderr")
    }


def test_answers_that_the_grader_cannot_read_are_counted(make_scored):
    scored = make_scored([1, 3], num_samples=2)
    metrics = evaluation_metrics(scored.replace(predictions=("1", None, None, None)))
    assert metrics["val-aux/source 1/without_answer"] == 3 / 4


def test_a_single_prompt_has_no_standard_error(metrics):
    assert not any(name.endswith("stderr") for name in metrics if "source 0" in name)
    assert all(math.isfinite(value) for value in metrics.values())


def test_sources_together(metrics, make_scored):
    assert metrics["val-aux/all/acc/mean@4"] == 6 / 12
    assert metrics["val-aux/all/acc/pass@4"] == pytest.approx(2 / 3)
    assert not any("/all/" in name for name in evaluation_metrics(make_scored([1, 3])))


def test_only_accuracies_are_core_metrics(metrics):
    assert {name for name in metrics if name.startswith("val-core/")} == {
        "val-core/source 0/acc/mean@4",
        "val-core/source 1/acc/mean@4",
    }
    assert list(evaluation_accuracy(metrics)) == ["source 1 mean@4", "source 0 mean@4"]


def test_one_answer_each(make_scored):
    metrics = evaluation_metrics(make_scored([1, 3], num_samples=1))
    assert metrics["val-core/source 1/acc/mean@1"] == metrics["val-aux/source 1/acc/pass@1"] == 1
    assert not any("best@" in name or "maj@" in name for name in metrics)
