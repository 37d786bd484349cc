"""What the decode loop is given and what it returns: a sample to decode, and its new tokens.

T tokens of a sequence   R tokens that a dispatch has added to a sample
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import numpy as np

from jaxrl.rollout.environment import Environment
from jaxrl.rollout.samples import Sample
from jaxrl.rollout.slots import DrawSettings


@dataclasses.dataclass(frozen=True, eq=False)
class StartSequence:
    """Tokens that samples start from. Samples that hold the same object share one prefill.

    Attributes:
      tokens: int32 [T].
    """

    tokens: np.ndarray


@dataclasses.dataclass(eq=False)
class SampleTask:
    """A sample to decode, with its settings.

    Attributes:
      sample: the sample that receives the tokens; it may already have some.
      start: the prompt, followed by the tokens that the sample already has.
      prompt_id: part of the sampling key. With `settings` and the sample's index it determines the noise of
        every token.
      settings: how tokens are drawn.
      max_tokens: maximum length of the whole sample, end-of-sequence included.
      budget_tokens: maximum number of tokens that this loop adds. After that the sample is left unfinished.
        0 means no limit.
      stop_strings: texts that end a turn; tokens after the stop string are removed.
      environment: function that answers a finished turn; None ends the sample after its first turn.
      owner: any value of the caller, to recognise the sample by.
      prompt_tokens: number of tokens before the sample.
      limit: length of the sample at which its slot stops decoding.
    """

    sample: Sample
    start: StartSequence
    prompt_id: int
    settings: DrawSettings
    max_tokens: int
    budget_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    environment: Environment | None = None
    owner: Any = None
    prompt_tokens: int = dataclasses.field(init=False)
    limit: int = dataclasses.field(init=False)

    def __post_init__(self):
        count = len(self.sample)
        self.prompt_tokens = len(self.start.tokens) - count
        allowed = count + self.budget_tokens if self.budget_tokens else self.max_tokens
        self.limit = min(allowed, self.max_tokens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and the sample together."""
        return self.prompt_tokens + len(self.sample)

    @property
    def sequence(self) -> np.ndarray:
        """The prompt and the tokens that the sample has now, int32 [T]."""
        return np.concatenate([self.start.tokens[: self.prompt_tokens], self.sample.tokens])


class End(enum.Enum):
    """Why a sample left the loop. A sample that is PAUSED is not finished."""

    STOP_ID = enum.auto()
    STOP_STRING = enum.auto()
    FULL = enum.auto()
    PAUSED = enum.auto()


class Decoded(NamedTuple):
    """Tokens that a dispatch has added to a sample.

    Attributes:
      task: the sample's task.
      tokens: int32 [R], without tokens after a stop string and without the environment's answer.
      logprob: float32 [R].
      end: reason why the sample has ended; None if it continues.
      num_before: number of tokens of the prompt and the sample before the dispatch.
    """

    task: SampleTask
    tokens: np.ndarray
    logprob: np.ndarray
    end: End | None
    num_before: int
