"""The agents among the recipes: the game of one of them, and that models learn them."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from extras import import_extra

from jaxrl.hub.hub_names import FETCHED
from jaxrl.user_code import load_function

ROOT = pathlib.Path(__file__).parents[3]


def test_the_game_says_where_the_number_is():
    game = load_function("shared/number_game.py:NumberGame", "game")()
    (question,) = game.start(3)
    assert question["content"] == "Guess my number from 1 to 20."
    low, high = 1, 20
    # Bisection needs five guesses at most.
    for _ in range(5):
        guess = (low + high) // 2
        told, reward, done = game.step(f" {guess}\n")
        if done:
            break
        assert reward == 0
        low, high = (guess + 1, high) if "higher" in told[0]["content"] else (low, guess - 1)
    assert (told, reward, done) == ((), 1.0, True)


def test_a_game_ends_after_six_turns():
    game = load_function("shared/number_game.py:NumberGame", "game")()
    game.start(3)
    ends = [game.step("no number")[1:] for _ in range(6)]
    assert ends == [(0.0, False)] * 5 + [(0.0, True)]


def trained(recipe: str, metric: str, folder: pathlib.Path) -> tuple[pathlib.Path, list[float]]:
    """The folder of a whole run, and the values of a metric."""
    # A process of its own: the tests' is set up to compile quickly, which makes a real model slow. It finds
    # what `jaxrl fetch` has made for the user.
    hidden = ("XLA_FLAGS", "XDG_CACHE_HOME")
    environment = {name: x for name, x in os.environ.items() if name not in hidden}
    command = [sys.executable, "launch/train.py", "--config", f"configs/{recipe}.py"]
    command.append(f"--config.run.output={folder}")
    subprocess.run(command, cwd=ROOT, env=environment | {"JAX_PLATFORMS": "cpu"}, check=True)
    run = folder / recipe / "seed0"
    lines = (run / "rl/metrics.jsonl").read_text().splitlines()
    return run, [x for line in lines if (x := json.loads(line).get(metric)) is not None]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_small_model_learns_to_listen(tmp_path):
    _, won = trained("guess_tiny", "val-core/number_game/acc/mean@8", tmp_path)
    assert won[0] < 0.45 and won[-1] > 0.7


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_small_model_learns_to_add_and_to_check(tmp_path):
    run, solved = trained("solver_checker_tiny", "val-core/chain_sum/solver/acc/mean@8", tmp_path)
    lines = (run / "rl/metrics.jsonl").read_text().splitlines()
    checker = "val-core/chain_sum/checker/acc/mean@8"
    checked = [x for line in lines if (x := json.loads(line).get(checker)) is not None]
    assert solved[-1] > solved[0] + 0.15 and checked[-1] > checked[0] + 0.15


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_small_model_learns_to_repair_by_another_projects_harness(tmp_path):
    import_extra("mini-swe-agent", "minisweagent")
    _, right = trained("repair_tiny", "val-core/repairs/acc/mean@4", tmp_path)
    assert right[0] < 0.45 and right[-1] > right[0] + 0.3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_smollm2_learns_to_use_a_calculator(tmp_path):
    if not (pathlib.Path.home() / ".cache/jaxrl/models" / FETCHED).exists():
        pytest.skip("needs SmolLM2-135M-Instruct; jaxrl fetch makes it")
    run, right = trained("calculator_smollm2", "val-core/calculator/acc/mean@2", tmp_path)
    assert right[0] < 0.45 and right[-1] > 0.65
    without = []
    for n in (1, 10):
        lines = (run / f"rollouts/step_{n}.jsonl").read_text().splitlines()
        said = [json.loads(line)["completion"] for line in lines]
        without.append(sum("<tool_response>" not in text for text in said))
    assert without[1] < without[0] / 2
