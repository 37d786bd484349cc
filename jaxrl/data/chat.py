"""Renders chat templates of Hugging Face tokenizer directories, without transformers.

A template comes with a model, so it is untrusted code. It runs in jinja2's immutable sandbox, in a process of
its own with limits for time and memory (`data.chat_rendering`). The first template starts this process, which
then serves all templates of the program. This adds a tenth of a millisecond per conversation.

Templates can use `tojson`, `raise_exception` and `strftime_now`. The block `{% generation %}`, which only
marks training masks, is not supported.
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

# Limits for compiling or rendering once. A long conversation takes milliseconds and a few megabytes.
_CPU_SECONDS = 2.0
_MEMORY_BYTES = 1 << 30
# Limit for the clock time. It exceeds the processor time only on a busy machine.
_PATIENCE_S = 600.0
# The path of the file rather than the name of the module, which would import the package and JAX: a second.
_RENDER = f"{pathlib.Path(__file__).with_name('chat_rendering.py')}:render"
_load = functools.partial(load_function, what="chat template")


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
        """Renders a conversation as one text. Safe to call from any thread.

        Args:
          messages: `{"role": ..., "content": ...}`, oldest first; values of JSON's types.
          add_generation_prompt: Whether the text ends with the opening of the assistant's turn.
          **kwargs: Further variables of the template, such as `enable_thinking`; none of
            `RESERVED_VARIABLES`.

        Raises:
          UserError: The template refuses the messages, or exceeds a limit.
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
    """Renders a template, or only compiles it if `variables` is None.

    Raises:
      UserError: The template failed. The message is a predicate whose subject is the template.
    """
    request = source, None if variables is None else json.dumps(variables)
    try:
        return _shared_pool().call(_RENDER, request)
    except WorkerFault as fault:
        raise UserError(f"it {fault.reason}") from fault


@functools.cache
def _shared_pool() -> ProcessPool:
    """The process pool for all templates of this program."""
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
