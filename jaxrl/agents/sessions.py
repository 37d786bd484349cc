"""The conversations of a server's clients: a key opens one, every request with that key extends it.

    begin(key) --> requests of the client: open, open, ... --> end(key): branches

Requests of one conversation may come at once: a lock is held while its tree is read or changed, not while the
model answers.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence

import numpy as np

from jaxrl.agents.conversation import Branch, ChatModel, Conversation, Counts, History, Turn
from jaxrl.data.tool_calls import AssistantMessage
from jaxrl.serving.online_driver import Delta
from jaxrl.serving.openai.calls import ApiError
from jaxrl.serving.openai.chat_prompts import ChatQuery, ChatTurn


@dataclasses.dataclass(eq=False)
class _Session:
    conversation: Conversation
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    # Deltas of the answers, for requests that are repeated.
    deltas: dict[str, tuple[Delta, ...]] = dataclasses.field(default_factory=dict)
    ended: bool = False


class Sessions:
    """Prompts with exact tokens for an OpenAI endpoint (`ChatPrompts`)."""

    def __init__(self, model: ChatModel, *, history: History = "kept", max_tokens: int = 0):
        """Args: the model's chat format, and settings of each `Conversation`."""
        self._model = model
        self._new = functools.partial(Conversation, model, history=history, max_tokens=max_tokens)
        self._open: dict[str, _Session] = {}

    def begin(self, key: str) -> None:
        """Opens a conversation for requests with this key."""
        assert key and key not in self._open, "keys are chosen by the server"
        self._open[key] = _Session(self._new())

    def end(self, key: str) -> tuple[tuple[Branch, ...], Counts]:
        """Closes a conversation. Requests with its key are refused from now on, and late answers dropped."""
        session = self._open.pop(key)
        with session.lock:
            session.ended = True
            return session.conversation.branches(), session.conversation.counts

    def open(self, query: ChatQuery, key: str) -> ChatTurn:
        """The turn of a request.

        Raises:
          ApiError: there is no conversation with this key, or several answers are asked for.
          UserError: the template refuses the messages, or the conversation is at its limit.
        """
        session = self._open.get(key)
        if session is None:
            raise ApiError(
                401,
                "this server has no open session with that key; send the one that was given to the "
                "program, as bearer token or X-Session-ID",
                code="invalid_api_key",
            )
        if query.num_choices != 1:
            raise ApiError(
                400,
                f"n {query.num_choices}: a session has one answer for each request; leave n out",
                param="n",
            )
        with session.lock:
            turn = session.conversation.extend(
                query.messages, query.tools, start=query.start, variables=query.variables
            )
            known = session.deltas.get(turn.key, ())
        answered = functools.partial(self._answered, session, turn, query)
        return ChatTurn(query, turn.prompt_ids, answered, known)

    def _answered(
        self, session: _Session, turn: Turn, query: ChatQuery, index: int, deltas: Sequence[Delta]
    ) -> AssistantMessage:
        tokens = np.concatenate([delta.tokens for delta in deltas])
        with session.lock:
            if session.ended:
                return self._model.parser.view(
                    turn.prompt_ids, tokens, start=query.start, stop=query.stop, calls=query.calls
                )
            session.deltas.setdefault(turn.key, tuple(deltas))
            return session.conversation.answer(
                turn,
                tokens,
                np.concatenate([delta.logprob for delta in deltas]),
                np.zeros(len(tokens), np.float32),
                finish=deltas[-1].finish,
                stop=query.stop,
                calls=query.calls,
            )
