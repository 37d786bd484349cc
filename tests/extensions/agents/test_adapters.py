"""Adapters without their packages; tests/clients plays with the real ones."""

import importlib
import random
import sys

import numpy as np
import pytest

from jaxrl.errors import UserError
from jaxrl_agents.adapters.own_random import OwnRandom


@pytest.mark.parametrize(
    "module, adapter, arguments, remedy",
    [
        ("gymnasium", "Gymnasium", ("FrozenLake-v1",), "pip install 'gymnasium"),
        ("textarena", "TextArena", ("GuessTheNumber-v0-raw",), "pip install 'textarena"),
        ("skyrl_gym", "SkyRLGym", ("gsm8k", []), "pip install 'skyrl-gym"),
        ("gem", "Gem", ("game:GuessTheNumber-v0-easy",), "pip install 'gem-llm"),
        ("openenv", "OpenEnv", ("http://127.0.0.1:1",), "pip install 'openenv"),
    ],
)
def test_without_its_package_an_adapter_says_how_to_get_it(
    monkeypatch, module, adapter, arguments, remedy
):
    monkeypatch.setitem(sys.modules, module, None)
    make = getattr(importlib.import_module(f"jaxrl_agents.adapters.{module}"), adapter)
    options = {"act": str} if adapter == "OpenEnv" else {}
    with pytest.raises(UserError, match=remedy):
        make(*arguments, **options)


def test_games_of_one_process_draw_as_each_alone():
    def draw():
        return random.random(), np.random.random()

    def alone(seed):
        random.seed(seed)
        np.random.seed(seed)
        return [draw() for _ in range(3)]

    expected = [alone(seed) for seed in (1, 2)]
    random.seed(0)
    np.random.seed(0)
    outside = [draw() for _ in range(2)]
    random.seed(0)
    np.random.seed(0)
    games = [OwnRandom(1), OwnRandom(2)]
    drawn = [[], []]
    assert draw() == outside[0]
    for n in (0, 1, 1, 0, 0, 1):
        drawn[n].append(games[n](draw))
    assert drawn == expected
    # Nobody else sees their draws.
    assert draw() == outside[1]


def test_a_game_that_fails_gives_the_generators_back():
    def fail():
        random.random()
        raise KeyError("move")

    state = random.getstate()
    with pytest.raises(KeyError):
        OwnRandom(1)(fail)
    assert random.getstate() == state
