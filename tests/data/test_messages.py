"""Messages of rows and of requests are read alike, and as other servers read them."""

import json

import pytest
from extras import import_extra

import_extra("dev", "pydantic")

from jaxrl.data.data_config import SourceConfig  # noqa: E402
from jaxrl.data.demonstrations import read_demonstrations  # noqa: E402
from jaxrl.data.messages import read_message  # noqa: E402
from jaxrl.data.preferences import read_preferences  # noqa: E402
from jaxrl.data.problems import read_source  # noqa: E402
from jaxrl.errors import UserError  # noqa: E402
from jaxrl_serving.openai.protocol import ApiError, ChatRequest, read_request  # noqa: E402

USER = {"role": "user", "content": "1 + 1?"}
FUNCTION = {"name": "add", "arguments": '{"a": 1}'}
CALL = {"id": "c", "type": "function", "function": FUNCTION}
READ_CALL = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
SAID = {"role": "assistant", "content": "2"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [READ_CALL]}


def of_row(messages, tmp_path):
    """The messages of a problem's row."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": messages, "answer": "2"}))
    (record,) = read_source(SourceConfig(path=str(path)), "data.train").records
    return list(record.prompt)


def of_request(messages):
    """The messages of a chat request."""
    request = read_request(ChatRequest, {"model": "m", "messages": messages})
    return [message.to_dict() for message in request.messages]


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "system", "content": ""}, {"role": "system", "content": ""}),
        ({"role": "developer", "content": "x"}, {"role": "developer", "content": "x"}),
        ({**SAID, "tool_calls": []}, SAID),
        ({**SAID, "tool_calls": None, "function_call": None}, SAID),
        ({**SAID, "name": ""}, SAID),
        ({**SAID, "name": None, "tool_call_id": None}, SAID),
        ({**SAID, "name": "Ada"}, {**SAID, "name": "Ada"}),
        ({**SAID, "refusal": None, "annotations": [], "audio": None, "metadata": {}}, SAID),
        (
            {**SAID, "refusal": "no", "annotations": [{"type": "url_citation"}], "id": "m1"}
            | {"provider_specific_fields": {"a": 1}, "reasoning_details": [{"text": "Hm."}]},
            SAID,
        ),
        (
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "assistant", "content": "No."},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "No."},
        ),
        ({**SAID, "content": None}, {**SAID, "content": ""}),
        ({"role": "assistant"}, {**SAID, "content": ""}),
        ({**SAID, "reasoning": "r"}, {**SAID, "reasoning_content": "r"}),
        ({**SAID, "thinking": "r"}, {**SAID, "reasoning_content": "r"}),
        ({**SAID, "reasoning": "r", "reasoning_content": "r"}, {**SAID, "reasoning_content": "r"}),
        ({**SAID, "reasoning": "r", "reasoning_content": None}, {**SAID, "reasoning_content": "r"}),
        ({**SAID, "reasoning": "", "reasoning_content": None}, SAID),
        ({**SAID, "content": [{"type": "text", "text": "2"}]}, SAID),
        ({**SAID, "content": []}, {**SAID, "content": ""}),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a ", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "", "image_url": None},
                    {"type": "text", "text": "b"},
                ],
            },
            {"role": "user", "content": "a b"},
        ),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, CALLED),
        ({"role": "assistant", "tool_calls": [CALL]}, CALLED),
        ({**CALLED, "tool_calls": [{"id": "c", "function": FUNCTION}]}, CALLED),
        ({**CALLED, "tool_calls": [{**READ_CALL, "index": 0}]}, CALLED),
        (
            {**CALLED, "tool_calls": [{"id": None, "function": {"name": "f", "arguments": ""}}]},
            {
                **CALLED,
                "tool_calls": [
                    {"id": "", "type": "function", "function": {"name": "f", "arguments": {}}}
                ],
            },
        ),
    ],
)
def test_a_message_is_read_alike_in_rows_and_in_requests(message, read, tmp_path):
    assert of_row([USER, message], tmp_path) == of_request([USER, message]) == [USER, read]
    assert read_message(read) == read


def test_results_of_tools_are_read_alike(tmp_path):
    result = {"role": "tool", "tool_call_id": "c", "name": "add", "content": ""}
    messages = [USER, {**CALLED, "content": None}, {**result, "tool_calls": None}]
    assert of_row(messages, tmp_path) == of_request(messages) == [USER, CALLED, result]


@pytest.mark.parametrize(
    ("message", "place", "fault"),
    [
        ({"role": "foo", "content": "x"}, "role", 'is "foo"; it must be one of system, developer'),
        ({"role": "", "content": "x"}, "role", 'is ""; it must be one of'),
        ({"role": "User", "content": "x"}, "role", 'is "User"; it must be one of'),
        ({"content": "x"}, "role", "is null; it must be one of"),
        ({"role": ["user"], "content": "x"}, "role", 'is ["user"]; it must be one of'),
        ({"role": "system", "content": None}, "content", "must be a text, or a list of text parts"),
        ({"role": "tool"}, "content", "must be a text, or a list of text parts"),
        ({**SAID, "content": 2}, "content", "must be a text, or a list of text parts"),
        ({**SAID, "content": {"text": "x"}}, "content", "must be a text, or a list of text parts"),
        ({**SAID, "content": ["x"]}, "content", "must be a text, or a list of text parts"),
        ({**SAID, "content": [{"type": "text"}]}, "content", "must be a text, or a list of"),
        (
            {**SAID, "content": [{"type": "image_url", "image_url": {}}]},
            "content",
            "must be a text",
        ),
        ({**SAID, "content": "\ud800"}, "content", "is no text: 'utf-8'"),
        ({**SAID, "audio": {"id": "a"}}, "audio", "is no field of a message; it can have role"),
        ({**SAID, "function_call": {"name": "f"}}, "function_call", "is no field of a message"),
        ({**SAID, "weight": 1}, "weight", "is no field of a message; it can have role, content"),
        ({**SAID, "reasoning": {"effort": 1}}, "reasoning_content", "it must be a text"),
        ({**SAID, "name": 5}, "name", "is 5; it must be a text"),
        ({**SAID, "tool_calls": "add"}, "tool_calls", "must be a list of calls"),
        ({**SAID, "tool_calls": ["add"]}, "tool_calls[0]", "must be an object with a function"),
        ({**USER, "tool_calls": [CALL]}, "tool_calls", "only the assistant calls tools"),
        ({**SAID, "tool_calls": [CALL, {"id": "d"}]}, "tool_calls[1]", "must be an object with a"),
        (
            {**SAID, "tool_calls": [{**CALL, "type": "custom"}]},
            "tool_calls[0]",
            "must be an object with a function",
        ),
        (
            {**SAID, "tool_calls": [{"function": {"arguments": "{}"}}]},
            "tool_calls[0].function.name",
            "must be a text and not empty",
        ),
        *(
            (
                {**SAID, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
                "tool_calls[0].function.arguments",
                "must be the JSON text of an object",
            )
            for arguments in ("[1]", "{", "7", [1], '{"a": "\\ud800"}', '{"a":' * 3000)
        ),
    ],
)
def test_a_message_is_refused_alike_in_rows_and_in_requests(message, place, fault, tmp_path):
    with pytest.raises(UserError) as raised:
        of_row([USER, message], tmp_path)
    assert f": message 2 of field 'prompt': {place} " in str(raised.value)
    assert fault in str(raised.value)
    with pytest.raises(ApiError) as raised:
        of_request([USER, message])
    assert str(raised.value).startswith(f"messages[1].{place} ")
    assert fault in str(raised.value)


def test_a_row_without_a_question_is_broken_and_a_request_may_ask_nothing(tmp_path):
    nothing = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " "}]
    with pytest.raises(UserError, match="'content' of message 2 of field 'prompt' is"):
        of_row(nothing, tmp_path)
    assert of_request(nothing) == nothing


def test_what_is_trained_on_is_a_text(tmp_path):
    path = tmp_path / "rows.jsonl"

    def demonstration(*messages):
        path.write_text(json.dumps({"messages": messages}))
        return read_demonstrations(path, source="s")

    asked = [{"role": "system", "content": ""}, USER]
    (read,) = demonstration(*asked, {**SAID, "tool_calls": [], "reasoning": None})
    assert (read.context, read.response) == (tuple(asked), "2")
    for answer, beside in (
        ({**SAID, "tool_calls": [CALL]}, "tool_calls"),
        ({**SAID, "reasoning": "r"}, "reasoning_content"),
    ):
        # The chat template writes them.
        (read,) = demonstration(USER, answer)
        assert read.response is None and beside in read.context[1]
        path.write_text(json.dumps({"chosen": [USER, answer], "rejected": [USER, SAID]}))
        with pytest.raises(UserError, match=f"the last message of field 'chosen' has {beside}"):
            read_preferences(path, source="s")
    with pytest.raises(UserError, match="'content' of message 2 of field 'messages' is"):
        demonstration(USER, {**SAID, "content": ""}, USER, SAID)
    # Of a pair only the answers are.
    path.write_text(
        json.dumps(
            {
                "chosen": [USER, CALLED, USER, SAID],
                "rejected": [USER, CALLED, USER, {**SAID, "content": "3"}],
            }
        )
    )
    (pair,) = read_preferences(path, source="s")
    assert pair.context == (USER, CALLED, USER)


def test_fields_of_a_request_that_mean_nothing_here_are_ignored():
    given = {"model": "m", "messages": [USER]}
    request = read_request(ChatRequest, {**given, "verbosity": None, "thinking": None})
    assert request.variables == {}
    with pytest.raises(ApiError, match="thinking is no field of this request"):
        read_request(ChatRequest, {**given, "thinking": True})


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": None}, {}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"x": 1}},
            {"reasoning_effort": "low", "x": 1},
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"reasoning_effort": "high"},
        ),
    ],
)
def test_an_effort_is_a_variable_of_the_template(fields, variables):
    request = read_request(ChatRequest, {"model": "m", "messages": [USER], **fields})
    assert request.variables == variables
