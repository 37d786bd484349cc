"""The live loop: each request gets the samples of a batch, whatever arrives, ends and changes beside it."""

import dataclasses
import functools
import json
import os
import pathlib
import sys

import jax
import numpy as np
import pytest
import tokens
from byte_engine import OPTIONS
from closeness import assert_close
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import free_port, started
from test_paged import BASE, backend_of, expected, greedy, prompts_of
from test_prefix_reuse import prefilled  # noqa: F401

from jaxrl.rollout import live_loop, speculation
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.decode_loop import End
from jaxrl.rollout.live_loop import LiveError, LiveLoop, Request, Stopped
from jaxrl.rollout.sampling import truncation_of
from jaxrl.types import Completions, Prompts

ROOT = pathlib.Path(__file__).parents[2]
CASES = {
    "contiguous": {},
    "few pages": {"cache": "paged", "cache_tokens": 160},
    "speculation": {"speculate": 3},
}
EVENTS = ("nothing", "the same weights", "pause", "evaluation")


class Heard:
    """A listener that puts the samples of a request together."""

    def __init__(self):
        self.error: LiveError | None = None
        self.turns: dict[int, list] = {}

    def __call__(self, event):
        assert self.error is None, "something came after an error"
        if isinstance(event, LiveError):
            self.error = event
            return
        turns = self.turns.setdefault(event.sample.index, [])
        assert not turns or turns[-1].end is None, "something came after the end"
        turns.append(event)

    def joined(self, name: str, index: int = 0) -> np.ndarray:
        return np.concatenate([getattr(turn, name) for turn in self.turns[index]])

    def versions(self, index: int = 0) -> list[int]:
        return self.joined("version", index).tolist()

    def end(self, index: int = 0) -> End | None:
        return self.turns[index][-1].end


def request_of(prompts: Prompts, n: int, **changes) -> Request:
    options = OPTIONS.replace(**changes)
    return Request(prompts.tokens[n], BASE.max_response_tokens, int(prompts.ids_N[n]), options)


def drain(live: LiveLoop) -> None:
    while live.turn():
        pass


def assert_heard(heard: Heard, completions: Completions, n: int, num_samples: int = 1) -> None:
    """The first samples of prompt n, token for token."""
    assert sorted(heard.turns) == list(range(num_samples))
    for k in range(num_samples):
        b = n * completions.num_samples + k
        assert heard.joined("tokens", k).tolist() == completions.tokens[b].tolist()
        assert_close(heard.joined("logprob", k), completions.rollout_logprob[b], scale=1)
        assert_close(heard.joined("entropy", k), completions.entropy[b], scale=1)
        assert (heard.end(k) is End.FULL) == completions.truncated_B[b]


@pytest.mark.parametrize("case", ["few pages", pytest.param("contiguous", marks=pytest.mark.long)])
def test_frozen_weights_answer_beside_those_that_change(case, monkeypatch):
    greedy(monkeypatch)
    backend, prompts = backend_of(**CASES[case]), prompts_of(0)
    before = backend.params
    other = jax.tree.map(lambda x: 2 * x, before)
    of_start = backend.generate(prompts, OPTIONS)
    live = backend.live(version=1, frozen={"start": before})
    backend.load(other)
    live.renew(other, 2)
    heard, tickets = {name: [Heard() for _ in prompts.ids_N] for name in ("start", "")}, []
    for name, some in heard.items():
        requests = (dataclasses.replace(request_of(prompts, n), weights=name) for n in range(5))
        tickets = live.submit_all([*zip(requests, some, strict=True)])
    live.turn()
    live.cancel(tickets[4])
    live.pause()
    drain(live)
    for n in range(5):
        assert_heard(heard["start"][n], of_start, n)
    now = backend.generate(prompts, OPTIONS)
    # Other tests share it.
    backend.load(before)
    for n in range(4):
        assert_heard(heard[""][n], now, n)
        assert {*heard[""][n].versions()} == {2}
    assert heard["start"][0].joined("tokens").tolist() != now.tokens[0].tolist()
    assert live.load == (0, 0) and live.counts.running == 0


