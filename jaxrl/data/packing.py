"""Packing ragged sequences into rows of equal length, for a program that is compiled once.

U minibatches   M microbatches   R rows   T tokens of a row
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.errors import UserError


@dataclasses.dataclass(frozen=True)
class PackedShape:
    """The fixed shape of packed arrays, [U, M, R, T].

    Attributes:
      minibatches: U, optimiser updates of one step.
      microbatches: M, how many at most one update is computed in. Empty ones cost nothing at run time.
      rows: R, rows of a microbatch; a multiple of the shards of the batch.
      tokens: T, tokens of a row; no sequence may be longer.
    """

    minibatches: int
    microbatches: int
    rows: int
    tokens: int

    @staticmethod
    def for_sequences(
        num_sequences: int, *, longest: int, minibatches: int, rows: int, tokens: int
    ) -> PackedShape:
        """A shape that holds any `num_sequences` sequences of at most `longest` tokens.

        Raises:
          UserError: sequences do not divide into minibatches, or one does not fit into a row.
        """
        if num_sequences % minibatches:
            raise UserError(
                f"{num_sequences} sequences do not divide into {minibatches} minibatches; "
                "choose a number of updates that divides prompts x samples"
            )
        if longest > tokens:
            raise UserError(
                f"rows of {tokens} tokens cannot hold a sequence of {longest}; "
                f"raise the row to at least {longest}"
            )
        # With k = floor(tokens / longest), a row of fewer than k sequences has room for one more of any
        # length. First-fit opens a row only when no other has room, so all rows but the last hold at
        # least k. If all sequences are as long as can be, it is exactly k: the bound is tight.
        per_row = tokens // longest
        most_rows = -(-(num_sequences // minibatches) // per_row)
        return PackedShape(minibatches, -(-most_rows // rows), rows, tokens)


@dataclasses.dataclass(frozen=True)
class RowLimits:
    """What the batches of a run are packed into, however many sequences they have.

    Attributes:
      rows: R, rows of a microbatch.
      tokens: T, tokens of a row.
      longest: tokens of a sequence at most.
    """

    rows: int
    tokens: int
    longest: int

    def shape(self, num_sequences: int, *, minibatches: int) -> PackedShape:
        """The shape that holds any so many sequences; errors as of `PackedShape.for_sequences`."""
        return PackedShape.for_sequences(
            num_sequences,
            longest=self.longest,
            minibatches=minibatches,
            rows=self.rows,
            tokens=self.tokens,
        )


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where each token of each sequence lies.

    Attributes:
      shape: of the packed arrays.
      positions, segment_ids: int32 [U, M, R, T].
      num_micro_U: int32, microbatches in use.
      starts: for each sequence its offset in the flattened packed array; it lies there in one piece.
      lengths: tokens of each sequence.
    """

    shape: PackedShape
    positions: np.ndarray
    segment_ids: np.ndarray
    num_micro_U: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def pack(self, values: Sequence[np.ndarray], dtype) -> np.ndarray:
        """Lays out one ragged field, an array per sequence, as [U, M, R, T]; padding is 0."""
        out = np.zeros(self.positions.size, dtype)
        for start, value in zip(self.starts, values, strict=True):
            out[start : start + len(value)] = value
        return out.reshape(self.positions.shape)

    def unpack(self, packed: np.ndarray) -> list[np.ndarray]:
        """The inverse of `pack`."""
        flat = np.asarray(packed).reshape(-1)
        return [flat[s : s + n] for s, n in zip(self.starts, self.lengths, strict=True)]


def plan_packing(lengths: Sequence[int], shape: PackedShape) -> Packing:
    """Places sequences, in order, an equal number to each minibatch, first-fit by decreasing length.

    At most one row of a minibatch is half empty: two such rows would have been one. The shape must
    hold the sequences, as one from `PackedShape.for_sequences` does.
    """
    tokens_of = np.asarray(lengths, np.int64)
    U, M, R, T = dataclasses.astuple(shape)
    assert len(tokens_of) % U == 0, f"{len(tokens_of)} sequences do not divide into {U} minibatches"
    assert np.all((tokens_of > 0) & (tokens_of <= T)), f"sequences must have 1 to {T} tokens"
    positions, segment_ids = (np.zeros((U, M, R, T), np.int32) for _ in range(2))
    starts = np.zeros(len(tokens_of), np.int64)
    num_micro_U = np.zeros(U, np.int32)
    per_minibatch = len(tokens_of) // U
    for u in range(U):
        members = np.arange(u * per_minibatch, (u + 1) * per_minibatch)
        rows = _first_fit_decreasing(members, tokens_of, T)
        assert len(rows) <= M * R, (
            f"minibatch {u} fills {len(rows)} rows, the shape has {M} x {R}; it was made for fewer or "
            "shorter sequences"
        )
        num_micro_U[u] = -(-len(rows) // R)
        for index, row in enumerate(rows):
            # Deal rows out so that a last, partly filled microbatch is the only one with empty rows.
            micro, r = divmod(index, R)
            offset = 0
            for segment, i in enumerate(row, start=1):
                n = int(tokens_of[i])
                positions[u, micro, r, offset : offset + n] = np.arange(n)
                segment_ids[u, micro, r, offset : offset + n] = segment
                starts[i] = np.ravel_multi_index((u, micro, r, offset), (U, M, R, T))
                offset += n
    return Packing(shape, positions, segment_ids, num_micro_U, starts, tokens_of)


def _first_fit_decreasing(
    members: np.ndarray, lengths: np.ndarray, capacity: int
) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(members.tolist(), key=lambda i: (-lengths[i], i)):
        n = int(lengths[i])
        fit = next((r for r, free in enumerate(room) if free >= n), None)
        if fit is None:
            rows.append([])
            room.append(capacity)
            fit = len(rows) - 1
        rows[fit].append(i)
        room[fit] -= n
    return rows
