"""Settings of a teacher, and the text that it reads around the student's prompts.

A teacher is a `roles.policy.Reference` with its own model, of any size or family with the student's
vocabulary. The student learns to approach it (distillation).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated

import numpy as np

from jaxrl.checks import NAME, PATH, settings, token_count
from jaxrl.types import Prompts

PROMPT, ANSWER = "{prompt}", "{answer}"


@settings
class TeacherConfig:
    """The teacher of a distillation dataflow (`dataflows.distill`)."""

    weights: Annotated[str, PATH] = ""
    """Hugging Face directory of a language model with the student's vocabulary."""
    template: Annotated[str, NAME] = PROMPT
    """Text before a response as the teacher reads it. "{prompt}" stands for the student's
    prompt with its chat template, "{answer}" for the ground truth. The text may contain special
    tokens.
    """
    max_extra_tokens: Annotated[int, token_count(1)] = 64
    """Maximum number of tokens that the template adds to a prompt; the rest is cut off."""

    def __post_init__(self):
        if self.template.count(PROMPT) != 1:
            raise ValueError(
                f"template {self.template!r} has {PROMPT} {self.template.count(PROMPT)} times; the teacher "
                "reads the student's prompt once, put it there once"
            )

    @property
    def changes_prompts(self) -> bool:
        """Whether the teacher's prompts differ from the student's."""
        return self.template != PROMPT


class TeacherPrompts:
    """The student's prompts with the text of a template around them."""

    def __init__(self, config: TeacherConfig, encode: Callable[[str], np.ndarray]):
        """Args: the settings, and the tokenizer's function that turns a text into ids."""
        self._before, self._after = config.template.split(PROMPT)
        self._max_extra_tokens = config.max_extra_tokens
        self._encode = encode

    def of(self, prompts: Prompts) -> tuple[Prompts, int]:
        """Returns the teacher's prompts, and how many of them were cut to `max_extra_tokens`."""
        tokens, num_cut = [], 0
        for prompt, answer in zip(prompts.tokens, prompts.answers, strict=True):
            before, after = (
                self._encode(text.replace(ANSWER, answer)) for text in (self._before, self._after)
            )
            num_cut += len(before) + len(after) > self._max_extra_tokens
            before = before[: self._max_extra_tokens]
            after = after[: self._max_extra_tokens - len(before)]
            tokens.append(np.concatenate([before, prompt, after]).astype(np.int32))
        return dataclasses.replace(prompts, tokens=tuple(tokens)), num_cut
