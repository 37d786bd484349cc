"""The routes of the Tinker API as an ASGI application, for tinker 0.38 and the cookbook.

Submissions answer `{"request_id": ..}` at once, and the result is fetched by `retrieve_future`. They are in a
log before they are answered, and `TinkerApp.build` submits those of an earlier server again.

An error of a submission is its result, `{"error": .., "category": "user"}`, and later calls still have their
turn. A request that cannot be a submission, such as a body cut short, is refused with a status:

    400  malformed           410  session, model or request unknown, or over
    404  no such route       413, 415  body too large, or of another kind
    408  still pending       429  too many samples wait
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl.errors import UserError
from jaxrl.models.model_config import LoraConfig
from jaxrl_serving.openai.endpoint import as_api_error, object_of, read_body
from jaxrl_serving.openai.protocol import ApiError
from jaxrl_tinker.bodies import (
    Call,
    CreateModel,
    FinishedSamples,
    LoadWeights,
    LoraFields,
    NewModel,
    OpenSampler,
    OptimStep,
    Sample,
    SaveForSampler,
    SaveWeights,
)
from jaxrl_tinker.clients import Clients
from jaxrl_tinker.devices import check_rank
from jaxrl_tinker.futures import Future, Futures, Gone
from jaxrl_tinker.log import Log
from jaxrl_tinker.models import Models, TrainedModel
from jaxrl_tinker.replay import replay
from jaxrl_tinker.sample_calls import read_call
from jaxrl_tinker.sampler_weights import SamplerWeights
from jaxrl_tinker.sampling import Sampler
from jaxrl_tinker.settings import TinkerConfig
from jaxrl_tinker.wire import parse

# Clients hold a request for 45 s and ask again at once after 408.
_HOLD_S = 30.0
# Rank of adapters of which a client names none, as in the SDK.
_RANK = 32
# Bodies of more bytes are parsed on another thread.
_LONG_BODY = 100_000

Json = dict[str, Any]


@dataclasses.dataclass(eq=False)
class TinkerApp:
    """The routes. Those of submissions and of samplers get a body as JSON and as it came.

    Attributes:
      config: settings of the server.
      log, clients, futures, models, sampler: its parts.
      base: weights of the base model, to sample from.
    """

    config: TinkerConfig
    log: Log
    clients: Clients
    futures: Futures
    models: Models
    sampler: Sampler
    base: SamplerWeights

    def __post_init__(self):
        self.devices = self.models.together.devices
        # The highest rank of an adapter, and the projections that adapters have; rank 0 without adapters.
        self.lora = self.devices.actor.model.lora
        # One object for a path: by its identity the sampler knows weights that have a place already.
        self._exported = functools.cache(
            lambda path: SamplerWeights(self.models.folder_of(path, "sampler_weights"), path)
        )

    def build(self) -> Starlette:
        """Makes the application, after it has gone on with the log."""
        submissions: dict[str, Callable[[Json, bytes], Json]] = {
            "create_model": self.create_model,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "save_weights_for_sampler": self.save_for_sampler,
            "load_weights": self.load_weights,
            "asample": self.asample,
        }

        def submit_again(route: str, content: bytes) -> None:
            if route in ("forward", "forward_backward"):
                self.forward_backward(parse("ForwardBackwardRequest", content), content)
            elif route == "create_sampling_session":
                self._open_sampler(json.loads(content))
            else:
                submissions[route](json.loads(content), content)

        replay(self.log.records, self.clients, self.futures, self.models, submit_again)
        self.log.records.clear()
        posts = {
            **submissions,
            "client/config": lambda *_: {},
            "client/dynamic_config": lambda *_: {},
            "telemetry": lambda *_: {"status": "accepted"},
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "sessions/{session_id}/finish": self.finish_session,
            "get_info": self.get_info,
            "create_sampling_session": self.create_sampling_session,
            "cancel_future": self.cancel,
            "retrieve_future": self.retrieve_future,
            "retrieve_futures": self.retrieve_futures,
        }
        gets = {
            "get_server_capabilities": self.capabilities,
            "samplers/{sampler_id}": self.get_sampler,
        }
        routes = [
            Route(f"/api/v1/{path}", self._route(handle), methods=[method])
            for method, handles in (("POST", posts), ("GET", gets))
            for path, handle in handles.items()
        ]
        batches = Route("/api/v1/forward_backward", self.receive_batch, methods=["POST"])
        refused = (ApiError, UserError, Gone, HTTPException, Exception)
        return Starlette(
            routes=[batches, *routes], exception_handlers=dict.fromkeys(refused, _refuse)
        )

    def _route(self, handle: Callable[[Json, bytes], Any]):
        """A route whose answer is a function of its body, and of the names in its path."""

        async def answer(request: Request) -> Response:
            content = await read_body(request, self.config.max_body_bytes)
            # A long body must not delay other answers.
            if len(content) > _LONG_BODY:
                body = await asyncio.to_thread(object_of, content)
            else:
                body = object_of(content) if content else {}
            found = handle(body | request.path_params, content)
            found = await found if inspect.isawaitable(found) else found
            return found if isinstance(found, Response) else await self._logged(found)

        return answer

    async def _logged(self, answer: Json) -> Response:
        """An answer, given once the records that it promises are on disk."""
        await asyncio.to_thread(self.log.sync, self.log.written)
        return JSONResponse(answer)

    def _check_base(self, name: str | None) -> None:
        if name != self.config.model_name:
            raise UserError(
                f"base_model {str(name)[:200]!r} is not here; this server has {self.config.model_name!r}"
            )

    # Sessions

    def capabilities(self, *_) -> Json:
        model = {
            "model_name": self.config.model_name,
            "max_context_length": self.devices.sizes.max_context_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    def create_session(self, *_) -> Json:
        return {"type": "create_session", "session_id": self.clients.open()}

    def heartbeat(self, body: Json, _: bytes) -> Json:
        self.clients.heard(body.get("session_id"))
        return {"type": "session_heartbeat"}

    def finish_session(self, body: Json, _: bytes) -> Json:
        self.clients.end(body["session_id"])
        return {}

    # Training

    def _train(
        self, kind: str, body: Json, content: bytes, work_of: Callable[[TrainedModel, str], Any]
    ) -> Json:
        """Submits a training call; its work is that of `work_of` for the model and the request's id."""
        model = self.models.model_of(str(body.get("model_id")))
        self.clients.heard(model.session_id)
        seq_id = Call.of(body).seq_id
        request_id = f"{model.model_id}/{seq_id}"
        work = functools.partial(work_of, model, request_id)
        start = lambda future: self.models.submit(model, seq_id, future, work)  # noqa: E731
        self.futures.submit(kind, request_id, content, start, session_id=model.session_id)
        return {"request_id": request_id}

    def _create(
        self,
        kind: str,
        body: Json,
        content: bytes,
        work_of: Callable[[TrainedModel, str], Any],
        check: Callable[[], Any] = lambda: None,
    ) -> Json:
        """Submits the creation of a model, which is checked before it takes a place."""
        session_id = self.clients.heard(body.get("session_id"))
        model_id = f"{session_id}:train:{NewModel.of(body).model_seq_id}"
        model = TrainedModel(model_id, session_id)

        def may_replace(before: TrainedModel) -> bool:
            return before.session_id == session_id or self.clients.is_silent(before.session_id)

        def start(future: Future) -> None:
            check()
            work = functools.partial(work_of, model, model_id)
            self.models.create(model, future, work, may_replace)

        self.futures.submit(kind, model_id, content, start, session_id=session_id)
        return {"request_id": model_id}

    def create_model(self, body: Json, content: bytes) -> Json:
        def adapter() -> tuple[LoraConfig | None, int]:
            given = CreateModel.of(body)
            if given.base_model is not None:
                self._check_base(given.base_model)
            return _adapter(given.lora_config, self.lora) if self.lora.rank else (None, 0)

        work = lambda model, _: self.models.start(model, *adapter())  # noqa: E731
        return self._create("create_model", body, content, work, check=adapter)

    def get_info(self, body: Json, _: bytes) -> Json:
        model, name = self.models.model_of(str(body.get("model_id"))), self.config.model_name
        data = {"model_name": name, "arch": "jaxrl"}
        if self.config.tokenizer:
            data["tokenizer_id"] = self.config.tokenizer
        trained = self.devices.trained.get(model.model_id)
        rank = {"lora_rank": trained.adapter.rank} if trained and self.lora.rank else {}
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": name,
            "model_data": data,
            "is_lora": bool(rank),
            **rank,
        }

    def forward_backward(self, message: Any, content: bytes) -> Json:
        kind = "forward" if message.forward_only else "forward_backward"
        body = {"model_id": message.model_id, "seq_id": message.seq_id}
        work = lambda model, _: self.models.forward_backward(model, message)  # noqa: E731
        return self._train(kind, body, content, work)

    async def receive_batch(self, request: Request) -> Response:
        content = await read_body(request, self.config.max_body_bytes)
        if coding := request.headers.get("content-encoding"):
            fault = f"content-encoding {coding!r} is not served; send the body as it is"
            raise ApiError(fault, status=415)
        message = await asyncio.to_thread(parse, "ForwardBackwardRequest", content)
        return await self._logged(self.forward_backward(message, content))

    def optim_step(self, body: Json, content: bytes) -> Json:
        work = lambda model, _: self.models.optim_step(model, OptimStep.of(body).adam_params)  # noqa: E731
        return self._train("optim_step", body, content, work)

    def save_weights(self, body: Json, content: bytes) -> Json:
        def work(model: TrainedModel, request_id: str) -> Json:
            return self.models.save_weights(model, request_id, SaveWeights.of(body))

        return self._train("save_weights", body, content, work)

    def save_for_sampler(self, body: Json, content: bytes) -> Json:
        follows = self.lora.rank > 0 and body.get("kind") == "inflight" and not body.get("path")
        number = body.get("sampling_session_seq_id")

        def work(model: TrainedModel, request_id: str) -> Json:
            given = SaveForSampler.of(body)
            if given.kind == "inflight" and not self.lora.rank:
                raise UserError("samplers of kind 'inflight' are not served; use snapshot")
            if given.path:
                return self.models.export(model, request_id, given.path)
            if number is None:
                raise UserError("send a path, or a sampling_session_seq_id from 0")
            sampler_id = f"{model.session_id}:sample:{number}"
            saved = self.models.snapshot(model, request_id)
            if follows:
                model.newest.saved = saved
                self.sampler.refresh()
            else:
                self.clients.add_sampler(sampler_id, model.session_id, saved)
            return {
                "type": "save_weights_for_sampler",
                "path": None,
                "sampling_session_id": sampler_id,
            }

        if follows:
            # Here and not in `work`: a restart repeats only the newest save, and all these samplers must
            # exist.
            model = self.models.model_of(str(body.get("model_id")))
            weights = SamplerWeights(newest=model.newest)
            sampler_id = f"{model.session_id}:sample:{number}"
            self.clients.add_sampler(sampler_id, model.session_id, weights)
        return self._train("save_weights_for_sampler", body, content, work)

    def load_weights(self, body: Json, content: bytes) -> Json:
        work = lambda model, _: self.models.load_weights(model, LoadWeights.of(body))  # noqa: E731
        submit = self._train if body.get("session_id") is None else self._create
        return submit("load_weights", body, content, work)

    # Sampling

    def _open_sampler(self, body: Json) -> str:
        session_id, given = self.clients.heard(body.get("session_id")), OpenSampler.of(body)
        weights = self.base
        if given.model_path is None:
            self._check_base(given.base_model)
        else:
            weights = self._exported(given.model_path)
        sampler_id = f"{session_id}:sample:{given.sampling_session_seq_id}"
        self.clients.add_sampler(sampler_id, session_id, weights)
        return sampler_id

    def create_sampling_session(self, body: Json, content: bytes) -> Json:
        sampler_id = self._open_sampler(body)
        self.log.write("sampler", body["session_id"], body=content)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def get_sampler(self, body: Json, _: bytes) -> Json:
        sampler_id, base = body["sampler_id"], self.config.model_name
        path = self.clients.sampler(sampler_id)[1].path
        return {"sampler_id": sampler_id, "base_model": base, "model_path": path}

    def asample(self, body: Json, content: bytes) -> Json:
        sample = Sample.of(body)
        sampler_id, seq_id = sample.sampling_session_id, sample.seq_id
        session_id, weights = self.clients.sampler(sampler_id)
        if self.sampler.is_full:
            raise ApiError("too many samples wait already; come again later", status=429)
        request_id = f"{sampler_id}/{seq_id}"

        def start(future: Future) -> None:
            vocabulary, seed = self.devices.actor.model.live_tokens, request_id.encode()
            sizes, tokenizer = self.devices.sizes, self.devices.tokenizer
            call = read_call(body, sizes, tokenizer, vocabulary, seed)
            self.sampler.submit(call, weights, future)

        # The name by which a session's finished samples are found: clones count from multiples of 1e9.
        names = {"session_id": session_id, "channel": f"{sampler_id}/{seq_id // 1_000_000_000}"}
        self.futures.submit("asample", request_id, content, start, **names)
        number = body.get("num_samples", 1)
        # A wrong number is refused by `read_call`, in the result; here it must not make a long list.
        count = number if type(number) is int and 0 < number <= 100_000 else 1
        ids = [f"{request_id}/{i}" for i in range(count)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def cancel(self, body: Json, _: bytes) -> Json:
        self.sampler.cancel(str(body.get("request_id")))
        return {}

    # Results

    async def retrieve_future(self, body: Json, _: bytes) -> Response:
        request_id = str(body.get("request_id"))
        result = await self.futures.retrieve(request_id, _HOLD_S)
        if result is None:
            pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            if reason := self.futures.find(request_id).waits_for:
                pending |= {"queue_state": "paused_capacity", "queue_state_reason": reason}
            return JSONResponse(pending, 408)
        kind = "application/x-protobuf" if result.is_protobuf else "application/json"
        return Response(result.body, media_type=kind)

    async def retrieve_futures(self, body: Json, _: bytes) -> Response:
        given = FinishedSamples.of(body)
        target = given.target
        self.clients.sampler(target.sampling_session_id)
        hold = _HOLD_S if given.timeout is None else min(_HOLD_S, given.timeout)
        channel = f"{target.sampling_session_id}/{target.cloned_sampler_id}"
        events, cursor = await self.futures.finished_of(channel, given.prev_cursor, hold)
        completions: list[Json] = []
        for request_id, failed, size in events:
            further = {} if failed else {"response_payload_uncompressed_size": size}
            state = "failed" if failed else "finished"
            completions.append({"state": state, "request_id": request_id, **further})
        return JSONResponse({"completions": completions, "cursor": cursor})


def _adapter(given: LoraFields, most: LoraConfig) -> tuple[LoraConfig, int]:
    """The adapter that a create_model asks for, and its seed."""
    rank = min(_RANK, most.rank) if given.rank is None else given.rank
    check_rank(rank, most.rank)
    of_attention = ("q", "k", "v", "o")
    targets = tuple(
        name
        for name in most.targets
        if (given.train_attn if name in of_attention else given.train_mlp)
    )
    if not targets:
        raise UserError(
            "lora_config: train_attn and train_mlp leave nothing to train; set one of them to true"
        )
    # A key takes 32 bits of it.
    return LoraConfig(rank=rank, targets=targets), given.seed % 2**32


async def _refuse(_: Request, error: Exception) -> Response:
    if isinstance(error, Gone):
        error = ApiError(str(error), status=410)
    elif isinstance(error, HTTPException):
        fault = f"{error.detail}: this route of the Tinker API is not served"
        error = ApiError(fault, status=error.status_code)
    refusal = as_api_error(error)
    category = "user" if refusal.status < 500 else "server"
    return JSONResponse({"error": str(refusal), "category": category}, refusal.status)
