"""An actor whose sampling has limits trains the policy that samples: the kept tokens and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from meshes import mesh_of
from model_sizes import sized_model
from small import actor_on
from test_policy import (
    EIGHT_DEVICES,
    MODEL,
    ONE_DEVICE,
    ONE_EACH,
    OPTIONS,
    PACKED,
    PROMPTS,
    TRAIN,
    TWO_UPDATES,
    first_state,
    fresh,
    packed,
    sequences,
    shown_gradient,
    step,
)

from jaxrl.dataflows.experience import Experience
from jaxrl.dataflows.learning import ActorPhase
from jaxrl.dataflows.preparation import ReferencePhase
from jaxrl.dataflows.step_timer import NoTimer
from jaxrl.roles.batches import pack_completions
from jaxrl.roles.losses import SUPERVISED, CorrectionConfig, policy
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.policy import Actor, Reference
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.sampling import truncation_of
from jaxrl.rollout.settings import EngineConfig

LIMITS = {"top_k": 7, "top_p": 0.6, "min_p": 0.01}
MASKED = "rollout_corr/truncation_masked_fraction"
CLIPPED = policy("clipped", OPTIONS, truncated=True)


def limited(layout=ONE_DEVICE) -> Actor:
    return fresh(layout, limits=tuple(LIMITS.items()))


def sampled(actor: Actor, shape=ONE_EACH, **options):
    sampling = SamplingOptions(
        num_samples=4,
        seed=3,
        step=0,
        temperature=0.9,
        truncation=truncation_of(**LIMITS, renormalized=True),
    )
    completions = actor.generate(PROMPTS, sampling)
    batch, _ = pack_completions(completions, shape, **options)
    rng = np.random.default_rng(0)
    advantage = rng.normal(size=batch.tokens.shape).astype(np.float32) * batch.loss_mask
    return actor.place(batch.replace(advantage=advantage))


def phase_of(actor: Actor, *, shares: bool, **options) -> ActorPhase:
    objective = policy("clipped", OPTIONS, shares_forward=shares, truncated=True)
    correction = CorrectionConfig()
    return ActorPhase(actor, objective, correction, NoTimer(), shares_forward=shares, **options)


@pytest.mark.parametrize(
    "layout",
    [ONE_DEVICE, pytest.param(EIGHT_DEVICES, marks=pytest.mark.long)],
    ids=["one", "eight"],
)
def test_sampler_and_trainer_agree(layout):
    actor = limited(layout)
    batch = sampled(actor)
    is_trained = np.asarray(batch.loss_mask) > 0
    logprob = np.asarray(actor.logprobs(batch))[is_trained]
    assert_close(logprob, np.asarray(batch.rollout_logprob)[is_trained], scale=1)
    # Which are those of the whole vocabulary, less the log of the probability of all that is kept.
    whole = np.asarray(fresh().logprobs(jax.device_get(batch)))[is_trained]
    log_mass = np.asarray(actor.log_kept_mass(batch))[is_trained]
    assert_close(logprob, whole - log_mass, scale=1)
    assert np.exp(log_mass).min() < 0.8
    # Top-p .6 of a nearly flat distribution.
    assert (log_mass < -0.1).all()


@pytest.mark.parametrize("shares", [True, False], ids=["update", "forward"])
def test_the_ratio_is_one_in_the_first_minibatch(shares):
    actor = limited()
    seen = []
    phase = phase_of(actor, shares=shares, look=seen.append)
    experience = phase.logprobs(Experience(None, sampled(actor), {}, None))
    metrics = jax.device_get(experience.metrics | phase.update(experience))
    assert metrics["actor/first_ratio_max_deviation"] <= (0 if shares else 1e-5)
    assert metrics[MASKED] == 0
    # The gap to the sampler, which both renormalise.
    assert abs(metrics["rollout_corr/kl"]) < 1e-6
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert np.isfinite(seen[0].batch.old_logprob).all()


def outside(actor: Actor, batch) -> np.ndarray:
    """Tokens that the actor does not keep, of those in the mask."""
    return np.isneginf(np.asarray(actor.logprobs(actor.place(batch)))) & (batch.loss_mask > 0)


@pytest.mark.parametrize(
    "layout",
    [ONE_DEVICE, pytest.param(EIGHT_DEVICES, marks=pytest.mark.long)],
    ids=["one", "eight"],
)
def test_tokens_outside_are_masked_and_counted(layout):
    """Random tokens, of which a good part was never sampled within the limits."""
    batch = packed(sequences(), PACKED)
    is_outside = outside(limited(layout), batch)
    trained = batch.loss_mask.sum()
    assert 0.2 < is_outside.sum() / trained < 0.8
    params, metrics = step(limited(layout), batch, CLIPPED)
    assert metrics[MASKED] == pytest.approx(is_outside.sum() / trained)
    inside = batch.replace(loss_mask=batch.loss_mask * ~is_outside)
    expected, others = step(limited(layout), inside, CLIPPED)
    assert others[MASKED] == 0
    # They stay in the divisor, as tokens of weight 0 do.
    share = inside.loss_mask.sum() / trained
    assert metrics["loss"] == pytest.approx(share * others["loss"], rel=1e-4)
    before = first_state().params
    scaled = jax.tree.map(lambda g: share * g, shown_gradient(before, expected))
    assert_close(shown_gradient(before, params), scaled, rtol=1e-3)


def test_old_logprobs_of_tokens_outside_are_those_of_the_sampler():
    actor = limited()
    batch = packed(sequences())
    is_outside = outside(actor, batch)
    phase = phase_of(actor, shares=False)
    experience = phase.logprobs(Experience(None, actor.place(batch), {}, None))
    old = np.asarray(experience.batch.old_logprob)
    np.testing.assert_array_equal(old[is_outside], batch.rollout_logprob[is_outside])
    assert np.isfinite(old[batch.loss_mask > 0]).all()
    assert all(np.isfinite(float(x)) for x in experience.metrics.values())


@pytest.mark.long
def test_tokens_that_an_update_moves_out_are_masked_in_the_next():
    """All minibatches are sampled within the limits; a huge first step leaves them behind."""
    actor = limited()
    batch = sampled(actor, TWO_UPDATES)
    phase = phase_of(actor, shares=True)
    experience = phase.logprobs(Experience(None, batch, {}, None))
    assert not np.isneginf(np.asarray(experience.batch.old_logprob)).any()
    metrics = jax.device_get(phase.update(experience))
    assert 0 < metrics[MASKED] < 0.5
    assert metrics["actor/first_ratio_max_deviation"] == 0
    assert all(np.isfinite(value) for value in metrics.values())


def test_examples_are_learnt_by_the_whole_vocabulary():
    params, metrics = step(limited(), packed(sequences()), SUPERVISED)
    expected, others = step(fresh(), packed(sequences()), SUPERVISED)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert metrics == others


def test_a_policy_that_has_not_moved_has_no_kl_to_its_reference():
    actor = limited()
    reference = Reference(MODEL, actor.mesh, train=TRAIN, temperature=0.9)
    reference.load(jax.device_put(first_state().params, reference.train_shardings))
    batch = sampled(actor)
    experience = Experience(None, batch.replace(old_logprob=actor.logprobs(batch)), {}, None)
    batch = ReferencePhase(actor, reference, NoTimer(), asked=True).logprobs(experience).batch
    is_trained = np.asarray(batch.loss_mask) > 0
    assert_close(
        np.asarray(batch.ref_logprob)[is_trained], np.asarray(batch.old_logprob)[is_trained]
    )


def test_the_kl_over_the_vocabulary_is_that_of_whole_distributions():
    """By the reference's weights themselves: a difference of limits alone would show."""
    actor = limited()
    weights = jax.device_put(first_state().params, actor.train_shardings)
    objective = policy("clipped", OPTIONS, kl_coef=0.1, kl_estimate="full", truncated=True)
    batch = packed(sequences())
    is_outside = outside(actor, batch)
    metrics = jax.device_get(actor.update(actor.place(batch), objective, reference=weights))
    assert abs(metrics["kl_loss"]) < 1e-6
    assert metrics[MASKED] == pytest.approx(is_outside.sum() / batch.loss_mask.sum())


