"""Samples of failed agents: they are no zeros in any mean, and their rows say what happened."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import sys

import jax
import numpy as np
import pytest
from agent_runs import OPTIONS, agent_backend, problems
from extras import import_extra
from processes import started
from recipe_files import write_recipe_file
from test_agent_training import ONE, settings_of
from test_multiprocess import ROOT

import jaxrl
from jaxrl.commands.evaluate import table_of
from jaxrl.dataflows.dynamic_sampling import GroupBuffer, NotEnoughGroups
from jaxrl.dataflows.experience import Sampled
from jaxrl.dataflows.rewarding import CostPhase, Multiplier
from jaxrl.dataflows.step_metrics import batch_metrics
from jaxrl.rewards.evaluation_metrics import evaluation_metrics
from jaxrl.rewards.judge import JudgeTemplate, judge_scores
from jaxrl.rewards.score import Term, weighted_sum
from jaxrl.tracking.metrics import read_metrics
from jaxrl.tracking.sample_rows import TokenStrings, sample_rows, to_lines
from jaxrl.types import AgentFailure, AgentRows, Scored
from jaxrl_agents.agent_rows import Talk
from jaxrl_browse.browse_command import sample_files

FILE = pathlib.Path(__file__).with_name("failing_agents.py")
AGENT = f"{FILE}:agent"


def line_of(kind: str) -> int:
    """The number of the line with a comment of this name."""
    lines = FILE.read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# {kind}"))
    return number


# Means


def with_failures(scored: Scored, failed: list[int]) -> Scored:
    """With agents, of which those of these samples have failed."""
    B = len(scored)
    failures = tuple(AgentFailure("failed") if b in failed else None for b in range(B))
    agents = AgentRows(np.full(B, np.nan, np.float32), failures, ((),) * B)
    completions = dataclasses.replace(scored.completions, of_agents=agents)
    return scored.replace(completions=completions)


@pytest.fixture
def scored(make_scored):
    """Two groups of four; the second and third sample of the first have failed, and the last of all."""
    return with_failures(make_scored([5, 1]), [1, 2, 7])


def test_means_of_a_step_are_those_of_the_finished_samples(scored):
    # Lengths (1 + 15 + g) % 5 and (1 + 3 + g) % 5 as in `make_scored`: 1 + (3 i + g) % 5.
    # i = 5: 1 (g = 0), 4 (g = 3); i = 1: 4, 5, 1 (g = 0, 1, 2).
    metrics = batch_metrics(scored, max_prompt_tokens=3)
    # Right are 5.0 and 1.0, of five.
    assert metrics["critic/score/mean"] == pytest.approx((1 - 1 + 1 - 1 - 1) / 5)
    # Shaping is -g / 4.
    rewards = [1, -1 - 3 / 4, 1, -1 - 1 / 4, -1 - 2 / 4]
    assert metrics["critic/rewards/mean"] == pytest.approx(sum(rewards) / 5)
    assert metrics["critic/rewards/min"] == -1.75
    assert metrics["response_length/mean"] == pytest.approx((1 + 4 + 4 + 5 + 1) / 5)
    # Truncated are those of an odd i + g: 5.0, 1.0 and 1.2.
    assert metrics["response_length/clip_ratio"] == pytest.approx(3 / 5)
    assert metrics["response_length/overlong_ratio"] == pytest.approx(3 / 5)
    # Prompts have 1 + i % 3 tokens: 3 for two samples, 2 for three.
    assert metrics["prompt_length/mean"] == 2.5 and metrics["prompt_length/clip_ratio"] == 0.5
    assert metrics["perf/total_num_tokens"] == 15 + 2 * 3 + 3 * 2
    assert metrics["perf/response_num_tokens"] == 15
    assert metrics["agent/failed"] == 3


def changed(scored: Scored, rows: list[int]) -> Scored:
    """With other scores, lengths and limits in these rows."""

    def other(values, value):
        return np.where(np.isin(np.arange(len(values)), rows), value, values)

    tokens, entropy = (
        tuple(x[:0] if b in rows else x for b, x in enumerate(values))
        for values in (scored.completions.tokens, scored.completions.entropy)
    )
    completions = dataclasses.replace(
        scored.completions,
        tokens=tokens,
        entropy=entropy,
        mask=tuple(np.ones(len(x), np.float32) for x in tokens),
        truncated_B=other(scored.completions.truncated_B, True),
    )
    return scored.replace(
        completions=completions,
        correct_B=other(scored.correct_B, True),
        score_B=other(scored.score_B, 9).astype(np.float32),
        shaping_B=other(scored.shaping_B, 0).astype(np.float32),
        predictions=tuple(None if b in rows else x for b, x in enumerate(scored.predictions)),
    )


def sampling_metrics(scored: Scored) -> dict:
    buffer = GroupBuffer(1, max_generation_batches=1, fills_up=True)
    assert buffer.add(scored)
    metrics = buffer.take()[1].metrics()
    # A sum of all tokens that were sampled.
    return {k: x for k, x in metrics.items() if k != "train/num_response_tokens_sampled"}


def reward_metrics(scored: Scored) -> dict:
    terms = [Term("grader", 1.0, scored.score_B), Term("mine", 0.5, 2 * scored.score_B)]
    return weighted_sum(scored, terms)[1]


def judge_metrics(scored: Scored) -> dict:
    said = [f"Score: {5 if score < 0 else 'none'}" for score in scored.score_B]
    template = JudgeTemplate("{response}")
    return judge_scores(scored.completions, template=template, sample=lambda _: said)[1]


def cost_metrics(scored: Scored) -> dict:
    class Phase:
        def phase(self, *_, **__):
            return contextlib.nullcontext()

    cost = CostPhase(lambda _: scored.score_B, Phase())  # pyright: ignore[reportArgumentType]
    costs, multiplier = cost.score(Sampled(scored)), Multiplier(1.0, 0.0, 0.1)
    return {**costs.metrics, **multiplier.update(costs), "next": multiplier.value}


MEANS = {
    "step": lambda scored: batch_metrics(scored, max_prompt_tokens=3),
    "sampling": sampling_metrics,
    "evaluation": evaluation_metrics,
    "rewards": reward_metrics,
    "judge": judge_metrics,
    "cost": cost_metrics,
}


@pytest.mark.parametrize("name", MEANS)
def test_nothing_of_a_failed_sample_counts_in_a_mean(name, scored):
    of, rows = MEANS[name], [1, 2, 7]
    metrics = of(scored)
    assert metrics == of(changed(scored, rows)) != of(changed(scored, [1, 2, 3, 7]))
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", MEANS)
def test_a_step_of_failed_samples_has_no_means(name, make_scored):
    metrics = MEANS[name](with_failures(make_scored([5, 1]), list(range(8))))
    assert all(math.isfinite(value) for value in metrics.values())
    forbidden = ("mean", "ratio", "accuracy", "all_", "parse", "without", "reward/", "acc/")
    assert not [key for key in metrics if any(word in key for word in forbidden)]
    failed = {key: x for key, x in metrics.items() if key.endswith("agent/failed")}
    assert sum(failed.values()) == (8 if name in ("step", "sampling", "evaluation") else 0)


def test_accuracy_of_everything_sampled(make_scored):
    # Prompt 5: right 5.0 and 5.2, of which 5.2 failed; 5.1 and 5.3 wrong. Prompt 15: all right, one failed.
    # Prompt 0: all wrong, all failed.
    scored = with_failures(make_scored([5, 15, 0]), [2, 4, 8, 9, 10, 11])
    metrics = sampling_metrics(scored)
    assert metrics["train/accuracy"] == pytest.approx((1 + 3) / (3 + 3))
    assert metrics["training/filter_groups/all_correct"] == 1 / 2
    assert metrics["training/filter_groups/all_wrong"] == 0
    assert metrics["agent/failed"] == 6


def test_too_few_groups_tell_how_many_agents_failed(make_scored):
    buffer = GroupBuffer(4, max_generation_batches=1)
    with pytest.raises(NotEnoughGroups, match="0% all wrong; 6 samples of agents failed"):
        buffer.add(with_failures(make_scored([5, 15, 0]), [2, 4, 8, 9, 10, 11]))


def test_an_evaluation_counts_the_finished_answers_of_each_prompt(make_scored):
    # Of source 1 prompt 5 has a right and a wrong answer left, prompt 1 a right one, prompt 3 none.
    scored = with_failures(make_scored([5, 1, 3]), [2, 3, 5, 6, 7, 8, 9, 10, 11])
    metrics = evaluation_metrics(scored)
    assert metrics["val-aux/source 1/agent/failed"] == 9
    assert metrics["val-core/source 1/acc/mean@4"] == (1 / 2 + 1) / 2
    # Two draws of right and wrong have a right one with probability 3/4.
    assert metrics["val-aux/source 1/acc/best@2/mean"] == (3 / 4 + 1) / 2
    # One prompt alone has two answers, none has four.
    assert metrics["val-aux/source 1/acc/pass@2"] == 1
    assert "val-aux/source 1/acc/pass@4" not in metrics
    # Lengths 1 + 3 i % 5 ...: 1, 2 of prompt 5, and 4 of prompt 1.
    assert metrics["val-aux/source 1/response_length/mean"] == pytest.approx(7 / 3)
    # The prediction of a first answer is None in `make_scored`.
    assert metrics["val-aux/source 1/without_answer"] == pytest.approx(2 / 3)


def test_entropy_is_that_of_sampled_tokens(make_scored):
    scored = make_scored([4], num_samples=1)
    # Prompt 4: three tokens, of which the middle one is a tool's and has no entropy.
    given = np.array([1, 0, 1], np.float32)
    entropy = np.array([0.5, 0, 1.5], np.float32)
    completions = dataclasses.replace(scored.completions, entropy=(entropy,), mask=(given,))
    metrics = evaluation_metrics(scored.replace(completions=completions))
    assert metrics["val-aux/source 0/entropy/mean"] == 1


def test_the_table_of_an_evaluation(make_scored):
    # Source 0 has no finished sample, source 1 has three of four.
    scored = with_failures(make_scored([0, 5]), [0, 1, 2, 3, 5])
    lines = table_of(scored, evaluation_metrics(scored)).splitlines()
    table = {line[:15].strip(): line[15:].split() for line in lines}
    assert table["mean@4"][:2] == ["-", "66.7%"] and table["truncated"][:2] == ["-", "66.7%"]
    assert table["agent failed"] == ["4", "1", "5"]
    assert table["response tokens"][:2] == ["-", "2.7"]


# Rows


@pytest.fixture(scope="module")
def backend():
    with contextlib.closing(agent_backend(agent=AGENT)) as backend:
        yield backend


def rows_of(backend, kind: str) -> list[dict]:
    """Rows of the samples of an agent, whose failure has passed through a checkpoint's JSON."""
    # Else a run ends whose agents have all failed.
    backend._any_ended = True
    done = backend.generate(problems([kind]), OPTIONS)
    B = len(done)
    zeros = np.zeros(B, np.float32)
    scored = Scored(done, zeros > 0, zeros, zeros, (None,) * B)
    strings = TokenStrings(backend._tokenizer)
    rows = sample_rows(scored, strings, stop_ids=backend._tokenizer.stop_ids)
    return [json.loads(to_lines([row])) for row in rows]


