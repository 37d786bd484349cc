"""Phases of the roles that learn: the policy and critics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.data.demonstrations import DemonstrationStream
from jaxrl.dataflows.experience import Experience, Metrics
from jaxrl.dataflows.preparation import EntropyCoefficient
from jaxrl.dataflows.step_metrics import advantage_metrics, prefixed
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.mesh import hosts
from jaxrl.roles.advantage_estimator import VocabularyBatch
from jaxrl.roles.batches import pack_examples
from jaxrl.roles.losses import CorrectionConfig, EntropyBatch, Objective, corrected
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.policy import Actor, Reference
from jaxrl.roles.redraw import draws_of
from jaxrl.roles.scores import ActorCritic, Critic
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.types import TrainBatch, ValueBatch

# Number of steps between draws with the trainer's logits. One costs a forward pass of one microbatch.
REDRAWN_EVERY = 10


@dataclasses.dataclass(eq=False)
class Pretraining:
    """Supervised examples for the auxiliary loss of the actor (ptx in Safe RLHF)."""

    stream: DemonstrationStream
    shape: PackedShape
    objective: Objective
    _batches: Iterator[Any] | None = dataclasses.field(default=None, init=False)

    def next(self, actor: Actor) -> tuple[TrainBatch, Objective]:
        """The next batch on the actor's devices, and its loss."""
        if self._batches is None:
            self._batches = iter(self.stream)
        rows = actor.rows_of(self.shape)
        batch, _ = pack_examples(next(self._batches), self.shape, **rows)
        return actor.place(batch), self.objective


