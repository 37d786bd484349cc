"""Builds the sampler of a reinforcement learning step: which prompts, which options, when to stop.

PromptStream --> Sampling, or partial, or free running --> CurriculumSampling --> DynamicSampling
"""

from __future__ import annotations

import pathlib
from typing import Any

from jaxrl.config.config_tree import format_config
from jaxrl.config.schema import Config
from jaxrl.data.pass_rates import Curriculum
from jaxrl.data.stream import PromptStream
from jaxrl.dataflows.dynamic_sampling import (
    DynamicSampling,
    GroupFilter,
    MixedGroups,
    SpreadGroups,
)
from jaxrl.dataflows.free_running import FreeRunning, SamplingSchedule, VersionRow
from jaxrl.dataflows.rewarding import Rewards
from jaxrl.dataflows.samplers import (
    CurriculumSampling,
    Generation,
    PartialSampling,
    Sampler,
    Sampling,
)
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.tracking.run_folder import RunFolder
from jaxrl.tracking.schedule_file import read_schedule
from jaxrl.trainer.algorithm import runs_free
from jaxrl.trainer.context import RunContext


def prompt_stream(run: RunContext) -> PromptStream:
    """The training prompts in an endless order; checkpoints save the position."""
    config, rollout = run.config, run.config.rollout
    return PromptStream(
        run.train_prompts,
        weights=[source.settings.weight for source in run.problems.train],
        # Partial rollout draws prompts one at a time, as slots fall free.
        prompts_per_batch=1 if rollout.partial else _prompts_per_batch(run),
        seed=config.seed,
        curriculum=_curriculum(config),
    )


def _prompts_per_batch(run: RunContext) -> int:
    """The number of prompts of a generation batch."""
    dynamic = run.algorithm.dataflow.dynamic_sampling
    return run.config.rollout.prompts_per_batch(dynamic_sampling=dynamic)


def recorded_schedule(config: Config) -> dict[int, VersionRow] | None:
    """The schedule that the config names; None if the run goes by the clock.

    Raises:
      UserError: the schedule is missing, damaged, or of a run with other settings.
    """
    if not config.rollout.schedule:
        return None
    return read_schedule(RunFolder(pathlib.Path(config.rollout.schedule)), format_config(config))


def group_sampler(
    run: RunContext, generation: Generation, rewards: Rewards, schedule: SamplingSchedule
) -> Sampler:
    """Builds the sampler of finished groups from the config.

    Args:
      run: the run.
      generation: the actor in its generation layout.
      rewards: rewards that score each response.
      schedule: schedule of a sampler that runs free.
    """
    options = run.config.rollout
    limits: Any = {
        "prompts_per_batch": _prompts_per_batch(run),
        "max_staleness": options.max_staleness,
    }
    if runs_free(run.config):
        return FreeRunning(
            generation, rewards, schedule, groups_per_step=options.num_prompts, **limits
        )
    if options.partial:
        return PartialSampling(generation, rewards, **limits)
    return Sampling(generation, rewards)


def step_sampler(run: RunContext, inner: Sampler, prompts: PromptStream) -> Sampler:
    """Wraps the sampler of finished groups by a curriculum and by dynamic sampling.

    Args:
      run: the run.
      inner: sampler of finished groups.
      prompts: stream of prompts; graded groups tell it which problems are solved.
    """
    options, dataflow = run.config.rollout, run.algorithm.dataflow
    sampler = CurriculumSampling(inner, prompts)
    if not dataflow.dynamic_sampling:
        return sampler
    return DynamicSampling(
        sampler,
        options.num_prompts,
        max_generation_batches=options.max_generation_batches,
        keeps=_group_filter(options),
        fills_up=options.on_shortage == "fill",
    )


def _group_filter(options: RolloutConfig) -> GroupFilter:
    return MixedGroups() if options.keep_groups == "correctness" else SpreadGroups()


def _curriculum(config: Config) -> Curriculum | None:
    off = config.data.curriculum.by == "off"
    return None if off else Curriculum(config.rollout.num_samples)
