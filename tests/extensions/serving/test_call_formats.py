"""Calls of each family: what its template writes is read back, with the types of the tool's schema."""

import json
import time

import numpy as np
import pytest
from chats import CHATML, CODER, ENDS, GEMMA, GLM, HARMONY, MINISTRAL, SPECIAL, chat_tokenizer, user
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_serving.call_formats import typed
from jaxrl_serving.tool_calls import AnswerParser, AssistantMessage

TEMPLATES = {
    "hermes": CHATML,
    "coder": CODER,
    "glm": GLM,
    "gemma": GEMMA,
    "gpt-oss": HARMONY,
    "ministral": MINISTRAL,
}
TOKENIZERS = {name: chat_tokenizer(template) for name, template in TEMPLATES.items()}
PARSERS = {name: AnswerParser(tokenizer) for name, tokenizer in TOKENIZERS.items()}
PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "string"},
        "c": {"type": ["number", "null"]},
        "d": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        "e": {"type": "array", "items": {"type": "string"}},
        "f": {"type": "boolean"},
        "g": {"enum": ["one", 2]},
    },
    "$defs": {"Point": {"properties": {"x": {"type": "number"}}}},
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
# Without what the formats are made of: none of them can quote that.
TEXTS = st.text(st.sampled_from("ab1 \n\"'{}[],:\\\té"), max_size=12)
NUMBERS = st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6)
VALUES = {
    "a": st.integers(),
    "b": TEXTS | st.sampled_from(["1", "true", "null", '{"a": 1}', "</p>"]),
    "c": NUMBERS | st.none(),
    "d": st.fixed_dictionaries({"x": NUMBERS, "y": st.lists(TEXTS, max_size=2)}) | st.none(),
    "e": st.lists(TEXTS, max_size=3),
    "f": st.booleans(),
    "g": st.sampled_from(["one", 2]),
}
ARGUMENTS = st.fixed_dictionaries({}, optional=VALUES)


def answer_of(name: str, calls, content: str = "") -> str:
    """What the template writes for a message with calls, from the end of the prompt on."""
    tokenizer = TOKENIZERS[name]
    called = [
        {
            "id": f"callcall{i}",
            "type": "function",
            "function": {"name": "add", "arguments": arguments},
        }
        for i, arguments in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": called}
    before = tokenizer.render_chat([user("u")], add_generation_prompt=True, tools=TOOLS)
    whole = tokenizer.render_chat([user("u"), message], tools=TOOLS)
    assert whole.startswith(before)
    answer = whole[len(before) :].rstrip("\n")
    end = ENDS.get(TEMPLATES[name], SPECIAL[TEMPLATES[name]])[0]
    return answer.removesuffix(end) + end


def view(name: str, text: str, tools=TOOLS) -> AssistantMessage:
    tokens = TOKENIZERS[name].encode(text)
    return PARSERS[name].view(np.zeros(0, np.int32), tokens, tools=tools)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=3))
def test_what_the_template_writes_is_read_back(name, calls):
    calls = calls[:1] if name == "gpt-oss" else calls
    found = view(name, answer_of(name, calls))
    assert [json.loads(call.arguments) for call in found.calls] == calls
    assert {call.name for call in found.calls} == {"add"} and found.content == ""
    # Types are part of it: 1 == True == 1.0.
    written = [json.dumps(json.loads(call.arguments), sort_keys=True) for call in found.calls]
    assert written == [json.dumps(call, sort_keys=True) for call in calls]


@pytest.mark.parametrize("name", ["coder", "glm", "gemma", "ministral"])
def test_text_before_calls_is_content(name):
    found = view(name, answer_of(name, [{"a": 1}], "Let me see."))
    assert found.content == "Let me see." and len(found.calls) == 1
    assert view(name, answer_of(name, [{"a": 1}], "Well."), tools=[]).calls == ()


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=20, deadline=None)
@given(call=ARGUMENTS)
def test_a_stream_shows_a_beginning_of_the_content(name, call):
    content = "" if name == "gpt-oss" else "So:"
    tokens, parser = TOKENIZERS[name].encode(answer_of(name, [call], content)), PARSERS[name]
    whole = view(name, answer_of(name, [call], content))
    for n in range(len(tokens) + 1):
        reasoning, shown = parser.visible(parser.decode(tokens[:n]), opened=False, calls=True)
        assert whole.content.startswith(shown) and whole.reasoning.startswith(reasoning)


