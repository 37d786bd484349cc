"""Conversations with tools: an environment answers each finished turn of the model.

prompt | sampled turn ... <stop> | tokens from the environment | sampled turn ... <stop> | end
  mask   1 1 1 1 1 1 1 1 1 1 1 1   0 0 0 0 0 0 0 0 0 0 0 0 0 0   1 1 1 1 1 1 1 1 1 1 1 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from jaxrl.errors import UserError
from jaxrl.mesh import hosts
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


class TokenizerLike(Protocol):
    """The part of a tokenizer that is used here; the user's function gets the whole object."""

    @property
    def vocab_size(self) -> int: ...


def environment_of(path: str, tokenizer: TokenizerLike) -> Environment | None:
    """The environment at `path`, "package.module:function" or "path/to/file.py:function"; None for "".

    The environment raises UserError if the answer is not a list of token ids.
    Exceptions of the user's function pass through, with a note of its path.

    Raises:
      UserError: the function cannot be loaded.
    """
    if not path:
        return None
    function = load_environment(path)

    def ask(turn: Turn) -> list[int] | None:
        try:
            reply = function(turn, tokenizer)
        except Exception as error:
            error.add_note(f"raised by the environment {path!r}")
            raise
        if reply is None:
            return None
        tokens = np.asarray(reply)
        if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
            raise UserError(
                f"environment {path!r} returned {tokens.dtype} of shape {tokens.shape}; it returns token "
                "ids, at least one, or None to end the sample"
            )
        if tokens.min() < 0 or tokens.max() >= tokenizer.vocab_size:
            raise UserError(
                f"environment {path!r} returned token ids from {tokens.min()} to {tokens.max()}; the "
                f"tokenizer's go from 0 to {tokenizer.vocab_size - 1}: encode texts with the tokenizer that "
                "it is given"
            )
        return tokens.tolist()

    def environment(turn: Turn) -> np.ndarray | None:
        # The first process sends the answer to the others, because a tool may answer differently each time.
        reply = hosts.on_first(lambda: ask(turn))
        return None if reply is None else np.array(reply, np.int32)

    return environment
