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
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxrl.data.tokenizer import TextStream, Tokenizer
from jaxrl.errors import UserError
from jaxrl.rollout.decode_state import TokenScores, TopTokens
from jaxrl.rollout.live_loop import Request
from jaxrl.rollout.sampling import SamplingOptions, truncation_of
from jaxrl.rollout.settings import EngineConfig
from jaxrl_serving.call_formats import CallFormat
from jaxrl_serving.online_driver import LENGTH, STOP, Delta
from jaxrl_serving.openai.chat_prompts import (
    ChatPrompts,
    ChatQuery,
    ChatTurn,
    RenderedPrompts,
)
from jaxrl_serving.openai.logit_edits import LogitEdits, json_grammar, matcher_of, tool_grammar
from jaxrl_serving.openai.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    RequestType,
    Sampling,
    TokenizeRequest,
    read_request,
)
from jaxrl_serving.tool_calls import END_THINK, AnswerParser, AssistantMessage

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Call:
    """A client's request, parsed.

    Attributes:
      requests: requests to the driver, one per prompt, all with the same number of samples.
      stream: whether the answer is sent as events.
      include_usage: whether the last event has the token counts.
      logprobs: whether the answer has log-probabilities.
      token_ids: whether the answer has the ids of prompt and answer.
      prompt_logprobs: number of most probable tokens to show at each place of the prompt; None without them.
      echoes: text of each prompt that an answer begins with; empty without them.
      only_echo: whether nothing but the prompt is shown. A token is sampled and dropped.
      shows_stop: whether answers show the text that ended them.
      turn: the turn of a chat, or of ids that belong to a conversation; None for other calls.
    """

    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool = False
    turn: ChatTurn | None = None
    prompt_logprobs: int | None = None
    echoes: tuple[str, ...] = ()
    only_echo: bool = False
    shows_stop: bool = False


# Samples of a request.
_MAX_CHOICES = 128
# OpenAI's default number of tokens for completions. Chats default to the server's limit.
_DEFAULT_COMPLETION_TOKENS = 16
# Characters per token; twice the value of English prose.
_CHARS_PER_TOKEN = 8
# Temperatures below count as greedy: division by them would overflow float32.
LOWEST_TEMPERATURE = 1e-5


