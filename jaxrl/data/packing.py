"""Packing ragged sequences into rows of equal length, for a program that is compiled once.

U minibatches   M microbatches   R rows   T tokens of a row
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

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
        # length. Best-fit opens a row only when no other has room, so all rows but the last hold at
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
      prefix_ids: int32 [U, M, R, T], for each token the segment that its own goes on from, 0 for none; None
        where nothing can be shared.
      num_micro_U: int32, microbatches in use.
      starts: for each sequence its offset in the flattened packed array; it lies there in one piece, but for
        what it shares.
      lengths: tokens of each sequence.
      shared: how many first tokens of each lie elsewhere, where others of its row have them too.
      shared_starts: the offset of those.
    """

    shape: PackedShape
    positions: np.ndarray
    segment_ids: np.ndarray
    prefix_ids: np.ndarray | None
    num_micro_U: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray
    shared_starts: np.ndarray

    def pack(self, values: Sequence[np.ndarray], dtype) -> np.ndarray:
        """Lays out one ragged field, an array per sequence, as [U, M, R, T]; padding is 0.

        What is shared is taken from the last of those who share it.
        """
        out = np.zeros(self.positions.size, dtype)
        for value, start, shared, there in self._places(values):
            out[there : there + shared] = value[:shared]
            out[start : start + len(value) - shared] = value[shared:]
        return out.reshape(self.positions.shape)

    def unpack(self, packed: np.ndarray) -> list[np.ndarray]:
        """The inverse of `pack`."""
        flat = np.asarray(packed).reshape(-1)
        return [
            np.concatenate([flat[there : there + shared], flat[start : start + length - shared]])
            for length, start, shared, there in self._places(self.lengths)
        ]

    def _places(self, of_sequences) -> Iterator[tuple[Any, int, int, int]]:
        return zip(of_sequences, self.starts, self.shared, self.shared_starts, strict=True)


@dataclasses.dataclass(frozen=True)
class PrefixGroups:
    """Sequences that begin alike, such as the answers to one prompt.

    Attributes:
      family_B: int, those of one family begin with the same tokens.
      shared_B: int, how many these are; less than the sequence has.
    """

    family_B: np.ndarray
    shared_B: np.ndarray


def plan_packing(
    lengths: Sequence[int],
    shape: PackedShape,
    *,
    shards: int = 1,
    fill_minibatches: bool = False,
    families: PrefixGroups | None = None,
) -> Packing:
    """Places sequences, in order, an equal number to each minibatch, best-fit by decreasing length.

    At most one row of a minibatch is half empty: two such rows would have been one. Rows of a microbatch
    have about equal work, and so do the shards that its rows are split over, which wait for each other. The
    shape must hold the sequences, as one from `PackedShape.for_sequences` does.

    Args:
      lengths: tokens of each sequence.
      shape: of the packed arrays.
      shards: of the rows of a microbatch; each has as many that follow each other.
      fill_minibatches: sequences may change places with ones of another minibatch where the step then has
        fewer microbatches. Each minibatch keeps its number of sequences.
      families: what sequences of a row may share; then minibatches stay as they are.
    """
    tokens_of = np.asarray(lengths, np.int64)
    U, M, R, T = dataclasses.astuple(shape)
    assert len(tokens_of) % U == 0, f"{len(tokens_of)} sequences do not divide into {U} minibatches"
    assert np.all((tokens_of > 0) & (tokens_of <= T)), f"sequences must have 1 to {T} tokens"
    assert R % shards == 0, f"{R} rows do not divide into {shards} shards"
    assert not (families and fill_minibatches), "families would be parted by an exchange"
    members_U = list(np.arange(len(tokens_of)).reshape(U, -1))
    if families is None:
        rows_U = [_best_fit_decreasing(members, tokens_of, T) for members in members_U]
    else:
        rows_U = [_best_fit_families(members, tokens_of, families, T) for members in members_U]
    if fill_minibatches and U > 1:
        rows_U = _filled_minibatches(members_U, rows_U, tokens_of, R, T)
    positions, segment_ids, prefix_ids = (np.zeros((U * M * R, T), np.int32) for _ in range(3))
    starts, shared, shared_starts = (np.zeros(len(tokens_of), np.int64) for _ in range(3))
    for u, rows in enumerate(rows_U):
        assert len(rows) <= M * R, (
            f"minibatch {u} fills {len(rows)} rows, the shape has {M} x {R}; it was made for fewer or "
            "shorter sequences"
        )
        pieces = [_pieces(row, tokens_of, families) for row in rows]
        for index, r in _dealt([_work(row) for row in pieces], R, shards):
            at = u * M * R + index
            offset = 0
            for segment, piece in enumerate(pieces[r], start=1):
                here = slice(offset, offset + piece.stop - piece.first)
                positions[at, here] = np.arange(piece.first, piece.stop)
                segment_ids[at, here] = segment
                prefix_ids[at, here] = piece.prefix
                start = at * T + offset
                if piece.sequence is not None:
                    starts[piece.sequence], shared[piece.sequence] = start, piece.first
                for i in piece.sharers:
                    shared_starts[i] = start
                offset = here.stop
    num_micro_U = np.array([_num_micro(rows, R) for rows in rows_U], np.int32)
    positions, segment_ids, prefix_ids = (
        x.reshape(U, M, R, T) for x in (positions, segment_ids, prefix_ids)
    )
    return Packing(
        shape,
        positions,
        segment_ids,
        prefix_ids if families else None,
        num_micro_U,
        starts,
        tokens_of,
        shared,
        shared_starts,
    )


