"""From sequences on the host to packed arrays for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.data.demonstrations import MaskedExample
from jaxrl.data.packing import PackedShape, plan_packing
from jaxrl.types import Completions, PackedBatch, TrainBatch


def pack_completions(completions: Completions, shape: PackedShape) -> TrainBatch:
    """Packs sampled sequences, with what the sampler said of their response tokens."""
    prompts = [completions.prompts.tokens[i] for i in completions.prompt_index_B]
    return _pack(prompts, completions.tokens, completions.rollout_logprob, completions.mask, shape)


def pack_examples(examples: Sequence[MaskedExample], shape: PackedShape) -> TrainBatch:
    """Packs examples for supervised training, each with its own mask; log-probabilities are 0."""
    prompts, responses, masks = zip(*examples, strict=True)
    zeros = [np.zeros(len(response), np.float32) for response in responses]
    return _pack(prompts, responses, zeros, masks, shape)


def _pack(prompts, responses, rollout_logprob, mask, shape: PackedShape) -> TrainBatch:
    sequences = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
    packing = plan_packing([len(s) for s in sequences], shape)

    def on_responses(values) -> np.ndarray:
        padded = [
            np.concatenate([np.zeros(len(p), np.float32), v])
            for p, v in zip(prompts, values, strict=True)
        ]
        return packing.pack(padded, np.float32)

    numbers = [np.full(len(s), i, np.int32) for i, s in enumerate(sequences)]
    packed: dict[str, Any] = {
        "tokens": packing.pack(sequences, np.int32),
        "positions": packing.positions,
        "segment_ids": packing.segment_ids,
        "sequence": np.where(packing.segment_ids, packing.pack(numbers, np.int32), -1),
        "loss_mask": on_responses(mask),
        "num_micro_U": packing.num_micro_U,
    }
    return TrainBatch.of(PackedBatch(**packed), rollout_logprob=on_responses(rollout_logprob))
