"""Chats with tools over HTTP: OpenAI's client, and a model that says what it is told to."""

import contextlib
import dataclasses
import json
import sys

import numpy as np
import pytest
from chats import CHATML, LLAMA, MISTRAL, THINKING, chat_tokenizer
from extras import import_extra

for package in ("pydantic", "starlette", "uvicorn"):
    import_extra("dev", package)
openai = import_extra("dev", "openai")
httpx = import_extra("dev", "httpx2")

from scripted_driver import ScriptedDriver, serving, sizes_of  # noqa: E402

from jaxrl.data.chat import ChatTemplate  # noqa: E402
from jaxrl.rollout.live_loop import LiveCounts  # noqa: E402
from jaxrl_serving.openai.calls import RequestReader  # noqa: E402
from jaxrl_serving.openai.chat_prompts import RenderedPrompts  # noqa: E402
from jaxrl_serving.openai.logit_edits import LogitEdits  # noqa: E402
from jaxrl_serving.openai.protocol import ApiError  # noqa: E402
from jaxrl_serving.tool_calls import AnswerParser  # noqa: E402

PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}}
ADD = {"name": "add", "description": "Adds.", "strict": True, "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": ADD}]
ASK = {"model": "m", "messages": [{"role": "user", "content": "1 + 2?"}]}
CALL = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'


@contextlib.contextmanager
def client_of(template, say):
    """OpenAI's client, and the driver; `say` is a text, or a function from the prompt to one."""
    tokenizer = chat_tokenizer(template)
    end = tokenizer.special_tokens["eos_token"]

    def spoken(prompt):
        text = say if isinstance(say, str) else say(tokenizer.decode(prompt))
        return tokenizer.encode(text + end)

    driver = ScriptedDriver(tokenizer, spoken)
    with (
        serving(driver, tokenizer) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client, driver, tokenizer


@pytest.mark.parametrize(
    ("template", "said", "content", "reasoning"),
    [
        (CHATML, f"I add.\n<tool_call>\n{CALL}\n</tool_call>", "I add.", None),
        (CHATML, f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", None, None),
        (THINKING, f"<think>\nHm.\n</think>\n\n<tool_call>{CALL}</tool_call>", None, "Hm."),
        (LLAMA, CALL.replace("arguments", "parameters"), None, None),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}]", None, None),
    ],
    ids=["qwen", "two", "thinking", "llama", "mistral"],
)
def test_calls_come_back_whole_and_streamed_and_their_results_go_on(
    template, said, content, reasoning
):
    say = lambda prompt: "done" if "RESULT" in prompt else said  # noqa: E731
    with client_of(template, say) as (client, driver, tokenizer):
        answer = client.chat.completions.create(**ASK, tools=TOOLS)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == content
        assert getattr(choice.message, "reasoning_content", None) == reasoning
        calls = choice.message.tool_calls
        assert all(json.loads(call.function.arguments) == {"a": 1, "b": [2]} for call in calls)
        assert answer.usage.prompt_tokens == len(driver.prompts[0])

        parts = [
            part.choices[0]
            for part in client.chat.completions.create(**ASK, tools=TOOLS, stream=True)
        ]
        assert parts[-1].finish_reason == "tool_calls"
        assert "".join(part.delta.content or "" for part in parts) == (content or "")
        thoughts = [getattr(part.delta, "reasoning_content", None) or "" for part in parts]
        assert "".join(thoughts) == (reasoning or "")
        streamed = [call for part in parts for call in part.delta.tool_calls or []]
        assert [call.index for call in streamed] == [*range(len(calls))]
        # The same prompt and the same tokens: the same ids.
        assert [call.id for call in streamed] == [call.id for call in calls]
        arguments, whole = ([c.function.arguments for c in some] for some in (streamed, calls))
        assert arguments == whole

        results = [
            {"role": "tool", "tool_call_id": call.id, "content": f"RESULT {i}"}
            for i, call in enumerate(calls)
        ]
        history = [*ASK["messages"], choice.message, *results]
        last = client.chat.completions.create(model="m", messages=history, tools=TOOLS)
        assert (last.choices[0].finish_reason, last.choices[0].message.content) == ("stop", "done")
        text = tokenizer.backend.decode(driver.prompts[-1].tolist(), skip_special_tokens=False)
        assert "RESULT 0" in text and "add" in text.split("RESULT")[0]


