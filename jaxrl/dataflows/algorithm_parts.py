"""Builds the estimator and the loss that the settings of an algorithm describe."""

from __future__ import annotations

from jaxrl.algos.covariance import SELECTIONS
from jaxrl.algos.registry import options_of
from jaxrl.dataflows.algorithm_config import AlgorithmConfig
from jaxrl.dataflows.lookup import DATAFLOWS, find_dataflow
from jaxrl.roles import losses
from jaxrl.roles.advantage_estimator import IMPORTANCE_WEIGHT, SUM_PI_SQUARED, Estimator
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
    """Whether the first minibatch takes its old log-probabilities from the forward pass of its own update.

    The numbers are those of a forward pass before the updates, because the weights are. A user's dataflow may
    look at them earlier, and so do these settings:
    """
    estimator, correction = estimator_of(algorithm), algorithm.correction
    arrays = estimator.inputs | set(options_of(estimator.function))
    seen = {"logprob_BT", SUM_PI_SQUARED} | ({IMPORTANCE_WEIGHT} if correction.weighs else set())
    corrects = correction.weighs or bool(correction.rejections)
    adds_terms = bool(algorithm.entropy_coef or algorithm.kl.loss_coef)
    early = (
        correction.bypass,  # takes the sampler's
        algorithm.kl.reward_coef > 0,  # penalises rewards by them
        algorithm.loss in SELECTIONS,  # selects tokens by them
        arrays & seen,  # the advantage is made of them
        find_dataflow(algorithm.dataflow).trust_region,  # searches along its step with them
        algorithm.epochs > 1,  # needs those of all minibatches
        corrects and algorithm.updates_per_step > 1,  # compares them over all minibatches
        # Inside the loss their mean is known only at the end of the minibatch.
        correction.weighs and correction.normalize and adds_terms,
        corrects and load_balancing_coef > 0,  # counts the tokens that they leave
    )
    return algorithm.dataflow in DATAFLOWS and not any(early)


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
        kl_coef=algorithm.kl.loss_coef,
        kl_estimate=algorithm.kl.loss_estimate,
        correction=correction if inside else None,
        shares_forward=shares,
        # Dynamic sampling has already dropped the groups without advantages.
        skips_groups=not find_dataflow(algorithm.dataflow).dynamic_sampling,
        truncated=truncated,
    )
