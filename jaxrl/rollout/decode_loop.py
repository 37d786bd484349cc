"""The decode loop: samples wait in a queue, decode in slots, and leave when they end.

    add(samples) -> [queue -> slot] -> dispatch() -> new tokens of each slot, and why a sample ended
    drop(samples)

The loop has no thread and no clock, and it does not know where samples come from. Two callers feed it:

    groups   (rollout/group_loop.py)  adds the samples of a batch, or further ones as slots fall free
    live     (rollout/live_loop.py)   adds samples as requests arrive, and drops cancelled ones

A dispatch takes these steps, in this order:

    begin     resize      chooses the number and capacity of slots that the live samples need
              grow pages  in a paged cache: takes memory for W more tokens; the newest give way if needed
              admit       moves samples from the queue into free slots: prefill if needed, then insert
              generate    starts to decode up to W tokens in every slot, or speculates in a few; one token
                          while a sample has edits of its logits that change with every token
    finish    collect     cuts at stop strings and samples' own stop ids, frees the slots of ended samples

Between `begin` and `finish` the devices work and the host is free, for the text of finished samples, say.
Python runs only for samples that start, end or have stop strings; the others cost array operations.

Every decision depends only on the arguments and on tokens, which are the same on all processes of the engine.
So these take the same decisions and dispatch the same programs.

W tokens of a dispatch   T tokens
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from jaxrl.models.decoder import Params
from jaxrl.rollout.decode_state import DecodedTokens, Prefix, TokenScores, TopTokens
from jaxrl.rollout.decoded_log import DecodedLog
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.samples import Sample, Start
from jaxrl.rollout.scheduler import Admission, Scheduler
from jaxrl.rollout.slot_pages import SlotPages
from jaxrl.rollout.slots import Slots, prefilled
from jaxrl.rollout.speculation import AnswerTexts, Speculation
from jaxrl.rollout.stop_strings import StopSearch, StopsOfSlots
from jaxrl.types import Stretch


class End(enum.Enum):
    """Why a sample left the loop. A sample that is PAUSED is not finished."""

    STOP_ID = enum.auto()
    STOP_STRING = enum.auto()
    FULL = enum.auto()
    PAUSED = enum.auto()


@dataclasses.dataclass(frozen=True, eq=False)
class Decoded(Stretch):
    """Tokens that a dispatch has added to a sample, up to the one that ended it.

    Attributes:
      sample: the sample.
      end: reason why the sample has ended; None if it continues.
      num_before: number of tokens of the prompt and the sample before the dispatch.
      top: the `SamplingOptions.top_logprobs` most probable tokens at each place; None if there are none.
      prompt: with the first tokens, the scores of the prompt's tokens but the first, if
        `SamplingOptions.scores_prompt` asks for them.
    """

    sample: Sample
    end: End | None
    num_before: int
    top: TopTokens | None = None
    prompt: TokenScores | None = None


class DecodeLoop:
    """Decodes samples in the slots of one engine. Not thread-safe.

    Attributes:
      scheduler: the samples that wait or decode.
      speculation: the decisions to speculate, and their metrics.
      prompt_tokens: number of tokens of all prompts so far, each counted once for the samples that share it.
      known_tokens: those of them whose pages were known, so that the model has not run them again.
    """

    def __init__(
        self,
        engine: Engine,
        params: Params | None,
        stops: StopSearch,
        *,
        version: int = 0,
        streams: bool = False,
        reuse_prefixes: bool = False,
        texts: AnswerTexts | None = None,
    ):
        """Makes an empty loop. Device memory is first taken by `dispatch`.

        Args:
          engine, params: engine of the model, and its weights in the generation layout; None until `renew`.
          stops: search for stop strings. It gets faster with use, so several loops should share one.
          version: version of the weights; recorded with every token.
          streams: whether a dispatch reports the tokens of every sample, and not only those of ended ones.
          reuse_prefixes: whether a sample that begins like an earlier one prefills the rest only. Needs a
            paged cache and a model without delta layers, without which it has no effect, and changes the
            rounding of the logits.
          texts: answers to draft from, to which the loop adds its own; None drafts from a sample's own text.
        """
        self._engine = engine
        self._stop_search = stops
        # The state of a delta layer is that of a whole sequence: there is none for a known beginning.
        self._reuses = reuse_prefixes and not engine.model.has_state
        self._version = version
        self._streams = streams
        self._slots = Slots(engine, params)
        self._texts = AnswerTexts(0) if texts is None else texts
        self.speculation = Speculation()
        self.prompt_tokens = self.known_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Drops all samples and frees the memory of their slots."""
        self._slots.clear()
        pages = self._pages = self._slots.pages
        # With one shard there is nothing to choose.
        known = pages if self._reuses and self._engine.shards > 1 else None
        # The functions hold pages alone: with `self` the weights would live until Python's cycle collection.
        self.scheduler = Scheduler(
            (),
            slot_sizes=self._engine.slot_sizes,
            prefill_batch=self._engine.batch_sizes[-1],
            shards=self._engine.shards,
            # A contiguous cache has memory in every slot.
            may_start=lambda slot, sample: (
                pages is None
                or pages.take(
                    slot,
                    sample.start.tokens,
                    sample.prompt_tokens + sample.limit,
                    len(sample),
                    sample.start.adapter,
                )
            ),
            # The shards that hold most of the beginning of a sample's sequence.
            preferred=lambda sample: () if known is None else _holders(known, sample.start)[0],
        )
        # The prefixes of the newest prefill batch, and the row of each batch index that a prefix has.
        self._prefixes: list[tuple[Prefix, dict[int, int]]] = []
        self._begun = False
        self._forget_slots(0)

    def _forget_slots(self, num_slots: int) -> None:
        """Begins with idle slots: no tokens, no lengths, no stop strings."""
        self._log = DecodedLog(num_slots)
        self._stops = StopsOfSlots(self._stop_search, num_slots)
        # Tokens of the sequence in each slot.
        self._length_n = np.zeros(num_slots, int)
        # Whether a sample in the slot has edits or reports the most probable tokens. Stale for idle slots.
        self._edited_n = np.zeros(num_slots, bool)

    def add(self, samples: Iterable[Sample]) -> None:
        """Queues samples; they start in this order. `Sample.request` comes first."""
        for sample in samples:
            self.scheduler.add(sample, sample.start)

    def drop(self, samples: Collection[Sample]) -> None:
        """Drops waiting or decoding samples; their slots are free at the next dispatch."""
        freed = [self.scheduler.cancel(sample) for sample in samples]
        if running := [slot for slot in freed if slot is not None]:
            # The devices would decode them on.
            self._slots.release(running)
            self._log.stop(np.array(running))
            if self._pages is not None:
                self._pages.release(running)

    def dispatch(self) -> list[Decoded]:
        """Starts waiting samples and decodes up to W tokens in every slot: `begin` and `finish`.

        Unlike after `finish`, ended samples have all their tokens.
        """
        self.begin()
        results = self.finish()
        self.give_ended()
        return results

    def begin(self) -> None:
        """Starts waiting samples, and a dispatch on the devices, if there is any sample."""
        scheduler = self.scheduler
        if not scheduler.num_unfinished:
            return
        moves = scheduler.resize()
        if moves is not None:
            self._move(moves)
        # Before new samples start: running ones have the first claim on free pages.
        self._grow_pages()
        admissions = []
        while (admission := scheduler.admit()) is not None:
            # Later admissions may take the memory of known beginnings, so these are looked up one by one.
            admissions.append((admission, self._known(admission)))
            slots, _, samples = zip(*admission.slots, strict=True)
            self._length_n[list(slots)] = [sample.num_tokens for sample in samples]
        longest = int(self._length_n[scheduler.busy_slots].max())
        self._slots.make_room(len(scheduler.owners), moves, longest)
        for admission, known in admissions:
            self._admit(admission, known)
        self._decode()
        # Copies what the last dispatch decoded, and the devices do not wait for it.
        self._log.settle()
        self._begun = True

    def _decode(self) -> None:
        """Starts a dispatch on the devices: tokens one by one or, with few samples, by speculation."""
        scheduler, rows = self.scheduler, None
        owners, busy = scheduler.owners, scheduler.busy_slots
        # `finish` reads it, and this dispatch may not speculate.
        self.speculation.rows = None
        if edited := self._edited_slots(busy):
            edits = {slot: owners[slot].edits for slot in edited}
            changing = any(each is not None and each.change for each in edits.values())
            # The host must see a token before it knows the edits of the next.
            steps = 1 if changing else self._engine.config.tokens_per_dispatch
            self._slots.generate_edited(edits, scheduler.enough_active, steps)
            return
        if self._engine.num_drafted:
            # Tokens of a sample, with those in the log.
            rows = self.speculation.choose(
                busy,
                len(owners),
                self._engine.shards,
                lambda slot: int(self._length_n[slot]) - owners[slot].prompt_tokens,
            )
        if rows is None:
            adapters = ()
            if self._engine.config.adapter_places:
                adapters = tuple(0 if sample is None else sample.start.adapter for sample in owners)
            self._slots.generate(scheduler.enough_active, adapters)
            return
        prompt_ids: list[int | None] = [None] * len(rows.slot_m)
        for row, slot in rows.slots.items():
            prompt_ids[row] = owners[slot].prompt_id
        self._slots.speculate(rows, self._texts.references(prompt_ids), scheduler.enough_active)

    def finish(self) -> list[Decoded]:
        """Waits for the dispatch that `begin` has started.

        Frees the slots of ended samples. They may get their tokens only in the next `begin`, while the
        devices work, or in `give_ended`.

        Returns:
          One entry per ended sample, or with `streams` per running sample, in the order of the slots; empty
          if nothing runs.
        """
        if not self._begun:
            return []
        self._begun = False
        # Only after it the next dispatch is sent. To send that before would save little: with the 32B recipe
        # on 128 H100 the host takes .15% of the time (docs/rollout.md).
        active, decoded = self._slots.decoded()
        busy, before_n = self.scheduler.busy_slots, self._length_n
        top = None
        for slot in self._edited_slots(busy):
            sample = self.scheduler.owners[slot]
            if sample.edits is not None:
                sample.edits.add(decoded.token[slot, : decoded.count[slot]])
            if top is None and sample.options.top_logprobs:
                # One transfer for all slots, and none if no sample reports them.
                top = self._slots.top()
        self._log.append(decoded)
        # A new array: `before_n` is needed below.
        self._length_n = before_n + decoded.count
        if self._pages is not None:
            self._pages.advance(decoded.count)
        speculated = self.speculation.rows is not None
        self.speculation.note(int(decoded.count.sum()), self._slots.rounds() if speculated else 0)
        cuts = self._stops.cuts(busy, decoded.token, decoded.count, self._tail)
        over = np.union1d(busy[~active[busy]], np.fromiter(cuts, int)).astype(int)
        ends = self._end(over, decoded, cuts)
        # The device knows none of these stops, so it must be told to stop decoding.
        if still_active := [slot for slot in cuts if active[slot]]:
            self._slots.release(still_active)
        if speculated:
            # The log takes slots that decode on to have equally many tokens.
            for slot in np.setdiff1d(busy, over).tolist():
                self._give_tokens(slot)
        results = []
        for slot in busy.tolist() if self._streams else ends:
            kept = decoded.count[slot] - cuts.get(slot, 0)
            sample, before = self.scheduler.owners[slot], int(before_n[slot])
            scores = sample.start.scores if before == sample.prompt_tokens else None
            num_top = sample.options.top_logprobs
            # Copies: on CPUs these arrays are memory of the devices, which the next dispatch overwrites.
            arrays = (decoded.token, decoded.logprob, decoded.entropy)
            results.append(
                Decoded(
                    *(x[slot, :kept].copy() for x in arrays),
                    version=self._version,
                    sample=sample,
                    end=ends.get(slot),
                    num_before=before,
                    top=TopTokens(*(x[slot, :kept, :num_top].copy() for x in top))
                    if top and num_top
                    else None,
                    prompt=scores[0] if scores else None,
                )
            )
        self._free(list(ends))
        return results

    def give_tokens(self) -> None:
        """Gives all samples the tokens that they have so far, without those of a dispatch in progress."""
        self.give_ended()
        for slot in self.scheduler.busy_slots.tolist():
            self._give_tokens(slot)

    def give_ended(self) -> None:
        """Gives ended samples their last tokens, if `finish` has left that to the next `begin`."""
        self._log.pass_on()

    def renew(self, params: Params, version: int) -> None:
        """Decodes on with other weights. No dispatch may have started.

        Samples keep their slots and caches. Those that wait are prefilled with the new weights, and with
        `reuse_prefixes` they share nothing that older weights have cached.
        """
        assert not self._begun, "a dispatch in progress has the weights that it began with"
        # The version is recorded when tokens are given, so those of the old weights are given before it
        # changes.
        self.give_tokens()
        self._slots.load(params)
        self._version = version
        # The old weights have prefilled it, and the next samples of its prompts must not start from that.
        self.scheduler.forget_batch()
        if self._reuses and self._pages is not None:
            self._pages.pool.forget()

    def load_adapters(self, adapters: Params) -> None:
        """Decodes on with another stack of adapters. Samples keep their slots and caches."""
        self._slots.load_adapters(adapters)

    def release_weights(self) -> None:
        """Forgets the weights, so that their memory can be freed before `renew`."""
        self._slots.load(None)

    def _move(self, moves: list[int]) -> None:
        """Moves what is known of the slots, as the scheduler's `resize` has moved their samples."""
        before, now = len(self._length_n), len(moves)
        if not before:
            self._forget_slots(now)
            return
        shards = self._engine.shards
        first_n = np.repeat(np.arange(shards) * (before // shards), now // shards)
        old_n = np.where(np.array(moves) < 0, -1, first_n + moves)
        self._log = self._log.moved(old_n)
        self._stops = self._stops.moved(old_n)
        self._length_n, self._edited_n = self._length_n[old_n], self._edited_n[old_n]

    # Pages

    def _grow_pages(self) -> None:
        """Takes pages for W tokens more in every slot. The newest samples go back to the queue if needed."""
        if self._pages is None:
            return
        if not (dropped := self._pages.grow(self._reusable if self._reuses else None)):
            return
        self._slots.release(dropped)
        for slot in dropped:
            self._give_tokens(slot)
        self._log.stop(np.array(dropped))
        for sample in self.scheduler.finish(dropped):
            # Like a sample of an earlier step it starts again from the tokens that it has.
            sample.start = Start(sample.sequence, sample.start.adapter)
            self.scheduler.add_first(sample, sample.start)

    def _reusable(self, slot: int) -> np.ndarray:
        """The sequence in a slot, int32 [T], as far as later samples may share its pages."""
        self._give_tokens(slot)
        sample = self.scheduler.owners[slot]
        # The weights of its first token have prefilled its prompt.
        return sample.sequence[: None if sample.oldest_version >= self._version else 0]

    # Into slots

    def _known(self, admission: Admission) -> dict[int, tuple[int, list[int], Start]]:
        """The sequences of a new prefill batch that begin with known pages, as `Slots.reuse` takes them."""
        # With 512 known tokens and 24 new ones the first token comes 2.4 to 4.5 times sooner on CPU
        # (benchmarks/results/2026-11-23-prefix_reuse.md).
        if not (self._reuses and self._pages and admission.needs_prefill):
            return {}
        found = {}
        for index, start in enumerate(admission.sources):
            if start.scores is not None:
                continue
            shards, pages = _holders(self._pages, start)
            if pages:
                found[index] = (shards[0], pages, start)
        return found

    def _admit(self, admission: Admission, known: Mapping[int, Any]) -> None:
        """Prefills the batch of an admission if it is new, and inserts its samples."""
        if admission.needs_prefill:
            self.prompt_tokens += sum(len(start.tokens) for start in admission.sources)
            if known:
                assert self._engine.pages is not None, "known sequences have pages"
                num_pages = sum(len(pages) for _, pages, _ in known.values())
                self.known_tokens += num_pages * self._engine.pages.page_tokens
            # Kept, since later admissions may start further samples of this batch.
            self._prefixes = [
                (prefix, {index: row for row, index in index_of.items()})
                for prefix, index_of in self._slots.reuse(known)
            ]
            whole = [i for i in range(len(admission.sources)) if i not in known]
            if whole:
                starts = [admission.sources[i] for i in whole]
                prefix = prefilled(self._engine, self._slots.params, starts)
                self._prefixes.append((prefix, {index: row for row, index in enumerate(whole)}))
        for prefix, row_of in self._prefixes:
            starts = [(slot, row_of[i], each) for slot, i, each in admission.slots if i in row_of]
            if not starts:
                continue
            slots = np.array([slot for slot, _, _ in starts])
            self._log.start(slots)
            options = [sample.options for _, _, sample in starts]
            self._stops.set(slots, [(each.stop_strings, each.stop_ids) for each in options])
            self._edited_n[slots] = [bool(each.edits or each.top_logprobs) for each in options]
            self._slots.insert(prefix, starts)

    # Out of slots

    def _edited_slots(self, busy: np.ndarray) -> list[int]:
        """The slots among those in use whose samples need the program with edits."""
        return busy[self._edited_n[busy]].tolist()

    def _free(self, ended: list[int]) -> None:
        if self._reuses and self._pages is not None:
            for slot in ended:
                # Before `finish`, which forgets the sample of the slot.
                self._pages.remember(slot, self._reusable(slot))
        self._log.stop(np.array(ended, int))
        samples = self.scheduler.finish(ended)
        if self._pages is None:
            return
        # Paused samples say nothing of how long responses are (`LengthRecord`).
        finished = [s for s, sample in zip(ended, samples, strict=True) if sample.finished]
        self._pages.end(finished)
        self._pages.release([slot for slot in ended if slot not in set(finished)])

    def _tail(self, slot: int, count: int) -> np.ndarray:
        """The last `count` tokens of the sample in a slot, or all of them if there are fewer."""
        sample, tokens = self.scheduler.owners[slot], self._log.tail(slot, count)
        # A sample that was continued has its beginning itself.
        before = sample.tokens[max(0, len(sample) + len(tokens) - count) :]
        return np.concatenate([before, tokens])

    def _give_tokens(self, slot: int) -> None:
        """Moves the tokens of a slot from the log to its sample."""
        sample = self.scheduler.owners[slot]
        sample.add(self._log.take(slot, self._version))

    def _end(
        self, slots: np.ndarray, decoded: DecodedTokens, cuts: Mapping[int, int]
    ) -> dict[int, End]:
        """Ends samples, finished or not.

        Args:
          slots: int, slots that decode no more, ascending.
          decoded: tokens that the dispatch has added; the log has them too.
          cuts: number of tokens after a stop that the host has found, by slot.

        Returns:
          Why each sample has ended, by slot.
        """
        newest = decoded.count[slots]
        # Without a new token this reads the last column; `newest > 0` below drops it.
        at_stop_id = np.isin(decoded.token[slots, newest - 1], self._engine.config.stop_ids)
        owners = self.scheduler.owners
        ignored = [owners[slot].options.ignores_stop_ids for slot in slots.tolist()]
        at_stop_id &= ~np.array(ignored, bool)
        cut = np.array([cuts.get(slot, 0) for slot in slots.tolist()], int)
        self._length_n[slots] -= cut
        samples = [self.scheduler.owners[slot] for slot in slots.tolist()]
        self._log.give_later(slots, cut, self._version, [sample.add for sample in samples])
        if self._reuses or self._engine.num_drafted:
            # What follows reads the tokens. Else the next `begin` gives them, while the devices work.
            self._log.pass_on()
        ends: dict[int, End] = {}
        for slot, sample, stopped, length in zip(
            slots.tolist(),
            samples,
            ((newest > 0) & at_stop_id).tolist(),
            self._length_n[slots].tolist(),
            strict=True,
        ):
            # The first, since the tokens after a stop string, stop ids too, are cut off.
            if slot in cuts:
                last = int(decoded.token[slot, decoded.count[slot] - cuts[slot] - 1])
                end = End.STOP_ID if last in sample.options.stop_ids else End.STOP_STRING
            elif stopped:
                end = End.STOP_ID
            else:
                full = length - sample.prompt_tokens >= sample.max_tokens
                end = End.FULL if full else End.PAUSED
            ends[slot] = end
            sample.finished = end is not End.PAUSED
            sample.truncated = end is End.FULL
            if sample.finished and self._engine.num_drafted:
                self._texts.add(sample.prompt_id, sample.tokens)
        if self._engine.config.keeps_routes:
            owners = self.scheduler.owners
            wanted = [s for s in ends if owners[s].finished and owners[s].options.keeps_routes]
            for slot, routes in self._slots.routes(wanted).items():
                # The newest token was drawn but not run. A copy, or all rows of the fetch would be kept.
                owners[slot].routes = routes[: self._length_n[slot] - 1].copy()
        return ends


def _holders(pages: SlotPages, start: Start) -> tuple[list[int], list[int]]:
    """`PagePool.holders` of what is cached of a sequence; its last token is not."""
    return pages.pool.holders(start.tokens[:-1], start.adapter)
