"""Off-policy correction of a packed batch: the sampler's policy differs from the one that learns.

`algos.rollout_correction` has the formulas and the direction of every bound.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.algos import rollout_correction as algos
from jaxrl.algos.moments import RunningMoments, merge_moments
from jaxrl.algos.rollout_correction import WEIGHTINGS, Rejection
from jaxrl.algos.segments import masked
from jaxrl.checks import between, check_value, coefficient, positive_coefficient, settings
from jaxrl.errors import UserError
from jaxrl.types import TrainBatch

_RATIO = positive_coefficient()
_RATIO_OR_INF = positive_coefficient(or_inf=True)
RATIOS = tuple[Annotated[float, _RATIO], Annotated[float, _RATIO_OR_INF]]
NATS = Annotated[float, positive_coefficient()]
Limit = NATS | RATIOS

REJECTIONS: dict[str, Any] = {
    "token_ratio": RATIOS,
    "token_k2": NATS,
    "token_k3": NATS,
    "token_kl": NATS,
    "token_tv": Annotated[float, between(0, 1, has_low=False)],
    "seq_sum_ratio": RATIOS,
    "seq_sum_k2": NATS,
    "seq_sum_k3": NATS,
    "seq_mean_ratio": RATIOS,
    "seq_mean_k2": NATS,
    "seq_mean_k3": NATS,
    "seq_max_k2": NATS,
    "seq_max_k3": NATS,
    "veto": Annotated[float, between(0, 1, has_low=False, has_high=False)],
}
"""The rules of `CorrectionConfig.reject`, with the type and range of their limits.

A ratio has two limits, (lowest, highest) pi_train / pi_rollout; inf for no upper limit. It is the ratio of a
token, or the product (sum) or geometric mean over a sequence. k2 = (log ratio)^2 / 2 and
k3 = ratio - 1 - log ratio have one limit in nats, for a token, or for the sum, mean or maximum over a
sequence. "token_kl" and "token_tv" compare the probabilities of a token itself, p against 1 - p: a binary KL
in nats, and |p_train - p_rollout|. "veto" rejects sequences with a token whose ratio is below its limit.
"""


def _check_rejections(limits: Mapping[str, Limit]) -> None:
    """Raises UserError if a rule is unknown, or its limit has the wrong type or range."""
    for name, limit in limits.items():
        if name not in REJECTIONS:
            near = difflib.get_close_matches(name, REJECTIONS) or list(REJECTIONS)
            raise UserError(f"reject.{name} is not a rejection rule; near: {', '.join(near)}")
        check_value(f"reject.{name}", limit, REJECTIONS[name])
        if isinstance(limit, tuple) and limit[0] > limit[1]:
            raise UserError(
                f"reject.{name} {limit} has its lowest ratio above its highest; write it as (0.5, 2.0)"
            )


def _rejection(name: str, limit: Limit) -> Rejection:
    if isinstance(limit, tuple):
        over = name.removesuffix("_ratio")
        return Rejection(f"{over}_k1", over, "k1", *algos.ratio_bounds(*limit))
    if name == "veto":
        return Rejection(name, "seq_max", "k1", *algos.ratio_bounds(limit, math.inf))
    over, _, by = name.rpartition("_")
    return Rejection(name, over, by, -math.inf, limit)


@settings
class CorrectionConfig:
    """Correction for tokens whose probability differs between sampler and trainer.

    All bounds are on pi_train / pi_rollout.

    Attributes:
      bypass: use the sampler's log-probability as the old one (two policies instead of three). This saves a
        forward pass. Weights and rejections are then computed inside the loss, from the policy being trained,
        and `weights` are for losses without a ratio of their own (`algos.policy_losses.RATIO_FREE`).
      weights: importance weights of the loss, per token, per sequence, or none.
      highest: upper bound of weights (TIS, truncated importance sampling); inf for none.
      lowest: if above 0, weights outside lowest..highest become 0 (IcePop).
      normalize: scale weights to mean 1 over the step, or in bypass over each minibatch.
      reject: rejection rules, name of `REJECTIONS` -> limit or limits: {"token_k3": 0.1, "seq_mean_ratio":
        (0.5, 2.0)}. A token is kept only if every rule accepts it. Each rule sees the original mask and has
        its own metrics, `rollout_corr/rollout_rs_<name>_*`, where a ratio is called k1, as in verl.
    """

    bypass: bool = False
    weights: Literal["none", "token", "sequence"] = "none"
    highest: Annotated[float, positive_coefficient(or_inf=True)] = 2.0
    lowest: Annotated[float, coefficient()] = 0.0
    normalize: bool = False
    # A dict has no hash. Compiled functions take this class as a static argument.
    reject: dict[str, Limit] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The rules of `reject`, as those of `algos.rollout_correction`, in the order of `REJECTIONS`."""
        return tuple(
            _rejection(name, self.reject[name]) for name in REJECTIONS if name in self.reject
        )

    @property
    def weighs(self) -> bool:
        """Whether the loss has importance weights."""
        return self.weights != "none"

    def check_sequence_loss(self, loss: str) -> None:
        """Raises UserError if single tokens are corrected for a loss that takes the ratio of a sequence."""
        by_token = ["correction.weights 'token'"] if self.weights == "token" else []
        by_token += [
            f"correction.reject.{name}" for name in self.reject if name.startswith("token_")
        ]
        if by_token:
            raise UserError(
                f"loss {loss!r} takes the ratio of a whole sequence, and algorithm."
                f"{' and '.join(by_token)} corrects single tokens of it; use 'sequence' for weights and "
                "a seq_mean bound to reject"
            )

    def check_load_balancing(self, coef: float) -> None:
        """Raises UserError if the divisor of a load balancing loss would be known too late."""
        late = self.bypass and (self.rejections or self.normalize)
        if late and coef:
            raise UserError(
                "algorithm.correction.bypass rejects and normalizes inside the loss, whose divisor is known "
                "only at the end, and train.load_balancing_coef is divided before; set one of the two "
                "to 0 or False"
            )

    def __post_init__(self):
        _check_rejections(self.reject)
        if not 0 <= self.lowest < self.highest:
            raise ValueError(
                f"lowest {self.lowest} and highest {self.highest} bound a ratio: 0 <= lowest < highest"
            )