@pytest.mark.parametrize(
    ("said", "more", "shown"),
    [
        (f"<tool_call>{CALL}</tool_call>", {}, False),
        (f"<tool_call>{CALL}</tool_call>", {"tools": TOOLS, "tool_choice": "none"}, True),
        ('I add.\n<tool_call>{"name": "add", "argum', {"tools": TOOLS}, True),
        (
            'I add.\n<tool_call>{"name": "3 + 4", "arguments": {}}</tool_call>',
            {"tools": TOOLS},
            True,
        ),
        ('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', {"tools": TOOLS}, True),
    ],
    ids=["no tools", "none chosen", "malformed", "no such function", "no object"],
)
def test_what_is_no_call_is_text_whole_and_streamed(said, more, shown):
    with client_of(CHATML, said) as (client, driver, tokenizer):
        (choice,) = client.chat.completions.create(**ASK, **more).choices
        assert choice.finish_reason == "stop" and not choice.message.tool_calls
        stream = client.chat.completions.create(**ASK, **more, stream=True)
        text = "".join(part.choices[0].delta.content for part in stream)
        assert text == choice.message.content == said
        assert ("Adds." in tokenizer.decode(driver.prompts[-1])) == shown


NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("choice", "start"),
    [("required", '<tool_call>\n{"name": "'), (NAMED, '<tool_call>\n{"name": "add", "arguments":')],
)
def test_a_call_can_be_forced_by_its_beginning(choice, start):
    rest = f"<tool_call>\n{CALL}\n</tool_call>".removeprefix(start)
    with client_of(CHATML, rest) as (client, driver, tokenizer):
        for stream in (False, True):
            answer = client.chat.completions.create(
                **ASK, tools=TOOLS, tool_choice=choice, stream=stream
            )
            if stream:
                deltas = [part.choices[0].delta for part in answer]
                assert not any(delta.content for delta in deltas)
                (call,) = deltas[-1].tool_calls
            else:
                (call,) = answer.choices[0].message.tool_calls
            assert call.function.name == "add"
            assert tokenizer.decode(driver.prompts[-1]).endswith(start)


def test_a_response_format_holds_after_the_reasoning_that_a_prompt_opens():
    """As DeepSeek-R1's: the prompt ends with the beginning of reasoning."""
    import_extra("dev", "llguidance")
    tokenizer, opened = chat_tokenizer(THINKING), THINKING + "<think>\n"
    tokenizer.backend.add_tokens(["</think>"])
    end = tokenizer.encode("</think>").tolist()
    sizes = sizes_of(1900, 1000, 2000, tokenizer.stop_ids)
    for template, after in ((THINKING, None), (opened, end[0])):
        chat = ChatTemplate(template, origin="this test", special_tokens={})
        model = dataclasses.replace(tokenizer, chat_template=chat)
        parser = AnswerParser(model)
        reader = RequestReader(model, "m", sizes, RenderedPrompts(model, parser), parser)
        call = reader.chat({**ASK, "response_format": {"type": "json_object"}})
        edits = call.requests[0].options.edits
        assert isinstance(edits, LogitEdits) and edits.grammar_after == after


def reader_of(template):
    """(reader of requests, tokenizer)."""
    tokenizer = chat_tokenizer(template)
    tokenizer.backend.add_tokens(["<think>", "</think>"])
    parser = AnswerParser(tokenizer)
    sizes = sizes_of(1900, 1000, 2000, tokenizer.stop_ids)
    return RequestReader(
        tokenizer, "m", sizes, RenderedPrompts(tokenizer, parser), parser
    ), tokenizer


STRICT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT |= {"additionalProperties": False}
ADD_STRICT = {"type": "function", "function": ADD | {"parameters": STRICT}}
# Not strict: any object.
FIND = {"type": "function", "function": {"name": "find", "parameters": STRICT}}


of_every_form = pytest.mark.parametrize(
    ("template", "form"),
    [
        (CHATML, '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>'),
        (LLAMA, '{"name": "NAME", "parameters": ARGS}'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "NAME", "arguments": ARGS}]'),
    ],
    ids=["qwen", "llama", "mistral"],
)


