"""Answers with calls of tools, by hand: what a client is shown of them."""

import json

import numpy as np
import pytest
from chats import CHATML, LLAMA, MISTRAL, THINKING, chat_tokenizer

from jaxrl.data.chat import PLAIN_TEMPLATE, ChatTemplate
from jaxrl.data.messages import read_message
from jaxrl_serving.call_formats import HERMES, ToolCall, call_format
from jaxrl_serving.tool_calls import (
    AnswerParser,
    AssistantMessage,
)

TOKENIZERS = {template: chat_tokenizer(template) for template in (CHATML, THINKING, LLAMA, MISTRAL)}
NO_PROMPT = np.zeros(0, np.int32)
ADD = ToolCall("add", '{"a": 1, "b": [2.5, "é"]}')


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "now", "f")]


def view(template, text, prompt="", tools=TOOLS, **options):
    tokenizer = TOKENIZERS[template]
    tokens = tokenizer.encode(text + tokenizer.special_tokens["eos_token"])
    return AnswerParser(tokenizer).view(tokenizer.encode(prompt), tokens, tools=tools, **options)


CALL = '{"name": "add", "arguments": {"a": 1, "b": [2.5, "é"]}}'
PARAMETERS = CALL.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("template", "text", "content", "calls"),
    [
        (CHATML, "four", "four", ()),
        (CHATML, f"<tool_call>\n{CALL}\n</tool_call>", "", (ADD,)),
        (CHATML, f"I add.\n<tool_call>{CALL}</tool_call>", "I add.", (ADD,)),
        (
            CHATML,
            f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call> ok",
            "",
            (ADD, ADD),
        ),
        # Ended by the end of the answer.
        (CHATML, f"<tool_call>\n{CALL}", "", (ADD,)),
        (CHATML, '<tool_call>{"name": "now"}</tool_call>', "", (ToolCall("now", "{}"),)),
        (LLAMA, PARAMETERS, "", (ADD,)),
        (LLAMA, CALL, "", (ADD,)),
        (LLAMA, f"<|python_tag|>{PARAMETERS}; {PARAMETERS}", "", (ADD, ADD)),
        (LLAMA, f"Well. {PARAMETERS}", f"Well. {PARAMETERS}", ()),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]", "", (ADD, ADD)),
        (MISTRAL, f" So: [TOOL_CALLS][{CALL}]", " So:", (ADD,)),
        (MISTRAL, " four", " four", ()),
    ],
)
def test_calls_are_found(template, text, content, calls):
    found = view(template, text)
    assert found == AssistantMessage(content, "", calls)
    ids = [call.id for call in found.calls]
    assert len({*ids}) == len(calls) and all(len(i) == 9 and i.isalnum() for i in ids)
    # Without tools, and where one of the calls is of another function, it is all text.
    for tools in ([], TOOLS[2:]):
        assert view(template, text, tools=tools) == AssistantMessage(text)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CHATML, "<tool_call>"),
        (CHATML, '<tool_call>{"name": "add", "arguments": {"a": 1'),
        (CHATML, '<tool_call>{"name": 3}</tool_call>'),
        (CHATML, '<tool_call>{"name": "3 + 4", "arguments": {}}</tool_call>'),
        (CHATML, '<tool_call>{"name": "Add", "arguments": {}}</tool_call>'),
        (CHATML, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        (CHATML, f'<tool_call>{CALL}</tool_call><tool_call>{{"name": "sub"}}</tool_call>'),
        (CHATML, '<tool_call>{"name": "add", "arguments": null}</tool_call>'),
        (CHATML, '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>'),
        (CHATML, '<tool_call>{"name": "add", "arguments": 7}</tool_call>'),
        (CHATML, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        (CHATML, '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>'),
        (CHATML, f"<tool_call>{CALL}</tool_call> <tool_call>none</tool_call>"),
        (CHATML, "<tool_call>" + "[" * 9999),
        (CHATML, '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 9999 + "}}"),
        (LLAMA, '{"name": "add"'),
        (LLAMA, '{"answer": 4}'),
        (LLAMA, '{"name": "John", "parameters": {}}'),
        (LLAMA, '{"name": "add", "parameters": [1]}'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "sub", "arguments": {}}]'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": "x"}]'),
        (LLAMA, "<|python_tag|>search.call(query='x')"),
        (MISTRAL, "[TOOL_CALLS] add"),
        (MISTRAL, f"[TOOL_CALLS] {CALL}"),
        (MISTRAL, "[TOOL_CALLS]"),
    ],
)
def test_malformed_calls_are_content(template, text):
    assert view(template, text) == AssistantMessage(text)


