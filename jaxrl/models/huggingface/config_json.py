"""config.json of a Hugging Face directory to a ModelConfig, and back.

Values are read from the file and never guessed from the name of a model. An architecture only adds what its
code fixes (Qwen2 always has biases on q, k and v). Both forms of the rotary settings are read: `rope_theta`
with `rope_scaling`, and the `rope_parameters` of Transformers 5. The first form is written, since every
version reads it.

Not covered, and refused with the name of the key: gates other than silu and (in Gemma) tanh-gelu, partial
rotation of heads, rotary scalings other than Llama 3.1's and a plain factor, biases on the output projection
or the feed-forward network, quantised weights. Of a Gemma 3 with images (4B and larger) only the text model
is read.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from jaxrl.errors import UserError
from jaxrl.files import read_json_object
from jaxrl.models.huggingface.architectures import ARCHITECTURES, SOFTCAP_KEYS, Architecture
from jaxrl.models.huggingface.json_values import boolean, integer, number, shown
from jaxrl.models.huggingface.sliding_windows import read_windows, window_values
from jaxrl.models.model_config import LoraConfig, ModelConfig, RopeScaling

# Keys of a base config that are not kept: `config_json` writes their content under another name, or they
# describe other weights.
_REPLACED = frozenset(
    {
        "dtype",
        "rope_parameters",
        "layer_types",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "quantization_config",
        "num_local_experts",
    }
)

# Values that do not follow from the weights, for a model without a base config. The ids are null, because the
# Llama class of Transformers would otherwise use ids 1 and 2 for begin and end.
_WITHOUT_BASE: Mapping[str, Any] = {
    "max_position_embeddings": 32_768,
    "bos_token_id": None,
    "eos_token_id": None,
}

_GEMMA3_WITH_IMAGES = "Gemma3ForConditionalGeneration"
# Defaults of the Gemma3TextConfig of Transformers. The published files leave out what equals them.
_GEMMA3_TEXT: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
}
# Keys beside `text_config` that hold for the text model too.
_OF_BOTH = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "quantization_config",
)

# Settings of PEFT that change what an adapter computes, each off or absent here.
_ADAPTER_SWITCHES = (
    "fan_in_fan_out",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "target_parameters",
)

_LLAMA3_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
# Keys by rope_type, which is `RopeScaling.kind`.
_ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "llama3": _LLAMA3_KEYS,
    "linear": ("factor",),
}


def read_config_json(directory: str | pathlib.Path, name: str = "config.json") -> dict[str, Any]:
    """Reads the config.json of a directory, or another JSON object in it.

    Of a model with images only the values of its text model are returned; see `_text_values`.

    Raises:
      UserError: the file is missing or not a JSON object; see `files.read_json_object`.
    """
    path = pathlib.Path(directory) / name
    values = read_json_object(
        path,
        absent=f"name a directory that holds {name} beside its weights, as published models and "
        "save_pretrained do",
    )
    return _text_values(values, origin=str(path))


def _text_values(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The values of the text model in a config.json with `text_config`; other files unchanged."""
    if values.get("architectures") != [_GEMMA3_WITH_IMAGES]:
        return dict(values)
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise UserError(
            f"{origin}: text_config is {shown(text)}; it must be an object: copy the published file again"
        )
    of_both = {key: values[key] for key in _OF_BOTH if values.get(key) is not None}
    return {
        **_GEMMA3_TEXT,
        **text,
        **of_both,
        # The class with images does not cap logits, whatever its file says.
        "final_logit_softcapping": None,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
    }


def read_config(directory: str | pathlib.Path) -> ModelConfig:
    """The shape of the model in a Hugging Face directory; see `parse_config`."""
    path = pathlib.Path(directory) / "config.json"
    return parse_config(read_config_json(directory), origin=str(path))


