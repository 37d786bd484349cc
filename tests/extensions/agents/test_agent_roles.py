"""Several roles in one problem: conversations, scores, groups and baselines are those of a role."""

import contextlib
import dataclasses
import pathlib

import numpy as np
import pytest
from agent_runs import AGENT, OPTIONS, agent_backend, problems
from test_agent_backend import conversations, scores
from test_agent_training import ONE, step_of

from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.rollout.rollout_config import RolloutConfig
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
    for kind, said in (
        (
            "lacks",
            "returned {'solver': 1.0}, without a number for each role; return a dict of solver, checker",
        ),
        ("stranger", "this session has no such role; send KEY.ROLE, of solver, checker"),
    ):
        done = backend.generate(problems([kind]), OPTIONS)
        assert not done.finished_B.any() and said in done.of_agents.failures[0].message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"agent": ""}, "those of an agent, and agent is empty"),
        ({"agent_roles": ("a", "a")}, "different names of letters"),
        ({"agent_roles": ("a", "b/c")}, "different names of letters"),
        ({"max_staleness": 2}, "need all samples of a step finished"),
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
