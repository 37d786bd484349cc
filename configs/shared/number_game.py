"""A game of several turns: guess a number from 1 to 20 within six turns.

    user        Guess my number from 1 to 20.
    assistant   10
    user        It is higher.
    assistant   15

The right guess has reward 1 and ends the game. Any other one has a tenth if it agrees with all answers so
far. So a game that is won has a score of 1 or more, and no other has.

    rollout.agent = "shared/number_game.py:play"       plays against a policy
    data.train.path = "shared/number_game.py:make"     positions of games, each with a next guess, for SFT

Most of these guesses take no notice of what was said. A model trained on them wins three games in ten;
reinforcement learning has to discover that listening pays off.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.agents.environments import environment_agent

NUMBERS, TURNS = 20, 6
QUESTION = f"Guess my number from 1 to {NUMBERS}."
# Reward of a wrong guess that agrees with what was said.
LISTENED = 0.1
# Share of the guesses to learn from that agree with all answers so far.
LISTENS = 0.3


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class NumberGame:
    """One game."""

    def start(self, seed: int) -> Sequence[dict[str, str]]:
        """Chooses the number."""
        self._number = random.Random(seed).randint(1, NUMBERS)
        self._turns, self._low, self._high = 0, 1, NUMBERS
        return (_user(QUESTION),)

    def step(self, text: str) -> tuple[Sequence[dict[str, str]], float, bool]:
        """Answers a guess. Text without a number takes a turn like a wrong guess."""
        self._turns += 1
        found = re.fullmatch(r"\s*(\d{1,4})\s*", text, re.ASCII)
        guess = int(found[1]) if found else None
        if guess == self._number:
            return (), 1.0, True
        reward = 0.0
        if guess is not None:
            reward = LISTENED if self._low <= guess <= self._high else 0.0
            self._low, self._high = narrowed(guess, self._number, self._low, self._high)
        return (_user(answer_to(guess, self._number)),), reward, self._turns == TURNS

    def close(self) -> None:
        """Nothing to end."""


def answer_to(guess: int | None, number: int) -> str:
    """What the game says of a wrong guess."""
    if guess is None:
        return "Say a number."
    return f"It is {'higher' if number > guess else 'lower'}."


def narrowed(guess: int, number: int, low: int, high: int) -> tuple[int, int]:
    """The range that is left after a wrong guess."""
    return (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))


play = environment_agent(lambda problem: NumberGame(), max_tokens=4)


def make(index: int, rng: np.random.Generator) -> dict[str, Any]:
    """A position of a game as a conversation, and a next guess as its solution."""
    del index
    choose = random.Random(int(rng.integers(2**63)))
    number = choose.randint(1, NUMBERS)
    messages, low, high = [_user(QUESTION)], 1, NUMBERS
    for _ in range(choose.randrange(TURNS)):
        guess = _guess(choose, low, high)
        if guess == number:
            break
        low, high = narrowed(guess, number, low, high)
        said = answer_to(guess, number)
        messages += [{"role": "assistant", "content": str(guess)}, _user(said)]
    guess = _guess(choose, low, high)
    return {"problem": messages, "answer": str(number), "solution": str(guess)}


def _guess(choose: random.Random, low: int, high: int) -> int:
    listens = choose.random() < LISTENS
    return choose.randint(low, high) if listens else choose.randint(1, NUMBERS)
