"""The families of Transformers that can be read and written, a row each.

A row only adds what the code of its family fixes and config.json does not say: Qwen2 always has biases on q,
k and v. A family of known parts and tensor names is a row here and nothing else; other tensor names are rules
in `weight_table`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl.models.model_config import ModelConfig

# Key in config.json and type of the fields of ModelConfig that are plain values there.
_KEYS: dict[str, tuple[str, type]] = {
    "vocab_size": ("vocab_size", int),
    "num_layers": ("num_hidden_layers", int),
    "d_model": ("hidden_size", int),
    "d_ff": ("intermediate_size", int),
    "num_heads": ("num_attention_heads", int),
    "num_kv_heads": ("num_key_value_heads", int),
    "head_dim": ("head_dim", int),
    "rms_norm_eps": ("rms_norm_eps", float),
    "tie_embeddings": ("tie_word_embeddings", bool),
}
# The same for fields that only the families have which name them in `Architecture.own`.
_OWN_KEYS: dict[str, tuple[str, type]] = {
    "num_experts": ("num_experts", int),
    "experts_per_token": ("num_experts_per_tok", int),
    "normalize_experts": ("norm_topk_prob", bool),
    "query_pre_attn_scalar": ("query_pre_attn_scalar", float),
    "attention_softcap": ("attn_logit_softcapping", float),
    "logits_softcap": ("final_logit_softcapping", float),
    "rope_local_theta": ("rope_local_base_freq", float),
    "rotary_fraction": ("partial_rotary_factor", float),
    "full_head_dim": ("global_head_dim", int),
    "full_kv_heads": ("num_global_key_value_heads", int),
    "keys_as_values": ("attention_k_eq_v", bool),
    "delta_key_heads": ("linear_num_key_heads", int),
    "delta_value_heads": ("linear_num_value_heads", int),
    "delta_key_dim": ("linear_key_head_dim", int),
    "delta_value_dim": ("linear_value_head_dim", int),
    "delta_taps": ("linear_conv_kernel_dim", int),
    "qkv_bias": ("attention_bias", bool),
    "qk_norm": ("use_qk_norm", bool),
    "expert_groups": ("n_group", int),
    "groups_per_token": ("topk_group", int),
    "routed_scale": ("routed_scaling_factor", float),
    "shared_d_ff": ("n_shared_experts", int),  # times the width of an expert
    "first_dense_layers": ("first_k_dense_replace", int),
    "dense_d_ff": ("intermediate_size", int),
    "kv_latent": ("kv_lora_rank", int),
    "q_latent": ("q_lora_rank", int),
    "rope_dim": ("qk_rope_head_dim", int),
    "value_dim": ("v_head_dim", int),
    "interleaved_rotary": ("rope_interleave", bool),
    "layer_inputs": ("hidden_size_per_layer_input", int),
    "sharing_layers": ("num_kv_shared_layers", int),
    "double_wide_sharing": ("use_double_wide_mlp", bool),
    "index_topk": ("index_topk", int),
    "index_heads": ("index_n_heads", int),
    "index_dim": ("index_head_dim", int),
}
SOFTCAPS = ("attention_softcap", "logits_softcap")
# Fields that the code of a family fixes, with their values in a family that does not name them in `traits`.
PLAIN: Mapping[str, Any] = {
    "qkv_bias": False,
    "output_bias": False,
    "attention_sinks": False,
    "expert_biases": False,
    "sigmoid_routing": False,
    "shared_gate": False,
    "qk_norm": False,
    "qk_norm_over_heads": False,
    "value_norm": False,
    "gated_attention": False,
    "activation": "silu",
    "pre_norms": True,
    "post_norms": False,
    "zero_centered_norms": False,
    "scale_embeddings": False,
    "scaled_layers": False,
    "expert_norms": False,
}


_DEFAULT = ModelConfig()


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A family of classes of Transformers.

    Attributes:
      language_model, score_model: class names of language models, and of models with scores instead of
        logits; "" if there is none. Of several rows of a class the first holds whose `needs` a file meets.
      model_type: name of the family in config.json.
      traits: fields of ModelConfig that the code of the family fixes, where they differ from `PLAIN`.
      needs: required values of switches in config.json; our decoder does not support other values.
      own: fields of `_OWN_KEYS` that the family has, with the default of a missing key; None for no default.
      windows: the keys of config.json that determine the layers with a sliding window: "" if none has one,
        "number" (`sliding_window`, a number or null for all layers), or "types" (`layer_types`, or every
        layer but each `sliding_window_pattern`-th). "delta" are delta nets in place of attention
        (`layer_types`, or every layer but each `full_attention_interval`-th).
      window_pattern: default of a missing `sliding_window_pattern`.
      window: default of a missing `sliding_window`; None for no window.
      unrotated_every: default of a missing `no_rope_layer_interval`; 0 if all layers have rotary positions.
      scaled_queries: True if queries grow with their position.
      fused: a name of `weight_table.FUSED` if one tensor holds what others store as several; "" for none.
      renamed: keys of fields that have another one in other families.
      quantized: the method of `quantization_config` whose weights can be read; "" for none.
      rope_theta: default of a missing rotary base.
      rope_by_type: True if `rope_parameters` has an entry for each kind of layer and no older form is known.
      own_head_dim: True if the head size does not follow from the width of the model.
      divides: True if its code requires a width that is a multiple of the number of heads.
      tied: default of a missing `tie_word_embeddings`.
      with_images: class whose text model, described by `text_config`, is of this family; "" for none.
      text_absent: defaults of missing keys of `text_config`, which published files leave out.
      text_fixed: keys that `with_images` ignores, and the values that it has instead.
    """

    language_model: str
    score_model: str
    model_type: str
    traits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs: Mapping[str, Any] = dataclasses.field(default_factory=lambda: _SILU)
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    windows: Literal["", "number", "types", "delta"] = ""
    window_pattern: int = 1
    window: int | None = None
    unrotated_every: int = 0
    scaled_queries: bool = False
    fused: str = ""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    quantized: str = ""
    rope_theta: float = 10_000.0
    rope_by_type: bool = False
    own_head_dim: bool = False
    divides: bool = False
    tied: bool = False
    with_images: str = ""
    text_absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    text_fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def keys(self) -> dict[str, tuple[str, type]]:
        """Key and type of all plain values of the family, by field."""
        keys = _KEYS | {field: _OWN_KEYS[field] for field in self.own}
        if "num_experts" in self.own:
            keys["d_ff"] = ("moe_intermediate_size", int)
        return keys | {field: (key, keys[field][1]) for field, key in self.renamed.items()}

    @property
    def counts_shared(self) -> bool:
        """Whether the width of the shared expert is given in widths of an expert."""
        return self.keys.get("shared_d_ff", ("", int))[0] == "n_shared_experts"

    @property
    def has_local_theta(self) -> bool:
        """Whether layers with a sliding window have a rotary base of their own."""
        return "rope_local_theta" in {**self.own, **self.traits}

    def spells(self, config: ModelConfig) -> bool:
        """Whether the architecture can express all of `config`."""
        sliding, rope = config.sliding_layers, config.rope_scaling
        own_scalar = config.query_pre_attn_scalar not in (0, config.head_dim)
        others = _OWN_KEYS.keys() - {"query_pre_attn_scalar"}
        fixed = {field: getattr(_DEFAULT, field) for field in others}
        fixed = {**fixed, **PLAIN, **self.traits}
        return (
            bool(self.score_model or not config.num_scores)
            and all(getattr(config, k) == v for k, v in fixed.items() if k not in self.own)
            and all(
                (field in self.own) == bool(getattr(config, field))
                for field in ("num_experts", "kv_latent", "index_topk")
            )
            and (self.windows == "delta") == config.has_state
            and self.has_local_theta == bool(config.rope_local_theta)
            and (all(config.rotated_layers) or bool(self.unrotated_every))
            and (rope is not None and rope.query_beta > 0) == self.scaled_queries
            and (rope is None or self.fused != "qkv_proj" or rope.kind == "longrope")
            and (rope is None or self.rope_by_type or rope.kind != "proportional")
            and not (own_scalar and "query_pre_attn_scalar" not in {**self.own, **self.traits})
            and (
                not any(sliding)
                or (all(sliding) if self.windows == "number" else bool(self.windows))
            )
        )