@of_every_form
def test_strict_tools_are_called_as_their_schemas_say(template, form):
    import_extra("dev", "llguidance")
    reader, tokenizer = reader_of(template)
    (end,) = tokenizer.encode(tokenizer.special_tokens["eos_token"]).tolist()

    def is_allowed(text, **fields):
        body = {**ASK, "tools": [ADD_STRICT, FIND], **fields}
        edits = reader.chat(body).requests[0].options.edits
        assert isinstance(edits, LogitEdits) and edits.grammar is not None
        grammar = edits.grammar.deep_copy()
        return all(grammar.consume_token(int(i)) for i in [*tokenizer.encode(text), end])

    def call(name, arguments):
        return form.replace("NAME", name).replace("ARGS", arguments)

    right, wrong = call("add", '{"a": 1}'), call("add", '{"a": "x"}')
    assert is_allowed(right) and is_allowed("Just a text.")
    assert not is_allowed(wrong)
    assert not is_allowed(call("add", '{"a": 1, "b": 2}')) and not is_allowed(call("sub", "{}"))
    assert is_allowed(call("find", '{"a": "x", "b": [2]}'))
    if template is CHATML:
        assert is_allowed(f"<think>\nHm.\n</think>\n\nI add. {right} {call('find', '{}')}")
        assert not is_allowed(f"I add. {right} {wrong}")
    # What a choice has started goes on.
    begun = form.partition("NAME")[0]
    assert is_allowed(right.removeprefix(begun), tool_choice="required")
    assert not is_allowed(wrong.removeprefix(begun), tool_choice="required")
    several = f"{right}\n{call('find', '{}')}".removeprefix(begun)
    assert is_allowed(several, tool_choice="required") == (template is CHATML)
    begun = right.partition(' {"a')[0]
    assert is_allowed(right.removeprefix(begun), tool_choice=NAMED)
    assert not is_allowed(wrong.removeprefix(begun), tool_choice=NAMED)


@of_every_form
def test_a_call_that_is_demanded_is_of_a_tool_with_an_object(template, form):
    """Without `strict`, which would hold arguments to their schemas."""
    import_extra("dev", "llguidance")
    reader, tokenizer = reader_of(template)
    (end,) = tokenizer.encode(tokenizer.special_tokens["eos_token"]).tolist()
    tools = [
        {"type": "function", "function": {"name": name, "parameters": STRICT}}
        for name in ("add", "add_all", "now")
    ]

    def is_allowed(name, arguments, choice):
        body = {**ASK, "tools": tools, "tool_choice": choice}
        (request,) = reader.chat(body).requests
        assert isinstance(request.options.edits, LogitEdits)
        grammar = request.options.edits.grammar.deep_copy()
        begun = form.partition("NAME")[0]
        if choice != "required":
            begun = form.partition(" ARGS")[0].replace("NAME", choice["function"]["name"])
        text = form.replace("NAME", name).replace("ARGS", arguments)
        assert text.startswith(begun)
        read = [*tokenizer.encode(text.removeprefix(begun)), end]
        return all(grammar.consume_token(int(i)) for i in read)

    for name in ("add", "add_all", "now"):
        named = {"type": "function", "function": {"name": name}}
        for choice in ("required", named):
            assert is_allowed(name, '{"b": [1, {"c": null}]}', choice)
            assert is_allowed(name, "{}", choice)
            for wrong in ("[]", "3", '"{}"', "null", '{"a": 1', "{a: 1}"):
                assert not is_allowed(name, wrong, choice)
    for name in ("3 + 4", "Add", "ad", "add_", "addnow", "", "multiply"):
        assert not is_allowed(name, "{}", "required")


def test_without_llguidance_a_demanded_call_is_refused(monkeypatch):
    reader, _ = reader_of(CHATML)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for choice in ("required", NAMED):
        with pytest.raises(ApiError, match=r"a tool_choice that demands a call need.* extra json"):
            reader.chat({**ASK, "tools": TOOLS[:1], "tool_choice": choice})
    plain = [{"type": "function", "function": {"name": "add"}}]
    for choice in ("auto", "none"):
        (request,) = reader.chat({**ASK, "tools": plain, "tool_choice": choice}).requests
        assert request.options.edits is None


