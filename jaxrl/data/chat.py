"""Chat templates of Hugging Face tokenizer directories, rendered without transformers.

A template comes with a model, so it is code of a stranger: it runs in jinja2's immutable sandbox, in a
process of its own that is ended when it takes too long or too much memory (`data.chat_worker`). One such
process serves all templates of a program, from its first one on; a conversation costs a tenth of a
millisecond more than it would here.

The functions that templates expect (`tojson`, `raise_exception`, `strftime_now`) are there; the
`{% generation %}` block, which only marks training masks, is not supported.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import pathlib
import reprlib
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from jaxrl.errors import UserError

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
_WORKER = pathlib.Path(__file__).with_name("chat_worker.py")


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
            _shared_worker().run(source, None)
        except _TemplateFault as fault:
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
            return _shared_worker().run(self.source, variables)
        except _TemplateFault as fault:
            roles = [message.get("role") for message in messages]
            further = f" and variables {reprlib.repr(sorted(kwargs))}" if kwargs else ""
            raise UserError(
                f"the chat template of {self._origin} refuses messages with roles {roles}{further}: "
                f"{fault}; change the messages or set `chat` to False"
            ) from fault


class _TemplateFault(Exception):
    """What is wrong with a template, or with what it was given."""


class _Worker:
    """The process that renders; a new one takes its place when a template has brought it down."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._known: set[str] = set()
        atexit.register(self.close)

    def run(self, source: str, variables: dict[str, Any] | None) -> str:
        """Renders a template; without variables it is compiled.

        Raises:
          _TemplateFault: it cannot be.
        """
        name = hashlib.blake2b(source.encode("utf-8", "surrogatepass")).hexdigest()
        with self._lock:
            process = self._running()
            request = {
                "template": name,
                "source": None if name in self._known else source,
                "variables": variables,
            }
            reply = self._exchange(process, json.dumps(request).encode() + b"\n")
            if reply is None:
                raise _TemplateFault(self._why_it_ended())
            if "error" in reply:
                raise _TemplateFault(reply["error"])
            self._known.add(name)
            return reply["text"]

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes) -> dict[str, str] | None:
        """The worker's reply; None if it has ended."""
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        line, complete = b"", False
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
            complete = True
        except BrokenPipeError:
            complete = True
        finally:
            # Ctrl-C comes between a question and its answer, which nobody must take for that to another.
            if not complete:
                self.close()
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            # Waits, and closes the pipes.
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._known = set()
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), str(_CPU_SECONDS), str(_MEMORY_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Ctrl-C is for the program, which ends this process when it has no more need of it.
                start_new_session=True,
            )
        return self._process

    def _why_it_ended(self) -> str:
        assert self._process is not None, "there is a process as long as one asks"
        status = self._process.wait()
        self.close()
        if status == -signal.SIGPROF:
            return f"it took more than {_CPU_SECONDS:g} s and was ended"
        return f"the process that renders it has ended with status {status}"


@functools.cache
def _shared_worker() -> _Worker:
    """The one of this program."""
    return _Worker()
