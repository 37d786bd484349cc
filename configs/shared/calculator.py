"""An agent with a tool, written with the openai client as for any other endpoint.

user        What is 58 - 31?
assistant   <tool_call>{"name": "calculate", "arguments": {"expression": "58 - 31"}}</tool_call>
tool        27
assistant   27                                   the grader reads the last number

rollout.agent = "shared/calculator.py:agent"
data.train.path = "shared/calculator.py:make"    sums and differences of two-digit numbers
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import openai

from jaxrl_agents.worker import Problem

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Works out a sum or a difference.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def _shown(question: str, expression: str, value: str) -> list[Any]:
    arguments = json.dumps({"expression": expression})
    function = {"name": "calculate", "arguments": arguments}
    call = {"id": expression, "type": "function", "function": function}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": expression, "content": value},
        {"role": "assistant", "content": value},
    ]


# A conversation of two questions that shows how the tool is used. It is not trained on.
SHOWN = [
    *_shown("What is 58 - 31?", "58 - 31", "27"),
    *_shown("What is 12 + 64?", "12 + 64", "76"),
]
_CALLS = 2


async def agent(client: openai.AsyncOpenAI, problem: Problem) -> None:
    """Asks until the policy answers without a call; the grader scores the answer."""
    messages = [*SHOWN, {"role": "user", "content": problem.prompt}]
    for _ in range(_CALLS + 1):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, max_tokens=40
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            said = _calculated(call.function.arguments)  # pyright: ignore[reportAttributeAccessIssue]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def _calculated(arguments: str) -> str:
    """The value of an expression of two numbers, or what is wrong with it."""
    try:
        expression = str(json.loads(arguments)["expression"])
    except (ValueError, TypeError, KeyError):
        return "error: give an expression"
    found = re.fullmatch(r"\s*(\d{1,6})\s*([+-])\s*(\d{1,6})\s*", expression, re.ASCII)
    if found is None:
        return "error: a sum or a difference of two numbers"
    left, right = int(found[1]), int(found[3])
    return str(left + right if found[2] == "+" else left - right)


def make(index: int, rng: np.random.Generator) -> dict[str, str]:
    """A sum or a difference of two-digit numbers."""
    del index
    choose = random.Random(int(rng.integers(2**63)))
    left, right = choose.randint(10, 99), choose.randint(10, 99)
    sign = choose.choice("+-")
    answer = left + right if sign == "+" else left - right
    return {"problem": f"What is {left} {sign} {right}?", "answer": str(answer)}
