"""config.json of a Hugging Face directory to a ModelConfig, and back.

Values are read from the file and never guessed from a model's name; an architecture only says what its
code does without asking the file (Qwen2 always has biases on q, k and v). Both spellings of the rotary
settings are read: `rope_theta` with `rope_scaling`, and the `rope_parameters` of Transformers 5. The
first is written, since every version reads it.

Not covered, and refused with the key that asks for it: sliding windows, other activations than silu,
rotation of a part of the head, other scalings of rotary wavelengths than Llama 3.1's, biases on the
output projection or the feed-forward network, quantised weights.
"""

from __future__ import annotations

import dataclasses
import pathlib
import types
from collections.abc import Mapping
from typing import Any

from jaxrl.checks import is_finite
from jaxrl.errors import UserError
from jaxrl.files import read_json_object
from jaxrl.models.config import LoraConfig, ModelConfig, RopeScaling


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """What a family of classes of Transformers is in our terms.

    Attributes:
      model_type: its name in config.json.
      qkv_bias, qk_norm: as in ModelConfig.
      mixture: its layers are mixtures of experts.
      needs: value each of its own switches must have, since our decoder has no other side.
    """

    model_type: str
    qkv_bias: bool
    qk_norm: bool
    needs: Mapping[str, Any]
    mixture: bool = False


