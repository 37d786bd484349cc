"""The offline backend: samples batches of prompts, for training and evaluation.

It turns prompts into tasks of a `DecodeLoop`. `generate` samples one batch to its end, those with the longest
expected responses first. `resume` also draws prompts as slots fall free, so that all slots stay busy. All
samples of a prompt share one prefill. After each dispatch the groups that have just finished are handed out.

Every decision depends only on the arguments and on tokens, which are the same on all processes of a run. So
all processes take the same decisions.

N prompts   G samples of each   B = N * G
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.models.decoder import Params
from jaxrl.rollout.backend import (
    DecodeTexts,
    More,
    OnGroup,
    SamplingOptions,
    check_lengths,
    expected_or_prompt_lengths,
)
from jaxrl.rollout.decode_loop import DecodeLoop, SampleTask, StartSequence
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.sample_groups import SampleGroups
from jaxrl.rollout.samples import Rollout, Sample, UnfinishedGroups
from jaxrl.rollout.slots import DrawSettings
from jaxrl.rollout.speculation import AnswerTexts
from jaxrl.rollout.stop_strings import StopSearch
from jaxrl.types import Completions, Prompts


class EngineBackend:
    """An engine with its weights. Base class of all backends that use our engine."""

    def __init__(self, engine: Engine, decode_texts: DecodeTexts):
        """Args: the compiled programs; a function from token ids to texts. `load` brings the weights."""
        self.engine = engine
        self._decode_texts = decode_texts
        # A function and no method, which would keep the weights until Python's cycle collection.
        self._decode_text = functools.partial(_decode_text, decode_texts)
        self._stops = StopSearch(self._decode_text)
        self._params: Params | None = None

    @property
    def mesh(self) -> Mesh:
        """The devices of the engine."""
        return self.engine.mesh

    @property
    def dtype(self) -> Any:
        """The data type of weights and activations."""
        return jnp.dtype(self.engine.config.dtype)

    @property
    def weights_dtype(self) -> str:
        """The 8-bit type of the weights of projections; "" if it is `dtype`."""
        return self.engine.config.weights_dtype

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last call; none by default."""
        return {}

    @property
    def params(self) -> Params:
        """The loaded weights."""
        assert self._params is not None, "load() comes first"
        return self._params

    def load(self, params: Params) -> None:
        """Takes weights in the generation layout and drops any earlier ones.

        If `weights_dtype` is set, projections that are not in 8 bits yet are rounded to it.
        """
        self._params = self.engine.stored(params) if self.weights_dtype else params

    def unload(self) -> Params | None:
        """Returns the weights and releases them; None if none are loaded."""
        params, self._params = self._params, None
        return params

    def close(self) -> None:
        """Stateless: there is nothing to close."""


