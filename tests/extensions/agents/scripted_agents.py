"""Agents for tests: what each does stands in the row of its problem (`kind`), or follows from its number.

rollout.agent = "tests/extensions/agents/scripted_agents.py:agent"
"""

import asyncio
import functools
import os
import pathlib
import random
import time

import openai

TURN = {"model": "policy", "max_tokens": 3}


def user(text):
    return {"role": "user", "content": text}


async def talk(client, problem, turns=3, nap_s=0.0):
    """Some turns, with results of tools between them; returns the number of sampled tokens."""
    messages, tokens = [user(problem.prompt)], 0
    for turn in range(turns):
        answer = await client.chat.completions.create(messages=messages, **TURN)
        tokens += answer.usage.completion_tokens
        # At random on purpose: the order of arrival must not matter.
        await asyncio.sleep(random.random() * nap_s)
        content = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": content}, user(f"tool {turn}")]
    return tokens


async def threads(client, problem, nap_s=0.0):
    """One beginning, two ends, and another question; returns the number of sampled tokens."""

    async def ask(*texts):
        # At random on purpose: the order of arrival must not matter.
        await asyncio.sleep(random.random() * nap_s)
        messages = [user(texts[0])]
        for said, text in zip(texts[1::2], texts[2::2], strict=True):
            messages += [{"role": "assistant", "content": said}, user(text)]
        answer = await client.chat.completions.create(messages=messages, **TURN)
        return answer.choices[0].message.content, answer.usage.completion_tokens

    first = await ask(problem.prompt)
    # One of them is asked twice at once, and the beginning once more in the end.
    asked = [ask(problem.prompt, first[0], end) for end in ("one", "one", "two")]
    answers = await asyncio.gather(*asked, ask("another question"))
    assert answers[0] == answers[1] and await ask(problem.prompt) == first
    return first[1] + sum(tokens for _, tokens in answers[1:])


async def fork(client, problem):
    """Asks without end, all at once; returns the number of answers."""
    asked = [
        client.chat.completions.create(messages=[user(f"{problem.prompt} {n}")], **TURN)
        for n in range(40)
    ]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert {getattr(error, "code", error) for error in refused} <= {"turn_limit"}
    return len(answers) - len(refused)


async def fill(client, problem):
    """Speaks until the context is full; returns the number of turns."""
    messages = [user(problem.prompt)]
    while True:
        try:
            long = TURN | {"max_tokens": 1000}
            answer = await client.chat.completions.create(messages=messages, **long)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded", error
            return len(messages) // 2
        content = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": content}, user("x" * 40)]


async def goes_on(client, problem):
    """Tries to end its own session, and asks on after its end."""
    asking = functools.partial(talk, client, problem, turns=1)
    url = str(client.base_url).replace("/v1/", "/agents/done")
    try:
        await client.post(url, cast_to=object, body={"key": client.api_key, "score": 7.0})
    except openai.AuthenticationError:
        tokens = await asking()

        async def later():
            await asyncio.sleep(0.2)
            await asking()

        LATER.append(asyncio.create_task(later()))
        return tokens


LATER = []


def raises():
    raise LookupError("no such tool")


def slow_tool():
    raise TimeoutError("the tool was slow")


ENDS = {
    "raises": raises,
    "slow_tool": slow_tool,
    "exits": lambda: exit(3),
    "dies": lambda: os._exit(3),
    "hangs": lambda: asyncio.sleep(1e6),
    "blocks": lambda: time.sleep(1e6),
    "nan": lambda: float("nan"),
    "text": lambda: "good",
    "none": lambda: None,
}


async def agent(client, problem):
    kind = problem.extra.get("kind", "talk")
    if kind in ENDS:
        await talk(client, problem, turns=1)
        score = ENDS[kind]()
        return await score if asyncio.iscoroutine(score) else score
    if kind == "silent":
        await client.close()
        return 1.0
    if kind in ("talk", "long", "threads"):
        long = functools.partial(talk, turns=7)
        function = {"talk": talk, "long": long, "threads": threads}[kind]
        tokens = await function(client, problem, nap_s=problem.extra.get("nap_s", 0.0))
        return problem.sample if problem.extra.get("by_sample") else tokens
    return await {"fork": fork, "fill": fill, "goes_on": goes_on}[kind](client, problem)


async def duet(client, problem):
    """A solver and a checker that reads it; the score of each, by what the row says."""
    solver, checker = problem.clients["solver"], problem.clients["checker"]
    kind, asked = problem.extra["kind"], [user(problem.prompt)]
    first = await solver.chat.completions.create(messages=asked, **TURN)
    # The first role has the key without a name, too: the same request, so the same answer.
    again = await client.chat.completions.create(messages=asked, **TURN)
    assert again.choices[0].message == first.choices[0].message
    await asyncio.sleep({"soon": 0.3, "late": 1.5, "later": 4.0}.get(kind, 0.0))
    # As long as a file is there, so that what comes before is no matter of the clock.
    while kind == "waits" and pathlib.Path(problem.extra["while"]).exists():
        await asyncio.sleep(0.02)
    if kind == "stranger":
        other = client.with_options(api_key=f"{client.api_key}.judge")
        await other.chat.completions.create(messages=asked, **TURN)
    if kind == "same":
        await checker.chat.completions.create(messages=asked, **TURN)
    elif kind != "alone":
        said = user(f"Is this right? {first.choices[0].message.content}")
        await checker.chat.completions.create(messages=[said], **TURN)
    scores = {"solver": float(problem.sample), "checker": 0.5}
    return {"solver": 1.0} if kind == "lacks" else scores
