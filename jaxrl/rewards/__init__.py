from jaxrl.rewards.graders import GRADERS, Graders, check_grader
from jaxrl.rewards.grading import (
    FunctionGrader,
    Grade,
    Grader,
    GradingTask,
    Response,
    TextGrader,
    Verdict,
)
from jaxrl.rewards.judge import (
    JudgeTemplate,
    judge_prompts,
    judge_scores,
    parse_verdicts,
    score_parser,
)
from jaxrl.rewards.score import (
    AskedVerdicts,
    Term,
    grader_term,
    rows_of,
    samples_of,
    score_completions,
    verdicts_of,
    weighted_sum,
)
from jaxrl.rewards.user import Responses, RewardFunction, UserRewards, user_reward
from jaxrl.types import GraderFailure

__all__ = [
    "GRADERS",
    "AskedVerdicts",
    "FunctionGrader",
    "Grade",
    "Grader",
    "GraderFailure",
    "Graders",
    "GradingTask",
    "JudgeTemplate",
    "Response",
    "Responses",
    "RewardFunction",
    "Term",
    "TextGrader",
    "UserRewards",
    "Verdict",
    "check_grader",
    "grader_term",
    "judge_prompts",
    "judge_scores",
    "parse_verdicts",
    "rows_of",
    "samples_of",
    "score_completions",
    "score_parser",
    "user_reward",
    "verdicts_of",
    "weighted_sum",
]
