"""Builds objectives: connects the outputs of a role with the losses of `algos`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos.aggregation import AGGREGATIONS
from jaxrl.algos.covariance import SELECTIONS, covariance
from jaxrl.algos.kl import FULL, KL_ESTIMATES
from jaxrl.algos.moments import Moments, RunningMoments, merge_moments
from jaxrl.algos.policy_losses import (
    HAVE_OTHER_TERMS,
    INPUTS,
    POLICY_LOSSES,
    RATIO_FREE,
    entropy_bonus,
    on_packed_rows,
)
from jaxrl.algos.ratio import bounded_log_ratio
from jaxrl.algos.registry import check_inputs, check_options, lookup, options_of
from jaxrl.algos.segments import masked
from jaxrl.algos.value_loss import clipped_value
from jaxrl.errors import UserError
from jaxrl.roles.correction import CorrectionConfig, correct, correction_metrics, norm_factor
from jaxrl.roles.objective import InnerCorrection, Objective
from jaxrl.roles.policy import PolicyOutputs
from jaxrl.roles.value import ValueOutputs
from jaxrl.types import TrainBatch, ValueBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectedBatch(TrainBatch):
    """A batch for Clip-Cov and KL-Cov.

    Attributes:
      selected: bool [U, M, R, T], True on tokens that are masked or penalised; see `algos.covariance`.
    """

    selected: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EntropyBatch(TrainBatch):
    """A batch for an entropy bonus whose coefficient changes from step to step.

    Attributes:
      entropy_coef: float32, the coefficient of this step.
    """

    entropy_coef: jax.Array


def likelihood(*, coef: float = 1.0) -> Objective:
    """The mean negative log-likelihood of the tokens in the mask, times a coefficient."""

    def loss(outputs: PolicyOutputs, micro: Any):
        del micro
        return -coef * outputs.logprob, {}

    return Objective(loss, supervised=True)


SUPERVISED = likelihood()


def policy(
    name: str,
    options: Mapping[str, Any],
    *,
    aggregation: str = "token-mean",
    aggregation_options: Mapping[str, Any] | None = None,
    entropy_coef: float = 0.0,
    adapts_entropy: bool = False,
    kl_coef: float = 0.0,
    kl_estimate: str = "k3",
    correction: CorrectionConfig | None = None,
    shares_forward: bool = False,
    skips_groups: bool = False,
    truncated: bool = False,
) -> Objective:
    """The objective of a policy: a loss of `algos.policy_losses`, an entropy bonus and a KL penalty.

    Args:
      name, options: one of `POLICY_LOSSES` or the path of a function of the same form, and its keywords.
      aggregation, aggregation_options: one of `AGGREGATIONS`, and its keywords.
      entropy_coef: coefficient of the entropy bonus; 0 for none.
      adapts_entropy: take the coefficient from the batch instead, an `EntropyBatch`.
      kl_coef, kl_estimate: coefficient of the KL penalty, and one of `KL_ESTIMATES` or "full".
      correction: importance weights and rejections inside the loss, from the policy being trained and the
        sampler's. None if the correction is done before the update, or not at all.
      shares_forward: take the old log-probabilities of a step's first minibatch from the forward pass of the
        update itself. The ratio there is then 1 by definition.
      skips_groups: leave groups without advantages out of the backward pass, if no other term of the loss
        gives them a gradient.
      truncated: the outputs are of an actor with a truncation. Tokens that it does not keep are masked; they
        stay in the divisor of the loss.

    Raises:
      UserError: a name or an option is unknown, or the loss and its correction contradict each other.
    """
    function = lookup(POLICY_LOSSES, name, "policy loss")
    select, of_selection = _selection(name, options)
    options = {k: value for k, value in options.items() if k not in of_selection}
    check_inputs(function, INPUTS, f"policy loss {name!r}")
    check_options(function, options, f"policy loss {name!r}", given=("selected",))
    # The exact KL ("full") has no estimate here. It needs the logits of both models, so the role computes it.
    estimate = lookup({**KL_ESTIMATES, FULL: None}, kl_estimate, "KL estimate")

    has_bonus = bool(entropy_coef) or adapts_entropy
    if adapts_entropy and select is not None:
        raise UserError(
            f"algorithm.entropy_target and policy loss {name!r} are two ways to keep the entropy; set the "
            "target to 0, or take another loss"
        )

    def loss(outputs: PolicyOutputs, micro: TrainBatch):
        given = {"selected": micro.selected} if isinstance(micro, SelectedBatch) else {}
        loss_RT, stats = on_packed_rows(function, _loss_inputs(outputs, micro), **options, **given)
        loss_RT = loss_RT * micro.weight
        if has_bonus:
            # A plan traces the update with a batch that has no coefficient.
            coef = micro.entropy_coef if isinstance(micro, EntropyBatch) else entropy_coef
            loss_RT = loss_RT + entropy_bonus(outputs.entropy, coef=coef)
        if kl_coef:
            if estimate is None:
                kl_RT = outputs.kl
            else:
                kl_RT = masked(estimate(outputs.logprob, micro.ref_logprob), micro.loss_mask)
            loss_RT = loss_RT + kl_coef * kl_RT
            stats = stats | {"kl_loss": kl_RT}
        return loss_RT, stats

    make = lookup(AGGREGATIONS, aggregation, "aggregation")
    check_options(make, aggregation_options or {}, f"aggregation {aggregation!r}")
    further: dict[str, Any] = {} if select is None else {"prepare": select}
    if correction is not None and correction.bypass:
        _check_correction(correction, name, adds_terms=has_bonus or bool(kl_coef))
    if correction is not None or truncated:
        further["correction"] = _inside_the_loss(correction, truncated=truncated)
    if shares_forward:
        further["this_pass"] = _logprobs_of_this_pass
    return Objective(
        loss,
        make(**(aggregation_options or {})),
        maxima=_ratio_deviation,
        needs_advantage=skips_groups
        and name in POLICY_LOSSES
        and name not in HAVE_OTHER_TERMS
        and not (has_bonus or kl_coef),
        needs_reference=bool(kl_coef) and estimate is None,
        **further,
    )


def _logprobs_of_this_pass(outputs: PolicyOutputs) -> dict[str, jax.Array]:
    return {"old_logprob": outputs.logprob}


def _loss_inputs(outputs: PolicyOutputs, micro: TrainBatch) -> dict[str, jax.Array]:
    """The arrays of `algos.policy_losses.INPUTS`."""
    return {
        "logprob": outputs.logprob,
        "entropy": outputs.entropy,
        "old_logprob": micro.old_logprob,
        "rollout_logprob": micro.rollout_logprob,
        "ref_logprob": micro.ref_logprob,
        "advantage": micro.advantage,
        "mask": micro.loss_mask,
        "segment_ids": micro.segment_ids,
    }


def _selection(
    name: str, options: Mapping[str, Any]
) -> tuple[Callable[[TrainBatch, jax.Array], SelectedBatch] | None, tuple[str, ...]]:
    """The token selection of Clip-Cov or KL-Cov, and the names of its options; (None, ()) for other losses.

    Tokens are selected once, over whole minibatches, so the split into microbatches does not matter.
    """
    if name not in SELECTIONS:
        return None, ()
    select = SELECTIONS[name]
    names = options_of(select)
    settings = {k: value for k, value in options.items() if k in names}
    check_options(select, settings, f"policy loss {name!r}")

    def prepare(batch: TrainBatch, key: jax.Array) -> SelectedBatch:
        def of_minibatch(key, *rows):
            old_BT, advantage_BT, mask_BT = (x.reshape(-1, x.shape[-1]) for x in rows)
            chosen_BT = select(key, covariance(old_BT, advantage_BT, mask_BT), mask_BT, **settings)
            return chosen_BT.reshape(rows[-1].shape)

        keys_U = jax.random.split(key, batch.tokens.shape[0])
        selected = jax.vmap(of_minibatch)(
            keys_U, batch.old_logprob, batch.advantage, batch.loss_mask
        )
        return batch.extended_as(SelectedBatch, selected=selected)

    return prepare, names


def _check_correction(correction: CorrectionConfig, loss: str, *, adds_terms: bool) -> None:
    """Raises UserError if a correction inside the loss contradicts the loss."""
    if not correction.weighs:
        return
    if loss not in RATIO_FREE:
        raise UserError(
            f"correction.bypass with correction.weights {correction.weights!r} corrects loss {loss!r} twice: "
            "its ratio is to the sampler's policy, which corrects for it; set weights to none, or the "
            f"loss to {' or '.join(sorted(RATIO_FREE))}, or bypass to False"
        )
    if correction.normalize and adds_terms:
        raise UserError(
            "correction.normalize in bypass divides the whole gradient by the weights' mean, which is known "
            "only at the end of a minibatch, and would divide the entropy bonus and the KL penalty too; set "
            "entropy_coef and kl.loss_coef to 0, or normalize or bypass to False"
        )


def _inside_the_loss(correction: CorrectionConfig | None, *, truncated: bool) -> InnerCorrection:
    def apply(outputs: PolicyOutputs, micro: TrainBatch):
        moments: RunningMoments = {}
        if truncated:
            # The probability of these tokens is 0: rounding, or an update, moved them out of the limits.
            outside_RT = jnp.isneginf(outputs.logprob)
            moments["outside"] = Moments.of(outside_RT.astype(jnp.float32), micro.loss_mask)
            micro = micro.replace(loss_mask=masked(micro.loss_mask, ~outside_RT))
        if correction is None:
            return micro, moments
        weight_RT, mask_RT, of_correction = correct(
            correction, outputs.logprob, micro.rollout_logprob, micro.loss_mask, micro.segment_ids
        )
        return micro.replace(
            weight=micro.weight * weight_RT, loss_mask=mask_RT
        ), moments | of_correction

    def metrics(moments_U: RunningMoments) -> dict[str, jax.Array]:
        found = {} if correction is None else correction_metrics(correction, moments_U)
        if truncated:
            fraction = merge_moments(moments_U)["outside"].mean
            found["rollout_corr/truncation_masked_fraction"] = fraction
        return found

    config = correction or CorrectionConfig()
    return InnerCorrection(
        apply,
        norm_factor=functools.partial(norm_factor, config),
        metrics=metrics,
        defers_normalizer=bool(config.rejections) or (config.weighs and config.normalize),
    )


def _ratio_deviation(outputs: PolicyOutputs, micro: TrainBatch) -> dict[str, jax.Array]:
    """|ratio - 1|: in the first minibatch of a step only rounding, if the old policy is the trainer's."""
    log_ratio = bounded_log_ratio(outputs.logprob, micro.old_logprob)
    return {"ratio_max_deviation": jnp.abs(jnp.expm1(log_ratio))}


def clipped_values(*, clip: float) -> Objective:
    """The mean over tokens of the critic's clipped squared error, `algos.value_loss.clipped_value`."""

    def loss(outputs: ValueOutputs, micro: ValueBatch):
        return clipped_value(outputs.value, micro.old_value, micro.target, clip=clip)

    return Objective(loss)