Rows = list[list[int]]


@dataclasses.dataclass(frozen=True)
class _Segment:
    """A segment of a row: tokens `first` to `stop` of a sequence, or of what several share.

    Attributes:
      first, stop: which tokens.
      prefix: number of the piece that it goes on from, counted from 1; 0 for none.
      sequence: whose it is alone; None if several share it.
      sharers: who share it.
    """

    first: int
    stop: int
    prefix: int = 0
    sequence: int | None = None
    sharers: tuple[int, ...] = ()


def _pieces(row: list[int], lengths: np.ndarray, families: PrefixGroups | None) -> list[_Segment]:
    """The segments of a row, in order: what a family shares stands before its members."""
    kin: dict[int, list[int]] = {}
    for i in row:
        kin.setdefault(-1 - i if families is None else int(families.family_B[i]), []).append(i)
    pieces: list[_Segment] = []
    for members in kin.values():
        shared = 0 if families is None else int(families.shared_B[members[0]])
        if len(members) == 1 or not shared:
            pieces += [_Segment(0, int(lengths[i]), sequence=i) for i in members]
            continue
        pieces.append(_Segment(0, shared, sharers=tuple(members)))
        prefix = len(pieces)
        pieces += [_Segment(shared, int(lengths[i]), prefix, sequence=i) for i in members]
    return pieces


def _work(pieces: list[_Segment]) -> int:
    """Of attention in a row: for each of its tokens, those before it in its sequence."""
    return sum(piece.stop**2 - piece.first**2 for piece in pieces)


