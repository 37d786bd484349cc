"""Makes one sample of a step again, without its batch: its noise depends on its key and its positions alone.

kept row --prompt_id--> prompt --weights before the step, key of the sample--> tokens --grader--> verdict
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.config.schema import Config
from jaxrl.config.shapes import stop_ids_of
from jaxrl.dataflows.rewarding import Grading
from jaxrl.errors import UserError
from jaxrl.mesh.interrupt import StopSignal
from jaxrl.mesh.rules import with_shardings
from jaxrl.tracking.run_weights import read_newest_params
from jaxrl.tracking.sample_rows import TOKEN_STRINGS, TokenStrings, sample_rows
from jaxrl.trainer.context import RunContext, build_context, training_prompts
from jaxrl.trainer.evaluation import answered
from jaxrl.trainer.findings import REINFORCEMENT
from jaxrl.trainer.program import claimed
from jaxrl.trainer.run_rewards import graders_of
from jaxrl.trainer.supervised import starting_params
from jaxrl.types import Prompts
from jaxrl_proofs.parting import kept_rows, sample_difference
from jaxrl_proofs.stored_run import StoredRun

# What the sampler and the grader say of a sample; rewards may depend on the others of its group.
_MADE_AGAIN = ("prompt", "answer", "problem_key", "prediction", "correct", "failure")


def kept_sample(
    run: StoredRun, config: Config, step: int, number: int, start: int
) -> dict[str, Any]:
    """A kept sample of a step, as a row.

    Args:
      run: the run.
      config: its config.
      step: the step.
      number: number of the sample in the file of the step.
      start: step of the checkpoint that the run goes on from.

    Raises:
      UserError: the run has no such sample, or not the weights that it was drawn with.
    """
    rollout = config.rollout
    others = {"rollout.agent": rollout.agent, "rollout.max_staleness": rollout.max_staleness}
    for setting, value in (others | {"data.sampler": config.data.sampler}).items():
        if value:
            raise UserError(
                f"--sample: with {setting} {value!r} a sample depends on more than its key and the weights "
                "before its step; leave --sample out, which makes the whole step again"
            )
    if start != step - 1:
        raise UserError(
            f"--sample {number} of step {step} needs the weights after step {step - 1}, and the newest "
            f"checkpoint before is of step {start}; take a sample of step {start + 1}, or leave --sample "
            "out, which trains up to the step"
        )
    rows = kept_rows(
        run.folder.rollouts.step(step),
        absent="the run kept no samples of this step (run.rollouts_every); choose another, or leave "
        "--sample out",
    )
    if not 0 <= number < len(rows):
        raise UserError(f"--sample {number}: step {step} kept the samples 0 to {len(rows) - 1}")
    return rows[number]


def drawn_again(kept: Mapping[str, Any], config: Config, step: int, start: int) -> tuple[str, bool]:
    """Draws and grades a kept sample again; returns a line on it, and whether tokens and verdict are equal.

    Args:
      kept: row of the sample.
      config: config of the new run, whose folder has the checkpoint.
      step: step of the sample.
      start: step of the checkpoint; 0 for the weights that training starts from.
    """
    with (
        claimed(config) as found,
        StopSignal(within_s=config.run.stop_within_s) as stop,
    ):
        run = build_context(found, kind=REINFORCEMENT)
        actor = run.roles.actor(optim=config.optim)
        if start:
            like = with_shardings(actor.shapes, actor.train_shardings)
            _, params = read_newest_params(config.run_folder.path, like)
        else:
            params = starting_params(run, stop)
        actor.start_from(params)
        graders = graders_of(config, run.problems.settings)
        prompt = _prompt(run, kept["prompt_id"])
        scored = answered(actor, prompt, run.sampling.replace(step=step - 1), Grading(graders))
        graders.close()
        actor.close()
        stop_ids = stop_ids_of(config.rollout, run.tokenizer)
        rows = list(sample_rows(scored, TokenStrings(run.tokenizer), stop_ids=stop_ids))
    row = rows[kept["sample"]]
    new = {**kept, **{name: row[name] for name in _MADE_AGAIN}}
    # The trainer's log-probabilities are made by the step.
    trainers = {name: x for name, x in kept[TOKEN_STRINGS].items() if name == "old_logprob"}
    new[TOKEN_STRINGS] = row[TOKEN_STRINGS] | trainers
    difference = sample_difference(kept, new)
    if difference is None:
        num_tokens = len(row[TOKEN_STRINGS]["text"])
        what = f"{num_tokens} tokens with their log-probabilities, and the verdict"
        return f"equal: sample {kept['sample']} of prompt {kept['prompt_id']}, {what}", True
    close = " (by rounding alone: tokens and verdict are equal)" if difference.by_rounding else ""
    return difference.line + close, difference.by_rounding


def _prompt(run: RunContext, prompt_id: int) -> Prompts:
    """The prompt with an id of the training stream."""
    stream: Any = training_prompts(run)
    state = stream.state()
    # As if its source were the next to be drawn from, at its turn.
    turn, number = divmod(prompt_id, len(state["turns"]))
    drawn = [int(n != number) * 2**53 for n in range(len(state["turns"]))]
    stream.restore(state | {"turns": [turn] * len(drawn), "num_drawn": drawn})
    return next(stream).take([0])
