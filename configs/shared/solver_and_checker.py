"""Two roles of one policy: a solver works out a sum of the demo, and a checker says whether it is right.

    system      You work out sums.                         system      You check sums.
    user        Work out the following sum: 5 + 9 - 7 =    user        5 + 9 - 7 = 7
    assistant   5+9=14                                     assistant   5+9=14; 14-7=7
                14-7=7                                                 Answer: yes
                Answer: 7

    rollout.agent = "shared/solver_and_checker.py:agent"       asks both roles, and scores them
    data.train.path = "shared/solver_and_checker.py:make"      sums, each with an example of a role for SFT

Half of the examples of either role show no steps, and half of those are wrong. Each role has to discover that
steps pay off. A solver is compared with other solvers of the sum, a checker with other checkers.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from jaxrl.rewards.answer import extract_answer
from jaxrl.user_code import load_function

_make_sum = load_function("shared/worked_sums.py:make", "the sums")
_solve = load_function("shared/worked_sums.py:solve", "the sums")
_WRONG_BY = (-10, -2, -1, 1, 2, 10)


def solve(problem: str) -> list[dict[str, str]]:
    """The messages to a solver of a problem."""
    return _asked("You work out sums.", problem)


def check(problem: str, answer: str) -> list[dict[str, str]]:
    """The messages to a checker of an answer."""
    return _asked("You check sums.", f"{_sum(problem)} = {answer}")


async def agent(client: Any, problem: Any) -> dict[str, float]:
    """Asks the solver, then the checker; each has score 1 if it is right."""
    del client  # that of the first role

    async def say(role: str, messages: list[dict[str, str]]) -> str:
        done = await problem.clients[role].chat.completions.create(
            model="policy", messages=messages, max_tokens=48
        )
        return extract_answer(done.choices[0].message.content) or "nothing"

    sum_ = problem.extra["sum"]
    answer = await say("solver", solve(sum_))
    verdict = await say("checker", check(sum_, answer[:8]))
    right = answer == problem.answer
    return {"solver": float(right), "checker": float(verdict == ("yes" if right else "no"))}


def make(index: int, rng: np.random.Generator, **sizes: int) -> dict[str, Any]:
    """A sum of `worked_sums.make`, with a message to one of the roles and what that role might say."""
    row = _make_sum(index, rng, **sizes)
    choose = random.Random(int(rng.integers(2**63)))
    problem, value = row["problem"], int(row["answer"])
    if choose.random() < 0.5:
        return row | {"problem": solve(problem), "sum": problem}
    shown = value if choose.random() < 0.5 else value + choose.choice(_WRONG_BY)
    work = _solve(_sum(problem), choose).rpartition("Answer:")[0]
    # Without steps it is a guess.
    is_right = shown == value if work else choose.random() < 0.5
    said = f"{work}Answer: {'yes' if is_right else 'no'}"
    return row | {"problem": check(problem, str(shown)), "solution": said, "sum": problem}


def _asked(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": role}, {"role": "user", "content": text}]


def _sum(problem: str) -> str:
    return problem.rpartition(": ")[2].removesuffix(" =")
