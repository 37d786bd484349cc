"""A rollout backend without a model for tests: it computes responses from the prompt and the sample index.

It implements the whole contract of `rollout.backend`, so samplers, rewards and training steps can be tested
in milliseconds. It ignores the weights.

N prompts   G samples per prompt   R tokens of a response   W tokens per dispatch
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.errors import UserError
from jaxrl.models.decoder import Params
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.backend import DecodeTexts, More, OnGroup, SamplingOptions, check_lengths
from jaxrl.rollout.sample_groups import SampleGroups
from jaxrl.rollout.samples import Rollout, Sample, UnfinishedGroups
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import Completions, Prompts, Stretch

# (tokens of a prompt, index of the sample) -> int32 [R], the response with its stop id.
Respond: TypeAlias = Callable[[np.ndarray, int], np.ndarray]

ENTROPY = 1.0


class ArithmeticBackend:
    """Generates the responses of a function, W tokens at a time.

    Token t of a response has the log-probability -1 / (t + 1) and entropy 1.

    Attributes:
      mesh, dtype, weights_dtype, metrics, samplers: see `RolloutBackend`; there are no metrics.
      weights: weights that `load` received; None before.
    """

    def __init__(
        self,
        mesh: Mesh,
        config: EngineConfig,
        decode_texts: DecodeTexts,
        respond: Respond | None = None,
    ):
        """Args:
        mesh: mesh of the weights.
        config: limits of lengths, number of slots, tokens per dispatch and stop ids.
        decode_texts: converts sequences of token ids to texts.
        respond: computes the responses; None uses `counting`.
        """
        self.mesh = mesh
        self.dtype, self.weights_dtype = np.dtype(config.dtype), config.weights_dtype
        self.metrics: Mapping[str, float] = {}
        self.samplers = tuple(range(jax.process_count()))
        self.weights: Params | None = None
        self._config = config
        self._decode_texts = decode_texts
        self._respond = counting(config.stop_ids) if respond is None else respond

    def load(self, params: Params) -> None:
        """Stores the weights."""
        self.weights = params

    def unload(self) -> Params | None:
        """Returns the weights and forgets them."""
        params, self.weights = self.weights, None
        return params

    def close(self) -> None:
        """Does nothing: there is nothing to close."""

    def generate(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Completions:
        """See `RolloutBackend.generate`. `expected_tokens_N` has no effect."""

        # Returns nothing, since a true value ends the sampling and `generate` is to finish all groups.
        def goes_on(group: Completions) -> None:
            if on_group is not None:
                on_group(group)

        # A budget would leave samples unfinished.
        options = options.replace(budget_tokens=0)
        return self.resume(prompts, options, on_group=goes_on).completions

    def resume(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        more: More | None = None,
        unfinished: UnfinishedGroups | None = None,
        on_group: OnGroup | None = None,
    ) -> Rollout:
        """See `RolloutBackend.resume`."""
        if options.stop_strings:
            raise UserError("the arithmetic backend knows no stop strings; leave them out")
        groups = SampleGroups(options, self._decode_texts, unfinished)
        self._start(groups, prompts)
        self._decode(groups, options, more, on_group)
        return groups.rollout()

    def _start(self, groups: SampleGroups, prompts: Prompts) -> None:
        check_lengths(prompts, self._config.max_prompt_tokens)
        groups.add(prompts)

    def _decode(
        self,
        groups: SampleGroups,
        options: SamplingOptions,
        more: More | None,
        on_group: OnGroup | None,
    ) -> None:
        """Decodes W tokens per round for as many groups as fit into the slots.

        It stops when every sample is finished or out of budget, or when `on_group` returns True.
        """
        W, G = self._config.tokens_per_dispatch, options.num_samples
        budget = options.budget_tokens or self._config.max_response_tokens
        most = max(1, self._config.slots // G)
        ends: dict[int, int] = {}

        def running(n: int) -> bool:
            group = groups.samples[n]
            limits = [ends.setdefault(id(s), len(s) + budget) for s in group]
            return any(not s.finished and len(s) < e for s, e in zip(group, limits, strict=True))

        def waiting() -> list[int]:
            return [n for n in groups.samples if running(n)]

        while True:
            live = waiting()
            if more is not None and len(live) < most:
                left = sum(not s.finished for n in live for s in groups.samples[n])
                self._start(groups, more((most - len(live)) * G, left))
                live = waiting()
            if not (now := live[:most]):
                return
            for n in now:
                for sample in groups.samples[n]:
                    count = min(W, ends[id(sample)] - len(sample))
                    self._add(sample, groups.prompts[n].tokens[0], count, options.step)
            if groups.hand_out([n for n in now if groups.finished(n)], on_group):
                return

    def _add(self, sample: Sample, prompt: np.ndarray, count: int, step: int) -> None:
        """Adds at most `count` tokens to a sample."""
        if sample.finished:
            return
        most = self._config.max_response_tokens
        whole = np.asarray(self._respond(prompt, sample.index), np.int32)
        start, end = len(sample), min(len(sample) + count, len(whole), most)
        logprob = (-1.0 / np.arange(start + 1, end + 1)).astype(np.float32)
        entropy = np.full(end - start, ENTROPY, np.float32)
        sample.add(Stretch(whole[start:end], logprob, entropy, step))
        sample.finished = end == min(len(whole), most)
        sample.truncated = sample.finished and int(whole[end - 1]) not in self._config.stop_ids


def counting(stop_ids: tuple[int, ...]) -> Respond:
    """Responses that count up from the prompt's last token and skip stop ids.

    Example with stop id 1: prompt [5, 7], sample 2 -> [8, 9, 10, 1]. Sample k has k + 1 tokens and a stop id.
    """

    def respond(prompt: np.ndarray, index: int) -> np.ndarray:
        after = int(prompt[-1]) + 1
        ids = (i for i in itertools.count(after) if i not in stop_ids)
        return np.array([*itertools.islice(ids, index + 1), *stop_ids[:1]], np.int32)

    return respond


def build_arithmetic_backend(
    model: ModelConfig, mesh: Mesh, config: EngineConfig, decode_texts: DecodeTexts
) -> ArithmeticBackend:
    """Builds the backend for the setting `rollout.driver`.

        rollout.driver = "arithmetic_backend:build_arithmetic_backend"

    Tokens are taken modulo the size of the model's vocabulary.
    """
    count = counting(config.stop_ids)
    vocabulary = model.num_tokens or model.vocab_size

    def respond(prompt: np.ndarray, index: int) -> np.ndarray:
        return count(prompt, index) % vocabulary

    return ArithmeticBackend(mesh, config, decode_texts, respond)
