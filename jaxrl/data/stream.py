"""An endless shuffled stream of prompts, with a position that can be saved.

Everything is rendered by the template and tokenised once, at construction; `shuffling` has the order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from jaxrl.data.messages import render_prompt
from jaxrl.data.records import Record
from jaxrl.data.shuffling import ShuffledRows, checksum, drop_overlong
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.types import Prompts

Overlong: TypeAlias = Literal["drop", "left", "error"]


class PromptStream:
    """Endless batches of `Prompts`, every prompt once an epoch, in a new order each epoch.

    `Prompts.ids_N` counts 0, 1, 2, ... through the whole stream. A batch may reach over the end of
    an epoch, and may be larger than the data set.

    Args:
      records: the problems.
      tokenizer: of the policy.
      prompts_per_batch: N.
      seed: of the order, below 2**32.
      max_prompt_tokens: longest prompt, template included.
      template: text around the problem, with "{prompt}" where it goes.
      chat: send the text through the tokenizer's chat template as one user message.
      overlong: what happens to longer prompts: "drop" leaves them out, "left" keeps their last
        `max_prompt_tokens` tokens, "error" refuses them.

    Raises:
      UserError: an argument breaks its rule, or no prompt is short enough.
    """

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: Tokenizer,
        *,
        prompts_per_batch: int,
        seed: int,
        max_prompt_tokens: int,
        template: str = "{prompt}",
        chat: bool = False,
        overlong: Overlong = "drop",
    ):
        self._prompts = evaluation_prompts(
            records,
            tokenizer,
            max_prompt_tokens=max_prompt_tokens,
            template=template,
            chat=chat,
            overlong=overlong,
        )
        self._order = ShuffledRows(
            len(self._prompts),
            rows_per_batch=prompts_per_batch,
            seed=seed,
            checksum=checksum(self._prompts.tokens),
        )

    @property
    def num_prompts(self) -> int:
        """Prompts of one epoch."""
        return len(self._prompts)

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> Prompts:
        places, rows = next(self._order)
        return dataclasses.replace(self._prompts.take(rows), ids_N=places)

    def state(self) -> dict[str, int]:
        """Where the stream stands, for `restore`; plain JSON."""
        return self._order.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken. Another `prompts_per_batch` is allowed.

        Raises:
          UserError: the state belongs to other prompts or to another seed.
        """
        self._order.restore(state)


def evaluation_prompts(
    records: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    template: str = "{prompt}",
    chat: bool = False,
    overlong: Overlong = "drop",
    limit: int | None = None,
) -> Prompts:
    """The records as prompts, in their own order, for evaluation.

    Args:
      records, tokenizer, max_prompt_tokens, template, chat, overlong: as in `PromptStream`.
      limit: take this many of the first that fit; None takes all.

    Returns:
      Prompts whose `ids_N` are the row numbers in `records`.

    Raises:
      UserError: as in `PromptStream`.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit {limit} leaves no prompts; use at least 1, or None for all")
    if overlong not in get_args(Overlong):
        raise UserError(f"overlong is {overlong!r}; choose one of {', '.join(get_args(Overlong))}")
    if max_prompt_tokens < 1:
        raise UserError(f"max_prompt_tokens {max_prompt_tokens} leaves no prompt; use at least 1")
    texts = _render(records, tokenizer, template=template, chat=chat)
    tokens = tokenizer.encode_batch(texts)
    lengths = np.array([len(ids) for ids in tokens])
    if overlong == "error":
        _refuse_overlong(lengths, max_prompt_tokens)
    if overlong == "left":
        # A prompt's end holds the question and the opening of the answer; its start can go.
        tokens = tuple(ids[-max_prompt_tokens:] for ids in tokens)
        lengths = np.minimum(lengths, max_prompt_tokens)
    kept = drop_overlong(lengths, max_prompt_tokens, what="prompts", setting="max_prompt_tokens")
    return Prompts(
        ids_N=np.arange(len(records), dtype=np.int64),
        tokens=tokens,
        texts=tuple(texts),
        answers=tuple(record.answer for record in records),
        sources=tuple(record.source for record in records),
    ).take(kept[:limit])


def _render(
    records: Sequence[Record], tokenizer: Tokenizer, *, template: str, chat: bool
) -> list[str]:
    if not len(records):
        raise UserError("there are no prompts; give a data set with at least one row")
    return [
        render_prompt(record.prompt, tokenizer, template=template, chat=chat) for record in records
    ]


def _refuse_overlong(lengths: np.ndarray, limit: int) -> None:
    if lengths.max() > limit:
        row = int(lengths.argmax())
        raise UserError(
            f"row {row} has a prompt of {lengths[row]} tokens, and {int((lengths > limit).sum())} "
            f"rows are longer than max_prompt_tokens {limit}; raise it, or set overlong to drop or "
            "left"
        )
