"""Samples that reuse the pages of earlier ones are those that prefill everything."""

import dataclasses
import functools

import byte_engine
import jax
import numpy as np
import pytest
from byte_engine import CONFIG, MODEL, decode, weights
from closeness import assert_close
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl.rollout import decode_loop, slots
from jaxrl.rollout.decode_loop import DecodeLoop
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.samples import Sample, Start
from jaxrl.rollout.sampling import SamplingOptions
from jaxrl.rollout.slot_pages import SlotPages
from jaxrl.rollout.slots import Slots
from jaxrl.rollout.stop_strings import StopSearch

# Pages of 16 tokens.
BASE = dataclasses.replace(
    CONFIG,
    max_prompt_tokens=80,
    max_response_tokens=24,
    slots=4,
    smallest_bucket=4,
    prefill_prompts=4,
)
PAGED = {"cache": "paged", "slots": 8}
EIGHT = ("1-4-2", "1-2-2-2", 2)
SETTINGS = SamplingOptions(seed=5, step=2, temperature=0.7)


engine_of = functools.partial(byte_engine.engine_of, base=BASE)


def loop_of(engine: Engine, scale=1.0, **options) -> DecodeLoop:
    scaled = jax.tree.map(lambda w: w * np.float32(scale), weights())
    params = byte_engine.placed(scaled, MODEL, engine.mesh)
    return DecodeLoop(engine, params, StopSearch(decode), **options)


def sample_of(prompt, index=0, max_tokens=24) -> Sample:
    start = prompt if isinstance(prompt, Start) else Start(np.asarray(prompt, np.int32))
    return Sample(0, index, SETTINGS.step).request(start, 3, SETTINGS, max_tokens)


def run(loop: DecodeLoop, *samples: Sample) -> None:
    loop.add(samples)
    while loop.scheduler.num_unfinished:
        loop.dispatch()


def words(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 240, count).astype(np.int32)


@functools.cache
def expected(prompt: tuple[int, ...], index: int, max_tokens: int, scale=1.0) -> Sample:
    """The sample of a contiguous cache."""
    sample = sample_of(prompt, index, max_tokens)
    run(loop_of(engine_of(), scale), sample)
    return sample


def assert_expected(sample: Sample, scale=1.0) -> None:
    prompt = tuple(sample.start.tokens[: sample.prompt_tokens].tolist())
    want = expected(prompt, sample.index, sample.max_tokens, scale)
    assert sample.tokens.tolist() == want.tokens.tolist()
    assert_close(sample.sampled.logprob, want.sampled.logprob, scale=1)
    assert_close(sample.sampled.entropy, want.sampled.entropy, scale=1)


@pytest.fixture
def prefilled(monkeypatch) -> list[tuple[int, int]]:
    """Tokens of each sequence prefilled for a paged cache, and how many of them came from pages."""
    seen = []
    prefill, reuse = slots.prefilled, Slots.reuse

    def watched_prefill(engine, params, starts):
        if engine.config.cache == "paged":
            seen.extend((len(start.tokens), 0) for start in starts)
        return prefill(engine, params, starts)

    def watched_reuse(self, known):
        seen.extend((len(start.tokens), 16 * len(pages)) for _, pages, start in known.values())
        return reuse(self, known)

    monkeypatch.setattr(decode_loop, "prefilled", watched_prefill)
    monkeypatch.setattr(Slots, "reuse", watched_reuse)
    return seen


@pytest.mark.parametrize(
    ("layout", "chunk"),
    [(("1-1-1",), 9), pytest.param(EIGHT, 0, marks=pytest.mark.long)],
    ids=["one device", "eight devices"],
)
def test_a_conversation_prefills_its_new_tokens_only(layout, chunk, prefilled):
    """Three turns; each prompt is the turn before, its answer, and a question."""
    loop = loop_of(engine_of(layout, prefill_chunk_tokens=chunk, **PAGED), reuse_prefixes=True)
    prompt, full = words(0, 21), 0
    for turn in range(3):
        sample = sample_of(prompt)
        run(loop, sample)
        assert_expected(sample)
        before, cached = len(prompt), len(prompt) + len(sample) - 1
        prompt = np.concatenate([prompt, sample.tokens, words(turn + 1, 5)])[:80]
        if turn:
            assert prefilled[-1] == (before, full)
        full = cached // 16 * 16
    assert full >= 32 and len(prefilled) == 3


def test_samples_of_a_prompt_share_one_reused_prefix(prefilled):
    loop = loop_of(engine_of(**PAGED), reuse_prefixes=True)
    shared = words(0, 50)
    run(loop, sample_of(shared))
    # Four samples of each of three prompts; the second has another beginning, the third is known entirely.
    prompts = [np.concatenate([shared[:40], words(1, 9)]), words(2, 50), shared[:49]]
    samples = []
    for prompt in prompts:
        first = sample_of(prompt)
        samples.append(first)
        samples += [sample_of(first.start, i) for i in (1, 2, 3)]
    run(loop, *samples)
    for sample in samples:
        assert_expected(sample)
    assert sorted(prefilled[1:]) == [(49, 32), (49, 48), (50, 0)]


def test_without_the_option_everything_is_prefilled(prefilled):
    loop = loop_of(engine_of(**PAGED))
    for _ in range(2):
        run(loop, sample_of(words(0, 50)))
    assert prefilled == [(50, 0)] * 2


