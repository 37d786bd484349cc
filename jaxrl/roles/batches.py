"""From sequences on the host to packed arrays for the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jaxrl.data.demonstrations import MaskedExample
from jaxrl.roles.packing import PackedShape, Packing, PrefixGroups, plan_packing
from jaxrl.types import Completions, PackedBatch, TrainBatch

ShareOption = bool | Literal["auto"]

# Shared prompts are computed in smaller tiles. They win a tenth of the time where they save 22% of the
# tokens, and lose a tenth where they save 11% (docs/learning.md).
_WORTH_SHARING = 0.83


def pack_completions(
    completions: Completions,
    shape: PackedShape,
    *,
    shards: int = 1,
    fill_minibatches: bool = False,
    share_prompts: ShareOption = False,
    last_B: np.ndarray | None = None,
    trained_B: np.ndarray | None = None,
    top_entropy: float = 1.0,
) -> TrainBatch:
    """Packs sampled sequences with the sampler's log-probabilities of their response tokens.

    Args:
      completions: prompts and responses.
      shape: [U, M, R, T] of the batch.
      shards, fill_minibatches, last_B: see `plan_packing`.
      share_prompts: store a prompt once for all its answers in a row, except for its last token. Each
        answer's segment begins with that last token, because its hidden state predicts the first token of
        the answer. "auto" does so if it saves enough tokens.
      trained_B: bool, the sequences that the loss trains on; None for all.
      top_entropy: share of the trained tokens, those of the highest entropy, that have weight 1; the others
        have weight 0.
    """
    prompts = [completions.prompts.tokens[i] for i in completions.prompt_index_B]
    sequences = [np.concatenate(pair) for pair in zip(prompts, completions.tokens, strict=True)]
    shared_B = np.array([len(prompt) - 1 for prompt in prompts])
    plan = functools.partial(
        plan_packing, [len(s) for s in sequences], shape, shards=shards, last_B=last_B
    )
    packing = None
    if share_prompts:
        packing = plan(prefix_groups=PrefixGroups(completions.prompt_index_B, shared_B))
        saves = (packing.segment_ids > 0).sum() <= _WORTH_SHARING * packing.lengths.sum()
        if share_prompts == "auto" and not saves:
            packing = None
    if packing is None:
        packing = plan(fill_minibatches=fill_minibatches)
    mask = completions.mask
    if trained_B is not None:
        mask = [of_one * trained for of_one, trained in zip(mask, trained_B, strict=True)]
    batch = _packed(packing, sequences, completions.rollout_logprob, mask)
    if top_entropy < 1:
        trained = [of_one[m > 0] for of_one, m in zip(completions.entropy, mask, strict=True)]
        trained = np.concatenate(trained).astype(np.float64)
        # The quantile lies between two entropies if the share is not a whole number of tokens.
        bound = np.quantile(trained, 1.0 - top_entropy) if len(trained) else 0.0
        weight = [of_one >= bound for of_one in completions.entropy]
        batch = batch.replace(weight=packing.pack_ends(weight, np.float32))
    return batch


def pack_examples(
    examples: Sequence[MaskedExample], shape: PackedShape, *, shards: int = 1
) -> TrainBatch:
    """Packs supervised examples, each with its own loss mask; rollout log-probabilities are 0."""
    prompts, responses, masks = zip(*examples, strict=True)
    zeros = [np.zeros(len(response), np.float32) for response in responses]
    sequences = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
    packing = plan_packing([len(s) for s in sequences], shape, shards=shards)
    return _packed(packing, sequences, zeros, masks)


def _packed(packing: Packing, sequences, rollout_logprob, mask) -> TrainBatch:
    fields: dict[str, Any] = {
        "tokens": packing.pack(sequences, np.int32),
        "loss_mask": packing.pack_ends(mask, np.float32),
        **packing.fields(),
    }
    rollout_logprob = packing.pack_ends(rollout_logprob, np.float32)
    return TrainBatch.of(PackedBatch(**fields), rollout_logprob=rollout_logprob)
