"""Converts between OpenAI's JSON and the online driver: bodies to `Request`s, `Delta`s to answers.

    POST /v1/completions        prompt: text, token ids, or a list of either
                                choices have `text`
    POST /v1/chat/completions   messages through the model's chat template
                                choices have `message`, or `delta` in the events of a stream
    POST /inference/v1/generate token_ids: a prompt; as in vLLM, for programs that render themselves
                                choices have `token_ids` and log-probabilities

`protocol` checks the form of a body. This module checks it against the model: name, tokenizer, lengths.
Log-probabilities are those of the tempered distribution before edits and truncation, the same that training
uses.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import reprlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.data.tokenizer import TextStream
from jaxrl.data.tool_calls import END_THINK, AnswerParser, AssistantMessage
from jaxrl.errors import UserError
from jaxrl.rollout.live_loop import Request
from jaxrl.rollout.sampling import SamplingOptions, truncation_of
from jaxrl.rollout.settings import EngineConfig
from jaxrl.serving.online_driver import Delta
from jaxrl.serving.openai.chat_prompts import (
    ChatPrompts,
    ChatQuery,
    ChatTurn,
    RequestTokenizer,
)
from jaxrl.serving.openai.logit_edits import LogitEdits, json_grammar
from jaxrl.serving.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    InvalidRequest,
    RequestType,
    Sampling,
    read_request,
)

Json = dict[str, Any]


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
      token_ids: whether the answer has the ids of prompt and answer.
      turn: the turn of a chat, or of ids that belong to a conversation; None for other calls.
    """

    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool = False
    turn: ChatTurn | None = None

    @property
    def needs_texts(self) -> bool:
        """Whether the texts of deltas are shown. The view of a whole chat is made of its ids."""
        return self.stream or self.logprobs or self.turn is None


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """Limits of a request, and the name of the model.

    Attributes:
      model: model name that requests must give.
      max_prompt_tokens: maximum number of tokens per prompt.
      max_tokens: maximum number of tokens per sample.
      max_context_tokens: maximum number of tokens of a prompt and its sample together.
      max_choices: maximum number of samples per request.
      stop_ids: token ids that end every sample.
    """

    model: str
    max_prompt_tokens: int
    max_tokens: int
    max_context_tokens: int
    max_choices: int = 128
    stop_ids: tuple[int, ...] = ()

    @staticmethod
    def of_engine(model: str, sizes: EngineConfig) -> RequestLimits:
        """What an engine of these sizes takes, under a name."""
        return RequestLimits(
            model,
            sizes.max_prompt_tokens,
            sizes.max_response_tokens,
            sizes.max_context_tokens,
            stop_ids=sizes.stop_ids,
        )


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
    return Call(
        _requests(request, prompts, max_tokens, limits, tokenizer),
        request.stream,
        request.stream_options.include_usage,
        request.logprobs is not None,
        request.return_token_ids,
    )


def read_chat(
    body: Json,
    tokenizer: RequestTokenizer,
    limits: RequestLimits,
    *,
    prompts: ChatPrompts,
    parser: AnswerParser,
    keys: Sequence[str] = (),
) -> Call:
    """Parses the body of POST /v1/chat/completions.

    Args:
      body: the body.
      tokenizer, limits: what the model takes.
      prompts: where the prompt comes from.
      parser: parser of the model's answers.
      keys: the client's keys, for `prompts`.

    Raises:
      ApiError, UserError: the body is malformed or asks for something that is not supported.
    """
    request = _checked(ChatRequest, body, limits)
    tools = tuple(request.tools)
    start = ""
    if tools:
        form = parser.format
        if form is None or "tools" not in tokenizer.chat_template.source:  # pyright: ignore[reportOptionalMemberAccess]
            raise ApiError(
                400,
                "the chat template of this model has no tools in a form that is known here (Qwen's and "
                "Hermes', Llama 3's, Mistral's); leave tools out, or serve a model with one of them",
                param="tools",
            )
        if request.forced_tool is not None:
            start = form.begin(request.forced_tool)
    query = ChatQuery(
        messages=tuple(message.to_dict() for message in request.messages),
        tools=tools,
        variables=request.chat_template_kwargs,
        start=start,
        stop=request.stops,
        calls=bool(tools) and request.tool_choice != "none",
        num_choices=request.n,
    )
    said = [
        message.text + "".join(c.function.arguments for c in message.tool_calls)
        for message in request.messages
    ]
    _check_length("".join([*said, json.dumps(tools) if tools else ""]), tokenizer, limits)
    turn = prompts.open(query, keys)
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    after = None
    if request.answer_schema is not None and parser.opens_reasoning(turn.prompt_ids):
        after = _end_of_reasoning(tokenizer)
    return Call(
        _requests_of_turn(
            request, turn.prompt_ids, max_tokens, limits, tokenizer, turn, after=after
        ),
        request.stream,
        request.stream_options.include_usage,
        request.logprobs,
        request.return_token_ids,
        turn,
    )


