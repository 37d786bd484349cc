"""The optimiser and its settings: AdamW or Muon after a global-norm clip, and a rate per rollout step."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxrl.checks import (
    at_least,
    between,
    coefficient,
    positive,
    positive_coefficient,
    settings,
    steps,
)
from jaxrl.models.model_config import STACKS
from jaxrl.roles.eight_bit_moments import with_compressed_moments

_Beta: TypeAlias = Annotated[float, between(0, 1, has_high=False)]


@settings
class StageOptimConfig:
    """The optimiser of a stage before reinforcement learning. All else is as in the run's `optim`."""

    kind: Literal["adamw", "muon"] = "adamw"
    """"adamw", or "muon": Muon for the matrices of the layers, AdamW for all other weights."""
    lr: Annotated[float, coefficient()] = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: Annotated[int, steps(0)] = 10
    """Steps of linear warm-up. By default the first step already trains, at lr / lr_warmup_steps."""
    lr_decay_steps: Annotated[int, steps(0)] = 0
    """Step at which the decay reaches lr * lr_final; 0 for a constant rate."""
    lr_final: Annotated[float, between(0, 1)] = 0.0
    """Learning rate after the decay, as a share of lr."""
    lr_schedule: Literal["", "constant", "cosine", "linear", "wsd"] = ""
    """"" warms up and decays by a cosine from the first step on. The others are verl's: the first
    step of the warm-up has the rate 0, and the decay begins when the warm-up is over. That of
    "wsd" (warm-up, stable, decay) is a cosine too, after `lr_stable_ratio` of the other steps.
    """
    lr_cycles: Annotated[float, positive(at_most=1000)] = 0.5
    """Number of waves of a cosine; 0.5 only falls."""
    lr_stable_ratio: Annotated[float, between(0, 1)] = 0.9
    """Share of the steps between warm-up and `lr_decay_steps` at the full rate, for "wsd"."""
    weight_decay: Annotated[float, at_least(0, at_most=1000)] = 0.1
    """Weight decay of AdamW and Muon."""

    def __post_init__(self):
        if self.lr_schedule == "constant" and self.lr_decay_steps:
            raise ValueError(
                f"lr_schedule 'constant' has no decay, and lr_decay_steps is {self.lr_decay_steps}; set it "
                "to 0, or lr_schedule to cosine, linear or wsd"
            )
        decays = self.lr_schedule in ("cosine", "linear", "wsd")
        if decays and self.lr_decay_steps <= self.lr_warmup_steps:
            raise ValueError(
                f"lr_schedule {self.lr_schedule!r} decays from lr_warmup_steps {self.lr_warmup_steps} to "
                f"lr_decay_steps {self.lr_decay_steps}, which has to be larger; set it to the number of steps"
            )


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


# Typical root mean square of an AdamW update. Muon's updates are scaled to it, so that the same learning rate
# and weight decay suit both (Liu et al. 2025, arXiv 2502.16982, section 2.2).
_RMS_OF_ADAMW = 0.2


def build_optimizer(config: OptimConfig, axes: Any = None) -> optax.GradientTransformation:
    """An optax transformation from gradients to updates of unit learning rate.

    Multiply the updates by minus the learning rate before adding them to the weights.

    Args:
      config: the optimiser.
      axes: tuple of logical axes of each trained weight, in nested dicts. Muon finds the matrices by them;
        AdamW takes None.
    """
    # The rate is left out: it comes with each step, as an argument of the compiled update.
    scaled = optax.scale_by_adam(*config.betas, config.epsilon)
    if config.kind == "muon":
        scaled = _muon(axes, others=scaled)
    # Clipped before the moments see the gradient; decayed after them, decoupled from their scale (AdamW).
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip),
        with_compressed_moments(scaled, config.moments),
        optax.add_decayed_weights(config.weight_decay),
    )


