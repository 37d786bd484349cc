"""Converts the online driver's deltas to OpenAI's answers: deltas in, JSON out.

    POST /v1/completions        choices have `text`
    POST /v1/chat/completions   choices have `message`, or `delta` in the events of a stream

Log-probabilities are those of the tempered distribution before truncation, the same that training uses.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from typing import cast

from pydantic import BaseModel

from jaxrl.serving.online_driver import Delta
from jaxrl.serving.openai.calls import Call
from jaxrl.serving.openai.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    MessageDelta,
    TokenLogprob,
    Usage,
)


class Choice:
    """One sample as it grows.

    Attributes:
      text: text so far.
      num_tokens: number of tokens so far.
      finish: reason why it has ended; None before.
    """

    def __init__(self):
        self.text = ""
        self.num_tokens = 0
        self.finish: FinishReason | None = None
        self._tokens: list[tuple[str, float]] = []
        self._spelled = 0

    def add(self, delta: Delta) -> None:
        """Appends a delta."""
        self.text += delta.text
        self.num_tokens += len(delta.tokens)
        self.finish = cast(FinishReason, delta.finish) if delta.finish else None
        self._tokens += zip(delta.pieces, map(float, delta.logprob), strict=True)

    def take(self) -> tuple[str, list[tuple[str, float]], int]:
        """What is new since the last call: text, (token, log-probability) pairs, and their text offset."""
        text, tokens, start = self.text, self._tokens, self._spelled
        self.text, self._tokens = "", []
        self._spelled += sum(len(piece) for piece, _ in tokens)
        return text, tokens, start


@dataclasses.dataclass(frozen=True)
class Form:
    """The shape of an endpoint's answers.

    Attributes:
      prefix: start of the ids.
      whole, event: types of a whole answer and of an event of a stream.
      choice: (index, choice, with log-probabilities) -> the choice of a whole answer.
      new_part: (index, choice, with log-probabilities, is the first) -> the choice of an event.
    """

    prefix: str
    whole: Callable[..., BaseModel]
    event: Callable[..., BaseModel]
    choice: Callable[[int, Choice, bool], BaseModel]
    new_part: Callable[[int, Choice, bool, bool], BaseModel]


def _completion_choice(index: int, choice: Choice, logprobs: bool, _: bool = False) -> BaseModel:
    text, tokens, start = choice.take()
    return CompletionChoice(
        index=index,
        text=text,
        logprobs=_completion_logprobs(tokens, start) if logprobs else None,
        finish_reason=choice.finish,
    )


def _completion_logprobs(tokens: Sequence[tuple[str, float]], start: int) -> CompletionLogprobs:
    ends = itertools.accumulate((len(piece) for piece, _ in tokens), initial=start)
    return CompletionLogprobs(
        tokens=[piece for piece, _ in tokens],
        token_logprobs=[logprob for _, logprob in tokens],
        text_offset=list(ends)[:-1],
    )


def _chat_choice(index: int, choice: Choice, logprobs: bool) -> BaseModel:
    text, tokens, _ = choice.take()
    return ChatChoice(
        index=index,
        message=AssistantMessage(content=text),
        logprobs=_chat_logprobs(tokens) if logprobs else None,
        finish_reason=choice.finish,
    )


def _chat_delta(index: int, choice: Choice, logprobs: bool, first: bool) -> BaseModel:
    text, tokens, _ = choice.take()
    return ChatChunkChoice(
        index=index,
        delta=MessageDelta(role="assistant" if first else None, content=text),
        logprobs=_chat_logprobs(tokens) if logprobs else None,
        finish_reason=choice.finish,
    )


def _chat_logprobs(tokens: Sequence[tuple[str, float]]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            TokenLogprob(token=piece, logprob=logprob, bytes=list(piece.encode()))
            for piece, logprob in tokens
        ]
    )


COMPLETION = Form("cmpl-", Completion, Completion, _completion_choice, _completion_choice)
CHAT = Form("chatcmpl-", ChatCompletion, ChatCompletionChunk, _chat_choice, _chat_delta)


class Answer:
    """The choices of a call, assembled from deltas; returns whole answers and events as JSON."""

    def __init__(self, call: Call, form: Form, model: str):
        self._call = call
        self._form = form
        self._head = {
            "id": form.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }
        self._choices = [Choice() for _ in range(call.num_choices)]
        self._begun: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish for choice in self._choices)

    def add(self, index: int, delta: Delta) -> None:
        """Appends a delta to a choice."""
        self._choices[index].add(delta)

    def whole(self) -> str:
        """The whole answer, once it is complete."""
        logprobs = self._call.logprobs
        choices = [self._form.choice(i, x, logprobs) for i, x in enumerate(self._choices)]
        answer = self._form.whole(**self._head, choices=choices, usage=self._usage())
        return answer.model_dump_json()

    def event(self, index: int) -> str:
        """The event with the new part of a choice."""
        first = index not in self._begun
        self._begun.add(index)
        part = self._form.new_part(index, self._choices[index], self._call.logprobs, first)
        event = self._form.event(**self._head, choices=[part])
        return event.model_dump_json(exclude=None if self._call.include_usage else {"usage"})

    def usage_event(self) -> str:
        """The event with the token counts."""
        return self._form.event(**self._head, choices=[], usage=self._usage()).model_dump_json()

    def _usage(self) -> Usage:
        prompt = self._call.prompt_tokens
        completion = sum(choice.num_tokens for choice in self._choices)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
        )
