"""Learning from preference pairs: reward models, cost models, DPO."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.shapes import row_limits
from jaxrl.data.preferences import PreferencePair
from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.step_metrics import work_metrics
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.mesh import hosts
from jaxrl.mesh.interrupt import StopSignal
from jaxrl.mesh.sharding_strategies import state_rules
from jaxrl.models import lora
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.roles.learner import Learner
from jaxrl.roles.losses import Objective
from jaxrl.roles.packing import Packing
from jaxrl.roles.pairs import (
    PairBatch,
    pack_pairs,
    pair_sums,
    policy_pair_objective,
    reward_model_objective,
)
from jaxrl.roles.scores import RewardModelLearner
from jaxrl.trainer.context import RunContext, preference_stream
from jaxrl.trainer.loop import Schedule, open_loop
from jaxrl.trainer.supervised import ExamplesStage, copied, starting_params

# Number of pairs that the accuracy is measured on.
_EVALUATION_PAIRS = 256


class PairStage(ExamplesStage):
    """Training of one learner on pairs of a chosen and a rejected answer."""

    def __init__(
        self,
        run: RunContext,
        learner: Learner,
        objective: Objective,
        timer: StepTimer,
        *,
        name: str,
        begin_weights: Callable[[bool], None],
        rank: Callable[[PairBatch], jax.Array],
        complete: Callable[[PairBatch], PairBatch] = lambda batch: batch,
    ):
        """Builds everything except weights, which `begin` sets.

        Args:
          run: the run.
          learner: role to train, without weights.
          objective: loss of the role.
          timer: loop of the stage.
          name: name of the role.
          begin_weights: as in `ExamplesStage`.
          rank: function that ranks answers of packed pairs, higher is better: [U, M, R, T], summed over each
            answer.
          complete: function that adds the other inputs of the objective to a batch.

        Raises:
          UserError: there are no pairs, or the config names an unknown method to make them.
        """
        self._objective = objective
        self._rank = rank
        self._complete = complete
        stream = preference_stream(
            run, evaluation=False, pairs_per_batch=run.config.preference.pairs_per_step
        )
        super().__init__(run, learner, timer, stream, name=name, begin_weights=begin_weights)
        self._evaluation_pairs = None
        if _evaluates(run):
            # Packed once, so every evaluation has the same pairs.
            pairs = preference_stream(run, evaluation=True, pairs_per_batch=_EVALUATION_PAIRS)
            self._evaluation_pairs, _ = self._placed(next(pairs))

    def evaluate(self, when: str) -> Metrics:
        """Fraction of evaluation pairs in which the chosen answer ranks higher; ties count half.

        Empty if there are no evaluation pairs.
        """
        batch = self._evaluation_pairs
        if batch is None:
            return {}
        ranks, segment_ids, mask = hosts.fetch(
            (self._rank(batch), batch.segment_ids, batch.loss_mask)
        )
        T = ranks.shape[-1]
        segment_ids_RT = jnp.asarray(segment_ids.reshape(-1, T))
        chosen, rejected = pair_sums(jnp.asarray(ranks.reshape(-1, T)), segment_ids_RT)
        # A row has fewer pairs than places; unused ones would count as ties.
        there = np.asarray(pair_sums(jnp.asarray(mask.reshape(-1, T)), segment_ids_RT)[0]) > 0
        order = np.sign(np.asarray(chosen - rejected)[there])
        return {"val-core/pairs/accuracy": float((order + 1).mean() / 2)}

    def step(self) -> Metrics:
        """Packs the next pairs, and runs one optimiser update on them."""
        pairs = next(iter(self._stream))
        with self._timer.phase("pack", may_stop=True):
            batch, packing = self._placed(pairs)
            metrics = {"perf/total_num_tokens": float(packing.lengths.sum())}
            batch, metrics = self._complete(batch), metrics | work_metrics(self._learner, packing)
        with self._timer.phase("update"):
            # The devices work on after the call returns; the phase must have their time.
            update = jax.block_until_ready(self._learner.update(batch, self._objective))
        return metrics | {f"pairs/{name}": float(x) for name, x in hosts.fetch(update).items()}

    def _placed(self, pairs: list[PreferencePair]) -> tuple[PairBatch, Packing]:
        config = self._run.config
        shape = row_limits(config, longest=config.row_tokens).shape(len(pairs), minibatches=1)
        batch, packing = pack_pairs(pairs, shape, **self._learner.rows_of(shape))
        return self._learner.place(batch), packing


def learn_reward_model(run: RunContext, stop: StopSignal) -> None:
    """Trains a reward or cost model and saves it as a Hugging Face directory in `<run>/trained_model`.

    Raises:
      StopRequested: a signal arrived; the last finished step is saved.
    """
    config, options = run.config, run.config.preference
    learner = RewardModelLearner(
        lora.base_config(run.model),
        run.meshes["actor"],
        train=config.train,
        optim=config.optim,
        seed=config.seed,
        state_rules=state_rules(config.mesh.sharding),
    )

    def begin_weights(resumed: bool) -> None:
        if not resumed:
            params = starting_params(run, stop)
            # It trains all of its weights, and starts from the base model.
            learner.start_from(lora.split(params)[1] if run.model.lora.rank else params)

    # A reward is higher for the better answer, a cost is lower.
    sign = -1.0 if options.loss == "cost_preference" else 1.0
    loop = _open_loop(run, stop)
    stage = PairStage(
        run,
        learner,
        reward_model_objective(options.loss, dict(options.options)),
        loop,
        name="reward_model",
        begin_weights=begin_weights,
        rank=lambda batch: sign * learner.scores_of(batch),
    )
    loop.run(stage)
    directory = config.run_folder.trained_model
    # It exists if a finished run is started again.
    if not directory.exists() and hosts.is_first():
        save_checkpoint(
            learner.for_training().params,
            learner.model,
            directory,
            dtype="float32",
            source=config.run_folder.model,
        )
        print(f"model: {directory}")


def learn_preferences(run: RunContext, stop: StopSignal) -> None:
    """Trains the policy directly on pairs (DPO, arXiv 2305.18290), with its initial weights as reference.

    Raises:
      StopRequested: a signal arrived; the last finished step is saved.
    """
    options = run.config.preference
    actor = run.roles.actor(optim=run.config.optim, samples=False)
    reference = run.roles.other("reference", like="actor")

    def begin_weights(resumed: bool) -> None:
        # A copy, and first: the start of the actor consumes the weights. Also for a resumed stage, since no
        # checkpoint has the reference.
        params = starting_params(run, stop)
        reference.load(copied(params, reference))
        if not resumed:
            actor.start_from(params)

    loop = _open_loop(run, stop)
    stage = PairStage(
        run,
        actor,
        policy_pair_objective(options.loss, dict(options.options)),
        loop,
        name="actor",
        begin_weights=begin_weights,
        # Prompts have log-probabilities too, and are no part of the answers.
        rank=lambda x: x.loss_mask * (actor.logprobs(x) - reference.logprobs(x)),
        complete=lambda batch: batch.replace(ref_logprob=reference.logprobs(batch)),
    )
    loop.run(stage)


def _open_loop(run: RunContext, stop: StopSignal):
    config = run.config
    every = config.evaluation.every if _evaluates(run) else 0
    schedule = Schedule(config.run.num_steps, config.run.save_every, evaluate_every=every)
    title = config.preference.loss.upper().replace("_", " ")
    return open_loop(run, title, config.run_folder.preference, schedule, stop)


def _evaluates(run: RunContext) -> bool:
    """Whether there are pairs to measure the accuracy on."""
    options = run.config.preference
    return bool(options.evaluation_path or (options.makes_pairs and run.problems.evaluation))
