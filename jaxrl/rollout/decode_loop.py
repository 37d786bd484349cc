"""The decode loop: samples wait in a queue, decode in slots, and leave when they end.

    add(samples) -> [queue -> slot] -> dispatch() -> new tokens of each slot, and why a sample ended
    drop(samples)

The loop has no thread and no clock, and it does not know where samples come from. Three callers feed it:

    generate (rollout/driver.py)          adds the samples of a batch, dispatches until none is left
    resume   (rollout/driver.py)          adds samples as slots fall free; unfinished ones continue later
    serving  (serving/online_driver.py)   adds samples as requests arrive, and drops cancelled ones

A dispatch takes these steps, in this order:

    begin     resize      chooses the number and capacity of slots that the live samples need
              grow pages  in a paged cache: takes memory for W more tokens; the newest give way if needed
              extend      appends the environment's answer to the sequences of answered samples
              admit       moves samples from the queue into free slots: prefill if needed, then insert
              generate    starts to decode up to W tokens in every slot, or speculates in a few
    finish    collect     cuts at stop strings, calls the environment, frees the slots of ended samples

Between `begin` and `finish` the devices work and the host is free, for the text of finished samples, say.
Python runs only for samples that start, end or have stop strings; the others cost array operations.

Every decision depends only on the arguments and on tokens, which are the same on all processes of a run. So
all processes take the same decisions and dispatch the same programs.

W tokens of a dispatch   T tokens
"""

from __future__ import annotations

import collections
import enum
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxrl.models.decoder import Params
from jaxrl.rollout.decode_state import DecodedTokens, Prefix
from jaxrl.rollout.decoded_log import DecodedLog, Stretch
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.environment import Environment, Turn
from jaxrl.rollout.samples import Sample, Start
from jaxrl.rollout.sampling import SamplingOptions
from jaxrl.rollout.scheduler import Admission, Scheduler
from jaxrl.rollout.slot_pages import SlotPages
from jaxrl.rollout.slots import Known, Placed, Slots
from jaxrl.rollout.speculation import AnswerTexts, Speculation
from jaxrl.rollout.stop_strings import StopSearch, StopsOfSlots


class End(enum.Enum):
    """Why a sample left the loop. A sample that is PAUSED is not finished."""

    STOP_ID = enum.auto()
    STOP_STRING = enum.auto()
    FULL = enum.auto()
    PAUSED = enum.auto()


class Decoded(NamedTuple):
    """Tokens that a dispatch has added to a sample.

    Attributes:
      sample: the sample.
      tokens: int32 [R], without tokens after a stop string and without the environment's answer.
      logprob: float32 [R].
      end: reason why the sample has ended; None if it continues.
      num_before: number of tokens of the prompt and the sample before the dispatch.
    """

    sample: Sample
    tokens: np.ndarray
    logprob: np.ndarray
    end: End | None
    num_before: int


