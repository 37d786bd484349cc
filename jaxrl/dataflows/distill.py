"""On-policy distillation: the student samples, and a frozen teacher gives the probability of each token.

This is GKD (arXiv 2306.13649) with samples of the student only and the reverse KL. The token-wise policy
gradient is that of MiniLLM (arXiv 2306.08543) with a horizon of one token.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.algos.moments import Moments
from jaxrl.algos.segments import masked
from jaxrl.dataflows.dataflow import dataflow
from jaxrl.dataflows.experience import Experience, Metrics
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.dataflows.step import Step
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.mesh import hosts
from jaxrl.mesh.rules import TRAIN_RULES, shards_of
from jaxrl.roles.batches import pack_completions
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.policy import Actor, Reference
from jaxrl.roles.teacher import TeacherPrompts
from jaxrl.types import Completions, Prompts


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """The packed rows of a teacher whose prompts differ from the student's.

    Attributes:
      prompts: makes the teacher's prompts.
      shape: shape of the teacher's packed rows.
    """

    prompts: TeacherPrompts
    shape: PackedShape


@dataclasses.dataclass(eq=False)
class TeacherPhase:
    """The teacher in a step.

    Attributes:
      own: the teacher's own rows; None if it reads the student's.
    """

    teacher: Reference
    actor: Actor
    timer: StepTimer
    own: OwnRows | None = None

    def logprobs(self, experience: Experience) -> tuple[Experience, jax.Array]:
        """The teacher's log-probability of every token of the student, float32 [U, M, R, T].

        If the teacher has its own prompts, only tokens of responses have one; the others are 0.

        Returns:
          (the experience with the metric `teacher/reverse_kl`, log-probabilities). The metric is the mean of
          log p_S - log p_T over trained tokens, in nats.
        """
        with self.timer.phase("teacher"):
            batch, metrics = experience.batch, {}
            found: Any
            if self.own is None:
                found = self.teacher.logprobs(batch)
            else:
                found, num_cut = self._of_own_rows(experience, self.own)
                metrics["teacher/cut_prompts"] = num_cut
            logprob: jax.Array = self.actor.place(found)
            kl = _mean_difference(batch.old_logprob, logprob, batch.loss_mask)
            metrics["teacher/reverse_kl"] = self.timer.when_done(kl)
            return experience.extended(batch, metrics), logprob

    def _of_own_rows(self, experience: Experience, own: OwnRows) -> tuple[np.ndarray, int]:
        completions = experience.completions
        prompts, num_cut = own.prompts.of(completions.prompts)
        student = experience.batch
        sequence, positions = hosts.fetch((student.sequence, student.positions))
        ours = _places(sequence, positions, completions.prompts, completions)
        shards = shards_of("batch", TRAIN_RULES, self.teacher.mesh)
        rows = pack_completions(
            dataclasses.replace(completions, prompts=prompts), own.shape, shards=shards
        )
        logprob = hosts.fetch(self.teacher.logprobs(self.teacher.place(rows)))
        theirs = _places(rows.sequence, rows.positions, prompts, completions)
        longest = max(len(tokens) for tokens in completions.tokens)
        by_sequence = np.zeros((len(completions), longest), np.float32)
        by_sequence[theirs.sequence, theirs.token] = logprob[theirs.where]
        out = np.zeros(student.tokens.shape, np.float32)
        out[ours.where] = by_sequence[ours.sequence, ours.token]
        return out, num_cut


class _Places(NamedTuple):
    """The response tokens in packed rows: a bool mask, and the sequence and index of each token."""

    where: np.ndarray
    sequence: np.ndarray
    token: np.ndarray


def _places(sequence: Any, positions: Any, prompts: Prompts, completions: Completions) -> _Places:
    sequence, positions = np.asarray(sequence), np.asarray(positions)
    lengths_N = np.array([len(tokens) for tokens in prompts.tokens])
    first = lengths_N[completions.prompt_index_B][sequence]
    where = (sequence >= 0) & (positions >= first)
    return _Places(where, sequence[where], (positions - first)[where])


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