CODER_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
)
GLM_CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("coder", CODER_CALL.format(7), [{"a": 7}]),
        ("coder", "<tool_call><function=add><parameter=a>7</parameter></function>", [{"a": 7}]),
        ("coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [{}]),
        # A text may have the tag that ends values.
        (
            "coder",
            CODER_CALL.replace("=a>", "=b>").format("if x:\n    y </parameter> z"),
            [{"b": "if x:\n    y </parameter> z"}],
        ),
        # A parameter that no schema knows is text.
        ("coder", CODER_CALL.replace("=a>", "=z>").format(7), [{"z": "7"}]),
        ("glm", GLM_CALL.format(7) + "\n" + GLM_CALL.format(8), [{"a": 7}, {"a": 8}]),
        # As GLM-4.7 writes it, and cut by the end of the answer.
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>7</arg_value>", [{"a": 7}]),
        ("glm", "<tool_call>now</tool_call>", [{}]),
        ("gemma", '<|tool_call>call:add{ "a": 1 }<tool_call|>', None),
        ("gemma", "<|tool_call>call:add{a: 1, e: []}<tool_call|>", [{"a": 1, "e": []}]),
        ("gemma", '<|tool_call>call:add{d:{<|"|>x y<|"|>:-2.5e3}}', [{"d": {"x y": -2500.0}}]),
        (
            "gpt-oss",
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 7}<|call|>',
            [{"a": 7}],
        ),
        (
            "ministral",
            '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 7}[TOOL_CALLS]now[ARGS]{}',
            [{"a": 7}, {}],
        ),
        # Malformed ones.
        ("ministral", "[TOOL_CALLS]add{}", None),
        ("ministral", "[TOOL_CALLS]add[ARGS]{", None),
        ("coder", CODER_CALL.format("seven"), None),
        ("coder", CODER_CALL.format("7.5"), None),
        ("coder", CODER_CALL.format(7).replace("</parameter>", ""), None),
        ("coder", CODER_CALL.format(7).replace("=add", "=sub"), None),
        ("coder", CODER_CALL.format(7) + "<tool_call>", None),
        ("coder", "<tool_call>" + '{"name": "add", "arguments": {}}', None),
        ("glm", GLM_CALL.format("seven"), None),
        ("glm", GLM_CALL.format(7).replace("</arg_value>", ""), None),
        ("glm", "<tool_call>", None),
        ("gemma", "<|tool_call>call:add{a:one}<tool_call|>", None),
        ("gemma", "<|tool_call>call:add{a:1<tool_call|>", None),
        ("gemma", "<|tool_call>call:add{a:1 b:2}<tool_call|>", None),
        ("gemma", "<|tool_call>call:add{a:1}, and then", None),
        ("gemma", "<|tool_call>call:add" + "{a:[" * 20_000, None),
    ],
)
def test_calls_by_hand(name, text, expected):
    found = view(name, text)
    if expected is None:
        assert found == AssistantMessage(PARSERS[name].decode(TOKENIZERS[name].encode(text)))
    else:
        assert [json.loads(call.arguments) for call in found.calls] == expected


@pytest.mark.parametrize(
    "text", ["<arg_key>" + " " * 40_000, "</arg_value>" * 9_000, "\n" * 40_000]
)
def test_the_time_of_an_answer_grows_with_its_length(text):
    begun_s = time.process_time()
    view("glm", f"<tool_call>add{text}")
    view("coder", f"<tool_call>\n<function=add>\n<parameter=a>{text}")
    view("gemma", f"<|tool_call>call:add{{{text}")
    # A square of the length would be minutes.
    assert time.process_time() - begun_s < 20


def test_channels_of_gpt_oss():
    thought = "<|channel|>analysis<|message|>A sum.<|end|><|start|>assistant"
    said = "<|channel|>commentary<|message|>Let me add.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.add<|message|>{}<|call|>"
    final = "<|channel|>final<|message|>It is 4.<|return|>"
    assert view("gpt-oss", thought + final) == AssistantMessage("It is 4.", "A sum.")
    assert view("gpt-oss", thought + final, tools=[]) == AssistantMessage("It is 4.", "A sum.")
    found = view("gpt-oss", thought + said + call)
    assert (found.content, found.reasoning, len(found.calls)) == ("Let me add.", "A sum.", 1)
    # Malformed, of no tool, and without tools: text.
    for wrong, tools in (
        (call.replace("{}", "{"), TOOLS),
        (call.replace(".add", ".sub"), TOOLS),
        (call, []),
    ):
        body = wrong.split("<|message|>")[1].removesuffix("<|call|>")
        found = view("gpt-oss", thought + said + wrong, tools=tools)
        assert found == AssistantMessage(f"Let me add.\n{body}", "A sum.")
    # Cut in the thought, in a head, and without any head.
    assert view("gpt-oss", "<|channel|>analysis<|message|>A su") == AssistantMessage("", "A su")
    assert view("gpt-oss", thought + "<|channel|>fin") == AssistantMessage("", "A sum.")
    assert view("gpt-oss", "It is 4.<|return|>") == AssistantMessage("It is 4.")


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "integer"}, 7),
        (" 7\n", {"type": "integer"}, 7),
        ("7", {"type": "number"}, 7),
        ("7", {"type": "string"}, "7"),
        ("7", {}, "7"),
        ("7", None, "7"),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": ["boolean", "string"]}, True),
        ("None", {"type": ["string", "null"]}, None),
        ("yes", {"type": ["boolean", "string"]}, "yes"),
        ('"quoted"', {"type": ["integer", "string"]}, '"quoted"'),
        ("[1]", {"type": "array"}, [1]),
        ('{"x": 1}', {"properties": {"x": {}}}, {"x": 1}),
        ("2", {"enum": ["one", 2]}, 2),
        ("3", {"const": 3}, 3),
        ("3", {"allOf": [{"type": "integer"}]}, 3),
        ("3", {"$ref": "#/nowhere"}, "3"),
        ("3", {"type": 3, "anyOf": 4, "enum": None}, "3"),
        ("x", {"anyOf": [{"type": "integer"}, {"$ref": "#/nowhere"}]}, "x"),
        # A schema that holds itself.
        ("3", {"anyOf": [{"$ref": "#"}, {"type": "integer"}]}, 3),
    ],
)
def test_a_value_has_the_type_of_its_schema(text, schema, value):
    found = typed(text, schema, schema)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("seven", "integer"),
        ("7.5", "integer"),
        ("1", "boolean"),
        ("[1", "array"),
        ("True", "number"),
    ],
)
def test_a_text_that_is_no_value_of_its_type_is_refused(text, kind):
    with pytest.raises(ValueError, match=kind):
        typed(text, {"type": kind})
