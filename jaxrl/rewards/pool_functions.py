"""The functions in the processes of a grader pool, by name; a name with a colon is a user's grader."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from jaxrl.rewards.answer_reader.answer_equality import equal
from jaxrl.rewards.code_tests import run_tests
from jaxrl.rewards.math_grader import EQUAL
from jaxrl.rewards.sandbox import SandboxLimits, run_forked
from jaxrl.rewards.sandboxed_graders import CODE, TASK
from jaxrl.rewards.simple_graders import SEARCH, search
from jaxrl.user_code import load_function

# No answer to a puzzle needs these. Some scorers evaluate the answer, and these would let it do anything.
_CODE = re.compile(
    r"__|\b(?:import|lambda|exec|eval|open|globals|getattr|setattr)\b|\w\.[A-Za-z_]\w*\s*\("
)


def load_pool_function(name: str) -> Callable[[Any], Any]:
    """Returns the function of a name; imports it."""
    if ":" in name:
        function = load_function(name, "grader", takes=("response", "answer"), own_process=True)
        return lambda texts: function(*texts)
    if name == TASK:
        return _load_scorer()
    return {EQUAL: lambda pair: equal(*pair), SEARCH: search, CODE: run_tests}[name]


def _load_scorer() -> Callable[[tuple[str, str, dict, float]], float | str]:
    import reasoning_gym
    from reasoning_gym import factory

    scorer_of: Any = factory.get_score_answer_fn
    # It reads word lists from its own folder.
    readable = list(reasoning_gym.__path__)

    def score(argument: tuple[str, str, dict, float]) -> float | str:
        task, answer, entry, seconds = argument
        if task not in factory.DATASETS:
            return f"raised: reasoning-gym has no task {task!r}"
        if _CODE.search(answer):
            return 0.0
        scorer = scorer_of(task)

        def marked() -> bytes:
            # An exception may be due to the answer or to the scorer; the child then returns no mark.
            return json.dumps(float(scorer(answer, entry))).encode()

        mark = run_forked(marked, SandboxLimits(seconds=seconds), readable)
        if mark is None:
            return f"timeout: the scorer of {task} has taken more than {seconds:g} s"
        try:
            return float(json.loads(mark))
        except ValueError:
            return f"raised: the scorer of {task} gave no mark"

    return score
