"""Training calls in the order of their seq_id, and what is refused about their data."""

import functools
import itertools
import pathlib
import threading
import time
from typing import Any

import numpy as np
import pytest
from recorded import models_alone, result_of

from jaxrl.errors import UserError
from jaxrl_tinker.devices import Together
from jaxrl_tinker.futures import Futures, Gone
from jaxrl_tinker.models import TrainedModel
from jaxrl_tinker.wire import MESSAGES, read_data, tensor_of


class Client:
    """Submits work that needs no model, to the thread that would train one."""

    def __init__(self, **options):
        self.futures = Futures()
        self.models = models_alone(self.futures, pathlib.Path(), **options)

    def create(self, number=0, work=lambda: {}, *, may_replace=lambda before: True):
        self.model = model = TrainedModel(f"s:train:{number}", "s")
        start = lambda f: self.models.create(model, f, work, may_replace)  # noqa: E731
        return self.futures.submit("create_model", model.model_id, b"", start, session_id="s")

    def call(self, seq_id, work=lambda: {}):
        model = self.model
        start = lambda f: self.models.submit(model, seq_id, f, work)  # noqa: E731
        request_id = f"{model.model_id}/{seq_id}"
        return self.futures.submit("optim_step", request_id, b"", start, session_id="s")

    def result(self, future, timeout_s=20.0):
        return result_of(self.futures, future, timeout_s)


@pytest.fixture
def client():
    client = Client(gap_timeout_s=0.3)
    yield client
    client.models.close()


def test_calls_run_in_the_order_of_their_numbers_however_they_arrive(client):
    done = []
    # The model is being made when the first calls arrive.
    client.create(work=lambda: done.append(0) or {})
    futures = [client.call(n, lambda n=n: done.append(n) or {"n": n}) for n in (3, 2, 4, 1)]
    assert [client.result(f) for f in futures] == [{"n": n} for n in (3, 2, 4, 1)]
    assert done == [0, 1, 2, 3, 4]


def test_a_failed_call_keeps_its_turn_and_an_old_number_is_refused(client):
    def fail():
        raise UserError("bad datum; mend it")

    client.result(client.create())
    bad, good = client.call(1, fail), client.call(2, lambda: {"ok": True})
    assert client.result(bad) == {"error": "bad datum; mend it", "category": "user"}
    assert client.result(good) == {"ok": True}
    client.futures.end_session("s")
    assert "seq_id 1 was used" in client.result(client.call(1))["error"]


def test_calls_after_a_gap_wait_for_it_and_not_for_ever(client):
    client.result(client.create())
    late = client.call(3)
    assert client.result(late, 0.05) is None
    assert "waited 0.3 s for 1" in client.result(late)["error"]
    assert client.result(client.call(4)) == {}


def test_a_model_that_was_replaced_fails_its_calls_and_is_gone(client):
    client.result(client.create())
    waiting, before = client.call(2), client.model
    # One that may not replace it waits until it may, and holds up nobody.
    ended = threading.Event()
    later = client.create(1, may_replace=lambda model: ended.is_set())
    assert client.result(later, 0.05) is None and "1 of 1 places" in later.waits_for
    client.result(client.create(2))
    ended.set()
    assert client.result(later) == {} and not later.waits_for
    client.result(client.create(2.5))
    assert "was replaced by s:train:2" in client.result(waiting)["error"]
    with pytest.raises(Gone, match="is not here"):
        client.models.model_of(before.model_id)


@pytest.mark.parametrize("run", ["..", ".", "../..", "/etc", ""])
def test_a_path_of_weights_does_not_leave_the_folder(client, run, tmp_path):
    (tmp_path / "weights" / "secret").mkdir(parents=True)
    client.models.folder = tmp_path / "server"
    client.models.folder.mkdir()
    with pytest.raises(UserError, match="no path of weights"):
        client.models.folder_of(f"tinker://{run}/weights/secret", "weights")
    with pytest.raises(UserError, match="no name for weights"):
        client.models.folder_of("tinker://run/weights/..", "weights")


# Data


def request(loss="cross_entropy", forward_only=False, config=(), tokens=(1, 2, 3), **inputs):
    found = MESSAGES["ForwardBackwardRequest"](loss_fn=loss, forward_only=forward_only)
    for name, value in dict(config).items():
        if isinstance(value, str):
            found.loss_fn_config_v2[name].text = value
        else:
            found.loss_fn_config[name] = found.loss_fn_config_v2[name].number = value
    datum = found.data.add()
    chunk = datum.model_input.add()
    chunk.encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    for name, values in inputs.items():
        if values is not None:
            datum.loss_fn_inputs[name].CopyFrom(tensor_of(np.asarray(values)))
    return found


