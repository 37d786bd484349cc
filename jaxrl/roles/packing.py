"""Packs sequences of different lengths into rows of one length, for a program that is compiled once.

U minibatches   M microbatches   R rows of a microbatch   T tokens of a row   B sequences

Example: sequences of 5, 6 and 3 tokens; the first two share a prefix of 2 tokens; one row of 14 tokens:

    sequence       -1 -1 1 1 1 1   0 0 0   2 2 2   0 0
    segment_ids    1 1   2 2 2 2   3 3 3   4 4 4   0 0
    prefix_ids     0 0   1 1 1 1   1 1 1   0 0 0   0 0
    positions      0 1   2 3 4 5   2 3 4   0 1 2   0 0

A shape has room for the longest sequences, so most of its microbatches are usually unused. Nothing is written
there, nor in rows that lie on devices of other processes. Arrays of zeros take memory only where something is
written, and so the time and the memory of packing grow with the tokens of this process, not with the shape.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl.errors import UserError


@dataclasses.dataclass(frozen=True)
class PackedShape:
    """The fixed shape of packed arrays, [U, M, R, T].

    Attributes:
      minibatches: U, the number of optimiser updates of one step.
      microbatches: M, the largest number of microbatches of an update. Empty ones cost nothing at run time.
      rows: R, the number of rows of a microbatch; a multiple of the shards of the batch.
      tokens: T, the number of tokens of a row; the limit for a sequence.
    """

    minibatches: int
    microbatches: int
    rows: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class RowLimits:
    """The part of a packed shape that does not depend on the number of sequences.

    Attributes:
      rows: R, the number of rows of a microbatch.
      tokens: T, the number of tokens of a row.
      longest: The largest number of tokens of a sequence.
    """

    rows: int
    tokens: int
    longest: int

    def shape(self, num_sequences: int, *, minibatches: int) -> PackedShape:
        """Returns the smallest shape that holds any such number of sequences.

        Raises:
          UserError: The sequences do not divide into minibatches, or `longest` exceeds a row.
        """
        if num_sequences % minibatches:
            raise UserError(
                f"{num_sequences} sequences do not divide into {minibatches} minibatches; "
                "choose algorithm.updates_per_step so that it divides prompts x samples"
            )
        if self.longest > self.tokens:
            raise UserError(
                f"rows of {self.tokens} tokens cannot hold a sequence of {self.longest}; "
                f"raise the row to at least {self.longest}"
            )
        # With k = floor(tokens / longest), a row of fewer than k sequences has room for one more of any
        # length. Best-fit opens a row only when no other has room, so all rows but the last hold at
        # least k. If all sequences have `longest` tokens, each row holds exactly k: the bound is tight.
        per_row = self.tokens // self.longest
        most_rows = -(-(num_sequences // minibatches) // per_row)
        return PackedShape(minibatches, -(-most_rows // self.rows), self.rows, self.tokens)


@dataclasses.dataclass(frozen=True)
class Segments:
    """The K segments of all rows: the own tokens of one sequence each, or a prefix that several share.

    Attributes:
      starts: int [K], the offset of each in the flattened packed array.
      first, stop: int [K], the range of positions.
      number: int [K], its number in its row, counted from 1.
      prefix: int [K], the number of the segment that it continues; 0 for none.
      sequence: int [K], the sequence it belongs to; -1 for a shared prefix.
    """

    starts: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    number: np.ndarray
    prefix: np.ndarray
    sequence: np.ndarray


@dataclasses.dataclass(frozen=True)
class Packing:
    """The place of each token of each sequence in the packed arrays.

    It is the same on all processes, and small. Each process fills arrays only in its own rows.

    Attributes:
      shape: The shape of the packed arrays.
      segments: All segments.
      shares: Whether there are prefix groups.
      own_R: bool, the rows of a microbatch that this process fills; all others are 0.
      num_micro_U: int32, the number of microbatches in use.
      starts: int [B], the offset of each sequence's own tokens in the flattened packed array. They are
        contiguous.
      lengths: int [B], the number of tokens of each sequence.
      shared: int [B], the number of first tokens that a sequence shares with others of its row. They are
        stored once, apart from its own tokens.
      shared_starts: int [B], the offset of the shared tokens.
    """

    shape: PackedShape
    segments: Segments
    shares: bool
    own_R: np.ndarray
    num_micro_U: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray
    shared_starts: np.ndarray

    def pack(self, values: Sequence[np.ndarray], dtype, *, padding: int = 0) -> np.ndarray:
        """Lays out one ragged field, an array [n, ...] per sequence, as [U, M, R, T, ...].

        Shared tokens get the values of the last sequence that shares them. Last tokens without a value get
        that of padding.
        """
        out = self.filled(padding, dtype, *(values[0].shape[1:] if values else ()))
        shared_B = self.shared_starts % self.shape.tokens
        for i, row, first in self._own(self.starts):
            value, shared, of_shared = values[i], self.shared[i], shared_B[i]
            out[row][of_shared : of_shared + shared] = value[:shared]
            out[row][first : first + len(value) - shared] = value[shared:]
        return out

    def pack_ends(self, values: Sequence[np.ndarray], dtype) -> np.ndarray:
        """Lays out a field of the last tokens of each sequence, such as its response; all else is 0.

        The values of a sequence are at most as many as its own tokens.
        """
        out = self.filled(0, dtype)
        own_B = self.lengths - self.shared
        for i, row, first in self._own(self.starts):
            value, end = values[i], first + own_B[i]
            out[row][end - len(value) : end] = value
        return out

    def filled(self, value: int, dtype, *of_token: int) -> np.ndarray:
        """`value` in the own rows of the microbatches in use, [U, M, R, T, *of_token]; 0 elsewhere."""
        U, M, R, T = dataclasses.astuple(self.shape)
        # Zeros take memory only where something is written, and few microbatches are in use.
        if self.own_R.all():
            out = np.zeros((U, M, R, T, *of_token), dtype)
        else:
            # The own rows lie together in memory, which the system gives in pages of up to 2 MB.
            out = np.moveaxis(np.zeros((R, U, M, T, *of_token), dtype), 0, 2)
        if value:
            out[(np.arange(M) < self.num_micro_U[:, None])[..., None] & self.own_R] = value
        return out

    def fields(self, number_B: np.ndarray | None = None) -> dict[str, Any]:
        """The fields of `types.PackedBatch` that do not depend on the content of the sequences, by name.

        Args:
          number_B: The number of each sequence in the field `sequence`; None for its index.
        """
        number_B = np.arange(len(self.starts)) if number_B is None else number_B
        of_all = self.segments
        of_segment = {
            "segment_ids": of_all.number,
            # Index -1 takes the entry that is appended, so shared prefixes keep their -1.
            "sequence": np.append(number_B, -1)[of_all.sequence],
            **({"prefix_ids": of_all.prefix} if self.shares else {}),
        }
        out = {name: self.filled(0, np.int32) for name in ("positions", *of_segment)}
        for k, row, start in self._own(of_all.starts):
            first, stop = of_all.first[k], of_all.stop[k]
            here = (*row, slice(start, start + stop - first))
            out["positions"][here] = np.arange(first, stop)
            for name, values in of_segment.items():
                out[name][here] = values[k]
        return {"num_micro_U": self.num_micro_U, **out}

    def unpack(self, packed: np.ndarray) -> list[np.ndarray]:
        """The inverse of `pack`, if this process has all rows."""
        flat = np.asarray(packed).reshape(-1)
        places = zip(self.lengths, self.starts, self.shared, self.shared_starts, strict=True)
        return [
            np.concatenate(
                [flat[shared_start : shared_start + shared], flat[start : start + length - shared]]
            )
            for length, start, shared, shared_start in places
        ]

    def rows(self, starts: np.ndarray) -> tuple[np.ndarray, ...]:
        """Indices u, m and r of the row of each of some starts."""
        return np.unravel_index(starts // self.shape.tokens, dataclasses.astuple(self.shape)[:3])

    @property
    def own_B(self) -> np.ndarray:
        """The sequences in rows that this process fills, bool."""
        return self.own_R[self.rows(self.starts)[2]]

    def _own(self, starts: np.ndarray) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """Index, row (u, m, r), and offset in the row, of each of some starts in an own row."""
        rows, offset = np.stack(self.rows(starts), axis=1), starts % self.shape.tokens
        own = np.flatnonzero(self.own_R[rows[:, 2]])
        yield from zip(
            own.tolist(), map(tuple, rows[own].tolist()), offset[own].tolist(), strict=True
        )


@dataclasses.dataclass(frozen=True)
class PrefixGroups:
    """Groups of sequences with a common prefix, such as the answers to one prompt.

    Attributes:
      group_B: int, the number of each sequence's group.
      shared_B: int, the number of tokens of the common prefix; less than the sequence has.
    """

    group_B: np.ndarray
    shared_B: np.ndarray


def plan_packing(
    lengths: Sequence[int],
    shape: PackedShape,
    *,
    shards: int = 1,
    fill_minibatches: bool = False,
    prefix_groups: PrefixGroups | None = None,
    last_B: np.ndarray | None = None,
    minibatch_B: np.ndarray | None = None,
    own_R: np.ndarray | None = None,
) -> Packing:
    """Assigns every sequence to a row: in order to minibatches, and within one by best-fit decreasing.

    Each minibatch gets the same number of sequences. At most one row of a minibatch is half empty, because
    two such rows would have been one. Rows with a similar amount of attention share a microbatch. So all
    shards of a microbatch, which wait for each other, have similar work.

    Args:
      lengths: Number of tokens of each sequence.
      shape: Shape of the packed arrays, from `RowLimits.shape`; it must hold all sequences.
      shards: Number of devices that split the rows of a microbatch, each with consecutive rows.
      fill_minibatches: Whether minibatches may exchange sequences when that saves a microbatch. Each
        minibatch keeps its number of sequences.
      prefix_groups: Groups that store their common prefix once per row; None stores every sequence whole.
        Groups rule out `fill_minibatches`.
      last_B: bool, the sequences for the last rows of their minibatch, apart from the others if there is
        room; None for none. `fill_minibatches` ignores it.
      minibatch_B: The minibatch of each sequence; None gives each equally many, in order.
      own_R: See `Packing`; None for all.
    """
    tokens_of = np.asarray(lengths, np.int64)
    U, _, R, T = dataclasses.astuple(shape)
    if minibatch_B is None:
        assert len(tokens_of) % U == 0, (
            f"{len(tokens_of)} sequences do not divide into {U} minibatches"
        )
        minibatch_B = np.repeat(np.arange(U), len(tokens_of) // U)
    assert np.all((tokens_of > 0) & (tokens_of <= T)), f"sequences must have 1 to {T} tokens"
    assert R % shards == 0, f"{R} rows do not divide into {shards} shards"
    assert not (prefix_groups and fill_minibatches), "an exchange would split prefix groups"
    indices = np.arange(len(tokens_of))
    groups = prefix_groups or PrefixGroups(indices, np.zeros_like(indices))
    members_U = [indices[minibatch_B == u] for u in range(U)]
    rows_U = [best_fit_decreasing(members, tokens_of, groups, T) for members in members_U]
    if last_B is not None and last_B.any():
        rows_U = [
            _apart(members, rows, last_B, tokens_of, groups, shape)
            for members, rows in zip(members_U, rows_U, strict=True)
        ]
    if fill_minibatches and U > 1:
        rows_U = filled_minibatches(members_U, rows_U, tokens_of, groups, R, T)
    return placed(
        *(rows_U, tokens_of, groups, shape),
        shards=shards,
        last_B=last_B,
        own_R=own_R,
        shares=prefix_groups is not None,
    )


Rows = list[list[int]]
"""The sequences of each row."""


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Consecutive tokens of a row: the own tokens of one sequence, or the prefix that several share.

    Attributes:
      first, stop: The range of positions.
      prefix: The number of the segment that it continues, counted from 1; 0 for none.
      sequence: The sequence it belongs to; -1 for a shared prefix.
      sharers: The sequences that share the prefix.
    """

    first: int
    stop: int
    prefix: int = 0
    sequence: int = -1
    sharers: tuple[int, ...] = ()


