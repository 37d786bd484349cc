"""Settings of the algorithm: the dataflow, advantages and losses, the KL penalty, critics and costs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from jaxrl.algos.kl import FULL, KL_ESTIMATES
from jaxrl.algos.policy_losses import RATIO_FREE
from jaxrl.checks import (
    NAME,
    PATH,
    at_least,
    between,
    coefficient,
    count,
    one_of,
    positive,
    positive_coefficient,
    score,
    settings,
    steps,
)
from jaxrl.errors import UserError
from jaxrl.roles.losses import CorrectionConfig

if TYPE_CHECKING:
    from jaxrl.dataflows.dataflow import Dataflow


@settings
class KlConfig:
    """The KL penalty to the reference policy, which holds the initial weights of training."""

    reward_coef: Annotated[float, coefficient()] = 0.0
    """Coefficient of the KL penalty in the reward."""
    reward_estimate: Annotated[str, one_of(*KL_ESTIMATES)] = "k1"
    """Estimate of the KL in the reward, a name of `algos.kl.KL_ESTIMATES`. Its value counts."""
    loss_coef: Annotated[float, coefficient()] = 0.0
    """Coefficient of the KL penalty in the loss."""
    loss_estimate: Annotated[str, one_of(*KL_ESTIMATES, FULL)] = "k3"
    """Estimate of the KL in the loss, one of the same names. Its gradient counts. "full" is the
    KL over the whole vocabulary; every update then runs the reference's forward pass too.
    """
    target: Annotated[float, coefficient()] = 0.0
    """KL that `reward_coef` is adapted to reach; 0 keeps the coefficient constant."""
    horizon: Annotated[float, at_least(1, at_most=10**8)] = 10_000.0
    """Number of sequences over which the coefficient adapts."""

    def __post_init__(self):
        if self.target and not self.reward_coef:
            raise ValueError(
                f"target {self.target} adapts reward_coef, which is 0 and would stay so; set it above 0"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether a coefficient is above 0."""
        return self.reward_coef > 0 or self.loss_coef > 0

    @property
    def is_full(self) -> bool:
        """Whether the loss has the KL over the whole vocabulary."""
        return self.loss_coef > 0 and self.loss_estimate == FULL

    @property
    def needs_ref_logprobs(self) -> bool:
        """Whether the run needs the reference's log-probabilities of the sampled tokens."""
        return self.reward_coef > 0 or (self.loss_coef > 0 and not self.is_full)

    def check_compared(self, dataflow: str, role: str) -> None:
        """Raises UserError if a coefficient needs a reference policy that the dataflow does not have.

        Args:
          dataflow: name of the dataflow.
          role: its role that the KL is measured against; "" for none.
        """
        if role not in ("", "reference") and self.needs_ref_logprobs:
            raise UserError(
                f"dataflow {dataflow!r} has the KL to its {role} over the whole vocabulary alone; set "
                "algorithm.kl.reward_coef to 0 and algorithm.kl.loss_estimate to 'full'"
            )
        if self.needs_reference and not role:
            raise UserError(
                f"algorithm.kl has a coefficient above 0, but dataflow {dataflow!r} has no reference policy "
                "to measure it against; set reward_coef and loss_coef to 0, or use dataflow grpo or ppo"
            )

    def check_pool(self, pool: str, *, has_reference: bool, same_layout: bool) -> None:
        """Raises UserError if the two models of the KL over the vocabulary have different devices or layouts.

        Args:
          pool: name of the actor's pool.
          has_reference: whether the reference is in the same pool.
          same_layout: whether the reference has the layout of the actor.
        """
        if not self.is_full or same_layout:
            return
        fault = (
            f"placement.{pool}.layouts splits them otherwise; give both one layout"
            if has_reference
            else f"pool {pool} has the actor without the reference; put both into one pool"
        )
        raise UserError(
            f"algorithm.kl.loss_estimate 'full' has the reference's weights in the actor's updates, and "
            f"{fault}, or use k3, k3+ or k2, which take one number a token"
        )

    def check_ref_logprobs(self, loss: str) -> None:
        """Raises UserError if a loss needs reference log-probabilities and the run has no KL penalty."""
        if not self.needs_ref_logprobs:
            raise UserError(
                f"policy loss {loss!r} takes ref_logprob, and this run has no reference policy; set "
                "algorithm.kl.loss_coef or algorithm.kl.reward_coef above 0"
            )

    def check_separate_rewards(self, advantage: str) -> None:
        """Raises UserError if an advantage of separate rewards would ignore the KL penalty in the reward."""
        if self.reward_coef:
            raise UserError(
                f"advantage {advantage!r} takes the reward in its parts, and the KL penalty "
                "(algorithm.kl.reward_coef) is none of them; set it to 0 and use algorithm.kl.loss_coef"
            )


