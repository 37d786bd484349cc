"""Shapes of published models by name: the values of their config.json that determine the sizes of weights.

For commands that compute with shapes, and for planning a recipe without its files:

    config.model = model_shapes("qwen2.5-32b")

Training reads the config.json of its checkpoint instead: `rms_norm_eps` and `rope_theta` may differ between
models of one shape.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from jaxrl.errors import UserError
from jaxrl.models.model_config import ModelConfig, RopeScaling

_SIZES = ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff")


def _shape(*sizes: int, family: Mapping[str, Any], **others: Any) -> ModelConfig:
    """A model of a family; `sizes` are those of `_SIZES`."""
    named = dict(zip(_SIZES, sizes, strict=True))
    return ModelConfig(**{"qkv_bias": False, "tie_embeddings": False, **family, **named, **others})


_QWEN25 = {"vocab_size": 152_064, "rope_theta": 1e6, "qkv_bias": True}
_QWEN25_SMALL = {**_QWEN25, "vocab_size": 151_936, "tie_embeddings": True}
_QWEN3 = {"vocab_size": 151_936, "rope_theta": 1e6, "qk_norm": True}
_QWEN3_SMALL = {**_QWEN3, "tie_embeddings": True}
_QWEN35 = {
    "vocab_size": 248_320,
    "rope_theta": 1e7,
    "rotary_fraction": 0.25,
    "qk_norm": True,
    "gated_attention": True,
    "zero_centered_norms": True,
    "layer_pattern": ("delta",) * 3 + ("full",),
    "delta_key_heads": 16,
}
_LLAMA3 = {"vocab_size": 128_256, "rope_theta": 5e5, "rms_norm_eps": 1e-5}
_SMOLLM2 = {"vocab_size": 49_152, "rope_theta": 1e5, "rms_norm_eps": 1e-5, "tie_embeddings": True}
_MISTRAL = {"vocab_size": 32_000, "rms_norm_eps": 1e-5}
_MISTRAL_WINDOW = {"sliding_window": 4096, "layer_pattern": ("sliding",)}
_GEMMA3 = {
    "vocab_size": 262_144,
    "tie_embeddings": True,
    "rope_theta": 1e6,
    "rope_local_theta": 1e4,
    "layer_pattern": ("sliding",) * 5 + ("full",),
    "qk_norm": True,
    "query_pre_attn_scalar": 256.0,
    "activation": "gelu_tanh",
    "post_norms": True,
    "zero_centered_norms": True,
    "scale_embeddings": True,
}
_SMOLLM3 = {
    "vocab_size": 128_256,
    "rope_theta": 5e6,
    "tie_embeddings": True,
    "layer_pattern": ("full",) * 3 + ("unrotated",),
}
# Without the factors of wavelengths, which are in its config.json.
_PHI4_MINI = {
    "vocab_size": 200_064,
    "rms_norm_eps": 1e-5,
    "tie_embeddings": True,
    "rotary_fraction": 0.75,
}
_PHI4 = {"vocab_size": 100_352, "rms_norm_eps": 1e-5, "rope_theta": 250_000.0}
_MINISTRAL3 = {
    "vocab_size": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_embeddings": True,
    "rope_scaling": RopeScaling(
        kind="yarn",
        factor=16.0,
        original_max_positions=16_384,
        mscale=1.0,
        mscale_all_dim=1.0,
        query_beta=0.1,
    ),
}
_GLM45 = {
    "vocab_size": 151_552,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "rotary_fraction": 0.5,
    "qkv_bias": True,
    "experts_per_token": 8,
    "sigmoid_routing": True,
}
_LATENT = {
    "kv_latent": 512,
    "rope_dim": 64,
    "interleaved_rotary": True,
    "sigmoid_routing": True,
}
_DEEPSEEK3 = {
    **_LATENT,
    "vocab_size": 129_280,
    "rope_scaling": RopeScaling(
        kind="yarn", factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0
    ),
    "q_latent": 1536,
    "value_dim": 128,
    "experts_per_token": 8,
    "expert_groups": 8,
    "groups_per_token": 4,
    "routed_scale": 2.5,
}
_INDEXER = {"indexer_pattern": (True,), "index_topk": 2048, "index_dim": 128}
_MOONLIGHT = {
    **_LATENT,
    "vocab_size": 163_840,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50_000.0,
    "value_dim": 128,
    "experts_per_token": 6,
    "routed_scale": 2.446,
}
_GLM47_FLASH = {
    **_LATENT,
    "vocab_size": 154_880,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "q_latent": 768,
    "value_dim": 256,
    "experts_per_token": 4,
    "routed_scale": 1.8,
}
_GLM5 = {
    **_GLM47_FLASH,
    "q_latent": 2048,
    "experts_per_token": 8,
    "routed_scale": 2.5,
}
_OLMO3 = {
    "vocab_size": 100_278,
    "rope_theta": 5e5,
    "rope_local_theta": 5e5,
    "rope_scaling": RopeScaling(kind="yarn", factor=8.0, original_max_positions=8192),
    "sliding_window": 4096,
    "layer_pattern": ("sliding",) * 3 + ("full",),
    "qk_norm": True,
    "qk_norm_over_heads": True,
    "pre_norms": False,
    "post_norms": True,
}
_GPT_OSS = {
    "vocab_size": 201_088,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_scaling": RopeScaling(
        kind="yarn", factor=32.0, original_max_positions=4096, truncate=False
    ),
    "sliding_window": 128,
    "layer_pattern": ("sliding", "full"),
    "qkv_bias": True,
    "output_bias": True,
    "attention_sinks": True,
    "activation": "clamped_silu",
    "expert_biases": True,
    "experts_per_token": 4,
}
_MIXTURE = {"num_experts": 128, "experts_per_token": 8}

SHAPES = {
    "qwen2.5-0.5b": _shape(24, 896, 14, 2, 64, 4864, family=_QWEN25_SMALL),
    "qwen2.5-1.5b": _shape(28, 1536, 12, 2, 128, 8960, family=_QWEN25_SMALL),
    "qwen2.5-3b": _shape(36, 2048, 16, 2, 128, 11008, family=_QWEN25_SMALL),
    "qwen2.5-7b": _shape(28, 3584, 28, 4, 128, 18944, family=_QWEN25),
    "qwen2.5-14b": _shape(48, 5120, 40, 8, 128, 13824, family=_QWEN25, rms_norm_eps=1e-5),
    "qwen2.5-32b": _shape(64, 5120, 40, 8, 128, 27648, family=_QWEN25, rms_norm_eps=1e-5),
    "qwen3-0.6b": _shape(28, 1024, 16, 8, 128, 3072, family=_QWEN3_SMALL),
    "qwen3-1.7b": _shape(28, 2048, 16, 8, 128, 6144, family=_QWEN3_SMALL),
    "qwen3-4b": _shape(36, 2560, 32, 8, 128, 9728, family=_QWEN3_SMALL),
    "qwen3-8b": _shape(36, 4096, 32, 8, 128, 12288, family=_QWEN3),
    "qwen3-14b": _shape(40, 5120, 40, 8, 128, 17408, family=_QWEN3),
    "qwen3-32b": _shape(64, 5120, 64, 8, 128, 25600, family=_QWEN3),
    "qwen3-30b-a3b": _shape(48, 2048, 32, 4, 128, 768, family=_QWEN3, **_MIXTURE),
    "qwen3.5-0.8b": _shape(
        24, 1024, 8, 2, 256, 3584, family=_QWEN35, delta_value_heads=16, tie_embeddings=True
    ),
    "qwen3.5-4b": _shape(
        32, 2560, 16, 4, 256, 9216, family=_QWEN35, delta_value_heads=32, tie_embeddings=True
    ),
    "qwen3.5-9b": _shape(32, 4096, 16, 4, 256, 12288, family=_QWEN35, delta_value_heads=32),
    "qwen3.5-35b-a3b": _shape(
        *(40, 2048, 16, 2, 256, 512),
        family=_QWEN35,
        delta_value_heads=32,
        num_experts=256,
        experts_per_token=8,
        shared_d_ff=512,
        shared_gate=True,
    ),
    "qwen3-next-80b-a3b": _shape(
        *(48, 2048, 16, 2, 256, 512),
        family=_QWEN35,
        vocab_size=151_936,
        delta_value_heads=32,
        num_experts=512,
        experts_per_token=10,
        shared_d_ff=512,
        shared_gate=True,
    ),
    "qwen3.5-27b": _shape(64, 5120, 24, 4, 256, 17408, family=_QWEN35, delta_value_heads=48),
    "llama-3-8b": _shape(32, 4096, 32, 8, 128, 14336, family=_LLAMA3),
    "llama-3-70b": _shape(80, 8192, 64, 8, 128, 28672, family=_LLAMA3),
    "llama-3.1-8b": _shape(32, 4096, 32, 8, 128, 14336, family=_LLAMA3, rope_scaling=RopeScaling()),
    "mistral-7b-v0.1": _shape(32, 4096, 32, 8, 128, 14336, family=_MISTRAL, **_MISTRAL_WINDOW),
    "mistral-7b-v0.3": _shape(
        32, 4096, 32, 8, 128, 14336, family=_MISTRAL, vocab_size=32_768, rope_theta=1e6
    ),
    "smollm2-135m": _shape(30, 576, 9, 3, 64, 1536, family=_SMOLLM2),
    "smollm3-3b": _shape(36, 2048, 16, 4, 128, 11008, family=_SMOLLM3),
    "gemma-3-1b": _shape(26, 1152, 4, 1, 256, 6912, family=_GEMMA3, sliding_window=512),
    "phi-4-mini": _shape(32, 3072, 24, 8, 128, 8192, family=_PHI4_MINI),
    "phi-4": _shape(40, 5120, 40, 10, 128, 17920, family=_PHI4),
    "ministral-3-3b": _shape(26, 3072, 32, 8, 128, 9216, family=_MINISTRAL3),
    "gpt-oss-20b": _shape(24, 2880, 64, 8, 64, 2880, family=_GPT_OSS, num_experts=32),
    "gpt-oss-120b": _shape(36, 2880, 64, 8, 64, 2880, family=_GPT_OSS, num_experts=128),
    "glm-4.5-air": _shape(
        *(46, 4096, 96, 8, 128, 1408),
        family=_GLM45,
        num_experts=128,
        shared_d_ff=1408,
        first_dense_layers=1,
        dense_d_ff=10_944,
    ),
    "glm-4.5": _shape(
        *(92, 5120, 96, 8, 128, 1536),
        family=_GLM45,
        qk_norm=True,
        num_experts=160,
        shared_d_ff=1536,
        routed_scale=2.5,
        first_dense_layers=3,
        dense_d_ff=12_288,
    ),
    "glm-4.7-flash": _shape(
        *(47, 2048, 20, 20, 256, 1536),
        family=_GLM47_FLASH,
        num_experts=64,
        shared_d_ff=1536,
        first_dense_layers=1,
        dense_d_ff=10_240,
    ),
    "deepseek-v3": _shape(
        *(61, 7168, 128, 128, 192, 2048),
        family=_DEEPSEEK3,
        num_experts=256,
        shared_d_ff=2048,
        first_dense_layers=3,
        dense_d_ff=18_432,
    ),
    "deepseek-v3.2": _shape(
        *(61, 7168, 128, 128, 192, 2048),
        family=_DEEPSEEK3,
        num_experts=256,
        shared_d_ff=2048,
        first_dense_layers=3,
        dense_d_ff=18_432,
        index_heads=64,
        **_INDEXER,
    ),
    "glm-5": _shape(
        *(78, 6144, 64, 64, 256, 2048),
        family=_GLM5,
        num_experts=256,
        shared_d_ff=2048,
        first_dense_layers=3,
        dense_d_ff=12_288,
        index_heads=32,
        **_INDEXER,
    ),
    "moonlight-16b-a3b": _shape(
        *(27, 2048, 16, 16, 192, 1408),
        family=_MOONLIGHT,
        num_experts=64,
        shared_d_ff=2816,
        first_dense_layers=1,
        dense_d_ff=11_264,
    ),
    "olmo-3-7b": _shape(32, 4096, 32, 32, 128, 11008, family=_OLMO3),
}


def model_shapes(name: str) -> ModelConfig:
    """The shape of a published model; raises UserError with near names for an unknown one."""
    if name not in SHAPES:
        near = difflib.get_close_matches(name.lower(), SHAPES, n=3, cutoff=0.5)
        raise UserError(
            f"model {name!r} is not one of {', '.join(SHAPES)}; "
            + (f"did you mean {' or '.join(near)}? " if near else "")
            + "The path of a config.json works too"
        )
    return SHAPES[name]
