from jaxrl.rewards.answer import (
    Grade,
    extract_answer,
    grade_answer,
    grade_gsm8k,
    gsm8k_answer,
    normalize_answer,
)
from jaxrl.rewards.score import GRADERS, Grader, grader, score_completions

__all__ = [
    "GRADERS",
    "Grade",
    "Grader",
    "extract_answer",
    "grade_answer",
    "grade_gsm8k",
    "grader",
    "gsm8k_answer",
    "normalize_answer",
    "score_completions",
]
