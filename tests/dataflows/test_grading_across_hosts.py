"""Hosts share the grading: each response is graded on one of them, and all have all verdicts."""

import json
import os
import pathlib
import sys

import pytest
from processes import free_port, started

ROOT = pathlib.Path(__file__).parents[2]
# Each process samples the same responses, and says which of them it has graded.
PROGRAM = r"""
import dataclasses, json, sys

from jaxrl.dataflows.step_timer import NoTimer
from jaxrl.dataflows.rewarding import OverlongPunishment, Rewards
from jaxrl.dataflows.samplers import Generation, PartialSampling, Sampling
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.private import coordination_client
from jaxrl.rewards import Grade, Graders
from jaxrl.rewards.grading import FunctionGrader
from jaxrl.rollout.backend import SamplingOptions
from steps import NumberedPrompts, SamplingPolicy, make_backend

hosts.start(hosts.HostsConfig(coordinator=sys.argv[1], num_processes=2, process_id=int(sys.argv[2])))
graded = []

def grade(response, answer):
    graded.append(int(answer))
    if answer == "13":
        raise UserError("no truth; fix the row")
    if answer in ("2", "5"):
        raise ZeroDivisionError("caf\u00e9 \ud83e")
    return Grade(answer == "3", None if answer == "1" else response + " \u6771")

def told(sampled):
    scored = sampled.scored
    return {
        "ids": scored.completions.prompts.ids_N.tolist(),
        "correct": scored.correct_B.tolist(),
        "score": scored.score_B.tolist(),
        "predictions": scored.predictions,
        "failures": [f and dataclasses.astuple(f) for f in scored.failures],
        "metrics": {k: v for k, v in sampled.metrics.items() if "failed" in k},
    }

timer = NoTimer()
rewards = Rewards(Graders.of(FunctionGrader(grade)), OverlongPunishment(12, 0, 0.0), timer)
options = SamplingOptions(num_samples=2, seed=0, step=0, temperature=1.0)
policy = SamplingPolicy(make_backend())
generation = Generation(policy, options, timer)
plain = Sampling(generation, rewards).sample(NumberedPrompts(6))
of_plain = sorted(graded)
partial = PartialSampling(generation, rewards, prompts_per_batch=6, max_staleness=8)
some = partial.sample(NumberedPrompts(1), enough=lambda group: bool(group.correct_B.any()))
again = rewards(plain.completions)
try:
    Sampling(generation, rewards).sample(NumberedPrompts(20))
except UserError as error:
    refused = str(error)
hosts.check_same("the steps", ["1"])
# More than are kept, at even and at odd numbers.
for i in range(150):
    assert hosts.gather(lambda: [i, int(sys.argv[2])]) == [[i, 0], [i, 1]]
    if i == 70:
        assert hosts.on_first(lambda: int(sys.argv[2])) == 0
assert hosts.largest(int(sys.argv[2])) == 1
# Long ones are not kept as long.
hosts._KEPT_BYTES = 1000
for _ in range(3):
    hosts.on_first(lambda: 2000 * "x")
assert len(coordination_client().key_value_dir_get_bytes("jaxrl/exchange/")) == 1
try:
    hosts.check_same("the settings", [sys.argv[2]])
except UserError as error:
    differ = str(error)
print(json.dumps({
    "plain": told(plain), "some": told(some), "again": told(again), "refused": refused, "graded": of_plain,
    "differ": differ,
}))
"""


@pytest.fixture(scope="module")
def outputs():
    address = f"localhost:{free_port()}"
    commands = [[sys.executable, "-c", PROGRAM, address, str(i)] for i in range(2)]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/dataflows")))
    env = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    with started(commands, cwd=ROOT, env=env) as processes:
        told = [process.communicate(timeout=300) for process in processes]
        assert [p.returncode for p in processes] == [0, 0], told
    # What connects them says so on the same stream.
    return [
        json.loads(next(line for line in out.splitlines() if line.startswith("{")))
        for out, _ in told
    ]


def test_a_response_is_graded_on_one_host_and_every_host_has_all_verdicts(outputs):
    first, second = map(dict, outputs)
    # Two responses to each prompt; groups are graded in turns.
    assert [len(o["graded"]) for o in outputs] == [6, 6]
    assert sorted(first.pop("graded") + second.pop("graded")) == sorted([*range(6)] * 2)
    assert first == second
    assert first["differ"].startswith(
        "the settings differ between processes: 1 disagree with process 0"
    )
    plain = first["plain"]
    assert plain["ids"] == [0, 1, 2, 3, 4, 5]
    assert plain["correct"] == [n == 3 for n in plain["ids"] for _ in range(2)]
    kinds = [failure and failure[0] for failure in plain["failures"]]
    assert kinds == [(n in (2, 5) and "raised") or None for n in plain["ids"] for _ in range(2)]
    # Whatever text there is.
    assert plain["failures"][4][1] == "ZeroDivisionError: caf\u00e9 \ud83e"
    assert plain["predictions"][2] is None and plain["predictions"][0].endswith("\u6771")
    assert plain["metrics"] == {"reward/grader/failed": 4.0, "reward/grader/failed_raised": 4.0}


def test_beside_generation_or_after_they_are_the_same(outputs):
    assert outputs[0]["again"] == outputs[0]["plain"]


def test_what_ends_a_step_is_decided_alike(outputs):
    assert 0 < len(outputs[0]["some"]["ids"]) <= 6
    assert outputs[0]["some"] == outputs[1]["some"]


def test_a_truth_that_cannot_be_read_ends_every_host(outputs):
    assert {o["refused"] for o in outputs} == {"prompt 13 of 'numbers': no truth; fix the row"}
