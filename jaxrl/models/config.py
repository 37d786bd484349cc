"""The shape of a decoder. One dataclass covers the Qwen2, Qwen3 and Llama families."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of rotary wavelengths; lengths in tokens."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a pre-norm decoder with RMSNorm, SwiGLU, rotary positions and grouped queries.

    The defaults are those of the demo's Qwen2-architecture model.

    Attributes:
      vocab_size: rows of the embedding, at least the tokenizer's size.
      num_tokens: ids the model may emit; rows above are padding and get no probability. 0 means all.
      num_layers, d_model, d_ff: depth, width, width of the feed-forward network.
      num_heads, num_kv_heads, head_dim: query heads, key-value heads, size of each.
      rope_theta, rope_scaling: base of the rotary wavelengths, and Llama 3.1's scaling if any.
      rms_norm_eps: added to the mean square before its root.
      tie_embeddings: the unembedding is the embedding transposed.
      qkv_bias: biases on the query, key and value projections (Qwen2).
      qk_norm: RMSNorm over head_dim on queries and keys before the rotation (Qwen3).
    """

    vocab_size: int = 128
    num_tokens: int = 0
    num_layers: int = 4
    d_model: int = 128
    d_ff: int = 384
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = True
    qk_norm: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "each key-value head serves an equal group of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions pair its halves")
        if self.num_tokens > self.vocab_size:
            raise ValueError(
                f"num_tokens {self.num_tokens} exceeds vocab_size {self.vocab_size}; "
                "raise vocab_size to at least the tokenizer's size"
            )

    @property
    def live_tokens(self) -> int:
        """Ids that can be emitted."""
        return self.num_tokens or self.vocab_size

    @property
    def num_params(self) -> int:
        """Parameters, a tied unembedding counted once."""
        d, h = self.d_model, self.head_dim
        attention = 2 * d * h * (self.num_heads + self.num_kv_heads)
        if self.qkv_bias:
            attention += (self.num_heads + 2 * self.num_kv_heads) * h
        if self.qk_norm:
            attention += 2 * h
        layer = attention + 3 * d * self.d_ff + 2 * d
        return self.num_layers * layer + d + self.vocab_size * d * (1 if self.tie_embeddings else 2)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of the key-value cache per token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value
