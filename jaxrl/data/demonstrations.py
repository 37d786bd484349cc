"""Supervised examples: answers to questions, and whole conversations.

    context    <user> 1 + 1? <assistant>          response   2 <end> <user> And 3 more? <assistant> 5 <end>
                                                  mask       1   1     0      0    0        0       1   1

The loss covers the assistant's turns and the token that ends each of them. Each part of a conversation is
tokenised separately, as in generation, where the model continues a tokenised prompt. Turns of text are learnt
as they are given. In a conversation with reasoning, calls of tools or tools they are learnt as the chat
template writes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.data.messages import (
    ASSISTANT,
    PLAIN_FORMAT,
    Context,
    PromptFormat,
    is_text,
    messages_of,
    prompt_of,
    render_context,
    split_last_answer,
    trained_text,
)
from jaxrl.data.row_layouts import Record
from jaxrl.data.rows import BadRow, Row, checked_text, field_of, parse_rows, shown
from jaxrl.data.stream import ShuffledExamples, checksum, drop_overlong
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One answer to imitate.

    Attributes:
      context: The question without a template, or the conversation before the answer.
      response: The answer; None if the context ends with it, and the chat template writes it.
      source: Name of the data set.
      all_turns: Whether the assistant's earlier turns are imitated too.
      tools: The tools of the conversation.
    """

    context: Context
    response: str | None
    source: str
    all_turns: bool = False
    tools: Sequence[Mapping[str, Any]] = ()


class MaskedExample(NamedTuple):
    """A demonstration in tokens.

    Attributes:
      prompt: int32, the tokens before the first imitated turn.
      response: int32, all further tokens; the last one is end-of-sequence.
      mask: float32, as long as the response: 1 for trained tokens, 0 for the turns of others.
    """

    prompt: np.ndarray
    response: np.ndarray
    mask: np.ndarray


