"""Several roles in one problem: conversations, scores, groups and baselines are those of a role."""

import collections
import contextlib
import dataclasses
import json
import pathlib

import numpy as np
import pytest
from agent_runs import AGENT, OPTIONS, agent_backend, problems
from recipe_files import write_recipe_file
from test_agent_backend import conversations, said, scores
from test_agent_training import ONE, settings_of, step_of
from test_agents_over_steps import NONE, TOGETHER, other_weights, sampled_versions, through_json
from test_multiprocess import run as run_processes

import jaxrl
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.rollout.samples import UnfinishedGroups
from jaxrl.tracking.metrics import read_metrics, without_timings
from jaxrl.trainer.resolved import resolve

ROLES = ("solver", "checker")
DUET = f"{pathlib.Path(AGENT.rpartition(':')[0])}:duet"


@pytest.fixture(scope="module")
def backend():
    with contextlib.closing(agent_backend(agent=DUET, agent_roles=ROLES)) as backend:
        yield backend


def test_each_role_has_groups_of_its_own(backend):
    groups = []
    done = backend.generate(problems(["duet", "same"]), OPTIONS, on_group=groups.append)
    named = ["tests/solver", "tests/checker"] * 2
    assert list(done.prompts.sources) == named
    assert done.prompts.ids_N.tolist() == [10, 10, 11, 11]
    assert sorted(x.prompts.sources[0] for x in groups) == sorted(named)
    # Samples 0 and 1 of the solver, of the checker, and so on.
    assert scores(done) == [0, 1, 0.5, 0.5] * 2
    assert (
        backend.metrics["agent/solver/score/mean"]
        == 0.5
        == backend.metrics["agent/checker/score/mean"]
    )
    decode = backend.inner._decode_text
    begin = [decode(tokens).split("\n")[1] for tokens in done.prompts.tokens]
    assert begin[0] == "problem 0" and begin[1].startswith("Is this right?")
    # Both roles read the same here, and have noise of their own.
    assert begin[2] == begin[3] == "problem 1"
    assert any(not np.array_equal(done.tokens[b], done.tokens[b + 2]) for b in (4, 5))
    # Every sampled token is that of one role: three in an answer at most, one answer each.
    sampled = [sum(x.mask.sum() for x in conversations(done, b)) for b in range(8)]
    assert all(1 <= n <= 3 for n in sampled)
    assert sum(sampled) == backend.metrics["agent/sampled_tokens"]


def test_what_fails_of_a_role(backend):
    alone = backend.generate(problems(["alone"]), OPTIONS)
    # The checker was not asked: nothing of it is trained, and the solver's samples count.
    assert alone.finished_B.tolist() == [True, True, False, False]
    assert "without an answer" in alone.of_agents.failures[2].message
    for kind, fault in (
        (
            "lacks",
            "returned {'solver': 1.0}, without a number for each role; return a dict of solver, checker",
        ),
        ("stranger", "this session has no such role; send KEY.ROLE, of solver, checker"),
    ):
        done = backend.generate(problems([kind]), OPTIONS)
        assert not done.finished_B.any() and fault in done.of_agents.failures[0].message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"agent": ""}, "those of an agent, and agent is empty"),
        ({"agent_roles": ("a", "a")}, "different names of letters"),
        ({"agent_roles": ("a", "b/c")}, "different names of letters"),
    ],
)
def test_roles_that_cannot_be(changes, said):
    with pytest.raises(ValueError, match=said):
        RolloutConfig(**({"agent": DUET, "agent_roles": ROLES} | changes))


def test_roles_that_do_not_fit_a_batch():
    config = Config()
    three = RolloutConfig(agent=DUET, agent_roles=("a", "b", "c"), num_prompts=32)
    grpo = dataclasses.replace(config.algorithm, dataflow="grpo")
    with pytest.raises(UserError, match=r"has 32 groups .* every problem gives 3.*multiple of 3"):
        resolve(dataclasses.replace(config, rollout=three, algorithm=grpo))
    # A sampler with devices of its own counts the groups of a problem one by one.
    apart = RolloutConfig(agent=DUET, agent_roles=ROLES, max_staleness=2)
    with pytest.raises(UserError, match="solver, checker are of one problem and end together"):
        apart.check_partial("dapo", dynamic_sampling=True, runs_free=True)
    apart.check_partial("dapo", dynamic_sampling=True, runs_free=False)


def test_the_roles_of_a_problem_are_groups_that_end_together(backend):
    prompts = problems(["soon", "late"])
    expected = said(backend.generate(prompts, OPTIONS))
    first = backend.resume(prompts, OPTIONS, on_group=lambda group: True)
    rest = backend.resume(NONE, OPTIONS.replace(step=4), unfinished=first.unfinished).completions
    assert (
        first.completions.prompts.sources
        == rest.prompts.sources
        == ("tests/solver", "tests/checker")
    )
    assert said(first.completions) + said(rest) == expected


