"""OpenAI's requests as types: `CompletionRequest` and `ChatRequest`; vLLM's `GenerateRequest` of token ids.

The field descriptions of the request types define what a valid body holds. An unsupported field is accepted
only at values that change nothing (`_NEUTRAL`), because clients send their defaults. `null` means the
default, as with OpenAI. Besides OpenAI's fields there are `top_k`, `min_p`, `min_tokens`,
`repetition_penalty`, `return_token_ids` and `chat_template_kwargs`, named as in other servers.

Not checked here: everything that depends on the model (its name, its tokens, its longest prompt), and the
ranges of sampling settings such as `top_p`, which the sampler checks. OpenAI's own package is not used: it
does not check requests, and it brings the whole client.

`chat_template_kwargs` are variables that a client passes to the model's chat template. The template always
runs in a sandbox (`data.chat`). The checks here keep a client from overriding the server's own variables, and
ensure that the values are plain JSON.
"""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jaxrl.data.chat import RESERVED_VARIABLES
from jaxrl.data.messages import MessageFault, read_message
from jaxrl.rollout.sampling import MOST_TOP_LOGPROBS

MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_IDS = 16, 256, 64
MAX_VARIABLES, MAX_NAME_CHARACTERS, MAX_DEPTH = 64, 64, 8
# Depth of a tool's schema, and of the arguments of a call.
MAX_TOOLS, MAX_TOOL_DEPTH = 128, 32

# Tools are a field of their own; the server supports no documents.
_OF_THE_SERVER = RESERVED_VARIABLES | {"tools", "documents"}
# eos_token and the like: they belong to the model.
_SPECIAL_TOKEN = "_token"

VARIABLES_RULE = (
    f"an object of up to {MAX_VARIABLES} variables of the chat template, with texts, numbers, true, false, "
    f"null, and lists and objects of them up to {MAX_DEPTH} deep"
)


