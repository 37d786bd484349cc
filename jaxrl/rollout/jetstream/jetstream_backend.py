"""A rollout backend that JetStream's driver drives: `rollout.driver="jetstream"`; one host only.

R tokens of a sample   C columns of a token
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.errors import UserError
from jaxrl.mesh.hosts import num_processes
from jaxrl.rollout.backend import (
    OnGroup,
    SamplingOptions,
    check_lengths,
    expected_or_prompt_lengths,
)
from jaxrl.rollout.driver import EngineBackend
from jaxrl.rollout.jetstream.engine_adapter import JetStreamEngine, Tokenizer, Work
from jaxrl.rollout.jetstream.orchestrator_driver import JetStreamDriver
from jaxrl.rollout.jetstream.package import ReturnSample
from jaxrl.rollout.samples import Rollout, Sample, UnfinishedGroups, completions_of
from jaxrl.rollout.slots import DrawSettings
from jaxrl.rollout.stop_strings import end_of_stop
from jaxrl.types import Completions, Prompts

# Of the decode state, beside the token.
FIELDS = ("out_logprob", "out_entropy")
_COLUMNS = 1 + len(FIELDS)


class CollectedSamples:
    """The channel of a request whose sender waits for all of it: tokens, each followed by `FIELDS`."""

    def __init__(self):
        self._done = threading.Event()
        self._parts: list[list[ReturnSample]] = []
        self._error: Exception | None = None

    def add_result(self, samples: list[ReturnSample]) -> None:
        """Takes what a dispatch has given."""
        self._parts.append(samples)

    def cancelled(self) -> bool:
        """Never; the sender waits."""
        return False

    def close(self) -> None:
        """All samples are complete."""
        self._done.set()

    def set_exception(self, error: Exception) -> None:
        """There will be no more, for this reason."""
        self._error = error
        self._done.set()

    def wait(self) -> list[np.ndarray]:
        """For each sample int32 [R, C], when all are complete; raises what `set_exception` was given."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        each = zip(*self._parts, strict=True)
        return [
            np.array([i for part in parts for i in part.token_ids], np.int32).reshape(-1, _COLUMNS)
            for parts in each
        ]


class JetStreamBackend(EngineBackend):
    """The engine and JetStream's driver: the samples that `rollout.driver.OfflineBackend` would give.

    It keeps all slots at full length, and decodes past stop strings, which are looked for afterwards. There
    are no several hosts, no environments and nothing is left unfinished.
    """

    def generate(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Completions:
        """See `RolloutBackend.generate`; groups are handed out in the order in which they have begun.

        Raises:
          UserError: a prompt is empty or too long, there are several hosts, or an environment was given.
          DriverFailed: the engine has failed.
        """
        assert not options.budget_tokens, "JetStream cannot leave a sample unfinished"
        _check_options(options)
        check_lengths(prompts, self.engine.max_prefill_length)
        expected_N = expected_or_prompt_lengths(prompts, expected_tokens_N)
        order = np.argsort(-expected_N, kind="stable").tolist()
        groups: dict[int, Completions] = {}

        def take(n: int, columns: Sequence[np.ndarray]) -> None:
            groups[n] = self._group(prompts.take([n]), columns, options)
            if on_group is not None:
                on_group(groups[n])

        self._collect(prompts, options, order, take)
        return Completions.concatenate([groups[n] for n in range(len(prompts))])

    def _group(
        self, prompt: Prompts, columns: Sequence[np.ndarray], options: SamplingOptions
    ) -> Completions:
        stop_ids, decode_text = self.engine.config.stop_ids, self._decode_text
        samples = [
            _sample_of(0, k, columns_RC, options, stop_ids, decode_text)
            for k, columns_RC in enumerate(columns)
        ]
        return completions_of(prompt, samples, options.num_samples, decode_text)

    def resume(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        unfinished: UnfinishedGroups | None = None,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Rollout:
        """Raises UserError: JetStream samples to the end."""
        raise UserError(
            "rollout.driver=jetstream with rollout.partial: JetStream cannot leave a sample unfinished; use "
            "the driver of our own"
        )

    def _collect(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        order: Sequence[int],
        take: Callable[[int, list[np.ndarray]], None],
    ) -> None:
        """Hands prompt after prompt to `take`, with [R, C] of each of its samples."""
        per_slot = math.gcd(options.num_samples, self.engine.slot_sizes[-1])
        adapter = JetStreamEngine(
            self.engine,
            self.params,
            Tokenizer(_no_text, self._decode_text, stop_ids=()),
            DrawSettings(options.seed, options.step, options.temperature, options.truncation),
            samples_per_slot=per_slot,
            columns=FIELDS,
        )
        longest = self.engine.config.max_response_tokens
        firsts = range(0, options.num_samples, per_slot)
        channels: dict[int, list[CollectedSamples]] = {n: [] for n in order}
        driver = JetStreamDriver(adapter)
        try:
            for n in order:
                for first in firsts:
                    channels[n].append(CollectedSamples())
                    work = Work(prompts.tokens[n], longest, int(prompts.ids_N[n]), first)
                    driver.submit(work, channels[n][-1])
            for n, of_prompt in channels.items():
                take(n, [columns for channel in of_prompt for columns in channel.wait()])
        finally:
            driver.stop()


def _check_options(options: SamplingOptions) -> None:
    if num_processes() > 1:
        raise UserError(
            f"rollout.driver=jetstream on {num_processes()} hosts: its threads would dispatch in another "
            "order on each, and hang; use the driver of our own"
        )
    if options.environment is not None:
        raise UserError(
            "rollout.driver=jetstream with an environment: JetStream cannot continue a finished sample; use "
            "the driver of our own"
        )


def _no_text(text: str) -> np.ndarray:
    raise AssertionError(f"rollouts begin with tokens, not with {text!r}")


def _sample_of(
    prompt: int,
    index: int,
    columns_RC: np.ndarray,
    options: SamplingOptions,
    stop_ids: Sequence[int],
    decode_text: Callable[[np.ndarray], str],
) -> Sample:
    """One finished sample, up to its first stop."""
    tokens_R = columns_RC[:, 0]
    logprob_R, entropy_R = (np.ascontiguousarray(c).view(np.float32) for c in columns_RC[:, 1:].T)
    result = Sample(prompt, index, options.step)
    result.add_decoded(tokens_R, logprob_R, entropy_R, version=options.step)
    result.finished = True
    result.truncated = int(tokens_R[-1]) not in stop_ids
    end = end_of_stop(tokens_R, len(tokens_R), options.stop_strings, decode_text)
    if end is not None:
        result.cut(end)
        result.truncated = False
    return result
