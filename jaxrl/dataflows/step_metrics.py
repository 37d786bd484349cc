"""The metrics of a step: a flat dict with verl's names.

Two differences to verl are intended. Every mean over tokens is taken once, over the whole step or minibatch,
so it does not depend on microbatches. `actor/lr` is the rate that the step was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl.algos.moments import Moments
from jaxrl.algos.value_loss import explained_variance
from jaxrl.mesh.hosts import fetch
from jaxrl.types import Completions, Scored, TrainBatch, ValueBatch

_PER_TOKEN_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


def batch_metrics(groups: Scored, *, max_prompt_tokens: int) -> dict[str, float]:
    """Metrics of rewards and lengths of a step's sequences."""
    completions = groups.completions
    prompt_lengths = np.array([len(t) for t in completions.prompts.tokens])
    response_lengths = completions.lengths_B
    return {
        **_spread("critic/score", groups.score_B),
        **_spread("critic/rewards", groups.reward_B),
        **_spread("response_length", response_lengths),
        "response_length/clip_ratio": float(completions.truncated_B.mean()),
        **_spread("prompt_length", prompt_lengths),
        "prompt_length/clip_ratio": float((prompt_lengths >= max_prompt_tokens).mean()),
        "perf/total_num_tokens": float(
            response_lengths.sum() + prompt_lengths.sum() * completions.num_samples
        ),
        "perf/response_num_tokens": float(response_lengths.sum()),
        **_turns(completions),
        "response_length/overlong_ratio": float((groups.shaping_B < 0).mean()),
    }


def _turns(completions: Completions) -> dict[str, float]:
    """Number of turns of each conversation, including the prompt, and number of turns of the environment."""
    answered = [int((np.diff(mask, prepend=1.0) < 0).sum()) for mask in completions.mask]
    resumed = [int((np.diff(mask, prepend=1.0) > 0).sum()) for mask in completions.mask]
    turns = 2 + np.array(answered) + np.array(resumed)
    return {
        **_spread("num_turns", turns),
        **_spread("tool_call_counts", np.array(answered)),
    }


def timing_per_token(metrics: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds per token of each phase; sampling counts sampled tokens, other phases all tokens.

    Args:
      metrics: metrics of a step, with its `timing_s`; without token counts the result is empty.
    """
    trained = metrics.get("perf/total_num_tokens", 0.0)
    sampled = metrics.get(
        "train/num_response_tokens_sampled", metrics.get("perf/response_num_tokens", 0.0)
    )
    tokens = dict.fromkeys(_PER_TOKEN_PHASES, trained) | {"gen": sampled}
    return {
        f"timing_per_token_ms/{phase}": 1000 * metrics[f"timing_s/{phase}"] / number
        for phase, number in tokens.items()
        if number and f"timing_s/{phase}" in metrics
    }


def advantage_metrics(batch: TrainBatch) -> dict[str, float]:
    """Metrics of the advantages of trained tokens (0 if all are rejected), and the number of these tokens."""
    mask, advantage = fetch((batch.loss_mask, batch.advantage))
    trained = advantage[mask > 0]
    return {
        **_spread("critic/advantages", trained if trained.size else np.zeros(1)),
        "train/num_trained_tokens": float(trained.size),
    }


def value_metrics(critic: str, targets: ValueBatch) -> dict[str, jax.Array]:
    """Metrics of a critic's values and targets for the trained tokens; still on the device.

    `vf_explained_var` is `algos.value_loss.explained_variance` of the values before the update.
    """
    numbers = _value_numbers(targets.old_value, targets.target, targets.loss_mask)
    return {f"{critic}/{name}": x for name, x in numbers.items()}


@jax.jit
def _value_numbers(value: jax.Array, target: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    numbers = {"vf_explained_var": explained_variance(value, target, mask)}
    for name, x in (("values", value), ("returns", target)):
        moments = Moments.of(x, mask)
        numbers |= {
            f"{name}/mean": moments.mean,
            f"{name}/max": moments.max,
            f"{name}/min": moments.min,
        }
    return numbers


def prefixed(role: str, update: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a role's update under its name; they may still be on the device.

    Names that have a group already ("rollout_corr/...") stay.
    """
    renamed = {"loss": "pg_loss" if role == "actor" else "vf_loss"}
    return {
        name if "/" in name else f"{role}/{renamed.get(name, name)}": value
        for name, value in update.items()
    }


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
