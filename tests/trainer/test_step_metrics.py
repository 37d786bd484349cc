"""What a step is told as."""

import numpy as np
import pytest

from jaxrl.dataflows.step_metrics import value_metrics
from jaxrl.types import PackedBatch, ValueBatch


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