@pytest.mark.long
def test_in_bfloat16_at_a_width_of_256():
    """Where sampler and trainer round differently, few tokens leave the trainer's set."""
    model = sized_model(512, 2, 256, 512, 4, 2, 64, tie_embeddings=False)
    engine = EngineConfig(
        slots=16,
        prefill_prompts=4,
        max_prompt_tokens=4,
        max_response_tokens=32,
        tokens_per_dispatch=8,
        stop_ids=(1,),
        dtype="bfloat16",
    )
    actor = actor_on(
        mesh_of(),
        model=model,
        engine=engine,
        train=TrainConfig(dtype="bfloat16", row_tokens=48),
        optim=OptimConfig(lr=1e-4),
        truncation=truncation_of(top_k=0, top_p=0.9, min_p=0.0),
    )
    actor.init()
    # Initial weights give nearly equal probabilities; those of a trained model differ.
    peaked = actor.state.params | {"unembedding": actor.state.params["unembedding"] * 10}
    actor.state = actor.state.replace(params=peaked)
    options = SamplingOptions(
        num_samples=8,
        seed=0,
        step=0,
        temperature=1.0,
        truncation=truncation_of(top_k=0, top_p=0.9, min_p=0.0, renormalized=True),
    )
    completions = actor.generate(PROMPTS, options)
    shape = PackedShape(minibatches=1, microbatches=2, rows=8, tokens=48)
    batch, _ = pack_completions(completions, shape)
    batch = actor.place(batch.replace(advantage=batch.loss_mask.copy()))
    whole = np.concatenate(completions.rollout_logprob)
    assert len(whole) > 200 and whole.std() > 0.3
    phase = phase_of(actor, shares=True)
    experience = phase.logprobs(Experience(None, batch, {}, None))
    metrics = jax.device_get(phase.update(experience))
    assert metrics["actor/first_ratio_max_deviation"] == 0
    assert 0 <= metrics[MASKED] < 0.03
    assert 0 < metrics["training/rollout_probs_diff_mean"] < 0.03
    assert jnp.isfinite(metrics["actor/grad_norm"]) and metrics["actor/grad_norm"] > 0
