"""Prepares the data of a step: packing, log-probabilities of the reference, advantages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algos.controllers import adaptive, constrained_advantage, entropy_coef
from jaxrl.data.packing import PackedShape
from jaxrl.dataflows.costs import Costs, Multiplier
from jaxrl.dataflows.experience import Experience, Metrics, Sampled
from jaxrl.dataflows.step_metrics import batch_metrics, value_metrics
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.dataflows.work_metrics import work_metrics
from jaxrl.mesh import hosts
from jaxrl.mesh.rules import TRAIN_RULES, shards_of
from jaxrl.roles.advantage_estimator import Estimator
from jaxrl.roles.batches import ShareOption, pack_completions
from jaxrl.roles.policy import Actor, Reference
from jaxrl.types import Scored, ValueBatch


class Packer:
    """Packs the groups of a step into rows on the actor's devices."""

    def __init__(
        self,
        actor: Actor,
        shape: PackedShape,
        *,
        max_prompt_tokens: int,
        mask_truncated: bool = False,
        fill_minibatches: bool = False,
        share_prompts: ShareOption = False,
        equal_last: bool = False,
        top_entropy: float = 1.0,
        epochs: int = 1,
    ):
        """Args.

        actor: role that learns; its devices get equal shares of the work.
        shape: shape of the packed arrays.
        max_prompt_tokens: limit of a prompt, for metrics.
        mask_truncated: whether truncated responses are left out of the loss (overlong filtering); they still
          count in the baseline of their group.
        fill_minibatches, share_prompts, top_entropy: see `roles.batches.pack_completions`.
        equal_last: whether groups with equal rewards are packed into the last rows of their minibatch, where
          the update needs no backward pass for them (`Objective.needs_advantage`).
        epochs: number of passes of the actor, for metrics.
        """
        self._actor = actor
        self._shape = shape
        self._max_prompt_tokens = max_prompt_tokens
        self._mask_truncated = mask_truncated
        self._equal_last = equal_last
        self._epochs = epochs
        self._layout: Any = {
            "shards": shards_of("batch", TRAIN_RULES, actor.mesh),
            "fill_minibatches": fill_minibatches,
            "share_prompts": share_prompts,
            "top_entropy": top_entropy,
        }

    def __call__(self, sampled: Sampled) -> Experience:
        """The sequences of a step, packed on the actor's devices."""
        completions, layout = sampled.completions, self._layout
        if self._equal_last:
            layout = layout | {"last_B": _in_equal_group(sampled.scored)}
        if self._mask_truncated:
            layout = layout | {"trained_B": ~completions.truncated_B}
        batch = pack_completions(completions, self._shape, **layout)
        metrics = batch_metrics(sampled.scored, max_prompt_tokens=self._max_prompt_tokens)
        metrics = {**metrics, **work_metrics(self._actor, batch, epochs=self._epochs)}
        metrics = {**metrics, **sampled.metrics, **sampled.counts}
        return Experience(sampled.scored, self._actor.place(batch), metrics)


def _in_equal_group(scored: Scored) -> np.ndarray:
    """Whether all responses to the same prompt have the same reward, bool [B]."""
    reward_NG = scored.reward_B.reshape(-1, scored.completions.num_samples)
    return np.repeat(np.ptp(reward_NG, axis=1) == 0, reward_NG.shape[1])


class ReferencePhase:
    """The reference policy in a step: log-probabilities with the initial weights of training."""

    def __init__(self, actor: Actor, reference: Reference | None, timer: StepTimer, *, asked: bool):
        """Args.

        actor: the policy. With adapters it is its own reference: the same weights without the adapters.
        reference: separate reference policy; None uses the actor.
        timer: timer of the step.
        asked: whether a KL penalty needs the log-probabilities; if not, the batch stays unchanged.
        """
        self._actor = actor
        self._reference = reference
        self._timer = timer
        self._asked = asked

    def logprobs(self, experience: Experience) -> Experience:
        """Adds the log-probabilities of the reference, if they are needed.

        With a truncation they are divided by the probability of the actor's kept tokens.
        """
        with self._timer.phase("ref"):
            if not self._asked:
                return experience
            batch = experience.batch
            if self._reference is None:
                ref_logprob = self._actor.reference_logprobs(batch)
            else:
                ref_logprob = self._actor.place(self._reference.logprobs(batch))
            if self._actor.truncation is not None:
                # The actor's tokens have all of the probability; the reference's have the share that they
                # had in the actor. So a policy without changes has no KL to it.
                ref_logprob = ref_logprob - self._actor.log_kept_mass(batch)
            batch = self._timer.when_done(batch.replace(ref_logprob=ref_logprob))
            return experience.extended(batch)


class KlCoefficient:
    """The coefficient of the KL penalty in the reward, constant or adapted to a target."""

    def __init__(self, coef: float, *, target: float = 0.0, horizon: float = 1.0):
        """Args: the initial coefficient, the target KL (0 for none) and the horizon in sequences."""
        self.value = coef
        self._target = target
        self._horizon = horizon

    def follow(self, mean_kl: jax.Array, num_sequences: int) -> None:
        """Adapts the coefficient after a step."""
        if self._target:
            self.value = float(
                adaptive(
                    jnp.float32(self.value),
                    hosts.fetch(mean_kl),
                    num_sequences=num_sequences,
                    target=self._target,
                    horizon=self._horizon,
                )
            )


