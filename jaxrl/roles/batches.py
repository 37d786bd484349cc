"""From sequences on the host to packed arrays for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.data.demonstrations import MaskedExample
from jaxrl.data.packing import PackedShape, Packing, PrefixGroups, plan_packing
from jaxrl.types import Completions, PackedBatch, TrainBatch


def pack_completions(
    completions: Completions,
    shape: PackedShape,
    *,
    shards: int = 1,
    fill_minibatches: bool = False,
    share_prompts: bool = False,
    last_B: np.ndarray | None = None,
) -> TrainBatch:
    """Packs sampled sequences with the sampler's log-probabilities of their response tokens.

    Args:
      completions: prompts and responses.
      shape: [U, M, R, T] of the batch.
      shards, fill_minibatches, last_B: see `plan_packing`.
      share_prompts: store a prompt once for all its answers in a row, except for its last token. Each
        answer's segment begins with that last token, because its hidden state predicts the first token of
        the answer.
    """
    prompts = [completions.prompts.tokens[i] for i in completions.prompt_index_B]
    sequences = _sequences(prompts, completions.tokens)
    shared_B = np.array([len(prompt) - 1 for prompt in prompts])
    packing = plan_packing(
        [len(s) for s in sequences],
        shape,
        shards=shards,
        fill_minibatches=fill_minibatches,
        prefix_groups=PrefixGroups(completions.prompt_index_B, shared_B) if share_prompts else None,
        last_B=last_B,
    )
    return _packed(packing, prompts, sequences, completions.rollout_logprob, completions.mask)


def pack_examples(
    examples: Sequence[MaskedExample], shape: PackedShape, *, shards: int = 1
) -> TrainBatch:
    """Packs supervised examples, each with its own loss mask; rollout log-probabilities are 0."""
    prompts, responses, masks = zip(*examples, strict=True)
    zeros = [np.zeros(len(response), np.float32) for response in responses]
    sequences = _sequences(prompts, responses)
    packing = plan_packing([len(s) for s in sequences], shape, shards=shards)
    return _packed(packing, prompts, sequences, zeros, masks)


def _sequences(prompts, responses) -> list[np.ndarray]:
    return [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]


def _packed(packing: Packing, prompts, sequences, rollout_logprob, mask) -> TrainBatch:

    def on_responses(values) -> np.ndarray:
        padded = [
            np.concatenate([np.zeros(len(p), np.float32), v])
            for p, v in zip(prompts, values, strict=True)
        ]
        return packing.pack(padded, np.float32)

    # Tokens of a shared prompt belong to no single sequence: -1.
    numbers = [
        np.where(np.arange(len(s)) < shared, -1, i)
        for i, (s, shared) in enumerate(zip(sequences, packing.shared, strict=True))
    ]
    packed: dict[str, Any] = {
        "tokens": packing.pack(sequences, np.int32),
        "positions": packing.positions,
        "segment_ids": packing.segment_ids,
        "sequence": np.where(packing.segment_ids, packing.pack(numbers, np.int32), -1),
        "loss_mask": on_responses(mask),
        "num_micro_U": packing.num_micro_U,
        "prefix_ids": packing.prefix_ids,
    }
    return TrainBatch.of(PackedBatch(**packed), rollout_logprob=on_responses(rollout_logprob))