def _by_group(members: Iterable[int], groups: PrefixGroups) -> list[list[int]]:
    """The members of each group, in their given order; groups in the order of their first members."""
    found: dict[int, list[int]] = {}
    for i in members:
        found.setdefault(int(groups.group_B[i]), []).append(i)
    return list(found.values())


def _segments(row: list[int], lengths: np.ndarray, groups: PrefixGroups) -> list[_Segment]:
    """The segments of a row in order; a shared prefix precedes the sequences that continue it."""
    segments: list[_Segment] = []
    for members in _by_group(row, groups):
        # A prompt with one answer in the row needs no branch.
        shared = int(groups.shared_B[members[0]]) if len(members) > 1 else 0
        if shared:
            segments.append(_Segment(0, shared, sharers=tuple(members)))
        prefix = len(segments) if shared else 0
        segments += [_Segment(shared, int(lengths[i]), prefix, sequence=i) for i in members]
    return segments


def placed(
    rows_U: Sequence[Rows],
    lengths: np.ndarray,
    groups: PrefixGroups,
    shape: PackedShape,
    *,
    shards: int,
    last_B: np.ndarray | None = None,
    own_R: np.ndarray | None = None,
    shares: bool = True,
) -> Packing:
    """Places the rows of each minibatch, from `best_fit_decreasing`; other arguments as of `plan_packing`."""
    _, M, R, T = dataclasses.astuple(shape)
    starts, shared, shared_starts = (np.zeros(len(lengths), np.int64) for _ in range(3))
    last_B = np.zeros(len(lengths), bool) if last_B is None else last_B
    # The fields of `Segments`, segment by segment.
    table: list[tuple[int, int, int, int, int, int]] = []
    for u, rows in enumerate(rows_U):
        assert len(rows) <= M * R, (
            f"minibatch {u} fills {len(rows)} rows, the shape has {M} x {R}; it was made for fewer or "
            "shorter sequences"
        )
        segments_of = [_segments(row, lengths, groups) for row in rows]
        is_last = [bool(last_B[row].all()) for row in rows]
        # The attention work of a row: each token attends to all earlier ones of its sequence.
        work = [sum(s.stop**2 - s.first**2 for s in segments) for segments in segments_of]
        for index, r in _assigned(work, is_last, R, shards):
            # The row among those of all minibatches and microbatches.
            start = (u * M * R + index) * T
            for number, s in enumerate(segments_of[r], 1):
                table.append((start, s.first, s.stop, number, s.prefix, s.sequence))
                if s.sequence >= 0:
                    starts[s.sequence], shared[s.sequence] = start, s.first
                shared_starts[list(s.sharers)] = start
                start += s.stop - s.first
    return Packing(
        shape,
        Segments(*np.array(table, np.int64).reshape(-1, 6).T),
        shares,
        np.ones(R, bool) if own_R is None else own_R,
        np.array([_num_micro(rows, R) for rows in rows_U], np.int32),
        *(starts, lengths, shared, shared_starts),
    )


