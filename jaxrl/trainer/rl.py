"""Reinforcement learning: the config's dataflow, its step put together, as a stage of training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.config.schema import Config
from jaxrl.data.demonstrations import solutions_of
from jaxrl.data.pass_rates import Curriculum
from jaxrl.data.stream import PromptStream
from jaxrl.dataflows.clock import Clock
from jaxrl.dataflows.costs import CostPhase, Multiplier
from jaxrl.dataflows.curriculum_sampling import CurriculumSampling
from jaxrl.dataflows.dynamic_sampling import (
    DynamicSampling,
    GroupFilter,
    MixedGroups,
    NotEnoughGroups,
    SpreadGroups,
)
from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.learning import ActorPhase, CriticPhase, Pretraining
from jaxrl.dataflows.lookup import find_dataflow
from jaxrl.dataflows.preparation import Advantages, KlCoefficient, Packer, ReferencePhase
from jaxrl.dataflows.rewarding import (
    FunctionReward,
    JudgeReward,
    ModelReward,
    OverlongPunishment,
    Rewards,
    RewardTerm,
    SequenceScores,
)
from jaxrl.dataflows.samplers import (
    Generation,
    GreedySampling,
    OneStepAhead,
    PartialSampling,
    Sampler,
    Sampling,
)
from jaxrl.dataflows.step import Step
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.models.decoder import Params
from jaxrl.rewards.graders import Graders
from jaxrl.rewards.judge import JudgeTemplate, score_parser
from jaxrl.rewards.user import UserRewards
from jaxrl.roles.advantage_estimator import SUM_PI_SQUARED
from jaxrl.roles.learner import Learner
from jaxrl.roles.losses import clipped_values, likelihood
from jaxrl.roles.reward_model import RewardModel
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.trainer.context import (
    RunContext,
    row_limits,
    supervised_stream,
    training_sampling,
)
from jaxrl.trainer.cross_checks import estimator_of, policy_objective, shares_forward, title_of
from jaxrl.trainer.evaluation import Evaluation
from jaxrl.trainer.interrupt import StopSignal
from jaxrl.trainer.kept_rollouts import KeptRollouts
from jaxrl.trainer.loop import TrainingStage, open_loop
from jaxrl.trainer.roles import Roles, build_roles
from jaxrl.trainer.run_graders import graders_of
from jaxrl.trainer.supervised import starting_params
from jaxrl.trainer.weights import keep_reference, start_from


def reinforce(run: RunContext, stop: StopSignal) -> None:
    """Trains the roles of a run to the last step of its config.

    Raises:
      StopRequested: a signal arrived; the last finished step is saved.
      UserError: too few prompts are answered both right and wrong, or a metric is not finite.
    """
    config = run.config
    roles = build_roles(run)
    with open_loop(
        run,
        title_of(config),
        config.run_folder.rl,
        num_steps=config.run.num_steps,
        save_every=config.run.save_every,
        evaluate_every=config.evaluation.every if len(run.evaluation_prompts) else 0,
        stop=stop,
    ) as loop:
        loop.run(RlStage(run, roles, loop, functools.partial(starting_params, run, stop)))


class RlStage(TrainingStage):
    """Reinforcement learning by the config's dataflow."""

    def __init__(
        self,
        run: RunContext,
        roles: Roles,
        clock: Clock,
        starting_params: Callable[[], Params],
    ):
        """Builds nothing yet.

        Args:
          run: the run.
          roles: without weights, but for models that do not learn.
          clock: the loop around.
          starting_params: weights of the policy to start from, in the actor's training layout; asked for only
            where they are needed.
        """
        self._run = run
        self._roles = roles
        self._clock = clock
        self._starting_params = starting_params
        self._dataflow = find_dataflow(run.config.algorithm.dataflow)
        self._user_rewards: UserRewards | None = None
        self._graders: Graders | None = None
        self._rollouts: KeptRollouts | None = None

    @property
    def learners(self) -> Mapping[str, Learner]:
        """Roles whose state changes."""
        return self._roles.learners

    def begin(self, record: Mapping[str, Any] | None) -> None:
        """First weights, or what a checkpoint left, and all that a step needs."""
        run, roles, config = self._run, self._roles, self._run.config
        if record is None:
            start_from(roles, self._starting_params(), run)
        elif roles.reference is not None:
            keep_reference(roles, self._starting_params())
        self._prompts = _prompt_stream(run, groups_wanted=self._dataflow.dynamic_sampling)
        self._generation = Generation(roles.actor, training_sampling(run), self._clock)
        self._graders = graders = graders_of(config, run.problems.settings)
        self._rewards = self._build_rewards(graders)
        self._rollouts = KeptRollouts(run, self._clock, terms=self._rewards.term_names)
        self._kl = KlCoefficient(
            config.algorithm.kl.reward_coef,
            target=config.algorithm.kl.target,
            horizon=config.algorithm.kl.horizon,
        )
        self._multiplier = Multiplier(
            config.cost.multiplier,
            limit=config.cost.limit,
            learning_rate=config.cost.multiplier_lr,
        )
        self._pretraining = _pretraining(run) if config.cost.pretrain_coef else None
        self._sampler = self._build_sampler()
        self._step = self._build_step()
        self._evaluation = Evaluation(run, graders)
        if record is not None:
            self._restore(record)

    def step(self) -> Metrics:
        """One step of the dataflow."""
        assert self._rollouts is not None, "a stage begins before its first step"
        self._rollouts.begin_step()
        try:
            return self._dataflow(self._step, self._prompts)
        except NotEnoughGroups as error:
            path = self._rollouts.look_at_failed(error.sampled)
            raise UserError(f"{error}. What was sampled is in {path}") from error

    def evaluate(self, when: str) -> Metrics:
        """Accuracy on the evaluation prompts."""
        self._generation.load_weights()
        with self._clock.phase("testing", shown="evaluate"):
            return dict(self._evaluation(self._roles.actor, when))

    def record(self) -> dict[str, Any]:
        """JSON-able: everything besides the learners' states that a resumed run needs."""
        record: dict[str, Any] = {"kl_coef": self._kl.value, "multiplier": self._multiplier.value}
        if self._pretraining is not None:
            record["pretraining"] = self._pretraining.stream.state()
        return record | {"sampling": self._sampler.record(self._prompts)}

    def _restore(self, record: Mapping[str, Any]) -> None:
        self._kl.value, self._multiplier.value = record["kl_coef"], record["multiplier"]
        if self._pretraining is not None:
            self._pretraining.stream.restore(record["pretraining"])
        self._sampler.restore(record["sampling"], self._prompts)

    def close(self) -> None:
        """Waits for what is being sampled, and ends what samples and what scores."""
        if self._rollouts is not None:
            self._rollouts.close()
        if self._user_rewards is not None:
            self._user_rewards.close()
        if self._graders is not None:
            self._graders.close()
        self._roles.actor.close()

    def _build_rewards(self, graders: Graders) -> Rewards:
        config, clock = self._run.config.reward, self._clock
        paths = {name: function["path"] for name, function in config.functions.items()}
        # Asked on the first host alone; it is a process of its own, which `close` ends.
        functions = UserRewards(
            [*paths.values()] if hosts.is_first() else [],
            timeout_s=config.functions_timeout_s,
            interrupted=lambda: clock.stop_pending,
        )
        self._user_rewards = functions
        terms: list[RewardTerm] = [
            FunctionReward(name, config.functions[name]["weight"], path, functions, clock)
            for name, path in paths.items()
        ]
        return Rewards(
            graders,
            OverlongPunishment(
                self._run.config.rollout.max_response_tokens,
                config.overlong_buffer_tokens,
                config.overlong_penalty,
            ),
            clock,
            grader_weight=config.grader_weight,
            terms=terms + _model_rewards(self._run, self._roles),
        )

    def _build_step(self) -> Step:
        config, roles, clock = self._run.config, self._roles, self._clock
        algorithm = config.algorithm
        actor = roles.actor
        estimator = estimator_of(config)
        needs_ref_logprobs = algorithm.kl.needs_ref_logprobs
        values = clipped_values(clip=config.critic.clip)
        return Step(
            sample=self._sampler.sample,
            greedy=GreedySampling(self._generation, self._rewards),
            pack=Packer(
                actor,
                row_limits(config).shape(
                    config.rollout.num_prompts * config.rollout.num_samples,
                    minibatches=algorithm.updates_per_step,
                ),
                max_prompt_tokens=config.data.max_prompt_tokens,
                mask_truncated=config.reward.mask_truncated,
                fill_minibatches=config.train.fill_minibatches,
                share_prompts=config.train.shares_prompts,
                epochs=algorithm.epochs,
            ),
            actor=ActorPhase(
                actor,
                policy_objective(config),
                algorithm.correction,
                clock,
                epochs=algorithm.epochs,
                reference=roles.reference,
                shares_forward=shares_forward(config),
                squared_probabilities=SUM_PI_SQUARED in estimator.inputs,
                pretraining=self._pretraining,
                frozen_steps=config.critic.warmup_steps,
                look=self._rollouts and self._rollouts.look,
            ),
            advantages=Advantages(
                actor,
                estimator,
                self._kl,
                clock,
                penalizes=algorithm.kl.reward_coef > 0,
                multiplier=self._multiplier,
            ),
            critic_phase=roles.critic
            and CriticPhase("critic", roles.critic, values, clock, epochs=config.critic.epochs),
            reference_phase=ReferencePhase(actor, roles.reference, clock, asked=needs_ref_logprobs),
            cost_phase=roles.cost and CostPhase(_sequence_scores(self._run, roles.cost), clock),
            cost_critic_phase=roles.cost_critic
            and CriticPhase(
                "cost_critic", roles.cost_critic, values, clock, epochs=config.critic.epochs
            ),
            multiplier_phase=self._multiplier,
        )

    def _build_sampler(self) -> Sampler:
        options, generation, rewards = self._run.config.rollout, self._generation, self._rewards
        if options.partial:
            sampler: Sampler = PartialSampling(
                generation, rewards, prompts_per_batch=options.generation_prompts
            )
        elif self._run.config.algorithm.one_step_off:
            sampler = OneStepAhead(generation, rewards)
        else:
            sampler = Sampling(generation, rewards)
        sampler = CurriculumSampling(sampler, self._prompts)
        if self._dataflow.dynamic_sampling:
            sampler = DynamicSampling(
                sampler,
                options.num_prompts,
                max_generation_batches=options.max_generation_batches,
                keeps=_group_filter(options),
                fills_up=options.if_too_few == "fill",
            )
        return sampler