class Corrected(NamedTuple):
    """The correction of some rows.

    Attributes:
      weight_BT: importance weights, bounded but not yet normalised; 1 if the correction has none.
      mask_BT: 1 on trained tokens that no rule rejects.
      moments: moments of the statistics; add those of parts.
    """

    weight_BT: jax.Array
    mask_BT: jax.Array
    moments: RunningMoments


def correct(
    config: CorrectionConfig,
    train_logprob_BT: jax.Array,
    rollout_logprob_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
) -> Corrected:
    """Weighs and rejects the tokens of any part of a batch. No gradient passes.

    Args:
      config: the correction.
      train_logprob_BT: log-probabilities of the policy that learns, from the start of the step or from inside
        the loss.
      rollout_logprob_BT: log-probabilities of the sampler.
      mask_BT, segment_ids_BT: as in `algos.segments`, with whole sequences.
    """
    where = (mask_BT, segment_ids_BT)
    train_logprob_BT = jax.lax.stop_gradient(train_logprob_BT)
    rho_BT = algos.log_ratio(train_logprob_BT, rollout_logprob_BT, mask_BT)
    moments: RunningMoments = {
        "mismatch": algos.mismatch_moments(train_logprob_BT, rollout_logprob_BT, *where)
    }
    weight_BT = jnp.ones_like(mask_BT)
    if config.weighs:
        ratio_BT = WEIGHTINGS[config.weights].of_ratio(rho_BT, *where)
        weight_BT = _bounded(config, ratio_BT)
        bounds = {"lowest": config.lowest or 1.0 / config.highest, "highest": config.highest}
        moments["weights"] = algos.weight_moments(ratio_BT, weight_BT, *where, **bounds)
    kept_BT = jnp.ones_like(mask_BT)
    for rejection in config.rejections:
        statistic_BT = rejection.statistic(rho_BT, train_logprob_BT, *where)
        keep_BT = rejection.keep(statistic_BT, mask_BT)
        moments[rejection.name] = algos.rejection_moments(rejection, statistic_BT, keep_BT, *where)
        kept_BT = kept_BT * keep_BT
    if config.rejections:
        moments["kept"] = algos.kept_moments(kept_BT, *where)
    return Corrected(weight_BT, masked(mask_BT, kept_BT), moments)


