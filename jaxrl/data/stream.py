"""An endless shuffled stream of prompts, with a position that can be saved.

    records --encode_prompts--> Prompts of one source --PromptStream--> batches of N, mixed by weight

Everything is rendered by its template and tokenised once, ahead of training; `shuffling` has the order. A
step then takes rows that are ready: the device never waits for a tokenizer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from jaxrl.data.messages import PLAIN_FORMAT, PromptFormat, render_context
from jaxrl.data.records import Record
from jaxrl.data.shuffling import ShuffledRows, checksum, drop_overlong
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.types import Prompts

Overlong: TypeAlias = Literal["drop", "left", "right", "middle", "error"]


class PromptStream:
    """Endless batches of `Prompts`, every prompt of a source once an epoch, in a new order each epoch.

    `Prompts.ids_N` counts 0, 1, 2, ... through the whole stream. A batch may reach over the end of
    an epoch, and may be larger than the data set.

    Args:
      sources: prompts of each source.
      weights: of the sources: of any stretch of the stream each has its share. An epoch of one then ends
        when it ends, whatever the others do.
      prompts_per_batch: N.
      seed: of the order, below 2**32.

    Raises:
      UserError: an argument breaks its rule.
    """

    def __init__(
        self,
        sources: Sequence[Prompts],
        *,
        prompts_per_batch: int,
        seed: int,
        weights: Sequence[float] = (1.0,),
    ):
        assert len(sources) == len(weights), "every source has a weight"
        self._prompts = Prompts.concatenate(sources)
        sizes = [len(source) for source in sources]
        self._order = ShuffledRows(
            len(self._prompts),
            rows_per_batch=prompts_per_batch,
            seed=seed,
            checksum=checksum(self._prompts.tokens),
            shares=list(zip(sizes, weights, strict=True)),
        )

    @property
    def num_prompts(self) -> int:
        """Prompts of all sources."""
        return len(self._prompts)

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> Prompts:
        places, rows = next(self._order)
        return dataclasses.replace(self._prompts.take(rows), ids_N=places)

    def state(self) -> dict[str, Any]:
        """Where the stream stands, for `restore`; plain JSON."""
        return self._order.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken. Another `prompts_per_batch` is allowed.

        Raises:
          UserError: the state belongs to other prompts, to other weights or to another seed.
        """
        self._order.restore(state)


@dataclasses.dataclass(frozen=True)
class EncodedPrompts:
    """Prompts of a source, and what they were before any was cut or left out.

    Attributes:
      prompts: those that fit; `ids_N` are their row numbers.
      lengths: int64, tokens of every row, before it was cut.
      num_cut: rows that were cut to fit.
    """

    prompts: Prompts
    lengths: np.ndarray
    num_cut: int

    @property
    def num_dropped(self) -> int:
        """Rows that did not fit and were left out."""
        return len(self.lengths) - len(self.prompts)


def encode_prompts(
    records: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    prompt_format: PromptFormat = PLAIN_FORMAT,
    overlong: Overlong = "drop",
    setting: str = "max_prompt_tokens",
) -> EncodedPrompts:
    """The records as prompts, in their own order.

    Args:
      records: the problems.
      tokenizer: of the policy.
      max_prompt_tokens: longest prompt, template and answer prefix included.
      prompt_format: how a problem becomes a prompt.
      overlong: what happens to longer prompts: "drop" leaves them out, "left" cuts them from the left, which
        keeps the question's end and the opening of the answer, "right" from the right, "middle" keeps both
        ends, "error" refuses them.
      setting: name of the limit, for messages.

    Raises:
      UserError: an argument breaks its rule, a conversation cannot be rendered, or no prompt fits.
    """
    if overlong not in get_args(Overlong):
        raise UserError(f"overlong is {overlong!r}; choose one of {', '.join(get_args(Overlong))}")
    if max_prompt_tokens < 1:
        raise UserError(f"max_prompt_tokens {max_prompt_tokens} leaves no prompt; use at least 1")
    if not len(records):
        raise UserError("there are no prompts; give a data set with at least one row")
    texts = [render_context(record.prompt, tokenizer, prompt_format) for record in records]
    tokens = tokenizer.encode_batch(texts)
    lengths = np.array([len(ids) for ids in tokens], np.int64)
    if overlong == "error":
        _refuse_overlong(lengths, max_prompt_tokens)
    num_cut = 0
    if overlong in ("left", "right", "middle"):
        num_cut = int((lengths > max_prompt_tokens).sum())
        tokens = tuple(_cut(ids, max_prompt_tokens, overlong) for ids in tokens)
    fitting = np.array([len(ids) for ids in tokens], np.int64)
    kept = drop_overlong(fitting, max_prompt_tokens, what="prompts", setting=setting)
    prompts = Prompts(
        ids_N=np.arange(len(records), dtype=np.int64),
        tokens=tokens,
        texts=tuple(texts),
        answers=tuple(record.answer for record in records),
        sources=tuple(record.source for record in records),
        extras=tuple(record.extra for record in records),
    ).take(kept)
    return EncodedPrompts(prompts, lengths, num_cut)


def evaluation_prompts(sources: Sequence[EncodedPrompts]) -> Prompts:
    """Prompts of all evaluation sets, one after the other.

    Their `ids_N`, which seed the sampling, are row numbers through all of the sets.
    """
    starts = [0, *itertools.accumulate(len(source.lengths) for source in sources)]
    return Prompts.concatenate(
        [
            dataclasses.replace(source.prompts, ids_N=source.prompts.ids_N + start)
            for source, start in zip(sources, starts, strict=False)
        ]
    )


def _cut(ids: np.ndarray, limit: int, side: Overlong) -> np.ndarray:
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[-limit:]
    # The middle goes: the longer half of what stays is the end, where the question is.
    start = limit if side == "right" else limit // 2
    return np.concatenate([ids[:start], ids[len(ids) - (limit - start) :]])


def _refuse_overlong(lengths: np.ndarray, limit: int) -> None:
    if lengths.max() > limit:
        row = int(lengths.argmax())
        raise UserError(
            f"row {row} has a prompt of {lengths[row]} tokens, and {int((lengths > limit).sum())} "
            f"rows are longer than max_prompt_tokens {limit}; raise it, or set overlong to drop, left, "
            "right or middle"
        )
