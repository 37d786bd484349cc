"""A user's reward functions, named in a config by their path (`user_code`).

A function is called once per step, with all responses. A run calls it in another process (`process_pool`),
which can be ended if it hangs. Responses are untrusted: a function should parse them, never evaluate them,
and bound its work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxrl.errors import UserError
from jaxrl.process_pool import ProcessPool, WorkerFault
from jaxrl.rewards.score import Scores, checked_scores
from jaxrl.types import Completions, TurnText
from jaxrl.user_code import load_function

Of = TypeVar("Of")


@dataclasses.dataclass(frozen=True)
class Responses:
    """The argument of a user's reward function: B responses with their prompts.

    The `num_samples` responses to a prompt are adjacent. If an environment answers the policy's turns,
    `texts` and `tokens` hold the whole conversation and `policy_texts` only the policy's turns.

        texts         "6 * 7 is <ask>42 Answer: 42"
        turns         (True, "6 * 7 is <ask>"), (False, "42"), (True, " Answer: 42")
        policy_texts  "6 * 7 is <ask>\\n Answer: 42"

    Attributes:
      prompts: B texts as the model saw them, template included.
      texts: B responses without special tokens.
      policy_texts: B texts of the policy's turns, one line break between turns, as graders see them.
      turns: B tuples of turns with `by_policy` and `text`.
      answers: B ground truths.
      sources: B names of data sets.
      extras: B mappings with the other fields of the rows (`types.Prompts.extras`).
      tokens: B int32 arrays of response tokens, end-of-sequence included.
      mask: B float32 arrays, 1 for tokens of the policy, 0 for tokens of an environment.
      truncated_B: bool, whether the response reached the length limit before end-of-sequence.
      num_samples: G, number of responses to each prompt.
    """

    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    policy_texts: tuple[str, ...]
    turns: tuple[tuple[TurnText, ...], ...]
    answers: tuple[str, ...]
    sources: tuple[str, ...]
    extras: tuple[Mapping[str, Any], ...]
    tokens: tuple[np.ndarray, ...]
    mask: tuple[np.ndarray, ...]
    truncated_B: np.ndarray
    num_samples: int

    def __len__(self) -> int:
        return len(self.texts)

    @staticmethod
    def of(completions: Completions) -> Responses:
        """Repeats the fields of each prompt for its responses."""
        prompts = completions.prompts

        def repeated(values: tuple[Of, ...]) -> tuple[Of, ...]:
            return tuple(values[n] for n in completions.prompt_index_B)

        return Responses(
            prompts=repeated(prompts.texts),
            texts=tuple(completions.texts),
            policy_texts=completions.policy_texts,
            turns=tuple(completions.turns),
            answers=repeated(prompts.answers),
            sources=repeated(prompts.sources),
            extras=repeated(prompts.extras),
            tokens=completions.tokens,
            mask=completions.mask,
            truncated_B=completions.truncated_B,
            num_samples=completions.num_samples,
        )


RewardFunction = Callable[[Responses], Scores]
"""Responses -> B scores, all finite; None abstains from a response."""


def reward_function(path: str) -> Callable[[Responses], list[float | None]]:
    """Loads the reward function at `path`.

    Args:
      path: "package.module:function" or "path/to/file.py:function".

    Returns:
      A function from responses to B scores, of float32. It raises UserError unless there is one finite number
      or None per response. Exceptions of the user's function pass through, with a note of its path.

    Raises:
      UserError: The path is malformed or names the running program, its module cannot be imported or lacks
        the function, or the function does not take one argument, the responses.
    """
    function: RewardFunction = load_function(
        path, "reward function", takes=("responses",), own_process=True
    )

    def scores(responses: Responses) -> list[float | None]:
        try:
            values = function(responses)
        except Exception as error:
            # The traceback names a file, but not the setting that has chosen it.
            error.add_note(f"raised by the reward function {path!r}")
            raise
        G = responses.num_samples
        score_B = checked_scores(
            values,
            f"reward function {path!r}",
            num_samples=G,
            prompts=responses.prompts[::G],
            sources=responses.sources[::G],
        )
        return [None if math.isnan(score) else score for score in score_B.tolist()]

    return scores


class UserRewards:
    """The reward functions of a run, in one process that starts once. Close it after use."""

    def __init__(
        self,
        paths: Sequence[str],
        *,
        timeout_s: float = 600.0,
        start_s: float = 600.0,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        """Imports the functions.

        Args:
          paths: paths of the functions, see `reward_function`; without any, no process starts.
          timeout_s: seconds that a function may take for the responses of a step.
          start_s: seconds for the imports of all functions.
          interrupted: function called every tenth of a second while one runs; True ends the wait.

        Raises:
          UserError: See `reward_function`.
        """
        self._interrupted = interrupted
        self._pool = ProcessPool(
            paths,
            reward_function,
            what="reward function",
            patience_s=timeout_s,
            start_s=start_s,
        )
        if paths:
            # Now, so that an error of an import ends the run before anything compiles.
            self._pool.start()

    def close(self) -> None:
        self._pool.close()

    def scores(self, path: str, completions: Completions) -> list[float | None]:
        """Returns the B scores of the function at `path`, None where it abstains.

        Raises:
          UserError: The function did not return one finite number or None per response, raised an exception,
            ended its process, or took too long.
          Interrupted: The wait was ended.
        """
        try:
            return self._pool.call(path, Responses.of(completions), interrupted=self._interrupted)
        except WorkerFault as fault:
            remedy = "; bound its work, or raise reward.functions_timeout_s"
            raise UserError(f"{fault}{remedy if fault.kind == 'timeout' else ''}") from fault
