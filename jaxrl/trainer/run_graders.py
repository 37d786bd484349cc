"""The graders of a config: the run's own, and those that its sources name."""

from __future__ import annotations

from jaxrl.config.schema import Config
from jaxrl.rewards.graders import GraderChoice, Graders


def graders_of(config: Config) -> Graders:
    """Builds them; processes start when they are needed.

    Raises:
      UserError: a grader is not known, lacks a package, or refuses its options.
    """
    reward = config.reward
    by_source: dict[str, GraderChoice] = {}
    return Graders(
        (reward.grader, reward.grader_options),
        by_source,
        workers=reward.grader_workers,
        cpu_seconds=reward.grader_timeout_s,
    )
