"""OpenAI's completion requests and answers as data: JSON objects in, `Ask`s out; deltas in, JSON objects out.

    POST /v1/completions        prompt: text, token ids, or a list of either; choices have `text`
    POST /v1/chat/completions   messages through the model's chat template; choices have `message`

Beyond OpenAI's fields there are `top_k`, `min_p`, `min_tokens` and `repetition_penalty`, as other servers
have them. A field that asks for what is not here is refused by name: other candidates than the sampled token,
penalties by count, biases, tools, schemas, echo. Log-probabilities are those of the tempered distribution
before truncation, which is what training compares with.

R tokens of a delta
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl.errors import UserError
from jaxrl.rollout.online import Ask, Delta
from jaxrl.rollout.sampling import truncation_of

Json = dict[str, Any]


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str) -> np.ndarray:
        """Int32 [T] ids of a text, nothing added."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids, without special tokens."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Int32 [T] ids of a conversation, up to where the answer begins; UserError if it cannot."""
        ...


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape.

    Attributes:
      status: of HTTP.
      body: the JSON object.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str = ""):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
        kind = "rate_limit_error" if status == 429 else kind
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": code or None}
        }


@dataclasses.dataclass(frozen=True)
class Call:
    """A request, understood.

    Attributes:
      asks: one per prompt, with the same number of samples.
      stream: the answer is to come in events.
      include_usage: its last event tells the number of tokens.
      logprobs: it is to have log-probabilities.
    """

    asks: tuple[Ask, ...]
    stream: bool
    include_usage: bool
    logprobs: bool

    @property
    def num_choices(self) -> int:
        """Samples of all prompts; choice i is sample i % n of prompt i // n."""
        return sum(ask.num_samples for ask in self.asks)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each once."""
        return sum(len(ask.prompt) for ask in self.asks)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What requests may ask for.

    Attributes:
      model: the name requests must give.
      max_tokens: of a sample.
      max_context_tokens: of a prompt and a sample of it together.
      max_choices: samples of one request.
    """

    model: str
    max_tokens: int
    max_context_tokens: int
    max_choices: int = 128

    def max_tokens_after(self, prompt: np.ndarray) -> int:
        """What a chat gets that does not say: as much as there is room for."""
        return min(self.max_tokens, self.max_context_tokens - len(prompt))


# Fields that are understood, with a default and a check of the type; OpenAI lets null stand for the default.
_NUMBER, _BOOLEAN = "a number below 1e9", "true or false"
# As the sampler has them; of a seed, which counts modulo 2^31, clients give more.
_INTEGER, _LONG_INTEGER = "an integer of 32 bits", "an integer of 64 bits"
_FIELDS: dict[str, tuple[str, Any]] = {
    "temperature": (_NUMBER, 1.0),
    "top_p": (_NUMBER, 1.0),
    "top_k": (_INTEGER, 0),
    "min_p": (_NUMBER, 0.0),
    "min_tokens": (_INTEGER, 0),
    "repetition_penalty": (_NUMBER, 1.0),
    "n": (_INTEGER, 1),
    "seed": (_LONG_INTEGER, None),
    "stream": (_BOOLEAN, False),
}
# Read elsewhere.
_OTHER_FIELDS = frozenset({"model", "stop", "stream_options", "max_tokens"})
# They change nothing of an answer.
_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
# Harmless if they ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "prediction": (),
    "audio": (),
    "top_logprobs": (0,),
}
_COMPLETION_FIELDS = frozenset({"prompt", "logprobs"})
_CHAT_FIELDS = frozenset({"messages", "logprobs", "max_completion_tokens"})
# What OpenAI's completions give that do not say; a chat goes on to the server's limit.
_DEFAULT_COMPLETION_TOKENS = 16
# Below it the most probable token is the only one; logits divided by it would leave the range of float32.
_LOWEST_TEMPERATURE = 1e-5
_MAX_STOPS, _MAX_STOP_CHARACTERS = 16, 256


