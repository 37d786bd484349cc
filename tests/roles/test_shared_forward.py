"""Old log-probabilities from the update's own forward pass: the same step without the pass before it."""

import dataclasses

import jax
import numpy as np
import pytest
from closeness import assert_close
from test_policy import EIGHT_DEVICES, ONE_DEVICE, PACKED, TWO_UPDATES, fresh, packed, sequences

from jaxrl.config.schema import Config
from jaxrl.dataflows.experience import Experience
from jaxrl.dataflows.learning import ActorPhase
from jaxrl.dataflows.step_timer import NoTimer
from jaxrl.roles.losses import CorrectionConfig, policy
from jaxrl.trainer.resolved import resolve

OPTIONS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
CORRECTION = CorrectionConfig(weights="token", normalize=True, reject=dict(token_ratio=(0.2, 6.0)))


def shares_forward(config: Config) -> bool:
    return resolve(config).shares_forward


def step(shape, correction, *, shares, layout=ONE_DEVICE):
    """Weights, metrics and the batch that `look` is shown, after one step of the actor's phase."""
    actor = fresh(layout)
    corrects_inside = shares and (correction.weighs or bool(correction.rejections))
    objective = policy(
        "clipped",
        OPTIONS,
        correction=correction if corrects_inside else None,
        shares_forward=shares,
    )
    seen = []
    phase = ActorPhase(
        actor, objective, correction, NoTimer(), shares_forward=shares, look=seen.append
    )
    batch = actor.place(packed(sequences(), shape))
    # Whatever it holds, it is not looked at.
    batch = batch.replace(old_logprob=batch.old_logprob * np.nan)
    experience = phase.logprobs(Experience(None, batch, {}, None))
    metrics = experience.metrics | phase.update(experience)
    return jax.device_get(actor.state.params), jax.device_get(metrics), seen[0].batch


@pytest.mark.parametrize(
    "layout",
    # On eight what is added up over all devices, at once.
    [ONE_DEVICE, pytest.param(EIGHT_DEVICES, marks=pytest.mark.long)],
    ids=["one device", "eight devices"],
)
def test_one_update_a_step_takes_no_other_pass(layout, monkeypatch):
    plain, told, seen = step(PACKED, CORRECTION, shares=False, layout=layout)

    def never(*args, **kwargs):
        raise AssertionError("the update has a forward pass of its own")

    monkeypatch.setattr(fresh(layout), "logprobs_program", never)
    shared, metrics, seen_shared = step(PACKED, CORRECTION, shares=True, layout=layout)
    assert_close(shared, plain)
    assert_close(seen_shared.old_logprob, seen.old_logprob)
    assert metrics["actor/first_ratio_max_deviation"] == 0
    # What only rounding makes: the ratio, and the sum of its logarithms.
    rounding = ("ratio_max_deviation", "ppo_kl")
    assert metrics.keys() == told.keys()
    for name, value in told.items():
        if not name.endswith(rounding):
            np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.long
def test_the_first_of_two_updates_shares_its_forward_pass():
    plain, told, seen = step(TWO_UPDATES, CorrectionConfig(), shares=False)
    shared, metrics, seen_shared = step(TWO_UPDATES, CorrectionConfig(), shares=True)
    assert_close(shared, plain)
    assert_close(seen_shared.old_logprob, seen.old_logprob)
    assert metrics["actor/first_ratio_max_deviation"] == 0
    # In the second the weights have changed, and the ratio is to those of the start of the step.
    assert metrics["actor/ratio_max_deviation"] > 1e-3
    for name in ("actor/ratio_max_deviation", "rollout_corr/kl"):
        np.testing.assert_allclose(metrics[name], told[name], rtol=1e-3)


def test_while_the_actor_is_frozen_the_gap_is_still_reported():
    actor = fresh()
    phase = ActorPhase(
        actor,
        policy("clipped", OPTIONS, shares_forward=True),
        CorrectionConfig(),
        NoTimer(),
        shares_forward=True,
        frozen_steps=1,
    )
    experience = phase.logprobs(
        Experience(None, actor.place(packed(sequences(), PACKED)), {}, None)
    )
    assert "rollout_corr/kl" in experience.metrics
    assert "rollout_corr/kl" not in phase.update(experience)


def changed(**settings) -> Config:
    algorithm = dataclasses.replace(Config().algorithm, **settings)
    return dataclasses.replace(Config(), algorithm=algorithm)


CLIP_COV = {"fraction": 0.01, "lowest": 0.1, "highest": 1.0, "clip_low": 0.2, "clip_high": 0.2}
LOOKS = {
    "takes the sampler's": {"correction": CorrectionConfig(bypass=True)},
    "selects tokens": {"loss": "clip_cov", "loss_options": CLIP_COV},
    "is made of them": {"advantage": "optimal_token_baseline"},
    "over all minibatches": {"correction": CorrectionConfig(weights="token")},
    "algorithm.epochs 2 needs them whole": {"epochs": 2},
    "takes a mean": {
        "correction": CorrectionConfig(weights="token", normalize=True),
        "entropy_coef": 0.1,
        "updates_per_step": 1,
    },
}


@pytest.mark.parametrize("clause", LOOKS)
def test_what_looks_at_them_before_takes_the_pass(clause):
    assert not shares_forward(changed(**LOOKS[clause]))


def test_by_default_nothing_is_computed_twice():
    assert shares_forward(Config())
    # A dataflow of one's own may look at anything.
    assert not shares_forward(changed(dataflow="jaxrl.dataflows.grpo:grpo"))
    one = changed(correction=CorrectionConfig(weights="token"), updates_per_step=1)
    assert shares_forward(one)
