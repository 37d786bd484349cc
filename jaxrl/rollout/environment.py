"""Conversations with tools: what answers a finished turn.

prompt | sampled turn ... <stop> | tokens from the environment | sampled turn ... <stop> | end
  mask   1 1 1 1 1 1 1 1 1 1 1 1   0 0 0 0 0 0 0 0 0 0 0 0 0 0   1 1 1 1 1 1 1 1 1 1 1 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl.user_code import load_function


@dataclasses.dataclass(frozen=True)
class Turn:
    """A finished turn of the model.

    Attributes:
      prompt_id: of `Prompts.ids_N`.
      sample_index: which of the prompt's samples this is.
      tokens: int32, the turn, with the stop that ended it.
      response: int32, everything since the prompt, this turn included.
    """

    prompt_id: int
    sample_index: int
    tokens: np.ndarray
    response: np.ndarray


# Tokens to append, which are not trained on and after which the model goes on; None ends the sample. It runs
# between two dispatches and must depend on the turn alone, on every process alike.
Environment = Callable[[Turn], np.ndarray | None]


def load_environment(path: str) -> Callable[..., Any]:
    """The user's function at `path`, which is called with a `Turn` and the tokenizer.

    Raises:
      UserError: there is none, or it takes other arguments.
    """
    return load_function(path, "environment", takes=("turn", "tokenizer"))
