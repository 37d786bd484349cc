"""Prepares the data of a step: packing, log-probabilities of the reference, advantages."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algos.controllers import (
    adaptive,
    constrained_advantage,
    entropy_coef,
    moving_average,
)
from jaxrl.dataflows.experience import Experience, Metrics, Sampled
from jaxrl.dataflows.rewarding import Costs, Multiplier
from jaxrl.dataflows.step_metrics import batch_metrics, value_metrics, work_metrics
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.mesh import hosts
from jaxrl.roles.advantage_estimator import Estimator
from jaxrl.roles.batches import ShareOption, pack_completions
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.policy import Actor, Reference
from jaxrl.types import Scored, ValueBatch


@dataclasses.dataclass(eq=False)
class Packer:
    """Packs the groups of a step into rows on the actor's devices.

    Attributes:
      actor: role that learns; its devices get equal shares of the work.
      shape: shape of the packed arrays.
      max_prompt_tokens: limit of a prompt, for metrics.
      mask_truncated: whether truncated responses are left out of the loss (overlong filtering).
      fill_minibatches, share_prompts, top_entropy: see `roles.batches.pack_completions`.
      equal_last: whether groups with equal rewards are packed into the last rows of their minibatch, where
        the update needs no backward pass for them (`Objective.needs_advantage`).
      epochs: number of passes of the actor, for metrics.
    """

    actor: Actor
    shape: PackedShape
    max_prompt_tokens: int
    mask_truncated: bool = False
    fill_minibatches: bool = False
    share_prompts: ShareOption = False
    equal_last: bool = False
    top_entropy: float = 1.0
    epochs: int = 1

    def __call__(self, sampled: Sampled) -> Experience:
        scored, completions, last_B = sampled.scored, sampled.completions, None
        if self.equal_last:
            # Groups of equal rewards have no advantages: last, so that whole microbatches can be left out.
            last_B = np.repeat(~scored.differ_N(scored.reward_B), completions.num_samples)
        trained_B = scored.counts_B
        if self.mask_truncated:
            # Truncated responses still count in the baseline of their group.
            trained_B = trained_B & ~completions.truncated_B
        batch, packing = pack_completions(
            completions,
            self.shape,
            **self.actor.rows_of(self.shape),
            fill_minibatches=self.fill_minibatches,
            share_prompts=self.share_prompts,
            last_B=last_B,
            trained_B=None if trained_B.all() else trained_B,
            top_entropy=self.top_entropy,
        )
        metrics = batch_metrics(scored, max_prompt_tokens=self.max_prompt_tokens)
        metrics = {**metrics, **work_metrics(self.actor, packing, epochs=self.epochs)}
        metrics = {**metrics, **sampled.metrics, **sampled.counts}
        return Experience(scored, self.actor.place(batch), metrics, packing)


@dataclasses.dataclass(eq=False)
class ReferencePhase:
    """The reference policy in a step: log-probabilities with the initial weights of training.

    Attributes:
      actor: the policy. With adapters it is its own reference: the same weights without the adapters.
      reference: separate reference policy; None uses the actor.
      timer: timer of the step.
      asked: whether a KL penalty needs the log-probabilities; if not, the batch stays unchanged.
    """

    actor: Actor
    reference: Reference | None
    timer: StepTimer
    _: dataclasses.KW_ONLY
    asked: bool

    def logprobs(self, experience: Experience) -> Experience:
        """Adds the log-probabilities of the reference, if they are needed.

        With a truncation they are divided by the probability of the actor's kept tokens.
        """
        with self.timer.phase("ref"):
            if not self.asked:
                return experience
            batch = experience.batch
            if self.reference is None:
                ref_logprob = self.actor.reference_logprobs(batch)
            else:
                # The reference may have devices of its own.
                ref_logprob = self.actor.place(self.reference.logprobs(batch))
            if self.actor.truncation is not None:
                # The actor's tokens have all of the probability; the reference's have the share that they
                # had in the actor. So a policy without changes has no KL to it.
                ref_logprob = ref_logprob - self.actor.log_kept_mass(batch)
            batch = self.timer.when_done(batch.replace(ref_logprob=ref_logprob))
            return experience.extended(batch)


@dataclasses.dataclass(eq=False)
class KlCoefficient:
    """The coefficient of the KL penalty in the reward, constant or adapted to a target.

    Attributes:
      value: coefficient of the next step.
      target: KL to reach; 0 keeps the coefficient.
      horizon: number of sequences over which it adapts.
    """

    value: float
    target: float = 0.0
    horizon: float = 1.0

    def follow(self, mean_kl: jax.Array, num_sequences: int) -> None:
        if self.target:
            self.value = float(
                adaptive(
                    jnp.float32(self.value),
                    hosts.fetch(mean_kl),
                    num_sequences=num_sequences,
                    target=self.target,
                    horizon=self.horizon,
                )
            )


@dataclasses.dataclass(eq=False)
class EntropyCoefficient:
    """The coefficient of the entropy bonus, adapted to keep an entropy.

    Attributes:
      value: coefficient of a step whose entropy is at most the target.
      target: entropy to keep, in nats.
      entropy: mean entropy of the last step; 0 before the first.
    """

    value: float
    target: float
    entropy: float = 0.0

    @property
    def applied(self) -> float:
        """The coefficient of the next step."""
        # As in Skywork-OR1, section 4.
        return self.value if self.entropy <= self.target else 0.0

    def follow(self, entropy: jax.Array) -> None:
        self.entropy = float(hosts.fetch(entropy))
        value = entropy_coef(jnp.float32(self.value), jnp.float32(self.entropy), target=self.target)
        self.value = float(value)


@dataclasses.dataclass(eq=False)
class RewardAverage:
    """The moving average of the mean rewards of earlier steps, the baseline of REINFORCE.

    Attributes:
      decay: share of the old average.
      value: the average; None before the first step with a reward.
    """

    decay: float
    value: float | None = None

    def follow(self, scored: Scored) -> None:
        counted = scored.reward_B[scored.counts_B]
        if len(counted):
            mean = float(counted.mean(dtype=np.float64))
            self.value = moving_average(self.value, mean, decay=self.decay)


@dataclasses.dataclass(eq=False)
class Advantages:
    """Computes advantages from rewards, including the KL penalty in the reward.

    Attributes:
      actor: role whose devices hold the batch.
      estimator: advantage estimator of the algorithm.
      kl: coefficient of the KL penalty in the reward.
      timer: timer of the step.
      penalizes: whether the reward has a KL penalty, which is then reported.
      multiplier: Lagrange multiplier of costs; None without costs.
      average: moving average of rewards; None for estimators without it.
    """

    actor: Actor
    estimator: Estimator
    kl: KlCoefficient
    timer: StepTimer
    _: dataclasses.KW_ONLY
    penalizes: bool = False
    multiplier: Multiplier | None = None
    average: RewardAverage | None = None

    def __call__(self, experience: Experience) -> Experience:
        """Adds advantages relative to other responses: of the group, of the batch, or of earlier steps."""
        with self.timer.phase("adv"):
            parts, scored = {}, experience.scored
            if "score_BK" in self.estimator.inputs:
                # The terms of the score, the length punishment last.
                parts["score_BK"] = np.column_stack([scored.term_BK, scored.shaping_B])
                # The length punishment counts as it is.
                parts["weight_K"] = np.append(scored.term_weight_K, np.float32(1.0))
            if self.average is not None:
                # That of earlier steps: with this one's rewards in it the gradient would be biased.
                before = parts["average_reward"] = self.average.value or 0.0
                self.average.follow(scored)
                experience = experience.extended(
                    experience.batch, {"reward/moving_average": before}
                )
            return self._done(self._estimated(experience, **parts)[0])

    def with_values(
        self, experience: Experience, values: jax.Array
    ) -> tuple[Experience, ValueBatch]:
        """Adds generalised advantages over a critic's values; returns the critic's targets too."""
        with self.timer.phase("adv"):
            value = self.actor.place(values)
            experience, target = self._estimated(experience, value=value)
            batch = experience.batch
            targets = ValueBatch(**batch.packing(), old_value=value, target=target)
            if batch.old_value is not None:
                batch = batch.replace(target=target)
            return experience.extended(batch, value_metrics("critic", targets)), targets

    def of_tokens(self, experience: Experience, **arrays: jax.Array) -> Experience:
        """Adds token-wise advantages, from the arrays [U, M, R, T] that the dataflow declares in `gives`."""
        with self.timer.phase("adv"):
            arrays = {name: self.actor.place(x) for name, x in arrays.items()}
            return self._done(self._estimated(experience, arrays=arrays)[0])

    def with_baseline(self, experience: Experience, greedy: Sampled) -> Experience:
        """Adds advantages with the reward of the greedy response as baseline (ReMax)."""
        with self.timer.phase("adv"):
            reward_N, counts_N = greedy.scored.reward_B, greedy.scored.counts_B
            index_B = experience.completions.prompt_index_B
            # A greedy response that does not count is no baseline. Their own reward leaves an advantage of 0.
            baseline_B = np.where(
                counts_N[index_B], reward_N[index_B], experience.scored.reward_B
            ).astype(np.float32)
            experience, _ = self._estimated(experience, baseline_B=baseline_B)
            metrics = {"reward/greedy/mean": reward_N[counts_N].mean()} if counts_N.any() else {}
            return self._done(experience.extended(experience.batch, metrics))

    def with_costs(
        self, experience: Experience, costs: Costs, values: jax.Array
    ) -> tuple[Experience, ValueBatch]:
        """Subtracts the advantages of costs, times the multiplier, from those of rewards (Safe RLHF)."""
        assert self.multiplier is not None, "costs have a multiplier"
        with self.timer.phase("adv"):
            batch, value = experience.batch, self.actor.place(values)
            group_B, num_groups = _groups(experience.scored)
            # Without a KL coefficient: the penalty is in the rewards already.
            cost_advantage, target, _ = self.estimator(
                batch, costs.cost_B, group_B, num_groups=num_groups, value=value
            )
            advantage = constrained_advantage(
                batch.advantage, cost_advantage, jnp.float32(self.multiplier.value)
            )
            batch = batch.replace(advantage=advantage)
            targets = ValueBatch(**batch.packing(), old_value=value, target=target)
            metrics = {**costs.metrics, **value_metrics("cost_critic", targets)}
            return experience.extended(batch, metrics), targets

    def _estimated(self, experience: Experience, **given: Any) -> tuple[Experience, jax.Array]:
        """(experience with advantages, returns). Adapts the KL coefficient afterwards."""
        group_B, num_groups = _groups(experience.scored)
        advantage, target, reward_kl = self.estimator(
            experience.batch,
            experience.scored.reward_B,
            group_B,
            num_groups=num_groups,
            kl_coef=self.kl.value,
            **given,
        )
        metrics: Metrics = {}
        if self.penalizes:
            metrics["actor/reward_kl_penalty"] = reward_kl
            # That of this step: `follow` changes it.
            metrics["actor/reward_kl_penalty_coeff"] = self.kl.value
        self.kl.follow(reward_kl, int(experience.scored.counts_B.sum()))
        return experience.extended(experience.batch.replace(advantage=advantage), metrics), target

    def _done(self, experience: Experience) -> Experience:
        return experience.extended(self.timer.when_done(experience.batch))


def _groups(scored: Scored) -> tuple[np.ndarray, int]:
    """The group of each sample, int32 [B], and their number. Samples that do not count are absent, -1."""
    index_B = np.where(scored.counts_B, scored.completions.prompt_index_B, -1)
    return index_B.astype(np.int32), len(scored.completions.prompts)