@pytest.mark.parametrize(
    "case", ["contiguous", "few pages", pytest.param("speculation", marks=pytest.mark.long)]
)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 3),
    order=st.permutations(range(5)),
    num_samples=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    arrivals=st.lists(st.integers(0, 3), max_size=8),
    events=st.lists(st.sampled_from(EVENTS), max_size=8),
)
def test_requests_in_any_order_get_the_samples_of_a_batch(
    case, seed, order, num_samples, arrivals, events
):
    """With other requests, new weights that are the old ones, pauses and evaluations between two turns."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        greedy(monkeypatch)
        monkeypatch.setattr(speculation, "OFF_ON", ())
        backend, prompts = backend_of(**CASES[case]), prompts_of(seed)
        live, heard, version = backend.live(version=1), [Heard() for _ in order], 1
        coming, happening = iter(arrivals), iter(events)
        left = list(order)
        while left or live.load != (0, 0):
            count = next(coming, len(left))
            now, left = left[:count], left[count:]
            live.submit_all(
                [(request_of(prompts, n, num_samples=num_samples[n]), heard[n]) for n in now]
            )
            assert live.turn() or not now
            event = next(happening, "nothing")
            if event == "the same weights":
                backend.load(backend.unload())
                version += 1
                live.renew(backend.params, version)
            elif event == "pause":
                live.pause()
            elif event == "evaluation":
                backend.generate(prompts_of(seed + 1), OPTIONS.replace(num_samples=1))
        live.close()
    for n in order:
        assert_heard(heard[n], expected(seed), n, num_samples[n])
        for k in range(num_samples[n]):
            assert heard[n].versions(k) == sorted(heard[n].versions(k))


def never_stopping(tokens: int = BASE.max_response_tokens):
    return truncation_of(min_tokens=tokens)


LONG = {"max_prompt_tokens": 150, "cache": "paged"}


def test_a_conversation_takes_its_beginning_from_pages(prefilled):  # noqa: F811
    """Each prompt is the turn before, its answer, and more. Pages have 16 tokens."""
    live = backend_of(**LONG).live()
    contiguous = backend_of(max_prompt_tokens=150)
    prompt, more = prompts_of(0).tokens[0], np.arange(5, 10, dtype=np.int32)
    lengths = []
    for turn in range(3):
        heard, said = Heard(), prompt
        lengths.append(len(said))
        live.submit(Request(said, 40, turn, OPTIONS), heard)
        drain(live)
        prompt = np.concatenate([said, heard.joined("tokens"), more])
        alone = tokens.prompts_of(said, ids=[turn])
        assert_heard(heard, contiguous.generate(alone, OPTIONS), 0)
    # All but the last token of the sequence before are cached; full pages of them are known.
    known = [0, *((length - len(more) - 1) // 16 * 16 for length in lengths[1:])]
    assert prefilled == list(zip(lengths, known, strict=True)) and known[2] >= 32


def test_equal_prompts_that_arrive_together_share_a_prefill(prefilled):  # noqa: F811
    live, prompt = backend_of(**LONG).live(), prompts_of(0).tokens[0]
    heard = [Heard() for _ in range(3)]
    requests = [Request(prompt.copy(), BASE.max_response_tokens, n, OPTIONS) for n in range(3)]
    live.submit_all(list(zip(requests, heard, strict=True)))
    drain(live)
    assert prefilled == [(len(prompt), 0)]
    found = backend_of(max_prompt_tokens=150).generate(tokens.prompts_of(*[prompt] * 3), OPTIONS)
    for n in range(3):
        assert_heard(heard[n], found, n)


def test_other_weights_draw_the_next_tokens(prefilled):  # noqa: F811
    """A sample that has started goes on; later ones share nothing that older weights have cached."""
    backend, prompts = backend_of(**LONG), prompts_of(1, count=2)
    old, new = backend.params, jax.tree.map(lambda w: w * np.float32(1.3), backend.params)
    asked = functools.partial(request_of, prompts, truncation=never_stopping())
    try:
        live, across, before = backend.live(version=4), Heard(), Heard()
        live.submit(asked(1), before)
        drain(live)
        live.submit(asked(0), across)
        for _ in range(3):
            live.turn()
        backend.unload()
        backend.load(new)
        live.renew(backend.params, 5)
        after = [Heard() for _ in range(2)]
        live.submit_all([(asked(n), after[n]) for n in range(2)])
        drain(live)
        assert across.versions() == [4] * 12 + [5] * 28
        options = OPTIONS.replace(truncation=never_stopping())
        want = backend.generate(prompts, options)
        for n in range(2):
            assert after[n].versions() == [5] * 40
            assert_heard(after[n], want, n)
        # Whole prompts, by either weights; then those of the batch.
        assert [known for _, known in prefilled[:4]] == [0] * 4
        backend.load(old)
        want = backend.generate(prompts, options)
        assert_heard(before, want, 1)
        assert across.joined("tokens").tolist()[:12] == want.tokens[0].tolist()[:12]
        assert across.joined("tokens").tolist() != want.tokens[0].tolist()
        # The sample that two versions have cached is not known either.
        again, told = Heard(), len(prefilled)
        live.renew(backend.params, 6)
        live.submit(asked(0), again)
        drain(live)
        assert prefilled[told:] == [(len(prompts.tokens[0]), 0)]
        assert_heard(again, want, 0)
    finally:
        backend.load(old)


@pytest.mark.parametrize("case", ["contiguous", "few pages"])
def test_cancelled_requests_leave_the_others_alone(case):
    backend, prompts = backend_of(**CASES[case]), prompts_of(2)
    live, heard = backend.live(), [Heard() for _ in range(5)]
    endless = functools.partial(request_of, prompts, num_samples=8, truncation=never_stopping())
    # Eight samples decode, eight more are queued in the loop, and the others wait.
    tickets = live.submit_all([(endless(n), heard[n]) for n in range(5)])
    live.turn()
    assert live.load == (24, 16) and sum(bool(h.turns) for h in heard) == 1
    for n in (0, 1, 3):
        live.cancel(tickets[n])
    assert live.load == (16, 16)
    live.cancel(tickets[0])
    drain(live)
    want = backend.generate(prompts, OPTIONS.replace(num_samples=8, truncation=never_stopping()))
    for n in (2, 4):
        assert_heard(heard[n], want, n, 8)
    assert all(turns[-1].end is None for turns in heard[0].turns.values())
    assert not heard[1].turns and not heard[3].turns and not any(h.error for h in heard)
    # One that has ended is forgotten.
    live.cancel(tickets[2])
    assert not live.turn() and live.load == (0, 0)


def test_closing_ends_what_is_open_and_frees_the_slots():
    live, heard = backend_of().live(), [Heard() for _ in range(3)]
    live.submit_all([(request_of(prompts_of(0), n, num_samples=8), heard[n]) for n in range(3)])
    live.turn()
    live.refuse()
    with pytest.raises(Stopped, match="takes no requests"):
        live.submit(request_of(prompts_of(0), 0), print)
    live.close()
    assert all(isinstance(h.error, Stopped) for h in heard)
    assert live.load == (0, 0) and not live.turn()


@given(
    st.builds(
        SamplingOptions,
        num_samples=st.integers(1, 9),
        seed=st.integers(0, 2**32 - 1),
        step=st.integers(0, 2**31 - 1),
        temperature=st.floats(0.01, 100),
        truncation=st.builds(
            truncation_of, top_k=st.integers(0, 99), top_p=st.floats(0.125, 1, width=32)
        ),
        stop_strings=st.lists(st.text(min_size=1)).map(tuple),
    )
)
def test_a_request_is_the_same_after_it_was_sent(options):
    request = Request(np.array([3, 2**31 - 1], np.int32), 5, 2**31 - 1, options)
    there = live_loop._from_plain(json.loads(json.dumps(live_loop._to_plain(request))))
    assert there.prompt.dtype == np.int32 and there.prompt.tolist() == request.prompt.tolist()
    assert (there.max_tokens, there.seed, there.options) == (5, 2**31 - 1, options)
    assert hash(there.options) == hash(options)


# Each process has one device of two. The second request arrives while the first is decoded, the third is
# cancelled, and the fourth comes after other weights.
PROGRAM = r"""
import json, sys