def _muon(axes: Any, *, others: optax.GradientTransformation) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for matrices inside the layers, `others` for all other weights."""
    assert axes is not None, "Muon tells matrices by the logical axes of the weights"
    flat: dict[tuple[str, ...], Any] = dict(traverse_util.flatten_dict(axes))
    dimensions = {path: matrix_dimensions(path, names) for path, names in flat.items()}
    # The labels are part of the paths in a checkpoint: a new name would make old runs unreadable.
    labels = {path: "beside" if numbers is None else "muon" for path, numbers in dimensions.items()}
    masked = {
        path: optax.MaskedNode() if numbers is None else numbers
        for path, numbers in dimensions.items()
    }
    dims = traverse_util.unflatten_dict(masked)

    def as_adamw(update: jax.Array, numbers: MuonDimensionNumbers) -> jax.Array:
        # The root mean square of an orthogonal update is 1 / sqrt(longer side).
        sides: Any = (numbers.reduction_axis, numbers.output_axis)
        longer = max(math.prod(update.shape[axis] for axis in side) for side in sides)
        return _RMS_OF_ADAMW * longer**0.5 * update

    muon = optax.chain(
        scale_by_muon(weight_dimension_numbers=dims),
        optax.stateless(lambda updates, _: jax.tree.map(as_adamw, updates, dims)),
    )
    return optax.partition({"muon": muon, "beside": others}, traverse_util.unflatten_dict(labels))


def matrix_dimensions(path: tuple[str, ...], axes: tuple[Any, ...]) -> MuonDimensionNumbers | None:
    """The input and output dimensions of a weight as a matrix; its other dimensions count matrices.

    Example: `attention.q.weight` has axes (layers, embed, heads, head_dim). Its inputs are dimension 1, its
    outputs dimensions 2 and 3, and dimension 0 stacks one matrix per layer.

    Args:
      path: path of the weight in the tree of parameters.
      axes: logical axes of the weight.

    Returns:
      None for weights that Muon does not handle: embeddings, heads, routers, norms, biases.
    """
    if path[0] not in STACKS or path[-1] not in ("weight", "lora_a", "lora_b"):
        return None
    # Dimension 0 stacks layers.
    dims = tuple(i for i, name in enumerate(axes) if i and name != "experts")
    # "heads" and "head_dim" together are one side of the matrix. The other side is the width, or the rank of
    # an adapter (None).
    first = axes[dims[0]]
    num_ins = 1 if len(dims) == 2 or first in ("embed", None) else 2
    return MuonDimensionNumbers(dims[:num_ins], dims[num_ins:])


class Schedule(NamedTuple):
    """The numbers of a learning rate's schedule, float32.

    They are arguments of the update's program, not constants in it: another rate compiles nothing.

    Quotients are taken here, because XLA multiplies by the inverse of a constant, but divides by an argument:
    the last bits of a run would depend on which of them it was.

    Attributes:
      lr: peak rate.
      first: number of the first step in the warm-up, 1 or 0.
      per_warmup_step: 1 / number of steps of linear warm-up.
      decay_start: step at which the decay begins.
      per_decay_step: 1 / number of steps of the decay; 0 for a constant rate.
      final: rate after the decay, as a share of the peak.
      half_decay: (1 - final) / 2.
      angle: angle of the cosine at the end of the decay; 0 for a straight line.
    """

    lr: np.float32
    first: np.float32
    per_warmup_step: np.float32
    decay_start: np.float32
    per_decay_step: np.float32
    final: np.float32
    half_decay: np.float32
    angle: np.float32

    @classmethod
    def of(cls, config: OptimConfig) -> Schedule:
        one, start = np.float32(1), 0
        if config.lr_schedule:
            start = warmup = config.lr_warmup_steps
            if config.lr_schedule == "wsd":
                start += int((config.lr_decay_steps - warmup) * config.lr_stable_ratio)
        length = max(1, config.lr_decay_steps - start)
        return cls(
            lr=np.float32(config.lr),
            # verl's warm-up counts from 0. Without one there is no step at rate 0.
            first=np.float32(not (config.lr_schedule and config.lr_warmup_steps)),
            per_warmup_step=one / np.float32(max(1, config.lr_warmup_steps)),
            decay_start=np.float32(start),
            per_decay_step=one / np.float32(length) if config.lr_decay_steps else np.float32(0),
            final=np.float32(config.lr_final),
            half_decay=np.float32((1 - config.lr_final) * 0.5),
            angle=np.float32(0 if config.lr_schedule == "linear" else 2 * np.pi * config.lr_cycles),
        )


def learning_rate(schedule: Schedule, step: jax.Array) -> jax.Array:
    """The rate of a step, float32; the first step is 0.

    The step is the rollout step, so all updates of a step share a rate (DAPO section 4.1). By default warm-up
    counts from 1: with a rate of 0 the first step would train nothing.
    """
    step = jnp.asarray(step, jnp.float32)
    warmup = jnp.minimum(1.0, (step + schedule.first) * schedule.per_warmup_step)
    done = jnp.clip((step - schedule.decay_start) * schedule.per_decay_step, 0.0, 1.0)
    wave = jnp.where(schedule.angle > 0, jnp.cos(schedule.angle * done), 1 - 2 * done)
    decayed = schedule.final + schedule.half_decay * (1 + wave)
    return schedule.lr * warmup * jnp.where(schedule.per_decay_step > 0, decayed, 1.0)
