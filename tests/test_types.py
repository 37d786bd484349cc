"""Batches on the host keep their rows together; `make_scored` marks every entry with prompt and sample."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.types import Completions, LazyRows, Prompts, Scored

ids = st.lists(st.integers(0, 15), min_size=1, max_size=8)
num_samples = st.integers(1, 5)


def assert_same(one, other) -> None:
    """Equal in every field, types and dtypes too."""
    assert type(one) is type(other)
    if dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other


@given(ids=ids, G=num_samples, data=st.data())
def test_taking_groups_is_building_them_from_fewer_prompts(make_scored, ids, G, data):
    # Any order, any of them twice, none at all.
    indices = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=10))
    expected = make_scored([ids[i] for i in indices], G)
    scored = make_scored(ids, G)
    assert_same(scored.take(indices), expected)
    assert_same(scored.take(np.array(indices, np.int64)), expected)
    assert_same(scored.completions.take(indices), expected.completions)
    assert_same(scored.completions.prompts.take(indices), expected.completions.prompts)


@given(parts=st.lists(ids, min_size=1, max_size=4), G=num_samples)
def test_concatenating_groups_is_building_them_from_all_prompts(make_scored, parts, G):
    expected = make_scored([i for part in parts for i in part], G)
    scored = [make_scored(part, G) for part in parts]
    assert_same(Scored.concatenate(scored), expected)
    completions = [s.completions for s in scored]
    assert_same(Completions.concatenate(completions), expected.completions)
    assert_same(Prompts.concatenate([c.prompts for c in completions]), expected.completions.prompts)


def test_a_part_without_groups_takes_no_routes_away(make_scored):
    """Dynamic sampling adds one whenever it keeps no group of a generation batch."""
    scored = make_scored([5, 0])
    routes = tuple(np.full((3, 2, 1), b, np.int16) for b in range(8))
    scored = scored.replace(completions=dataclasses.replace(scored.completions, routes=routes))
    assert_same(Scored.concatenate([scored.take([]), scored]), scored)


def test_a_part_without_groups_has_no_texts_made(make_scored):
    """A grader reads some of them, later and elsewhere."""
    completions = make_scored([5, 0]).completions

    def read() -> str:
        raise AssertionError("read")

    texts = LazyRows([read] * len(completions))
    completions = dataclasses.replace(completions, texts=texts, turns=texts)
    joined = Completions.concatenate([completions.take([]), completions])
    assert len(joined.texts) == len(joined.turns) == len(completions)


@given(ids=ids, G=num_samples)
def test_rows_and_prompts_find_each_other(make_scored, ids, G):
    scored = make_scored(ids, G)
    completions = scored.completions
    assert len(scored) == len(completions) == G * len(completions.prompts) == G * len(ids)
    for b, n in enumerate(completions.prompt_index_B):
        assert n == b // G
        assert completions.texts[b] == f"response {ids[n]}.{b % G}"
    rows = completions.rows_of(range(len(ids)))
    np.testing.assert_array_equal(rows, np.arange(len(scored)))
    np.testing.assert_array_equal(completions.lengths_B, [len(t) for t in completions.tokens])
    assert completions.prompt_index_B.dtype == completions.lengths_B.dtype == np.int64


def test_rows_of_prompts_by_hand(make_scored):
    completions = make_scored([4, 5, 6], num_samples=2).completions
    np.testing.assert_array_equal(completions.rows_of([2, 0]), [4, 5, 0, 1])
    np.testing.assert_array_equal(completions.prompt_index_B, [0, 0, 1, 1, 2, 2])


def test_the_reward_is_the_score_and_its_shaping(make_scored):
    scored = make_scored([5, 15])  # right, wrong, right, wrong; and all right
    np.testing.assert_array_equal(scored.reward_B, [1, -1.25, 0.5, -1.75, 1, 0.75, 0.5, 0.25])
    assert scored.reward_B.dtype == np.float32
    np.testing.assert_array_equal(scored.correct_NG, [[True, False, True, False], [True] * 4])
