"""The shape of a decoder: one dataclass for all families (docs/models.md)."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, ClassVar

from jaxrl.checks import (
    MAX_COEFFICIENT,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    at_least,
    coefficient,
    one_of,
    positive,
    positive_coefficient,
    settings,
    token_count,
)
from jaxrl.errors import UserError

# Trees of weights whose first dimension counts layers or periods.
STACKS = ("layers", "first", "last")
# Projections that can have a low-rank adapter, by the name of our leaf; experts have the last three.
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
# The names there of leaves with other names. The gate of attention is a part of q in checkpoints, and goes
# with it.
TARGET_OF = {"q_gate": "q", "q_a": "q", "kv_a": "k", "kv_b": "v"}
# Gates of feed-forward networks, see `gates.GATES`.
ACTIVATIONS = ("silu", "clamped_silu", "gelu_tanh")


@settings
class RopeScaling:
    """Scaling of rotary wavelengths for longer contexts; lengths in tokens."""

    factor: Annotated[float, at_least(1, at_most=MAX_COEFFICIENT)] = 8.0
    """Factor of the wavelengths."""
    low_freq_factor: Annotated[float, positive_coefficient()] = 1.0
    high_freq_factor: Annotated[float, positive_coefficient()] = 4.0
    """Parameters of "llama3" only."""
    original_max_positions: Annotated[int, token_count(1)] = 8192
    """Longest text before the scaling, for all kinds but "linear"."""
    beta_fast: Annotated[float, positive_coefficient()] = 32.0
    beta_slow: Annotated[float, positive_coefficient()] = 1.0
    """Turns within `original_max_positions` from which a wavelength stays, and up to which it is stretched
    by the whole factor ("yarn").
    """
    truncate: bool = True
    """Whether the bounds between the two are rounded to whole dimensions ("yarn")."""
    attention_factor: Annotated[float, coefficient()] = 0.0
    """Factor of queries and keys ("yarn", "longrope"); 0 for the one that follows from the other values."""
    mscale: Annotated[float, coefficient()] = 0.0
    mscale_all_dim: Annotated[float, coefficient()] = 0.0
    """Coefficients of the logarithm in `attention_factor`, if both are set ("yarn")."""
    short_factors: tuple[Annotated[float, positive_coefficient()], ...] = ()
    long_factors: tuple[Annotated[float, positive_coefficient()], ...] = ()
    """Factors of each wavelength for texts of up to `original_max_positions`, and for longer ones
    ("longrope").
    """
    long: bool = False
    """Whether `long_factors` hold. One list holds for a whole run: cached keys depend on it."""
    query_beta: Annotated[float, coefficient()] = 0.0
    """Queries grow with their position, by 1 + `query_beta` ln(1 + floor(position /
    `original_max_positions`)) (Ministral 3).
    """
    rotated: Annotated[float, positive(at_most=1)] = 1.0
    """Part of the pairs of a head that turn, those of the shortest wavelengths ("proportional")."""
    kind: Annotated[str, one_of("llama3", "linear", "yarn", "longrope", "proportional")] = "llama3"
    """"llama3" (Llama 3.1) stretches long wavelengths only, "linear" (Gemma 3) all of them, "yarn"
    (arXiv 2309.00071) long ones, "longrope" (Phi-4-mini) each by a factor of its own. The last two also
    scale queries and keys. "proportional" (Gemma 4) stretches none, and leaves out long ones.
    """

    def __post_init__(self):
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast {self.beta_fast} is not above beta_slow {self.beta_slow}; wavelengths between "
                "the two are blended, so copy the published values"
            )
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} is not above low_freq_factor "
                f"{self.low_freq_factor}; wavelengths between the two are blended, so copy the published "
                "values"
            )

        if self.kind == "longrope" and self.original_max_positions < 2:
            raise ValueError(
                f"original_max_positions {self.original_max_positions} has no logarithm to scale by; copy "
                "the published values"
            )

    @property
    def magnitude(self) -> float:
        """The factor of rotated queries and of rotated keys."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor:
            return self.attention_factor
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_positions))
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_factor(self) -> float:
        """The factor of attention scores in latent attention, of which only some dimensions are rotated."""
        return self._growth(self.mscale_all_dim) ** 2

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1


