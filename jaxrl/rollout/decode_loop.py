"""The decode loop: samples wait in a queue, decode in slots, and leave when they end.

    add(samples) -> [queue -> slot] -> dispatch() -> new tokens of each slot, and why a sample ended
    drop(samples)

The loop has no thread and no clock, and it does not know where samples come from. Three callers feed it:

    generate (rollout/driver.py)          adds the samples of a batch, dispatches until none is left
    resume   (rollout/driver.py)          the same, but may stop early; its samples continue in a later loop
    serving  (serving/online_driver.py)   adds samples as requests arrive, and drops cancelled ones

A dispatch takes these steps, in this order:

    resize        chooses the number and capacity of slots that the live samples need
    grow pages    in a paged cache: takes memory for W more tokens; the newest samples give way if needed
    extend        appends the environment's answer to the sequences of answered samples
    admit         moves samples from the queue into free slots: prefill if needed, then insert
    generate      decodes up to W tokens in every slot
    collect       cuts at stop strings, calls the environment, frees the slots of ended samples

Every decision depends only on the arguments and on tokens, which are the same on all processes of a run. So
all processes take the same decisions and dispatch the same programs.

W tokens of a dispatch   T tokens   R tokens that a dispatch has added to a sample
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxrl.models.decoder import Params
from jaxrl.rollout.decode_state import DecodedTokens, Prefix
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.environment import Environment, Turn
from jaxrl.rollout.samples import Sample
from jaxrl.rollout.scheduler import Admission, SampleRequest, Scheduler
from jaxrl.rollout.slot_pages import SlotPages
from jaxrl.rollout.slots import DrawSettings, Extension, SlotAssignment, Slots
from jaxrl.rollout.stop_strings import end_of_stop, tokens_to_search


@dataclasses.dataclass(frozen=True, eq=False)
class StartSequence:
    """Tokens that samples start from. Samples that hold the same object share one prefill.

    Attributes:
      tokens: int32 [T].
    """

    tokens: np.ndarray


@dataclasses.dataclass(eq=False)
class SampleTask:
    """A sample to decode, with its settings.

    Attributes:
      sample: the sample that receives the tokens; it may already have some.
      start: the prompt, followed by the tokens that the sample already has.
      prompt_id: part of the sampling key. With `settings` and the sample's index it determines the noise of
        every token.
      settings: how tokens are drawn.
      max_tokens: maximum length of the whole sample, end-of-sequence included.
      budget_tokens: maximum number of tokens that this loop adds. After that the sample is left unfinished.
        0 means no limit.
      stop_strings: texts that end a turn; tokens after the stop string are removed.
      environment: function that answers a finished turn; None ends the sample after its first turn.
      owner: any value of the caller, to recognise the sample by.
      prompt_tokens: number of tokens before the sample.
      limit: length of the sample at which its slot stops decoding.
    """

    sample: Sample
    start: StartSequence
    prompt_id: int
    settings: DrawSettings
    max_tokens: int
    budget_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    environment: Environment | None = None
    owner: Any = None
    prompt_tokens: int = dataclasses.field(init=False)
    limit: int = dataclasses.field(init=False)

    def __post_init__(self):
        count = len(self.sample)
        self.prompt_tokens = len(self.start.tokens) - count
        allowed = count + self.budget_tokens if self.budget_tokens else self.max_tokens
        self.limit = min(allowed, self.max_tokens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and the sample together."""
        return self.prompt_tokens + len(self.sample)


class End(enum.Enum):
    """Why a sample left the loop. A sample that is PAUSED is not finished."""

    STOP_ID = enum.auto()
    STOP_STRING = enum.auto()
    FULL = enum.auto()
    PAUSED = enum.auto()


class Decoded(NamedTuple):
    """Tokens that a dispatch has added to a sample.

    Attributes:
      task: the sample's task.
      tokens: int32 [R], without tokens after a stop string and without the environment's answer.
      logprob: float32 [R].
      end: reason why the sample has ended; None if it continues.
    """

    task: SampleTask
    tokens: np.ndarray
    logprob: np.ndarray
    end: End | None


