"""JetStream's gRPC service around our engine, with its own stubs; its driver beside the one of HTTP."""

import contextlib
import dataclasses
import functools
import importlib
import queue
import threading

import jax
import numpy as np
import pytest
from byte_engine import CONFIG, OPTIONS, PROMPTS, decode, encode, engine_of, loaded, weights
from extras import import_extra

import_extra("dev", "jetstream")
grpc = import_extra("dev", "grpc")

from jaxrl.errors import UserError  # noqa: E402
from jaxrl.rollout.driver import OfflineBackend  # noqa: E402
from jaxrl.rollout.jetstream.engine_adapter import (  # noqa: E402
    JetStreamEngine,
    JetstreamTokenizer,
    Work,
)
from jaxrl.rollout.jetstream.jetstream_backend import FIELDS, CollectedSamples  # noqa: E402
from jaxrl.rollout.jetstream.orchestrator_driver import DriverStopped, JetStreamDriver  # noqa: E402
from jaxrl.rollout.slots import DrawSettings  # noqa: E402
from jaxrl.serving.jetstream_grpc import GrpcServer, TextDriver  # noqa: E402
from jaxrl.serving.online_driver import OnlineDriver, Request  # noqa: E402

# Importable since our module is.
jetstream_pb2 = importlib.import_module("jetstream.core.proto.jetstream_pb2")
jetstream_pb2_grpc = importlib.import_module("jetstream.core.proto.jetstream_pb2_grpc")


def test_two_drivers_of_one_mesh_take_turns():
    """Two threads that dispatch programs with collectives to the same eight devices."""
    engine, lock = engine_of("1-2-4"), threading.Lock()
    tokenizer = JetstreamTokenizer(encode, decode, stop_ids=())
    adapter = JetStreamEngine(
        engine, weights(), tokenizer, DrawSettings(), columns=FIELDS, lock=lock
    )
    driver = JetStreamDriver(adapter)
    try:
        with OnlineDriver(engine, weights(), decode, lock=lock) as online:
            work = [Work(tokens, 20) for tokens in PROMPTS.tokens * 4]
            channels = [CollectedSamples() for _ in work]
            ours, ended = [[] for _ in work], queue.SimpleQueue()

            def listen(event, answer):
                answer += event.tokens.tolist()
                if event.finish:
                    ended.put(event)

            for item, channel, answer in zip(work, channels, ours, strict=True):
                driver.submit(item, channel)
                ours_too = Request(
                    item.tokens, num_samples=1, max_tokens=20, seed=0, temperature=0.0
                )
                online.submit(ours_too, functools.partial(listen, answer=answer))
            theirs = [channel.wait()[0][:, 0].tolist() for channel in channels]
            for _ in work:
                ended.get(timeout=60)
    finally:
        driver.stop()
    assert ours == theirs


@pytest.fixture(scope="module")
def service():
    tokenizer = JetstreamTokenizer(encode, decode, CONFIG.stop_ids)
    driver = TextDriver(JetStreamEngine(engine_of(), weights(), tokenizer, DrawSettings()))
    server = GrpcServer(
        driver,
        host="127.0.0.1",
        port=0,
        max_tokens=20,
        max_message_bytes=4096,
        max_requests=64,
    )
    yield driver, server
    server.stop(grace_s=5)


@pytest.fixture
def stub(service):
    with grpc.insecure_channel(f"127.0.0.1:{service[1].port}") as channel:
        yield jetstream_pb2_grpc.OrchestratorStub(channel)


def request(text=None, tokens=None, max_tokens=0):
    if tokens is not None:
        content = {"token_content": jetstream_pb2.DecodeRequest.TokenContent(token_ids=tokens)}
    else:
        content = (
            {"text_content": jetstream_pb2.DecodeRequest.TextContent(text=text)} if text else {}
        )
    return jetstream_pb2.DecodeRequest(max_tokens=max_tokens, **content)


def samples_of(responses):
    return [response.stream_content.samples[0] for response in responses]


@functools.cache
def greedy(prompt: str) -> np.ndarray:
    one = dataclasses.replace(PROMPTS.take([0]), tokens=(encode(prompt),))
    return loaded(OfflineBackend).generate(one, OPTIONS.replace(temperature=0.0)).tokens[0]


def test_tokens_and_texts_stream_over_grpc(stub):
    for prompt in ("a", "hello", "naïve"):
        expected = greedy(prompt)
        shown = expected[:-1] if expected[-1] in CONFIG.stop_ids else expected
        parts = samples_of(stub.Decode(request(tokens=encode(prompt))))
        assert [t for part in parts for t in part.token_ids] == shown.tolist()
        assert len(parts) == -(-len(shown) // 4)
        parts = samples_of(stub.Decode(request(text=prompt)))
        assert "".join(part.text for part in parts) == decode(shown)
        parts = samples_of(stub.Decode(request(text=prompt, max_tokens=6)))
        assert [t for part in parts for t in part.token_ids] == shown[:6].tolist()


def test_health_and_many_requests_at_once(stub):
    assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
    prompts = ["a", "hello", "naïve"] * 10
    calls = [stub.Decode(request(text=prompt)) for prompt in prompts]
    for prompt, call in zip(prompts, calls, strict=True):
        text = "".join(part.text for part in samples_of(call))
        assert text == decode(greedy(prompt))


@pytest.mark.parametrize(
    "bad, message",
    [
        ({}, "no text_content or token_content"),
        ({"tokens": []}, "has 0 tokens; this server takes 1 to 24"),
        ({"text": "x" * 25}, "has 25 tokens"),
        ({"tokens": [258]}, "from 258 to 258; this model's go from 0 to 257"),
        ({"text": "x", "max_tokens": 21}, "max_tokens 21: this server gives 1 to 20"),
    ],
)
def test_what_can_never_be_served_is_an_invalid_argument(bad, message, stub):
    with pytest.raises(grpc.RpcError, match=message) as caught:
        list(stub.Decode(request(**bad)))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_message_may_not_be_too_long_and_a_port_not_shared(service, stub):
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Decode(request(text="x" * 5000)))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    driver, server = service
    with pytest.raises(UserError, match="choose another --grpc_port"):
        GrpcServer(
            driver,
            host="127.0.0.1",
            port=server.port,
            max_tokens=20,
            max_message_bytes=4096,
            max_requests=64,
        )


def test_cancelled_calls_leave_their_slots_to_others(service, stub):
    for _ in range(3):
        calls = [stub.Decode(request(text="hello")) for _ in range(8)]
        for call in calls:
            with contextlib.suppress(StopIteration):
                next(call)
            call.cancel()
    assert "".join(p.text for p in samples_of(stub.Decode(request(text="a")))) == decode(
        greedy("a")
    )
    slots = service[0]._generate_slots[0]
    assert slots.qsize() >= 7  # the last one is given back a moment after its answer


def test_a_failed_driver_says_so_and_refuses_what_comes_later(service, stub, monkeypatch):
    def out_of_memory(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(engine_of(), "generate", out_of_memory)
    with pytest.raises(grpc.RpcError, match="out of memory") as caught:
        list(stub.Decode(request(text="hello")))
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    with pytest.raises(grpc.RpcError, match="takes no requests: the engine has failed") as caught:
        list(stub.Decode(request(text="hello")))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert not stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
    driver, _ = service
    for _ in range(2):
        with pytest.raises(DriverStopped) as refused:
            driver.submit(Work(encode("a"), 4), CollectedSamples())
        assert isinstance(refused.value.__cause__, jax.errors.JaxRuntimeError)
        driver.stop()
