"""The algorithm of a run: what its config says of it, looked up and checked once."""

from __future__ import annotations

import dataclasses

from jaxrl.config.schema import Config
from jaxrl.dataflows.dataflow import Dataflow
from jaxrl.dataflows.lookup import find_dataflow
from jaxrl.roles.advantage_estimator import Estimator
from jaxrl.roles.objective import Objective
from jaxrl.trainer import cross_checks


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A dataflow with the functions that it is made of.

    Attributes:
      dataflow: the function of a step.
      roles: of the run, the actor first; "rollout" where the actor samples on devices of its own.
      estimator: from rewards to advantages.
      objective: the actor's loss.
      shares_forward: the first minibatch's old log-probabilities come from the forward pass of its update.
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
    return Algorithm(
        find_dataflow(config.algorithm.dataflow),
        cross_checks.roles_of(config),
        cross_checks.estimator_of(config),
        cross_checks.policy_objective(config),
        cross_checks.shares_forward(config),
    )
