"""Rewards of responses: grader, reward functions, reward models, judges, and the overlong punishment.

Completions -> graded (right or wrong, overlong punishment) -> + terms, weighted -> Sampled
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algos.controllers import raised_multiplier
from jaxrl.algos.segments import to_sequences
from jaxrl.algos.shaping import soft_overlong_penalty
from jaxrl.dataflows.experience import Metrics, Sampled
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.mesh import hosts
from jaxrl.process_pool import Interrupted
from jaxrl.rewards.graders import Graders
from jaxrl.rewards.grading import Verdict
from jaxrl.rewards.judge import JudgeTemplate, judge_scores
from jaxrl.rewards.score import AskedVerdicts, Scores, Term, score_completions, weighted_sum
from jaxrl.rewards.user import UserRewards
from jaxrl.roles.batches import pack_completions
from jaxrl.roles.generative_judge import GenerativeJudge
from jaxrl.roles.packing import RowLimits
from jaxrl.roles.scores import RewardModel
from jaxrl.types import Completions, GraderFailure, PackedBatch, Scored


@dataclasses.dataclass(frozen=True)
class RewardTerm(abc.ABC):
    """A term of the reward besides the grader's.

    Attributes:
      name: name of its metrics.
      weight: weight of its scores in the sum.
    """

    name: str
    weight: float

    @abc.abstractmethod
    def scores(self, completions: Completions) -> tuple[Scores, Mapping[str, Any]]:
        """Scores of B responses, and metrics."""


@dataclasses.dataclass(frozen=True)
class FunctionReward(RewardTerm):
    """A user's reward function, called on the first host. A stop signal during the call ends the step."""

    path: str
    functions: UserRewards
    timer: StepTimer

    def scores(self, completions: Completions) -> tuple[Scores, Mapping[str, Any]]:
        # On one host: two calls of a user's function might differ, and then the weights of the hosts.
        completions = completions.with_rows(hosts.is_first())
        scores = hosts.on_first(lambda: self._ask(completions))
        if scores is None:
            self.timer.check_stop()
        assert scores is not None, "only a signal interrupts, and then the check has raised"
        return scores, {}

    def _ask(self, completions: Completions) -> list[float | None] | None:
        try:
            # A list: scores travel between hosts as JSON.
            return self.functions.scores(self.path, completions)
        except Interrupted:
            return None


@dataclasses.dataclass(eq=False)
class SequenceScores:
    """Scores of whole sequences by a reward or cost model.

    Attributes:
      most_sequences: the most sequences to score at once; 0 for all of a batch.
    """

    model: RewardModel
    rows: RowLimits
    _: dataclasses.KW_ONLY
    most_sequences: int = 0

    def __call__(self, completions: Completions) -> np.ndarray:
        """Scores of B responses, float32 [B]."""
        N, G = len(completions.prompts), completions.num_samples
        each = self.most_sequences // G or max(1, N)
        parts = (range(n, min(n + each, N)) for n in range(0, max(1, N), each))
        scores = []
        # Further conversations of agents are not scored, and the shape has no room for them. Routes are those
        # of another model.
        alone = dataclasses.replace(completions, of_agents=None, routes=())
        for some in (alone.take(part) for part in parts):
            # A partial rollout finishes a varying number of groups; one shape avoids a compilation for each.
            sequences = max(self.most_sequences, len(some))
            shape = self.rows.shape(sequences, minibatches=1)
            batch, _ = pack_completions(some, shape, **self.model.rows_of(shape))
            batch = self.model.place(batch)
            score_B = hosts.fetch(_by_sequence(self.model.scores_of(batch), batch, sequences))
            # The others are places of the shape without a sequence.
            scores.append(score_B[: len(some)])
        return np.concatenate(scores)


@dataclasses.dataclass(frozen=True)
class ModelReward(RewardTerm):
    """A reward model."""

    model: SequenceScores

    def scores(self, completions: Completions) -> tuple[np.ndarray, Mapping[str, Any]]:
        return self.model(completions), {}


@dataclasses.dataclass(frozen=True)
class JudgeReward(RewardTerm):
    """A generative judge. Its settings are those of `rewards.judge`."""

    judge: GenerativeJudge
    template: JudgeTemplate

    def scores(self, completions: Completions) -> tuple[np.ndarray, Mapping[str, Any]]:
        completions = completions.with_rows(True)
        return judge_scores(completions, template=self.template, sample=self.judge.answer)


