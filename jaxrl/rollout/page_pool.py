"""Assigns the pages of a paged cache to slots, on the host. NumPy only: deterministic, without a device.

A page holds the keys and values of a fixed number of tokens. Each shard of the slots has its own pages and
numbers them from 0. Page 0 is a scratch page: unused entries of the page table name it, and the devices may
write anything to it.

    start     a sample enters a slot: pages for its tokens; full pages with the same beginning are shared
    grow      before a dispatch: pages for the tokens that it may add
    remember  before a sample leaves its slot: later samples may share the full pages of its whole sequence
    release   a sample leaves its slot: pages that no other slot holds are free again
    forget    the weights have changed: no page is shared with later samples any more

A free page whose tokens are known is kept until its memory is needed, the least recently used first. So a
sample shares the beginnings of samples that have ended, too.

Example: pages of 4 tokens, one shard, three samples that start from the same ten tokens, of which the last is
not cached yet. Pages 1 and 2 are shared. Each sample has a copy of the third page, to which it will append.

    slot   table          shared
    0      1 2 3 0 0 0    0        writes pages 1, 2 and 3
    1      1 2 4 0 0 0    2        writes page 4
    2      1 2 5 0 0 0    2        writes page 5

    n slots   S shards   P pages of a slot
"""

from __future__ import annotations

import itertools

import numpy as np

from jaxrl.rollout.engine_sizes import PageSizes


