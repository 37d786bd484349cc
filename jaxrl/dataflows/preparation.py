"""Before anything is learned: packing, the reference's log-probabilities, advantages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algos.controllers import adaptive, constrained_advantage
from jaxrl.data.packing import PackedShape
from jaxrl.dataflows.costs import Costs, Multiplier
from jaxrl.dataflows.experience import Experience, Metrics, Sampled
from jaxrl.dataflows.step_metrics import batch_metrics, value_metrics
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.dataflows.work_metrics import work_metrics
from jaxrl.mesh import hosts
from jaxrl.mesh.rules import TRAIN_RULES, shards_of
from jaxrl.roles.advantage_estimator import Estimator
from jaxrl.roles.batches import pack_completions
from jaxrl.roles.policy import Actor, Reference
from jaxrl.types import ValueBatch


class Packer:
    """Lays the groups of a step out for the device."""

    def __init__(
        self,
        actor: Actor,
        shape: PackedShape,
        *,
        max_prompt_tokens: int,
        mask_truncated: bool = False,
        fill_minibatches: bool = False,
        share_prompts: bool = False,
        epochs: int = 1,
    ):
        """Args.

        actor: whose devices the arrays go to, in equal shares of work.
        shape: of the packed arrays.
        max_prompt_tokens: limit of a prompt, for metrics.
        mask_truncated: truncated responses are left out of the loss (overlong filtering); they still count
          in their group's baseline.
        fill_minibatches, share_prompts: see `roles.batches.pack_completions`.
        epochs: how often the actor goes through them, for metrics.
        """
        self._actor = actor
        self._shape = shape
        self._max_prompt_tokens = max_prompt_tokens
        self._mask_truncated = mask_truncated
        self._epochs = epochs
        self._layout: Any = {
            "shards": shards_of("batch", TRAIN_RULES, actor.mesh),
            "fill_minibatches": fill_minibatches,
            "share_prompts": share_prompts,
        }

    def __call__(self, sampled: Sampled) -> Experience:
        """The step's sequences, where the actor wants them."""
        completions = sampled.completions
        batch = pack_completions(completions, self._shape, **self._layout)
        if self._mask_truncated:
            kept_B = (~completions.truncated_B).astype(np.float32)
            batch = batch.replace(loss_mask=batch.loss_mask * kept_B[batch.sequence])
        metrics = batch_metrics(sampled.scored, max_prompt_tokens=self._max_prompt_tokens)
        metrics = {**metrics, **work_metrics(self._actor, batch, epochs=self._epochs)}
        metrics = {**metrics, **sampled.metrics, **sampled.counts}
        return Experience(sampled.scored, self._actor.place(batch), metrics)


class ReferencePhase:
    """Log-probabilities of the policy that training started from."""

    def __init__(self, actor: Actor, reference: Reference | None, timer: StepTimer, *, asked: bool):
        """Args.

        actor: with adapters it is its own reference, without them.
        reference: a policy of its own; None takes the actor's.
        timer: of the step.
        asked: some coefficient of the KL penalty wants them; else the batch passes through as it is.
        """
        self._actor = actor
        self._reference = reference
        self._timer = timer
        self._asked = asked

    def logprobs(self, experience: Experience) -> Experience:
        """Adds them."""
        with self._timer.phase("ref"):
            if not self._asked:
                return experience
            batch = experience.batch
            if self._reference is None:
                ref_logprob = self._actor.reference_logprobs(batch)
            else:
                ref_logprob = self._actor.place(self._reference.logprobs(batch))
            batch = self._timer.when_done(batch.replace(ref_logprob=ref_logprob))
            return experience.extended(batch)


class KlCoefficient:
    """The KL coefficient of the reward, which may follow a target."""

    def __init__(self, coef: float, *, target: float = 0.0, horizon: float = 1.0):
        """Args: the coefficient to begin with, the KL aimed for (0 keeps it) and the horizon in sequences."""
        self.value = coef
        self._target = target
        self._horizon = horizon

    def follow(self, mean_kl: jax.Array, num_sequences: int) -> None:
        """Moves it towards the target, after a step."""
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


class Advantages:
    """From rewards to advantages, the KL penalty in the reward included."""

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

        actor: where the batch lies.
        estimator: of the algorithm.
        kl: the coefficient of the reward's KL penalty.
        timer: of the step.
        penalizes: the reward pays for the KL to the reference, which is then reported.
        multiplier: of costs, where there are any.
        """
        self._actor = actor
        self._estimator = estimator
        self._kl = kl
        self._timer = timer
        self._penalizes = penalizes
        self._multiplier = multiplier

    def __call__(self, experience: Experience) -> Experience:
        """Relative to the other responses of the group, or of the batch."""
        with self._timer.phase("adv"):
            parts = self._reward_parts(experience)
            return self._done(self._estimated(experience, **parts)[0])

    def with_values(
        self, experience: Experience, values: jax.Array
    ) -> tuple[Experience, ValueBatch]:
        """Generalised advantages over a critic's values, and what the critic is to learn."""
        with self._timer.phase("adv"):
            value = self._actor.place(values)
            experience, target = self._estimated(experience, value=value)
            targets = ValueBatch(**experience.batch.packing(), old_value=value, target=target)
            return experience.extended(experience.batch, value_metrics("critic", targets)), targets

    def of_tokens(self, experience: Experience, **arrays: jax.Array) -> Experience:
        """By an estimator of single tokens, from arrays that the dataflow's `gives` names, [U, M, R, T]."""
        with self._timer.phase("adv"):
            arrays = {name: self._actor.place(x) for name, x in arrays.items()}
            return self._done(self._estimated(experience, arrays=arrays)[0])

    def with_baseline(self, experience: Experience, greedy: Sampled) -> Experience:
        """Rewards less that of the greedy response to the same prompt (ReMax)."""
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
        """Takes the multiplier's share of the costs' advantages off those of the rewards (Safe RLHF)."""
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
        """(with advantages, returns); the KL coefficient then follows its controller."""
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
        """The terms of the score, and what was added for length as one more, where they are wanted."""
        if "score_BK" not in self._estimator.inputs:
            return {}
        scored = experience.scored
        return {
            "score_BK": np.concatenate([scored.term_BK, scored.shaping_B[:, None]], axis=1),
            "weight_K": np.append(scored.term_weight_K, np.float32(1.0)),
        }

    def _done(self, experience: Experience) -> Experience:
        return experience.extended(self._timer.when_done(experience.batch))
