"""Prompts with exact tokens for the sessions of agents; the endpoint's `ChatPrompts`.

A session's answers are drawn as the run samples, whatever temperature its requests name, because training
computes the probabilities of that distribution. The noise of a turn depends on the prompt, the sample and the
tokens before it: whoever asks again gets the same answer, in whatever order requests arrive.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.rollout.live_loop import Request
from jaxrl.rollout.sampling import turn_seed
from jaxrl.types import Stretch
from jaxrl_agents.conversation import ChatModel, Conversation, Turn
from jaxrl_agents.sessions import Session, Sessions
from jaxrl_serving.online_driver import Delta
from jaxrl_serving.openai.chat_prompts import ChatQuery, ChatTurn
from jaxrl_serving.openai.logit_edits import LogitEdits
from jaxrl_serving.openai.protocol import ApiError
from jaxrl_serving.tool_calls import AssistantMessage


class SessionPrompts:
    """Finds the conversation of a request by its key.

    Attributes:
      version: version of the weights that answer.
    """

    version = 0

    def __init__(self, model: ChatModel, sessions: Sessions, *, most_turns: int):
        """Args: the model's chat format, the sessions, and the most turns of one."""
        self._model = model
        self._sessions = sessions
        self._most_turns = most_turns

    def open(self, query: ChatQuery, keys: Sequence[str]) -> ChatTurn:
        """The turn of a request.

        Raises:
          ApiError: no open session has one of these keys, it has had its turns, or n is not 1.
          UserError: the template refuses the messages.
        """
        if query.continues or not query.opens:
            raise ApiError(
                "a session keeps whole turns, each after the opening that the chat template gives it; leave "
                "continue_final_message and add_generation_prompt out",
                param="continue_final_message" if query.continues else "add_generation_prompt",
            )
        return self._open(
            query,
            keys,
            lambda conversation: conversation.extend(
                query.messages, query.tools, start=query.start, variables=query.variables
            ),
        )

    def open_ids(self, prompt: np.ndarray, num_choices: int, keys: Sequence[str]) -> ChatTurn:
        """The turn of a prompt that a client has rendered itself, int32 [T]. Raises as `open`."""
        query = ChatQuery((), num_choices=num_choices)
        return self._open(query, keys, lambda conversation: conversation.extend_ids(prompt))

    def _open(
        self, query: ChatQuery, keys: Sequence[str], extend: Callable[[Conversation], Turn]
    ) -> ChatTurn:
        # A client may have a name of its own for its session, besides the key that it was given.
        named = ((key, self._sessions.find(key)) for key in keys)
        key, session = next(((key, found) for key, found in named if found), ("", None))
        if session is None:
            raise ApiError(
                "this server has no open session with that key; send the one that was given to the "
                "program, as bearer token or X-Session-ID",
                status=401,
                code="invalid_api_key",
            )
        if (role := session.role_of(key)) is None:
            raise ApiError(
                f"this session has no such role; send KEY.ROLE, of {', '.join(session.conversations)}",
                status=401,
                code="invalid_api_key",
            )
        conversation = session.conversations[role]
        if query.num_choices != 1:
            raise ApiError(
                f"n {query.num_choices}: a session has one answer for each request; leave n out",
                param="n",
            )
        with session.lock:
            turn = extend(conversation)
            if turn.key not in session.turns and len(session.turns) >= self._most_turns:
                raise ApiError(
                    f"this session has had {self._most_turns} turns, which is rollout.agent_turns; end it",
                    code="turn_limit",
                )
            # Before the answer: an agent may ask for any number of turns at once.
            session.turns.add(turn.key)
            known = session.deltas.get(turn.key, ())
            # Frozen weights have no age.
            if not known and not conversation.weights:
                session.asked.setdefault(turn.key, self.version)
        answered = functools.partial(self._answered, session, conversation, turn, query)
        # Two roles that read the same have noise of their own.
        place = [*session.conversations].index(role)
        drawn = functools.partial(self._drawn, session, place, conversation.weights)
        return ChatTurn(query, turn.prompt_ids, answered, known, drawn)

    def _drawn(self, session: Session, role: int, weights: str, request: Request) -> Request:
        """The request with the settings of the run, and the request's stop strings besides the run's.

        Raises:
          ApiError: it would edit logits: training computes the probabilities of the policy without that.
        """
        if isinstance(edits := request.options.edits, LogitEdits):
            fields = {
                "logit_bias": edits.bias,
                "presence_penalty": edits.presence_penalty,
                "frequency_penalty": edits.frequency_penalty,
                "response_format": edits.grammar,
            }
            asked = [name for name, value in fields.items() if value]
            raise ApiError(
                f"{' and '.join(asked)}: answers of an agent are trained as the policy alone would draw "
                "them; leave it out",
                param=asked[0],
            )
        stops = (*session.options.stop_strings, *request.options.stop_strings)
        return dataclasses.replace(
            request,
            weights=weights,
            seed=turn_seed(session.prompt_id, session.sample + (role << 32), request.prompt),
            options=session.options.replace(
                num_samples=1,
                stop_strings=stops,
                stop_ids=request.options.stop_ids,
                top_logprobs=request.options.top_logprobs,
            ),
        )

    def _answered(
        self,
        session: Session,
        conversation: Conversation,
        turn: Turn,
        query: ChatQuery,
        index: int,
        deltas: Sequence[Delta],
    ) -> AssistantMessage:
        sampled = Stretch.concatenate(deltas)
        with session.lock:
            # Nothing is recorded any more, and it is not read.
            if session.ended:
                return self._model.parser.view(turn.prompt_ids, sampled.tokens)
            session.deltas.setdefault(turn.key, tuple(deltas))
            session.asked.pop(turn.key, None)
            return conversation.answer(
                turn,
                sampled,
                finish=deltas[-1].finish,
                stop=(*session.options.stop_strings, *query.stop),
                stop_ids=query.stop_ids,
                calls=query.calls,
            )
