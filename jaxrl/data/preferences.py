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
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxrl.checks import is_finite
from jaxrl.data.json_rows import read_jsonl
from jaxrl.data.messages import (
    ASSISTANT,
    PLAIN_FORMAT,
    Context,
    Message,
    PromptFormat,
    context_of,
    messages_of,
    render_context,
    split_last_answer,
)
from jaxrl.data.rows import BadRow, checked_text, field_of, shown
from jaxrl.data.shuffling import ShuffledExamples, checksum, drop_overlong
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
      UserError: An argument is out of range, or no pair is left.
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
        pairs = _with_different_answers(
            _encode(preferences, tokenizer, prompt_format, formats or {})
        )
        lengths = np.array([max(_length(pair.chosen), _length(pair.rejected)) for pair in pairs])
        kept = drop_overlong(lengths, max_tokens, what="pairs", setting="max_tokens")
        pairs = [pairs[i] for i in kept]
        super().__init__(
            pairs,
            examples_per_batch=pairs_per_batch,
            seed=seed,
            checksum=checksum(array for pair in pairs for array in _arrays(pair)),
        )


def read_preferences(
    path: str | pathlib.Path,
    *,
    source: str,
    prompt_field: str = "prompt",
    chosen_field: str = "chosen",
    rejected_field: str = "rejected",
    harm_fields: tuple[str, str] | None = None,
) -> tuple[Preference, ...]:
    """Reads a JSONL file of pairs.

    The two answers are texts, or lists of messages that end with the assistant's answer. A list that does not
    begin with the assistant is a whole conversation. Then the prompt's field is ignored, and only the last
    messages may differ.

    Args:
      path: The file, UTF-8.
      source: Name of the data set.
      prompt_field: Field with the question, or with a list of messages.
      chosen_field, rejected_field: Fields with the two answers.
      harm_fields: Fields that say whether the chosen and the rejected answer are harmful (true, false, or
        null for unknown); None ignores harm.

    Raises:
      UserError: The file is missing or empty, or a row is broken ("file:line: ...").
    """

    def parse(row: dict[str, Any]) -> Preference:
        context, chosen, rejected = _answers(row, prompt_field, chosen_field, rejected_field)
        chosen_harm, rejected_harm = (_harm(row, name) for name in harm_fields or (None, None))
        margin = _margin(row)
        return Preference(context, chosen, rejected, source, margin, chosen_harm, rejected_harm)

    names = (prompt_field, chosen_field, rejected_field)
    wanted = "{" + ", ".join(f'"{name}": ...' for name in names) + "}"
    return tuple(read_jsonl(path, parse, wanted=wanted))


def _answers(
    row: dict[str, Any], prompt_field: str, chosen_field: str, rejected_field: str
) -> tuple[Context, str, str]:
    """Returns context, chosen and rejected answer of a row."""
    chosen, rejected = field_of(row, chosen_field), field_of(row, rejected_field)
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise BadRow(
            f"of {chosen_field!r} and {rejected_field!r} one is a list of messages and the other "
            "is not; write both alike"
        )
    what = f"field {chosen_field!r}", f"field {rejected_field!r}"
    if not isinstance(chosen, list):
        context = context_of(row, prompt_field)
        return context, checked_text(chosen, what[0]), checked_text(rejected, what[1])
    before, chosen = split_last_answer(messages_of(chosen, what[0]), what[0])
    before_rejected, rejected = split_last_answer(messages_of(rejected, what[1]), what[1])
    if before != before_rejected:
        raise BadRow(
            f"{chosen_field!r} and {rejected_field!r} part before their last message, and only the "
            "last may differ; end both where they part"
        )
    if before and before[0]["role"] != ASSISTANT:
        return before, chosen, rejected
    context = context_of(row, prompt_field)
    return _extended(context, before) if before else context, chosen, rejected


def _extended(context: Context, further: tuple[Message, ...]) -> tuple[Message, ...]:
    start = ({"role": "user", "content": context},) if isinstance(context, str) else context
    return start + further


def _margin(row: dict[str, Any]) -> float:
    value = row.get("margin", 0.0)
    if not is_finite(value) or value < 0:
        raise BadRow(
            f"field 'margin' is {shown(value)}; a margin must be a number of 0 or more (swap the "
            "answers if the rejected one is better)"
        )
    return float(value)


def _harm(row: dict[str, Any], name: str | None) -> int:
    if name is None:
        return 0
    value = field_of(row, name)
    if value is not None and not isinstance(value, bool):
        raise BadRow(
            f"field {name!r} is {shown(value)}; whether an answer does harm must be true, false or "
            "null"
        )
    return 0 if value is None else 1 if value else -1


def _encode(
    preferences: Sequence[Preference],
    tokenizer: Tokenizer,
    prompt_format: PromptFormat,
    formats: Mapping[str, PromptFormat],
) -> list[PreferencePair]:
    if not len(preferences):
        raise UserError("there are no pairs; give a data set with at least one row")
    prompts = tokenizer.encode_batch(
        [
            render_context(p.context, tokenizer, formats.get(p.source, prompt_format))
            for p in preferences
        ]
    )
    end = np.array([tokenizer.eos_id], np.int32)

    def answers(texts: list[str]) -> list[Answer]:
        responses = tokenizer.encode_batch(texts)
        return [
            (prompt, np.concatenate([response, end]))
            for prompt, response in zip(prompts, responses, strict=True)
        ]

    chosen = answers([p.chosen for p in preferences])
    rejected = answers([p.rejected for p in preferences])
    return [
        PreferencePair(one, other, p.margin, p.chosen_harm, p.rejected_harm)
        for one, other, p in zip(chosen, rejected, preferences, strict=True)
    ]


def _with_different_answers(pairs: list[PreferencePair]) -> list[PreferencePair]:
    """Returns the pairs whose answers differ, and logs how many do not."""
    kept = [pair for pair in pairs if not np.array_equal(pair.chosen[1], pair.rejected[1])]
    if not kept:
        raise UserError(
            f"in all {len(pairs)} pairs the chosen answer is the rejected one; check which fields "
            "hold them"
        )
    if len(kept) < len(pairs):
        logger.warning(
            "%d of %d pairs dropped: the chosen answer is the rejected one",
            len(pairs) - len(kept),
            len(pairs),
        )
    return kept


def _length(answer: Answer) -> int:
    return len(answer[0]) + len(answer[1])


def _arrays(pair: PreferencePair) -> list[np.ndarray]:
    labels = np.array([pair.margin, pair.chosen_harm, pair.rejected_harm])
    return [*pair.chosen, pair.rejected[1], labels]
