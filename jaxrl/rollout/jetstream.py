"""JetStream: its engine contract, its orchestrator and its gRPC server, around our engine.

    JetStreamEngine   our engine as a `jetstream.engine.engine_api.Engine`
    Driver            JetStream's own driver (prefill, transfer, generate and detokenize threads)
    sample            `rollout.driver.sample`, driven by that driver; one host only
    GrpcServer        JetStream's servicer and messages

JetStream is archived: google-jetstream 0.2.2 is its last release and was written for jax 0.4. All that it
takes to run it today is in this file, each with its reason, and nothing else imports the package:

    seqio, hence TensorFlow, is imported for tokenizers that we do not use    a stub, while importing
    the root logger is set to DEBUG and prints to stdout                      put back after importing
    `logging.info` on every step, which installs handlers by itself           a logger of its own
    `jax.tree_map` is gone from jax                                           `_delete_arrays`
    an exception in a thread is answered with SIGKILL                         `Driver._guarded`
    stopping leaves callers waiting for ever                                  `Driver.stop`
    BOS is put before every prompt                                            `_process_prefill_content`
    prompts are padded to a fixed list of sizes, longer ones cut              the same
    `max_tokens` is checked per dispatch, not per token                       the engine's own limit
    tokens are turned into text one by one, which breaks characters           `Driver._pass_on`
    cancelled requests decode to their end                                    the same
    the server listens on all interfaces, on a port it does not tell          `GrpcServer`

Not covered: JetStream's driver knows no settings per request, and keeps a state of full size: for both see
`rollout.online`. On several hosts its threads would dispatch in different orders and hang.

    W tokens of a dispatch   n rows   C columns of a token
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import logging
import math
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import UserError
from jaxrl.mesh.hosts import num_processes
from jaxrl.mesh.rules import replicated
from jaxrl.models.decoder import Params
from jaxrl.rollout.driver import Options
from jaxrl.rollout.engine import DecodeState, Engine, Prefix, host_inputs
from jaxrl.rollout.online import ServingError, Stopped
from jaxrl.rollout.samples import Sample, completions_of
from jaxrl.rollout.sampling import Truncation, untruncated
from jaxrl.rollout.slots import Seat, insert, prefilled, settings_on_device
from jaxrl.rollout.text_stream import TextStream
from jaxrl.types import Completions, Prompts


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """JetStream can be imported: without TensorFlow, and without side effects on logging."""
    if importlib.util.find_spec("jetstream") is None:
        raise UserError(
            "JetStream is not installed; install jaxrl with its extra: pip install 'jaxrl[jetstream]'"
        )
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    stubs: dict[str, types.ModuleType] = {}
    if "seqio" not in sys.modules:
        vocabularies: Any = types.ModuleType("seqio.vocabularies")
        vocabularies.Vocabulary = type("Vocabulary", (), {})
        vocabularies.SentencePieceVocabulary = vocabularies.Vocabulary
        stubs = {"seqio": types.ModuleType("seqio"), "seqio.vocabularies": vocabularies}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]
        root.setLevel(level)
        root.handlers[:] = handlers


with _importable():
    import grpc
    from jetstream.core import orchestrator
    from jetstream.core.proto import jetstream_pb2_grpc
    from jetstream.core.utils.return_sample import ReturnSample
    from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2

_LOG = logging.getLogger("jetstream")


def _delete_arrays(tree: Any) -> None:
    """Frees the memory of a prefix that has been inserted."""
    for leaf in jax.tree.leaves(tree):
        leaf.delete()


orchestrator.delete_pytree = _delete_arrays
orchestrator.logging = token_utils.logging = _LOG


# Engine


@dataclasses.dataclass(frozen=True)
class Settings:
    """How all requests of a JetStream driver are sampled.

    Attributes:
      seed, step: with a request's own numbers they determine its samples.
      temperature: 0 is greedy.
      truncation: which tokens may be drawn, as scalars.
    """

    seed: int = 0
    step: int = 0
    temperature: float = 0.0
    truncation: Truncation = dataclasses.field(default_factory=untruncated)


@dataclasses.dataclass(frozen=True)
class Work:
    """A prompt and what else the engine should know of its request.

    Attributes:
      tokens: int32 [T].
      max_tokens: of each sample.
      prompt_id: enters the samples' keys.
      first_sample: index of the first of the samples; the others follow.
    """

    tokens: np.ndarray
    max_tokens: int
    prompt_id: int = 0
    first_sample: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WorkPrefix:
    """Keys and values of a prompt, and its request; fields as of `Work`."""

    prefix: Prefix
    max_tokens: int = dataclasses.field(metadata={"static": True})
    prompt_id: int = dataclasses.field(metadata={"static": True})
    first_sample: int = dataclasses.field(metadata={"static": True})


class Tokenizer(tokenizer_api.Tokenizer):
    """Two functions as JetStream's tokenizer. It neither pads nor adds tokens."""

    def __init__(
        self,
        encode_text: Callable[[str], np.ndarray],
        decode_text: Callable[[np.ndarray], str],
        stop_ids: Sequence[int],
    ):
        self._encode_text = encode_text
        self.decode_text = decode_text
        self._stop_ids = tuple(stop_ids)

    def encode(self, s: str, **kwargs) -> tuple[np.ndarray, int]:
        """Token ids, int32 [T], and T; how JetStream would pad them is ignored."""
        tokens = self._encode_text(s)
        return tokens, len(tokens)

    def decode(self, token_ids: list[int], **kwargs) -> str:
        """The text of `token_ids`."""
        return self.decode_text(np.asarray(token_ids, np.int32))

    @property
    def stop_tokens(self) -> set[int]:
        """Ids that end a response and are not passed on."""
        return set(self._stop_ids)

    @property
    def pad_id(self) -> int:
        """Padding is never seen by the model."""
        return 0

    @property
    def eos_id(self) -> int:
        """The first of the ids that end a response, 0 if there is none."""
        return next(iter(self._stop_ids), 0)

    @property
    def bos_id(self) -> int:
        """A prompt's own business; nothing is put before it."""
        return self.eos_id


