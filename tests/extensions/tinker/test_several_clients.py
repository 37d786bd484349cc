"""Clients with adapters: several at once, their files, and what they may not ask."""

import dataclasses
import json
import resource
import threading

import jax
import numpy as np
import pytest
import safetensors.numpy
from closeness import assert_close
from flax import nnx
from plain_pass import next_logprobs
from recorded import (
    DATA,
    PROTOBUF,
    Client,
    Trainer,
    asked,
    config_of,
    decoded,
    finish,
    sampled,
    supervised,
    write_model,
)

from jaxrl.errors import UserError
from jaxrl.models import lora
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.config_json import read_adapter_config, read_config
from jaxrl.models.huggingface.weight_loading import load_adapter, load_params
from jaxrl.models.model_config import LoraConfig
from jaxrl_tinker import devices as tinker_devices
from jaxrl_tinker.sampler_weights import Places, SamplerWeights
from jaxrl_tinker.server import devices_of, main, running
from jaxrl_tinker.wire import parse


@pytest.fixture(scope="module")
def server(folder):
    with running(config_of(folder)) as server:
        yield server


# What two clients train on, with which rank, at which rate.
CLIENTS = ((DATA, 4, 1e-2), ([supervised([40, 41, 42, 43]), supervised(range(50, 75))], 2, 3e-2))


def steps(clients, which):
    """Two steps of some of the clients, whose calls alternate; samples of each after each step.

    Returns:
      for each client its log-probabilities, losses and norms; and the samples' tokens and log-probabilities.
    """
    found, drawn = {i: [] for i in which}, {i: [] for i in which}
    for step in range(2):
        batches = {
            i: clients[i].post("forward_backward", clients[i].batch(CLIENTS[i][0]), kind=PROTOBUF)
            for i in which
        }
        for i in which:
            logprobs, metrics = decoded(clients[i].result(batches[i]))
            found[i] += [x.tobytes() for x in logprobs] + [metrics["loss:sum"]]
        for i in reversed(which):
            found[i].append(clients[i].step(CLIENTS[i][2])["metrics"]["grad_norm:mean"])
        samplers = {i: clients[i].snapshot() for i in which}
        # All are submitted before the first result is there: they decode together.
        asked_for = {
            i: [
                clients[i].post("asample", asked(samplers[i], n, params={"seed": 10 * step + n}))
                for n in range(3)
            ]
            for i in which
        }
        for i in which:
            for each in asked_for[i]:
                response = parse("SampleResponse", clients[i].result(each))
                drawn[i] += map(sampled, response.sequences)
    return found, drawn


def test_two_clients_at_once_get_what_each_gets_alone(server):
    clients = [Trainer(server.http_port, rank) for _, rank, _ in CLIENTS]
    trained, drawn = steps(clients, (0, 1))
    finish(*clients)
    programs = [server.actor.accumulate_program, server.actor.apply_program]
    compiled = [program._cache_size() for program in programs]
    assert compiled == [1, 1]
    for i, (_, rank, _) in enumerate(CLIENTS):
        client = Trainer(server.http_port, rank)
        trained_alone, drawn_alone = steps({i: client}, (i,))
        # To the bit; the sampler's cache has another size beside others.
        assert trained_alone[i] == trained[i]
        for (tokens, logprobs), (here, there) in zip(drawn[i], drawn_alone[i], strict=True):
            assert tokens == here
            np.testing.assert_allclose(logprobs, there, atol=1e-6)
        finish(client)
    assert [program._cache_size() for program in programs] == compiled
    assert [tokens for tokens, _ in drawn[0]] != [tokens for tokens, _ in drawn[1]]


