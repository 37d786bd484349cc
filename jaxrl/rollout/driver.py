"""Samples batches of prompts offline: the backend that training and evaluation use.

A batch becomes samples for a `DecodeLoop`. Longest-expected samples go first, and a prompt is prefilled once
for all its samples. After each dispatch the groups whose last sample has ended are handed out.

Everything that decides comes from the arguments and from tokens, which all processes read alike. So every
process of a run takes the same decisions.

N prompts   G samples of each   B = N * G
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from jaxrl.rollout.decode_loop import DecodeLoop, SampleTask, StartSequence
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.samples import Rollout, Sample, UnfinishedGroups, completions_of
from jaxrl.rollout.slots import DrawSettings
from jaxrl.types import Completions, Prompts


class EngineBackend:
    """An engine with its weights: the part that all backends around our engine share."""

    def __init__(self, engine: Engine, decode_text: DecodeText):
        """Args: the compiled programs; token ids to text. Weights come with `load`."""
        self.engine = engine
        self._decode_text = decode_text
        self._params: Params | None = None

    @property
    def mesh(self) -> Mesh:
        """The devices of the engine."""
        return self.engine.mesh

    @property
    def dtype(self) -> Any:
        """The type of weights and activations."""
        return jnp.dtype(self.engine.config.dtype)

    @property
    def params(self) -> Params:
        """The loaded weights."""
        assert self._params is not None, "load() comes first"
        return self._params

    def load(self, params: Params) -> None:
        """Takes weights in the generation layout and drops those it had."""
        self._params = params

    def unload(self) -> Params | None:
        """Gives the weights back; None if there are none."""
        params, self._params = self._params, None
        return params

    def close(self) -> None:
        """Stateless: there is nothing to close."""


class OfflineBackend(EngineBackend):
    """Samples with our engine; see `backend.RolloutBackend` for the methods."""

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
        batch = self._batch(prompts, options, None, expected_tokens_N)
        for finished in batch.dispatches():
            _hand_out(batch, finished, on_group)
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
        """Goes on with unfinished groups and samples `prompts`, until `on_group` says that there is enough.

        The prompt and tokens of an unfinished sample are prefilled under the present weights. `on_group` is
        called after each dispatch.
        """
        batch = self._batch(prompts, options, unfinished, expected_tokens_N)
        for finished in batch.dispatches():
            if _hand_out(batch, finished, on_group):
                break
        return batch.rollout()

    def _batch(
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
        loop = DecodeLoop(self.engine, self.params, self._decode_text, version=options.step)
        batch = _Batch(loop, prompts, self._decode_text, options, samples)
        max_tokens = self.engine.config.max_response_tokens
        loop.add(batch.tasks(_order(samples, num_resumed, expected_N), max_tokens))
        return batch


def _hand_out(batch: _Batch, finished: Sequence[int], on_group: OnGroup | None) -> bool:
    """Calls `on_group` with every finished group; True if any call says that there is enough."""
    return on_group is not None and any([on_group(batch.completions([n])) for n in finished])


def _joined(
    prompts: Prompts, options: SamplingOptions, unfinished: UnfinishedGroups | None
) -> tuple[Prompts, list[Sample]]:
    """All prompts and their samples, unfinished groups first."""
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
    """Indices of the samples to start, in order: resumed samples, then the longest expected."""

    def rank(i: int):
        prompt = samples[i].prompt
        if prompt < num_resumed:
            return (0, -len(samples[i]), i)
        return (1, -expected_N[prompt - num_resumed], i)

    return sorted((i for i, s in enumerate(samples) if not s.finished), key=rank)


class _Batch:
    """The samples of a batch, prompt by prompt, while a loop decodes them."""

    def __init__(
        self,
        loop: DecodeLoop,
        prompts: Prompts,
        decode_text: DecodeText,
        options: SamplingOptions,
        samples: list[Sample],
    ):
        self._loop = loop
        self._prompts = prompts
        self._decode_text = decode_text
        self._options = options
        self._samples = samples
        self._unfinished_of = [
            sum(not sample.finished for sample in self._group(n)) for n in range(len(prompts))
        ]
        # Texts of long responses take a while to make: once, for `on_group` and the result.
        self._groups: dict[int, Completions] = {}

    def tasks(self, order: Sequence[int], max_tokens: int) -> Iterator[SampleTask]:
        """The samples at `order`, as the loop takes them.

        Args:
          order: indices of samples.
          max_tokens: of a response.
        """
        options = self._options
        # Samples without tokens share their prompt's prefill.
        starts = [StartSequence(tokens) for tokens in self._prompts.tokens]
        for sample in (self._samples[i] for i in order):
            start = starts[sample.prompt]
            if len(sample):
                start = StartSequence(np.concatenate([start.tokens, sample.tokens]))
            yield SampleTask(
                sample,
                start,
                int(self._prompts.ids_N[sample.prompt]),
                DrawSettings(options.seed, sample.step, options.temperature, options.truncation),
                max_tokens,
                budget_tokens=options.budget_tokens,
                stop_strings=options.stop_strings,
                environment=options.environment,
            )

    def dispatches(self) -> Iterator[list[int]]:
        """Decodes until nothing is left; yields after each dispatch the prompts whose groups it finished."""
        while self._loop.unfinished:
            finished = []
            for result in self._loop.dispatch():
                if (sample := result.task.sample).finished:
                    self._unfinished_of[sample.prompt] -= 1
                    if not self._unfinished_of[sample.prompt]:
                        finished.append(sample.prompt)
            yield finished

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
        """Finished groups as completions, and the others as they are."""
        left = [n for n, count in enumerate(self._unfinished_of) if count]
        done = [n for n, count in enumerate(self._unfinished_of) if not count]
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
