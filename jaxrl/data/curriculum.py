"""Prompts in the order of a user's class, `data.sampler`, which learns how well they are answered.

    problems of all sources --> CurriculumSampler.next() --> row numbers --> batches of prompts
                                        ^                                        |
                                        +------- update(graded groups) <---------+

Every process of a run has its own sampler, and all of them choose alike, since they see the same groups; each
batch is checked (`dataflows.samplers.check_same_prompts`). The state is in every checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl.data.stream import check_same_data, checksum_of_problems
from jaxrl.errors import UserError
from jaxrl.types import Prompts, Scored
from jaxrl.user_code import load_function

_METHODS = ("next", "update", "state", "restore")
# Sampling keys take ids below this number.
_MAX_ID = 2**31


@dataclasses.dataclass(frozen=True)
class GradedGroup:
    """The graded answers to a prompt. Answers of failed agents are left out.

    Attributes:
      row: Row number of the prompt.
      correct: Whether the grader accepts each answer.
      rewards: The reward of each answer, the sum of all terms.
      lengths: Number of tokens of each answer.
    """

    row: int
    correct: tuple[bool, ...]
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]


class CurriculumSampler(Protocol):
    """Chooses the prompts of a run; a user's class, named by `data.sampler`.

    Each process of a run has one. They must choose alike, so that every decision follows from the arguments:
    not from the clock, from random numbers without the seed, or from the order of a set of texts.

        class InOrder:
            def __init__(self, prompts, seed):
                self.size, self.row = len(prompts), -1

            def next(self):
                self.row = (self.row + 1) % self.size
                return self.row

            def update(self, groups):
                pass

            def state(self):
                return self.row

            def restore(self, state):
                self.row = state
    """

    def __init__(self, prompts: Prompts, seed: int):
        """Args: the prompts of all sources, one after the other, and the seed of the run."""
        ...

    def next(self) -> int:
        """The row number of the next prompt, from 0. There is always a next one; rows may repeat."""
        ...

    def update(self, groups: Sequence[GradedGroup]) -> None:
        """Learns from graded groups, whether a step trains on them or not.

        It is called after every generation batch. The prompts of a batch are drawn before its groups are
        graded, and those of a partial rollout up to `rollout.max_staleness` steps before.
        """
        ...

    def state(self) -> Any:
        """Everything that `next` depends on, called after every step.

        It consists of dicts with texts as keys, lists, numbers, texts, True, False and None. Arrays of
        numbers may be values of the dicts.
        """
        ...

    def restore(self, state: Any) -> None:
        """Continues from a state. Tuples have become lists."""
        ...


def load_sampler(path: str) -> Callable[[Prompts, int], CurriculumSampler]:
    """Loads the class at `path`, "package.module:Class" or "path/to/file.py:Class".

    Raises:
      UserError: There is no such class, or it lacks a method.
    """
    sampler = load_function(path, "data.sampler", takes=("prompts", "seed"))
    lacks = [name for name in _METHODS if not callable(getattr(sampler, name, None))]
    if lacks:
        raise UserError(
            f"data.sampler {path!r} has no method {', '.join(lacks)}; a sampler is a class with "
            f"{', '.join(_METHODS)} (docs/data.md)"
        )
    return sampler


class CurriculumStream:
    """Endless batches of the prompts that a user's sampler chooses.

    The id of a prompt is its row plus the number of rows times the number of its earlier draws.

    Args:
      sources: The prompts of each source.
      path: The sampler's class.
      prompts_per_batch: N, the number of prompts of a batch.
      seed: Seed of the sampler.

    Raises:
      UserError: The class cannot be loaded, or it raises.
    """

    def __init__(self, sources: Sequence[Prompts], *, path: str, prompts_per_batch: int, seed: int):
        rows = Prompts.concatenate(sources)
        self._prompts = dataclasses.replace(rows, ids_N=np.arange(len(rows), dtype=np.int64))
        self._path = path
        self._prompts_per_batch = prompts_per_batch
        self._identity = {
            "sampler": path,
            "seed": seed,
            "sources": [[len(source), checksum_of_problems(source)] for source in sources],
        }
        self._draws = np.zeros(len(rows), np.int32)
        self._sampler = self._call(load_sampler(path), self._prompts, seed, name="__init__")
        # A state that cannot be saved or restored is found now, and not when a long run goes on.
        self._restore_sampler(self._sampler_state())

    def __iter__(self) -> CurriculumStream:
        return self

    def __next__(self) -> Prompts:
        rows = [self._next_row() for _ in range(self._prompts_per_batch)]
        ids = []
        for row in rows:
            # A row gets new ids, hence other samples. They begin again long after a group has ended.
            draw = int(self._draws[row]) % (_MAX_ID // len(self._prompts))
            ids.append(draw * len(self._prompts) + row)
            self._draws[row] += 1
        return dataclasses.replace(self._prompts.take(rows), ids_N=np.array(ids, np.int64))

    def update(self, scored: Scored) -> None:
        """Tells the sampler graded groups of prompts of this stream."""
        counts_NG = scored.counts_NG
        fields = (scored.correct_B, scored.reward_B, scored.completions.lengths_B)
        groups = []
        for n, prompt_id in enumerate(scored.completions.prompts.ids_N.tolist()):
            correct, rewards, lengths = (
                tuple(of.reshape(counts_NG.shape)[n][counts_NG[n]].tolist()) for of in fields
            )
            groups.append(GradedGroup(prompt_id % len(self._prompts), correct, rewards, lengths))
        self._call(self._sampler.update, groups)

    def state(self) -> dict[str, Any]:
        """The position in the stream, for `restore`; JSON and arrays."""
        return {
            **self._identity,
            "draws": self._draws.copy(),
            "sampler_state": self._sampler_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`. `prompts_per_batch` may differ.

        Raises:
          UserError: The state belongs to other prompts, another sampler or another seed, or the sampler does
            not return to it.
        """
        check_same_data({name: state.get(name) for name in self._identity}, self._identity)
        self._draws = np.array(state["draws"], np.int32)
        self._restore_sampler(state["sampler_state"])

    def _next_row(self) -> int:
        row, count = self._call(self._sampler.next), len(self._prompts)
        try:
            number = operator.index(row)
        except TypeError:
            number = -1
        # True is an index, too.
        if isinstance(row, bool) or not 0 <= number < count:
            raise UserError(
                f"data.sampler {self._path!r}: next() returned {row!r}, and the {count} prompts have the "
                f"numbers 0 to {count - 1}; return one of them"
            )
        return number

    def _sampler_state(self) -> Any:
        return self._copied(self._call(self._sampler.state), "state()")

    def _restore_sampler(self, state: Any) -> None:
        self._call(self._sampler.restore, self._copied(state, "state"))
        if _as_text(self._sampler_state()) != _as_text(state):
            raise UserError(
                f"data.sampler {self._path!r}: after restore(state), state() is another one, so that a "
                "resumed run would draw other prompts; let restore set everything that state returns"
            )

    def _copied(self, value: Any, where: str, *, in_list: bool = False) -> Any:
        """A copy of a state, as a checkpoint gives it back."""
        # A copy, since the sampler goes on while the checkpoint is written.
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return [self._copied(x, f"{where}[{i}]", in_list=True) for i, x in enumerate(value)]
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {
                key: self._copied(x, f"{where}[{key!r}]", in_list=in_list)
                for key, x in value.items()
            }
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and not in_list:
            return value.copy()
        what = "an array in a list" if isinstance(value, np.ndarray) else type(value).__name__
        if isinstance(value, dict):
            what = "a dict with keys that are no texts"
        raise UserError(
            f"data.sampler {self._path!r}: {where} is {what}, which a checkpoint cannot hold; return dicts "
            "with texts as keys, lists, numbers and texts, and arrays of numbers as values of dicts"
        )

    def _call(self, function: Callable[..., Any], *args: Any, name: str = "") -> Any:
        """Calls the user's code. StopIteration, too, becomes a UserError: it would end a loop of ours."""
        try:
            return function(*args)
        except Exception as error:  # a user's method may raise anything
            frames = traceback.extract_tb(error.__traceback__)[1:2]
            place = "".join(f"{frame.filename}:{frame.lineno}: " for frame in frames)
            raise UserError(
                f"data.sampler {self._path!r}: {name or function.__name__}() raised "
                f"{place}{type(error).__name__}: {error}; correct it"
            ) from error


def _as_text(state: Any) -> str:
    return json.dumps(
        state, sort_keys=True, default=lambda array: [str(array.dtype), array.tolist()]
    )
