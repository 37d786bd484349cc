"""What supervised learning imitates: answers to questions, and whole conversations.

    context    <user> 1 + 1? <assistant>          response   2 <end> <user> And 3 more? <assistant> 5 <end>
                                                  mask       1   1     0      0    0        0       1   1

What the assistant says is trained on, and that it ends there. Each part is tokenised by itself, as it is
when a model is asked and answers.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.data.json_rows import read_jsonl
from jaxrl.data.messages import (
    ASSISTANT,
    PLAIN_FORMAT,
    Context,
    PromptFormat,
    answered,
    context_of,
    messages_of,
    render_context,
)
from jaxrl.data.records import Record
from jaxrl.data.rows import text_of
from jaxrl.data.shuffling import ShuffledExamples, checksum, drop_overlong
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One answer to imitate.

    Attributes:
      context: the question before any template, or the conversation before the answer.
      response: the answer.
      source: name of the data set.
      all_turns: what the assistant says in the conversation is imitated too.
    """

    context: Context
    response: str
    source: str
    all_turns: bool = False


class MaskedExample(NamedTuple):
    """A demonstration in tokens.

    Attributes:
      prompt: int32, everything before the assistant's first word.
      response: int32, all the rest; it ends with end-of-sequence.
      mask: float32, as long as the response: 1 on what is trained on, 0 on what others say in between.
    """

    prompt: np.ndarray
    response: np.ndarray
    mask: np.ndarray


class DemonstrationStream(ShuffledExamples[MaskedExample]):
    """Endless batches of `MaskedExample`s, reshuffled each epoch.

    Args:
      demonstrations: what to imitate.
      tokenizer: of the model.
      examples_per_batch: length of each batch.
      seed: of the order, below 2**32.
      max_tokens: longest prompt and response together; longer examples are dropped.
      prompt_format: how a question becomes a prompt.
      formats: the same for questions of some data sets, by their names.

    Raises:
      UserError: an argument breaks its rule, no example is short enough, or all turns of a conversation are
        to be trained on and the chat template rewrites an earlier one.
    """

    def __init__(
        self,
        demonstrations: Sequence[Demonstration],
        tokenizer: Tokenizer,
        *,
        examples_per_batch: int,
        seed: int,
        max_tokens: int,
        prompt_format: PromptFormat = PLAIN_FORMAT,
        formats: Mapping[str, PromptFormat] | None = None,
    ):
        examples = encode_demonstrations(
            demonstrations,
            tokenizer,
            max_tokens=max_tokens,
            prompt_format=prompt_format,
            formats=formats or {},
        )
        super().__init__(
            examples,
            examples_per_batch=examples_per_batch,
            seed=seed,
            checksum=checksum(part for example in examples for part in example),
        )


def read_demonstrations(
    path: str | pathlib.Path,
    *,
    source: str,
    prompt_field: str = "prompt",
    response_field: str = "response",
    messages_field: str = "messages",
) -> tuple[Demonstration, ...]:
    """The rows of a JSONL file: conversations, or questions with answers, or some of each.

    Args:
      path: the file, UTF-8.
      source: name of the data set.
      prompt_field, response_field: fields with the question, or a list of messages, and with its answer,
        which alone is trained on.
      messages_field: field with a conversation that ends with the assistant, all of whose turns are trained
        on; where a row has it, the others are not read.

    Raises:
      UserError: the file is missing or empty, or a row is broken ("file:line: ...").
    """

    def parse(row: dict[str, Any]) -> Demonstration:
        if messages_field in row:
            what = f"field {messages_field!r}"
            context, response = answered(messages_of(row[messages_field], what), what)
            return Demonstration(context, response, source, all_turns=True)
        return Demonstration(context_of(row, prompt_field), text_of(row, response_field), source)

    wanted = f'{{"{prompt_field}": ..., "{response_field}": ...}} or {{"{messages_field}": [...]}}'
    return tuple(read_jsonl(path, parse, wanted=wanted))


def texts_of(demonstrations: Sequence[Demonstration]) -> list[str]:
    """Everything that is said, for a tokenizer to be trained on."""
    texts = []
    for demonstration in demonstrations:
        context = demonstration.context
        said = [context] if isinstance(context, str) else [m["content"] for m in context]
        texts += [*said, demonstration.response]
    return texts


def solutions_of(records: Sequence[Record]) -> tuple[Demonstration, ...]:
    """The worked solutions of problems; UserError if one has none."""
    return tuple(
        Demonstration(record.prompt, _solution(row, record), record.source)
        for row, record in enumerate(records)
    )


def encode_demonstrations(
    demonstrations: Sequence[Demonstration],
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    prompt_format: PromptFormat,
    formats: Mapping[str, PromptFormat],
) -> list[MaskedExample]:
    """The demonstrations in tokens, in their order, without those that are too long.

    Args and errors as for `DemonstrationStream`.
    """
    if not len(demonstrations):
        raise UserError("there are no prompts; give a data set with at least one row")
    parts = [
        _parts(row, demonstration, tokenizer, formats.get(demonstration.source, prompt_format))
        for row, demonstration in enumerate(demonstrations)
    ]
    tokens = iter(tokenizer.encode_batch([text for row in parts for text in row]))
    examples = [_example([next(tokens) for _ in row], tokenizer) for row in parts]
    lengths = np.array([len(e.prompt) + len(e.response) for e in examples])
    kept = drop_overlong(lengths, max_tokens, what="examples", setting="max_tokens")
    return [examples[row] for row in kept]


def _parts(
    row: int, demonstration: Demonstration, tokenizer: Tokenizer, prompt_format: PromptFormat
) -> list[str]:
    """The text in parts, by turns what stands before an answer and the answer."""
    context = demonstration.context
    steps = [(context, demonstration.response)]
    if demonstration.all_turns and not isinstance(context, str):
        said = [i for i, message in enumerate(context) if message["role"] == ASSISTANT]
        steps = [(context[:i], context[i]["content"]) for i in said] + steps
        # What it says is given whole, in every turn.
        prompt_format = dataclasses.replace(prompt_format, answer_prefix="")
    parts: list[str] = []
    for before, answer in steps:
        text = render_context(before, tokenizer, prompt_format)
        so_far = "".join(parts)
        if not text.startswith(so_far):
            raise UserError(
                f"row {row} of {demonstration.source} cannot be trained on as one sequence: the chat "
                "template writes an earlier answer of the conversation otherwise than it was "
                "given; make it a row for each answer, with the messages before it as prompt and "
                "the answer as response"
            )
        parts += [text[len(so_far) :], answer]
    return parts


def _example(parts: Sequence[np.ndarray], tokenizer: Tokenizer) -> MaskedExample:
    """Tokens of the parts that `_parts` made, the last one ended."""
    prompt, *rest = parts
    masks = []
    for i, tokens in enumerate(rest):
        mask = np.full(len(tokens), i % 2 == 0, np.float32)
        # What follows an answer begins with its end, if the template marks that.
        mask[:1] += (i % 2 == 1) & np.isin(tokens[:1], tokenizer.stop_ids)
        masks.append(mask)
    end = np.array([tokenizer.eos_id], np.int32)
    return MaskedExample(
        prompt, np.concatenate([*rest, end]), np.concatenate([*masks, np.ones(1, np.float32)])
    )


def _solution(row: int, record: Record) -> str:
    if record.solution is None:
        raise UserError(
            f"row {row} of {record.source} has no solution to learn from; name the field that "
            "holds it (solution_field), or use a task that has solutions, such as chain_sum"
        )
    return record.solution
