"""The shape of a decoder. One dataclass covers the Qwen2, Qwen3, Qwen3-MoE and Llama families."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from jaxrl.checks import (
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    at_least,
    check_fields,
    one_of,
    positive,
    token_count,
)

# Projections a low-rank adapter can sit on, by the name of our leaf; experts have the last three.
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of rotary wavelengths; lengths in tokens."""

    factor: Annotated[float, at_least(1)] = 8.0
    low_freq_factor: Annotated[float, positive()] = 1.0
    high_freq_factor: Annotated[float, positive()] = 4.0
    original_max_positions: Annotated[int, token_count(1)] = 8192

    def __post_init__(self):
        check_fields(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} is not above low_freq_factor "
                f"{self.low_freq_factor}; wavelengths between the two are blended, so copy the published "
                "values"
            )


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): W x + alpha / rank * B A x, W frozen.

    Attributes:
      rank: width of the adapters; 0 trains all weights and has none.
      alpha: scale of what they add, divided by the rank.
      targets: projections that have one, names of `LORA_TARGETS`.
    """

    rank: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    alpha: Annotated[float, positive()] = 32.0
    targets: tuple[Annotated[str, one_of(*LORA_TARGETS)], ...] = LORA_TARGETS

    def __post_init__(self):
        check_fields(self)
        if self.rank and not self.targets:
            raise ValueError(
                f"rank {self.rank} without targets trains nothing; name some of {', '.join(LORA_TARGETS)}"
            )

    @property
    def scale(self) -> float:
        """What the adapter's output is multiplied by."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a pre-norm decoder with RMSNorm, SwiGLU, rotary positions and grouped queries.

    The defaults are those of the demo's Qwen2-architecture model.

    Attributes:
      vocab_size: rows of the embedding, at least the tokenizer's size.
      num_tokens: ids the model may emit; rows above are padding and get no probability. 0 means all.
      num_layers, d_model: depth, width.
      d_ff: width of the feed-forward network, of each expert in a mixture.
      num_heads, num_kv_heads, head_dim: query heads, key-value heads, size of each.
      rope_theta, rope_scaling: base of the rotary wavelengths, and Llama 3.1's scaling if any.
      rms_norm_eps: added to the mean square before its root.
      tie_embeddings: the unembedding is the embedding transposed.
      qkv_bias: biases on the query, key and value projections (Qwen2).
      qk_norm: RMSNorm over head_dim on queries and keys before the rotation (Qwen3).
      num_experts: experts of every layer (Qwen3-MoE); 0 is a dense feed-forward network.
      experts_per_token: how many of them each token is sent to.
      normalize_experts: the weights of a token's experts sum to 1 (`norm_topk_prob`).
      num_scores: 0 is a language model; otherwise every token gets so many scores in the place of
        logits, as a reward, cost or value model needs one.
      lora: low-rank adapters, if any.
    """

    vocab_size: Annotated[int, at_least(1, at_most=MAX_VOCABULARY)] = 128
    num_tokens: Annotated[int, at_least(0, at_most=MAX_VOCABULARY)] = 0
    num_layers: Annotated[int, at_least(1, at_most=MAX_LAYERS)] = 4
    d_model: Annotated[int, at_least(1, at_most=MAX_WIDTH)] = 128
    d_ff: Annotated[int, at_least(1, at_most=MAX_WIDTH)] = 384
    num_heads: Annotated[int, at_least(1, at_most=MAX_WIDTH)] = 4
    num_kv_heads: Annotated[int, at_least(1, at_most=MAX_WIDTH)] = 2
    head_dim: Annotated[int, at_least(2, at_most=MAX_WIDTH)] = 32
    rope_theta: Annotated[float, at_least(1, at_most=1e11)] = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: Annotated[float, positive(at_most=1)] = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = True
    qk_norm: bool = False
    num_experts: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    experts_per_token: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    normalize_experts: bool = True
    num_scores: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)

    def __post_init__(self):
        check_fields(self)
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
        fewest = 1 if self.num_experts else 0
        if not fewest <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} of num_experts {self.num_experts}: a token "
                "goes to at least one expert of a mixture and at most to all; a dense model has 0 of 0"
            )

    @property
    def live_tokens(self) -> int:
        """Ids that can be emitted."""
        return self.num_tokens or self.vocab_size

    @property
    def has_unembedding(self) -> bool:
        """The logits have a matrix of their own."""
        return not self.tie_embeddings and not self.num_scores

    @property
    def num_params(self) -> int:
        """Parameters without adapters, a tied unembedding counted once."""
        return self._count(self.num_experts)

    @property
    def num_active_params(self) -> int:
        """Parameters that one token meets; fewer than `num_params` in a mixture of experts."""
        return self._count(self.experts_per_token)

    def _count(self, num_experts: int) -> int:
        d, h = self.d_model, self.head_dim
        attention = 2 * d * h * (self.num_heads + self.num_kv_heads)
        if self.qkv_bias:
            attention += (self.num_heads + 2 * self.num_kv_heads) * h
        if self.qk_norm:
            attention += 2 * h
        feed_forward = 3 * d * self.d_ff
        if self.num_experts:
            feed_forward = d * self.num_experts + num_experts * feed_forward
        layer = attention + feed_forward + 2 * d
        head = self.vocab_size * d if self.has_unembedding else self.num_scores * d
        return self.num_layers * layer + d + self.vocab_size * d + head

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of the key-value cache per token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value
