"""A server that ends at any moment, and one that goes on in its folder: clients notice nothing."""

import time

import numpy as np
import pytest
from recorded import (
    DATA,
    PROTOBUF,
    Client,
    Patient,
    Server,
    Trainer,
    asked,
    config_of,
    decoded,
    supervised,
)

from jaxrl_tinker.server import running


@pytest.mark.long
@pytest.mark.parametrize("full", [False, True])
def test_a_client_goes_on_with_the_server_after(folder, full):
    saved = folder / f"saved-{full}"
    config = config_of(folder, checkpoint_steps=2, full=full, folder=str(saved))
    with running(config) as server:
        trainer = Trainer(server.http_port)
        for step in range(3):
            trainer.train(DATA)
            trainer.step()
            if step == 1:
                sampler = trainer.snapshot()
        drawn = trainer.post("asample", asked(sampler, 0))
        tokens = trainer.result(drawn)
        named = trainer.call("save_weights_for_sampler", path="named")["path"]
        before = trainer.train(DATA, forward_only=True)
        trainer.train(DATA)
        # A step that waits for the batch before it.
        batch = trainer.batch(DATA)
        step = {"model_id": trainer.model_id, "seq_id": trainer.next(), "adam_params": {}}
        waiting = trainer.post("optim_step", step)
        other = Client(server.http_port)
        over = other.post("create_session", {})["session_id"]
        other.post(f"sessions/{over}/finish", {})
    with running(config) as server:
        trainer.port = server.http_port
        # Results are there, and calls whose answers were lost get the same ones.
        assert trainer.result(drawn) == tokens
        assert trainer.post("asample", asked(sampler, 0)) == drawn
        assert trainer.post("optim_step", step) == waiting
        # The sampler of a snapshot draws what it drew; the same request under another number.
        seeded = {"params": {"seed": 5}}
        first = trainer.sample(sampler, 1, **seeded)
        trained = trainer.future("forward_backward", batch, kind=PROTOBUF)
        # The model is what it was, and the step applies both batches.
        for logprobs, earlier in zip(decoded(trained)[0], before[0], strict=True):
            np.testing.assert_array_equal(logprobs, earlier)
        norm = trainer.result(waiting)
        assert norm["metrics"]["grad_norm:mean"] > 0
        assert trainer.send("session_heartbeat", {"session_id": over})[0] == 410
        assert "exist" in trainer.call("save_weights_for_sampler", path="named")["error"]
        body = {"session_id": trainer.session_id, "sampling_session_seq_id": 9}
        body["model_path"] = named
        by_name = trainer.post("create_sampling_session", body)["sampling_session_id"]
        saving = {"model_id": trainer.model_id, "seq_id": trainer.next(), "path": "again"}
        saving = trainer.post("save_weights", saving)
        path = trainer.result(saving)["path"]
    # As if it was killed when the folder was there and its result was not in the log.
    log = saved / "log.jsonl"
    *lines, result = log.read_text().splitlines(keepends=True)
    assert saving["request_id"] in result and '"kind": "result"' in result
    log.write_text("".join(lines))
    with running(config) as server:
        trainer.port = server.http_port
        assert trainer.sample(sampler, 2, **seeded) == first
        assert trainer.sample(by_name, 0).sequences
        assert trainer.result(saving)["path"] == path
        assert trainer.result(waiting) == norm
        assert trained == trainer.future("forward_backward", batch, kind=PROTOBUF)
    checkpoints = list((saved / "checkpoints").iterdir())
    # One for the snapshot after step 2, one after step 4.
    assert len(checkpoints) == 2


# What is happening to a request when its server is killed, in each of the first steps.
MOMENTS = ("submitted", "computing", "answered", "saving", "sampling")


def run(server: Server, kills: bool):
    """Six steps; with `kills` the server is killed in each of the first five, at another moment."""
    trainer = Patient(server.port)
    found = []

    def kill(submitted, moment, step):
        if not kills or MOMENTS[step : step + 1] != (moment,):
            return
        if moment == "answered":
            while submitted["request_id"] not in server.ids("result"):
                time.sleep(0.01)
        server.kill()
        request_id = submitted["request_id"]
        assert request_id in server.ids("call")
        assert (request_id in server.ids("result")) == (moment == "answered")
        server.start()

    many = [supervised([3 + i % 200, *range(i % 30, i % 30 + 24)]) for i in range(1000)]
    for step in range(6):
        sampler = trainer.snapshot()
        # Without a seed, noise comes from the id of the session, which is another one in each run.
        params = [{"max_tokens": 8, "seed": 10 * step + i} for i in range(4)]
        drawn = [
            trainer.post("asample", asked(sampler, i, num_samples=8, params=each))
            for i, each in enumerate(params)
        ]
        kill(drawn[-1], "sampling", step)
        found += [trainer.result(each) for each in drawn]
        first, second = trainer.next(), trainer.next()
        body = {"model_id": trainer.model_id, "seq_id": second}
        stepped = trainer.post("optim_step", {**body, "adam_params": {"learning_rate": 1e-2}})
        # It waits for the batch before it.
        kill(stepped, "submitted", step)
        body = trainer.batch(many if step == 1 else DATA, seq_id=first)
        batch = trainer.post("forward_backward", body, kind=PROTOBUF)
        kill(batch, "computing", step)
        kill(batch, "answered", step)
        found += [trainer.result(batch), trainer.result(stepped)]
        saving = {"model_id": trainer.model_id, "seq_id": trainer.next(), "path": f"step{step}"}
        saved = trainer.post("save_weights", saving)
        if kills and step == 3:
            while not list(server.saved.glob("*/weights/.step3.part")):
                time.sleep(0.001)
        kill(saved, "saving", step)
        assert trainer.result(saved)["path"].endswith(f"/step{step}")
    path = trainer.call("save_weights_for_sampler", path="final")["path"]
    run_folder = server.saved / trainer.model_id.replace(":", "-")
    assert path.endswith("/final")
    (weights,) = (run_folder / "sampler_weights/final").glob("*.safetensors")
    return found, weights.read_bytes()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("switches", [(), ("--full",)])
def test_a_server_killed_at_five_moments_gives_the_same_bits(folder, switches):
    runs = []
    for name in ("undisturbed", "killed"):
        server = Server(folder, folder / "".join((name, *switches)), *switches)
        try:
            runs.append(run(server, kills=name == "killed"))
        finally:
            server.kill()
    (expected, weights), (found, killed_weights) = runs
    assert len(found) == len(expected)
    for i, (here, there) in enumerate(zip(found, expected, strict=True)):
        assert here == there, i
    assert killed_weights == weights