@dataclasses.dataclass(eq=False)
class ActorPhase:
    """The policy in a step: its log-probabilities before the updates, and the updates.

    Attributes:
      actor: the role.
      objective: loss of its updates.
      correction: correction for a sampler whose probabilities differ from the trainer's.
      timer: timer of the step.
      epochs: number of passes over the minibatches of a step.
      reference: policy for a loss that compares whole distributions; None for other losses.
      shares_forward: whether the first minibatch takes its old log-probabilities from the forward pass of
        its own update. The correction then happens inside the loss.
      squared_probabilities: whether the advantage estimator needs the sum of squared probabilities over the
        vocabulary.
      pretraining: examples of the auxiliary loss; None for none.
      frozen_steps: number of first steps in which only critics learn.
      needs_signal: whether the loss is only the policy loss, with no gradient where all advantages are 0.
        Such a step is skipped.
      entropy: coefficient of the entropy bonus that changes from step to step; None for a constant one.
      sampling: options that the responses are sampled with, to draw their tokens again now and then; None
        never does.
      look: called with the experience of every step, after its updates are dispatched.
      meanwhile: called with arrays on the devices before the host waits for them.
    """

    actor: Actor
    objective: Objective
    correction: CorrectionConfig
    timer: StepTimer
    _: dataclasses.KW_ONLY
    epochs: int = 1
    reference: Reference | None = None
    shares_forward: bool = False
    squared_probabilities: bool = False
    pretraining: Pretraining | None = None
    frozen_steps: int = 0
    needs_signal: bool = False
    entropy: EntropyCoefficient | None = None
    sampling: SamplingOptions | None = None
    look: Callable[[Experience], None] | None = None
    meanwhile: Callable[[Any], None] = lambda results: None

    def logprobs(self, experience: Experience) -> Experience:
        """Adds the log-probabilities of the start of the step, and corrects for the sampler's.

        An actor-critic adds its values too. If the update computes those of the first minibatch, they stay 0
        here.
        """
        with self.timer.phase("old_log_prob"):
            batch = experience.batch
            experience = experience.extended(batch, self._same_tokens(experience))
            if self.correction.bypass:
                # The gap to the sampler is unknown before the update; the loss itself rejects tokens.
                return experience.extended(batch.replace(old_logprob=batch.rollout_logprob))
            # Not while only critics learn: no update would compute them.
            if self.shares_forward and self.timer.step >= self.frozen_steps:
                # A single minibatch has all its old log-probabilities from its update.
                if len(batch.tokens) > 1:
                    later = self.actor.logprobs(batch, first_minibatch=1)
                    batch = self._with_old_logprob(batch, later)
                return experience.extended(self.timer.when_done(batch))
            if isinstance(self.actor, ActorCritic):
                logprob, value = self.actor.logprobs_and_values(batch)
                batch = self._with_old_logprob(batch, logprob)
                # The advantages come with the target.
                batch = batch.replace(old_value=value, target=value)
            elif self.squared_probabilities:
                logprob, sum_pi_squared = self.actor.squared_probabilities(batch)
                batch = self._with_old_logprob(batch, logprob)
                batch = batch.extended_as(VocabularyBatch, sum_pi_squared=sum_pi_squared)
            else:
                batch = self._with_old_logprob(batch, self.actor.logprobs(batch))
            batch, metrics = corrected(self.correction, batch)
            return experience.extended(self.timer.when_done(batch), metrics)

    def _same_tokens(self, experience: Experience) -> Metrics:
        """How far the trainer's draws agree with the sampler's, every tenth step; of no token nothing."""
        if self.sampling is None or self.timer.step % REDRAWN_EVERY:
            return {}
        draws = draws_of(experience.completions, self.sampling)
        if draws is None:
            return {}
        same = self.actor.same_tokens(experience.batch, draws)
        return {} if same is None else {"training/same_token_fraction": same}

    def _with_old_logprob(self, batch: TrainBatch, logprob: jax.Array) -> TrainBatch:
        """Sets the old log-probabilities; those of the sampler where the trainer does not keep the token."""
        # Rounded otherwise, the last token that top-p keeps may fall out, and -inf would make an infinite
        # ratio.
        if self.actor.truncation is not None:
            logprob = _finite_or(logprob, batch.rollout_logprob)
        return batch.replace(old_logprob=logprob)

    def update(self, experience: Experience) -> Metrics:
        """Runs all optimiser updates of the step; returns their metrics."""
        if self.timer.step < self.frozen_steps:
            return self._metrics(experience)
        with self.timer.phase("update_actor", shown="update"):
            # Adam's momentum and weight decay would move the weights without a gradient, too.
            if self.needs_signal:
                has_signal = _has_signal(experience.batch)
                # The fetch below waits for the devices.
                self.meanwhile(has_signal)
                if not hosts.fetch(has_signal):
                    self.actor.skip_update()
                    nothing = {"actor/skipped_updates": 1.0, "perf/update_tflop": 0.0}
                    return nothing | self._metrics(experience)
            # Read before the update: `follow` changes it for the next step.
            coef = None if self.entropy is None else self.entropy.applied
            metrics, experience = self._updated(experience, coef)
            metrics = self.timer.when_done(prefixed("actor", metrics))
            self.meanwhile(metrics)
        if self.entropy is not None:
            # An entropy of no tokens would change the coefficient.
            if hosts.fetch(metrics["actor/skipped_updates"]) < 1:
                self.entropy.follow(metrics["actor/entropy"])
            metrics = metrics | {"actor/entropy_coef": coef}
        # Reading metrics waits for the device, so the updates are dispatched first.
        return metrics | self._metrics(experience)

    def _updated(
        self, experience: Experience, entropy_coef: float | None
    ) -> tuple[Metrics, Experience]:
        """Runs the updates; returns their metrics, and the experience with all old log-probabilities."""
        batch, objective = experience.batch, self.objective
        if entropy_coef is not None:
            batch = batch.extended_as(EntropyBatch, entropy_coef=jnp.float32(entropy_coef))
        beside: dict[str, Any] = {}
        if self.pretraining is not None:
            beside["also"] = (self.pretraining.next(self.actor),)
        if self.reference is not None and objective.needs_reference:
            beside["reference"] = self.reference.onloaded()
        if not self.shares_forward:
            metrics = self.actor.update(batch, objective, epochs=self.epochs, **beside)
            return metrics, experience
        # Only now has the first minibatch its old log-probabilities, and the gap of the whole step is known.
        metrics, batch = self.actor.update_and_logprobs(batch, objective, **beside)
        batch = self._with_old_logprob(batch, batch.old_logprob)
        batch, of_the_gap = corrected(self.correction, batch)
        return metrics | of_the_gap, experience.extended(batch)

    def _metrics(self, experience: Experience) -> Metrics:
        if self.look is not None:
            self.look(experience)
        return advantage_metrics(experience.batch)


@jax.jit
def _finite_or(logprob: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.where(jnp.isneginf(logprob), other, logprob)


@jax.jit
def _has_signal(batch: TrainBatch) -> jax.Array:
    trained = batch.loss_mask > 0
    # A batch without trained tokens is the business of the update, which counts it.
    return jnp.any((batch.advantage != 0) & trained) | ~jnp.any(trained)


@dataclasses.dataclass(eq=False)
class CriticPhase:
    """A critic in a step: its values before the updates, and the updates.

    Attributes:
      name: prefix of its metrics.
      critic: the role; None for a head of an actor-critic, whose log-probabilities come with the values, and
        whose update trains both.
      epochs: number of passes over a step.
    """

    name: str
    critic: Critic | None
    objective: Objective
    timer: StepTimer
    _: dataclasses.KW_ONLY
    epochs: int = 1

    def values(self, experience: Experience) -> jax.Array:
        """Values of the state before every token, [U, M, R, T]."""
        if self.critic is None:
            value = experience.batch.old_value
            assert value is not None, "step.actor.logprobs comes first: its pass gives the values"
            return value
        with self.timer.phase("values"):
            return self.critic.values(experience.batch)

    def update(self, targets: ValueBatch) -> Metrics:
        if self.critic is None:
            return {}
        with self.timer.phase("update_critic", shown="update"):
            metrics = self.critic.update(targets, self.objective, epochs=self.epochs)
            return self.timer.when_done(prefixed(self.name, metrics))
