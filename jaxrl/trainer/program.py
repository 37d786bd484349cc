"""The program: warm start, reinforcement learning, report. The only place where all rooms meet."""

from __future__ import annotations

import functools
import json
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algos.advantages import group_relative
from jaxrl.algos.shaping import soft_overlong_penalty
from jaxrl.data.stream import PromptStream, SupervisedStream
from jaxrl.errors import UserError
from jaxrl.mesh.devices import abstract_mesh
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.models.huggingface_weights import load_params
from jaxrl.planner import dry_run as planner
from jaxrl.recipes.dapo import dapo
from jaxrl.recipes.dynamic_sampling import GroupBuffer, SamplingStats, keep_mixed_groups
from jaxrl.recipes.sft import sft
from jaxrl.rewards.score import grader, score_completions
from jaxrl.roles.actor import Actor, TokenLoss
from jaxrl.roles.batches import pack_examples, pack_groups
from jaxrl.roles.losses import clipped_policy, supervised
from jaxrl.trainer.config import Config, RewardConfig
from jaxrl.trainer.config_tree import flatten_config, format_config
from jaxrl.trainer.interrupt import StopRequested, StopSignal
from jaxrl.trainer.metrics import (
    METRICS_FILE,
    WandbOptions,
    ensure_writable,
    read_metrics,
    write_atomically,
)
from jaxrl.trainer.setup import (
    Parts,
    build_actor,
    build_parts,
    check_batches,
    engine_config,
    packed_shape,
    prompt_options,
)
from jaxrl.trainer.stage import Stage, run_until_stopped
from jaxrl.trainer.step_metrics import (
    actor_metrics,
    batch_metrics,
    evaluation_metrics,
    policy_metrics,
)
from jaxrl.types import Completions, Scored, TrainBatch

logger = logging.getLogger(__name__)

# Evaluation samples with keys of a step that training never reaches, the same every time: two evaluations
# differ by the weights alone.
_EVALUATION_STEP = 2**31 - 1

# Evaluations whose answers the report shows.
_SAMPLES_KEPT = ("before", "after")


def train(config: Config, *, devices: Sequence[Any] | None = None) -> int:
    """Trains a recipe from start, or from where it was stopped, to its report.

    Args:
      config: the run.
      devices: which to use; all of them by default.

    Returns:
      The exit status: 0, or 130 after Ctrl-C.
    """
    ensure_writable(config.run_folder)
    parts = build_parts(config, devices)
    _note_config(config)
    with StopSignal() as stop:
        try:
            _reinforce(parts, stop)
        except StopRequested:
            print(
                f"stopped; everything is saved in {config.run_folder}, the same command goes on from there"
            )
            return stop.exit_status
    path = _write_report(parts)
    print(f"report: {path}")
    return 0


def dry_run(config: Config) -> int:
    """Prints what a recipe would take, without its devices, weights or data; returns the exit status."""
    rollout, algorithm = config.rollout, config.algorithm
    layout = ParallelLayout.from_config(config.mesh)
    check_batches(config, abstract_mesh(layout))
    shape = packed_shape(
        config,
        sequences=rollout.num_prompts * rollout.num_samples,
        updates=algorithm.updates_per_step,
    )
    plan = planner.dry_run(
        f"{config.name} ({config.hardware})" if config.hardware else config.name,
        config.model,
        layout,
        train=config.train,
        optim=config.optim,
        # Which ids end a response is the tokenizer's to say, and no shape depends on it.
        engine=engine_config(config, stop_ids=(0,)),
        temperature=rollout.temperature,
        loss=_policy_loss(config),
        flow=planner.BatchFlow(
            rollout.generation_prompts,
            rollout.max_generation_batches,
            rollout.num_prompts,
            rollout.num_samples,
            shape,
        ),
    )
    plan.show()
    return 0


def _policy_loss(config: Config) -> TokenLoss:
    return clipped_policy(
        clip_low=config.algorithm.clip_low,
        clip_high=config.algorithm.clip_high,
        dual_clip=config.algorithm.dual_clip,
    )


def _warm_start(parts: Parts, stop: StopSignal) -> Actor:
    """An actor trained on written solutions, or as it starts if the stage is switched off."""
    config = parts.config
    options = config.warm_start
    actor = build_actor(parts, optim=options.optim)
    with _stage(
        "SFT", "sft", parts, stop, num_steps=options.num_steps, save_every=options.save_every
    ) as stage:
        record = stage.resume(actor)
        if record is None:
            _first_weights(actor, parts)
        if stage.finished:
            return actor
        stream = SupervisedStream(
            parts.train,
            parts.tokenizer,
            examples_per_batch=options.examples_per_step,
            seed=config.seed,
            max_tokens=config.train.row_tokens,
            template=config.data.template,
            chat=config.data.chat,
        )
        if record is not None:
            stream.restore(record["stream"])
        shape = packed_shape(config, sequences=options.examples_per_step, updates=1)

        def hooks(batch: TrainBatch, update: dict[str, jax.Array]) -> bool:
            values = actor_metrics(jax.device_get(update))
            metrics = {
                "sft/loss": values["actor/pg_loss"],
                "sft/token_accuracy": values["actor/mean_token_prob"],
                "sft/grad_norm": values["actor/grad_norm"],
                "sft/lr": values["actor/lr"],
                "perf/total_num_tokens": float((np.asarray(batch.segment_ids) > 0).sum()),
            }
            return stage.finish_step(metrics, actor, {"stream": stream.state()})

        stage.begin()
        recipe = functools.partial(
            sft,
            stream,
            pack=stage.phase(
                "pack", lambda examples: actor.place(pack_examples(examples, shape)), may_stop=True
            ),
            update=stage.phase("update_actor", lambda batch: actor.update(batch, supervised)),
            hooks=hooks,
        )
        run_until_stopped(stage, actor, recipe)
    return actor


