"""Samples on the host, from the first token to a batch of completions or to the next step.

N prompts   G samples of each   R tokens of a response
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.rollout.sampling import SampleEdits, SamplingOptions
from jaxrl.types import Completions, LazyRows, Prompts, Stretch, TurnText, repeated

if TYPE_CHECKING:
    # Settings import this file, and the first error for a wrong setting does not wait for flax.
    from jaxrl.rollout.decode_state import TokenScores


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """What samples start from. Samples that hold the same object share one prefill.

    Attributes:
      tokens: int32 [T].
      adapter: number of the adapter, which is at place `adapter % EngineConfig.adapter_places` of the stack.
        What comes later to the same place has another number. 0 without a stack.
      scores: a list that gets the scores of all tokens but the first when they are prefilled; None if they
        are not wanted. Such tokens share no known pages.
    """

    tokens: np.ndarray
    adapter: int = 0
    scores: list[TokenScores] | None = None


class Sample:
    """One response, finished or not, and what a decode loop has to know to continue it.

    Attributes:
      prompt: index of its prompt.
      index: index among the samples of its prompt.
      step: training step that started it. Its sampling keys use this step until it ends.
      finished: whether it is complete; no more tokens are added.
      truncated: whether it ended because it reached the length limit.
      holder: the group of processes (`mesh.replica_groups`) that has its tokens; -1 if all have them. Others
        know its length when it is finished; before, one place with the version of its first token.
      sampled: its tokens so far.
      session: what the session of an agent has left so far, as JSON; its tokens are
        those of all its answers. None for a sample without an agent.
      routes: int16 [T - 1, L, A], experts that each token of prompt and sample but the last took, with the
        newest weights that ran it; None if the engine does not keep them, and until the sample is finished.
      start, prompt_id, options, max_tokens, owner: see `request`.
      prompt_tokens: number of tokens before the sample.
      limit: length of the sample at which its slot stops decoding.
      edits: the edits of its logits; None for none.
    """

    start: Start
    prompt_id: int
    options: SamplingOptions
    max_tokens: int
    owner: Any
    prompt_tokens: int
    limit: int
    edits: SampleEdits | None

    def __init__(self, prompt: int, index: int, step: int):
        self.prompt = prompt
        self.index = index
        self.step = step
        self.finished = False
        self.truncated = False
        self.holder = -1
        self.session: dict[str, Any] | None = None
        self.routes: np.ndarray | None = None
        self.sampled = Stretch.concatenate([])

    def __len__(self) -> int:
        return len(self.sampled)

    def request(
        self,
        start: Start,
        prompt_id: int,
        options: SamplingOptions,
        max_tokens: int,
        owner: Any = None,
    ) -> Sample:
        """Prepares the sample for a decode loop, and returns it.

        Args:
          start: the prompt, followed by the tokens that the sample already has.
          prompt_id: part of the sampling key. With `options` and the sample's index it determines the noise
            of every token.
          options: how tokens are drawn; `step` is that of the sample.
          max_tokens: maximum length of the whole sample, end-of-sequence included.
          owner: any value of the caller, to recognise the sample by.
        """
        self.start, self.prompt_id, self.options = start, prompt_id, options
        self.max_tokens, self.owner = max_tokens, owner
        self.prompt_tokens = len(start.tokens) - len(self)
        allowed = len(self) + options.budget_tokens if options.budget_tokens else max_tokens
        self.limit = min(allowed, max_tokens)
        self.edits = None if options.edits is None else options.edits.begin()
        return self

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and the sample together."""
        return self.prompt_tokens + len(self)

    @property
    def sequence(self) -> np.ndarray:
        """The prompt and the tokens that the sample has now, int32 [T]."""
        return np.concatenate([self.start.tokens[: self.prompt_tokens], self.tokens])

    def at(self, prompt: int) -> Sample:
        """A copy whose prompt index is `prompt`."""
        moved = Sample(prompt, self.index, self.step)
        moved.finished, moved.truncated = self.finished, self.truncated
        moved.holder = self.holder
        moved.session, moved.routes = self.session, self.routes
        moved.sampled = self.sampled
        return moved

    def add(self, new: Stretch) -> None:
        """Appends tokens; the sample keeps the arrays of the first ones."""
        self.sampled = Stretch.concatenate([self.sampled, new])

    @property
    def tokens(self) -> np.ndarray:
        """Int32 [R]."""
        return self.sampled.tokens

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Version and number of consecutive tokens of one version, in order."""
        version = self.sampled.version
        runs = np.split(version, np.flatnonzero(np.diff(version)) + 1)
        return [(int(run[0]), len(run)) for run in runs if len(run)]

    def set_runs(self, runs: Iterable[tuple[int, int]]) -> None:
        """Puts places (ids of -1, and NaN) where its tokens were; another process has these.

        Args:
          runs: as in the property `runs`.
        """
        self.sampled = Stretch.concatenate([])
        for version, count in runs:
            nan = repeated(math.nan, count, np.float32)
            self.add(Stretch(repeated(-1, count, np.int32), nan, nan, version))

    @property
    def oldest_version(self) -> int:
        """The policy version of the oldest token; without tokens the largest number."""
        if self.session is not None:
            # Its answers were not sampled one after another.
            return self.session["oldest"]
        # A token is never older than the one before it.
        return int(self.sampled.version[0]) if len(self) else np.iinfo(np.int64).max


def oldest_version(samples: Sequence[Sample]) -> int:
    """The policy version of the oldest token of some samples; without tokens the largest number."""
    return min(sample.oldest_version for sample in samples)


@dataclasses.dataclass(frozen=True)
class UnfinishedGroups:
    """Groups that a step left unfinished, for the next step.

    Attributes:
      prompts: N prompts.
      num_samples: number of samples per prompt, G.
      samples: N * G samples, including finished ones, because training needs whole groups.
      bring: function of `whole`; None if this process has all tokens.
    """

    prompts: Prompts
    num_samples: int
    samples: tuple[Sample, ...]
    bring: Callable[[Sequence[Sample], bool], list[Sample]] | None = None

    def whole(self, wanted: bool) -> UnfinishedGroups:
        """With the tokens that other processes have, if this process wants them. Collective."""
        if self.bring is None:
            return self
        samples = tuple(self.bring(self.samples, wanted))
        return dataclasses.replace(self, samples=samples, bring=None)

    @property
    def oldest_version_N(self) -> np.ndarray:
        """The policy version of the oldest token of each group, int64; see `oldest_version`."""
        groups = range(len(self.prompts))
        return np.array([oldest_version(self.group(n)) for n in groups], np.int64)

    def group(self, n: int) -> tuple[Sample, ...]:
        return self.samples[n * self.num_samples : (n + 1) * self.num_samples]

    def take(self, indices: Sequence[int] | np.ndarray) -> UnfinishedGroups:
        """The groups at `indices`, in that order."""
        samples = tuple(s.at(i) for i, n in enumerate(indices) for s in self.group(n))
        return UnfinishedGroups(self.prompts.take(indices), self.num_samples, samples, self.bring)

    @staticmethod
    def concatenate(parts: Sequence[UnfinishedGroups]) -> UnfinishedGroups:
        """The groups of all parts, of which there is at least one."""
        prompts = Prompts.concatenate([part.prompts for part in parts])
        groups = [part.group(n) for part in parts for n in range(len(part.prompts))]
        samples = tuple(sample.at(i) for i, group in enumerate(groups) for sample in group)
        bring = next((part.bring for part in parts if part.bring is not None), None)
        return UnfinishedGroups(prompts, parts[0].num_samples, samples, bring)

    def record(self) -> dict[str, Any]:
        """All data, exact to the bit, as lists of JSON types and NumPy arrays, for a checkpoint.

        Call `whole` first: the record has the tokens of this process alone.
        """
        # One flat array for a field of all samples, since each array is an entry of the checkpoint: 1,000
        # groups of 16 samples are saved and read in 5 s.
        prompts, samples = self.prompts, self.samples
        return {
            "num_samples": self.num_samples,
            **{name: list(getattr(prompts, name)) for name in _OF_PROMPT},
            "ids": prompts.ids_N,
            "prompt_lengths": np.array([len(tokens) for tokens in prompts.tokens], np.int64),
            "prompt_tokens": _flat(prompts.tokens),
            "lengths": np.array([len(s) for s in samples], np.int64),
            "sessions": [s.session for s in samples],
            "routes_shape": np.array([_shape(s.routes) for s in samples], np.int64).reshape(-1, 3),
            "routes": _flat([s.routes.reshape(-1) for s in samples if s.routes is not None]),
            **{
                name: np.array([getattr(s, name) for s in samples], np.int64) for name in _OF_SAMPLE
            },
            **{name: _flat([getattr(s.sampled, name) for s in samples]) for name in _OF_TOKEN},
        }

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> UnfinishedGroups:
        """Restores groups from the result of `record`."""
        prompts = Prompts(
            ids_N=record["ids"],
            tokens=tuple(_cut(record["prompt_tokens"], record["prompt_lengths"])),
            **{name: tuple(record[name]) for name in _OF_PROMPT},
        )
        of_sample = zip(*(record[name].tolist() for name in _OF_SAMPLE), strict=True)
        of_token = (_cut(record[name], record["lengths"]) for name in _OF_TOKEN)
        samples = []
        for numbers, *arrays in zip(of_sample, *of_token, strict=True):
            prompt, index, step, finished, truncated = numbers
            sample = Sample(prompt, index, step)
            sample.finished, sample.truncated = bool(finished), bool(truncated)
            samples.append(sample)
            sample.add(Stretch(*arrays))
        for sample, session in zip(samples, record["sessions"], strict=True):
            sample.session = session
        shapes = record["routes_shape"]
        parts = _cut(record["routes"], shapes.prod(axis=1))
        for sample, routes, shape in zip(samples, parts, shapes.tolist(), strict=True):
            sample.routes = routes.reshape(shape) if routes.size else None
        return UnfinishedGroups(prompts, record["num_samples"], tuple(samples))


_OF_PROMPT = ("texts", "answers", "sources", "extras")
_OF_SAMPLE = ("prompt", "index", "step", "finished", "truncated")
_OF_TOKEN = ("tokens", "logprob", "entropy", "version")


def _shape(routes: np.ndarray | None) -> tuple[int, ...]:
    return (0, 0, 0) if routes is None else routes.shape


def _flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)


def _cut(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The samples of a step.

    Attributes:
      completions: all groups whose samples are all finished, in the order of their prompts.
      prompt_indices: index of each of these prompts among the resumed prompts followed by the new ones.
      unfinished: all other groups.
    """

    completions: Completions
    prompt_indices: tuple[int, ...]
    unfinished: UnfinishedGroups


