"""Sampling from a model with delta layers: states follow their samples through slots and caches."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from byte_engine import assert_same_samples, placed, resumed
from closeness import assert_close
from plain_pass import plain_logprobs
from test_driver import OPTIONS, PROMPTS, engine_of, spell
from test_engine import MODEL, attend_by_kernel

from jaxrl.errors import UserError
from jaxrl.models.decoder import decoder_graph
from jaxrl.rollout.decode_loop import DecodeLoop
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.slot_pages import SlotPages
from jaxrl.rollout.stop_strings import StopSearch
from jaxrl.types import Completions

DELTA = dataclasses.replace(
    MODEL,
    num_layers=4,
    layer_pattern=("delta", "full"),
    gated_attention=True,
    delta_key_heads=2,
    delta_value_heads=4,
    delta_key_dim=5,
    delta_value_dim=6,
)


@functools.cache
def weights(model=DELTA):
    rng = np.random.default_rng(0)
    draw = lambda s: (0.4 * rng.normal(size=s.shape)).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, decoder_graph(model)[1])


def backend_of(layout=("1-1-1",), model=DELTA, **changes) -> OfflineBackend:
    engine = engine_of(layout, model=model, **changes)
    backend = OfflineBackend(engine, functools.partial(map, spell))
    backend.load(placed(weights(model), model, engine.mesh))
    return backend


@pytest.fixture(scope="module")
def whole() -> Completions:
    return backend_of().generate(PROMPTS, OPTIONS)


def test_probabilities_are_those_of_one_plain_pass(whole):
    """Of short and long responses to prompts from one token on, several to a prompt."""
    assert whole.lengths_B.min() < 10 and whole.lengths_B.max() == 40
    prompts = dict(zip(PROMPTS.ids_N.tolist(), PROMPTS.tokens, strict=True))
    options = {"longest": 64, "temperature": OPTIONS.temperature}
    for i, tokens in enumerate(whole.tokens):
        prompt = prompts[int(whole.prompts.ids_N[i // OPTIONS.num_samples])]
        expected = plain_logprobs(DELTA, weights(), prompt, tokens, **options)
        assert_close(whole.rollout_logprob[i], expected, scale=1)


EIGHT = ("1-2-4", "1-2-1-4")
WAYS = {
    "two slots": {"slots": 2, "prefill_prompts": 1, "tokens_per_dispatch": 3},
    "prefill in chunks": {"prefill_chunk_tokens": 5, "tokens_per_dispatch": 64},
    "pages": {"cache": "paged"},
    "a scan, pages": {"cache": "paged", "unroll": 1, "slots": 4},
    "heads and replicas": {"layout": EIGHT, "slots": 32, "prefill_chunk_tokens": 9},
    "heads and replicas, pages": {"layout": EIGHT, "slots": 32, "cache": "paged"},
    "stages": {"layout": ("2-2-2", "2-2-1-2")},
}


@pytest.mark.parametrize(
    "way",
    [name if name == "two slots" else pytest.param(name, marks=pytest.mark.long) for name in WAYS],
)
def test_slots_and_caches_never_change_a_sample(way, whole):
    changes = dict(WAYS[way])
    layout = changes.pop("layout", ("1-1-1",))
    assert_same_samples(backend_of(layout, **changes).generate(PROMPTS, OPTIONS), whole)


FIRST_DENSE = dataclasses.replace(
    MODEL, num_layers=3, num_experts=4, experts_per_token=2, first_dense_layers=1, dense_d_ff=20
)


@pytest.mark.long
@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@pytest.mark.parametrize(("model", "stacks"), [(DELTA, {2}), (FIRST_DENSE, {1, 2})])
@pytest.mark.parametrize("unroll", [1, 4], ids=["scan", "list"])
def test_kernels_find_the_layer_by_its_number(unroll, model, stacks, cache, monkeypatch):
    """One layer of two has keys and values, so the number is that of a period. First layers are apart."""
    model = dataclasses.replace(model, head_dim=16)
    changes = {"attention": "xla", "cache": cache}
    expected = backend_of(model=model, decode_attention="xla", unroll=1, **changes)
    expected = expected.generate(PROMPTS, OPTIONS)
    seen = set()
    attend_by_kernel(monkeypatch, lambda cache: seen.add(getattr(cache, "pool", cache).k.shape[0]))
    backend = backend_of(model=model, decode_attention="auto", unroll=unroll, **changes)
    assert backend.engine.splits_layers == (unroll > 1)
    assert_same_samples(backend.generate(PROMPTS, OPTIONS), expected)
    assert seen == stacks


@pytest.mark.long
def test_samples_that_give_way_are_the_same(whole, monkeypatch):
    """They leave their pages, and their state is computed again."""
    monkeypatch.setattr(SlotPages, "_will_last", lambda self, *_: True)
    backend = backend_of(cache="paged", cache_tokens=64)
    assert_same_samples(backend.generate(PROMPTS, OPTIONS), whole)


@pytest.mark.long
def test_an_unfinished_sample_goes_on_as_if_it_had_not_been_left(whole):
    found = resumed(backend_of(), PROMPTS, OPTIONS.replace(budget_tokens=20))
    assert_same_samples(found, whole)


def test_what_needs_an_earlier_state_is_refused_or_off():
    with pytest.raises(
        UserError, match="speculate 2 takes tokens back, and the states of this model"
    ):
        backend_of(speculate=2)
    with pytest.raises(
        UserError, match="deterministic sampling covers models without delta layers"
    ):
        backend_of(deterministic=True)
    engine = backend_of(cache="paged").engine
    assert not DecodeLoop(engine, weights(), StopSearch(spell), reuse_prefixes=True)._reuses
