"""Chat templates of Hugging Face tokenizer directories, rendered without transformers.

A template comes with a model, so it is code of a stranger: it runs in jinja2's immutable sandbox, in a
process of its own that is ended when it takes too long or too much memory (`data.chat_rendering`). One such
process serves all templates of a program, from its first one on; a conversation costs a tenth of a
millisecond more than it would here.

The functions that templates expect (`tojson`, `raise_exception`, `strftime_now`) are there; the
`{% generation %}` block, which only marks training masks, is not supported.
"""

from __future__ import annotations

import atexit
import functools
import json
import pathlib
import reprlib
from typing import TYPE_CHECKING, Any

from jaxrl.errors import UserError
from jaxrl.process_pool import ProcessPool, WorkerFault
from jaxrl.user_code import load_function

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# For tokenizers that are trained here: "user: ...", a line each, and end-of-sequence after an answer.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    # The newline is written as a value, since one that follows a block is no part of the text.
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

RESERVED_VARIABLES = frozenset(
    {"messages", "add_generation_prompt", "raise_exception", "strftime_now", "self"}
)
"""Variables of a template that are set here, or by jinja2, and by nobody else."""

# What compiling or rendering once may take. A long conversation takes milliseconds, and a few megabytes.
_CPU_SECONDS = 2.0
_MEMORY_BYTES = 1 << 30
# Rendering takes no clock time beside its processor time, except on a machine that is busy.
_PATIENCE_S = 600.0
# By its file: by its module's name the process would import the package around it, and JAX, for a second.
_RENDER = f"{pathlib.Path(__file__).with_name('chat_rendering.py')}:render"
_load = functools.partial(load_function, what="chat template")


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
            _rendered(source, None)
        except UserError as fault:
            raise UserError(
                f"the chat template of {origin} does not compile ({fault}); put the template that "
                "was published with the model there"
            ) from fault

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The conversation as one text. May be called from any thread.

        Args:
          messages: `{"role": ..., "content": ...}`, oldest first; they, too, go through JSON.
          add_generation_prompt: end with the opening of the assistant's turn.
          **kwargs: further variables of the template, such as `enable_thinking`; none of
            `RESERVED_VARIABLES`.

        Raises:
          UserError: the template refuses the messages, or does not come to an end.
        """
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _rendered(self.source, variables)
        except UserError as fault:
            roles = [message.get("role") for message in messages]
            further = f" and variables {reprlib.repr(sorted(kwargs))}" if kwargs else ""
            raise UserError(
                f"the chat template of {self._origin} refuses messages with roles {roles}{further}: "
                f"{fault}; change the messages or set `chat` to False"
            ) from fault


def _rendered(source: str, variables: Mapping[str, Any] | None) -> str:
    """Renders a template; without variables it is only compiled.

    Raises:
      UserError: The template has failed. The message is a reason without a subject.
    """
    request = source, None if variables is None else json.dumps(variables)
    try:
        return _shared_pool().call(_RENDER, request)
    except WorkerFault as fault:
        raise UserError(f"it {fault.reason}") from fault


@functools.cache
def _shared_pool() -> ProcessPool:
    """The pool for all templates of this program."""
    pool = ProcessPool(
        [_RENDER],
        _load,
        what="chat template",
        patience_s=_PATIENCE_S,
        cpu_seconds=_CPU_SECONDS,
        memory_bytes=_MEMORY_BYTES,
    )
    atexit.register(pool.close)
    return pool
