"""Agents of a user's file sample through the endpoint: what they leave, and what they can break."""

import contextlib

import numpy as np
import pytest
from agent_runs import OPTIONS, agent_backend, problems

from jaxrl.errors import UserError
from jaxrl.types import Branch, Completions


@pytest.fixture(scope="module")
def backend():
    backend = agent_backend(seconds=60.0)
    yield backend
    backend.close()


def conversations(done: Completions, b: int) -> list[Branch]:
    """The conversations of a sample with their prompts, the main one first."""
    assert done.of_agents is not None
    if not len(done.tokens[b]):
        return list(done.of_agents.branches[b])
    prompt = done.prompts.tokens[b // done.num_samples]
    zeros = np.zeros(len(prompt), np.float32)
    values = (done.rollout_logprob[b], done.entropy[b], 0 * done.tokens[b], done.mask[b])
    main = Branch(np.append(prompt, done.tokens[b]), *(np.append(zeros, x) for x in values))
    return [main, *done.of_agents.branches[b]]


def sampled(done: Completions, b: int) -> float:
    return sum(float(x.mask.sum()) for x in conversations(done, b))


def said(done: Completions) -> list[list[tuple[int, ...]]]:
    """The tokens of each sample's conversations, in an order that does not depend on time."""
    return [
        sorted(tuple(x.tokens.tolist()) for x in conversations(done, b)) for b in range(len(done))
    ]


def scores(done: Completions) -> list[float]:
    """Scores of the samples; None of those that failed."""
    agents = done.of_agents
    return [
        None if failed else float(score)
        for score, failed in zip(agents.score_B, agents.failures, strict=True)
    ]


def test_rows_and_branches(backend):
    groups = []
    done = backend.generate(problems(["talk", "threads"]), OPTIONS, on_group=groups.append)
    assert sorted(int(group.prompts.ids_N[0]) for group in groups) == [10, 11]
    assert done.prompts.ids_N.tolist() == [10, 11]
    assert [len(conversations(done, b)) for b in range(4)] == [1, 1, 3, 3]
    # The agents count the tokens of different requests.
    assert scores(done) == [sampled(done, b) for b in range(4)]
    metrics = backend.metrics
    assert metrics["agent/sampled_tokens"] == sum(sampled(done, b) for b in range(4))
    given = sum(float((x.mask == 0).sum()) for b in range(2) for x in conversations(done, b))
    # The last results of tools were not sent, and of three ends two begin alike.
    assert metrics["agent/encoded_tokens"] > given and metrics["agent/forked_tokens"] > 0
    assert metrics["agent/rewritten_tokens"] == 0
    assert 0.2 < metrics["agent/prompt_share_from_pages"] < 1
    assert 0 < metrics["agent/seconds/mean"] <= metrics["agent/seconds/max"] < 60
    decode = backend.inner._decode_text
    # Special tokens are not shown.
    assert decode(done.prompts.tokens[0]) == "user\nproblem 0\nassistant\n"
    for b in range(2):
        (only,) = conversations(done, b)
        assert [turn.by_policy for turn in done.turns[b]] == [True, False, True, False, True]
        assert "tool 0" in done.turns[b][1].text and "tool 1" in done.turns[b][3].text
        assert np.all((only.logprob < 0) == (only.mask > 0))
        assert done.truncated_B[b] == (only.mask[-3:].sum() == 3)
    for b in (2, 3):
        # The last answer is that to "another question" or an end of the first one, which is trained once.
        texts = sorted(decode(x.tokens).split("\n")[1] for x in conversations(done, b))
        assert texts == ["another question", "problem 1", "problem 1"]
    assert backend.inner.engine.config.cache == "paged"


def test_limits(backend):
    done = backend.generate(problems(["fork", "fill"]), OPTIONS)
    # Eight turns, and 256 tokens.
    assert scores(done)[:2] == [8, 8] and sampled(done, 0) <= 24
    assert all(1 <= score <= 8 for score in scores(done)[2:])
    assert all(100 < len(conversations(done, b)[0].tokens) <= 256 for b in (2, 3))


def test_agents_that_fail_cost_only_their_own_sample(backend, caplog):
    errors = {
        "talk": "",
        "raises": "LookupError: no such tool",
        "slow_tool": "TimeoutError: the tool was slow",
        "exits": "SystemExit: 3",
        "nan": "returned nan, which is no score; return a number or None",
        "text": "returned 'good', which is no score; return a number or None",
        "silent": "ended without an answer of the policy, so there is nothing to learn from",
        "none": "",
        "goes_on": "",
    }
    for kind, error in errors.items():
        caplog.clear()
        done = backend.generate(problems([kind]), OPTIONS)
        assert (~done.finished_B).tolist() == [bool(error)] * 2
        assert [r.getMessage().split(" (/")[0] for r in caplog.records] == (
            [f"2 agents failed, most of them so: {error}"] if error else []
        )
        if kind == "none":
            assert np.isnan(done.of_agents.score_B).all()
        elif not error:
            # What an agent asks after its end is refused.
            assert scores(done) == [sampled(done, b) for b in range(2)]
    # It is said once.
    caplog.clear()
    backend.generate(problems(["raises"]), OPTIONS)
    assert not caplog.records


def test_the_order_of_arrival_does_not_matter(backend):
    prompts = problems(["talk", "threads"] * 3, nap_s=0.1)
    first, second = (backend.generate(prompts, OPTIONS) for _ in range(2))
    assert said(first) == said(second) and scores(first) == scores(second)
    other = backend.generate(prompts, OPTIONS.replace(step=4))
    assert said(other) != said(first)


@pytest.mark.long
def test_workers_that_die_lose_no_other_agent(backend):
    calm = ["talk", "threads"] * 10
    kinds = ["dies" if n % 10 == 3 else kind for n, kind in enumerate(calm)]
    expected, done = (backend.generate(problems(some, 0.1), OPTIONS) for some in (calm, kinds))
    died = [kind == "dies" for kind in kinds for _ in range(2)]
    assert (~done.finished_B).tolist() == died
    for ours, theirs, gone in zip(said(done), said(expected), died, strict=True):
        assert ours == ([] if gone else theirs)


@pytest.mark.long
def test_agents_that_hang_are_late_and_lose_no_other():
    kinds = ["talk", "hangs", "blocks", "threads", "talk"]
    with contextlib.closing(agent_backend(seconds=20.0)) as backend:
        done = backend.generate(problems(kinds), OPTIONS.replace(num_samples=1))
    assert (~done.finished_B).tolist() == [False, True, True, False, False]


@pytest.mark.long
def test_an_agent_that_cannot_be_loaded_again_ends_the_run(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import os\n"
        "def agent(client, problem):\n"
        "    open(__file__, 'w').write('broken(')\n"
        "    os._exit(1)\n"
    )
    with (
        contextlib.closing(agent_backend(agent=f"{path}:agent")) as backend,
        pytest.raises(UserError, match=r"own\.py"),
    ):
        backend.generate(problems(["talk"]), OPTIONS)
