"""Agents that fail in all ways, after one answer. The lines of the failures are looked up in this file.

rollout.agent = "tests/extensions/agents/failing_agents.py:agent"
"""

import asyncio
import json

import openai

SYSTEM = {"role": "system", "content": "Be short."}


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


async def fails(kind):
    if kind == "raises":
        raise LookupError("no such tool")  # raises
    if kind == "library":
        json.loads("{")  # library
    if kind == "group":
        async with asyncio.TaskGroup() as group:
            group.create_task(fails("raises"))
    if kind == "chained":
        try:
            json.loads("{")
        except ValueError as error:
            raise RuntimeError("the tool said no JSON") from error  # chained
    if kind == "unprintable":
        raise Unprintable  # unprintable
    if kind == "surrogate":
        raise ValueError("half \ud83e pair")  # surrogate
    if kind == "cancelled":
        raise asyncio.CancelledError  # cancelled
    if kind == "thread":
        await asyncio.to_thread(json.loads, "{")  # thread
    if kind == "deep":
        await fails("deep")  # deep
    if kind == "exits":
        exit(3)  # exits
    if kind == "huge":
        raise ValueError("x" * 100_000)  # huge
    return {"text": "good", "nan": float("nan"), "vast": 10**400}.get(kind)


async def agent(client, problem):  # returned
    kind = problem.extra["kind"]
    if kind == "refused":
        messages = [{"role": "nobody", "content": "?"}]
        await client.chat.completions.create(model="policy", messages=messages, n=2)  # refused
    if kind == "unasked":
        raise LookupError("no such tool")  # unasked
    messages = [SYSTEM, {"role": "user", "content": f"Now {problem.prompt}"}]
    answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
    # Of a group the samples with an even number fail.
    if kind == "half" and problem.sample % 2:
        return 1.0
    if kind == "hangs":
        await asyncio.sleep(1e6)
    if kind == "cancels":
        asyncio.current_task().cancel()
        return 1.0
    if kind == "mute":
        post = openai.AsyncOpenAI.post

        async def mute(self, path, **options):
            if path == "/agents/done" and options["body"]["key"] == client.api_key:
                raise OSError("the cable is cut")
            return await post(self, path, **options)

        openai.AsyncOpenAI.post = mute
        return 1.0
    assert answer.choices[0].message.content is not None
    return await fails("raises" if kind == "half" else kind)
