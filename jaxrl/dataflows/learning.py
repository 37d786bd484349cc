"""Phases of the roles that learn: the policy and critics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.data.demonstrations import DemonstrationStream
from jaxrl.data.packing import PackedShape
from jaxrl.dataflows.experience import Experience, Metrics
from jaxrl.dataflows.preparation import EntropyCoefficient
from jaxrl.dataflows.step_metrics import advantage_metrics, prefixed
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.models.decoder import Params
from jaxrl.roles.advantage_estimator import VocabularyBatch
from jaxrl.roles.batches import pack_examples
from jaxrl.roles.losses import CorrectionConfig, EntropyBatch, Objective, corrected
from jaxrl.roles.policy import Actor, Reference
from jaxrl.roles.redraw import draws_of
from jaxrl.roles.scores import Critic
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.types import TrainBatch, ValueBatch

# Number of steps between draws with the trainer's logits. One costs a forward pass of one microbatch.
REDRAWN_EVERY = 10


class Pretraining:
    """Supervised examples for the auxiliary loss of the actor (ptx in Safe RLHF)."""

    def __init__(self, stream: DemonstrationStream, shape: PackedShape, objective: Objective):
        self.stream = stream
        self._shape = shape
        self._objective = objective
        self._batches: Iterator[Any] | None = None

    def next(self, actor: Actor) -> tuple[TrainBatch, Objective]:
        """The next batch on the actor's devices, and its loss."""
        if self._batches is None:
            self._batches = iter(self.stream)
        return actor.place(pack_examples(next(self._batches), self._shape)), self._objective


