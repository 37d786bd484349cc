"""Samplers, with one interface: they turn prompts into the groups of a step with their rewards.

    Sampling            one generation batch; every response is finished
    PartialSampling     draws prompts as slots fall free and ends once there are enough groups; the next step
                        continues unfinished ones
    FreeRunning         goes on while the step learns, on devices of its own (`free_running`)
    CountedSampling     wraps one of these and counts the problems that the stream left out
    CurriculumSampling  wraps one of these and tells the user's sampler of prompts every graded group
    DynamicSampling     wraps one of these and samples until enough groups are mixed (`dynamic_sampling`)

Each finished group is graded once, while others are still sampled.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import numpy as np

from jaxrl.data.curriculum import CurriculumStream
from jaxrl.data.stream import PromptStream
from jaxrl.dataflows.experience import Sampled
from jaxrl.dataflows.rewarding import Rewards
from jaxrl.dataflows.schedule import RequestOrder
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.mesh import hosts
from jaxrl.roles.policy import Actor
from jaxrl.rollout.backend import OnGroup, SamplingOptions
from jaxrl.rollout.samples import UnfinishedGroups
from jaxrl.types import Completions, Prompts, Scored

# Called with the graded groups of each prompt; returns whether the step has enough groups.
Enough = Callable[[Scored], bool]


class PromptSource(Protocol):
    """An endless stream of generation batches of prompts, with a position that can be saved."""

    def __iter__(self) -> Self: ...

    def __next__(self) -> Prompts: ...

    def state(self) -> dict[str, Any]:
        """The position as JSON, and arrays in dicts."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a state."""
        ...


class Sampler(Protocol):
    """Samples the groups of a step."""

    def sample(self, prompts: PromptSource, *, enough: Enough | None = None) -> Sampled:
        """Groups with rewards.

        Args:
          prompts: source of prompts; the sampler takes as many as it needs.
          enough: function that returns True once the remaining groups may be dropped. Samplers that finish
            every group do not call it.
        """
        ...

    def record(self, prompts: PromptSource) -> dict[str, Any]:
        """State of a resumed run for `Checkpoints.save`, including the position in the prompts."""
        ...

    def restore(self, record: Mapping[str, Any], prompts: PromptSource) -> None:
        """Continues from a record, as a checkpoint gives it back."""
        ...


@dataclasses.dataclass(eq=False)
class Generation:
    """Generates responses with the actor; earlier steps tell their expected lengths.

    Attributes:
      actor: the policy.
      options: sampling options; `step` is set for each call.
      timer: timer of the step.
    """

    actor: Actor
    options: SamplingOptions
    timer: StepTimer
    # Checksum of a prompt -> mean length of the responses when it was last sampled. Equal checksums of two
    # prompts only change the order in which samples start.
    _lengths: dict[int, int] = dataclasses.field(default_factory=dict, init=False)

    def load_weights(self) -> None:
        """Reshards the actor's weights to the generation layout, unless they are there already."""
        if not self.actor.can_sample:
            with self.timer.phase("update_weights"):
                self.actor.for_sampling()

    def current(self, **changes: Any) -> SamplingOptions:
        return self.options.replace(step=self.timer.step, **changes)

    def generate(self, prompts: Prompts, on_group: OnGroup, **changes: Any) -> Completions:
        """Finishes a response to every prompt.

        Args:
          prompts: prompts to answer.
          on_group: called with each finished group.
          **changes: changes of the options.
        """
        self.load_weights()
        expected_N = self.expected_tokens(prompts)
        completions = self.actor.generate(
            prompts, self.current(**changes), on_group=on_group, expected_tokens_N=expected_N
        )
        # The next answers to these prompts will probably be about as long.
        mean_N = completions.lengths_B.reshape(-1, completions.num_samples).mean(axis=1)
        for tokens, mean in zip(completions.prompts.tokens, mean_N, strict=True):
            self._lengths[zlib.crc32(tokens.tobytes())] = round(mean)
        return completions

    def expected_tokens(self, prompts: Prompts) -> np.ndarray:
        """Expected response lengths [N]: those of earlier steps; new prompts count as the longest."""
        # The longest start first; one of unknown length that started last might decode alone at the end.
        longest = max(self._lengths.values(), default=0) + 1
        known = [
            self._lengths.get(zlib.crc32(tokens.tobytes()), longest) for tokens in prompts.tokens
        ]
        # A fraction below 1 sorts equal lengths by prompt length, longest first.
        own = np.array([len(tokens) for tokens in prompts.tokens], np.float64)
        return np.array(known) + own / (own.max() + 1)

    def record(self) -> dict[str, Any]:
        # As pairs: JSON would make texts of the keys of an object.
        return {"lengths": list(self._lengths.items())}

    def restore(self, record: Mapping[str, Any]) -> None:
        self._lengths = {text: length for text, length in record["lengths"]}


