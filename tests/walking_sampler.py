"""A sampler of prompts for `data.sampler` whose every row depends on all that it was told."""

import os
import pathlib
import random

import numpy as np

FILE = pathlib.Path(__file__).resolve()
WALK, UNSEEDED = f"{FILE}:Walk", f"{FILE}:Unseeded"


class Walk:
    """A walk over the rows by random steps, and by the lengths of the answers."""

    def __init__(self, prompts, seed):
        self.rng, self.row, self.told = random.Random(seed), 0, np.zeros(len(prompts), int)

    def next(self):
        self.row = (self.row + self.rng.randrange(3) + int(self.told.sum())) % len(self.told)
        return self.row

    def update(self, groups):
        for group in groups:
            self.told[group.row] += sum(group.lengths)

    def state(self):
        return {"rng": self.rng.getstate(), "row": self.row, "told": self.told}

    def restore(self, state):
        version, numbers, gauss = state["rng"]
        self.rng.setstate((version, tuple(numbers), gauss))
        self.row, self.told = state["row"], state["told"]


class Unseeded(Walk):
    """A walk of its own in each process."""

    def __init__(self, prompts, seed):
        super().__init__(prompts, os.getpid())


def make(index, rng):
    """Problems of another source."""
    del rng
    return {"problem": f"repeat {index}", "answer": str(index)}
