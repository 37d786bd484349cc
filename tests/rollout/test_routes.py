"""The experts of a mixture's tokens: kept by the sampler beside keys and values, taken again in training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_engine import assert_same_samples
from flax import nnx
from slow_values import mostly_slow
from test_delta_states import DELTA, EIGHT, backend_of, weights
from test_driver import OPTIONS, PROMPTS
from test_engine import MODEL

from jaxrl.errors import UserError
from jaxrl.models.attention import attention
from jaxrl.models.compute import Compute
from jaxrl.models.decoder import Decoder, decoder_graph
from jaxrl.rollout import speculation
from jaxrl.rollout.samples import UnfinishedGroups
from jaxrl.types import Completions

MIXTURE = dataclasses.replace(MODEL, num_layers=3, num_experts=6, experts_per_token=2)
KINDS = {
    "mixture": MIXTURE,
    "first dense": dataclasses.replace(MIXTURE, first_dense_layers=1, dense_d_ff=20),
    "delta": dataclasses.replace(DELTA, num_experts=4, experts_per_token=2),
}


@functools.cache
def plain_pass(model):
    """The experts that each token of a sequence chooses, int [T, L, A], in any order of the last."""
    decoder: Decoder = nnx.merge(decoder_graph(model)[0], jax.device_put(weights(model)))

    @jax.jit
    def run(tokens_1T):
        positions = jnp.arange(tokens_1T.shape[1])[None]

        def attend(q, k, v, kind, _, segments):
            return attention(q, k, v, segments, kind, implementation="xla"), None

        compute = Compute(keeps_routes=True)
        segments = jnp.ones_like(tokens_1T)
        out = decoder(tokens_1T, positions, attend, compute=compute, per_row=segments)
        return out.routing.expert[:, 0].swapaxes(0, 1)

    # Of one length: padding comes last, and nothing before it depends on it.
    padded = lambda tokens: np.pad(tokens, (0, 64 - len(tokens)))[None]  # noqa: E731
    return lambda tokens: np.asarray(run(padded(tokens)))[: len(tokens)]


def assert_routes_of_a_plain_pass(completions: Completions, model) -> None:
    assert len(completions.routes) == len(completions)
    for b, routes in enumerate(completions.routes):
        prompt = completions.prompts.tokens[b // completions.num_samples]
        sequence = np.concatenate([prompt, completions.tokens[b]])
        assert len(routes) == len(sequence) - 1
        expected = plain_pass(model)(sequence)[:-1]
        np.testing.assert_array_equal(np.sort(routes, axis=-1), np.sort(expected, axis=-1))


WAYS = {
    "contiguous": {},
    "a scan, pages": {"unroll": 1, "cache": "paged", "slots": 4},
    "prefill in chunks": {"prefill_chunk_tokens": 5, "tokens_per_dispatch": 64, "slots": 2},
    "heads and replicas, pages": {"layout": EIGHT, "slots": 32, "cache": "paged"},
    "speculation": {"speculate": 2, "tokens_per_dispatch": 12},
}


@pytest.mark.parametrize(
    "changes", mostly_slow(WAYS, fast=("contiguous", "a scan, pages"), long=WAYS)
)
def test_the_sampler_keeps_what_every_token_took(changes, monkeypatch):
    monkeypatch.setattr(speculation, "OFF_ON", ())
    changes = dict(changes)
    backend = backend_of(changes.pop("layout", ("1-1-1",)), MIXTURE, keeps_routes=True, **changes)
    assert_routes_of_a_plain_pass(backend.generate(PROMPTS, OPTIONS), MIXTURE)


@pytest.mark.long
@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@pytest.mark.parametrize("kind", ["first dense", "delta"])
def test_other_stacks_keep_them_too(kind, cache):
    model = KINDS[kind]
    kept = backend_of(model=model, keeps_routes=True, cache=cache).generate(PROMPTS, OPTIONS)
    assert_routes_of_a_plain_pass(kept, model)
    assert_same_samples(kept, backend_of(model=model, cache=cache).generate(PROMPTS, OPTIONS))


def test_samples_that_go_on_in_another_run_keep_them():
    backend, options = (
        backend_of(model=MIXTURE, keeps_routes=True),
        OPTIONS.replace(budget_tokens=20),
    )
    first = backend.resume(PROMPTS, options)
    saved = UnfinishedGroups.of_record(first.unfinished.record())
    assert any(sample.finished for sample in saved.samples)
    # The others will be run again.
    assert all(sample.finished == (sample.routes is not None) for sample in saved.samples)
    rest = backend.resume(PROMPTS.take([]), OPTIONS.replace(step=1), unfinished=saved)
    assert not len(rest.unfinished.prompts)
    # An evaluation has no use for them.
    assert not backend.generate(PROMPTS, OPTIONS.replace(keeps_routes=False)).routes
    assert_routes_of_a_plain_pass(rest.completions, MIXTURE)


def test_stages_of_a_pipeline_are_refused():
    layout = ("2-2-2", "2-2-1-2")
    with pytest.raises(UserError, match="2 pipeline stages"):
        backend_of(layout, dataclasses.replace(MIXTURE, num_layers=4), keeps_routes=True)