TARGETS = np.array([2, 3, 4])
ONES = np.ones(3, np.float32)
RL = {"target_tokens": TARGETS, "logprobs": -ONES, "advantages": ONES}


def test_data_become_targets_with_their_numbers():
    (found,) = read_data(request("ppo", config={"clip_low_threshold": 0.5}, **RL), 4, 16)
    assert found.tokens.tolist() == [1, 2, 3]
    assert found.targets.tolist() == [[2], [3], [4]]
    assert found.inputs["clip_low_threshold"].tolist() == [[0.5]] * 3
    np.testing.assert_allclose(found.inputs["clip_high_threshold"], 1.2, rtol=1e-6)
    # A number of each token takes the place of one for all.
    own = request("ppo", clip_low_threshold=np.float32([0.1, 0.2, 0.3]), **RL)
    low = read_data(own, 4, 16)[0].inputs["clip_low_threshold"]
    np.testing.assert_array_equal(low, np.float32([[0.1], [0.2], [0.3]]))


def test_a_forward_needs_no_more_than_targets():
    """Custom losses: their own inputs may come along."""
    given = request(forward_only=True, target_tokens=TARGETS, mine=ONES)
    assert read_data(given, 4, 16)[0].inputs["weights"].tolist() == [[1.0]] * 3


CE = {"target_tokens": TARGETS, "weights": ONES}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"loss": "stable_reinforce", **RL}, "loss_fn=importance_sampling"),
        ({"loss": "sft", **CE}, "cross_entropy, importance_sampling"),
        ({"config": {"beta": 1.0}, **CE}, "beta.*has none"),
        ({"loss": "dro", "config": {"beta": float("nan")}, **RL}, "finite"),
        ({"target_tokens": TARGETS}, "no weights"),
        ({"weights": ONES}, "no target_tokens"),
        ({"loss": "gspo", **RL}, "no sequence_ratio_mask"),
        ({**CE, "mask": ONES}, "mask, which cross_entropy does not take"),
        ({**CE, "weights": ONES[:2]}, r"weights \[2\] and target_tokens \[3\]"),
        ({**CE, "weights": np.float32([1, np.nan, 1])}, "not finite"),
        ({**CE, "target_tokens": TARGETS[:2]}, r"target_tokens \[2\] for 3 tokens"),
        ({**CE, "target_tokens": np.array([2, 3, 16])}, "go from 0 to 15"),
        ({**CE, "target_tokens": np.array([-1, 3, 4])}, "from -1 to 4"),
        ({**CE, "target_tokens": ONES}, "float32; send int64"),
        ({**CE, "tokens": (1, 2, 99)}, "go from 0 to 15"),
        ({**CE, "tokens": ()}, "0 tokens"),
        ({**CE, "tokens": (1,) * 5}, "more --train_tokens"),
        ({"loss": "ppo", **{k: np.stack([v, v], 1) for k, v in RL.items()}}, "takes one"),
    ],
)
def test_data_that_do_not_fit_are_refused_with_the_remedy(given, says):
    with pytest.raises(UserError, match=says):
        read_data(request(**given), 4, 16)


def test_no_data_are_refused():
    with pytest.raises(UserError, match="at least one"):
        read_data(MESSAGES["ForwardBackwardRequest"](loss_fn="cross_entropy"), 4, 16)


def test_closing_ends_the_thread_soon():
    client = Client()
    client.create()
    client.call(2)
    began = time.monotonic()
    client.models.close()
    assert time.monotonic() - began < 10


class Counting:
    """Devices that notice two commands at work."""

    def __init__(self):
        self.order, self.at_work = [], 0

    def count(self, name):
        self.at_work += 1
        assert self.at_work == 1
        time.sleep(0.001)
        self.order.append(name)
        self.at_work -= 1
        if name == "broken":
            raise UserError("broken; mend it")


def test_commands_take_turns_and_who_waits_goes_before_who_asks_again():
    devices: Any = Counting()
    together = Together(devices, exclusive=True)
    run: Any = functools.partial(together.run, Counting.count)

    def ask_again_at_once(name):
        for _ in range(20):
            run(name)

    threads = [threading.Thread(target=ask_again_at_once, args=(name,)) for name in "ab"]
    with pytest.raises(UserError, match="mend"):
        run("broken")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    # One that waits is the next one.
    first = next(i for i, name in enumerate(devices.order) if name == "b")
    alternating = devices.order[first : 2 * 20 - first]
    assert all(here != there for here, there in itertools.pairwise(alternating))
