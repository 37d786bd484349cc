"""launch/serve.py and what it serves, over real sockets: OpenAI's client, rude clients."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import re
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_engine import random_weights
from closeness import assert_close
from extras import import_extra
from processes import started

for package in ("pydantic", "starlette", "uvicorn"):
    import_extra("dev", package)
openai = import_extra("dev", "openai")

from jaxrl import cli  # noqa: E402
from jaxrl.data.chat import ChatTemplate  # noqa: E402
from jaxrl.data.tokenizer import train_tokenizer  # noqa: E402
from jaxrl.errors import UserError  # noqa: E402
from jaxrl.models.huggingface.weight_export import save_checkpoint  # noqa: E402
from jaxrl.models.model_config import ModelConfig  # noqa: E402
from jaxrl.rollout.backend import SamplingOptions  # noqa: E402
from jaxrl.rollout.driver import OfflineBackend  # noqa: E402
from jaxrl.serving.model_loading import lengths_of, load  # noqa: E402
from jaxrl.serving.serve_config import ServeConfig  # noqa: E402
from jaxrl.serving.server import running  # noqa: E402
from jaxrl.types import Prompts  # noqa: E402

SCRIPT = pathlib.Path(__file__).parents[2] / "launch" / "serve.py"
TEMPLATE = (
    "{% for m in messages %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %} briefly{% endif %}"
    # It shows no tools, because prompts are short.
    "{# tools: <tool_call> #}"
)
SIZES = {
    # Few sizes, so that little is compiled: 8 slots of capacity 64 or 96.
    "slots": 8,
    "prefill_prompts": 1,
    "max_prompt_tokens": 48,
    "max_response_tokens": 44,
    "tokens_per_dispatch": 4,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> pathlib.Path:
    """A model and a tokenizer as a user has them."""
    root = tmp_path_factory.mktemp("serve")
    tokenizer = train_tokenizer(["one two three four: naïve 東京 🦜"] * 4, vocab_size=300)
    chat = ChatTemplate(TEMPLATE, origin="test", special_tokens=tokenizer.special_tokens)
    dataclasses.replace(tokenizer, chat_template=chat).save(root / "tokenizer")
    model = ModelConfig(
        vocab_size=320, num_layers=2, d_model=32, d_ff=48, num_heads=2, num_kv_heads=1, head_dim=16
    )
    out, source = root / "tiny-model", root / "tokenizer"
    params = jax.device_put(random_weights(model))
    save_checkpoint(params, model, out, dtype="float32", source=source)
    return out


def config_of(directory, **changes) -> ServeConfig:
    given = {"http_port": 0, "grace_s": 5.0, **SIZES}
    return ServeConfig(model=str(directory), **{**given, **changes})


@pytest.fixture(scope="module")
def loaded(directory):
    return load(config_of(directory))


@pytest.fixture(scope="module")
def server(directory, loaded):
    with running(config_of(directory, max_body_bytes=20_000, max_waiting=400), loaded) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_stays_behind(server):
    yield
    wait_until(lambda: server.driver.load == (0, 0))


@pytest.fixture
def client(server):
    with openai.OpenAI(**address(server)) as client:
        yield client


def address(server):
    return {
        "base_url": f"http://127.0.0.1:{server.http_port}/v1",
        "api_key": "none",
        "max_retries": 0,
        "timeout": 300,
    }


def wait_until(condition, timeout_s=120):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


MODEL = {"model": "tiny-model"}


def offline(loaded, prompt: str, *, seed: int, max_tokens: int, temperature=1.0):
    """Text, tokens and logprobs that training would sample from the same weights."""
    blank = ("",)
    prompts = Prompts(np.array([seed]), (loaded.tokenizer.encode(prompt),), blank, blank, blank)
    backend = OfflineBackend(loaded.engine, loaded.tokenizer.decode_batch)
    backend.load(loaded.params)
    options = SamplingOptions(num_samples=2, seed=0, step=0, temperature=temperature)
    found = backend.generate(prompts, options)
    tokens = [t[:max_tokens] for t in found.tokens]
    return [
        (loaded.tokenizer.decode(t), t, logprob[:max_tokens], t[-1] in loaded.tokenizer.stop_ids)
        for t, logprob in zip(tokens, found.rollout_logprob, strict=True)
    ]


# OpenAI's client


def test_a_completion_is_what_training_would_sample(client, loaded):
    assert [model.id for model in client.models.list()] == ["tiny-model"]
    assert client.models.retrieve("tiny-model").model_extra["max_model_len"] == 92
    with pytest.raises(openai.NotFoundError, match="model 'org/other' is not here"):
        client.models.retrieve("org/other")
    answer = client.completions.create(
        **MODEL, prompt="one two", seed=3, n=2, max_tokens=40, logprobs=1
    )
    expected = offline(loaded, "one two", seed=3, max_tokens=40)
    for choice, (text, tokens, logprob, stopped) in zip(answer.choices, expected, strict=True):
        assert choice.text == text
        assert choice.finish_reason == ("stop" if stopped else "length")
        # A character cut off by the limit is shown in the text, and belongs to no token.
        assert text.startswith("".join(choice.logprobs.tokens))
        assert len(choice.logprobs.tokens) == len(tokens)
        assert_close(np.array(choice.logprobs.token_logprobs), logprob, scale=1)
        starts = np.cumsum([0, *map(len, choice.logprobs.tokens)])[:-1]
        assert choice.logprobs.text_offset == starts.tolist()
    usage = answer.usage
    assert usage.prompt_tokens == len(loaded.tokenizer.encode("one two"))
    assert usage.completion_tokens == sum(len(tokens) for _, tokens, _, _ in expected)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_streamed_completion_is_the_same_piece_by_piece(client):
    options = {**MODEL, "prompt": ["one", "two three"], "seed": 4, "max_tokens": 30, "logprobs": 1}
    whole = client.completions.create(**options, n=2)
    texts, tokens, offsets = [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)]
    finish, usage, events = [None] * 4, None, 0
    stream = client.completions.create(
        **options, n=2, stream=True, stream_options={"include_usage": True}
    )
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            events += 1
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.token_logprobs
            offsets[choice.index] += choice.logprobs.text_offset
            finish[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    assert finish == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert events >= 8


def test_a_chat_goes_through_the_template_whole_and_streamed(client, loaded):
    parts = [{"type": "text", "text": text} for text in ("one ", "two")]
    messages = [{"role": "system", "content": "count"}, {"role": "user", "content": parts}]
    options = {**MODEL, "messages": messages, "seed": 5, "max_completion_tokens": 24}
    answer = client.chat.completions.create(**options, logprobs=True, n=2)
    rendered = "[system] count\n[user] one two\n[assistant]"
    expected = offline(loaded, rendered, seed=5, max_tokens=24)
    for choice, (text, _, logprob, _) in zip(answer.choices, expected, strict=True):
        assert (choice.message.role, choice.message.content) == ("assistant", text)
        content = choice.logprobs.content
        assert_close(np.array([entry.logprob for entry in content]), logprob, scale=1)
        assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
    parts = list(client.chat.completions.create(**options, logprobs=True, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content for part in parts) == expected[0][0]
    streamed = [entry.logprob for part in parts for entry in part.choices[0].logprobs.content]
    assert_close(np.array(streamed), expected[0][2], scale=1)
    assert answer.usage.prompt_tokens == len(loaded.tokenizer.encode(rendered))


def test_a_client_sets_variables_of_the_template(client, loaded):
    messages = [{"role": "user", "content": "one two"}]
    options = {**MODEL, "messages": messages, "seed": 5, "max_completion_tokens": 24}
    extra = {"chat_template_kwargs": {"enable_thinking": False, "not_read": [{"x": None}]}}
    answer = client.chat.completions.create(**options, extra_body=extra)
    rendered = "[user] one two\n[assistant] briefly"
    ((text, *_),) = offline(loaded, rendered, seed=5, max_tokens=24)[:1]
    assert answer.choices[0].message.content == text
    assert answer.usage.prompt_tokens == len(loaded.tokenizer.encode(rendered))


def test_ids_are_answered_with_ids(server, loaded):
    prompt = loaded.tokenizer.encode("one two")
    params = {"seed": 3, "n": 2, "logprobs": 1, "stop_token_ids": list(loaded.tokenizer.stop_ids)}
    body = {"token_ids": prompt.tolist(), "sampling_params": params}
    status, answer = post(server, body, "/inference/v1/generate")
    assert status == 200
    # Without a number: all that a response may have.
    expected = offline(loaded, "one two", seed=3, max_tokens=SIZES["max_response_tokens"])
    for choice, (_, tokens, logprob, stopped) in zip(answer["choices"], expected, strict=True):
        assert choice["token_ids"] == tokens.tolist()
        assert choice["finish_reason"] == ("stop" if stopped else "length")
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in tokens]
        assert_close(np.array([entry["logprob"] for entry in content]), logprob, scale=1)


def test_stops_settings_and_seeds(client):
    def text(**options):
        given = {**MODEL, "prompt": "one", "seed": 6, "max_tokens": 40, **options}
        return client.completions.create(**given).choices[0]

    whole = text().text
    stop = whole[7:9]
    cut = text(stop=["\N{NULL}never", stop])
    assert (cut.text, cut.finish_reason) == (whole[: whole.find(stop)], "stop")
    assert text().text == whole != text(seed=7).text
    greedy = [text(temperature=0, seed=s).text for s in (1, 2)]
    assert greedy[0] == greedy[1] == text(extra_body={"top_k": 1}).text
    # Without a seed every answer is another.
    assert len({text(seed=None).text for _ in range(3)}) == 3
    assert (
        len(text(max_tokens=None, extra_body={"min_tokens": 16}, logprobs=1).logprobs.tokens) == 16
    )


def test_two_hundred_requests_at_once_are_answered_as_one_by_one(client, server):
    asks = [
        {"prompt": f"{'one two ' * (i % 4)}{i}", "seed": i, "max_tokens": 1 + 2 * i}
        for i in range(20)
    ]
    alone = [client.completions.create(**MODEL, **ask).choices[0].text for ask in asks]

    async def all_at_once():
        async with openai.AsyncOpenAI(**address(server)) as client:
            calls = [client.completions.create(**MODEL, **asks[i % 20]) for i in range(200)]
            return await asyncio.gather(*calls)

    answers = asyncio.run(all_at_once())
    assert [a.choices[0].text for a in answers] == alone * 10


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["one", "東京"]},
        "n": {"type": "integer", "minimum": -5, "maximum": 99},
        "on": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
    },
    "required": ["name", "n", "on"],
    "additionalProperties": False,
}


def follows_the_schema(answer: str) -> bool:
    value = json.loads(answer)
    return (
        list(value) == ["name", "n", "on"]
        and value["name"] in ("one", "東京")
        and type(value["n"]) is int
        and -5 <= value["n"] <= 99
        and value["on"] in ([], [True], [False])
    )


def test_answers_follow_a_schema_beside_others_that_do_not_change(client, server, loaded):
    """The model has random weights. Without white space every answer is short enough."""
    import_extra("dev", "llguidance")
    spaces = [loaded.tokenizer.encode(character)[0] for character in " \t\r\n"]
    chat = {**MODEL, "messages": [{"role": "user", "content": "one"}], "max_tokens": 42}
    asked = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "logit_bias": {str(token): -100 for token in spaces},
        "seed": 1,
        "n": 8,
    }
    alone = client.completions.create(**MODEL, prompt="two", seed=2, max_tokens=40, logprobs=0)

    async def all_at_once():
        async with openai.AsyncOpenAI(**address(server)) as client:
            return await asyncio.gather(
                client.chat.completions.create(**chat, **asked),
                client.completions.create(**MODEL, prompt="two", seed=2, max_tokens=40, logprobs=0),
                client.chat.completions.create(**chat, **asked | {"temperature": 2, "seed": 3}),
            )

    first, beside, second = asyncio.run(all_at_once())
    texts = [choice.message.content for chat in (first, second) for choice in chat.choices]
    assert all(map(follows_the_schema, texts)) and len(set(texts)) > 8
    assert {c.finish_reason for chat in (first, second) for c in chat.choices} == {"stop"}
    assert beside.choices[0].text == alone.choices[0].text
    parts = client.chat.completions.create(**chat, **asked, stream=True)
    streamed = [""] * 8
    for part in parts:
        streamed[part.choices[0].index] += part.choices[0].delta.content
    assert streamed == texts[:8]
    # The limit ends a grammar like any other answer.
    cut = client.chat.completions.create(**chat | {"max_tokens": 5}, **asked)
    assert {choice.finish_reason for choice in cut.choices} == {"length"}
    asked["response_format"] = {"type": "json_object"}
    anything = client.chat.completions.create(**chat, **asked)
    assert all(choice.message.content.startswith("{") for choice in anything.choices)


def test_the_most_probable_tokens_are_reported(client, loaded):
    spelled = [loaded.tokenizer.decode([token]) for token in range(loaded.tokenizer.vocab_size)]
    chat = {**MODEL, "messages": [{"role": "user", "content": "one"}], "seed": 4, "max_tokens": 9}
    plain = client.chat.completions.create(**chat, logprobs=True).choices[0].logprobs.content
    answer = client.chat.completions.create(**chat, logprobs=True, top_logprobs=20).choices[0]
    for entry, alone in zip(answer.logprobs.content, plain, strict=True):
        assert entry.token == alone.token
        assert_close(entry.logprob, alone.logprob, scale=1)
        top = [each.logprob for each in entry.top_logprobs]
        assert len(top) == 20 and top == sorted(top, reverse=True)
        assert {each.token for each in entry.top_logprobs} <= set(spelled)
        assert np.exp(top).sum() < 1 and not alone.top_logprobs
    asked = {**MODEL, "prompt": "one", "seed": 4, "max_tokens": 9, "temperature": 0}
    logprobs = client.completions.create(**asked, logprobs=2).choices[0].logprobs
    # Greedy: what is drawn is the most probable token, and each has a place of its own.
    for logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert 1 <= len(top) <= 3
        assert_close(max(top.values()), logprob, scale=1)


# What is wrong with a request


JSON = {"content-type": "application/json"}


@contextlib.contextmanager
def sent(port, method, path, body=None, headers=JSON):
    """A connection over which a request was sent."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        yield connection