class ApiError(Exception):
    """An error answer in OpenAI's format.

    Attributes:
      status: HTTP status.
      body: JSON object. Its `param` is the path of a field, such as `messages[0].content`.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str = ""
    ):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        kind = "rate_limit_error" if status == 429 else kind
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": code or None}
        }


# Requests


def _check_encodes(text: str) -> str:
    # JSON can contain half of a surrogate pair, which no tokenizer accepts.
    text.encode()
    return text


def _refused(fault: str, *path: str | int, after: str = " ") -> PydanticCustomError:
    """The error for a part of a field; `path` leads to the part, `after` separates it from the fault."""
    return PydanticCustomError("refused", "refused", {"path": path, "fault": after + fault})


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    if (count := len(variables)) > MAX_VARIABLES:
        raise _refused(f"there are {count}; give at most {MAX_VARIABLES}", after=": ")
    for name, value in variables.items():
        if not (name.isascii() and name.isidentifier() and len(name) <= MAX_NAME_CHARACTERS):
            rule = (
                f"letters, digits and _, at most {MAX_NAME_CHARACTERS} of them, and no digit first"
            )
            raise _refused(f"{ascii(name)[:60]} is no name of a variable: {rule}", after=": ")
        if name in _OF_THE_SERVER or name.endswith(_SPECIAL_TOKEN):
            rule = "is set by the server; name other variables of the chat template"
            raise _refused(f"{name} {rule}", after=": ")
        if fault := _value_fault(value):
            raise _refused(f"{name} {fault}", after=": ")
    return variables


def _value_fault(value: Any, depth: int = MAX_DEPTH) -> str | None:
    level = [value]
    # Iterative: values can be nested deeper than Python's recursion limit.
    for _ in range(depth + 1):
        objects = [item for item in level if isinstance(item, dict)]
        texts = [item for item in level if isinstance(item, str)]
        texts += [name for item in objects for name in item]
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            return "holds half of a surrogate pair, which is no text"
        inner = [part for item in objects for part in item.values()]
        inner += [part for item in level if isinstance(item, list) for part in item]
        if not inner:
            return None
        level = inner
    return f"is nested too deeply; {depth} levels are read"


_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Checks a tool, which stays as it is: templates show it to the model.

    What is not read here is only text for the model.
    """
    if tool.get("type") != "function":
        raise _refused("must be 'function'; there are no other tools here", "type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _refused("must be an object with a name and parameters", "function")
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise _refused("must be 1 to 64 letters, digits, _ and -", "function", "name")
    if not isinstance(function.get("description") or "", str):
        raise _refused("must be a text", "function", "description")
    if function.get("strict") not in (None, False, True):
        raise _refused("must be true or false", "function", "strict")
    schema = function.get("parameters")
    if schema is not None:
        properties = schema.get("properties", {}) if isinstance(schema, dict) else None
        if properties is None or schema.get("type", "object") != "object":
            raise _refused("must be the JSON schema of an object", "function", "parameters")
        if not isinstance(properties, dict) or not all(
            isinstance(each, dict | bool) for each in properties.values()
        ):
            rule = "must be an object of JSON schemas"
            raise _refused(rule, "function", "parameters", "properties")
    if fault := _value_fault(tool, MAX_TOOL_DEPTH):
        raise _refused(fault)
    return tool


def _check_bias(bias: dict[str, Any]) -> dict[str, Any]:
    for token, value in bias.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise _refused(f"names {reprlib.repr(token)}, which is no token id; give ids as texts")
        if isinstance(value, bool) or not (isinstance(value, int | float) and abs(value) <= 100):
            raise _refused(
                f"gives token {token} {reprlib.repr(value)}; give a number from -100 to 100"
            )
    return bias


def _check_format(form: dict[str, Any]) -> dict[str, Any]:
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise _refused("must be 'text', 'json_object' or 'json_schema'", "type")
    if kind == "json_schema":
        holder = form.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            raise _refused("must be a JSON schema", "json_schema", "schema")
        if fault := _value_fault(schema, MAX_TOOL_DEPTH):
            raise _refused(fault, "json_schema", "schema")
    return form


# Fields of OpenAI's, vLLM's and SGLang's requests that a type here does not have, by the values at which they
# change nothing; None stands for all values. `null` changes nothing anywhere.
_NEUTRAL: Mapping[str, Sequence[Any] | None] = {
    name: values
    for values, names in (
        (
            None,
            "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options "
            "prompt_cache_retention request_id session_id cache_salt truncation_side return_mm_kwargs "
            "return_token_offsets spaces_between_special_tokens",
        ),
        (
            (),
            "audio moderation prediction web_search_options allowed_token_ids chat_template features "
            "logprob_token_ids prompt_embeds repetition_detection structural_tag thinking_token_budget "
            "truncate_prompt_tokens guided_json guided_regex guided_choice guided_grammar ebnf regex "
            "lora_path session_params",
        ),
        (
            (False,),
            "add_special_tokens continuous_usage_stats early_stopping echo flat_logprobs include_obfuscation "
            "no_stop_trim return_hidden_states return_prompt_text return_tokens_as_token_ids stream "
            "use_beam_search watermarking",
        ),
        (
            (True,),
            "detokenize include_reasoning separate_reasoning skip_special_tokens stream_reasoning",
        ),
        ((True, False), "parallel_tool_calls"),
        ((0,), "priority routed_experts_prompt_start top_logprobs"),
        ((1,), "best_of length_penalty stream_interval"),
        (("",), "suffix"),
        (("medium",), "verbosity"),
        (("none", "auto"), "function_call tool_choice"),
        (([],), "bad_words documents functions logits_processors tools"),
        (([], ["text"]), "modalities"),
        (
            ({},),
            "ec_transfer_params kv_transfer_params media_io_kwargs mm_processor_kwargs structured_outputs "
            "vllm_xargs",
        ),
    )
    for name in names.split()
}

_Text = Annotated[str, AfterValidator(_check_encodes)]
_Stop = Annotated[_Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
# JSON integers have no limit; these types have the range of the sampler's.
_Number = Annotated[float, Field(gt=-1e9, lt=1e9, allow_inf_nan=False)]
_Int32 = Annotated[int, Field(gt=-(2**31), lt=2**31)]
_Int64 = Annotated[int, Field(gt=-(2**63), lt=2**63)]
_NUMBER, _INT32 = "a number below 1e9", "an integer of 32 bits"
# Report only the first wrong item of a long list.
_TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_NumTop = Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)]
_NUM_TOP = f"an integer from 0 to {MOST_TOP_LOGPROBS}"


