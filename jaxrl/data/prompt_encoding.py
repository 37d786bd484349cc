"""Problems as prompts: rendered by their template, tokenised, and cut or left out if too long."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np

from jaxrl.data.messages import PLAIN_FORMAT, PromptFormat, render_context
from jaxrl.data.records import Record
from jaxrl.data.shuffling import drop_overlong
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.types import Prompts

# A text of more than twice as many characters is first tokenised at its ends only. Tokens of prose and code
# have 3 to 5 characters, so such a text is far beyond the limit.
_CHARS_PER_TOKEN = 32
_LEAST_CHARS = 1 << 16

Overlong: TypeAlias = Literal["drop", "left", "right", "middle", "error"]
"""The treatment of prompts beyond the limit: leave out, cut at a side or in the middle, or refuse."""


@dataclasses.dataclass(frozen=True)
class EncodedPrompts:
    """The prompts of a source, and their lengths before any was cut or left out.

    Attributes:
      prompts: The prompts that fit; `ids_N` are their row numbers.
      lengths: int64, the number of tokens of every row before cutting. A text far beyond the limit counts
        only the tokens of its two ends.
      num_cut: Number of rows that were cut to fit.
    """

    prompts: Prompts
    lengths: np.ndarray
    num_cut: int

    @property
    def num_dropped(self) -> int:
        """Number of rows that did not fit and were left out."""
        return len(self.lengths) - len(self.prompts)


@dataclasses.dataclass(frozen=True)
class PromptEncoder:
    """Turns problems into prompts.

    Attributes:
      tokenizer: The policy's tokenizer.
      max_prompt_tokens: Largest number of tokens of a prompt, template and answer prefix included.
      prompt_format: Template and chat settings.
      overlong: Treatment of longer prompts: "drop" leaves them out. "left" cuts them from the left, which
        keeps the end of the question and the opening of the answer. "right" cuts from the right, "middle"
        keeps both ends, and "error" refuses them.

    Raises:
      UserError: `overlong` is unknown, or the limit leaves no prompt.
    """

    tokenizer: Tokenizer
    max_prompt_tokens: int
    prompt_format: PromptFormat = PLAIN_FORMAT
    overlong: Overlong = "drop"

    def __post_init__(self):
        choices = get_args(Overlong)
        if self.overlong not in choices:
            raise UserError(f"overlong is {self.overlong!r}; choose one of {', '.join(choices)}")
        if self.max_prompt_tokens < 1:
            raise UserError(
                f"max_prompt_tokens {self.max_prompt_tokens} leaves no prompt; use at least 1"
            )

    def encode(self, records: Sequence[Record]) -> EncodedPrompts:
        """Encodes problems in their order; perhaps none of them fits.

        Raises:
          UserError: A conversation cannot be rendered, or a prompt is refused.
        """
        limit = self.max_prompt_tokens
        texts = [
            render_context(record.prompt, self.tokenizer, self.prompt_format) for record in records
        ]
        tokens = self._tokens(texts)
        lengths = np.array([len(ids) for ids in tokens], np.int64)
        num_cut = 0
        if self.overlong == "error" and lengths.max() > limit:
            raise self._refusal(lengths, texts)
        if self.overlong in ("left", "right", "middle"):
            num_cut = int((lengths > limit).sum())
            tokens = [_cut(ids, limit, self.overlong) for ids in tokens]
        kept = [row for row, ids in enumerate(tokens) if len(ids) <= limit]
        prompts = Prompts(
            ids_N=np.arange(len(records), dtype=np.int64),
            tokens=tuple(tokens),
            texts=tuple(texts),
            answers=tuple(record.answer for record in records),
            sources=tuple(record.source for record in records),
            extras=tuple(record.extra for record in records),
        ).take(kept)
        return EncodedPrompts(prompts, lengths, num_cut)

    def encode_one(self, record: Record) -> Prompts | None:
        """Encodes one problem; None if it does not fit."""
        prompts = self.encode([record]).prompts
        return prompts if len(prompts) else None

    @property
    def _end_chars(self) -> int:
        return max(_LEAST_CHARS, _CHARS_PER_TOKEN * self.max_prompt_tokens)

    def _tokens(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text; of a text far beyond the limit only those of its two ends.

        Such a text is cut or left out, so its middle is not needed. Each end must exceed the limit by
        itself, because a tokenizer may make few tokens of many characters.
        """
        chars = self._end_chars
        long = [row for row, text in enumerate(texts) if len(text) > 2 * chars]
        starts = self.tokenizer.encode_batch([texts[row][:chars] for row in long])
        ends = self.tokenizer.encode_batch([texts[row][-chars:] for row in long])
        found = {
            row: np.concatenate([start, end])
            for row, start, end in zip(long, starts, ends, strict=True)
            if min(len(start), len(end)) > self.max_prompt_tokens
        }
        rest = [row for row in range(len(texts)) if row not in found]
        encoded = self.tokenizer.encode_batch([texts[row] for row in rest])
        found |= zip(rest, encoded, strict=True)
        return [found[row] for row in range(len(texts))]

    def _refusal(self, lengths: np.ndarray, texts: Sequence[str]) -> UserError:
        limit = self.max_prompt_tokens
        row = int(lengths.argmax())
        more = " or more" if len(texts[row]) > 2 * self._end_chars else ""
        return UserError(
            f"row {row} has a prompt of {lengths[row]} tokens{more}, and {int((lengths > limit).sum())} "
            f"rows are longer than max_prompt_tokens {limit}; raise it, or set overlong to drop, left, "
            "right or middle"
        )


def encode_prompts(
    records: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    prompt_format: PromptFormat = PLAIN_FORMAT,
    overlong: Overlong = "drop",
) -> EncodedPrompts:
    """Encodes the problems of a source; arguments as for `PromptEncoder`.

    Raises:
      UserError: As for `PromptEncoder`, or no prompt fits.
    """
    encoder = PromptEncoder(tokenizer, max_prompt_tokens, prompt_format, overlong)
    if not len(records):
        raise UserError("there are no prompts; give a data set with at least one row")
    encoded = encoder.encode(records)
    if encoded.num_dropped:
        drop_overlong(
            encoded.lengths, max_prompt_tokens, what="prompts", setting="max_prompt_tokens"
        )
    return encoded


def evaluation_prompts(sources: Sequence[EncodedPrompts]) -> Prompts:
    """Joins the prompts of all evaluation sets; without sets there are no prompts.

    Their `ids_N`, which seed the sampling, are row numbers over all sets together.
    """
    if not sources:
        return Prompts(np.zeros(0, np.int64), (), (), (), ())
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
    # "middle" keeps a longer end than start, because the question is at the end.
    start = limit if side == "right" else limit // 2
    return np.concatenate([ids[:start], ids[len(ids) - (limit - start) :]])