def post(server, body, path="/v1/completions", **headers):
    content = body if isinstance(body, bytes) else json.dumps({**MODEL, **body}).encode()
    with sent(server.http_port, "POST", path, content, JSON | headers) as connection:
        response = connection.getresponse()
        return response.status, json.loads(response.read())


NO_ARRAY = {"name": "x", "schema": {"type": "array", "uniqueItems": True}}
NO_FORMAT = {"type": "json_schema", "json_schema": NO_ARRAY}


@pytest.mark.parametrize(
    "body, status, message",
    [
        (b"{", 400, "the body is no JSON"),
        (b"[" * 10_000, 400, "the body is no JSON"),
        (b"[]", 400, "must be a JSON object"),
        ({"prompt": [0, 319]}, 400, "token ids from 0 to 319; this model's go from 0 to"),
        ({"prompt": "x" * 300}, 400, "of which prompts have 48 at most; this one has 300"),
        ({"prompt": "x", "max_tokens": 92}, 400, "maximum context length is 92 tokens"),
        ({"prompt": "x", "logit_bias": {"319": 1}}, 400, "logit_bias has token id 319; this"),
        ({"prompt": "x", "response_format": NO_FORMAT}, 400, "Unimplemented keys"),
        ({"prompt": ["x"] * 100, "n": 2}, 400, "100 prompts with n 2"),
        ({"prompt": "x", "model": "gpt-4"}, 404, "model 'gpt-4' is not here; this server has"),
        ({"prompt": "x" * 20_000}, 413, "larger than 20000 bytes"),
    ],
)
def test_a_request_that_cannot_be_served_says_why(body, status, message, server):
    """Faults of single fields: test_openai_protocol.py."""
    got, answer = post(server, body)
    assert got == status
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"]
)
def test_a_body_that_a_page_of_another_site_may_send_is_refused(kind, server):
    """A browser asks before it sends JSON to another site, and gets no permission here."""
    foreign = {"origin": "https://evil.example"}
    body = {"prompt": "one", "max_tokens": 1}
    status, answer = post(server, body, **{"content-type": kind}, **foreign)
    assert status == 415 and "send content-type: application/json" in answer["error"]["message"]
    asks = {"access-control-request-method": "POST", **foreign}
    with sent(server.http_port, "OPTIONS", "/v1/completions", headers=asks) as connection:
        response = connection.getresponse()
        assert response.status == 405
        assert not [name for name, _ in response.getheaders() if name.startswith("access-control")]
    assert post(server, body, **{"content-type": "Application/JSON; charset=utf-8"})[0] == 200