class _RequestPart(BaseModel):
    """An object of a request. Numbers are not converted to text, and unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    # Fields that are accepted and not read.
    IGNORED: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _given_fields(cls, body: Any) -> Any:
        """Removes nulls and what changes nothing; refuses the first other field that is not here."""
        if not isinstance(body, dict):
            return body
        # Not `model_fields`, whose look-up takes longer than the rest.
        fields = cls.__pydantic_fields__
        for name, value in body.items():
            # Clients send null for what they have not set, and some set what others read.
            if name in fields or name in cls.IGNORED or value is None:
                continue
            if name not in _NEUTRAL:
                raise _refused("is no field of this request", _short(name))
            neutral = _NEUTRAL[name]
            # The best of as many samples as there are choices are these.
            if name == "best_of" and "n" in body:
                neutral = (1, body["n"])
            if neutral is not None and value not in neutral:
                rule = "this server does not have it; leave it out"
                raise _refused(rule, name, after=f" {reprlib.repr(value)}: ")
        return {name: value for name, value in body.items() if name in fields and value is not None}


class StreamOptions(_RequestPart):
    """How an answer is streamed."""

    include_usage: bool = Field(default=False, description="true or false")


class _OpenPart(BaseModel):
    """An object of a message or a tool. Its other fields, such as cache hints, are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


class Message(_RequestPart):
    """A message of a chat, as `data.messages` reads it."""

    role: str
    content: str
    name: str = ""
    reasoning_content: str = ""
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    tool_call_id: str = ""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        try:
            message = read_message(body)
        except MessageFault as error:
            raise _refused(error.fault, *error.path) from error
        for i, call in enumerate(message.get("tool_calls", ())):
            if fault := _value_fault(call["function"]["arguments"], MAX_TOOL_DEPTH):
                raise _refused(fault, "tool_calls", i, "function", "arguments")
        return message

    def to_dict(self) -> dict[str, Any]:
        """The message as plain JSON, without fields that have no value."""
        return self.model_dump(exclude_defaults=True)


class NamedFunction(_OpenPart):
    """The name of a function."""

    name: _Text


class NamedTool(_OpenPart):
    """A choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class Sampling(_RequestPart):
    """How samples are drawn: fields of all kinds of request."""

    max_tokens: _Int32 | None = Field(default=None, description=_INT32)
    n: _Int32 = Field(default=1, description=_INT32)
    seed: _Int64 | None = Field(default=None, description="an integer of 64 bits")
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = Field(
        default=1.0, description="a number from 0 to 2"
    )
    top_p: _Number = Field(default=1.0, description=_NUMBER)
    top_k: _Int32 = Field(default=0, description=_INT32)
    min_p: _Number = Field(default=0.0, description=_NUMBER)
    min_tokens: _Int32 = Field(default=0, description=_INT32)
    repetition_penalty: _Number = Field(default=1.0, description=_NUMBER)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] = Field(
        default_factory=list,
        description=f"a text or up to {MAX_STOPS} of them, none empty or longer than "
        f"{MAX_STOP_CHARACTERS} characters",
    )
    stop_token_ids: Annotated[_TokenIds, Field(max_length=MAX_STOP_IDS)] = Field(
        default_factory=list, description=f"a list of up to {MAX_STOP_IDS} token ids"
    )
    include_stop_str_in_output: bool = Field(default=False, description="true or false")
    ignore_eos: bool = Field(default=False, description="true or false")
    prompt_logprobs: _NumTop | None = Field(default=None, description=_NUM_TOP)
    logit_bias: Annotated[dict[str, Any], AfterValidator(_check_bias)] = Field(
        default_factory=dict, description="an object with numbers from -100 to 100 for token ids"
    )
    presence_penalty: _Penalty = Field(default=0.0, description="a number from -2 to 2")
    frequency_penalty: _Penalty = Field(default=0.0, description="a number from -2 to 2")

    @property
    def num_top(self) -> int:
        """The number of most probable tokens to report at each place."""
        return 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer has log-probabilities of the prompt's tokens."""
        return self.prompt_logprobs is not None

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema of answers; None if they are any text."""
        return None

    @property
    def holds_calls(self) -> str:
        """The field by which calls must be of the tools that are given; "" if they may be any text."""
        return ""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class _Request(Sampling):
    """Fields of OpenAI's requests."""

    model: str = Field(description="the name of a model")
    stream: bool = Field(default=False, description="true or false")
    stream_options: StreamOptions = Field(default=StreamOptions(), description="an object")
    return_token_ids: bool = Field(default=False, description="true or false")
    response_format: Annotated[dict[str, Any], AfterValidator(_check_format)] = Field(
        default={"type": "text"}, description="an object with a type"
    )

    @model_validator(mode="after")
    def _scores_whole_answers(self) -> _Request:
        if self.stream and self.prompt_logprobs is not None:
            raise _refused("comes with whole answers; leave stream out", "prompt_logprobs")
        return self

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema of answers; None if they are any text."""
        match self.response_format["type"]:
            case "text":
                return None
            case "json_object":
                return {"type": "object"}
            case _:
                return self.response_format["json_schema"]["schema"]


class CompletionRequest(_Request):
    """The body of POST /v1/completions."""

    prompt: (
        _Text
        | Annotated[_TokenIds, Field(min_length=1)]
        | Annotated[list[_Text], Field(min_length=1, fail_fast=True)]
        | Annotated[list[_TokenIds], Field(min_length=1, fail_fast=True)]
    ) = Field(
        description="a text, a list of token ids, or a list of several of either, and not empty"
    )
    logprobs: _NumTop | None = Field(default=None, description=_NUM_TOP)
    echo: bool = Field(default=False, description="true or false")
    add_special_tokens: bool = Field(default=False, description="true or false")

    @property
    def num_top(self) -> int:
        """The number of most probable tokens to report at each place."""
        return self.logprobs or 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer has log-probabilities of the prompt's tokens."""
        return super().scores_prompt or (self.echo and self.logprobs is not None)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or a list of ids."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # pyright: ignore[reportReturnType]