@pytest.mark.long
def test_roles_go_on_over_a_step_and_from_a_checkpoint(backend):
    prompts = problems(["soon", "late"])
    expected = said(backend.generate(prompts, OPTIONS))
    first = backend.resume(prompts, OPTIONS, on_group=lambda group: True)
    # The roles of a problem end together. The other problem is cut between its solver and its checker.
    assert first.completions.prompts.sources == ("tests/solver", "tests/checker")
    assert said(first.completions) == expected[:4]
    saved = UnfinishedGroups.of_record(through_json(first.unfinished.record()))
    assert saved.prompts.sources == ("tests",) and len(saved.samples) == 2
    solvers = sum(map(len, saved.samples))
    before = backend.inner.params
    backend.load(other_weights(before))
    later = backend.resume(NONE, OPTIONS.replace(step=4), unfinished=first.unfinished)
    # The next step asks the same agents, now of other weights.
    assert later.completions.prompts.sources == ("tests/solver", "tests/checker")
    assert said(later.completions)[:2] == expected[4:6] != said(later.completions)[2:]
    assert [{*v.tolist()} for v in sampled_versions(later)] == [{3}, {3}, {4}, {4}]
    with contextlib.closing(agent_backend(agent=DUET, agent_roles=ROLES)) as again:
        rest = again.resume(NONE, OPTIONS.replace(step=5), unfinished=saved)
        assert said(rest.completions) == expected[4:]
        assert [{*v.tolist()} for v in sampled_versions(rest)] == [{3}, {3}, {5}, {5}]
        # What the solvers had said is not sampled again.
        assert again._live.counts.sampled == sum(map(len, sampled_versions(rest))) - solvers
    backend.load(before)


@pytest.mark.long
def test_steps_of_roles_leave_sessions_open(tmp_path):
    # Every other problem is answered late.
    settings = settings_of(tmp_path, **TOGETHER) | {
        "rollout.agent": DUET,
        "rollout.agent_roles": ROLES,
        "rollout.max_staleness": 2,
        "run.num_steps": 3,
        "run.save_every": 2,
        "run.rollouts_every": 1,
    }
    rows = [
        {"problem": f"{n} and", "answer": "4", "kind": ("duet", "late")[n % 2]} for n in range(40)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = write_recipe_file(tmp_path, settings)
    for num_steps in (2, 3):
        rows = jaxrl.train(str(recipe), num_steps=num_steps).to_pylist()
    assert len(rows) == 3 and all(row["agent/failed"] == 0 for row in rows)
    assert max(row["rollout/unfinished_groups"] for row in rows) > 0
    assert max(row["rollout/stale_tokens"] for row in rows) > 0
    # At most three problems, six groups of four samples, at a time.
    assert all(row["rollout/unfinished_groups"] <= 3 for row in rows)


@pytest.mark.long
def test_a_step_has_baselines_by_role(tmp_path):
    roles = {"rollout.agent": DUET, "rollout.agent_roles": ROLES}
    metrics, done = step_of(tmp_path, {"kind": "duet"}, **ONE, **roles)
    # Two problems, each with a group of either role.
    assert len(done.prompts) == 4 and len(done) == 16
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert metrics["agent/solver/score/mean"] == 1.5 and metrics["agent/checker/score/mean"] == 0.5
    # Scores 0, 1, 2, 3 of a solver: 1.5 above their mean at most, by a deviation of sqrt(5/3). All of a
    # checker's are equal. With one group for both it would be 1.96 / 1.22.
    assert metrics["critic/advantages/max"] == pytest.approx(1.5 / np.sqrt(5 / 3), rel=1e-4)
    assert metrics["critic/advantages/min"] == pytest.approx(-1.5 / np.sqrt(5 / 3), rel=1e-4)


@pytest.mark.long
def test_two_processes_have_whole_groups_of_each_role_and_repeat_them(tmp_path):
    roles = {"rollout.agent": DUET, "rollout.agent_roles": ROLES, "mesh.train": "1-2-2"}
    made = []
    for name, schedule in (("first", ""), ("again", str(tmp_path / "runs" / "first" / "seed0"))):
        changes = {"name": name, "rollout.schedule": schedule, "run.rollouts_every": 1} | roles
        recipe = write_recipe_file(tmp_path, settings_of(tmp_path, {"kind": "duet"}, **changes))
        run_processes([recipe, recipe])
        stage = tmp_path / "runs" / name / "seed0" / "rl"
        kept = sorted((stage.parent / "rollouts").rglob("*.jsonl"))
        rows = [json.loads(line) for path in kept for line in path.read_text().splitlines()]
        metrics = [*map(without_timings, read_metrics(stage / "metrics.jsonl"))]
        made.append((metrics, rows, (stage / "schedule.jsonl").read_text()))
    assert made[0] == made[1]
    groups = collections.Counter((row["source"], row["prompt_id"]) for row in rows)
    # Two problems, with a group of four samples for each role.
    assert sorted(groups.values()) == [4] * 4
    assert {source.rpartition("/")[2] for source, _ in groups} == {*ROLES}
    assert len({prompt for _, prompt in groups}) == 2
    # 0, 1, 2, 3 for a solver, and 0.5 for a checker.
    assert metrics[0]["agent/solver/score/mean"] == 1.5
    assert metrics[0]["agent/checker/score/mean"] == 0.5
