"""Sizes and operation counts of a model for the simulators: floats, computed once per model."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxrl.mesh.devices import abstract_mesh
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, parts_of
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.flops import attention_flops, token_flops


@dataclasses.dataclass(frozen=True)
class ModelNumbers:
    """Sizes and operation counts of one model.

    Attributes:
      layers: L.
      periods: iterations of the scan over the stack, which stages share.
      dense: parameters of the stack without experts, split by pipeline and tensor parallelism.
      experts: parameters of all experts, split in the same way and over the expert axis.
      outside: parameters of embedding, head and first dense layers, split by tensor parallelism only.
      token_flops: operations of a token's forward pass, without attention to other tokens.
      down_flops: those of the last product of each layer, which a backward pass does not need again.
      pair_flops: operations of attention between two tokens, all layers, without windows.
      width: D.
      kept_values: values per token of width D that the backward pass of a layer needs.
      split_values: those of them that tensor parallelism splits.
      vocabulary: logits or scores per token.
      cached: K, and keys and values per token, of the layers with as many heads.
    """

    layers: int
    periods: int
    dense: float
    experts: float
    outside: float
    token_flops: float
    down_flops: float
    pair_flops: float
    width: int
    kept_values: float
    split_values: float
    vocabulary: int
    cached: tuple[tuple[int, float], ...]

    def part_of_stage(self, p: int) -> float:
        """The part of the stack that each of p stages has and computes: 1 / p, or more with absent layers."""
        return -(-self.periods // p) / self.periods

    def params_of_shard(self, p: int, t: int, expert: int = 1) -> float:
        """Parameters per device with p stages, t tensor and some expert shards, without FSDP."""
        stack = (self.dense + self.experts / expert) * self.part_of_stage(p)
        return (stack + self.outside) / t

    def cache_values_of_shard(self, p: int, t: int) -> float:
        """Cached values per token and device; kv heads are split as far as t divides them (mesh.rules)."""
        return sum(values / _kv_parts(heads, t) for heads, values in self.cached) / p


@functools.lru_cache(maxsize=1024)
def _kv_parts(kv_heads: int, t: int) -> int:
    mesh = abstract_mesh(ParallelLayout(1, t, 1, 1, t))
    return parts_of(("kv_heads",), (kv_heads,), GENERATE_RULES, mesh)[0]


@functools.lru_cache(maxsize=256)
def model_numbers(model: ModelConfig) -> ModelNumbers:
    """Counts a model once; every simulated layout of it asks for these numbers."""
    width = model.d_model
    outside = model.vocab_size * width
    outside += outside if model.has_unembedding else model.num_scores * width
    outside += model.vocab_size * model.num_layers * model.layer_inputs
    first = model.first_dense_layers
    if first:
        stack = dataclasses.replace(
            model, num_layers=model.num_layers - first, first_dense_layers=0, dense_d_ff=0
        )
        outside += model.num_params - stack.num_params
    used = model.d_ff * (model.experts_per_token or 1) + model.shared_d_ff
    layers = model.of_attention_layers
    heads = [2 * (model.num_heads + layer.num_kv_heads) * layer.head_dim for layer in layers]
    cached: dict[int, float] = {}
    for layer in model.of_cached_layers:
        values = (1 if model.kv_latent else 2) * layer.cached_heads * layer.cached_dim
        cached[layer.cached_heads] = cached.get(layer.cached_heads, 0.0) + values
    split = sum(heads) / len(heads) + 3 * used
    experts = (model.num_layers - first) * model.num_experts * 3 * width * model.d_ff
    return ModelNumbers(
        layers=model.num_layers,
        periods=model.num_periods,
        dense=float(model.num_params - outside - width - experts),
        experts=float(experts),
        outside=float(outside),
        token_flops=token_flops(model).weights,
        down_flops=2.0 * model.num_layers * width * used,
        pair_flops=2.0 * model.num_heads * sum(layer.pair_dims for layer in layers),
        width=width,
        kept_values=float(2 * width),
        split_values=float(split),
        vocabulary=model.num_scores or model.vocab_size,
        cached=tuple(cached.items()),
    )


@functools.lru_cache(maxsize=256)
def mean_attention_flops(
    model: ModelConfig, mean_tokens: float, mean_square: float, *, windows: bool = True
) -> float:
    """Mean operations of attention in a sequence's forward pass.

    Without sliding windows attention is quadratic, so mean and mean square of the lengths give the exact
    value. With windows the root mean square length stands for all lengths; without `windows` sliding layers
    count like others.
    """
    if not (model.sliding_window and windows):
        return model_numbers(model).pair_flops * (mean_square + mean_tokens) / 2
    return float(attention_flops(model, np.array([round(mean_square**0.5)]))[0])