def test_other_weights_and_a_cleared_loop_know_nothing(prefilled):
    """A loop keeps its weights, and its pages belong to it."""
    for scale in (1.0, 1.3):
        loop = loop_of(engine_of(**PAGED), scale, reuse_prefixes=True)
        for _ in range(2):
            sample = sample_of(words(0, 50))
            run(loop, sample)
            assert_expected(sample, scale)
        loop.clear()
        run(loop, sample_of(words(0, 50)))
    assert prefilled == [(50, 0), (50, 48), (50, 0)] * 2
    first, second = (expected(tuple(words(0, 50).tolist()), 0, 24, s) for s in (1.0, 1.3))
    assert first.tokens.tolist() != second.tokens.tolist()


@pytest.mark.long
def test_a_sample_starts_on_the_replica_that_knows_its_beginning():
    """Of two idle replicas the second knows it; otherwise a sample starts on the first."""
    engine = engine_of(("1-1-2",), **PAGED)
    loop = loop_of(engine, reuse_prefixes=True)
    pool = loop._slots.pages.pool
    run(loop, sample_of(words(0, 20)), sample_of(words(1, 60)))
    for prompt, replica, shared in [(words(1, 60), 1, 3), (words(2, 60), 0, 0)]:
        sample = sample_of(prompt, 1)
        loop.add([sample])
        loop.begin()
        slot = loop.scheduler.slot_of[sample]
        assert (pool.shard_n[slot], pool.shared_n[slot]) == (replica, shared)
        loop.finish()
        run(loop)
        assert_expected(sample)


@pytest.mark.long
def test_a_sample_that_gave_way_prefills_its_last_token_only(prefilled, monkeypatch):
    """Seven pages; two samples with three full ones each after the first dispatch."""
    monkeypatch.setattr(SlotPages, "_will_last", lambda self, *_: True)
    loop = loop_of(engine_of(cache_tokens=112, **PAGED), reuse_prefixes=True)
    prompt_tokens = 49 - BASE.tokens_per_dispatch
    samples = [sample_of(words(seed, prompt_tokens), 6) for seed in (7, 8)]
    run(loop, *samples)
    for sample in samples:
        assert_expected(sample)
    assert prefilled == [(prompt_tokens, 0), (prompt_tokens, 0), (49, 48)]


def test_known_pages_give_way_to_samples(prefilled):
    """Pages for one sample of full length: the second prompt needs those of the first."""
    loop = loop_of(engine_of(cache_tokens=112, **PAGED), reuse_prefixes=True)
    samples = [sample_of(words(seed, 80)) for seed in (0, 1, 0, 0)]
    for sample in samples:
        run(loop, sample)
        assert_expected(sample)
    assert [known < 32 for _, known in prefilled] == [True, True, True, False]


def check_pages(loop: DecodeLoop) -> None:
    """Every page is held, kept or empty, and only known pages are kept."""
    pool = loop._slots.pages.pool
    for shard, kept in enumerate(pool._kept):
        empty = pool._free_SN[shard, : pool._num_empty_S[shard]].tolist()
        held = set(pool.table_nP[pool.slots_of(shard)].reshape(-1).tolist()) - {0}
        assert sorted([*empty, *kept, *held]) == list(range(1, pool.num_pages + 1))
        assert len(empty) + len(kept) == pool.num_free_S[shard]
        known = {page for s, page in pool._key_of if s == shard}
        assert set(kept) <= known and not known & set(empty)
    assert {key: page for page, key in pool._key_of.items()} == {
        key: (key[0], page) for key, page in pool._page_of.items()
    }


# Pages are scarce on one device.
@pytest.mark.parametrize("layout", [("1-1-1",), EIGHT], ids=["one", "eight"])
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.long
def test_random_requests_ends_and_preemptions(layout, data):
    """Samples that overlap, are cancelled or give way are the expected ones, and no page is lost.

    At times the weights are replaced, by the same ones.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        if scarce := not layout:
            monkeypatch.setattr(SlotPages, "_will_last", lambda self, *_: True)
        shards = engine_of(layout, **PAGED).shards
        engine = engine_of(layout, cache_tokens=160 * shards if scarce else 0, **PAGED)
        loop = loop_of(engine, reuse_prefixes=True)
        live: list[Sample] = []
        done: list[Sample] = []
        version = 0

        def dispatch():
            ended = {result.sample for result in loop.dispatch() if result.end is not None}
            check_pages(loop)
            done.extend(ended)
            live[:] = [sample for sample in live if sample not in ended]

        for _ in range(data.draw(st.integers(2, 12))):
            for _ in range(data.draw(st.integers(0, 4))):
                shared = data.draw(st.sampled_from([0, 16, 33, 48]))
                own = words(data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 15, 31])))
                sample = sample_of(
                    np.concatenate([words(0, shared), own]),
                    data.draw(st.integers(0, 1)),
                    data.draw(st.sampled_from([3, 24])),
                )
                loop.add([sample])
                live.append(sample)
            if live and data.draw(st.booleans()):
                gone = live.pop(data.draw(st.integers(0, len(live) - 1)))
                loop.drop([gone])
                check_pages(loop)
            if data.draw(st.integers(0, 3)) == 0:
                version += 1
                loop.renew(loop._slots.params, version)
                check_pages(loop)
            dispatch()
        while loop.scheduler.num_unfinished:
            dispatch()
        assert not live
        pool = loop._slots.pages.pool
        assert set(pool.num_free_S.tolist()) == {pool.num_pages} and not pool.table_nP.any()
        for sample in done:
            assert_expected(sample)
