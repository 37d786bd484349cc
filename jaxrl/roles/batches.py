"""From sequences on the host to packed arrays for the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jaxrl.data.demonstrations import MaskedExample
from jaxrl.roles.packing import PackedShape, Packing, PrefixGroups, plan_packing
from jaxrl.types import Branch, Completions, LazyRows, PackedBatch, TrainBatch

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
    own_R: np.ndarray | None = None,
) -> tuple[TrainBatch, Packing]:
    """Packs sampled sequences with the sampler's log-probabilities of their response tokens.

    Further conversations of agents go to the minibatch of their sample. It has at most as many of them as
    samples; of more, those with the fewest trained tokens are left out. The shape must have room for them.

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
      own_R: see `Packing`.
    """
    rows = _rows_of(completions, trained_B, shape.minibatches)
    plan = functools.partial(
        plan_packing,
        rows.lengths,
        shape,
        shards=shards,
        last_B=None if last_B is None else last_B[rows.sample],
        # In their order, like the samples of completions without further conversations.
        minibatch_B=rows.sample * shape.minibatches // len(completions),
        own_R=own_R,
    )
    packing = None
    if share_prompts:
        packing = plan(prefix_groups=PrefixGroups(rows.group, rows.shared))
        stored = (packing.segments.stop - packing.segments.first).sum()
        saves = stored <= _WORTH_SHARING * packing.lengths.sum()
        if share_prompts == "auto" and not saves:
            packing = None
    if packing is None:
        packing = plan(fill_minibatches=fill_minibatches)
    if completions.fetch is not None:
        # The quantile is one of all entropies.
        completions = completions.with_rows(packing.own_B | (top_entropy < 1))
        rows = _rows_of(completions, trained_B, shape.minibatches)
    batch = _packed(packing, rows.tokens, rows.logprob, rows.mask, rows.number)
    if completions.routes:
        # -1 on padding, and on the last token of each sequence, which was never run through the model. The
        # number of an expert fits into 16 bits.
        flat = [of_one.reshape(len(of_one), -1) for of_one in completions.routes]
        routes = np.moveaxis(packing.pack(flat, np.int16, padding=-1), -1, 2)
        batch = batch.replace(routes=routes)
    if top_entropy < 1:
        trained = [of_one[m > 0] for of_one, m in zip(rows.entropy, rows.mask, strict=True)]
        trained = np.concatenate(trained).astype(np.float64)
        # The quantile lies between two entropies if the share is not a whole number of tokens.
        bound = np.quantile(trained, 1.0 - top_entropy) if len(trained) else 0.0
        weight = [of_one >= bound for of_one in rows.entropy]
        batch = batch.replace(weight=packing.pack_ends(weight, np.float32))
    return batch, packing


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The C sequences of a step: the conversation of each sample, then further ones.

    Attributes:
      sample: int [C], sample of each.
      number: int [C], `PackedBatch.sequence` of each.
      group: int [C], sequences of equal number begin with the same prompt.
      shared: int [C], number of tokens of the prompt that may be stored once.
      lengths: number of tokens of each.
      tokens: C int32 arrays.
      logprob, entropy, mask: C float32 arrays, of the last tokens of each.
    """

    sample: np.ndarray
    number: np.ndarray
    group: np.ndarray
    shared: np.ndarray
    lengths: list[int]
    tokens: Sequence[np.ndarray]
    logprob: Sequence[np.ndarray]
    entropy: Sequence[np.ndarray]
    mask: Sequence[np.ndarray]


def _rows_of(completions: Completions, trained_B: np.ndarray | None, minibatches: int) -> _Rows:
    B, group_B = len(completions), completions.prompt_index_B
    prompts = [completions.prompts.tokens[n] for n in group_B]
    # (sample, its number among those of the sample from 1, branch)
    further: list[tuple[int, int, Branch]] = []
    if completions.of_agents is not None:
        most, branches = B // minibatches, completions.of_agents.branches
        further = [(b, j, x) for b, some in enumerate(branches) for j, x in enumerate(some, 1)]
        # A minibatch has room for as many as samples; those with the most trained tokens are worth the most.
        further.sort(key=lambda item: -item[2].mask.sum())
        parts = ([x for x in further if x[0] // most == u][:most] for u in range(minibatches))
        further = sorted((x for some in parts for x in some), key=lambda item: item[:2])
    sample = np.array([*range(B), *(b for b, _, _ in further)])
    mask = [*completions.mask, *(branch.mask for _, _, branch in further)]
    if trained_B is not None:
        trained = trained_B.astype(np.float32)
        mask = LazyRows(
            [
                functools.partial(np.multiply, of_one, trained[b])
                for of_one, b in zip(mask, sample, strict=True)
            ]
        )
    whole = [*zip(prompts, completions.tokens, strict=True), *((x.tokens,) for _, _, x in further)]
    return _Rows(
        sample=sample,
        # Modulo B each of these numbers is its sample.
        number=np.array([*range(B), *(b + j * B for b, j, _ in further)]),
        # A further conversation is a group of its own, and shares nothing.
        group=np.append(group_B, len(completions.prompts) + np.arange(len(further))),
        # Each answer keeps a last token of the prompt: its hidden state predicts the answer's first token.
        shared=np.array([len(prompt) - 1 for prompt in prompts] + [0] * len(further)),
        lengths=[sum(map(len, parts)) for parts in whole],
        # Like `mask` made as they are read: a process reads those of its own rows.
        tokens=LazyRows([functools.partial(np.concatenate, parts) for parts in whole]),
        logprob=[*completions.rollout_logprob, *(x.logprob for _, _, x in further)],
        entropy=[*completions.entropy, *(branch.entropy for _, _, branch in further)],
        mask=mask,
    )


def pack_examples(
    examples: Sequence[MaskedExample],
    shape: PackedShape,
    *,
    shards: int = 1,
    own_R: np.ndarray | None = None,
) -> tuple[TrainBatch, Packing]:
    """Packs supervised examples, each with its own loss mask; rollout log-probabilities are 0."""
    prompts, responses, masks = zip(*examples, strict=True)
    zeros = [np.zeros(len(response), np.float32) for response in responses]
    sequences = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
    packing = plan_packing([len(s) for s in sequences], shape, shards=shards, own_R=own_R)
    return _packed(packing, sequences, zeros, masks), packing


def _packed(
    packing: Packing, sequences, rollout_logprob, mask, number: np.ndarray | None = None
) -> TrainBatch:
    fields: dict[str, Any] = {
        "tokens": packing.pack(sequences, np.int32),
        "loss_mask": packing.pack_ends(mask, np.float32),
        **packing.fields(number),
    }
    return TrainBatch.of(
        PackedBatch(**fields),
        rollout_logprob=packing.pack_ends(rollout_logprob, np.float32),
        weight=packing.filled(1, np.float32),
    )
