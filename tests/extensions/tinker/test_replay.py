"""What a server makes of the log of the one before, without a model."""

import json
import pathlib
import time

import pytest
from recorded import models_alone, result_of

from jaxrl.errors import UserError
from jaxrl_tinker.clients import Clients
from jaxrl_tinker.futures import Futures, Gone
from jaxrl_tinker.log import Log
from jaxrl_tinker.models import TrainedModel
from jaxrl_tinker.replay import replay


class Server:
    """The parts that remember; calls write their bodies down, and fail if these say so."""

    def __init__(self, folder: pathlib.Path, fails: str = "fail", **options):
        self.done = []
        self.fails = fails
        self.log = Log(folder / "log.jsonl")
        self.futures = Futures(self.log.write)
        self.clients = Clients(self.futures, self.log.write, 300.0)
        parts: dict = {"write": self.log.write, "held": self.clients.snapshots}
        self.models = models_alone(self.futures, folder, **parts, **options)
        replay(self.log.records, self.clients, self.futures, self.models, self.handle)

    def handle(self, route: str, content: bytes):
        body = json.loads(content)

        def work(*_):
            self.done.append(body["name"])
            if self.fails in body["name"]:
                raise UserError("failed; mend it")
            return body

        session_id = self.clients.heard(body["session"])
        if route == "create_model":
            model = TrainedModel(f"{session_id}:train:0", session_id)
            start = lambda f: self.models.create(model, f, work, lambda _: True)  # noqa: E731
            request_id = model.model_id
        else:
            model = self.models.model_of(f"{session_id}:train:0")
            start = lambda f: self.models.submit(model, body["seq"], f, work)  # noqa: E731
            request_id = f"{model.model_id}/{body['seq']}"
        return self.futures.submit(route, request_id, content, start, session_id=session_id)

    def call(self, route: str, session: str, name: str, seq: int = 0):
        body = {"session": session, "name": name, "seq": seq}
        return self.handle(route, json.dumps(body).encode())

    def result(self, future, timeout_s=20.0):
        return result_of(self.futures, future, timeout_s)

    def kill(self):
        """Nothing of what it does from now on is in the log."""
        self.log.close()
        self.models.close()


def test_what_was_finished_has_its_result_and_the_rest_is_done(tmp_path):
    first = Server(tmp_path)
    session = first.clients.open()
    over = first.clients.open()
    first.clients.end(over)
    first.result(first.call("create_model", session, "new"))
    first.result(first.call("forward_backward", session, "fb", 1))
    bad = first.call("forward_backward", session, "fail", 2)
    failed = first.result(bad)
    assert "mend it" in failed["error"]
    first.result(first.call("forward", session, "forward", 3))
    first.result(first.call("optim_step", session, "step", 4))
    late = first.call("optim_step", session, "late", 6)
    first.kill()
    assert first.done == ["new", "fb", "fail", "forward", "step"]

    second = Server(tmp_path)
    # Without checkpoints from the beginning, and only what changes the model.
    assert second.done == ["new", "fb", "step"]
    assert second.result(bad) == failed
    assert second.result(late, 0.05) is None
    # A submission whose answer was lost, and the one that was missing.
    assert second.call("optim_step", session, "late", 6).request_id == late.request_id
    second.result(second.call("forward_backward", session, "more", 5))
    assert second.result(late)["name"] == "late"
    assert second.done == ["new", "fb", "step", "more", "late"]
    with pytest.raises(UserError, match="another body"):
        second.call("optim_step", session, "other", 4)
    with pytest.raises(Gone):
        second.clients.heard(over)
    second.kill()

    third = Server(tmp_path)
    assert third.done == second.done
    assert third.result(late)["name"] == "late"
    assert not third.clients.is_silent(session)
    third.kill()


def test_a_call_that_was_at_work_is_done_again(tmp_path):
    first = Server(tmp_path)
    session = first.clients.open()
    first.result(first.call("create_model", session, "new"))
    slow = first.call("forward_backward", session, "slow", 1)
    while first.done != ["new", "slow"]:
        time.sleep(0.001)
    # Its result is lost.
    path = tmp_path / "log.jsonl"
    first.result(slow)
    first.kill()
    path.write_bytes(b"\n".join(path.read_bytes().split(b"\n")[:-2]) + b"\n")
    second = Server(tmp_path)
    assert second.result(slow)["name"] == "slow"
    assert second.done == ["new", "slow"]
    second.kill()


def test_a_call_that_fails_after_the_restart_ends_it(tmp_path):
    first = Server(tmp_path)
    session = first.clients.open()
    first.result(first.call("create_model", session, "new"))
    first.kill()
    with pytest.raises(UserError, match=r"train:0: failed; .* move log.jsonl away"):
        Server(tmp_path, fails="new")