def _first_weights(actor: Actor, parts: Parts) -> None:
    """Weights from the checkpoint that the config names, or random ones."""
    if parts.config.weights:
        actor.start_from(load_params(parts.config.weights, parts.model, actor.train_shardings))
    else:
        actor.init()


def _reinforce(parts: Parts, stop: StopSignal) -> None:
    """DAPO from the warm start, or from the newest checkpoint."""
    config = parts.config
    rollout = config.rollout
    actor = build_actor(parts, optim=config.optim)
    score = _score_function(config.reward, config)
    with _stage(
        "DAPO", "rl", parts, stop, num_steps=config.run.num_steps, save_every=config.run.save_every
    ) as stage:
        record = stage.resume(actor)
        if stage.finished:
            return
        if record is None:
            actor.start_from(_warm_start(parts, stop).state.params)
        stream = PromptStream(
            parts.train,
            parts.tokenizer,
            prompts_per_batch=rollout.generation_prompts,
            seed=config.seed if config.data.shuffle_seed is None else config.data.shuffle_seed,
            **prompt_options(config),
        )
        if record is not None:
            stream.restore(record["stream"])
        shape = packed_shape(
            config,
            sequences=rollout.num_prompts * rollout.num_samples,
            updates=config.algorithm.updates_per_step,
        )
        loss = _policy_loss(config)

        def generate(prompts) -> Completions:
            return actor.generate(
                prompts, parts.tokenizer.decode, num_samples=rollout.num_samples, step=stage.step
            )

        def with_advantages(groups: Scored) -> TrainBatch:
            reward_NG = groups.reward_B.reshape(-1, rollout.num_samples)
            advantage_NG = group_relative(
                jnp.asarray(reward_NG), normalize_std=config.algorithm.normalize_std
            )
            return actor.place(pack_groups(groups, np.asarray(advantage_NG), shape))

        def with_old_logprobs(batch: TrainBatch) -> TrainBatch:
            return batch.replace(old_logprob=jax.block_until_ready(actor.logprobs(batch)))

        def evaluate(when: str) -> dict[str, float]:
            scored = score(
                actor.generate(
                    parts.held_out,
                    parts.tokenizer.decode,
                    num_samples=config.evaluation.num_samples,
                    step=_EVALUATION_STEP,
                    temperature=config.evaluation.temperature,
                )
            )
            if when in _SAMPLES_KEPT:
                _keep_samples(config, scored, when)
            return evaluation_metrics(scored)

        def hooks(
            groups: Scored, sampling: SamplingStats, batch: TrainBatch, update: dict[str, jax.Array]
        ) -> bool:
            metrics = {
                **batch_metrics(
                    groups,
                    max_response_tokens=rollout.max_response_tokens,
                    max_prompt_tokens=config.data.max_prompt_tokens,
                ),
                **sampling.metrics(),
                **policy_metrics(batch),
                **actor_metrics(jax.device_get(update)),
            }
            if stage.due(config.evaluation.every):
                last = stage.step + 1 == config.run.num_steps
                metrics |= timed_evaluate("after" if last else "during")
            return stage.finish_step(metrics, actor, {"stream": stream.state()})

        stage.begin()
        timed_evaluate = stage.phase("testing", evaluate, shown="evaluate")
        load_rollout = stage.phase("update_weights", actor.load_rollout)
        load_rollout()
        if record is None:
            stage.log_start(timed_evaluate("before"))
        recipe = functools.partial(
            dapo,
            stream,
            GroupBuffer(rollout.num_prompts, max_generation_batches=rollout.max_generation_batches),
            generate=stage.phase("gen", generate, shown="generate", may_stop=True),
            score=stage.phase("reward", score),
            keep=keep_mixed_groups,
            with_advantages=stage.phase("adv", with_advantages),
            with_old_logprobs=stage.phase("old_log_prob", with_old_logprobs),
            update=stage.phase(
                "update_actor", lambda batch: jax.block_until_ready(actor.update(batch, loss))
            ),
            load_rollout=load_rollout,
            hooks=hooks,
        )
        run_until_stopped(stage, actor, recipe)


