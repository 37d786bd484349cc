"""Requests as data: whatever JSON holds, it is a request that can be served or an error of OpenAI's shape."""

import json

import numpy as np
import pytest
from extras import import_extra

import_extra("dev", "pydantic")

from jaxrl.errors import UserError  # noqa: E402
from jaxrl.serving.openai.calls import (  # noqa: E402
    ApiError,
    RequestLimits,
    read_chat,
    read_completion,
)

LIMITS = RequestLimits("m", max_prompt_tokens=60, max_tokens=40, max_context_tokens=64)
VALUES = [
    *(None, True, False, 0, -1, 1, 2**31, -(2**31) - 1, 2**63, 10**400, 0.5, -0.0),
    *(1e-300, 1e300, float("nan"), float("inf"), float("-inf"), "", "text", "\ud800"),
    *("x" * 10_000, [], [None], [[]], [[[1]]], ["", 1], [2**31], [10**400], {}, {"": {}}),
    *({"include_usage": 10**400}, {"type": "text"}),
]
FIELDS = [
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature"),
    *("top_p", "top_k", "min_p", "min_tokens", "repetition_penalty", "n", "seed", "stream"),
    *("stop", "stream_options", "logprobs", "top_logprobs", "best_of", "echo", "suffix"),
    *("logit_bias", "presence_penalty", "frequency_penalty", "tools", "tool_choice"),
    *("parallel_tool_calls", "chat_template_kwargs", "functions", "function_call"),
    *("response_format", "modalities", "prediction", "audio", "user", "metadata", "store"),
    *("service_tier", "safety_identifier", "prompt_cache_key", "no_such_field" * 99),
]


class Tokenizer:
    """One token a character."""

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids):
        return bytes(ids).decode()

    def encode_chat(self, messages, **variables):
        # As a template's worker gets them: through JSON.
        said = json.dumps(variables) if variables else ""
        return self.encode("".join(m["role"] + m["content"] for m in messages) + said)


def outcome(read, body):
    """The request, or the error that is answered; anything else is a fault of ours."""
    # As it comes over the wire: Python writes and reads NaN and Infinity, which JSON does not have.
    body = json.loads(json.dumps(body))
    try:
        return read(body, Tokenizer(), LIMITS)
    except ApiError as error:
        return error
    except UserError as error:
        return ApiError(400, str(error))


def check(result):
    if not isinstance(result, ApiError):
        for request in result.requests:
            temperature, limits = request.options.temperature, request.options.truncation
            assert 0 <= temperature <= 2 and temperature not in (1e-300,)
            assert limits.top_k.dtype == limits.min_tokens.dtype == np.int32
            assert request.prompt.dtype == np.int32 and 0 <= request.seed < 2**31
        return
    assert result.status in (400, 404)
    error = json.loads(json.dumps(result.body, allow_nan=False))["error"]
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 400


@pytest.mark.parametrize("field", FIELDS)
def test_no_value_of_a_field_is_a_fault_of_the_server(field):
    completion = {"model": "m", "prompt": "x"}
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for value in VALUES:
        check(outcome(read_completion, completion | {field: value}))
        check(outcome(read_chat, chat | {field: value}))


def test_nor_is_one_of_a_variable_of_the_chat_template():
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for name in ("enable_thinking", "messages", "self", "", "x" * 10_000):
        for value in VALUES:
            check(outcome(read_chat, chat | {"chat_template_kwargs": {name: value}}))


@pytest.mark.parametrize("key", ["role", "content", "name", "tool_calls"])
def test_nor_is_one_of_a_message(key):
    for value in VALUES:
        message = {"role": "user", "content": "x"} | {key: value}
        check(outcome(read_chat, {"model": "m", "messages": [message]}))
        part = {"role": "user", "content": [{"type": "text", "text": value}]}
        check(outcome(read_chat, {"model": "m", "messages": [part, value]}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("top_k", 2**31, "top_k is 2147483648; it must be an integer of 32 bits"),
        ("min_tokens", 2**31, "min_tokens is 2147483648; it must be an integer of 32 bits"),
        ("temperature", 10**400, "temperature is 1000"),
        ("temperature", float("inf"), "temperature is inf; it must be a number"),
        ("repetition_penalty", float("nan"), "repetition_penalty is nan; it must be a number"),
        ("n", 10**400, "n is 1000"),
        ("stop", 0, "stop must be a text or up to 16"),
        ("stream_options", [], "stream_options must be an object"),
        ("max_tokens", 64, "This model's maximum context length is 64 tokens, and 1 of the prompt"),
    ],
)
def test_what_is_wrong_is_named(field, value, message):
    error = outcome(read_completion, {"model": "m", "prompt": "x", field: value})
    assert error.status == 400 and error.body["error"]["param"] == field
    assert message in error.body["error"]["message"]


def test_a_chat_that_names_no_number_gets_what_there_is_room_for():
    def max_tokens(content):
        messages = [{"role": "", "content": content}]
        (request,) = outcome(read_chat, {"model": "m", "messages": messages}).requests
        return request.max_tokens

    assert max_tokens("x") == 40
    assert max_tokens("x" * 50) == 14
    # A prompt without room says so itself.
    error = outcome(read_chat, {"model": "m", "messages": [{"role": "", "content": "x" * 64}]})
    assert error.body["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("length", [61, 64, 100, 600])
def test_a_prompt_that_is_too_long_has_the_code_of_openai(length):
    for read, body in (
        (read_completion, {"prompt": "x" * length, "max_tokens": 1}),
        (read_completion, {"prompt": [1] * length, "max_tokens": 1}),
        (read_chat, {"messages": [{"role": "user", "content": "x" * length}], "max_tokens": 1}),
    ):
        error = outcome(read, {"model": "m", **body}).body["error"]
        assert error["code"] == "context_length_exceeded" and "shorten" in error["message"]
    assert not isinstance(
        outcome(read_completion, {"model": "m", "prompt": "x" * 60, "max_tokens": 1}), ApiError
    )


def test_a_temperature_too_small_to_divide_by_is_greedy():
    body = {"model": "m", "prompt": "x", "temperature": 1e-300}
    assert outcome(read_completion, body).requests[0].options.temperature == 0


@pytest.mark.parametrize(
    ("read", "prompt"),
    [
        (read_completion, {"prompt": "x" * 900_000}),
        (read_completion, {"prompt": ["x", "x" * 900_000]}),
        (read_chat, {"messages": [{"role": "user", "content": "x" * 900_000}]}),
        (read_chat, {"messages": [{"role": "user", "content": "x" * 1000}] * 900}),
    ],
)
def test_a_prompt_far_too_long_is_refused_by_its_beginning(read, prompt, monkeypatch):
    seen = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, x: (seen.append(len(x)), encode(self, x))[1]
    )
    error = outcome(read, {"model": "m", **prompt})
    check(error)
    assert error.body["error"]["code"] == "context_length_exceeded"
    assert sum(seen) < 1000