_SILU = {"hidden_act": "silu"}
_SILU_WHOLE = {**_SILU, "use_sliding_window": False}
_SILU_NO_BIAS = {**_SILU_WHOLE, "attention_bias": False}
_GEMMA_TRAITS = {
    "activation": "gelu_tanh",
    "post_norms": True,
    "zero_centered_norms": True,
    "scale_embeddings": True,
}
_GEMMA_NEEDS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "use_bidirectional_attention": False,
}
_GEMMA: dict[str, Any] = dict(windows="types", own_head_dim=True, divides=True, tied=True)
_GEMMA_QUERIES = {"query_pre_attn_scalar": 256.0}
# Defaults of the Gemma3TextConfig of Transformers.
_GEMMA3_TEXT: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
}
_QWEN_DELTA_TRAITS = {"qk_norm": True, "gated_attention": True, "zero_centered_norms": True}
_QWEN_DELTA_OWN = {
    "rotary_fraction": 0.25,
    "delta_key_heads": 16,
    "delta_value_heads": 32,
    "delta_key_dim": 128,
    "delta_value_dim": 128,
    "delta_taps": 4,
}
_QWEN_DELTA: dict[str, Any] = dict(windows="delta", window_pattern=4, own_head_dim=True)
_QWEN_SHARED = {"shared_d_ff": 512}
_QWEN_RENAMED = {"shared_d_ff": "shared_expert_intermediate_size"}
_GEMMA4: dict[str, Any] = dict(
    language_model="Gemma4ForCausalLM",
    score_model="",
    model_type="gemma4_text",
    windows="types",
    window_pattern=6,
    window=512,
    rope_theta=1_000_000.0,
    rope_by_type=True,
    own_head_dim=True,
    tied=True,
    with_images="Gemma4ForConditionalGeneration",
)
_GEMMA4_TRAITS = {
    "activation": "gelu_tanh",
    "qk_norm": True,
    "value_norm": True,
    "query_pre_attn_scalar": 1.0,
    "post_norms": True,
    "scale_embeddings": True,
    "scaled_layers": True,
}
_GEMMA4_NEEDS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    # Of images only.
    "use_bidirectional_attention": "vision",
}
_GEMMA4_OWN = {
    "logits_softcap": 0.0,
    "rope_local_theta": 10_000.0,
    "full_head_dim": 512,
    "full_kv_heads": 0,
    "keys_as_values": False,
}