@dataclasses.dataclass(frozen=True)
class OverlongPunishment:
    """DAPO's soft punishment of long responses (eq. 13).

    Attributes:
      max_response_tokens: limit of a response.
      buffer_tokens: number of tokens before the limit that are punished; 0 disables the punishment.
      penalty: punishment at the limit, in units of reward.
    """

    max_response_tokens: int
    buffer_tokens: int
    penalty: float

    def __call__(self, lengths_B: np.ndarray) -> np.ndarray:
        """The shaping of responses of these lengths, at most 0, float32 [B]."""
        if not self.buffer_tokens:
            return np.zeros(len(lengths_B), np.float32)
        penalty_B = soft_overlong_penalty(
            jnp.asarray(lengths_B),
            max_response_tokens=self.max_response_tokens,
            buffer_tokens=self.buffer_tokens,
            penalty=self.penalty,
        )
        return np.asarray(penalty_B)


@dataclasses.dataclass
class BegunGrading:
    """Responses that are being graded in the background.

    Attributes:
      completions: the responses.
      asked: work of the graders; None if another host grades.
      verdicts: verdicts, or None until they are collected.
    """

    completions: Completions
    asked: AskedVerdicts | None
    verdicts: list[Verdict] | None = None


class Grading:
    """The graders of a run on all hosts: each host grades a part, and all hosts get all verdicts."""

    def __init__(self, graders: Graders):
        self._graders = graders
        self._failures: collections.Counter[str] = collections.Counter()

    def begin(self, completions: Completions, *, mine: bool) -> BegunGrading:
        """Starts grading in the background.

        Args:
          completions: the responses.
          mine: whether this host grades them. One host does only: two could disagree, as when one of them
            runs out of time, and their weights would diverge.
        """
        return BegunGrading(
            completions, AskedVerdicts(self._graders, completions) if mine else None
        )

    def collect(self, begun: Sequence[BegunGrading]) -> list[Verdict]:
        """Waits for the verdicts of these responses, in order. Collective.

        Raises:
          UserError: a ground truth cannot be read.
        """
        awaited = [part for part in begun if part.verdicts is None]
        if awaited:
            # One exchange for all: the latency between hosts dominates.
            for found in hosts.gather(
                lambda: [
                    (place, [dataclasses.astuple(verdict) for verdict in part.asked.result()])
                    for place, part in enumerate(awaited)
                    if part.asked is not None
                ]
            ):
                for place, verdicts in found:
                    awaited[place].verdicts = [
                        # JSON made lists of tuples and knows no classes.
                        Verdict(*fields, failure=failure and GraderFailure(*failure))
                        for *fields, failure in verdicts
                    ]
        for part in awaited:
            assert part.verdicts is not None, "some host has graded it"
            self._failures.update(v.failure.kind for v in part.verdicts if v.failure)
        return [verdict for part in begun for verdict in part.verdicts or ()]

    def take_metrics(self, prefix: str) -> dict[str, float]:
        """Number of grader failures since the last call, in total and by kind."""
        failures, self._failures = self._failures, collections.Counter()
        metrics = {f"{prefix}/failed": float(failures.total())}
        return metrics | {f"{prefix}/failed_{kind}": float(n) for kind, n in failures.items()}


@dataclasses.dataclass(eq=False)
class GroupsBeside:
    """Grades groups while others are still sampled. A sampler calls it with those of each finished problem.

    Attributes:
      grading: the graders.
      samplers: processes that finish the same groups, in the same order; none for all.
    """

    grading: Grading
    samplers: tuple[int, ...] = ()
    _next: int = dataclasses.field(default=0, init=False)
    _begun: dict[tuple[str, int], BegunGrading] = dataclasses.field(
        default_factory=dict, init=False
    )

    def __call__(self, groups: Completions, mine: bool | None = None) -> None:
        """Begins to grade groups. `mine` says whether this process does; None lets them take turns."""
        for n, key in enumerate(_keys(groups)):
            assert key not in self._begun, "a batch has each prompt once, by its source and id"
            is_ours = hosts.is_turn_of_this(self._next, self.samplers) if mine is None else mine
            self._next += mine is None
            self._begun[key] = self.grading.begin(groups.take([n]), mine=is_ours)

    def of(self, completions: Completions) -> list[BegunGrading]:
        """The grading of a batch, in the order of its prompts."""
        for n, key in enumerate(_keys(completions)):
            if key not in self._begun:
                # Sampled by other processes.
                self._begun[key] = self.grading.begin(completions.take([n]), mine=False)
        return [self._begun[key] for key in _keys(completions)]

    def forget(self, completions: Completions) -> None:
        for key in _keys(completions):
            del self._begun[key]


def _keys(completions: Completions) -> list[tuple[str, int]]:
    # In an evaluation an id is a position in a file, and there may be several files.
    prompts = completions.prompts
    return list(zip(prompts.sources, prompts.ids_N.tolist(), strict=True))