class JetStreamEngine(engine_api.Engine):
    """Our engine as JetStream's contract has it. A dispatch gives up to W tokens, its "speculations".

    A slot is a run of `samples_per_slot` rows, all of one prompt. With `columns` a token is followed by the
    bits of further values of the state, so that they travel with it. The tokenizer must then have no stop
    ids, since bits may look like one; a sample ends where nothing is valid any more.
    """

    def __init__(
        self,
        engine: Engine,
        params: Params,
        tokenizer: Tokenizer,
        settings: Settings,
        *,
        samples_per_slot: int = 1,
        columns: Sequence[str] = (),
        lock: contextlib.AbstractContextManager | None = None,
    ):
        """Takes no memory; the decode state comes with the first insert.

        Args:
          engine, params, tokenizer: of the model.
          settings: of all requests.
          samples_per_slot: divides the engine's rows.
          columns: float32 fields [n, W] of the decode state.
          lock: held while something is dispatched; for another driver of the same devices. JetStream's own
            threads need one too: on a mesh all devices must get programs in one order.
        """
        self.engine = engine
        self.tokenizer = tokenizer
        self._params = params
        self._settings = settings_on_device(engine, **vars(settings))
        self._samples_per_slot = samples_per_slot
        self._columns = tuple(columns)
        self._lock = threading.Lock() if lock is None else lock
        self._packed = jax.jit(self._pack)
        (self._none_active,) = host_inputs(engine.mesh, np.int32(0))

    def load_params(self, *args, **kwargs) -> Params:
        """The weights that were given."""
        return self._params

    def init_decode_state(self, *args, **kwargs) -> DecodeState | None:
        """None: `insert` makes a state when there is something to put into it."""
        return None

    def prefill(
        self,
        *,
        params: Params,
        existing_prefix: WorkPrefix | None = None,
        padded_tokens: Any,
        true_length: int,
    ) -> WorkPrefix:
        """Keys and values of one prompt.

        Args:
          params: the weights.
          existing_prefix: None; JetStream's driver never has one.
          padded_tokens: int [T'], padded on the right, or a `Work`.
          true_length: T, of which `Work` has no need.
        """
        assert existing_prefix is None, "prefixes are not extended"
        work = padded_tokens
        if not isinstance(work, Work):
            tokens = np.asarray(padded_tokens, np.int32)[:true_length]
            work = Work(tokens, self.engine.config.max_response_tokens)
        with self._lock:
            prefix = prefilled(self.engine, params, [work.tokens])
        return WorkPrefix(prefix, work.max_tokens, work.prompt_id, work.first_sample)

    def insert(
        self, prefix: WorkPrefix, decode_state: DecodeState | None, slot: int
    ) -> DecodeState:
        """Starts a request's samples in a slot."""
        first = slot * self.samples_per_slot
        seats = [
            Seat(first + k, 0, prefix.prompt_id, prefix.first_sample + k, prefix.max_tokens)
            for k in range(self.samples_per_slot)
        ]
        with self._lock:
            state = self.engine.init_decode_state() if decode_state is None else decode_state
            return insert(self.engine, prefix.prefix, state, seats, self._settings)

    def generate(
        self, params: Params, decode_state: DecodeState
    ) -> tuple[DecodeState, engine_api.ResultTokens]:
        """Decodes up to W tokens in every row that is active."""
        with self._lock:
            state = self.engine.generate(params, decode_state, self._none_active)
            data = self._packed(state)
        tokens = self.engine.config.tokens_per_dispatch * (1 + len(self._columns))
        return state, engine_api.ResultTokens(
            data=data,
            tokens_idx=(0, tokens),
            valid_idx=(tokens, 2 * tokens),
            length_idx=(2 * tokens, 2 * tokens + 1),
            samples_per_slot=self.samples_per_slot,
        )

    def _pack(self, state: DecodeState) -> jax.Array:
        """Tokens, validity and lengths side by side, int32 [n, 2 * W * C + 1], for one copy to the host."""
        bits = [
            jax.lax.bitcast_convert_type(getattr(state, name), jnp.int32) for name in self._columns
        ]
        token_nWC = jnp.stack([state.out_token, *bits], axis=-1)
        n, W, _ = token_nWC.shape
        valid_nW1 = (jnp.arange(W)[None] < state.out_count[:, None])[..., None]
        valid_nWC = jnp.broadcast_to(valid_nW1, token_nWC.shape).astype(jnp.int32)
        parts = (token_nWC.reshape(n, -1), valid_nWC.reshape(n, -1), state.count[:, None])
        return jnp.concatenate(parts, axis=1)

    def get_prefix_destination_sharding(self) -> Any:
        """Where a prefix goes before it is inserted."""
        return replicated(self.engine.mesh)

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:  # pyright: ignore
        """Nothing: `build_tokenizer` needs no file."""
        return tokenizer_pb2.TokenizerParameters()  # pyright: ignore

    def build_tokenizer(self, metadata: Any) -> Tokenizer:
        """The tokenizer that was given."""
        return self.tokenizer

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots."""
        return self.engine.slot_sizes[-1] // self.samples_per_slot

    @property
    def samples_per_slot(self) -> int:
        """Rows of a slot."""
        return self._samples_per_slot

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt in tokens."""
        return self.engine.max_prefill_length

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Where the engine runs."""
        return self.engine.mesh

    @property
    def colocated_cpus(self) -> None:
        """Not known."""
        return None


# Driver


class Driver(orchestrator.Driver):
    """JetStream's driver of one engine, which prefills and decodes in turn.

    If one of its threads fails, every request that is open gets a `ServingError`, later ones are refused,
    and `stop` ends the other threads.
    """

    def __init__(self, engine: JetStreamEngine):
        """Starts the threads; `stop` must be called, or the process does not end."""
        self._engine = engine
        self._numbers = itertools.count()
        self._guard = threading.Lock()
        self._channels: dict[int, Any] = {}
        self._failure: ServingError | None = None
        params = engine.load_params()
        super().__init__(
            prefill_engines=[engine],
            generate_engines=[engine],
            prefill_params=[params],
            generate_params=[params],
            interleaved_mode=True,
        )

    def stop(self) -> None:
        """Ends all threads; open requests get `Stopped`."""
        super().stop()
        self._close_channels(Stopped("the server has stopped before the answer was complete"))

    def place_request_on_prefill_queue(self, request: orchestrator.ActiveRequest) -> None:
        """Queues a request.

        Args:
          request: its content is a text, a list of token ids, or a `Work`.

        Raises:
          UserError: it can never be served.
          Stopped: the driver has, or has failed.
        """
        content: Any = request.prefill_content
        streams: list[TextStream] = []
        if not isinstance(content, Work):
            if isinstance(content, str):
                tokenizer = self._engine.tokenizer
                streams = [
                    TextStream(tokenizer.decode_text) for _ in range(self._engine.samples_per_slot)
                ]
                content = tokenizer.encode(content)[0]
            content = self._work_of(np.asarray(content, np.int64), request.max_tokens)
        request.prefill_content = content  # pyright: ignore[reportAttributeAccessIssue]
        # Else the detokenize thread would decode token by token; what text there is comes from the streams.
        request.is_client_side_tokenization = True
        channel = request.return_channel
        pass_on = functools.partial(self._pass_on, request, channel, streams)
        request.enqueue_samples = pass_on  # pyright: ignore[reportAttributeAccessIssue]
        with self._guard:
            if not self.live:
                reason = self._failure or "it is stopping"
                raise Stopped(f"the server takes no requests: {reason}") from self._failure
            self._channels[id(request)] = channel
        super().place_request_on_prefill_queue(request)

    def _work_of(self, tokens: np.ndarray, max_tokens: int) -> Work:
        config = self._engine.engine.config
        vocabulary = self._engine.engine.model.num_tokens or self._engine.engine.model.vocab_size
        if not 0 < len(tokens) <= config.max_prompt_tokens:
            raise UserError(
                f"the prompt has {len(tokens)} tokens; this server takes 1 to {config.max_prompt_tokens}"
            )
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise UserError(
                f"the prompt has token ids from {tokens.min()} to {tokens.max()}; this model's go from 0 "
                f"to {vocabulary - 1}: use its own tokenizer"
            )
        if not 0 < max_tokens <= config.max_response_tokens:
            raise UserError(
                f"max_tokens {max_tokens}: this server gives 1 to {config.max_response_tokens}"
            )
        room = config.max_context_tokens - len(tokens)
        if max_tokens == config.max_response_tokens:
            # What requests have that name no number: as much as there is room for.
            max_tokens = min(max_tokens, room)
        if not 0 < max_tokens <= room:
            raise UserError(
                f"{len(tokens)} tokens of the prompt and max_tokens {max_tokens}: this server has room for "
                f"{config.max_context_tokens} together"
            )
        return Work(tokens.astype(np.int32), max_tokens, prompt_id=next(self._numbers) % 2**31)

    def _process_prefill_content(
        self,
        request: orchestrator.ActiveRequest,
        tokenizer: tokenizer_api.Tokenizer,
        is_bos: bool,
        max_prefill_length: int,
    ) -> tuple[Any, int]:
        """The prompt as it is: the engine has sizes of its own, and a prompt brings its BOS if it has one."""
        work: Any = request.prefill_content
        return work, len(work.tokens)

    def _pass_on(
        self,
        request: orchestrator.ActiveRequest,
        channel: Any,
        streams: Sequence[TextStream],
        samples: list[ReturnSample],
    ) -> None:
        """What takes the place of `ActiveRequest.enqueue_samples`; runs in the detokenize thread."""
        complete = request.complete
        assert complete is not None, "it is set when the request gets its slot"
        for stream, sample, ended in zip(streams, samples, complete, strict=False):
            text = "".join(stream.add(token)[1] for token in sample.token_ids)
            # By characters, so that nothing reads "<0x41>" in an answer as JetStream's way to write a byte.
            sample.text = list(text + stream.flush() if ended else text)
        channel.add_result(samples)
        if channel.cancelled():
            # What is asked next is whether all are complete, and the slot is free.
            complete[:] = True
        if complete.all():
            with self._guard:
                self._channels.pop(id(request), None)

    def _prefill_thread(self, idx: int) -> None:
        self._guarded(super()._prefill_thread, idx)

    def _transfer_thread(self, idx: int) -> None:
        self._guarded(super()._transfer_thread, idx)

    def _generate_thread(self, idx: int) -> None:
        self._guarded(super()._generate_thread, idx)

    def _detokenize_thread(self, idx: int) -> None:
        self._guarded(super()._detokenize_thread, idx)

    def _guarded(self, body: Callable[[int], None], idx: int) -> None:
        try:
            body(idx)
        # Of every kind: JetStream's threads answer what is raised with SIGKILL. Nothing is hidden by this,
        # since the error goes to everybody who waits for a result.
        except Exception as error:
            failure = ServingError(f"the engine has failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            with self._guard:
                self.live = False
                self._failure = failure
            _LOG.error("JetStream's driver has failed", exc_info=error)
            self._close_channels(failure)

    def _close_channels(self, error: ServingError) -> None:
        with self._guard:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.set_exception(error)


# Rollout


class _Collected:
    """The channel of a request whose sender waits for all of it."""

    def __init__(self):
        self._done = threading.Event()
        self._parts: list[list[ReturnSample]] = []
        self._error: Exception | None = None

    def add_result(self, samples: list[ReturnSample]) -> None:
        self._parts.append(samples)

    def cancelled(self) -> bool:
        return False

    def close(self) -> None:
        self._done.set()

    def set_exception(self, error: Exception) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> list[np.ndarray]:
        """For each sample int32 [R, C], C columns of a token."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        each = zip(*self._parts, strict=True)
        return [
            np.array([i for part in parts for i in part.token_ids], np.int32).reshape(-1, _COLUMNS)
            for parts in each
        ]


