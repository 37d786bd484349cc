"""Trains a small tokenizer on the problems and demonstrations of a run, for configs without a tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxrl.data.chat import PLAIN_TEMPLATE, ChatTemplate
from jaxrl.data.data_config import DataConfig
from jaxrl.data.demonstrations import Demonstration, texts_of
from jaxrl.data.problems import Problems
from jaxrl.data.records import text_of_context
from jaxrl.data.tokenizer import Tokenizer, train_tokenizer

# Enough text to contain every word of a procedural task.
_TOKENIZER_RECORDS = 2000


def tokenizer_from(
    problems: Problems,
    demonstrations: Sequence[Demonstration],
    data: DataConfig,
    *,
    vocab_size: int,
) -> Tokenizer:
    """Trains a tokenizer. It has a plain chat template if there are conversations.

    Args:
      problems: problems of the run; their prompts are formatted by `data`.
      demonstrations: supervised examples of the run.
      data: settings of the data.
      vocab_size: largest number of tokens.
    """
    texts = [
        data.format_of(source.settings, source.own_template).fill(text_of_context(record.prompt))
        + (record.solution or record.answer)
        for source in problems.train
        for record in source.records[:_TOKENIZER_RECORDS]
    ]
    texts += texts_of(demonstrations[:_TOKENIZER_RECORDS])
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
    contexts = [
        *(demonstration.context for demonstration in demonstrations),
        *(
            record.prompt
            for source in (*problems.train, *problems.evaluation)
            for record in source.records
        ),
    ]
    if all(isinstance(context, str) for context in contexts):
        return tokenizer
    template = ChatTemplate(
        PLAIN_TEMPLATE, origin="a trained tokenizer", special_tokens=tokenizer.special_tokens
    )
    return dataclasses.replace(tokenizer, chat_template=template)
