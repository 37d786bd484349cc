"""Safe RLHF's multiplier: log m + rate * m * (mean cost - limit), from step to step."""

import json
import math

import numpy as np
import pytest

from jaxrl.dataflows.algorithm_config import CostConfig
from jaxrl.dataflows.preparation import KlCoefficient
from jaxrl.dataflows.rewarding import Costs, Multiplier
from jaxrl.trainer.run_step import StepState


def used(multiplier: Multiplier, *mean_costs: float) -> list[float]:
    """The multiplier of each step, and that after the last."""
    found = [
        multiplier.update(Costs(np.array([cost - 1, cost + 1], np.float32), np.float32(cost), {}))[
            "cost/multiplier"
        ]
        for cost in mean_costs
    ]
    return [*found, multiplier.value]


@pytest.mark.parametrize(
    ("settings", "costs", "expected"),
    [
        # exp(.1 * 1 * 1); then exp(.1 - .1 * 1.10517 * 2)
        ({}, [1.0, -2.0], [1, 1.10517, 0.88600]),
        # Over the limit of 3 by 1: 2 exp(.5 * 2 * 1)
        ({"multiplier": 2.0, "multiplier_lr": 0.5, "limit": 3.0}, [4.0], [2, 5.43656]),
        # exp(1) and no further
        ({"multiplier_lr": 1.0, "multiplier_max": 2.0}, [1.0, 1.0], [1, 2, 2]),
        # 2 exp(-.1 * 2 * 5) comes down from the largest at once.
        ({"multiplier": 2.0, "multiplier_max": 2.0}, [-5.0], [2, 0.73576]),
        # Two steps of delay, then exp(.1 * 1 * 3)
        ({"multiplier_delay_steps": 2}, [3.0, 3.0, 3.0], [1, 1, 1, 1.34986]),
        ({"multiplier_lr": 0.0}, [9.0, 9.0], [1, 1, 1]),
    ],
)
def test_values_by_hand(settings, costs, expected):
    cost = CostConfig(**settings)
    multiplier = Multiplier(
        cost.multiplier,
        cost.limit,
        cost.multiplier_lr,
        cost.multiplier_max,
        cost.multiplier_delay_steps,
    )
    np.testing.assert_allclose(used(multiplier, *costs), expected, rtol=1e-5)


def test_a_resumed_run_keeps_the_multiplier_and_its_delay():
    def state() -> StepState:
        multiplier = Multiplier(1.0, 0.0, 0.1, delay_steps=3)
        return StepState(KlCoefficient(0.0, target=0, horizon=1), multiplier, None, None)

    whole, resumed = state(), state()
    used(whole.multiplier, 3.0, 3.0)
    resumed.restore(json.loads(json.dumps(whole.record())))
    # The third step is the last of the delay.
    assert used(resumed.multiplier, 3.0, 3.0) == used(whole.multiplier, 3.0, 3.0)
    assert resumed.multiplier.value == pytest.approx(1.34986, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"multiplier": 3.0, "multiplier_max": 2.0},
        {"multiplier": 0.0},
        {"multiplier_max": 0.0},
        {"multiplier_lr": -0.1},
        {"multiplier_lr": math.nan},
        {"multiplier_delay_steps": -1},
        {"multiplier_delay_steps": 1.5},
    ],
)
def test_settings_that_cannot_be(settings):
    with pytest.raises(ValueError, match="multiplier"):
        CostConfig(**settings)
