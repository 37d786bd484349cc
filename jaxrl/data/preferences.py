"""Preference pairs for reward models, cost models and DPO: two answers to one prompt, one of them chosen.

    {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
    {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [...]}

Both answers of a pair have the same prompt tokens, and end with end-of-sequence like a sampled response. A
pair of equal answers is dropped, because it prefers neither. A pair with an overlong answer is dropped,
because a shortened answer is not the one that was judged. The log counts both. Repeated pairs are kept.

Not supported: rankings of more than two answers, and conversations that differ before the last answer.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxrl.checks import is_finite
from jaxrl.data.messages import (
    ASSISTANT,
    PLAIN_FORMAT,
    USER,
    Context,
    PromptFormat,
    messages_of,
    prompt_of,
    render_context,
    split_last_answer,
    trained_text,
)
from jaxrl.data.rows import BadRow, Row, checked_text, field_of, parse_rows, shown
from jaxrl.data.stream import ShuffledExamples, checksum, drop_overlong
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError

logger = logging.getLogger(__name__)

Answer: TypeAlias = tuple[np.ndarray, np.ndarray]
"""(prompt tokens, response tokens), both int32; the last response token is end-of-sequence."""


@dataclasses.dataclass(frozen=True)
class Preference:
    """One pair.

    Attributes:
      context: The question without a template, or the conversation before the answers.
      chosen, rejected: The answers.
      source: Name of the data set.
      margin: The advantage of the chosen answer, 0 or more; 0 if unknown.
      chosen_harm, rejected_harm: 1 for a harmful answer, -1 for a harmless answer, 0 if unknown.
    """

    context: Context
    chosen: str
    rejected: str
    source: str
    margin: float = 0.0
    chosen_harm: int = 0
    rejected_harm: int = 0


class PreferencePair(NamedTuple):
    """A preference in tokens, with the fields of `Preference`."""

    chosen: Answer
    rejected: Answer
    margin: float
    chosen_harm: int
    rejected_harm: int


class PreferenceStream(ShuffledExamples[PreferencePair]):
    """Endless batches of `PreferencePair`s, reshuffled each epoch.

    Args:
      preferences: The pairs.
      tokenizer: The model's tokenizer.
      pairs_per_batch: Length of each batch.
      seed: Seed of the order, below 2**32.
      max_tokens: Largest number of tokens of the prompt and one answer; pairs with a longer answer are
        dropped. A packed row has to hold twice as many, because each answer has its own copy of the prompt.
      prompt_format: Template and chat settings for questions.
      formats: The same for data sets of their own format, by their names.

    Raises:
      UserError: No pair is left.
    """

    def __init__(
        self,
        preferences: Sequence[Preference],
        tokenizer: Tokenizer,
        *,
        pairs_per_batch: int,
        seed: int,
        max_tokens: int,
        prompt_format: PromptFormat = PLAIN_FORMAT,
        formats: Mapping[str, PromptFormat] | None = None,
    ):
        encoded = _encode(preferences, tokenizer, prompt_format, formats or {})
        # By tokens: two spellings of one answer may be equal to the model.
        pairs = [pair for pair in encoded if not np.array_equal(pair.chosen[1], pair.rejected[1])]
        if not pairs:
            raise UserError(
                f"in all {len(encoded)} pairs the chosen answer is the rejected one; check which fields hold "
                "them"
            )
        if len(pairs) < len(encoded):
            logger.warning(
                "%d of %d pairs dropped: the chosen answer is the rejected one",
                len(encoded) - len(pairs),
                len(encoded),
            )
        lengths = np.array(
            [
                len(pair.chosen[0]) + max(len(pair.chosen[1]), len(pair.rejected[1]))
                for pair in pairs
            ]
        )
        kept = drop_overlong(lengths, max_tokens, what="pairs", setting="max_tokens")
        pairs = [pairs[i] for i in kept]
        arrays = (
            array
            for pair in pairs
            for array in (
                *pair.chosen,
                # Its prompt is the chosen one's.
                pair.rejected[1],
                np.array([pair.margin, pair.chosen_harm, pair.rejected_harm]),
            )
        )
        super().__init__(
            pairs, examples_per_batch=pairs_per_batch, seed=seed, checksum=checksum(arrays)
        )


HARM_FIELDS = ("chosen_harms", "rejected_harms")
_HARMS = {None: 0, True: 1, False: -1}


def read_preferences(path: str | pathlib.Path, *, source: str) -> tuple[Preference, ...]:
    """Reads a file of pairs, with the fields prompt, chosen and rejected.

    Optional fields are margin (how much better), and chosen_harms and rejected_harms: whether each answer is
    harmful; true, false, or null for unknown.

    The two answers are texts, or lists of messages that end with the assistant's answer. A list that does not
    begin with the assistant is a whole conversation. Then the prompt is ignored, and only the last messages
    may differ.

    Args:
      path: The file, in any format of `data.rows`.
      source: Name of the data set.

    Raises:
      UserError: The file is missing or empty, or a row is broken ("file:line: ...").
    """

    def parse(row: Row) -> Preference:
        context, chosen, rejected = _answers(row)
        # Another value is a KeyError, which `parse_rows` reports with its place.
        harms = (_HARMS[row.get(name)] for name in HARM_FIELDS)
        margin = row.get("margin", 0.0)
        # A negative margin would reverse the loss silently.
        if not is_finite(margin) or margin < 0:
            raise BadRow(f"field 'margin' is {shown(margin)}; it must be a number of 0 or more")
        return Preference(context, chosen, rejected, source, float(margin), *harms)

    return parse_rows(path, parse, example='{"prompt": ..., "chosen": ..., "rejected": ...}')


def _answers(row: Row) -> tuple[Context, str, str]:
    """Returns context, chosen and rejected answer of a row."""
    values = {name: field_of(row, name) for name in ("chosen", "rejected")}
    are_lists = [isinstance(value, list) for value in values.values()]
    if not any(are_lists):
        chosen, rejected = (checked_text(x, f"field {name!r}") for name, x in values.items())
        return prompt_of(row), chosen, rejected
    if not all(are_lists):
        raise BadRow(
            "of 'chosen' and 'rejected' one is a list of messages and the other is not; write both alike"
        )
    (before, chosen), (before_rejected, rejected) = (
        (context, trained_text(last, f"the last message of field {name!r}"))
        for name, x in values.items()
        for context, last in [
            split_last_answer(messages_of(x, f"field {name!r}"), f"field {name!r}")
        ]
    )
    if before != before_rejected:
        raise BadRow(
            "'chosen' and 'rejected' part before their last message, and only the last may differ; end both "
            "where they part"
        )
    # A whole conversation: it has the question already.
    if before and before[0]["role"] != ASSISTANT:
        return before, chosen, rejected
    context = prompt_of(row)
    if before:
        is_text = isinstance(context, str)
        context = ({"role": USER, "content": context}, *before) if is_text else context + before
    return context, chosen, rejected


def _encode(
    preferences: Sequence[Preference],
    tokenizer: Tokenizer,
    prompt_format: PromptFormat,
    formats: Mapping[str, PromptFormat],
) -> list[PreferencePair]:
    texts = [
        render_context(p.context, tokenizer, formats.get(p.source, prompt_format))
        for p in preferences
    ]
    end = np.array([tokenizer.eos_id], np.int32)
    pairs = zip(
        preferences,
        tokenizer.encode_batch(texts),
        tokenizer.encode_batch([p.chosen for p in preferences]),
        tokenizer.encode_batch([p.rejected for p in preferences]),
        strict=True,
    )
    return [
        PreferencePair(
            (prompt, np.concatenate([chosen, end])),
            (prompt, np.concatenate([rejected, end])),
            p.margin,
            p.chosen_harm,
            p.rejected_harm,
        )
        for p, prompt, chosen, rejected in pairs
    ]