def parse_config(values: Mapping[str, Any], *, origin: str = "config.json") -> ModelConfig:
    """The shape that the values of a config.json describe.

    `num_tokens` stays 0 (all rows of the embedding), because the file does not know the tokenizer.

    Args:
      values: content of the file.
      origin: name of the file in errors.

    Raises:
      UserError: the decoder does not support the architecture or a setting, or a value is missing or
        malformed; the message names the key.
    """
    values = _text_values(values, origin)
    architecture = _architecture_named(values, origin)
    _check_switches(values, architecture, origin)
    num_heads = integer(values, "num_attention_heads", origin)
    d_ff_key = "moe_intermediate_size" if architecture.mixture else "intermediate_size"
    d_model = integer(values, "hidden_size", origin)
    window, pattern = read_windows(values, architecture, origin)
    fields: dict[str, Any] = dict(
        vocab_size=integer(values, "vocab_size", origin),
        num_layers=integer(values, "num_hidden_layers", origin),
        d_model=d_model,
        d_ff=integer(values, d_ff_key, origin),
        num_heads=num_heads,
        num_kv_heads=integer(values, "num_key_value_heads", origin, absent=num_heads),
        head_dim=_head_dim(values, architecture, d_model, num_heads, origin),
        **_rotary_fields(values, architecture, origin),
        sliding_window=window,
        layer_pattern=pattern,
        rms_norm_eps=number(values, "rms_norm_eps", origin),
        tie_embeddings=boolean(values, "tie_word_embeddings", origin, absent=architecture.tied),
        num_scores=_num_scores(values, architecture, origin),
        **architecture.all_traits,
        **_score_fields(values, architecture, origin),
    )
    if architecture.mixture:
        # Transformers 5 writes `num_local_experts`.
        experts_key = "num_experts" if "num_experts" in values else "num_local_experts"
        fields |= dict(
            num_experts=integer(values, experts_key, origin),
            experts_per_token=integer(values, "num_experts_per_tok", origin),
            normalize_experts=boolean(values, "norm_topk_prob", origin),
        )
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        raise UserError(f"{origin}: {error}; copy the published file again") from error


