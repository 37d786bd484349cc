"""Correction of a packed batch for having been sampled by another policy than the one that learns.

`algos.rollout_correction` has the formulas and the direction of every bound.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from jaxrl.algos import rollout_correction as algos
from jaxrl.algos.segments import masked
from jaxrl.checks import at_least, between, check_fields, positive
from jaxrl.types import TrainBatch


@dataclasses.dataclass(frozen=True)
class CorrectionConfig:
    """What is done about tokens that the sampler and the trainer give different probabilities.

    All bounds are on pi_train / pi_rollout.

    Attributes:
      bypass: two policies: the sampler's log-probability is the old one, which saves a forward pass; the
        clipped loss then corrects by itself, and `weights` must be "none". What is rejected is decided
        inside the loss, by the policy being trained.
      weights: importance weights of the loss: of each token, of whole sequences, or none.
      highest: weights above are cut to it (TIS, truncated importance sampling); inf for none.
      lowest: with a value above 0 weights outside lowest..highest become 0 instead (IcePop).
      normalize: scale weights to mean 1 over the step.
      reject_over: what a rejection looks at: "" none, each "token", or a sequence's "seq_sum", "seq_mean" or
        "seq_max".
      reject_by: "ratio" (k1: between reject_lowest and reject_highest), or a divergence, "k2" or "k3"
        (at most reject_highest).
      reject_lowest, reject_highest: the bounds.
      veto: sequences with a token below this ratio are rejected; 0 vetoes none.
    """

    bypass: bool = False
    weights: Literal["none", "token", "sequence"] = "none"
    highest: Annotated[float, positive(or_inf=True)] = 2.0
    lowest: Annotated[float, at_least(0)] = 0.0
    normalize: bool = False
    reject_over: Literal["", "token", "seq_sum", "seq_mean", "seq_max"] = ""
    reject_by: Literal["ratio", "k2", "k3"] = "ratio"
    reject_lowest: Annotated[float, at_least(0)] = 0.5
    reject_highest: Annotated[float, positive(or_inf=True)] = 2.0
    veto: Annotated[float, between(0, 1, has_high=False)] = 0.0

    @property
    def rejects(self) -> bool:
        """Some token may be taken out of the mask."""
        return bool(self.reject_over or self.veto)

    def __post_init__(self):
        check_fields(self)
        if self.bypass and self.weights != "none":
            raise ValueError(
                f"bypass with weights {self.weights!r} corrects twice: the clipped ratio is against the "
                "sampler's policy already; set weights to none, or bypass to False"
            )
        if not 0 <= self.lowest < self.highest:
            raise ValueError(
                f"lowest {self.lowest} and highest {self.highest} bound a ratio: 0 <= lowest < highest"
            )
        if self.reject_over == "seq_max" and self.reject_by == "ratio":
            raise ValueError(
                "reject_over seq_max takes the largest divergence of a sequence; set reject_by to k2 or k3"
            )
        if self.reject_by == "ratio" and not 0 < self.reject_lowest <= self.reject_highest:
            raise ValueError(
                f"reject_lowest {self.reject_lowest} and reject_highest {self.reject_highest} bound a ratio: "
                "0 < lowest <= highest"
            )


def corrected(
    config: CorrectionConfig, batch: TrainBatch
) -> tuple[TrainBatch, dict[str, jax.Array]]:
    """The batch with importance weights and without rejected tokens, and every metric of the mismatch.

    Args:
      config: what to do.
      batch: with both log-probabilities.

    Returns:
      (batch, metrics); metrics named as in verl, `rollout_corr/*` and `training/rollout_*`.
    """
    weight, mask, metrics = _correct(config, batch)
    return batch.replace(weight=weight, loss_mask=mask), metrics


def not_rejected(
    config: CorrectionConfig,
    train_logprob_BT: jax.Array,
    rollout_logprob_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
) -> jax.Array:
    """1 on the trained tokens that neither rejection nor veto takes out, else 0; no gradient.

    Args:
      config: the bounds.
      train_logprob_BT: of the policy that learns: at the start of the step, or inside the loss.
      rollout_logprob_BT: of the sampler's.
      mask_BT, segment_ids_BT: as in `algos.segments`; sequences are judged as a whole.
    """
    rho_BT = algos.log_ratio(train_logprob_BT, rollout_logprob_BT, mask_BT)
    return _kept(config, rho_BT, mask_BT, segment_ids_BT)


@functools.partial(jax.jit, static_argnums=0)
def _correct(config: CorrectionConfig, batch: TrainBatch):
    shape = batch.tokens.shape
    old_BT, rollout_BT, mask_BT, segment_ids_BT = (
        x.reshape(-1, shape[-1])
        for x in (batch.old_logprob, batch.rollout_logprob, batch.loss_mask, batch.segment_ids)
    )
    where = (mask_BT, segment_ids_BT)
    rho_BT = algos.log_ratio(old_BT, rollout_BT, mask_BT)
    metrics = algos.mismatch_metrics(old_BT, rollout_BT, *where)
    weight_BT = jnp.ones_like(mask_BT)
    if config.weights != "none":
        raw_BT = _WEIGHTS[config.weights](rho_BT, *where)
        bounds = {"lowest": config.lowest, "highest": config.highest}
        metrics |= algos.weight_metrics(raw_BT, *where, **bounds)
        weight_BT = _bounded(config, raw_BT, *where)
    kept_BT = _kept(config, rho_BT, *where)
    if config.rejects:
        metrics |= algos.rejection_metrics(kept_BT, *where)
    named = {f"rollout_corr/{name}": value for name, value in metrics.items()}
    probabilities = algos.probability_metrics(old_BT, rollout_BT, mask_BT)
    named |= {f"training/{name}": value for name, value in probabilities.items()}
    return weight_BT.reshape(shape), masked(mask_BT, kept_BT).reshape(shape), named


_WEIGHTS: dict[str, Callable[..., jax.Array]] = {
    "token": algos.token_weights,
    "sequence": algos.sequence_weights,
}


def _bounded(config: CorrectionConfig, raw_BT, mask_BT, segment_ids_BT) -> jax.Array:
    if config.lowest > 0:
        weight_BT = algos.band(raw_BT, lowest=config.lowest, highest=config.highest)
    else:
        weight_BT = algos.truncate(raw_BT, highest=config.highest)
    if not config.normalize:
        return weight_BT
    if config.weights == "token":
        return algos.normalize_by_tokens(weight_BT, mask_BT)
    return algos.normalize_by_sequences(weight_BT, mask_BT, segment_ids_BT)


def _kept(config: CorrectionConfig, rho_BT, mask_BT, segment_ids_BT) -> jax.Array:
    where = (rho_BT, mask_BT, segment_ids_BT)
    kept_BT = jnp.ones_like(mask_BT)
    if config.reject_over:
        over = algos.OVER[config.reject_over]
        highest = config.reject_highest
        if config.reject_by == "ratio":
            bounds = {"lowest": config.reject_lowest, "highest": highest}
            kept_BT = algos.keep_ratio(*where, over=over, **bounds)
        else:
            divergence = algos.DIVERGENCES[config.reject_by]
            kept_BT = algos.keep_divergence(
                *where, divergence=divergence, over=over, highest=highest
            )
    if config.veto:
        kept_BT = kept_BT * algos.keep_not_vetoed(*where, lowest=config.veto)
    return kept_BT
