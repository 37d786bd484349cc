"""Stages that learn from preference pairs: reward models, cost models, DPO. All begin with the warm start."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.data.packing import PackedShape
from jaxrl.data.preferences import PreferencePair
from jaxrl.mesh import hosts
from jaxrl.mesh.groupings import state_tables
from jaxrl.models import lora
from jaxrl.models.huggingface_export import save_checkpoint
from jaxrl.recipes.sft import sft
from jaxrl.roles.learner import Learner, Objective
from jaxrl.roles.pairs import (
    PairBatch,
    pack_pairs,
    pair_sums,
    policy_pair_objective,
    scorer_objective,
)
from jaxrl.roles.scorer import Scorer
from jaxrl.trainer.interrupt import StopSignal
from jaxrl.trainer.setup import Parts, preference_stream
from jaxrl.trainer.stage import open_stage, run_until_stopped
from jaxrl.trainer.team import build_actor
from jaxrl.trainer.warm_start import warm_start

# Ranks answers of packed pairs, higher is better: [U, M, R, T], summed over each answer.
Rank = Callable[[PairBatch], jax.Array]


def train_scorer(parts: Parts, stop: StopSignal) -> None:
    """Trains a reward or cost model and leaves it in `<run>/scorer`, a Hugging Face directory.

    Raises:
      StopRequested: a signal arrived; the last finished step is saved.
      UserError: the loss is not one of scores.
    """
    options = parts.config.preference
    objective = scorer_objective(options.loss, dict(options.options))
    scorer = Scorer(
        lora.base_config(parts.model),
        parts.mesh_of("actor"),
        train=parts.config.train,
        optim=options.optim,
        seed=parts.config.seed,
        tables=state_tables(parts.config.mesh.sharding),
    )
    # The better answer scores higher, and costs less.
    sign = -1.0 if options.loss == "cost_preference" else 1.0

    def start() -> None:
        params = warm_start(parts, stop).state.params
        scorer.start_from(lora.split(params)[1] if parts.model.lora.rank else params)

    def rank(batch: PairBatch) -> jax.Array:
        return sign * scorer.scores_of(batch)

    _train(parts, stop, {"scorer": scorer}, objective, start, rank)
    _save(scorer, parts)


def train_dpo(parts: Parts, stop: StopSignal) -> None:
    """Trains the policy on pairs directly (arXiv 2305.18290), with the warm start as its reference.

    Raises:
      StopRequested: a signal arrived; the last finished step is saved.
      UserError: the loss is not one of policies.
    """
    options = parts.config.preference
    objective = policy_pair_objective(options.loss, dict(options.options))
    actor = build_actor(parts, optim=options.optim)
    reference = warm_start(parts, stop)

    def with_reference(batch: PairBatch) -> PairBatch:
        return batch.replace(ref_logprob=reference.logprobs(batch))

    def start() -> None:
        params = jax.tree.map(jnp.copy, reference.state.params)
        actor.start_from(params)

    def rank(batch: PairBatch) -> jax.Array:
        inside = batch.loss_mask
        return inside * (actor.logprobs(batch) - reference.logprobs(batch))

    _train(parts, stop, {"actor": actor}, objective, start, rank, complete=with_reference)


def _train(
    parts: Parts,
    stop: StopSignal,
    learners: Mapping[str, Learner],
    objective: Objective,
    start: Callable[[], None],
    rank: Rank,
    *,
    complete: Callable[[PairBatch], PairBatch] = lambda batch: batch,
) -> None:
    """The stage of one learner, in the folder `preference` of a run: supervised learning's loop, on pairs."""
    config = parts.config
    options = config.preference
    (learner,) = learners.values()
    with open_stage(
        parts,
        options.loss.upper().replace("_", " "),
        config.run_folder / "preference",
        num_steps=options.num_steps,
        save_every=config.run.save_every,
        stop=stop,
    ) as stage:
        record = stage.resume(learners)
        if stage.finished:
            return
        stream = preference_stream(parts, held_out=False, pairs_per_batch=options.pairs_per_step)
        # Before the warm start: it reads files, too.
        accuracy = _held_out(parts, learner, rank)
        if record is None:
            start()
        else:
            stream.restore(record["stream"])
        stage.begin(learners, {"stream": stream.state()})
        if stage.begins:
            stage.log_start({"val-core/pairs/accuracy": accuracy()})
        shape = _shape(parts, options.pairs_per_step)

        def pack(pairs: list[PreferencePair]) -> PairBatch:
            return complete(learner.place(pack_pairs(pairs, shape)))

        def update(batch: PairBatch) -> dict[str, jax.Array]:
            return jax.block_until_ready(learner.update(batch, objective))

        def hooks(batch: PairBatch, update: dict[str, jax.Array]) -> bool:
            metrics = {f"pairs/{name}": float(x) for name, x in hosts.fetch(update).items()}
            metrics["perf/total_num_tokens"] = float((hosts.fetch(batch.segment_ids) > 0).sum())
            if stage.due(options.every):
                metrics["val-core/pairs/accuracy"] = accuracy()
            return stage.finish_step(metrics, learners, {"stream": stream.state()})

        recipe = functools.partial(
            sft,
            stream,
            pack=stage.phase("pack", pack, may_stop=True),
            update=stage.phase("update", update),
            hooks=hooks,
        )
        run_until_stopped(stage, learners, recipe)


def _shape(parts: Parts, pairs: int) -> PackedShape:
    train = parts.config.train
    return PackedShape.for_sequences(
        pairs, longest=train.row_tokens, minibatches=1, rows=train.rows, tokens=train.row_tokens
    )


def _held_out(parts: Parts, learner: Learner, rank: Rank) -> Callable[[], float]:
    """A function that measures on how many held-out pairs the chosen answer ranks higher; ties are half."""
    options = parts.config.preference
    stream = preference_stream(parts, held_out=True, pairs_per_batch=options.held_out_pairs)
    batch = learner.place(pack_pairs(next(stream), _shape(parts, options.held_out_pairs)))

    def accuracy() -> float:
        ranks, segment_ids, mask = hosts.fetch((rank(batch), batch.segment_ids, batch.loss_mask))
        T = ranks.shape[-1]
        segment_ids_RT = jnp.asarray(segment_ids.reshape(-1, T))
        chosen, rejected = pair_sums(jnp.asarray(ranks.reshape(-1, T)), segment_ids_RT)
        there = np.asarray(pair_sums(jnp.asarray(mask.reshape(-1, T)), segment_ids_RT)[0]) > 0
        order = np.sign(np.asarray(chosen - rejected)[there])
        return float((order + 1).mean() / 2)

    return accuracy


def _save(scorer: Scorer, parts: Parts) -> None:
    """Writes the model as a Hugging Face directory, `<run>/scorer`; again if the run is finished again."""
    directory = parts.config.run_folder / "scorer"
    if directory.exists() or not hosts.is_first():
        return
    save_checkpoint(
        scorer.state.params,
        scorer.model,
        directory,
        dtype="float32",
        source=parts.config.run_folder / "model",
    )
    print(f"model: {directory}")
