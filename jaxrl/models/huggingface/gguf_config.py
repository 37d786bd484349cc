"""config.json from the keys of a GGUF file.

    qwen2.embedding_length           hidden_size
    qwen2.attention.head_count_kv    num_key_value_heads
    ...

GGUF stores only what llama.cpp needs. Values that llama.cpp has in its code are taken from there: which
layers of Gemma have a sliding window, how it scales its queries, that Qwen3-MoE normalises the weights of its
experts.

Not covered, and refused with the name of the key: architectures outside `MODEL_TYPES`, sizes that differ
between layers, partial rotation of heads, rotary scalings other than Llama 3.1's and a plain factor.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl.errors import UserError
from jaxrl.models.huggingface.architectures import ARCHITECTURES, SOFTCAP_KEYS, Architecture
from jaxrl.models.huggingface.json_values import integer, number, shown

MODEL_TYPES: Mapping[str, str] = types.MappingProxyType(
    {
        "llama": "llama",  # Mistral too
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "qwen3moe": "qwen3_moe",
        "gemma2": "gemma2",
        "gemma3": "gemma3_text",
    }
)
"""Covered values of `general.architecture`, with the model_type of Transformers."""

REMEDY = "take the model's Hugging Face directory instead"

# Layers of the 27B models, which scale queries by width / heads. The others scale by the size of a head.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
# Settings of Llama 3.1 to 3.3. GGUF stores only the divisors that follow from them and from `factor`.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def architecture_of(keys: Mapping[str, Any], origin: str) -> Architecture:
    """Returns the architecture of a file.

    Args:
      keys: keys of the file with their values.
      origin: path of the file, for messages.

    Raises:
      UserError: the architecture is not covered.
    """
    name = keys.get("general.architecture")
    # Compare with a tuple, since the value of an untrusted file may not be hashable.
    if name not in tuple(MODEL_TYPES):
        raise UserError(
            f"{origin} has general.architecture {shown(name)}, and only {', '.join(MODEL_TYPES)} are read; "
            f"{REMEDY}"
        )
    return next(a for a in ARCHITECTURES if a.model_type == MODEL_TYPES[name])


def config_values(
    keys: Mapping[str, Any],
    origin: str,
    *,
    vocab_size: int,
    tied: bool,
    rope_divisors: np.ndarray | None,
) -> dict[str, Any]:
    """Returns the values of config.json.

    Args:
      keys: keys of the file with their values.
      origin: path of the file, for messages.
      vocab_size: rows of the embedding.
      tied: True if there is no separate unembedding.
      rope_divisors: [H / 2] divisors of the rotary frequencies; None if the file has none.

    Raises:
      UserError: the model is not covered, or a key is missing or malformed.
    """
    architecture = architecture_of(keys, origin)
    name = keys["general.architecture"]
    values = {
        key.removeprefix(f"{name}."): _same_for_all(value, key, origin)
        for key, value in keys.items()
        if key.startswith(f"{name}.")
    }
    heads = integer(values, "attention.head_count", origin)
    width = integer(values, "embedding_length", origin)
    head_dim = integer(values, "attention.key_length", origin, absent=max(width // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := integer(values, key, origin, absent=head_dim)) != head_dim:
            raise UserError(
                f"{origin} has {key} {found}, and its heads have size {head_dim}; {REMEDY}"
            )
    return {
        **architecture.needs,
        "architectures": [architecture.language_model],
        "model_type": architecture.model_type,
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": integer(values, "block_count", origin),
        "num_attention_heads": heads,
        "num_key_value_heads": integer(values, "attention.head_count_kv", origin, absent=heads),
        "head_dim": head_dim,
        "max_position_embeddings": integer(values, "context_length", origin),
        "rms_norm_eps": _short(values, "attention.layer_norm_rms_epsilon", origin),
        "rope_theta": _short(values, "rope.freq_base", origin, absent=architecture.rope_theta),
        "rope_scaling": _rope_scaling(values, origin, rope_divisors, head_dim),
        "tie_word_embeddings": tied,
        "bos_token_id": keys.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": keys.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
        **_feed_forward(values, architecture, origin),
        **_gemma(values, architecture, origin, plain_scalar=head_dim),
    }


def _same_for_all(value: Any, key: str, origin: str) -> Any:
    """A value; for a list with one entry per layer, the entry of every layer."""
    if not isinstance(value, list) or key.endswith(".sliding_window_pattern"):
        return value
    if not value or any(other != value[0] for other in value):
        raise UserError(
            f"{origin} has {key} {shown(value)}, which differs between layers; {REMEDY}"
        )
    return value[0]


def _short(
    values: Mapping[str, Any], key: str, origin: str, *, absent: float | None = None
) -> float:
    """A number in its shortest form: GGUF stores float32, where 1e-05 became 9.999999747378752e-06."""
    return float(str(np.float32(number(values, key, origin, absent=absent))))


def _feed_forward(
    values: Mapping[str, Any], architecture: Architecture, origin: str
) -> dict[str, Any]:
    if not architecture.mixture:
        return {"intermediate_size": integer(values, "feed_forward_length", origin)}
    width = integer(values, "expert_feed_forward_length", origin)
    return {
        "intermediate_size": integer(values, "feed_forward_length", origin, absent=width),
        "moe_intermediate_size": width,
        "num_experts": integer(values, "expert_count", origin),
        "num_experts_per_tok": integer(values, "expert_used_count", origin),
        "norm_topk_prob": True,
    }


def _gemma(
    values: Mapping[str, Any], architecture: Architecture, origin: str, *, plain_scalar: float
) -> dict[str, Any]:
    """Windows, score scaling and caps, which only Gemma's architectures have."""
    if not architecture.has_query_scalar:
        return {}
    layers = integer(values, "block_count", origin)
    scalar = plain_scalar
    if layers == _LAYERS_OF_27B[architecture.model_type.removesuffix("_text")]:
        scalar = values["embedding_length"] // values["attention.head_count"]
    result: dict[str, Any] = {
        "query_pre_attn_scalar": scalar,
        "sliding_window": integer(values, "attention.sliding_window", origin),
    }
    # Without the key, the default of Transformers is that of llama.cpp.
    pattern = values.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        result["layer_types"] = kinds
    elif pattern is not None:
        result["sliding_window_pattern"] = pattern
    caps = {"attention_softcap": "attn_logit", "logits_softcap": "final_logit"}
    for field, default in architecture.softcaps.items():
        cap = values.get(f"{caps[field]}_softcapping", default)
        result[SOFTCAP_KEYS[field]] = _short({"cap": cap}, "cap", origin) if cap else None
    if architecture.has_local_rope:
        local = _short(values, "rope.freq_base_swa", origin, absent=10_000.0)
        result["rope_local_base_freq"] = local
    return result


