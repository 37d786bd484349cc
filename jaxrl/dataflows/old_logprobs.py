"""Resolves `algorithm.old_logprobs`: the source of the log-probabilities of the start of a step.

    forward   a forward pass before the updates
    update    the forward pass of the first update itself, which has the same weights
    auto      "update" if nothing needs them earlier and the dataflow is one of this package

Example: with `algorithm.epochs = 2` the second epoch needs those of all minibatches. So "auto" is "forward",
and "update" is refused.
"""

from __future__ import annotations

from jaxrl.algos.covariance import SELECTIONS
from jaxrl.algos.registry import options_of
from jaxrl.dataflows.algorithm_config import AlgorithmConfig
from jaxrl.dataflows.lookup import DATAFLOWS, find_dataflow
from jaxrl.errors import UserError
from jaxrl.roles.advantage_estimator import IMPORTANCE_WEIGHT, SUM_PI_SQUARED, Estimator


def shares_forward(
    algorithm: AlgorithmConfig, estimator: Estimator, load_balancing_coef: float
) -> bool:
    """Whether the first minibatch takes its old log-probabilities from the forward pass of its own update."""
    if algorithm.old_logprobs == "auto":
        early = early_reader(algorithm, estimator, load_balancing_coef)
        return algorithm.dataflow in DATAFLOWS and not early
    return algorithm.old_logprobs == "update"


def check_old_logprobs(
    algorithm: AlgorithmConfig, estimator: Estimator, load_balancing_coef: float
) -> None:
    """Raises UserError if the setting is "update" and another setting needs the log-probabilities earlier."""
    early = early_reader(algorithm, estimator, load_balancing_coef)
    if algorithm.old_logprobs == "update" and early:
        raise UserError(
            f'algorithm.old_logprobs "update" has them only when the first update has begun, and {early} '
            "before; set it to auto or forward"
        )


def early_reader(
    algorithm: AlgorithmConfig, estimator: Estimator, load_balancing_coef: float
) -> str:
    """Names the first setting that needs old log-probabilities before the first update; "" if none does."""
    correction = algorithm.correction
    arrays = estimator.inputs | set(options_of(estimator.function))
    seen = {"logprob_BT", SUM_PI_SQUARED} | ({IMPORTANCE_WEIGHT} if correction.weighs else set())
    corrects = correction.weighs or bool(correction.rejections)
    adds_terms = bool(algorithm.entropy_coef or algorithm.entropy_target or algorithm.kl.loss_coef)
    readers = {
        "algorithm.correction.bypass takes the sampler's": correction.bypass,
        "algorithm.kl.reward_coef penalizes rewards by them": algorithm.kl.reward_coef > 0,
        f"algorithm.loss {algorithm.loss!r} selects tokens by them": algorithm.loss in SELECTIONS,
        f"algorithm.advantage {algorithm.advantage!r} is made of them": bool(arrays & seen),
        f"dataflow {algorithm.dataflow!r} searches along its step with them": find_dataflow(
            algorithm.dataflow
        ).trust_region,
        f"algorithm.epochs {algorithm.epochs} needs them whole": algorithm.epochs > 1,
        "algorithm.correction compares them over all minibatches": corrects
        and algorithm.updates_per_step > 1,
        # Inside the loss the mean is known only at the end of the minibatch.
        "algorithm.correction.normalize takes a mean of them": correction.weighs
        and correction.normalize
        and adds_terms,
        "train.load_balancing_coef counts the tokens they leave": corrects
        and load_balancing_coef > 0,
    }
    return next((clause for clause, reads in readers.items() if reads), "")
