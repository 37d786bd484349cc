"""Bodies as recorded with tinker 0.38 and its cookbook, over a socket, and bodies that are wrong."""

import itertools

import numpy as np
import pytest
from closeness import assert_close
from recorded import (
    DATA,
    PROMPT,
    PROTOBUF,
    Client,
    Trainer,
    asked,
    config_of,
    decoded,
    finish,
    sampled,
    supervised,
)

from jaxrl.errors import UserError
from jaxrl_tinker import app as tinker_app
from jaxrl_tinker import clients as tinker_clients
from jaxrl_tinker.server import running
from jaxrl_tinker.wire import array_of


@pytest.fixture(scope="module", params=["adapters", pytest.param("full", marks=pytest.mark.long)])
def server(folder, request):
    saved = str(folder / request.param)
    with running(config_of(folder, folder=saved, full=request.param == "full")) as server:
        yield server


def test_a_template_that_no_client_would_render_with_is_refused(folder):
    with pytest.raises(UserError, match=r"--chat_template own[.]jinja has no effect with --tinker"):
        config_of(folder, chat_template="own.jinja")


def places_of(server) -> int:
    return 2 if server.actor.frozen else 1


@pytest.fixture
def trainer(server):
    trainer = Trainer(server.http_port)
    yield trainer
    finish(trainer)


def test_the_first_calls_of_every_client(server):
    client = Client(server.http_port)
    for route in ("client/config", "client/dynamic_config"):
        assert client.post(route, {"sdk_version": "0.38.0"}) == {}
    _, found = client.send("get_server_capabilities", None, method="GET")
    assert found["supported_models"][0]["model_name"] == "Qwen/Qwen3-8B"
    assert client.post("telemetry", {"events": []})["status"] == "accepted"
    trainer = Trainer(server.http_port)
    beat = {"session_id": trainer.session_id, "type": "session_heartbeat"}
    assert client.post("session_heartbeat", beat)["type"] == "session_heartbeat"
    info = client.post("get_info", {"model_id": trainer.model_id, "type": "get_info"})
    assert info["model_data"]["model_name"] == "Qwen/Qwen3-8B"
    finish(trainer)
    assert client.send("session_heartbeat", beat)[0] == 410


def test_steps_of_sl_loop_lower_the_loss_and_chunks_come_in_any_order(trainer, server):
    losses = []
    for _ in range(3):
        _, metrics = trainer.train(DATA)
        losses.append(metrics["loss:sum"])
        assert trainer.step()["metrics"]["grad_norm:mean"] > 0
    assert losses[0] > losses[1] > losses[2]
    # The second chunk and the step arrive before the first chunk; all gradients are applied.
    first, second, step = (trainer.next() for _ in range(3))
    later = trainer.post("forward_backward", trainer.batch(DATA[:1], seq_id=second), kind=PROTOBUF)
    body = {"model_id": trainer.model_id, "seq_id": step, "adam_params": {"learning_rate": 0.0}}
    applied = trainer.post("optim_step", body)
    body = trainer.batch(DATA, seq_id=first)
    earlier = trainer.post("forward_backward", body, kind=PROTOBUF)
    # A submission whose answer was lost is sent again, and its result fetched again.
    assert trainer.post("forward_backward", body, kind=PROTOBUF) == earlier
    assert trainer.result(earlier) == trainer.result(earlier)
    both = trainer.result(applied)["metrics"]["grad_norm:mean"]
    (of_first, *_), _ = decoded(trainer.result(earlier))
    (of_second,), _ = decoded(trainer.result(later))
    assert_close(of_second, of_first, scale=1)
    trainer.train([*DATA, DATA[0]])
    assert_close(trainer.step(0.0)["metrics"]["grad_norm:mean"], both)
    # Nothing more is compiled for other lengths, of more than a batch holds.
    compiled = server.actor.accumulate_program._cache_size()
    found, _ = trainer.train([supervised(range(40, 42 + i)) for i in range(31)])
    assert [len(x) for x in found] == list(range(1, 32))
    assert server.actor.accumulate_program._cache_size() == compiled


