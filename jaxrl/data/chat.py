"""Chat templates of Hugging Face tokenizer directories, rendered without transformers.

A template comes with a model, so it is code of a stranger: it runs in jinja2's immutable sandbox.
The functions that templates expect (`tojson`, `raise_exception`, `strftime_now`) are here; the
`{% generation %}` block, which only marks training masks, is not supported.
"""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.sandbox

from jaxrl.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# For tokenizers that are trained here: "user: ...", a line each, and end-of-sequence after an answer.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class ChatTemplate:
    """A compiled chat template.

    Args:
      source: the template's text.
      origin: the file it came from, for messages.
      special_tokens: what the template may name, such as {"eos_token": "<|im_end|>"}.

    Raises:
      UserError: the template does not compile.
    """

    def __init__(self, source: str, *, origin: str, special_tokens: Mapping[str, str]):
        self.source = source
        self._origin = origin
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        # The last two are Python's, which jinja2 compiles to: expressions nested too deeply for it.
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise UserError(
                f"the chat template of {origin} does not compile ({error}); put the template that "
                "was published with the model there"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The conversation as one text.

        Args:
          messages: `{"role": ..., "content": ...}`, oldest first.
          add_generation_prompt: end with the opening of the assistant's turn.
          **kwargs: further variables of the template, such as `enable_thinking`.

        Raises:
          UserError: the template refuses the messages.
        """
        variables = {**self._special_tokens, **kwargs}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except jinja2.TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise UserError(
                f"the chat template of {self._origin} refuses messages with roles {roles}: "
                f"{error}; change the messages or set `chat` to False"
            ) from error


def _environment() -> jinja2.Environment:
    # These two settings and the extension are what published templates are written for; with
    # jinja's defaults they render with stray newlines.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja's own filter escapes for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(time_format: str) -> str:
    return datetime.datetime.now().strftime(time_format)
