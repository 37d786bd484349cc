"""The rollout backend of `rollout.driver="jetstream"`: our engine, driven by JetStream's threads on one host.

R tokens of a sample   C columns of a token
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl.errors import UserError
from jaxrl.jetstream.engine_adapter import (
    LOG,
    JetStreamEngine,
    JetstreamTokenizer,
    ReturnSample,
    Work,
    orchestrator,
    tokenizer_api,
)
from jaxrl.mesh.hosts import num_processes
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.backend import (
    DecodeTexts,
    More,
    OnGroup,
    SamplingOptions,
    check_lengths,
    expected_or_prompt_lengths,
)
from jaxrl.rollout.driver import EngineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.sample_groups import SampleGroups
from jaxrl.rollout.samples import Rollout, UnfinishedGroups
from jaxrl.rollout.settings import EngineConfig
from jaxrl.rollout.stop_strings import end_of_stop
from jaxrl.types import Completions, Prompts, Stretch

# Fields of the decode state that accompany each token.
FIELDS = ("logprob", "entropy")
_COLUMNS = 1 + len(FIELDS)


class DriverFailed(RuntimeError):
    """The engine has failed or the driver was stopped, so a request was not answered."""


class CollectedSamples:
    """Channel of a request whose sender waits for all tokens; each token is followed by `FIELDS`."""

    def __init__(self):
        self._done = threading.Event()
        self._parts: list[list[ReturnSample]] = []
        self._error: Exception | None = None

    def add_result(self, samples: list[ReturnSample]) -> None:
        self._parts.append(samples)

    def close(self) -> None:
        self._done.set()

    def set_exception(self, error: Exception) -> None:
        """Ends the request with an error, unless it is complete."""
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def wait(self) -> list[np.ndarray]:
        """Waits for the samples; returns int32 [R, C] for each, or raises the error of `set_exception`."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        each = zip(*self._parts, strict=True)
        return [
            np.array([i for part in parts for i in part.token_ids], np.int32).reshape(-1, _COLUMNS)
            for parts in each
        ]


