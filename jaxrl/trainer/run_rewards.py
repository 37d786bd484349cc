"""What scores the responses of a run: graders, reward functions, reward models and a judge."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl.config.schema import Config
from jaxrl.data.data_config import SourceConfig
from jaxrl.data.sources import FaultOf
from jaxrl.dataflows.clock import Clock
from jaxrl.dataflows.lookup import find_dataflow
from jaxrl.dataflows.rewarding import (
    FunctionReward,
    JudgeReward,
    ModelReward,
    OverlongPunishment,
    Rewards,
    RewardTerm,
)
from jaxrl.mesh import hosts
from jaxrl.rewards.graders import GraderChoice, Graders
from jaxrl.rewards.grading import Row
from jaxrl.rewards.judge import JudgeTemplate, score_parser
from jaxrl.rewards.user import UserRewards
from jaxrl.roles.generative_judge import GenerativeJudge
from jaxrl.trainer.role_table import sequence_scores
from jaxrl.trainer.roles import Roles


def graders_of(config: Config, sources: Mapping[str, SourceConfig] | None = None) -> Graders:
    """The graders of a config; processes start when they are needed.

    Args:
      config: of the run.
      sources: the settings of each data set, by the name that its problems carry.

    Raises:
      UserError: a grader is not known, lacks a package, or refuses its options; or no sandbox works for code.
    """
    reward = config.reward
    return Graders(
        (reward.grader, reward.grader_options),
        _choices_of(sources or {}),
        workers=reward.grader_workers,
        cpu_seconds=reward.grader_timeout_s,
        code_sandbox=reward.code_sandbox,
        needs_truths=needs_truths(config),
    )


def needs_truths(config: Config) -> bool:
    """Whether prompts to train on need a ground truth."""
    reward = config.reward
    return bool(
        reward.grader_weight
        or (
            find_dataflow(config.algorithm.dataflow).dynamic_sampling
            and config.rollout.keep_groups == "correctness"
        )
        or (reward.judge.model and "{answer}" in reward.judge.template)
    )


def truth_faults(default: GraderChoice, settings: Mapping[str, SourceConfig]) -> FaultOf:
    """Lets the grader of each data set read ground truths, before there is a response to any.

    Args:
      default: grader of data sets without one of their own, and its options.
      settings: of each data set, by the name that its problems carry.
    """
    graders = Graders(default, _choices_of(settings))
    return lambda answer, extra, source: graders.fault_of(Row(answer, extra, source))


def _choices_of(sources: Mapping[str, SourceConfig]) -> dict[str, GraderChoice]:
    """The graders of data sets that name one of their own."""
    return {
        name: (source.grader, source.grader_options)
        for name, source in sources.items()
        if source.grader
    }


def reward_functions(config: Config, clock: Clock) -> UserRewards:
    """The reward functions of a config in a process of their own, on the first host. Close it after use."""
    paths = [function["path"] for function in config.reward.functions.values()]
    return UserRewards(
        paths if hosts.is_first() else [],
        timeout_s=config.reward.functions_timeout_s,
        interrupted=lambda: clock.stop_pending,
    )


def rewards_of(
    config: Config, roles: Roles, clock: Clock, graders: Graders, functions: UserRewards
) -> Rewards:
    """The weighted sum of everything that scores a response.

    Args:
      config: of the run.
      roles: reward model and judge, if the run has them.
      clock: of the step.
      graders: of `graders_of`.
      functions: of `reward_functions`.
    """
    reward = config.reward
    terms: list[RewardTerm] = [
        FunctionReward(name, function["weight"], function["path"], functions, clock)
        for name, function in reward.functions.items()
    ]
    if roles.reward is not None:
        scores = sequence_scores(config, roles.reward)
        terms.append(ModelReward("model", reward.model_weight, scores))
    if roles.judge is not None:
        terms.append(_judge_reward(config, roles.judge))
    return Rewards(
        graders,
        OverlongPunishment(
            config.rollout.max_response_tokens,
            reward.overlong_buffer_tokens,
            reward.overlong_penalty,
        ),
        clock,
        grader_weight=reward.grader_weight,
        terms=terms,
    )


def _judge_reward(config: Config, judge: GenerativeJudge) -> JudgeReward:
    options = config.reward.judge
    return JudgeReward(
        "judge",
        options.weight,
        judge,
        JudgeTemplate(options.template, options.max_response_chars, judge.special_texts),
        score_parser(low=options.low, high=options.high),
        options.failed_score,
    )
