"""Renders chat templates of Hugging Face tokenizer directories, without transformers.

A template comes with a model, so it is untrusted code. It runs in jinja2's immutable sandbox, as in
Transformers: it reaches nothing outside its variables. Nothing limits its time or memory.

Their environment is that of Transformers: the filter `tojson` with its options, `raise_exception`,
`strftime_now`, `break` and `continue`, and the block `{% generation %}`, whose content is rendered. It marks
training masks, which are not made of it here.
"""

from __future__ import annotations

import datetime
import functools
import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

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
    """The chat template of a model, or its templates by name: "tool_use" renders chats with tools.

    A template is compiled when it first renders, so a broken one matters only to who uses it.

    Args:
      sources: Text of the template, or texts by name.
      origin: File of the template, for messages.
      special_tokens: Variables for special tokens, such as {"eos_token": "<|im_end|>"}.
      fault: Why the texts cannot be read, raised by `render`; "" if they can.

    Attributes:
      sources: Texts by name; a single one is called "default".
    """

    def __init__(
        self,
        sources: str | Mapping[str, str],
        *,
        origin: str,
        special_tokens: Mapping[str, str],
        fault: str = "",
    ):
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self._origin = origin
        self._special_tokens = dict(special_tokens)
        self._fault = fault

    def source(self, *, tools: bool = False) -> str:
        """The text of the template that renders chats with or without tools; "" if there is none."""
        named = self.sources.get("tool_use") if tools else None
        return self.sources.get("default", "") if named is None else named

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Renders a conversation as one text. Safe to call from any thread.

        Args:
          messages: `{"role": ..., "content": ...}`, oldest first; values of JSON's types. Fields without a
            value are left out, and reasoning has all names that templates read it by.
          add_generation_prompt: Whether the text ends with the opening of the assistant's turn.
          **kwargs: Further variables of the template, such as `enable_thinking`; none of
            `RESERVED_VARIABLES`.

        Raises:
          UserError: The template does not compile, or refuses the messages.
        """
        variables = {
            # Templates ask whether they are none, and not whether they are there.
            **{"tools": None, "documents": None},
            **self._special_tokens,
            **kwargs,
            # After `kwargs`: no variable of a caller takes their place.
            "messages": [_template_message(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._template(with_tools=variables["tools"] is not None)
        try:
            return template.render(variables)
        # Untrusted code may raise anything: it divides by zero, adds texts to numbers, recurses.
        except Exception as error:
            roles = [message.get("role") for message in messages]
            further = f" and variables {reprlib.repr(sorted(kwargs))}" if kwargs else ""
            raise UserError(
                f"the chat template of {self._origin} refuses messages with roles {roles}{further}: "
                f"{_error_text(error)}; change the messages or set `chat` to False"
            ) from error

    def _template(self, *, with_tools: bool) -> jinja2.Template:
        if self._fault:
            raise UserError(self._fault)
        source = self.source(tools=with_tools)
        if not source and "default" not in self.sources:
            raise UserError(
                f"{self._origin} has chat templates with the names {sorted(self.sources)} and none is called "
                "default; name the one to use: tokenizer.chat_template"
            )
        try:
            return _compiled(source)
        except Exception as error:  # jinja2 and Python's compiler raise many kinds
            raise UserError(
                f"the chat template of {self._origin} does not compile ({_error_text(error)}); put the "
                "template that was published with the model there"
            ) from error


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as Transformers gives it to templates: without nulls, reasoning under each of its names."""
    given = {name: value for name, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((given[name] for name in names if name in given), None)
    if reasoning is None:
        return given
    # gpt-oss reads "thinking".
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}`, around what the assistant says: its content."""

    tags = {"generation"}  # noqa: RUF012 (its base class has it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope, because what the block sets is not seen after it in Transformers either.
        return jinja2.nodes.Scope(body, lineno=line)


# A template is rendered for every prompt, and compiled once.
@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    # Published templates expect these two settings and the extension; with jinja's defaults they render
    # with stray newlines.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    # A template with a date renders other prompts tomorrow: so do those of Transformers.
    environment.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which would change what the model reads.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _error_text(error: Exception) -> str:
    """The message on one line; the name of its type comes first if jinja2 did not raise it."""
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return (kind + " ".join(str(error).split()))[:500]
