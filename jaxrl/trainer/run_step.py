"""Builds the sampler of a run and the `Step` that its dataflow gets (`dataflows.step`), from its roles."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.config.config_tree import format_config
from jaxrl.config.schema import Config
from jaxrl.config.shapes import row_limits, step_shape
from jaxrl.data.curriculum import CurriculumStream
from jaxrl.data.demonstrations import solutions_of
from jaxrl.data.stream import PromptStream
from jaxrl.dataflows.dynamic_sampling import DynamicSampling
from jaxrl.dataflows.experience import Experience
from jaxrl.dataflows.free_running import FreeRunning
from jaxrl.dataflows.learning import ActorPhase, Pretraining
from jaxrl.dataflows.preparation import (
    Advantages,
    EntropyCoefficient,
    KlCoefficient,
    Packer,
    RewardAverage,
)
from jaxrl.dataflows.rewarding import Multiplier, Rewards
from jaxrl.dataflows.samplers import (
    CountedSampling,
    CurriculumSampling,
    Generation,
    GreedySampling,
    PartialSampling,
    Sampler,
    Sampling,
)
from jaxrl.dataflows.schedule import RequestOrder, SamplingSchedule, VersionRow
from jaxrl.dataflows.step import Step
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.roles.advantage_estimator import AVERAGE, SUM_PI_SQUARED
from jaxrl.roles.losses import likelihood
from jaxrl.roles.policy import Actor
from jaxrl.tracking.run_folder import RunFolder
from jaxrl.tracking.schedule_file import ScheduleFile, read_schedule
from jaxrl.trainer.context import RunContext, supervised_stream
from jaxrl.trainer.role_table import ROLES, PhaseParts
from jaxrl.trainer.roles import Roles


class RunSampling:
    """The sampler of a run's steps, with the prompts that it draws.

        PromptStream --> Sampling, or partial, or free running --> CountedSampling --> DynamicSampling

    With `data.sampler` a CurriculumStream and CurriculumSampling take the places of two of them.

    Attributes:
      generation: the actor in its generation layout.
      sampler: sampler of the groups to learn from.
      free: the sampler inside `sampler` if it goes on while a step learns, else None.
    """

    def __init__(
        self,
        run: RunContext,
        actor: Actor,
        timer: StepTimer,
        rewards: Rewards,
        prompts: PromptStream | CurriculumStream,
        recorded: dict[int, VersionRow] | None,
    ):
        """Builds the sampler.

        Args:
          run, actor, timer, rewards: the run, its actor, timer and rewards.
          prompts: the result of `training_prompts`.
          recorded: the schedule to repeat (`recorded_schedule`).
        """
        config, options, flow = run.config, run.config.rollout, run.resolved.dataflow
        per_batch, per_step = config.problems_per_batch, options.num_prompts
        per_step = -(-per_step // max(1, len(options.learning_roles)))
        self.generation = Generation(actor, run.sampling, timer)
        self._schedule_file = ScheduleFile(config.run_folder.rl.schedule)
        self.free: FreeRunning | None = None
        limits: Any = {"prompts_per_batch": per_batch, "max_staleness": options.max_staleness}
        groups: Sampler
        if run.resolved.runs_free:
            schedule = SamplingSchedule(self._schedule_file.write, recorded)
            groups = self.free = FreeRunning(
                self.generation, rewards, schedule, prompts_per_step=per_step, **limits
            )
        elif options.partial:
            groups = PartialSampling(self.generation, rewards, **limits)
        else:
            groups = sampling = Sampling(self.generation, rewards)
            if options.agent:
                agents: Any = actor.backend
                order = RequestOrder(self._schedule_file.write, recorded)
                agents.order = sampling.order = order
        # Both inside dynamic sampling, which drops groups and adds the counts of a step's batches up.
        self.sampler: Sampler
        if isinstance(prompts, CurriculumStream):
            self.sampler = CurriculumSampling(groups, prompts)
        else:
            self.sampler = CountedSampling(groups, prompts)
        if flow.dynamic_sampling:
            self.sampler = DynamicSampling(
                self.sampler,
                options.num_prompts,
                max_generation_batches=options.max_generation_batches,
                keeps=options.keep_groups,
                fills_up=options.on_shortage == "fill",
            )

    def close(self) -> None:
        """Closes the recorded schedule."""
        self._schedule_file.close()


def recorded_schedule(config: Config) -> dict[int, VersionRow] | None:
    """The schedule that the config names; None if the run goes by the clock.

    Raises:
      UserError: the schedule is missing, damaged, or of a run with other settings.
    """
    if not config.rollout.schedule:
        return None
    return read_schedule(RunFolder(pathlib.Path(config.rollout.schedule)), format_config(config))


@dataclasses.dataclass
class StepState:
    """State that steps change, besides the learners and the position in the data.

    Attributes:
      kl: coefficient of the KL penalty in the reward.
      multiplier: Lagrange multiplier of costs.
      entropy: coefficient of the entropy bonus; None for a constant one.
      pretraining: supervised examples of the auxiliary (ptx) loss; None without `cost.pretrain_coef`.
      average: moving average of rewards; None for advantages without it.
    """

    kl: KlCoefficient
    multiplier: Multiplier
    entropy: EntropyCoefficient | None
    pretraining: Pretraining | None
    average: RewardAverage | None = None

    @staticmethod
    def of(run: RunContext) -> StepState:
        """The state before the first step."""
        config, algorithm, cost = run.config, run.config.algorithm, run.config.cost
        kl, entropy, pretraining = algorithm.kl, None, None
        averages = AVERAGE in run.resolved.estimator.inputs
        if algorithm.entropy_target:
            entropy = EntropyCoefficient(algorithm.entropy_coef, target=algorithm.entropy_target)
        if cost.pretrain_coef:
            # An update learns from as many examples as prompts, so they divide into the updates too.
            updates, limits = algorithm.updates_per_step, row_limits(config)
            examples = updates * -(-config.rollout.num_prompts // updates)
            stream = supervised_stream(
                run,
                solutions_of(run.problems.train_records),
                examples_per_batch=examples,
                max_tokens=limits.longest,
            )
            shape = limits.shape(examples, minibatches=updates)
            pretraining = Pretraining(stream, shape, likelihood(coef=cost.pretrain_coef))
        return StepState(
            KlCoefficient(kl.reward_coef, target=kl.target, horizon=kl.horizon),
            Multiplier(
                cost.multiplier,
                cost.limit,
                cost.multiplier_lr,
                cost.multiplier_max,
                cost.multiplier_delay_steps,
            ),
            entropy,
            pretraining,
            RewardAverage(algorithm.baseline_decay) if averages else None,
        )

    def record(self) -> dict[str, Any]:
        """JSON-compatible state."""
        multiplier = (self.multiplier.value, self.multiplier.steps)
        record: dict[str, Any] = {"kl_coef": self.kl.value, "multiplier": multiplier}
        if self.entropy is not None:
            record["entropy"] = (self.entropy.value, self.entropy.entropy)
        if self.average is not None:
            record["average"] = self.average.value
        if self.pretraining is None:
            return record
        return record | {"pretraining": self.pretraining.stream.state()}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Continues from the result of `record`."""
        self.kl.value = record["kl_coef"]
        self.multiplier.value, self.multiplier.steps = record["multiplier"]
        if self.entropy is not None:
            self.entropy.value, self.entropy.entropy = record["entropy"]
        if self.average is not None:
            self.average.value = record["average"]
        if self.pretraining is not None:
            self.pretraining.stream.restore(record["pretraining"])