class EntropyCoefficient:
    """The coefficient of the entropy bonus, adapted to keep an entropy.

    Attributes:
      value: coefficient of a step whose entropy is at most the target.
      entropy: mean entropy of the last step; 0 before the first.
    """

    def __init__(self, coef: float, *, target: float):
        """Args: the initial coefficient, and the target in nats."""
        self.value = coef
        self.entropy = 0.0
        self._target = target

    @property
    def applied(self) -> float:
        """The coefficient of the next step."""
        return self.value if self.entropy <= self._target else 0.0

    def follow(self, entropy: jax.Array) -> None:
        """Adapts the coefficient after a step."""
        self.entropy = float(hosts.fetch(entropy))
        value = entropy_coef(
            jnp.float32(self.value), jnp.float32(self.entropy), target=self._target
        )
        self.value = float(value)


class Advantages:
    """Computes advantages from rewards, including the KL penalty in the reward."""

    def __init__(
        self,
        actor: Actor,
        estimator: Estimator,
        kl: KlCoefficient,
        timer: StepTimer,
        *,
        penalizes: bool = False,
        multiplier: Multiplier | None = None,
    ):
        """Args.

        actor: role whose devices hold the batch.
        estimator: advantage estimator of the algorithm.
        kl: coefficient of the KL penalty in the reward.
        timer: timer of the step.
        penalizes: whether the reward has a KL penalty, which is then reported.
        multiplier: Lagrange multiplier of costs; None without costs.
        """
        self._actor = actor
        self._estimator = estimator
        self._kl = kl
        self._timer = timer
        self._penalizes = penalizes
        self._multiplier = multiplier

    def __call__(self, experience: Experience) -> Experience:
        """Adds advantages relative to the other responses of the group, or of the batch."""
        with self._timer.phase("adv"):
            parts = self._reward_parts(experience)
            return self._done(self._estimated(experience, **parts)[0])

    def with_values(
        self, experience: Experience, values: jax.Array
    ) -> tuple[Experience, ValueBatch]:
        """Adds generalised advantages over a critic's values; returns the critic's targets too."""
        with self._timer.phase("adv"):
            value = self._actor.place(values)
            experience, target = self._estimated(experience, value=value)
            targets = ValueBatch(**experience.batch.packing(), old_value=value, target=target)
            return experience.extended(experience.batch, value_metrics("critic", targets)), targets

    def of_tokens(self, experience: Experience, **arrays: jax.Array) -> Experience:
        """Adds token-wise advantages, from the arrays [U, M, R, T] that the dataflow declares in `gives`."""
        with self._timer.phase("adv"):
            arrays = {name: self._actor.place(x) for name, x in arrays.items()}
            return self._done(self._estimated(experience, arrays=arrays)[0])

    def with_baseline(self, experience: Experience, greedy: Sampled) -> Experience:
        """Adds advantages with the reward of the greedy response as baseline (ReMax)."""
        with self._timer.phase("adv"):
            reward_N = greedy.scored.reward_B
            baseline_B = reward_N[experience.completions.prompt_index_B]
            experience, _ = self._estimated(experience, baseline_B=baseline_B)
            experience = experience.extended(
                experience.batch, {"reward/greedy/mean": reward_N.mean()}
            )
            return self._done(experience)

    def with_costs(
        self, experience: Experience, costs: Costs, values: jax.Array
    ) -> tuple[Experience, ValueBatch]:
        """Subtracts the advantages of costs, times the multiplier, from those of rewards (Safe RLHF)."""
        assert self._multiplier is not None, "costs have a multiplier"
        with self._timer.phase("adv"):
            batch, completions = experience.batch, experience.completions
            value = self._actor.place(values)
            cost_advantage, target, _ = self._estimator(
                batch,
                costs.cost_B,
                completions.prompt_index_B.astype(np.int32),
                num_groups=len(completions.prompts),
                value=value,
            )
            advantage = constrained_advantage(
                batch.advantage, cost_advantage, jnp.float32(self._multiplier.value)
            )
            batch = batch.replace(advantage=advantage)
            targets = ValueBatch(**batch.packing(), old_value=value, target=target)
            metrics = {**costs.metrics, **value_metrics("cost_critic", targets)}
            return experience.extended(batch, metrics), targets

    def _estimated(self, experience: Experience, **given: Any) -> tuple[Experience, jax.Array]:
        """(experience with advantages, returns). Adapts the KL coefficient afterwards."""
        completions = experience.completions
        advantage, target, reward_kl = self._estimator(
            experience.batch,
            experience.scored.reward_B,
            completions.prompt_index_B.astype(np.int32),
            num_groups=len(completions.prompts),
            kl_coef=self._kl.value,
            **given,
        )
        metrics: Metrics = {}
        if self._penalizes:
            metrics["actor/reward_kl_penalty"] = reward_kl
            metrics["actor/reward_kl_penalty_coeff"] = self._kl.value
        self._kl.follow(reward_kl, len(completions))
        return experience.extended(experience.batch.replace(advantage=advantage), metrics), target

    def _reward_parts(self, experience: Experience) -> dict[str, np.ndarray]:
        """The terms of the score, the length punishment last; {} unless the estimator needs them."""
        if "score_BK" not in self._estimator.inputs:
            return {}
        scored = experience.scored
        return {
            "score_BK": np.concatenate([scored.term_BK, scored.shaping_B[:, None]], axis=1),
            "weight_K": np.append(scored.term_weight_K, np.float32(1.0)),
        }

    def _done(self, experience: Experience) -> Experience:
        return experience.extended(self._timer.when_done(experience.batch))
