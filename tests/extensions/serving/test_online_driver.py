"""The online driver: requests from many threads, each answered as if it were alone."""

import dataclasses
import functools
import queue
import threading
import time

import byte_engine
import jax
import numpy as np
import pytest
from byte_engine import engine_of, random_weights
from closeness import assert_close
from model_sizes import sized_model

from jaxrl.errors import UserError
from jaxrl.rollout import decode_loop, slots
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.live_loop import LiveError, Overloaded, Request, Stopped
from jaxrl.rollout.sampling import truncation_of
from jaxrl.rollout.slot_pages import SlotPages
from jaxrl.rollout.slots import Slots
from jaxrl.types import Prompts
from jaxrl_serving import server
from jaxrl_serving.online_driver import OnlineDriver
from jaxrl_serving.server import _warm_up

MODEL = sized_model(16, 2, 16, 32, 4, 2, 8, num_tokens=14)
CONFIG = dataclasses.replace(byte_engine.CONFIG, max_response_tokens=40, stop_ids=(1,))


@functools.cache
def weights():
    return random_weights(MODEL)


def build_engine(train="1-1-1", **changes) -> Engine:
    return engine_of((train,), base=CONFIG, model=MODEL, **changes)


def spell(tokens) -> str:
    return "".join(chr(ord("a") + t) for t in tokens if t != 1)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine()


@pytest.fixture
def driver(engine):
    with OnlineDriver(engine, weights(), spell) as driver:
        yield driver
        # Whatever a test has done, nothing stays behind.
        wait_until(lambda: driver.load == (0, 0))


def wait_until(condition, timeout_s=20):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


def request_of(seed=0, prompt=(3, 4, 5), **changes) -> Request:
    max_tokens = changes.pop("max_tokens", 40)
    options = SamplingOptions(**{"temperature": 0.8, **changes})
    return Request(np.array(prompt, np.int32), max_tokens, seed, options)


class Answer:
    """A listener that puts the samples of a request together."""

    def __init__(self, request: Request):
        self.left = request.options.num_samples
        self.error = None
        self.deltas = [[] for _ in range(request.options.num_samples)]
        self.ended = threading.Event()
        self.begun = threading.Event()

    def __call__(self, event):
        assert not self.ended.is_set(), "something came after the end"
        self.begun.set()
        if isinstance(event, LiveError):
            self.error = event
            self.ended.set()
            return
        self.deltas[event.index].append(event)
        self.left -= bool(event.finish)
        if not self.left:
            self.ended.set()

    def wait(self):
        assert self.ended.wait(60)
        if self.error is not None:
            raise self.error
        return self

    def tokens(self, index=0) -> list[int]:
        return np.concatenate([d.tokens for d in self.deltas[index]]).tolist()

    def logprob(self, index=0) -> np.ndarray:
        return np.concatenate([d.logprob for d in self.deltas[index]])

    def text(self, index=0) -> str:
        return "".join(d.text for d in self.deltas[index])

    def finish(self, index=0) -> str:
        return self.deltas[index][-1].finish


def answer(driver, request) -> Answer:
    listener = Answer(request)
    driver.submit(request, listener)
    return listener.wait()


REQUESTS = [
    request_of(seed=1, num_samples=3),
    request_of(seed=2, prompt=range(2, 14), temperature=0.0),
    request_of(seed=2, truncation=truncation_of(top_k=3, top_p=0.9, min_p=0.0), temperature=1.5),
    request_of(seed=4, prompt=(9,) * 24, max_tokens=3),
    request_of(seed=5, prompt=(13,), max_tokens=1),
]


@pytest.fixture(scope="module")
def alone(engine) -> list[Answer]:
    """Every request of REQUESTS when nothing else runs."""
    with OnlineDriver(engine, weights(), spell) as driver:
        return [answer(driver, request) for request in REQUESTS]


def test_a_request_gets_what_the_offline_driver_samples(engine, alone):
    for request, online in zip(REQUESTS, alone, strict=True):
        blank = ("",)
        prompts = Prompts(np.array([request.seed]), (request.prompt,), blank, blank, blank)
        backend = OfflineBackend(engine, functools.partial(map, spell))
        backend.load(weights())
        offline = backend.generate(prompts, request.options)
        for k in range(request.options.num_samples):
            expected = offline.tokens[k][: request.max_tokens]
            assert online.tokens(k) == expected.tolist()
            logprob = offline.rollout_logprob[k][: request.max_tokens]
            assert_close(online.logprob(k), logprob, scale=1)
            assert online.text(k) == spell(expected)
            assert online.finish(k) == ("stop" if expected[-1] == 1 else "length")
    assert {online.finish(k) for online in alone for k in range(online.left)} <= {"stop", "length"}


