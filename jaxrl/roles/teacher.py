"""What is particular about a teacher: its settings and the text around the student's prompts.

The role itself is a `roles.policy.Reference` with a model of its own, of another size or family, which a
student is to approach (distillation).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated

import numpy as np

from jaxrl.checks import NAME, PATH, check_fields, token_count
from jaxrl.types import Prompts

PROMPT, ANSWER = "{prompt}", "{answer}"


@dataclasses.dataclass(frozen=True)
class TeacherConfig:
    """The teacher of dataflows that distil one (`dataflows.distill`).

    Attributes:
      weights: Hugging Face directory of a language model; it has the student's tokens.
      template: what the teacher reads before a response. "{prompt}" is the student's prompt, token by token,
        with its chat template; "{answer}" the ground truth of the problem. Texts around it may hold special
        tokens.
      max_extra_tokens: limit of what the template adds to a prompt; the rest is cut off.
    """

    weights: Annotated[str, PATH] = ""
    template: Annotated[str, NAME] = PROMPT
    max_extra_tokens: Annotated[int, token_count(1)] = 64

    def __post_init__(self):
        check_fields(self)
        if self.template.count(PROMPT) != 1:
            raise ValueError(
                f"template {self.template!r} has {PROMPT} {self.template.count(PROMPT)} times; the teacher "
                "reads the student's prompt once, put it there once"
            )

    @property
    def changes_prompts(self) -> bool:
        """Whether the teacher reads anything but the student's prompts."""
        return self.template != PROMPT


class TeacherPrompts:
    """The student's prompts with the text of a template around them."""

    def __init__(self, config: TeacherConfig, encode: Callable[[str], np.ndarray]):
        """Args: the settings, and the tokenizer's function from a text to ids."""
        self._before, self._after = config.template.split(PROMPT)
        self._max_extra_tokens = config.max_extra_tokens
        self._encode = encode

    def of(self, prompts: Prompts) -> tuple[Prompts, int]:
        """(the prompts as the teacher reads them, how many lost text to `max_extra_tokens`)."""
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
