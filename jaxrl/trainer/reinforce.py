"""The second stage: reinforcement learning by the config's recipe, from the warm start or a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable

from jaxrl.data.stream import PromptStream
from jaxrl.recipes.one_step_off_policy import one_step_off_policy
from jaxrl.recipes.registry import RECIPES
from jaxrl.trainer.config import Config
from jaxrl.trainer.events import Events
from jaxrl.trainer.interrupt import StopSignal
from jaxrl.trainer.recipe import events_of, title_of
from jaxrl.trainer.setup import Parts, prompt_options
from jaxrl.trainer.stage import open_stage, run_until_stopped
from jaxrl.trainer.team import build_team, keep_reference, start_from
from jaxrl.trainer.warm_start import warm_start


def reinforce(parts: Parts, stop: StopSignal) -> None:
    """Trains the team of `parts` to the last step of its config.

    Raises:
      StopRequested: a signal arrived; the last finished step is saved.
      UserError: too few prompts are answered both right and wrong, or a metric is not finite.
    """
    config = parts.config
    team = build_team(parts)
    with open_stage(
        parts,
        title_of(config),
        config.run_folder / "rl",
        num_steps=config.run.num_steps,
        save_every=config.run.save_every,
        stop=stop,
    ) as stage:
        record = stage.resume(team.learners)
        if stage.finished:
            return
        if record is None:
            start_from(team, warm_start(parts, stop).state.params, parts)
        elif team.reference is not None:
            keep_reference(team, warm_start(parts, stop).state.params)
        stream = _stream(parts)
        with Events(parts, stage, team, stream, stop) as events:
            if record is not None:
                stream.restore(record["stream"])
                events.restore(record)
            stage.begin(team.learners, events.record())
            events.load_rollout()
            if stage.begins:
                stage.log_start(events.evaluate("before"))
            run_until_stopped(stage, team.learners, _recipe(config, events, stream))


def _recipe(config: Config, events: Events, stream: PromptStream) -> Callable[[], None]:
    """The config's recipe, with the events that it names."""
    recipe = RECIPES[config.algorithm.recipe]
    handed = {name: getattr(events, name) for name in events_of(config.algorithm.recipe)}
    if config.algorithm.one_step_off:
        recipe = one_step_off_policy(recipe)
        handed |= {
            "start_generating": events.start_generating,
            "generate": events.finish_generating,
        }
    return functools.partial(recipe, events.batches(stream), **handed)


def _stream(parts: Parts) -> PromptStream:
    config = parts.config
    rollout = config.rollout
    buffered = "buffer" in events_of(config.algorithm.recipe)
    per_batch = rollout.generation_prompts if buffered else rollout.num_prompts
    return PromptStream(
        parts.train,
        parts.tokenizer,
        # `Events.batches` makes batches of what is missing.
        prompts_per_batch=1 if rollout.partial else per_batch,
        seed=config.seed if config.data.shuffle_seed is None else config.data.shuffle_seed,
        **prompt_options(config),
    )
