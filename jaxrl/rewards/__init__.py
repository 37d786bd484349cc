from jaxrl.rewards.answer import (
    Grade,
    extract_answer,
    grade_answer,
    grade_gsm8k,
    gsm8k_answer,
    normalize_answer,
)
from jaxrl.rewards.judge import (
    JudgeTemplate,
    judge_prompts,
    judge_scores,
    parse_verdicts,
    score_parser,
)
from jaxrl.rewards.score import GRADERS, Grader, grader, score_completions
from jaxrl.rewards.terms import Term, grader_term, weighted_sum
from jaxrl.rewards.user import Responses, RewardFunction, UserRewards, user_reward

__all__ = [
    "GRADERS",
    "Grade",
    "Grader",
    "JudgeTemplate",
    "Responses",
    "RewardFunction",
    "Term",
    "UserRewards",
    "extract_answer",
    "grade_answer",
    "grade_gsm8k",
    "grader",
    "grader_term",
    "gsm8k_answer",
    "judge_prompts",
    "judge_scores",
    "normalize_answer",
    "parse_verdicts",
    "score_completions",
    "score_parser",
    "user_reward",
    "weighted_sum",
]
