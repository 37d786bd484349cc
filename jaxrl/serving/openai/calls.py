"""Converts between OpenAI's JSON and the online driver: bodies to `Request`s, `Delta`s to answers.

    POST /v1/completions        prompt: text, token ids, or a list of either
                                choices have `text`
    POST /v1/chat/completions   messages through the model's chat template
                                choices have `message`, or `delta` in the events of a stream

`protocol` checks the form of a body. This module checks it against the model: name, tokenizer, lengths.
Log-probabilities are those of the tempered distribution before truncation, the same that training uses.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import reprlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl.rollout.live_loop import Request
from jaxrl.rollout.sampling import SamplingOptions, truncation_of
from jaxrl.serving.online_driver import Delta
from jaxrl.serving.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    InvalidRequest,
    RequestType,
    read_request,
)

Json = dict[str, Any]


class RequestTokenizer(Protocol):
    """The methods of a tokenizer that requests need."""

    def encode(self, text: str) -> np.ndarray:
        """Int32 [T] ids of a text, without added tokens."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids, without special tokens."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> np.ndarray:
        """Int32 [T] ids of a conversation, up to the start of the answer; UserError if the template fails.

        `variables` are additional variables of the chat template, such as enable_thinking.
        """
        ...


class ApiError(Exception):
    """An error answer in OpenAI's format.

    Attributes:
      status: HTTP status.
      body: JSON object.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str = ""):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        kind = "rate_limit_error" if status == 429 else kind
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": code or None}
        }


@dataclasses.dataclass(frozen=True)
class Call:
    """A client's request, parsed.

    Attributes:
      requests: requests to the driver, one per prompt, all with the same number of samples.
      stream: whether the answer is sent as events.
      include_usage: whether the last event has the token counts.
      logprobs: whether the answer has log-probabilities.
    """

    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    logprobs: bool


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """Limits of a request, and the name of the model.

    Attributes:
      model: model name that requests must give.
      max_prompt_tokens: maximum number of tokens per prompt.
      max_tokens: maximum number of tokens per sample.
      max_context_tokens: maximum number of tokens of a prompt and its sample together.
      max_choices: maximum number of samples per request.
    """

    model: str
    max_prompt_tokens: int
    max_tokens: int
    max_context_tokens: int
    max_choices: int = 128


# OpenAI's default number of tokens for completions. Chats default to the server's limit.
_DEFAULT_COMPLETION_TOKENS = 16
# Characters per token; twice the value of English prose.
_CHARS_PER_TOKEN = 8
# Temperatures below count as greedy: division by them would overflow float32.
_LOWEST_TEMPERATURE = 1e-5


def read_completion(body: Json, tokenizer: RequestTokenizer, limits: RequestLimits) -> Call:
    """Parses the body of POST /v1/completions.

    Raises:
      ApiError, UserError: the body is malformed or asks for something that is not supported.
    """
    request = _checked(CompletionRequest, body, limits)
    for prompt in request.prompts:
        if isinstance(prompt, str):
            _check_length(prompt, tokenizer, limits)
    prompts = [
        tokenizer.encode(prompt) if isinstance(prompt, str) else np.array(prompt, np.int32)
        for prompt in request.prompts
    ]
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = min(_DEFAULT_COMPLETION_TOKENS, limits.max_tokens)
    return _call(request, prompts, max_tokens, limits, logprobs=request.logprobs is not None)


def read_chat(body: Json, tokenizer: RequestTokenizer, limits: RequestLimits) -> Call:
    """Parses the body of POST /v1/chat/completions.

    Raises:
      ApiError, UserError: the body is malformed or asks for something that is not supported.
    """
    request = _checked(ChatRequest, body, limits)
    messages = [{"role": message.role, "content": message.text} for message in request.messages]
    _check_length("".join(message["content"] for message in messages), tokenizer, limits)
    prompt = tokenizer.encode_chat(messages, **request.chat_template_kwargs)
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    if max_tokens is None:
        # All the room after the prompt. One that leaves none is refused later, with a better message.
        max_tokens = max(1, min(limits.max_tokens, limits.max_context_tokens - len(prompt)))
    return _call(request, [prompt], max_tokens, limits, logprobs=request.logprobs)


def _checked(kind: type[RequestType], body: Json, limits: RequestLimits) -> RequestType:
    try:
        request = read_request(kind, body)
    except InvalidRequest as error:
        raise ApiError(400, str(error), param=error.param) from error
    check_model(request.model, limits)
    return request


def check_model(name: str, limits: RequestLimits) -> None:
    """Raises ApiError with status 404 if `name` is not the server's model."""
    if name != limits.model:
        raise ApiError(
            404,
            f"model {reprlib.repr(name)} is not here; this server has {limits.model!r}",
            param="model",
            code="model_not_found",
        )


def _call(
    request: CompletionRequest | ChatRequest,
    prompts: Sequence[np.ndarray],
    max_tokens: int,
    limits: RequestLimits,
    *,
    logprobs: bool,
) -> Call:
    _check_sizes(request, prompts, max_tokens, limits)
    truncation = truncation_of(
        # Some clients send -1 to disable top_k.
        top_k=max(request.top_k, 0),
        top_p=request.top_p,
        min_p=request.min_p,
        min_tokens=request.min_tokens,
        repetition_penalty=request.repetition_penalty,
    )
    temperature = request.temperature if request.temperature >= _LOWEST_TEMPERATURE else 0.0
    seed = secrets.randbits(31) if request.seed is None else request.seed
    options = SamplingOptions(
        request.n, temperature=temperature, truncation=truncation, stop_strings=request.stops
    )
    requests = tuple(Request(prompt, max_tokens, seed % 2**31, options) for prompt in prompts)
    return Call(requests, request.stream, request.stream_options.include_usage, logprobs)