def _stage(
    title: str, name: str, parts: Parts, stop: StopSignal, *, num_steps: int, save_every: int
) -> Stage:
    config = parts.config
    wandb = None
    if config.run.wandb_project:
        wandb = WandbOptions(
            config.run.wandb_project,
            f"{config.name}-seed{config.seed}-{name}",
            flatten_config(config),
        )
    return Stage(
        title,
        config.run_folder / name,
        num_steps=num_steps,
        save_every=save_every,
        keep_checkpoints=config.run.keep_checkpoints,
        num_devices=parts.mesh.size,
        stop=stop,
        wandb=wandb,
    )


def _score_function(reward: RewardConfig, config: Config):
    """Completions to Scored: the rule grader, and the soft overlong punishment if it is on."""

    def overlong(lengths_B: np.ndarray) -> np.ndarray:
        if not reward.overlong_buffer_tokens:
            return np.zeros(len(lengths_B), np.float32)
        penalty_B = soft_overlong_penalty(
            jnp.asarray(lengths_B),
            max_response_tokens=config.rollout.max_response_tokens,
            buffer_tokens=reward.overlong_buffer_tokens,
            penalty=reward.overlong_penalty,
        )
        return np.asarray(penalty_B)

    return functools.partial(score_completions, grade=grader(reward.grader), overlong=overlong)


# What a run leaves behind


def _note_config(config: Config) -> None:
    """Keeps the config beside the run; says what differs from the one the run was started with."""
    path = config.run_folder / "config.txt"
    text = format_config(config)
    if path.exists():
        before, now = (
            dict(line.split(" = ", 1) for line in t.splitlines()) for t in (path.read_text(), text)
        )
        changed = [
            f"{key}: {before.get(key)} -> {now.get(key)}"
            for key in now
            if now[key] != before.get(key)
        ]
        if changed and not config.run.resume:
            changed = []
        if changed:
            logger.warning("this run was started with other settings: %s", "; ".join(changed))
        if not config.run.resume:
            raise UserError(
                f"{config.run_folder} already holds a run and run.resume is False; remove it, or give "
                "this run another --config.name or --config.run.output"
            )
    write_atomically(path, text.encode())


def _keep_samples(config: Config, scored: Scored, when: str) -> None:
    """Stores the first sample of a few held-out prompts, for the report."""
    completions = scored.completions
    count = min(config.run.report_samples, len(completions.prompts))
    samples = [
        {
            "prompt": completions.prompts.texts[i],
            "answer": completions.prompts.answers[i],
            "text": completions.texts[i * completions.num_samples],
            "correct": bool(scored.correct_B[i * completions.num_samples]),
        }
        for i in range(count)
    ]
    write_atomically(_samples_path(config, when), json.dumps(samples, indent=1).encode())


def _samples_path(config: Config, when: str) -> pathlib.Path:
    return config.run_folder / f"samples_{when}.json"


def _write_report(parts: Parts) -> pathlib.Path:
    """One HTML page about the whole run."""
    # Drawing libraries take a second to import, which only this last step has to wait for.
    from jaxrl.trainer import report

    config = parts.config
    rows = {name: _rows(config, name) for name in ("rl", "sft")}
    before, after = (json.loads(_samples_path(config, when).read_text()) for when in _SAMPLES_KEPT)
    pairs = [
        report.SamplePair(
            b["prompt"],
            b["answer"],
            report.Response(b["text"], b["correct"]),
            report.Response(a["text"], a["correct"]),
        )
        for b, a in zip(before, after, strict=True)
    ]
    stages = [report.Stage("DAPO", rows["rl"])]
    if rows["sft"]:
        stages.append(report.Stage("Warm start (SFT)", rows["sft"]))
    path = config.run_folder / "report.html"
    report.write_report(
        path,
        title=f"{config.name}, seed {config.seed}",
        summary=_summary(parts, rows),
        stages=stages,
        samples=pairs,
        config_text=format_config(config),
    )
    return path


def _rows(config: Config, stage: str) -> list[dict[str, Any]]:
    path = config.run_folder / stage / METRICS_FILE
    return read_metrics(path) if path.exists() else []


def _summary(parts: Parts, rows: dict[str, list[dict[str, Any]]]) -> Sequence[tuple[str, str]]:
    """Headline numbers of the report."""
    config, rl = parts.config, rows["rl"]
    source = parts.held_out.sources[0]
    key = f"val-core/{source}/acc/mean@{config.evaluation.num_samples}"
    accuracy = [row[key] for row in rl if key in row]
    steps = [row for row in rl if "actor/entropy" in row]
    minutes = {
        name: sum(row.get("timing_s/step", 0.0) for row in r) / 60 for name, r in rows.items()
    }
    return [
        ("held-out accuracy before", f"{accuracy[0]:.1%}"),
        ("held-out accuracy after", f"{accuracy[-1]:.1%}"),
        (
            "entropy, first and last step",
            f"{steps[0]['actor/entropy']:.3f} → {steps[-1]['actor/entropy']:.3f}",
        ),
        ("steps", f"{len(steps)}"),
        ("minutes, warm start + DAPO", f"{minutes['sft']:.1f} + {minutes['rl']:.1f}"),
        ("parameters", f"{parts.model.num_params:,}"),
        ("devices", f"{parts.mesh.size} x {parts.mesh.devices.flat[0].device_kind}"),
    ]