# Pages for one sample of full length on each of its shards: others wait or give way, and none is lost.
FEW_PAGES = {"cache": "paged", "cache_tokens": 64}


EIGHT = pytest.param("1-2-4", {}, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("train", "changes"),
    [("1-1-1", {}), EIGHT, ("1-1-1", FEW_PAGES)],
    ids=["one device", "eight", "few pages"],
)
def test_requests_of_many_threads_are_answered_as_if_alone(train, changes, engine, alone):
    if (train, changes) != ("1-1-1", {}):
        engine = build_engine(train, **changes)
    answers = [(i, Answer(REQUESTS[i])) for _ in range(12) for i in range(len(REQUESTS))]
    with OnlineDriver(engine, weights(), spell) as driver:

        def submit(part):
            for i, listener in part:
                driver.submit(REQUESTS[i], listener)

        threads = [threading.Thread(target=submit, args=(answers[t::4],)) for t in range(4)]
        for thread in threads:
            thread.start()
        for i, listener in answers:
            listener.wait()
            for k in range(REQUESTS[i].options.num_samples):
                assert listener.tokens(k) == alone[i].tokens(k)
                assert_close(listener.logprob(k), alone[i].logprob(k), scale=1)
        assert driver.load == (0, 0)


@pytest.mark.parametrize("train", ["1-1-1", pytest.param("1-2-1", marks=pytest.mark.long)])
def test_out_of_pages_the_newest_request_waits_and_none_is_lost(train, engine, monkeypatch):
    """Samples start whenever there is a page, so that many give way, some of them several times."""
    monkeypatch.setattr(SlotPages, "_will_last", lambda self, *_: True)
    requests = [request_of(seed=s, truncation=never_stopping()) for s in range(12)]
    with OnlineDriver(engine, weights(), spell) as driver:
        alone = [answer(driver, request) for request in requests]
    grow, waiting, ended = SlotPages.grow, [], []

    def watched(self, *cached):
        dropped = grow(self, *cached)
        for slot in dropped:
            others = np.flatnonzero(self._busy_n)
            others = others[self.pool.shard_n[others] == self.pool.shard_n[slot]]
            assert (self._order_n[others] < self._order_n[slot]).all()
        waiting.extend(dropped)
        return dropped

    monkeypatch.setattr(SlotPages, "grow", watched)
    with OnlineDriver(build_engine(train, **FEW_PAGES), weights(), spell) as driver:
        listeners = [Answer(request) for request in requests]
        for i, listener in enumerate(listeners):
            listener.ended.set = functools.partial(_noted, listener.ended.set, ended, i)
        driver.submit_all(list(zip(requests, listeners, strict=True)))
        for got, want in zip(listeners, alone, strict=True):
            got.wait()
            assert got.tokens() == want.tokens() and got.text() == want.text()
            assert_close(got.logprob(), want.logprob(), scale=1)
    assert len(waiting) > 5
    # First come, first served, although all of them have the same length.
    assert ended == sorted(ended)


def _noted(then, ended: list[int], i: int) -> None:
    ended.append(i)
    then()


def test_warming_up_runs_every_size_whole_and_reused(monkeypatch, capsys):
    """A prompt that began like the one before would leave the larger program uncompiled."""
    whole, known = [], []
    prefill, reuse = slots.prefilled, Slots.reuse

    def watched_prefill(engine, params, starts):
        whole.extend(len(start.tokens) for start in starts)
        return prefill(engine, params, starts)

    def watched_reuse(self, beginnings):
        known.extend(len(start.tokens) for _, _, start in beginnings.values())
        return reuse(self, beginnings)

    monkeypatch.setattr(decode_loop, "prefilled", watched_prefill)
    monkeypatch.setattr(server, "_SLOW_S", -1.0)
    monkeypatch.setattr(Slots, "reuse", watched_reuse)
    engine = build_engine(cache="paged", max_prompt_tokens=100)
    assert engine.prompt_sizes == (64, 96, 140)
    with OnlineDriver(engine, weights(), spell) as driver:
        _warm_up(driver, engine)
    # One token runs the program of the shortest prompts.
    ends = [
        line.partition(" tokens,")[0].split()[-1] for line in capsys.readouterr().out.splitlines()
    ]
    assert ends == ["64", "64", "96", "100"]
    # One token is no page.
    assert whole == [1, 1, 64, 96, 100] and known == [64, 96, 100]


def test_text_comes_dispatch_by_dispatch(driver):
    long = answer(driver, request_of(seed=3, truncation=never_stopping()))
    assert [len(d.tokens) for d in long.deltas[0]] == [4] * 10
    assert all(d.text == spell(d.tokens) == "".join(d.pieces) for d in long.deltas[0])