@dataclasses.dataclass(frozen=True)
class RequestReader:
    """Parses the bodies of requests to a model.

    Its methods take a body and what the client sent as `X-Session-ID` and as bearer token.

    Raises:
      ApiError, UserError: the body is malformed or asks for something that is not supported.

    Attributes:
      tokenizer, model, sizes: the model's tokenizer, its name in requests, and the sizes of its engine.
      prompts: where the prompts of chats come from.
      parser: parser of the model's answers.
      max_waiting: number of samples that may wait at the server.
    """

    tokenizer: Tokenizer
    model: str
    sizes: EngineConfig
    prompts: ChatPrompts
    parser: AnswerParser
    max_waiting: int = 10_000

    def completion(self, body: Json, keys: Sequence[str] = ()) -> Call:
        """Parses the body of POST /v1/completions."""
        request = self._checked(CompletionRequest, body)
        for prompt in request.prompts:
            if isinstance(prompt, str):
                self._check_length(prompt)
        given = request.prompts
        if request.add_special_tokens:
            encode = self.tokenizer.backend.encode
            given = [encode(prompt).ids if isinstance(prompt, str) else prompt for prompt in given]
        prompts = [
            self.tokenizer.encode(prompt) if isinstance(prompt, str) else np.array(prompt, np.int32)
            for prompt in given
        ]
        max_tokens = request.max_tokens
        if max_tokens is None:
            max_tokens = min(_DEFAULT_COMPLETION_TOKENS, self.sizes.max_response_tokens)
        only_echo = request.echo and max_tokens == 0
        echoes = ()
        if request.echo:
            echoes = tuple(
                text if isinstance(text, str) else "".join(self.parser.pieces(ids))
                for text, ids in zip(request.prompts, prompts, strict=True)
            )
        return Call(
            self._requests(request, prompts, 1 if only_echo else max_tokens),
            request.stream,
            request.stream_options.include_usage,
            request.logprobs is not None,
            request.return_token_ids,
            prompt_logprobs=request.prompt_logprobs,
            echoes=echoes,
            only_echo=only_echo,
            shows_stop=request.include_stop_str_in_output,
        )

    def chat(self, body: Json, keys: Sequence[str] = ()) -> Call:
        """Parses the body of POST /v1/chat/completions."""
        request = self._checked(ChatRequest, body)
        turn = self.prompts.open(self._query(request), keys)
        max_tokens = request.max_completion_tokens
        if max_tokens is None:
            max_tokens = request.max_tokens
        return Call(
            self._requests(request, [turn.prompt_ids], max_tokens, turn),
            request.stream,
            request.stream_options.include_usage,
            request.logprobs,
            request.return_token_ids,
            turn,
            prompt_logprobs=request.prompt_logprobs,
            shows_stop=request.include_stop_str_in_output,
        )

    def _query(self, request: ChatRequest) -> ChatQuery:
        tools, form, start = tuple(request.tools), self.parser.format, ""
        if tools:
            template = self.tokenizer.chat_template
            if form is None or template is None or "tools" not in template.source(tools=True):
                raise ApiError(
                    "the chat template of this model has no tools in a form that is known here (Qwen's, "
                    "Hermes', Qwen3-Coder's, GLM's, Gemma 4's, gpt-oss's, Llama 3's, Mistral's); leave tools "
                    "out, or serve a model with one of them",
                    param="tools",
                )
            if request.forced_tool is not None:
                self._check_held(form, request)
                start = form.begin(request.forced_tool)
        said = [
            message.content + (json.dumps(message.tool_calls) if message.tool_calls else "")
            for message in request.messages
        ]
        self._check_length("".join([*said, json.dumps(tools) if tools else ""]))
        hides = not request.include_stop_str_in_output
        return ChatQuery(
            messages=tuple(message.to_dict() for message in request.messages),
            tools=tools,
            variables=request.variables,
            start=start,
            stop=request.stops if hides else (),
            stop_ids=tuple(request.stop_token_ids) if hides else (),
            calls=bool(tools) and request.tool_choice != "none",
            num_choices=request.n,
            opens=request.add_generation_prompt,
            continues=request.continue_final_message,
        )

    def _check_held(self, form: CallFormat, sampling: Sampling) -> None:
        if not form.forced:
            raise ApiError(
                "calls of this model are written in a form that nothing here holds it to; leave tool_choice "
                "at auto, and strict out",
                param=sampling.holds_calls,
            )

    def generate(self, body: Json, keys: Sequence[str] = ()) -> Call:
        """Parses the body of POST /inference/v1/generate."""
        request = self._checked(GenerateRequest, body)
        params = request.sampling_params
        prompt = np.array(request.token_ids, np.int32)
        turn = self.prompts.open_ids(prompt, params.n, keys)
        requests = self._requests(params, [prompt], params.max_tokens, turn)
        logprobs = params.logprobs is not None
        return Call(
            requests,
            stream=False,
            include_usage=False,
            logprobs=logprobs,
            turn=turn,
            prompt_logprobs=params.prompt_logprobs,
        )

    def tokenize(self, body: Json) -> Json:
        """The answer to POST /tokenize."""
        text = {"model": self.model, **body}
        if "messages" in body:
            # Of a chat only its prompt.
            text = {k: v for k, v in text.items() if k in TokenizeRequest.model_fields}
            others = {k: v for k, v in body.items() if k == "model" or k not in text}
            query = self._query(self._checked(ChatRequest, {"model": self.model, **others}))
            rendered = RenderedPrompts(self.tokenizer, self.parser)
            text["prompt"] = rendered.render(query)
        request = self._checked(TokenizeRequest, text)
        self._check_length(request.prompt)
        encoded = self.tokenizer.backend.encode(
            request.prompt, add_special_tokens=request.add_special_tokens
        )
        strings = encoded.tokens if request.return_token_strs else None
        return {
            "count": len(encoded.ids),
            "max_model_len": self.sizes.max_context_tokens,
            "tokens": encoded.ids,
            "token_strs": strings,
        }

    def detokenize(self, body: Json) -> Json:
        """The answer to POST /detokenize. Special tokens have their names in it, as in vLLM."""
        request = self._checked(DetokenizeRequest, {"model": self.model, **body})
        self._check_ids("tokens", request.tokens)
        return {"prompt": self.tokenizer.backend.decode(request.tokens, skip_special_tokens=False)}

    def check_model(self, name: str) -> None:
        """Raises ApiError with status 404 if `name` is not the server's model."""
        if name != self.model:
            raise ApiError(
                f"model {reprlib.repr(name)} is not here; this server has {self.model!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _checked(self, kind: type[RequestType], body: Json) -> RequestType:
        request = read_request(kind, body)
        self.check_model(request.model)
        return request

    def _check_ids(self, field: str, tokens: Sequence[int]) -> None:
        most = self.tokenizer.vocab_size - 1
        if unknown := [token for token in tokens if token > most]:
            raise ApiError(
                f"{field} has {unknown[0]}; this model's ids go from 0 to {most}: use its own tokenizer",
                param=field,
            )

    def _check_length(self, text: str) -> None:
        """Refuses a text whose beginning alone is too long."""
        # Tokenising megabytes of text takes seconds, and any client can send them.
        most = self.sizes.max_context_tokens
        reach = _CHARS_PER_TOKEN * most
        if len(text) > reach and len(self.tokenizer.encode(text[:reach])) > most:
            raise ApiError(
                f"This model's maximum context length is {most} tokens, and of the prompt's "
                f"{len(text)} characters the first {reach} have more; shorten the prompt",
                code="context_length_exceeded",
            )

    def _requests(
        self,
        sampling: Sampling,
        prompts: Sequence[np.ndarray],
        max_tokens: int | None,
        turn: ChatTurn | None = None,
    ) -> tuple[Request, ...]:
        """The requests of some prompts, with the settings of their turn if it has its own (`ChatTurn.drawn`).

        Without `max_tokens` a sample may fill the context.
        """
        # A prompt that leaves no room is refused below, with a better message.
        room = self.sizes.max_context_tokens - max(map(len, prompts), default=0)
        rest = max(1, min(self.sizes.max_response_tokens, room))
        drawn = None if turn is None else turn.drawn
        if max_tokens is None:
            max_tokens = rest
        elif drawn is not None:
            max_tokens = min(max_tokens, rest)
        self._check_sizes(sampling, prompts, max_tokens)
        truncation = truncation_of(
            # Some clients send -1 to disable top_k.
            top_k=max(sampling.top_k, 0),
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            min_tokens=sampling.min_tokens,
            repetition_penalty=sampling.repetition_penalty,
        )
        temperature = sampling.temperature if sampling.temperature >= LOWEST_TEMPERATURE else 0.0
        seed = secrets.randbits(31) if sampling.seed is None else sampling.seed
        stop_ids = self._stop_ids(sampling)
        if drawn is not None and sampling.scores_prompt:
            raise ApiError(
                "prompt_logprobs: a session gives those of its answers alone; leave it out",
                param="prompt_logprobs",
            )
        options = SamplingOptions(
            sampling.n,
            temperature=temperature,
            truncation=truncation,
            stop_strings=sampling.stops,
            stop_ids=stop_ids,
            ignores_stop_ids=sampling.ignore_eos,
            scores_prompt=sampling.scores_prompt,
            edits=self._edits(sampling, turn, stop_ids),
            top_logprobs=sampling.num_top,
        )
        # OpenAI's seeds have 64 bits, those of sampling keys 31.
        requests = (Request(prompt, max_tokens, seed % 2**31, options) for prompt in prompts)
        return tuple(requests if drawn is None else map(drawn, requests))

    def _stop_ids(self, sampling: Sampling) -> tuple[int, ...]:
        """Ids that end the samples of a request, without those at which the engine ends them anyway."""
        try:
            named = self.tokenizer.ids_named_by(sampling.stops)
        except UserError as error:
            raise ApiError(str(error), param="stop") from error
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        known = () if sampling.ignore_eos else self.sizes.stop_ids
        return tuple({*sampling.stop_token_ids, *named}.difference(known))

    def _edits(
        self, sampling: Sampling, turn: ChatTurn | None, stop_ids: tuple[int, ...]
    ) -> LogitEdits | None:
        """The edits of logits that a request asks for; None for none."""
        grammar = after = None
        try:
            ids = self.tokenizer, self.sizes.stop_ids
            if sampling.answer_schema is not None:
                if turn is not None and self.parser.opens_reasoning(turn.prompt_ids):
                    # The format holds after the reasoning.
                    end = self.tokenizer.encode(END_THINK)
                    if len(end) != 1:
                        raise UserError(
                            f"the prompt opens the model's reasoning, whose end has {len(end)} tokens; leave "
                            "response_format out"
                        )
                    after = int(end[0])
                text = json_grammar(sampling.answer_schema)
                grammar = matcher_of(*ids, text, "response_format")
            # Not for answers that are trained: these are drawn from the policy without edits.
            elif turn is not None and turn.drawn is None and sampling.holds_calls:
                assert self.parser.format is not None, "tools have a format"
                query = turn.query
                self._check_held(self.parser.format, sampling)
                text = tool_grammar(*ids, self.parser.format, query.tools, query.start)
                grammar = matcher_of(*ids, text, "strict")
        except UserError as error:
            raise ApiError(str(error), param=sampling.holds_calls or "response_format") from error
        bias = {int(token): float(value) for token, value in sampling.logit_bias.items()}
        penalties = sampling.presence_penalty, sampling.frequency_penalty
        if grammar is not None and sampling.ignore_eos:
            raise ApiError(
                "ignore_eos: an answer with a form ends where the form does; leave one out",
                param="ignore_eos",
            )
        # The engine knows its own stop ids, and answers that are trained have the run's limits.
        early = sampling.min_tokens if stop_ids and (turn is None or turn.drawn is None) else 0
        if not (grammar or bias or any(penalties) or early):
            return None
        return LogitEdits(bias, *penalties, grammar, after, early, stop_ids)

    def _check_sizes(
        self, sampling: Sampling, prompts: Sequence[np.ndarray], max_tokens: int
    ) -> None:
        sizes = self.sizes
        most_choices = min(_MAX_CHOICES, self.max_waiting)
        if not 1 <= sampling.n * len(prompts) <= most_choices:
            raise ApiError(
                f"{len(prompts)} prompts with n {sampling.n}: this server gives 1 to {most_choices} "
                "choices at once; ask for fewer",
                param="prompt" if len(prompts) > most_choices else "n",
            )
        if max_tokens < 1:
            raise ApiError(f"max_tokens is {max_tokens}; it must be 1 or more", param="max_tokens")
        if sampling.min_tokens > max_tokens:
            raise ApiError(
                f"min_tokens {sampling.min_tokens} is above max_tokens {max_tokens}; lower it",
                param="min_tokens",
            )
        longest, most = max(map(len, prompts)), sizes.max_context_tokens
        if longest > min(sizes.max_prompt_tokens, most - 1):
            raise ApiError(
                f"This model's maximum context length is {most} tokens, of which prompts have "
                f"{sizes.max_prompt_tokens} at most; this one has {longest}: shorten it",
                code="context_length_exceeded",
            )
        if longest + max_tokens > most:
            raise ApiError(
                f"This model's maximum context length is {most} tokens, and {longest} of the prompt with "
                f"max_tokens {max_tokens} are {longest + max_tokens}; shorten the prompt, or ask for fewer "
                "tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )


class _Token(NamedTuple):
    """A token of a choice.

    Attributes:
      token: its id.
      text: its text in the answer.
      logprob: its log-probability; None for the first of a prompt.
      top: the same of the most probable tokens at its place.
    """

    token: int
    text: str
    logprob: float | None
    top: Sequence[_Token] = ()


class Choice:
    """One sample of a call as it grows, shown as one of the endpoints shows it.

    Attributes:
      prefix, id_name: beginning and name of an answer's id.
      kinds: kind of a whole answer, and of an event of a stream.
      one_prompt: whether all choices of an answer have the same prompt.
      num_tokens: number of tokens so far.
      finish: reason why it has ended; None before.
      view: the view of the whole answer to a turn; None before it has ended.
    """

    prefix: ClassVar[str]
    id_name: ClassVar[str] = "id"
    kinds: ClassVar[tuple[str, str]]
    one_prompt: ClassVar[bool] = True

    def __init__(self, index: int, call: Call, parser: AnswerParser):
        self._index, self._call, self._parser = index, call, parser
        self.num_tokens = 0
        self.finish: str | None = None
        self.view: AssistantMessage | None = None
        self._deltas: list[Delta] = []
        self._num_shown = 0
        self._spell = functools.cache(lambda token: parser.decode([token]))
        # Of the prompt, as they came with the first tokens.
        self._scores: TokenScores | None = None

    @property
    def _prompt(self) -> np.ndarray:
        call = self._call
        return call.requests[self._index // call.requests[0].options.num_samples].prompt

    def add(self, delta: Delta) -> None:
        if self._scores is None:
            self._scores = delta.prompt
        if self._call.only_echo:
            delta = Delta(*delta[:0].arrays, delta.index, (), "", LENGTH, None, delta.prompt)
        elif name := self._stop_name(delta):
            delta = dataclasses.replace(delta, text=delta.text + name)
        self._deltas.append(delta)
        self.num_tokens += len(delta.tokens)
        self.finish = delta.finish or None
        if delta.finish and self._call.turn is not None:
            self.view = self._call.turn.answered(self._index, self._deltas)
            # OpenAI's reason, by which clients know that they have to call tools.
            self.finish = "tool_calls" if self.view.calls else delta.finish
            if not self.view.calls:
                shown = self.view.content + self._stop_name(delta)
                self.view = dataclasses.replace(self.view, content=shown)

    def _stop_name(self, delta: Delta) -> str:
        """The name of the special token that ended the answer, if it is shown; "" for other ends."""
        if not (self._call.shows_stop and delta.finish == STOP and len(delta.tokens)):
            return ""
        last = int(delta.tokens[-1])
        is_stop = last in self._call.requests[0].options.stop_ids
        return self._parser.special_name(last) if is_stop else ""

    def show(self, *, whole: bool) -> Json:
        """What is new since the last call, for a whole answer or for an event."""
        new, first = self._deltas[self._num_shown :], not self._num_shown
        fields = self._fields(new, first=first, whole=whole)
        self._num_shown = len(self._deltas)
        return {"index": self._index, **fields, "finish_reason": self.finish}

    def _fields(self, new: Sequence[Delta], *, first: bool, whole: bool) -> Json:
        raise NotImplementedError

    def _tokens(self, new: Sequence[Delta]) -> list[_Token]:
        tokens: list[_Token] = []
        for delta in new:
            tops: Sequence[Sequence[_Token]] = [()] * len(delta.tokens)
            if delta.top is not None:
                tops = self._tops(delta.top)
            given = (delta.tokens.tolist(), delta.pieces, map(float, delta.logprob), tops)
            tokens += map(_Token, *given)
        return tokens

    def _tops(self, top: TopTokens) -> list[list[_Token]]:
        rows = zip(top.token.tolist(), top.logprob.tolist(), strict=True)
        return [[_Token(i, self._spell(i), x) for i, x in zip(*row, strict=True)] for row in rows]

    def _prompt_tokens(self, num_top: int) -> list[_Token]:
        """The tokens of the prompt, with the most probable ones at each place; the first has no scores."""
        ids, pieces, scores = self._prompt.tolist(), self._parser.pieces(self._prompt), self._scores
        assert scores is not None, "they come with the first tokens"
        tops = self._tops(TopTokens(*(x[:, :num_top] for x in scores.top)))
        first = _Token(ids[0], pieces[0], None)
        return [first, *map(_Token, ids[1:], pieces[1:], scores.logprob.tolist(), tops)]

    def prompt_logprobs(self) -> Json:
        """What is shown of the prompt's log-probabilities, in vLLM's form."""
        if (num_top := self._call.prompt_logprobs) is None:
            return {}
        shown: list[Json | None] = [None]
        assert self._scores is not None, "they come with the first tokens"
        ranks = self._scores.rank.tolist()
        for token, rank in zip(self._prompt_tokens(num_top)[1:], ranks, strict=True):
            # By rank, and the prompt's own token last if it is none of them.
            ranked = [*((x, i + 1) for i, x in enumerate(token.top)), (token, rank)]
            shown.append(
                {
                    str(x.token): {"logprob": x.logprob, "rank": r, "decoded_token": x.text}
                    for x, r in ranked
                }
            )
        return {"prompt_logprobs": shown}


def _ids(new: Sequence[Delta]) -> list[int]:
    return [token for delta in new for token in delta.tokens.tolist()]


class CompletionChoice(Choice):
    """One answer of /v1/completions."""

    prefix, kinds, one_prompt = "cmpl-", ("text_completion", "text_completion"), False
    # Characters whose tokens were shown.
    _spelled = 0

    def _fields(self, new: Sequence[Delta], *, first: bool, whole: bool) -> Json:
        call, options = self._call, self._call.requests[0].options
        part: Json = {"text": "".join(delta.text for delta in new), "logprobs": None}
        echoes = first and call.echoes
        if echoes:
            part["text"] = call.echoes[self._index // options.num_samples] + part["text"]
        if whole:
            part |= self.prompt_logprobs()
        if call.logprobs:
            tokens = self._tokens(new)
            if echoes:
                tokens = [*self._prompt_tokens(options.top_logprobs), *tokens]
            lengths = (len(token.text) for token in tokens)
            *offsets, self._spelled = itertools.accumulate(lengths, initial=self._spelled)
            part["logprobs"] = {
                "tokens": [token.text for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                # With the sampled token. Of several with the same text the most probable one is shown.
                "top_logprobs": [
                    None
                    if token.logprob is None
                    else {x.text: x.logprob for x in (token, *reversed(token.top))}
                    for token in tokens
                ]
                if options.top_logprobs
                else None,
                "text_offset": offsets,
            }
        if call.token_ids:
            part["token_ids"] = _ids(new)
            if first:
                part["prompt_token_ids"] = self._prompt.tolist()
        return part


class ChatChoice(Choice):
    """One answer of /v1/chat/completions; its text is shown as a view."""

    prefix, kinds = "chatcmpl-", ("chat.completion", "chat.completion.chunk")

    def __init__(self, index: int, call: Call, parser: AnswerParser):
        super().__init__(index, call, parser)
        assert call.turn is not None, "chats have turns"
        self._query = call.turn.query
        # For the events of a stream: the text so far, and how much of reasoning and content was sent.
        self._text = self._query.start
        self._opened = not self._text and parser.opens_reasoning(call.turn.prompt_ids)
        # The driver's text leaves out special tokens of calls, and `visible` must see them.
        hides = call.stream and bool(parser.kept)
        self._stream = TextStream(parser.decode, self._query.stop) if hides else None
        self._sent = 0, 0

    def _fields(self, new: Sequence[Delta], *, first: bool, whole: bool) -> Json:
        if whole:
            assert self.view is not None, "a whole answer has ended"
            part: Json = {"message": self.view.to_message() | {"refusal": None}}
        else:
            for delta in new:
                stream = self._stream
                self._text += delta.text if stream is None else stream.add(delta.tokens)[1]
            if self.view is None:
                reasoning, content = self._parser.visible(
                    self._text, opened=self._opened, calls=self._query.calls
                )
            else:
                reasoning, content = self.view.reasoning, self.view.content
            # Only the first event of a stream has the role.
            fields: Json = {"role": "assistant"} if first else {}
            fields["content"] = content[self._sent[1] :]
            if more := reasoning[self._sent[0] :]:
                fields["reasoning_content"] = more
            self._sent = len(reasoning), len(content)
            # Calls are sent whole, at the end.
            if self.view is not None and self.view.calls:
                calls = self.view.to_message()["tool_calls"]
                fields["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
            part = {"delta": fields}
        part["logprobs"] = None
        if self._call.logprobs:
            content = [
                {
                    **self._token_json(token),
                    "top_logprobs": [self._token_json(each) for each in token.top],
                }
                for token in self._tokens(new)
            ]
            part["logprobs"] = {"content": content, "refusal": None}
        return part | ({"token_ids": _ids(new)} if self._call.token_ids else {})

    def _token_json(self, token: _Token) -> Json:
        of_token = self._parser.token_bytes(token.token, token.text)
        return {"token": token.text, "logprob": token.logprob, "bytes": list(of_token)}


class GenerateChoice(Choice):
    """One answer of /inference/v1/generate."""

    prefix, id_name, kinds = "gen-", "request_id", ("generate", "generate")

    def _fields(self, new: Sequence[Delta], *, first: bool, whole: bool) -> Json:
        part: Json = {"token_ids": _ids(new), "logprobs": None}
        if self._call.logprobs:
            # Named by its id: the text of a token may be a part of a character.
            content = [
                {"token": f"token_id:{token}", "logprob": logprob}
                for delta in new
                for token, logprob in zip(
                    delta.tokens.tolist(), map(float, delta.logprob), strict=True
                )
            ]
            part["logprobs"] = {"content": content}
        return part


class Answer:
    """The choices of a call, assembled from deltas; returns whole answers and events as JSON."""

    def __init__(self, call: Call, form: type[Choice], model: str, parser: AnswerParser):
        self._call = call
        self._form = form
        self._head = {
            form.id_name: form.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }
        # Choice i is sample i % n of prompt i // n.
        num_choices = sum(request.options.num_samples for request in call.requests)
        self._choices = [form(i, call, parser) for i in range(num_choices)]
        self._begun = False

    @property
    def complete(self) -> bool:
        return all(choice.finish for choice in self._choices)

    def add(self, index: int, delta: Delta) -> None:
        self._choices[index].add(delta)

    def whole(self) -> Json:
        """The whole answer, once it is complete."""
        choices = [choice.show(whole=True) for choice in self._choices]
        of_prompt = self._choices[0].prompt_logprobs() if self._form.one_prompt else {}
        return self._json(0, choices, {**self._prompt_ids(), **of_prompt, **self._usage()})

    def event(self, index: int) -> Json:
        """The event with the new part of a choice. If the counts are asked for, its own are null."""
        further = {} if self._begun else self._prompt_ids()
        self._begun = True
        usage = {"usage": None} if self._call.include_usage else {}
        return self._json(1, [self._choices[index].show(whole=False)], {**further, **usage})

    def usage_event(self) -> Json:
        return self._json(1, [], self._usage())

    def _json(self, kind: int, choices: list[Json], further: Json) -> Json:
        return {**self._head, **further, "object": self._form.kinds[kind], "choices": choices}

    def _prompt_ids(self) -> Json:
        # The prompt of a chat belongs to all choices, as in vLLM; a completion's is in each choice.
        if self._call.turn is None or not self._call.token_ids:
            return {}
        return {"prompt_token_ids": self._call.turn.prompt_ids.tolist()}

    def _usage(self) -> Json:
        # Every prompt counts once, however many choices it has.
        prompt = sum(len(request.prompt) for request in self._call.requests)
        completion = sum(choice.num_tokens for choice in self._choices)
        return {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            }
        }
