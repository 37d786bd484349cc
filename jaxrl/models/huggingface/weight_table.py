"""A table from the tensors of a Hugging Face checkpoint to our tree of parameters.

    L layers   V vocabulary   D width   F ffn width   Q query heads   K kv heads   H head size
    E experts   S scores
    M width of a shared expert
    P, Z sizes of latents of queries, and of keys and values
    A Z and the rotated dimensions   O size of a value   J O and the dimensions of a key without rotation
    I layers with an indexer   B its heads   T their size
    p size of a layer's input   a that of all layers' inputs
    N key heads of a delta layer   U value heads of each   X, Y sizes of their heads   C taps

Loading and export follow this table alone; they have no code for particular models.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.checks import MAX_LAYERS
from jaxrl.errors import UserError
from jaxrl.models.model_config import STACKS, TARGET_OF, ModelConfig

Bounds = tuple[tuple[int, int], ...]  # begin and end, dimension by dimension


@dataclasses.dataclass(frozen=True)
class WeightRule:
    """One line of the table. Dimensions are letters, as in the legend above.

    Example, with two layers:

        "model.layers.{L}.self_attn.q_proj.weight"   "QH D"   "layers.attention.q.weight"   "LDQH"

    maps `...layers.0...` and `...layers.1...`, each [Q * H, D], to our leaf [L, D, Q, H].

    Attributes:
      name: name of the tensor. A letter in braces numbers the tensors that one leaf stacks.
      stored: dimensions of the tensor. Letters without a space form one merged dimension, the first slowest.
      path: path of our leaf, keys joined by dots.
      ours: dimensions of our leaf; stacked dimensions (letters in braces) first.
      sizes: size of each dimension, from `dimension_sizes`.
      within: for a dimension that is a part of a larger one of the tensor, its offset in that one, and the
        size of that one. A letter that `ours` lacks stands for one element.
      part: offset in the first merged dimension of the tensor, and the size of that, if others have the rest.
      grouped: True if each element of the first letter has such a part, with offset and size of its own.
      numbers: the number in a name for each place of the first stacked dimension, from 0 on by default.
      exact: True for a tensor that is float32 whatever the type of the others.
    """

    name: str
    stored: str
    path: str
    ours: str
    sizes: Mapping[str, int]
    within: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    part: tuple[int, int] | None = None
    grouped: bool = False
    numbers: Sequence[int] = range(MAX_LAYERS)
    exact: bool = False

    @property
    def stacked(self) -> str:
        """The stacked dimensions of our leaf, which number tensors."""
        return "".join(re.findall(r"{(\w)}", self.name))

    @property
    def order(self) -> tuple[int, ...]:
        """The permutation from the tensor's unmerged dimensions to our unstacked dimensions."""
        split = [letter for letter in self.stored if letter in self.ours]
        return tuple(split.index(letter) for letter in self.ours[len(self.stacked) :])

    def tensor_name(self, position: Sequence[int]) -> str:
        """The name of the tensor at a position of the stacked dimensions."""
        if position:
            position = (self.numbers[position[0]], *position[1:])
        return self.name.format(**dict(zip(self.stacked, position, strict=True)))

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        shape = [math.prod(map(self.size_in_tensor, group)) for group in self.stored.split()]
        groups = self.sizes[self.stored[0]] if self.grouped else 1
        return (groups * self.part[1] if self.part else shape[0], *shape[1:])

    def own_part(self, tensor: np.ndarray) -> np.ndarray:
        """A view of the part of the tensor that our leaf has, with unmerged dimensions."""
        begin = self.part[0] if self.part else 0
        shape = [self.size_in_tensor(letter) for letter in self.stored.replace(" ", "")]
        groups = shape[0] if self.grouped else 1
        rows = math.prod(shape) // groups // math.prod(tensor.shape[1:])
        by_group = tensor.reshape(groups, -1, *tensor.shape[1:])
        return by_group[:, begin : begin + rows].reshape(shape)

    def size_in_tensor(self, letter: str) -> int:
        """The size of one of the tensor's unmerged dimensions."""
        return self.within[letter][1] if letter in self.within else self.sizes[letter]

    def in_tensor(self, bounds: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Begin and end in each unmerged dimension of the tensor, from those in our leaf."""
        found = {}
        for letter in self.stored.replace(" ", ""):
            begin, end = bounds.get(letter, (0, 1))
            offset = self.within[letter][0] if letter in self.within else 0
            found[letter] = (offset + begin, offset + end)
        return found

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[letter] for letter in self.ours)

    def positions(self) -> Iterator[tuple[int, ...]]:
        """All positions of the stacked dimensions."""
        return itertools.product(*(range(self.sizes[letter]) for letter in self.stacked))


# Parts of names of tensors that hold what others store as several: q, k and v (Phi-3, with gate and up), the
# same of delta nets with z, each by key head (Qwen3-Next, with a and b), and gate and up of all experts
# (Qwen3.5's mixtures, as published).
FUSED = ("qkv_proj", "in_proj_qkvz", "mlp.experts.gate_up_proj")


# The tensors of an indexer: name, dimensions, leaf, dimensions of that, `exact`.
_INDEXER = (
    ("wq_b.weight", "BT P", "q", "PBT", False),
    ("wk.weight", "T D", "k", "DT", False),
    ("k_norm.weight", "T", "k_scale", "T", True),
    ("k_norm.bias", "T", "k_bias", "T", True),
    ("weights_proj.weight", "B D", "head_weights", "DB", True),
)


def weight_table(config: ModelConfig, *, fused: Sequence[str] = ()) -> tuple[WeightRule, ...]:
    """Every tensor of a checkpoint of `config`, in the order of Transformers; `fused` are some of `FUSED`."""
    rule = functools.partial(WeightRule, sizes=dimension_sizes(config))
    rows = [rule("model.embed_tokens.weight", "V D", "embedding", "VD")]
    if config.layer_inputs:
        projection = "model.per_layer_model_projection.weight"
        rows += [
            rule("model.embed_tokens_per_layer.weight", "V a", "inputs.table", "Va"),
            rule(projection, "a D", "inputs.projection", "Da"),
            rule("model.per_layer_projection_norm.weight", "p", "inputs.norm.scale", "p"),
        ]
    first, last = config.first_dense_layers, config.num_layers - config.sharing_layers
    ends = {"first": (0, first), "layers": (first, last), "last": (last, config.num_layers)}
    for stack in STACKS:
        layers = range(*ends[stack])
        period = 1 if stack == "first" else config.period
        for place in range(period if layers else 0):
            path = f"{stack}.place{place}" if period > 1 else stack
            rows += _layer_table(config, path, place, layers[place::period], fused=fused)
    for name, stored, leaf, ours, exact in _INDEXER if config.indexed_layers else ():
        name, ours = f"model.layers.{{I}}.self_attn.indexer.{name}", f"I{ours}"
        further: Any = {"numbers": config.indexed_layers, "exact": exact}
        rows.append(rule(name, stored, f"indexers.{leaf}", ours, **further))
    rows.append(rule("model.norm.weight", "D", "final_norm.scale", "D"))
    if config.num_scores:
        rows.append(rule("score.weight", "S D", "score_head", "DS"))
    if config.has_unembedding:
        rows.append(rule("lm_head.weight", "V D", "unembedding", "DV"))
    return tuple(rows)


def _layer_table(
    config: ModelConfig, prefix: str, place: int, numbers: range, *, fused: Sequence[str]
) -> list[WeightRule]:
    """Rules for the tensors of the given layers, which share one position in the repeating layer pattern."""
    rows: list[WeightRule] = []
    kind, dense, shares = config.layer_pattern[place], prefix == "first", "last." in prefix
    sizes = dimension_sizes(config, kind) | {"L": len(numbers)}
    if dense:
        sizes["F"] = config.dense_d_ff
    elif shares:
        sizes["F"] *= 1 + config.double_wide_sharing
    rule = functools.partial(WeightRule, sizes=sizes, numbers=numbers)

    def per_layer(name, stored, path, ours, part=None, exact=False, grouped=False, **within):
        name, path = f"model.layers.{{L}}.{name}", f"{prefix}.{path}"
        options = {"within": within, "part": part, "exact": exact, "grouped": grouped}
        rows.append(rule(name, stored, path, f"L{ours}", **options))

    if config.pre_norms:
        per_layer("input_layernorm.weight", "D", "attention_norm.scale", "D")
    if kind == "delta":
        _delta_table(config, per_layer, fused="in_proj_qkvz" in fused)
    else:
        fused_qkv = "qkv_proj" in fused
        _attention_table(config.of_kind(kind), per_layer, fused=fused_qkv, shares=shares)
    if config.post_norms:
        # A trap of names: `post_attention_layernorm` follows attention in Gemma. In other families it is the
        # norm before the feed-forward network.
        per_layer("post_attention_layernorm.weight", "D", "attention_post_norm.scale", "D")
        if config.pre_norms:
            per_layer("pre_feedforward_layernorm.weight", "D", "mlp_norm.scale", "D")
        per_layer("post_feedforward_layernorm.weight", "D", "mlp_post_norm.scale", "D")
    else:
        per_layer("post_attention_layernorm.weight", "D", "mlp_norm.scale", "D")
    if config.layer_inputs:
        per_layer("per_layer_input_gate.weight", "p D", "input_gate.weight", "Dp")
        per_layer("per_layer_projection.weight", "D p", "input_out.weight", "pD")
        per_layer("post_per_layer_input_norm.weight", "D", "input_norm.scale", "D")
    if config.scaled_layers:
        per_layer("layer_scalar", "G", "layer_scale", "", G=(0, 1))
    _feed_forward_table(config, per_layer, dense=dense, fused=fused)
    return rows


def _feed_forward_table(
    config: ModelConfig, per_layer: Callable[..., None], *, dense: bool, fused: Sequence[str]
) -> None:
    """Adds the tensors of a feed-forward network or of a mixture of experts."""
    if config.expert_norms:
        per_layer("post_feedforward_layernorm_1.weight", "D", "mlp.shared_post_norm.scale", "D")
        per_layer("pre_feedforward_layernorm_2.weight", "D", "mlp.experts_norm.scale", "D")
        per_layer("post_feedforward_layernorm_2.weight", "D", "mlp.experts_post_norm.scale", "D")
        per_layer("router.scale", "D", "mlp.router_norm.scale", "D")
        per_layer("router.proj.weight", "E D", "mlp.router", "DE")
        per_layer("router.per_expert_scale", "E", "mlp.expert_scale", "E")
        _fused_experts_table("experts", per_layer)
        _network_table(per_layer, "mlp", "mlp.shared", "M")
    elif config.expert_biases:
        per_layer("mlp.router.weight", "E D", "mlp.router", "DE")
        per_layer("mlp.router.bias", "E", "mlp.router_bias", "E")
        for i, path in enumerate(("mlp.gate", "mlp.up")):
            # Columns of gate and up in turn, and the input dimension first.
            per_layer("mlp.experts.gate_up_proj", "E D FG", f"{path}.weight", "EDF", G=(i, 2))
            per_layer("mlp.experts.gate_up_proj_bias", "E FG", f"{path}.bias", "EF", G=(i, 2))
        per_layer("mlp.experts.down_proj", "E F D", "mlp.down.weight", "EFD")
        per_layer("mlp.experts.down_proj_bias", "E D", "mlp.down.bias", "ED")
    elif "qkv_proj" in fused:
        per_layer("mlp.gate_up_proj.weight", "GF D", "mlp.gate.weight", "DF", G=(0, 2))
        per_layer("mlp.gate_up_proj.weight", "GF D", "mlp.up.weight", "DF", G=(1, 2))
        per_layer("mlp.down_proj.weight", "D F", "mlp.down.weight", "FD")
    elif dense or not config.num_experts:
        _network_table(per_layer, "mlp", "mlp", "F")
    else:
        per_layer("mlp.gate.weight", "E D", "mlp.router", "DE")
        if config.sigmoid_routing:
            bias = "mlp.gate.e_score_correction_bias"
            per_layer(bias, "E", "mlp.correction_bias", "E", exact=True)
        if "mlp.experts.gate_up_proj" in fused:
            _fused_experts_table("mlp.experts", per_layer)
        else:
            _network_table(per_layer, "mlp.experts.{E}", "mlp", "F", stack="E")
        if config.shared_d_ff:
            name = "mlp.shared_expert" if config.shared_gate else "mlp.shared_experts"
            _network_table(per_layer, name, "mlp.shared", "M")
        if config.shared_gate:
            per_layer("mlp.shared_expert_gate.weight", "G D", "mlp.shared_gate", "D", G=(0, 1))


def _fused_experts_table(prefix: str, per_layer: Callable[..., None]) -> None:
    """Adds the tensors of experts whose gate and up are one tensor."""
    per_layer(f"{prefix}.gate_up_proj", "E GF D", "mlp.gate.weight", "EDF", G=(0, 2))
    per_layer(f"{prefix}.gate_up_proj", "E GF D", "mlp.up.weight", "EDF", G=(1, 2))
    per_layer(f"{prefix}.down_proj", "E D F", "mlp.down.weight", "EFD")


def _network_table(
    per_layer: Callable[..., None], name: str, path: str, inner: str, *, stack: str = ""
) -> None:
    """Adds the tensors of feed-forward networks; `inner` is the letter of their width."""
    for ours in ("gate", "up"):
        per_layer(
            f"{name}.{ours}_proj.weight", f"{inner} D", f"{path}.{ours}.weight", f"{stack}D{inner}"
        )
    per_layer(f"{name}.down_proj.weight", f"D {inner}", f"{path}.down.weight", f"{stack}{inner}D")


def _attention_table(
    config: ModelConfig, per_layer: Callable[..., None], *, fused: bool, shares: bool
) -> None:
    """Adds the tensors of attention."""

    def weight(name: str, stored: str, leaf: str, ours: str, **within: tuple[int, int]) -> None:
        per_layer(f"self_attn.{name}.weight", stored, f"attention.{leaf}", ours, **within)

    if config.kv_latent:
        if config.q_latent:
            weight("q_a_proj", "P D", "q_a.weight", "DP")
            weight("q_a_layernorm", "P", "q_norm.scale", "P")
            weight("q_b_proj", "QH P", "q.weight", "PQH")
        else:
            weight("q_proj", "QH D", "q.weight", "DQH")
        # A latent and the rotated key; keys without rotation and values, head by head.
        weight("kv_a_proj_with_mqa", "A D", "kv_a.weight", "DA")
        weight("kv_a_layernorm", "Z", "kv_norm.scale", "Z")
        weight("kv_b_proj", "QJ Z", "kv_b.weight", "ZQJ")
        weight("o_proj", "D QO", "o.weight", "QOD")
        return
    if fused:
        Q, K = config.num_heads, config.num_kv_heads
        whole = Q + 2 * K
        weight("qkv_proj", "QH D", "q.weight", "DQH", Q=(0, whole))
        weight("qkv_proj", "KH D", "k.weight", "DKH", K=(Q, whole))
        weight("qkv_proj", "KH D", "v.weight", "DKH", K=(Q + K, whole))
    else:
        if config.gated_attention:
            # Queries and gates of each head in turn.
            weight("q_proj", "QGH D", "q.weight", "DQH", G=(0, 2))
            weight("q_proj", "QGH D", "q_gate.weight", "DQH", G=(1, 2))
        else:
            weight("q_proj", "QH D", "q.weight", "DQH")
        if not shares:
            weight("k_proj", "KH D", "k.weight", "DKH")
        if not (shares or config.keys_as_values):
            weight("v_proj", "KH D", "v.weight", "DKH")
    weight("o_proj", "D QH", "o.weight", "QHD")
    if config.qkv_bias:
        per_layer("self_attn.q_proj.bias", "QH", "attention.q.bias", "QH")
        per_layer("self_attn.k_proj.bias", "KH", "attention.k.bias", "KH")
        if not config.keys_as_values:
            per_layer("self_attn.v_proj.bias", "KH", "attention.v.bias", "KH")
    if config.output_bias:
        per_layer("self_attn.o_proj.bias", "D", "attention.o.bias", "D")
    if config.attention_sinks:
        per_layer("self_attn.sinks", "Q", "attention.sinks", "Q")
    if config.qk_norm:
        q, k = ("QH", "KH") if config.qk_norm_over_heads else ("H", "H")
        weight("q_norm", q, "q_norm.scale", q)
        if not shares:
            weight("k_norm", k, "k_norm.scale", k)


def _delta_table(config: ModelConfig, per_layer: Callable[..., None], *, fused: bool) -> None:
    """Adds the tensors of a delta net; q, k and v are parts of one, as are their taps."""
    keys = config.delta_key_heads * config.delta_key_dim
    whole = 2 * keys + config.delta_value_heads * config.delta_value_dim
    # Widths of the parts of a key head.
    X, UY = config.delta_key_dim, config.delta_group * config.delta_value_dim
    parts = channels = [("q", 0, "NX"), ("k", keys, "NX"), ("v", 2 * keys, "NUY")]
    into, rows = "linear_attn.in_proj_qkv.weight", whole
    if fused:
        into, rows = "linear_attn.in_proj_qkvz.weight", 2 * X + 2 * UY
        parts = [("q", 0, "NX"), ("k", X, "NX"), ("v", 2 * X, "NUY"), ("z", 2 * X + UY, "NUY")]
    for name, first, dims in parts:
        part, path = (first, rows), f"delta.{name}.weight"
        per_layer(into, f"{dims} D", path, f"D{dims}", part, grouped=fused)
    for name, first, dims in channels:
        part, path = (first, whole), f"delta.{name}_taps"
        # The dimension between, of size 1, is for convolutions over all channels.
        per_layer("linear_attn.conv1d.weight", f"{dims} G C", path, f"{dims}C", part, G=(0, 1))
    if fused:
        for i, name in enumerate("ba"):
            ba = "linear_attn.in_proj_ba.weight"
            per_layer(ba, "NGU D", f"delta.{name}.weight", "DNU", G=(i, 2))
    else:
        per_layer("linear_attn.in_proj_z.weight", "NUY D", "delta.z.weight", "DNUY")
        per_layer("linear_attn.in_proj_b.weight", "NU D", "delta.b.weight", "DNU")
        per_layer("linear_attn.in_proj_a.weight", "NU D", "delta.a.weight", "DNU")
    per_layer("linear_attn.A_log", "NU", "delta.a_log", "NU")
    per_layer("linear_attn.dt_bias", "NU", "delta.a_bias", "NU")
    per_layer("linear_attn.norm.weight", "Y", "delta.norm.scale", "Y")
    per_layer("linear_attn.out_proj.weight", "D NUY", "delta.o.weight", "NUYD")


def dimension_sizes(config: ModelConfig, kind: str = "full") -> dict[str, int]:
    """Size of each letter of the table, in layers of a kind."""
    of_kind = config.of_kind(kind)
    return {
        "L": config.num_periods,
        "V": config.vocab_size,
        "D": config.d_model,
        "F": config.d_ff,
        "Q": config.num_heads,
        "K": of_kind.num_kv_heads,
        "H": of_kind.head_dim,
        "E": config.num_experts,
        "M": config.shared_d_ff,
        "P": config.q_latent,
        "Z": config.kv_latent,
        "A": config.cached_dim,
        "O": config.value_dim,
        "J": config.pair_dims - config.rope_dim,
        "I": len(config.indexed_layers),
        "B": config.index_heads,
        "T": config.index_dim,
        "p": config.layer_inputs,
        "a": config.num_layers * config.layer_inputs,
        "S": config.num_scores,
        "R": config.lora.rank,
        "N": config.delta_key_heads,
        "U": config.delta_group,
        "X": config.delta_key_dim,
        "Y": config.delta_value_dim,
        "C": config.delta_taps,
    }


def adapter_table(config: ModelConfig) -> tuple[WeightRule, ...]:
    """Every tensor of the adapters of `config` with PEFT's names; R is the rank.

    Example: layers.attention.q has lora_a [L, D, R], in PEFT [R, D] for each layer, and lora_b [L, R, Q, H],
    in PEFT [Q * H, R].

    Raises:
      UserError: PEFT has no such adapter for a tensor.
    """
    rows = []
    for row in weight_table(config):
        rule = functools.partial(WeightRule, sizes=row.sizes, numbers=row.numbers)
        path, _, leaf = row.path.rpartition(".")
        name = path.split(".")[-1]
        if leaf != "weight" or TARGET_OF.get(name, name) not in config.lora.targets:
            continue
        if row.within or row.part:
            raise UserError(
                f"PEFT has one adapter for all of {row.name}, and here its parts have their own; merge the "
                "adapters into the model instead (without --adapter_only)"
            )
        name = f"base_model.model.{row.name.removesuffix('.weight')}"
        if len(row.stored.split()) != 2:
            raise UserError(
                f"PEFT has no adapters for single experts of {row.name}; merge the adapters into the model, "
                f"or leave {path.split('.')[-1]} out of model.lora.targets"
            )
        outs, ins = row.stored.split()
        stack = row.stacked
        rows += [
            rule(f"{name}.lora_A.weight", f"R {ins}", f"{path}.lora_a", f"{stack}{ins}R"),
            rule(f"{name}.lora_B.weight", f"{outs} R", f"{path}.lora_b", f"{stack}R{outs}"),
        ]
    return tuple(rows)


def tensors_of(table: Iterable[WeightRule]) -> dict[str, list[tuple[WeightRule, tuple[int, ...]]]]:
    """The rules and positions of every tensor of a table, by its name and in the table's order."""
    found: dict[str, list[tuple[WeightRule, tuple[int, ...]]]] = {}
    for row in table:
        for at in row.positions():
            found.setdefault(row.tensor_name(at), []).append((row, at))
    return found


def bounds_of(index: tuple[slice, ...] | None, shape: Sequence[int]) -> Bounds:
    """Begin and end of a shard in each dimension, from the slices of a sharding."""
    assert index is not None, "every device of a sharding of this process has a part"
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def offset_of(position: Sequence[int], stacked: Bounds) -> np.ndarray:
    """The offset of a position within a shard."""
    offsets = [at - begin for at, (begin, _) in zip(position, stacked, strict=True)]
    return np.array(offsets, np.int32)


def leaf_at(tree: Any, path: str) -> Any:
    """The leaf of a tree at a path of the table."""
    for key in path.split("."):
        tree = tree[key]
    return tree
