"""Fronts: nothing on them is beaten, everything off them is."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
from hypothesis.extra import numpy as arrays

from jaxrl.planner.search.pareto import pareto_front


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
        # Somebody on the front is as good; of those on it nobody else is.
        assert as_good.any()
        if i in kept:
            assert as_good.sum() == 1


def test_of_equal_points_the_first_stays():
    assert pareto_front(np.array([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0]])).tolist() == [0, 2]
