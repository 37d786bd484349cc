"""JetStream's real package around our engine: its contract, its driver, its gRPC service."""

import contextlib
import dataclasses
import functools
import importlib
import os
import pathlib
import queue
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from closeness import assert_close
from extras import import_extra

import_extra("dev", "jetstream")
grpc = import_extra("dev", "grpc")

from jaxrl.errors import UserError  # noqa: E402
from jaxrl.mesh.devices import build_mesh  # noqa: E402
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout  # noqa: E402
from jaxrl.models.config import ModelConfig  # noqa: E402
from jaxrl.models.decoder import decoder_graph  # noqa: E402
from jaxrl.rollout import driver as offline  # noqa: E402
from jaxrl.rollout import jetstream  # noqa: E402
from jaxrl.rollout.engine import Engine, EngineConfig  # noqa: E402
from jaxrl.rollout.online import Ask, OnlineDriver, ServingError, Stopped  # noqa: E402
from jaxrl.rollout.sampling import truncation_of  # noqa: E402
from jaxrl.types import Prompts  # noqa: E402

# Importable since our module is.
jetstream_pb2 = importlib.import_module("jetstream.core.proto.jetstream_pb2")
jetstream_pb2_grpc = importlib.import_module("jetstream.core.proto.jetstream_pb2_grpc")
engine_api = importlib.import_module("jetstream.engine.engine_api")

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ModelConfig(
    vocab_size=288,
    num_tokens=258,
    num_layers=2,
    d_model=16,
    d_ff=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
CONFIG = EngineConfig(
    slots=8,
    prefill_prompts=4,
    max_prompt_tokens=24,
    max_response_tokens=20,
    tokens_per_dispatch=4,
    # Many, so that some samples are short.
    stop_ids=(257, *range(240, 256)),
)


@functools.cache
def weights():
    _, shapes, _ = decoder_graph(MODEL)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: (0.3 * rng.normal(size=s.shape)).astype(np.float32), shapes)


@functools.cache
def engine_of(train="1-1-1") -> Engine:
    layout = ParallelLayout.from_config(LayoutConfig(train=train))
    mesh = build_mesh(layout, jax.devices()[: layout.num_devices])
    return Engine(MODEL, decoder_graph(MODEL)[0], mesh, CONFIG)


def encode(text) -> np.ndarray:
    return np.array(list(text.encode()), np.int32)


def decode(tokens) -> str:
    return bytes(t for t in np.asarray(tokens).tolist() if t < 240).decode("utf-8", "replace")


def adapter_of(**settings) -> jetstream.JetStreamEngine:
    return jetstream.JetStreamEngine(
        engine_of(),
        weights(),
        jetstream.Tokenizer(encode, decode, CONFIG.stop_ids),
        jetstream.Settings(**settings),
    )


LENGTHS = (1, 20, 7, 24, 3)
rng = np.random.default_rng(1)
PROMPTS = Prompts(
    ids_N=np.array([3, 0, 7, 1, 2]),
    tokens=tuple(rng.integers(3, 256, n).astype(np.int32) for n in LENGTHS),
    texts=("",) * 5,
    answers=("",) * 5,
    sources=("",) * 5,
)
OPTIONS = {"seed": 7, "step": 3, "temperature": 0.5}
CHOICE = truncation_of(top_k=0, top_p=0.9, min_p=0.0)


@pytest.mark.parametrize("num_samples, train", [(4, "1-1-1"), (3, "1-1-1"), (2, "1-2-4")])
def test_its_driver_gives_the_samples_of_ours(num_samples, train):
    given = (engine_of(train), weights(), PROMPTS, decode)
    options = {**OPTIONS, "num_samples": num_samples, "truncation": CHOICE}
    ours, theirs = offline.sample(*given, **options), jetstream.sample(*given, **options)
    assert 0 < ours.truncated_B.sum() < len(ours)
    assert [t.tolist() for t in theirs.tokens] == [t.tolist() for t in ours.tokens]
    assert theirs.texts == ours.texts
    np.testing.assert_array_equal(theirs.truncated_B, ours.truncated_B)
    for field in ("rollout_logprob", "entropy", "mask"):
        for x, y in zip(getattr(theirs, field), getattr(ours, field), strict=True):
            assert_close(x, y, err_msg=field, scale=1)


def test_stop_strings_cut_as_in_our_driver():
    options = {**OPTIONS, "num_samples": 1}
    given = (engine_of(), weights(), PROMPTS, decode)
    whole = offline.sample(*given, **options)
    stop = next(c for text in whole.texts for c in text[3:8] if c != "\N{REPLACEMENT CHARACTER}")
    ours = offline.sample(*given, **options, stop_strings=(stop,))
    theirs = jetstream.sample(*given, **options, stop_strings=(stop,))
    assert [t.tolist() for t in theirs.tokens] == [t.tolist() for t in ours.tokens]
    assert any(len(t) < len(w) for t, w in zip(theirs.tokens, whole.tokens, strict=True))
    np.testing.assert_array_equal(theirs.truncated_B, ours.truncated_B)