def _check_length(text: str, tokenizer: RequestTokenizer, limits: RequestLimits) -> None:
    """Refuses a text whose beginning alone is too long, before the whole text is tokenised."""
    reach = _CHARS_PER_TOKEN * limits.max_context_tokens
    if len(text) > reach and len(tokenizer.encode(text[:reach])) > limits.max_context_tokens:
        raise ApiError(
            400,
            f"This model's maximum context length is {limits.max_context_tokens} tokens, and of the prompt's "
            f"{len(text)} characters the first {reach} have more; shorten the prompt",
            code="context_length_exceeded",
        )


def _check_sizes(
    request: CompletionRequest | ChatRequest,
    prompts: Sequence[np.ndarray],
    max_tokens: int,
    limits: RequestLimits,
) -> None:
    if not 1 <= request.n * len(prompts) <= limits.max_choices:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with n {request.n}: this server gives 1 to {limits.max_choices} "
            "choices",
            param="n",
        )
    if request.min_tokens > max_tokens:
        raise ApiError(
            400,
            f"min_tokens {request.min_tokens} is above max_tokens {max_tokens}; lower it",
            param="min_tokens",
        )
    longest = max(map(len, prompts))
    if longest > min(limits.max_prompt_tokens, limits.max_context_tokens - 1):
        raise ApiError(
            400,
            f"This model's maximum context length is {limits.max_context_tokens} tokens, of which prompts "
            f"have {limits.max_prompt_tokens} at most; this one has {longest}: shorten it",
            code="context_length_exceeded",
        )
    if longest + max_tokens > limits.max_context_tokens:
        raise ApiError(
            400,
            f"This model's maximum context length is {limits.max_context_tokens} tokens, and {longest} of "
            f"the prompt with max_tokens {max_tokens} are {longest + max_tokens}; shorten the prompt, or ask "
            "for fewer tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )


class Choice:
    """One sample as it grows.

    Attributes:
      text: new text since the last `take`.
      num_tokens: number of tokens so far.
      finish: reason why it has ended; None before.
    """

    def __init__(self):
        self.text = ""
        self.num_tokens = 0
        self.finish: str | None = None
        self._tokens: list[tuple[str, float]] = []
        self._spelled = 0

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.num_tokens += len(delta.tokens)
        self.finish = delta.finish or None
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
      whole, event: kind of a whole answer and of an event of a stream.
      choice: (index, choice, with log-probabilities) -> the choice of a whole answer.
      new_part: (index, choice, with log-probabilities, is the first) -> the choice of an event.
    """

    prefix: str
    whole: str
    event: str
    choice: Callable[[int, Choice, bool], Json]
    new_part: Callable[[int, Choice, bool, bool], Json]


def _completion_choice(index: int, choice: Choice, logprobs: bool, _: bool = False) -> Json:
    text, tokens, start = choice.take()
    ends = itertools.accumulate((len(piece) for piece, _ in tokens), initial=start)
    of_tokens = {
        "tokens": [piece for piece, _ in tokens],
        "token_logprobs": [logprob for _, logprob in tokens],
        "top_logprobs": None,
        "text_offset": list(ends)[:-1],
    }
    part = {"text": text, "logprobs": of_tokens if logprobs else None}
    return {"index": index, **part, "finish_reason": choice.finish}


def _chat_choice(
    index: int, choice: Choice, logprobs: bool, first: bool = True, *, name: str = "message"
) -> Json:
    text, tokens, _ = choice.take()
    # Only the first event of a stream has the role.
    message: Json = ({"role": "assistant"} if first else {}) | {"content": text}
    if name == "message":
        message["refusal"] = None
    content = [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in tokens
    ]
    of_tokens = {"content": content, "refusal": None} if logprobs else None
    return {"index": index, name: message, "logprobs": of_tokens, "finish_reason": choice.finish}


COMPLETION = Form(
    "cmpl-", "text_completion", "text_completion", _completion_choice, _completion_choice
)
CHAT = Form(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    _chat_choice,
    functools.partial(_chat_choice, name="delta"),
)


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
        # Choice i is sample i % n of prompt i // n.
        num_choices = sum(request.options.num_samples for request in call.requests)
        self._choices = [Choice() for _ in range(num_choices)]
        self._begun: set[int] = set()

    @property
    def complete(self) -> bool:
        return all(choice.finish for choice in self._choices)

    def add(self, index: int, delta: Delta) -> None:
        self._choices[index].add(delta)

    def whole(self) -> str:
        """The whole answer, once it is complete."""
        logprobs = self._call.logprobs
        choices = [self._form.choice(i, x, logprobs) for i, x in enumerate(self._choices)]
        return self._json(self._form.whole, choices, self._usage())

    def event(self, index: int) -> str:
        """The event with the new part of a choice. If the counts are asked for, its own are null."""
        first = index not in self._begun
        self._begun.add(index)
        part = self._form.new_part(index, self._choices[index], self._call.logprobs, first)
        return self._json(
            self._form.event, [part], {"usage": None} if self._call.include_usage else {}
        )

    def usage_event(self) -> str:
        """The event with the token counts."""
        return self._json(self._form.event, [], self._usage())

    def _json(self, kind: str, choices: list[Json], usage: Json) -> str:
        return to_json({**self._head, **usage, "object": kind, "choices": choices})

    def _usage(self) -> Json:
        """Every prompt counts once, however many choices it has."""
        prompt = sum(len(request.prompt) for request in self._call.requests)
        completion = sum(choice.num_tokens for choice in self._choices)
        return {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            }
        }


def to_json(body: Json) -> str:
    """The body of an answer, without spaces."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))
