"""The samples of a backend in groups, one group per prompt, and the decode loop that they go through.

Example, G = 2, one unfinished group of an earlier call, then `add` with the prompts "p", "q":

    group 0   the unfinished group; its samples keep their tokens
    group 1   p: two samples without tokens
    group 2   q: two samples without tokens

All samples of a prompt share one prefill.

    N prompts   G samples of each
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from jaxrl.errors import UserError
from jaxrl.mesh.replica_groups import ReplicaGroups
from jaxrl.rollout.backend import (
    DecodeTexts,
    More,
    OnGroup,
    SamplingOptions,
    check_lengths,
    expected_or_prompt_lengths,
)
from jaxrl.rollout.decode_loop import Decoded, DecodeLoop
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.samples import (
    Rollout,
    Sample,
    Start,
    Texts,
    UnfinishedGroups,
    completions_of,
    oldest_version,
)
from jaxrl.types import Completions, LazyRows, Prompts


class SampleGroups:
    """Groups of samples by number; unfinished groups of an earlier call come first.

    Attributes:
      prompts: prompt of each group, in the order in which they were added.
      samples: samples of each group.
      decode_texts: function from token ids to texts.
    """

    def __init__(
        self,
        options: SamplingOptions,
        decode_texts: DecodeTexts,
        unfinished: UnfinishedGroups | None = None,
    ):
        """Args: those of `RolloutBackend.resume`; `unfinished` is copied.

        Raises:
          UserError: the unfinished groups have another number of samples.
        """
        self._num_samples = options.num_samples
        self._step = options.step
        self.decode_texts = decode_texts
        self.prompts: dict[int, Prompts] = {}
        self.samples: dict[int, list[Sample]] = {}
        self._next = 0
        # For both `hand_out` and the result, which then share their texts.
        self._completions: dict[int, Completions] = {}
        if unfinished is not None:
            if unfinished.num_samples != options.num_samples:
                raise UserError(
                    f"{len(unfinished.prompts)} unfinished groups have {unfinished.num_samples} samples each "
                    f"and would go on with num_samples {options.num_samples}; a run keeps one number: finish "
                    f"them first, or set it to {unfinished.num_samples}"
                )
            self._next = len(unfinished.prompts)
            for n in range(self._next):
                self.prompts[n] = unfinished.prompts.take([n])
                self.samples[n] = [sample.at(n) for sample in unfinished.group(n)]

    def add(self, prompts: Prompts, *, step: int | None = None) -> range:
        """Adds a group without tokens for each prompt; returns their numbers.

        Args:
          prompts: the prompts.
          step: training step that starts the samples; None is that of the options.
        """
        new = range(self._next, self._next + len(prompts))
        self._next = new.stop
        step = self._step if step is None else step
        for n in new:
            self.prompts[n] = prompts.take([n - new.start])
            self.samples[n] = [Sample(n, k, step) for k in range(self._num_samples)]
        return new

    def finished(self, n: int) -> bool:
        return all(sample.finished for sample in self.samples[n])

    def hand_out(self, finished: Sequence[int], on_group: OnGroup | None) -> bool:
        """Calls `on_group` with each finished group; returns True if any call returned True."""
        return on_group is not None and any([on_group(self.completions([n])) for n in finished])

    def completions(self, finished: Sequence[int]) -> Completions:
        """The completions of the finished groups at these indices."""
        for n in finished:
            if n not in self._completions:
                self._completions[n] = completions_of(
                    self.prompts[n], self.samples[n], self._num_samples, self.decode_texts
                )
        if not finished:
            none = Prompts.concatenate([])
            return completions_of(none, [], self._num_samples, self.decode_texts)
        return Completions.concatenate([self._completions[n] for n in finished])

    def rollout(self) -> Rollout:
        """The finished groups as completions, and the unfinished groups unchanged."""
        done = [n for n in self.samples if self.finished(n)]
        return Rollout(
            completions=self.completions(done),
            prompt_indices=tuple(done),
            unfinished=self.unfinished(),
        )

    def unfinished(self) -> UnfinishedGroups:
        """A copy of the unfinished groups."""
        return self.copied([n for n in self.samples if not self.finished(n)])

    def copied(self, groups: Sequence[int]) -> UnfinishedGroups:
        """A copy of some groups."""
        return UnfinishedGroups(
            Prompts.concatenate([self.prompts[n] for n in groups]),
            self._num_samples,
            tuple(sample.at(i) for i, n in enumerate(groups) for sample in self.samples[n]),
        )

    def remove(self, n: int) -> None:
        del self.prompts[n], self.samples[n]
        self._completions.pop(n, None)


class GroupLoop:
    """Groups of a decode loop.

    Attributes:
      loop: the decode loop.
      groups: all groups, started or not.
      options: how samples are drawn. A new sample has the sampling keys of its step.
    """

    def __init__(
        self, loop: DecodeLoop, groups: SampleGroups, options: SamplingOptions, engine: Engine
    ):
        """Starts no sample yet.

        Args:
          loop: a loop.
          groups: groups; those that are there already start with `go_on`.
          options: see above.
          engine: engine of the loop.
        """
        self.loop = loop
        self.groups = groups
        self.options = options
        self._longest_prompt = engine.config.max_prompt_tokens
        self._max_tokens = engine.config.max_response_tokens
        self._started: dict[int, list[Sample]] = {}
        self._num_unfinished = 0

    def go_on(self) -> None:
        """Starts the unfinished samples of all groups: those of the group with the oldest tokens first."""
        # Of equally old ones the longest start first, so that sequences of a prefill have similar lengths.
        groups = self.groups.samples
        oldest = {n: oldest_version(group) for n, group in groups.items()}
        samples = [sample for group in groups.values() for sample in group if not sample.finished]
        self._start(sorted(samples, key=lambda s: (oldest[s.prompt], -len(s))))

    def add(
        self,
        prompts: Prompts,
        expected_tokens_N: np.ndarray | None = None,
        *,
        starts_N: np.ndarray | None = None,
    ) -> None:
        """Adds a group for each prompt and starts it, those with the longest expected responses first.

        Args:
          prompts, expected_tokens_N: as in `RolloutBackend.generate`.
          starts_N: bool, whether a group starts here; None starts all.
        """
        check_lengths(prompts, self._longest_prompt)
        expected_N = expected_or_prompt_lengths(prompts, expected_tokens_N)
        new = self.groups.add(prompts, step=self.options.step)
        order = sorted(new, key=lambda n: -expected_N[n - new.start])
        if starts_N is not None:
            order = [n for n in order if starts_N[n - new.start]]
        self._start(sample for n in order for sample in self.groups.samples[n])

    def draw(self, more: More | None) -> bool:
        """Fills free places with new prompts; returns whether any sample waits or decodes."""
        scheduler = self.loop.scheduler
        if more is not None and (places := scheduler.places):
            self.add(more(places, self._num_unfinished))
        return scheduler.num_unfinished > 0

    def finish(self) -> list[int]:
        """Waits for the dispatch in progress; returns the groups that it has finished."""
        return self.ended(self.loop.finish())

    def ended(self, decoded: Sequence[Decoded]) -> list[int]:
        """The groups that a dispatch has finished, of its result; the loop may have other groups too."""
        own = [s for each in decoded if (s := each.sample) in self._started.get(s.prompt, ())]
        self._num_unfinished -= len(own)
        numbers = dict.fromkeys(sample.prompt for sample in own if sample.finished)
        return [n for n in numbers if self.groups.finished(n)]

    def remove(self, n: int) -> None:
        """Forgets a group. Its unfinished samples leave their slots."""
        dropped = [s for s in self._started.pop(n, []) if not s.finished]
        self._num_unfinished -= len(dropped)
        self.loop.drop(dropped)
        self.groups.remove(n)

    def _start(self, samples: Iterable[Sample]) -> None:
        # Samples without tokens of their own share the prefill of their prompt.
        starts: dict[int, Start] = {}
        options: dict[int, SamplingOptions] = {}
        requested = []
        for sample in samples:
            prompt = self.groups.prompts[sample.prompt]
            start = starts.setdefault(sample.prompt, Start(prompt.tokens[0]))
            if len(sample):
                start = Start(np.concatenate([start.tokens, sample.tokens]))
            if sample.step not in options:
                options[sample.step] = self.options.replace(step=sample.step)
            requested.append(
                sample.request(start, int(prompt.ids_N[0]), options[sample.step], self._max_tokens)
            )
            self._started.setdefault(sample.prompt, []).append(sample)
        self._num_unfinished += len(requested)
        self.loop.add(requested)


def exchange_lengths(
    groups: ReplicaGroups, samples: SampleGroups, group_N: np.ndarray, *, version: int
) -> None:
    """Gives the samples of other processes their lengths; `fetch_rows` brings their tokens. Collective.

    Args:
      groups: the groups of processes.
      samples: N groups of samples; those that this process has sampled are finished, all others are empty.
      group_N: int, the group of processes that has sampled each.
      version: version of the weights that have sampled.
    """
    of_group = [
        [sample for n in np.flatnonzero(group_N == g).tolist() for sample in samples.samples[n]]
        for g in range(len(groups.processes))
    ]
    own = of_group[groups.own] if groups.own >= 0 else []
    shape = next((s.routes.shape[1:] for s in own if s.routes is not None), (0, 0))
    # Of a truncated one the complement of its length.
    lengths = [~len(s) if s.truncated else len(s) for s in own]
    for g, content in enumerate(groups.gather(np.array([*shape, *lengths], np.int32))):
        if g == groups.own:
            continue
        shape, lengths = content[:2].tolist(), content[2:].tolist()
        for sample, length in zip(of_group[g], lengths, strict=True):
            sample.finished, sample.truncated = True, length < 0
            length = ~length if length < 0 else length
            # Each a single number in memory.
            nan = np.broadcast_to(np.float32("nan"), length)
            sample.add_decoded(np.broadcast_to(np.int32(-1), length), nan, nan, version)
            if shape[0]:
                rows = len(samples.prompts[sample.prompt].tokens[0]) + length - 1
                sample.routes = np.broadcast_to(np.int16(-1), (rows, *shape))


def fetch_rows(
    groups: ReplicaGroups,
    decode_texts: DecodeTexts,
    completions: Completions,
    wanted_B: np.ndarray,
) -> Completions:
    """Brings samples to the processes that want them: `Completions.with_rows`. Collective.

    Args:
      groups: the groups of processes, of which one has sampled each row.
      decode_texts: function from token ids to texts.
      completions: samples of all groups, the same ones on every process.
      wanted_B: bool, the rows that this process wants.
    """
    assert completions.of_agents is None, "all processes sample the sessions of agents together"
    names = ["tokens", "rollout_logprob", "entropy", *(["routes"] if completions.routes else [])]
    fields = {name: list(getattr(completions, name)) for name in names}
    bytes_FB = np.array([[x.nbytes for x in rows] for rows in fields.values()], np.int64)
    words_B = -(-bytes_FB.sum(axis=0) // 4)
    # A row is its fields one after another, in whole words.
    content, chosen, ranges = np.zeros(0, np.int32), [], []
    for g in range(len(groups.processes)):
        of_group = np.flatnonzero(completions.holder_B == g)
        ends = np.cumsum(words_B[of_group])
        starts = ends - words_B[of_group]
        wanted = wanted_B[of_group] & (g != groups.own)
        chosen += of_group[wanted].tolist()
        ranges.append(np.stack([starts, ends], axis=1)[wanted])
        if g == groups.own:
            content = np.zeros(words_B[of_group].sum(), np.int32)
            for b, start in zip(of_group.tolist(), (4 * starts).tolist(), strict=True):
                row = np.concatenate([x[b].reshape(-1).view(np.uint8) for x in fields.values()])
                content.view(np.uint8)[start : start + len(row)] = row
    found = np.concatenate(groups.gather(content, ranges))
    for b, row in zip(chosen, np.split(found, np.cumsum(words_B[chosen])), strict=False):
        row = row.view(np.uint8)
        for rows in fields.values():
            like = rows[b]
            rows[b] = row[: like.nbytes].view(like.dtype).reshape(like.shape)
            row = row[like.nbytes :]
    made = Texts([fields["tokens"][b] for b in chosen], decode_texts)
    texts, turns = (
        [functools.partial(x.__getitem__, b) for b in range(len(completions))]
        for x in (completions.texts, completions.turns)
    )
    for i, b in enumerate(chosen):
        texts[b], turns[b] = functools.partial(made.text, i), functools.partial(made.turns, i)
    return dataclasses.replace(
        completions,
        **{name: tuple(rows) for name, rows in fields.items()},
        texts=LazyRows(texts),
        turns=LazyRows(turns),
    )