@settings
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): W x + alpha / rank * B A x, W frozen."""

    rank: Annotated[int, at_least(0, at_most=65_536)] = 0
    """Rank of the adapters; 0 trains all weights, without adapters."""
    alpha: Annotated[float, positive_coefficient()] = 32.0
    """Scale of the adapters' output, divided by the rank."""
    targets: tuple[Annotated[str, one_of(*LORA_TARGETS)], ...] = LORA_TARGETS
    """Projections with an adapter, names of `LORA_TARGETS`."""

    def __post_init__(self):
        if self.rank and not self.targets:
            raise ValueError(
                f"rank {self.rank} without targets trains nothing; name some of {', '.join(LORA_TARGETS)}"
            )

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / self.rank


@settings
class ModelConfig:
    """Architecture of a decoder with RMSNorm, gated feed-forward, rotary positions and grouped queries.

    The defaults are those of the demo's Qwen2-architecture model.
    """

    # A checkpoint's config.json or `model_shapes` gives all other fields, and no command line.
    SETTINGS: ClassVar[tuple[str, ...]] = (
        *("vocab_size", "num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim"),
        "lora",
    )

    vocab_size: Annotated[int, at_least(1, at_most=MAX_VOCABULARY)] = 128
    """Rows of the embedding, at least the tokenizer's size."""
    num_tokens: Annotated[int, at_least(0, at_most=MAX_VOCABULARY)] = 0
    """Number of token ids; rows above are padding and get no probability. 0 for all rows."""
    num_layers: Annotated[int, at_least(1, at_most=MAX_LAYERS)] = 4
    d_model: Annotated[int, at_least(1, at_most=MAX_WIDTH)] = 128
    """Depth, width."""
    d_ff: Annotated[int, at_least(1, at_most=MAX_WIDTH)] = 384
    """Width of the feed-forward network, of each expert in a mixture."""
    num_heads: Annotated[int, at_least(1, at_most=MAX_WIDTH)] = 4
    num_kv_heads: Annotated[int, at_least(1, at_most=MAX_WIDTH)] = 2
    head_dim: Annotated[int, at_least(2, at_most=MAX_WIDTH)] = 32
    """Query heads, key-value heads, size of each."""
    full_head_dim: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    full_kv_heads: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    """Head size and key-value heads of full layers, if others have other ones (Gemma 4); 0 for the same."""
    rope_theta: Annotated[float, at_least(1, at_most=1e11)] = 10_000.0
    rope_scaling: RopeScaling | None = None
    """Base of the rotary wavelengths, and their scaling; None for none."""
    rope_local_theta: Annotated[float, at_least(0, at_most=1e11)] = 0.0
    """Rotary base of layers with a sliding window, which are not scaled (Gemma 3, OLMo 3); 0 for
    the base of the other layers.
    """
    rotary_fraction: Annotated[float, positive(at_most=1)] = 1.0
    """Leading part of each head that is rotated (Phi-4-mini: 0.75)."""
    sliding_window: Annotated[int, token_count(0)] = 0
    """Tokens that a token of a sliding layer sees, itself included; 0 if no layer slides."""
    layer_pattern: tuple[Annotated[str, one_of("full", "sliding", "unrotated", "delta")], ...] = (
        "full",
    )
    """Kinds of layers, repeated from the first: attention that is "full", "sliding", or
    "unrotated", which is full and without rotary positions (SmolLM3), or "delta", a gated delta net in place
    of attention (Qwen3.5). A whole number of patterns makes up the model if weights of its kinds have other
    shapes.
    """
    delta_key_heads: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    delta_value_heads: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    delta_key_dim: Annotated[int, at_least(1, at_most=MAX_WIDTH)] = 128
    delta_value_dim: Annotated[int, at_least(1, at_most=MAX_WIDTH)] = 128
    """Heads of queries and keys of delta layers, heads of their values, and the size of each."""
    delta_taps: Annotated[int, at_least(2, at_most=64)] = 4
    """Tokens that the convolution of a delta layer sees."""
    rms_norm_eps: Annotated[float, positive(at_most=0.1)] = 1e-6
    """Added to the mean square before its root."""
    tie_embeddings: bool = True
    """The unembedding is the embedding transposed."""
    qkv_bias: bool = True
    """Biases on the query, key and value projections (Qwen2)."""
    output_bias: bool = False
    """Bias on the output projection of attention (gpt-oss)."""
    attention_sinks: bool = False
    """Every query head has one more score, a weight, which takes probability and adds no value (gpt-oss)."""
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys before the rotation (Qwen3, Gemma 3)."""
    qk_norm_over_heads: bool = False
    """These norms run over all heads together (OLMo 3)."""
    value_norm: bool = False
    """RMSNorm over head_dim on values, without weights (Gemma 4)."""
    keys_as_values: bool = False
    """Full layers have no projection of values: they are the keys before norm and rotation (Gemma 4)."""
    gated_attention: bool = False
    """The output of attention is multiplied by the sigmoid of another projection (Qwen3.5)."""
    kv_latent: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    q_latent: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    """Sizes of the vectors that keys and values, and queries, are projections of (DeepSeek-V3); 0 for
    none.
    """
    rope_dim: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    value_dim: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    """With `kv_latent` the number of last dimensions of a head that are rotated, and the size of its
    values.
    """
    interleaved_rotary: bool = False
    """Rotated pairs are neighbours in checkpoints, not a half of the dimensions apart (DeepSeek-V3)."""
    indexer_pattern: tuple[bool, ...] = ()
    """Whether layers have an indexer, which chooses `index_topk` tokens to attend to (DeepSeek-V3.2),
    repeated from the first; () for none. Texts are at most so long that it chooses all, and it is not run.
    """
    index_topk: Annotated[int, token_count(0)] = 0
    index_heads: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    index_dim: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    """Tokens that an indexer chooses, heads of its queries, and their size; 0 for none."""
    query_pre_attn_scalar: Annotated[float, at_least(0, at_most=MAX_WIDTH)] = 0.0
    """Attention scores are divided by its square root; 0 for head_dim."""
    attention_softcap: Annotated[float, coefficient()] = 0.0
    logits_softcap: Annotated[float, coefficient()] = 0.0
    """C of the cap c * tanh(x / c) on attention scores and on logits (Gemma 2); 0 for none."""
    activation: Annotated[str, one_of(*ACTIVATIONS)] = "silu"
    """Gate of the feed-forward network: silu(gate) * up, the same with gelu, or "clamped_silu", which
    bounds both and adds 1 to up (gpt-oss).
    """
    pre_norms: bool = True
    """Norms before attention and feed-forward; OLMo 3 has none."""
    post_norms: bool = False
    """Norms after attention and feed-forward, before the residual sum (Gemma, OLMo 3)."""
    zero_centered_norms: bool = False
    """Norm weights are stored as scale - 1 (Gemma)."""
    scale_embeddings: bool = False
    """Multiply embeddings by the square root of d_model (Gemma)."""
    scaled_layers: bool = False
    """Each layer multiplies its output, residual sum included, by a number that is not trained (Gemma 4)."""
    layer_inputs: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    """Size of the input that each layer has for each token, from an embedding of its own (Gemma 4 E2B and
    E4B); 0 for none.
    """
    sharing_layers: Annotated[int, at_least(0, at_most=MAX_LAYERS)] = 0
    double_wide_sharing: bool = False
    """Number of last layers that attend to the keys and values of the last layer of their kind before them
    (Gemma 4 E2B and E4B), and whether their feed-forward networks are twice as wide.
    """
    num_experts: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    """Experts of every layer (Qwen3-MoE); 0 for a dense feed-forward network."""
    experts_per_token: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    """Number of experts that each token is sent to."""
    normalize_experts: bool = True
    """Scale the weights of a token's experts to sum to 1 (`norm_topk_prob`)."""
    expert_biases: bool = False
    """Biases on the router and on the projections of experts (gpt-oss)."""
    sigmoid_routing: bool = False
    """Weights of experts are sigmoids of their logits, and the choice adds a frozen correction bias to them
    (DeepSeek-V3, GLM-4.5); False for a softmax.
    """
    expert_groups: Annotated[int, at_least(1, at_most=MAX_WIDTH)] = 1
    groups_per_token: Annotated[int, at_least(1, at_most=MAX_WIDTH)] = 1
    """Groups of the experts, and groups that a token chooses its experts from: those with the largest sum of
    their two best (DeepSeek-V3).
    """
    routed_scale: Annotated[float, positive_coefficient()] = 1.0
    """Factor of the weights of a token's experts."""
    first_dense_layers: Annotated[int, at_least(0, at_most=MAX_LAYERS)] = 0
    dense_d_ff: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    """Number of first layers that have a dense feed-forward network in place of experts, and its width."""
    shared_d_ff: Annotated[int, at_least(0, at_most=MAX_WIDTH)] = 0
    """Width of the shared expert, a feed-forward network of all tokens beside the experts; 0 for none."""
    shared_gate: bool = False
    """The output of the shared expert is multiplied by the sigmoid of one projection (Qwen3.5-MoE)."""
    expert_norms: bool = False
    """Router and experts read the residual sum through norms of their own, what experts and shared expert
    return is normalised before it is added up, and each expert has a factor (Gemma 4).
    """
    num_scores: Annotated[int, at_least(0, at_most=1000)] = 0
    """Number of scores per token in place of logits, for reward, cost and value models; 0 for a
    language model.
    """
    value_head: bool = False
    """A language model has a head of one score too, the value function of an actor-critic."""
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    """Low-rank adapters."""

    def __post_init__(self):
        self._check_heads()
        self._check_rotation()
        self._check_latent_attention()
        self._check_experts()
        self._check_layer_pattern()
        if self.num_tokens > self.vocab_size:
            raise ValueError(
                f"num_tokens {self.num_tokens} exceeds vocab_size {self.vocab_size}; "
                "raise vocab_size to at least the tokenizer's size"
            )

    def _check_heads(self) -> None:
        for heads in ("num_kv_heads", "full_kv_heads"):
            if self.num_heads % (getattr(self, heads) or 1):
                raise ValueError(
                    f"num_heads {self.num_heads} is not a multiple of {heads} {getattr(self, heads)}; "
                    "each key-value head serves an equal group of query heads"
                )
        for size in ("head_dim", "full_head_dim"):
            if getattr(self, size) % 2:
                raise ValueError(
                    f"{size} {getattr(self, size)} is odd; rotary positions pair its halves"
                )
        if self.qk_norm_over_heads and not self.qk_norm:
            raise ValueError("qk_norm_over_heads without qk_norm; set both, or none")

    def _check_rotation(self) -> None:
        if self.rotary_dims % 2 or not self.rotary_dims:
            raise ValueError(
                f"rotary_fraction {self.rotary_fraction:g} of head_dim {self.head_dim} is "
                f"{self.rotary_dims}; rotary positions pair its halves, so it must be even"
            )
        rope = self.rope_scaling
        if rope is not None and rope.kind == "longrope":
            counts = len(rope.short_factors), len(rope.long_factors)
            if counts != (self.rotary_dims // 2,) * 2:
                raise ValueError(
                    f"{counts[0]} short_factors and {counts[1]} long_factors of {self.rotary_dims} rotated "
                    f"dimensions; each of the {self.rotary_dims // 2} wavelengths has one"
                )
        if rope is not None and rope.kind == "yarn" and self.rope_theta == 1:
            raise ValueError("rope_theta 1 makes all wavelengths equal; copy the published value")

    def _check_latent_attention(self) -> None:
        latent = self.kv_latent, self.rope_dim, self.value_dim
        if not all(latent) == any(latent) or (self.q_latent and not any(latent)):
            raise ValueError(
                f"kv_latent {latent[0]} with rope_dim {latent[1]}, value_dim {latent[2]} and q_latent "
                f"{self.q_latent}: the first three are 1 or more for latent attention, else all are 0"
            )
        if self.kv_latent and (
            self.num_kv_heads != self.num_heads
            or self.rope_dim >= self.head_dim
            or self.layer_pattern != ("full",)
            or self.query_pre_attn_scalar
            or self.attention_softcap
            or self.rotary_fraction != 1
            or (self.qkv_bias or self.output_bias or self.qk_norm)
            or (self.gated_attention or self.attention_sinks)
            or (self.rope_scaling is not None and self.rope_scaling.query_beta)
        ):
            raise ValueError(
                f"kv_latent {self.kv_latent} with num_heads {self.num_heads}, num_kv_heads "
                f"{self.num_kv_heads}, head_dim {self.head_dim} and rope_dim {self.rope_dim}: latent "
                "attention has as many heads of keys, a part of each rotated, and no biases, norms, gates, "
                "windows, caps or scaled queries"
            )
        indexer = self.index_topk, self.index_heads, self.index_dim, len(self.indexer_pattern)
        if not all(indexer) == any(indexer) or (any(indexer) and not self.q_latent):
            raise ValueError(
                f"index_topk {indexer[0]}, index_heads {indexer[1]}, index_dim {indexer[2]} and an "
                f"indexer_pattern of {indexer[3]} with q_latent {self.q_latent}: indexers have all of them, "
                "other models none of the first four"
            )

    def _check_experts(self) -> None:
        if not bool(self.num_experts) <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} of num_experts {self.num_experts}: a token "
                "goes to at least one expert of a mixture and at most to all; a dense model has 0 of 0"
            )
        if self.expert_biases and not self.num_experts:
            raise ValueError("expert_biases with num_experts 0; a dense model has none")
        if (self.shared_d_ff and not self.num_experts) or (
            self.shared_gate and not self.shared_d_ff
        ):
            raise ValueError(
                f"shared_d_ff {self.shared_d_ff} and shared_gate {self.shared_gate} with num_experts "
                f"{self.num_experts}: a gate belongs to a shared expert, and that to a mixture"
            )
        if self.expert_norms and not self.shared_d_ff:
            raise ValueError(
                "expert_norms with shared_d_ff 0; one of them normalises a shared expert"
            )
        groups, in_group = self.expert_groups, self.num_experts // self.expert_groups
        if (groups > 1 or self.routed_scale != 1) and not self.sigmoid_routing:
            raise ValueError(
                f"expert_groups {groups} and routed_scale {self.routed_scale:g} without sigmoid_routing, to "
                "which they belong; set that, or both to 1"
            )
        if self.sigmoid_routing and not self.num_experts:
            raise ValueError("sigmoid_routing with num_experts 0; a dense model has no router")
        if max(groups, self.groups_per_token) > 1 and (
            in_group * groups != self.num_experts
            or in_group < 2
            or not self.experts_per_token / in_group <= self.groups_per_token <= groups
        ):
            raise ValueError(
                f"groups_per_token {self.groups_per_token} of expert_groups {groups} with experts_per_token "
                f"{self.experts_per_token} of num_experts {self.num_experts}: groups have equally many "
                "experts, two or more, and those of a token have room for its experts"
            )
        first = self.first_dense_layers
        if bool(first) != bool(self.dense_d_ff) or first >= self.num_layers:
            raise ValueError(
                f"first_dense_layers {first} of num_layers {self.num_layers}, with dense_d_ff "
                f"{self.dense_d_ff}: they are fewer than all, and both numbers are 0 or neither"
            )
        if first and (self.layer_pattern != ("full",) or not self.num_experts):
            raise ValueError(
                f"first_dense_layers {first} with layer_pattern {self.layer_pattern} and num_experts "
                f"{self.num_experts}: they are supported in mixtures with full attention"
            )

    def _check_layer_pattern(self) -> None:
        if not self.layer_pattern:
            raise ValueError("layer_pattern is empty; name the attention of one layer or more")
        if any(self.sliding_layers) != bool(self.sliding_window):
            raise ValueError(
                f"sliding_window {self.sliding_window} with layer_pattern {self.layer_pattern}: a pattern "
                "with sliding layers has a window of 1 or more tokens, another has 0"
            )
        heads = self.delta_key_heads, self.delta_value_heads
        if not all(heads) == any(heads) == ("delta" in self.layer_pattern):
            raise ValueError(
                f"delta_key_heads {heads[0]} and delta_value_heads {heads[1]} with layer_pattern "
                f"{self.layer_pattern}: both are 1 or more if some layers are delta nets, else 0"
            )
        if any(heads) and heads[1] % heads[0]:
            raise ValueError(
                f"delta_value_heads {heads[1]} is no multiple of delta_key_heads {heads[0]}; each key head "
                "serves an equal group of value heads"
            )
        sharing, inputs = self.sharing_layers, self.layer_inputs
        if (sharing or inputs) and (
            sharing >= self.num_layers
            or sharing % self.period
            or self.period == 1
            or self.num_experts
            or "delta" in self.layer_pattern
        ):
            raise ValueError(
                f"sharing_layers {sharing} of num_layers {self.num_layers} and layer_inputs {inputs} with "
                f"layer_pattern {self.layer_pattern}: they are supported in dense models with several kinds "
                "of attention, and the layers that share are whole patterns and fewer than all"
            )
        if (self.num_layers - self.first_dense_layers) % self.period:
            raise ValueError(
                f"num_layers {self.num_layers} is no multiple of the {self.period} layers of layer_pattern; "
                "with delta layers, or heads of two sizes, the pattern fits a whole number of times"
            )
        if any(heads) and self.post_norms:
            raise ValueError(
                "delta layers with post_norms; they are supported with norms before the blocks"
            )

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        repeats = -(-self.num_layers // len(self.layer_pattern))
        return (self.layer_pattern * repeats)[: self.num_layers]

    @property
    def sliding_layers(self) -> tuple[bool, ...]:
        """For each layer, True if it has a sliding window."""
        return tuple(kind == "sliding" for kind in self.layer_kinds)

    @property
    def indexed_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with an indexer."""
        pattern = self.indexer_pattern
        return tuple(i for i in range(self.num_layers) if pattern and pattern[i % len(pattern)])

    @property
    def has_state(self) -> bool:
        """Whether some layers keep a state in place of keys and values."""
        return "delta" in self.layer_pattern

    @property
    def period(self) -> int:
        """Layers of one iteration of the scan: 1, or a whole pattern if weights of its kinds differ."""
        differ = self.has_state or self.full_head_dim or self.full_kv_heads or self.keys_as_values
        differ = differ or self.layer_inputs or self.sharing_layers
        return len(self.layer_pattern) if differ else 1

    def of_kind(self, kind: str) -> ModelConfig:
        """The model with the heads of one kind of layer."""
        if kind != "full":
            return dataclasses.replace(self, keys_as_values=False)
        return dataclasses.replace(
            self,
            head_dim=self.full_head_dim or self.head_dim,
            num_kv_heads=self.full_kv_heads or self.num_kv_heads,
        )

    @property
    def largest_head(self) -> int:
        """The largest head size of attention."""
        return max(self.head_dim, self.full_head_dim)

    @property
    def of_attention_layers(self) -> list[ModelConfig]:
        """The model with the heads of each layer with attention."""
        kinds = {kind: self.of_kind(kind) for kind in self.layer_pattern}
        return [kinds[kind] for kind in self.layer_kinds if kind != "delta"]

    @property
    def mixture_layers(self) -> int:
        """The number of layers with experts."""
        return (self.num_layers - self.first_dense_layers) if self.num_experts else 0

    @property
    def num_periods(self) -> int:
        """Iterations of the scan over the stack, without first dense layers and sharing layers."""
        return (self.num_layers - self.first_dense_layers - self.sharing_layers) // self.period

    def check_stages(self, stages: int, *, sampling: bool = False) -> None:
        """Raises UserError if the stages of a pipeline would cut the model where it cannot be cut.

        Stages that sample hold equally many layers, as their caches do.
        """
        if (self.sharing_layers or self.layer_inputs) and stages > 1:
            raise UserError(
                f"the layout has {stages} pipeline stages, but layers of the model have inputs, or keys and "
                "values of earlier layers, which stages do not pass on; choose p = 1"
            )
        kind = "layers" if self.period == 1 else f"periods of {self.period} layers"
        whole = f"{self.num_periods} {kind}"
        if sampling and self.num_periods % stages:
            raise UserError(
                f"p_g={stages} pipeline stages of mesh.generate do not divide {whole} (num_layers "
                f"{self.num_layers}); choose p_g = {math.gcd(stages, self.num_periods)}"
            )
        used = -(-self.num_periods // self.periods_of_stage(stages))
        if used < stages:
            raise UserError(
                f"the layout has {stages} pipeline stages for {whole}, {self.periods_of_stage(stages)} each, "
                f"so {used} would have all of them; choose p = {used}"
            )

    def periods_of_stage(self, stages: int) -> int:
        """Iterations of the scan over a stage's part of the stack; the last stage may have fewer."""
        return -(-self.num_periods // stages)

    @property
    def attention_layers(self) -> int:
        """The number of layers with attention."""
        return self.num_layers - self.num_periods * self.layer_pattern.count("delta")

    @property
    def delta_group(self) -> int:
        """Value heads of each key head of a delta layer."""
        return self.delta_value_heads // max(1, self.delta_key_heads)

    @property
    def rotated_layers(self) -> tuple[bool, ...]:
        """For each layer, True if it has rotary positions."""
        return tuple(kind != "unrotated" for kind in self.layer_kinds)

    @property
    def rotary_dims(self) -> int:
        """Dimensions of a head that are rotated, leading ones but in latent attention."""
        return self.rope_dim or int(self.head_dim * self.rotary_fraction)

    @property
    def decodes_by_kernel(self) -> bool:
        """Whether kernels know its caches: of keys and values, in one array if layers differ."""
        plain = not (any(self.sliding_layers) or self.attention_softcap)
        return not self.kv_latent and (plain or self.has_one_cache)

    @property
    def has_one_cache(self) -> bool:
        """Whether all keys and values of the stack are one array, of which a layer has a number."""
        return self.period == 1 or self.attention_layers == self.num_periods

    @property
    def cached_heads(self) -> int:
        """The key-value heads of a cache; latents are one for all."""
        return 1 if self.kv_latent else self.num_kv_heads

    @property
    def cached_dim(self) -> int:
        """The size of a cached key; latents, which are values too, count once."""
        return self.kv_latent + self.rope_dim if self.kv_latent else self.head_dim

    @property
    def pair_dims(self) -> int:
        """Dimensions of a query head's key and value."""
        return self.head_dim + (self.value_dim or self.head_dim)

    def check_texts_of(self, tokens: int) -> None:
        """Raises UserError if the model computes something else for texts of up to `tokens` tokens."""
        if tokens > self.index_topk > 0:
            raise UserError(
                f"texts of up to {tokens} tokens, prompt and response, exceed index_topk {self.index_topk} "
                "of the model: longer ones need its sparse attention, which is not supported; lower "
                "data.max_prompt_tokens, rollout.max_response_tokens, or train.row_tokens for SFT from a file"
            )

    def for_texts_of(self, tokens: int) -> ModelConfig:
        """The model with the rotary factors of texts of up to `tokens` tokens, see `RopeScaling.long`.

        Raises:
          UserError: as `check_texts_of`.
        """
        self.check_texts_of(tokens)
        rope = self.rope_scaling
        if rope is None or rope.kind != "longrope":
            return self
        rope = dataclasses.replace(rope, long=tokens > rope.original_max_positions)
        return dataclasses.replace(self, rope_scaling=rope)

    @property
    def live_tokens(self) -> int:
        """The number of token ids that the model can emit."""
        return self.num_tokens or self.vocab_size

    @property
    def has_unembedding(self) -> bool:
        """Whether the unembedding is untied from the embedding."""
        return not self.tie_embeddings and not self.num_scores

    @property
    def num_params(self) -> int:
        """The number of parameters without adapters; a tied unembedding counts once."""
        of_indexer = self.q_latent * self.index_heads * self.index_dim
        of_indexer += self.d_model * (self.index_dim + self.index_heads) + 2 * self.index_dim
        return self._count(self.num_experts) + len(self.indexed_layers) * of_indexer

    @property
    def num_active_params(self) -> int:
        """The number of parameters used by one token; fewer than `num_params` in a mixture of experts."""
        return self._count(self.experts_per_token)

    def _count(self, num_experts: int) -> int:
        d = self.d_model
        feed_forward = 3 * d * self.d_ff
        if self.num_experts:
            biases = self.expert_biases
            router = (d + biases + self.sigmoid_routing) * self.num_experts
            feed_forward = router + num_experts * (feed_forward + biases * (2 * self.d_ff + d))
            feed_forward += d * (3 * self.shared_d_ff + self.shared_gate)
            feed_forward += self.expert_norms * (4 * d + self.num_experts)
        first = self.first_dense_layers
        layers = (self.num_layers - first) * feed_forward + first * 3 * d * self.dense_d_ff
        layers += self.double_wide_sharing * self.sharing_layers * feed_forward
        inputs = self.layer_inputs
        layers += self.num_layers * inputs * (self.vocab_size + 3 * d) + inputs
        layers += self.num_layers * d if inputs else 0
        layers += self.num_layers * (
            2 * (self.pre_norms + self.post_norms) * d + self.scaled_layers
        )
        keys = 2 * self.delta_key_heads * self.delta_key_dim
        values, heads = self.delta_value_heads * self.delta_value_dim, self.delta_value_heads
        delta = d * (keys + 3 * values + 2 * heads) + self.delta_taps * (keys + values)
        delta += 2 * heads + self.delta_value_dim
        mixing = sum(layer._attention_params for layer in self.of_attention_layers)
        mixing += sum(layer._key_value_params for layer in self.of_cached_layers)
        mixing += (self.num_layers - self.attention_layers) * delta
        head = self.vocab_size * d if self.has_unembedding else self.num_scores * d
        return layers + mixing + d + self.vocab_size * d + head

    @property
    def _attention_params(self) -> int:
        """Parameters of attention in one layer with the heads of `of_kind`, without `_key_value_params`."""
        d, h, queries = self.d_model, self.head_dim, self.num_heads * self.head_dim
        count = (2 + self.gated_attention) * d * queries
        if self.kv_latent:
            into = self.q_latent
            count = d * into + into + into * queries if into else d * queries
            count += d * self.cached_dim + self.kv_latent
            count += self.kv_latent * self.num_heads * (self.pair_dims - self.rope_dim)
            count += self.num_heads * self.value_dim * d
        count += self.qkv_bias * queries
        count += self.output_bias * d + self.attention_sinks * self.num_heads
        return count + self.qk_norm * (queries if self.qk_norm_over_heads else h)

    @property
    def _key_value_params(self) -> int:
        """Parameters of keys and values in one layer; latent attention has others."""
        if self.kv_latent:
            return 0
        heads = (2 - self.keys_as_values) * self.num_kv_heads
        norms = self.qk_norm * (self.num_kv_heads if self.qk_norm_over_heads else 1)
        return (heads * (self.d_model + self.qkv_bias) + norms) * self.head_dim

    @property
    def of_cached_layers(self) -> list[ModelConfig]:
        """`of_attention_layers` without those that share keys and values of others."""
        layers = self.of_attention_layers
        return layers[: len(layers) - self.sharing_layers]

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of the key-value cache per token, over all layers."""
        values = sum(layer.cached_heads * layer.cached_dim for layer in self.of_cached_layers)
        return (1 if self.kv_latent else 2) * values * bytes_per_value
