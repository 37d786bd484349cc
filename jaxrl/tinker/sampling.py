"""Samples for clients, from the weights that each of them has named.

    asample --> waiting --> driver of these weights --> samples --> log-probabilities --> future
                            (the only use of `serving.online_driver`)

Adapters decode together, whichever sampler has them, as long as there are places (`sampler_weights`).
Of whole weights the devices hold one set for sampling at a time. Requests are served in the order of their
arrival: those that follow each other with the same weights decode together, and one with others waits until
the samples before it have ended. A sampling session never changes its weights.

Log-probabilities are those at temperature 1, as the trainer computes them. The engine's are of the tempered
distribution, so for other temperatures, and for what is asked about prompts and top-k, the sequences are run
through the trainer's forward pass once more, with the sampler's weights.

Not covered: images, which are refused elsewhere.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jaxrl.errors import UserError
from jaxrl.models.decoder import Params
from jaxrl.roles.accumulating import DRAW_NUMBERS, AccumulatingActor, Targets, pack_targets
from jaxrl.roles.packing import PackedShape
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.live_loop import LiveError, Overloaded, Request
from jaxrl.rollout.sampling import SamplingOptions, truncation_of
from jaxrl.rollout.settings import EngineConfig
from jaxrl.serving.online_driver import STOP, Delta, OnlineDriver
from jaxrl.serving.openai.calls import LOWEST_TEMPERATURE
from jaxrl.tinker.futures import Future, Futures, Result
from jaxrl.tinker.sampler_weights import AdapterPlaces, SamplerWeights
from jaxrl.tinker.turns import Turns
from jaxrl.tinker.wire import MESSAGES, tensor_of, topk_of

_LOG = logging.getLogger(__name__)

_MAX_SAMPLES = 1024
_MAX_TOP_K = 100


@dataclasses.dataclass(frozen=True)
class SampleCall:
    """A request to sample, checked.

    Attributes:
      prompt: int32 [N].
      num_samples, max_tokens: number of samples, and of tokens of each.
      seed: what its noise depends on, besides the index of the sample.
      options: how tokens are drawn, of one sample.
      stop_ids: token ids that end a sample.
      prompt_logprobs: number of last prompt tokens whose log-probability is wanted; 0 for none.
      topk_prompt, topk_sample: number of most probable tokens to return at each place.
      targets: int64 [N - 1, K], tokens whose log-probability is wanted, -1 for none; None without any.
      is_sparse: whether the answer about targets is sparse, as the question was.
      draws: number of tokens to draw at each place of the prompt, at the call's temperature.
    """

    prompt: np.ndarray
    num_samples: int
    max_tokens: int
    seed: bytes
    options: SamplingOptions
    stop_ids: frozenset[int]
    prompt_logprobs: int = 0
    topk_prompt: int = 0
    topk_sample: int = 0
    targets: np.ndarray | None = None
    is_sparse: bool = False
    draws: int = 0


@dataclasses.dataclass
class _OpenSample:
    """A sample as it grows."""

    ticket: int = -1
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish: str = ""


@dataclasses.dataclass(eq=False)
class _Job:
    """A call, its weights, its future and its samples; with adapters the number of its own."""

    call: SampleCall
    weights: SamplerWeights
    future: Future
    samples: list[_OpenSample]
    adapter: int = 0


@dataclasses.dataclass(eq=False)
class Sampler:
    """Answers calls on a thread of its own, which starts at once.

    Attributes:
      engine: engine of the model, without stop ids of its own.
      actor: policy whose forward pass computes log-probabilities.
      shape, shards: shape of its batches, and the devices that split their rows.
      decode_text: function from token ids to text.
      futures: futures, which the thread finishes.
      turns: turns on the devices.
      max_waiting: most samples that may wait.
      places: places of adapters; None if samplers have whole weights.
    """

    engine: Engine
    actor: AccumulatingActor
    shape: PackedShape
    decode_text: Callable[[np.ndarray], str]
    futures: Futures
    _: dataclasses.KW_ONLY
    shards: int
    turns: Turns
    max_waiting: int
    places: AdapterPlaces | None = None

    def __post_init__(self):
        # What happens, as functions that the thread calls; None ends it.
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_waiting = 0
        # Used only by the thread.
        self._waiting: collections.deque[_Job] = collections.deque()
        self._open: dict[str, _Job] = {}
        self._weights: SamplerWeights | None = None
        self._params: Params | None = None
        self._driver: OnlineDriver | None = None
        self.turns.on_free = lambda: self._events.put(lambda: None)
        self._thread = threading.Thread(target=self._serve, name="tinker-sampler", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether more calls should come later."""
        return self._num_waiting >= self.max_waiting

    def submit(self, call: SampleCall, weights: SamplerWeights, future: Future) -> None:
        """Queues a call."""
        job = _Job(call, weights, future, [_OpenSample() for _ in range(call.num_samples)])
        self._count(call.num_samples)
        self._events.put(functools.partial(self._waiting.append, job))

    def _count(self, samples: int) -> None:
        with self._lock:
            self._num_waiting += samples

    def refresh(self) -> None:
        """Lets samplers of `kind: inflight` go on with weights that were saved now."""
        self._events.put(self._refresh)

    def cancel(self, request_id: str) -> None:
        """Ends a call that nobody waits for."""
        self._events.put(functools.partial(self._cancel, request_id))

    def close(self) -> None:
        """Ends the thread; calls that are not answered stay so."""
        self._events.put(None)
        self._thread.join()

    # The thread

    def _serve(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                event()
                self._start_waiting()
                if not self._open:
                    self._rest()
        finally:
            self._unload()

    def _start_waiting(self) -> None:
        while self._waiting and self.turns.may_sample():
            job = self._waiting[0]
            try:
                if not self._has_weights(job):
                    return
                try:
                    self._begin(job)
                except Exception:
                    self._leave(job)
                    raise
            except Overloaded:
                if self._open:
                    return
                self.futures.finish(
                    job.future, Result.error(UserError("too many samples for this server at once"))
                )
            except Exception as error:  # one call's failure is not the sampler's
                self.futures.finish(job.future, Result.error(error))
            self._waiting.popleft()
            self._count(-job.call.num_samples)

    def _rest(self) -> None:
        """Ends the turn once the driver has dropped what was cancelled."""
        while self._driver is not None and self._driver.alive and self._driver.load != (0, 0):
            time.sleep(0.001)
        self.turns.end_sampling()

    @property
    def _is_alive(self) -> bool:
        return self._driver is not None and self._driver.alive

    def _has_weights(self, job: _Job) -> bool:
        """Brings the weights of a call to the driver; False if samples of others have to end first."""
        if self.places is None:
            if job.weights is self._weights and self._is_alive:
                return True
            if not self._open:
                self._unload()
                self._drive(job.weights.load())
                self._weights = job.weights
                return True
            return False
        number = self.places.take(job.weights)
        if number is None:
            return False
        job.adapter = number
        if not self._is_alive:
            self._drive(self.places.params)
        self._refresh()
        return True

    def _refresh(self) -> None:
        if self.places is not None:
            self.places.refresh()
            if self._driver is not None:
                self._driver.load_adapters(self.places.stack)

    def _drive(self, params: Params) -> None:
        self._params = params
        self._driver = OnlineDriver(
            self.engine, params, self.decode_text, max_waiting=self.max_waiting
        )

    def _leave(self, job: _Job) -> None:
        """Gives the place of a call's adapter back."""
        if self.places is not None:
            self.places.leave(job.adapter)

    def _unload(self) -> None:
        self._weights = None
        if self._driver is not None:
            self._driver.close()
        # Before other weights come: both may not fit.
        self._driver = self._params = None

    def _begin(self, job: _Job) -> None:
        call = job.call
        # A request for each sample, so that one that ends early frees its slot. They share a prefill.
        requests = []
        for i, sample in enumerate(job.samples):
            seed = int.from_bytes(hashlib.sha256(call.seed + b"/%d" % i).digest()[:4], "big") >> 1
            request = Request(call.prompt, call.max_tokens, seed, call.options, job.adapter)
            requests.append((request, functools.partial(self._listen, job, sample)))
        assert self._driver is not None, "weights are loaded first"
        tickets = self._driver.submit_all(requests)
        self._open[job.future.request_id] = job
        for sample, ticket in zip(job.samples, tickets, strict=True):
            sample.ticket = ticket

    def _listen(self, job: _Job, sample: _OpenSample, event: Delta | LiveError) -> None:
        """Called on the driver's thread."""
        self._events.put(functools.partial(self._take, job, sample, event))

    def _take(self, job: _Job, sample: _OpenSample, event: Delta | LiveError) -> None:
        if job.future.request_id not in self._open or sample.finish:
            return
        if isinstance(event, LiveError):
            self._end(job, Result.error(event))
            return
        tokens = event.tokens.tolist()
        # The engine knows no stop ids, which differ from call to call.
        stop = next((i for i, token in enumerate(tokens) if token in job.call.stop_ids), None)
        count = len(tokens) if stop is None else stop + 1
        sample.tokens += tokens[:count]
        sample.logprobs += event.logprob[:count].tolist()
        sample.finish = event.finish if stop is None else STOP
        if stop is not None and not event.finish:
            self._cancel_ticket(sample)
        if all(each.finish for each in job.samples):
            try:
                result = Result.of(self._response(job).SerializeToString())
            except Exception as error:  # one call's failure is not the sampler's
                result = Result.error(error)
            self._end(job, result)

    def _cancel_ticket(self, sample: _OpenSample) -> None:
        if self._driver is not None:
            self._driver.cancel(sample.ticket)

    def _cancel(self, request_id: str) -> None:
        cancelled = Result.error(UserError("the client has cancelled the request"))
        if request_id in self._open:
            self._end(self._open[request_id], cancelled)
        for job in [job for job in self._waiting if job.future.request_id == request_id]:
            self._waiting.remove(job)
            self._count(-job.call.num_samples)
            self.futures.finish(job.future, cancelled)

    def _end(self, job: _Job, result: Result) -> None:
        """Ends a call that has begun, with what is not sampled yet."""
        del self._open[job.future.request_id]
        self._leave(job)
        for sample in job.samples:
            if not sample.finish:
                self._cancel_ticket(sample)
        self.futures.finish(job.future, result)

    # Answers

    def _response(self, job: _Job) -> Any:
        call, samples = job.call, job.samples
        N = len(call.prompt)
        top_k = max(call.topk_prompt, call.topk_sample)
        tempered = call.options.temperature not in (0.0, 1.0)
        prompts_too = (
            call.prompt_logprobs or call.topk_prompt or call.targets is not None or call.draws
        )
        scored: list[Scores] = []
        if tempered or call.topk_sample:
            sequences = [np.array([*call.prompt, *s.tokens], np.int32) for s in samples]
            scored = self._score(job, sequences, top_k)
        elif prompts_too and N > 1:
            scored = self._score(job, [call.prompt], top_k)
        response = MESSAGES["SampleResponse"]()
        for i, sample in enumerate(samples):
            logprobs = np.array(sample.logprobs, np.float32)
            if tempered:
                logprobs = scored[i].logprobs[N - 1 :]
            sequence = response.sequences.add(
                stop_reason=0 if sample.finish == STOP else 1,
                tokens=np.array(sample.tokens, "<i4").tobytes(),
                logprobs=logprobs.astype("<f4").tobytes(),
            )
            if call.topk_sample:
                k = slice(call.topk_sample)
                top = topk_of(*(values[N - 1 :, k] for values in scored[i].top))
                sequence.topk_sampled_logprobs.CopyFrom(top)
        if prompts_too:
            self._add_prompt(response, call, scored[0] if scored else None)
        return response

    def _add_prompt(self, response: Any, call: SampleCall, scores: Scores | None) -> None:
        """Adds what was asked about the prompt; `scores` is None for a prompt of one token."""
        N, k = len(call.prompt), call.topk_prompt
        wanted = call.prompt_logprobs or N
        # Nothing comes before the first token; before the last `wanted` nothing was asked.
        first = max(1, N - wanted)
        if call.prompt_logprobs:
            logprobs = np.full(N, np.nan, "<f4")
            if scores is not None:
                logprobs[first:] = scores.logprobs[first - 1 : N - 1]
            response.prompt_logprobs = logprobs.tobytes()
        if k:
            ids, top = np.full((N, k), -1, np.int32), np.zeros((N, k), np.float32)
            if scores is not None:
                ids[first:], top[first:] = (x[first - 1 : N - 1, :k] for x in scores.top)
            response.topk_prompt_logprobs.CopyFrom(topk_of(ids, top))
        if call.draws:
            none = np.zeros((0, call.draws))
            ids, logprobs = (none, none) if scores is None else (x[: N - 1] for x in scores.drawn)
            response.prompt_alt_tokens.tokens.CopyFrom(tensor_of(ids.astype(np.int64)))
            response.prompt_alt_tokens.logprobs.CopyFrom(tensor_of(logprobs.astype(np.float32)))
        if call.targets is not None:
            found = np.zeros(call.targets.shape, np.float32)
            if scores is not None:
                found = scores.targets[: N - 1]
            asked = call.targets >= 0
            if not call.is_sparse:
                found = np.where(asked, found, np.float32(np.nan))
                response.target_prompt_logprobs.CopyFrom(tensor_of(found))
                return
            tensor = response.target_prompt_logprobs
            tensor.dtype = 1
            tensor.shape.extend(call.targets.shape)
            crow = np.append(0, np.cumsum(asked.sum(axis=1)))
            tensor.sparse_csr.values = found[asked].astype("<f4").tobytes()
            tensor.sparse_csr.crow_indices = crow.astype("<i8").tobytes()
            tensor.sparse_csr.col_indices = np.nonzero(asked)[1].astype("<i8").tobytes()

    def _score(self, job: _Job, sequences: Sequence[np.ndarray], top_k: int) -> list[Scores]:
        """Log-probabilities of sequences at temperature 1, with the weights of the sampler."""
        targets, most = job.call.targets, self.shape.tokens + 1
        if (longest := max(map(len, sequences))) > most:
            raise UserError(
                f"log-probabilities of a sequence of {longest} tokens were asked for, and this server "
                f"computes them for {most} at most; start it with more --train_tokens"
            )
        K, draws = 0 if targets is None else targets.shape[1], job.call.draws
        random = np.random.default_rng(list(hashlib.sha256(job.call.seed + b"/draws").digest()))
        given = []
        for tokens in sequences:
            of_place = np.zeros((len(tokens) - 1, 1 + K + draws), np.int32)
            of_place[:, 0] = tokens[1:]
            if targets is not None:
                of_place[: len(targets), 1 : 1 + K] = np.maximum(targets, 0)
            of_place[:, 1 + K :] = random.integers(DRAW_NUMBERS, size=(len(tokens) - 1, draws))
            given.append(Targets(tokens[:-1], of_place, {}))
        scores: dict[int, Scores] = {}
        params = self._params
        if self.places is not None:
            params = self.places.params_of(job.adapter)
        assert params is not None, "weights are loaded first"
        further = {
            "top_k": top_k,
            "draws": draws,
            "temperature": max(job.call.options.temperature, LOWEST_TEMPERATURE),
        }
        for part in pack_targets(given, self.shape, shards=self.shards):
            found = jax.device_get(self.actor.score(params, part.batch, **further))
            for fields in zip(*map(part.unpack, found), strict=True):
                index, logprobs = fields[0]
                values = [each for _, each in fields[1:]]
                top, drawn = (values[:2], values[2:]) if top_k else ((), values)
                scores[index] = Scores(logprobs[:, 0], logprobs[:, 1:], top, drawn)
        return [scores[i] for i in range(len(sequences))]


@dataclasses.dataclass(frozen=True)
class Scores:
    """Log-probabilities at the N - 1 places of a sequence that have a next token.

    Attributes:
      logprobs: float32 [N - 1], of the next token.
      targets: float32 [N - 1, K], of further tokens.
      top: [N - 1, k] both, the most probable tokens and theirs; empty if nobody asked.
      drawn: the same of tokens that were drawn.
    """

    logprobs: np.ndarray
    targets: np.ndarray
    top: Sequence[np.ndarray]
    drawn: Sequence[np.ndarray]


# Reading of requests


def read_call(
    body: Mapping[str, Any], sizes: EngineConfig, vocabulary: int, default_seed: bytes
) -> SampleCall:
    """A SampleCall from the JSON of `asample`, for a model with so many tokens.

    Raises:
      UserError: something does not fit, or is not served.
    """
    if body.get("record_stability_info"):
        raise UserError(
            "record_stability_info belongs to stable_reinforce, which is not served; train with "
            "loss_fn=importance_sampling"
        )
    params = _object(body, "sampling_params")
    prompt = _tokens(_object(body, "prompt"), vocabulary)
    room = min(sizes.max_response_tokens, sizes.max_context_tokens - len(prompt))
    if len(prompt) > sizes.max_prompt_tokens or room < 1:
        raise UserError(
            f"the prompt has {len(prompt)} tokens; this server takes {sizes.max_prompt_tokens} at most, and "
            f"{sizes.max_context_tokens} together with a sample: shorten it"
        )
    max_tokens = _number(params, "max_tokens", room, 1)
    if max_tokens > room:
        raise UserError(
            f"max_tokens {max_tokens} after a prompt of {len(prompt)}: this server has room for {room}; ask "
            "for as many"
        )
    temperature = _number(params, "temperature", 1.0, 0, 100)
    truncation = truncation_of(
        top_k=max(_number(params, "top_k", -1, -1, vocabulary), 0),
        top_p=_number(params, "top_p", 1.0, 1e-6, 1),
    )
    stop_ids, stop_strings = _stops(params.get("stop"), sizes.stop_ids)
    options = SamplingOptions(
        temperature=0.0 if temperature < LOWEST_TEMPERATURE else temperature,
        truncation=truncation,
        stop_strings=stop_strings,
    )
    seed = params.get("seed")
    N, most = len(prompt), min(_MAX_TOP_K, vocabulary)
    wanted = 0
    if body.get("prompt_logprobs"):
        wanted = _number(body, "prompt_logprobs_last_n", N, 1, max(1, N - 1))
    elif body.get("prompt_logprobs_last_n") is not None:
        raise UserError("prompt_logprobs_last_n needs prompt_logprobs; set it to true")
    targets = body.get("target_prompt_logprobs")
    return SampleCall(
        prompt,
        _number(body, "num_samples", 1, 1, _MAX_SAMPLES),
        max_tokens,
        default_seed if seed is None else b"seed %d" % _number(params, "seed", 0),
        options,
        stop_ids,
        prompt_logprobs=wanted,
        topk_prompt=_number(body, "topk_prompt_logprobs", 0, 0, most),
        topk_sample=_number(body, "topk_sample_logprobs", 0, 0, most),
        targets=None if targets is None else _targets(targets, N, vocabulary),
        is_sparse=isinstance(targets, dict) and targets.get("sparse_crow_indices") is not None,
        draws=_number(body, "prompt_alt_tokens_k", 0, 0, _MAX_TOP_K),
    )


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if not isinstance(value, dict):
        raise UserError(f"{name} is {type(value).__name__}; send a JSON object")
    return value


Number = TypeVar("Number", int, float)


def _number(
    body: Mapping[str, Any], name: str, default: Number, low: float = -(2**63), high: float = 2**63
) -> Number:
    """A field of the default's type, or the default."""
    value, kind = body.get(name), type(default)
    if value is None:
        return default
    if type(value) not in (int, kind) or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        raise UserError(f"{name} is {value!r}; send {what} from {low} to {high}")
    return kind(value)


def _tokens(prompt: Mapping[str, Any], vocabulary: int) -> np.ndarray:
    chunks = prompt.get("chunks")
    if not isinstance(chunks, list):
        raise UserError("the prompt has no chunks; send {chunks: [{type: encoded_text, tokens}]}")
    tokens: list[Any] = []
    for chunk in chunks:
        kind = chunk.get("type") if isinstance(chunk, dict) else None
        if kind != "encoded_text" or not isinstance(chunk.get("tokens"), list):
            raise UserError(
                f"a chunk of the prompt is of type {kind!r}; this model reads encoded_text"
            )
        tokens += chunk["tokens"]
    if not tokens:
        raise UserError("the prompt is empty; write one")
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise UserError(
            f"the prompt has tokens that are no ids of this model, which go from 0 to "
            f"{vocabulary - 1}; use its own tokenizer"
        )
    return np.array(tokens, np.int32)


def _stops(stop: Any, default: Sequence[int]) -> tuple[frozenset[int], tuple[str, ...]]:
    """Stop ids and strings; None for the model's own, an empty list for none at all."""
    if stop is None:
        return frozenset(default), ()
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list) and len(stops) <= 64:
        ids = [each for each in stops if type(each) is int]
        if len(ids) == len(stops):
            return frozenset(ids), ()
        if all(isinstance(each, str) and 0 < len(each) <= 1000 for each in stops):
            return frozenset(), tuple(stops)
    raise UserError("stop takes a text, up to 64 texts, or up to 64 token ids; none may be empty")


def _targets(tensor: Any, length: int, vocabulary: int) -> np.ndarray:
    """Int64 [N - 1, K] from a tensor in JSON; -1 where nothing is asked."""
    what = f"target_prompt_logprobs must be an int64 tensor [{length - 1}, K]"
    try:
        shape, data = tuple(tensor["shape"]), np.array(tensor["data"], np.int64).reshape(-1)
        if len(shape) != 2 or shape[0] != length - 1 or not 1 <= shape[1] <= 1000:
            raise UserError(
                f"{what}, K up to 1,000; it has shape {list(shape)}: send one row per token"
            )
        if tensor.get("sparse_crow_indices") is None:
            targets = data.reshape(shape)
        else:
            counts = np.diff(np.array(tensor["sparse_crow_indices"], np.int64))
            targets = np.full(shape, -1, np.int64)
            rows = np.repeat(np.arange(len(counts)), counts)
            targets[rows, np.array(tensor["sparse_col_indices"], np.int64)] = data
    except (TypeError, KeyError, ValueError, IndexError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{what} ({error}); send it as tinker 0.38 does") from error
    if targets.size and (targets.min() < -1 or targets.max() >= vocabulary):
        raise UserError(f"{what} of ids below {vocabulary}, or -1; it has others")
    return targets