def _group_filter(options: RolloutConfig) -> GroupFilter:
    return (
        MixedGroups() if options.keep_groups == "correctness" else SpreadGroups(options.min_spread)
    )


def _model_rewards(run: RunContext, roles: Roles) -> list[RewardTerm]:
    """Rewards by models: one that scores, one that is asked."""
    config = run.config.reward
    terms: list[RewardTerm] = []
    if roles.reward is not None:
        terms.append(ModelReward("model", config.model_weight, _sequence_scores(run, roles.reward)))
    if roles.judge is not None:
        options = config.judge
        terms.append(
            JudgeReward(
                "judge",
                options.weight,
                roles.judge,
                JudgeTemplate(
                    options.template, options.max_response_chars, roles.judge.special_texts
                ),
                score_parser(low=options.low, high=options.high),
                options.failed_score,
            )
        )
    return terms


def _sequence_scores(run: RunContext, model: RewardModel) -> SequenceScores:
    """Scores of sampled sequences by a reward or cost model."""
    rollout = run.config.rollout
    most = rollout.generation_prompts * rollout.num_samples if rollout.partial else 0
    return SequenceScores(model, row_limits(run.config), most_sequences=most)


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


def _prompt_stream(run: RunContext, *, groups_wanted: bool) -> PromptStream:
    config, rollout = run.config, run.config.rollout
    per_batch = rollout.generation_prompts if groups_wanted else rollout.num_prompts
    return PromptStream(
        run.train_prompts,
        weights=[source.settings.weight for source in run.problems.train],
        # Partial sampling makes batches of what is missing.
        prompts_per_batch=1 if rollout.partial else per_batch,
        seed=config.seed,
        curriculum=_curriculum(config),
    )


def _curriculum(config: Config) -> Curriculum | None:
    options = config.data.curriculum
    if options.by == "off":
        return None
    return Curriculum(config.rollout.num_samples, options.least_chance, options.decay)