def test_other_paths_and_methods_have_errors_of_the_same_shape(server):
    assert post(server, {}, "/v1/embeddings")[0] == 404
    status, answer = post(server, {}, "/v1/models")
    assert status == 405 and "Method Not Allowed" in answer["error"]["message"]


def test_a_body_that_hides_its_size_is_refused_too(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("transfer-encoding", "chunked")
    connection.endheaders()
    for _ in range(3):
        connection.send(b"2328\r\n" + b" " * 0x2328 + b"\r\n")
    assert connection.getresponse().status == 413
    connection.close()


def test_more_than_may_wait_is_refused_for_now(server, client):
    with pytest.raises(openai.RateLimitError, match="no more than 400 may"):
        asyncio.run(too_many(server))
    assert client.completions.create(**MODEL, prompt="one", max_tokens=1).choices


async def too_many(server):
    async with openai.AsyncOpenAI(**address(server)) as client:
        options = {"n": 128, "max_tokens": 44, "extra_body": {"min_tokens": 44}}
        calls = [client.completions.create(**MODEL, prompt="one", **options) for _ in range(5)]
        await asyncio.gather(*calls)


# Clients that go away, engines that fail


LONG = {"prompt": "one", "max_tokens": 44, "min_tokens": 44, "n": 8}


@pytest.fixture
def dispatches(loaded, monkeypatch):
    """Calls of the engine; a long answer takes 11 of them."""
    calls = []
    generate = loaded.engine.generate

    def counted(*args):
        calls.append(1)
        time.sleep(0.05)
        return generate(*args)

    monkeypatch.setattr(loaded.engine, "generate", counted)
    return calls


def test_metrics_for_prometheus(server, client):
    def read():
        with sent(server.http_port, "GET", "/metrics") as connection:
            response = connection.getresponse()
            assert response.getheader("content-type").startswith("text/plain; version=0.0.4")
            lines = response.read().decode().splitlines()
        types = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))
        values = dict(line.split() for line in lines if not line.startswith("#"))
        assert types.keys() == values.keys()
        return {name: int(value) for name, value in values.items()}

    before = read()
    options = {"prompt": [17, 4, 9], "n": 2, "max_tokens": 5, "extra_body": {"min_tokens": 5}}
    client.completions.create(**MODEL, **options)
    wait_until(lambda: server.driver.load == (0, 0))
    added = {name: value - before[name] for name, value in read().items()}
    assert added == {
        "jaxrl_samples_waiting": 0,
        "jaxrl_samples_running": 0,
        "jaxrl_sampled_tokens_total": 2 * 5,
        "jaxrl_prompt_tokens_total": 3,
        # Shorter than a page.
        "jaxrl_prompt_tokens_cached_total": 0,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slots(stream, server, dispatches):
    body = json.dumps({**MODEL, **LONG, "stream": stream})
    with sent(server.http_port, "POST", "/v1/completions", body) as connection:
        if stream:
            assert connection.getresponse().read(10) == b'data: {"id'
        wait_until(lambda: server.driver.load == (0, 8))
    wait_until(lambda: server.driver.load == (0, 0))
    assert 0 < len(dispatches) < 11


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_failure_is_an_error_of_that_request(stream, client, loaded, monkeypatch):
    def out_of_memory(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(loaded.engine, "generate", out_of_memory)
        with pytest.raises(openai.APIError, match="the engine has failed: RESOURCE_EXHAUSTED") as e:
            answer = client.completions.create(**MODEL, prompt="one", stream=stream)
            list(answer)
    assert stream or e.value.status_code == 500
    assert client.completions.create(**MODEL, prompt="one", max_tokens=1).choices


NOT_FINITE = "log-probabilities are not finite after a sequence of"


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_gives_no_probabilities_is_an_error(
    stream, client, loaded, monkeypatch, caplog
):
    generate = loaded.engine.generate
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, loaded.params)

    with monkeypatch.context() as patch:
        patch.setattr(loaded.engine, "generate", lambda _, *args: generate(broken, *args))
        with pytest.raises(openai.APIError, match=NOT_FINITE) as e:
            list(client.completions.create(**MODEL, prompt="one", n=3, stream=stream))
    assert stream or e.value.status_code == 500
    assert NOT_FINITE in caplog.text
    assert client.completions.create(**MODEL, prompt="one", max_tokens=1).choices


def test_broken_weights_are_noticed_before_the_port_opens(directory, loaded):
    broken = dataclasses.replace(
        loaded, params=jax.tree.map(lambda leaf: leaf * jnp.nan, loaded.params)
    )
    message = f"a first sample could not be drawn: .*{NOT_FINITE}"
    with pytest.raises(UserError, match=message), running(config_of(directory), broken):
        raise AssertionError("it serves")


# The command


def changed_config(directory, tmp_path, **changes) -> pathlib.Path:
    """A directory like `directory` with another config.json."""
    for path in directory.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return tmp_path


def test_without_limits_a_prompt_and_its_response_share_the_models_context(directory, tmp_path):
    path = changed_config(directory, tmp_path, max_position_embeddings=100)
    free = {"max_prompt_tokens": 0, "max_response_tokens": 0, "name": "tiny-model"}
    config = config_of(path, **free)
    with running(config, load(config)) as other, openai.OpenAI(**address(other)) as client:
        assert client.models.retrieve("tiny-model").model_extra["max_model_len"] == 100
        ask = {**MODEL, "prompt": "one", "stop": [" "], "extra_body": {"top_k": 1}}
        with client.completions.create(**ask, max_tokens=90, stream=True) as stream:
            next(iter(stream))
        with pytest.raises(openai.BadRequestError, match="maximum context length is 100") as e:
            client.completions.create(**ask, max_tokens=100)
        assert e.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("given", "fitting", "expected"),
    [
        # Memory decides, but not below what is of use; then the model.
        ({}, 5000, (4999, 4999, 5000)),
        ({}, 10, (2047, 2047, 2048)),
        ({}, 10**9, (8191, 8191, 8192)),
        ({"max_response_tokens": 192}, 0, (8000, 192, 8192)),
        ({"max_prompt_tokens": 192}, 0, (192, 8000, 8192)),
        ({"max_prompt_tokens": 100, "max_response_tokens": 30}, 0, (100, 30, 130)),
    ],
)
def test_the_longest_sequences(given, fitting, expected):
    assert lengths_of(ServeConfig(model="x", **given), 8192, lambda: fitting) == expected