FIRST_PROMPT = (
    "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nNow problem 0<|im_end|>\n"
)


@pytest.mark.parametrize(
    ("kind", "message", "mark"),
    [
        ("raises", "LookupError: no such tool", "raises"),
        ("library", "JSONDecodeError: Expecting property name", "library"),
        ("group", "ExceptionGroup: unhandled errors in a TaskGroup", "raises"),
        ("chained", "RuntimeError: the tool said no JSON", "chained"),
        ("unprintable", "Unprintable, whose text raises an exception", "unprintable"),
        ("surrogate", "ValueError: half \\ud83e pair", "surrogate"),
        ("cancelled", "CancelledError: ", "cancelled"),
        ("thread", "JSONDecodeError: Expecting property name", "thread"),
        ("deep", "RecursionError: maximum recursion depth", "deep"),
        ("exits", "SystemExit: 3", "exits"),
        ("huge", "ValueError: xxx", "huge"),
        ("text", "returned 'good', which is no score", "returned"),
        ("nan", "returned nan, which is no score", "returned"),
        ("vast", "returned 1000", "returned"),
    ],
)
def test_a_failed_sample_says_why_where_and_what_was_said(kind, message, mark, backend):
    for row in rows_of(backend, kind):
        failure = row["failure"]
        assert failure["kind"] == "agent" and failure["message"].startswith(message)
        assert failure["message"].endswith(f" ({FILE}:{line_of(mark)})")
        assert len(failure["message"]) < 1200 and len(failure["traceback"]) < 21_000
        if mark != "returned":
            assert f'File "{FILE}", line {line_of(mark)}' in failure["traceback"]
            assert "worker.py" not in failure["traceback"].split("\n")[1]
        assert row["prompt"].startswith(FIRST_PROMPT) and row["problem"] == "problem 0"
        assert row["prompt"].endswith("<|im_start|>assistant\n")
        assert row["length"] == 3 == len(row["token_pieces"]["text"])
        assert all(x < 0 for x in row["token_pieces"]["rollout_logprob"])
        assert row["completion"] and row["entropy"] > 0 and row["stop_reason"] == "failed"
        nothing = ("correct", "score", "shaping", "reward", "prediction")
        assert [row[name] for name in nothing] == [None] * 5
        assert row["reward_parts"] == {"grader": None}