_SIGMOID_NEEDS = {**_SILU, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_SIGMOID_MIXTURE: Mapping[str, Any] = {
    "num_experts": None,
    "experts_per_token": None,
    "normalize_experts": True,
    "shared_d_ff": None,
    "expert_groups": 1,
    "groups_per_token": 1,
    "routed_scale": 1.0,
}

# Attention to latents. Its files name the size of a head without rotation.
_LATENT: dict[str, Any] = dict(
    traits={"sigmoid_routing": True},
    needs={**_SIGMOID_NEEDS, "attention_bias": False, "moe_layer_freq": 1},
    renamed={"num_experts": "n_routed_experts", "head_dim": "qk_nope_head_dim"},
    own_head_dim=True,
)
_LATENT_SIZES = {"kv_latent": 512, "rope_dim": 64, "interleaved_rotary": True}
_INDEXED: dict[str, Any] = _LATENT | {"needs": {**_LATENT["needs"], "rope_interleave": True}}
_INDEXED_OWN = {
    **_SIGMOID_MIXTURE,
    **_LATENT_SIZES,
    "routed_scale": 2.5,
    "first_dense_layers": 3,
    "dense_d_ff": None,
    "index_topk": 2048,
    "index_dim": 128,
}

# If several architectures can express a model, export writes the first, unless the model came from another
# one.
ARCHITECTURES = (
    Architecture(
        "Qwen2ForCausalLM",
        "Qwen2ForSequenceClassification",
        "qwen2",
        traits={"qkv_bias": True},
        needs=_SILU_WHOLE,
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "Qwen3ForSequenceClassification",
        "qwen3",
        traits={"qk_norm": True},
        needs=_SILU_NO_BIAS,
        own_head_dim=True,
    ),
    Architecture(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeForSequenceClassification",
        "qwen3_moe",
        traits={"qk_norm": True},
        needs={**_SILU_NO_BIAS, "decoder_sparse_step": 1, "mlp_only_layers": []},
        own={"num_experts": None, "experts_per_token": None, "normalize_experts": False},
        own_head_dim=True,
    ),
    Architecture(
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextForSequenceClassification",
        "qwen3_5_text",
        traits=_QWEN_DELTA_TRAITS,
        needs={**_SILU, "attention_bias": False},
        own=_QWEN_DELTA_OWN,
        with_images="Qwen3_5ForConditionalGeneration",
        **_QWEN_DELTA,
    ),
    Architecture(
        "Qwen3_5MoeForCausalLM",
        "",
        "qwen3_5_moe_text",
        traits={**_QWEN_DELTA_TRAITS, "shared_gate": True},
        needs={**_SILU, "attention_bias": False},
        own={**_QWEN_DELTA_OWN, **_QWEN_SHARED, "num_experts": 256, "experts_per_token": 8},
        renamed=_QWEN_RENAMED,
        with_images="Qwen3_5MoeForConditionalGeneration",
        **_QWEN_DELTA,
    ),
    Architecture(
        "Qwen3NextForCausalLM",
        "Qwen3NextForSequenceClassification",
        "qwen3_next",
        traits={**_QWEN_DELTA_TRAITS, "shared_gate": True},
        needs={**_SILU, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        own={
            **_QWEN_DELTA_OWN,
            **_QWEN_SHARED,
            "num_experts": 512,
            "experts_per_token": 10,
            "normalize_experts": True,
        },
        renamed=_QWEN_RENAMED,
        fused="in_proj_qkvz",
        **_QWEN_DELTA,
    ),
    Architecture(
        "Glm4MoeForCausalLM",
        "Glm4MoeForSequenceClassification",
        "glm4_moe",
        traits={"sigmoid_routing": True},
        needs=_SIGMOID_NEEDS,
        own={
            "qkv_bias": False,
            "qk_norm": False,
            "rotary_fraction": 0.5,
            **_SIGMOID_MIXTURE,
            "first_dense_layers": 1,
            "dense_d_ff": None,
        },
        renamed={"num_experts": "n_routed_experts"},
        own_head_dim=True,
    ),
    Architecture(
        "DeepseekV3ForCausalLM",
        "DeepseekV3ForSequenceClassification",
        "deepseek_v3",
        own={
            **_SIGMOID_MIXTURE,
            **_LATENT_SIZES,
            "q_latent": 1536,
            "value_dim": 128,
            "expert_groups": 8,
            "groups_per_token": 4,
            "routed_scale": 2.5,
            "first_dense_layers": 3,
            "dense_d_ff": None,
        },
        **_LATENT,
    ),
    Architecture(
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteForSequenceClassification",
        "glm4_moe_lite",
        own={
            **_SIGMOID_MIXTURE,
            **_LATENT_SIZES,
            "q_latent": 768,
            "value_dim": 256,
            "routed_scale": 1.8,
            "first_dense_layers": 1,
            "dense_d_ff": None,
        },
        **_LATENT,
    ),
    # First GLM-5, of which some layers may have no indexer.
    Architecture(
        "GlmMoeDsaForCausalLM",
        "",
        "glm_moe_dsa",
        own={**_INDEXED_OWN, "q_latent": 2048, "value_dim": 256, "index_heads": 32},
        **_INDEXED,
    ),
    Architecture(
        "DeepseekV32ForCausalLM",
        "",
        "deepseek_v32",
        own={
            **_INDEXED_OWN,
            "q_latent": 1536,
            "value_dim": 128,
            "expert_groups": 8,
            "groups_per_token": 4,
            "index_heads": 64,
        },
        **_INDEXED,
    ),
    Architecture(
        "GptOssForCausalLM",
        "GptOssForSequenceClassification",
        "gpt_oss",
        traits={
            "qkv_bias": True,
            "output_bias": True,
            "attention_sinks": True,
            "expert_biases": True,
            "activation": "clamped_silu",
        },
        needs={**_SILU, "attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        own={"num_experts": 128, "experts_per_token": 4},
        renamed={"num_experts": "num_local_experts", "d_ff": "intermediate_size"},
        quantized="mxfp4",
        windows="types",
        window_pattern=2,
        window=128,
        rope_theta=150_000.0,
        own_head_dim=True,
    ),
    Architecture(
        "LlamaForCausalLM",
        "LlamaForSequenceClassification",
        "llama",
        needs={**_SILU_NO_BIAS, "mlp_bias": False},
        divides=True,
    ),
    Architecture(
        "MistralForCausalLM",
        "MistralForSequenceClassification",
        "mistral",
        windows="number",
        window=4096,
        with_images="Mistral3ForConditionalGeneration",
    ),
    Architecture(
        "Ministral3ForCausalLM",
        "Ministral3ForSequenceClassification",
        "ministral3",
        windows="number",
        scaled_queries=True,
        rope_theta=1_000_000.0,
        own_head_dim=True,
        with_images="Mistral3ForConditionalGeneration",
    ),
    Architecture(
        "SmolLM3ForCausalLM",
        "SmolLM3ForSequenceClassification",
        "smollm3",
        needs={**_SILU_NO_BIAS, "mlp_bias": False},
        unrotated_every=4,
        rope_theta=2_000_000.0,
        divides=True,
        tied=True,
    ),
    Architecture(
        "Phi3ForCausalLM",
        "Phi3ForSequenceClassification",
        "phi3",
        own={"rotary_fraction": 1.0},
        windows="number",
        fused="qkv_proj",
        divides=True,
    ),
    Architecture(
        "Olmo3ForCausalLM",
        "Olmo3ForSequenceClassification",
        "olmo3",
        traits={
            "qk_norm": True,
            "qk_norm_over_heads": True,
            "pre_norms": False,
            "post_norms": True,
            # Whatever its file says: the class reads only the other base from `rope_theta`.
            "rope_local_theta": 500_000.0,
        },
        needs={**_SILU, "attention_bias": False},
        windows="types",
        window_pattern=4,
        window=4096,
        rope_theta=500_000.0,
        divides=True,
    ),
    Architecture(
        "Gemma2ForCausalLM",
        "Gemma2ForSequenceClassification",
        "gemma2",
        traits=_GEMMA_TRAITS,
        needs=_GEMMA_NEEDS,
        own={"attention_softcap": 50.0, "logits_softcap": 30.0, **_GEMMA_QUERIES},
        window_pattern=2,
        **_GEMMA,
    ),
    Architecture(
        "Gemma3ForCausalLM",
        "Gemma3TextForSequenceClassification",
        "gemma3_text",
        traits={**_GEMMA_TRAITS, "qk_norm": True},
        # The class reads `attn_logit_softcapping` but does not use it.
        needs={**_GEMMA_NEEDS, "attn_logit_softcapping": None},
        own={"logits_softcap": 0.0, "rope_local_theta": 10_000.0, **_GEMMA_QUERIES},
        window_pattern=6,
        rope_theta=1_000_000.0,
        with_images="Gemma3ForConditionalGeneration",
        text_absent=_GEMMA3_TEXT,
        text_fixed={"final_logit_softcapping": None},
        **_GEMMA,
    ),
    Architecture(
        traits=_GEMMA4_TRAITS,
        needs={**_GEMMA4_NEEDS, "enable_moe_block": False},
        # The last three are of E2B and E4B.
        own={
            **_GEMMA4_OWN,
            "layer_inputs": 256,
            "sharing_layers": 0,
            "double_wide_sharing": False,
        },
        **_GEMMA4,
    ),
    Architecture(
        traits={**_GEMMA4_TRAITS, "expert_norms": True},
        needs={
            **_GEMMA4_NEEDS,
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
        own={**_GEMMA4_OWN, "num_experts": None, "experts_per_token": None, "shared_d_ff": None},
        renamed={"experts_per_token": "top_k_experts", "shared_d_ff": "intermediate_size"},
        **_GEMMA4,
    ),
)
