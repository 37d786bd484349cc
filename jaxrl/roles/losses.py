"""What the roles minimise: losses of `algos`, connected with the outputs of a role and with its batches.

    policy(...)         a loss of `algos.policy_losses`, entropy bonus, KL penalty, correction
    likelihood(...)     supervised learning
    clipped_values(...) critics
    roles.pairs         reward models and preferences

Each returns an `Objective`, which `Learner.update` minimises. `CorrectionConfig` corrects for a sampler whose
policy differs from the one that learns, before the update or inside the loss; `algos.rollout_correction` has
the formulas and the direction of every bound.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxrl.algos import rollout_correction
from jaxrl.algos.aggregation import AGGREGATIONS, Aggregation, token_mean
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
from jaxrl.algos.rollout_correction import WEIGHTINGS, Rejection
from jaxrl.algos.segments import masked
from jaxrl.algos.value_loss import clipped_value
from jaxrl.checks import between, check_value, coefficient, positive_coefficient, settings
from jaxrl.errors import UserError
from jaxrl.types import TrainBatch

Stats: TypeAlias = dict[str, jax.Array]
# (outputs of the role for a microbatch, the microbatch) -> (loss, stats), all [R, T].
TokenLoss: TypeAlias = Callable[[Any, Any], tuple[jax.Array, Stats]]


class PolicyOutputs(NamedTuple):
    """Inputs of a policy's losses.

    Attributes:
      logprob: [R, T], log-probability of each token given the earlier tokens of its sequence, temperature
        applied. With `Actor.truncation` among the kept tokens; -inf for others.
      entropy: [R, T], entropy in nats of the distribution at that token.
      kl: [R, T], exact KL in nats of that distribution to the reference's; 0 unless the objective needs a
        reference.
      value: [R, T], as in `ValueOutputs`, of a policy with a value head; None of others.
    """

    logprob: jax.Array
    entropy: jax.Array
    kl: jax.Array
    value: jax.Array | None = None


class ValueOutputs(NamedTuple):
    """Inputs of a critic's losses.

    Attributes:
      value: [R, T], value of the state before each token, in units of reward.
    """

    value: jax.Array


class ScoreOutputs(NamedTuple):
    """Inputs of a reward model's losses.

    Attributes:
      score: [R, T], the score of each sequence on its last token, 0 elsewhere.
    """

    score: jax.Array


def _nothing(*_: Any) -> Stats:
    return {}


@dataclasses.dataclass(frozen=True)
class InnerCorrection:
    """A correction inside the loss: changes to a microbatch that depend on the policy being trained.

    Attributes:
      apply: (outputs, microbatch) -> (microbatch, moments). Multiplies weights in, removes rejected tokens
        from the mask, and returns running statistics.
      norm_factor: (moments of a minibatch) -> a divisor of its gradient, besides the count.
      metrics: (moments of each minibatch, along the first axis) -> metrics of the step.
      defers_normalizer: the divisor of the loss is known only at the end of the minibatch, because tokens may
        be rejected or `norm_factor` is not 1.
    """

    apply: Callable[[Any, Any], tuple[Any, RunningMoments]]
    norm_factor: Callable[[RunningMoments], jax.Array | float]
    metrics: Callable[[RunningMoments], Stats]
    defers_normalizer: bool


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of an update. Pass the same object at each step: another one compiles another program.

    Attributes:
      loss: (outputs, microbatch) -> (loss, stats) per token. Outputs are those of the role, such as
        `PolicyOutputs`. Everything outside the mask is set to 0 before the loss sees it.
      aggregation: sum and divisor that turn token losses into the loss of a minibatch.
      stats: the same for stats, and for `beside`.
      beside: another loss of the same outputs, which is added; its stats have names with a group.
      prepare: (batch, key) -> batch, called before the first update of a step, for decisions over whole
        minibatches.
      correction: correction inside the loss; None for none.
      maxima: (outputs, microbatch) -> stats [R, T], at least 0; their largest values are reported.
      this_pass: (outputs) -> batch fields [R, T] that describe the policy at the start of the step. In the
        first minibatch of a step the policy is unchanged, so these values replace the fields.
      needs_advantage: the loss has no gradient where the advantage is 0. Microbatches at the end of a
        minibatch without any other advantage then have no backward pass.
      needs_reference: the outputs compare the policy with a reference, whose weights `update` is given.
      supervised: the tokens are examples. Limits of sampling do not apply to their log-probabilities.
    """

    loss: TokenLoss
    aggregation: Aggregation = dataclasses.field(default_factory=token_mean)
    stats: Aggregation = dataclasses.field(default_factory=token_mean)
    beside: TokenLoss | None = None
    prepare: Callable[[Any, jax.Array], Any] = lambda batch, key: batch
    correction: InnerCorrection | None = None
    maxima: Callable[[Any, Any], Stats] = _nothing
    this_pass: Callable[[Any], dict[str, jax.Array]] = _nothing
    needs_advantage: bool = False
    needs_reference: bool = False
    supervised: bool = False

    @property
    def uses_this_pass(self) -> bool:
        """Whether the first minibatch replaces fields of the batch by its own outputs."""
        return self.this_pass is not _nothing


