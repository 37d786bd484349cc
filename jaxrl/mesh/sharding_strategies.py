"""Sharding strategies: HybridFlow's three ways to group devices for generation, and the ZeRO family.

A strategy has the sharding rules of weights in training and in generation, and the order in which devices
fill the mesh. HybridFlow compares three (section 5.3, Figure 8, Table 2); docs/resharding.md derives the
rules.
"""

from __future__ import annotations

import dataclasses

from jaxrl.errors import UserError
from jaxrl.mesh.layout import AXES, TENSOR_GEN
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, Rules

# An order in which the axes of generation are the minor ones: generation groups are then consecutive devices.
_CONSECUTIVE = (
    "data",
    "fsdp",
    "expert",
    "context",
    "fsdp_gen",
    "stage_micro",
    "stage_gen",
    "tensor_micro",
    *TENSOR_GEN,
)
_WEIGHT_AXES = ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "experts", "vocab")


@dataclasses.dataclass(frozen=True)
class ShardingStrategy:
    """The sharding of weights in both phases.

    Attributes:
      name: name on command lines.
      system: name in the paper.
      train, generate: sharding rules of the two phases.
      axes: axes of the mesh from major to minor; neighbours along the last one are consecutive devices.
    """

    name: str
    system: str
    train: Rules
    generate: Rules
    axes: tuple[str, ...]


HYBRID = ShardingStrategy("hybrid", "HybridFlow", TRAIN_RULES, GENERATE_RULES, AXES)

_TENSOR = ("tensor_micro", *TENSOR_GEN)
VANILLA = ShardingStrategy(
    "vanilla",
    "HybridFlow-V",
    {
        **TRAIN_RULES,
        "layers": ("stage_micro", "stage_gen"),
        **dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), _TENSOR),
        "experts": ("expert", *_TENSOR),
    },
    GENERATE_RULES,
    _CONSECUTIVE,
)

# ZeRO-3 over all devices: no weight is whole anywhere, and none is split by heads or layers.
GATHER_ALL = ShardingStrategy(
    "gather_all",
    "DeepSpeed-Chat",
    {
        **TRAIN_RULES,
        **dict.fromkeys(_WEIGHT_AXES, ()),
        "embed": _CONSECUTIVE,
        "batch": _CONSECUTIVE,
        "length": (),
    },
    GENERATE_RULES,
    _CONSECUTIVE,
)

STRATEGIES = {strategy.name: strategy for strategy in (HYBRID, VANILLA, GATHER_ALL)}


@dataclasses.dataclass(frozen=True)
class StateRules:
    """Sharding rules of the three parts of a training state."""

    weights: Rules
    gradients: Rules
    optimizer: Rules


_WHOLE: Rules = {**TRAIN_RULES, "embed": ()}
# Devices with the same tensor and pipeline shard are replicas. Each of them keeps a part of it.
_SHARED: Rules = {**TRAIN_RULES, "embed": ("data", "fsdp", "context", "fsdp_gen")}

# ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) shards over all replicas, FSDP over the `fsdp` axis only.
ZERO = {
    "replicated": StateRules(_WHOLE, _WHOLE, _WHOLE),
    "ZeRO-1": StateRules(_WHOLE, _WHOLE, _SHARED),
    "ZeRO-2": StateRules(_WHOLE, _SHARED, _SHARED),
    "ZeRO-3": StateRules(_SHARED, _SHARED, _SHARED),
    "FSDP": StateRules(TRAIN_RULES, TRAIN_RULES, TRAIN_RULES),
}


def state_rules(name: str) -> StateRules:
    """The entry of `ZERO` by name.

    Raises:
      UserError: the name is unknown.
    """
    if name not in ZERO:
        raise UserError(f"mesh.sharding {name!r} is not one of {', '.join(ZERO)}")
    return ZERO[name]
