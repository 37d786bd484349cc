"""Requests as data: whatever JSON holds, it is a request that can be served or an error of OpenAI's shape."""

import json

import numpy as np
import pytest
import tokenizers
from chats import CHATML, chat_tokenizer
from extras import import_extra

for package in ("pydantic", "starlette", "uvicorn"):
    import_extra("dev", package)

from scripted_driver import ScriptedDriver, sizes_of  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402

from jaxrl.data.chat import ChatTemplate  # noqa: E402
from jaxrl.errors import UserError  # noqa: E402
from jaxrl_serving.openai.calls import RequestReader  # noqa: E402
from jaxrl_serving.openai.chat_prompts import RenderedPrompts  # noqa: E402
from jaxrl_serving.openai.endpoint import build_app  # noqa: E402
from jaxrl_serving.openai.protocol import ApiError  # noqa: E402
from jaxrl_serving.tool_calls import AnswerParser  # noqa: E402

SIZES = sizes_of(60, 40, 64)
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

    vocab_size = 2**20
    chat_template = ChatTemplate("{{ tools }} <tool_call>", origin="a test", special_tokens={})

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids):
        return bytes(np.asarray(ids, np.uint8)).decode()

    def ids_named_by(self, stop_strings):
        return ()

    def render_chat(self, messages, add_generation_prompt=True, **variables):
        # As a template's worker gets them: through JSON.
        said = json.dumps(variables) if variables else ""
        return "".join(m["role"] + m["content"] for m in messages) + said


# Room for tools.
WIDE = sizes_of(9000, 40, 9064)


def outcome(name, body, sizes=SIZES, tokenizer=None):
    """The request, or the error that is answered; anything else is a fault of ours."""
    tokenizer = tokenizer or Tokenizer()
    parser = AnswerParser(tokenizer)
    reader = RequestReader(tokenizer, "m", sizes, RenderedPrompts(tokenizer, parser), parser)
    # As it comes over the wire: Python writes and reads NaN and Infinity, which JSON does not have.
    body = json.loads(json.dumps({"model": "m", **body}))
    try:
        return getattr(reader, name)(body)
    except ApiError as error:
        return error
    except UserError as error:
        return ApiError(str(error))


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
    completion = {"prompt": "x"}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for value in VALUES:
        check(outcome("completion", completion | {field: value}))
        check(outcome("chat", chat | {field: value}))
        check(outcome("chat", chat | {"chat_template_kwargs": {field: value}}))


@pytest.mark.parametrize(
    "key", ["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"]
)
def test_nor_is_one_of_a_message(key):
    for value in VALUES:
        for role in ("user", "assistant", "tool"):
            message = {"role": role, "content": "x"} | {key: value}
            check(outcome("chat", {"messages": [message]}))
        part = {"role": "user", "content": [{"type": "text", "text": value}]}
        check(outcome("chat", {"messages": [part, value]}))


def _put(tree, path, value):
    """A copy of `tree` with `value` at `path`."""
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = _put(tree[path[0]], path[1:], value)
    return copy


PARAMETERS = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}
CALL_OF_F = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [CALL_OF_F]},
    {"role": "tool", "content": "y", "tool_call_id": "c", "name": "f"},
]
WITH_TOOLS = {"messages": CALLED, "tools": [TOOL], "tool_choice": "auto"}
CALL = ("messages", 1, "tool_calls")
FUNCTION = ("tools", 0, "function")


@pytest.mark.parametrize(
    "path",
    [
        *(("tools", 0), ("tools", 0, "type"), FUNCTION, (*FUNCTION, "name")),
        *((*FUNCTION, "description"), (*FUNCTION, "parameters")),
        *((*FUNCTION, "parameters", "properties"), (*FUNCTION, "parameters", "type")),
        *(CALL, (*CALL, 0), (*CALL, 0, "id"), (*CALL, 0, "type"), (*CALL, 0, "function")),
        *((*CALL, 0, "function", "name"), (*CALL, 0, "function", "arguments")),
        *(("messages", 1, "content"), ("messages", 2, "tool_call_id"), ("messages", 2, "name")),
        ("tool_choice",),
    ],
    ids=lambda path: ".".join(map(str, path)),
)
def test_nor_is_one_of_a_tool_or_a_call(path):
    assert not isinstance(outcome("chat", WITH_TOOLS, WIDE), ApiError)
    deep = json.loads('{"a":' * 400 + "1" + "}" * 400)
    texts = ['{"a": ' * n + "1" + "}" * n for n in (40, 5000)]
    for value in [*VALUES, deep, *texts, '{"a": "\\ud800"}', "[]", {"type": "function"}]:
        check(outcome("chat", _put(WITH_TOOLS, path, value), WIDE))


