"""On-policy distillation: the student samples, a frozen teacher says how likely each token was.

GKD (arXiv 2306.13649) with samples of the student alone and the reverse KL; the token-wise policy gradient is
that of MiniLLM (arXiv 2306.08543) with a horizon of one token.
"""

from __future__ import annotations

import jax

from jaxrl.algos.moments import Moments
from jaxrl.algos.segments import masked
from jaxrl.dataflows.clock import Clock
from jaxrl.dataflows.dataflow import dataflow
from jaxrl.dataflows.experience import Experience, Metrics
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.dataflows.step import Step
from jaxrl.roles.policy import Actor
from jaxrl.roles.teacher import Teacher


class TeacherPhase:
    """The teacher in a step."""

    def __init__(self, teacher: Teacher, actor: Actor, clock: Clock):
        """Args: the role, the student, and the clock of the step."""
        self._teacher = teacher
        self._actor = actor
        self._clock = clock

    def logprobs(self, experience: Experience) -> tuple[Experience, jax.Array]:
        """Log-probability of every token of the student's, float32 [U, M, R, T].

        Returns:
          (the experience with the metric `teacher/reverse_kl`, log-probabilities). The metric is the mean of
          log p_S - log p_T over trained tokens, in nats.
        """
        with self._clock.phase("teacher"):
            batch = experience.batch
            logprob = self._actor.place(self._teacher.logprobs(batch))
            kl = _mean_difference(batch.old_logprob, logprob, batch.loss_mask)
            metrics = {"teacher/reverse_kl": self._clock.when_done(kl)}
            return experience.extended(batch, metrics), logprob


@jax.jit
def _mean_difference(logprob: jax.Array, teacher_logprob: jax.Array, mask: jax.Array) -> jax.Array:
    return Moments.of(masked(logprob, mask) - masked(teacher_logprob, mask), mask).mean


@dataflow(roles=("actor", "teacher"), gives=("teacher_logprob_BT",))
def distill(step: Step, prompts: PromptSource) -> Metrics:
    """Each token's advantage is how much likelier the teacher finds it than the student."""
    batch = step.actor.logprobs(step.pack(step.sample(prompts)))
    batch, logprob = step.phase("teacher", TeacherPhase).logprobs(batch)
    batch = step.advantages.of_tokens(batch, teacher_logprob_BT=logprob)
    return batch.metrics | step.actor.update(batch)
