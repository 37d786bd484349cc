"""The gates of feed-forward networks, by the names of `model_config.ACTIVATIONS`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

# Constants of gpt-oss, the only family with this gate.
_LIMIT, _SLOPE = 7.0, 1.702


def _clamped_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
    return (up + 1) * gate * jax.nn.sigmoid(_SLOPE * gate)


# (gate(x), up(x)) -> the input of down
GATES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "clamped_silu": _clamped_silu,
}
