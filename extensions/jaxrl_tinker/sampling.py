"""Samples for clients, from the weights that each of them has named.

    asample --> waiting --> live loop of the devices --> samples --> log-probabilities --> future

Samplers decode together as long as their weights have places (`sampler_weights`): many adapters, or one
set of whole weights. Requests are served in the order of their arrival, and one whose weights find no place
waits until the samples before it have ended. A sampling session never changes its weights.

Log-probabilities are those at temperature 1, as the trainer computes them. The engine's are of the tempered
distribution, so for other temperatures, and for what is asked about prompts and top-k, the sequences are run
through the trainer's forward pass once more, with the sampler's weights.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.errors import UserError
from jaxrl.rollout.decode_loop import Decoded, End
from jaxrl.rollout.live_loop import LiveError, Overloaded, Request
from jaxrl_serving.openai.calls import LOWEST_TEMPERATURE
from jaxrl_tinker.accumulating import DRAW_NUMBERS, Targets
from jaxrl_tinker.devices import Devices, Scores, Together
from jaxrl_tinker.futures import Future, Futures, Result
from jaxrl_tinker.sample_calls import SampleCall
from jaxrl_tinker.sampler_weights import Places, SamplerWeights
from jaxrl_tinker.wire import MESSAGES, tensor_of, topk_of


@dataclasses.dataclass
class _OpenSample:
    """A sample as it grows."""

    ticket: int = -1
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    end: End | None = None


@dataclasses.dataclass(eq=False)
class _Job:
    """A call, its weights, its future, its samples, and the number of its weights (`Places.take`)."""

    call: SampleCall
    weights: SamplerWeights
    future: Future
    samples: list[_OpenSample]
    number: int = 0


class Sampler:
    """Answers calls on a thread of its own, which starts at once."""

    def __init__(
        self, together: Together, futures: Futures, base: SamplerWeights, *, max_waiting: int
    ):
        """Args: devices; futures; the base model's weights; most samples that may wait."""
        self._together = together
        self._live = together.devices.live
        self._futures = futures
        self._max_waiting = max_waiting
        # Events, as functions for the thread to call; None ends it.
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_waiting = 0
        # Used only by the thread.
        self._places = Places(
            together.devices.num_places,
            base,
            lambda at, weights: together.run(Devices.bring, at, weights.taken_by, weights.folder),
        )
        self._waiting: collections.deque[_Job] = collections.deque()
        self._open: dict[str, _Job] = {}
        self._thread = threading.Thread(target=self._serve, name="tinker-sampler", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether more calls should come later."""
        return self._num_waiting >= self._max_waiting

    def submit(self, call: SampleCall, weights: SamplerWeights, future: Future) -> None:
        job = _Job(call, weights, future, [_OpenSample() for _ in range(call.num_samples)])
        self._count(call.num_samples)
        self._events.put(functools.partial(self._waiting.append, job))

    def _count(self, samples: int) -> None:
        with self._lock:
            self._num_waiting += samples

    def refresh(self) -> None:
        """Gives samplers of `kind: inflight` the weights that were just saved."""
        self._events.put(self._refresh)

    def cancel(self, request_id: str) -> None:
        """Ends a call that has no client waiting."""
        self._events.put(functools.partial(self._cancel, request_id))

    def close(self) -> None:
        """Ends the thread; calls that are not answered stay so."""
        self._events.put(None)
        self._thread.join()

    # The thread

    def _serve(self) -> None:
        while True:
            is_idle = self._live.load == (0, 0)
            # While samples decode the thread does not wait: it takes only what is there already.
            while is_idle or not self._events.empty():
                if (event := self._events.get()) is None:
                    return
                event()
                is_idle = False
            self._start_waiting()
            if self._live.load != (0, 0):
                self._together.run(Devices.turn)

    def _start_waiting(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            try:
                number = self._places.take(job.weights)
                # In the order of arrival: it waits for a place, and all behind it wait too.
                if number is None:
                    return
                job.number = number
                try:
                    self._begin(job)
                except Exception:
                    self._places.leave(number)
                    raise
            # No room beside the samples at work: try again when they end. With none at work there never is.
            except Overloaded:
                if self._open:
                    return
                self._futures.finish(
                    job.future, Result.error(UserError("too many samples for this server at once"))
                )
            except Exception as error:  # one call's failure is not the sampler's
                self._futures.finish(job.future, Result.error(error))
            self._waiting.popleft()
            self._count(-job.call.num_samples)

    def _begin(self, job: _Job) -> None:
        call = job.call
        # A request for each sample, so that one that ends early frees its slot. They share a prefill.
        requests = []
        # Called in the middle of a turn, when the loop takes no requests and no cancellations.
        put_later = lambda *event: self._events.put(functools.partial(self._take, *event))  # noqa: E731
        for i, sample in enumerate(job.samples):
            # 31 bits: a seed takes the place of an int32 in the sampling key.
            seed = int.from_bytes(hashlib.sha256(call.seed + b"/%d" % i).digest()[:4], "big") >> 1
            request = Request(call.prompt, call.max_tokens, seed, call.options, job.number)
            requests.append((request, functools.partial(put_later, job, sample)))
        tickets = self._live.submit_all(requests)
        self._open[job.future.request_id] = job
        for sample, ticket in zip(job.samples, tickets, strict=True):
            sample.ticket = ticket

    def _take(self, job: _Job, sample: _OpenSample, event: Decoded | LiveError) -> None:
        if job.future.request_id not in self._open or sample.end:
            return
        if isinstance(event, LiveError):
            self._end(job, Result.error(event))
            return
        sample.tokens += event.tokens.tolist()
        sample.logprobs += event.logprob.tolist()
        sample.end = event.end
        if all(each.end for each in job.samples):
            try:
                result = Result.of(self._response(job).SerializeToString())
            except Exception as error:  # one call's failure is not the sampler's
                result = Result.error(error)
            self._end(job, result)

    def _refresh(self) -> None:
        for at, error in self._places.refresh().items():
            result = Result.error(error)
            # They would go on with older weights than their client knows of.
            for job in [job for job in self._open.values() if self._places.at(job.number) == at]:
                self._end(job, result)

    def _cancel(self, request_id: str) -> None:
        cancelled = Result.error(UserError("the client has cancelled the request"))
        if request_id in self._open:
            self._end(self._open[request_id], cancelled)
        for job in [job for job in self._waiting if job.future.request_id == request_id]:
            self._waiting.remove(job)
            self._count(-job.call.num_samples)
            self._futures.finish(job.future, cancelled)

    def _end(self, job: _Job, result: Result) -> None:
        """Ends a call that has started, and its unfinished samples."""
        del self._open[job.future.request_id]
        self._places.leave(job.number)
        for sample in job.samples:
            if not sample.end:
                self._live.cancel(sample.ticket)
        self._futures.finish(job.future, result)

    # Answers

    def _response(self, job: _Job) -> Any:
        call, samples = job.call, job.samples
        N = len(call.prompt)
        top_k = max(call.topk_prompt, call.topk_sample)
        # Greedy samples have log-probabilities at temperature 1 from the engine already.
        tempered = call.options.temperature not in (0.0, 1.0)
        prompts_too = (
            call.prompt_logprobs or call.topk_prompt or call.targets is not None or call.draws
        )
        scored: list[Scores] = []
        if tempered or call.topk_sample:
            sequences = [np.array([*call.prompt, *s.tokens], np.int32) for s in samples]
            scored = self._score(job, sequences, top_k)
        # A prompt of one token has no token that follows another.
        elif prompts_too and N > 1:
            scored = self._score(job, [call.prompt], top_k)
        response = MESSAGES["SampleResponse"]()
        for i, sample in enumerate(samples):
            logprobs = np.array(sample.logprobs, np.float32)
            if tempered:
                # The last place of the prompt is about the first token of the sample.
                logprobs = scored[i].logprobs[N - 1 :]
            sequence = response.sequences.add(
                stop_reason=1 if sample.end is End.FULL else 0,
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
        targets, most = job.call.targets, self._together.devices.shape.tokens + 1
        if (longest := max(map(len, sequences))) > most:
            raise UserError(
                f"log-probabilities of a sequence of {longest} tokens were asked for, and this server "
                f"computes them for {most} at most; start it with more --train_tokens"
            )
        K, draws = 0 if targets is None else targets.shape[1], job.call.draws
        random = np.random.default_rng(list(hashlib.sha256(job.call.seed + b"/draws").digest()))
        given = []
        for tokens in sequences:
            # The next token, the targets that were asked for, and random numbers in the place of targets.
            of_place = np.zeros((len(tokens) - 1, 1 + K + draws), np.int32)
            of_place[:, 0] = tokens[1:]
            if targets is not None:
                of_place[: len(targets), 1 : 1 + K] = np.maximum(targets, 0)
            of_place[:, 1 + K :] = random.integers(DRAW_NUMBERS, size=(len(tokens) - 1, draws))
            given.append(Targets(tokens[:-1], of_place, {}))
        return self._together.run(
            Devices.score,
            self._places.at(job.number),
            given,
            top_k=top_k,
            draws=draws,
            temperature=max(job.call.options.temperature, LOWEST_TEMPERATURE),
        )