class ChatRequest(_Request):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(
        min_length=1,
        description="a list of messages, each an object with a role and a content, and not empty",
    )
    max_completion_tokens: _Int32 | None = Field(default=None, description=_INT32)
    logprobs: bool = Field(default=False, description="true or false")
    top_logprobs: _NumTop = Field(default=0, description=_NUM_TOP)
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_check_variables)] = Field(
        default_factory=dict, description=VARIABLES_RULE
    )
    reasoning_effort: Annotated[_Text, Field(max_length=MAX_NAME_CHARACTERS)] | None = Field(
        default=None, description=f"a text of up to {MAX_NAME_CHARACTERS} characters"
    )
    tools: Annotated[
        list[Annotated[dict[str, Any], AfterValidator(_check_tool)]],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ] = Field(
        default_factory=list, description=f"a list of up to {MAX_TOOLS} tools, each an object"
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool = Field(
        default="auto", description="'none', 'auto', 'required' or the name of a function"
    )
    parallel_tool_calls: bool = Field(default=True, description="true or false")
    add_generation_prompt: bool = Field(default=True, description="true or false")
    continue_final_message: bool = Field(default=False, description="true or false")

    @model_validator(mode="after")
    def _belongs_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise _refused("is only given with logprobs true", "top_logprobs")
        if self.answer_schema is not None and self.tools and self.tool_choice != "none":
            rule = "allows no call of a tool, and there are tools; leave one out, or set tool_choice to none"
            raise _refused(rule, "response_format")
        if self.continue_final_message:
            if self.add_generation_prompt:
                rule = (
                    "needs add_generation_prompt false: the last message goes on, and none begins"
                )
                raise _refused(rule, "continue_final_message")
            if self.messages[-1].role != "assistant":
                rule = "goes on with the assistant's last message, and the last one is another's"
                raise _refused(rule, "continue_final_message")
        names = {tool["function"]["name"] for tool in self.tools}
        if self.forced_tool is not None and not self.add_generation_prompt:
            rule = "begins the assistant's turn with a call; leave add_generation_prompt out"
            raise _refused(rule, "tool_choice")
        if self.forced_tool is not None and not names:
            raise _refused("needs tools, and this request has none", "tool_choice")
        if self.forced_tool and self.forced_tool not in names:
            raise _refused("names no function of tools", "tool_choice")
        if self.tools and not self.parallel_tool_calls:
            rule = "is false, but the model may call several tools at once here; leave it out"
            raise _refused(rule, "parallel_tool_calls")
        called: set[str] = set()
        for i, message in enumerate(self.messages):
            # Only calls of earlier messages: a result cannot come before its call.
            called |= {call["id"] for call in message.tool_calls}
            if message.role == "tool" and message.tool_call_id not in called:
                where = ("messages", i, "tool_call_id")
                raise _refused("is the id of no call in the messages before", *where)
        return self

    @property
    def num_top(self) -> int:
        """The number of most probable tokens to report at each place."""
        return self.top_logprobs

    @property
    def holds_calls(self) -> str:
        """The field by which calls must be of the tools that are given; "" if they may be any text."""
        if self.forced_tool is not None:
            return "tool_choice"
        strict = any(tool["function"].get("strict") for tool in self.tools)
        return "tools" if strict and self.tool_choice != "none" else ""

    @property
    def variables(self) -> Mapping[str, Any]:
        """Further variables of the chat template; those that it does not read do nothing."""
        effort = self.reasoning_effort
        return ({} if effort is None else {"reasoning_effort": effort}) | self.chat_template_kwargs

    @property
    def forced_tool(self) -> str | None:
        """The name of the tool that must be called; "" if any may be, None if none must."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        return "" if self.tool_choice == "required" else None


class SamplingParams(Sampling):
    """How the samples of a `GenerateRequest` are drawn."""

    logprobs: Annotated[int, Field(ge=0, le=1)] | None = Field(
        default=None, description="0 or 1: there are only those of the sampled tokens"
    )

    # Answers are ids, and no routing of experts is recorded.
    IGNORED = (
        *("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind"),
        "routed_experts_prompt_start",
    )


class GenerateRequest(_RequestPart):
    """The body of POST /inference/v1/generate."""

    model: str = Field(description="the name of a model")
    token_ids: Annotated[_TokenIds, Field(min_length=1)] = Field(
        description="a list of token ids, and not empty"
    )
    sampling_params: SamplingParams = Field(default=SamplingParams(), description="an object")

    # All requests wait alike.
    IGNORED = ("priority",)


class TokenizeRequest(_RequestPart):
    """The body of POST /tokenize with a text; with messages it has the fields of a `ChatRequest` instead."""

    model: str = Field(description="the name of a model")
    prompt: _Text = Field(description="a text")
    add_special_tokens: bool = Field(default=False, description="true or false")
    return_token_strs: bool = Field(default=False, description="true or false")


class DetokenizeRequest(_RequestPart):
    """The body of POST /detokenize."""

    model: str = Field(description="the name of a model")
    tokens: _TokenIds = Field(description="a list of token ids")


RequestType = TypeVar(
    "RequestType",
    CompletionRequest,
    ChatRequest,
    GenerateRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


def read_request(kind: type[RequestType], body: Mapping[str, Any]) -> RequestType:
    """Parses a JSON object as a request.

    Raises:
      ApiError: it is malformed or asks for something that is not supported.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        invalid = error
    # The first of pydantic's errors as an answer.
    found = invalid.errors(include_url=False)[0]
    location, context = found["loc"], found.get("ctx", {})
    if found["type"] == "refused":
        where = _path((*location, *context["path"]))
        raise ApiError(where + context["fault"], param=where) from invalid
    parts = (StreamOptions, SamplingParams, Message, kind)
    rules = {
        name: field.description
        for part in parts
        for name, field in part.model_fields.items()
        # For a wrong type of a part the message describes the whole.
        if name != "type"
    }
    # After the field names pydantic lists branches of a union; only the union as a whole is reported.
    known = list(itertools.takewhile(lambda p: isinstance(p, int) or p in rules, location))
    while isinstance(known[-1], int):
        known.pop()
    where, rule = _path(known), rules[str(known[-1])]
    value = found["input"] if len(known) == len(location) else None
    shown = reprlib.repr(value) if isinstance(value, str | int | float) else ""
    if found["type"] == "value_error":
        message = f"{where} is no text: {context['error']}"
    else:
        message = f"{where} is {shown}; it must be {rule}" if shown else f"{where} must be {rule}"
    raise ApiError(message, param=where) from invalid


def _path(location: Sequence[int | str]) -> str:
    """Formats a location as in messages[0].content."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return _short("".join(parts).removeprefix("."))


def _short(text: str) -> str:
    # The name of an unknown field can contain anything, including half of a surrogate pair.
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= 60 else text[:57] + "..."