_FIELDS = ("out_logprob", "out_entropy")
_COLUMNS = 1 + len(_FIELDS)


def sample(
    engine: Engine,
    params: Params,
    prompts: Prompts,
    decode_text: Callable[[np.ndarray], str],
    *,
    expected_tokens_N: np.ndarray | None = None,
    **options: Any,
) -> Completions:
    """Samples G responses to each prompt by JetStream's driver: those that `rollout.driver.sample` would.

    Arguments and result are the same. It keeps all slots at full length, and decodes past stop strings,
    which are looked for afterwards.

    Raises:
      UserError: a prompt is empty or too long, there are several hosts, or an environment was given.
      ServingError: the engine has failed.
    """
    settings = Options(**options)
    assert not settings.budget_tokens, "JetStream cannot leave a sample unfinished"
    _check(engine, prompts, settings)
    per_slot = math.gcd(settings.num_samples, engine.slot_sizes[-1])
    adapter = JetStreamEngine(
        engine,
        params,
        Tokenizer(_no_text, decode_text, stop_ids=()),
        Settings(
            settings.seed,
            settings.step,
            settings.temperature,
            settings.truncation or untruncated(),
        ),
        samples_per_slot=per_slot,
        columns=_FIELDS,
    )
    if expected_tokens_N is None:
        expected_tokens_N = np.array([len(tokens) for tokens in prompts.tokens])
    channels: dict[tuple[int, int], _Collected] = {}
    driver = Driver(adapter)
    try:
        for n in np.argsort(-expected_tokens_N, kind="stable").tolist():
            for first in range(0, settings.num_samples, per_slot):
                channel = channels[n, first] = _Collected()
                work = Work(
                    prompts.tokens[n],
                    engine.config.max_response_tokens,
                    int(prompts.ids_N[n]),
                    first,
                )
                driver.place_request_on_prefill_queue(_request(work, channel))
        found = {at: channel.wait() for at, channel in channels.items()}
    finally:
        driver.stop()
    samples = [
        _sample_of(n, first + k, columns, settings, engine.config.stop_ids, decode_text)
        for n, first in sorted(found)
        for k, columns in enumerate(found[n, first])
    ]
    return completions_of(prompts, samples, settings.num_samples, decode_text)