def completions_of(
    prompts: Prompts,
    samples: Sequence[Sample],
    num_samples: int,
    decode_texts: Callable[[Sequence[np.ndarray]], Iterable[str]],
    fetch: Callable[[Completions, np.ndarray], Completions] | None = None,
) -> Completions:
    """Completions of N prompts, from their N * G samples in order. Texts are made when they are read."""
    sampled = [sample.sampled for sample in samples]
    tokens = tuple(x.tokens for x in sampled)
    made, rows = Texts(tokens, decode_texts), range(len(tokens))
    routes = [sample.routes for sample in samples if sample.routes is not None]
    return Completions(
        prompts=prompts,
        num_samples=num_samples,
        tokens=tokens,
        rollout_logprob=tuple(x.logprob for x in sampled),
        entropy=tuple(x.entropy for x in sampled),
        truncated_B=np.array([sample.truncated for sample in samples], bool),
        texts=LazyRows([functools.partial(made.text, b) for b in rows]),
        turns=LazyRows([functools.partial(made.turns, b) for b in rows]),
        started_B=np.array([sample.step for sample in samples], np.int32),
        # Of all samples or of none, as `Completions` has them.
        routes=tuple(routes) if len(routes) == len(samples) else (),
        holder_B=np.array([sample.holder for sample in samples], np.int32),
        fetch=fetch,
        version=tuple(x.version for x in sampled),
    )


class Texts:
    """Decodes the texts of all samples in one call, at the first access."""

    # The processes of a run grade different samples, so each makes only the texts that it reads.

    def __init__(
        self,
        tokens: Sequence[np.ndarray],
        decode_texts: Callable[[Sequence[np.ndarray]], Iterable[str]],
    ):
        self._tokens = tokens
        self._decode_texts = decode_texts
        # Graders on several threads read texts, and one of them makes all.
        self._lock = threading.Lock()
        self._made: list[str] | None = None

    def text(self, b: int) -> str:
        with self._lock:
            if self._made is None:
                self._made = list(self._decode_texts(self._tokens))
            return self._made[b]

    def turns(self, b: int) -> tuple[TurnText, ...]:
        """Sample b as one turn of the policy."""
        return (TurnText(True, self.text(b)),)
