"""The examples at the heads of the search's files, computed by its functions."""

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.extra import numpy as arrays

from jaxrl_planner.search.pool_fronts import Turns, fits, in_turn, pareto_front, passes_s
from jaxrl_planner.search.search import Bounds, SideBySide

# Resident and transient GB, seconds of preparation and training, as in pool_fronts.py.
# One combination of no roles; no pools.
NOTHING = np.zeros((1, 4)), np.zeros((1, 0), int)
ACTOR = np.array([[6.0, 2.0, 1.0, 4.0], [9.0, 1.0, 1.0, 3.0]])
CRITIC = np.array([[5.0, 3.0, 1.0, 2.0]])


def everything(points):
    return np.full(points.shape[:-1], True)


def test_a_point_that_another_beats_is_off_the_front():
    points = np.array([[1.0, 5.0], [2.0, 2.0], [3.0, 3.0], [5.0, 1.0]])
    assert sorted(pareto_front(points).tolist()) == [0, 1, 3]


@hypothesis.given(
    arrays.arrays(
        np.float64,
        st.tuples(st.integers(0, 40), st.integers(1, 4)),
        elements=st.integers(0, 6).map(float),
    )
)
def test_a_front_is_what_no_other_point_beats(points):
    kept = pareto_front(points)
    assert len(set(kept.tolist())) == len(kept)
    for i, point in enumerate(points):
        as_good = (points[kept] <= point).all(axis=1)
        # Some point on the front is as good; of those on it no other is.
        assert as_good.any()
        if i in kept:
            assert as_good.sum() == 1


def test_of_equal_points_the_first_stays():
    assert pareto_front(np.array([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0]])).tolist() == [0, 2]


def test_roles_that_take_turns_add_up():
    together = in_turn(ACTOR, CRITIC)
    assert together[..., 0].tolist() == [[11], [14]]
    assert together[..., 1].tolist() == [[3], [3]]
    assert passes_s(together).tolist() == [[8], [7]]
    assert fits(together, 20).all() and fits(together, 14).tolist() == [[True], [False]]


def test_combinations_that_do_not_fit_or_take_too_long_are_left_out():
    both = Turns(*NOTHING).with_role(ACTOR, budget=20, most_s=math.inf)
    assert both.with_role(CRITIC, budget=20, most_s=math.inf).options.tolist() == [[0, 0], [1, 0]]
    assert both.with_role(CRITIC, budget=16, most_s=math.inf).options.tolist() == [[0, 0]]
    assert both.with_role(CRITIC, budget=20, most_s=7).options.tolist() == [[1, 0]]
    assert not len(both.with_role(CRITIC, budget=20, most_s=6).costs)


def test_pools_side_by_side_last_as_long_as_the_slower():
    critic, actor = np.array([[4.0, 0.0, 1.0, 9.0]]), np.array([[8.0, 10.0, 2.0, 6.0]])
    alone = SideBySide(*NOTHING).with_pool(critic, most_devices=15, interesting=everything)
    assert alone.best_with(actor, most_devices=16, below_s=math.inf) == (21.0, (0, 0))
    assert alone.best_with(actor, most_devices=11, below_s=math.inf) is None
    assert alone.best_with(actor, most_devices=16, below_s=21.0) is None
    both = alone.with_pool(actor, most_devices=16, interesting=everything)
    assert both.points.tolist() == [[12, 10, 2, 9]] and both.picks.tolist() == [[0, 0]]


def test_a_critic_that_trains_too_long_is_ruled_out_whatever_the_others_do():
    # The actor does not fit on 4 devices, and generates in 12 s on 8, in 8 s on 16.
    bounds = Bounds([[4, 8, 16]], [[math.inf, 12.0, 8.0]])
    critic = np.array([[4.0, 0.0, 0.0, 20.0], [4.0, 0.0, 0.0, 13.0]])
    assert bounds.may_be_best(critic).all()
    bounds.lower(26.0)
    # 12 devices are left to generate on, of which a pool may have 8.
    assert bounds.may_be_best(critic).tolist() == [False, True]
    assert bounds.most_passes_s == pytest.approx(26 - 8)
    devices = np.array([[3.0], [4.0], [9.0]])
    assert bounds.generation_s(devices).tolist() == [math.inf, math.inf, 12.0]
