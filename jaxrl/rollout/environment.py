"""Conversations with tools: an environment answers each finished turn of the model.

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
      prompt_id: id of the prompt, from `Prompts.ids_N`.
      sample_index: index of the sample among the prompt's samples.
      tokens: int32, the turn, including the stop that ended it.
      response: int32, all tokens since the prompt, including this turn.
    """

    prompt_id: int
    sample_index: int
    tokens: np.ndarray
    response: np.ndarray


# Returns tokens to append, after which the model continues; they are not trained on. None ends the sample.
# It is called between two dispatches. Its result must depend on the turn alone and be equal on all processes.
Environment = Callable[[Turn], np.ndarray | None]


def load_environment(path: str) -> Callable[..., Any]:
    """Loads the user's function at `path`; it is called with a `Turn` and the tokenizer.

    Raises:
      UserError: the function does not exist or takes other arguments.
    """
    return load_function(path, "environment", takes=("turn", "tokenizer"))
