"""Settings of the optimiser and its schedule."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxrl.checks import (
    at_least,
    between,
    check_fields,
    coefficient,
    positive,
    positive_coefficient,
    steps,
)


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its schedule.

    Attributes:
      kind: "adamw", or "muon": matrices of the layers by Muon, all else by AdamW.
      moments: what moments are kept in, "float32", "bfloat16" or "int8": 8, 4 or about 2.1 bytes a trained
        weight with AdamW. Weights stay float32.
      moments_on_host: moments lie in pinned host memory, and pass through the device at each update, where
        activations have gone by then. The device holds less while it computes gradients, and waits for the
        copies there and back.
      lr: peak learning rate.
      lr_warmup_steps: steps of linear warm-up; the first step already trains, at lr / lr_warmup_steps.
      lr_decay_steps: steps until a cosine has brought the rate down to lr * lr_final; 0 keeps it constant.
      lr_stable_steps: how many of these pass before the cosine begins (warm-up, stable, decay).
      lr_final: share of lr that a decay ends at.
      beta1, beta2, epsilon, weight_decay: of AdamW; Muon has the weight decay, and a momentum of 0.95.
      grad_clip: largest global norm of a gradient; inf for none.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    moments: Literal["float32", "bfloat16", "int8"] = "float32"
    moments_on_host: bool = False
    lr: Annotated[float, coefficient()] = 1e-6
    lr_warmup_steps: Annotated[int, steps(0)] = 10
    lr_decay_steps: Annotated[int, steps(0)] = 0
    lr_stable_steps: Annotated[int, steps(0)] = 0
    lr_final: Annotated[float, between(0, 1)] = 0.0
    beta1: Annotated[float, between(0, 1, has_high=False)] = 0.9
    beta2: Annotated[float, between(0, 1, has_high=False)] = 0.999
    epsilon: Annotated[float, positive_coefficient()] = 1e-8
    weight_decay: Annotated[float, at_least(0, at_most=1000)] = 0.1
    grad_clip: Annotated[float, positive(at_most=10**9, or_inf=True)] = 1.0

    def __post_init__(self):
        check_fields(self)
        if self.lr_stable_steps and self.lr_stable_steps >= self.lr_decay_steps:
            raise ValueError(
                f"lr_stable_steps {self.lr_stable_steps} leaves no step for a decay that ends at "
                f"lr_decay_steps {self.lr_decay_steps}; raise that above it, or set both to 0 for a "
                "constant rate"
            )


@dataclasses.dataclass(frozen=True)
class StageOptimConfig:
    """The optimiser of a stage before reinforcement learning. All else is as in the run's `optim`.

    Attributes:
      kind: "adamw", or "muon": matrices of the layers by Muon, all else by AdamW.
      lr: peak learning rate.
      lr_warmup_steps: steps of linear warm-up; the first step already trains, at lr / lr_warmup_steps.
      lr_decay_steps: steps until a cosine has brought the rate down to lr * lr_final; 0 keeps it constant.
      lr_final: share of lr that a decay ends at.
      weight_decay: of AdamW and Muon.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    lr: Annotated[float, coefficient()] = 1e-6
    lr_warmup_steps: Annotated[int, steps(0)] = 10
    lr_decay_steps: Annotated[int, steps(0)] = 0
    lr_final: Annotated[float, between(0, 1)] = 0.0
    weight_decay: Annotated[float, at_least(0, at_most=1000)] = 0.1

    def __post_init__(self):
        check_fields(self)

    def merged_into(self, optim: OptimConfig) -> OptimConfig:
        """The run's optimiser with these settings."""
        return dataclasses.replace(optim, lr_stable_steps=0, **vars(self))
