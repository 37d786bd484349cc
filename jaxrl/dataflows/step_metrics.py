"""The metrics of a step: a flat dict with verl's names.

Two differences to verl are intended. Every mean over tokens is taken once, over the whole step or minibatch,
so it does not depend on microbatches. `actor/lr` is the rate that the step was trained with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl.algos.moments import Moments
from jaxrl.algos.value_loss import explained_variance
from jaxrl.mesh.hardware import roof_of
from jaxrl.mesh.rules import TRAIN_RULES, shards_of
from jaxrl.roles.flops import attention_flops, token_flops, training_flops
from jaxrl.roles.packed_model import PackedModel
from jaxrl.roles.packing import Packing
from jaxrl.types import Completions, Scored, TrainBatch, ValueBatch

_PER_TOKEN_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


def batch_metrics(groups: Scored, *, max_prompt_tokens: int) -> dict[str, float]:
    """Metrics of rewards and lengths of a step's sequences.

    Samples that do not count (`Scored.counts_B`) are in `Scored.left_out` alone. A step without any other
    has no means.
    """
    completions, counts_B = groups.completions, groups.counts_B
    lengths_N = np.array([len(t) for t in completions.prompts.tokens])
    prompt_lengths = lengths_N[groups.counts_NG.any(axis=1)]
    response_lengths = completions.lengths_B[counts_B]
    changes = [_changes(mask) for mask in completions.mask]
    answered, resumed = np.array(changes, np.int64).reshape(-1, 2)[counts_B].T
    return {
        **_spread("critic/score", groups.score_B[counts_B]),
        **_spread("critic/rewards", groups.reward_B[counts_B]),
        **_spread("response_length", response_lengths),
        **_mean("response_length/clip_ratio", completions.truncated_B[counts_B]),
        **_spread("prompt_length", prompt_lengths),
        **_mean("prompt_length/clip_ratio", prompt_lengths >= max_prompt_tokens),
        # As in verl every sample has its prompt, also where samples share it.
        "perf/total_num_tokens": float(
            response_lengths.sum() + lengths_N[completions.prompt_index_B[counts_B]].sum()
        ),
        "perf/response_num_tokens": float(response_lengths.sum()),
        # The prompt and the first answer are turns too.
        **_spread("num_turns", 2 + answered + resumed),
        **_spread("tool_call_counts", answered),
        **_mean("response_length/overlong_ratio", groups.shaping_B[counts_B] < 0),
        **_mean("train/mixed_groups", groups.differ_N(groups.correct_B)),
        **groups.left_out,
        **_agent_metrics(completions),
    }


def _changes(mask: np.ndarray) -> tuple[int, int]:
    """How often a mask falls, where an environment begins to speak, and rises, where the policy goes on."""
    if mask.all():
        return 0, 0
    change = np.diff(mask, prepend=1.0)
    return int((change < 0).sum()), int((change > 0).sum())


def _agent_metrics(completions: Completions) -> dict[str, float]:
    """Conversations beyond the first of each sample."""
    agents = completions.of_agents
    if agents is None:
        return {}
    return {"agent/further_conversations": float(sum(map(len, agents.branches)))}


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


def advantage_metrics(batch: TrainBatch) -> dict[str, jax.Array]:
    """Metrics of advantages of trained tokens (0 if all are rejected), and their number; on the device."""
    return _advantage_numbers(batch.advantage, batch.loss_mask)


@jax.jit
def _advantage_numbers(advantage: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    # An integer: float32 does not count beyond 16.7 million.
    number = (mask > 0).sum()
    return {**_moments("critic/advantages", advantage, mask), "train/num_trained_tokens": number}


def value_metrics(critic: str, targets: ValueBatch) -> dict[str, jax.Array]:
    """Metrics of a critic's values and targets for the trained tokens; still on the device.

    `vf_explained_var` is `algos.value_loss.explained_variance` of the values before the update.
    """
    numbers = _value_numbers(targets.old_value, targets.target, targets.loss_mask)
    return {f"{critic}/{name}": x for name, x in numbers.items()}


@jax.jit
def _value_numbers(value: jax.Array, target: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    return {
        "vf_explained_var": explained_variance(value, target, mask),
        **_moments("values", value, mask),
        **_moments("returns", target, mask),
    }


def _moments(name: str, x: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    moments = Moments.of(x, mask)
    return {f"{name}/{kind}": getattr(moments, kind) for kind in ("mean", "max", "min")}


def prefixed(role: str, update: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a role's update under its name; they may still be on the device.

    Names that have a group already ("rollout_corr/...") stay.
    """
    # verl's names.
    renamed = {"loss": "pg_loss" if role == "actor" else "vf_loss"}
    return {
        name if "/" in name else f"{role}/{renamed.get(name, name)}": value
        for name, value in update.items()
    }


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean and extremes; nothing of no values."""
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _mean(name: str, values: np.ndarray) -> dict[str, float]:
    return {name: float(values.mean())} if len(values) else {}


# Timers of the phase that updates the model: of an actor, and of pairs.
_UPDATES = ("timing_s/update_actor", "timing_s/update")


def work_metrics(model: PackedModel, packing: Packing, *, epochs: int = 1) -> dict[str, float]:
    """Work metrics of packed sequences that `model` learns from, `epochs` times.

    Returns:
      perf/padding: share of padding in the microbatches that run.
      perf/imbalance: largest work of a device over the mean, summed over microbatches, because devices wait
        for each other after each of them; 1 is even. Padding counts like tokens. Attention counts within
        segments only.
      perf/update_tflop: operations of the update on one device, in 10^12 (`roles.flops`).
      perf/roof_tflops: peak rate of a device in 10^12 per second; absent if unknown.
    """
    U, M, R, T = dataclasses.astuple(packing.shape)
    starts, first, stop = (getattr(packing.segments, x) for x in ("starts", "first", "stop"))
    attention = attention_flops(model.model, stop) - attention_flops(model.model, first)
    # The backward pass takes twice the operations of the forward pass.
    work = np.bincount(starts // T, 3 * attention, minlength=U * M * R)
    work += T * token_flops(model.model).training
    row_shards = shards_of("batch", TRAIN_RULES, model.mesh)
    used_UM = np.arange(M) < packing.num_micro_U[:, None]
    work_S = work.reshape(U, M, row_shards, -1).sum(-1)[used_UM]
    # A branch costs as much as its whole sequence minus the shared prefix.
    operations = training_flops(model.model, stop).sum() - training_flops(model.model, first).sum()
    metrics = {
        "perf/padding": 1 - float((stop - first).sum()) / max(1, int(used_UM.sum()) * R * T),
        "perf/imbalance": work_S.max(-1).sum() / work_S.mean(-1).sum() if len(work_S) else 1.0,
        "perf/update_tflop": epochs * float(operations) / 1e12 / model.mesh.size,
    }
    roof = roof_of(model.mesh.devices.flat[0].device_kind)
    if roof is not None:
        metrics["perf/roof_tflops"] = roof.tflops(model.train.dtype)
    return metrics


def work_rates(metrics: Mapping[str, float]) -> dict[str, float]:
    """Speed of the update, from the metrics of a step and its `timing_s`; empty without an update.

    Returns:
      perf/tflops_per_device: operations of the model per second and device, in 10^12.
      perf/mfu: the same divided by the peak rate of the device (model FLOPs utilisation); absent if unknown.
    """
    seconds = sum(metrics.get(name, 0.0) for name in _UPDATES)
    if not seconds or "perf/update_tflop" not in metrics:
        return {}
    rate = metrics["perf/update_tflop"] / seconds
    rates = {"perf/tflops_per_device": rate}
    if "perf/roof_tflops" in metrics:
        rates["perf/mfu"] = rate / metrics["perf/roof_tflops"]
    return rates
