"""What a step has to do: prompts, samples, their lengths, updates; and how models are split for it."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Annotated, Literal

import numpy as np

from jaxrl.checks import at_least, check_fields, count, positive, token_count
from jaxrl.errors import UserError
from jaxrl.mesh.layout import ParallelLayout

_QUANTILES = 16_384


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How long texts are, in tokens.

    Attributes:
      mean: of all, those that are cut among them.
      longest: where they are cut, and what memory is kept for.
      kind: "constant", or "log-normal" with the spread of many reasoning policies.
      sigma: standard deviation of the logarithm before the cut.
    """

    mean: Annotated[float, positive()]
    longest: Annotated[int, token_count(1)]
    kind: Literal["constant", "log-normal"] = "constant"
    sigma: Annotated[float, positive(at_most=5)] = 0.95

    def __post_init__(self):
        check_fields(self)
        if self.mean > self.longest:
            raise UserError(
                f"mean length {self.mean} is above the longest, {self.longest}, where texts are cut; lower "
                "the mean or raise the longest"
            )

    @staticmethod
    def exactly(tokens: int) -> Lengths:
        """All of one length, as the HybridFlow paper forces them (section 8.1)."""
        return Lengths(tokens, tokens)

    def quantiles(self, count: int) -> np.ndarray:
        """`count` lengths that stand for all, growing: int64 [count], the last the longest there is."""
        if self.kind == "constant":
            return np.full(count, round(self.mean), np.int64)
        places = (np.arange(count) + 0.5) / count * (_QUANTILES - 1)
        z = np.interp(places, np.arange(_QUANTILES), _normals())
        found = np.clip(np.round(self._median * np.exp(self.sigma * z)), 1, self.longest)
        found = found.astype(np.int64)
        # Everybody waits for the longest, on whichever replica it is.
        found[-1] = self.longest
        return found

    @functools.cached_property
    def mean_square(self) -> float:
        """Mean of the squares: what attention grows with."""
        return float(np.mean(self.quantiles(4096).astype(float) ** 2))

    @functools.cached_property
    def _median(self) -> float:
        """Of the log-normal whose mean is right after the cut, by bisection."""
        low, high = 1e-3, 100.0 * self.longest
        spread = np.exp(self.sigma * _normals())
        for _ in range(60):
            middle = math.sqrt(low * high)
            if np.minimum(middle * spread, self.longest).mean() < self.mean:
                low = middle
            else:
                high = middle
        return low


@functools.cache
def _normals() -> np.ndarray:
    """Standard normal numbers, growing, the same ones always."""
    return np.sort(np.random.default_rng(7).normal(size=_QUANTILES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A step.

    Attributes:
      prompts, samples: that are learned from, and responses to each.
      prompt_lengths, response_lengths: in tokens.
      sampled_per_kept: prompts that are sampled for each that is kept (dynamic sampling); 1 keeps all.
      updates: optimiser steps that an epoch over the responses is divided into.
      epochs: over the responses of a step.
      microbatch_tokens: on a device at a time, in one pipeline microbatch.
      microbatch_rows: rows of `microbatch_tokens` in the microbatches of every role, which its replicas and
        stages share out evenly; 0 gives each of them one row, however many that makes for a role.
      pipeline_microbatches: that follow each other through the stages; 0 is as many as there are stages.
      tokens_per_dispatch: W, tokens that the engine decodes between two looks of the host.
      max_slots: of a replica of the engine, whatever memory there is.
    """

    prompts: Annotated[int, count(1)]
    samples: Annotated[int, count(1)] = 1
    prompt_lengths: Lengths
    response_lengths: Lengths
    sampled_per_kept: Annotated[float, at_least(1)] = 1.0
    updates: Annotated[int, count(1)] = 1
    epochs: Annotated[int, count(1)] = 1
    microbatch_tokens: Annotated[int, token_count(1)] = 8192
    microbatch_rows: Annotated[int, count(0)] = 0
    pipeline_microbatches: Annotated[int, count(0)] = 0
    tokens_per_dispatch: Annotated[int, token_count(1)] = 64
    max_slots: Annotated[int, count(1)] = 1024

    def __post_init__(self):
        check_fields(self)
        if self.updates > self.sequences:
            raise UserError(
                f"{self.updates} updates are more than the {self.sequences} sequences of a step; each "
                "learns from at least one, so lower updates"
            )

    @property
    def sequences(self) -> int:
        """That are learned from."""
        return self.prompts * self.samples

    @property
    def mean_tokens(self) -> float:
        """Of a prompt and its response."""
        return self.prompt_lengths.mean + self.response_lengths.mean

    @property
    def longest_tokens(self) -> int:
        """Of a prompt and its response: what a slot of a contiguous cache holds."""
        return self.prompt_lengths.longest + self.response_lengths.longest

    @property
    def mean_square_tokens(self) -> float:
        """Mean square of their sum, prompts and responses independent."""
        prompt, response = self.prompt_lengths, self.response_lengths
        return prompt.mean_square + response.mean_square + 2 * prompt.mean * response.mean


@dataclasses.dataclass(frozen=True, order=True)
class Strategy:
    """How a role's model is split over n = p t d devices.

    Attributes:
      p, t, d: pipeline, tensor and data parallel size (HybridFlow section 5.1).
      fsdp: how many of the d replicas share one copy of weights and optimiser state.
    """

    p: int
    t: int
    d: int
    fsdp: int = 1

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.p * self.t * self.d

    @property
    def row_parts(self) -> int:
        """Into how many parts the rows of a microbatch divide: for each replica, for each stage."""
        return self.p * self.d

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.p}-{self.t}-{self.d}" + (f" fsdp {self.fsdp}" if self.fsdp > 1 else "")


@dataclasses.dataclass(frozen=True, order=True)
class GenerationStrategy:
    """How an actor's model is split while it generates: p_g divides p, t_g divides t.

    Attributes:
      p_g, t_g: pipeline and tensor parallel size.
      slots: samples that a replica decodes side by side.
    """

    p_g: int
    t_g: int
    slots: int


def layout_of(strategy: Strategy, generation: GenerationStrategy | None = None) -> ParallelLayout:
    """Both as one layout of a mesh; without a generation strategy it is the one of training."""
    p_g, t_g = (generation.p_g, generation.t_g) if generation else (strategy.p, strategy.t)
    return ParallelLayout(strategy.p, strategy.t, strategy.d, p_g, t_g, strategy.fsdp)