def never_stopping():
    return truncation_of(top_k=0, top_p=1.0, min_p=0.0, min_tokens=40)


def test_a_stop_string_ends_a_sample_and_its_slot_is_free(driver):
    whole = answer(driver, request_of(seed=3, truncation=never_stopping()))
    stop = whole.text()[5:8]
    end = whole.text().find(stop)
    cut = answer(driver, request_of(seed=3, truncation=never_stopping(), stop_strings=(stop, "zz")))
    assert cut.text() == whole.text()[:end]
    assert cut.finish() == "stop"
    # The tokens are those of the text and of the stop string.
    assert cut.tokens() == whole.tokens()[: end + 3]
    assert len(cut.logprob()) == end + 3


def test_ten_thousand_requests_may_wait_and_no_more(engine, alone):
    with OnlineDriver(engine, weights(), spell, max_waiting=10_000) as driver:
        done = queue.SimpleQueue()
        first = [driver.submit(request_of(seed=s, max_tokens=1), done.put) for s in range(9_999)]
        with pytest.raises(Overloaded, match="no more than 10000 may"):
            while True:
                first.append(driver.submit(request_of(max_tokens=40), done.put))
        for ticket in first[200:]:
            driver.cancel(ticket)
        finished = [done.get(timeout=60) for _ in range(100)]
        assert all(not isinstance(event, LiveError) for event in finished)
        wait_until(lambda: driver.load == (0, 0))
        assert answer(driver, REQUESTS[0]).tokens(2) == alone[0].tokens(2)


def test_a_call_for_more_samples_than_may_wait_is_no_matter_of_time(engine):
    with OnlineDriver(engine, weights(), spell, max_waiting=3) as driver:
        calls = [(request_of(num_samples=2), print)] * 2
        with pytest.raises(UserError, match="4 samples at once, and no more than 3 may wait"):
            driver.submit_all(calls)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompt": ()}, "has 0 tokens; this server takes 1 to 24: write one"),
        ({"prompt": (3,) * 25}, "has 25 tokens; this server takes 1 to 24: shorten it"),
        ({"prompt": (3, 14)}, "ids from 3 to 14; this model's go from 0 to 13"),
        ({"max_tokens": 41}, "max_tokens 41: this server gives 1 to 40"),
        ({"num_samples": 0}, "0 samples of a prompt; ask for 1 or more"),
    ],
)
def test_what_can_never_be_served_is_refused(changes, message, driver):
    with pytest.raises(UserError, match=message):
        driver.submit(request_of(**changes), print)


def test_an_engine_failure_ends_what_is_in_slots_and_nothing_else(engine, alone, monkeypatch):
    generate, calls = engine.generate, []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return generate(*args)

    monkeypatch.setattr(engine, "generate", fails_once)
    requests = [request_of(seed=s, num_samples=4, truncation=never_stopping()) for s in range(6)]
    with OnlineDriver(engine, weights(), spell) as driver:
        listeners = [Answer(request) for request in requests]
        driver.submit_all(list(zip(requests, listeners, strict=True)))
        for listener in listeners:
            listener.ended.wait(60)
        failed = [listener.error is not None for listener in listeners]
        # 8 slots and as many queued ahead of them: four requests of six.
        assert failed == [True] * 4 + [False] * 2
        assert "the engine has failed: RESOURCE_EXHAUSTED" in str(listeners[0].error)
        assert driver.alive
        assert answer(driver, REQUESTS[0]).tokens(1) == alone[0].tokens(1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_mistake_of_our_own_ends_the_driver_and_leaves_nobody_waiting(engine, monkeypatch):
    def broken(tokens):
        raise TypeError("no text for you")

    driver = OnlineDriver(engine, weights(), broken)
    with pytest.raises(Stopped, match="before the answer was complete"):
        answer(driver, REQUESTS[0])
    wait_until(lambda: not driver.alive)
    with pytest.raises(Stopped, match="takes no requests"):
        driver.submit(REQUESTS[0], print)
    driver.close()


def closed_with(engine, count, **grace) -> tuple[OnlineDriver, list[Answer]]:
    """A driver that was closed while so many requests were open, and their listeners."""
    driver = OnlineDriver(engine, weights(), spell)
    listeners = [Answer(REQUESTS[0]) for _ in range(count)]
    driver.submit_all([(REQUESTS[0], listener) for listener in listeners])
    driver.close(**grace)
    return driver, listeners


def test_closing_can_wait_for_what_is_open(engine, alone):
    driver, listeners = closed_with(engine, 10, grace_s=60)
    assert all(listener.wait().tokens(1) == alone[0].tokens(1) for listener in listeners)
    with pytest.raises(Stopped, match="takes no requests"):
        driver.submit(REQUESTS[0], print)
