"""The trainer's logits with the sampler's noise draw the sampler's tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from meshes import mesh_of
from small import actor_on
from tokens import prompts_of

from jaxrl.roles.batches import pack_completions
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.policy import Actor
from jaxrl.roles.redraw import draws_of
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.sampling import truncation_of
from jaxrl.types import Completions

MODEL = dataclasses.replace(small.MODEL, vocab_size=64)
ENGINE = dataclasses.replace(small.ENGINE, slots=8, max_response_tokens=8)
PROMPTS = prompts_of([3, 4], [5], ids=[5, 2])
SHAPE = PackedShape(minibatches=1, microbatches=1, rows=8, tokens=16)
OPTIONS = SamplingOptions(num_samples=4, seed=3, step=7, temperature=0.8)


def actor_of(train: str, generate: str = "", fsdp: int = 1) -> Actor:
    actor = actor_on(
        mesh_of(train, generate, fsdp=fsdp),
        model=MODEL,
        engine=ENGINE,
        train=TrainConfig(logprob_chunk_tokens=8),
        optim=OptimConfig(lr=1.0),
        temperature=OPTIONS.temperature,
    )
    actor.init()
    return actor


@pytest.fixture(scope="module")
def actor() -> Actor:
    return actor_of("1-1-1")


def fraction(actor: Actor, completions: Completions, options: SamplingOptions, **packing) -> float:
    batch = actor.place(pack_completions(completions, SHAPE, **packing)[0])
    draws = draws_of(completions, options)
    assert draws is not None
    return float(actor.same_tokens(batch, draws))


@pytest.mark.parametrize(
    ("limits", "share_prompts"),
    [
        ({}, False),
        ({}, True),
        ({"top_k": 5, "top_p": 0.9, "min_p": 0.02}, True),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_tokens": 3}, False),
    ],
)
def test_all_tokens_are_the_same_with_equal_weights(actor, limits, share_prompts):
    options = OPTIONS
    if limits:
        options = options.replace(truncation=truncation_of(**limits))
    completions = actor.generate(PROMPTS, options)
    assert fraction(actor, completions, options, share_prompts=share_prompts) == 1


@pytest.mark.long
def test_all_tokens_are_the_same_on_eight_devices():
    actor = actor_of("1-4-2", "1-2-2-2", fsdp=2)
    completions = actor.generate(PROMPTS, OPTIONS)
    assert fraction(actor, completions, OPTIONS) == 1


def test_other_noise_draws_other_tokens(actor):
    completions = actor.generate(PROMPTS, OPTIONS)
    # Two independent draws from 64 nearly equal tokens agree about once in 64.
    assert fraction(actor, completions, OPTIONS.replace(seed=4)) < 0.5


def test_other_weights_draw_some_other_tokens(actor):
    completions = actor.generate(PROMPTS, OPTIONS)
    state = actor.for_training()
    noise = jax.random.normal
    moved = jax.tree.map(lambda x: x + 0.1 * noise(jax.random.key(x.size), x.shape), state.params)
    actor.state = state.replace(params=moved)
    assert 0.2 < fraction(actor, completions, OPTIONS) < 1
    actor.state = state


def test_samples_keep_the_step_that_started_them(actor):
    first = actor.resume(PROMPTS, OPTIONS.replace(budget_tokens=2)).unfinished
    later = OPTIONS.replace(step=8)
    rollout = actor.resume(PROMPTS.take([]), later, unfinished=first)
    assert set(rollout.completions.started_B) == {7}
    assert fraction(actor, rollout.completions, later) == 1


def test_a_repetition_penalty_cannot_be_repeated(actor):
    limits = truncation_of(top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.1)
    options = OPTIONS.replace(truncation=limits)
    assert draws_of(actor.generate(PROMPTS, options), options) is None


def test_only_trained_tokens_count(actor):
    completions = actor.generate(PROMPTS, OPTIONS)
    batch = actor.place(pack_completions(completions, SHAPE)[0])
    draws = draws_of(completions, OPTIONS)
    none = batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask))
    assert actor.same_tokens(none, draws) is None


def test_an_empty_microbatch_is_passed_over(actor):
    """The first one has no trained token, and neither has the first minibatch."""
    completions = actor.generate(PROMPTS, OPTIONS)
    shape = PackedShape(minibatches=2, microbatches=2, rows=2, tokens=16)
    draws = draws_of(completions, OPTIONS)
    whole = actor.place(pack_completions(completions, shape)[0])
    mask = np.asarray(whole.loss_mask).copy()
    mask[0], mask[1, 0] = 0, 0
    assert mask.any()
    assert float(actor.same_tokens(whole.replace(loss_mask=jnp.asarray(mask)), draws)) == 1
    # Nothing is compared before the shortest length of an answer.
    limits = truncation_of(top_k=0, top_p=1.0, min_p=0.0, min_tokens=99)
    assert actor.same_tokens(whole, dataclasses.replace(draws, truncation=limits)) is None