def test_reasoning_is_apart_where_the_template_knows_it():
    text = f"<think>\nA sum.\n</think>\n\nI add.\n<tool_call>{CALL}</tool_call>"
    assert view(THINKING, text) == AssistantMessage("I add.", "A sum.", (ADD,))
    assert view(CHATML, text.split("\n<tool")[0]).content.startswith("<think>")
    # Some templates open it themselves; it may also be cut.
    assert view(THINKING, "A\n</think>\nB", "<think>\n") == AssistantMessage("B", "A")
    assert view(THINKING, "A", "x<think>\n") == AssistantMessage("", "A")
    assert view(THINKING, "<think>\nA") == AssistantMessage("", "A")
    assert view(THINKING, "A </think> B") == AssistantMessage("A </think> B")
    # A prompt that closes it.
    assert view(THINKING, "B", "<think>\n\n</think>\n\n") == AssistantMessage("B")


def test_the_beginning_that_was_given_belongs_to_the_answer_and_stop_strings_do_not():
    start = HERMES.begin("add")
    assert start == '<tool_call>\n{"name": "add", "arguments":'
    found = view(CHATML, ' {"a": 1, "b": [2.5, "é"]}}\n</tool_call>', start=start)
    assert found.calls == (ADD,)
    found = view(CHATML, CALL.removeprefix('{"name": "'), start=HERMES.begin())
    assert found.calls == (ADD,)
    assert view(CHATML, "one. two. Obs: three", stop=("Obs:", ". ")).content == "one"


def test_formats_are_known_by_the_template():
    assert call_format(PLAIN_TEMPLATE) is None
    plain = TOKENIZERS[CHATML]
    template = ChatTemplate(PLAIN_TEMPLATE, origin="this test", special_tokens={})
    parser = AnswerParser(type(plain)(**{**vars(plain), "chat_template": template}))
    text = f"<tool_call>{CALL}</tool_call>"
    assert parser.view(NO_PROMPT, plain.encode(text)) == AssistantMessage(text)


@pytest.mark.parametrize(
    ("template", "text", "visible"),
    [
        (CHATML, "I add", ("", "I add")),
        (CHATML, "I add.\n", ("", "I add.")),
        (CHATML, "I add.\n<tool", ("", "I add.")),
        (CHATML, "a <tool> b", ("", "a <tool> b")),
        (CHATML, "I add.\n<tool_call>{", ("", "I add.")),
        (CHATML, "<think>", ("", "<think>")),
        (LLAMA, ' {"a', ("", "")),
        (LLAMA, 'x {"a', ("", 'x {"a')),
        (MISTRAL, "x [TOOL_", ("", "x")),
        (THINKING, "", ("", "")),
        (THINKING, "<thi", ("", "")),
        (THINKING, "<this", ("", "<this")),
        (THINKING, "<think>\nR\n</thi", ("R", "")),
        (THINKING, "<think>\nR\n</think>\n\nx", ("R", "x")),
    ],
)
def test_what_can_be_shown_before_the_answer_ends(template, text, visible):
    parser = AnswerParser(TOKENIZERS[template])
    assert parser.visible(text, opened=False, calls=True) == visible


def test_messages_for_clients_and_for_templates():
    found = view(THINKING, f"<think>\nR\n</think>\n\n<tool_call>{CALL}</tool_call>")
    message = found.to_message()
    assert message["content"] is None and message["reasoning_content"] == "R"
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and json.loads(call["function"]["arguments"])["a"] == 1
    assert AssistantMessage("four").to_message() == {"role": "assistant", "content": "four"}
    read = read_message(message | {"refusal": None, "annotations": []})
    assert read["content"] == "" and read["reasoning_content"] == "R"
    assert read["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": json.loads(ADD.arguments),
    }
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert read_message({"role": "user", "content": parts, "tool_calls": []}) == {
        "role": "user",
        "content": "one two",
    }
