"""Samples on the host, and what a checkpoint keeps of them."""

import concurrent.futures
import threading

import numpy as np
import pytest

from jaxrl.rollout.samples import Sample, UnfinishedGroups, completions_of
from jaxrl.types import Completions, Prompts, Stretch, TurnText


def grown() -> Sample:
    """Four tokens drawn in two steps, and three in a third."""
    rng = np.random.default_rng(0)
    sample = Sample(prompt=1, index=0, step=3)
    for count, version in ((3, 3), (1, 4)):
        ids = rng.integers(0, 99, count).astype(np.int32)
        sample.add(Stretch(ids, *rng.normal(size=(2, count)).astype(np.float32), version))
    sample.add(Stretch(np.arange(3, dtype=np.int32), *np.full((2, 3), 0.1, np.float32), 5))
    return sample


def test_a_record_has_every_bit():
    empty, truncated = Sample(0, 0, 5), Sample(0, 1, 5)
    truncated.add(Stretch(np.arange(2, dtype=np.int32), *np.ones((2, 2), np.float32), 5))
    truncated.finished = truncated.truncated = True
    prompts = Prompts(
        np.array([4, 9]),
        (np.array([1, 2], np.int32), np.array([3], np.int32)),
        *(("a", "é") for _ in range(3)),
        extras=({"level": 5, "info": {"é": [1.5, None]}}, {}),
    )
    other = Sample(1, 1, 3)
    unfinished = UnfinishedGroups(prompts, 2, (empty, truncated, grown(), other))
    again = UnfinishedGroups.of_record(unfinished.record())
    assert again.num_samples == 2
    assert [t.tolist() for t in again.prompts.tokens] == [[1, 2], [3]]
    assert again.prompts.texts == ("a", "é") and again.prompts.ids_N.tolist() == [4, 9]
    assert again.prompts.extras == prompts.extras
    for one, copy in zip(unfinished.samples, again.samples, strict=True):
        for was, now in zip(one.sampled.arrays, copy.sampled.arrays, strict=True):
            assert was.dtype == now.dtype and was.tolist() == now.tolist()
        assert copy.runs == one.runs
        for name in ("prompt", "index", "step", "finished", "truncated"):
            assert getattr(one, name) == getattr(copy, name), name
    nothing = UnfinishedGroups(prompts.take([]), 2, ())
    assert UnfinishedGroups.of_record(nothing.record()).samples == ()


def test_a_sample_is_one_stretch():
    sample = grown()
    assert len(sample) == 7 and sample.tokens[4:].tolist() == [0, 1, 2]
    assert sample.runs == [(3, 3), (4, 1), (5, 3)] and Sample(0, 0, 0).runs == []
    part = sample.sampled[2:5]
    assert part.version.tolist() == [3, 4, 5] and part.entropy[2] == np.float32(0.1)
    assert part[part.version == 4].tokens == sample.tokens[3]
    # A part that is alone is not copied.
    assert Stretch.concatenate([part[:0], part]).tokens is part.tokens
    assert [x.dtype.kind for x in part[:0].arrays] == list("iffi")


def spell(tokens) -> str:
    return ",".join(map(str, tokens.tolist()))


def completions(samples: list[Sample], decode_texts) -> Completions:
    prompts = Prompts(np.arange(1), (np.array([1]),), *(("",) for _ in range(3)))
    return completions_of(prompts, samples, len(samples), decode_texts)


def test_texts_are_made_once_when_they_are_read_by_the_thread_that_reads():
    calls = []

    def decode_texts(sequences):
        calls.append((threading.get_ident(), len(sequences)))
        return map(spell, sequences)

    groups = [completions([grown(), grown()], decode_texts) for _ in range(3)]
    taken = Completions.concatenate(groups).take([2, 0])
    assert taken.lengths_B.tolist() == [7] * 4 and not calls
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        ident = thread.submit(threading.get_ident).result()
        assert thread.submit(lambda: taken.policy_texts[0]).result() == spell(grown().tokens)
    # The group that was not taken has no text yet.
    assert calls == [(ident, 2)] * 2
    assert groups[0].texts == taken.texts[2:] == (spell(grown().tokens),) * 2
    assert groups[2].turns[1] == (TurnText(True, taken.texts[1]),) and len(calls) == 2
    assert groups[1].texts != ("", "") and len(calls) == 3


def test_an_error_in_a_text_reaches_whoever_reads_it():
    broken = completions([grown()], lambda sequences: [1 / 0 for _ in sequences])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            broken.texts[0]