@settings
class TrustRegionConfig:
    """The step of dataflow `trpo`."""

    # The value of the paper's experiments.
    max_kl: Annotated[float, positive_coefficient()] = 0.01
    """Bound on the mean KL of a step, in nats per token."""


@settings
class AlgorithmConfig:
    """The algorithm: dataflow, advantages, loss and updates."""

    dataflow: Annotated[str, PATH] = "dapo"
    """Name of `dataflows.lookup.DATAFLOWS`, or your own function as "package.module:function"
    or "path/to/file.py:function".
    """
    advantage: Annotated[str, PATH] = "grpo"
    advantage_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Name of `algos.advantages.ADVANTAGES` or your own function, and its keyword arguments."""
    baseline_decay: Annotated[float, between(0, 1, has_high=False)] = 0.9
    """Share of the old average in the moving average of rewards that advantage `reinforce` has
    as its baseline: b becomes decay * b + (1 - decay) * mean after each step.
    """
    whiten: bool = False
    """Scale the advantages of a step to mean 0 and deviation 1, as PPO does."""
    loss: Annotated[str, PATH] = "clipped"
    loss_options: dict[str, Any] = dataclasses.field(
        # Clip-higher of DAPO, and the dual clip of verl's script for it.
        default_factory=lambda: {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
    )
    """Name of `algos.policy_losses.POLICY_LOSSES` or your own function, and its keyword
    arguments.
    """
    aggregation: Annotated[str, NAME] = "token-mean"
    aggregation_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Name of `algos.aggregation.AGGREGATIONS`, and its keyword arguments."""
    entropy_coef: Annotated[float, coefficient()] = 0.0
    """Coefficient of the entropy bonus."""
    entropy_target: Annotated[float, coefficient()] = 0.0
    """Entropy in nats that `entropy_coef` is adapted to keep, after each step; 0 keeps the
    coefficient constant.
    """
    top_entropy_quantile: Annotated[float, between(0, 1, has_low=False)] = 1.0
    """Share of a step's trained tokens that give a gradient: those at which the sampler had the
    highest entropy (arXiv 2506.01939 uses .2). The others stay in the divisor of the loss.
    """
    kl: KlConfig = dataclasses.field(default_factory=KlConfig)
    """KL penalty to the reference policy."""
    trust_region: TrustRegionConfig = dataclasses.field(default_factory=TrustRegionConfig)
    """Step of dataflow `trpo`, which has no optimiser."""
    correction: CorrectionConfig = dataclasses.field(default_factory=CorrectionConfig)
    """Correction for a sampler whose probabilities differ from the trainer's."""
    truncated_logprobs: bool = True
    """With `rollout.top_k`, `top_p` or `min_p`, log-probabilities are those among the tokens
    that these keep, in the sampler and in training. So the policy that is trained is the one
    that sampled. Without such a limit it has no effect.
    """
    updates_per_step: Annotated[int, count(1)] = 4
    """Number of minibatches in a step, one optimiser update each."""
    epochs: Annotated[int, between(1, 1000)] = 1
    """Number of passes over the minibatches of a step. Later passes keep the old
    log-probabilities of the first, as in PPO.
    """

    @functools.cached_property
    def flow(self) -> Dataflow:
        """The function that `dataflow` names; UserError if there is none."""
        from jaxrl.dataflows.lookup import find_dataflow

        return find_dataflow(self.dataflow)

    def check_trust_region(self, *, pretrain_coef: float, truncates: bool) -> None:
        """Raises UserError if a setting contradicts one step per batch whose loss can be measured again.

        Args:
          pretrain_coef: coefficient of the auxiliary loss, `cost.pretrain_coef`.
          truncates: whether log-probabilities are those of truncated sampling.
        """
        clashes = {
            f"algorithm.updates_per_step {self.updates_per_step}; set it to 1": self.updates_per_step
            > 1,
            f"algorithm.epochs {self.epochs}; set it to 1": self.epochs > 1,
            "algorithm.correction.bypass True; set it to False": self.correction.bypass,
            "algorithm.kl.loss_estimate 'full'; set it to 'k3'": self.kl.is_full,
        }
        _refuse(
            f"dataflow {self.dataflow!r} takes one step from the whole batch, and compares the loss before "
            "it with the loss after it",
            clashes,
        )
        if truncates:
            raise UserError(
                f"dataflow {self.dataflow!r} bounds the KL over the whole vocabulary, and with "
                "algorithm.truncated_logprobs True its loss would be one of the tokens that the limits of "
                "rollout keep; set it to False, or rollout.top_k to 0, top_p to 1 and min_p to 0"
            )
        if pretrain_coef:
            raise UserError(
                f"dataflow {self.dataflow!r} has one loss, without cost.pretrain_coef {pretrain_coef}; "
                "set it to 0"
            )

    def check_runs_free(self) -> None:
        """Raises UserError if nothing corrects for samples of older weights."""
        correction = self.correction
        # With bypass, a loss with a ratio compares with the sampler's policy, which corrects it.
        if not (correction.weighs or (correction.bypass and self.loss not in RATIO_FREE)):
            raise UserError(
                "rollout.max_staleness with a pool of its own for the role rollout samples with weights of "
                'earlier steps, and nothing corrects for it; set algorithm.correction.weights to "token" or '
                '"sequence", or algorithm.correction.bypass to True for a loss with a ratio'
            )