class DemonstrationStream(ShuffledExamples[MaskedExample]):
    """Endless batches of `MaskedExample`s, reshuffled each epoch.

    Args:
      demonstrations: Answers to imitate.
      tokenizer: The model's tokenizer.
      examples_per_batch: Length of each batch.
      seed: Seed of the order, below 2**32.
      max_tokens: Largest number of tokens of prompt and response together; longer examples are dropped.
      prompt_format: Template and chat settings for questions.
      formats: The same for data sets of their own format, by their names.

    Raises:
      UserError: No example is short enough, or the chat template rewrites an
        earlier turn that is to be trained on.
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
        formats = formats or {}
        parts = [
            _parts(row, demonstration, tokenizer, formats.get(demonstration.source, prompt_format))
            for row, demonstration in enumerate(demonstrations)
        ]
        # Part by part, as in generation: a token across a border is one that the model could never sample.
        tokens = iter(tokenizer.encode_batch([text for row in parts for text in row]))
        end, examples = np.array([tokenizer.eos_id], np.int32), []
        for prompt, *rest in ([next(tokens) for _ in row] for row in parts):
            masks = []
            for i, turn in enumerate(rest):
                # Answers alternate with the text between them.
                mask = np.full(len(turn), i % 2 == 0, np.float32)
                # The template may write the token that ends an answer; it is then the first token after it.
                mask[:1] += (i % 2 == 1) & np.isin(turn[:1], tokenizer.stop_ids)
                masks.append(mask)
            if len(rest) % 2:
                # Only after the last answer: the template itself writes what ends the earlier ones.
                rest, masks = [*rest, end], [*masks, np.ones(1, np.float32)]
            examples.append(MaskedExample(prompt, np.concatenate(rest), np.concatenate(masks)))
        lengths = np.array([len(e.prompt) + len(e.response) for e in examples])
        kept = drop_overlong(lengths, max_tokens, what="examples", setting="max_tokens")
        examples = [examples[row] for row in kept]
        super().__init__(
            examples,
            examples_per_batch=examples_per_batch,
            seed=seed,
            checksum=checksum(part for example in examples for part in example),
        )


def read_demonstrations(path: str | pathlib.Path, *, source: str) -> tuple[Demonstration, ...]:
    """Reads a file of questions with answers, of conversations, or of both.

    Args:
      path: The file, in any format of `data.rows`.
      source: Name of the data set.

    Raises:
      UserError: The file is missing or empty, or a row is broken ("file:line: ...").
    """

    def parse(row: Row) -> Demonstration:
        tools = row.get("tools") or ()
        if isinstance(tools, str):
            # Some data sets have the text of a list there.
            with contextlib.suppress(ValueError):
                tools = json.loads(tools) or ()
        is_list = isinstance(tools, Sequence) and not isinstance(tools, str)
        if not is_list or not all(isinstance(tool, Mapping) for tool in tools):
            raise BadRow(f"field 'tools' is {shown(tools)}; it must be a list of tools")
        if "messages" in row:
            what = "field 'messages'"
            messages = messages_of(row["messages"], what)
            context, last = split_last_answer(messages, what)
            if tools or not all(map(is_text, messages)):
                return Demonstration(messages, None, source, all_turns=True, tools=tools)
            for i, message in enumerate(messages, start=1):
                if message["role"] == ASSISTANT:
                    trained_text(message, f"message {i} of {what}")
            return Demonstration(context, last["content"], source, all_turns=True)
        response = checked_text(field_of(row, "response"), "field 'response'")
        return Demonstration(prompt_of(row), response, source, tools=tools)

    example = '{"prompt": ..., "response": ...} or {"messages": [...]}'
    return parse_rows(path, parse, example=example)


def solutions_of(records: Sequence[Record]) -> tuple[Demonstration, ...]:
    """The worked solutions of problems as demonstrations; UserError if a problem has none."""
    demonstrations = []
    for row, record in enumerate(records):
        if record.solution is None:
            raise UserError(
                f"row {row} of {record.source} has no solution to learn from; name the field that holds it "
                "(fields.solution), or leave SFT out: sft.num_steps=0 and an empty sft.run"
            )
        demonstrations.append(Demonstration(record.prompt, record.solution, record.source))
    return tuple(demonstrations)


def _parts(
    row: int, demonstration: Demonstration, tokenizer: Tokenizer, prompt_format: PromptFormat
) -> list[str]:
    """The text in parts: the text before an answer, the answer, the text before the next one, and so on."""
    context, tools = demonstration.context, demonstration.tools
    of_tools: dict[str, Any] = {"tools": list(tools)} if tools else {}
    render = functools.partial(
        render_context, tokenizer=tokenizer, prompt_format=prompt_format, **of_tools
    )
    if demonstration.response is None:
        return _written(row, demonstration, tokenizer, render)
    steps = [(context, demonstration.response)]
    if demonstration.all_turns and not isinstance(context, str):
        said = [i for i, message in enumerate(context) if message["role"] == ASSISTANT]
        steps = [(context[:i], context[i]["content"]) for i in said] + steps
    parts: list[str] = []
    for before, answer in steps:
        text = render(before)
        so_far = "".join(parts)
        if not text.startswith(so_far):
            raise _rewritten(row, demonstration)
        parts += [text[len(so_far) :], answer]
    return parts


def _written(
    row: int, demonstration: Demonstration, tokenizer: Tokenizer, render: Callable[..., str]
) -> list[str]:
    """The same parts with all answers as the chat template writes them, and the token that ends the last."""
    messages = demonstration.context
    assert not isinstance(messages, str), "a template writes messages"
    said = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    texts = [render(messages[:i]) for i in said]
    texts.append(render(messages, add_generation_prompt=False))
    names = [tokenizer.backend.id_to_token(token) for token in tokenizer.stop_ids]
    end = re.compile("|".join(map(re.escape, filter(None, names))))
    parts, found = texts[:1], None
    for i, before, after in zip(said, texts[:-1], texts[1:], strict=True):
        if not after.startswith(before):
            raise _rewritten(row, demonstration)
        turn = after[len(before) :]
        found = end.search(turn)
        at = found.start() if found else len(turn)
        message = messages[i]
        given = [message["content"], message.get("reasoning_content", "")]
        given += [call["function"]["name"] for call in message.get("tool_calls", ())]
        if not all(text.strip() in turn[:at] for text in given):
            raise _rewritten(row, demonstration)
        parts += [turn[:at], turn[at:]]
    return [*parts[:-1], found[0]] if found else parts[:-1]


def _rewritten(row: int, demonstration: Demonstration) -> UserError:
    # Templates may drop the reasoning of earlier answers, or calls of tools.
    return UserError(
        f"row {row} of {demonstration.source} cannot be trained on as one sequence: the chat template "
        "writes an answer of the conversation otherwise than it was given; make it a row for each answer, "
        "with the messages before it as prompt and the answer as response"
    )