def _num_micro(rows: Rows, rows_of_micro: int) -> int:
    return -(-len(rows) // rows_of_micro)


def _best_fit_decreasing(members: np.ndarray, lengths: np.ndarray, capacity: int) -> Rows:
    """Each sequence, the longest first, goes to the fullest row that has room, or opens one."""
    rows: Rows = []
    # (room, row), sorted.
    rooms: list[tuple[int, int]] = []
    for i in members[np.argsort(-lengths[members], kind="stable")].tolist():
        n = int(lengths[i])
        fit = bisect.bisect_left(rooms, (n, -1))
        if fit == len(rooms):
            rows.append([])
            room, row = capacity, len(rows) - 1
        else:
            room, row = rooms.pop(fit)
        rows[row].append(i)
        if room > n:
            bisect.insort(rooms, (room - n, row))
    return rows


def _best_fit_families(
    members: np.ndarray, lengths: np.ndarray, families: PrefixGroups, capacity: int
) -> Rows:
    """As `_best_fit_decreasing`, the largest family first, and of each as many in a row as it has room for.

    A row is opened only where no other has room for the sequence with all its tokens, so that
    `PackedShape.for_sequences` holds here too.
    """
    kin: dict[int, list[int]] = {}
    for i in members[np.argsort(-lengths[members], kind="stable")].tolist():
        kin.setdefault(int(families.family_B[i]), []).append(i)
    own = lengths - families.shared_B
    rows: Rows = []
    rooms: list[int] = []
    for brood in sorted(kin.values(), key=lambda brood: -int(own[brood].sum())):
        shared, here = int(families.shared_B[brood[0]]), set[int]()
        for done, i in enumerate(brood):
            needs = int(own[i])
            fits = [row for row in here if rooms[row] >= needs]
            if not fits:
                needs += shared
                rest = shared + int(own[brood[done:]].sum())
                roomy = [row for row, room in enumerate(rooms) if room >= needs]
                # The fullest that takes them all, or else the emptiest, which takes most of them.
                whole = [row for row in roomy if rooms[row] >= rest]
                fits = whole or sorted(roomy, key=rooms.__getitem__)[-1:]
            if not fits:
                rows.append([])
                rooms.append(capacity)
                fits = [len(rows) - 1]
            row = min(fits, key=lambda row: (rooms[row], row))
            rows[row].append(i)
            rooms[row] -= needs
            here.add(row)
    return rows


def _dealt(work: list[int], rows_of_micro: int, shards: int) -> Iterator[tuple[int, int]]:
    """(place among the rows of all microbatches, row), the heaviest rows together in the first microbatch.

    A row's places cost the same whatever they hold; what differs is `work`, its attention.
    """
    order = sorted(range(len(work)), key=lambda row: (-work[row], row))
    each = rows_of_micro // shards
    for first in range(0, len(order), rows_of_micro):
        # (work, rows) of each shard: the next row goes to the least loaded one that has a place.
        loads = [(0, 0)] * shards
        for row in order[first : first + rows_of_micro]:
            shard = min((s for s in range(shards) if loads[s][1] < each), key=lambda s: loads[s])
            load, held = loads[shard]
            yield first + shard * each + held, row
            loads[shard] = (load + work[row], held + 1)


# Shares of a microbatch's places that its sequences are expected to fill, to be tried in turn.
_FILLS = (1.0, 0.998, 0.995, 0.99, 0.98, 0.96)


def _filled_minibatches(
    members_U: list[np.ndarray], rows_U: list[Rows], lengths: np.ndarray, R: int, T: int
) -> list[Rows]:
    """Rows of all minibatches after the exchange that leaves the fewest microbatches; none if none helps.

    A microbatch costs the same however little it holds, so a minibatch of 7.3 of them costs 8. Where
    the tokens of each are close to a whole number of microbatches, hardly any place is empty.
    """
    best = rows_U
    for fill in _FILLS:
        exchanged = _exchanged(members_U, lengths, int(fill * R * T))
        rows = [_best_fit_decreasing(members, lengths, T) for members in exchanged]
        if sum(_num_micro(r, R) for r in rows) < sum(_num_micro(r, R) for r in best):
            best = rows
    return best


def _exchanged(
    members_U: list[np.ndarray], lengths: np.ndarray, micro_tokens: int
) -> list[np.ndarray]:
    """Minibatches of as many sequences whose tokens are at most a multiple of `micro_tokens`, if that can be.

    Long sequences of those that are above theirs change places with short ones of those that are below.
    """
    # Each in order of length.
    pools = [m[np.argsort(lengths[m], kind="stable")] for m in members_U]
    room_U = _rooms([int(lengths[m].sum()) for m in members_U], micro_tokens)
    while True:
        giver, taker = int(np.argmin(room_U)), int(np.argmax(room_U))
        most = min(-room_U[giver], room_U[taker])
        given, taken = lengths[pools[giver]], lengths[pools[taker]]
        # For each long one the shortest in return that does not move too many tokens.
        back = np.searchsorted(taken, given - most)
        moved = np.where(back < len(taken), given - taken[np.minimum(back, len(taken) - 1)], 0)
        best = int(np.argmax(moved))
        if most <= 0 or moved[best] <= 0:
            return [np.sort(pool) for pool in pools]
        long, short = pools[giver][best], pools[taker][back[best]]
        pools[giver] = _replaced(pools[giver], long, short, lengths)
        pools[taker] = _replaced(pools[taker], short, long, lengths)
        room_U[giver] += moved[best]
        room_U[taker] -= moved[best]


def _replaced(pool: np.ndarray, old: Any, new: Any, lengths: np.ndarray) -> np.ndarray:
    rest = pool[pool != old]
    return np.insert(rest, np.searchsorted(lengths[rest], lengths[new]), new)


def _rooms(tokens_U: list[int], micro_tokens: int) -> np.ndarray:
    """Tokens that each minibatch has room for, negative where it has too many, at the fewest microbatches.

    All get the whole microbatches that they fill; those that fill most of a further one get that too, as
    many as all tokens together need.
    """
    whole_U = [tokens // micro_tokens for tokens in tokens_U]
    more = -(-sum(tokens_U) // micro_tokens) - sum(whole_U)
    by_rest = sorted(range(len(tokens_U)), key=lambda u: (-(tokens_U[u] % micro_tokens), u))
    for u in by_rest[:more]:
        whole_U[u] += 1
    return np.array(whole_U) * micro_tokens - np.array(tokens_U)