@dataclasses.dataclass(eq=False)
class Sampling:
    """Samples one generation batch; every response is finished.

    Attributes:
      generation, rewards: how responses are sampled and scored.
      order: order of the requests of agents; None without agents.
    """

    generation: Generation
    rewards: Rewards
    order: RequestOrder | None = None

    def sample(self, prompts: PromptSource, *, enough: Enough | None = None) -> Sampled:
        batch = next(prompts)
        beside = self.rewards.beside(self.generation.actor.backend.samplers)
        with self.generation.timer.phase("gen", shown="generate", may_stop=True):
            # With other prompts a process would dispatch other programs, and all would hang.
            check_same_prompts(batch, self.generation.timer.step)
            if self.order is not None:
                self.order.begin(self.generation.timer.step)
            completions = self.generation.generate(batch, beside)
            if self.order is not None:
                self.order.end()
            metrics = self.generation.actor.backend.metrics
        return with_metrics(self.rewards(completions, beside), metrics)

    def record(self, prompts: PromptSource) -> dict[str, Any]:
        """Expected lengths, and the position in the prompts."""
        return {"prompts": prompts.state(), **self.generation.record()}

    def restore(self, record: Mapping[str, Any], prompts: PromptSource) -> None:
        prompts.restore(record["prompts"])
        self.generation.restore(record)


def with_metrics(sampled: Sampled, metrics: Mapping[str, float]) -> Sampled:
    """`sampled` with more metrics."""
    return dataclasses.replace(sampled, metrics={**sampled.metrics, **metrics})


@dataclasses.dataclass(eq=False)
class GreedySampling:
    """Samples the greedy response to each prompt (temperature 0), with its reward."""

    generation: Generation
    rewards: Rewards

    def __call__(self, prompts: Prompts) -> Sampled:
        beside = self.rewards.beside(self.generation.actor.backend.samplers)
        with self.generation.timer.phase("gen_max", shown="generate"):
            completions = self.generation.generate(prompts, beside, num_samples=1, temperature=0.0)
        return self.rewards(completions, beside)


