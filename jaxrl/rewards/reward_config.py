"""Settings of the reward: grader, functions, reward model, generative judge, length."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import with_config
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from jaxrl.checks import (
    PATH,
    PROSE,
    between,
    coefficient,
    score,
    settings,
    token_count,
)
from jaxrl.errors import UserError
from jaxrl.rewards.judge import SCORE_TEMPLATE, JudgeTemplate

SandboxChoice = Literal["auto", "bubblewrap", "landlock", "none"]
"""Values of `reward.code_sandbox`."""


@settings
class JudgeConfig:
    """A language model that scores responses (`rewards.judge`)."""

    model: Annotated[str, PATH] = ""
    """Hugging Face directory with model and tokenizer; "" for no judge."""
    weight: Annotated[float, score()] = 1.0
    """Weight of the judge's score in the reward."""
    template: Annotated[str, PROSE] = SCORE_TEMPLATE
    """Prompt of the judge, with {response} and optionally {question} and {answer}."""
    max_prompt_tokens: Annotated[int, token_count(1)] = 4096
    """Longest prompt. Of a response the last two characters per token are in it."""
    max_verdict_tokens: Annotated[int, token_count(1)] = 256
    """Longest verdict."""

    def __post_init__(self):
        # Its constructor is the check.
        JudgeTemplate(self.template)

    @property
    def max_response_chars(self) -> int:
        """Characters of a response that the judge reads: two per token of the longest prompt."""
        return 2 * self.max_prompt_tokens


@with_config(extra="forbid", strict=True)
class RewardFunction(TypedDict):
    """A reward function of the user: its path, and its weight in the reward."""

    path: Annotated[str, PATH]
    weight: Annotated[int | float, score()]


@settings
class RewardConfig:
    """Settings of the reward."""

    grader: Annotated[str, PATH] = "answer"
    """Name of a grader (answer, gsm8k, math, math_verify, choice, exact, regex, code,
    reasoning_gym), or your own as "package.module:function" or "path/to/file.py:function".
    """
    grader_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the grader, by name."""
    grader_timeout_s: Annotated[float, between(0.01, 3600)] = 4.0
    """Processor time for grading one response in a worker process."""
    grader_weight: Annotated[float, score()] = 1.0
    """Weight of the grader's +1 or -1 in the reward. With 0, training prompts need no ground
    truth, unless dynamic sampling filters groups by correctness or the judge's template has
    {answer}.
    """
    functions: dict[str, RewardFunction] = dataclasses.field(default_factory=dict)
    """Further reward functions, name -> {"path": path, "weight": w}; the path is
    "package.module:function" or "path/to/file.py:function" (`rewards.user`).
    """
    functions_timeout_s: Annotated[float, between(0.01, 7 * 86_400)] = 600.0
    """Seconds that each function may take for the responses of a step; a longer call ends the run."""
    model: Annotated[str, PATH] = ""
    """Hugging Face directory of a reward model (...ForSequenceClassification) with the policy's
    tokenizer; "" for none.
    """
    model_weight: Annotated[float, score()] = 1.0
    """Weight of the reward model's score in the reward."""
    code_sandbox: SandboxChoice = "auto"
    """Sandbox in which the grader `code` runs programs: "bubblewrap", "landlock",
    or "none" for no sandbox; "auto" takes the first that works on this machine, and
    never "none".
    """
    judge: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    """Generative judge."""
    overlong_buffer_tokens: Annotated[int, token_count(0)] = 16
    """Tokens before the length limit in which the soft penalty grows; 0 turns it off."""
    overlong_penalty: Annotated[float, coefficient()] = 1.0
    """Largest soft penalty."""
    mask_truncated: bool = False
    """Whether to leave truncated responses out of the loss (overlong filtering); they still
    count in the baseline of their group.
    """

    def __post_init__(self):
        # The terms of the sum, which have names of their own.
        for name in self.functions.keys() & {"grader", "model", "judge"}:
            raise ValueError(
                f"functions.{name} has the name of another reward, under which metrics are kept; "
                "give it one of its own"
            )

    def check_several_terms(self, advantage: str) -> None:
        """Raises UserError if an advantage that normalises each term finds fewer than two."""
        weights = {"grader": self.grader_weight}
        weights |= {name: function["weight"] for name, function in self.functions.items()}
        weights |= {"model": self.model_weight} if self.model else {}
        weights |= {"judge": self.judge.weight} if self.judge.model else {}
        counting = [name for name, weight in weights.items() if weight]
        if len(counting) < 2:
            raise UserError(
                f"advantage {advantage!r} normalises each reward on its own, and this run has "
                f"{', '.join(counting) or 'none'} alone; add reward.functions, reward.model or reward.judge "
                "with a weight, or use advantage grpo"
            )