def test_an_agent_that_fails_before_its_first_answer_keeps_what_it_has(backend):
    for row in rows_of(backend, "unasked"):
        assert (
            row["failure"]["message"] == f"LookupError: no such tool ({FILE}:{line_of('unasked')})"
        )
        assert (row["prompt"], row["completion"], row["length"]) == ("problem 0", "", 0)
    for row in rows_of(backend, "refused"):
        assert row["failure"]["message"].endswith(f"({FILE}:{line_of('refused')})")


@pytest.mark.parametrize(
    ("kind", "message"), [("cancels", "CancelledError: "), ("mute", "ended its process")]
)
def test_an_agent_whose_end_cannot_be_told_fails_at_once(kind, message, backend):
    """Its task is cancelled as it sends its score, or it sends nothing at all."""
    for row in rows_of(backend, kind):
        assert row["failure"]["message"].startswith(message)


def test_finished_samples_of_the_group_are_as_they_are(backend):
    failed, finished = rows_of(backend, "half")
    assert failed["failure"] and finished["failure"] is None
    # The same first prompt; the answers have their own tokens.
    assert failed["prompt"] == finished["prompt"] and finished["correct"] is False
    assert failed["length"] == finished["length"] == 3


@pytest.mark.long
def test_a_late_agent_keeps_what_was_said():
    with contextlib.closing(agent_backend(seconds=20.0, agent=AGENT)) as backend:
        for row in rows_of(backend, "hangs"):
            assert row["failure"]["message"] == "took longer than 20 s"
            assert row["prompt"].startswith(FIRST_PROMPT) and row["length"] == 3