def _check(engine: Engine, prompts: Prompts, options: Options) -> None:
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
    for prompt_id, tokens in zip(prompts.ids_N, prompts.tokens, strict=True):
        if not 0 < len(tokens) <= engine.max_prefill_length:
            raise UserError(
                f"prompt {prompt_id} has {len(tokens)} tokens; the engine takes 1 to "
                f"{engine.max_prefill_length}: raise data.max_prompt_tokens or drop the prompt"
            )


def _no_text(text: str) -> np.ndarray:
    raise AssertionError(f"rollouts begin with tokens, not with {text!r}")


def _request(work: Work, channel: Any) -> orchestrator.ActiveRequest:
    content: Any = work
    return orchestrator.ActiveRequest(
        max_tokens=work.max_tokens, return_channel=channel, prefill_content=content
    )


def _sample_of(
    prompt: int,
    index: int,
    columns_RC: np.ndarray,
    options: Options,
    stop_ids: Sequence[int],
    decode_text: Callable[[np.ndarray], str],
) -> Sample:
    """One finished sample, up to its first stop."""
    tokens_R = columns_RC[:, 0]
    logprob_R, entropy_R = (np.ascontiguousarray(c).view(np.float32) for c in columns_RC[:, 1:].T)
    result = Sample(prompt, index, options.step)
    result.add_drawn(tokens_R, logprob_R, entropy_R, version=options.step)
    result.finished = True
    result.truncated = int(tokens_R[-1]) not in stop_ids
    if options.stop_strings:
        stream = TextStream(decode_text, options.stop_strings)
        for size, token in enumerate(tokens_R.tolist(), start=1):
            stream.add(token)
            if stream.stopped:
                result.cut(size)
                result.truncated = False
                break
    return result