def test_a_step_of_rl_loop(trainer):
    sampler = trainer.snapshot()
    response = trainer.sample(sampler)
    data = []
    for sequence in response.sequences:
        tokens, logprobs = sampled(sequence)
        assert len(tokens) == 6 and sequence.stop_reason == 1
        full, zeros = np.array([*PROMPT, *tokens]), np.zeros(len(PROMPT) - 1, np.float32)
        advantages = np.full(len(tokens), 0.5 if data else -0.5, np.float32)
        inputs = {
            "target_tokens": np.concatenate([zeros.astype(np.int64), tokens]),
            "logprobs": np.concatenate([zeros, logprobs]),
            "advantages": np.concatenate([zeros, advantages]),
        }
        data.append((full[:-1], inputs))
    for loss in ("importance_sampling", "ppo"):
        found, metrics = trainer.train(data, loss)
        for logprobs, (_, inputs) in zip(found, data, strict=True):
            # Trainer and sampler agree where the policy is still the sampler's.
            assert_close(logprobs[2:], inputs["logprobs"][2:], scale=1)
        # Every ratio is 1, so the loss is minus the sum of the advantages.
        assert_close(metrics["loss:sum"], 0.0, scale=1)
    trainer.step()
    # The sampler is a snapshot: the same seed draws the same tokens as before the step.
    seeded = {"params": {"seed": 3}}
    before = trainer.sample(sampler, seq_id=1, **seeded)
    after = trainer.sample(trainer.snapshot(), seq_id=0, **seeded)
    again = trainer.sample(sampler, seq_id=2, **seeded)
    assert before == again
    old, new = (sampled(x.sequences[0])[1] for x in (before, after))
    assert np.abs(old[:1] - new[:1]).max() > 1e-4


def test_log_probabilities_are_at_temperature_one_and_cover_the_prompt(trainer):
    sampler = trainer.snapshot()
    prompt = [*PROMPT, 11, 12]
    asked = np.array([[1, -1], [2, 3], [-1, -1], [4, 5]])
    target = {"data": asked.flatten().tolist(), "dtype": "int64", "shape": [4, 2]}
    response = trainer.sample(
        sampler,
        prompt=prompt,
        params={"temperature": 0.5},
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=target,
        prompt_alt_tokens_k=3,
    )
    tokens, logprobs = sampled(response.sequences[0])
    (found,), _ = trainer.train([supervised([*prompt, *tokens])], forward_only=True)
    assert_close(logprobs, found[4:], scale=1)
    of_prompt = np.frombuffer(response.prompt_logprobs, "<f4")
    assert np.isnan(of_prompt[0])
    assert_close(of_prompt[1:], found[:4], scale=1)
    top = response.topk_prompt_logprobs
    assert (top.k, top.length) == (2, 5)
    best = np.frombuffer(top.logprobs, "<f4").reshape(5, 2)
    assert (best[0] == -99999).all() and (best[1:, 0] >= of_prompt[1:] - 1e-6).all()
    of_sample = response.sequences[0].topk_sampled_logprobs
    assert (of_sample.k, of_sample.length) == (3, 6)
    targets = array_of(response.target_prompt_logprobs, "targets")
    assert np.isnan(targets[asked < 0]).all()
    rows = np.array([(i, j) for i, j in np.argwhere(asked >= 0)])
    tokens_K = np.where(asked < 0, 0, asked)
    inputs = {"target_tokens": tokens_K, "weights": np.ones((4, 2), np.float32)}
    (of_k,), _ = trainer.train([(np.array(prompt[:-1]), inputs)], forward_only=True)
    of_k = of_k.reshape(4, 2)
    assert_close(targets[tuple(rows.T)], of_k[tuple(rows.T)], scale=1)
    drawn = array_of(response.prompt_alt_tokens.tokens, "drawn")
    of_drawn = array_of(response.prompt_alt_tokens.logprobs, "drawn")
    assert drawn.shape == (4, 3) and len(np.unique(drawn)) > 3
    inputs = {"target_tokens": drawn, "weights": np.ones((4, 3), np.float32)}
    (of_k,), _ = trainer.train([(np.array(prompt[:-1]), inputs)], forward_only=True)
    assert_close(of_drawn, of_k.reshape(4, 3), scale=1)
    # Only the last two, as the SDK insists.
    two = {"prompt_logprobs": True, "prompt_logprobs_last_n": 2}
    last = trainer.sample(sampler, seq_id=1, prompt=prompt, num_samples=1, **two)
    last = np.frombuffer(last.prompt_logprobs, "<f4")
    assert np.isnan(last[:3]).all()
    assert_close(last[3:], of_prompt[3:], scale=1)


