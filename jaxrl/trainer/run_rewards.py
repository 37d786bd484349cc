"""Builds the rewards of a run: graders, reward functions, reward models and a generative judge."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl.config.schema import Config
from jaxrl.data.data_config import SourceConfig
from jaxrl.data.problems import Validate
from jaxrl.dataflows.rewarding import (
    FunctionReward,
    OverlongPunishment,
    Rewards,
    RewardTerm,
)
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.mesh import hosts
from jaxrl.rewards.graders import GraderChoice, Graders
from jaxrl.rewards.grading import GradingTask
from jaxrl.rewards.user import UserRewards
from jaxrl.trainer.role_table import ROLES
from jaxrl.trainer.roles import Roles


def graders_of(config: Config, sources: Mapping[str, SourceConfig] | None = None) -> Graders:
    """Builds the graders of a config; their processes start at first use.

    Args:
      config: config of the run.
      sources: settings of each data set, by its name in the problems.

    Raises:
      UserError: a grader is unknown, lacks a package, or rejects its options; or no sandbox for code works.
    """
    reward = config.reward
    return Graders(
        (reward.grader, reward.grader_options),
        _choices_of(sources or {}),
        cpu_seconds=reward.grader_timeout_s,
        code_sandbox=reward.code_sandbox,
        needs_truths=needs_truths(config),
    )


def needs_truths(config: Config) -> bool:
    """Whether training prompts need a ground truth."""
    reward = config.reward
    return bool(
        reward.grader_weight
        or (config.algorithm.flow.dynamic_sampling and config.rollout.keep_groups == "correctness")
        or (reward.judge.model and "{answer}" in reward.judge.template)
    )


def truth_faults(default: GraderChoice, settings: Mapping[str, SourceConfig]) -> Validate:
    """Makes a function that lets each data set's grader validate ground truths before sampling starts.

    Args:
      default: grader and options for data sets without their own.
      settings: settings of each data set, by its name in the problems.
    """
    graders = Graders(default, _choices_of(settings))
    return lambda answer, extra, source: graders.validate(GradingTask(answer, extra, source))


def _choices_of(sources: Mapping[str, SourceConfig]) -> dict[str, GraderChoice]:
    """The graders of the data sets that set their own."""
    return {name: (source.grader, {}) for name, source in sources.items() if source.grader}


def reward_functions(config: Config, timer: StepTimer) -> UserRewards:
    """Starts the reward functions of a config in a process on the first host. Close it after use."""
    paths = [function["path"] for function in config.reward.functions.values()]
    return UserRewards(
        # The others get the scores from the first host (`FunctionReward`).
        paths if hosts.is_first() else [],
        timeout_s=config.reward.functions_timeout_s,
        interrupted=lambda: timer.stop_pending,
    )


def rewards_of(
    config: Config, roles: Roles, timer: StepTimer, graders: Graders, functions: UserRewards
) -> Rewards:
    """Builds the weighted sum of all reward terms.

    Args:
      config: config of the run.
      roles: roles of the run.
      timer: loop of the stage, for timing.
      graders: result of `graders_of`.
      functions: result of `reward_functions`.
    """
    reward = config.reward
    terms: list[RewardTerm] = [
        FunctionReward(name, function["weight"], function["path"], functions, timer)
        for name, function in reward.functions.items()
    ]
    for name, role in roles.others.items():
        if (term := ROLES[name].reward(role, config)) is not None:
            terms.append(term)
    return Rewards(
        graders,
        OverlongPunishment(
            config.rollout.max_response_tokens,
            reward.overlong_buffer_tokens,
            reward.overlong_penalty,
        ),
        timer,
        grader_weight=reward.grader_weight,
        terms=terms,
    )