def test_the_log_has_the_traceback_once(backend, caplog):
    backend._told.clear()
    for _ in range(2):
        rows_of(backend, "chained")
    (text,) = [r.getMessage() for r in caplog.records if "no JSON" in r.getMessage()]
    assert text.startswith(
        "2 agents failed, most of them so: RuntimeError: the tool said no JSON ("
    )
    assert "JSONDecodeError" in text and f"line {line_of('chained')}" in text


def test_a_failure_survives_a_checkpoint(backend):
    backend._any_ended = True
    (first, _) = backend.generate(problems(["raises"]), OPTIONS).of_agents.failures
    assert first is not None
    talk = Talk.of_plain(json.loads(json.dumps(Talk((), None, first).to_plain())))
    assert talk.failure is not None and talk.failure.traceback == first.traceback
    np.testing.assert_array_equal(talk.failure.said[0].tokens, first.said[0].tokens)


# A whole step


@pytest.mark.long
def test_a_step_and_its_pages(tmp_path):
    """Every other sample fails; the others are right."""
    changes = ONE | {"rollout.agent": AGENT, "run.num_steps": 1, "run.rollouts_every": 1}
    more = {"evaluation.every": 1, "evaluation.num_samples": 4}
    settings = settings_of(tmp_path, **changes, **more)
    rows = [{"problem": f"{n} and", "answer": "4", "kind": "half"} for n in range(40)]
    for name in ("train", "evaluation"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings["data.evaluation.path"] = str(tmp_path / "evaluation.jsonl")
    settings["data.evaluation.size"] = 3
    recipe = write_recipe_file(tmp_path, settings)
    command = [sys.executable, ROOT / "launch/train.py", f"--config={recipe}"]
    with started([command], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as (process,):
        output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert "failed agents 8" in output and f'failing_agents.py", line {line_of("raises")}' in errors
    run = tmp_path / "runs" / "tiny" / "seed0"
    first, metrics = read_metrics(run / "rl" / "metrics.jsonl")
    assert metrics["agent/failed"] == 8
    assert metrics["critic/score/mean"] == metrics["critic/rewards/mean"] == 1
    assert metrics["response_length/mean"] == metrics["response_length/min"] == 3
    assert metrics["num_turns/mean"] == 2
    for row in (first, metrics):
        assert row["val-core/repeat/acc/mean@4"] == 1 and row["val-aux/repeat/agent/failed"] == 6
    (path,) = (run / "rollouts").glob("*.jsonl")
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    failed = [row for row in kept if row["failure"]]
    assert len(failed) == 8 and len(kept) == 16
    assert all(row["length"] == 3 and row["reward"] is None for row in failed)
    import_extra("dev", "starlette")
    from starlette.testclient import TestClient

    from jaxrl_browse.browse_app import build_app

    pages = TestClient(build_app(sample_files(run), title="run"), base_url="http://127.0.0.1")
    text = pages.get("/").text
    assert "right 100.0%" in text and "reward 1.000" in text
    assert f"agent failed: LookupError: no such tool ({FILE}:{line_of('raises')})" in text
    page = pages.get(f"/sample/{path.stem}/{kept.index(failed[0])}").text
    assert f"LookupError: no such tool ({FILE}:{line_of('raises')})" in page
    assert "Traceback" in page and "Be short." in page


AWAY = """
import pathlib
async def agent(client, problem):
    messages = [{"role": "user", "content": problem.prompt}]
    await client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
    if pathlib.Path(__file__).with_name("away").exists():
        raise LookupError("the tool is away")
    return float(problem.sample % 2)
"""


@pytest.mark.long
def test_a_step_without_a_finished_agent_goes_on_without_an_update(tmp_path):
    (tmp_path / "away.py").write_text(AWAY)
    changes = ONE | {"rollout.agent": f"{tmp_path / 'away.py'}:agent"}
    recipe = write_recipe_file(tmp_path, settings_of(tmp_path, **changes))
    with jaxrl.open_run(str(recipe)) as run:
        # Before any agent has ended such a step ends the run.
        assert run.step()["critic/score/mean"] == 0.5
        before = jax.tree.map(np.asarray, run.roles.actor.for_training().params)
        (tmp_path / "away").touch()
        # The tenth step compares tokens again.
        for _ in range(10):
            metrics = run.step()
            assert [k for k, x in metrics.items() if not math.isfinite(x)] == []
            assert metrics["agent/failed"] == 16 and "critic/score/mean" not in metrics
            assert metrics["actor/skipped_updates"] == 1
        (tmp_path / "away").unlink()
        jax.tree.map(np.testing.assert_array_equal, before, run.roles.actor.for_training().params)
        assert run.step()["agent/failed"] == 0