def test_stops_end_samples_and_stay_in_them(trainer):
    sampler = trainer.snapshot()
    free, _ = sampled(trainer.sample(sampler, params={"seed": 1}).sequences[0])
    cut = trainer.sample(sampler, seq_id=1, params={"seed": 1, "stop": [free[2], 999_999]})
    tokens, _ = sampled(cut.sequences[0])
    assert tokens == free[: free.index(free[2]) + 1] and cut.sequences[0].stop_reason == 0
    # As are special tokens by their names, here 0 and 1: no text has them.
    many = {"num_samples": 400, "params": {"seed": 1, "stop": []}}
    samples = [sampled(s)[0] for s in trainer.sample(sampler, 4, **many).sequences]
    many["params"] |= {"stop": ["never", "<pad>", "<eos>"]}
    ended = trainer.sample(sampler, 5, **many).sequences
    at = [next((i + 1 for i, t in enumerate(x) if t < 2), 6) for x in samples]
    assert [sampled(s)[0] for s in ended] == [x[:n] for x, n in zip(samples, at, strict=True)]
    assert [s.stop_reason for s in ended] == [int(min(x) > 1) for x in samples]
    assert min(at) < 6
    params = {"temperature": 0.0}
    greedy = [trainer.sample(sampler, 2 + i, num_samples=1, params=params) for i in range(2)]
    assert greedy[0].sequences[0].tokens == greedy[1].sequences[0].tokens


def test_weights_are_saved_and_loaded_with_the_optimizer_and_sampled_from_by_name(trainer):
    trainer.train(DATA)
    trainer.step()
    saved = trainer.call("save_weights", path="000001", ttl_seconds=604800, overwrite=False)["path"]
    assert saved == f"tinker://{trainer.model_id}/weights/000001"
    again = trainer.call("save_weights", path="000001", overwrite=False)
    assert again["category"] == "user" and "overwrite" in again["error"]
    trainer.train(DATA)
    trainer.step()
    after, _ = trainer.train(DATA, forward_only=True)
    named = trainer.call("save_weights_for_sampler", path="final")["path"]
    # Loading creates the session's next model, whose id the client computes.
    load = {"session_id": trainer.session_id, "model_seq_id": 1, "path": saved, "optimizer": True}
    trainer.go_on(trainer.future("load_weights", load))
    assert trainer.model_id == f"{trainer.session_id}:train:1"
    trainer.train(DATA)
    trainer.step()
    resumed, _ = trainer.train(DATA, forward_only=True)
    for x, y in zip(resumed, after, strict=True):
        np.testing.assert_array_equal(x, y)
    body = {"session_id": trainer.session_id, "sampling_session_seq_id": 7, "model_path": named}
    sampler = trainer.post("create_sampling_session", body)["sampling_session_id"]
    _, found = trainer.send(f"samplers/{sampler}", None, method="GET")
    assert found == {"sampler_id": sampler, "base_model": "Qwen/Qwen3-8B", "model_path": named}
    scored = trainer.sample(
        sampler, prompt=[*DATA[0][0].tolist(), 7], num_samples=1, prompt_logprobs=True
    )
    of_prompt = np.frombuffer(scored.prompt_logprobs, "<f4")[1:]
    assert_close(of_prompt, after[0], scale=1)
    # One long poll serves a session's samples.
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    polled = trainer.post("retrieve_futures", {"target": target, "prev_cursor": 0})
    assert polled["cursor"] == 1 and polled["completions"][0]["state"] == "finished"


def test_calls_without_a_gradient_are_refused_and_a_second_client_waits(
    trainer, server, monkeypatch
):
    assert "no gradient" in trainer.step()["error"]
    body = trainer.batch(DATA, "stable_reinforce")
    failed = trainer.future("forward_backward", body, kind=PROTOBUF)
    assert failed["category"] == "user" and "importance_sampling" in failed["error"]
    failed = trainer.call("optim_step", adam_params={"learning_rate": -1})
    assert failed["category"] == "user" and "adam_params.learning_rate is -1: " in failed["error"]
    failed = trainer.call("optim_step", optimizer_params={"type": "dimuon"})
    assert failed["category"] == "user"
    # A number that was used with another body.
    stale = {"model_id": trainer.model_id, "seq_id": 1, "adam_params": {}}
    status, answer = trainer.send("optim_step", stale)
    assert status == 400 and "another body" in answer["error"]
    # All that was wrong has had its turn.
    trainer.train(DATA)
    assert "metrics" in trainer.step(0.0)
    # Another session may not take a place while those that have them are heard of.
    others = [Trainer(server.http_port) for _ in range(places_of(server) - 1)]
    other = Client(server.http_port)
    session = other.post("create_session", {"tags": []})["session_id"]
    create = {"session_id": session, "model_seq_id": 1, "base_model": "Other/Model"}
    assert "this server has" in other.future("create_model", create)["error"]
    create |= {"model_seq_id": 0, "base_model": "Qwen/Qwen3-8B"}
    waiting = other.post("create_model", create)
    monkeypatch.setattr(tinker_app, "_HOLD_S", 0.05)
    status, answer = other.send("retrieve_future", waiting)
    assert (status, answer["queue_state"]) == (408, "paused_capacity")
    assert "places for models are taken" in answer["queue_state_reason"]
    finish(trainer)
    monkeypatch.undo()
    assert other.result(waiting)["model_id"] == f"{session}:train:0"
    other.session_id = session
    finish(other, *others)