def test_files_are_those_of_peft(server, folder):
    """Read as any PEFT directory, the saved adapter has the log-probabilities of the client's last pass."""
    client = Trainer(server.http_port, rank=2)
    assert client.post("get_info", {"model_id": client.model_id})["lora_rank"] == 2
    client.train(DATA)
    client.step()
    client.call("save_weights_for_sampler", path="final")
    client.call("save_weights", path="state")
    expected, _ = client.train(DATA[:1], forward_only=True)
    run = folder / "saved" / client.model_id.replace(":", "-")
    config = json.loads((run / "sampler_weights/final/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 32)
    for place in ("sampler_weights/final", "weights/state"):
        tensors = safetensors.numpy.load_file(run / place / "adapter_model.safetensors")
        name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
        assert tensors[name].shape == (2, 32) and len(tensors) == 2 * 7 * 2
    padding = {"num_tokens": server.actor.model.num_tokens}
    base = dataclasses.replace(read_config(folder / "tiny"), **padding)
    model = lora.with_adapters(base, read_adapter_config(run / "weights/state"))
    graph, shapes, _ = decoder_graph(model)
    where = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes)
    params = load_params(folder / "tiny", base, lora.split(where)[1])
    adapters = load_adapter(run / "weights/state", model, where)
    tokens, inputs = DATA[0]
    logprobs = np.array(next_logprobs(nnx.merge(graph, lora.join(adapters, params)), tokens))
    of_targets = np.take_along_axis(logprobs, inputs["target_tokens"][:, None], axis=1)[:, 0]
    assert_close(expected[0], of_targets, scale=1)
    # A model that goes on with it has its rank.
    path = f"tinker://{client.model_id}/weights/state"
    load = {"session_id": client.session_id, "model_seq_id": 1, "path": path, "optimizer": True}
    client.go_on(client.future("load_weights", load))
    info = client.post("get_info", {"model_id": client.model_id})
    assert (info["lora_rank"], info["is_lora"]) == (2, True)
    # Loading drops what has added up.
    client.train(DATA)
    client.call("load_weights", path=path, optimizer=False)
    assert "no gradient" in client.step()["error"]
    again, _ = client.train(DATA[:1], forward_only=True)
    assert again[0].tobytes() == expected[0].tobytes()
    finish(client)


def test_parts_that_are_not_to_be_trained_stay(server, folder):
    client = Trainer(server.http_port, train_mlp=False, seed=5)
    client.train(DATA)
    assert client.step()["metrics"]["grad_norm:mean"] > 0
    client.call("save_weights_for_sampler", path="part")
    run = folder / "saved" / client.model_id.replace(":", "-")
    tensors = safetensors.numpy.load_file(run / "sampler_weights/part/adapter_model.safetensors")
    changed = {name.split(".")[5] for name, x in tensors.items() if np.abs(x).max()}
    assert changed == {"self_attn"}
    finish(client)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rank": 5}, "ranks from 1 to 4"),
        ({"rank": 0}, "--full"),
        ({"rank": "4"}, "'4'"),
        ({"rank": True}, "True"),
        ({"seed": 1.5}, "lora_config.seed is 1.5: "),
        ({"train_mlp": False, "train_attn": False}, "nothing to train"),
        ([4], "lora_config is [4]: "),
    ],
)
def test_adapters_that_cannot_be_are_refused(server, config, says):
    client = Client(server.http_port)
    client.session_id = client.post("create_session", {})["session_id"]
    body = {"session_id": client.session_id, "model_seq_id": 0, "lora_config": config}
    refused = client.future("create_model", {**body, "base_model": "Qwen/Qwen3-8B"})
    assert refused["category"] == "user" and says in refused["error"]
    finish(client)


def test_an_adapter_comes_again_from_its_file_to_a_place_that_no_call_uses():
    """Three places: the base model and two."""
    base, a, b, c = (SamplerWeights(path=name) for name in ("base", "a", "b", "c"))
    there, loads = ["base", "", ""], []

    def bring(at, weights):
        there[at] = weights.path
        loads.append(weights.path)

    places = Places(3, base, bring)

    def value(number):
        return there[places.at(number)]

    assert places.take(base) == 0 and value(0) == "base"
    first, second = places.take(a), places.take(b)
    assert (value(first), value(second)) == ("a", "b") and places.take(a) == first
    # Both are in use.
    assert places.take(c) is None
    places.leave(second)
    third = places.take(c)
    assert third % 3 == second % 3 and third not in (first, second)
    assert (value(first), value(third)) == ("a", "c")
    places.leave(third)
    again = places.take(b)
    assert value(again) == "b" and len({first, second, third, again}) == 4
    assert loads == ["a", "b", "c", "b"]


