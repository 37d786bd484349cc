"""The routes of the Tinker API as an ASGI application, for tinker 0.38 and the cookbook.

Submissions answer `{"request_id": ..}` at once, and the result is fetched by `retrieve_future`. They are in a
log before they are answered, and `build_app` submits those of an earlier server again.

An error of a submission is its result, `{"error": .., "category": "user"}`, and later calls still have their
turn. A request that cannot be a submission, such as a body cut short, is refused with a status:

    400  malformed           410  session, model or request unknown, or over
    404  no such route       413, 415  body too large, or of another kind
    408  still pending       429  too many samples wait
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl.errors import UserError
from jaxrl.models.model_config import LoraConfig
from jaxrl.roles.accumulating import AdamNumbers
from jaxrl.serving.openai.endpoint import as_api_error, object_of, read_body
from jaxrl.serving.openai.protocol import ApiError
from jaxrl.tinker.clients import Clients
from jaxrl.tinker.devices import check_rank
from jaxrl.tinker.futures import Future, Futures, Gone
from jaxrl.tinker.log import Log
from jaxrl.tinker.models import Models, TrainedModel
from jaxrl.tinker.replay import replay
from jaxrl.tinker.sample_calls import read_call
from jaxrl.tinker.sampler_weights import SamplerWeights
from jaxrl.tinker.sampling import Sampler
from jaxrl.tinker.settings import TinkerConfig
from jaxrl.tinker.wire import parse

# Clients hold a request for 45 s and ask again at once after 408.
_HOLD_S = 30.0
# Rank of adapters of which a client names none, as in the SDK.
_RANK = 32
# Bodies of more bytes are parsed on another thread.
_LONG_BODY = 100_000

Json = dict[str, Any]


def build_app(
    config: TinkerConfig,
    log: Log,
    clients: Clients,
    futures: Futures,
    models: Models,
    sampler: Sampler,
    base: SamplerWeights,
) -> Starlette:
    """Makes the application.

    Args:
      config: settings of the server.
      log, clients, futures, models, sampler: its parts.
      base: weights of the base model, to sample from.
    """
    devices, served = models.together.devices, config.model_name
    sizes, model_config = devices.sizes, devices.actor.model
    # The highest rank of an adapter, and the projections that adapters have; rank 0 without adapters.
    lora = model_config.lora

    # One object for a path: by its identity the sampler knows weights that have a place already.
    @functools.cache
    def exported(path: str) -> SamplerWeights:
        return SamplerWeights(models.folder_of(path, "sampler_weights"), path)

    async def json_of(request: Request) -> tuple[Json, bytes]:
        content = await read_body(request, config.max_body_bytes)
        # A long body must not delay other answers.
        if len(content) > _LONG_BODY:
            return await asyncio.to_thread(object_of, content), content
        return object_of(content) if content else {}, content

    async def logged(answer: Json) -> Response:
        """An answer, given once the records that it promises are on disk."""
        await asyncio.to_thread(log.sync, log.written)
        return JSONResponse(answer)

    def route(handle: Callable[[Json, bytes], Json]):
        """A route whose answer is a function of its body."""

        async def answer(request: Request) -> Response:
            return await logged(handle(*await json_of(request)))

        return answer

    def check_base(name: Any) -> None:
        if name != served:
            raise UserError(
                f"base_model {str(name)[:200]!r} is not here; this server has {served!r}"
            )

    def training(
        kind: str, body: Json, content: bytes, work_of: Callable[[TrainedModel, str], Any]
    ) -> Json:
        """Submits a training call; its work is that of `work_of` for the model and the request's id."""
        model, seq_id = models.model_of(str(body.get("model_id"))), body.get("seq_id")
        clients.heard(model.session_id)
        if type(seq_id) is not int or seq_id < 1:
            raise ApiError(f"seq_id is {seq_id!r}; count from 1 for each model")

        def start(future: Future) -> None:
            work = functools.partial(work_of, model, future.request_id)
            models.submit(model, seq_id, future, work)

        request_id = f"{model.model_id}/{seq_id}"
        futures.submit(kind, request_id, content, start, session_id=model.session_id)
        return {"request_id": request_id}

    # Sessions

    def heartbeat(body: Json, _: bytes) -> Json:
        clients.heard(body.get("session_id"))
        return {"type": "session_heartbeat"}

    async def finish_session(request: Request) -> Response:
        clients.end(request.path_params["session_id"])
        return await logged({})

    # Training

    def new_model(body: Json, content: bytes, kind: str, work_of: Any) -> Json:
        session_id = clients.heard(body.get("session_id"))
        number = body.get("model_seq_id")
        if type(number) is not int or number < 0:
            raise ApiError(f"model_seq_id is {number!r}; count from 0")
        model = TrainedModel(f"{session_id}:train:{number}", session_id)

        def may_replace(before: TrainedModel) -> bool:
            return before.session_id == session_id or clients.is_silent(before.session_id)

        def start(future: Future) -> None:
            if "base_model" in body and body["base_model"] is not None:
                check_base(body["base_model"])
            optimizer = body.get("optimizer_config")
            if optimizer not in (None, {}) and optimizer != {"type": "adamw"}:
                raise UserError(f"optimizer {str(optimizer)[:200]} is not served; use adamw")
            if kind == "create_model" and lora.rank:
                # Before it takes a place.
                _adapter(body, lora)
            work = functools.partial(work_of, model, future.request_id)
            models.create(model, future, work, may_replace)

        futures.submit(kind, model.model_id, content, start, session_id=session_id)
        return {"request_id": model.model_id}

    def create_model(body: Json, content: bytes) -> Json:
        def work(model: TrainedModel, _: str) -> Json:
            adapter, seed = _adapter(body, lora) if lora.rank else (None, 0)
            return models.start(model, adapter, seed)

        return new_model(body, content, "create_model", work)

    def get_info(body: Json, _: bytes) -> Json:
        model = models.model_of(str(body.get("model_id")))
        data = {"model_name": served, "arch": "jaxrl"}
        if config.tokenizer:
            data["tokenizer_id"] = config.tokenizer
        trained = devices.trained.get(model.model_id)
        rank = {"lora_rank": trained.adapter.rank} if trained and lora.rank else {}
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": served,
            "model_data": data,
            "is_lora": bool(rank),
            **rank,
        }

    def forward_backward(message: Any, content: bytes) -> Json:
        return training(
            "forward" if message.forward_only else "forward_backward",
            {"model_id": message.model_id, "seq_id": message.seq_id},
            content,
            lambda model, _: models.forward_backward(model, message),
        )

    async def receive_batch(request: Request) -> Response:
        content = await read_body(request, config.max_body_bytes)
        if coding := request.headers.get("content-encoding"):
            fault = f"content-encoding {coding!r} is not served; send the body as it is"
            raise ApiError(fault, status=415)
        message = await asyncio.to_thread(parse, "ForwardBackwardRequest", content)
        return await logged(forward_backward(message, content))

    def optim_step(body: Json, content: bytes) -> Json:
        work = lambda model, _: models.optim_step(model, _adam(body))  # noqa: E731
        return training("optim_step", body, content, work)

    def save_weights(body: Json, content: bytes) -> Json:
        def work(model: TrainedModel, request_id: str) -> Json:
            name = str(body.get("path") or f"{body['seq_id']:06d}")
            return models.save_weights(model, request_id, name, body.get("overwrite") is True)

        return training("save_weights", body, content, work)

    def save_for_sampler(body: Json, content: bytes) -> Json:
        kind, number = body.get("kind", "snapshot"), body.get("sampling_session_seq_id")
        kinds = ("snapshot", "inflight") if lora.rank else ("snapshot",)
        follows = kind == "inflight" and kind in kinds and not body.get("path")

        def work(model: TrainedModel, request_id: str) -> Json:
            if kind not in kinds:
                raise UserError(
                    f"samplers of kind {kind!r} are not served; use {' or '.join(kinds)}"
                )
            if body.get("path"):
                return models.export(model, request_id, str(body["path"]))
            if type(number) is not int or number < 0:
                raise UserError("send a path, or a sampling_session_seq_id from 0")
            sampler_id = f"{model.session_id}:sample:{number}"
            saved = models.snapshot(model, request_id)
            if follows:
                model.newest.saved = saved
                sampler.refresh()
            else:
                clients.add_sampler(sampler_id, model.session_id, saved)
            return {
                "type": "save_weights_for_sampler",
                "path": None,
                "sampling_session_id": sampler_id,
            }

        if follows:
            # Here and not in `work`: a restart repeats only the newest save, and all these samplers must
            # exist.
            model = models.model_of(str(body.get("model_id")))
            weights = SamplerWeights(newest=model.newest)
            clients.add_sampler(f"{model.session_id}:sample:{number}", model.session_id, weights)
        return training("save_weights_for_sampler", body, content, work)

    def load_weights(body: Json, content: bytes) -> Json:
        def work(model: TrainedModel, _: str) -> Json:
            return models.load_weights(model, str(body.get("path")), body.get("optimizer") is True)

        if body.get("session_id") is not None:
            return new_model(body, content, "load_weights", work)
        return training("load_weights", body, content, work)

    # Sampling

    def open_sampler(body: Json) -> str:
        session_id = clients.heard(body.get("session_id"))
        number, path = body.get("sampling_session_seq_id"), body.get("model_path")
        if type(number) is not int or number < 0:
            raise ApiError(f"sampling_session_seq_id is {number!r}; count from 0")
        if path is None:
            check_base(body.get("base_model"))
            weights = base
        else:
            weights = exported(str(path))
        sampler_id = f"{session_id}:sample:{number}"
        clients.add_sampler(sampler_id, session_id, weights)
        return sampler_id

    def create_sampling_session(body: Json, content: bytes) -> Json:
        sampler_id = open_sampler(body)
        log.write("sampler", str(body["session_id"]), body=content)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def get_sampler(request: Request) -> Response:
        sampler_id = request.path_params["sampler_id"]
        _, weights = clients.sampler(sampler_id)
        return JSONResponse(
            {
                "sampler_id": sampler_id,
                "base_model": served,
                "model_path": weights.path,
            }
        )

    def asample(body: Json, content: bytes) -> Json:
        sampler_id, seq_id = body.get("sampling_session_id"), body.get("seq_id")
        if sampler_id is None or type(seq_id) is not int:
            raise ApiError("send sampling_session_id and seq_id; create a sampling session first")
        session_id, weights = clients.sampler(sampler_id)
        if sampler.is_full:
            raise ApiError("too many samples wait already; come again later", status=429)

        def start(future: Future) -> None:
            seed = f"{sampler_id}/{seq_id}".encode()
            vocabulary = model_config.live_tokens
            call = read_call(body, sizes, vocabulary, seed)
            sampler.submit(call, weights, future)

        # The name by which a session's finished samples are found: clones count from multiples of 1e9.
        channel = f"{sampler_id}/{seq_id // 1_000_000_000}"
        request_id = f"{sampler_id}/{seq_id}"
        futures.submit(
            "asample", request_id, content, start, session_id=session_id, channel=channel
        )
        number = body.get("num_samples", 1)
        # A wrong number is refused by `read_call`, in the result; here it must not make a long list.
        count = number if type(number) is int and 0 < number <= 100_000 else 1
        ids = [f"{request_id}/{i}" for i in range(count)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def cancel(body: Json, _: bytes) -> Json:
        sampler.cancel(str(body.get("request_id")))
        return {}

    # Results

    async def retrieve_future(request: Request) -> Response:
        body, _ = await json_of(request)
        request_id = str(body.get("request_id"))
        result = await futures.retrieve(request_id, _HOLD_S)
        if result is None:
            pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            if reason := futures.find(request_id).waits_for:
                pending |= {"queue_state": "paused_capacity", "queue_state_reason": reason}
            return JSONResponse(pending, 408)
        kind = "application/x-protobuf" if result.is_protobuf else "application/json"
        return Response(result.body, media_type=kind)

    async def retrieve_futures(request: Request) -> Response:
        body, _ = await json_of(request)
        target, cursor = body.get("target"), body.get("prev_cursor", 0)
        if not isinstance(target, dict) or type(cursor) is not int or cursor < 0:
            raise ApiError("send target and prev_cursor")
        sampler_id = target.get("sampling_session_id")
        clients.sampler(sampler_id)
        wait = body.get("timeout")
        hold = min(_HOLD_S, wait) if isinstance(wait, int | float) and wait >= 0 else _HOLD_S
        channel = f"{sampler_id}/{target.get('cloned_sampler_id', 0)}"
        events, cursor = await futures.finished_of(channel, cursor, hold)
        completions: list[Json] = []
        for request_id, failed, size in events:
            further = {} if failed else {"response_payload_uncompressed_size": size}
            state = "failed" if failed else "finished"
            completions.append({"state": state, "request_id": request_id, **further})
        return JSONResponse({"completions": completions, "cursor": cursor})

    submissions: dict[str, Callable[[Json, bytes], Json]] = {
        "create_model": create_model,
        "optim_step": optim_step,
        "save_weights": save_weights,
        "save_weights_for_sampler": save_for_sampler,
        "load_weights": load_weights,
        "asample": asample,
    }

    def submit_again(route: str, content: bytes) -> None:
        if route in ("forward", "forward_backward"):
            forward_backward(parse("ForwardBackwardRequest", content), content)
        elif route == "create_sampling_session":
            open_sampler(json.loads(content))
        else:
            submissions[route](json.loads(content), content)

    replay(log.records, clients, futures, models, submit_again)
    log.records.clear()
    posts = {
        **{path: route(handle) for path, handle in submissions.items()},
        "client/config": route(lambda *_: {}),
        "client/dynamic_config": route(lambda *_: {}),
        "telemetry": route(lambda *_: {"status": "accepted"}),
        "create_session": route(
            lambda *_: {"type": "create_session", "session_id": clients.open()}
        ),
        "session_heartbeat": route(heartbeat),
        "sessions/{session_id}/finish": finish_session,
        "get_info": route(get_info),
        "forward_backward": receive_batch,
        "create_sampling_session": route(create_sampling_session),
        "cancel_future": route(cancel),
        "retrieve_future": retrieve_future,
        "retrieve_futures": retrieve_futures,
    }
    model = {
        "model_name": served,
        "max_context_length": sizes.max_context_tokens,
        "trainable": True,
        "sampleable": True,
    }
    gets = {
        "get_server_capabilities": route(lambda *_: {"supported_models": [model]}),
        "samplers/{sampler_id}": get_sampler,
    }
    return Starlette(
        routes=[
            *(Route(f"/api/v1/{path}", call, methods=["POST"]) for path, call in posts.items()),
            *(Route(f"/api/v1/{path}", call) for path, call in gets.items()),
        ],
        exception_handlers=dict.fromkeys(
            (ApiError, UserError, Gone, HTTPException, Exception), _refuse
        ),
    )


def _adapter(body: Mapping[str, Any], most: LoraConfig) -> tuple[LoraConfig, int]:
    """The adapter that a create_model asks for, and its seed."""
    given = {} if body.get("lora_config") is None else body["lora_config"]
    if not isinstance(given, dict):
        raise UserError(f"lora_config is {str(given)[:200]!r}; send an object, with rank and seed")
    rank = given.get("rank", min(_RANK, most.rank))
    check_rank(rank, most.rank)
    seed = 0 if given.get("seed") is None else given["seed"]
    if type(seed) is not int:
        raise UserError(f"lora_config: seed is {seed!r}; send a whole number, or none")
    trained = [given.get(f"train_{part}", True) is not False for part in ("attn", "mlp")]
    of_attention = ("q", "k", "v", "o")
    targets = tuple(name for name in most.targets if trained[name not in of_attention])
    if not targets:
        raise UserError(
            "lora_config: train_attn and train_mlp leave nothing to train; set one of them to true"
        )
    # A key takes 32 bits of it.
    return LoraConfig(rank=rank, targets=targets), seed % 2**32


def _adam(body: Mapping[str, Any]) -> AdamNumbers:
    """The numbers of an optim_step."""
    if body.get("optimizer_params") is not None:
        raise UserError("optimizer_params of another optimizer are not served; send adam_params")
    given = body.get("adam_params")
    if not isinstance(given, dict):
        raise UserError("adam_params are missing; send an object, {} for the defaults")
    unknown = given.keys() - set(AdamNumbers._fields)
    numbers = {"learning_rate": 1e-4, **{k: v for k, v in given.items() if k not in unknown}}
    bounds = {"learning_rate": 1e4, "beta1": 1.0, "beta2": 1.0, "weight_decay": 1e4}
    for name, value in numbers.items():
        # Finite in float32, in which the program computes.
        most = bounds.get(name, 1e30)
        inside = type(value) in (int, float) and 0 <= value <= most
        if not inside or (name.startswith("beta") and value == 1):
            raise UserError(f"adam_params: {name} is {value!r}; send a number from 0 to {most:g}")
    if unknown:
        raise UserError(
            f"adam_params: {', '.join(sorted(unknown))} are not known; there are "
            f"{', '.join(AdamNumbers._fields)}"
        )
    return AdamNumbers(**numbers)


async def _refuse(_: Request, error: Exception) -> Response:
    if isinstance(error, Gone):
        error = ApiError(str(error), status=410)
    elif isinstance(error, HTTPException):
        fault = f"{error.detail}: this route of the Tinker API is not served"
        error = ApiError(fault, status=error.status_code)
    refusal = as_api_error(error)
    category = "user" if refusal.status < 500 else "server"
    return JSONResponse({"error": str(refusal), "category": category}, refusal.status)
