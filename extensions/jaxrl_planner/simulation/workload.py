"""The work of a step: prompts, samples, lengths of texts, updates."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import numpy as np

from jaxrl.errors import UserError
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.rollout.engine_sizes import MOST_PAGE_TOKENS

_QUANTILES = 16_384


@dataclasses.dataclass(frozen=True)
class LengthDistribution:
    """Distribution of text lengths in tokens.

    Attributes:
      mean: mean length, truncated texts included.
      longest: maximum length; longer texts are truncated, and memory is reserved for it.
      kind: "constant", or "log-normal" with the spread of many reasoning policies.
      sigma: standard deviation of the logarithm before truncation, of a log-normal.
    """

    mean: float
    longest: int
    kind: Literal["constant", "log-normal"] = "constant"
    sigma: float = 0.95

    def __post_init__(self):
        if not 0 < self.mean <= self.longest:
            raise UserError(
                f"mean length {self.mean} is not above 0 and up to the longest, {self.longest}, where "
                "texts are cut; change one of them"
            )

    @staticmethod
    def exactly(tokens: int) -> LengthDistribution:
        """Texts of one length, as in the experiments of the HybridFlow paper (section 8.1)."""
        return LengthDistribution(tokens, tokens)

    @property
    def is_constant(self) -> bool:
        return self.kind == "constant"

    @functools.cached_property
    def deviation(self) -> float:
        return float(self._sample.std())

    @functools.cached_property
    def cut_off(self) -> float:
        """Share of texts with the maximum length: those that were truncated."""
        return float((self._sample >= self.longest).mean())

    def quantiles(self, count: int) -> np.ndarray:
        """`count` representative lengths, ascending: int64 [count]; the last is the longest possible."""
        if self.kind == "constant":
            return np.full(count, round(self.mean), np.int64)
        sample = self._sample
        places = ((np.arange(count) + 0.5) / count * len(sample)).astype(np.int64)
        found = np.round(sample[places]).astype(np.int64)
        # A batch ends only with its longest sample, on whichever replica that is.
        found[-1] = self.longest
        return found

    # Sampled once for each distribution: a search reads it for thousands of mappings.
    @functools.cached_property
    def mean_square(self) -> float:
        """Mean of the squared lengths, which the cost of attention is proportional to."""
        return float(np.mean(self.quantiles(4096).astype(float) ** 2))

    @functools.cached_property
    def mean_in_flight(self) -> float:
        """Mean length so far of a text in flight: E[L^2] / 2 E[L], as long texts are in flight for longer."""
        sample = self._sample
        return float((sample**2).mean() / (2 * sample.mean()))

    @functools.cached_property
    def _sample(self) -> np.ndarray:
        # Representative lengths, ascending: float64.
        if self.kind == "constant":
            return np.array([self.mean])
        # The median that gives the mean after truncation, by bisection.
        low, high = 1e-3, 100.0 * self.longest
        spread = np.exp(self.sigma * _normals())
        for _ in range(60):
            median = math.sqrt(low * high)
            is_short = np.minimum(median * spread, self.longest).mean() < self.mean
            low, high = (median, high) if is_short else (low, median)
        return np.clip(low * spread, 1, self.longest)


@functools.cache
def _normals() -> np.ndarray:
    # A fixed sample of standard normal numbers, ascending.
    return np.sort(np.random.default_rng(7).normal(size=_QUANTILES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of a step.

    Attributes:
      prompts, samples: number of prompts to train on, and of responses per prompt.
      prompt_lengths, response_lengths: lengths in tokens.
      sampled_per_kept: prompts sampled per prompt kept (dynamic sampling); 1 keeps all.
      updates: optimiser steps per epoch over the responses.
      epochs: number of epochs over the responses of a step.
      microbatch_tokens: tokens of a row of a microbatch.
      microbatch_rows: rows in the microbatches of every role, divided evenly over its replicas and stages; 0
        gives one row to each of them.
      pipeline_microbatches: microbatches in a pipeline at a time; 0 means the number of stages. Without
        `microbatch_rows` each has one row of a replica, and fewer are used if they hold an update.
      tokens_per_dispatch: W, tokens that the engine decodes before the host checks the slots again.
      prefill_prompts: prompts of a prefill batch of the engine.
      prefill_chunk_tokens: tokens of a prompt that are prefilled at a time; 0 for whole prompts.
      shares_prompts: whether a packed row holds a prompt once for all its answers there.
      fill_minibatches: whether minibatches exchange sequences to fill whole microbatches.
      max_slots: maximum number of slots per replica of the engine, even if more fit into memory.
      paged: whether the cache has pages, so that more slots fit than at full length.
      always_full: whether prompts are drawn as slots fall free, and unfinished groups continue in the next
        step; else the samples of a step are sampled to their end.
      max_staleness: with `always_full`, largest age of a token in steps.
    """

    prompts: int
    samples: int = 1
    prompt_lengths: LengthDistribution
    response_lengths: LengthDistribution
    sampled_per_kept: float = 1.0
    updates: int = 1
    epochs: int = 1
    microbatch_tokens: int = 8192
    microbatch_rows: int = 0
    pipeline_microbatches: int = 0
    tokens_per_dispatch: int = 64
    prefill_prompts: int = 32
    prefill_chunk_tokens: int = 0
    shares_prompts: bool = False
    fill_minibatches: bool = False
    max_slots: int = 1024
    paged: bool = False
    always_full: bool = False
    max_staleness: int = 8

    def __post_init__(self):
        if self.updates > self.sequences:
            raise UserError(
                f"{self.updates} updates are more than the {self.sequences} sequences of a step; each "
                "learns from at least one, so lower updates"
            )

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def row_tokens(self) -> int:
        """Tokens of a packed row, which holds the longest sequence."""
        return max(self.microbatch_tokens, self.longest_tokens)

    def lengths_of(self, prompts: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of `prompts` prompts, int64 [N], and of `samples` responses to each, int64 [N, G]."""
        responses = self.response_lengths.quantiles(prompts * samples)
        # A fixed order, as if lengths were not known beforehand: equal questions get equal answers.
        responses = np.random.default_rng(0).permutation(responses)
        lengths = np.random.default_rng(1).permutation(self.prompt_lengths.quantiles(prompts))
        return lengths, responses.reshape(prompts, samples)

    @property
    def longest_tokens(self) -> int:
        """Maximum tokens of a prompt and its response."""
        return self.prompt_lengths.longest + self.response_lengths.longest

    @property
    def slot_tokens(self) -> float:
        """Tokens of cache per slot: room for the longest sample, which the last dispatch may run past.

        In pages several slots share it. Samples in flight are taken to have half of the longest prompt and a
        quarter of the longest response, more than expected: with more slots, more of them are idle.
        """
        longest = self.longest_tokens + self.tokens_per_dispatch
        live = self.prompt_lengths.longest / 2 + self.response_lengths.longest / 4
        return min(longest, live) if self.paged else longest

    def cache_tokens(self, slots: int) -> int:
        """Tokens of the pages of a replica with this many slots; 0 without pages."""
        return max(round(slots * self.slot_tokens), self.least_pool_tokens) if self.paged else 0

    @property
    def least_pool_tokens(self) -> int:
        """Tokens of the pages that hold one sample of full length."""
        return -(-self.longest_tokens // MOST_PAGE_TOKENS) * MOST_PAGE_TOKENS


def train_name(layout: ParallelLayout) -> str:
    """Sizes of the training layout, p-t-d and the axes that share d; and the sharding, but for FSDP."""
    shares = {"fsdp": layout.fsdp, "expert": layout.expert, "context": layout.context}
    words = [f"{name} {size}" for name, size in shares.items() if size > 1]
    words += [layout.sharding] if layout.sharding != "FSDP" else []
    return " ".join((f"{layout.p}-{layout.t}-{layout.d}", *words))
