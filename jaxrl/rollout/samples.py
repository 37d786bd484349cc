"""Samples on the host, from the first token to a batch of completions or to the next step.

N prompts   G samples of each   R tokens of a response
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.types import Completions, Prompts, TurnText

# Per token: id, log-probability, entropy, mask and version. Per sample: Python objects.
_TOKEN_BYTES = 20
_SAMPLE_BYTES = 1000


def host_bytes(num_samples: int, max_response_tokens: int) -> int:
    """Host bytes of samples with responses of the maximum length."""
    return num_samples * (max_response_tokens * _TOKEN_BYTES + _SAMPLE_BYTES)


class _DecodedTokens(NamedTuple):
    """Tokens added by one call: int32 ids, float32 logprobs and entropies, and their mask and version."""

    tokens: np.ndarray
    logprob: np.ndarray
    entropy: np.ndarray
    mask: float
    version: int


class Sample:
    """One response, finished or not.

    Attributes:
      prompt: index of its prompt.
      index: index among the samples of its prompt.
      step: training step that started it. Its sampling keys use this step until it ends.
      finished: whether it is complete; no more tokens are added.
      truncated: whether it ended because it reached the length limit.
    """

    def __init__(self, prompt: int, index: int, step: int):
        self.prompt = prompt
        self.index = index
        self.step = step
        self.finished = False
        self.truncated = False
        self._pieces: list[_DecodedTokens] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def at(self, prompt: int) -> Sample:
        """A copy whose prompt index is `prompt`."""
        moved = Sample(prompt, self.index, self.step)
        moved.finished, moved.truncated = self.finished, self.truncated
        moved._pieces, moved._count = list(self._pieces), self._count
        return moved

    def add_decoded(
        self, tokens: np.ndarray, logprob: np.ndarray, entropy: np.ndarray, version: int
    ) -> None:
        """Appends tokens that the policy of this version has decoded."""
        self._add(_DecodedTokens(tokens.copy(), logprob.copy(), entropy.copy(), 1.0, version))

    def add_given(self, tokens: np.ndarray, version: int) -> None:
        """Appends tokens from the environment."""
        zeros = np.zeros(len(tokens), np.float32)
        self._add(_DecodedTokens(np.asarray(tokens, np.int32), zeros, zeros, 0.0, version))

    def _add(self, piece: _DecodedTokens) -> None:
        if len(piece.tokens):
            self._pieces.append(piece)
            self._count += len(piece.tokens)

    def cut(self, count: int) -> None:
        """Removes all tokens after the first `count`."""
        while self._count > count:
            piece = self._pieces.pop()
            keep = max(0, len(piece.tokens) - (self._count - count))
            self._count -= len(piece.tokens)
            tokens, logprob, entropy = piece.tokens, piece.logprob, piece.entropy
            kept = (tokens[:keep], logprob[:keep], entropy[:keep])
            self._add(_DecodedTokens(*kept, piece.mask, piece.version))

    def tail(self, count: int) -> np.ndarray:
        """The last `count` tokens of the current turn, or all of them if there are fewer."""
        taken: list[np.ndarray] = []
        for piece in reversed(self._pieces):
            if piece.mask == 0 or count <= 0:
                break
            taken.append(piece.tokens[-count:])
            count -= len(piece.tokens)
        return np.concatenate([*taken[::-1], np.zeros(0, np.int32)])

    @property
    def tokens(self) -> np.ndarray:
        """Int32 [R]."""
        return self._joined(lambda p: p.tokens, np.int32)

    @property
    def logprob(self) -> np.ndarray:
        """Float32 [R], 0 for tokens of the environment."""
        return self._joined(lambda p: p.logprob, np.float32)

    @property
    def entropy(self) -> np.ndarray:
        """Float32 [R], 0 for tokens of the environment."""
        return self._joined(lambda p: p.entropy, np.float32)

    @property
    def mask(self) -> np.ndarray:
        """Float32 [R], 1 for tokens of the policy, 0 for tokens of the environment."""
        return self._joined(lambda p: np.full(len(p.tokens), p.mask), np.float32)

    @property
    def version(self) -> np.ndarray:
        """Int32 [R], policy version of each token: the training step of its weights."""
        return self._joined(lambda p: np.full(len(p.tokens), p.version), np.int32)

    @property
    def oldest_version(self) -> int | None:
        """The policy version of the first token; None without tokens."""
        return self._pieces[0].version if self._pieces else None

    def _joined(self, of: Callable[[_DecodedTokens], np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *(of(p) for p in self._pieces)]).astype(dtype)


@dataclasses.dataclass(frozen=True)
class UnfinishedGroups:
    """Groups that a step left unfinished, for the next step.

    Attributes:
      prompts: N prompts.
      num_samples: number of samples per prompt, G.
      samples: N * G samples, including finished ones, because training needs whole groups.
    """

    prompts: Prompts
    num_samples: int
    samples: tuple[Sample, ...]

    @property
    def oldest_version_N(self) -> np.ndarray:
        """The policy version of the oldest token of each group, int64; without tokens the largest number."""
        none = np.iinfo(np.int64).max
        oldest = [none if s.oldest_version is None else s.oldest_version for s in self.samples]
        return np.array(oldest, np.int64).reshape(-1, self.num_samples).min(axis=1)

    def take(self, indices: Sequence[int] | np.ndarray) -> UnfinishedGroups:
        """The groups at `indices`, in that order."""
        G = self.num_samples
        samples = tuple(s.at(i) for i, n in enumerate(indices) for s in self.samples[n * G :][:G])
        return UnfinishedGroups(self.prompts.take(indices), G, samples)

    def record(self) -> dict[str, Any]:
        """All data, exact to the bit, as lists of JSON types and NumPy arrays, for a checkpoint."""
        prompts, samples = self.prompts, self.samples
        return {
            "num_samples": self.num_samples,
            **{name: list(getattr(prompts, name)) for name in _OF_PROMPT},
            "ids": prompts.ids_N,
            "prompt_lengths": np.array([len(tokens) for tokens in prompts.tokens], np.int64),
            "prompt_tokens": _flat(prompts.tokens),
            "lengths": np.array([len(s) for s in samples], np.int64),
            **{
                name: np.array([getattr(s, name) for s in samples], np.int64) for name in _OF_SAMPLE
            },
            **{name: _flat([getattr(s, name) for s in samples]) for name in _OF_TOKEN},
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
        samples = tuple(
            _restored(dict(zip(_OF_SAMPLE, numbers, strict=True)), *tokens)
            for numbers, *tokens in zip(of_sample, *of_token, strict=True)
        )
        return UnfinishedGroups(prompts, record["num_samples"], samples)


_OF_PROMPT = ("texts", "answers", "sources", "extras")
_OF_SAMPLE = ("prompt", "index", "step", "finished", "truncated")
_OF_TOKEN = ("tokens", "logprob", "entropy", "mask", "version")


def _flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)


def _cut(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _restored(numbers: Mapping[str, Any], tokens, logprob, entropy, mask, version) -> Sample:
    sample = Sample(numbers["prompt"], numbers["index"], numbers["step"])
    sample.finished, sample.truncated = bool(numbers["finished"]), bool(numbers["truncated"])
    changes = np.flatnonzero((np.diff(mask) != 0) | (np.diff(version) != 0)) + 1
    for run in np.split(np.arange(len(tokens)), changes):
        if len(run) and mask[run[0]]:
            sample.add_decoded(tokens[run], logprob[run], entropy[run], int(version[run[0]]))
        elif len(run):
            sample.add_given(tokens[run], int(version[run[0]]))
    return sample


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The samples of a step.

    Attributes:
      completions: all groups whose samples are all finished, in the order of their prompts.
      prompt_indices: index of each of these prompts among the resumed prompts followed by the new ones.
      versions: int32 array per sample of the completions: the policy version of each token.
      unfinished: all other groups.
    """

    completions: Completions
    prompt_indices: tuple[int, ...]
    versions: tuple[np.ndarray, ...]
    unfinished: UnfinishedGroups


