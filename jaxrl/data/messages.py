"""Questions and conversations: checks the values of a row, and renders them as the text of a prompt.

    "What is 1 + 1?"                              a template; the chat template, by setting
    [{"role": "user", "content": "What is ..."}]  always the tokenizer's chat template

Not supported: tool calls and pictures. A message is a role and a text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxrl.data.rows import BadRow, Row, checked_text, field_of, shown
from jaxrl.errors import UserError

if TYPE_CHECKING:
    from jaxrl.data.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, str]
"""{"role": ..., "content": ...}"""

Context: TypeAlias = str | tuple[Message, ...]
"""The input to an answer: a question, or the conversation so far."""

ASSISTANT = "assistant"
USER = "user"
SYSTEM = "system"


def prompt_of(row: Row) -> Context:
    """Returns the field "prompt", a question or a list of messages; BadRow if it is neither."""
    return as_context(field_of(row, "prompt"), "field 'prompt'")


def as_context(value: Any, what: str) -> Context:
    """Checks a question or a list of messages; BadRow, with the name `what`, if the value is neither."""
    return messages_of(value, what) if isinstance(value, list) else checked_text(value, what)


def messages_of(value: Any, what: str) -> tuple[Message, ...]:
    """Checks a list of messages; BadRow, with the name `what`, if the value is anything else."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"{what} is {shown(value)}; it must be a list of messages and not empty")
    messages = []
    for i, item in enumerate(value, start=1):
        of_one = f"message {i} of {what}"
        if not isinstance(item, dict):
            raise BadRow(
                f"{of_one} is {shown(item)}; it must be an object with a role and a content"
            )
        # Many files write null for a key that a message does not have.
        keys = [key for key, x in item.items() if key not in ("role", "content") and x is not None]
        if keys:
            raise BadRow(
                f"{of_one} has {', '.join(map(repr, keys))}; only a role and a content are read, so "
                "take the rest out, or the line if it calls tools"
            )
        messages.append(
            {k: checked_text(item.get(k), f"{k!r} of {of_one}") for k in ("role", "content")}
        )
    return tuple(messages)


def split_last_answer(messages: tuple[Message, ...], what: str) -> tuple[tuple[Message, ...], str]:
    """Splits a conversation into the messages before the last one, and the text of the last one.

    Raises:
      BadRow: The last message is not the assistant's.
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
    """The format of a prompt. For example:

        template        "Solve it.\n{prompt}"        around the question
        system_prompt   "You are terse."             a system message; without chat, the first line
        chat            True                         the tokenizer's chat template renders the whole

    Attributes:
      template: Text around a question, with "{prompt}" in its place. Conversations have no template.
      chat: Whether the tokenizer's chat template renders a question, as one user message. It always renders
        conversations.
      system_prompt: System message of a conversation that does not begin with one; "" for none.
      chat_options: Further variables of the chat template, such as enable_thinking.
    """

    template: str = "{prompt}"
    chat: bool = False
    system_prompt: str = ""
    chat_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_template(self.template)

    def fill(self, question: str) -> str:
        # Not str.format, because templates may have other braces, such as \\boxed{}.
        return self.template.replace("{prompt}", question)


def render_context(context: Context, tokenizer: Tokenizer, prompt_format: PromptFormat) -> str:
    """Renders a question or conversation as the text of the prompt."""
    system = prompt_format.system_prompt
    if isinstance(context, str):
        text = prompt_format.fill(context)
        if not prompt_format.chat:
            return (f"{system}\n" if system else "") + text
        context = ({"role": USER, "content": text},)
    # A conversation keeps a system message of its own.
    if system and context[0]["role"] != SYSTEM:
        context = ({"role": SYSTEM, "content": system}, *context)
    return tokenizer.render_chat(context, **prompt_format.chat_options)


def check_template(template: str) -> None:
    """Raises UserError for a template without "{prompt}"."""
    if "{prompt}" not in template:
        raise UserError(
            f"template {shown(template)} has no {{prompt}}, so every prompt would be alike"
        )


def text_of_context(context: Context) -> str:
    """The text of a question, or of all messages of a conversation."""
    return context if isinstance(context, str) else "\n".join(m["content"] for m in context)


PLAIN_FORMAT = PromptFormat()
"""The question alone."""
