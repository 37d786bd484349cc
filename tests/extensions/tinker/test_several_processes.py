"""Two processes of two devices each are one server: the same numbers as one process of four."""

import signal
import subprocess

import numpy as np
import pytest
from closeness import assert_close
from recorded import DATA, PROTOBUF, Patient, Server, asked, config_of, decoded, finish, sampled

from jaxrl.errors import EXIT_TRY_AGAIN
from jaxrl_tinker.server import running

SPREAD = {"mesh": "1-2-2", "prefill_prompts": 2, "adapters": 2}
SEEDED = {"params": {"seed": 1}}


def used(port, saved):
    """A client that trains, samples, saves and loads, and does much that is wrong between.

    Returns:
      (tokens, and numbers: losses, norms and log-probabilities).
    """
    client = Patient(port, rank=2, seed=3)
    tokens, numbers = [], []

    def draw(sampler, seq_id, **fields):
        response = client.sample(sampler, seq_id, **SEEDED | fields)
        for found, logprobs in map(sampled, response.sequences):
            tokens.append(found)
            numbers.extend(logprobs)
        numbers.extend(np.nan_to_num(np.frombuffer(response.prompt_logprobs, "<f4")))

    assert "no gradient" in client.step()["error"]
    flight = client.snapshot("inflight")
    for step in range(2):
        sampler = client.snapshot()
        # All at the same time.
        drawn = [client.post("asample", asked(sampler, i, **SEEDED)) for i in range(3)]
        body = client.batch(DATA)
        trained = client.post("forward_backward", body, kind=PROTOBUF)
        logprobs, metrics = decoded(client.result(trained))
        numbers += [metrics["loss:sum"], *np.concatenate(logprobs)]
        assert all(isinstance(client.result(each), bytes) for each in drawn)
        numbers.append(client.step(0.05)["metrics"]["grad_norm:mean"])
        wrong = client.batch(DATA, "stable_reinforce")
        assert "error" in client.future("forward_backward", wrong, kind=PROTOBUF)
        assert "error" in client.sample(sampler, 9, params={"top_p": 0})
        assert "error" in client.call("load_weights", path="tinker://x/weights/y", optimizer=True)
        draw(flight, 3 * step)
        client.snapshot("inflight")
        draw(flight, 3 * step + 1, prompt_logprobs=True)
        draw(flight, 3 * step + 2, params={"temperature": 0.7, "seed": 2})
    path = client.call("save_weights", path="state")["path"]
    named = client.call("save_weights_for_sampler", path="named")["path"]
    client.train(DATA)
    client.step(0.05)
    client.call("load_weights", path=path, optimizer=True)
    logprobs, _ = client.train(DATA, forward_only=True)
    numbers.extend(np.concatenate(logprobs))
    body = {"session_id": client.session_id, "sampling_session_seq_id": 90, "model_path": named}
    draw(client.post("create_sampling_session", body)["sampling_session_id"], 0)
    (file,) = saved.glob("*/sampler_weights/named/*.safetensors")
    assert file.stat().st_size > 1000
    return client, tokens, numbers


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_are_one_server_and_end_and_go_on_together(folder):
    with running(config_of(folder, folder=str(folder / "one"), **SPREAD)) as server:
        client, tokens, numbers = used(server.http_port, folder / "one")
        finish(client)
    saved = folder / "two"
    two = Server(folder, saved, processes=2, lost_after_s=5, **SPREAD)
    try:
        client, found, values = used(two.port, saved)
        assert found == tokens
        assert_close(values, numbers, scale=1)
        # The other process does not outlive the first one, and both go on.
        sampler = client.snapshot()
        before = client.sample(sampler, 0, **SEEDED)
        client.train(DATA)
        first, second = two.processes
        first.kill()
        _, errors = second.communicate(timeout=60)
        assert second.returncode == EXIT_TRY_AGAIN, errors
        two.kill()
        two.start()
        assert client.sample(sampler, 1, **SEEDED) == before
        assert client.step()["metrics"]["grad_norm:mean"] > 0
        # A signal to the second alone ends nothing, one to the first ends both.
        first, second = two.processes
        second.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(3)
        assert client.sample(sampler, 2, **SEEDED) == before
        first.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in two.processes] == [0, 0]
    finally:
        two.kill()