@dataclasses.dataclass(eq=False)
class PartialSampling:
    """Keeps all slots busy: prompts are drawn as slots fall free, until a step has enough groups.

        slot 0   [prompt 0 ][3      ][4    | step 2: 4 goes on ][7   ..
        slot 1   [1  ][2         ][5       | 5 goes on     ][6     ..

    The other groups keep their tokens and log-probabilities, and continue with the next weights (as in
    DAPO's code, Kimi k1.5 and AReaL). A group with tokens that are too old is dropped.

    Attributes:
      generation, rewards: how responses are sampled and scored.
      prompts_per_batch: number of prompts of a generation batch, after which sampling ends in any case. If
        there are slots, the groups of at most this many decode at the same time.
      max_staleness: largest number of steps between the weights that sampled a token and those that train
        on it.
    """

    generation: Generation
    rewards: Rewards
    _: dataclasses.KW_ONLY
    prompts_per_batch: int
    max_staleness: int
    _unfinished: UnfinishedGroups | None = dataclasses.field(default=None, init=False)
    # The step of the last generation batch; a step may have several.
    _last_step: int = dataclasses.field(default=-1, init=False)

    def sample(self, prompts: PromptSource, *, enough: Enough | None = None) -> Sampled:
        """The groups that are finished once there are enough, or a generation batch of them."""
        generation, step = self.generation, self.generation.timer.step
        carried = dropped = 0
        # A step of several generation batches counts once, at its first.
        if self._unfinished is not None and step != self._last_step:
            fresh = np.flatnonzero(step - self._unfinished.oldest_version_N <= self.max_staleness)
            carried, dropped = len(fresh), len(self._unfinished.prompts) - len(fresh)
            self._unfinished = self._unfinished.take(fresh)
        self._last_step = step
        beside = self.rewards.beside()
        num_finished = 0

        def has_enough(groups: Completions) -> bool:
            nonlocal num_finished
            beside(groups)
            num_finished += 1
            whole_batch = num_finished >= self.prompts_per_batch
            if enough is None:
                # No decision depends on the verdict, so grading continues in the background.
                return whole_batch
            scored, asked = self.rewards.graded(beside.of(groups)), enough
            # Asked on one host, so that all stop after the same prompt.
            return hosts.on_first(lambda: asked(scored)) or whole_batch

        with generation.timer.phase("gen", shown="generate", may_stop=True):
            generation.load_weights()
            rollout = generation.actor.resume(
                # None to begin with: `more` draws all of them.
                Prompts.concatenate([]),
                generation.current(),
                more=lambda places, unfinished: self._draw(prompts, places, unfinished),
                unfinished=self._unfinished,
                on_group=has_enough,
            )
        self._unfinished = rollout.unfinished
        # Added up over the generation batches of a step.
        counts = {
            "rollout/unfinished_groups": carried,
            "rollout/dropped_stale_groups": dropped,
            "rollout/stale_tokens": rollout.completions.num_stale(step),
        }
        sampled = dataclasses.replace(self.rewards(rollout.completions, beside), counts=counts)
        return with_metrics(sampled, generation.actor.backend.metrics)

    def _draw(self, prompts: PromptSource, places: int, unfinished: int) -> Prompts:
        """Draws groups for free places, but not more samples than a generation batch has."""
        G = self.generation.options.num_samples
        places = min(places, self.prompts_per_batch * G - unfinished)
        # The stream of a partial rollout gives one prompt at a time (`trainer.run_step`).
        drawn = Prompts.concatenate([next(prompts) for _ in range(0, places, G)])
        if len(drawn):
            check_same_prompts(drawn, self.generation.timer.step)
        return drawn

    def record(self, prompts: PromptSource) -> dict[str, Any]:
        """Unfinished groups, expected lengths, and the position in the prompts."""
        return {
            "prompts": prompts.state(),
            "unfinished": self._unfinished,
            **self.generation.record(),
        }

    def restore(self, record: Mapping[str, Any], prompts: PromptSource) -> None:
        prompts.restore(record["prompts"])
        self.generation.restore(record)
        stored = record["unfinished"]
        self._unfinished = None if stored is None else UnfinishedGroups.of_record(stored)


def check_same_prompts(prompts: Prompts, step: int) -> None:
    """Raises UserError if the processes of a run have different prompts. Collective."""
    extras = (json.dumps(extra, sort_keys=True) for extra in prompts.extras)
    content = [*prompts.tokens, *prompts.answers, *prompts.sources, *extras]
    hosts.check_same(f"the prompts of step {step + 1}", content)


class CountedSampling:
    """Counts the generated problems that the prompt stream left out since the last sample."""

    def __init__(self, inner: Sampler, stream: PromptStream):
        """Args: the wrapped sampler, and the stream of its prompts."""
        self._inner = inner
        self._stream = stream
        self._counted = stream.counts()

    def sample(self, prompts: PromptSource, *, enough: Enough | None = None) -> Sampled:
        sampled = self._inner.sample(prompts, enough=enough)
        before, self._counted = self._counted, self._stream.counts()
        counts = Counter(sampled.counts)
        counts.update({name: count - before[name] for name, count in self._counted.items()})
        return dataclasses.replace(sampled, counts=counts)

    def record(self, prompts: PromptSource) -> dict[str, Any]:
        return self._inner.record(prompts)

    def restore(self, record: Mapping[str, Any], prompts: PromptSource) -> None:
        self._inner.restore(record, prompts)
        # An earlier process has reported what the stream left out before the record.
        self._counted = self._stream.counts()


class CurriculumSampling:
    """Tells the user's sampler of prompts (`data.sampler`) every graded group."""

    def __init__(self, inner: Sampler, stream: CurriculumStream):
        """Args: the wrapped sampler, and the stream of its prompts."""
        self._inner = inner
        self._stream = stream

    def sample(self, prompts: PromptSource, *, enough: Enough | None = None) -> Sampled:
        sampled = self._inner.sample(prompts, enough=enough)
        # All processes have the same verdicts and rewards (`rewarding.Rewards` checks it).
        self._stream.update(sampled.scored)
        return sampled

    def record(self, prompts: PromptSource) -> dict[str, Any]:
        return self._inner.record(prompts)

    def restore(self, record: Mapping[str, Any], prompts: PromptSource) -> None:
        self._inner.restore(record, prompts)
