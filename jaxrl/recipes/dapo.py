"""DAPO (Decoupled Clip and Dynamic Sampling Policy Optimisation), Algorithm 1 of the paper.

The four techniques sit where the paper puts them: dynamic sampling in the loop below, the soft overlong
punishment in `score`, clip-higher and the token-level mean in `update`. Which they are is decided by the
functions handed in; GRPO is this loop with other functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax

from jaxrl.recipes.dynamic_sampling import GroupBuffer, SamplingStats
from jaxrl.types import Completions, Prompts, Scored, TrainBatch

Metrics = dict[str, jax.Array]


def dapo(
    stream: Iterable[Prompts],
    buffer: GroupBuffer,
    *,
    generate: Callable[[Prompts], Completions],
    score: Callable[[Completions], Scored],
    keep: Callable[[Scored], Scored],
    with_advantages: Callable[[Scored], TrainBatch],
    with_old_logprobs: Callable[[TrainBatch], TrainBatch],
    update: Callable[[TrainBatch], Metrics],
    load_rollout: Callable[[], None],
    hooks: Callable[[Scored, SamplingStats, TrainBatch, Metrics], bool],
) -> None:
    """Trains until `hooks` returns False or the stream ends.

    Args:
      stream: prompts, a generation batch at a time.
      buffer: collects groups until a step is full.
      generate: G samples of each prompt, from the actor in its generation layout.
      score: grades them, and punishes overlong ones softly.
      keep: which groups are worth training on.
      with_advantages: packs the groups of a step and gives each token its group-relative advantage.
      with_old_logprobs: adds the actor's log-probabilities at the start of the step.
      update: all optimiser updates of the step.
      load_rollout: brings the new weights into the generation layout.
      hooks: log, evaluate, save; says whether to go on.
    """
    for prompts in stream:
        completions = generate(prompts)
        scored = score(completions)
        if not buffer.add(scored, keep(scored)):
            continue
        groups, sampling = buffer.take()
        batch = with_advantages(groups)
        batch = with_old_logprobs(batch)
        metrics = update(batch)
        load_rollout()
        if not hooks(groups, sampling, batch, metrics):
            break