def test_whole_weights_have_one_place_and_wait_for_it():
    loads = []
    base, a = SamplerWeights(path="base"), SamplerWeights(path="a")
    places = Places(1, base, lambda at, weights: loads.append((at, weights.path)))
    first = places.take(a)
    assert places.take(a) == first and places.take(base) is None
    places.leave(first)
    assert places.take(base) is None
    places.leave(first)
    assert places.take(base) != first and loads == [(0, "a"), (0, "base")]


def test_samplers_in_flight_go_on_with_the_newest_save(server):
    client = Trainer(server.http_port)
    seeded = {"params": {"seed": 5}}

    first = client.snapshot("inflight")
    before = client.sample(first, 0, **seeded)
    client.train(DATA)
    client.step(0.1)
    snapshot = client.snapshot()
    assert client.sample(first, 1, **seeded) == before
    second = client.snapshot("inflight")
    after = client.sample(snapshot, 0, **seeded)
    assert client.sample(first, 2, **seeded) == client.sample(second, 0, **seeded) == after
    assert after != before
    finish(client)


def test_newer_weights_that_find_no_memory_end_the_samples_that_wait_for_them(server, monkeypatch):
    devices, client, held = server.together.devices, Trainer(server.http_port), threading.Event()
    sampler = client.snapshot("inflight")
    other = Trainer(server.http_port)
    others = other.snapshot()
    before = other.sample(others, params={"seed": 5})
    turn = devices.turn

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(devices, "turn", lambda: held.wait(60) and turn())
    monkeypatch.setattr(devices, "bring", full)
    waiting = client.post("asample", asked(sampler, 0))
    beside = other.post("asample", asked(others, 1, params={"seed": 5}))
    client.train(DATA)
    client.step(0.1)
    client.snapshot("inflight")
    held.set()
    failed = client.result(waiting)
    assert failed["category"] == "server" and "RESOURCE_EXHAUSTED" in failed["error"]
    assert parse("SampleResponse", other.result(beside)) == before
    # As long as there is no memory each call says so; then the newest weights answer.
    assert "RESOURCE_EXHAUSTED" in client.sample(sampler, 1)["error"]
    monkeypatch.undo()
    seeded = {"params": {"seed": 5}}
    assert client.sample(sampler, 2, **seeded) == client.sample(client.snapshot(), **seeded)
    finish(client, other)


@pytest.mark.long
def test_two_clients_go_on_after_a_restart(folder):
    """One of them twice replaced its model, and one snapshot is of a model that is gone."""
    config = config_of(folder, folder=str(folder / "again"), checkpoint_steps=2)
    seeded = {"params": {"seed": 5}}

    def seen(clients, samplers, seq_id):
        passes = [c.train(DATA, forward_only=True) for c in clients]
        drawn = [clients[0].sample(s, seq_id + i, **seeded) for i, s in enumerate(samplers)]
        return [([x.tobytes() for x in found], sums) for found, sums in passes], drawn

    with running(config) as server:
        clients = [Trainer(server.http_port, rank) for rank in (4, 2)]
        for step in range(5):
            for i, client in enumerate(clients[: 1 if step > 2 else 2]):
                client.train(CLIENTS[i][0])
                client.step()
        samplers = [clients[1].snapshot()]
        # A third model takes the place of the first one of its session.
        other = {**clients[1].of_base(), "lora_config": {"rank": 3}, "model_seq_id": 1}
        clients[1].go_on(clients[1].future("create_model", other))
        clients[1].train(DATA)
        clients[1].step()
        samplers.append(clients[0].snapshot())
        for _ in range(2):
            clients[0].samplers = 1
            last = clients[0].snapshot("inflight")
        samplers.append(last)
        clients[1].train(DATA)
        before = seen(clients, samplers, 0)
    for restart in (1, 2):
        with running(config) as server:
            for client in clients:
                client.port = server.http_port
            assert seen(clients, samplers, 10 * restart) == before
            gone = f"{clients[1].session_id}:train:0"
            assert clients[1].send("get_info", {"model_id": gone})[0] == 410
    with running(config) as server:
        for client in clients:
            client.port = server.http_port
        # What had added up before the restarts is applied.
        assert clients[1].step()["metrics"]["grad_norm:mean"] > 0
        assert "no gradient" in clients[0].step()["error"]