class Rewards:
    """All rewards of a run."""

    def __init__(
        self,
        graders: Graders,
        overlong: OverlongPunishment,
        timer: StepTimer,
        *,
        grader_weight: float = 1.0,
        terms: Sequence[RewardTerm] = (),
    ):
        """Args: the graders with their weight, the overlong punishment, the timer, and the other terms."""
        self._grading = Grading(graders)
        self._overlong = overlong
        self._timer = timer
        self._grader_weight = grader_weight
        self._terms = tuple(terms)

    @property
    def term_names(self) -> tuple[str, ...]:
        """Names of the terms of a score, in the order of `Scored.term_BK`."""
        return ("grader", *(term.name for term in self._terms))

    def beside(self, samplers: tuple[int, ...] = ()) -> GroupsBeside:
        """A callback that grades the groups of the next batch as they finish; see `GroupsBeside`."""
        return GroupsBeside(self._grading, samplers)

    def graded(self, begun: Sequence[BegunGrading]) -> Scored:
        """Responses scored by grader and overlong punishment, without the other terms. Collective."""
        completions = Completions.concatenate([part.completions for part in begun])
        verdicts = self._grading.collect(begun)
        return score_completions(completions, verdicts, overlong=self._overlong)

    def __call__(self, completions: Completions, beside: GroupsBeside | None = None) -> Sampled:
        """The weighted sum of all rewards. Collective.

        Args:
          completions: B responses.
          beside: callback that graded their groups during sampling; None grades them now.

        Raises:
          UserError: a reward is not a finite number for each response, or processes disagree.
        """
        with self._timer.phase("reward"):
            # Graders work in their own processes while models and functions score.
            if beside is None:
                groups = range(len(completions.prompts))
                # Group by group, so that the hosts share the work.
                begun = [
                    self._grading.begin(completions.take([n]), mine=hosts.is_turn_of_this(n))
                    for n in groups
                ]
            else:
                begun = beside.of(completions)
            others: list[Term] = []
            metrics: dict[str, Any] = {}
            for term in self._terms:
                score_B, measured = term.scores(completions)
                others.append(Term(term.name, term.weight, score_B))
                metrics |= measured
            verdicts = self._grading.collect(begun)
            scored = score_completions(completions, verdicts, overlong=self._overlong)
            terms = [Term("grader", self._grader_weight, scored.score_B), *others]
            metrics |= self._grading.take_metrics("reward/grader")
            scored, of_terms = weighted_sum(scored, terms)
            # Other rewards on one host would make other weights there. Of samples of other processes lengths
            # alone are known.
            sampled = completions.tokens if completions.fetch is None else [completions.lengths_B]
            hosts.check_same(
                f"the rewards of step {self._timer.step + 1}",
                [scored.correct_B, scored.reward_B, *sampled],
            )
            return Sampled(scored, metrics | of_terms)


@functools.partial(jax.jit, static_argnums=2)
def _by_sequence(score: jax.Array, batch: PackedBatch, num_sequences: int) -> jax.Array:
    T = batch.tokens.shape[-1]
    score_BT, live_BT, sequence_BT = (
        x.reshape(-1, T) for x in (score, batch.segment_ids, batch.sequence)
    )
    return to_sequences(score_BT, live_BT, sequence_BT, num_sequences=num_sequences)


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of a step's responses.

    Attributes:
      cost_B: float32 [B], cost of each response.
      mean: mean cost, float32; None if no sample counts.
      metrics: metrics of the costs.
    """

    cost_B: np.ndarray
    mean: np.floating | None
    metrics: Metrics


@dataclasses.dataclass(eq=False)
class CostPhase:
    """The cost model in a step."""

    scores: SequenceScores
    timer: StepTimer

    def score(self, sampled: Sampled) -> Costs:
        with self.timer.phase("cost"):
            cost_B = self.scores(sampled.completions)
            counted = cost_B[sampled.scored.counts_B]
            if not len(counted):
                return Costs(cost_B, None, {})
            mean = counted.mean()
            return Costs(cost_B, mean, {"cost/mean": mean, "cost/max": counted.max()})


@dataclasses.dataclass(eq=False)
class Multiplier:
    """The Lagrange multiplier: the reward that one unit of cost takes away.

    Attributes:
      value: multiplier of the next step.
      limit: largest acceptable mean cost.
      learning_rate: rate of its logarithm.
      largest: largest value; inf for no limit.
      delay_steps: number of first steps in which it does not change.
      steps: number of steps so far.
    """

    value: float
    limit: float
    learning_rate: float
    largest: float = math.inf
    delay_steps: int = 0
    steps: int = 0

    def update(self, costs: Costs) -> Metrics:
        """Raises it if the mean cost is above the limit, else lowers it; reports the previous value."""
        used, self.steps = self.value, self.steps + 1
        if self.steps > self.delay_steps and costs.mean is not None:
            excess = jnp.float32(costs.mean - self.limit)
            raised = raised_multiplier(jnp.float32(used), excess, learning_rate=self.learning_rate)
            self.value = min(float(raised), self.largest)
        return {"cost/multiplier": used}
