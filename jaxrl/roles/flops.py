"""Floating-point operations that a model's definition asks for: what rates and shares of the roof are of.

Counted: products with weights, two operations a weight and token, adapters and logits among them; scores and
values of attention, for the pairs that a token may see, so a packed row costs what its sequences cost. Not
counted: what is computed again (remat, chunks of logits, tiles of attention), what is computed for padding or
the masked future, and everything element by element.

B sequences
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class TokenFlops:
    """Operations of one token's forward pass, attention to others left out.

    Attributes:
      weights: products with the weights of layers and head.
      adapters: products with adapters, if there are any.
    """

    weights: float
    adapters: float

    @property
    def training(self) -> float:
        """Forward and backward. Frozen weights pass gradients on and get none of their own."""
        return (2 if self.adapters else 3) * self.weights + 3 * self.adapters


def token_flops(model: ModelConfig) -> TokenFlops:
    """Of one token."""
    width = model.d_model
    sides = _projections(model)
    layer = sum(copies * ins * outs for ins, outs, copies in sides.values())
    layer += width * model.num_experts
    head = width * (model.num_scores or model.vocab_size)
    rank, targets = model.lora.rank, model.lora.targets
    adapters = sum(
        copies * rank * (ins + outs)
        for name, (ins, outs, copies) in sides.items()
        if name in targets
    )
    return TokenFlops(
        2.0 * (model.num_layers * layer + head), 2.0 * model.num_layers * adapters if rank else 0.0
    )


def _projections(model: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """(inputs, outputs, how many a token meets) of each projection of a layer."""
    width, inner, experts = model.d_model, model.d_ff, model.experts_per_token or 1
    queries, keys = (n * model.head_dim for n in (model.num_heads, model.num_kv_heads))
    return {
        "q": (width, queries, 1),
        "k": (width, keys, 1),
        "v": (width, keys, 1),
        "o": (queries, width, 1),
        "gate": (width, inner, experts),
        "up": (width, inner, experts),
        "down": (inner, width, experts),
    }


def attention_flops(model: ModelConfig, lengths_B: np.ndarray) -> np.ndarray:
    """Of scores and weighted values in the forward pass of whole sequences, all layers: float64 [B].

    Training takes three times as many.
    """
    tokens_B = np.asarray(lengths_B, np.float64)
    full_B = tokens_B * (tokens_B + 1) / 2
    beyond_B = np.maximum(tokens_B - model.sliding_window, 0)
    # Tokens whose window is full do not see what lies before it.
    sliding_B = full_B - beyond_B * (beyond_B + 1) / 2
    num_sliding = sum(model.sliding_layers)
    pairs_B = (model.num_layers - num_sliding) * full_B + num_sliding * sliding_B
    return 4.0 * model.num_heads * model.head_dim * pairs_B


def training_flops(model: ModelConfig, lengths_B: np.ndarray) -> np.ndarray:
    """Of a forward and a backward pass over whole sequences: float64 [B]."""
    linear_B = np.asarray(lengths_B) * token_flops(model).training
    return linear_B + 3 * attention_flops(model, lengths_B)