def read_completion(body: Json, tokenizer: Tokenizer, limits: Limits) -> Call:
    """The body of POST /v1/completions.

    Raises:
      ApiError, UserError: what is asked for is not here, or is not well formed.
    """
    _check_fields(body, _COMPLETION_FIELDS, limits)
    if "prompt" not in body:
        raise ApiError(400, "the request has no prompt; give a text or token ids", param="prompt")
    prompts = _prompts_of(body["prompt"], tokenizer)
    logprobs = body.get("logprobs")
    if logprobs not in (None, 0, 1) or isinstance(logprobs, bool):
        raise ApiError(
            400,
            f"logprobs {_shown(logprobs)}: there are only those of the sampled tokens; give 1, or leave it "
            "out",
            param="logprobs",
        )
    default = min(_DEFAULT_COMPLETION_TOKENS, limits.max_tokens)
    max_tokens = _typed(body, "max_tokens", _INTEGER, default)
    return _call(body, prompts, max_tokens, limits, logprobs=logprobs is not None)


def read_chat(body: Json, tokenizer: Tokenizer, limits: Limits) -> Call:
    """The body of POST /v1/chat/completions.

    Raises:
      ApiError, UserError: what is asked for is not here, or is not well formed.
    """
    _check_fields(body, _CHAT_FIELDS, limits)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of messages, and not empty", param="messages")
    prompt = tokenizer.encode_chat([_message(item, i) for i, item in enumerate(messages)])
    max_tokens = _typed(body, "max_tokens", _INTEGER, None)
    max_tokens = _typed(body, "max_completion_tokens", _INTEGER, max_tokens)
    if max_tokens is None:
        # A prompt that leaves no room is refused for itself, by the driver.
        max_tokens = max(1, limits.max_tokens_after(prompt))
    logprobs = _typed(body, "logprobs", _BOOLEAN, False)
    return _call(body, [prompt], max_tokens, limits, logprobs=logprobs)


def _check_fields(body: Json, own: frozenset[str], limits: Limits) -> None:
    known = own | _OTHER_FIELDS | _IGNORED | _FIELDS.keys() | _REFUSED.keys()
    for name in body:
        if name not in known:
            raise ApiError(400, f"{name[:60]} is no field of this request", param=name[:60])
    for name, harmless in _REFUSED.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise ApiError(
                400,
                f"{name} {_shown(value)}: this server does not have it; leave it out",
                param=name,
            )
    check_model(body.get("model"), limits)


def check_model(name: Any, limits: Limits) -> None:
    """Raises ApiError, with status 404, unless it is the name of the server's model."""
    if name != limits.model:
        raise ApiError(
            404,
            f"model {_shown(name)} is not here; this server has {limits.model!r}",
            param="model",
            code="model_not_found",
        )


def _prompts_of(value: Any, tokenizer: Tokenizer) -> list[np.ndarray]:
    """One prompt of each text or list of ids."""
    if isinstance(value, str):
        return [tokenizer.encode(_text(value, "prompt"))]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return [tokenizer.encode(_text(item, "prompt")) for item in value]
        if _are_ids(value):
            return [np.array(value, np.int32)]
        if all(isinstance(item, list) and _are_ids(item) for item in value):
            return [np.array(item, np.int32) for item in value]
    raise ApiError(
        400,
        "prompt must be a text, a list of token ids, or a list of several of either, and not empty",
        param="prompt",
    )


