"""Questions and conversations as the text of a prompt, by chat templates of Hugging Face directories.

    "What is 1 + 1?"                              a template; the chat template, by setting
    [{"role": "user", "content": "What is ..."}]  always the tokenizer's chat template

A template comes with a model, so it is untrusted code. It runs in jinja2's immutable sandbox, as in
Transformers: it reaches nothing outside its variables. Nothing limits its time or memory.

Templates can use `tojson`, `raise_exception` and `strftime_now`. The block `{% generation %}`, which only
marks training masks, is not supported. Data has no tool calls and pictures: a message is a role and a text.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jinja2
import jinja2.sandbox

from jaxrl.data.rows import BadRow, Row, checked_text, field_of, shown
from jaxrl.errors import UserError

# For tokenizers trained by jaxrl: a line "role: text" a message, and end-of-sequence after an answer.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    # The newline is a value, because jinja removes a newline that follows a block.
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

RESERVED_VARIABLES = frozenset(
    {"messages", "add_generation_prompt", "raise_exception", "strftime_now", "self"}
)
"""Variables of a template that jaxrl or jinja2 sets, so callers cannot."""


class ChatTemplate:
    """A compiled chat template.

    Args:
      source: Text of the template.
      origin: File of the template, for messages.
      special_tokens: Variables for special tokens, such as {"eos_token": "<|im_end|>"}.

    Raises:
      UserError: The template does not compile.
    """

    def __init__(self, source: str, *, origin: str, special_tokens: Mapping[str, str]):
        self.source = source
        self._origin = origin
        self._special_tokens = dict(special_tokens)
        try:
            _compiled(source)
        except Exception as error:  # jinja2 and Python's compiler raise many kinds
            raise UserError(
                f"the chat template of {origin} does not compile ({_fault(error)}); put the template that "
                "was published with the model there"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Renders a conversation as one text. Safe to call from any thread.

        Args:
          messages: `{"role": ..., "content": ...}`, oldest first; values of JSON's types.
          add_generation_prompt: Whether the text ends with the opening of the assistant's turn.
          **kwargs: Further variables of the template, such as `enable_thinking`; none of
            `RESERVED_VARIABLES`.

        Raises:
          UserError: The template refuses the messages.
        """
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _compiled(self.source).render(variables)
        # Untrusted code may raise anything: it divides by zero, adds texts to numbers, recurses.
        except Exception as error:
            roles = [message.get("role") for message in messages]
            further = f" and variables {reprlib.repr(sorted(kwargs))}" if kwargs else ""
            raise UserError(
                f"the chat template of {self._origin} refuses messages with roles {roles}{further}: "
                f"{_fault(error)}; change the messages or set `chat` to False"
            ) from error


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    # Published templates expect these two settings and the extension; with jinja's defaults they render
    # with stray newlines.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # jinja's own filter escapes for HTML, which would change what the model reads.
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _fault(error: Exception) -> str:
    """The message on one line; the name of its type comes first if jinja2 did not raise it."""
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return (kind + " ".join(str(error).split()))[:500]


if TYPE_CHECKING:
    from jaxrl.data.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, str]
"""{"role": ..., "content": ...}"""

Context: TypeAlias = str | tuple[Message, ...]
"""The input to an answer: a question, or the conversation so far."""

ASSISTANT = "assistant"
USER = "user"
SYSTEM = "system"


def context_of(row: Row, name: str) -> Context:
    """Returns a field with a question or a list of messages; BadRow if it is neither."""
    return as_context(field_of(row, name), f"field {name!r}")


def as_context(value: Any, what: str) -> Context:
    """Checks a question or a list of messages; BadRow if the value is neither.

    Args:
      value: A value of a row.
      what: Its name, for messages.
    """
    return messages_of(value, what) if isinstance(value, list) else checked_text(value, what)


def messages_of(value: Any, what: str) -> tuple[Message, ...]:
    """Checks a list of messages; BadRow if the value is anything else.

    Args:
      value: A value of a row.
      what: Its name, for messages.
    """
    if not isinstance(value, list) or not value:
        raise BadRow(f"{what} is {shown(value)}; it must be a list of messages and not empty")
    return tuple(_message(item, f"message {i} of {what}") for i, item in enumerate(value, start=1))


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
        """Puts a question into the template."""
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


def _message(item: Any, what: str) -> Message:
    if not isinstance(item, dict):
        raise BadRow(f"{what} is {shown(item)}; it must be an object with a role and a content")
    # Many files write null for a key that a message does not have.
    further = [key for key, x in item.items() if key not in ("role", "content") and x is not None]
    if further:
        raise BadRow(
            f"{what} has {', '.join(map(repr, further))}; only a role and a content are read, so "
            "take the rest out, or the line if it calls tools"
        )
    return {key: checked_text(item.get(key), f"{key!r} of {what}") for key in ("role", "content")}