def test_a_dry_run_tells_the_memory_of_a_server(folder, capsys):
    """By hand, for two models in training and three places of samplers."""
    config = config_of(folder, dry_run=True, folder=str(folder / "none"))
    parts = devices_of(config).memory()
    # Rank 4 in two layers: (in + out) of q, k, v, o, and of gate, up, down.
    adapter = 4 * 2 * (32 + 24 + 24 + 32 + 3 * 48)
    # Weights, two moments and gradients in float32; two counters.
    assert parts.pop("2 adapters in training") == 2 * (4 * 4 * adapter + 2 * 4)
    assert parts.pop("3 places of adapters") == 2 * 3 * 4 * adapter
    tensors = safetensors.numpy.load_file(folder / "tiny/model.safetensors").values()
    assert parts.pop("base model") == 4 * sum(x.size for x in tensors)
    cache, temporaries = parts
    assert cache == "cache of 8 samples of 32 tokens" and "4 x 1 x 32 tokens" in temporaries
    # Keys and values of 8 slots, 2 layers, 1 head of 8.
    assert parts[cache] > 2 * 8 * 32 * 2 * 8 * 4 and parts[temporaries] > 0
    flags = ["--model", str(folder / "tiny"), "--dry_run", "--train_tokens", "32"]
    assert main(["jaxrl serve", *flags]) == 0
    assert "they fit" in capsys.readouterr().out


def test_on_a_gpu_the_engine_leaves_room_for_the_layers_of_samples(folder, monkeypatch):
    """Training reads the stack, samples a list of the same layers."""
    build, others = tinker_devices.build_engine, []

    def building(*given, other_bytes, **options):
        others.append(other_bytes)
        return build(*given, other_bytes=other_bytes, **options)

    monkeypatch.setattr(tinker_devices, "build_engine", building)
    devices_of(config_of(folder, dry_run=True, folder=str(folder / "none")))
    monkeypatch.setattr(tinker_devices, "lists_layers", lambda mesh: True)
    devices_of(config_of(folder, dry_run=True, folder=str(folder / "none")))
    tensors = safetensors.numpy.load_file(folder / "tiny/model.safetensors").values()
    assert others[1] - others[0] == 4 * sum(x.size for x in tensors)


def test_what_cannot_be_written_is_told_to_every_process(folder, tmp_path):
    """By a UserError, which those that follow get too."""
    devices = devices_of(config_of(folder))
    devices.load_base()
    devices.start("model", LoraConfig(rank=4, targets=("q", "up")), seed=0)
    # Compiled programs are files, too.
    devices.export("model", tmp_path / "before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(UserError, match=r"out could not be written .*File too large"):
            devices.export("model", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == [tmp_path / "before"]


def test_adapters_that_cannot_be_saved_are_refused_at_the_start(tmp_path):
    """Of Qwen3.5: its queries, and what its delta layers read, are parts of tensors."""
    norms = {"qkv_bias": False, "qk_norm": True, "gated_attention": True}
    delta = {"layer_pattern": ("delta", "full"), "delta_key_heads": 1, "delta_value_heads": 2}
    folder = write_model(tmp_path, **norms, **delta, zero_centered_norms=True)
    with pytest.raises(UserError, match=r"adapters of .* cannot be saved: .*; set --full"):
        running(config_of(folder)).__enter__()
