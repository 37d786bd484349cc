"""Prompts as text or as chat messages: from the row of a file to the text that a model gets.

    "What is 1 + 1?"                              through a template, and the chat template if asked to
    [{"role": "user", "content": "What is ..."}]  through the tokenizer's chat template, always

Not covered: tool calls and pictures in messages; a message is a role and a text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxrl.data.rows import BadRow, checked_text, field_of, shown
from jaxrl.errors import UserError

if TYPE_CHECKING:
    from jaxrl.data.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, str]
"""{"role": ..., "content": ...}"""

Context: TypeAlias = str | tuple[Message, ...]
"""What an answer answers: a question, or the conversation so far."""

ASSISTANT = "assistant"
USER = "user"
SYSTEM = "system"


def context_of(row: dict[str, Any], name: str) -> Context:
    """A field that holds a question, or a list of messages; BadRow if it is neither."""
    return as_context(field_of(row, name), f"field {name!r}")


def as_context(value: Any, what: str) -> Context:
    """A question or a list of messages, checked; BadRow if it is neither.

    Args:
      value: from a row.
      what: it is, for messages.
    """
    return messages_of(value, what) if isinstance(value, list) else checked_text(value, what)


def messages_of(value: Any, what: str) -> tuple[Message, ...]:
    """A list of messages, checked; BadRow if it is something else.

    Args:
      value: from a row.
      what: it is, for messages.
    """
    if not isinstance(value, list) or not value:
        raise BadRow(f"{what} is {shown(value)}; it must be a list of messages and not empty")
    return tuple(_message(item, f"message {i} of {what}") for i, item in enumerate(value, start=1))


def answered(messages: tuple[Message, ...], what: str) -> tuple[tuple[Message, ...], str]:
    """A conversation as what comes before its last message, and that message's text.

    Raises:
      BadRow: the last message is not the assistant's.
    """
    *before, last = messages
    if last["role"] != ASSISTANT:
        raise BadRow(
            f"the last message of {what} is by {last['role']!r}; it must be the {ASSISTANT}'s, "
            "which is what is trained on"
        )
    return tuple(before), last["content"]


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """How a question, or a conversation so far, becomes the text that a model goes on from.

        template        "Solve it.\n{prompt}"        around the question
        system_prompt   "You are terse."             before it: a system message or, without chat, a line
        chat            through the tokenizer's chat template
        answer_prefix   "Let me think. "             the answer's first words, already said

    Attributes:
      template: text around a question, with "{prompt}" where it goes; conversations are left as they are.
      chat: send a question through the tokenizer's chat template, as one user message. Conversations always
        go through it.
      system_prompt: what the conversation begins with, unless it begins with a system message of its own.
      chat_options: further variables of the chat template, such as enable_thinking.
      answer_prefix: text that the response starts after; it is part of the prompt.
    """

    template: str = "{prompt}"
    chat: bool = False
    system_prompt: str = ""
    chat_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    answer_prefix: str = ""

    def __post_init__(self):
        check_template(self.template)

    def around(self, question: str) -> str:
        """The question in its template."""
        # Not str.format: templates write \\boxed{} and other braces of their own.
        return self.template.replace("{prompt}", question)


def render_context(context: Context, tokenizer: Tokenizer, prompt_format: PromptFormat) -> str:
    """The text that the model gets before an answer."""
    system = prompt_format.system_prompt
    if isinstance(context, str):
        text = prompt_format.around(context)
        if not prompt_format.chat:
            return (f"{system}\n" if system else "") + text + prompt_format.answer_prefix
        context = ({"role": USER, "content": text},)
    if system and context[0]["role"] != SYSTEM:
        context = ({"role": SYSTEM, "content": system}, *context)
    return (
        tokenizer.render_chat(context, **prompt_format.chat_options) + prompt_format.answer_prefix
    )


def check_template(template: str) -> None:
    """Raises UserError for a template without a place for the question."""
    if "{prompt}" not in template:
        raise UserError(
            f"template {shown(template)} has no {{prompt}}, so every prompt would be alike"
        )


PLAIN_FORMAT = PromptFormat()
"""The question alone."""


def _message(item: Any, what: str) -> Message:
    if not isinstance(item, dict):
        raise BadRow(f"{what} is {shown(item)}; it must be an object with a role and a content")
    # A null is how many files say that a message has none.
    further = [key for key, x in item.items() if key not in ("role", "content") and x is not None]
    if further:
        raise BadRow(
            f"{what} has {', '.join(map(repr, further))}; only a role and a content are read, so "
            "take the rest out, or the line if it calls tools"
        )
    return {key: checked_text(item.get(key), f"{key!r} of {what}") for key in ("role", "content")}
