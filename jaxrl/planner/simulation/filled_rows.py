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

from jaxrl.data.packing import PrefixGroups, best_fit_decreasing
from jaxrl.planner.simulation.workload import Workload


@dataclasses.dataclass(frozen=True)
class FilledRows:
    """The rows of a step that hold tokens.

    Attributes:
      rows_U: number of rows of each minibatch.
      tokens: number of tokens of a row.
      prompt_copies: copies of a prompt for each of its responses: 1 unless prompts are shared.
      unused: mean number of tokens at the end of these rows that are padding.
      unused_square: mean of the squares of these numbers.
    """

    rows_U: tuple[int, ...]
    tokens: int
    prompt_copies: float
    unused: float
    unused_square: float

    @property
    def total(self) -> int:
        """Number of rows of all minibatches."""
        return sum(self.rows_U)

    @property
    def most(self) -> int:
        """Number of rows of the largest minibatch."""
        return max(self.rows_U)

    def microbatches(self, rows: float, *, fill_minibatches: bool) -> float:
        """Number of microbatches of a minibatch, the mean over the minibatches.

        Args:
          rows: R, number of rows of a microbatch.
          fill_minibatches: whether minibatches exchange sequences, so that one microbatch of the step is
            partly filled, and rows have hardly any gaps.
        """
        if fill_minibatches:
            gapless = self.total * (1 - self.unused / self.tokens)
            return max(1.0, math.ceil(gapless / rows) / len(self.rows_U))
        return sum(math.ceil(filled / rows) for filled in self.rows_U) / len(self.rows_U)


@functools.lru_cache(maxsize=256)
def filled_rows(work: Workload) -> FilledRows:
    """Packs the sequences of a step, whose lengths are those of the replayed engine."""
    prompts_N, responses_NG = work.lengths_of(work.prompts, work.samples)
    prompts_B = prompts_N.repeat(work.samples)
    lengths_B = prompts_B + responses_NG.ravel()
    index_B = np.arange(work.sequences)
    groups = PrefixGroups(index_B, np.zeros_like(index_B))
    if work.shares_prompts:
        # An answer begins with the last token of its prompt (roles.batches).
        groups = PrefixGroups(index_B // work.samples, prompts_B - 1)
    rows_U, unused, copies = [], [], 0
    for members in np.array_split(index_B, work.updates):
        rows = best_fit_decreasing(members, lengths_B, groups, work.row_tokens)
        rows_U.append(len(rows))
        for row in rows:
            # A prefix is stored once for the members of its group, whole for a member without others.
            shared = {int(groups.group_B[i]): int(groups.shared_B[i]) for i in row}
            copies += len(shared)
            own = sum(int(lengths_B[i] - groups.shared_B[i]) for i in row)
            unused.append(work.row_tokens - own - sum(shared.values()))
    unused = np.array(unused, float)
    return FilledRows(
        tuple(rows_U),
        work.row_tokens,
        copies / work.sequences,
        float(unused.mean()),
        float((unused**2).mean()),
    )