def completions_of(
    prompts: Prompts,
    samples: Sequence[Sample],
    num_samples: int,
    decode_text: Callable[[np.ndarray], str],
) -> Completions:
    """Completions of N prompts, from their N * G samples in order."""
    tokens = tuple(sample.tokens for sample in samples)
    mask = tuple(sample.mask for sample in samples)
    texts = tuple(decode_text(t) for t in tokens)
    return Completions(
        prompts=prompts,
        num_samples=num_samples,
        tokens=tokens,
        rollout_logprob=tuple(sample.logprob for sample in samples),
        entropy=tuple(sample.entropy for sample in samples),
        truncated_B=np.array([sample.truncated for sample in samples], bool),
        texts=texts,
        mask=mask,
        turns=tuple(
            _turns(*of_sample, decode_text) for of_sample in zip(tokens, mask, texts, strict=True)
        ),
        started_B=np.array([sample.step for sample in samples], np.int32),
    )


def _turns(
    tokens: np.ndarray, mask: np.ndarray, text: str, decode_text: Callable[[np.ndarray], str]
) -> tuple[TurnText, ...]:
    """Splits a response with known text into its turns."""
    if mask.all():
        return (TurnText(True, text),)
    starts = np.flatnonzero(np.diff(mask)) + 1
    return tuple(
        TurnText(bool(by_policy[0]), decode_text(turn))
        for turn, by_policy in zip(np.split(tokens, starts), np.split(mask, starts), strict=True)
    )