def norm_factor(config: CorrectionConfig, moments: RunningMoments) -> jax.Array | float:
    """The divisor that gives the weights mean 1; 1 if the correction does not normalise them."""
    if not (config.weighs and config.normalize):
        return 1.0
    return WEIGHTINGS[config.weights].norm_factor(moments["weights"])


def correction_metrics(config: CorrectionConfig, moments_U: RunningMoments) -> dict[str, jax.Array]:
    """All metrics of the mismatch and its correction, named as in verl: `rollout_corr/*`.

    Args:
      config: the correction.
      moments_U: moments of U parts whose weights were normalised separately, along the first axis. Statistics
        cover all parts together; `rollout_is_batch_norm_factor` is the mean of the factors.
    """
    moments = merge_moments(moments_U)
    metrics = algos.mismatch_metrics(moments["mismatch"])
    if config.weighs:
        metrics |= WEIGHTINGS[config.weights].metrics(moments["weights"])
        if config.lowest:
            metrics |= algos.outside_band(moments["weights"])
        if config.normalize:
            factor_U = jnp.asarray(norm_factor(config, moments_U))
            metrics["rollout_is_batch_norm_factor"] = factor_U.mean()
    for rejection in config.rejections:
        of_one = algos.rejection_metrics(rejection, moments[rejection.name])
        metrics |= {f"rollout_rs_{rejection.name}_{name}": x for name, x in of_one.items()}
    if config.rejections:
        of_all = algos.kept_metrics(moments["kept"])
        metrics |= {f"rollout_rs_{name}": x for name, x in of_all.items()}
    return {f"rollout_corr/{name}": x for name, x in metrics.items()}


def corrected(
    config: CorrectionConfig, batch: TrainBatch
) -> tuple[TrainBatch, dict[str, jax.Array]]:
    """Multiplies a batch's weights by importance weights, masks rejected tokens, and measures the mismatch.

    Args:
      config: the correction.
      batch: a batch with the log-probabilities of sampler and trainer.

    Returns:
      (batch, metrics); metrics named as in verl, `rollout_corr/*` and `training/rollout_*`.
    """
    weight, mask, metrics = _corrected(config, batch)
    return batch.replace(weight=weight, loss_mask=mask), metrics


@functools.partial(jax.jit, static_argnums=0)
def _corrected(config: CorrectionConfig, batch: TrainBatch):
    shape = batch.tokens.shape
    old_BT, rollout_BT, mask_BT, segment_ids_BT = (
        x.reshape(-1, shape[-1])
        for x in (batch.old_logprob, batch.rollout_logprob, batch.loss_mask, batch.segment_ids)
    )
    weight_BT, kept_BT, moments = correct(config, old_BT, rollout_BT, mask_BT, segment_ids_BT)
    weight = batch.weight * (weight_BT / norm_factor(config, moments)).reshape(shape)
    metrics = correction_metrics(config, jax.tree.map(lambda x: x[None], moments))
    probabilities = algos.probability_metrics(old_BT, rollout_BT, mask_BT)
    metrics |= {f"training/{name}": x for name, x in probabilities.items()}
    return weight, kept_BT.reshape(shape), metrics


def _bounded(config: CorrectionConfig, ratio_BT: jax.Array) -> jax.Array:
    if config.lowest > 0:
        return algos.band(ratio_BT, lowest=config.lowest, highest=config.highest)
    return algos.truncate(ratio_BT, highest=config.highest)
