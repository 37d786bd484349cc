"""Ragged sequences, the twins' view, and the same packed into rows, the functions' view."""

import dataclasses

import numpy as np

NUM_SEQUENCES, ROWS, TOKENS = 7, 4, 12


def packed_inputs(logprob, old_logprob, advantage, mask, segment_ids) -> dict[str, np.ndarray]:
    """Inputs of the losses in `policy_losses.POLICY_LOSSES`, by name. The sampler's policy is the old one."""
    return {
        "logprob": logprob,
        "old_logprob": old_logprob,
        "advantage": advantage,
        "mask": mask,
        "segment_ids": segment_ids,
        "rollout_logprob": old_logprob,
    }


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Sequences of 1 to 6 tokens, with holes, some without a trained token, in rows in random order."""

    rng: np.random.Generator
    masks: list[np.ndarray]
    places: list[tuple[int, int, int]]  # row, first token, segment id

    @staticmethod
    def sample(seed: int) -> "Ragged":
        rng = np.random.default_rng(seed)
        masks = [
            (rng.random(rng.integers(1, 7)) < rng.choice([0.0, 0.6, 1.0], p=[0.15, 0.5, 0.35]))
            for _ in range(NUM_SEQUENCES)
        ]
        places: list = [None] * NUM_SEQUENCES
        free = [0] * ROWS
        for i in rng.permutation(NUM_SEQUENCES):
            row = rng.choice([r for r in range(ROWS) if free[r] + len(masks[i]) <= TOKENS])
            # Ids need not be in order, only unique within a row.
            taken = [p[2] for p in places if p is not None and p[0] == row]
            segment = rng.choice([s for s in range(1, 8) if s not in taken])
            places[i] = (int(row), free[row], int(segment))
            free[row] += len(masks[i])
        return Ragged(rng, masks, places)

    def values(self, low: float = -2.0, high: float = 2.0) -> list[np.ndarray]:
        """One field: a float per token."""
        return [self.rng.uniform(low, high, len(m)).astype(np.float32) for m in self.masks]

    def pack(self, field, fill=0, dtype=np.float32) -> np.ndarray:
        """A ragged field in rows; `fill` on padding."""
        packed = np.full((ROWS, TOKENS), fill, dtype)
        for (row, first, _), x in zip(self.places, field, strict=True):
            packed[row, first : first + len(x)] = x
        return packed

    def spoiled(self, field) -> np.ndarray:
        """Packed, with NaN on everything outside the mask."""
        holes = [np.where(m, x, np.nan) for m, x in zip(self.masks, field, strict=True)]
        return self.pack(holes, fill=np.nan)

    def unpack(self, packed) -> list[np.ndarray]:
        return [
            np.asarray(packed)[row, first : first + len(m)]
            for (row, first, _), m in zip(self.places, self.masks, strict=True)
        ]

    @property
    def mask(self) -> np.ndarray:
        return self.pack(self.masks)

    @property
    def segment_ids(self) -> np.ndarray:
        ids = [np.full(len(m), p[2]) for m, p in zip(self.masks, self.places, strict=True)]
        return self.pack(ids, dtype=np.int32)

    @property
    def sequence(self) -> np.ndarray:
        numbers = [np.full(len(m), i) for i, m in enumerate(self.masks)]
        return self.pack(numbers, fill=-1, dtype=np.int32)

    @property
    def where(self) -> tuple[np.ndarray, np.ndarray]:
        return self.mask, self.segment_ids

    def trained(self, *fields) -> list[list[np.ndarray]]:
        """By sequence, the values of its trained tokens, float64: what the formulas in papers see."""
        return [
            [np.asarray(f[i])[m].astype(np.float64) for f in fields]
            for i, m in enumerate(self.masks)
        ]

    def assert_equal(self, packed, expected, **tolerance) -> None:
        """`packed` has `expected` (by sequence, trained tokens only) inside the mask and 0 outside.

        Values lie within 2 of 0, so what is left of them where they cancel is wrong by some ulps of 2; powers
        and quotients of their float32 sums lose another few digits.
        """
        tolerance = {"rtol": 2e-5, "atol": 2e-6} | tolerance
        packed = np.asarray(packed)
        for got, mask, want in zip(self.unpack(packed), self.masks, expected, strict=True):
            np.testing.assert_allclose(got[mask], want, **tolerance)
        np.testing.assert_array_equal(packed[self.mask == 0], 0)


def differences(function, x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences of a float64 function of an array."""
    slope = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        slope[index] = (function(up) - function(down)) / (2 * step)
    return slope