@pytest.mark.parametrize("given", [{"max_prompt_tokens": 8192}, {"max_response_tokens": 9000}])
def test_limits_outside_of_the_context_are_refused(given):
    with pytest.raises(UserError, match="do not fit into the 8192 positions of the model"):
        lengths_of(ServeConfig(model="x", **given), 8192, lambda: 0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mesh": "1-64-1"}, "--mesh 1-64-1 needs 64 devices, here are 8"),
        ({"mesh": "1-2-4", "slots": 10}, "--slots=10 does not divide"),
        ({"mesh": "2"}, "is not p-t-d"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(changes, message, directory):
    with pytest.raises(UserError, match=message):
        load(config_of(directory, **changes))


def test_a_run_folder_is_told_how_to_be_exported_and_ports_are_not_shared(
    directory, tmp_path, server, loaded
):
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="is the folder of a run; export it first"):
        load(config_of(tmp_path))
    taken = config_of(directory, http_port=server.http_port)
    with pytest.raises(UserError, match="choose another --host or"), running(taken, loaded):
        raise AssertionError("two servers on one port")


def test_the_command_serves_until_sigterm_and_lets_requests_end(directory):
    sizes = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, SCRIPT, "--model", directory, *sizes, "--port=0"]
    with started([command], env={**os.environ, "JAX_PLATFORMS": "cpu"}) as (process,):
        # On a slow machine the sizes that are being compiled come first.
        line = next(line for line in process.stdout if not line.startswith("compil"))
        form = r"tiny-model: http://127.0.0.1:(\d+)/v1, up to 92 tokens of prompt and response, in float32"
        port = re.fullmatch(form, line.strip())[1]
        body = json.dumps({**MODEL, **LONG, "n": 1, "stream": True})
        with sent(int(port), "POST", "/v1/completions", body) as connection:
            response = connection.getresponse()
            events = [response.readline()]
            process.send_signal(signal.SIGTERM)
            events += response.read().splitlines()
        out, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    last, done = [event for event in events if event.strip()][-2:]
    assert json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
    assert done == b"data: [DONE]"
    assert out.startswith("stopping")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.1.2.3", "no-such-host.invalid"])
