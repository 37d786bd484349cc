"""What happens in a step of reinforcement learning: each event is a method that a recipe is handed.

A recipe names the events it wants as its arguments; see `recipes.ppo` for what each is for.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algos.controllers import adaptive, constrained_advantage, raised_multiplier
from jaxrl.algos.segments import to_sequences
from jaxrl.algos.shaping import soft_overlong_penalty
from jaxrl.data.demonstrations import DemonstrationStream, solutions_of
from jaxrl.data.packing import PackedShape
from jaxrl.data.stream import PromptStream
from jaxrl.mesh import hosts
from jaxrl.models.decoder import Params
from jaxrl.recipes.dynamic_sampling import GroupBuffer, keep_mixed_groups
from jaxrl.rewards.judge import JudgeTemplate, judge_scores, score_parser
from jaxrl.rewards.score import grader, score_completions
from jaxrl.rewards.terms import Term, grader_term, weighted_sum
from jaxrl.rewards.user import UserRewards
from jaxrl.rewards.worker import Interrupted
from jaxrl.roles.advantages import SUM_PI_SQUARED, VocabularyBatch
from jaxrl.roles.batches import pack_completions, pack_examples
from jaxrl.roles.correction import corrected
from jaxrl.roles.critic import Critic
from jaxrl.roles.frozen import Judge
from jaxrl.roles.generative_judge import GenerativeJudge
from jaxrl.roles.learner import Learner, Objective
from jaxrl.roles.losses import clipped_values, likelihood
from jaxrl.trainer.evaluation import evaluator
from jaxrl.trainer.generation import Generation
from jaxrl.trainer.interrupt import StopSignal
from jaxrl.trainer.recipe import estimator_of, policy_objective
from jaxrl.trainer.setup import Parts, longest_sequence, packed_shape, supervised_stream
from jaxrl.trainer.stage import Stage
from jaxrl.trainer.step_metrics import (
    advantage_metrics,
    batch_metrics,
    prefixed,
    value_metrics,
)
from jaxrl.trainer.team import Team
from jaxrl.types import Completions, Prompts, Scored, TrainBatch, ValueBatch

Metrics = dict[str, Any]


class Events:
    """The events of a run's recipe, timed, on the roles of its team. Used as a context manager."""

    def __init__(
        self, parts: Parts, stage: Stage, team: Team, stream: PromptStream, stop: StopSignal
    ):
        """Checks the algorithm's settings; raises UserError where they contradict each other."""
        config = parts.config
        self._config = config
        self._parts = parts
        self._stage = stage
        self._team = team
        self._stream = stream
        self._grade = grader(config.reward.grader)
        self._stop = stop
        self._evaluator = evaluator(parts)
        self._estimator = estimator_of(config)
        self._policy_objective = policy_objective(config)
        self._value_objective = clipped_values(clip=config.critic.clip)
        self._kl_coef = config.algorithm.kl.reward_coef
        self._multiplier = config.cost.multiplier
        self._pretraining = _Pretraining(parts) if config.cost.pretrain_coef else None
        self._shape = packed_shape(
            config,
            sequences=config.rollout.num_prompts * config.rollout.num_samples,
            updates=config.algorithm.updates_per_step,
        )
        # Metrics of events that return something else.
        self._noted: Metrics = {}
        self._generation = Generation(parts, team.actor)
        # Where the data stood after the prompts of this step, and of the next if they are being sampled.
        self._stream_states: collections.deque[Any] = collections.deque(maxlen=2)
        self.buffer = GroupBuffer(
            config.rollout.num_prompts,
            max_generation_batches=config.rollout.max_generation_batches,
        )
        self.keep = keep_mixed_groups
        phase = stage.phase
        self.load_rollout = phase("update_weights", team.actor.load_rollout)
        self.generate = phase("gen", self._generate, shown="generate", may_stop=True)
        self.finish_generating = phase("gen", self._finish_generating, may_stop=True)
        self.generate_greedily = phase("gen_max", self._generate_greedily, shown="generate")
        self.score = phase("reward", self._score)
        self.cost = phase("cost", self._cost)
        self.with_old_logprobs = phase("old_log_prob", self._with_old_logprobs)
        self.with_ref_logprobs = phase("ref", self._with_ref_logprobs)
        self.values = phase("values", self._values)
        self.cost_values = phase("values", self._cost_values)
        self.with_advantages = phase("adv", self._with_advantages)
        self.with_critic_advantages = phase("adv", self._with_critic_advantages)
        self.with_baseline_advantages = phase("adv", self._with_baseline_advantages)
        self.with_cost_advantages = phase("adv", self._with_cost_advantages)
        self.update_actor = phase("update_actor", self._update_actor, shown="update")
        self.update_critic = phase("update_critic", self._update_critic, shown="update")
        self.update_cost_critic = phase("update_critic", self._update_cost_critic, shown="update")
        self.evaluate = phase("testing", self._evaluate, shown="evaluate")

        # Last, since it starts a process, which is ended when this is left.
        self._user_rewards: UserRewards | None = None
        hosts.on_first(self._start_user_rewards)

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *exception) -> None:
        if self._user_rewards is not None:
            self._user_rewards.close()
        self._generation.close()

    # What outlives a step

    def record(self) -> dict[str, Any]:
        """JSON-able: everything besides the learners' states that a resumed run needs."""
        record = {"kl_coef": self._kl_coef, "multiplier": self._multiplier}
        if self._pretraining is not None:
            record["pretraining"] = self._pretraining.stream.state()
        record["generation"] = self._generation.record()
        ahead = len(self._stream_states) == 2
        return record | {"stream": self._stream_states[0] if ahead else self._stream.state()}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Goes on from a record."""
        self._kl_coef, self._multiplier = record["kl_coef"], record["multiplier"]
        if self._pretraining is not None:
            self._pretraining.stream.restore(record["pretraining"])
        self._generation.restore(record["generation"])

    # Generation

    def start_generating(self, prompts: Prompts) -> concurrent.futures.Future[Completions]:
        """Samples from the weights as they are now, beside whatever comes next."""
        self._stream_states.append(self._stream.state())
        self.load_rollout()
        return self._generation.start(prompts, step=self._stage.step)

    def _finish_generating(self, started: concurrent.futures.Future[Completions]) -> Completions:
        return self._generation.finish(started)

    def _generate(self, prompts: Prompts) -> Completions:
        step = self._stage.step
        hosts.check_same(f"the prompts of step {step + 1}", [*prompts.tokens, *prompts.answers])
        self._load_if_stale()
        if not self._config.rollout.partial:
            return self._generation.sample(prompts, step=step)
        completions, counts = self._generation.sample_until(prompts, self._enough(), step=step)
        for name, count in counts.items():
            self._noted[name] = self._noted.get(name, 0) + count
        return completions

    def _enough(self) -> Callable[[Completions], bool]:
        """Says of each group that is finished whether the buffer will be full with it."""
        missing = self.buffer.missing

        def count(group: Completions) -> int:
            return len(self.keep(self._graded(group)).completions.prompts)

        def enough(group: Completions) -> bool:
            nonlocal missing
            # A grader that runs into its time limit on one host alone would part them here.
            missing -= hosts.on_first(lambda: count(group))
            return missing <= 0

        return enough

    def batches(self, stream: PromptStream) -> Iterable[Prompts]:
        """The prompts of each generation batch."""
        return self._generation.batches(stream) if self._config.rollout.partial else stream

    def _generate_greedily(self, prompts: Prompts) -> Completions:
        self._load_if_stale()
        return self._generation.sample(
            prompts, step=self._stage.step, num_samples=1, temperature=0.0
        )

    def _load_if_stale(self) -> None:
        if self._team.actor.rollout_params is None:
            self.load_rollout()

    # Rewards

    def _score(self, completions: Completions) -> Scored:
        scored = self._graded(completions)
        terms = [grader_term(scored, weight=self._config.reward.grader_weight)]
        for name, function in self._config.reward.functions.items():
            score_B = self._user_scores(function["path"], completions)
            terms.append(Term(name, function["weight"], score_B))
        if self._team.reward is not None:
            model_B = self._judged(self._team.reward, completions)
            terms.append(Term("model", self._config.reward.model_weight, model_B))
        if self._team.judge is not None:
            terms.append(self._asked(self._team.judge, completions))
        scored, metrics = weighted_sum(scored, terms)
        self._noted |= metrics
        # A grader that runs into its time limit on one host alone would part them here.
        hosts.check_same(
            f"the rewards of step {self._stage.step + 1}",
            [scored.correct_B, scored.reward_B, *completions.tokens],
        )
        return scored

    def _start_user_rewards(self) -> None:
        options = self._config.reward
        self._user_rewards = UserRewards(
            [function["path"] for function in options.functions.values()],
            timeout_s=options.functions_timeout_s,
            interrupted=lambda: self._stop.pending,
        )

    def _user_scores(self, path: str, completions: Completions) -> np.ndarray:
        """A user's function, asked on the first host; a signal that comes meanwhile ends the step."""

        def ask() -> list[float] | None:
            assert self._user_rewards is not None, "the first host has them"
            try:
                return self._user_rewards.scores(path, completions).tolist()
            except Interrupted:
                return None

        scores = hosts.on_first(ask)
        if scores is None:
            self._stop.check()
        assert scores is not None, "only a signal interrupts, and then the check has raised"
        return np.array(scores, np.float32)

    def _asked(self, judge: GenerativeJudge, completions: Completions) -> Term:
        options = self._config.reward.judge
        score_B, metrics = judge_scores(
            completions,
            template=JudgeTemplate(
                options.template, options.max_response_chars, judge.special_texts
            ),
            sample=judge.answer,
            parse=score_parser(low=options.low, high=options.high),
            failed_score=options.failed_score,
        )
        self._noted |= metrics
        return Term("judge", options.weight, score_B)

    def _graded(self, completions: Completions) -> Scored:
        return score_completions(completions, grade=self._grade, overlong=self._overlong)

    def _overlong(self, lengths_B: np.ndarray) -> np.ndarray:
        reward = self._config.reward
        if not reward.overlong_buffer_tokens:
            return np.zeros(len(lengths_B), np.float32)
        penalty_B = soft_overlong_penalty(
            jnp.asarray(lengths_B),
            max_response_tokens=self._config.rollout.max_response_tokens,
            buffer_tokens=reward.overlong_buffer_tokens,
            penalty=reward.overlong_penalty,
        )
        return np.asarray(penalty_B)

    def _cost(self, scored: Scored) -> np.ndarray:
        assert self._team.cost is not None
        cost_B = self._judged(self._team.cost, scored.completions)
        self._noted |= {"cost/mean": cost_B.mean(), "cost/max": cost_B.max()}
        return cost_B

    def _judged(self, judge: Judge, completions: Completions) -> np.ndarray:
        """A judge's score of each completion, float32 [B]."""
        rollout = self._config.rollout
        # The number of groups that a partial rollout finishes differs; one shape holds them all.
        most = rollout.generation_prompts * rollout.num_samples if rollout.partial else 0
        sequences = max(most, len(completions))
        shape = packed_shape(self._config, sequences=sequences, updates=1)
        batch = judge.place(pack_completions(completions, shape))
        score_B = hosts.fetch(_by_sequence(judge.scores_of(batch), batch, sequences))
        return score_B[: len(completions)]

    # Preparation

    def pack(self, scored: Scored) -> TrainBatch:
        """The step's sequences, where the actor wants them."""
        completions = scored.completions
        batch = pack_completions(completions, self._shape)
        if self._config.reward.mask_truncated:
            kept_B = (~completions.truncated_B).astype(np.float32)
            batch = batch.replace(loss_mask=batch.loss_mask * kept_B[batch.sequence])
        return self._team.actor.place(batch)

    def _with_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        correction = self._config.algorithm.correction
        if correction.bypass:
            # Nothing is known of a gap before the update; what is done about it is done inside the loss.
            return batch.replace(old_logprob=batch.rollout_logprob)
        if SUM_PI_SQUARED in self._estimator.inputs:
            logprob, sum_pi_squared = self._team.actor.squared_probabilities(batch)
            batch = batch.replace(old_logprob=logprob)
            batch = batch.grown(VocabularyBatch, sum_pi_squared=sum_pi_squared)
        else:
            batch = batch.replace(old_logprob=self._team.actor.logprobs(batch))
        batch, metrics = corrected(correction, batch)
        self._noted |= metrics
        return self._when_done(batch)

    def _with_ref_logprobs(self, batch: TrainBatch) -> TrainBatch:
        if not self._config.algorithm.kl.needs_ref_logprobs:
            return batch
        team = self._team
        if team.reference is None:
            ref_logprob = team.actor.reference_logprobs(batch)
        else:
            ref_logprob = team.actor.place(team.reference.logprobs(batch))
        return self._when_done(batch.replace(ref_logprob=ref_logprob))

    def _values(self, batch: TrainBatch) -> jax.Array:
        assert self._team.critic is not None
        return self._team.critic.values(batch)

    def _cost_values(self, batch: TrainBatch) -> jax.Array:
        assert self._team.cost_critic is not None
        return self._team.cost_critic.values(batch)

    # Advantages

    def _with_advantages(self, scored: Scored, batch: TrainBatch) -> TrainBatch:
        advantage, _ = self._estimate(
            scored.reward_B, scored.completions, batch, **self._parts_of_reward(scored)
        )
        return self._when_done(batch.replace(advantage=advantage))

    def _parts_of_reward(self, scored: Scored) -> dict[str, np.ndarray]:
        """The terms of the score, and what was added for length as one more, where they are wanted."""
        if "score_BK" not in self._estimator.inputs:
            return {}
        return {
            "score_BK": np.concatenate([scored.term_BK, scored.shaping_B[:, None]], axis=1),
            "weight_K": np.append(scored.term_weight_K, np.float32(1.0)),
        }

    def _with_critic_advantages(
        self, scored: Scored, batch: TrainBatch, values: jax.Array
    ) -> tuple[TrainBatch, ValueBatch]:
        value = self._team.actor.place(values)
        advantage, target = self._estimate(scored.reward_B, scored.completions, batch, value=value)
        targets = ValueBatch(**batch.packing(), old_value=value, target=target)
        self._noted |= value_metrics("critic", targets)
        return batch.replace(advantage=advantage), targets

    def _with_baseline_advantages(
        self, scored: Scored, batch: TrainBatch, greedy: Scored
    ) -> TrainBatch:
        baseline_B = greedy.reward_B[scored.completions.prompt_index_B]
        self._noted["reward/greedy/mean"] = greedy.reward_B.mean()
        advantage, _ = self._estimate(
            scored.reward_B, scored.completions, batch, baseline_B=baseline_B
        )
        return self._when_done(batch.replace(advantage=advantage))

    def _with_cost_advantages(
        self, cost_B: np.ndarray, batch: TrainBatch, cost_values: jax.Array
    ) -> tuple[TrainBatch, ValueBatch]:
        value = self._team.actor.place(cost_values)
        group_B = np.arange(len(cost_B), dtype=np.int32) // self._config.rollout.num_samples
        cost_advantage, target, _ = self._estimator(
            batch,
            cost_B,
            group_B,
            num_groups=self._config.rollout.num_prompts,
            value=value,
        )
        advantage = constrained_advantage(
            batch.advantage, cost_advantage, jnp.float32(self._multiplier)
        )
        targets = ValueBatch(**batch.packing(), old_value=value, target=target)
        self._noted |= value_metrics("cost_critic", targets)
        return batch.replace(advantage=advantage), targets

    def _estimate(
        self, reward_B: np.ndarray, completions: Completions, batch: TrainBatch, **given
    ) -> tuple[jax.Array, jax.Array]:
        """(advantage, return); the price of KL then follows its controller."""
        kl = self._config.algorithm.kl
        advantage, target, reward_kl = self._estimator(
            batch,
            reward_B,
            completions.prompt_index_B.astype(np.int32),
            num_groups=len(completions.prompts),
            kl_coef=self._kl_coef,
            **given,
        )
        if kl.needs_ref_logprobs:
            self._noted |= {"actor/reward_kl_penalty": reward_kl}
        if kl.reward_coef:
            self._noted["actor/reward_kl_penalty_coeff"] = self._kl_coef
        if kl.target:
            self._kl_coef = float(
                adaptive(
                    jnp.float32(self._kl_coef),
                    hosts.fetch(reward_kl),
                    num_sequences=len(completions),
                    target=kl.target,
                    horizon=kl.horizon,
                )
            )
        return advantage, target

    def raise_multiplier(self, cost_B: np.ndarray) -> Metrics:
        """Moves the Lagrange multiplier by how far the step's mean cost is over the limit."""
        used = self._multiplier
        cost = self._config.cost
        self._multiplier = float(
            raised_multiplier(
                jnp.float32(used),
                jnp.float32(cost_B.mean() - cost.limit),
                learning_rate=cost.multiplier_lr,
            )
        )
        return {"cost/multiplier": used}

    # Learning

    def _update_actor(self, batch: TrainBatch) -> Metrics:
        if self._stage.step < self._config.critic.warmup_steps:
            return {}
        actor = self._team.actor
        also = () if self._pretraining is None else (self._pretraining.next(actor),)
        metrics = actor.update(
            batch, self._policy_objective, also=also, reference=self._weights_to_compare_with()
        )
        return self._when_done(prefixed("actor", metrics))

    def _weights_to_compare_with(self) -> Params | None:
        """The reference's, if the actor's loss compares whole distributions with it."""
        reference = self._team.reference
        if reference is None or not self._policy_objective.needs_reference:
            return None
        return reference.params

    def _update_critic(self, targets: ValueBatch) -> Metrics:
        return self._updated_critic("critic", self._team.critic, targets)

    def _update_cost_critic(self, targets: ValueBatch) -> Metrics:
        return self._updated_critic("cost_critic", self._team.cost_critic, targets)

    def _updated_critic(self, name: str, critic: Critic | None, targets: ValueBatch) -> Metrics:
        assert critic is not None
        metrics = critic.update(targets, self._value_objective)
        return self._when_done(prefixed(name, metrics))

    def _when_done(self, result: Any) -> Any:
        """Waits where all roles share their devices, so that timers tell events apart.

        Roles of different pools work side by side only if nothing waits.
        """
        if len(self._parts.placement.pools) == 1:
            jax.block_until_ready(jax.tree.leaves(result))
        return result

    # After a step

    def _evaluate(self, when: str) -> dict[str, float]:
        self._load_if_stale()
        return self._evaluator(self._team.actor, when)

    def hooks(self, scored: Scored, batch: TrainBatch, metrics: Metrics) -> bool:
        """Logs, evaluates and saves; says whether to go on."""
        noted, self._noted = self._noted, {}
        metrics = {
            **batch_metrics(scored, max_prompt_tokens=self._config.data.max_prompt_tokens),
            **advantage_metrics(batch),
            **{name: float(value) for name, value in hosts.fetch(noted | metrics).items()},
        }
        if self._stage.due(self._config.evaluation.every):
            last = self._stage.step + 1 == self._config.run.num_steps
            metrics |= self.evaluate("after" if last else "during")
        return self._stage.finish_step(metrics, self._team.learners, self.record())


