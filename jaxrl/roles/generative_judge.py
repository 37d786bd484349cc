"""A judge that answers in words: a frozen language model with a tokenizer and an engine of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl.data.messages import render_prompt
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.models.decoder import Params, decoder_graph
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.driver import sample
from jaxrl.rollout.engine import Engine, EngineConfig
from jaxrl.types import Prompts


class GenerativeJudge:
    """Answers texts with texts, greedily: what `rewards.judge.judge_scores` samples with."""

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        tokenizer: Tokenizer,
        engine: EngineConfig,
        template: str = "{prompt}",
        chat: bool = False,
    ):
        """Builds the programs; an assignment to `params` gives weights.

        Args:
          model, mesh: the language model, and where it samples.
          tokenizer: its own.
          engine: how it samples; the longest prompt has to hold template, question and response.
          template, chat: how a text becomes a prompt.
        """
        self.mesh = mesh
        graph, shapes, axes = decoder_graph(model)
        self.generate_shardings = shardings(axes, shapes, GENERATE_RULES, mesh)
        self.params: Params | None = None
        self._engine = Engine(model, graph, mesh, engine)
        self._tokenizer = tokenizer
        self._prompting: dict[str, Any] = {"template": template, "chat": chat}

    @property
    def special_texts(self) -> tuple[str, ...]:
        """What its tokenizer reads as one token wherever it stands, such as "<|im_end|>"."""
        return self._tokenizer.added_tokens

    def answer(self, texts: Sequence[str]) -> tuple[str, ...]:
        """The likeliest answer to each text. Prompts that are too long keep their end."""
        assert self.params is not None, "an assignment to `params` comes first"
        rendered = [render_prompt(text, self._tokenizer, **self._prompting) for text in texts]
        limit = self._engine.max_prefill_length
        tokens = tuple(ids[-limit:] for ids in self._tokenizer.encode_batch(rendered))
        prompts = Prompts(
            ids_N=np.arange(len(texts), dtype=np.int64),
            tokens=tokens,
            texts=tuple(rendered),
            answers=("",) * len(texts),
            sources=("judge",) * len(texts),
        )
        completions = sample(
            self._engine,
            self.params,
            prompts,
            self._tokenizer.decode,
            num_samples=1,
            seed=0,
            step=0,
            temperature=0.0,
        )
        return completions.texts