def test_an_address_that_others_reach_needs_a_key_before_a_model_is_read(host, monkeypatch, capsys):
    monkeypatch.delenv("JAXRL_API_KEY", raising=False)
    with pytest.raises(SystemExit):
        cli.main(["jaxrl", "serve", "--model=m", f"--host={host}"])
    assert "set a key in the variable JAXRL_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("JAXRL_API_KEY", " from the environment\n")
    assert ServeConfig(model="m", host=host).key == "from the environment"
    assert ServeConfig(model="m", host=host, api_key="given").key == "given"


def test_a_client_with_the_key_is_served(directory, loaded):
    with running(config_of(directory, host="", api_key="s3cret"), loaded) as other:
        ask = {**MODEL, "prompt": "one", "max_tokens": 1}
        with openai.OpenAI(**address(other)) as client:
            with pytest.raises(openai.AuthenticationError) as e:
                client.completions.create(**ask)
            assert e.value.code == "invalid_api_key"
            assert client.with_options(api_key="s3cret").completions.create(**ask).choices


def test_what_the_command_cannot_do_is_one_line(directory, capsys):
    for name, message in (
        ("nowhere", "config.json does not exist"),
        ("config.json", "config.json is a file; name the Hugging Face directory"),
    ):
        assert cli.main(["jaxrl", "serve", "--model", str(directory / name)]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    with pytest.raises(SystemExit) as caught:
        cli.main(["jaxrl", "serve", "--model", str(directory), "--slots=0"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith("slots 0 is below 1; use 1 to 1,000,000\n")