class DecodeLoop:
    """Decodes samples in the slots of one engine. Not thread-safe."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        decode_text: Callable[[np.ndarray], str],
        *,
        version: int = 0,
        lock: Any = None,
    ):
        """Makes an empty loop. Device memory is first taken by `dispatch`.

        Args:
          engine, params: engine of the model, and its weights in the generation layout.
          decode_text: function that turns token ids into text, for stop strings.
          version: version of the weights; recorded with every token.
          lock: context manager that is held during each dispatch, if another thread uses the same devices;
            None if no other thread does.
        """
        self._engine = engine
        self._decode_text = decode_text
        self._version = version
        self._slots = Slots(engine, params, lock)
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
            may_start=_always if self._pages is None else functools.partial(_take, self._pages),
        )
        self._prefix: Prefix | None = None
        self._extensions: dict[SampleTask, Extension] = {}

    @property
    def unfinished(self) -> bool:
        """Whether any sample waits or decodes."""
        return self._scheduler.unfinished

    def add(self, tasks: Iterable[SampleTask]) -> None:
        """Queues samples; they start in this order."""
        for task in tasks:
            self._scheduler.add(SampleRequest(task, task.start))

    def drop(self, tasks: Collection[SampleTask]) -> None:
        """Drops waiting or decoding samples; their slots are free at the next dispatch."""
        freed = [self._scheduler.cancel(task) for task in tasks]
        for task in tasks:
            self._extensions.pop(task, None)
        if running := [slot for slot in freed if slot is not None]:
            self._slots.release(running)
            if self._pages is not None:
                self._pages.release(running)

    def dispatch(self) -> list[Decoded]:
        """Starts waiting samples and decodes up to W tokens in every slot.

        Returns:
          One entry per running sample, in the order of the slots; empty if nothing runs.
        """
        scheduler = self._scheduler
        if not scheduler.unfinished:
            return []
        moves = scheduler.resize()
        self._grow_pages()
        admissions = list(iter(scheduler.admit, None))
        running = scheduler.running
        longest = max(task.num_tokens for task in running.values())
        self._slots.make_room(scheduler.num_slots, moves, longest)
        self._extend_answered(running)
        for admission in admissions:
            self._admit(admission)
        return self._collect(running, *self._slots.generate(scheduler.enough_active))

    # Pages

    def _grow_pages(self) -> None:
        """Takes pages for W tokens more in every slot. The newest samples go back to the queue if needed."""
        if self._pages is None:
            return
        if self._extensions:
            for slot, task in self._scheduler.running.items():
                if (extension := self._extensions.get(task)) is not None:
                    self._pages.extend(slot, extension.length, len(extension.tokens))
        if not (dropped := self._pages.grow()):
            return
        self._slots.release(dropped)
        for task in self._scheduler.finish(dropped):
            # Like a sample of an earlier step it starts again from the tokens that it has.
            self._extensions.pop(task, None)
            prompt = task.start.tokens[: task.prompt_tokens]
            task.start = StartSequence(np.concatenate([prompt, task.sample.tokens]))
            self._scheduler.add_first(SampleRequest(task, task.start))

    # Into slots

    def _admit(self, admission: Admission) -> None:
        """Prefills the batch of an admission if it is new, and inserts its samples."""
        if admission.needs_prefill:
            self._prefix = self._slots.prefill([start.tokens for start in admission.sources])
        assert self._prefix is not None, "the first admission needs a prefill"
        self._insert(self._prefix, admission.slots)

    def _insert(self, prefix: Prefix, starts: Iterable[tuple[int, int, SampleTask]]) -> None:
        """Puts samples into slots; samples with equal settings are inserted in one call.

        Args:
          prefix: prefilled sequences.
          starts: slot, batch index in the prefix, and task of each sample.
        """
        alike: dict[DrawSettings, list[SlotAssignment]] = collections.defaultdict(list)
        for slot, batch_index, task in starts:
            sample = task.sample
            alike[task.settings].append(
                SlotAssignment(
                    slot, batch_index, task.prompt_id, sample.index, task.limit, len(sample)
                )
            )
        for settings, assignments in alike.items():
            self._slots.insert(prefix, assignments, settings)

    def _extend_answered(self, running: dict[int, SampleTask]) -> None:
        """Appends the environment's answers to the sequences in their slots, so that they decode on."""
        # A slot may have moved since its turn ended.
        extensions = {
            slot: extension
            for slot, task in running.items()
            if (extension := self._extensions.pop(task, None)) is not None
        }
        for prefix, slot_of in self._slots.extend(extensions):
            self._insert(prefix, [(slot, index, running[slot]) for index, slot in slot_of.items()])

    # Out of slots

    def _collect(
        self, running: dict[int, SampleTask], active: np.ndarray, decoded: DecodedTokens
    ) -> list[Decoded]:
        """Adds decoded tokens to their samples, and frees the slots of ended samples."""
        results, ended, still_active = [], [], []
        if self._pages is not None:
            self._pages.advance(decoded.count)
        for slot, task in running.items():
            sample, before = task.sample, len(task.sample)
            tokens, logprob, entropy = decoded.of_slot(slot)
            sample.add_decoded(tokens, logprob, entropy, version=self._version)
            stop = self._cut_at_stop(task, tokens)
            kept = len(sample) - before
            turn_over = stop is not None or not active[slot]
            end = self._end_turn(task, stop) if turn_over else None
            results.append(Decoded(task, tokens[:kept], logprob[:kept], end))
            if turn_over and active[slot]:
                # The device does not check stop strings, so it must be told to stop decoding.
                still_active.append(slot)
            if end is not None:
                ended.append(slot)
        if still_active:
            self._slots.release(still_active)
        self._scheduler.finish(ended)
        if self._pages is not None:
            self._pages.end([slot for slot in ended if running[slot].sample.finished])
            self._pages.release([slot for slot in ended if not running[slot].sample.finished])
        return results

    def _cut_at_stop(self, task: SampleTask, newest: np.ndarray) -> End | None:
        """Cuts the sample after the first stop string; returns how its turn ended, None if it did not.

        Args:
          task: the sample's task.
          newest: int32, tokens that this dispatch has added.
        """
        sample = task.sample
        if task.stop_strings:
            tail = sample.tail(tokens_to_search(len(newest), task.stop_strings))
            end = end_of_stop(tail, len(newest), task.stop_strings, self._decode_text)
            if end is not None:
                sample.cut(len(sample) - (len(tail) - end))
                return End.STOP_STRING
        stopped = len(newest) and int(newest[-1]) in self._engine.config.stop_ids
        return End.STOP_ID if stopped else None

    def _end_turn(self, task: SampleTask, stop: End | None) -> End | None:
        """Ends a turn: the sample ends, stays unfinished, or continues after the environment's answer.

        Args:
          task: task of a sample whose slot is idle.
          stop: how the turn ended; None if it reached the token limit.

        Returns:
          Why the sample has ended; None if it continues.
        """
        end = stop
        if stop is None:
            end = End.FULL if len(task.sample) >= task.max_tokens else End.PAUSED
        elif task.environment is not None:
            end = self._answer(task, task.environment, stop)
        task.sample.finished = end not in (None, End.PAUSED)
        task.sample.truncated = end is End.FULL
        return end

    def _answer(self, task: SampleTask, environment: Environment, stop: End) -> End | None:
        """Calls the environment; returns None if it has answered, because the sample then continues."""
        sample = task.sample
        turn = sample.tail(len(sample))
        answer = environment(Turn(task.prompt_id, sample.index, turn, sample.tokens))
        if answer is None:
            return stop
        answer = np.asarray(answer, np.int32)
        if len(sample) + len(answer) >= task.max_tokens:
            return End.FULL
        self._extensions[task] = Extension(task.num_tokens, int(turn[-1]), answer)
        sample.add_given(answer, self._version)
        return None


def _always(slot: int, task: SampleTask) -> bool:
    """A contiguous cache has memory for a sample in every slot."""
    del slot, task
    return True


def _take(pages: SlotPages, slot: int, task: SampleTask) -> bool:
    """Takes pages for a sample; False if there are too few."""
    most = task.prompt_tokens + task.limit
    return pages.take(slot, task.start.tokens, most, len(task.sample))
