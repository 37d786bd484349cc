"""Problems as prompts: rendered by their template, tokenised, and cut or left out if too long."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np

from jaxrl.data.chat import PLAIN_TEMPLATE, ChatTemplate
from jaxrl.data.data_config import DataConfig
from jaxrl.data.demonstrations import Demonstration
from jaxrl.data.messages import PLAIN_FORMAT, PromptFormat, render_context, text_of_context
from jaxrl.data.problems import Problems, Source
from jaxrl.data.row_layouts import Record
from jaxrl.data.stream import GeneratedPrompts, drop_overlong
from jaxrl.data.tokenizer import Tokenizer, train_tokenizer
from jaxrl.errors import UserError
from jaxrl.types import Prompts

Overlong: TypeAlias = Literal["drop", "left", "right", "middle", "error"]
"""The treatment of prompts beyond the limit: leave out, cut at a side or in the middle, or refuse."""

# Problems of a source, and demonstrations, that a tokenizer is trained on: enough text to contain every word
# of a procedural task.
_TOKENIZER_RECORDS = 2000


@dataclasses.dataclass(frozen=True)
class EncodedPrompts:
    """The prompts of a source, and their lengths before any was cut or left out.

    Attributes:
      prompts: The prompts that fit; `ids_N` are their row numbers.
      lengths: int64, the number of tokens of every row before cutting.
      num_cut: Number of rows that were cut to fit.
    """

    prompts: Prompts
    lengths: np.ndarray
    num_cut: int


def encode_prompts(
    records: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    prompt_format: PromptFormat = PLAIN_FORMAT,
    overlong: Overlong = "drop",
    may_be_empty: bool = False,
) -> EncodedPrompts:
    """Turns problems into prompts, in their order.

    Args:
      records: The problems.
      tokenizer: The policy's tokenizer.
      max_prompt_tokens: Largest number of tokens of a prompt, template and answer prefix included.
      prompt_format: Template and chat settings.
      overlong: Treatment of longer prompts: "drop" leaves them out. "left" cuts them from the left, which
        keeps the end of the question and the opening of the answer. "right" cuts from the right, "middle"
        keeps both ends, and "error" refuses them.
      may_be_empty: Whether it is no error if no prompt fits.

    Raises:
      UserError: A conversation cannot be rendered, a prompt is refused, or no prompt fits.
    """
    texts = [render_context(record.prompt, tokenizer, prompt_format) for record in records]
    tokens = tokenizer.encode_batch(texts)
    lengths = np.array([len(ids) for ids in tokens], np.int64)
    num_long = int((lengths > max_prompt_tokens).sum())
    if overlong == "error" and num_long:
        raise UserError(
            f"row {lengths.argmax()} has a prompt of {lengths.max()} tokens, and {num_long} rows are longer "
            f"than max_prompt_tokens {max_prompt_tokens}; raise it, or set overlong to drop, left, right or "
            "middle"
        )
    kept = range(len(records))
    if overlong == "drop" and num_long:
        kept = np.flatnonzero(lengths <= max_prompt_tokens).tolist()
        if not may_be_empty:
            # For its warning, and its error if none is left.
            drop_overlong(lengths, max_prompt_tokens, what="prompts", setting="max_prompt_tokens")
    else:
        # "middle" keeps a longer end than start, because the question is at the end.
        starts = {"left": 0, "middle": max_prompt_tokens // 2}
        start = starts.get(overlong, max_prompt_tokens)
        rest = max_prompt_tokens - start
        tokens = [
            ids if len(ids) <= max_prompt_tokens else np.append(ids[:start], ids[len(ids) - rest :])
            for ids in tokens
        ]
    prompts = Prompts(
        # Row numbers, whichever of the rows are left out.
        ids_N=np.arange(len(records), dtype=np.int64),
        tokens=tuple(tokens),
        texts=tuple(texts),
        answers=tuple(record.answer for record in records),
        sources=tuple(record.source for record in records),
        extras=tuple(record.extra for record in records),
    ).take(kept)
    return EncodedPrompts(prompts, lengths, num_cut=0 if overlong == "drop" else num_long)


def encode(
    sources: Sequence[Source], data: DataConfig, tokenizer: Tokenizer
) -> tuple[EncodedPrompts, ...]:
    """Encodes the prompts of each source."""
    return tuple(_encoder(source, data, tokenizer)(source.records) for source in sources)


def stream_inputs(
    sources: Sequence[Source],
    encoded: Sequence[EncodedPrompts],
    data: DataConfig,
    tokenizer: Tokenizer,
) -> tuple[Prompts | GeneratedPrompts, ...]:
    """The inputs of a stream: for each source its encoded prompts, or prompts generated on demand."""

    inputs: list[Prompts | GeneratedPrompts] = []
    for source, first in zip(sources, encoded, strict=True):
        if source.generated is None:
            inputs.append(first.prompts)
            continue
        # A problem that is too long is no error here: the stream draws the next one.
        encoder = functools.partial(_encoder(source, data, tokenizer), may_be_empty=True)
        encode_one = lambda record, encoder=encoder: encoder([record]).prompts  # noqa: E731
        inputs.append(
            GeneratedPrompts(source.generated, encode_one, first=first.prompts, name=source.name)
        )
    return tuple(inputs)


def _encoder(
    source: Source, data: DataConfig, tokenizer: Tokenizer
) -> Callable[..., EncodedPrompts]:
    return functools.partial(
        encode_prompts,
        tokenizer=tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        prompt_format=data.format_of(source.own_template),
        overlong=data.overlong,
    )


def evaluation_prompts(sources: Sequence[EncodedPrompts]) -> Prompts:
    """Joins the prompts of all evaluation sets; without sets there are no prompts.

    Their `ids_N`, which seed the sampling, are row numbers over all sets together.
    """
    if not sources:
        return Prompts(np.zeros(0, np.int64), (), (), (), ())
    # Of all rows, also those that were left out: ids must not depend on the length limit.
    starts = [0, *itertools.accumulate(len(source.lengths) for source in sources)]
    return Prompts.concatenate(
        [
            dataclasses.replace(source.prompts, ids_N=source.prompts.ids_N + start)
            # `starts` has one entry more, the number of all rows.
            for source, start in zip(sources, starts, strict=False)
        ]
    )


def tokenizer_from(
    problems: Problems,
    demonstrations: Sequence[Demonstration],
    data: DataConfig,
    *,
    vocab_size: int,
) -> Tokenizer:
    """Trains a small tokenizer on the problems and demonstrations of a run, for configs that name none.

    It has a plain chat template if there are conversations.

    Args:
      problems: problems of the run; their prompts are formatted by `data`.
      demonstrations: supervised examples of the run.
      data: settings of the data.
      vocab_size: largest number of tokens.
    """
    texts = [
        # With the template's words, which are in every prompt.
        data.format_of(source.own_template).fill(text_of_context(record.prompt))
        + (record.solution or record.answer)
        for source in problems.train
        for record in source.records[:_TOKENIZER_RECORDS]
    ]
    for demonstration in demonstrations[:_TOKENIZER_RECORDS]:
        context = demonstration.context
        said = [context] if isinstance(context, str) else [m["content"] for m in context]
        texts += [*said, demonstration.response or ""]
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
    sources = (*problems.train, *problems.evaluation)
    contexts = [
        *(demonstration.context for demonstration in demonstrations),
        *(record.prompt for source in sources for record in source.records),
    ]
    if all(isinstance(context, str) for context in contexts):
        return tokenizer
    template = ChatTemplate(
        PLAIN_TEMPLATE, origin="a trained tokenizer", special_tokens=tokenizer.special_tokens
    )
    return dataclasses.replace(tokenizer, chat_template=template)
