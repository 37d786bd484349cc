"""The offline driver: all samples of a batch of prompts, from one thread, in a fixed order of dispatches.

    plan (host)  ->  resize  ->  prefill, insert  ->  generate  ->  collect (host)  ->  plan ...

Everything that decides comes from the arguments and from what all processes read alike, so every process of a
run takes the same way. Longest-expected samples go first; a prompt is prefilled once for all its samples.

N prompts   G samples of each   B = N * G   W tokens of a dispatch
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.errors import UserError
from jaxrl.models.decoder import Params
from jaxrl.rollout.backend import (
    DecodeText,
    OnGroup,
    SamplingOptions,
    check_lengths,
    expected_or_prompt_lengths,
)
from jaxrl.rollout.decode_state import Prefix
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.environment import Turn
from jaxrl.rollout.samples import Rollout, Sample, UnfinishedGroups, completions_of
from jaxrl.rollout.scheduler import Admission, SampleRequest, Scheduler
from jaxrl.rollout.slots import DecodedTokens, Extension, SlotAssignment, Slots
from jaxrl.types import Completions, Prompts


class EngineBackend:
    """An engine and its weights: what backends around our engine share."""

    def __init__(self, engine: Engine, decode_text: DecodeText):
        """Args: the compiled programs, and token ids to text. Weights come with `load`."""
        self.engine = engine
        self._decode_text = decode_text
        self._params: Params | None = None

    @property
    def mesh(self) -> Mesh:
        """Where the engine runs."""
        return self.engine.mesh

    @property
    def dtype(self) -> Any:
        """Type of weights and activations."""
        return jnp.dtype(self.engine.config.dtype)

    @property
    def params(self) -> Params:
        """The weights that were loaded."""
        assert self._params is not None, "load() comes first"
        return self._params

    def load(self, params: Params) -> None:
        """Takes weights in the generation layout, in the place of those it has."""
        self._params = params

    def unload(self) -> Params | None:
        """Gives the weights back; None without any."""
        params, self._params = self._params, None
        return params

    def close(self) -> None:
        """Nothing outlives a call."""


class OfflineBackend(EngineBackend):
    """The engine and the offline driver; see `backend.RolloutBackend` for the methods."""

    def generate(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Completions:
        """Samples G responses to each prompt, all to their end."""
        assert not options.budget_tokens, "a budget leaves samples unfinished: call `resume`"
        batch = self._start(prompts, options, None, expected_tokens_N)
        while batch.unfinished:
            _hand_out(batch, batch.dispatch(), on_group)
        return batch.completions(range(len(prompts)))

    def resume(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        unfinished: UnfinishedGroups | None = None,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Rollout:
        """Goes on with unfinished groups and samples `prompts`, until there is enough.

        An unfinished sample is prefilled, prompt and tokens, under the present weights. `on_group` is asked
        after each dispatch.
        """
        batch = self._start(prompts, options, unfinished, expected_tokens_N)
        while batch.unfinished:
            if _hand_out(batch, batch.dispatch(), on_group):
                break
        return batch.rollout()

    def _start(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        unfinished: UnfinishedGroups | None,
        expected_tokens_N: np.ndarray | None,
    ) -> _Batch:
        check_lengths(prompts, self.engine.max_prefill_length)
        expected_N = expected_or_prompt_lengths(prompts, expected_tokens_N)
        num_resumed = 0 if unfinished is None else len(unfinished.prompts)
        prompts, samples = _joined(prompts, options, unfinished)
        batch = _Batch(self.engine, self.params, prompts, self._decode_text, options, samples)
        batch.start(_order(samples, num_resumed, expected_N))
        return batch


def _hand_out(batch: _Batch, finished: Sequence[int], on_group: OnGroup | None) -> bool:
    """Gives all finished groups away; whether there is enough with one of them."""
    return on_group is not None and any([on_group(batch.completions([n])) for n in finished])


def _joined(
    prompts: Prompts, options: SamplingOptions, unfinished: UnfinishedGroups | None
) -> tuple[Prompts, list[Sample]]:
    """All prompts and all their samples, unfinished groups first."""
    G = options.num_samples
    if unfinished is None:
        resumed: tuple[Sample, ...] = ()
    elif unfinished.num_samples != G:
        raise UserError(
            f"{len(unfinished.prompts)} unfinished groups have {unfinished.num_samples} samples each and "
            f"would go on with num_samples {G}; a run keeps one number: finish them first, or set it to "
            f"{unfinished.num_samples}"
        )
    else:
        prompts = Prompts.concatenate([unfinished.prompts, prompts])
        resumed = tuple(s.at(s.prompt) for s in unfinished.samples)
    first = len(resumed) // G
    fresh = [Sample(n, k, options.step) for n in range(first, len(prompts)) for k in range(G)]
    return prompts, [*resumed, *fresh]


def _order(samples: Sequence[Sample], num_resumed: int, expected_N: np.ndarray) -> list[int]:
    """Which of the samples to start, in which order: resumed ones, then the longest expected."""

    def rank(i: int):
        prompt = samples[i].prompt
        if prompt < num_resumed:
            return (0, -len(samples[i]), i)
        return (1, -expected_N[prompt - num_resumed], i)

    return sorted((i for i, s in enumerate(samples) if not s.finished), key=rank)


class _Batch:
    """A batch being sampled: its samples on the host, their slots on the devices."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        prompts: Prompts,
        decode_text: DecodeText,
        options: SamplingOptions,
        samples: list[Sample],
    ):
        self._engine = engine
        self._prompts = prompts
        self._decode_text = decode_text
        self._options = options
        self._samples = samples
        self._limits = [
            min(engine.config.max_response_tokens, len(s) + options.budget_tokens)
            if options.budget_tokens
            else engine.config.max_response_tokens
            for s in samples
        ]
        self._slots = Slots(engine, params)
        self._prefix: Prefix | None = None
        self._replies: dict[int, np.ndarray] = {}
        # Texts of long responses take a while: each is made once, whoever asks first.
        self._groups: dict[int, Completions] = {}

    def start(self, order: Sequence[int]) -> None:
        """Queues the samples at `order`; they start with the next dispatch."""

        def source(i: int):
            sample = self._samples[i]
            # Samples that have not begun share their prompt's prefill.
            return (sample.prompt, i if len(sample) else -1)

        self._scheduler = Scheduler(
            [SampleRequest(i, source(i)) for i in order],
            slot_sizes=self._engine.slot_sizes,
            prefill_batch=self._engine.batch_sizes[-1],
            shards=self._engine.shards,
        )

    @property
    def unfinished(self) -> bool:
        """There is something to do for another dispatch."""
        return self._scheduler.unfinished

    def completions(self, prompts: Sequence[int]) -> Completions:
        """The groups of finished prompts."""
        if not prompts:
            return self._completions_of([])
        for n in prompts:
            if n not in self._groups:
                self._groups[n] = self._completions_of([n])
        return Completions.concatenate([self._groups[n] for n in prompts])

    def _completions_of(self, prompts: Sequence[int]) -> Completions:
        samples = [sample for n in prompts for sample in self._group(n)]
        return completions_of(
            self._prompts.take(prompts), samples, self._options.num_samples, self._decode_text
        )

    def rollout(self) -> Rollout:
        """Finished groups as completions, and the others."""
        finished = [self._group_finished(n) for n in range(len(self._prompts))]
        done, left = np.flatnonzero(finished).tolist(), np.flatnonzero(np.invert(finished)).tolist()
        return Rollout(
            completions=self.completions(done),
            prompt_indices=tuple(done),
            versions=tuple(s.version for n in done for s in self._group(n)),
            unfinished=UnfinishedGroups(
                self._prompts.take(left),
                self._options.num_samples,
                tuple(s.at(i) for i, n in enumerate(left) for s in self._group(n)),
            ),
        )

    def _group(self, prompt: int) -> list[Sample]:
        """The samples of a prompt."""
        G = self._options.num_samples
        return self._samples[prompt * G : (prompt + 1) * G]

    def _group_finished(self, prompt: int) -> bool:
        return all(sample.finished for sample in self._group(prompt))

    def dispatch(self) -> list[int]:
        """Starts what can start, decodes up to W tokens, and returns prompts whose groups are finished."""
        scheduler, slots = self._scheduler, self._slots
        moves = scheduler.resize()
        admissions = []
        while (admission := scheduler.admit()) is not None:
            admissions.append(admission)
        longest = max(self._length(i) for i in scheduler.running.values())
        slots.make_room(scheduler.num_slots, moves, longest)
        self._go_on_after_replies()
        for admission in admissions:
            self._admit(admission)
        return self._collect(slots.generate(scheduler.enough_active))

    def _length(self, i: int) -> int:
        sample = self._samples[i]
        return len(self._prompts.tokens[sample.prompt]) + len(sample)

    def _sequence(self, i: int) -> np.ndarray:
        """A sample's prompt and tokens."""
        sample = self._samples[i]
        return np.concatenate([self._prompts.tokens[sample.prompt], sample.tokens])

    # Slots

    def _admit(self, admission: Admission) -> None:
        """Prefills the admitted batch, unless it is the one before, and inserts its samples."""
        if admission.fresh:
            firsts = [
                self._prompts.tokens[prompt] if i < 0 else self._sequence(i)
                for prompt, i in admission.sources
            ]
            self._prefix = self._slots.prefill(firsts)
        assert self._prefix is not None, "the first admission is of a fresh batch"
        self._insert(self._prefix, admission.slots)

    def _insert(self, prefix: Prefix, starts: Iterable[tuple[int, int, int]]) -> None:
        """Puts samples into (slot, place in the prefix, sample), those of one step at a time."""
        of_step = collections.defaultdict(list)
        for slot, place, i in starts:
            sample = self._samples[i]
            prompt_id = int(self._prompts.ids_N[sample.prompt])
            of_step[sample.step].append(
                SlotAssignment(slot, place, prompt_id, sample.index, self._limits[i], len(sample))
            )
        for step, assignments in sorted(of_step.items()):
            self._slots.insert(
                prefix,
                assignments,
                temperature=self._options.temperature,
                truncation=self._options.truncation,
                seed=self._options.seed,
                step=step,
            )

    def _go_on_after_replies(self) -> None:
        """Extends the slots that the environment spoke to, on top of what they have cached."""
        extensions = []
        for slot, i in self._scheduler.running.items():
            if (reply := self._replies.pop(i, None)) is not None:
                before = self._sequence(i)[: -len(reply)]
                extensions.append(Extension(slot, len(before), int(before[-1]), reply))
        running = self._scheduler.running
        for prefix, places in self._slots.extend(extensions):
            self._insert(prefix, [(e.slot, place, running[e.slot]) for place, e in places.items()])

    # Host side

    def _collect(self, decoded: DecodedTokens) -> list[int]:
        """Takes in what the dispatch has decoded, frees the slots that are done; returns finished groups."""
        still_active, done, groups = [], [], []
        for slot, i in self._scheduler.running.items():
            sample = self._samples[i]
            sample.add_decoded(*decoded.of_slot(slot), version=self._options.step)
            stopped = self._cut_at_stop(sample, int(decoded.num_tokens[slot]))
            if decoded.active[slot] and not stopped:
                continue
            if decoded.active[slot]:
                still_active.append(slot)
            if not self._goes_on(i, stopped):
                done.append(slot)
                if self._group_finished(sample.prompt):
                    groups.append(sample.prompt)
        if still_active:
            self._slots.release(still_active)
        self._scheduler.finish(done)
        return groups

    def _cut_at_stop(self, sample: Sample, newest: int) -> bool:
        """Whether the `newest` last tokens end a turn; a stop string cuts off what comes after it."""
        strings = self._options.stop_strings
        if strings and newest:
            # Every token is at least a byte of the text, but for those that spell nothing.
            reach = newest + max(len(s.encode()) for s in strings)
            tail = sample.tail(reach)
            for end in range(max(1, len(tail) - newest + 1), len(tail) + 1):
                text = self._decode_text(tail[:end])
                if any(s in text for s in strings):
                    sample.cut(len(sample) - (len(tail) - end))
                    return True
        last = sample.tail(1)
        return bool(len(last)) and int(last[0]) in self._engine.config.stop_ids

    def _goes_on(self, i: int, stopped: bool) -> bool:
        """Whether the environment keeps a sample going whose slot is idle; else it is finished, or left."""
        sample, limit = self._samples[i], self._engine.config.max_response_tokens
        full = len(sample) >= limit
        if stopped and self._options.environment is not None:
            reply = self._reply(sample)
            if reply is not None and len(sample) + len(reply) < limit:
                sample.add_given(reply, self._options.step)
                self._replies[i] = np.asarray(reply, np.int32)
                return True
            stopped, full = reply is None, reply is not None
        # At its budget, but neither stopped nor full, it stays unfinished.
        sample.finished = stopped or full
        sample.truncated = sample.finished and not stopped
        return False

    def _reply(self, sample: Sample) -> np.ndarray | None:
        assert self._options.environment is not None
        return self._options.environment(
            Turn(
                prompt_id=int(self._prompts.ids_N[sample.prompt]),
                sample_index=sample.index,
                tokens=sample.tail(len(sample)),
                response=sample.tokens,
            )
        )
