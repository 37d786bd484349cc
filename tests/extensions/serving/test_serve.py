"""launch/serve.py and what it serves, over real sockets: OpenAI's client, rude clients."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import queue
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
from jaxrl.errors import EXIT_USER_ERROR, UserError  # noqa: E402
from jaxrl.models.huggingface.weight_export import save_checkpoint  # noqa: E402
from jaxrl.models.model_config import ModelConfig  # noqa: E402
from jaxrl.rollout.backend import SamplingOptions  # noqa: E402
from jaxrl.rollout.driver import OfflineBackend  # noqa: E402
from jaxrl.rollout.live_loop import Request  # noqa: E402
from jaxrl.types import Prompts  # noqa: E402
from jaxrl_serving.model_loading import lengths_of, load  # noqa: E402
from jaxrl_serving.serve_config import ServeConfig  # noqa: E402
from jaxrl_serving.server import running  # noqa: E402

SCRIPT = pathlib.Path(__file__).parents[3] / "launch" / "serve.py"
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
        said = b"".join(bytes(entry.bytes) for entry in content)
        assert said.decode(errors="replace") == text
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


def test_a_stop_string_that_is_a_special_token_ends_an_answer(client, server, loaded):
    """<pad> is no end of the model's. Its token stays in the answer as the model's own end would."""
    pad, one = 0, int(loaded.tokenizer.encode("1")[0])
    # Greedy: "1" until it has been said three times, then <pad>.
    bias = {str(one): 100, str(pad): 90}
    options = {
        **MODEL,
        "max_tokens": 30,
        "logit_bias": bias,
        "frequency_penalty": 2,
        "temperature": 0,
    }
    options = {**options, "stop": ["never", "<pad>"], "extra_body": {"return_token_ids": True}}
    free = client.completions.create(**{**options, "stop": None}, prompt="one").choices[0]
    at = free.token_ids.index(pad) + 1
    assert 2 < at < 30 == len(free.token_ids)
    messages = [{"role": "user", "content": "one"}]
    whole = client.completions.create(**options, prompt="one", logprobs=1)
    chat = client.chat.completions.create(**options, messages=messages, logprobs=True)
    body = {"token_ids": [5], "sampling_params": {k: options[k] for k in ("logit_bias", "stop")}}
    body["sampling_params"] |= {"frequency_penalty": 2, "temperature": 0, "max_tokens": 30}
    _, generated = post(server, body, "/inference/v1/generate")
    choice = whole.choices[0]
    assert (choice.token_ids, choice.text) == (free.token_ids[:at], "1" * (at - 1))
    assert len(choice.logprobs.token_logprobs) == at == whole.usage.completion_tokens
    assert chat.choices[0].message.content == "1" * (at - 1)
    assert chat.choices[0].token_ids == generated["choices"][0]["token_ids"] == choice.token_ids
    assert len(chat.choices[0].logprobs.content) == at
    reasons = {choice.finish_reason, chat.choices[0].finish_reason}
    assert reasons == {generated["choices"][0]["finish_reason"]} == {"stop"}
    parts = list(client.completions.create(**options, prompt="one", stream=True))
    assert "".join(part.choices[0].text for part in parts) == choice.text
    assert parts[-1].choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="use '<pad>' alone") as refused:
        client.completions.create(**{**options, "stop": "1<pad>"}, prompt="one")
    assert refused.value.param == "stop"


PROMPTS = ("one", [17, 4, 9, 250, 3], "three four two")


def test_prompts_are_scored_as_sampling_scores_what_follows_their_beginnings(
    client, loaded, server
):
    """All in one call, and alone; the twin asks for the first token after each beginning."""
    options = {**MODEL, "temperature": 0, "seed": 1, "extra_body": {"prompt_logprobs": 3}}
    texts = ["one", "three four two"]
    both = client.completions.create(
        **options, prompt=texts, echo=True, logprobs=2, max_tokens=2, n=2
    ).choices
    for n, prompt in enumerate(texts):
        ids = loaded.tokenizer.encode(prompt).tolist()
        plain = client.completions.create(**MODEL, prompt=prompt, temperature=0, max_tokens=2)
        for choice in both[2 * n : 2 * n + 2]:
            assert choice.text == prompt + plain.choices[0].text
            assert choice.logprobs.token_logprobs[0] is choice.logprobs.top_logprobs[0] is None
            # A character that is cut belongs to no token.
            assert choice.text.startswith("".join(choice.logprobs.tokens))
            assert choice.logprobs.text_offset[1] == len(choice.logprobs.tokens[0])
            assert len(choice.logprobs.tokens) == len(ids) + 2
        scores = choice.model_extra["prompt_logprobs"]
        assert scores[0] is None and len(scores) == len(ids)
        for t in range(1, len(ids)):
            heard: queue.SimpleQueue = queue.SimpleQueue()
            one = SamplingOptions(temperature=0.0, top_logprobs=20)
            server.driver.submit(Request(np.array(ids[:t], np.int32), 1, 0, one), heard.put)
            (best_ids,), (best,) = heard.get(timeout=60).top
            expected = dict(zip(best_ids.tolist(), best.tolist(), strict=True))
            of_token = scores[t].pop(str(ids[t]))
            assert of_token["logprob"] == choice.logprobs.token_logprobs[t]
            found = {int(token): each["logprob"] for token, each in scores[t].items()}
            if of_token["rank"] <= 3:
                found[ids[t]] = of_token["logprob"]
            assert found.keys() == set(best_ids[:3].tolist())
            for token, logprob in found.items():
                assert_close(np.array(logprob), np.array(expected[token]), scale=1)
            if of_token["rank"] <= 20:
                assert best_ids.tolist()[of_token["rank"] - 1] == ids[t]
            best_two = sorted(choice.logprobs.top_logprobs[t].values(), reverse=True)[:2]
            assert_close(np.array(best_two), best[:2], scale=1)


def test_a_prompt_alone_is_given_back_with_its_scores(client, server):
    ask = {**MODEL, "prompt": PROMPTS[0], "echo": True, "logprobs": 0}
    alone = client.completions.create(**ask, max_tokens=0)
    (choice,) = alone.choices
    assert (choice.text, choice.finish_reason) == (PROMPTS[0], "length")
    assert alone.usage.completion_tokens == 0
    assert "".join(choice.logprobs.tokens) == PROMPTS[0]
    # With an answer, whole and streamed: the same beginning.
    for stream in (False, True):
        answer = client.completions.create(**ask, max_tokens=9, stream=stream, seed=1)
        parts = [part.choices[0] for part in answer] if stream else answer.choices
        assert "".join(part.text for part in parts).startswith(PROMPTS[0])
        scores = [x for part in parts for x in part.logprobs.token_logprobs]
        assert scores[: len(choice.logprobs.tokens)] == choice.logprobs.token_logprobs
        assert len(scores) == len(choice.logprobs.tokens) + 9 or parts[-1].finish_reason == "stop"
    # Of a chat and of ids there is one prompt; one token has nothing to score.
    body = {**MODEL, "messages": [{"role": "user", "content": "one"}], "prompt_logprobs": 0}
    status, chat = post(server, body, "/v1/chat/completions")
    assert status == 200 and len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(each) == 1 for each in chat["prompt_logprobs"][1:])
    for ids in ([5], [5, 6]):
        body = {"token_ids": ids, "sampling_params": {"prompt_logprobs": 1, "max_tokens": 1}}
        status, answer = post(server, body, "/inference/v1/generate")
        assert status == 200 and len(answer["prompt_logprobs"]) == len(ids)


def test_a_prompt_is_run_once_for_its_scores_and_its_answer(client, loaded, monkeypatch):
    engine, calls = loaded.engine, []
    for name in ("prefill", "prefill_scored", "extend", "extend_scored"):
        program = getattr(engine, name)
        monkeypatch.setattr(
            engine,
            name,
            lambda *args, name=name, program=program: (calls.append(name), program(*args))[1],
        )
    client.completions.create(**MODEL, prompt="one two", echo=True, logprobs=1, max_tokens=1, n=4)
    assert calls == ["prefill_scored"]


def test_ids_of_a_request_end_its_answers(client, loaded):
    """Of a token with a text, which is not shown, unless it is asked for."""
    one, two = (int(loaded.tokenizer.encode(x)[0]) for x in "12")
    # Greedy: "1" until it has been said three times, then "2", then "1" again.
    options = {**MODEL, "max_tokens": 12, "temperature": 0, "frequency_penalty": 2}
    options["logit_bias"] = {str(one): 100, str(two): 95}
    messages = [{"role": "user", "content": "one"}]

    def ask(**extra):
        extra = {"extra_body": {"return_token_ids": True, **extra}}
        text = client.completions.create(**options, **extra, prompt="one", logprobs=0)
        chat = client.chat.completions.create(**options, **extra, messages=messages)
        stream = list(
            client.chat.completions.create(**options, **extra, messages=messages, stream=True)
        )
        (choice,), (said,) = text.choices, chat.choices
        assert said.token_ids == choice.token_ids and said.message.content == choice.text
        assert "".join(part.choices[0].delta.content for part in stream) == choice.text
        assert choice.finish_reason == said.finish_reason == stream[-1].choices[0].finish_reason
        assert len(choice.logprobs.token_logprobs) == len(choice.token_ids)
        return choice.token_ids, choice.text, choice.finish_reason

    free, text, _ = ask()
    at = free.index(two)
    assert 0 < at < 11 and text == "".join("12"[i == two] for i in free)
    shows = {"include_stop_str_in_output": True}
    assert ask(stop_token_ids=[two, 7]) == (free[: at + 1], text[:at], "stop")
    assert ask(stop_token_ids=[two], **shows) == (free[: at + 1], text[: at + 1], "stop")
    assert ask(stop="12", **shows) == (free[: at + 1], text[: at + 1], "stop")
    assert ask(stop="12") == (free[: at + 1], text[: at - 1], "stop")
    # Not among the first tokens: the model says something else there.
    late, _, reason = ask(stop_token_ids=[two], min_tokens=at + 3)
    assert late[: at + 3] == [one] * (at + 3) and reason in ("stop", "length")
    # A special token has its name.
    options["logit_bias"] = {"0": 100}
    assert ask(stop="<pad>") == ([0], "", "stop")
    assert ask(stop="<pad>", **shows) == ([0], "<pad>", "stop")
    assert ask(stop_token_ids=[0]) == ([0], "", "stop")


@pytest.mark.parametrize("kind", ["completion", "chat", "ids"])
def test_the_models_own_end_may_be_ignored(kind, server, loaded):
    (end,) = loaded.tokenizer.stop_ids
    params = {"max_tokens": 9, "logit_bias": {str(end): 100}, "temperature": 0}

    def ask(**more):
        asked = {**params, **more}
        if kind == "ids":
            body, path = {"token_ids": [5, 6], "sampling_params": asked}, "/inference/v1/generate"
        else:
            prompt = (
                {"prompt": "one"}
                if kind == "completion"
                else {"messages": [{"role": "user", "content": "x"}]}
            )
            path = "/v1/completions" if kind == "completion" else "/v1/chat/completions"
            body = {**prompt, **asked, "return_token_ids": True}
        status, answer = post(server, {**MODEL, **body}, path)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"], answer["choices"][0]["finish_reason"]

    assert ask() == ([end], "stop")
    assert ask(ignore_eos=True) == ([end] * 9, "length")
    # Beside one another.
    assert ask(n=2) == ([end], "stop")
    assert ask(ignore_eos=True, stop_token_ids=[end]) == ([end], "stop")


def test_the_last_message_may_be_continued(client, server, loaded):
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two thr "}]
    for extra, prompt in (
        ({}, "[user] one\n[assistant] two thr \n[assistant]"),
        ({"add_generation_prompt": False}, "[user] one\n[assistant] two thr \n[assistant]"),
        (
            {"add_generation_prompt": False, "continue_final_message": True},
            "[user] one\n[assistant] two thr ",
        ),
    ):
        extra = {"extra_body": {**extra, "return_token_ids": True}}
        answer = client.chat.completions.create(
            **MODEL, messages=messages, max_tokens=4, seed=1, **extra
        )
        assert loaded.tokenizer.decode(answer.model_extra["prompt_token_ids"]) == prompt
    plain = client.completions.create(**MODEL, prompt=prompt, max_tokens=4, seed=1)
    assert answer.choices[0].message.content == plain.choices[0].text
    for extra, last, says in (
        ({"continue_final_message": True}, 2, "needs add_generation_prompt false"),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            1,
            "the assistant's last",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=says) as refused:
            client.chat.completions.create(**MODEL, messages=messages[:last], extra_body=extra)
        assert refused.value.param == "continue_final_message"


def test_texts_are_tokenized_and_ids_are_turned_into_texts_as_in_vllm(server, loaded):
    text = "one naïve<eos> 🦜"
    ids = loaded.tokenizer.encode(text).tolist()
    status, found = post(server, {**MODEL, "prompt": text}, "/tokenize")
    assert status == 200
    assert found == {"count": len(ids), "max_model_len": 92, "tokens": ids, "token_strs": None}
    _, found = post(server, {"prompt": "one", "return_token_strs": True}, "/tokenize")
    assert len(found["token_strs"]) == found["count"]
    assert post(server, {**MODEL, "tokens": ids}, "/detokenize") == (200, {"prompt": text})
    messages = [{"role": "user", "content": "one"}]
    _, chat = post(server, {"messages": messages}, "/tokenize")
    assert loaded.tokenizer.decode(chat["tokens"]) == "[user] one\n[assistant]"
    briefly = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    _, chat = post(server, briefly, "/tokenize")
    assert loaded.tokenizer.decode(chat["tokens"]) == "[user] one\n[assistant] briefly"
    for body, path, param in (
        ({"prompt": 3}, "/tokenize", "prompt"),
        ({}, "/tokenize", "prompt"),
        ({"messages": []}, "/tokenize", "messages"),
        ({"prompt": "x", "words": 1}, "/tokenize", "words"),
        ({"tokens": [10**6]}, "/detokenize", "tokens"),
        ({"tokens": "x"}, "/detokenize", "tokens"),
    ):
        status, refused = post(server, body, path)
        assert (status, refused["error"]["param"]) == (400, param)
    assert post(server, {"model": "other", "tokens": [5]}, "/detokenize")[0] == 404


def test_bytes_of_tokens_are_their_own_and_make_the_text(client, loaded):
    """A parrot is four tokens of a byte: parts of a character have no text."""
    parrot = loaded.tokenizer.encode("\N{PARROT}").tolist()
    for token in parrot:
        assert len(loaded.tokenizer.token_bytes(token)) < 4
    assert b"".join(map(loaded.tokenizer.token_bytes, parrot)) == "\N{PARROT}".encode()
    messages = [{"role": "user", "content": "one"}]
    for seed in range(4):
        choice = client.chat.completions.create(
            **MODEL, messages=messages, seed=seed, logprobs=True, top_logprobs=20, max_tokens=40
        ).choices[0]
        content = choice.logprobs.content
        said = b"".join(bytes(entry.bytes) for entry in content)
        assert said.decode(errors="replace") == choice.message.content
        assert any(len(entry.bytes) == 1 and entry.bytes[0] > 127 for entry in content)
        for entry in content:
            assert all(top.bytes is not None for top in entry.top_logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": 2}, "top_p"),
        ({"top_k": -5_000_000}, None),
        ({"min_p": 1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 90}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"prompt": [99_999]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "one " * 300}, "prompt"),
        ({"stop": ["<eos>!"]}, "stop"),
        ({"stop_token_ids": [99_999]}, "stop_token_ids"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_an_error_names_its_field(fields, param, server):
    status, answer = post(server, {**MODEL, "prompt": "x", "max_tokens": 1, **fields})
    if param is None:
        assert status == 200
        return
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_a_template_of_the_users_own_is_served(directory, tmp_path, capsys):
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    own = load(config_of(directory, chat_template=str(template)))
    assert own.tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<x>"
    with pytest.raises(UserError, match=r"no\.jinja"):
        load(config_of(directory, chat_template=str(tmp_path / "no.jinja")))


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
        assert types.keys() == {name.partition("{")[0] for name in values}
        assert all('{model_name="tiny-model"' in name for name in values)
        return {name.replace('model_name="tiny-model"', ""): int(x) for name, x in values.items()}

    before = read()
    options = {"prompt": [17, 4, 9], "n": 2, "max_tokens": 5, "extra_body": {"min_tokens": 5}}
    client.completions.create(**MODEL, **options)
    wait_until(lambda: server.driver.load == (0, 0))
    added = {name: value - before[name] for name, value in read().items()}
    assert added == {
        "vllm:num_requests_waiting{}": 0,
        "vllm:num_requests_running{}": 0,
        "vllm:generation_tokens_total{}": 2 * 5,
        "vllm:prompt_tokens_total{}": 3,
        "vllm:prefix_cache_queries_total{}": 3,
        # Shorter than a page.
        "vllm:prefix_cache_hits_total{}": 0,
        'vllm:request_success_total{,finished_reason="stop"}': 0,
        'vllm:request_success_total{,finished_reason="length"}': 2,
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
    with pytest.raises(UserError, match=r"^--max_\w+_tokens (8192|9000): the model has 8192 posi"):
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


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--model"),
        (["--model=m", "--slotz=3"], "--slotz=3"),
        (["--model=m", "--slots=many"], "--slots"),
        (["--model=m", "--slots=0"], "slots"),
        (["--model=m", "--cache_tokens=5"], "set cache to paged"),
        (["--model=m", "--dtype=float16"], "float16"),
        (["--model=m", "--http_port=99999"], "http_port"),
        (["--tinker", "--model=m", "--adapters=0"], "adapters"),
        (["--model=/no/such/place"], "/no/such/place"),
    ],
)
def test_a_wrong_command_line_is_one_line(flags, says, capsys):
    assert cli.main(["jaxrl", "serve", *flags]) == EXIT_USER_ERROR
    out, error = capsys.readouterr()
    assert out == "" and says in error and error.count("\n") == 1 and error.startswith("error: ")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.1.2.3", "no-such-host.invalid"])
def test_an_address_that_others_reach_needs_a_key_before_a_model_is_read(host, monkeypatch, capsys):
    monkeypatch.delenv("JAXRL_API_KEY", raising=False)
    assert cli.main(["jaxrl", "serve", "--model=m", f"--host={host}"]) == EXIT_USER_ERROR
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
    assert cli.main(["jaxrl", "serve", "--model", str(directory), "--slots=0"]) == 2
    assert capsys.readouterr().err.endswith("slots = 0: must be at least 1 and at most 1,000,000\n")


def test_the_program_of_the_page_answers(directory, capsys):
    page = (pathlib.Path(__file__).parents[3] / "docs/serving.md").read_text()
    (program,) = re.findall(r"of your own\n\n```python\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(program.replace('"DIR"', repr(str(directory))), names)
    printed = capsys.readouterr().out
    # Lines of samples 0 to 3, in any order, and no event is left over.
    assert {line.split(" ", 1)[0] for line in printed.splitlines() if line} >= {"0", "1", "2", "3"}
    assert names["unfinished"] == 0 and names["events"].empty()