import jax
import numpy as np

from jaxrl.mesh import hosts

config = hosts.HostsConfig(coordinator=sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
hosts.start(config)

from byte_engine import OPTIONS, spread
from test_live_loop import BASE, Heard, request_of
from test_paged import prompts_of

backend, prompts = spread(("1-1-2",), base=BASE, cache="paged"), prompts_of(3)
live, heard = backend.live(version=1), [Heard() for _ in range(4)]
loop, seen = live._loops[""], []
dispatch = loop.dispatch

def watched():
    results = dispatch()
    seen.extend((r.sample.owner, r.sample.index, r.version.tolist(), r.tokens.tolist()) for r in results)
    return results

loop.dispatch = watched

def submit(n):
    if hosts.is_first():
        return live.submit(request_of(prompts, n, num_samples=3), heard[n])

submit(0)
assert live.turn(wait_s=0.05)
submit(1)
ticket = submit(2)
assert live.turn(wait_s=0.05)
if hosts.is_first():
    live.cancel(ticket)
while live.turn(wait_s=0.05):
    pass
assert not live.turn(wait_s=0.05)
backend.unload()
backend.load(jax.tree.map(lambda w: w * np.float32(1.3), spread(("1-1-2",), base=BASE).params))
live.renew(backend.params, 2)
submit(3)
while live.turn(wait_s=0.05):
    pass
live.close()
tokens = {
    n: [heard[n].joined("tokens", k).tolist() for k in range(3)] for n in (0, 1, 3) if heard[n].turns
}
print(json.dumps({"seen": seen, "tokens": tokens}))
"""


@pytest.mark.long
def test_two_processes_decode_what_arrives_at_the_first():
    address = f"localhost:{free_port()}"
    commands = [[sys.executable, "-c", PROGRAM, address, str(i)] for i in range(2)]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/rollout")))
    env = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    with started(commands, cwd=ROOT, env=env) as processes:
        told = [process.communicate(timeout=300) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], told
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in told)
    assert first["seen"] == second["seen"] and not second["tokens"]
    assert first["tokens"].keys() == {"0", "1", "3"}
    backend = backend_of()
    old, options = backend.params, OPTIONS.replace(num_samples=3)
    want = backend.generate(prompts_of(3), options)
    backend.load(jax.tree.map(lambda w: w * np.float32(1.3), old))
    later = backend.generate(prompts_of(3), options)
    backend.load(old)
    for n, completions in ((0, want), (1, want), (3, later)):
        assert first["tokens"][str(n)] == [
            t.tolist() for t in completions.tokens[3 * n : 3 * n + 3]
        ]


@pytest.mark.parametrize("layout", [(), pytest.param((("1-2-2",),), marks=pytest.mark.long)])
def test_prompts_are_scored_the_same_in_chunks_and_beside_others(layout):
    """Lengths around the ends of chunks; a scored prompt shares no pages with one that is not."""
    rng = np.random.default_rng(0)
    prompts = tokens.prompts_of(*(rng.integers(3, 240, n) for n in (1, 2, 8, 9, 10, 18, 19, 24)))
    found = {}
    for chunk in (0, 9):
        live = backend_of(*layout, prefill_chunk_tokens=chunk, cache="paged").live()
        heard = [Heard() for _ in range(2 * len(prompts))]
        live.submit_all(
            [
                (request_of(prompts, n % len(prompts), scores_prompt=scored), listener)
                for scored, rest in ((False, heard[: len(prompts)]), (True, heard[len(prompts) :]))
                for n, listener in enumerate(rest)
            ]
        )
        drain(live)
        plain, scored = heard[: len(prompts)], heard[len(prompts) :]
        assert all(each.turns[0][0].prompt is None for each in plain)
        for n, (one, other) in enumerate(zip(plain, scored, strict=True)):
            assert one.joined("tokens").tolist() == other.joined("tokens").tolist()
            scores = other.turns[0][0].prompt
            assert all(turn.prompt is None for turn in other.turns[0][1:])
            assert len(scores.logprob) == len(prompts.tokens[n]) - 1
            if len(scores.logprob):
                ranked = np.take_along_axis(
                    scores.top.logprob, np.minimum(scores.rank, 20)[:, None] - 1, 1
                )
                inside = scores.rank <= 20
                assert (ranked[:, 0][inside] == scores.logprob[inside]).all()
                assert (scores.logprob <= scores.top.logprob[:, 0]).all()
            found.setdefault(n, []).append(scores)
    for whole, chunked in found.values():
        assert_close(chunked.logprob, whole.logprob, scale=1)
        assert chunked.rank.tolist() == whole.rank.tolist()
