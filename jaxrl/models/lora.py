"""Low-rank adapters as a part of the parameter tree (Hu et al. 2021, arXiv 2106.09685).

A projection with an adapter has the leaves `lora_a` and `lora_b` next to its `weight`. Only these are
trained. The model without them is the reference policy, so the reference needs no second copy of the
weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.models.decoder import Params, init_params
from jaxrl.models.model_config import TARGET_OF, LoraConfig, ModelConfig

_LEAVES = ("lora_a", "lora_b")
# Leaves, and trees of them, that no update changes, adapters or not.
FROZEN = frozenset({"correction_bias", "layer_scale", "indexers"})


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


def split_trained(params: Any) -> tuple[Any, Any]:
    """Splits the same trees into (all that training without adapters changes, leaves of `FROZEN`)."""
    flat = _flat(params)
    frozen = {path: leaf for path, leaf in flat.items() if FROZEN.intersection(path)}
    trained = {path: leaf for path, leaf in flat.items() if path not in frozen}
    return traverse_util.unflatten_dict(trained), traverse_util.unflatten_dict(frozen)


def join(adapters: Any, rest: Any) -> Any:
    """Joins the two trees of a split."""
    return traverse_util.unflatten_dict(_flat(rest) | _flat(adapters))


def _flat(tree: Any) -> dict[tuple[str, ...], Any]:
    return dict(traverse_util.flatten_dict(tree))


def fresh_adapters(config: ModelConfig, key: jax.Array) -> Params:
    """Adapters that change nothing yet: `lora_a` normal with variance 1 / fan-in, `lora_b` 0."""
    return split(init_params(config, key))[0]


def uniform_adapters(like: Params, ranks: Any, key: jax.Array) -> Params:
    """Adapters as PEFT and Tinker start them: `lora_a` uniform within 1 / sqrt(fan-in), `lora_b` 0.

    What is beyond the rank is 0 in both factors and stays so: the gradient of each has the other as a factor.

    Args:
      like: adapters of dense layers, whose shapes count.
      ranks: rank of each projection, by its name, at most that of the shapes; 0 changes nothing ever.
      key: PRNG key.
    """
    adapters = {}
    for i, (path, leaf) in enumerate(sorted(_flat(like).items())):
        adapters[path] = jnp.zeros(leaf.shape, jnp.float32)
        if path[-1] == "lora_a":
            bound = math.prod(leaf.shape[1:-1]) ** -0.5
            own = jax.random.fold_in(key, i)
            values = jax.random.uniform(own, leaf.shape, jnp.float32, -bound, bound)
            inside = jnp.arange(leaf.shape[-1]) < ranks[TARGET_OF.get(path[-2], path[-2])]
            adapters[path] = jnp.where(jnp.expand_dims(inside, range(leaf.ndim - 1)), values, 0)
    return traverse_util.unflatten_dict(adapters)


def scaled(adapters: Params, scale: Any) -> Params:
    """Adapters with another scale of their output; a tree without adapters stays as it is."""
    return _by_leaf(adapters, lambda name, x: scale * x if name == "lora_b" else x)


def with_rank(tree: Any, rank: int) -> Any:
    """A tree with adapters of dense layers in it, cut to a rank or padded to it with zeros."""

    def resized(name: str, x: jax.Array) -> jax.Array:
        if name not in _LEAVES:
            return x
        # lora_a is [L, *ins, R], lora_b [L, R, *outs].
        dim = x.ndim - 1 if name == "lora_a" else 1
        x = jax.lax.slice_in_dim(x, 0, min(rank, x.shape[dim]), axis=dim)
        missing = [(0, rank - x.shape[dim] if i == dim else 0) for i in range(x.ndim)]
        return jnp.pad(x, missing)

    return _by_leaf(tree, resized)


def _by_leaf(tree: Any, function: Callable[[str, Any], Any]) -> Any:
    """Applies a function to the name and the value of each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: function(getattr(path[-1], "key", "") if path else "", x), tree
    )


def empty_stack(like: Params, places: int, dtype: Any) -> Params:
    """A stack of adapters that change nothing: [L, N, ...] for the shapes [L, ...] of `like`."""
    return jax.tree.map(lambda x: jnp.zeros((x.shape[0], places, *x.shape[1:]), dtype), like)


def put_into(stack: Params, adapters: Params, place: Any) -> Params:
    """The stack with other adapters at a place."""
    return jax.tree.map(
        lambda all_, x: all_.at[:, place].set(x.astype(all_.dtype)), stack, adapters
    )


def taken_from(stack: Params, place: Any) -> Params:
    """The adapters at a place of a stack."""
    return jax.tree.map(lambda all_: all_[:, place], stack)


def stack_shardings(where: Any) -> Any:
    """The shardings of a stack, from those of adapters: every place is split alike."""
    return jax.tree.map(
        lambda s: NamedSharding(s.mesh, PartitionSpec(*(*s.spec[:1], None, *s.spec[1:]))), where
    )


def merge(params: Params, config: ModelConfig) -> Params:
    """Merges the adapters into the weights. Without adapters the model computes the same up to rounding."""
    adapters, rest = (_flat(tree) for tree in split(params))
    for path in {path[:-1] for path in adapters}:
        # [stack, ins, outs], [stack, ins, R] and [stack, R, outs]; layers and experts are stacked.
        weight, a, b = rest[*path, "weight"], adapters[*path, "lora_a"], adapters[*path, "lora_b"]
        product: Any = functools.partial(jnp.tensordot, axes=1)
        for _ in range(a.ndim + b.ndim - 2 - weight.ndim):
            product = jax.vmap(product)
        delta = product(a.astype(jnp.float32), b.astype(jnp.float32))
        merged = weight.astype(jnp.float32) + config.lora.scale * delta
        rest[*path, "weight"] = merged.astype(weight.dtype)
    return traverse_util.unflatten_dict(rest)