class ActorPhase:
    """The policy in a step: its log-probabilities before the updates, and the updates."""

    def __init__(
        self,
        actor: Actor,
        objective: Objective,
        correction: CorrectionConfig,
        timer: StepTimer,
        *,
        epochs: int = 1,
        reference: Reference | None = None,
        shares_forward: bool = False,
        squared_probabilities: bool = False,
        pretraining: Pretraining | None = None,
        frozen_steps: int = 0,
        needs_signal: bool = False,
        entropy: EntropyCoefficient | None = None,
        sampling: SamplingOptions | None = None,
        look: Callable[[Experience], None] | None = None,
        meanwhile: Callable[[Any], None] = lambda results: None,
    ):
        """Args.

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
          Such a step is skipped: Adam's momentum and weight decay would move the weights all the same.
        entropy: coefficient of the entropy bonus that changes from step to step; None for a constant one.
        sampling: options that the responses are sampled with, to draw their tokens again now and then; None
          never does.
        look: called with the experience of every step, after its updates are dispatched.
        meanwhile: called with arrays on the devices before the host waits for them.
        """
        self._actor = actor
        self._objective = objective
        self._correction = correction
        self._timer = timer
        self._epochs = epochs
        self._reference = reference
        self._shares_forward = shares_forward
        self._squared_probabilities = squared_probabilities
        self._pretraining = pretraining
        self._frozen_steps = frozen_steps
        self._needs_signal = needs_signal
        self._entropy = entropy
        self._sampling = sampling
        self._look = look
        self._meanwhile = meanwhile

    def logprobs(self, experience: Experience) -> Experience:
        """Adds the log-probabilities of the start of the step, and corrects for the sampler's.

        If the update computes those of the first minibatch, they stay 0 here.
        """
        with self._timer.phase("old_log_prob"):
            batch = experience.batch
            experience = experience.extended(batch, self._same_tokens(experience))
            if self._correction.bypass:
                # The gap to the sampler is unknown before the update; the loss itself rejects tokens.
                return experience.extended(batch.replace(old_logprob=batch.rollout_logprob))
            if self._shares_forward and not self._is_frozen:
                return experience.extended(self._timer.when_done(self._with_later_logprobs(batch)))
            if self._squared_probabilities:
                logprob, sum_pi_squared = self._actor.squared_probabilities(batch)
                batch = self._with_old_logprob(batch, logprob)
                batch = batch.extended_as(VocabularyBatch, sum_pi_squared=sum_pi_squared)
            else:
                batch = self._with_old_logprob(batch, self._actor.logprobs(batch))
            batch, metrics = corrected(self._correction, batch)
            return experience.extended(self._timer.when_done(batch), metrics)

    def _same_tokens(self, experience: Experience) -> Metrics:
        """How far the trainer's draws agree with the sampler's, every tenth step."""
        if self._sampling is None or self._timer.step % REDRAWN_EVERY:
            return {}
        draws = draws_of(experience.completions, self._sampling)
        if draws is None:
            return {}
        same = self._actor.same_tokens(experience.batch, draws)
        return {"training/same_token_fraction": same}

    def _with_later_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Adds the log-probabilities of all minibatches except the first."""
        if len(batch.tokens) == 1:
            return batch
        return self._with_old_logprob(batch, self._actor.logprobs(batch, first_minibatch=1))

    def _with_old_logprob(self, batch: TrainBatch, logprob: jax.Array) -> TrainBatch:
        """Sets the old log-probabilities; those of the sampler where the trainer does not keep the token."""
        if self._actor.truncation is not None:
            logprob = _finite_or(logprob, batch.rollout_logprob)
        return batch.replace(old_logprob=logprob)

    @property
    def _is_frozen(self) -> bool:
        return self._timer.step < self._frozen_steps

    def update(self, experience: Experience) -> Metrics:
        """Runs all optimiser updates of the step; returns their metrics."""
        if self._is_frozen:
            return self._metrics(experience)
        with self._timer.phase("update_actor", shown="update"):
            if self._needs_signal and not self._has_signal(experience):
                self._actor.skip_update()
                return {"actor/skipped_updates": 1.0} | self._metrics(experience)
            coef = None if self._entropy is None else self._entropy.applied
            metrics, experience = self._updated(experience, coef)
            metrics = self._timer.when_done(prefixed("actor", metrics))
            self._meanwhile(metrics)
        if self._entropy is not None:
            self._entropy.follow(metrics["actor/entropy"])
            metrics = metrics | {"actor/entropy_coef": coef}
        # Reading metrics waits for the device, so the updates are dispatched first.
        return metrics | self._metrics(experience)

    def _has_signal(self, experience: Experience) -> bool:
        has_signal = _has_signal(experience.batch)
        self._meanwhile(has_signal)
        return bool(has_signal)

    def _updated(
        self, experience: Experience, entropy_coef: float | None
    ) -> tuple[Metrics, Experience]:
        """Runs the updates; returns their metrics, and the experience with all old log-probabilities."""
        batch, objective = experience.batch, self._objective
        if entropy_coef is not None:
            batch = batch.extended_as(EntropyBatch, entropy_coef=jnp.float32(entropy_coef))
        beside: Any = {
            "also": () if self._pretraining is None else (self._pretraining.next(self._actor),),
            "reference": self._reference_weights(),
        }
        if not self._shares_forward:
            metrics = self._actor.update(batch, objective, epochs=self._epochs, **beside)
            return metrics, experience
        metrics, batch = self._actor.update_and_logprobs(batch, objective, **beside)
        batch = self._with_old_logprob(batch, batch.old_logprob)
        batch, of_the_gap = corrected(self._correction, batch)
        return metrics | of_the_gap, experience.extended(batch)

    def _metrics(self, experience: Experience) -> Metrics:
        if self._look is not None:
            self._look(experience)
        return advantage_metrics(experience.batch)

    def _reference_weights(self) -> Params | None:
        if self._reference is None or not self._objective.needs_reference:
            return None
        return self._reference.onloaded()


@jax.jit
def _finite_or(logprob: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.where(jnp.isneginf(logprob), other, logprob)


@jax.jit
def _has_signal(batch: TrainBatch) -> jax.Array:
    trained = batch.loss_mask > 0
    # A batch without trained tokens is the business of the update, which counts it.
    return jnp.any((batch.advantage != 0) & trained) | ~jnp.any(trained)


class CriticPhase:
    """A critic in a step: its values before the updates, and the updates."""

    def __init__(
        self, name: str, critic: Critic, objective: Objective, timer: StepTimer, *, epochs: int = 1
    ):
        """Args: prefix of its metrics, role, loss, timer, and number of passes over a step."""
        self._name = name
        self._critic = critic
        self._objective = objective
        self._timer = timer
        self._epochs = epochs

    def values(self, experience: Experience) -> jax.Array:
        """Values of the state before every token, [U, M, R, T]."""
        with self._timer.phase("values"):
            return self._critic.values(experience.batch)

    def update(self, targets: ValueBatch) -> Metrics:
        """Runs all optimiser updates of the step; returns their metrics."""
        with self._timer.phase("update_critic", shown="update"):
            metrics = self._critic.update(targets, self._objective, epochs=self._epochs)
            return self._timer.when_done(prefixed(self._name, metrics))
