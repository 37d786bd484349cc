"""On-policy distillation: the student samples, and a frozen teacher gives the probability of each token.

This is GKD (arXiv 2306.13649) with samples of the student only and the reverse KL. The token-wise policy
gradient is that of MiniLLM (arXiv 2306.08543) with a horizon of one token.
"""

from __future__ import annotations

import dataclasses

import jax

from jaxrl.algos.moments import Moments
from jaxrl.algos.segments import masked
from jaxrl.dataflows.dataflow import dataflow
from jaxrl.dataflows.experience import Experience, Metrics
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.dataflows.step import Step
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.roles.policy import Actor, Reference


@dataclasses.dataclass(eq=False)
class TeacherPhase:
    """The teacher in a step."""

    teacher: Reference
    actor: Actor
    timer: StepTimer

    def logprobs(self, experience: Experience) -> tuple[Experience, jax.Array]:
        """The teacher's log-probability of every token of the student, float32 [U, M, R, T].

        Returns:
          (the experience with the metric `teacher/reverse_kl`, log-probabilities). The metric is the mean of
          log p_S - log p_T over trained tokens, in nats.
        """
        with self.timer.phase("teacher"):
            batch, found = experience.batch, self.teacher.logprobs(experience.batch)
            # The teacher may have devices of its own.
            logprob: jax.Array = self.actor.place(found)
            kl = _mean_difference(batch.old_logprob, logprob, batch.loss_mask)
            metrics = {"teacher/reverse_kl": self.timer.when_done(kl)}
            return experience.extended(batch, metrics), logprob


@jax.jit
def _mean_difference(logprob: jax.Array, teacher_logprob: jax.Array, mask: jax.Array) -> jax.Array:
    return Moments.of(masked(logprob, mask) - masked(teacher_logprob, mask), mask).mean


@dataflow(roles=("actor", "teacher"), gives=("teacher_logprob_BT",))
def distill(step: Step, prompts: PromptSource) -> Metrics:
    """The advantage of a token is the teacher's log-probability minus the student's."""
    batch = step.actor.logprobs(step.pack(step.sample(prompts)))
    batch, logprob = step.phase("teacher", TeacherPhase).logprobs(batch)
    batch = step.advantages.of_tokens(batch, teacher_logprob_BT=logprob)
    return batch.metrics | step.actor.update(batch)