def _text(value: str, param: str) -> str:
    """The text, if it is one: JSON can hold half of a surrogate pair, which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, f"{param} is no text: {error}", param=param) from error
    return value


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int and 0 <= item < 2**31 for item in items)


def _message(item: Any, i: int) -> Json:
    """A role and a text; text parts are joined."""
    where = f"messages[{i}]"
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise ApiError(400, f"{where} must be an object with a role and a content", param=where)
    content = item.get("content")
    if isinstance(content, list) and all(
        isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str)
        for p in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ApiError(400, f"{where}.content must be a text, or a list of text parts", param=where)
    further = [k for k, v in item.items() if k not in ("role", "content", "name") and v]
    if further:
        raise ApiError(
            400, f"{where} has {', '.join(further)}; only a role and a text are read", param=where
        )
    return {"role": _text(item["role"], where), "content": _text(content, where)}


def _call(
    body: Json, prompts: Sequence[np.ndarray], max_tokens: int, limits: Limits, *, logprobs: bool
) -> Call:
    given = {name: _typed(body, name, *field) for name, field in _FIELDS.items()}
    n = given["n"]
    if not 1 <= n * len(prompts) <= limits.max_choices:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with n {n}: this server gives 1 to {limits.max_choices} choices",
            param="n",
        )
    if not 0 <= given["temperature"] <= 2:
        raise ApiError(
            400, f"temperature {given['temperature']} is not from 0 to 2", param="temperature"
        )
    if given["min_tokens"] > max_tokens:
        raise ApiError(
            400,
            f"min_tokens {given['min_tokens']} is above max_tokens {max_tokens}; lower it",
            param="min_tokens",
        )
    if any(len(prompt) + max_tokens > limits.max_context_tokens for prompt in prompts):
        longest = max(map(len, prompts))
        raise ApiError(
            400,
            f"This model's maximum context length is {limits.max_context_tokens} tokens, and {longest} of "
            f"the prompt with max_tokens {max_tokens} are {longest + max_tokens}; shorten the prompt, or ask "
            "for fewer tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    truncation = truncation_of(
        # Some clients write -1 for all.
        top_k=max(given["top_k"], 0),
        top_p=given["top_p"],
        min_p=given["min_p"],
        min_tokens=given["min_tokens"],
        repetition_penalty=given["repetition_penalty"],
    )
    temperature = given["temperature"] if given["temperature"] >= _LOWEST_TEMPERATURE else 0.0
    seed = secrets.randbits(31) if given["seed"] is None else given["seed"]
    asks = tuple(
        Ask(
            prompt,
            n,
            max_tokens,
            seed=seed % 2**31,
            temperature=temperature,
            truncation=truncation,
            stop=_stops(body.get("stop")),
        )
        for prompt in prompts
    )
    options = body.get("stream_options")
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise ApiError(400, "stream_options must be an object", param="stream_options")
    include_usage = _typed(options, "include_usage", _BOOLEAN, False)
    return Call(asks, given["stream"], include_usage, logprobs)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    well_formed = isinstance(stops, list) and all(
        isinstance(s, str) and 0 < len(s) <= _MAX_STOP_CHARACTERS for s in stops
    )
    if not well_formed or len(stops) > _MAX_STOPS:
        raise ApiError(
            400,
            f"stop must be a text or up to {_MAX_STOPS} of them, none empty or longer than "
            f"{_MAX_STOP_CHARACTERS} characters",
            param="stop",
        )
    return tuple(stops)


def _typed(body: Json, name: str, kind: str, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if kind == _BOOLEAN:
        right = isinstance(value, bool)
    elif kind == _INTEGER:
        right = type(value) is int and abs(value) < 2**31
    elif kind == _LONG_INTEGER:
        right = type(value) is int and abs(value) < 2**63
    else:
        # False for NaN too; a whole number of JSON can be too large for a float, and is compared as it is.
        right = type(value) in (int, float) and abs(value) < 1e9
    if not right:
        raise ApiError(400, f"{name} is {_shown(value)}; it must be {kind}", param=name)
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Answers


class Choice:
    """One sample, as it grows.

    Attributes:
      text: so far.
      num_tokens: so far.
      finish: why it has ended, None before.
    """

    def __init__(self):
        self.text = ""
        self.num_tokens = 0
        self.finish: str | None = None
        self._tokens: list[tuple[str, float]] = []
        self._spelled = 0

    def add(self, delta: Delta) -> None:
        """Appends a delta."""
        self.text += delta.text
        self.num_tokens += len(delta.tokens)
        self.finish = delta.finish or None
        self._tokens += zip(delta.pieces, map(float, delta.logprob), strict=True)

    def take(self) -> tuple[str, list[tuple[str, float]], int]:
        """What has come since the last time: text, (token, log-probability)s, and where they begin."""
        text, tokens, start = self.text, self._tokens, self._spelled
        self.text, self._tokens = "", []
        self._spelled += sum(len(piece) for piece, _ in tokens)
        return text, tokens, start


class CompletionForm:
    """Answers of POST /v1/completions."""

    prefix = "cmpl-"
    whole = chunk = "text_completion"

    def whole_choice(self, index: int, choice: Choice, *, logprobs: bool) -> Json:
        """A choice that has ended."""
        return self.chunk_choice(index, choice, first=True, logprobs=logprobs)

    def chunk_choice(self, index: int, choice: Choice, *, first: bool, logprobs: bool) -> Json:
        """What is new of a choice."""
        text, tokens, start = choice.take()
        return {
            "index": index,
            "text": text,
            "logprobs": _completion_logprobs(tokens, start) if logprobs else None,
            "finish_reason": choice.finish,
        }


def _completion_logprobs(tokens: Sequence[tuple[str, float]], start: int) -> Json:
    offsets = []
    for piece, _ in tokens:
        offsets.append(start)
        start += len(piece)
    return {
        "tokens": [piece for piece, _ in tokens],
        "token_logprobs": [logprob for _, logprob in tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }


class ChatForm:
    """Answers of POST /v1/chat/completions."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def whole_choice(self, index: int, choice: Choice, *, logprobs: bool) -> Json:
        """A choice that has ended."""
        text, tokens, _ = choice.take()
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": _chat_logprobs(tokens) if logprobs else None,
            "finish_reason": choice.finish,
        }

    def chunk_choice(self, index: int, choice: Choice, *, first: bool, logprobs: bool) -> Json:
        """What is new of a choice."""
        text, tokens, _ = choice.take()
        role = {"role": "assistant"} if first else {}
        return {
            "index": index,
            "delta": {**role, "content": text},
            "logprobs": _chat_logprobs(tokens) if logprobs else None,
            "finish_reason": choice.finish,
        }