# Off-policy correction: the sampler's policy differs from the one that learns.

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


@settings
class CorrectionConfig:
    """Correction for tokens whose probability differs between sampler and trainer.

    All bounds are on pi_train / pi_rollout.
    """

    bypass: bool = False
    """Use the sampler's log-probability as the old one (two policies instead of three). This
    saves a forward pass. Weights and rejections are then computed inside the loss, from the
    policy being trained, and `weights` are for losses without a ratio of their own
    (`algos.policy_losses.RATIO_FREE`).
    """
    weights: Literal["none", "token", "sequence"] = "none"
    """Importance weights of the loss, per token, per sequence, or none."""
    bounds: tuple[
        Annotated[float, coefficient()], Annotated[float, positive_coefficient(or_inf=True)]
    ] = (0.0, 2.0)
    """Lower and upper bound of weights. Weights above the upper one are cut to it (TIS, truncated
    importance sampling), inf for none; with a lower one above 0, weights outside both become 0
    (IcePop).
    """
    normalize: bool = False
    """Scale weights to mean 1 over the step, or in bypass over each minibatch."""
    # A dict has no hash. Compiled functions take this class as a static argument.
    reject: dict[str, Limit] = dataclasses.field(default_factory=dict, hash=False)
    """Rejection rules, name of `REJECTIONS` -> limit or limits: {"token_k3": 0.1,
    "seq_mean_ratio": (0.5, 2.0)}. A token is kept only if every rule accepts it. Each rule sees
    the original mask and has its own metrics, `rollout_corr/rollout_rs_<name>_*`, where a ratio
    is called k1, as in verl.
    """

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The rules of `reject`, as those of `algos.rollout_correction`, in the order of `REJECTIONS`."""
        found = []
        for name in REJECTIONS:
            limit = self.reject.get(name)
            over, _, by = name.rpartition("_")
            if isinstance(limit, tuple):
                bounds = rollout_correction.ratio_bounds(*limit)
                found.append(Rejection(f"{over}_k1", over, "k1", *bounds))
            elif limit is not None and name == "veto":
                # The largest k1 of a sequence belongs to its smallest ratio.
                bounds = rollout_correction.ratio_bounds(limit, math.inf)
                found.append(Rejection(name, "seq_max", "k1", *bounds))
            elif limit is not None:
                found.append(Rejection(name, over, by, -math.inf, limit))
        return tuple(found)

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
        for name, limit in self.reject.items():
            if name not in REJECTIONS:
                near = difflib.get_close_matches(name, REJECTIONS) or list(REJECTIONS)
                raise UserError(f"reject.{name} is not a rejection rule; near: {', '.join(near)}")
            check_value(f"reject.{name}", limit, REJECTIONS[name])
            if isinstance(limit, tuple) and limit[0] > limit[1]:
                raise UserError(
                    f"reject.{name} {limit} has its lowest ratio above its highest; write it as (0.5, 2.0)"
                )
        if not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds {self.bounds} of a ratio: write the lower one first")


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
    rho_BT = rollout_correction.log_ratio(train_logprob_BT, rollout_logprob_BT, mask_BT)
    moments: RunningMoments = {
        "mismatch": rollout_correction.mismatch_moments(
            train_logprob_BT, rollout_logprob_BT, *where
        )
    }
    weight_BT = jnp.ones_like(mask_BT)
    if config.weighs:
        ratio_BT = WEIGHTINGS[config.weights].of_ratio(rho_BT, *where)
        lowest, highest = config.bounds
        if lowest > 0:
            weight_BT = rollout_correction.band(ratio_BT, lowest=lowest, highest=highest)
        else:
            weight_BT = rollout_correction.truncate(ratio_BT, highest=highest)
        # Without a lower bound the reported share lies below the inverse of the upper one, as in verl.
        moments["weights"] = rollout_correction.weight_moments(
            ratio_BT, weight_BT, *where, lowest=lowest or 1.0 / highest, highest=highest
        )
    # Each rule sees the original mask, so their order does not matter.
    kept_BT = jnp.ones_like(mask_BT)
    for rejection in config.rejections:
        statistic_BT = rejection.statistic(rho_BT, train_logprob_BT, *where)
        keep_BT = rejection.keep(statistic_BT, mask_BT)
        moments[rejection.name] = rollout_correction.rejection_moments(
            rejection, statistic_BT, keep_BT, *where
        )
        kept_BT = kept_BT * keep_BT
    if config.rejections:
        moments["kept"] = rollout_correction.kept_moments(kept_BT, *where)
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
    metrics = rollout_correction.mismatch_metrics(moments["mismatch"])
    if config.weighs:
        metrics |= WEIGHTINGS[config.weights].metrics(moments["weights"])
        if config.bounds[0]:
            metrics |= rollout_correction.outside_band(moments["weights"])
        if config.normalize:
            factor_U = jnp.asarray(norm_factor(config, moments_U))
            some_U = moments_U["weights"]["weight"].count > 0
            metrics["rollout_is_batch_norm_factor"] = Moments.of(factor_U, some_U).mean
    for rejection in config.rejections:
        of_one = rollout_correction.rejection_metrics(rejection, moments[rejection.name])
        metrics |= {f"rollout_rs_{rejection.name}_{name}": x for name, x in of_one.items()}
    if config.rejections:
        of_all = rollout_correction.kept_metrics(moments["kept"])
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
    # As one part: in bypass there is a part for each minibatch.
    metrics = correction_metrics(config, jax.tree.map(lambda x: x[None], moments))
    probabilities = rollout_correction.probability_metrics(old_BT, rollout_BT, mask_BT)
    metrics |= {f"training/{name}": x for name, x in probabilities.items()}
    return weight, kept_BT.reshape(shape), metrics


# Policies.


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
    return Objective(lambda outputs, micro: (-coef * outputs.logprob, {}), supervised=True)


# One object for all updates, since another one would compile another program.
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
    value_coef: float = 0.0,
    value_clip: float = math.inf,
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
      value_coef, value_clip: coefficient of the loss of the policy's value head, and its clip as in
        `clipped_values`; 0 for none.

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
        # Importance weights are of the policy's loss alone, as in verl; the other terms are added unweighted.
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
        further["this_pass"] = lambda outputs: {"old_logprob": outputs.logprob}
    if value_coef:
        further["beside"] = functools.partial(_value_loss, coef=value_coef, clip=value_clip)
    return Objective(
        loss,
        make(**(aggregation_options or {})),
        maxima=_ratio_deviation,
        # A function of the user may have a gradient without an advantage.
        needs_advantage=skips_groups
        and name in POLICY_LOSSES
        and name not in HAVE_OTHER_TERMS
        and not (has_bonus or kl_coef or value_coef),
        needs_reference=bool(kl_coef) and estimate is None,
        **further,
    )


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
    """The token selection of Clip-Cov or KL-Cov, and the names of its options. Other losses: (None, ())."""
    if name not in SELECTIONS:
        return None, ()
    select = SELECTIONS[name]
    names = options_of(select)
    settings = {k: value for k, value in options.items() if k in names}
    check_options(select, settings, f"policy loss {name!r}")

    # Over whole minibatches, before the first update, so that the split into microbatches does not matter.
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

    # The default weighs and rejects nothing.
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


def _value_loss(
    outputs: PolicyOutputs, micro: TrainBatch, *, coef: float, clip: float
) -> tuple[jax.Array, Stats]:
    """The loss of a policy's value head, with the metrics of a critic."""
    assert outputs.value is not None and micro.old_value is not None and micro.target is not None
    loss_RT, stats = clipped_value(outputs.value, micro.old_value, micro.target, clip=clip)
    stats |= {"vf_loss": loss_RT, "vpred_mean": outputs.value}
    return coef * loss_RT, {f"critic/{name}": x for name, x in stats.items()}


def clipped_values(*, clip: float) -> Objective:
    """The mean over tokens of the critic's clipped squared error, `algos.value_loss.clipped_value`."""
    return Objective(
        lambda outputs, micro: clipped_value(
            outputs.value, micro.old_value, micro.target, clip=clip
        )
    )
