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

from jaxrl.data.messages import read_message
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.rollout.live_loop import Request
from jaxrl_serving.online_driver import Delta
from jaxrl_serving.tool_calls import AnswerParser, AssistantMessage


@dataclasses.dataclass(frozen=True)
class ChatQuery:
    """A chat request as far as its prompt and the view of its answer depend on it.

    Attributes:
      messages: all messages in OpenAI's form.
      tools: tools as the template reads them.
      variables: further variables of the template.
      start: beginning of the answer that the model is given; "" for none.
      stop, stop_ids: texts and token ids that end an answer and are not shown.
      calls: whether calls are parsed.
      num_choices: number of answers that are asked for.
      opens, continues: whether the prompt opens the assistant's turn, or ends within the last message.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    start: str = ""
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    calls: bool = False
    num_choices: int = 1
    opens: bool = True
    continues: bool = False


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

    def render(self, query: ChatQuery) -> str:
        """The prompt of a request without its `start`."""
        messages = [read_message(message) for message in query.messages]
        tools = {"tools": list(query.tools)} if query.tools else {}
        text = self._tokenizer.render_chat(
            messages, add_generation_prompt=query.opens, **tools, **query.variables
        )
        return _up_to(text, messages[-1]["content"]) if query.continues else text

    def open(self, query: ChatQuery, keys: Sequence[str]) -> ChatTurn:
        """The turn of a request; `keys` do not matter."""
        prompt = self._tokenizer.encode(self.render(query))
        # Encoded apart, so that the prompt ends with the ids of the beginning whatever comes before it.
        if query.start:
            prompt = np.concatenate([prompt, self._tokenizer.encode(query.start)])

        def answered(index: int, deltas: Sequence[Delta]) -> AssistantMessage:
            tokens = np.concatenate([delta.tokens for delta in deltas])
            tools = query.tools if query.calls else ()
            return self._parser.view(
                prompt,
                tokens,
                start=query.start,
                stop=query.stop,
                stop_ids=query.stop_ids,
                tools=tools,
            )

        return ChatTurn(query, prompt, answered)


def _up_to(rendered: str, message: str) -> str:
    """A rendered chat up to the end of its last message, as Transformers continues one."""
    said = message.strip()
    at = rendered.rfind(said)
    if not said or at < 0:
        raise UserError(
            "the chat template does not show the last message as it is, so it cannot be continued; leave "
            "continue_final_message out"
        )
    # Some templates drop the white space at its end.
    whole = message.lstrip()
    return rendered[: at + len(whole if rendered.startswith(whole, at) else said)]
