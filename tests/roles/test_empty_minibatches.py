"""Minibatches without a trained token: no NaN, no update, and no zeros in means."""

import functools
import math

import jax
import numpy as np
import pytest
from meshes import mesh_of
from small import actor_on, whole_rows

from jaxrl.roles.losses import CorrectionConfig, policy
from jaxrl.roles.policy import Actor
from jaxrl.types import TrainBatch


def batches(empty: tuple[int, ...], num: int = 2) -> TrainBatch:
    """Minibatches of other tokens; those of these numbers have no trained token."""
    parts = [whole_rows(seed, rows=4) for seed in range(num)]
    batch = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    rng = np.random.default_rng(0)
    shape = batch.tokens.shape
    old, rollout = (rng.uniform(-4, -2, shape).astype(np.float32) for _ in range(2))
    mask = batch.loss_mask.copy()
    mask[list(empty)] = 0
    return batch.replace(
        loss_mask=mask,
        advantage=rng.normal(size=shape).astype(np.float32),
        old_logprob=old,
        rollout_logprob=rollout,
    )


CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
OBJECTIVES = {
    "plain": policy("clipped", CLIP, entropy_coef=0.01, kl_coef=0.1),
    "bypass": policy(
        "policy_gradient",
        {},
        correction=CorrectionConfig(
            bypass=True, weights="token", normalize=True, reject={"token_k3": 9.0}
        ),
    ),
}


@functools.cache
def actor_of(layout: str = "1-1-1") -> Actor:
    """One actor for each layout, whose programs all tests share."""
    return actor_on(mesh_of(layout))


def updated(batch: TrainBatch, name: str, layout: str = "1-1-1") -> dict[str, float]:
    actor = actor_of(layout)
    actor.init()
    metrics = actor.update(actor.place(batch), OBJECTIVES[name])
    return {key: float(x) for key, x in metrics.items()}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_empty_minibatch_is_no_part_of_a_mean(name):
    """The first of two minibatches alone has the metrics of both, if the other one is empty."""
    both = batches(empty=(1,))
    alone = jax.tree.map(lambda x: x[:1], both)
    expected, found = updated(alone, name), updated(both, name)
    assert found.pop("skipped_updates") == 0.5 and expected.pop("skipped_updates") == 0
    assert found.keys() == expected.keys() and found["entropy"] > 1
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize(("name", "layout"), [("bypass", "1-1-1"), ("plain", "1-1-4")])
def test_an_update_without_trained_tokens_has_finite_metrics(name, layout):
    found = updated(batches(empty=(0, 1)), name, layout)
    assert [key for key, x in found.items() if not math.isfinite(x)] == []
    assert found["skipped_updates"] == 1 and found["loss"] == found["grad_norm"] == 0


@pytest.mark.parametrize("empty", [(), (0,), (1,)])
def test_weights_that_are_nan_are_seen_beside_an_empty_minibatch(empty):
    actor = actor_of()
    actor.init()
    state = jax.device_get(actor.state)
    state = state.replace(params=jax.tree.map(lambda x: x * np.float32(np.nan), state.params))
    actor.state = jax.device_put(state, actor.state_shardings())
    metrics = actor.update(actor.place(batches(empty)), OBJECTIVES["plain"])
    assert math.isnan(metrics["loss"]) and math.isnan(metrics["grad_norm"])
