"""The first stage: weights to begin with, and supervised learning from them if the config asks for it."""

from __future__ import annotations

import functools

import jax

from jaxrl.data.demonstrations import DemonstrationStream, solutions_of
from jaxrl.mesh import hosts
from jaxrl.recipes.sft import sft
from jaxrl.roles.actor import Actor
from jaxrl.roles.batches import pack_examples
from jaxrl.roles.losses import SUPERVISED
from jaxrl.trainer.config import Config
from jaxrl.trainer.interrupt import StopSignal
from jaxrl.trainer.setup import Parts, longest_sequence, packed_shape, supervised_stream
from jaxrl.trainer.stage import Stage, open_stage, run_until_stopped
from jaxrl.trainer.step_metrics import prefixed
from jaxrl.trainer.team import build_actor, first_weights
from jaxrl.types import TrainBatch


def warm_start(parts: Parts, stop: StopSignal) -> Actor:
    """An actor trained on answers to imitate, or as it starts if the stage is switched off.

    Raises:
      StopRequested: a signal arrived; the last finished step is saved.
    """
    options = parts.config.warm_start
    actor = build_actor(parts, optim=options.optim)
    if not options.num_steps:
        first_weights(actor, parts)
        return actor
    with open_stage(
        parts,
        "SFT",
        parts.config.warm_start_folder,
        num_steps=options.num_steps,
        save_every=options.save_every,
        log_every=options.log_every,
        stop=stop,
    ) as stage:
        record = stage.resume({"actor": actor})
        if record is None:
            first_weights(actor, parts)
        if not stage.finished:
            stream = supervised_stream(
                parts,
                parts.demonstrations or solutions_of(parts.train),
                examples_per_batch=options.examples_per_step,
                max_tokens=_longest(parts.config),
            )
            if record is not None:
                stream.restore(record["stream"])
            stage.begin({"actor": actor}, {"stream": stream.state()})
            run_until_stopped(stage, {"actor": actor}, _recipe(parts, stage, actor, stream))
    return actor


def _longest(config: Config) -> int:
    """Tokens of an example at most: conversations have rows to themselves."""
    return config.train.row_tokens if config.warm_start.path else longest_sequence(config)


def _recipe(parts: Parts, stage: Stage, actor: Actor, stream: DemonstrationStream):
    config = parts.config
    shape = packed_shape(
        config,
        sequences=config.warm_start.examples_per_step,
        updates=1,
        longest=_longest(config),
    )

    def pack(examples) -> TrainBatch:
        hosts.check_same(
            f"the examples of step {stage.step + 1}",
            [part for example in examples for part in example],
        )
        return actor.place(pack_examples(examples, shape))

    def update(batch: TrainBatch) -> dict[str, jax.Array]:
        return jax.block_until_ready(actor.update(batch, SUPERVISED))

    def hooks(batch: TrainBatch, update: dict[str, jax.Array]) -> bool:
        values = {k: float(v) for k, v in prefixed("actor", jax.device_get(update)).items()}
        metrics = {
            "sft/loss": values["actor/pg_loss"],
            "sft/token_accuracy": values["actor/mean_token_prob"],
            "sft/grad_norm": values["actor/grad_norm"],
            "sft/lr": values["actor/lr"],
            "train/num_trained_tokens": float(hosts.fetch(batch.loss_mask).sum()),
            "perf/total_num_tokens": float((hosts.fetch(batch.segment_ids) > 0).sum()),
        }
        return stage.finish_step(metrics, {"actor": actor}, {"stream": stream.state()})

    return functools.partial(
        sft,
        stream,
        pack=stage.phase("pack", pack, may_stop=True),
        update=stage.phase("update_actor", update, shown="update"),
        hooks=hooks,
    )
