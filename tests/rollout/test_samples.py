"""Samples on the host, and what a checkpoint keeps of them."""

import numpy as np

from jaxrl.rollout.samples import Sample, UnfinishedGroups
from jaxrl.types import Prompts


def conversation() -> Sample:
    """Four tokens drawn in two steps, two given, three drawn."""
    rng = np.random.default_rng(0)
    sample = Sample(prompt=1, index=0, step=3)
    for count, version in ((3, 3), (1, 4)):
        sample.add_decoded(
            rng.integers(0, 99, count).astype(np.int32),
            *rng.normal(size=(2, count)).astype(np.float32),
            version,
        )
    sample.add_given(np.array([7, 8], np.int32), 4)
    sample.add_decoded(np.arange(3, dtype=np.int32), *np.full((2, 3), 0.1, np.float32), 5)
    return sample


def test_a_record_has_every_bit():
    empty, truncated = Sample(0, 0, 5), Sample(0, 1, 5)
    truncated.add_decoded(np.arange(2, dtype=np.int32), *np.ones((2, 2), np.float32), 5)
    truncated.finished = truncated.truncated = True
    prompts = Prompts(
        np.array([4, 9]),
        (np.array([1, 2], np.int32), np.array([3], np.int32)),
        *(("a", "é") for _ in range(3)),
        extras=({"level": 5, "info": {"é": [1.5, None]}}, {}),
    )
    other = Sample(1, 1, 3)
    unfinished = UnfinishedGroups(prompts, 2, (empty, truncated, conversation(), other))
    again = UnfinishedGroups.of_record(unfinished.record())
    assert again.num_samples == 2
    assert [t.tolist() for t in again.prompts.tokens] == [[1, 2], [3]]
    assert again.prompts.texts == ("a", "é") and again.prompts.ids_N.tolist() == [4, 9]
    assert again.prompts.extras == prompts.extras
    for one, copy in zip(unfinished.samples, again.samples, strict=True):
        for name in ("tokens", "logprob", "entropy", "mask", "version"):
            was, now = getattr(one, name), getattr(copy, name)
            assert was.dtype == now.dtype and was.tolist() == now.tolist(), name
        for name in ("prompt", "index", "step", "finished", "truncated"):
            assert getattr(one, name) == getattr(copy, name), name
        assert copy.tail(9).tolist() == one.tail(9).tolist()
    nothing = UnfinishedGroups(prompts.take([]), 2, ())
    assert UnfinishedGroups.of_record(nothing.record()).samples == ()


def test_the_tail_ends_where_the_environment_spoke():
    sample = conversation()
    assert sample.tail(2).tolist() == [1, 2]
    assert sample.tail(9).tolist() == [0, 1, 2]
    sample.cut(5)
    assert len(sample) == 5 and sample.mask.tolist() == [1, 1, 1, 1, 0]
    assert sample.version.tolist() == [3, 3, 3, 4, 4]
    assert sample.tail(9).tolist() == []