NOWHERE = {"model_id": "s1:train:0", "seq_id": 1}


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("retrieve_future", {"request_id": "sample-99"}, 410),
        ("session_heartbeat", {"session_id": "s1"}, 410),
        ("optim_step", NOWHERE, 410),
        ("get_info", {"model_id": ["x"]}, 410),
        ("asample", {"sampling_session_id": "s1:sample:0", "seq_id": 0}, 410),
        ("create_model", {"session_id": None}, 410),
        ("create_sampling_session", {}, 410),
        ("retrieve_futures", {}, 400),
        ("asample", {"prompt": {}}, 400),
        ("create_session", b"{", 400),
        ("create_session", b"[" * 50_000, 400),
        ("create_session", b"[]", 400),
        ("forward_backward", b"\x0a\xff", 400),
        ("create_session", b" " * 100_001, 413),
        ("forward_backward", b"\x0a" * 100_001, 413),
        ("copy_weights", {}, 404),
    ],
)
def test_what_is_no_submission_is_refused_with_a_status(server, route, body, status):
    found, answer = Client(server.http_port).send(route, body)
    assert (found, answer["category"]) == (status, "user")
    assert answer["error"]


def test_samples_that_cannot_be_drawn_say_why(trainer):
    sampler = trainer.snapshot()
    wrong = [
        ({"prompt": [5] * 25}, "shorten"),
        ({"prompt": []}, "empty"),
        ({"prompt": [10**9]}, "no ids"),
        ({"params": {"max_tokens": 99}}, "has room for"),
        ({"params": {"temperature": -1}}, "sampling_params.temperature is -1: "),
        ({"params": {"top_p": 0}}, "top_p"),
        ({"params": {"stop": [""]}}, "sampling_params.stop.0 is '': "),
        ({"params": {"stop": "x<eos>"}}, "use '<eos>' alone"),
        ({"prompt_alt_tokens_k": 101}, "prompt_alt_tokens_k"),
        ({"record_stability_info": True}, "importance_sampling"),
        ({"target_prompt_logprobs": {"data": [1], "shape": [1, 1]}}, "one row per token"),
        ({"prompt_logprobs_last_n": 1}, "needs prompt_logprobs"),
    ]
    for i, (fields, says) in enumerate(wrong):
        answer = trainer.sample(sampler, seq_id=i, **fields)
        assert answer["category"] == "user" and says in answer["error"], (fields, answer)
    kind = trainer.call("save_weights_for_sampler", sampling_session_seq_id=9, kind="other")
    assert "snapshot" in kind["error"]


def test_a_session_that_is_not_heard_of_loses_its_model(server, monkeypatch):
    silent = Trainer(server.http_port)
    later = tinker_clients.monotonic() + 1000
    monkeypatch.setattr(tinker_clients, "monotonic", lambda: later)
    others = [Trainer(server.http_port) for _ in range(places_of(server))]
    status, answer = silent.send("get_info", {"model_id": silent.model_id})
    assert status == 410 and "another model has its place" in answer["error"]
    finish(*others)


def test_a_pending_result_is_asked_for_again(trainer, monkeypatch):
    monkeypatch.setattr(tinker_app, "_HOLD_S", 0.05)
    waiting = trainer.post("optim_step", NOWHERE | {"model_id": trainer.model_id, "seq_id": 2})
    status, answer = trainer.send("retrieve_future", waiting)
    assert (status, answer["type"]) == (408, "try_again")


def test_only_the_newest_snapshots_are_kept(trainer):
    body = {**trainer.of_base(), "sampling_session_seq_id": 99}
    base = trainer.post("create_sampling_session", body)
    first, *_, last = [trainer.snapshot() for _ in range(5)]
    body = {"sampling_session_id": first, "seq_id": 0, "num_samples": 1}
    status, answer = trainer.send("asample", body)
    assert status == 400 and "by name" in answer["error"]
    assert trainer.sample(last).sequences
    assert trainer.sample(base["sampling_session_id"]).sequences


