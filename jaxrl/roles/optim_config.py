"""Settings of the optimiser and its schedule."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from jaxrl.checks import (
    at_least,
    between,
    coefficient,
    positive,
    positive_coefficient,
    settings,
    steps,
)

_Beta: TypeAlias = Annotated[float, between(0, 1, has_high=False)]


@settings
class StageOptimConfig:
    """The optimiser of a stage before reinforcement learning. All else is as in the run's `optim`."""

    kind: Literal["adamw", "muon"] = "adamw"
    """"adamw", or "muon": Muon for the matrices of the layers, AdamW for all other weights."""
    lr: Annotated[float, coefficient()] = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: Annotated[int, steps(0)] = 10
    """Steps of linear warm-up; the first step already trains, at lr / lr_warmup_steps."""
    lr_decay_steps: Annotated[int, steps(0)] = 0
    """Step at which a cosine reaches lr * lr_final; 0 for a constant rate."""
    lr_final: Annotated[float, between(0, 1)] = 0.0
    """Learning rate after the decay, as a share of lr."""
    weight_decay: Annotated[float, at_least(0, at_most=1000)] = 0.1
    """Weight decay of AdamW and Muon."""


@settings
class OptimConfig(StageOptimConfig):
    """The optimiser and its schedule; `StageOptimConfig` documents the inherited settings."""

    moments: Literal["float32", "bfloat16", "int8"] = "float32"
    """Data type of the moments, "float32", "bfloat16" or "int8". With AdamW they take 8, 4 or
    about 2.1 bytes per trained weight. Weights stay float32.
    """
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    epsilon: Annotated[float, positive_coefficient()] = 1e-8
    """Settings of AdamW. Muon has a momentum of 0.95."""
    grad_clip: Annotated[float, positive(at_most=10**9, or_inf=True)] = 1.0
    """Maximum global norm of the gradient; inf for none."""
