"""Low-rank adapters as a part of the parameter tree (Hu et al. 2021, arXiv 2106.09685).

A projection with an adapter has the leaves `lora_a` and `lora_b` next to its `weight`. Only these are
trained. The model without them is the reference policy, so the reference needs no second copy of the
weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from jaxrl.models.decoder import Params, init_params
from jaxrl.models.model_config import LoraConfig, ModelConfig

_LEAVES = ("lora_a", "lora_b")


def base_config(config: ModelConfig) -> ModelConfig:
    """The model with its adapters off."""
    return dataclasses.replace(config, lora=LoraConfig())


def with_adapters(config: ModelConfig, adapters: LoraConfig) -> ModelConfig:
    """The model of `config` with adapters."""
    return dataclasses.replace(config, lora=adapters)


def split(params: Any) -> tuple[Any, Any]:
    """Splits a tree of parameters, or a tree of the same structure, into (adapters, all other leaves)."""
    flat = _flat(params)
    adapters = {path: leaf for path, leaf in flat.items() if path[-1] in _LEAVES}
    rest = {path: leaf for path, leaf in flat.items() if path[-1] not in _LEAVES}
    return traverse_util.unflatten_dict(adapters), traverse_util.unflatten_dict(rest)


def join(adapters: Any, rest: Any) -> Any:
    """Joins the two trees of `split`."""
    return traverse_util.unflatten_dict(_flat(rest) | _flat(adapters))


def _flat(tree: Any) -> dict[tuple[str, ...], Any]:
    return dict(traverse_util.flatten_dict(tree))


def fresh_adapters(config: ModelConfig, key: jax.Array) -> Params:
    """Adapters that change nothing yet: `lora_a` normal with variance 1 / fan-in, `lora_b` 0."""
    return split(init_params(config, key))[0]


def merge(params: Params, config: ModelConfig) -> Params:
    """Merges the adapters into the weights. Without adapters the model computes the same up to rounding."""
    adapters, rest = (_flat(tree) for tree in split(params))
    for path in {path[:-1] for path in adapters}:
        rest[*path, "weight"] = _merged(
            rest[*path, "weight"], adapters[*path, "lora_a"], adapters[*path, "lora_b"], config.lora
        )
    return traverse_util.unflatten_dict(rest)


def _merged(weight: jax.Array, a: jax.Array, b: jax.Array, lora: LoraConfig) -> jax.Array:
    """weight + scale * a · b. `a` and `b` share leading dimensions, of layers and experts."""
    product = lambda a, b: jnp.tensordot(a, b, 1)  # noqa: E731
    # a is [stack, ins, R], b [stack, R, outs], weight [stack, ins, outs].
    for _ in range(a.ndim + b.ndim - 2 - weight.ndim):
        product = jax.vmap(product)
    delta = product(a.astype(jnp.float32), b.astype(jnp.float32))
    return (weight.astype(jnp.float32) + lora.scale * delta).astype(weight.dtype)