def _num_micro(rows: Rows, rows_of_micro: int) -> int:
    return -(-len(rows) // rows_of_micro)


class _OpenRows:
    """Rows under construction, sorted by the room that each has left."""

    def __init__(self, capacity: int):
        self.rows: Rows = []
        self.rooms: list[int] = []
        self._capacity = capacity
        self._sorted: list[tuple[int, int]] = []  # (room, row)

    def find(self, wanted: int, *, needed: int) -> int:
        """Returns the fullest row with room for `wanted`, or the emptiest one, or a new one.

        The emptiest needs room for `needed`.
        """
        # Before all rows with exactly this room: rows count from 0.
        fit = bisect.bisect_left(self._sorted, (wanted, -1))
        if fit < len(self._sorted):
            return self._sorted[fit][1]
        if self._sorted and self._sorted[-1][0] >= needed:
            return self._sorted[-1][1]
        self.rows.append([])
        self.rooms.append(self._capacity)
        self._sorted.append((self._capacity, len(self.rows) - 1))  # no other row is as empty
        return len(self.rows) - 1

    def add(self, i: int, row: int, tokens: int) -> None:
        """Puts a sequence into a row and takes `tokens` off its room."""
        del self._sorted[bisect.bisect_left(self._sorted, (self.rooms[row], row))]
        self.rows[row].append(i)
        self.rooms[row] -= tokens
        bisect.insort(self._sorted, (self.rooms[row], row))


def best_fit_decreasing(
    members: np.ndarray, lengths: np.ndarray, groups: PrefixGroups, capacity: int
) -> Rows:
    """Returns the rows of a minibatch: the largest group first, and as many of a group in one row as fit.

    A group of one sequence goes to the fullest row that has room: plain best-fit decreasing. Only a
    sequence that fits nowhere with all its tokens opens a row. So the bound of `RowLimits.shape`
    holds with prefix groups too.

    Args:
      members: Indices of the sequences of the minibatch.
      lengths, groups: Number of tokens and prefix group of every sequence.
      capacity: T, the number of tokens of a row.
    """
    own = (lengths - groups.shared_B).tolist()
    longest_first = members[np.argsort(-lengths[members], kind="stable")].tolist()
    sized = [(sum(own[i] for i in group), group) for group in _by_group(longest_first, groups)]
    opened = _OpenRows(capacity)
    for rest, group in sorted(sized, key=lambda pair: -pair[0]):
        shared = int(groups.shared_B[group[0]])
        used: set[int] = set()  # rows that hold the prefix of this group
        for i in group:
            tokens = own[i]
            fits = [(opened.rooms[row], row) for row in used if opened.rooms[row] >= tokens]
            if fits:
                # Best fit: the fullest row that takes it.
                _, row = min(fits)
            else:
                tokens += shared
                # Best is a row that takes the rest of the group; else the one that takes most of it.
                row = opened.find(shared + rest, needed=tokens)
            opened.add(i, row, tokens)
            used.add(row)
            rest -= own[i]
    return opened.rows


def _apart(
    members: np.ndarray,
    rows: Rows,
    last_B: np.ndarray,
    lengths: np.ndarray,
    groups: PrefixGroups,
    shape: PackedShape,
) -> Rows:
    """The rows of a minibatch in which no row mixes last sequences with others; `rows` if they do not fit."""
    parts = (members[~last_B[members]], members[last_B[members]])
    apart = [row for m in parts for row in best_fit_decreasing(m, lengths, groups, shape.tokens)]
    return apart if len(apart) <= shape.microbatches * shape.rows else rows


def _assigned(
    work: list[int], is_last: list[bool], rows_of_micro: int, shards: int
) -> Iterator[tuple[int, int]]:
    """Yields (index among the rows of all microbatches, row); rows that are last come after all others."""
    # The heaviest rows share the first microbatch. Dense layers cost the same for every row, so only the work
    # of attention differs.
    order = sorted(range(len(work)), key=lambda row: (is_last[row], -work[row], row))
    each = rows_of_micro // shards
    for first in range(0, len(order), rows_of_micro):
        # (work, number of rows) of each shard. The next row goes to the shard with the least work that
        # still has a free row.
        loads = [(0, 0)] * shards
        for row in order[first : first + rows_of_micro]:
            shard = min((s for s in range(shards) if loads[s][1] < each), key=lambda s: loads[s])
            load, held = loads[shard]
            yield first + shard * each + held, row
            loads[shard] = (load + work[row], held + 1)


# Shares of a microbatch's tokens that its sequences are expected to fill, tried in turn.
_FILLS = (1.0, 0.998, 0.995, 0.99, 0.98, 0.96)


def filled_minibatches(
    members_U: list[np.ndarray],
    rows_U: list[Rows],
    lengths: np.ndarray,
    groups: PrefixGroups,
    R: int,
    T: int,
) -> list[Rows]:
    """Returns the rows after the exchange with the fewest microbatches, or `rows_U` if no exchange helps.

    A partly filled microbatch costs as much as a full one: a minibatch of 7.3 microbatches costs 8. The
    exchange brings the tokens of each minibatch close to a whole number of microbatches.

    Args:
      members_U: Sequences of each minibatch.
      rows_U: Their rows, from `best_fit_decreasing` with the same lengths and groups.
      lengths, groups: Number of tokens and prefix group of every sequence; groups share nothing.
      R, T: Number of rows of a microbatch, and of tokens of a row.
    """
    best = rows_U
    for fill in _FILLS:
        exchanged = _exchanged(members_U, lengths, int(fill * R * T))
        rows = [best_fit_decreasing(members, lengths, groups, T) for members in exchanged]
        if sum(_num_micro(r, R) for r in rows) < sum(_num_micro(r, R) for r in best):
            best = rows
    return best


def _exchanged(
    members_U: list[np.ndarray], lengths: np.ndarray, micro_tokens: int
) -> list[np.ndarray]:
    """Exchanges sequences until each minibatch holds about a whole multiple of `micro_tokens`.

    The fullest minibatch gives a long sequence to the emptiest and gets a shorter one back, for as long as
    that helps.
    """
    tokens_U = [int(lengths[m].sum()) for m in members_U]
    # Each minibatch gets the whole microbatches that it fills. The further ones that all tokens together
    # need go to the minibatches with the largest remainders.
    whole_U = [tokens // micro_tokens for tokens in tokens_U]
    more = -(-sum(tokens_U) // micro_tokens) - sum(whole_U)
    by_rest = sorted(range(len(tokens_U)), key=lambda u: (-(tokens_U[u] % micro_tokens), u))
    for u in by_rest[:more]:
        whole_U[u] += 1
    # Negative where a minibatch has too many tokens.
    room_U = np.array(whole_U) * micro_tokens - np.array(tokens_U)
    # Sorted by length.
    pools = [m[np.argsort(lengths[m], kind="stable")] for m in members_U]
    while True:
        giver, taker = int(np.argmin(room_U)), int(np.argmax(room_U))
        most = min(-room_U[giver], room_U[taker])
        given, taken = lengths[pools[giver]], lengths[pools[taker]]
        # For each sequence to give, the shortest one in return that does not move more than `most` tokens.
        back = np.searchsorted(taken, given - most)
        moved = np.where(back < len(taken), given - taken[np.minimum(back, len(taken) - 1)], 0)
        best = int(np.argmax(moved))
        if most <= 0 or moved[best] <= 0:
            # Back in the order of the samples, which ties in best-fit depend on.
            return [np.sort(pool) for pool in pools]
        long, short = pools[giver][best], pools[taker][back[best]]
        pools[giver] = _replaced(pools[giver], long, short, lengths)
        pools[taker] = _replaced(pools[taker], short, long, lengths)
        room_U[giver] += moved[best]
        room_U[taker] -= moved[best]


def _replaced(pool: np.ndarray, old: Any, new: Any, lengths: np.ndarray) -> np.ndarray:
    rest = pool[pool != old]
    return np.insert(rest, np.searchsorted(lengths[rest], lengths[new]), new)
