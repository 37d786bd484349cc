"""Fixed costs of other systems: by hand, and in a plan."""

import json
import pathlib

import pytest
from toy_clusters import toy, toy_model, toy_work

from jaxrl import cli
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.simulation.assumptions import Assumptions
from jaxrl.planner.simulation.simulate_generation import GenerationSimulator
from jaxrl.planner.simulation.simulate_passes import PassSimulator
from jaxrl.planner.simulation.systems import OURS, SYSTEMS
from jaxrl.planner.simulation.workload import GenerationStrategy, LengthDistribution, Strategy

PAPER = SYSTEMS["hybridflow-2024"]
RECIPE = str(pathlib.Path(__file__).parents[3] / "configs/ppo_tiny.py")
CLUSTER = Cluster(toy(), (1, 4))
# 16 sequences of 128 tokens each, four updates of two epochs; our engine visits them every 64 tokens.
WORK = toy_work(
    prompts=16,
    samples=1,
    response_lengths=LengthDistribution.exactly(128),
    updates=4,
    epochs=2,
    tokens_per_dispatch=64,
)


def test_ours_is_the_default():
    assert OURS.assumptions(Assumptions()) == Assumptions() and OURS.work(WORK) == WORK


def test_the_papers_system_pays_for_every_pass_and_every_update():
    passes = PassSimulator(CLUSTER, PAPER.work(WORK), PAPER.assumptions(Assumptions()))
    one = Strategy(1, 1, 4)
    assert passes.inference(toy_model(), one).seconds["program call"] == 0.5
    assert passes.training(toy_model(), one).seconds["program call"] == 4 * 2 * 0.5


def test_the_papers_sampler_looks_at_every_sequence_after_every_token():
    engine = GenerationSimulator(CLUSTER, PAPER.work(WORK), PAPER.assumptions(Assumptions()))
    # Four replicas of four slots; each replica has a host of its own.
    found = engine.generation(toy_model(), Strategy(1, 1, 4), GenerationStrategy(1, 1, 4)).seconds
    assert found["host between dispatches"] == pytest.approx(128 * 4 * 40e-6)
    assert found["overhead of each step"] == pytest.approx(128 * 5e-3)


def planned(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.run("plan", ["plan", "--config", RECIPE, *arguments])
    return status, *capsys.readouterr()


def test_a_plan_has_the_seconds_of_the_named_system(capsys):
    step_s = {}
    for system in SYSTEMS:
        arguments = ("--topology", "a100:1x1", "--trace", "--as", system)
        status, out, _ = planned(capsys, *arguments, "--json")
        found = json.loads(out)["predicted"]
        assert status == 0 and found["system"] == system
        step_s[system] = found["step_s"]
    # Four updates of actor and critic, two passes before them, and one more for the reference.
    assert step_s["hybridflow-2024"] > step_s["jaxrl"] + 8 * 0.5
    out = planned(capsys, *arguments)[1]
    assert "with the fixed costs of hybridflow-2024" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--topology", "v5p:2x2x2"), "hybridflow-2024 runs on GPUs, and v5p:2x2x2 is TPUs"),
        ((), "--as is about a topology, and none is named"),
    ],
)
def test_a_system_that_says_nothing_of_these_devices_is_refused(arguments, words, capsys):
    status, _, error = planned(capsys, *arguments, "--as", "hybridflow-2024")
    assert status == 2 and words in error and error.count("\n") == 1
