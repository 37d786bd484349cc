"""The tokens of new messages after a sampled turn, by a short rendering of the chat template.

    stored    <|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n  4<|im_end|>
    frame     <|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n MARK<|im_end|>\n<|im_start|>user\nWhy?..
    suffix                                                                       \n<|im_start|>user\nWhy?..

The stored tokens are never encoded again. The frame is two invented messages before the new ones, and the
suffix is what follows the mark in it. All new messages are rendered together: Qwen's template makes one turn
of two tool messages in a row. Between mark and messages stand the terminator, which the model samples
itself unless its turn is cut, and the separator, which it never samples.

A template may show earlier messages in another way once later ones follow. Loading finds out and says so.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxrl.data.chat import ChatTemplate
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl_serving.tool_calls import END_THINK, THINK

Messages = Sequence[Mapping[str, Any]]

_NONE: Mapping[str, Any] = MappingProxyType({})

_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}


class ChatRenderer:
    """Renders conversations for the model, whole or from a sampled turn on.

    Attributes:
      terminators: texts that end a turn of the assistant, by the token that the model samples for each. GLM's
        calls end otherwise than its texts do.
      rewrites: what the template changes in earlier messages, such as "drops earlier reasoning".
      shows_tools: whether the template has tools at all.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Examines the template of `tokenizer`.

        Raises:
          UserError: there is no template, or it does not show the assistant's messages as they are.
        """
        if tokenizer.chat_template is None:
            raise UserError(
                "this tokenizer has no chat template, and agents speak in messages; put the "
                "chat_template.jinja of the model's chat version into the tokenizer's directory"
            )
        self._template: ChatTemplate = tokenizer.chat_template
        self._tokenizer = tokenizer
        self.shows_tools = "tools" in self._template.source(tools=True)
        self.terminators: dict[int, str] = {}
        between = self._after_mark("mark", [_plain("mark"), _user("v")], {})
        if (ending := self._ending(between)) is not None:
            tail, first, name = ending
            # A token behind other text ends something else than the turn.
            if not tail.strip():
                self.terminators[first] = tail + name
        # The text between a call's argument and the terminator; None if calls without text are not shown.
        self._call_tail: str | None = None
        if self.shows_tools:
            # Some templates accept tool messages only after calls.
            answer = {"role": "tool", "content": "", "tool_call_id": _CALL_ID, "name": "f"}
            with contextlib.suppress(UserError):
                after = self._after_mark("mark", [_call("f", "mark"), answer], {"tools": [_TOOL]})
                if (ending := self._ending(after)) is not None:
                    self._call_tail, first, name = ending
                    self.terminators.setdefault(first, name)
        self.rewrites = tuple(self._find_rewrites())

    @property
    def note(self) -> str:
        """One line for the user if the template rewrites earlier messages; else ""."""
        if not self.rewrites:
            return ""
        return (
            f"the chat template {' and '.join(self.rewrites)} when later messages follow; a conversation "
            'keeps the sampled tokens (history "kept") or starts a branch there ("as_template")'
        )

    def whole(self, messages: Messages, variables: Mapping[str, Any] = _NONE) -> str:
        """The text of a whole conversation, up to the start of the assistant's turn."""
        return self._template.render(messages, **variables)

    def after(
        self,
        messages: Messages,
        variables: Mapping[str, Any] = _NONE,
        *,
        system: Messages = (),
        called: str = "f",
    ) -> str:
        """The text of all new messages after a sampled turn, from its terminator on.

        Args:
          messages: the new messages; none if the model is to speak again.
          variables: tools and further variables of the template.
          system: the system message of the conversation, if it has one. Some templates show it late.
          called: name of the tool that the turn has called. Some templates show it beside the result.
        """
        # A mark that the messages do not hold: else the text would be cut at the wrong place.
        said = repr((messages, system, variables, called))
        mark = next(m for i in itertools.count() if (m := f"turn{i}mark") not in said)
        of_tools = bool(messages) and messages[0]["role"] == "tool"
        if of_tools and self._call_tail is not None:
            text = self._after_mark(
                mark, [*system, _call(called, mark), *messages], variables, end=True
            )
            return text.removeprefix(self._call_tail)
        return self._after_mark(mark, [*system, _plain(mark), *messages], variables, end=True)

    def encode_after(self, text: str, tokens: np.ndarray) -> np.ndarray:
        """Int32 ids of a text from `after`, without the terminator if the sampled `tokens` end with it."""
        # Encoded with the terminator even if it is dropped: the first word after the beginning of a text
        # may have other tokens (SentencePiece).
        ids, last = self._tokenizer.encode(text), int(tokens[-1])
        # A turn that was cut, or ended by a stop string, has none.
        if last in self.terminators and text.startswith(self.terminators[last]):
            ids = ids[int(np.flatnonzero(ids == last)[0]) + 1 :]
        return ids

    def _ending(self, after: str) -> tuple[str, int, str] | None:
        """The first token in a text that ends turns: what precedes it, its id and name; None without any."""
        ids = self._tokenizer.stop_ids
        names = {i: name for i in ids if (name := self._tokenizer.backend.id_to_token(i))}
        places = {i: after.find(name) for i, name in names.items() if name in after}
        if not places:
            return None
        first = min(places, key=lambda i: places[i])
        return after[: places[first]], first, names[first]

    def _after_mark(
        self, mark: str, messages: Messages, variables: Mapping[str, Any], *, end: bool = False
    ) -> str:
        """What follows `mark` in a rendering. A user's message is put before the assistant's."""
        at = 1 if messages[0]["role"] in ("system", "developer") else 0
        # Many templates refuse a conversation that does not begin with the user.
        messages = [*messages[:at], _user("u"), *messages[at:]]
        text = self._template.render(messages, **{"add_generation_prompt": end, **variables})
        _, found, after = text.partition(mark)
        if not found:
            raise UserError(
                "the chat template does not show what the assistant said, so the tokens of a conversation "
                "cannot be kept; put the template that was published with the model there"
            )
        return after

    def _find_rewrites(self):
        """Compares the text that a model has seen and written with what the template shows a turn later."""

        def is_kept(said: str, *, spaces: bool = False, **variables: Any) -> bool:
            before = self.whole([_user("u")], variables) + said
            after = self.whole([_user("u"), _plain(said), _user("v")], variables)
            if not spaces:
                # Many templates trim answers, and that is a finding of its own.
                before, after = ("".join(text.split()) for text in (before, after))
            return after.startswith(before)

        if not is_kept("mark"):
            # The checks below would find the same, under another name.
            yield "changes earlier messages"
            return
        if END_THINK in self._template.source() and not is_kept(f"{THINK}\nr\n{END_THINK}\n\nmark"):
            yield "drops earlier reasoning"
        if not is_kept("  mark  ", spaces=True):
            yield "changes the spaces of earlier answers"
        if self.shows_tools and not is_kept("mark", tools=[_TOOL]):
            yield "moves the tools"


_CALL_ID = "callcall1"


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _plain(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _call(name: str, argument: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"a": argument}}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