# By what the names of their classes begin with.
_ARCHITECTURES: Mapping[str, _Architecture] = types.MappingProxyType(
    {
        "Qwen2": _Architecture("qwen2", qkv_bias=True, qk_norm=False, needs={}),
        "Qwen3": _Architecture(
            "qwen3", qkv_bias=False, qk_norm=True, needs={"attention_bias": False}
        ),
        "Qwen3Moe": _Architecture(
            "qwen3_moe",
            qkv_bias=False,
            qk_norm=True,
            needs={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
            mixture=True,
        ),
        "Llama": _Architecture(
            "llama",
            qkv_bias=False,
            qk_norm=False,
            needs={"attention_bias": False, "mlp_bias": False},
        ),
    }
)
_NEEDS: Mapping[str, Any] = {"hidden_act": "silu"}

# What their names end with: a language model, and one that gives scores in the place of logits.
_LANGUAGE_MODEL, _SCORE_MODEL = "ForCausalLM", "ForSequenceClassification"

# Keys whose meaning `config_json` rewrites under another name, or that describe other weights.
_REPLACED = frozenset(
    {"dtype", "rope_parameters", "layer_types", "quantization_config", "num_local_experts"}
)

# What the file must say about the world outside the weights when there is no file to take it from.
# Null, because the Llama class of Transformers would otherwise take ids 1 and 2 for begin and end.
_WITHOUT_BASE: Mapping[str, Any] = {
    "max_position_embeddings": 32_768,
    "bos_token_id": None,
    "eos_token_id": None,
}

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


def read_config_json(directory: str | pathlib.Path, name: str = "config.json") -> dict[str, Any]:
    """The config.json of a directory, or another JSON object of it, as it stands.

    Raises:
      UserError: it is missing, or is no JSON object; see `files.read_json_object`.
    """
    return read_json_object(
        pathlib.Path(directory) / name,
        absent=f"name a directory that holds {name} beside its weights, as published models and "
        "save_pretrained do",
    )


def read_config(directory: str | pathlib.Path) -> ModelConfig:
    """The shape of the model in a Hugging Face directory; see `parse_config`."""
    path = pathlib.Path(directory) / "config.json"
    return parse_config(read_config_json(directory), origin=str(path))


def parse_config(values: Mapping[str, Any], *, origin: str = "config.json") -> ModelConfig:
    """The shape that the values of a config.json describe.

    `num_tokens` stays 0 (all rows of the embedding): the file does not know the tokenizer.

    Args:
      values: the file's content.
      origin: what errors call it.

    Raises:
      UserError: the architecture or a setting is none our decoder has, or a value is missing or no
        number; the message names the key.
    """
    architecture = _architecture_named(values, origin)
    _check_switches(values, architecture, origin)
    _check_whole_attention(values, origin)
    num_heads = _integer(values, "num_attention_heads", origin)
    d_ff_key = "moe_intermediate_size" if architecture.mixture else "intermediate_size"
    d_model = _integer(values, "hidden_size", origin)
    theta, scaling = _rope(values, origin)
    fields: dict[str, Any] = dict(
        vocab_size=_integer(values, "vocab_size", origin),
        num_layers=_integer(values, "num_hidden_layers", origin),
        d_model=d_model,
        d_ff=_integer(values, d_ff_key, origin),
        num_heads=num_heads,
        num_kv_heads=_integer(values, "num_key_value_heads", origin, absent=num_heads),
        head_dim=_head_dim(values, architecture, d_model, num_heads, origin),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=_number(values, "rms_norm_eps", origin),
        tie_embeddings=_boolean(values, "tie_word_embeddings", origin),
        qkv_bias=architecture.qkv_bias,
        qk_norm=architecture.qk_norm,
        num_scores=_num_scores(values, origin),
    )
    if architecture.mixture:
        # Transformers 5 writes the second.
        experts_key = "num_experts" if "num_experts" in values else "num_local_experts"
        fields |= dict(
            num_experts=_integer(values, experts_key, origin),
            experts_per_token=_integer(values, "num_experts_per_tok", origin),
            normalize_experts=_boolean(values, "norm_topk_prob", origin),
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
      config: the shape; rows of the vocabulary above `num_tokens` are not marked, as usual there.
      dtype: name of the type the weights are stored in, such as "bfloat16".
      base: the config.json the model came from. What it says beyond the shape is kept: number of
        positions, ids of special tokens. Without it these are 32,768 and null.

    Raises:
      UserError: no architecture of Transformers has this shape.
    """
    family, architecture = _architecture_of(config)
    head = _SCORE_MODEL if config.num_scores else _LANGUAGE_MODEL
    kept = {k: v for k, v in (base or _WITHOUT_BASE).items() if k not in _REPLACED}
    scaling = config.rope_scaling
    return {
        **kept,
        **_NEEDS,
        **architecture.needs,
        "architectures": [family + head],
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
        "rope_scaling": None if scaling is None else _llama3_values(scaling),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "use_sliding_window": False,
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
      UserError: the file is missing, or asks for what our adapters cannot do; it names the key.
    """
    origin = str(pathlib.Path(directory) / "adapter_config.json")
    values = read_config_json(directory, "adapter_config.json")
    needs = {"peft_type": "LORA", "bias": "none"} | dict.fromkeys(_ADAPTER_SWITCHES)
    for key, needed in needs.items():
        if (values.get(key) or None) not in (needed, None):
            raise UserError(
                f"{origin}: {key} is {_cut(values[key])}, but only {needed!r} is supported; "
                "merge the adapter into its base model with PEFT and start from that"
            )
    modules = values.get("target_modules")
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise UserError(f"{origin}: target_modules is {_cut(modules)}; it must be a list of names")
    try:
        return LoraConfig(
            rank=_integer(values, "r", origin),
            alpha=_number(values, "lora_alpha", origin),
            targets=tuple(sorted(name.removesuffix("_proj") for name in modules)),
        )
    except ValueError as error:
        raise UserError(f"{origin}: {error}") from error


def _feed_forward_values(config: ModelConfig, kept: Mapping[str, Any]) -> dict[str, Any]:
    if not config.num_experts:
        return {"intermediate_size": config.d_ff}
    return {
        # Of dense layers, which there are none of; the class wants a number nevertheless.
        "intermediate_size": kept.get("intermediate_size", config.d_ff),
        "moe_intermediate_size": config.d_ff,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.normalize_experts,
    }


def _score_values(config: ModelConfig) -> dict[str, Any]:
    """Transformers counts labels by their names."""
    labels = {i: f"LABEL_{i}" for i in range(config.num_scores)}
    if not labels:
        return {}
    return {
        "id2label": {str(i): label for i, label in labels.items()},
        "label2id": {label: i for i, label in labels.items()},
    }


def _num_scores(values: Mapping[str, Any], origin: str) -> int:
    if values["architectures"][0].endswith(_LANGUAGE_MODEL):
        return 0
    labels = values.get("id2label")
    if not isinstance(labels, dict | None):
        raise UserError(f"{origin}: id2label is {_cut(labels)}; it must be an object or null")
    # Two labels are the default of Transformers, which it does not write.
    return len(labels) if labels else _integer(values, "num_labels", origin, absent=2)


def _architecture_named(values: Mapping[str, Any], origin: str) -> _Architecture:
    names = values.get("architectures")
    supported = {
        family + head: architecture
        for family, architecture in _ARCHITECTURES.items()
        for head in (_LANGUAGE_MODEL, _SCORE_MODEL)
    }
    # A list is compared with lists, since what is in it need not have a hash.
    if not isinstance(names, list) or names not in [[name] for name in supported]:
        raise UserError(
            f"{origin}: architectures is {_cut(names)}, but supported is one of "
            f"{', '.join(supported)}; choose a checkpoint of one of these"
        )
    return supported[names[0]]


def _architecture_of(config: ModelConfig) -> tuple[str, _Architecture]:
    mixture = bool(config.num_experts)
    fitting = [
        (family, a)
        for family, a in _ARCHITECTURES.items()
        if (a.qkv_bias, a.qk_norm, a.mixture) == (config.qkv_bias, config.qk_norm, mixture)
    ]
    if not fitting:
        raise UserError(
            f"no architecture of Transformers has qkv_bias={config.qkv_bias} together with "
            f"qk_norm={config.qk_norm}{' and experts' if mixture else ''}; train a model with one of "
            "the two, or with neither (a mixture of experts: with qk_norm)"
        )
    family, architecture = fitting[0]
    if family == "Llama" and config.d_model % config.num_heads:
        raise UserError(
            f"d_model {config.d_model} is not a multiple of num_heads {config.num_heads}, which "
            "the Llama of Transformers demands though head_dim is set apart; change d_model"
        )
    return family, architecture


def _check_switches(values: Mapping[str, Any], architecture: _Architecture, origin: str) -> None:
    for key, needed in {**_NEEDS, **architecture.needs}.items():
        if values.get(key) not in (needed, None):
            raise UserError(
                f"{origin}: {key} is {_cut(values[key])}, but only {needed!r} is supported; "
                "choose a checkpoint without it"
            )
    if values.get("partial_rotary_factor") not in (1, None):
        raise UserError(
            f"{origin}: partial_rotary_factor is {_cut(values['partial_rotary_factor'])}, but only "
            "rotation of the whole head is supported; choose a checkpoint without it"
        )
    if values.get("quantization_config") is not None:
        raise UserError(
            f"{origin}: quantization_config is set, but quantised weights cannot be trained; "
            "choose the checkpoint in bfloat16 or float32"
        )


def _check_whole_attention(values: Mapping[str, Any], origin: str) -> None:
    """Refuses a sliding window in use. Many files name one that `use_sliding_window` keeps off."""
    layer_types = values.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise UserError(f"{origin}: layer_types is {_cut(layer_types)}; it must be a list")
        other = sorted({str(t) for t in layer_types} - {"full_attention"})
        if other:
            raise UserError(
                f"{origin}: layer_types has {', '.join(other)}, but only full_attention is "
                "supported; choose a checkpoint without it"
            )
        return
    # The first `max_window_layers` layers see everything even so.
    whole = values.get("max_window_layers")
    every = isinstance(whole, int) and whole >= _integer(values, "num_hidden_layers", origin)
    if values.get("use_sliding_window") and not every:
        raise UserError(
            f"{origin}: use_sliding_window is true, but attention is always to the whole past here; "
            "choose a checkpoint with false, or write false for texts that fit into the window"
        )


def _head_dim(
    values: Mapping[str, Any],
    architecture: _Architecture,
    d_model: int,
    num_heads: int,
    origin: str,
) -> int:
    if values.get("head_dim") is not None:
        return _integer(values, "head_dim", origin)
    # A Qwen3 head has nothing to do with hidden_size, so a missing value cannot be derived.
    if architecture.qk_norm or d_model % num_heads:
        raise UserError(
            f"{origin}: head_dim is missing, and hidden_size {d_model} / num_attention_heads "
            f"{num_heads} need not be it; add the size of one attention head"
        )
    return d_model // num_heads


def _rope(values: Mapping[str, Any], origin: str) -> tuple[float, RopeScaling | None]:
    """The base of the rotary wavelengths, and their scaling."""
    # Where both spellings are filled Transformers takes the older one.
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    settings = values.get(key) or {}
    if not isinstance(settings, dict):
        raise UserError(f"{origin}: {key} is {_cut(settings)}; it must be an object or null")
    where = f"{origin}: {key}"
    theta_of = settings if "rope_theta" in settings else values
    # 10,000 is what the classes of Transformers take where an early Llama names no base.
    theta = _number(theta_of, "rope_theta", origin, absent=10_000.0)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(
            f"{where} has rope_type {_cut(kind)}, but only 'default' and 'llama3' are supported; "
            "choose a checkpoint with one of these, or remove the scaling for texts of the "
            "original length"
        )
    known = {"rope_type", "type", "rope_theta", *(_LLAMA3_KEYS if kind == "llama3" else ())}
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
    factor, low, high = (_number(settings, k, where) for k in _LLAMA3_KEYS[:3])
    positions = _integer(settings, _LLAMA3_KEYS[3], where)
    try:
        return theta, RopeScaling(factor, low, high, positions)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def _llama3_values(scaling: RopeScaling) -> dict[str, Any]:
    numbers = (
        scaling.factor,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_positions,
    )
    return {"rope_type": "llama3", **dict(zip(_LLAMA3_KEYS, numbers, strict=True))}


def _integer(values: Mapping[str, Any], key: str, origin: str, *, absent: int | None = None) -> int:
    number = _number(values, key, origin, absent=absent)
    if number != int(number):
        raise UserError(f"{origin}: {key} is {number}; it must be a whole number")
    return int(number)


def _number(
    values: Mapping[str, Any], key: str, origin: str, *, absent: float | None = None
) -> float:
    """A positive number; `absent` stands for a key that is missing or null."""
    value = values.get(key)
    if value is None:
        value = absent
    if value is None:
        raise UserError(f"{origin}: {key} is missing; copy the published config.json")
    if not is_finite(value) or value <= 0:
        raise UserError(f"{origin}: {key} is {_cut(value)}; it must be a positive number")
    return float(value)


def _boolean(values: Mapping[str, Any], key: str, origin: str) -> bool:
    """A flag; missing or null is false, as in the classes of Transformers covered here."""
    value = values.get(key)
    if value not in (None, True, False):
        raise UserError(f"{origin}: {key} is {_cut(value)}; it must be true or false")
    return bool(value)


def _cut(value: Any) -> str:
    """A value in a message: files of strangers hold long ones."""
    return repr(value)[:80]
