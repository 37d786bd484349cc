"""Builds the estimator and the loss that the settings of an algorithm describe."""

from __future__ import annotations

from jaxrl.dataflows import old_logprobs
from jaxrl.dataflows.algorithm_config import AlgorithmConfig
from jaxrl.dataflows.lookup import find_dataflow
from jaxrl.roles import losses
from jaxrl.roles.advantage_estimator import Estimator
from jaxrl.roles.losses import Objective


def estimator_of(algorithm: AlgorithmConfig) -> Estimator:
    """The advantage estimator.

    Raises:
      UserError: its name or an option is unknown.
    """
    return Estimator.of(
        algorithm.advantage,
        algorithm.advantage_options,
        whiten=algorithm.whiten,
        kl_estimate=algorithm.kl.reward_estimate,
    )


def shares_forward(algorithm: AlgorithmConfig, load_balancing_coef: float) -> bool:
    """Whether the first update also computes the old log-probabilities of its minibatch."""
    return old_logprobs.shares_forward(algorithm, estimator_of(algorithm), load_balancing_coef)


def policy_objective(
    algorithm: AlgorithmConfig, load_balancing_coef: float, *, truncated: bool = False
) -> Objective:
    """The actor's loss.

    Args:
      algorithm: settings of the algorithm.
      load_balancing_coef: coefficient of the load balancing loss, `train.load_balancing_coef`.
      truncated: whether log-probabilities are those of truncated sampling.

    Raises:
      UserError: a name or an option is unknown, or loss and aggregation contradict each other.
    """
    correction = algorithm.correction
    shares = shares_forward(algorithm, load_balancing_coef)
    corrects = correction.weighs or bool(correction.rejections)
    # The current policy itself gives the correction ratio if there is no separate old policy, or if both are
    # equal.
    inside = correction.bypass or (corrects and shares)
    return losses.policy(
        algorithm.loss,
        algorithm.loss_options,
        aggregation=algorithm.aggregation,
        aggregation_options=algorithm.aggregation_options,
        entropy_coef=algorithm.entropy_coef,
        adapts_entropy=algorithm.entropy_target > 0,
        kl_coef=algorithm.kl.loss_coef,
        kl_estimate=algorithm.kl.loss_estimate,
        correction=correction if inside else None,
        shares_forward=shares,
        # Dynamic sampling has already dropped the groups without advantages.
        skips_groups=not find_dataflow(algorithm.dataflow).dynamic_sampling,
        truncated=truncated,
    )
