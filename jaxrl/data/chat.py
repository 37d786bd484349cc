"""Renders chat templates of Hugging Face tokenizer directories, without transformers.

A template comes with a model, so it is untrusted code. It runs in jinja2's immutable sandbox, as in
Transformers: it reaches nothing outside its variables. Nothing limits its time or memory.

Templates can use `tojson`, `raise_exception` and `strftime_now`. The block `{% generation %}`, which only
marks training masks, is not supported.
"""

from __future__ import annotations

import datetime
import functools
import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
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
            # After `kwargs`: no variable of a caller takes their place.
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


# A template is rendered for every prompt, and compiled once.
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
    # A template with a date renders other prompts tomorrow: so do those of Transformers.
    environment.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _fault(error: Exception) -> str:
    """The message on one line; the name of its type comes first if jinja2 did not raise it."""
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return (kind + " ".join(str(error).split()))[:500]
