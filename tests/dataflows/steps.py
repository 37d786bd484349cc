"""A policy that samples by arithmetic, and prompts that are numbered, for samplers and dataflows alone."""

import functools

import jax
import numpy as np
from arithmetic_backend import ArithmeticBackend
from jax.sharding import Mesh

from jaxrl.rewards.grading import Grade
from jaxrl.rollout.samples import Rollout
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import Prompts

STOP = 1
LIMITS = EngineConfig(
    slots=8, tokens_per_dispatch=2, max_prompt_tokens=4, max_response_tokens=12, stop_ids=(STOP,)
)


def make_backend(respond=None) -> ArithmeticBackend:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return ArithmeticBackend(
        mesh, LIMITS, functools.partial(map, lambda tokens: " ".join(map(str, tokens))), respond
    )


class SamplingPolicy:
    """What samplers need of an actor.

    Attributes:
      sampled: (id, version of the weights, step) of each prompt that was drawn.
      rollouts: results of `resume`.
    """

    def __init__(self, backend: ArithmeticBackend):
        self.backend = backend
        self.version = 0
        self.loaded = -1
        self.sampled: list[tuple[int, int, int]] = []
        self.rollouts: list[Rollout] = []

    def update(self) -> None:
        self.version += 1

    @property
    def can_sample(self) -> bool:
        return self.loaded == self.version

    def for_sampling(self) -> None:
        self.loaded = self.version

    def _note(self, prompts, options) -> None:
        assert self.can_sample, "weights are loaded before anything is sampled"
        self.sampled += [(i, self.loaded, options.step) for i in prompts.ids_N.tolist()]

    def generate(self, prompts, options, *, on_group=None, expected_tokens_N):
        self._note(prompts, options)
        assert expected_tokens_N.shape == (len(prompts),)
        return self.backend.generate(prompts, options, on_group=on_group)

    def continuous(self, options, unfinished=None, *, members=None):
        return self.backend.continuous(options, unfinished, members=members)

    def resume(self, prompts, options, *, more, unfinished, on_group):
        self._note(prompts, options)

        def noted(places, live):
            drawn = more(places, live)
            self._note(drawn, options)
            return drawn

        rollout = self.backend.resume(
            prompts, options, more=noted, unfinished=unfinished, on_group=on_group
        )
        self.rollouts.append(rollout)
        return rollout


class NumberedPrompts:
    """Prompt n is the token n + 2, its answer the parity of n."""

    def __init__(self, per_batch: int = 4):
        self._per_batch = per_batch
        self._next = 0

    def __iter__(self):
        return self

    def __next__(self) -> Prompts:
        numbers = range(self._next, self._next + self._per_batch)
        self._next += self._per_batch
        return Prompts(
            ids_N=np.array(numbers, np.int64),
            tokens=tuple(np.array([n + 2], np.int32) for n in numbers),
            texts=tuple(f"prompt {n}" for n in numbers),
            answers=tuple(str(n) for n in numbers),
            sources=("numbers",) * self._per_batch,
        )

    def state(self):
        return {"next": self._next}

    def restore(self, state):
        self._next = state["next"]


def saved(record):
    """The record of a sampler, as a checkpoint gives it back."""
    groups = record["unfinished"]
    return record | {"unfinished": groups and groups.record()}


class CountingGrader:
    """Right are responses whose first token has another parity than their prompt's number plus `shift`.

    Attributes:
      calls: how many responses it has seen.
    """

    def __init__(self, right=lambda number, response: True):
        self.calls = 0
        self._right = right

    def __call__(self, response: str, answer: str) -> Grade:
        self.calls += 1
        return Grade(self._right(int(answer), response), response)
