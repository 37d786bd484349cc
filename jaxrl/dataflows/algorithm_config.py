"""Settings of the algorithm: the dataflow, advantages and losses, the KL penalty, critics and costs."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jaxrl.algos.kl import FULL, KL_ESTIMATES
from jaxrl.algos.policy_losses import RATIO_FREE
from jaxrl.checks import (
    NAME,
    PATH,
    at_least,
    between,
    check_fields,
    coefficient,
    count,
    one_of,
    positive_coefficient,
    score,
    steps,
)
from jaxrl.errors import UserError
from jaxrl.roles.correction import CorrectionConfig
from jaxrl.roles.optim_config import OptimConfig


@dataclasses.dataclass(frozen=True)
class KlConfig:
    """The KL penalty for leaving the reference policy, which is the one training starts from.

    Attributes:
      reward_coef: coefficient of the KL penalty in the reward.
      reward_estimate: a name of `algos.kl.KL_ESTIMATES`; in the reward its value counts.
      loss_coef: coefficient of the KL penalty in the loss.
      loss_estimate: likewise, in the loss its gradient counts; or "full", the KL over the whole vocabulary,
        which takes the reference's forward pass into every update.
      target: the KL aimed for, to which `reward_coef` is adapted; 0 keeps it as it is.
      horizon: of the adaptation, in sequences.
    """

    reward_coef: Annotated[float, coefficient()] = 0.0
    reward_estimate: Annotated[str, one_of(*KL_ESTIMATES)] = "k1"
    loss_coef: Annotated[float, coefficient()] = 0.0
    loss_estimate: Annotated[str, one_of(*KL_ESTIMATES, FULL)] = "k3"
    target: Annotated[float, coefficient()] = 0.0
    horizon: Annotated[float, at_least(1, at_most=10**8)] = 10_000.0

    def __post_init__(self):
        check_fields(self)
        if self.target and not self.reward_coef:
            raise ValueError(
                f"target {self.target} adapts reward_coef, which is 0 and would stay so; set it above 0"
            )

    @property
    def needs_reference(self) -> bool:
        """Some coefficient is not 0."""
        return self.reward_coef > 0 or self.loss_coef > 0

    @property
    def is_full(self) -> bool:
        """The loss has the KL over the whole vocabulary."""
        return self.loss_coef > 0 and self.loss_estimate == FULL

    @property
    def needs_ref_logprobs(self) -> bool:
        """The reference's probabilities of the sampled tokens are asked for."""
        return self.reward_coef > 0 or (self.loss_coef > 0 and not self.is_full)

    def check_compared(self, dataflow: str, role: str) -> None:
        """Raises UserError if a coefficient needs a reference policy that the dataflow does not have.

        Args:
          dataflow: its name.
          role: the one of its roles that the KL is measured against; "" for none.
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
        """Raises UserError if the KL over the vocabulary has its two models in different places.

        Args:
          pool: name of the actor's pool.
          has_reference: the reference is in it too.
          same_layout: it is split like the actor.
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
        """Raises UserError if nothing computes the reference's log-probabilities that a loss takes."""
        if not self.needs_ref_logprobs:
            raise UserError(
                f"policy loss {loss!r} takes ref_logprob, and this run has no reference policy; set "
                "algorithm.kl.loss_coef or algorithm.kl.reward_coef above 0"
            )

    def check_separate_rewards(self, advantage: str) -> None:
        """Raises UserError if the reward has a penalty, which an advantage of separate rewards leaves out."""
        if self.reward_coef:
            raise UserError(
                f"advantage {advantage!r} takes the reward in its parts, and the KL penalty "
                "(algorithm.kl.reward_coef) is none of them; set it to 0 and use algorithm.kl.loss_coef"
            )


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """What is learned from, and how.

    Attributes:
      dataflow: a name of `dataflows.lookup.DATAFLOWS`, or "package.module:function" or
        "path/to/file.py:function" of one's own.
      advantage, advantage_options: a name of `algos.advantages.ADVANTAGES` or such a path, and its keywords.
      whiten: scale the advantages to mean 0 and deviation 1 over a step, as PPO does.
      loss, loss_options: a name of `algos.policy_losses.POLICY_LOSSES` or a path, and its keywords.
      aggregation, aggregation_options: a name of `algos.aggregation.AGGREGATIONS`, and its keywords.
      entropy_coef: of the entropy bonus.
      kl: the KL penalty for leaving the reference policy.
      correction: for sampling with other probabilities than the trainer's.
      old_logprobs: where the log-probabilities of the start of a step come from. "forward" takes a forward
        pass of the trainer's before the updates. "update" takes those of the first minibatch from the forward
        pass of its own update, whose weights they are: the same numbers, the ratio 1 by definition,
        and with one update a step no other pass at all; it is refused where something looks at them before.
        "auto" is "update" where nothing does, in dataflows of this package.
      updates_per_step: minibatches of a step, one optimiser update each.
      epochs: times that a step goes through its minibatches; more than one goes on from the first one's
        weights with its old log-probabilities, as PPO does.
      one_step_off: sample the next step's answers while this step learns; the role "rollout" then has a pool
        of its own.
    """

    dataflow: Annotated[str, PATH] = "dapo"
    advantage: Annotated[str, PATH] = "grpo"
    advantage_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    whiten: bool = False
    loss: Annotated[str, PATH] = "clipped"
    loss_options: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
    )
    aggregation: Annotated[str, NAME] = "token-mean"
    aggregation_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    entropy_coef: Annotated[float, coefficient()] = 0.0
    kl: KlConfig = dataclasses.field(default_factory=KlConfig)
    correction: CorrectionConfig = dataclasses.field(default_factory=CorrectionConfig)
    old_logprobs: Literal["auto", "forward", "update"] = "auto"
    updates_per_step: Annotated[int, count(1)] = 4
    epochs: Annotated[int, between(1, 1000)] = 1
    one_step_off: bool = False

    def __post_init__(self):
        check_fields(self)
        correction = self.correction
        # In bypass the ratio of a loss that has one is to the sampler's policy.
        corrects = correction.weighs or (correction.bypass and self.loss not in RATIO_FREE)
        if self.one_step_off and not corrects:
            raise ValueError(
                "one_step_off samples from weights of one step ago, and nothing corrects for it; set "
                'correction.weights to "token" or "sequence", or correction.bypass to True for a loss with a '
                "ratio"
            )

    def check_one_step_off(self, pool: str, *, with_actor: bool, num_processes: int) -> None:
        """Raises UserError if sampling beside learning has no devices or threads of its own.

        Args:
          pool: name of the pool of the role "rollout".
          with_actor: the actor is in it too.
          num_processes: of the run.
        """
        if with_actor:
            raise UserError(
                "algorithm.one_step_off samples while the actor learns, but both live in pool "
                f"{pool}; give the role rollout a pool of its own in `placement`"
            )
        if num_processes > 1:
            raise UserError(
                "algorithm.one_step_off runs two threads of programs, which several processes could not "
                "keep in one order; use hosts.num_processes=1"
            )


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The critic of dataflows that have one, and the critic of costs.

    Attributes:
      weights: Hugging Face directory to start from; "" takes the actor's first weights, with a head of zeros.
      lr: its peak learning rate; all else of its optimiser is as in `optim`.
      clip: how far a value may move in a step, in units of reward; inf for none.
      warmup_steps: steps in which the critic learns alone.
      epochs: times that a step goes through its minibatches.
    """

    weights: Annotated[str, PATH] = ""
    lr: Annotated[float, coefficient()] = 1e-5
    clip: Annotated[float, positive_coefficient(or_inf=True)] = 0.5
    warmup_steps: Annotated[int, steps(0)] = 0
    epochs: Annotated[int, between(1, 1000)] = 1

    def __post_init__(self):
        check_fields(self)

    def optim(self, optim: OptimConfig) -> OptimConfig:
        """The actor's optimiser with the critic's learning rate."""
        return dataclasses.replace(optim, lr=self.lr)


@dataclasses.dataclass(frozen=True)
class CostConfig:
    """What Safe RLHF keeps below a limit.

    Attributes:
      model: Hugging Face directory of a cost model (...ForSequenceClassification).
      limit: mean cost that is still acceptable.
      multiplier: the Lagrange multiplier to begin with.
      multiplier_lr: learning rate of its logarithm.
      pretrain_coef: weight of the loss on written solutions (`data.train.solution_field`) in the actor's
        updates; 0 leaves it out.
    """

    model: Annotated[str, PATH] = ""
    limit: Annotated[float, score()] = 0.0
    multiplier: Annotated[float, positive_coefficient()] = 1.0
    multiplier_lr: Annotated[float, between(0, 10)] = 0.1
    pretrain_coef: Annotated[float, coefficient()] = 0.0

    def __post_init__(self):
        check_fields(self)