def read_generate(
    body: Json,
    tokenizer: RequestTokenizer,
    limits: RequestLimits,
    *,
    prompts: ChatPrompts,
    keys: Sequence[str] = (),
) -> Call:
    """Parses the body of POST /inference/v1/generate; arguments as for `read_chat`.

    Raises:
      ApiError, UserError: the body is malformed or asks for something that is not supported.
    """
    request = _checked(GenerateRequest, body, limits)
    params = request.sampling_params
    if unknown := set(params.stop_token_ids) - set(limits.stop_ids):
        raise ApiError(
            400,
            f"sampling_params.stop_token_ids has {reprlib.repr(sorted(unknown))}; answers of this server "
            f"end with {list(limits.stop_ids)}: name others as eos_token_id in the model's "
            "generation_config.json",
            param="sampling_params.stop_token_ids",
        )
    prompt = np.array(request.token_ids, np.int32)
    turn = prompts.open_ids(prompt, params.n, keys)
    requests = _requests_of_turn(params, prompt, params.max_tokens, limits, tokenizer, turn)
    logprobs = params.logprobs is not None
    return Call(requests, stream=False, include_usage=False, logprobs=logprobs, turn=turn)


def _requests_of_turn(
    sampling: Sampling,
    prompt: np.ndarray,
    max_tokens: int | None,
    limits: RequestLimits,
    tokenizer: RequestTokenizer,
    turn: ChatTurn | None,
    **further: Any,
) -> tuple[Request, ...]:
    """The requests of a prompt, drawn as its turn says if there is one that says so."""
    drawn = None if turn is None else turn.drawn
    # A prompt that leaves no room is refused later, with a better message.
    rest = max(1, min(limits.max_tokens, limits.max_context_tokens - len(prompt)))
    if max_tokens is None:
        max_tokens = rest
    elif drawn is not None:
        max_tokens = min(max_tokens, rest)
    requests = _requests(sampling, [prompt], max_tokens, limits, tokenizer, **further)
    return requests if drawn is None else tuple(map(drawn, requests))


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


def _end_of_reasoning(tokenizer: RequestTokenizer) -> int:
    """The token that ends the reasoning that a prompt has opened."""
    ids = tokenizer.encode(END_THINK)
    if len(ids) != 1:
        raise ApiError(
            400,
            f"the prompt opens the model's reasoning, whose end has {len(ids)} tokens; leave response_format "
            "out",
            param="response_format",
        )
    return int(ids[0])


def _edits(
    sampling: Sampling, tokenizer: RequestTokenizer, limits: RequestLimits, after: int | None
) -> LogitEdits | None:
    """The edits of logits that a request asks for; None for none."""
    grammar = None
    if sampling.answer_schema is not None:
        try:
            grammar = json_grammar(tokenizer, limits.stop_ids, sampling.answer_schema)
        except UserError as error:
            raise ApiError(400, str(error), param="response_format") from error
    bias = {int(token): float(value) for token, value in sampling.logit_bias.items()}
    penalties = sampling.presence_penalty, sampling.frequency_penalty
    if not (grammar or bias or any(penalties)):
        return None
    return LogitEdits(bias, *penalties, grammar, after)


