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
    # (width, copies that a token passes) of the feed-forward networks of a layer.
    networks = [(model.d_ff, model.experts_per_token or 1)]
    networks += [(model.shared_d_ff, 1)] if model.shared_d_ff else []
    queries, keys = (n * model.head_dim for n in (model.num_heads, model.num_kv_heads))
    # (name, inputs, outputs, copies that a token passes) of each projection of a layer.
    attention = [
        ("q", width, queries, 1),
        ("k", width, keys, 1),
        ("v", width, keys, 1),
        ("o", queries, width, 1),
    ]
    if model.kv_latent:
        values = model.num_heads * model.value_dim
        attention = [
            ("q", model.q_latent or width, queries, 1),
            ("k", width, model.cached_dim, 1),
            ("v", model.kv_latent, values + queries - model.num_heads * model.rope_dim, 1),
            ("o", values, width, 1),
        ]
        attention += [("q", width, model.q_latent, 1)] if model.q_latent else []
    feed_forward = [
        side
        for inner, copies in networks
        for side in (
            ("gate", width, inner, copies),
            ("up", width, inner, copies),
            ("down", inner, width, copies),
        )
    ]
    weights = lambda sides: sum(copies * ins * outs for _, ins, outs, copies in sides)  # noqa: E731
    mixing = model.attention_layers * (weights(attention) + model.gated_attention * width * queries)
    mixing += (model.num_layers - model.attention_layers) * _delta_weights(model)
    dense = [
        ("gate", width, model.dense_d_ff, 1),
        ("up", width, model.dense_d_ff, 1),
        ("down", model.dense_d_ff, width, 1),
    ]
    first = model.first_dense_layers
    layer = weights(feed_forward) + width * (model.num_experts + model.shared_gate)
    layers = (model.num_layers - first) * layer + first * weights(dense)
    head = width * (model.num_scores or model.vocab_size)
    rank, targets = model.lora.rank, model.lora.targets
    adapters = sum(
        number * copies * rank * (ins + outs)
        for number, sides in (
            (model.num_layers, attention),
            (model.num_layers - first, feed_forward),
            (first, dense),
        )
        for name, ins, outs, copies in sides
        if name in targets
    )
    return TokenFlops(
        2.0 * (layers + mixing + head),
        2.0 * adapters if rank else 0.0,
    )


def _delta_weights(model: ModelConfig) -> int:
    """Multiplications of a token in a delta layer: its projections, and three passes over its states."""
    keys = 2 * model.delta_key_heads * model.delta_key_dim
    values, heads = model.delta_value_heads * model.delta_value_dim, model.delta_value_heads
    return model.d_model * (keys + 3 * values + 2 * heads) + 3 * values * model.delta_key_dim


def attention_flops(model: ModelConfig, lengths_B: np.ndarray) -> np.ndarray:
    """Operations of attention scores and weighted values in the forward pass, all layers: float64 [B].

    Training takes three times as many.

    Args:
      model: the shape.
      lengths_B: tokens of each sequence.
    """
    tokens_B = np.asarray(lengths_B, np.float64)
    full_B = tokens_B * (tokens_B + 1) / 2
    beyond_B = np.maximum(tokens_B - model.sliding_window, 0)
    # A token that lies m tokens beyond the first full window does not see the first m tokens.
    sliding_B = full_B - beyond_B * (beyond_B + 1) / 2
    num_sliding = sum(model.sliding_layers)
    pairs_B = (model.attention_layers - num_sliding) * full_B + num_sliding * sliding_B
    # Two matmuls, q.k and weights.v, of 2 operations for each pair, head and head dimension.
    return 2.0 * model.num_heads * model.pair_dims * pairs_B


def training_flops(model: ModelConfig, lengths_B: np.ndarray) -> np.ndarray:
    """Operations of the forward and backward pass over whole sequences: float64 [B]."""
    linear_B = np.asarray(lengths_B) * token_flops(model).training
    return linear_B + 3 * attention_flops(model, lengths_B)
