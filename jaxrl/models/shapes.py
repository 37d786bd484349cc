"""Shapes of published models by name: the values of their config.json that determine the sizes of weights.

For commands that compute with shapes, and for planning a recipe without its files:

    config.model = model_shapes("qwen2.5-32b")

Training reads the config.json of its checkpoint instead: `rms_norm_eps` and `rope_theta` may differ between
models of one shape.
"""

from __future__ import annotations

import difflib
from typing import Any

from jaxrl.errors import UserError
from jaxrl.models.model_config import ModelConfig, RopeScaling


def _qwen25(*shape: int, small: bool = False, eps: float = 1e-6) -> ModelConfig:
    vocab_size = 151_936 if small else 152_064
    return _dense(vocab_size, *shape, tied=small, rope_theta=1e6, rms_norm_eps=eps, qkv_bias=True)


def _qwen3(*shape: int, tied: bool = False, experts: tuple[int, int] = (0, 0)) -> ModelConfig:
    return _dense(
        151_936,
        *shape,
        tied=tied,
        rope_theta=1e6,
        qk_norm=True,
        num_experts=experts[0],
        experts_per_token=experts[1],
    )


def _llama3(*shape: int, rope_scaling: RopeScaling | None = None) -> ModelConfig:
    return _dense(128_256, *shape, rope_theta=5e5, rms_norm_eps=1e-5, rope_scaling=rope_scaling)


def _mistral(vocab_size: int, *shape: int, **others) -> ModelConfig:
    return _dense(vocab_size, *shape, rms_norm_eps=1e-5, **others)


def _gemma3(*shape: int, window: int, query_scalar: float = 256.0) -> ModelConfig:
    return _dense(
        262_144,
        *shape,
        tied=True,
        rope_theta=1e6,
        rope_local_theta=1e4,
        sliding_window=window,
        layer_pattern=("sliding",) * 5 + ("full",),
        qk_norm=True,
        query_pre_attn_scalar=query_scalar,
        activation="gelu_tanh",
        post_norms=True,
        zero_centered_norms=True,
        scale_embeddings=True,
    )


_SIZES = ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff")


def _dense(vocab_size: int, *shape: int, tied: bool = False, **others) -> ModelConfig:
    sizes: Any = dict(zip(_SIZES, shape, strict=True))
    others = {"qkv_bias": False, **others}
    return ModelConfig(vocab_size=vocab_size, tie_embeddings=tied, **sizes, **others)


# The numbers of a shape are those of `_SIZES`.
SHAPES = {
    "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 64, 4864, small=True),
    "qwen2.5-1.5b": _qwen25(28, 1536, 12, 2, 128, 8960, small=True),
    "qwen2.5-3b": _qwen25(36, 2048, 16, 2, 128, 11008, small=True),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 128, 18944),
    "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 128, 13824, eps=1e-5),
    "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 128, 27648, eps=1e-5),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 128, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 128, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 128, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 128, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 128, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 128, 25600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 128, 768, experts=(128, 8)),
    "llama-3-8b": _llama3(32, 4096, 32, 8, 128, 14336),
    "llama-3-70b": _llama3(80, 8192, 64, 8, 128, 28672),
    "llama-3.1-8b": _llama3(32, 4096, 32, 8, 128, 14336, rope_scaling=RopeScaling()),
    "mistral-7b-v0.1": _mistral(
        32_000,
        *(32, 4096, 32, 8, 128, 14336),
        sliding_window=4096,
        layer_pattern=("sliding",),
    ),
    "mistral-7b-v0.3": _mistral(32_768, 32, 4096, 32, 8, 128, 14336, rope_theta=1e6),
    "smollm2-135m": _dense(
        49_152,
        *(30, 576, 9, 3, 64, 1536),
        tied=True,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
    ),
    "gemma-3-1b": _gemma3(26, 1152, 4, 1, 256, 6912, window=512),
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
