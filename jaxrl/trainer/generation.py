"""How a run samples its training data: settings, what a step leaves to the next, what earlier steps teach.

With `rollout.partial` a step ends as soon as it has the groups that it needs. What is unfinished then waits
as `UnfinishedGroups`, tokens and log-probabilities included, and goes on under the next step's weights.
"""

from __future__ import annotations

import concurrent.futures
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl.roles.policy import Actor
from jaxrl.rollout.backend import Enough, SamplingOptions
from jaxrl.rollout.samples import UnfinishedGroups
from jaxrl.rollout.sampling import truncation_of
from jaxrl.trainer.environment import environment_of
from jaxrl.trainer.setup import Parts
from jaxrl.types import Completions, Prompts


class Generation:
    """The sampler's side of a run."""

    def __init__(self, parts: Parts, actor: Actor):
        """Raises UserError where the environment cannot be loaded."""
        options = parts.config.rollout
        self._actor = actor
        self._batch = options.generation_prompts
        self._options = SamplingOptions(
            num_samples=options.num_samples,
            seed=parts.config.seed,
            step=0,
            temperature=options.temperature,
            truncation=truncation_of(
                top_k=options.top_k,
                top_p=options.top_p,
                min_p=options.min_p,
                min_tokens=options.min_response_tokens,
                repetition_penalty=options.repetition_penalty,
            ),
            stop_strings=tuple(options.stop_strings),
            environment=environment_of(parts),
        )
        self._unfinished: UnfinishedGroups | None = None
        # Of a prompt's text, by its checksum: mean length of the responses when it was last met.
        self._lengths: dict[int, int] = {}

    def close(self) -> None:
        """Waits for what is being sampled."""
        self._actor.close()

    # What outlives a step

    def record(self) -> dict[str, Any]:
        """JSON-able: what a resumed run needs to sample the same."""
        unfinished = None if self._unfinished is None else self._unfinished.record()
        return {"unfinished": unfinished, "lengths": list(self._lengths.items())}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Goes on from a record."""
        self._lengths = {text: length for text, length in record["lengths"]}
        unfinished = record["unfinished"]
        self._unfinished = None if unfinished is None else UnfinishedGroups.of_record(unfinished)

    # Sampling

    def sample(self, prompts: Prompts, *, step: int, **changes: Any) -> Completions:
        """Samples every response to its end; `changes` are to the run's settings."""
        completions = self._actor.generate(
            prompts,
            self._options.replace(step=step, **changes),
            expected_tokens_N=self._expected(prompts),
        )
        self._learn_lengths(completions)
        return completions

    def finish(self, started: concurrent.futures.Future[Completions]) -> Completions:
        """Waits for what `start` has begun."""
        completions = started.result()
        self._learn_lengths(completions)
        return completions

    def start(self, prompts: Prompts, *, step: int) -> concurrent.futures.Future[Completions]:
        """Samples from the weights as they are now, beside whatever comes next."""
        return self._actor.start_generating(
            prompts,
            self._options.replace(step=step),
            expected_tokens_N=self._expected(prompts),
        )

    def sample_until(
        self, prompts: Prompts, enough: Enough, *, step: int
    ) -> tuple[Completions, dict[str, int]]:
        """Goes on with what the last call left, and with `prompts`, until there is enough.

        Returns:
          The finished groups; and counts of groups that were unfinished before, and of tokens that weights of
          earlier steps have drawn.
        """
        resumed = 0 if self._unfinished is None else len(self._unfinished.prompts)
        rollout = self._actor.resume(
            prompts,
            self._options.replace(step=step),
            unfinished=self._unfinished,
            enough=enough,
            expected_tokens_N=self._expected(prompts),
        )
        self._unfinished = rollout.unfinished
        self._learn_lengths(rollout.completions)
        return rollout.completions, {
            "rollout/carried_groups": resumed,
            "rollout/stale_tokens": sum(int((v < step).sum()) for v in rollout.versions),
        }

    def batches(self, stream: Iterable[Prompts]) -> Iterator[Prompts]:
        """Prompts for `sample_until`: as many as make a generation batch of what is unfinished.

        Args:
          stream: prompts one by one.
        """
        each = iter(stream)
        while True:
            resumed = 0 if self._unfinished is None else len(self._unfinished.prompts)
            wanted = max(1, self._batch - resumed)
            yield Prompts.concatenate([next(each) for _ in range(wanted)])

    # Lengths

    def _expected(self, prompts: Prompts) -> np.ndarray:
        """How long responses were when the prompts were met before; new ones are thought the longest."""
        longest = max(self._lengths.values(), default=0) + 1
        known = [self._lengths.get(_checksum(tokens), longest) for tokens in prompts.tokens]
        # Among equals the longest prompt goes first.
        own = np.array([len(tokens) for tokens in prompts.tokens], np.float64)
        return np.array(known) + own / (own.max() + 1)

    def _learn_lengths(self, completions: Completions) -> None:
        mean_N = completions.lengths_B.reshape(-1, completions.num_samples).mean(axis=1)
        for tokens, mean in zip(completions.prompts.tokens, mean_N, strict=True):
            self._lengths[_checksum(tokens)] = round(mean)


def _checksum(tokens: np.ndarray) -> int:
    return zlib.crc32(tokens.tobytes())