class OfflineBackend(EngineBackend):
    """Samples with our engine; `backend.RolloutBackend` documents the methods."""

    def __init__(self, engine: Engine, decode_texts: DecodeTexts):
        """Args: as for `EngineBackend`."""
        super().__init__(engine, decode_texts)
        # Answers of all calls: a prompt of an earlier epoch has some.
        self._texts = AnswerTexts(engine.config.max_response_tokens)
        self._metrics: dict[str, float] = {}

    @property
    def metrics(self) -> Mapping[str, float]:
        """With `speculate`: tokens that a round keeps, and the fraction of tokens decoded in rounds."""
        return self._metrics

    def generate(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Completions:
        """Samples G responses to each prompt until all are finished."""
        assert not options.budget_tokens, "a budget leaves samples unfinished: call `resume`"

        def goes_on(group: Completions) -> None:
            if on_group is not None:
                on_group(group)

        groups = SampleGroups(options, self._decode_texts)
        first = self._add(groups, prompts, expected_or_prompt_lengths(prompts, expected_tokens_N))
        self._sample(groups, first, options, goes_on)
        return groups.rollout().completions

    def resume(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        more: More | None = None,
        unfinished: UnfinishedGroups | None = None,
        on_group: OnGroup | None = None,
    ) -> Rollout:
        """Continues unfinished groups and samples prompts until `on_group` returns True.

        The prompt and the tokens of an unfinished sample are prefilled under the current weights. While the
        devices decode, `on_group` is called with the groups that the dispatch before has finished, and then
        `more` for samples that can take the next free slots.
        """
        groups = SampleGroups(options, self._decode_texts, unfinished)
        first = _oldest_first(groups, unfinished) if unfinished is not None else []
        first += self._add(groups, prompts, expected_or_prompt_lengths(prompts, None))
        self._sample(groups, first, options, on_group, more)
        return groups.rollout()

    def _add(self, groups: SampleGroups, prompts: Prompts, expected_N: np.ndarray) -> list[Sample]:
        """Adds groups; returns their samples in the order in which they start, the longest first."""
        check_lengths(prompts, self.engine.max_prefill_length)
        new = groups.add(prompts)
        order = sorted(new, key=lambda n: -expected_N[n - new.start])
        return [sample for n in order for sample in groups.group(n)]

    def _sample(
        self,
        groups: SampleGroups,
        first: Sequence[Sample],
        options: SamplingOptions,
        on_group: OnGroup | None,
        more: More | None = None,
    ) -> None:
        """Samples until `on_group` returns True, or until nothing is left and `more` draws nothing.

        `first` has the samples of `groups` that are unfinished, in the order in which they start.
        """
        loop = DecodeLoop(
            self.engine,
            self.params,
            self._stops,
            version=options.step,
            texts=self._texts,
        )
        max_tokens = self.engine.config.max_response_tokens

        def start_more() -> bool:
            """Fills free places; returns whether any sample waits or decodes."""
            if more is not None and (places := loop.places):
                new = more(places, loop.num_unfinished)
                samples = self._add(groups, new, expected_or_prompt_lengths(new, None))
                loop.add(_tasks(groups, samples, options, max_tokens))
            return loop.unfinished

        loop.add(_tasks(groups, first, options, max_tokens))
        start_more()
        finished: list[int] = []
        enough = False
        while not enough and (loop.unfinished or start_more()):
            loop.begin()
            # The text of the groups that have just finished is made while the devices decode on.
            enough = groups.hand_out(finished, on_group)
            if not enough:
                start_more()
            ended = [sample for result in loop.finish() if (sample := result.task.sample).finished]
            finished = [n for n in dict.fromkeys(s.prompt for s in ended) if groups.finished(n)]
        loop.leave()
        groups.hand_out(finished, on_group)
        if self.engine.config.speculate:
            self._metrics = loop.metrics()


def _decode_text(decode_texts: DecodeTexts, tokens: np.ndarray) -> str:
    (text,) = decode_texts([tokens])
    return text


def _oldest_first(groups: SampleGroups, unfinished: UnfinishedGroups) -> list[Sample]:
    """The unfinished samples of resumed groups: those of the group with the oldest tokens first.

    Of equally old ones the longest start first, so that the sequences of a prefill have similar lengths.
    """
    oldest_N = unfinished.oldest_version_N
    samples = [sample for sample in groups.samples if not sample.finished]
    return sorted(samples, key=lambda s: (oldest_N[s.prompt], -len(s)))


def _tasks(
    groups: SampleGroups, samples: Iterable[Sample], options: SamplingOptions, max_tokens: int
) -> Iterator[SampleTask]:
    """The tasks of samples, in their order."""
    # Samples without tokens of their own share the prefill of their prompt.
    starts: dict[int, StartSequence] = {}
    for sample in samples:
        prompt = groups.prompt(sample.prompt)
        start = starts.setdefault(sample.prompt, StartSequence(prompt.tokens[0]))
        if len(sample):
            start = StartSequence(np.concatenate([start.tokens, sample.tokens]))
        yield SampleTask(
            sample,
            start,
            int(prompt.ids_N[0]),
            DrawSettings(options.seed, sample.step, options.temperature, options.truncation),
            max_tokens,
            budget_tokens=options.budget_tokens,
            stop_strings=options.stop_strings,
            environment=options.environment,
        )