def test_strict_tools_may_be_given_and_not_called():
    reader, _ = reader_of(CHATML)
    body = {**ASK, "tools": TOOLS}
    assert reader.chat({**body, "tool_choice": "none"}).requests[0].options.edits is None
    odd = {"type": "function", "function": ADD | {"strict": "yes"}}
    with pytest.raises(ApiError, match="strict must be true or false"):
        reader.chat({**ASK, "tools": [odd]})
    open_ended = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    odd = {"type": "function", "function": ADD | {"parameters": open_ended}}
    with pytest.raises(ApiError, match="strict has a schema that cannot be enforced"):
        reader.chat({**ASK, "tools": [odd]})


def test_bodies_that_verifiers_sent():
    """Recorded with verifiers 0.4 and renderers 0.1.12, the ids of a tiny model in place of Qwen3's."""
    tokenizer = chat_tokenizer(CHATML)
    tokens = tokenizer.encode(f"<tool_call>\n{CALL}\n</tool_call><|im_end|>")
    driver = ScriptedDriver(tokenizer, lambda prompt: tokens)
    with serving(driver, tokenizer) as url:
        headers = {"authorization": "Bearer x", "x-session-id": "trace-1"}
        headers["user-agent"] = "AsyncOpenAI/Python 2.54.0"
        with httpx.Client(base_url=url, headers=headers) as client:
            (model,) = client.get("/v1/models").json()["data"]
            assert model["max_model_len"] == 2000
            params = {"stop_token_ids": list(tokenizer.stop_ids), "logprobs": 1}
            params["skip_special_tokens"] = False
            body = {"model": "m", "token_ids": list(range(3, 161)), "sampling_params": params}
            answer = client.post("/inference/v1/generate", json=body).json()
            (choice,) = answer["choices"]
            assert choice["token_ids"] == tokens.tolist() and choice["finish_reason"] == "stop"
            content = choice["logprobs"]["content"]
            assert [each["token"] for each in content] == [f"token_id:{i}" for i in tokens]
            assert np.isfinite([each["logprob"] for each in content]).all()
            assert answer["request_id"].startswith("gen-")
            # The second turn: the first prompt, the sampled ids, and 15 new ones.
            body["token_ids"] += [*choice["token_ids"], *range(15)]
            body["sampling_params"]["routed_experts_prompt_start"] = 180
            body["cache_salt"] = "v1"
            assert client.post("/inference/v1/generate", json=body).status_code == 200
            assert driver.prompts[-1].tolist() == body["token_ids"]
            for changes, param in (
                ({"stream": True}, "stream"),
                ({"token_ids": []}, "token_ids"),
                ({"sampling_params": {"bad_words": ["x"]}}, "sampling_params.bad_words"),
                ({"sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
                ({"sampling_params": {"stop": "x<|im_end|>"}}, "sampling_params.stop"),
                ({"sampling_params": {"max_tokens": 3000}}, "sampling_params.max_tokens"),
                ({"token_ids": [5] * 1950}, "token_ids"),
                (
                    {"sampling_params": {"stop_token_ids": [10**6]}},
                    "sampling_params.stop_token_ids",
                ),
            ):
                refused = client.post("/inference/v1/generate", json=body | changes)
                assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_metrics_count_what_clients_have_asked_for():
    """What the driver did before, to compile its programs, is no request."""
    tokenizer = chat_tokenizer(CHATML)
    driver = ScriptedDriver(tokenizer, tokenizer.encode)
    driver.counts = LiveCounts(0, 1, sampled=20, prompt=300, known=40, stopped=5, full=6)
    with serving(driver, tokenizer) as url:
        driver.counts = LiveCounts(2, 3, sampled=21, prompt=302, known=43, stopped=9, full=11)
        lines = httpx.get(f"{url}/metrics").text.splitlines()
    values = [int(line.split()[-1]) for line in lines if not line.startswith("#")]
    # Waiting, running, sampled, prompt (twice), known, stopped, full.
    assert values == [2, 3, 1, 2, 2, 3, 4, 5]
