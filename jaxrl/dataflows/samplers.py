"""Samplers: from a source of prompts to a step's groups with rewards, all of one interface.

    Sampling            a generation batch, every response to its end
    OneStepAhead        the next batch is sampled while this one is learned from
    PartialSampling     a step ends once it has enough groups; what is unfinished goes on in the next
    CurriculumSampling  lets the prompts learn from the groups of any of these (`curriculum_sampling`)
    DynamicSampling     takes from any of these until enough groups are mixed (`dynamic_sampling`)

A finished group is graded once, beside the sampling of the others.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from jaxrl.dataflows.experience import Sampled
from jaxrl.dataflows.rewarding import Rewards
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.mesh import hosts
from jaxrl.rollout.backend import OnGroup, SamplingOptions
from jaxrl.rollout.samples import Rollout, UnfinishedGroups
from jaxrl.types import Completions, Prompts, Scored

# Whether a step has enough, asked of each group once it is graded.
Enough = Callable[[Scored], bool]


class PromptSource(Protocol):
    """Prompts without end, a generation batch at a time, with a position that can be saved."""

    def __iter__(self) -> Self: ...

    def __next__(self) -> Prompts: ...

    def state(self, *, again: Sequence[int] | np.ndarray = ()) -> dict[str, Any]:
        """Where it stands, with the ids of prompts that are to be drawn once more; plain JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state."""
        ...


class Sampler(Protocol):
    """Where a step's groups come from."""

    def sample(self, prompts: PromptSource, *, enough: Enough | None = None) -> Sampled:
        """Groups with rewards.

        Args:
          prompts: the sampler takes as many as it wants.
          enough: once it says True the others may be given up; samplers that finish what they begin do
            not ask.
        """
        ...

    def record(self, prompts: PromptSource) -> dict[str, Any]:
        """JSON-able: what a resumed run needs to sample the same, the position in the prompts included."""
        ...

    def restore(self, record: Mapping[str, Any], prompts: PromptSource) -> None:
        """Goes on from a record."""
        ...


class Policy(Protocol):
    """What samplers need of an actor; see `roles.policy.Actor`."""

    @property
    def can_sample(self) -> bool:
        """It has its current weights where it samples."""
        ...

    def for_sampling(self) -> None:
        """Brings them there."""
        ...

    def generate(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        on_group: OnGroup | None,
        expected_tokens_N: np.ndarray | None,
    ) -> Completions:
        """Every response to its end; each group is handed out as it is finished."""
        ...

    def start_generating(
        self, prompts: Prompts, options: SamplingOptions, *, expected_tokens_N: np.ndarray | None
    ) -> concurrent.futures.Future[Completions]:
        """The same beside whatever comes next."""
        ...

    def resume(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        unfinished: UnfinishedGroups | None,
        on_group: OnGroup | None,
        expected_tokens_N: np.ndarray | None,
    ) -> Rollout:
        """Goes on with unfinished groups, and may leave some."""
        ...