def _rope_scaling(
    values: Mapping[str, Any], origin: str, divisors: np.ndarray | None, head_dim: int
) -> dict[str, Any] | None:
    if divisors is not None:
        return _llama3_scaling(values, origin, divisors, head_dim)
    # `rope.scale_linear` is the older key. A factor of 0 means none.
    older = values.get("rope.scale_linear") or 1.0
    factor = values.get("rope.scaling.factor") or older
    kind = values.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise UserError(
            f"{origin} has rope.scaling.type {shown(kind)}, and only 'linear' is read; {REMEDY}"
        )
    if kind == "none" or factor == 1.0:
        return None
    return {"rope_type": "linear", "factor": _short({"factor": factor}, "factor", origin)}


def _llama3_scaling(
    values: Mapping[str, Any], origin: str, divisors: np.ndarray, head_dim: int
) -> dict[str, Any]:
    """The scaling of Llama 3.1, if it leads to exactly these divisors."""
    factor = float(str(np.float32(divisors.max())))
    theta = _short(values, "rope.freq_base", origin, absent=10_000.0)
    low, high, positions = _LLAMA3.values()
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    # 0 where a wave is divided by the whole factor, 1 where it is left alone.
    share = np.clip((positions / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - share) / factor + share)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4, atol=0):
        raise UserError(
            f"{origin} has rope_freqs.weight, and its rotary scaling is not that of Llama 3.1; {REMEDY}"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
