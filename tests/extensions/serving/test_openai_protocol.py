"""What is a request and what is none, in terms of the request; that OpenAI's client reads the answers."""

import dataclasses
import json
import reprlib

import numpy as np
import pytest
from extras import import_extra

import_extra("dev", "pydantic")
openai_types = import_extra("dev", "openai.types")

from jaxrl.rollout.decode_state import TopTokens  # noqa: E402
from jaxrl.rollout.live_loop import Request  # noqa: E402
from jaxrl.rollout.sampling import SamplingOptions  # noqa: E402
from jaxrl_serving.online_driver import Delta  # noqa: E402
from jaxrl_serving.openai.calls import (  # noqa: E402
    Answer,
    Call,
    ChatChoice,
    CompletionChoice,
    GenerateChoice,
)
from jaxrl_serving.openai.chat_prompts import ChatQuery, RenderedPrompts  # noqa: E402
from jaxrl_serving.openai.protocol import (  # noqa: E402
    ApiError,
    ChatRequest,
    CompletionRequest,
    read_request,
)
from jaxrl_serving.tool_calls import AnswerParser  # noqa: E402

MODEL = {"model": "tiny"}
MESSAGE = {"role": "user", "content": "hi"}


def completion(**fields):
    return read_request(CompletionRequest, {**MODEL, "prompt": "x", **fields})