@pytest.mark.parametrize("field", ["token_ids", "sampling_params", "stream", "features"])
def test_nor_is_one_of_a_request_of_ids(field):
    for value in VALUES:
        check(outcome("generate", {"token_ids": [1], field: value}))


@pytest.mark.parametrize("field", [*FIELDS, "stop_token_ids", "prompt_logprobs", "ignore_eos"])
def test_nor_is_one_of_its_parameters(field):
    for value in VALUES:
        body = {"token_ids": [1], "sampling_params": {field: value}}
        check(outcome("generate", body))


def named(name):
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


def tool_with(field, value):
    return {"tools": [_put(TOOL, ("function", field), value)]}


BAD_ARGUMENTS = _put(CALLED, (1, "tool_calls", 0, "function", "arguments"), "{a")
CALL_OF_A_USER = {**CALLED[0], "tool_calls": [CALL_OF_F]}


@pytest.mark.parametrize("changes", [{"tools": []}, {"tool_choice": "none"}, named("f")])
def test_tools_may_be_chosen(changes):
    if "function" in str(changes):
        import_extra("dev", "llguidance")
    sizes = sizes_of(9000, 40, 9064, (1,))
    found = outcome("chat", WITH_TOOLS | changes, sizes, chat_tokenizer(CHATML))
    assert not isinstance(found, ApiError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (named("g"), "tool_choice names no function of tools"),
        ({"tool_choice": "any"}, "tool_choice must be 'none', 'auto', 'required' or the name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice needs tools, and this request ha"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls is false, but the model may call"),
        ({"tools": [TOOL, {**TOOL, "type": "web"}]}, "tools[1].type must be 'function'"),
        (tool_with("name", "a b"), "tools[0].function.name must be 1 to 64 letters, digits"),
        (
            tool_with("parameters", {"type": "string"}),
            "tools[0].function.parameters must be the JSON schema of an object",
        ),
        ({"tools": [TOOL] * 129}, "tools must be a list of up to 128 tools"),
        (
            {"messages": CALLED[:1] + CALLED[2:]},
            "messages[1].tool_call_id is the id of no call in the messages before",
        ),
        (
            {"messages": BAD_ARGUMENTS},
            "messages[1].tool_calls[0].function.arguments must be the JSON text of an object",
        ),
        ({"messages": [CALL_OF_A_USER]}, "messages[0].tool_calls only the assistant calls tools"),
        ({"messages": [{"role": "tool", "content": None}]}, "messages[0].content must be a text,"),
    ],
)
def test_what_is_wrong_with_tools_is_named(changes, message):
    found = outcome("chat", WITH_TOOLS | changes, WIDE)
    error = found.body["error"]
    assert (found.status, error["param"]) == (400, message.split()[0].rstrip(":"))
    assert error["message"].startswith(message)


def test_a_model_whose_template_has_no_tools_refuses_them_by_name():
    class Plain(Tokenizer):
        chat_template = None

    error = outcome("chat", WITH_TOOLS, tokenizer=Plain()).body["error"]
    assert error["param"] == "tools" and "Qwen's, Hermes', Qwen3-Coder's" in error["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]}, "tools"),
    ],
    ids=["required", "strict"],
)
def test_calls_that_nothing_holds_to_their_form_are_left_to_the_model(changes, param):
    class Coder(Tokenizer):
        chat_template = ChatTemplate(
            "{{ tools }} <tool_call><function=", origin="a test", special_tokens={}
        )

    assert not isinstance(outcome("chat", WITH_TOOLS, WIDE, tokenizer=Coder()), ApiError)
    error = outcome("chat", WITH_TOOLS | changes, WIDE, tokenizer=Coder()).body["error"]
    assert error["message"].startswith("calls of this model are written in a form that nothing")
    assert error["param"] == param


def test_a_request_has_stop_ids_besides_those_of_the_model():
    def read(ids, **params):
        sizes = sizes_of(60, 40, 64, (3, 4))
        body = {"token_ids": [1, 2], "sampling_params": {"stop_token_ids": ids, **params}}
        return outcome("generate", body, sizes)

    # Without a number: the rest of the context, here all that a sample may have.
    assert read([3]).requests[0].max_tokens == 40 and read([]).requests[0].prompt.tolist() == [1, 2]
    for ids, params, stop_ids in (
        ([], {}, set()),
        ([3, 5, 5], {}, {5}),
        ([3, 5], {"ignore_eos": True}, {3, 5}),
    ):
        options = read(ids, **params).requests[0].options
        assert {*options.stop_ids} == stop_ids
        assert options.ignores_stop_ids == bool(params)
    assert "stop_token_ids has 1048576; this model's ids go" in str(read([3, 2**20]))


