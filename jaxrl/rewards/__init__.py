from jaxrl.rewards.graders import GRADERS, Graders, check_grader
from jaxrl.rewards.grading import (
    FunctionGrader,
    Grade,
    Grader,
    GradingTask,
    Response,
    Verdict,
)
from jaxrl.rewards.judge import JudgeTemplate, judge_scores
from jaxrl.rewards.score import (
    Term,
    grader_term,
    score_completions,
    verdicts_of,
    weighted_sum,
)
from jaxrl.rewards.user import Responses, user_reward
from jaxrl.types import GraderFailure

__all__ = [
    "GRADERS",
    "FunctionGrader",
    "Grade",
    "Grader",
    "GraderFailure",
    "Graders",
    "GradingTask",
    "JudgeTemplate",
    "Response",
    "Responses",
    "Term",
    "Verdict",
    "check_grader",
    "grader_term",
    "judge_scores",
    "score_completions",
    "user_reward",
    "verdicts_of",
    "weighted_sum",
]