def chat(**fields):
    return read_request(ChatRequest, {**MODEL, "messages": [MESSAGE], **fields})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_several_of_either(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


def test_what_clients_send_without_meaning_anything_is_taken():
    # Defaults of OpenAI's own clients, and an answer that is sent back as it came.
    unused = {
        "best_of": 1,
        "echo": False,
        "ignore_eos": False,
        "logit_bias": {},
        "presence_penalty": 0.0,
        "tools": [],
    }
    completion(**unused, user="someone", metadata={"run": "1"}, response_format={"type": "text"})
    answer = {"role": "assistant", "content": "ho", "refusal": None, "tool_calls": []}
    assert [message.role for message in chat(messages=[MESSAGE, answer]).messages] == [
        "user",
        "assistant",
    ]


# What vLLM's types hold when nothing is set, without what is null there, and what they are never here.
OF_BOTH = {
    "use_beam_search": (False, True),
    "length_penalty": (1.0, 0.5),
    "skip_special_tokens": (True, False),
    "bad_words": ([], ["no"]),
    "priority": (0, 1),
    "stream_interval": (1, 4),
    "best_of": (1, 2),
    "modalities": (["text"], ["text", "audio"]),
    "truncate_prompt_tokens": (None, 9),
    "allowed_token_ids": (None, [1]),
    "structured_outputs": (None, {"regex": "a"}),
    "guided_json": (None, {}),
    "watermarking": (None, True),
    "return_tokens_as_token_ids": (None, True),
    "web_search_options": (None, {}),
    "prediction": (None, {"type": "content", "content": "x"}),
    "verbosity": ("medium", "low"),
    "function_call": ("none", {"name": "f"}),
}
OF_A_CHAT = {
    "echo": (False, True),
    "add_special_tokens": (False, True),
    "include_reasoning": (True, False),
    "documents": (None, [{"text": "x"}]),
    "chat_template": (None, "{{ messages }}"),
    "separate_reasoning": (True, False),
}
OF_NEITHER = {
    "spaces_between_special_tokens": False,
    "store": True,
    "metadata": {"run": "1"},
    "service_tier": "priority",
    "request_id": "r",
    "cache_salt": "s",
    "prompt_cache_retention": "24h",
}
SET = {"min_tokens": 0, "min_p": 0, "seed": None, "stream_options": None, "top_k": -1, "n": 1}


@pytest.mark.parametrize(
    ("read", "fields"), [(completion, OF_BOTH), (chat, OF_BOTH | OF_A_CHAT)], ids=["text", "chat"]
)
def test_a_field_at_the_value_that_changes_nothing_is_taken_and_no_other(read, fields):
    nothing = {name: neutral for name, (neutral, _) in fields.items()}
    # Not even a trace of them is left.
    assert read(**SET, **nothing, **OF_NEITHER) == read(**SET)
    for name, (_, other) in fields.items():
        check_refused(read, {name: other}, f"{name} {reprlib.repr(other)}: this server does not")


def test_the_best_of_as_many_samples_as_choices_are_these():
    assert completion(n=4, best_of=4) == completion(n=4)
    check_refused(completion, {"n": 4, "best_of": 8}, "best_of 8: this server does not have it")


def test_options_of_a_stream_have_defaults_of_other_servers():
    usage = {"include_usage": True}
    others = {"include_obfuscation": False, "continuous_usage_stats": False}
    assert chat(stream_options=usage | others) == chat(stream_options=usage)
    with pytest.raises(ApiError, match=r"^stream_options.continuous_usage_stats True: this server"):
        chat(stream_options={"continuous_usage_stats": True})


def test_parts_of_a_message_are_joined():
    parts = [{"type": "text", "text": "one ", "cache_control": {}}, {"type": "text", "text": "two"}]
    (message,) = chat(messages=[{"role": "user", "content": parts}]).messages
    assert message.content == "one two"


def _nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def check_refused(read, fields, message):
    """The message begins with the place in the body, and `message` with both."""
    with pytest.raises(ApiError) as raised:
        read(**fields)
    error = raised.value.body["error"]
    assert error["message"].startswith(message)
    assert error["param"] == message.split()[0].rstrip(":")


def format_of(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


A_PROMPT = "prompt must be a text, a list of token ids, or"
A_STOP = "stop must be a text or up to 16 of them"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"prompt": value}, A_PROMPT) for value in (None, [], [1, "a"], [2**31])),
        ({"prompt": "\ud800"}, "prompt is no text: 'utf-8' codec can't encode"),
        ({"max_tokens": "9"}, "max_tokens is '9'; it must be an integer of 32 bits"),
        ({"top_k": 2**31}, "top_k is 2147483648; it must be an integer of 32 bits"),
        ({"n": True}, "n is True; it must be an integer"),
        ({"temperature": 3}, "temperature is 3; it must be a number from 0 to 2"),
        ({"temperature": float("nan")}, "temperature is nan; it must be a number"),
        ({"temperature": 10**400}, "temperature is 100000000000000000...0000000000000000000; it m"),
        ({"top_p": float("inf")}, "top_p is inf; it must be a number below 1e9"),
        ({"stream": 1}, "stream is 1; it must be true or false"),
        *(({"stop": value}, A_STOP) for value in ([""], ["x"] * 17, "x" * 257)),
        ({"logprobs": 21}, "logprobs is 21; it must be an integer from 0 to 20"),
        ({"logit_bias": {"x": 1}}, "logit_bias names 'x', which is no token id"),
        ({"logit_bias": {"7": 101}}, "logit_bias gives token 7 101; give a number from -100 to"),
        ({"logit_bias": {"7": True}}, "logit_bias gives token 7 True; give a number from"),
        ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5; it must be a number from -2 to"),
        ({"response_format": "json"}, "response_format is 'json'; it must be an object with a ty"),
        ({"response_format": {"type": "xml"}}, "response_format.type must be 'text', 'json_objec"),
        (format_of(None), "response_format.json_schema.schema must be a JSON schema"),
        (format_of({"a": _nested(900)}), "response_format.json_schema.schema is nested too deeply"),
        ({"stream_options": 3}, "stream_options is 3; it must be an object"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage is 'yes'; it"),
        ({"echo": 1}, "echo is 1; it must be true or false"),
        ({"best_of": 2}, "best_of 2: this server does not have it; leave it out"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21; it must be an integer from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs comes with whole answers; leave"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of up to 64 token ids"),
        ({"stop_token_ids": [*range(65)]}, "stop_token_ids must be a list of up to 64 token ids"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output is 'no'; it must be tr"),
        ({"presence_penalty": 3}, "presence_penalty is 3; it must be a number from -2 to 2"),
        ({"tempreature": 1}, "tempreature is no field of this request"),
        ({"\ud800": 1}, r"\ud800 is no field of this request"),
    ],
)
def test_a_body_that_is_no_request_is_told_where_and_why(fields, message):
    check_refused(completion, fields, message)


IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
HALF = {**MESSAGE, "content": "\ud800"}
TOOL = {"type": "function", "function": {"name": "f"}}
AN_OBJECT = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages must be a list of messages"),
        ({"messages": ["hi"]}, "messages must be a list of messages, each an object"),
        ({"messages": [{"role": "user"}]}, "messages[0].content must be a text, or a list of"),
        ({"messages": [IMAGE]}, "messages[0].content must be a text, or a list of text parts"),
        ({"messages": [MESSAGE, HALF]}, "messages[1].content is no text"),
        ({"messages": [{**MESSAGE, "audio": [1]}]}, "messages[0].audio is no field of a message"),
        ({"logprobs": 1}, "logprobs is 1; it must be true or false"),
        ({"top_logprobs": 2}, "top_logprobs is only given with logprobs true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs is 21; it must be an integer from"),
        ({**AN_OBJECT, "tools": [TOOL]}, "response_format allows no call of a tool, and there are"),
        ({"prompt": "x"}, "prompt is no field of this request"),
        *(
            ({"chat_template_kwargs": value}, f"chat_template_kwargs{message}")
            for value, message in (
                ([], " must be an object of up to 64 variables"),
                ("x", " is 'x'; it must be an object of up to 64 variables"),
                ({"messages": []}, ": messages is set by the server; name other variables"),
                ({"tools": [{}]}, ": tools is set by the server"),
                ({"self": 1}, ": self is set by the server"),
                ({"eos_token": ""}, ": eos_token is set by the server"),
                ({"a b": 1}, ": 'a b' is no name of a variable: letters"),
                ({"\ud800": 1}, r": '\ud800' is no name of a variable"),
                ({"x" * 65: 1}, f": '{'x' * 59} is no name of a variable: letters"),
                ({f"v{i}": 1 for i in range(65)}, ": there are 65; give at most 64"),
                ({"x": [{"\ud800": 1}]}, ": x holds half of a surrogate pair"),
                ({"x": _nested(900)}, ": x is nested too deeply; 8 levels are read"),
            )
        ),
    ],
)
def test_so_is_a_chat(fields, message):
    check_refused(chat, fields, message)


def test_variables_of_a_chat_template_are_taken_as_they_are():
    deep = {"enable_thinking": False, "x": [[[[[[[[None, 1.5, "é"]]]]]]]]}
    assert chat(chat_template_kwargs=deep).chat_template_kwargs == deep
    assert chat(chat_template_kwargs=None).chat_template_kwargs == {}
    with pytest.raises(ApiError, match="chat_template_kwargs is no field of this request"):
        completion(chat_template_kwargs={})


@pytest.mark.parametrize(
    "fields",
    [
        {f"field{i}": 1 for i in range(10_000)},
        {"prompt": ["a", 1] * 10_000},
        {"stop": [""] * 10_000},
        {"modalities": ["audio"] * 10_000},
        {"x" * 100_000: 1},
        {"\ud800" * 100_000: 1},
        {"logit_bias": {"\ud800": 1}},
        {"echo": "x" * 100_000},
        {"tools": _nested(900)},
    ],
    ids=lambda fields: ascii(next(iter(fields)))[:10],
)
def test_however_much_is_wrong_the_answer_is_short(fields):
    with pytest.raises(ApiError) as raised:
        completion(**fields)
    assert len(str(raised.value)) < 200
    # As many as there are types that the field could have had; each would be kept in memory.
    assert raised.value.__cause__.error_count() <= 4


class Tokenizer:
    """Tokens 5 and 6 are "a" and "é"; a prompt has three tokens."""

    chat_template = None

    def encode(self, text):
        assert text == "a chat", "nothing else here is a text"
        return np.zeros(3, np.int32)

    def render_chat(self, messages, **variables):
        return "a chat"

    def decode(self, ids):
        return "".join({5: "a", 6: "é"}.get(int(i), chr(i)) for i in ids)

    def token_bytes(self, token):
        return self.decode([token]).encode()


PARSER = AnswerParser(Tokenizer())


def answer_of(
    form,
    *,
    logprobs: bool = True,
    include_usage: bool = False,
    token_ids: bool = False,
    num_top: int = 0,
) -> Answer:
    options = SamplingOptions(num_samples=2, top_logprobs=num_top)
    request = Request(np.zeros(3, np.int32), 9, 0, options)
    turn = None
    if form is ChatChoice:
        turn = RenderedPrompts(Tokenizer(), PARSER).open(ChatQuery(()), "")
    call = Call((request,), True, include_usage, logprobs, token_ids, turn)
    return Answer(call, form, "tiny", PARSER)


def delta(index: int, finish: str = "") -> Delta:
    logprob = np.array([-0.5, -1.0], np.float32)
    tokens = np.array([5, 6], np.int32)
    return Delta(tokens, logprob, -logprob, 0, index, ("a", "é"), "aé", finish)