def test_a_chat_that_names_no_number_gets_what_there_is_room_for():
    def max_tokens(content):
        messages = [{"role": "user", "content": content}]
        (request,) = outcome("chat", {"messages": messages}).requests
        return request.max_tokens

    assert max_tokens("x") == 40
    assert max_tokens("x" * 46) == 14
    # A prompt without room says so itself.
    error = outcome("chat", {"messages": [{"role": "user", "content": "x" * 64}]})
    assert error.body["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("length", [61, 64, 100, 600])
def test_a_prompt_that_is_too_long_has_the_code_of_openai(length):
    for read, body in (
        ("completion", {"prompt": "x" * length, "max_tokens": 1}),
        ("completion", {"prompt": [1] * length, "max_tokens": 1}),
        ("chat", {"messages": [{"role": "user", "content": "x" * length}], "max_tokens": 1}),
    ):
        error = outcome(read, body).body["error"]
        assert error["code"] == "context_length_exceeded" and "shorten" in error["message"]
    assert not isinstance(outcome("completion", {"prompt": "x" * 60, "max_tokens": 1}), ApiError)


@pytest.mark.parametrize(
    ("read", "prompt"),
    [
        ("completion", {"prompt": "x" * 900_000}),
        ("completion", {"prompt": ["x", "x" * 900_000]}),
        ("chat", {"messages": [{"role": "user", "content": "x" * 900_000}]}),
        ("chat", {"messages": [{"role": "user", "content": "x" * 1000}] * 900}),
    ],
)
def test_a_prompt_far_too_long_is_refused_by_its_beginning(read, prompt, monkeypatch):
    seen = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, x: (seen.append(len(x)), encode(self, x))[1]
    )
    error = outcome(read, prompt)
    check(error)
    assert error.body["error"]["code"] == "context_length_exceeded"
    assert sum(seen) < 1000


HELLO = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "param", "asked"),
    [
        ("/v1/completions", {"prompt": "x", "n": 4}, "n", "1 prompts with n 4"),
        ("/v1/completions", {"prompt": ["x"] * 4}, "prompt", "4 prompts with n 1"),
        ("/v1/completions", {"prompt": [[1]] * 4, "n": 2}, "prompt", "4 prompts with n 2"),
        ("/v1/completions", {"prompt": ["x"] * 2, "n": 2}, "n", "2 prompts with n 2"),
        ("/v1/completions", {"prompt": "x", "best_of": 4}, "best_of", "best_of 4"),
        ("/v1/chat/completions", HELLO | {"n": 4}, "n", "1 prompts with n 4"),
        ("/v1/chat/completions", HELLO | {"n": 4, "stream": True}, "n", "1 prompts with n 4"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"n": 4}},
            "sampling_params.n",
            "1 prompts with n 4",
        ),
    ],
)
def test_more_samples_than_may_ever_wait_are_refused_by_name(path, body, param, asked):
    tokenizer = chat_tokenizer(CHATML)
    driver = ScriptedDriver(tokenizer, lambda prompt: tokenizer.encode("y"))
    driver.max_waiting = 3
    app = build_app(driver, tokenizer, "m", WIDE, max_body_bytes=1000)  # pyright: ignore
    answer = TestClient(app).post(path, json={"model": "m", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert asked in error["message"]
    assert param == "best_of" or "gives 1 to 3 choices at once" in error["message"]
    assert not driver.prompts


def test_special_tokens_are_added_to_a_completion_if_they_are_asked_for():
    tokenizer = chat_tokenizer(CHATML)
    begin = tokenizer.special_tokens["eos_token"]
    number = int(tokenizer.encode(begin)[0])
    add = tokenizers.processors.TemplateProcessing(f"{begin} $A", special_tokens=[(begin, number)])
    tokenizer.backend.post_processor = add

    def prompts(**fields):
        found = outcome("completion", {"prompt": ["a", "b"], **fields}, WIDE, tokenizer)
        return [request.prompt.tolist() for request in found.requests]

    a, b = prompts()
    assert prompts(add_special_tokens=False) == [a, b] and number not in a
    assert prompts(add_special_tokens=True) == [[number, *a], [number, *b]]
    assert prompts(add_special_tokens=True, prompt=a) == [a]