@settings
class CriticConfig:
    """The critic, and the critic of costs."""

    weights: Annotated[str, PATH] = ""
    """Hugging Face directory of the initial weights; "" takes the policy's, with a new head of
    zeros.
    """
    lr: Annotated[float, coefficient()] = 1e-5
    """Peak learning rate of the critic; its optimiser is otherwise that of `optim`."""
    clip: Annotated[float, positive_coefficient(or_inf=True)] = 0.5
    """Largest change of a value in a step, in units of reward; inf for no limit."""
    warmup_steps: Annotated[int, steps(0)] = 0
    """Number of first steps in which only the critic learns."""
    epochs: Annotated[int, between(1, 1000)] = 1
    """Number of passes over the minibatches of a step."""
    trunk_coef: Annotated[float, coefficient()] = 0.0
    """Above 0, the critic is a second head of the actor's model, and its loss times this is part
    of the actor's (`vf_coef` of other programs); `lr` then has no effect. 0 is a model of its own.
    """

    def check_trunk(self, algorithm: AlgorithmConfig, *, squares: bool) -> None:
        """Raises UserError if a setting contradicts a critic that is a head of the actor.

        Args:
          algorithm: settings of the algorithm.
          squares: whether the advantage takes squared probabilities, which need a pass of their own.
        """
        flow, epochs = algorithm.flow, algorithm.epochs
        one_critic = "critic" in flow.roles and "cost_critic" not in flow.roles
        clashes = {
            f"algorithm.dataflow {algorithm.dataflow!r}; take 'ppo' or 'vpg'": not one_critic
            or flow.trust_region,
            f"algorithm.advantage {algorithm.advantage!r}; take 'gae'": squares,
            "algorithm.correction.bypass True; set it to False": algorithm.correction.bypass,
            "algorithm.kl.loss_estimate 'full'; set it to 'k3'": algorithm.kl.is_full,
            f"critic.weights {self.weights!r}; set it to ''": self.weights,
            f"critic.warmup_steps {self.warmup_steps}; set it to 0": self.warmup_steps,
            f"critic.epochs {self.epochs}; set it to {epochs}, algorithm.epochs": self.epochs
            != epochs,
        }
        _refuse(
            f"critic.trunk_coef {self.trunk_coef:g} makes the critic a head of the actor's model, with one "
            "pass and one update for both",
            clashes,
        )


def _refuse(why: str, clashes: Mapping[str, Any]) -> None:
    """Raises UserError for the first clash (setting; remedy) that is true."""
    for clash, clashing in clashes.items():
        if clashing:
            raise UserError(f"{why}, which excludes {clash}")


@settings
class TeacherConfig:
    """The teacher of a distillation (`dataflows.distill`), a `roles.policy.Reference` with its own model."""

    weights: Annotated[str, PATH] = ""
    """Hugging Face directory of a language model with the student's vocabulary."""


@settings
class CostConfig:
    """Costs, which Safe RLHF keeps below a limit."""

    model: Annotated[str, PATH] = ""
    """Hugging Face directory of a cost model (...ForSequenceClassification)."""
    limit: Annotated[float, score()] = 0.0
    """Largest acceptable mean cost."""
    multiplier: Annotated[float, positive_coefficient()] = 1.0
    """The first Lagrange multiplier: the reward that one unit of cost takes away."""
    multiplier_lr: Annotated[float, between(0, 10)] = 0.1
    """Learning rate of the multiplier's logarithm; 0 keeps the multiplier."""
    multiplier_max: Annotated[float, positive(or_inf=True)] = math.inf
    """Largest multiplier; inf for no limit."""
    multiplier_delay_steps: Annotated[int, steps(0)] = 0
    """Number of first steps in which the multiplier does not change."""
    pretrain_coef: Annotated[float, coefficient()] = 0.0
    """Coefficient of the auxiliary (ptx) loss in the actor's updates, on written solutions
    (the rows' solutions); 0 disables it.
    """

    def __post_init__(self):
        if self.multiplier > self.multiplier_max:
            raise ValueError(
                f"cost.multiplier {self.multiplier:g} is the first multiplier, and cost.multiplier_max "
                f"{self.multiplier_max:g} the largest; raise multiplier_max or lower multiplier"
            )
