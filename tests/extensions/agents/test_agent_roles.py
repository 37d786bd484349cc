"""Several roles in one problem: conversations, scores, groups and baselines are those of a role."""

import collections
import contextlib
import dataclasses
import json
import pathlib
import types
from typing import Any

import numpy as np
import pytest
from agent_runs import AGENT, OPTIONS, agent_backend, problems
from recipe_files import write_recipe_file
from test_agent_backend import conversations, said, scores
from test_agent_training import ONE, settings_of, step_of
from test_agents_over_steps import (
    APART,
    NONE,
    TOGETHER,
    other_weights,
    sampled_versions,
    through_json,
)
from test_multiprocess import run as run_processes

import jaxrl
from jaxrl.config.schema import Config
from jaxrl.dataflows.dynamic_sampling import DynamicSampling
from jaxrl.dataflows.free_running import FreeRunning
from jaxrl.dataflows.rewarding import OverlongPunishment, Rewards
from jaxrl.dataflows.samplers import Generation
from jaxrl.dataflows.schedule import SamplingSchedule
from jaxrl.dataflows.step_timer import NoTimer
from jaxrl.errors import UserError
from jaxrl.rewards import Graders
from jaxrl.rewards.grading import FunctionGrader, Grade
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.rollout.samples import UnfinishedGroups
from jaxrl.tracking.metrics import read_metrics, without_timings
from jaxrl.trainer.resolved import resolve
from jaxrl.types import Completions, Prompts

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


def one_that_waits(folder: pathlib.Path) -> tuple[Prompts, pathlib.Path]:
    """Two problems; between the roles of the second, agents wait as long as the file is there."""
    prompts, file = problems(["soon", "waits"]), folder / "wait"
    prompts.extras[1]["while"] = str(file)
    return prompts, file


def test_the_roles_of_a_problem_are_groups_that_end_together(backend, tmp_path):
    prompts, file = one_that_waits(tmp_path)
    expected = said(backend.generate(prompts, OPTIONS))
    file.touch()
    first = backend.resume(prompts, OPTIONS, on_group=lambda group: True)
    file.unlink()
    rest = backend.resume(NONE, OPTIONS.replace(step=4), unfinished=first.unfinished).completions
    assert (
        first.completions.prompts.sources
        == rest.prompts.sources
        == ("tests/solver", "tests/checker")
    )
    assert said(first.completions) + said(rest) == expected


class Endless:
    """Problems one at a time, of which every other one is answered late."""

    number = 0

    def __next__(self):
        n, self.number = self.number, self.number + 1
        prompts = problems([("duet", "soon")[n % 2]])
        return dataclasses.replace(prompts, ids_N=np.array([n]), texts=(f"problem {n}",))

    def state(self):
        return self.number

    def restore(self, number):
        self.number = number


def free_running(backend, step=0):
    """A sampler of two problems a step, beside a learner that there is not."""
    timer = NoTimer()
    timer.step = step
    actor: Any = types.SimpleNamespace(can_sample=True, continuous=backend.continuous)
    graders = Graders.of(FunctionGrader(lambda response, answer: Grade(False, response)))
    rewards = Rewards(graders, OverlongPunishment(64, 0, 0.0), timer)
    generation, schedule = Generation(actor, OPTIONS, timer), SamplingSchedule(lambda row: None)
    limits = {"prompts_per_step": 1, "prompts_per_batch": 2, "max_staleness": 2}
    return FreeRunning(generation, rewards, schedule, **limits)