def build_step(
    run: RunContext,
    roles: Roles,
    timer: StepTimer,
    state: StepState,
    sampling: RunSampling,
    rewards: Rewards,
    look: Callable[[Experience], None],
) -> Step:
    """Builds the step of a run, whose phases are those of the roles that its dataflow declares.

    Args:
      run, roles, timer: the run, its roles, and the timer of its steps.
      state: state that the steps change.
      sampling, rewards: the sampler, and rewards of greedy responses.
      look: called with the experience of every step.
    """
    config, resolved = run.config, run.resolved
    parts = PhaseParts(config, roles.actor, timer)
    phases = {
        name: kind.phase(name, roles.others.get(name), parts)
        for name, kind in ROLES.items()
        if name in resolved.dataflow.roles
    }
    learners = [mesh for role, mesh in run.meshes.items() if role != "rollout"]
    pack = Packer(
        roles.actor,
        step_shape(config, learners),
        max_prompt_tokens=config.data.max_prompt_tokens,
        mask_truncated=config.reward.mask_truncated,
        fill_minibatches=config.train.fill_minibatches,
        share_prompts=config.train.share_prompts,
        equal_last=resolved.objective.needs_advantage,
        top_entropy=config.algorithm.top_entropy_quantile,
        epochs=config.algorithm.epochs,
    )
    balances = run.model.num_experts and config.train.load_balancing_coef
    actor = ActorPhase(
        roles.actor,
        resolved.objective,
        config.algorithm.correction,
        timer,
        epochs=config.algorithm.epochs,
        reference=roles.compared,
        shares_forward=resolved.shares_forward,
        squared_probabilities=SUM_PI_SQUARED in resolved.estimator.inputs,
        pretraining=state.pretraining,
        frozen_steps=config.critic.warmup_steps,
        # Without advantages no other term of the loss has a gradient.
        needs_signal=resolved.objective.needs_advantage
        and not (balances or state.pretraining is not None),
        entropy=state.entropy,
        sampling=run.sampling,
        look=look,
        meanwhile=(lambda results: None) if sampling.free is None else sampling.free.meanwhile,
    )
    advantages = Advantages(
        roles.actor,
        resolved.estimator,
        state.kl,
        timer,
        penalizes=config.algorithm.kl.reward_coef > 0,
        multiplier=state.multiplier,
        average=state.average,
    )
    return Step(
        sample=sampling.sampler.sample,
        greedy=GreedySampling(sampling.generation, rewards),
        pack=pack,
        actor=actor,
        advantages=advantages,
        multiplier=state.multiplier,
        phases={name: phase for name, phase in phases.items() if phase is not None},
    )
