"""Answers to puzzles by the scorers of reasoning-gym, and what an answer may try instead."""

import contextlib

import numpy as np
from extras import import_extra

from jaxrl.rewards import Graders, GradingTask, Response


def test_scorers_of_reasoning_gym():
    import_extra("tasks", "reasoning_gym")
    extra = {"metadata": {"numbers": [1, 2, 3], "target": 7, "source_dataset": "countdown"}}
    answers = {
        "1 + 2*3": True,
        "2 * 3 + 1": True,
        "7": False,
        "1 + 2 + 3": False,
        "__import__('os')._exit(0)": False,
        "(lambda: 7)()": False,
        "9**9**9": False,
    }
    row, none = GradingTask("2*3 + 1", source="countdown", extra=extra), np.zeros(1, np.int32)
    samples = [Response(f"<answer>{a}</answer>", none, row) for a in answers]
    with contextlib.closing(Graders(("reasoning_gym", {}), code_sandbox="none")) as graders:
        assert [v.correct for v in graders.grade(samples)] == [*answers.values()]
        assert "no `metadata`" in graders.validate(GradingTask("7", source="countdown"))
