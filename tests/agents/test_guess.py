"""The game of the recipe, and that a small model learns it."""

import json
import pathlib
import subprocess
import sys

import pytest

from jaxrl.user_code import load_function

ROOT = pathlib.Path(__file__).parents[2]


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


@pytest.mark.slow
def test_a_small_model_learns_to_listen(tmp_path):
    command = [sys.executable, "launch/train.py", "--config", "configs/guess_tiny.py"]
    subprocess.run([*command, f"--config.run.output={tmp_path}"], cwd=ROOT, check=True)
    lines = (tmp_path / "guess_tiny/seed0/rl/metrics.jsonl").read_text().splitlines()
    won = [x for line in lines if (x := json.loads(line).get("val-core/number_game/acc/mean@8"))]
    assert won[0] < 0.45 and won[-1] > 0.7
