"""The offline backend: samples batches of prompts, for training and evaluation.

It turns a batch into tasks of a `DecodeLoop`. The samples with the longest expected responses start first,
and all samples of a prompt share one prefill. After each dispatch the groups that have just finished are
handed out.

Every decision depends only on the arguments and on tokens, which are the same on all processes of a run. So
all processes take the same decisions.

N prompts   G samples of each   B = N * G
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

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
from jaxrl.rollout.sample_groups import SampleGroups
from jaxrl.rollout.samples import Rollout, Sample, UnfinishedGroups
from jaxrl.rollout.slots import DrawSettings
from jaxrl.rollout.speculation import AnswerTexts
from jaxrl.types import Completions, Prompts


class EngineBackend:
    """An engine with its weights. Base class of all backends that use our engine."""

    def __init__(self, engine: Engine, decode_text: DecodeText):
        """Args: the compiled programs; a function from token ids to text. `load` brings the weights."""
        self.engine = engine
        self._decode_text = decode_text
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
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last call; none by default."""
        return {}

    @property
    def params(self) -> Params:
        """The loaded weights."""
        assert self._params is not None, "load() comes first"
        return self._params

    def load(self, params: Params) -> None:
        """Takes weights in the generation layout and drops any earlier ones."""
        self._params = params

    def unload(self) -> Params | None:
        """Returns the weights and releases them; None if none are loaded."""
        params, self._params = self._params, None
        return params

    def close(self) -> None:
        """Stateless: there is nothing to close."""


class OfflineBackend(EngineBackend):
    """Samples with our engine; `backend.RolloutBackend` documents the methods."""

    def __init__(self, engine: Engine, decode_text: DecodeText):
        """Args: as for `EngineBackend`."""
        super().__init__(engine, decode_text)
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

        settings: Any = {"on_group": goes_on, "expected_tokens_N": expected_tokens_N}
        return self.resume(prompts, options, **settings).completions

    def resume(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        unfinished: UnfinishedGroups | None = None,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Rollout:
        """Continues unfinished groups and samples `prompts` until `on_group` returns True.

        The prompt and the tokens of an unfinished sample are prefilled under the current weights. `on_group`
        is called with the groups that a dispatch has finished while the next one runs, which also counts.
        """
        groups = SampleGroups(prompts, options, self._decode_text, unfinished)
        new = groups.prompts.take(range(groups.num_resumed, len(groups)))
        check_lengths(new, self.engine.max_prefill_length)
        expected_N = expected_or_prompt_lengths(new, expected_tokens_N)
        loop = DecodeLoop(
            self.engine,
            self.params,
            self._decode_text,
            version=options.step,
            texts=self._texts,
        )
        loop.add(_tasks(groups, options, expected_N, self.engine.config.max_response_tokens))
        unfinished_of = [sum(not s.finished for s in groups.group(n)) for n in range(len(groups))]
        finished: list[int] = []
        enough = False
        while loop.unfinished and not enough:
            loop.begin()
            # The text of the groups that have just finished is made while the devices decode on.
            enough = groups.hand_out(finished, on_group)
            finished = []
            for result in loop.finish():
                if (sample := result.task.sample).finished:
                    unfinished_of[sample.prompt] -= 1
                    if not unfinished_of[sample.prompt]:
                        finished.append(sample.prompt)
        groups.hand_out(finished, on_group)
        loop.leave()
        if self.engine.config.speculate:
            self._metrics = loop.metrics()
        return groups.rollout()


def _tasks(
    groups: SampleGroups, options: SamplingOptions, expected_N: np.ndarray, max_tokens: int
) -> Iterator[SampleTask]:
    """The tasks of all unfinished samples, in the order in which they start."""
    # Samples without tokens of their own share the prefill of their prompt.
    starts = [StartSequence(tokens) for tokens in groups.prompts.tokens]
    for sample in _in_order(groups, expected_N):
        start = starts[sample.prompt]
        if len(sample):
            start = StartSequence(np.concatenate([start.tokens, sample.tokens]))
        yield SampleTask(
            sample,
            start,
            int(groups.prompts.ids_N[sample.prompt]),
            DrawSettings(options.seed, sample.step, options.temperature, options.truncation),
            max_tokens,
            budget_tokens=options.budget_tokens,
            stop_strings=options.stop_strings,
            environment=options.environment,
        )


def _in_order(groups: SampleGroups, expected_N: np.ndarray) -> list[Sample]:
    """The unfinished samples: first those of resumed groups, then by expected length, longest first."""

    def rank(sample: Sample):
        if sample.prompt < groups.num_resumed:
            return (0, -len(sample))
        return (1, -expected_N[sample.prompt - groups.num_resumed])

    # The sort is stable: samples of equal rank keep their order.
    return sorted((s for s in groups.samples if not s.finished), key=rank)
