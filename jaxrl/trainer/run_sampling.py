"""Builds the sampler of a reinforcement learning step: which prompts, which options, when to stop.

PromptStream --> Sampling, or one step ahead, or partial --> CurriculumSampling --> DynamicSampling
"""

from __future__ import annotations

from jaxrl.config.schema import Config
from jaxrl.data.pass_rates import Curriculum
from jaxrl.data.stream import PromptStream
from jaxrl.dataflows.curriculum_sampling import CurriculumSampling
from jaxrl.dataflows.dynamic_sampling import (
    DynamicSampling,
    GroupFilter,
    MixedGroups,
    SpreadGroups,
)
from jaxrl.dataflows.rewarding import Rewards
from jaxrl.dataflows.samplers import (
    Generation,
    OneStepAhead,
    PartialSampling,
    Sampler,
    Sampling,
)
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.trainer.context import RunContext


def prompt_stream(run: RunContext) -> PromptStream:
    """The training prompts in an endless order; checkpoints save the position."""
    config, rollout = run.config, run.config.rollout
    dynamic = run.algorithm.dataflow.dynamic_sampling
    per_batch = rollout.generation_prompts if dynamic else rollout.num_prompts
    return PromptStream(
        run.train_prompts,
        weights=[source.settings.weight for source in run.problems.train],
        # Partial rollout draws prompts one at a time, as slots fall free.
        prompts_per_batch=1 if rollout.partial else per_batch,
        seed=config.seed,
        curriculum=_curriculum(config),
    )


def sampler_of(
    run: RunContext, generation: Generation, rewards: Rewards, prompts: PromptStream
) -> Sampler:
    """Builds the sampler of a step from the config.

    Args:
      run: the run.
      generation: the actor in its generation layout.
      rewards: rewards that score each response.
      prompts: stream of prompts; graded groups tell it which problems are solved.
    """
    options, dataflow = run.config.rollout, run.algorithm.dataflow
    if options.partial:
        sampler: Sampler = PartialSampling(
            generation,
            rewards,
            prompts_per_batch=options.generation_prompts,
            max_staleness=options.max_staleness,
        )
    elif run.config.algorithm.one_step_off:
        sampler = OneStepAhead(generation, rewards)
    else:
        sampler = Sampling(generation, rewards)
    sampler = CurriculumSampling(sampler, prompts)
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
    if options.keep_groups == "correctness":
        return MixedGroups()
    return SpreadGroups(options.min_spread)


def _curriculum(config: Config) -> Curriculum | None:
    off = config.data.curriculum.by == "off"
    return None if off else Curriculum(config.rollout.num_samples)