def config_json(
    config: ModelConfig, *, dtype: str, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The values of a config.json from which Transformers builds the model of `config`.

    Args:
      config: the shape. Padding rows of the vocabulary above `num_tokens` are not marked, as usual in
        Transformers.
      dtype: name of the type of the stored weights, such as "bfloat16".
      base: config.json of the model that training started from. Its values that do not belong to the shape
        are kept, such as the number of positions and ids of special tokens. None sets these to 32,768 and
        null.

    Raises:
      UserError: no architecture of Transformers has this shape.
    """
    if base is not None:
        base = _text_values(base, "config.json")
    architecture = _architecture_of(config, base or {})
    kept = {k: v for k, v in (base or _WITHOUT_BASE).items() if k not in _REPLACED}
    return {
        **kept,
        **architecture.needs,
        "architectures": [
            architecture.score_model if config.num_scores else architecture.language_model
        ],
        "model_type": architecture.model_type,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.d_model,
        **_feed_forward_values(config, kept),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_values(config.rope_scaling),
        **_gemma_values(config, architecture),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **window_values(config, architecture),
        **_score_values(config),
    }


def adapter_config_json(config: ModelConfig, *, base: str) -> dict[str, Any]:
    """The values of PEFT's adapter_config.json for `config.lora` on the model `base`."""
    lora = config.lora
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if config.num_scores else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [f"{name}_proj" for name in lora.targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def read_adapter_config(directory: str | pathlib.Path) -> LoraConfig:
    """The adapters that PEFT's adapter_config.json of a directory describes.

    Raises:
      UserError: the file is missing, or our adapters do not support a setting; the message names the key.
    """
    origin = str(pathlib.Path(directory) / "adapter_config.json")
    values = read_config_json(directory, "adapter_config.json")
    needs = {"peft_type": "LORA", "bias": "none"} | dict.fromkeys(_ADAPTER_SWITCHES)
    for key, needed in needs.items():
        if (values.get(key) or None) not in (needed, None):
            raise UserError(
                f"{origin}: {key} is {shown(values[key])}, but only {needed!r} is supported; "
                "merge the adapter into its base model with PEFT and start from that"
            )
    modules = values.get("target_modules")
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise UserError(f"{origin}: target_modules is {shown(modules)}; it must be a list of names")
    try:
        return LoraConfig(
            rank=integer(values, "r", origin),
            alpha=number(values, "lora_alpha", origin),
            targets=tuple(sorted(name.removesuffix("_proj") for name in modules)),
        )
    except ValueError as error:
        raise UserError(f"{origin}: {error}") from error


def _feed_forward_values(config: ModelConfig, kept: Mapping[str, Any]) -> dict[str, Any]:
    if not config.num_experts:
        return {"intermediate_size": config.d_ff}
    return {
        # Width of dense layers. The model has none, but the class requires a number.
        "intermediate_size": kept.get("intermediate_size", config.d_ff),
        "moe_intermediate_size": config.d_ff,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.normalize_experts,
    }


def _score_values(config: ModelConfig) -> dict[str, Any]:
    """Labels of a score model: Transformers derives the number of scores from them."""
    labels = {i: f"LABEL_{i}" for i in range(config.num_scores)}
    if not labels:
        return {}
    return {
        "id2label": {str(i): label for i, label in labels.items()},
        "label2id": {label: i for i, label in labels.items()},
    }


def _num_scores(values: Mapping[str, Any], architecture: Architecture, origin: str) -> int:
    if values["architectures"] == [architecture.language_model]:
        return 0
    labels = values.get("id2label")
    if not isinstance(labels, dict | None):
        raise UserError(f"{origin}: id2label is {shown(labels)}; it must be an object or null")
    # Two labels are the default of Transformers, which it does not write.
    return len(labels) if labels else integer(values, "num_labels", origin, absent=2)


def _architecture_named(values: Mapping[str, Any], origin: str) -> Architecture:
    names = values.get("architectures")
    supported = {a.language_model: a for a in ARCHITECTURES}
    supported |= {a.score_model: a for a in ARCHITECTURES}
    # Compare whole lists, since the elements of an untrusted list may not be hashable.
    if not isinstance(names, list) or names not in [[name] for name in supported]:
        raise UserError(
            f"{origin}: architectures is {shown(names)}, but supported is one of "
            f"{', '.join(supported)}, {_GEMMA3_WITH_IMAGES} (text only); choose a checkpoint of one of these"
        )
    return supported[names[0]]


def _architecture_of(config: ModelConfig, base: Mapping[str, Any]) -> Architecture:
    """The architecture to write: that of `base` if it can express `config`, else the first that can."""
    fitting = [a for a in ARCHITECTURES if a.spells(config)]
    if not fitting:
        raise UserError(
            f"no architecture of Transformers has {' together with '.join(_unusual(config))}; train a model "
            f"that is one of {', '.join(a.model_type for a in ARCHITECTURES)} in all of these"
        )
    of_base = [a for a in fitting if a.model_type == base.get("model_type")]
    architecture = (of_base or fitting)[0]
    if architecture.divides and config.d_model % config.num_heads:
        raise UserError(
            f"d_model {config.d_model} is not a multiple of num_heads {config.num_heads}, which the "
            f"{architecture.language_model} of Transformers demands though head_dim is set apart; change "
            "d_model"
        )
    return architecture


def _unusual(config: ModelConfig) -> list[str]:
    """The settings of a shape that differ from plain Llama."""
    plain = ModelConfig(qkv_bias=False)
    names = (
        *ARCHITECTURES[0].all_traits,
        *SOFTCAP_KEYS,
        "num_experts",
        "query_pre_attn_scalar",
        "rope_local_theta",
        "layer_pattern",
    )
    return [
        f"{name}={getattr(config, name)}"
        for name in names
        if getattr(config, name) != getattr(plain, name)
    ]


def _check_switches(values: Mapping[str, Any], architecture: Architecture, origin: str) -> None:
    for key, needed in architecture.needs.items():
        if values.get(key) not in (needed, None):
            raise UserError(
                f"{origin}: {key} is {shown(values[key])}, but only {needed!r} is supported; "
                "choose a checkpoint without it"
            )
    if values.get("partial_rotary_factor") not in (1, None):
        raise UserError(
            f"{origin}: partial_rotary_factor is {shown(values['partial_rotary_factor'])}, but only "
            "rotation of the whole head is supported; choose a checkpoint without it"
        )
    if values.get("quantization_config") is not None:
        raise UserError(
            f"{origin}: quantization_config is set, but quantised weights cannot be trained; "
            "choose the checkpoint in bfloat16 or float32"
        )


def _head_dim(
    values: Mapping[str, Any],
    architecture: Architecture,
    d_model: int,
    num_heads: int,
    origin: str,
) -> int:
    if values.get("head_dim") is not None:
        return integer(values, "head_dim", origin)
    if architecture.own_head_dim or d_model % num_heads:
        raise UserError(
            f"{origin}: head_dim is missing, and hidden_size {d_model} / num_attention_heads "
            f"{num_heads} need not be it; add the size of one attention head"
        )
    return d_model // num_heads


def _score_fields(
    values: Mapping[str, Any], architecture: Architecture, origin: str
) -> dict[str, float]:
    """Scaling and caps of attention scores, and caps of logits."""
    fields = {}
    if architecture.has_query_scalar:
        # 256 is the default of the classes of Transformers.
        scalar = number(values, "query_pre_attn_scalar", origin, absent=256.0)
        fields["query_pre_attn_scalar"] = scalar
    for field, absent in architecture.softcaps.items():
        key = SOFTCAP_KEYS[field]
        capped = values.get(key, absent) not in (None, 0.0)
        fields[field] = number(values, key, origin, absent=absent) if capped else 0.0
    return fields


def _rotary_fields(
    values: Mapping[str, Any], architecture: Architecture, origin: str
) -> dict[str, Any]:
    """The bases of the rotary wavelengths, and their scaling."""
    if not architecture.has_local_rope:
        theta, scaling = _rope(values, architecture, origin)
        return {"rope_theta": theta, "rope_scaling": scaling}
    by_type = values.get("rope_parameters")
    if not isinstance(by_type, dict) or values.get("rope_scaling"):
        theta, scaling = _rope(values, architecture, origin)
        local = number(values, "rope_local_base_freq", origin, absent=10_000.0)
        return {"rope_theta": theta, "rope_scaling": scaling, "rope_local_theta": local}
    kinds = ("full_attention", "sliding_attention")
    if by_type.keys() - set(kinds):
        raise UserError(
            f"{origin}: rope_parameters has {', '.join(map(shown, by_type.keys() - set(kinds)))}, but only "
            f"{' and '.join(kinds)} are supported; copy the published config.json"
        )
    whole, sliding = ({"rope_parameters": by_type.get(name)} for name in kinds)
    theta, scaling = _rope(whole, architecture, f"{origin}: full_attention of rope_parameters")
    where = f"{origin}: sliding_attention of rope_parameters"
    local, of_local = _rope({"rope_theta": 10_000.0, **sliding}, architecture, where)
    if of_local is not None:
        raise UserError(
            f"{where} has rope_type {of_local.kind!r}, but only 'default' is supported there; choose a "
            "checkpoint without it"
        )
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_local_theta": local}


def _rope(
    values: Mapping[str, Any], architecture: Architecture, origin: str
) -> tuple[float, RopeScaling | None]:
    """The base of the rotary wavelengths, and their scaling."""
    # If both forms are present, Transformers uses the older one.
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    settings = values.get(key) or {}
    if not isinstance(settings, dict):
        raise UserError(f"{origin}: {key} is {shown(settings)}; it must be an object or null")
    where = f"{origin}: {key}"
    theta_of = settings if "rope_theta" in settings else values
    theta = number(theta_of, "rope_theta", origin, absent=architecture.rope_theta)
    kind = settings.get("rope_type", settings.get("type", "default"))
    # Compare with a tuple, since the value of an untrusted file may not be hashable.
    if kind not in tuple(_ROPE_KEYS):
        raise UserError(
            f"{where} has rope_type {shown(kind)}, but only {', '.join(_ROPE_KEYS)} are supported; "
            "choose a checkpoint with one of these, or remove the scaling for texts of the "
            "original length"
        )
    known = {"rope_type", "type", "rope_theta", *_ROPE_KEYS[kind]}
    if settings.get("partial_rotary_factor") == 1:
        known.add("partial_rotary_factor")
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise UserError(
            f"{where} has {', '.join(unknown)}, which rope_type {kind!r} does not know; "
            "choose a checkpoint without it"
        )
    if kind == "default":
        return theta, None
    factor, *frequencies = (number(settings, k, where) for k in _ROPE_KEYS[kind][:3])
    try:
        if kind == "linear":
            return theta, RopeScaling(factor, kind="linear")
        positions = integer(settings, _LLAMA3_KEYS[3], where)
        low, high = frequencies
        return theta, RopeScaling(factor, low, high, positions)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def _scaling_values(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    numbers = (
        scaling.factor,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_positions,
    )
    # A "linear" scaling has the factor only, so `zip` stops after the first number.
    return {
        "rope_type": scaling.kind,
        **dict(zip(_ROPE_KEYS[scaling.kind], numbers, strict=False)),
    }


def _gemma_values(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """Keys that only Gemma's classes know."""
    values: dict[str, Any] = {
        SOFTCAP_KEYS[field]: getattr(config, field) or None for field in architecture.softcaps
    }
    if architecture.has_query_scalar:
        scalar = config.query_pre_attn_scalar or config.head_dim
        # The class requires an int if the number is whole.
        values["query_pre_attn_scalar"] = int(scalar) if scalar == int(scalar) else scalar
    if architecture.has_local_rope:
        values["rope_local_base_freq"] = config.rope_local_theta
    return values