# Server


class _Orchestrator(orchestrator.LLMOrchestrator):
    """JetStream's servicer, with gRPC's own status for what goes wrong."""

    def __init__(self, driver: Driver, max_tokens: int):
        super().__init__(driver)
        self._max_tokens = max_tokens

    async def Decode(
        self, request: Any, context: grpc.aio.ServicerContext | None = None
    ) -> AsyncIterator[Any]:
        """Streams the response to one prompt; `max_tokens` of 0 is the server's limit."""
        assert context is not None, "this servicer is for servers"
        if request.WhichOneof("content") is None:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the request has no text_content or token_content"
            )
        request.max_tokens = request.max_tokens or self._max_tokens
        try:
            async for response in super().Decode(request, context):
                # The last dispatch of a sample may have given none.
                if any(s.token_ids or s.text for s in response.stream_content.samples):
                    yield response
        except UserError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Stopped as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except ServingError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))


class GrpcServer:
    """JetStream's gRPC service on a thread of its own.

    Unlike `jetstream.core.server_lib.JetStreamServer` it listens where it is told, and says on which port.

    Attributes:
      port: it listens on.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        host: str,
        port: int,
        max_tokens: int,
        max_message_bytes: int,
        max_requests: int,
    ):
        """Starts serving.

        Args:
          driver: answers the requests; it is the server's from now on.
          host, port: where to listen; port 0 takes a free one.
          max_tokens: of a request that names none.
          max_message_bytes: larger requests are refused.
          max_requests: that may be open at once; more are refused.

        Raises:
          UserError: the port cannot be had.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="grpc-server", daemon=True
        )
        self._thread.start()
        self._driver = driver
        self._server: Any = None
        try:
            self.port = self._call(
                self._start(host, port, max_tokens, max_message_bytes, max_requests)
            )
        except RuntimeError as error:
            self._end_loop()
            raise UserError(
                f"gRPC cannot listen on {host}:{port} ({error}); choose another --grpc_port"
            ) from error

    async def _start(
        self, host: str, port: int, max_tokens: int, max_message_bytes: int, max_requests: int
    ) -> int:
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=max_requests,
            # By default a second server would share the port in silence.
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", max_message_bytes),
            ],
        )
        jetstream_pb2_grpc.add_OrchestratorServicer_to_server(
            _Orchestrator(self._driver, max_tokens), self._server
        )
        port = self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()
        return port

    def stop(self, grace_s: float) -> None:
        """Takes no requests any more, and ends after those that are open or after `grace_s`.

        Stops the driver too.
        """
        self._call(self._server.stop(grace_s))
        # Before the loop that its threads send their results to.
        self._driver.stop()
        self._end_loop()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
