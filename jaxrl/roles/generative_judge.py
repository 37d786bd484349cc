"""A generative judge: a frozen language model with its own tokenizer and rollout backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl.data.messages import PromptFormat, render_context
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.rollout.backend import RolloutBackend, SamplingOptions
from jaxrl.types import Prompts

# At temperature 0 nothing is drawn, so seed, step and the ids of prompts do not matter.
_GREEDY = SamplingOptions(num_samples=1, seed=0, step=0, temperature=0.0)


class GenerativeJudge:
    """Answers texts with texts, by greedy decoding. `rewards.judge.judge_scores` samples with it."""

    def __init__(
        self, backend: RolloutBackend, tokenizer: Tokenizer, *, max_prompt_tokens: int, chat: bool
    ):
        """Wraps a rollout backend; its `load` gives the judge its weights.

        Args:
          backend: rollout backend of the model; it decodes tokens with `tokenizer`.
          tokenizer: tokenizer of the model.
          max_prompt_tokens: limit for template, question and response together. Longer prompts lose their
            beginning.
          chat: whether the tokenizer's chat template turns a text into a prompt.
        """
        self.backend = backend
        self.tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._prompt_format = PromptFormat(chat=chat)

    def answer(self, texts: Sequence[str]) -> tuple[str, ...]:
        """The greedy answer to each text. Prompts that are too long lose their beginning."""
        rendered = [render_context(text, self.tokenizer, self._prompt_format) for text in texts]
        # Cut from the left: the end of a prompt holds the response, and what makes a chat model answer.
        tokens = tuple(
            ids[-self._max_prompt_tokens :] for ids in self.tokenizer.encode_batch(rendered)
        )
        prompts = Prompts(
            ids_N=np.arange(len(texts), dtype=np.int64),
            tokens=tokens,
            texts=tuple(rendered),
            answers=("",) * len(texts),
            sources=("judge",) * len(texts),
        )
        return tuple(self.backend.generate(prompts, _GREEDY).with_rows(True).texts)