class JetStreamDriver(orchestrator.Driver):
    """JetStream's driver of one engine, an orchestrator of threads that alternates prefill and decode.

    If one of its threads fails, every open request gets `DriverFailed`, later requests are refused, and
    `stop` ends the other threads.
    """

    def __init__(self, engine: JetStreamEngine):
        """Starts the threads. Without a call of `stop` the process does not end."""
        self._guard = threading.Lock()
        self._channels: list[CollectedSamples] = []
        self._failure: DriverFailed | None = None
        # JetStream starts these methods as threads.
        for name in ("_prefill", "_transfer", "_generate", "_detokenize"):
            body = getattr(self, f"{name}_thread")
            setattr(self, f"{name}_thread", functools.partial(self._guarded, body))
        params = engine.load_params()
        super().__init__(
            prefill_engines=[engine],
            generate_engines=[engine],
            prefill_params=[params],
            generate_params=[params],
            # Prefill and decoding take turns on the same devices.
            interleaved_mode=True,
        )

    def stop(self) -> None:
        """Stops all threads; open requests get `DriverFailed`."""
        super().stop()
        self._fail(DriverFailed("the driver has stopped before the answer was complete"))

    def submit(self, work: Work, channel: CollectedSamples) -> None:
        """Queues a request; its channel receives the results as token ids."""
        content: Any = work
        to: Any = channel
        request = orchestrator.ActiveRequest(
            max_tokens=work.max_tokens, return_channel=to, prefill_content=content
        )
        # Without this the detokenize thread would decode token by token.
        request.is_client_side_tokenization = True
        with self._guard:
            if self._failure is not None:
                raise self._failure
            self._channels.append(channel)
        self.place_request_on_prefill_queue(request)

    def _process_prefill_content(
        self,
        request: orchestrator.ActiveRequest,
        tokenizer: tokenizer_api.Tokenizer,
        is_bos: bool,
        max_prefill_length: int,
    ) -> tuple[Any, int]:
        """Returns the prompt unchanged: the engine pads to its own sizes, and no BOS is added."""
        work: Any = request.prefill_content
        return work, len(work.tokens)

    def _guarded(self, body: Callable[[int], None], idx: int) -> None:
        try:
            body(idx)
        # Catches every exception: JetStream kills the process (SIGKILL) if one leaves a thread. Nothing is
        # hidden, because every open request gets the error.
        except Exception as error:
            failure = DriverFailed(f"the engine has failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            LOG.error("JetStream's driver has failed", exc_info=error)
            # Ends the loops of the other threads.
            self.live = False
            self._fail(failure)

    def _fail(self, error: DriverFailed) -> None:
        with self._guard:
            # The first failure is the reason; others follow from it.
            self._failure = self._failure or error
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.set_exception(error)


class JetStreamBackend(EngineBackend):
    """Samples with JetStream's driver; the samples equal those of `rollout.driver.OfflineBackend`.

    It keeps all slots at full length. It also decodes past stop strings and searches for them afterwards. It
    does not support several hosts and unfinished samples.
    """

    def generate(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Completions:
        """See `RolloutBackend.generate`. Groups are handed out in the order in which they started.

        Raises:
          UserError: a prompt is empty or too long, or there are several hosts.
          DriverFailed: the engine has failed.
        """
        assert not options.budget_tokens, "JetStream cannot leave a sample unfinished"
        if num_processes() > 1:
            raise UserError(
                f"rollout.driver=jetstream on {num_processes()} hosts: its threads would dispatch in another "
                "order on each, and hang; use the driver of our own"
            )
        check_lengths(prompts, self.engine.config.max_prompt_tokens)
        expected_N = expected_or_prompt_lengths(prompts, expected_tokens_N)
        # The longest first: one that starts last would decode alone at the end.
        order = np.argsort(-expected_N, kind="stable").tolist()
        groups = SampleGroups(options, self._decode_texts)
        groups.add(prompts)
        # `on_group` may raise. The driver must be stopped even then, because it has threads.
        with contextlib.closing(self._sampled(prompts, options, order)) as sampled:
            for n, columns in sampled:
                for sample, columns_RC in zip(groups.samples[n], columns, strict=True):
                    # `FIELDS`, whose bits came as integers. A column is not contiguous, and `view` needs
                    # that.
                    tokens_R, *bits = map(np.ascontiguousarray, columns_RC.T)
                    floats = (of_field.view(np.float32) for of_field in bits)
                    stops = options.stop_strings
                    end = end_of_stop(tokens_R, len(tokens_R), stops, self._decode_text)
                    sample.add(Stretch(tokens_R, *floats, version=options.step)[:end])
                    sample.finished = True
                    stopped = end is not None or int(tokens_R[-1]) in self.engine.config.stop_ids
                    sample.truncated = not stopped
                groups.hand_out([n], on_group)
        return groups.completions(list(groups.samples))

    def resume(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        more: More | None = None,
        unfinished: UnfinishedGroups | None = None,
        on_group: OnGroup | None = None,
    ) -> Rollout:
        """Raises UserError: JetStream cannot leave samples unfinished."""
        raise UserError(
            "rollout.driver=jetstream with rollout.max_staleness: JetStream cannot leave a sample "
            "unfinished; use the driver of our own"
        )

    def _sampled(
        self, prompts: Prompts, options: SamplingOptions, order: Sequence[int]
    ) -> Generator[tuple[int, list[np.ndarray]]]:
        """Yields the index of each prompt with the [R, C] arrays of its samples."""
        # It must divide the samples of a prompt, which share a prefill, and the slots of our engine.
        per_slot = math.gcd(options.num_samples, self.engine.slot_sizes[-1])
        adapter = JetStreamEngine(
            self.engine,
            self.params,
            # Bits of floats may look like a stop id. Without any, a sample ends where no entry is valid.
            JetstreamTokenizer(None, self._decode_text, stop_ids=()),
            options,
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
                yield n, [columns for channel in of_prompt for columns in channel.wait()]
        finally:
            driver.stop()


def build(
    model: ModelConfig, mesh: Mesh, config: EngineConfig, decode_texts: DecodeTexts
) -> JetStreamBackend:
    """Builds the backend; see `rollout.drivers.build_backend`."""
    return JetStreamBackend(Engine(model, decoder_graph(model)[0], mesh, config), decode_texts)