def steps_on(folder, /, **changes):
    """(losses of two steps while samples are drawn, tokens and log-probabilities of a sample after them)."""
    with running(config_of(folder, **changes)) as server:
        trainer = Trainer(server.http_port)
        sampler = trainer.snapshot()
        losses = []
        for step in range(2):
            body = trainer.batch(DATA)
            # Both are under way at the same time, and the devices are the same.
            samples = [trainer.post("asample", asked(sampler, 10 * step + i)) for i in range(3)]
            trained = trainer.post("forward_backward", body, kind=PROTOBUF)
            losses.append(decoded(trainer.result(trained))[1]["loss:sum"])
            assert all(isinstance(trainer.result(each), bytes) for each in samples)
            trainer.step()
        response = trainer.sample(trainer.snapshot(), params={"seed": 1})
        return losses, [sampled(sequence) for sequence in response.sequences]


@pytest.mark.long
@pytest.mark.parametrize("full", [False, True])
def test_eight_devices_train_and_sample_the_same(folder, full):
    alone = steps_on(folder, folder=str(folder / f"alone-{full}"), full=full)
    changes = {"mesh": "1-2-4", "prefill_prompts": 4, "folder": str(folder / f"spread-{full}")}
    spread = steps_on(folder, full=full, **changes)
    assert [tokens for tokens, _ in spread[1]] == [tokens for tokens, _ in alone[1]]
    assert_close([x for _, x in spread[1]], [x for _, x in alone[1]], scale=1)
    assert_close(spread[0], alone[0], scale=1)


ODD = (None, [], {}, "x", -1, 10**30, 1e308, True, [[1]], {"type": 1})


def odd_bodies(body):
    """The body with each of its values, and of those inside its objects, replaced by odd ones."""
    for key, value in body.items():
        yield from ({**body, key: odd} for odd in ODD)
        if isinstance(value, dict):
            yield from ({**body, key: inside} for inside in odd_bodies(value))


@pytest.mark.long
def test_odd_values_are_the_clients_mistake_and_never_the_servers(trainer):
    adam = {"learning_rate": 0.0, "beta1": 0.9, "eps": 1e-8}
    saving = {"sampling_session_seq_id": 0, "kind": "snapshot", "path": None}
    of_model = [
        ("optim_step", {"adam_params": adam, "optimizer_params": None}),
        ("save_weights_for_sampler", saving),
        ("load_weights", {"path": "tinker://r/weights/n", "optimizer": False}),
        ("save_weights", {"path": "../x", "overwrite": False}),
    ]
    sampler = trainer.snapshot()
    session = {"session_id": trainer.session_id}
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    adamw = {"optimizer_config": {"type": "adamw"}}
    further = {"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}}
    others = [
        ("asample", {**asked(sampler, 10**6), **further}),
        ("retrieve_futures", {"target": target, "prev_cursor": 0, "timeout": 0.0}),
        ("create_sampling_session", {**session, "sampling_session_seq_id": 50, "model_path": "x"}),
        ("get_info", {"model_id": trainer.model_id}),
        ("session_heartbeat", session),
        ("retrieve_future", {"request_id": "x"}),
        ("cancel_future", {"request_id": "x"}),
        ("create_model", {**trainer.of_base(), "model_seq_id": 90, **adamw}),
    ]
    seq_id = itertools.count(2 * 10**6)
    for route, body in [*of_model, *others]:
        for odd in odd_bodies(body):
            if (route, body) in of_model:
                odd |= {"model_id": trainer.model_id, "seq_id": trainer.next()}
            elif route == "create_model" and odd["model_seq_id"] == body["model_seq_id"]:
                odd["model_seq_id"] = next(seq_id)
            elif route == "asample" and odd["seq_id"] == body["seq_id"]:
                odd["seq_id"] = next(seq_id)
            status, answer = trainer.send(route, odd)
            assert status < 500, (route, odd, answer)
            if status == 200 and "request_id" in answer:
                found = trainer.result(answer)
                assert isinstance(found, bytes) or found.get("category") != "server", (odd, found)


@pytest.mark.long
def test_flipped_bytes_of_a_batch_are_no_mistake_of_the_server(trainer):
    rng = np.random.default_rng(0)
    for _ in range(300):
        body = bytearray(trainer.batch(DATA[:2], forward_only=bool(rng.integers(2))))
        for _ in range(rng.integers(1, 4)):
            body[rng.integers(len(body))] = rng.integers(256)
        if rng.integers(4) == 0:
            del body[rng.integers(len(body)) :]
        status, answer = trainer.send("forward_backward", bytes(body), kind=PROTOBUF)
        assert status < 500, answer
        if status == 200:
            found = trainer.result(answer) if answer else None
            assert isinstance(found, bytes) or found.get("category") == "user", found
        else:
            # The number was not used, and those behind would wait for it.
            trainer.seq_id -= 1
