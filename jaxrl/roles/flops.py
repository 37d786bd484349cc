"""Model FLOPs: floating-point operations that a model needs by definition. `perf/mfu` is computed from them.

Counted: matmuls with weights (adapters and logits included) at two operations per weight and token; the
attention matmuls for visible pairs of tokens, so a packed row costs as much as its sequences. Not counted:
recomputation (remat, chunks of logits, tiles of attention), padding, masked future tokens, and elementwise
operations.

B sequences
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class TokenFlops:
    """Operations of the forward pass of one token, without attention scores and values.

    Attributes:
      weights: operations of matmuls with the weights of layers and head.
      adapters: operations of matmuls with adapters; 0 without adapters.
    """

    weights: float
    adapters: float

    @property
    def training(self) -> float:
        """Operations of the forward and backward pass."""
        # The backward pass costs two matmuls per weight: one for the gradient of the input, one for that of
        # the weight. Weights frozen below adapters need the first only.
        return (2 if self.adapters else 3) * self.weights + 3 * self.adapters


def token_flops(model: ModelConfig) -> TokenFlops:
    """The operations of one token."""
    width = model.d_model
    # (name, inputs, outputs, copies that a token passes) of the projections of all layers.
    sides: list[tuple[str, int, int, int]] = []
    networks = [(model.d_ff, model.experts_per_token or 1)]
    networks += [(model.shared_d_ff, 1)] if model.shared_d_ff else []
    sparse = model.num_layers - model.first_dense_layers
    networks = [(inner, sparse * copies) for inner, copies in networks]
    networks += [(model.dense_d_ff, model.first_dense_layers)]
    networks += [(model.d_ff, model.sharing_layers)] * model.double_wide_sharing
    for inner, copies in networks:
        sides += [("gate", width, inner, copies), ("up", width, inner, copies)]
        sides += [("down", inner, width, copies)]
    for layer in model.of_attention_layers:
        queries = layer.num_heads * layer.head_dim
        if model.kv_latent:
            # Latent attention: one projection makes the latent and the rotated part of the keys; another one
            # makes values, and the rest of the keys, from the latent.
            values = model.num_heads * model.value_dim
            sides += [("q", model.q_latent or width, queries, 1), ("k", width, model.cached_dim, 1)]
            sides += [("q", width, model.q_latent, 1)] * bool(model.q_latent)
            outs = values + queries - model.num_heads * model.rope_dim
            sides += [("v", model.kv_latent, outs, 1), ("o", values, width, 1)]
            continue
        sides += [("q", width, queries, 1)] * (1 + model.gated_attention)
        sides += [("o", queries, width, 1)]
    for layer in [] if model.kv_latent else model.of_cached_layers:
        keys = layer.num_kv_heads * layer.head_dim
        sides += [("k", width, keys, 1), ("v", width, keys * (not layer.keys_as_values), 1)]
    # Three passes over the states of delta layers, and their projections.
    deltas, heads = model.num_layers - model.attention_layers, model.delta_value_heads
    keys, values = model.delta_key_heads * model.delta_key_dim, heads * model.delta_value_dim
    delta_sides = {"q": keys, "k": keys, "v": values, "z": values, "a": heads, "b": heads}
    sides += [(name, width, outs, deltas) for name, outs in delta_sides.items()]
    sides += [("o", values, width, deltas)]
    others = sparse * width * (model.num_experts + model.shared_gate)
    others += 3 * model.num_layers * model.layer_inputs * width
    others += deltas * 3 * values * model.delta_key_dim
    head = width * (model.num_scores or model.vocab_size)
    rank, targets = model.lora.rank, model.lora.targets
    adapters = sum(
        copies * rank * (ins + outs) for name, ins, outs, copies in sides if name in targets
    )
    weights = sum(copies * ins * outs for _, ins, outs, copies in sides)
    return TokenFlops(2.0 * (weights + others + head), 2.0 * adapters)


def attention_flops(model: ModelConfig, lengths_B: np.ndarray) -> np.ndarray:
    """Operations of attention scores and weighted values in the forward pass, all layers: float64 [B].

    Training takes three times as many.

    Args:
      model: the shape.
      lengths_B: tokens of each sequence.
    """
    tokens_B = np.asarray(lengths_B, np.float64)
    # A token sees itself and all tokens before it.
    full_B = tokens_B * (tokens_B + 1) / 2
    beyond_B = np.maximum(tokens_B - model.sliding_window, 0)
    # A token that lies m tokens beyond the first full window does not see the first m tokens.
    sliding_B = full_B - beyond_B * (beyond_B + 1) / 2
    num_sliding = sum(model.sliding_layers)
    sliding_dims = num_sliding * model.pair_dims
    full_dims = sum(layer.pair_dims for layer in model.of_attention_layers) - sliding_dims
    pairs_B = full_dims * full_B + sliding_dims * sliding_B
    # Two matmuls, q.k and weights.v, of 2 operations for each pair, head and head dimension.
    return 2.0 * model.num_heads * pairs_B


def training_flops(model: ModelConfig, lengths_B: np.ndarray) -> np.ndarray:
    """Operations of the forward and backward pass over whole sequences: float64 [B]."""
    linear_B = np.asarray(lengths_B) * token_flops(model).training
    return linear_B + 3 * attention_flops(model, lengths_B)
