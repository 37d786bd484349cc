"""A game of several turns: guess a number from 1 to 20 within six turns.

    user        Guess my number from 1 to 20.
    assistant   10
    user        It is higher.
    assistant   15                                     a game that is won has score 1, any other 0

    rollout.agent = "shared/number_game.py:play"       plays against a policy
    data.train.path = "shared/number_game.py:make"     positions of games, each with a next guess, for SFT

Most of these games are played without taking notice of what was said, and some by always agreeing with it. A
model trained on them wins about two games in five; reinforcement learning has to discover which way pays off.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_agents.environments import environment_agent

NUMBERS, TURNS = 20, 6
QUESTION = f"Guess my number from 1 to {NUMBERS}."
# Share of the games to learn from whose guesses agree with all answers so far.
LISTENS = 0.35


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class NumberGame:
    """One game."""

    def start(self, seed: int) -> Sequence[dict[str, str]]:
        """Chooses the number."""
        self._number = random.Random(seed).randint(1, NUMBERS)
        self._turns = 0
        return (_user(QUESTION),)

    def step(self, text: str) -> tuple[Sequence[dict[str, str]], float, bool]:
        """Answers a guess. Text without a number takes a turn like a wrong guess."""
        self._turns += 1
        found = re.fullmatch(r"\s*(\d{1,4})\s*", text, re.ASCII)
        guess = int(found[1]) if found else None
        if guess == self._number:
            return (), 1.0, True
        return (_user(answer_to(guess, self._number)),), 0.0, self._turns == TURNS

    def close(self) -> None:
        """Nothing to end."""


def answer_to(guess: int | None, number: int) -> str:
    """What the game says of a wrong guess."""
    if guess is None:
        return "Say a number."
    return f"It is {'higher' if number > guess else 'lower'}."


play = environment_agent(lambda problem: NumberGame(), max_tokens=4)


def make(index: int, rng: np.random.Generator) -> dict[str, Any]:
    """A position of a game as a conversation, and a next guess as its solution."""
    del index
    choose = random.Random(int(rng.integers(2**63)))
    number = choose.randint(1, NUMBERS)
    messages, low, high = [_user(QUESTION)], 1, NUMBERS
    listens = choose.random() < LISTENS

    def guess() -> int:
        return choose.randint(low, high) if listens else choose.randint(1, NUMBERS)

    for _ in range(choose.randrange(TURNS)):
        said = guess()
        if said == number:
            break
        low, high = (max(low, said + 1), high) if said < number else (low, min(high, said - 1))
        answer = answer_to(said, number)
        messages += [{"role": "assistant", "content": str(said)}, _user(answer)]
    return {"problem": messages, "answer": str(number), "solution": str(guess())}
