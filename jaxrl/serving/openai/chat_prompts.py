"""Gives chats their prompts, and receives their answers.

    request --> ChatPrompts.open --> ChatTurn: prompt ids --> driver --> deltas --> ChatTurn.answered --> view

`RenderedPrompts` renders and encodes every request from its texts. A program that keeps conversations gives
the server another `ChatPrompts`, which finds a conversation by the client's key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.data.tool_calls import AnswerParser, AssistantMessage, template_message
from jaxrl.rollout.live_loop import Request
from jaxrl.serving.online_driver import Delta


@dataclasses.dataclass(frozen=True)
class ChatQuery:
    """A chat request as far as its prompt and the view of its answer depend on it.

    Attributes:
      messages: all messages in OpenAI's form.
      tools: tools as the template reads them.
      variables: further variables of the template.
      start: beginning of the answer that the model is given; "" for none.
      stop: texts that end an answer and are not shown.
      calls: whether calls are parsed.
      num_choices: number of answers that are asked for.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    start: str = ""
    stop: tuple[str, ...] = ()
    calls: bool = False
    num_choices: int = 1


@dataclasses.dataclass(frozen=True)
class ChatTurn:
    """A prompt, and what becomes of its answers.

    Attributes:
      query: the request.
      prompt_ids: int32 [T]; they end with the ids of `query.start`.
      answered: function called once for each answer that is complete, with its index and deltas; returns the
        view for the client. It runs on the server's event loop and must be quick.
      known: deltas of the answer if the turn has been answered before; the model is not asked then.
      drawn: function from the client's request to the one that is sampled, if the client does not decide how;
        else None. Its length is then cut to the room that is left.
    """

    query: ChatQuery
    prompt_ids: np.ndarray
    answered: Callable[[int, Sequence[Delta]], AssistantMessage]
    known: tuple[Delta, ...] = ()
    drawn: Callable[[Request], Request] | None = None


class ChatPrompts(Protocol):
    """Gives chat requests their prompts. Any thread may call it."""

    def open(self, query: ChatQuery, keys: Sequence[str]) -> ChatTurn:
        """The turn of a request.

        Args:
          query: the request.
          keys: what the client sent as `X-Session-ID` and as bearer token, "" for what it did not.

        Raises:
          ApiError, UserError: the request cannot be served.
        """
        ...

    def open_ids(
        self, prompt: np.ndarray, num_choices: int, keys: Sequence[str]
    ) -> ChatTurn | None:
        """The turn of a prompt of ids, int32 [T]; None if it belongs to no conversation. As `open`."""
        ...


class RenderedPrompts:
    """Renders and encodes all messages of every request."""

    def __init__(self, tokenizer: Tokenizer, parser: AnswerParser):
        self._tokenizer = tokenizer
        self._parser = parser

    def open_ids(self, prompt: np.ndarray, num_choices: int, keys: Sequence[str]) -> None:
        """None: there are no conversations here."""

    def open(self, query: ChatQuery, keys: Sequence[str]) -> ChatTurn:
        """The turn of a request; `keys` do not matter."""
        messages = [template_message(message) for message in query.messages]
        tools = {"tools": list(query.tools)} if query.tools else {}
        text = self._tokenizer.render_chat(messages, **tools, **query.variables)
        prompt = self._tokenizer.encode(text)
        # Encoded apart, so that the prompt ends with the ids of the beginning whatever comes before it.
        if query.start:
            prompt = np.concatenate([prompt, self._tokenizer.encode(query.start)])

        def answered(index: int, deltas: Sequence[Delta]) -> AssistantMessage:
            tokens = np.concatenate([delta.tokens for delta in deltas])
            return self._parser.view(
                prompt, tokens, start=query.start, stop=query.stop, calls=query.calls
            )

        return ChatTurn(query, prompt, answered)