def _requests(
    sampling: Sampling,
    prompts: Sequence[np.ndarray],
    max_tokens: int,
    limits: RequestLimits,
    tokenizer: RequestTokenizer,
    *,
    after: int | None = None,
) -> tuple[Request, ...]:
    """The requests of some prompts.

    Args:
      sampling, prompts, max_tokens, limits: what is asked for.
      tokenizer: tokenizer of the model.
      after: token after which a response format holds; None if it holds from the beginning.
    """
    _check_sizes(sampling, prompts, max_tokens, limits)
    truncation = truncation_of(
        # Some clients send -1 to disable top_k.
        top_k=max(sampling.top_k, 0),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        repetition_penalty=sampling.repetition_penalty,
    )
    temperature = sampling.temperature if sampling.temperature >= _LOWEST_TEMPERATURE else 0.0
    seed = secrets.randbits(31) if sampling.seed is None else sampling.seed
    options = SamplingOptions(
        sampling.n,
        temperature=temperature,
        truncation=truncation,
        stop_strings=sampling.stops,
        edits=_edits(sampling, tokenizer, limits, after),
        top_logprobs=sampling.num_top,
    )
    return tuple(Request(prompt, max_tokens, seed % 2**31, options) for prompt in prompts)


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
    sampling: Sampling, prompts: Sequence[np.ndarray], max_tokens: int, limits: RequestLimits
) -> None:
    if not 1 <= sampling.n * len(prompts) <= limits.max_choices:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with n {sampling.n}: this server gives 1 to {limits.max_choices} "
            "choices",
            param="n",
        )
    if sampling.min_tokens > max_tokens:
        raise ApiError(
            400,
            f"min_tokens {sampling.min_tokens} is above max_tokens {max_tokens}; lower it",
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


class _Token(NamedTuple):
    """A token of a choice.

    Attributes:
      text: its text in the answer.
      logprob: its log-probability.
      top: texts and log-probabilities of the most probable tokens at its place.
    """

    text: str
    logprob: float
    top: Sequence[tuple[str, float]]


class Choice:
    """One sample as it grows.

    Attributes:
      text: new text since the last `take`.
      num_tokens: number of tokens so far.
      finish: reason why it has ended; None before.
    """

    def __init__(self, spell: Callable[[int], str]):
        """Args: a function that returns the text of a token id."""
        self._spell = spell
        self.text = ""
        self.num_tokens = 0
        self.finish: str | None = None
        self._tokens: list[_Token] = []
        self._ids: list[int] = []
        self._spelled = 0

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.num_tokens += len(delta.tokens)
        self.finish = delta.finish or None
        tops: Sequence[Sequence[tuple[str, float]]] = [()] * len(delta.tokens)
        if delta.top is not None:
            tops = [
                [(self._spell(token), logprob) for token, logprob in zip(*row, strict=True)]
                for row in zip(delta.top.token.tolist(), delta.top.logprob.tolist(), strict=True)
            ]
        self._tokens += map(_Token, delta.pieces, map(float, delta.logprob), tops)
        self._ids += delta.tokens.tolist()

    def take(self) -> tuple[str, list[_Token], list[int], int]:
        """What is new since the last call: text, tokens, ids, and the text offset."""
        text, tokens, ids, start = self.text, self._tokens, self._ids, self._spelled
        self.text, self._tokens, self._ids = "", [], []
        self._spelled += sum(len(token.text) for token in tokens)
        return text, tokens, ids, start


class ChatChoice(Choice):
    """One answer of a chat as it grows; its text is shown as a view.

    Attributes:
      view: the view of the whole answer; None before it has ended.
    """

    def __init__(
        self,
        index: int,
        turn: ChatTurn,
        parser: AnswerParser,
        spell: Callable[[int], str],
        *,
        stream: bool,
    ):
        super().__init__(spell)
        self._index, self._turn, self._parser = index, turn, parser
        self._deltas: list[Delta] = []
        self.view: AssistantMessage | None = None
        # For the events of a stream: the text so far, and how much of reasoning and content was sent.
        self._whole = turn.query.start
        self._opened = not self._whole and parser.opens_reasoning(turn.prompt_ids)
        hides = stream and parser.hides_calls
        self._stream = TextStream(parser.decode, turn.query.stop) if hides else None
        self._sent = 0, 0

    def add(self, delta: Delta) -> None:
        super().add(delta)
        self._deltas.append(delta)
        self._whole += delta.text if self._stream is None else self._stream.add(delta.tokens)[1]
        if delta.finish:
            self.view = self._turn.answered(self._index, self._deltas)
            self.finish = "tool_calls" if self.view.calls else delta.finish

    def new_fields(self) -> Json:
        """The fields of a message that are new since the last call. Calls come whole, with the end."""
        if self.view is None:
            reasoning, content = self._parser.visible(
                self._whole, opened=self._opened, calls=self._turn.query.calls
            )
        else:
            reasoning, content = self.view.reasoning, self.view.content
        fields: Json = {"content": content[self._sent[1] :]}
        if new := reasoning[self._sent[0] :]:
            fields["reasoning_content"] = new
        self._sent = len(reasoning), len(content)
        if self.view is not None and self.view.calls:
            calls = self.view.to_message()["tool_calls"]
            fields["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        return fields


@dataclasses.dataclass(frozen=True)
class Form:
    """The shape of an endpoint's answers.

    Attributes:
      prefix: start of the ids.
      whole, event: kind of a whole answer and of an event of a stream.
      choice: (index, choice, call) -> the choice of a whole answer.
      new_part: (index, choice, call, is the first) -> the choice of an event.
      id_name: name of the id.
    """

    prefix: str
    whole: str
    event: str
    choice: Callable[[int, Choice, Call], Json]
    new_part: Callable[[int, Choice, Call, bool], Json]
    id_name: str = "id"


def _completion_choice(index: int, choice: Choice, call: Call, first: bool = True) -> Json:
    text, tokens, ids, start = choice.take()
    ends = itertools.accumulate((len(token.text) for token in tokens), initial=start)
    wants_top = call.requests[0].options.top_logprobs
    of_tokens = {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        # With the sampled token. Of several with the same text the most probable one is shown.
        "top_logprobs": [
            {token.text: token.logprob, **dict(reversed(token.top))} for token in tokens
        ]
        if wants_top
        else None,
        "text_offset": list(ends)[:-1],
    }
    part: Json = {"text": text, "logprobs": of_tokens if call.logprobs else None}
    if call.token_ids:
        part["token_ids"] = ids
        if first:
            prompt = call.requests[index // call.requests[0].options.num_samples].prompt
            part["prompt_token_ids"] = prompt.tolist()
    return {"index": index, **part, "finish_reason": choice.finish}


def _chat_choice(
    index: int, choice: Choice, call: Call, first: bool = True, *, name: str = "message"
) -> Json:
    assert isinstance(choice, ChatChoice), "choices of a chat have views"
    _, tokens, ids, _ = choice.take()
    if name == "message":
        assert choice.view is not None, "a whole answer has ended"
        message = choice.view.to_message() | {"refusal": None}
    else:
        # Only the first event of a stream has the role.
        message = ({"role": "assistant"} if first else {}) | choice.new_fields()
    content = [
        {
            **_chat_token(token.text, token.logprob),
            "top_logprobs": [_chat_token(*each) for each in token.top],
        }
        for token in tokens
    ]
    part: Json = {
        name: message,
        "logprobs": {"content": content, "refusal": None} if call.logprobs else None,
    }
    if call.token_ids:
        part["token_ids"] = ids
    return {"index": index, **part, "finish_reason": choice.finish}


def _chat_token(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _generate_choice(index: int, choice: Choice, call: Call, first: bool = True) -> Json:
    _, tokens, ids, _ = choice.take()
    # Named by its id: the text of a token may be a part of a character.
    content = [
        {"token": f"token_id:{token_id}", "logprob": token.logprob}
        for token_id, token in zip(ids, tokens, strict=True)
    ]
    part = {"token_ids": ids, "logprobs": {"content": content} if call.logprobs else None}
    return {"index": index, **part, "finish_reason": choice.finish}


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
GENERATE = Form("gen-", "generate", "generate", _generate_choice, _generate_choice, "request_id")


class Answer:
    """The choices of a call, assembled from deltas; returns whole answers and events as JSON."""

    def __init__(self, call: Call, form: Form, model: str, parser: AnswerParser):
        self._call = call
        self._form = form
        self._head = {
            form.id_name: form.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }
        # Choice i is sample i % n of prompt i // n.
        num_choices = sum(request.options.num_samples for request in call.requests)
        turn = call.turn
        spell = functools.cache(lambda token: parser.decode([token]))
        self._choices = [
            Choice(spell)
            if turn is None
            else ChatChoice(i, turn, parser, spell, stream=call.stream)
            for i in range(num_choices)
        ]
        self._begun: set[int] = set()

    @property
    def complete(self) -> bool:
        return all(choice.finish for choice in self._choices)

    def add(self, index: int, delta: Delta) -> None:
        self._choices[index].add(delta)

    def whole(self) -> str:
        """The whole answer, once it is complete."""
        choices = [self._form.choice(i, x, self._call) for i, x in enumerate(self._choices)]
        return self._json(self._form.whole, choices, {**self._prompt_ids(), **self._usage()})

    def event(self, index: int) -> str:
        """The event with the new part of a choice. If the counts are asked for, its own are null."""
        first = index not in self._begun
        further = {} if self._begun else self._prompt_ids()
        self._begun.add(index)
        part = self._form.new_part(index, self._choices[index], self._call, first)
        usage = {"usage": None} if self._call.include_usage else {}
        return self._json(self._form.event, [part], {**further, **usage})

    def usage_event(self) -> str:
        """The event with the token counts."""
        return self._json(self._form.event, [], self._usage())

    def _json(self, kind: str, choices: list[Json], further: Json) -> str:
        return to_json({**self._head, **further, "object": kind, "choices": choices})

    def _prompt_ids(self) -> Json:
        """The ids of a chat's prompt, which stand beside the choices, as in vLLM."""
        if self._call.turn is None or not self._call.token_ids:
            return {}
        return {"prompt_token_ids": self._call.turn.prompt_ids.tolist()}

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
