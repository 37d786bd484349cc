"""Builds the `Step` that a dataflow gets (`dataflows.step`), from the roles of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.config.batch_shapes import row_limits, step_shape
from jaxrl.data.demonstrations import solutions_of
from jaxrl.dataflows.experience import Experience
from jaxrl.dataflows.learning import ActorPhase, Pretraining
from jaxrl.dataflows.preparation import Advantages, EntropyCoefficient, KlCoefficient, Packer
from jaxrl.dataflows.rewarding import MULTIPLIER_LR, Multiplier, Rewards
from jaxrl.dataflows.samplers import Generation, GreedySampling, Sampler
from jaxrl.dataflows.step import Step
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.roles.advantage_estimator import SUM_PI_SQUARED
from jaxrl.roles.losses import likelihood
from jaxrl.trainer.context import RunContext, supervised_stream
from jaxrl.trainer.role_table import ROLES, PhaseParts
from jaxrl.trainer.roles import Roles


class StepState:
    """State that steps change, besides the learners and the position in the data.

    Attributes:
      kl: coefficient of the KL penalty in the reward.
      multiplier: Lagrange multiplier of costs.
      entropy: coefficient of the entropy bonus; None for a constant one.
      pretraining: supervised examples of the auxiliary (ptx) loss; None without `cost.pretrain_coef`.
    """

    def __init__(self, run: RunContext):
        """Starts with the values of the config."""
        kl, cost = run.config.algorithm.kl, run.config.cost
        self.kl = KlCoefficient(kl.reward_coef, target=kl.target, horizon=kl.horizon)
        self.multiplier = Multiplier(cost.multiplier, limit=cost.limit, learning_rate=MULTIPLIER_LR)
        algorithm = run.config.algorithm
        self.entropy = (
            EntropyCoefficient(algorithm.entropy_coef, target=algorithm.entropy_target)
            if algorithm.entropy_target
            else None
        )
        self.pretraining = _pretraining(run) if cost.pretrain_coef else None

    def record(self) -> dict[str, Any]:
        """JSON-compatible state."""
        record: dict[str, Any] = {"kl_coef": self.kl.value, "multiplier": self.multiplier.value}
        if self.entropy is not None:
            record["entropy"] = (self.entropy.value, self.entropy.entropy)
        if self.pretraining is None:
            return record
        return record | {"pretraining": self.pretraining.stream.state()}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Continues from the result of `record`."""
        self.kl.value, self.multiplier.value = record["kl_coef"], record["multiplier"]
        if self.entropy is not None:
            self.entropy.value, self.entropy.entropy = record["entropy"]
        if self.pretraining is not None:
            self.pretraining.stream.restore(record["pretraining"])


class StepBuilder:
    """Builds the step of a run."""

    def __init__(self, run: RunContext, roles: Roles, state: StepState, timer: StepTimer):
        """Args: the run, its roles, the state that its steps change, and their timer."""
        self._run = run
        self._roles = roles
        self._state = state
        self._timer = timer

    def step(
        self,
        sampler: Sampler,
        generation: Generation,
        rewards: Rewards,
        look: Callable[[Experience], None],
        meanwhile: Callable[[Any], None],
    ) -> Step:
        """Builds the step.

        Args:
          sampler: sampler of the groups to learn from.
          generation, rewards: generation and rewards of greedy responses.
          look: called with the experience of every step.
          meanwhile: called with arrays on the devices before the host waits for them.
        """
        return Step(
            sample=sampler.sample,
            greedy=GreedySampling(generation, rewards),
            pack=self._packer(),
            actor=self._actor_phase(look, meanwhile),
            advantages=self._advantages(),
            multiplier=self._state.multiplier,
            phases=self._phases(),
        )

    def _phases(self) -> dict[str, Any]:
        """The phases of the roles that the dataflow declares."""
        parts = PhaseParts(
            self._run.config, self._roles.actor, self._timer, self._run.tokenizer.encode
        )
        declared = self._run.algorithm.dataflow.roles
        return {
            name: row.phase(name, self._roles.others.get(name), parts)
            for name, row in ROLES.items()
            if name in declared and row.phase is not None
        }

    def _packer(self) -> Packer:
        config = self._run.config
        return Packer(
            self._roles.actor,
            step_shape(
                config, [mesh for role, mesh in self._run.meshes.items() if role != "rollout"]
            ),
            max_prompt_tokens=config.data.max_prompt_tokens,
            mask_truncated=config.reward.mask_truncated,
            fill_minibatches=config.train.fill_minibatches,
            share_prompts=config.train.share_prompts,
            equal_last=self._run.algorithm.objective.needs_advantage,
            top_entropy=config.algorithm.top_entropy_quantile,
            epochs=config.algorithm.epochs,
        )

    def _actor_phase(
        self, look: Callable[[Experience], None], meanwhile: Callable[[Any], None]
    ) -> ActorPhase:
        config, algorithm = self._run.config, self._run.algorithm
        return ActorPhase(
            self._roles.actor,
            algorithm.objective,
            config.algorithm.correction,
            self._timer,
            epochs=config.algorithm.epochs,
            reference=self._roles.compared,
            shares_forward=algorithm.shares_forward,
            squared_probabilities=SUM_PI_SQUARED in algorithm.estimator.inputs,
            pretraining=self._state.pretraining,
            frozen_steps=config.critic.warmup_steps,
            needs_signal=self._needs_signal(),
            entropy=self._state.entropy,
            sampling=self._run.sampling,
            look=look,
            meanwhile=meanwhile,
        )

    def _needs_signal(self) -> bool:
        """Whether a step without advantages has no gradient at all."""
        config = self._run.config
        balances = self._run.model.num_experts and config.train.load_balancing_coef
        pretrains = self._state.pretraining is not None
        return self._run.algorithm.objective.needs_advantage and not (balances or pretrains)

    def _advantages(self) -> Advantages:
        return Advantages(
            self._roles.actor,
            self._run.algorithm.estimator,
            self._state.kl,
            self._timer,
            penalizes=self._run.config.algorithm.kl.reward_coef > 0,
            multiplier=self._state.multiplier,
        )


def _pretraining(run: RunContext) -> Pretraining:
    config = run.config
    updates = config.algorithm.updates_per_step
    examples = updates * -(-config.rollout.num_prompts // updates)
    limits = row_limits(config)
    stream = supervised_stream(
        run,
        solutions_of(run.problems.train_records),
        examples_per_batch=examples,
        max_tokens=limits.longest,
    )
    shape = limits.shape(examples, minibatches=updates)
    return Pretraining(stream, shape, likelihood(coef=config.cost.pretrain_coef))