class DecodeLoop:
    """Decodes samples in the slots of one engine. Not thread-safe."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        stops: StopSearch,
        *,
        version: int = 0,
        streams: bool = False,
        reuse_prefixes: bool = False,
        texts: AnswerTexts | None = None,
    ):
        """Makes an empty loop. Device memory is first taken by `dispatch`.

        Args:
          engine, params: engine of the model, and its weights in the generation layout.
          stops: search for stop strings. It gets faster with use, so several loops should share one.
          version: version of the weights; recorded with every token.
          streams: whether a dispatch reports the tokens of every sample, and not only those of ended ones.
          reuse_prefixes: whether a sample that begins like an earlier one prefills the rest only. Needs a
            paged cache, without which it has no effect, and changes the rounding of the logits.
          texts: answers to draft from, to which the loop adds its own; None drafts from a sample's own text.
        """
        self._engine = engine
        self._stop_search = stops
        self._reuses = reuse_prefixes
        # Whether samples get their tokens in `finish`; else the next `begin` gives them, while devices work.
        self._gives_at_once = reuse_prefixes or bool(engine.num_drafted)
        self._version = version
        self._streams = streams
        self._slots = Slots(engine, params)
        self._texts = AnswerTexts(0) if texts is None else texts
        self._speculation = Speculation()
        self.clear()

    def clear(self) -> None:
        """Drops all samples and frees the memory of their slots."""
        self._slots.clear()
        self._pages = self._slots.pages
        self._scheduler = Scheduler(
            (),
            slot_sizes=self._engine.slot_sizes,
            prefill_batch=self._engine.batch_sizes[-1],
            shards=self._engine.shards,
            may_start=functools.partial(_take, self._pages),
            preferred=functools.partial(_holders, self._pages if self._reuses else None),
        )
        # The prefixes of the newest prefill batch, and the row of each batch index that a prefix has.
        self._prefixes: list[tuple[Prefix, dict[int, int]]] = []
        # Samples whose environment has answered, with the length of the answer, which is not cached yet.
        self._answered: dict[Sample, int] = {}
        self._begun = False
        self._forget_slots(0)

    def _forget_slots(self, num_slots: int) -> None:
        """Begins with idle slots: no tokens, no lengths, no stop strings."""
        self._log = DecodedLog(num_slots)
        self._stops = StopsOfSlots(self._stop_search, num_slots)
        # Tokens of the sequence in each slot.
        self._length_n = np.zeros(num_slots, int)

    @property
    def unfinished(self) -> bool:
        return self._scheduler.unfinished

    @property
    def num_unfinished(self) -> int:
        return self._scheduler.num_unfinished

    @property
    def places(self) -> int:
        """The number of samples to add so that all slots are busy and stay so; see `Scheduler.places`."""
        return self._scheduler.places

    def add(self, samples: Iterable[Sample]) -> None:
        """Queues samples; they start in this order. `Sample.request` comes first."""
        for sample in samples:
            self._scheduler.add(sample, sample.start)

    def drop(self, samples: Collection[Sample]) -> None:
        """Drops waiting or decoding samples; their slots are free at the next dispatch."""
        freed = [self._scheduler.cancel(sample) for sample in samples]
        for sample in samples:
            self._answered.pop(sample, None)
        if running := [slot for slot in freed if slot is not None]:
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
        scheduler = self._scheduler
        if not scheduler.unfinished:
            return
        moves = scheduler.resize()
        if moves is not None:
            self._move(moves)
        self._grow_pages()
        # Later admissions may take the memory of known beginnings, so these are looked up one by one.
        admissions = [(each, self._known(each)) for each in iter(scheduler.admit, None)]
        for admission, _ in admissions:
            slots, _, samples = zip(*admission.slots, strict=True)
            self._length_n[list(slots)] = [sample.num_tokens for sample in samples]
        longest = int(self._length_n[scheduler.busy_slots].max())
        self._slots.make_room(scheduler.num_slots, moves, longest)
        self._extend_answered()
        for admission, known in admissions:
            self._admit(admission, known)
        self._decode()
        self._log.settle()
        self._begun = True

    def _decode(self) -> None:
        """Starts a dispatch on the devices: tokens one by one or, with few samples, by speculation."""
        scheduler, rows = self._scheduler, None
        if self._engine.num_drafted:
            busy, num_slots = scheduler.busy_slots, scheduler.num_slots
            rows = self._speculation.choose(busy, num_slots, self._engine.shards, self._num_sampled)
        if rows is None:
            self._slots.generate(scheduler.enough_active)
            return
        prompt_ids: list[int | None] = [None] * len(rows.slot_m)
        for row, slot in rows.slots.items():
            prompt_ids[row] = scheduler.owner(slot).prompt_id
        self._slots.speculate(rows, self._texts.references(prompt_ids), scheduler.enough_active)

    def _num_sampled(self, slot: int) -> int:
        """The number of tokens of the sample in a slot, those in the log included."""
        return int(self._length_n[slot]) - self._scheduler.owner(slot).prompt_tokens

    def finish(self) -> list[Decoded]:
        """Waits for the dispatch that `begin` has started.

        Ended samples may get their tokens only in the next `begin`, while the devices work, or in
        `give_ended`.

        Returns:
          One entry per ended sample, or with `streams` per running sample, in the order of the slots; empty
          if nothing runs.
        """
        if not self._begun:
            return []
        self._begun = False
        return self._collect(*self._slots.decoded())

    def metrics(self) -> dict[str, float]:
        """Metrics of speculation."""
        return self._speculation.metrics()

    def give_tokens(self) -> None:
        """Gives all samples the tokens that they have so far, without those of a begun dispatch."""
        self.give_ended()
        for slot in self._scheduler.busy_slots.tolist():
            self._give_tokens(slot)

    def give_ended(self) -> None:
        """Gives ended samples their last tokens, if `finish` has left that to the next `begin`."""
        self._log.pass_on()

    def renew(self, params: Params, version: int) -> None:
        """Decodes on with other weights. No dispatch may have begun.

        Samples keep their slots and caches. Sequences that are prefilled and wait for a slot keep theirs too.
        """
        assert not self._begun, "a dispatch in progress has the weights that it began with"
        self.give_tokens()
        self._slots.params, self._version = params, version

    def release_weights(self) -> None:
        """Forgets the weights, so that their memory can be freed before `renew`."""
        self._slots.params = None

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
        self._length_n = self._length_n[old_n]

    # Pages

    def _grow_pages(self) -> None:
        """Takes pages for W tokens more in every slot. The newest samples go back to the queue if needed."""
        if self._pages is None:
            return
        for slot, num_new in self._answered_by_slot().items():
            length = self._scheduler.owner(slot).num_tokens - num_new
            self._pages.extend(slot, length, num_new)
        if not (dropped := self._pages.grow(self._cached if self._reuses else None)):
            return
        self._slots.release(dropped)
        for slot in dropped:
            self._give_tokens(slot)
        self._log.stop(np.array(dropped))
        for sample in self._scheduler.finish(dropped):
            # Like a sample of an earlier step it starts again from the tokens that it has.
            self._answered.pop(sample, None)
            sample.start = Start(sample.sequence)
            self._scheduler.add_first(sample, sample.start)

    def _cached(self, slot: int) -> np.ndarray:
        """The sequence in a slot, int32 [T], without an environment's answer that still waits."""
        self._give_tokens(slot)
        sample = self._scheduler.owner(slot)
        num_new = self._answered.get(sample)
        # The token before an answer is not cached yet.
        return sample.sequence[: None if num_new is None else -num_new - 1]

    # Into slots

    def _known(self, admission: Admission) -> dict[int, Known]:
        """The batch indices of a new prefill batch whose sequences begin with known pages."""
        if not (self._reuses and self._pages and admission.needs_prefill):
            return {}
        found = {}
        for index, start in enumerate(admission.sources):
            shards, pages = self._pages.pool.holders(start.tokens[:-1])
            if pages:
                found[index] = (shards[0], pages, start.tokens)
        return found

    def _admit(self, admission: Admission, known: Mapping[int, Known]) -> None:
        """Prefills the batch of an admission if it is new, and inserts its samples."""
        if admission.needs_prefill:
            self._prefixes = [
                (prefix, {index: row for row, index in index_of.items()})
                for prefix, index_of in self._slots.reuse(known)
            ]
            whole = [i for i in range(len(admission.sources)) if i not in known]
            if whole:
                prefix = self._slots.prefill([admission.sources[i].tokens for i in whole])
                self._prefixes.append((prefix, {index: row for row, index in enumerate(whole)}))
        for prefix, row_of in self._prefixes:
            starts = [(slot, row_of[i], each) for slot, i, each in admission.slots if i in row_of]
            if starts:
                self._insert(prefix, starts)

    def _insert(self, prefix: Prefix, starts: list[tuple[int, int, Sample]]) -> None:
        """Puts samples into slots; samples with equal options are inserted in one call.

        Args:
          prefix: prefilled sequences.
          starts: slot, batch index in the prefix, and sample.
        """
        alike: dict[SamplingOptions, list[Placed]] = collections.defaultdict(list)
        slots = np.array([slot for slot, _, _ in starts])
        self._log.start(slots)
        self._stops.set(slots, [sample.options.stop_strings for _, _, sample in starts])
        for slot, row, sample in starts:
            alike[sample.options].append(
                (slot, row, sample.prompt_id, sample.index, sample.limit, len(sample))
            )
        for options, samples in alike.items():
            self._slots.insert(prefix, samples, options)

    def _answered_by_slot(self) -> dict[int, int]:
        """The lengths of the answers that wait, by the slot of their sample; a slot may have moved since."""
        found = {
            slot: num_new
            for sample, num_new in self._answered.items()
            if (slot := self._scheduler.slot_of(sample)) is not None
        }
        return dict(sorted(found.items()))

    def _extend_answered(self) -> None:
        """Appends the environment's answers to the sequences in their slots, so that they decode on."""
        owner, answered = self._scheduler.owner, self._answered_by_slot()
        self._answered = {}
        extensions = {slot: (owner(slot).sequence, num_new) for slot, num_new in answered.items()}
        for prefix, slot_of in self._slots.extend(extensions):
            self._insert(prefix, [(slot, index, owner(slot)) for index, slot in slot_of.items()])

    # Out of slots

    def _collect(self, active: np.ndarray, decoded: DecodedTokens) -> list[Decoded]:
        """Adds decoded tokens to samples whose turn is over, and frees the slots of ended samples."""
        busy = self._scheduler.busy_slots
        before_n = self._length_n
        self._log.append(decoded)
        self._length_n = before_n + decoded.count
        if self._pages is not None:
            self._pages.advance(decoded.count)
        speculated = self._speculation.rows is not None
        self._speculation.note(int(decoded.count.sum()), self._slots.rounds() if speculated else 0)
        cuts = self._stops.cuts(busy, decoded.token, decoded.count, self._tail)
        over = np.union1d(busy[~active[busy]], np.fromiter(cuts, int)).astype(int)
        ends = self._end_turns(over, decoded, cuts)
        # The device does not check stop strings, so it must be told to stop decoding.
        if still_active := [slot for slot in cuts if active[slot]]:
            self._slots.release(still_active)
        ended = [slot for slot, end in ends.items() if end is not None]
        if speculated:
            # The log takes slots that decode on to have equally many tokens.
            for slot in np.setdiff1d(busy, over).tolist():
                self._give_tokens(slot)
        reported = busy.tolist() if self._streams else ended
        results = []
        for slot in reported:
            tokens, logprob, _ = decoded.of_slot(slot)
            kept = len(tokens) - cuts.get(slot, 0)
            told = (tokens[:kept], logprob[:kept], ends.get(slot), int(before_n[slot]))
            results.append(Decoded(self._scheduler.owner(slot), *told))
        self._free(ended)
        return results

    def _free(self, ended: list[int]) -> None:
        self._log.stop(np.array(ended, int))
        samples = self._scheduler.finish(ended)
        if self._pages is None:
            return
        finished = [s for s, sample in zip(ended, samples, strict=True) if sample.finished]
        if self._reuses:
            for slot, sample in zip(ended, samples, strict=True):
                self._pages.remember(slot, sample.sequence)
        self._pages.end(finished)
        self._pages.release([slot for slot in ended if slot not in set(finished)])

    def _tail(self, slot: int, count: int) -> np.ndarray:
        """The last `count` tokens of a slot's current turn, or all of them if there are fewer."""
        sample, tokens = self._scheduler.owner(slot), self._log.tail(slot, count)
        # A sample that was continued has the beginning of its turn itself.
        before = sample.tail(count - len(tokens)) if len(tokens) < count else tokens[:0]
        return np.concatenate([before, tokens])

    def _give_tokens(self, slot: int) -> None:
        """Moves the tokens of a slot from the log to its sample."""
        sample = self._scheduler.owner(slot)
        sample.add_decoded(*self._log.take(slot), version=self._version)

    def _end_turns(
        self, slots: np.ndarray, decoded: DecodedTokens, cuts: Mapping[int, int]
    ) -> dict[int, End | None]:
        """Ends turns: a sample ends, stays unfinished, or continues after the environment's answer.

        Args:
          slots: int, slots that decode no more, ascending.
          decoded: tokens that the dispatch has added; the log has them too.
          cuts: number of tokens after a stop string, by slot.

        Returns:
          Why each sample has ended, by slot; None if it continues.
        """
        newest = decoded.count[slots]
        at_stop_id = np.isin(decoded.token[slots, newest - 1], self._engine.config.stop_ids)
        cut = np.array([cuts.get(slot, 0) for slot in slots.tolist()], int)
        self._length_n[slots] -= cut
        samples = [self._scheduler.owner(slot) for slot in slots.tolist()]
        self._log.give_later(slots, cut, [self._giving(sample) for sample in samples])
        if self._gives_at_once or any(sample.options.environment for sample in samples):
            self._log.pass_on()
        ends: dict[int, End | None] = {}
        for slot, sample, stopped, length in zip(
            slots.tolist(),
            samples,
            ((newest > 0) & at_stop_id).tolist(),
            self._length_n[slots].tolist(),
            strict=True,
        ):
            end = End.STOP_STRING if slot in cuts else End.STOP_ID if stopped else None
            if end is None:
                full = length - sample.prompt_tokens >= sample.max_tokens
                end = End.FULL if full else End.PAUSED
            elif sample.options.environment is not None:
                end = self._answer(sample, sample.options.environment, end)
                self._length_n[slot] = sample.num_tokens
            ends[slot] = end
            sample.finished = end not in (None, End.PAUSED)
            sample.truncated = end is End.FULL
            if sample.finished and self._engine.num_drafted:
                self._texts.add(sample.prompt_id, sample.tokens)
        return ends

    def _giving(self, sample: Sample) -> Callable[[Stretch], None]:
        version = self._version
        return lambda stretch: sample.add_decoded(*stretch, version=version)

    def _answer(self, sample: Sample, environment: Environment, stop: End) -> End | None:
        """Calls the environment; returns None if it has answered, because the sample then continues."""
        turn = sample.tail(len(sample))
        answer = environment(Turn(sample.prompt_id, sample.index, turn, sample.tokens))
        if answer is None:
            return stop
        answer = np.asarray(answer, np.int32)
        if len(sample) + len(answer) >= sample.max_tokens:
            return End.FULL
        self._answered[sample] = len(answer)
        sample.add_given(answer, self._version)
        return None


def _take(pages: SlotPages | None, slot: int, sample: Sample) -> bool:
    """Takes pages for a sample; False if there are too few. A contiguous cache has memory in every slot."""
    most = sample.prompt_tokens + sample.limit
    return pages is None or pages.take(slot, sample.start.tokens, most, len(sample))


def _holders(pages: SlotPages | None, sample: Sample) -> Collection[int]:
    """The shards that hold most of the beginning of a sample's sequence in known pages."""
    return () if pages is None else pages.pool.holders(sample.start.tokens[:-1])[0]
