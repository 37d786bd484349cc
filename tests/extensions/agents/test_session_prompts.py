"""Agents over HTTP: whatever a client sends back, the tokens of its branches are what the model saw."""

import concurrent.futures
import json

import numpy as np
import pytest
from chats import CHATML, chat_tokenizer
from extras import import_extra

for package in ("pydantic", "starlette", "uvicorn"):
    import_extra("dev", package)
openai = import_extra("dev", "openai")

from scripted_driver import serving_sessions  # noqa: E402

from jaxrl.rollout.live_loop import Request  # noqa: E402
from jaxrl.rollout.sampling import SamplingOptions  # noqa: E402
from jaxrl_agents.conversation import ChatModel, Conversation  # noqa: E402
from jaxrl_agents.session_prompts import SessionPrompts  # noqa: E402
from jaxrl_agents.sessions import Session, Sessions  # noqa: E402

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
# Spaces and keys that no template writes, and a token for each byte.
CALL = '<tool_call> {"arguments":{"b":2,  "a":1}, "name":"add"}</tool_call>'


def agent(url, key, *, session_header=False):
    """Asks, calls the tool, asks again; repeats its last request."""
    headers = {"X-Session-ID": key} if session_header else {}
    api_key = "other" if session_header else key
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key=api_key, default_headers=headers, max_retries=0
    ) as client:
        ask = {"model": "m", "tools": TOOLS}
        ask["extra_body"] = {"chat_template_kwargs": {"start": 1, "system": "x", "key": 2}}
        messages = [{"role": "user", "content": f"1 + 2? ({key})"}]
        for _ in range(3):
            answer = client.chat.completions.create(**ask, messages=messages)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                value = sum(json.loads(call.function.arguments).values())
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(value)})
        again = client.chat.completions.create(**ask, messages=messages[:-2])
        assert again.choices[0].message == message


def test_agents_at_once_leave_exact_branches():
    tokenizer = chat_tokenizer(CHATML)
    sampled = []

    def say(prompt):
        tokens = tokenizer.encode(f"{CALL}<|im_end|>")
        sampled.append((prompt, tokens))
        return tokens

    with serving_sessions(tokenizer, say, 4, most_turns=3) as (url, opened, sessions):
        keys = [session.key for session in opened]
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            ask = lambda key: agent(url, key, session_header=key == keys[0])  # noqa: E731
            list(threads.map(ask, keys))
        # Three requests each; the repeated one was not sampled again.
        assert len(sampled) == 12
        seen = {np.concatenate(pair).tobytes() for pair in sampled}
        for session in opened:
            sessions.end(session.key, None)
            talk = session.conversations[""]
            (branch,), counts = talk.branches(), talk.counts
            assert branch.tokens.tobytes() in seen
            assert branch.mask.sum() == counts.sampled == sum(len(t) for _, t in sampled) / 4
            assert counts.encoded + counts.sampled == len(branch.tokens)
            first = tokenizer.encode(f"{CALL}<|im_end|>")
            start = int(np.argmax(branch.mask))
            assert np.array_equal(branch.tokens[start:][: len(first)], first)
            parts = -np.arange(len(first), dtype=np.float32) / 8
            assert np.array_equal(branch.logprob[start:][: len(first)], parts)
        with openai.OpenAI(base_url=f"{url}/v1", api_key=keys[0], max_retries=0) as client:
            ask = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            with pytest.raises(openai.AuthenticationError, match="no open session with that key"):
                client.chat.completions.create(**ask)
            again = Conversation(ChatModel(tokenizer))
            sessions.open([Session(0, 0, 7, {}, {"": again}, key=keys[0])])
            with pytest.raises(openai.BadRequestError, match="n 2: a session has one answer"):
                client.chat.completions.create(**ask, n=2)
            # A name of its own for the session, beside the key.
            client.chat.completions.create(**ask, extra_headers={"X-Session-ID": "trace 1"})
            # They would change the policy that samples; what is only reported would not.
            edits = {"presence_penalty": 1, "logit_bias": {"7": 5}}
            refused = "logit_bias and presence_penalty: ans"
            with pytest.raises(openai.BadRequestError, match=refused):
                client.chat.completions.create(**ask, **edits)
            (choice,) = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2).choices
            assert choice.logprobs.content
            with pytest.raises(openai.BadRequestError, match="/v1/completions would not be part"):
                client.completions.create(model="m", prompt="x")


def test_stop_ids_of_a_request_end_its_answers():
    chat, sessions = ChatModel(chat_tokenizer(CHATML)), Sessions(600.0)
    session = Session(0, 0, 7, {}, {"": Conversation(chat)})
    sessions.open([session])
    turn = SessionPrompts(chat, sessions, most_turns=4).open_ids(
        np.array([5]), 1, (session.key, "")
    )
    assert turn is not None and turn.drawn is not None
    options = SamplingOptions(stop_strings=("x",), stop_ids=(3, 4))
    drawn = turn.drawn(Request(np.array([5]), 9, 0, options)).options
    assert (drawn.stop_strings, drawn.stop_ids) == (("x",), (3, 4))


def test_prompts_of_ids_are_turns_of_the_same_tree():
    tokenizer = chat_tokenizer(CHATML)
    sampled = []

    def say(prompt):
        sampled.append(prompt)
        return tokenizer.encode("4<|im_end|>")

    with (
        serving_sessions(tokenizer, say, most_turns=4) as (url, (session,), _),
        openai.OpenAI(base_url=url, api_key=session.key, max_retries=0) as client,
    ):

        def ask(ids, **params):
            body = {"model": "m", "token_ids": ids, "sampling_params": {"logprobs": 1, **params}}
            answer = client.post("/inference/v1/generate", cast_to=object, body=body)
            (choice,) = answer["choices"]
            assert [x["logprob"] for x in choice["logprobs"]["content"]] == [0, -1 / 8]
            assert choice["finish_reason"] == "stop"
            return choice["token_ids"]

        first = tokenizer.encode("2 + 2").tolist()
        said = ask(first)
        assert said == tokenizer.encode("4<|im_end|>").tolist() == ask(first)
        second = [*first, *said, *tokenizer.encode("Why?").tolist()]
        ask(second, max_tokens=10_000)
        # Another beginning is a branch.
        ask(first[1:])
        with pytest.raises(openai.BadRequestError, match="n 2: a session has one answer"):
            ask(first, n=2)
        chat = client.with_options(base_url=f"{url}/v1").chat.completions
        chat.create(model="m", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError, match="has had 4 turns"):
            ask([1])
    assert len(sampled) == 4
    main, *others = session.conversations[""].branches()
    assert main.tokens.tolist() == [*second, *said] and main.mask.sum() == 4
    assert sorted(x.mask.sum() for x in others) == [2, 2]
    assert session.conversations[""].counts.sampled == 8
