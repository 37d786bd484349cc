"""Loads a user's environment, which answers turns of conversations in training and evaluation."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.rollout.environment import Environment, Turn, load_environment


class TokenizerLike(Protocol):
    """The part of a tokenizer that is used here; the user's function gets the whole object."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...


def environment_of(path: str, tokenizer: TokenizerLike) -> Environment | None:
    """The environment at `path`, "package.module:function" or "path/to/file.py:function"; None for "".

    Only the first process calls the user's function and sends the answer to the others, because a tool may
    answer differently each time. The environment raises UserError if the answer is not a list of token ids.
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
        return None if reply is None else _checked_reply(reply, path, tokenizer.vocab_size)

    def environment(turn: Turn) -> np.ndarray | None:
        reply = hosts.on_first(lambda: ask(turn))
        return None if reply is None else np.array(reply, np.int32)

    return environment


def _checked_reply(reply: Any, path: str, vocab_size: int) -> list[int]:
    tokens = np.asarray(reply)
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(
            f"environment {path!r} returned {tokens.dtype} of shape {tokens.shape}; it returns token ids, at "
            "least one, or None to end the sample"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UserError(
            f"environment {path!r} returned token ids from {tokens.min()} to {tokens.max()}; the tokenizer's "
            f"go from 0 to {vocab_size - 1}: encode texts with the tokenizer that it is given"
        )
    return tokens.tolist()
