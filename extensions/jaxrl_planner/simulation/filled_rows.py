"""The rows and microbatches that the sequences of a step fill, packed as a run packs them.

A run computes whole microbatches of whole rows. Rows that are not full, and the rows that complete the last
microbatch of an update, are padding and cost as much as others.

U minibatches   R rows of a microbatch   G samples of a prompt
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from jaxrl.models.xla_attention import needed_tiles
from jaxrl.roles.packing import (
    PackedShape,
    PrefixGroups,
    Rows,
    best_fit_decreasing,
    filled_minibatches,
    placed,
)
from jaxrl_planner.simulation.workload import Workload


@dataclasses.dataclass(frozen=True)
class FilledRows:
    """The rows of a step that hold tokens.

    Attributes:
      rows_U: number of rows of each minibatch.
      tokens: number of tokens of a row.
      unused: mean number of tokens at the end of these rows that are padding.
    """

    rows_U: tuple[int, ...]
    tokens: int
    unused: float

    def microbatches(self, rows: float, *, fill_minibatches: bool) -> float:
        """Number of microbatches of a minibatch, the mean over the minibatches.

        Args:
          rows: R, number of rows of a microbatch.
          fill_minibatches: whether minibatches exchange sequences, so that one microbatch of the step is
            partly filled, and rows have hardly any gaps.
        """
        if fill_minibatches:
            gapless = sum(self.rows_U) * (1 - self.unused / self.tokens)
            return max(1.0, math.ceil(gapless / rows) / len(self.rows_U))
        return sum(math.ceil(filled / rows) for filled in self.rows_U) / len(self.rows_U)


@functools.lru_cache(maxsize=256)
def filled_rows(work: Workload) -> FilledRows:
    """The rows of a step with the sequences that the engine is replayed with."""
    rows_U, lengths_B, groups = _packed(work)
    rows = [row for rows in rows_U for row in rows]
    # A prefix is stored once for the members of its group, whole for a member without others.
    own = int((lengths_B - groups.shared_B).sum())
    shared = sum(
        sum({int(groups.group_B[i]): int(groups.shared_B[i]) for i in row}.values()) for row in rows
    )
    unused = work.row_tokens - (own + shared) / len(rows)
    return FilledRows(tuple(map(len, rows_U)), work.row_tokens, unused)


@functools.lru_cache(maxsize=256)
def pairs_of_a_row(
    work: Workload, rows: int, replicas: int, block_tokens: int, reach: int | None, parts: int = 1
) -> float:
    """Mean number of pairs of tokens whose scores plain attention computes for a row, in whole tiles.

    Replicas wait for each other in every microbatch, so the busiest one counts. A replica computes the tiles
    that any of the rows needs that it computes at once.

    Args:
      work: work of a step.
      rows: R, number of rows of a microbatch.
      replicas: number of replicas that split these rows.
      block_tokens: side of a tile, at most a row.
      reach: number of tokens in a window; None without one.
      parts: number of parts of a replica's rows that are computed one after the other.
    """
    rows_U, lengths_B, groups = _packed(work)
    if work.fill_minibatches and work.updates > 1:
        members_U = [np.sort(np.concatenate(filled)) for filled in rows_U]
        rows_U = filled_minibatches(members_U, rows_U, lengths_B, groups, rows, work.row_tokens)
    block, tokens = min(block_tokens, work.row_tokens), work.row_tokens
    busiest = []
    for filled in rows_U:
        shape = PackedShape(1, -(-len(filled) // rows), rows, tokens)
        fields = placed([filled], lengths_B, groups, shape, shards=replicas).fields()
        ids = np.stack([fields["segment_ids"][0], fields["prefix_ids"][0]], axis=2)
        for micro in ids.reshape(len(ids), replicas, parts, -1, 2, tokens):
            busiest.append(
                max(
                    sum(_pairs_of(together, block, reach) for together in replica) / parts
                    for replica in micro
                )
            )
    return float(np.mean(busiest))


def pairs_of_one_text(tokens: int, block_tokens: int, reach: int | None) -> float:
    """Pairs that tiles cover in a row of one text; args as of `pairs_of_a_row`."""
    ids = np.array([[[1] * tokens, [0] * tokens]], np.int32)  # segments, and no prefixes
    return _pairs_of(ids, min(block_tokens, tokens), reach)


def _pairs_of(ids: np.ndarray, block: int, reach: int | None) -> float:
    # Pairs of each of some rows that are computed at once; args as of `needed_tiles`: int32 [rows, 2, T].
    ids = np.pad(ids, ((0, 0), (0, 0), (0, -ids.shape[-1] % block)))
    own_NBC, prefix_NBC = ids.reshape(len(ids), 2, -1, block).transpose(1, 2, 0, 3)
    if prefix_NBC.any():
        # Windows count positions, which are not known here: all tiles of a prompt are taken.
        reach = None
    return float(needed_tiles(own_NBC, prefix_NBC, reach, xp=np).sum()) * block**2


@functools.lru_cache(maxsize=4)
def _packed(work: Workload) -> tuple[list[Rows], np.ndarray, PrefixGroups]:
    # The sequences of each row of each minibatch, the lengths of all sequences, and their shared prompts.
    prompts_N, responses_NG = work.lengths_of(work.prompts, work.samples)
    prompts_B = prompts_N.repeat(work.samples)
    lengths_B = prompts_B + responses_NG.ravel()
    index_B = np.arange(work.sequences)
    groups = PrefixGroups(index_B, np.zeros_like(index_B))
    if work.shares_prompts:
        # An answer begins with the last token of its prompt (roles.batches).
        groups = PrefixGroups(index_B // work.samples, prompts_B - 1)
    # Minibatches are equal parts of the step in its order, as a run makes them.
    members_U = np.array_split(index_B, work.updates)
    rows_U = [
        best_fit_decreasing(members, lengths_B, groups, work.row_tokens) for members in members_U
    ]
    return rows_U, lengths_B, groups