def _chat_logprobs(tokens: Sequence[tuple[str, float]]) -> Json:
    content = [
        {
            "token": piece,
            "logprob": logprob,
            "bytes": list(piece.encode()),
            "top_logprobs": [],
        }
        for piece, logprob in tokens
    ]
    return {"content": content, "refusal": None}


Form = CompletionForm | ChatForm


class Answer:
    """The choices of a call, put together from deltas."""

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
        """Every choice has ended."""
        return all(choice.finish for choice in self._choices)

    def add(self, index: int, delta: Delta) -> None:
        """Appends to a choice."""
        self._choices[index].add(delta)

    def whole(self) -> Json:
        """The answer, when it is complete."""
        choices = [
            self._form.whole_choice(i, choice, logprobs=self._call.logprobs)
            for i, choice in enumerate(self._choices)
        ]
        return {
            **self._head,
            "object": self._form.whole,
            "choices": choices,
            "usage": self._usage(),
        }

    def chunk(self, index: int) -> Json:
        """An event with what is new of a choice."""
        first = index not in self._begun
        self._begun.add(index)
        choice = self._form.chunk_choice(
            index, self._choices[index], first=first, logprobs=self._call.logprobs
        )
        return {**self._head, "object": self._form.chunk, "choices": [choice], **self._no_usage()}

    def _no_usage(self) -> Json:
        return {"usage": None} if self._call.include_usage else {}

    def usage_chunk(self) -> Json:
        """The event that tells the number of tokens."""
        return {
            **self._head,
            "object": self._form.chunk,
            "choices": [],
            "usage": self._usage(),
        }

    def _usage(self) -> Json:
        prompt = self._call.prompt_tokens
        completion = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def error_of(error: UserError) -> ApiError:
    """A request that can never be served."""
    return ApiError(400, str(error))
