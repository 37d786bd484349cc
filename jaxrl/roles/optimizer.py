"""The optimiser: AdamW behind a global-norm clip, and a learning rate per rollout step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import optax

from jaxrl.checks import at_least, between, check_fields, positive


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule.

    Attributes:
      lr: peak learning rate.
      lr_warmup_steps: steps of linear warm-up; the first step already trains, at lr / lr_warmup_steps.
      lr_decay_steps: steps until a cosine has brought the rate down to lr * lr_final; 0 keeps it constant.
      lr_final: share of lr that a decay ends at.
      beta1, beta2, epsilon, weight_decay: of AdamW.
      grad_clip: largest global norm of a gradient; inf for none.
    """

    lr: Annotated[float, at_least(0)] = 1e-6
    lr_warmup_steps: Annotated[int, at_least(0)] = 10
    lr_decay_steps: Annotated[int, at_least(0)] = 0
    lr_final: Annotated[float, between(0, 1)] = 0.0
    beta1: Annotated[float, between(0, 1, has_high=False)] = 0.9
    beta2: Annotated[float, between(0, 1, has_high=False)] = 0.999
    epsilon: Annotated[float, positive()] = 1e-8
    weight_decay: Annotated[float, at_least(0, at_most=1000)] = 0.1
    grad_clip: Annotated[float, positive(or_inf=True)] = 1.0

    def __post_init__(self):
        check_fields(self)


def build_optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """Gradient to parameter update of unit learning rate; multiply by minus the rate before adding."""
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip),
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay),
    )


def learning_rate(config: OptimConfig) -> Callable[[jax.Array], jax.Array]:
    """The schedule: step (0 is the first) -> rate.

    The step is the rollout step, so all updates of one step share a rate (DAPO section 4.1), and warm-up
    counts from 1, so that the first step is not lost.
    """

    def rate(step: jax.Array) -> jax.Array:
        warmup = jnp.minimum(1.0, (step + 1) / max(1, config.lr_warmup_steps))
        if not config.lr_decay_steps:
            return config.lr * warmup
        done = jnp.clip(step / config.lr_decay_steps, 0.0, 1.0)
        cosine = config.lr_final + (1 - config.lr_final) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return config.lr * warmup * cosine

    return rate
