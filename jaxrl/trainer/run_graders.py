"""The graders of a config: the run's own, and those that its sources name."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl.config.schema import Config
from jaxrl.data.data_config import SourceConfig
from jaxrl.dataflows.lookup import find_dataflow
from jaxrl.rewards.graders import GraderChoice, Graders


def graders_of(config: Config, sources: Mapping[str, SourceConfig] | None = None) -> Graders:
    """Builds them; processes start when they are needed.

    Args:
      config: of the run.
      sources: the settings of each data set, by the name that its problems carry.

    Raises:
      UserError: a grader is not known, lacks a package, or refuses its options; or no sandbox works for code.
    """
    reward = config.reward
    return Graders(
        (reward.grader, reward.grader_options),
        choices_of(sources or {}),
        workers=reward.grader_workers,
        cpu_seconds=reward.grader_timeout_s,
        code_sandbox=reward.code_sandbox,
        needs_truths=needs_truths(config),
    )


def needs_truths(config: Config) -> bool:
    """Prompts to train on need a ground truth: something in the run goes by it."""
    reward = config.reward
    return bool(
        reward.grader_weight
        or (
            find_dataflow(config.algorithm.dataflow).dynamic_sampling
            and config.rollout.keep_groups == "correctness"
        )
        or (reward.judge.model and "{answer}" in reward.judge.template)
    )


def choices_of(sources: Mapping[str, SourceConfig]) -> dict[str, GraderChoice]:
    """The graders of data sets that name one of their own."""
    return {
        name: (source.grader, source.grader_options)
        for name, source in sources.items()
        if source.grader
    }