def test_what_it_cannot_do_is_refused(monkeypatch):
    given = (engine_of(), weights(), PROMPTS, decode)
    with pytest.raises(UserError, match="cannot continue a finished sample"):
        jetstream.sample(*given, **OPTIONS, num_samples=1, environment=lambda turn: None)
    long = dataclasses.replace(PROMPTS, tokens=(np.zeros(25, np.int32),) * 5)
    with pytest.raises(UserError, match="prompt 3 has 25 tokens; the engine takes 1 to 24"):
        jetstream.sample(engine_of(), weights(), long, decode, **OPTIONS, num_samples=1)
    monkeypatch.setattr(jetstream, "num_processes", lambda: 2)
    with pytest.raises(UserError, match="on 2 hosts"):
        jetstream.sample(*given, **OPTIONS, num_samples=1)


@pytest.mark.parametrize("method", ["prefill", "insert", "generate"])
def test_an_engine_failure_is_raised_and_nothing_is_killed(method, monkeypatch, caplog):
    def out_of_memory(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(engine_of(), method, out_of_memory)
    before = threading.active_count()
    with pytest.raises(ServingError, match="the engine has failed: JaxRuntimeError") as caught:
        jetstream.sample(engine_of(), weights(), PROMPTS, decode, **OPTIONS, num_samples=4)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    assert threading.active_count() == before
    assert "driver has failed" in caplog.text


def test_the_contract_by_hand():
    """As any orchestrator of the contract would call it, with a padded array and no word of ours."""
    adapter = adapter_of(temperature=0.0)
    assert isinstance(adapter, engine_api.Engine)
    prompt = PROMPTS.tokens[2]
    padded = np.zeros(16, np.int32)
    padded[: len(prompt)] = prompt
    params = adapter.load_params()
    prefix = adapter.prefill(params=params, padded_tokens=padded, true_length=len(prompt))
    prefix = jax.device_put(prefix, adapter.get_prefix_destination_sharding())
    state = adapter.insert(prefix, adapter.init_decode_state(), slot=5)
    tokens = []
    for _ in range(6):
        state, result = adapter.generate(params, state)
        result.copy_to_host_async()
        slot = result.convert_to_numpy().get_result_at_slot(5)
        tokens += slot.tokens[slot.valid == 1].tolist()
        assert slot.lengths.tolist() == [len(tokens)]
        assert not result.convert_to_numpy().get_result_at_slot(4).valid.any()
    one = PROMPTS.take([2])
    ours = offline.sample(
        engine_of(), weights(), one, decode, num_samples=1, **{**OPTIONS, "temperature": 0.0}
    )
    assert tokens == ours.tokens[0].tolist()
    assert adapter.max_concurrent_decodes == 8
    assert adapter.build_tokenizer(adapter.get_tokenizer()).encode("ab")[1] == 2


def test_importing_it_leaves_logging_alone_and_tensorflow_away():
    code = """
import logging, sys
before = logging.getLogger().level, list(logging.getLogger().handlers)
from jaxrl.rollout import jetstream
assert (logging.getLogger().level, list(logging.getLogger().handlers)) == before
assert not {"tensorflow", "seqio", "tensorflow_datasets"} & sys.modules.keys()
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_two_drivers_of_one_mesh_take_turns():
    """Two threads that dispatch programs with collectives to the same eight devices."""
    engine, lock = engine_of("1-2-4"), threading.Lock()
    tokenizer = jetstream.Tokenizer(encode, decode, stop_ids=())
    adapter = jetstream.JetStreamEngine(
        engine, weights(), tokenizer, jetstream.Settings(), columns=jetstream._FIELDS, lock=lock
    )
    driver = jetstream.Driver(adapter)
    try:
        with OnlineDriver(engine, weights(), decode, lock=lock) as online:
            work = [jetstream.Work(tokens, 20) for tokens in PROMPTS.tokens * 4]
            channels = [jetstream._Collected() for _ in work]
            ours, ended = [[] for _ in work], queue.SimpleQueue()

            def listen(event, answer):
                answer += event.tokens.tolist()
                if event.finish:
                    ended.put(event)

            for item, channel, answer in zip(work, channels, ours, strict=True):
                driver.place_request_on_prefill_queue(jetstream._request(item, channel))
                ask = Ask(item.tokens, num_samples=1, max_tokens=20, seed=0, temperature=0.0)
                online.submit(ask, functools.partial(listen, answer=answer))
            theirs = [channel.wait()[0][:, 0].tolist() for channel in channels]
            for _ in work:
                ended.get(timeout=60)
    finally:
        driver.stop()
    assert ours == theirs


# gRPC


@pytest.fixture(scope="module")
def service():
    driver = jetstream.Driver(adapter_of())
    server = jetstream.GrpcServer(
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
    options = {**OPTIONS, "temperature": 0.0, "num_samples": 1}
    return offline.sample(engine_of(), weights(), one, decode, **options).tokens[0]


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
        jetstream.GrpcServer(
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
    driver.stop()
    with pytest.raises(Stopped):
        driver.place_request_on_prefill_queue(
            jetstream._request(jetstream.Work(encode("a"), 4), jetstream._Collected())
        )
