"""A paged cache gives the samples of a contiguous one, however few its pages are."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest
import tokens
from byte_engine import CONFIG, LAYOUTS, OPTIONS, assert_same_samples, decode, resumed, spread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_values import mostly_slow

from jaxrl.errors import UserError
from jaxrl.rollout.engine_sizes import page_sizes
from jaxrl.rollout.slot_pages import SlotPages
from jaxrl.types import Completions, Prompts

G = 8
# Pages of 16 tokens. A sample has at most 24 + 40 tokens, or 4 pages.
BASE = dataclasses.replace(CONFIG, max_response_tokens=40, slots=8)
backend_of = functools.partial(spread, base=BASE)


def prompts_of(seed: int, count: int = 5) -> Prompts:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 25, count)
    # Some share their beginning, up to more than a page.
    common = rng.integers(3, 240, 24).astype(np.int32)
    own = [rng.integers(3, 240, n).astype(np.int32) for n in lengths]
    kept = [rng.integers(0, n + 1) for n in lengths]
    return tokens.prompts_of(
        *(np.concatenate([common[:k], x[k:]]) for k, x in zip(kept, own, strict=True))
    )


@functools.cache
def expected(seed: int) -> Completions:
    return backend_of().generate(prompts_of(seed), OPTIONS.replace(num_samples=G))


@pytest.fixture
def events(monkeypatch) -> collections.Counter:
    """Counts the samples that give way; all pages are free whenever nothing is busy."""
    counts = collections.Counter()
    grow, release = SlotPages.grow, SlotPages.release

    def watched_grow(self, *cached):
        dropped = grow(self, *cached)
        counts["dropped"] += len(dropped)
        shared = (self.pool.shared_n > 0) & self._busy_n
        counts["shared"] += int(shared.sum())
        return dropped

    def watched_release(self, slots):
        release(self, slots)
        if not self._busy_n.any():
            counts["emptied"] += 1
            free = [self.pool.num_free_S[s] for s in range(len(self.pool.num_free_S))]
            assert set(free) == {self.pool.num_pages}

    monkeypatch.setattr(SlotPages, "grow", watched_grow)
    monkeypatch.setattr(SlotPages, "release", watched_release)
    return counts


def greedy(monkeypatch):
    """Samples start as long as there are pages for their prompts, so that many have to give way."""
    monkeypatch.setattr(SlotPages, "_will_last", lambda self, *_: True)


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, fast=("replicas and heads",)))
def test_samples_are_those_of_a_contiguous_cache(layout, events, caplog):
    """Room for every slot, and one program for all lengths."""
    backend = backend_of(layout, cache="paged", slots=24)
    for seed in range(2):
        want = expected(seed)
        with jax.log_compiles():
            got = backend.generate(prompts_of(seed), OPTIONS.replace(num_samples=G))
        assert_same_samples(got, want)
    compiled = [m for m in caplog.messages if m.startswith("Compiling jit(generate)")]
    assert len(compiled) == 1
    assert events["emptied"] and not events["dropped"]
    # Over eight replicas every one has another sample of a prompt.
    assert events["shared"] or layout == LAYOUTS["replicas"]


@pytest.mark.parametrize(
    "layout", mostly_slow(LAYOUTS, fast=("one device",), long=("replicas and heads",))
)
def test_samples_that_give_way_are_the_same(layout, events, monkeypatch):
    """The least pages: those of one sample for each shard."""
    greedy(monkeypatch)
    shards = backend_of(layout, cache="paged").engine.shards
    backend = backend_of(layout, cache="paged", slots=32, cache_tokens=64 * shards)
    assert backend.engine.pages.num_pages == 1 + 4
    got = backend.generate(prompts_of(0), OPTIONS.replace(num_samples=G))
    assert_same_samples(got, expected(0))
    assert events["dropped"]


@pytest.mark.parametrize("cache_tokens", [64, pytest.param(0, marks=pytest.mark.long)])
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 3), budget=st.integers(3, 40), wait=st.booleans())
def test_resumed_samples_are_the_same_on_any_cache(cache_tokens, seed, budget, wait):
    """Contiguous = paged = with samples that give way = left unfinished and resumed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not wait:
            greedy(monkeypatch)
        backend = backend_of(cache="paged", cache_tokens=cache_tokens)
        options = OPTIONS.replace(num_samples=G, budget_tokens=budget)
        assert_same_samples(resumed(backend, prompts_of(seed), options), expected(seed))


@pytest.mark.long
def test_stop_strings_and_limits_see_the_same_history():
    limits = {"stop_strings": (decode(expected(0).tokens[0][2:4]),)}
    options = OPTIONS.replace(num_samples=G, **limits)
    want = backend_of().generate(prompts_of(0), options)
    assert_same_samples(backend_of(cache="paged").generate(prompts_of(0), options), want)


def test_a_pool_that_is_too_small_for_one_sample_is_refused_with_the_numbers():
    with pytest.raises(
        UserError,
        match=r"cache_tokens 127 are 3 pages of 16 tokens on each replica \(2 in all\), and a sample of 64 "
        r"tokens needs 4; use 128 or more",
    ):
        backend_of(("1-1-2",), cache="paged", cache_tokens=127)
    backend_of(("1-1-2",), cache="paged", cache_tokens=128)
    with pytest.raises(ValueError, match="cache_tokens 64 is the size of a paged cache"):
        dataclasses.replace(BASE, cache_tokens=64)


@pytest.mark.parametrize(
    ("platform", "slots", "kv_heads", "page"),
    [
        ("cpu", 256, 8, 16),
        ("gpu", 256, 8, 128),
        ("tpu", 256, 1, 128),
        ("tpu", 128, 8, 128),
        ("tpu", 256, 8, 256),
        ("tpu", 512, 8, 512),
    ],
)
def test_pages_are_as_small_as_the_scalar_memory_of_a_device_allows(
    platform, slots, kv_heads, page
):
    """A table of 256 slots, 8 kv heads and 180 pages of 128 tokens has 1.4 MiB, and a TPU has 1."""
    config = dataclasses.replace(
        BASE, cache="paged", slots=2 * slots, max_prompt_tokens=2048, max_response_tokens=20_480
    )
    sizes = page_sizes(config, shards=2, kv_heads=kv_heads, platform=platform)
    assert sizes is not None and sizes.page_tokens == page
    assert (sizes.num_pages - 1) * page >= slots * (2048 + 20_480)


def test_a_page_table_that_no_page_size_makes_small_enough_is_refused():
    config = dataclasses.replace(
        BASE, cache="paged", slots=1024, max_prompt_tokens=2048, max_response_tokens=20_480
    )
    with pytest.raises(
        UserError,
        match=r"8,192 pairs .* takes 1,474,560 bytes .* room for 917,504; use fewer slots",
    ):
        page_sizes(config, shards=1, kv_heads=8, platform="tpu")