class _Pretraining:
    """Written solutions that the actor keeps learning from beside the policy's loss (Safe RLHF's ptx)."""

    def __init__(self, parts: Parts):
        config = parts.config
        updates = config.algorithm.updates_per_step
        examples = updates * -(-config.rollout.num_prompts // updates)
        self.stream: DemonstrationStream = supervised_stream(
            parts,
            solutions_of(parts.train),
            examples_per_batch=examples,
            max_tokens=longest_sequence(config),
        )
        self._shape: PackedShape = packed_shape(config, sequences=examples, updates=updates)
        self._objective = likelihood(coef=config.cost.pretrain_coef)
        self._batches: Iterator[Any] | None = None

    def next(self, actor: Learner) -> tuple[TrainBatch, Objective]:
        """The next batch and what to do with it."""
        if self._batches is None:
            self._batches = iter(self.stream)
        return actor.place(pack_examples(next(self._batches), self._shape)), self._objective


@functools.partial(jax.jit, static_argnums=2)
def _by_sequence(score: jax.Array, batch: TrainBatch, num_sequences: int) -> jax.Array:
    T = batch.tokens.shape[-1]
    score_BT, live_BT, sequence_BT = (
        x.reshape(-1, T) for x in (score, batch.segment_ids, batch.sequence)
    )
    return to_sequences(score_BT, live_BT, sequence_BT, num_sequences=num_sequences)
