"""The offline driver: all samples of a batch of prompts, from one thread, in a fixed order of dispatches.

    plan (host)  ->  resize  ->  prefill, insert  ->  generate  ->  collect (host)  ->  plan ...

Everything that decides comes from the requests and from what all processes read alike, so every process of a
run takes the same way. Longest-expected samples go first; a prompt is prefilled once for all its samples.

N prompts   G samples of each   B = N * G   W tokens of a dispatch
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl.errors import UserError
from jaxrl.models.decoder import Params
from jaxrl.rollout.engine import Engine, Prefix
from jaxrl.rollout.environment import Environment, Turn
from jaxrl.rollout.samples import Carry, Rollout, Sample, completions_of
from jaxrl.rollout.sampling import Truncation, untruncated
from jaxrl.rollout.scheduler import Admission, Request, Scheduler
from jaxrl.rollout.slots import Append, Drawn, Seat, Slots
from jaxrl.types import Completions, Prompts

DecodeText = Callable[[np.ndarray], str]
# Of the groups finished so far, whether the others may be given up.
Enough = Callable[[Completions], bool]


@dataclasses.dataclass(frozen=True)
class Options:
    """How a batch is sampled.

    Attributes:
      num_samples: G.
      seed, step: with a prompt's id and the sample's index they determine each sample.
      temperature: 0 is greedy.
      truncation: which tokens may be drawn, as scalars; None is all.
      stop_strings: texts that end a response as a stop id does; tokens after one are cut off.
      environment: what answers a finished turn; None ends every sample at its first stop.
      budget_tokens: most tokens that are added to a sample now; 0 is no such limit. What is unfinished then
        is carried.
    """

    num_samples: int
    seed: int
    step: int
    temperature: float
    truncation: Truncation | None = None
    stop_strings: tuple[str, ...] = ()
    environment: Environment | None = None
    budget_tokens: int = 0


def sample(
    engine: Engine,
    params: Params,
    prompts: Prompts,
    decode_text: DecodeText,
    *,
    expected_tokens_N: np.ndarray | None = None,
    **options: Any,
) -> Completions:
    """Samples G responses to each prompt, all to their end.

    Args:
      engine: the compiled programs.
      params: weights in the generation layout.
      prompts: N prompts, none longer than the engine's limit.
      decode_text: token ids to text.
      expected_tokens_N: how long responses are thought to become; see `rollout`.
      options: fields of `Options`, without a budget.

    Returns:
      Completions with B = N * G rows.

    Raises:
      UserError: a prompt is empty or too long.
    """
    settings = Options(**options)
    assert not settings.budget_tokens, "a budget leaves samples unfinished: call `rollout`"
    run = rollout(
        engine, params, prompts, decode_text, settings, expected_tokens_N=expected_tokens_N
    )
    return run.completions


def rollout(
    engine: Engine,
    params: Params,
    prompts: Prompts,
    decode_text: DecodeText,
    options: Options,
    *,
    carry: Carry | None = None,
    enough: Enough | None = None,
    expected_tokens_N: np.ndarray | None = None,
) -> Rollout:
    """Samples G responses to each prompt, and goes on with those of an earlier step.

    A carried sample is prefilled, prompt and tokens, under the present weights and goes on with the keys of
    the step that began it: if the weights are the same, so are its tokens.

    Args:
      engine, params, prompts, decode_text: as of `sample`.
      options: how.
      carry: groups that an earlier call left unfinished; they come before `prompts`.
      enough: called with each group as it is finished, as completions of one prompt; once it says True
        nothing more is decoded, and unfinished groups are carried.
      expected_tokens_N: how long responses to each of `prompts` are thought to become, from earlier steps
        say; the longest start first. By default the length of the prompt is all there is to go by.

    Returns:
      The finished groups, and the others to be carried.

    Raises:
      UserError: a prompt is empty or too long, or the carried groups are of another size.
    """
    _check_lengths(prompts, engine.max_prefill_length)
    prompts, samples = _joined(prompts, options, carry)
    given = len(prompts) if carry is None else len(prompts) - len(carry.prompts)
    if expected_tokens_N is None:
        expected_tokens_N = np.array([len(tokens) for tokens in prompts.tokens[-given:]])
    run = _Run(engine, params, prompts, decode_text, options, samples)
    run.start(_order(samples, len(prompts) - given, expected_tokens_N))
    while run.scheduler.unfinished:
        groups = run.dispatch()
        if enough is not None and any([enough(run.completions([n])) for n in groups]):
            break
    done = [n for n in range(len(prompts)) if run.group_finished(n)]
    left = [n for n in range(len(prompts)) if not run.group_finished(n)]
    return Rollout(
        completions=run.completions(done),
        prompt_indices=tuple(done),
        versions=tuple(s.version for n in done for s in run.group(n)),
        carry=Carry(
            prompts.take(left),
            options.num_samples,
            tuple(s.at(i) for i, n in enumerate(left) for s in run.group(n)),
        ),
    )


def _check_lengths(prompts: Prompts, limit: int) -> None:
    for prompt_id, tokens in zip(prompts.ids_N, prompts.tokens, strict=True):
        if not 0 < len(tokens) <= limit:
            raise UserError(
                f"prompt {prompt_id} has {len(tokens)} tokens; the engine takes 1 to {limit}: "
                "raise data.max_prompt_tokens or drop the prompt"
            )


def _joined(
    prompts: Prompts, options: Options, carry: Carry | None
) -> tuple[Prompts, list[Sample]]:
    """All prompts and all their samples, carried ones first."""
    G = options.num_samples
    if carry is None:
        carried: tuple[Sample, ...] = ()
    elif carry.num_samples != G:
        raise UserError(
            f"{len(carry.prompts)} groups of {carry.num_samples} samples are carried into a step with "
            f"num_samples {G}; a run keeps one number: finish them first, or set it to {carry.num_samples}"
        )
    else:
        prompts = Prompts.concatenate([carry.prompts, prompts])
        carried = tuple(s.at(s.prompt) for s in carry.samples)
    first = len(carried) // G
    fresh = [Sample(n, k, options.step) for n in range(first, len(prompts)) for k in range(G)]
    return prompts, [*carried, *fresh]


def _order(samples: Sequence[Sample], num_carried: int, expected_N: np.ndarray) -> list[int]:
    """Which of the samples to start, in which order: carried ones, then the longest expected."""

    def rank(i: int):
        prompt = samples[i].prompt
        if prompt < num_carried:
            return (0, -len(samples[i]), i)
        return (1, -expected_N[prompt - num_carried], i)

    return sorted((i for i, s in enumerate(samples) if not s.finished), key=rank)


class _Run:
    """A batch being sampled: its samples on the host, their rows on the devices."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        prompts: Prompts,
        decode_text: DecodeText,
        options: Options,
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
        self._truncation = options.truncation or untruncated()
        self._slots = Slots(engine, params)
        self._prefix: Prefix | None = None
        self._replies: dict[int, np.ndarray] = {}

    def start(self, order: Sequence[int]) -> None:
        """Queues the samples at `order`; they start with the next dispatch."""

        def source(i: int):
            sample = self._samples[i]
            # Samples that have not begun share their prompt's prefill.
            return (sample.prompt, i if len(sample) else -1)

        self.scheduler = Scheduler(
            [Request(i, source(i)) for i in order],
            row_sizes=self._engine.slot_sizes,
            prefill_batch=self._engine.batch_sizes[-1],
            shards=self._engine.shards,
        )

    def group(self, prompt: int) -> list[Sample]:
        """The samples of a prompt."""
        G = self._options.num_samples
        return self._samples[prompt * G : (prompt + 1) * G]

    def group_finished(self, prompt: int) -> bool:
        """All of them are."""
        return all(sample.finished for sample in self.group(prompt))

    def completions(self, prompts: Sequence[int]) -> Completions:
        """The groups of finished prompts."""
        samples = [sample for n in prompts for sample in self.group(n)]
        return completions_of(
            self._prompts.take(prompts), samples, self._options.num_samples, self._decode_text
        )

    def dispatch(self) -> list[int]:
        """Starts what can start, decodes up to W tokens, and returns prompts whose groups are finished."""
        scheduler, slots = self.scheduler, self._slots
        moves = scheduler.resize()
        admissions = []
        while (admission := scheduler.admit()) is not None:
            admissions.append(admission)
        longest = max(self._length(i) for i in scheduler.running.values())
        slots.make_room(scheduler.num_rows, moves, longest)
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

    # Rows

    def _admit(self, admission: Admission) -> None:
        """Prefills the admitted batch, unless it is the one before, and inserts its samples."""
        if admission.fresh:
            firsts = [
                self._prompts.tokens[prompt] if i < 0 else self._sequence(i)
                for prompt, i in admission.sources
            ]
            self._prefix = self._slots.prefill(firsts)
        assert self._prefix is not None, "the first admission is of a fresh batch"
        self._insert(self._prefix, admission.rows)

    def _insert(self, prefix: Prefix, rows: Iterable[tuple[int, int, int]]) -> None:
        """Puts samples into (row, place in the prefix, sample), those of one step at a time."""
        of_step = collections.defaultdict(list)
        for row, place, i in rows:
            sample = self._samples[i]
            prompt_id = int(self._prompts.ids_N[sample.prompt])
            seat = Seat(row, place, prompt_id, sample.index, self._limits[i], len(sample))
            of_step[sample.step].append(seat)
        for step, seats in sorted(of_step.items()):
            self._slots.insert(
                prefix,
                seats,
                temperature=self._options.temperature,
                truncation=self._truncation,
                seed=self._options.seed,
                step=step,
            )

    def _go_on_after_replies(self) -> None:
        """Appends what the environment said to the rows it spoke to, on top of what they have cached."""
        appends = []
        for row, i in self.scheduler.running.items():
            if (reply := self._replies.pop(i, None)) is not None:
                before = self._sequence(i)[: -len(reply)]
                appends.append(Append(row, len(before), int(before[-1]), reply))
        running = self.scheduler.running
        for prefix, places in self._slots.append(appends):
            self._insert(prefix, [(a.row, place, running[a.row]) for place, a in places.items()])

    # Host side

    def _collect(self, drawn: Drawn) -> list[int]:
        """Takes in what the dispatch has drawn, frees the rows that are done; returns finished groups."""
        still_active, done, groups = [], [], []
        for row, i in self.scheduler.running.items():
            sample = self._samples[i]
            sample.add_drawn(*drawn.of_row(row), version=self._options.step)
            stopped = self._cut_at_stop(sample, int(drawn.count[row]))
            if drawn.active[row] and not stopped:
                continue
            if drawn.active[row]:
                still_active.append(row)
            if not self._goes_on(i, stopped):
                done.append(row)
                if self.group_finished(sample.prompt):
                    groups.append(sample.prompt)
        if still_active:
            self._slots.release(still_active)
        self.scheduler.finish(done)
        return groups

    def _cut_at_stop(self, sample: Sample, drawn: int) -> bool:
        """Whether the newest `drawn` tokens end a turn; a stop string cuts off what comes after it."""
        strings = self._options.stop_strings
        if strings and drawn:
            # Every token is at least a byte of the text, but for those that spell nothing.
            reach = drawn + max(len(s.encode()) for s in strings)
            tail = sample.tail(reach)
            for end in range(max(1, len(tail) - drawn + 1), len(tail) + 1):
                text = self._decode_text(tail[:end])
                if any(s in text for s in strings):
                    sample.cut(len(sample) - (len(tail) - end))
                    return True
        last = sample.tail(1)
        return bool(len(last)) and int(last[0]) in self._engine.config.stop_ids

    def _goes_on(self, i: int, stopped: bool) -> bool:
        """What becomes of a sample whose row has fallen idle; True if the environment keeps it going."""
        sample, limit = self._samples[i], self._engine.config.max_response_tokens
        full = len(sample) >= limit
        if stopped and self._options.environment is not None:
            reply = self._reply(sample)
            if reply is not None and len(sample) + len(reply) < limit:
                sample.add_given(reply, self._options.step)
                self._replies[i] = np.asarray(reply, np.int32)
                return True
            stopped, full = reply is None, reply is not None
        # At its budget, but neither stopped nor full, it is carried.
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