def read_by_openai(kind: str, answer: dict) -> dict:
    """What OpenAI's types read, strictly and without fields that they do not know."""
    theirs = openai_types
    for name in kind.split("."):
        theirs = getattr(theirs, name)
    read = theirs.model_validate_json(json.dumps(answer), strict=True)
    assert not read.model_extra
    assert read.model_dump(exclude_unset=True) == answer
    return answer


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize(
    ("form", "kind"), [(CompletionChoice, "Completion"), (ChatChoice, "chat.ChatCompletion")]
)
def test_openais_client_reads_an_answer_whole(form, kind, logprobs):
    answer = answer_of(form, logprobs=logprobs)
    answer.add(0, delta(0))
    answer.add(1, delta(1, "length"))
    assert not answer.complete
    answer.add(0, delta(0, "stop"))
    assert answer.complete
    read = read_by_openai(kind, answer.whole())
    first, second = read["choices"]
    assert [first["finish_reason"], second["finish_reason"]] == ["stop", "length"]
    text = first["text"] if form is CompletionChoice else first["message"]["content"]
    assert text == "aéaé"
    assert read["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    if not logprobs:
        assert first["logprobs"] is None
    elif form is CompletionChoice:
        assert first["logprobs"]["text_offset"] == [0, 1, 2, 3]
        assert first["logprobs"]["token_logprobs"] == [-0.5, -1.0] * 2
    else:
        assert first["logprobs"]["content"][1]["bytes"] == list("é".encode())


@pytest.mark.parametrize(
    ("form", "kind"), [(CompletionChoice, "Completion"), (ChatChoice, "chat.ChatCompletion")]
)
def test_the_most_probable_tokens_stand_beside_each(form, kind):
    """The drawn tokens, "a" and "é", are not among the most probable two."""
    answer = answer_of(form, num_top=2)
    token = np.array([[70, 71], [72, 70]], np.int32)
    logprob = np.array([[-0.5, -1.5], [-0.25, -0.75]], np.float32)
    for index in range(2):
        top = TopTokens(token, logprob)
        answer.add(index, dataclasses.replace(delta(index, "stop"), top=top))
    (first, _) = read_by_openai(kind, answer.whole())["choices"]
    expected = [{"F": -0.5, "G": -1.5}, {"H": -0.25, "F": -0.75}]
    if form is CompletionChoice:
        # With the tokens that were drawn.
        drawn = [{"a": -0.5}, {"é": -1.0}]
        assert first["logprobs"]["top_logprobs"] == [
            a | b for a, b in zip(drawn, expected, strict=True)
        ]
    else:
        found = [entry["top_logprobs"] for entry in first["logprobs"]["content"]]
        assert [{e["token"]: e["logprob"] for e in top} for top in found] == expected
        assert found[0][0]["bytes"] == [70]


def test_events_of_a_chat_tell_the_role_once_and_the_counts_at_the_end():
    answer = answer_of(ChatChoice, include_usage=True)
    deltas = []
    for finish in ("", "stop"):
        answer.add(1, delta(1, finish))
        event = read_by_openai("chat.ChatCompletionChunk", answer.event(1))
        assert event["usage"] is None
        deltas.append(event["choices"][0]["delta"])
    assert deltas == [{"role": "assistant", "content": "aé"}, {"content": "aé"}]
    last = read_by_openai("chat.ChatCompletionChunk", answer.usage_event())
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    plain = answer_of(ChatChoice)
    plain.add(0, delta(0))
    assert "usage" not in plain.event(0)


def test_ids_are_given_where_they_are_asked_for_as_in_vllm():
    chat, completion = (answer_of(form, token_ids=True) for form in (ChatChoice, CompletionChoice))
    for answer in (chat, completion):
        answer.add(0, delta(0, "stop"))
        answer.add(1, delta(1, "stop"))
    whole = chat.whole()
    assert whole["prompt_token_ids"] == [0, 0, 0]
    assert [choice["token_ids"] for choice in whole["choices"]] == [[5, 6]] * 2
    choices = completion.whole()["choices"]
    assert [(c["prompt_token_ids"], c["token_ids"]) for c in choices] == [([0, 0, 0], [5, 6])] * 2
    streamed = answer_of(ChatChoice, token_ids=True)
    events = []
    for finish in ("", "stop"):
        streamed.add(1, delta(1, finish))
        events.append(streamed.event(1))
    assert events[0]["prompt_token_ids"] == [0, 0, 0] and "prompt_token_ids" not in events[1]
    assert [event["choices"][0]["token_ids"] for event in events] == [[5, 6]] * 2


def test_an_answer_of_ids_names_its_tokens_by_their_ids():
    answer = answer_of(GenerateChoice)
    for index in range(2):
        answer.add(index, delta(index, "stop"))
    read = answer.whole()
    assert read["request_id"].startswith("gen-") and "id" not in read
    assert read["choices"][1] == {
        "index": 1,
        "token_ids": [5, 6],
        "logprobs": {
            "content": [
                {"token": "token_id:5", "logprob": -0.5},
                {"token": "token_id:6", "logprob": -1.0},
            ]
        },
        "finish_reason": "stop",
    }