def test_a_sampler_beside_the_learner_takes_the_roles_of_a_problem_together(backend):
    """Here it stops after every step, and goes on from its record as after a restart."""
    prompts, record, trained = Endless(), None, []
    for step in range(3):
        sampler = free_running(backend, step)
        if record is not None:
            backend.keep(None, OPTIONS)
            sampler.restore(record, prompts := Endless())
        trained.append(sampler.sample(prompts).completions)
        # Until another problem is finished, and most often one is open.
        sampler.meanwhile(types.SimpleNamespace(is_ready=lambda sampler=sampler: sampler._ready))
        record = sampler.record(prompts)
        waiting = record["unfinished"].prompts
        record["unfinished"] = through_json(record["unfinished"].record())
    done = Completions.concatenate(trained)
    ids = done.prompts.ids_N[::2].tolist()
    assert done.prompts.sources == ("tests/solver", "tests/checker") * 6
    assert done.prompts.ids_N[1::2].tolist() == ids
    # None is trained on twice, and none is lost.
    assert sorted(ids + waiting.ids_N.tolist()) == [*range(prompts.number)]
    assert waiting.sources == ("tests",) * len(waiting) != ()
    # The tokens are those of a run without stops, with the keys of the step that began each problem.
    for n, begun in enumerate(done.started_B[:: 2 * OPTIONS.num_samples].tolist()):
        prompts.restore(ids[n])
        alone = backend.generate(next(prompts), OPTIONS.replace(step=begun))
        assert said(done.take([2 * n, 2 * n + 1])) == said(alone)
    backend.keep(None, OPTIONS)


def test_dynamic_sampling_beside_the_learner_drops_one_role_and_keeps_the_other(backend):
    sampler = DynamicSampling(free_running(backend), 3, max_generation_batches=2, keeps="score")
    sampled = sampler.sample(Endless())
    # All scores of a checker are equal. Its groups were graded, and count.
    assert sampled.completions.prompts.sources == ("tests/solver",) * 3
    assert sampled.metrics["train/num_prompts_sampled"] == 6
    assert len({*sampled.completions.prompts.ids_N.tolist()}) == 3
    backend.keep(None, OPTIONS)


@pytest.mark.long
def test_roles_go_on_over_a_step_and_from_a_checkpoint(backend, tmp_path):
    prompts, file = one_that_waits(tmp_path)
    expected = said(backend.generate(prompts, OPTIONS))
    file.touch()
    first = backend.resume(prompts, OPTIONS, on_group=lambda group: True)
    file.unlink()
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
@pytest.mark.parametrize("frozen", [{}, {"checker": "start"}], ids=["both learn", "one frozen"])
@pytest.mark.parametrize("where", [APART, TOGETHER], ids=["apart", "together"])
def test_steps_of_roles_leave_sessions_open_and_go_on_from_a_checkpoint(where, frozen, tmp_path):
    # Every other problem is answered late.
    settings = settings_of(tmp_path, **where) | {
        "rollout.agent": DUET,
        "rollout.agent_roles": ROLES,
        "rollout.frozen_roles": frozen,
        "rollout.max_staleness": 2,
        "run.save_every": 2,
        "run.rollouts_every": 1,
    }
    rows = [
        {"problem": f"{n} and", "answer": "4", "kind": ("duet", "late")[n % 2]} for n in range(40)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = write_recipe_file(tmp_path, settings)
    for num_steps in (2, 4):
        rows = jaxrl.train(str(recipe), num_steps=num_steps).to_pylist()
    assert len(rows) == 4 and all(row["agent/failed"] == 0 for row in rows)
    assert max(row["rollout/stale_tokens"] for row in rows) > 0
    waiting = max(row["rollout/unfinished_groups"] for row in rows)
    assert waiting > 0
    # Of twice as many problems as a step has; on one mesh samples are bounded, of however many problems.
    assert where is TOGETHER or waiting <= (8 if frozen else 4)
    kept = sorted((tmp_path / "runs" / "tiny" / "seed0" / "rollouts").iterdir())
    samples = [json.loads(line) for path in kept for line in path.read_text().splitlines()]
    groups = collections.Counter((row["prompt_id"], row["source"]) for row in samples)
    # Of TOGETHER dynamic sampling keeps the solver's alone.
    roles = 1 if frozen or where is TOGETHER else 2
    assert {*groups.values()} == {4} and len(groups) == 16
    assert len({n for n, _ in groups}) == 16 / roles


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
