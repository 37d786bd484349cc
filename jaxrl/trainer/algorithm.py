"""The algorithm of a run: its parts, looked up and checked once."""

from __future__ import annotations

import dataclasses

from jaxrl.config.schema import Config
from jaxrl.dataflows.algorithm_parts import estimator_of, policy_objective, shares_forward
from jaxrl.dataflows.dataflow import Dataflow
from jaxrl.dataflows.lookup import find_dataflow
from jaxrl.roles.advantage_estimator import Estimator
from jaxrl.roles.objective import Objective
from jaxrl.trainer import cross_checks


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A dataflow with its estimator and loss.

    Attributes:
      dataflow: function that runs a step.
      roles: roles of the run, the actor first; includes "rollout" if the actor samples on other devices.
      estimator: advantage estimator.
      objective: loss of the actor.
      shares_forward: whether the first minibatch takes its old log-probabilities from the forward pass of its
        own update.
    """

    dataflow: Dataflow
    roles: tuple[str, ...]
    estimator: Estimator
    objective: Objective
    shares_forward: bool


def algorithm_of(config: Config) -> Algorithm:
    """The algorithm of a config.

    Raises:
      UserError: settings of the algorithm are unknown or contradict each other.
    """
    cross_checks.check_algorithm(config)
    settings, coef = config.algorithm, config.train.load_balancing_coef
    return Algorithm(
        find_dataflow(config.algorithm.dataflow),
        cross_checks.roles_of(config),
        estimator_of(settings),
        policy_objective(settings, coef, truncated=config.truncates_logprobs),
        shares_forward(settings, coef),
    )