class Generation:
    """Responses from the actor, with what earlier steps teach about their lengths.

    Attributes:
      actor: the policy.
      options: how it samples; `step` is set for each call.
    """

    def __init__(self, actor: Policy, options: SamplingOptions, timer: StepTimer):
        self.actor = actor
        self.options = options
        self.timer = timer
        # Of a prompt's text, by its checksum: mean length of the responses when it was last met.
        self._lengths: dict[int, int] = {}

    def load_weights(self) -> None:
        """Brings the actor's weights to where it samples, unless they are there."""
        if not self.actor.can_sample:
            with self.timer.phase("update_weights"):
                self.actor.for_sampling()

    def current(self, **changes: Any) -> SamplingOptions:
        """The options of the present step, with changes."""
        return self.options.replace(step=self.timer.step, **changes)

    def generate(self, prompts: Prompts, on_group: OnGroup, **changes: Any) -> Completions:
        """Every response to its end.

        Args:
          prompts: to answer.
          on_group: is given each group as it is finished.
          **changes: to the options.
        """
        self.load_weights()
        expected_N = self.expected_tokens(prompts)
        completions = self.actor.generate(
            prompts, self.current(**changes), on_group=on_group, expected_tokens_N=expected_N
        )
        self.learn_lengths(completions)
        return completions

    def expected_tokens(self, prompts: Prompts) -> np.ndarray:
        """How long responses were when the prompts were met before, [N]; new ones are thought the longest."""
        longest = max(self._lengths.values(), default=0) + 1
        known = [self._lengths.get(_checksum(tokens), longest) for tokens in prompts.tokens]
        # Among equals the longest prompt goes first.
        own = np.array([len(tokens) for tokens in prompts.tokens], np.float64)
        return np.array(known) + own / (own.max() + 1)

    def learn_lengths(self, completions: Completions) -> None:
        """Remembers how long the responses to each prompt were."""
        mean_N = completions.lengths_B.reshape(-1, completions.num_samples).mean(axis=1)
        for tokens, mean in zip(completions.prompts.tokens, mean_N, strict=True):
            self._lengths[_checksum(tokens)] = round(mean)

    def record(self) -> dict[str, Any]:
        """JSON-able."""
        return {"lengths": list(self._lengths.items())}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Goes on from a record."""
        self._lengths = {text: length for text, length in record["lengths"]}


class Sampling:
    """A generation batch, every response to its end."""

    def __init__(self, generation: Generation, rewards: Rewards):
        self._generation = generation
        self._rewards = rewards

    def sample(self, prompts: PromptSource, *, enough: Enough | None = None) -> Sampled:
        """The next generation batch with its rewards."""
        del enough
        batch, beside = next(prompts), self._rewards.beside()
        with self._generation.timer.phase("gen", shown="generate", may_stop=True):
            check_same_prompts(batch, self._generation.timer.step)
            completions = self._generation.generate(batch, beside)
        return self._rewards(completions, beside)

    def record(self, prompts: PromptSource) -> dict[str, Any]:
        """What earlier steps teach, and where the prompts stand."""
        return {"prompts": prompts.state(), **self._generation.record()}

    def restore(self, record: Mapping[str, Any], prompts: PromptSource) -> None:
        """Goes on from a record."""
        prompts.restore(record["prompts"])
        self._generation.restore(record)


class GreedySampling:
    """The likeliest response to each prompt, every token for itself, with its reward."""

    def __init__(self, generation: Generation, rewards: Rewards):
        self._generation = generation
        self._rewards = rewards

    def __call__(self, prompts: Prompts) -> Sampled:
        """One response to each."""
        beside = self._rewards.beside()
        with self._generation.timer.phase("gen_max", shown="generate"):
            completions = self._generation.generate(prompts, beside, num_samples=1, temperature=0.0)
        return self._rewards(completions, beside)


class OneStepAhead:
    """The next batch is sampled, on devices of its own, while this one is learned from.

        step          1            2            3
        sampler    [batch 1] [ batch 2 ] [ batch 3 ] [ batch 4 ]      with the weights before the step
        learner              [ learn 1 ] [ learn 2 ] [ learn 3 ]

    A batch is then sampled by the weights of one update earlier than those it teaches, which the correction
    for rollouts (`roles.correction`) has to make up for.
    """

    def __init__(self, generation: Generation, rewards: Rewards):
        self._generation = generation
        self._rewards = rewards
        self._ahead: concurrent.futures.Future[Completions] | None = None
        # Of the prompts that are being sampled.
        self._ids_ahead_N = np.zeros(0, np.int64)

    def sample(self, prompts: PromptSource, *, enough: Enough | None = None) -> Sampled:
        """The batch that was begun a step ago, once the next one has been begun."""
        del enough
        generation = self._generation
        with generation.timer.phase("gen", shown="generate", may_stop=True):
            current = self._ahead or self._start(prompts)
            completions = current.result()
            self._ahead = self._start(prompts)
            generation.learn_lengths(completions)
        return self._rewards(completions)

    def _start(self, prompts: PromptSource) -> concurrent.futures.Future[Completions]:
        """Samples from the weights as they are now, beside whatever comes next."""
        generation = self._generation
        batch = next(prompts)
        self._ids_ahead_N = batch.ids_N
        generation.load_weights()
        return generation.actor.start_generating(
            batch, generation.current(), expected_tokens_N=generation.expected_tokens(batch)
        )

    def record(self, prompts: PromptSource) -> dict[str, Any]:
        """A resumed run samples again what was being sampled ahead, whatever was learned of it since."""
        state = prompts.state(again=self._ids_ahead_N)
        return {"prompts": state, **self._generation.record()}

    def restore(self, record: Mapping[str, Any], prompts: PromptSource) -> None:
        """Goes on from a record."""
        prompts.restore(record["prompts"])
        self._generation.restore(record)


class PartialSampling:
    """A step ends as soon as it has the groups that it needs (DAPO's code; Kimi k1.5's partial rollouts).

    What is unfinished waits, tokens and log-probabilities included, and goes on under the next step's
    weights.
    """

    def __init__(self, generation: Generation, rewards: Rewards, *, prompts_per_batch: int):
        """Args: how many prompts are in flight in a generation batch, unfinished ones among them."""
        self._generation = generation
        self._rewards = rewards
        self._prompts_per_batch = prompts_per_batch
        self._unfinished: UnfinishedGroups | None = None

    def sample(self, prompts: PromptSource, *, enough: Enough | None = None) -> Sampled:
        """The groups that were finished when there was enough of them, or all."""
        generation = self._generation
        step = generation.timer.step
        unfinished = self._num_unfinished
        batch = self._fill_up(prompts, unfinished)
        beside = self._rewards.beside()

        def has_enough(group: Completions) -> bool:
            beside(group)
            if enough is None:
                # Nothing hangs on it yet: it is graded beside the generation that goes on.
                return False
            scored, asked = self._rewards.graded(beside.of(group)), enough
            return hosts.on_first(lambda: asked(scored))

        with generation.timer.phase("gen", shown="generate", may_stop=True):
            check_same_prompts(batch, step)
            generation.load_weights()
            rollout = generation.actor.resume(
                batch,
                generation.current(),
                unfinished=self._unfinished,
                on_group=has_enough,
                expected_tokens_N=generation.expected_tokens(batch),
            )
            self._unfinished = rollout.unfinished
            generation.learn_lengths(rollout.completions)
        stale = sum(int((version < step).sum()) for version in rollout.versions)
        sampled = self._rewards(rollout.completions, beside)
        counts = {"rollout/unfinished_groups": unfinished, "rollout/stale_tokens": stale}
        return dataclasses.replace(sampled, counts=counts)

    @property
    def _num_unfinished(self) -> int:
        return 0 if self._unfinished is None else len(self._unfinished.prompts)

    def _fill_up(self, prompts: PromptSource, unfinished: int) -> Prompts:
        """Prompts, which the source has one by one, that make a generation batch of what is unfinished."""
        wanted = max(1, self._prompts_per_batch - unfinished)
        return Prompts.concatenate([next(prompts) for _ in range(wanted)])

    def record(self, prompts: PromptSource) -> dict[str, Any]:
        """What is unfinished, what earlier steps teach, and where the prompts stand."""
        unfinished = None if self._unfinished is None else self._unfinished.record()
        return {
            "prompts": prompts.state(),
            "unfinished": unfinished,
            **self._generation.record(),
        }

    def restore(self, record: Mapping[str, Any], prompts: PromptSource) -> None:
        """Goes on from a record."""
        prompts.restore(record["prompts"])
        self._generation.restore(record)
        stored = record["unfinished"]
        self._unfinished = None if stored is None else UnfinishedGroups.of_record(stored)


def check_same_prompts(prompts: Prompts, step: int) -> None:
    """Ends a run of several processes that hold different prompts. Collective."""
    extras = (json.dumps(extra, sort_keys=True) for extra in prompts.extras)
    content = [*prompts.tokens, *prompts.answers, *prompts.sources, *extras]
    hosts.check_same(f"the prompts of step {step + 1}", content)


def _checksum(tokens: np.ndarray) -> int:
    return zlib.crc32(tokens.tobytes())
