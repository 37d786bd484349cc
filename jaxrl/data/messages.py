"""Prompts as text or as chat messages: from the row of a file to the text that a model gets.

    "What is 1 + 1?"                              through a template, and the chat template if asked to
    [{"role": "user", "content": "What is ..."}]  through the tokenizer's chat template, always

Not covered: tool calls and pictures in messages; a message is a role and a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxrl.data.jsonl import BadRow, checked_text, field_of, shown
from jaxrl.errors import UserError

if TYPE_CHECKING:
    from jaxrl.data.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, str]
"""{"role": ..., "content": ...}"""

Context: TypeAlias = str | tuple[Message, ...]
"""What an answer answers: a question, or the conversation so far."""

ASSISTANT = "assistant"


def context_of(row: dict[str, Any], name: str) -> Context:
    """A field that holds a question, or a list of messages; BadRow if it is neither."""
    value = field_of(row, name)
    if isinstance(value, list):
        return messages_of(value, f"field {name!r}")
    return checked_text(value, f"field {name!r}")


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


def render_prompt(prompt: str, tokenizer: Tokenizer, *, template: str, chat: bool) -> str:
    """The text that the model gets for a question.

    Args:
      prompt: the question.
      tokenizer: of the model.
      template: text around it, with "{prompt}" where it goes.
      chat: send the text through the tokenizer's chat template as one user message.
    """
    check_template(template)
    # Not str.format: templates write \boxed{} and other braces of their own.
    text = template.replace("{prompt}", prompt)
    return tokenizer.render_chat([{"role": "user", "content": text}]) if chat else text


def check_template(template: str) -> None:
    """Raises UserError for a template without a place for the question."""
    if "{prompt}" not in template:
        raise UserError(f"template {template!r} has no {{prompt}}, so every prompt would be alike")


def render_context(context: Context, tokenizer: Tokenizer, *, template: str, chat: bool) -> str:
    """The text that the model gets before an answer; `template` and `chat` are for questions only."""
    if isinstance(context, str):
        return render_prompt(context, tokenizer, template=template, chat=chat)
    return tokenizer.render_chat(context)


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