class PagePool:
    """The free pages of every shard, and the page table.

    Attributes:
      page_tokens: number of tokens of a page.
      num_pages: number of pages of a shard that samples can use.
      shard_n: int [n], shard of each slot.
      table_nP: int32 [n, P], the pages of each slot, numbered within its shard; 0 where it has none.
      num_free_S: int [S], number of free pages of each shard, with those that are kept.
      shared_n: int32 [n], number of leading pages of each slot that already hold their tokens.
    """

    def __init__(self, sizes: PageSizes, num_slots: int):
        """Starts with every page free. Each shard has an equal, contiguous range of the slots."""
        shards, num_pages = sizes.shards, sizes.num_pages
        assert num_slots % shards == 0, "every shard has the same number of slots"
        self.page_tokens, self.num_pages = sizes.page_tokens, num_pages - 1
        self.table_nP = np.zeros((num_slots, sizes.pages_per_slot), np.int32)
        self.shared_n = np.zeros(num_slots, np.int32)
        self.shard_n = np.arange(num_slots) // (num_slots // shards)
        self._held_n = np.zeros(num_slots, np.int32)
        self._users_SN = np.zeros((shards, num_pages), np.int32)
        # The first `_num_empty_S` entries of a row are the free pages of a shard with unknown content; the
        # last of them is taken next. The other free pages are kept, the least recently used first.
        # Page 0 is the last entry of a row, behind the empty ones, so no slot gets it.
        self._free_SN = np.tile(np.arange(num_pages - 1, -1, -1, dtype=np.int32), (shards, 1))
        self._num_empty_S = np.full(shards, num_pages - 1)
        self._kept: list[dict[int, None]] = [{} for _ in range(shards)]
        self.num_free_S = self._num_empty_S.copy()
        self._adapter_n = np.zeros(num_slots, np.int64)
        # A shared page by what it holds: its shard, the identity of the page before it, and its own tokens.
        # Before the first page is minus the number of the adapter that has computed it.
        # An identity is never used again, so the key of a page whose predecessor is gone matches nothing.
        self._page_of: dict[tuple[int, int, bytes], int] = {}
        self._key_of: dict[tuple[int, int], tuple[int, int, bytes]] = {}
        self._identity_SN = np.zeros((shards, num_pages), np.int64)
        self._place_SN = np.zeros((shards, num_pages), np.int32)
        # Pages with later identities may not have been written yet.
        self._num_identities = self._last_written = 0

    def slots_of(self, shard: int) -> slice:
        size = len(self.shard_n) // len(self.num_free_S)
        return slice(shard * size, (shard + 1) * size)

    def start(self, slot: int, tokens: np.ndarray, room: int, adapter: int = 0) -> bool:
        """Gives pages to an idle slot; returns False, and gives none, if its shard has too few free ones.

        Full pages with the same tokens since the beginning, and the same adapter, are shared.

        Args:
          slot: index of a slot without pages.
          tokens: int32 [T], tokens of its sequence that are cached at once.
          room: number of tokens that fit into its pages, at least T.
          adapter: number of the adapter, see `samples.Start`.
        """
        assert not self._held_n[slot], "the slot has pages"
        shard = int(self.shard_n[slot])
        parts = self._full_pages(tokens)
        known = self._known_pages(shard, parts, adapter)
        wanted = -(-room // self.page_tokens)
        unused = [page for page in known if not self._users_SN[shard, page]]
        # Known pages without a user count as free, so they are taken from the free ones, too.
        if wanted - len(known) + len(unused) > self.num_free_S[shard]:
            return False
        # Before `_empty`, which would give their memory away.
        for page in unused:
            del self._kept[shard][page]
        self._users_SN[shard, known] += 1
        self.num_free_S[shard] -= wanted - len(known) + len(unused)
        new = wanted - len(known)
        if new > self._num_empty_S[shard]:
            missing_S = np.zeros(len(self.num_free_S), int)
            missing_S[shard] = new - self._num_empty_S[shard]
            self._empty(missing_S)
        empty = self._num_empty_S[shard]
        pages = self._free_SN[shard, empty - new : empty][::-1]
        self._num_empty_S[shard] -= new
        self._users_SN[shard, pages] = 1
        self.table_nP[slot, : len(known)] = known
        self.table_nP[slot, len(known) : wanted] = pages
        self._held_n[slot], self.shared_n[slot] = wanted, len(known)
        self._adapter_n[slot] = adapter
        self._make_known(slot, parts, len(known))
        return True

    def remember(self, slot: int, tokens: np.ndarray) -> None:
        """Lets later samples share the full pages of a slot.

        Args:
          slot: index of the slot.
          tokens: int32 [T], the beginning of its sequence; the devices have cached all of it.
        """
        self._make_known(slot, self._full_pages(tokens))

    def settle(self) -> None:
        """Notes that all pages known by now are written: what has started so far was dispatched."""
        self._last_written = self._num_identities

    def holders(self, tokens: np.ndarray, adapter: int = 0) -> tuple[list[int], list[int]]:
        """The shards that hold most of the beginning of `tokens` in written pages.

        Returns:
          These shards, ascending, and the pages of the first of them; both are empty if no page is known.
        """
        found: dict[int, list[int]] = {}
        parts = self._full_pages(tokens)
        for shard in range(len(self.num_free_S)):
            known = self._known_pages(shard, parts, adapter)
            identities = self._identity_SN[shard, known]
            # A sample that starts now has made its own pages known (`start`), and nothing is in them yet. A
            # page becomes known after the one before it, so identities ascend, and the written ones come
            # first.
            found[shard] = known[: int((identities <= self._last_written).sum())]
        most = max(map(len, found.values()))
        shards = [shard for shard, pages in found.items() if most and len(pages) == most]
        return shards, found[shards[0]] if shards else []

    def lacking(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The number of pages that each shard lacks to `grow` the slots, int [S]; 0 if there are enough."""
        missing = np.maximum(-(-tokens // self.page_tokens) - self._held_n[slots], 0)
        shards = len(self.num_free_S)
        wanted_S = np.bincount(self.shard_n[slots], missing, shards).astype(int)
        return np.maximum(wanted_S - self.num_free_S, 0)

    def grow(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Gives each slot pages for as many tokens; slots that have enough pages keep theirs.

        Args:
          slots: int [m], ascending, each at most once. Their shards must have enough free pages.
          tokens: int [m], numbers of tokens.
        """
        assert not self.lacking(slots, tokens).any(), "there are not enough free pages"
        missing = np.maximum(-(-tokens // self.page_tokens) - self._held_n[slots], 0)
        slot_k = np.repeat(slots, missing)
        if not len(slot_k):
            return
        shard_k = self.shard_n[slot_k]
        taken_S = np.bincount(shard_k, minlength=len(self.num_free_S))
        self._empty(taken_S - self._num_empty_S)
        # Slots are ascending, and so are their shards: number the new pages within slot and shard.
        in_shard_k = np.arange(len(slot_k)) - (np.cumsum(taken_S) - taken_S)[shard_k]
        in_slot_k = np.arange(len(slot_k)) - np.repeat(np.cumsum(missing) - missing, missing)
        page_k = self._free_SN[shard_k, self._num_empty_S[shard_k] - 1 - in_shard_k]
        self.table_nP[slot_k, self._held_n[slot_k] + in_slot_k] = page_k
        self._users_SN[shard_k, page_k] = 1
        self._num_empty_S -= taken_S
        self.num_free_S -= taken_S
        self._held_n[slots] += missing

    def release(self, slots: np.ndarray) -> None:
        """Takes all pages from the slots, int [m]. Pages that no other slot holds become free."""
        held = self._held_n[slots]
        shard_k = np.repeat(self.shard_n[slots], held)
        page_k = self.table_nP[slots][np.arange(self.table_nP.shape[1])[None] < held[:, None]]
        # `at` counts a page down once for each of the slots that share it.
        np.subtract.at(self._users_SN, (shard_k, page_k), 1)
        # Each page once, also if several of the slots shared it.
        freed = np.unique(shard_k * self._users_SN.shape[1] + page_k)
        shard_f, page_f = np.divmod(freed, self._users_SN.shape[1])
        unused_f = self._users_SN[shard_f, page_f] == 0
        shard_f, page_f = shard_f[unused_f], page_f[unused_f]
        self.num_free_S += np.bincount(shard_f, minlength=len(self.num_free_S))
        known_f = np.fromiter(
            (page in self._key_of for page in zip(shard_f.tolist(), page_f.tolist(), strict=True)),
            bool,
        )
        self._put_back(shard_f[~known_f], page_f[~known_f])
        shard_f, page_f = shard_f[known_f], page_f[known_f]
        # Ends before beginnings: what follows a page is of no use without it.
        order_f = np.lexsort((page_f, -self._place_SN[shard_f, page_f]))
        for shard, page in zip(shard_f[order_f].tolist(), page_f[order_f].tolist(), strict=True):
            self._kept[shard][page] = None
        self.table_nP[slots] = 0
        self._held_n[slots] = self.shared_n[slots] = 0

    def forget(self) -> None:
        """Lets later samples share none of the pages that are known now. Slots keep theirs."""
        self._page_of.clear()
        self._key_of.clear()
        for shard, kept in enumerate(self._kept):
            self._put_back(np.full(len(kept), shard), np.fromiter(kept, int))
            kept.clear()

    def _put_back(self, shard_f: np.ndarray, page_f: np.ndarray) -> None:
        """Adds pages of which nothing is known; shards ascending."""
        freed_S = np.bincount(shard_f, minlength=len(self.num_free_S))
        in_shard_f = np.arange(len(shard_f)) - (np.cumsum(freed_S) - freed_S)[shard_f]
        self._free_SN[shard_f, self._num_empty_S[shard_f] + in_shard_f] = page_f
        self._num_empty_S += freed_S

    def _empty(self, missing_S: np.ndarray) -> None:
        """Forgets as many kept pages of each shard, the least recently used first."""
        for shard in np.flatnonzero(missing_S > 0).tolist():
            kept = self._kept[shard]
            pages = list(itertools.islice(kept, int(missing_S[shard])))
            for page in pages:
                del kept[page]
                del self._page_of[self._key_of.pop((shard, page))]
            self._put_back(np.full(len(pages), shard), np.array(pages))

    def _known_pages(self, shard: int, parts: list[bytes], adapter: int) -> list[int]:
        """The pages of a shard that hold the beginning of a sequence, given as its full pages."""
        pages, before = [], -adapter
        for part in parts:
            page = self._page_of.get((shard, before, part))
            if page is None:
                break
            pages.append(page)
            before = int(self._identity_SN[shard, page])
        return pages

    def _make_known(self, slot: int, parts: list[bytes], num_known: int = 0) -> None:
        """Lets later samples share the full pages of a slot, unless other pages hold the same.

        The first `num_known` of them are known by the pages that the slot has.
        """
        shard = int(self.shard_n[slot])
        before = (
            int(self._identity_SN[shard, self.table_nP[slot, num_known - 1]])
            if num_known
            else -int(self._adapter_n[slot])
        )
        for i, part in enumerate(parts[num_known:], num_known):
            key = (shard, before, part)
            # Another page may hold the same. The chain then goes on from that one, by which others are found.
            page = self._page_of.get(key)
            if page is None:
                page = int(self.table_nP[slot, i])
                assert (shard, page) not in self._key_of, "a page holds one thing"
                self._page_of[key], self._key_of[shard, page] = page, key
                self._num_identities += 1
                self._identity_SN[shard, page] = self._num_identities
                self._place_SN[shard, page] = i
            before = int(self._identity_SN[shard, page])

    def _full_pages(self, tokens: np.ndarray) -> list[bytes]:
        size = self.page_tokens
        return [tokens[i : i + size].tobytes() for i in range(0, len(tokens) - size + 1, size)]
