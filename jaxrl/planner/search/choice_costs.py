"""The costs of choices: bytes per device, and seconds of preparation and training."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class ChoiceCosts:
    """Costs of choices for one role, or for several roles that use the same devices one after the other.

    Attributes:
      resident: float64 [K], bytes that stay from step to step.
      transient: float64 [K], additional bytes while a task runs.
      preparation_s, training_s: float64 [K], seconds of a step.
    """

    resident: np.ndarray
    transient: np.ndarray
    preparation_s: np.ndarray
    training_s: np.ndarray

    @staticmethod
    def from_rows(rows: np.ndarray) -> ChoiceCosts:
        """Of float64 [K, 4], a column for each attribute."""
        return ChoiceCosts(*rows.T)

    def rows(self) -> np.ndarray:
        """float64 [K, 4], a column for each attribute."""
        return np.stack([self.resident, self.transient, self.preparation_s, self.training_s], -1)

    def __len__(self) -> int:
        return len(self.resident)

    def __getitem__(self, index: Any) -> ChoiceCosts:
        return ChoiceCosts(
            *(getattr(self, field.name)[index] for field in dataclasses.fields(self))
        )

    @property
    def passes_s(self) -> np.ndarray:
        """Seconds of preparation and training."""
        return self.preparation_s + self.training_s

    def fits(self, budget: float) -> np.ndarray:
        """Which choices fit into this many bytes per device."""
        return self.resident + self.transient <= budget

    def in_turn(self, others: ChoiceCosts) -> ChoiceCosts:
        """Combines each choice here with each of `others` on the same devices, [K, J].

        Resident bytes add up. Tasks run one at a time, so only the larger transient counts. Seconds add up.

            resident 6 + 5 = 11 GB   transient max(2, 3) = 3 GB   training 4 + 2 = 6 s
        """
        a, b = self[:, None], others[None]
        return ChoiceCosts(
            a.resident + b.resident,
            np.maximum(a.transient, b.transient),
            a.preparation_s + b.preparation_s,
            a.training_s + b.training_s,
        )
