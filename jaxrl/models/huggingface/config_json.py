"""config.json of a Hugging Face directory to a ModelConfig, and back.

Values are read from the file and never guessed from the name of a model. An architecture only adds what its
code fixes (Qwen2 always has biases on q, k and v). Both forms of the rotary settings are read: `rope_theta`
with `rope_scaling`, and the `rope_parameters` of Transformers 5. The first form is written, since every
version reads it.

Not covered, and refused with the name of the key: gates other than silu and (in Gemma) tanh-gelu, partial
rotation of heads, rotary scalings other than Llama 3.1's and a plain factor, biases on the output projection
or the feed-forward network, quantised weights. Of a Gemma 3 with images (4B and larger) only the text model
is read. Other keys are ignored: no supported class computes anything with them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxrl.checks import MAX_LAYERS, is_finite
from jaxrl.errors import UserError
from jaxrl.files import read_json_object
from jaxrl.models.huggingface.architectures import (
    ARCHITECTURES,
    SOFTCAP_KEYS,
    Architecture,
    WindowKeys,
)
from jaxrl.models.model_config import LoraConfig, ModelConfig, RopeScaling

_Built = TypeVar("_Built")

# Required values of every architecture, as `Architecture.needs`; they are read and never written.
_NEEDS_OF_ALL = {"partial_rotary_factor": 1, "quantization_config": None}

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
_WITHOUT_BASE = {"max_position_embeddings": 32_768, "bos_token_id": None, "eos_token_id": None}

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
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
    *("tie_word_embeddings", "quantization_config"),
)

# Settings of PEFT that change what an adapter computes, each off or absent here.
_ADAPTER_SWITCHES = (
    *("fan_in_fan_out", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"),
    *("modules_to_save", "layers_to_transform", "target_parameters"),
)

_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}
# Defaults of the classes of Transformers for missing keys.
_MISTRAL_WINDOW, _QWEN_WHOLE_LAYERS = 4096, 28
_LOCAL_ROPE_THETA, _GEMMA_QUERY_SCALAR = 10_000.0, 256.0

# Keys of a rotary scaling by the fields of RopeScaling, and how many of them each kind has.
_ROPE_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}
_ROPE_KINDS = {"default": 0, "llama3": 4, "linear": 1}


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
    text = _Reader(values, origin).of_type("text_config", dict, "an object")
    return {
        **_GEMMA3_TEXT,
        **text,
        **{key: values[key] for key in _OF_BOTH if values.get(key) is not None},
        # The class with images does not cap logits, whatever its file says.
        "final_logit_softcapping": None,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
    }


class _Reader:
    """Typed values of an untrusted JSON object. A key that is missing or null gives `absent`."""

    def __init__(self, values: Mapping[str, Any], origin: str):
        self.values, self.origin = values, origin

    def fault(self, key: str, rule: str) -> UserError:
        # Cut the value: an untrusted file may hold a very long one.
        return UserError(f"{self.origin}: {key} is {repr(self.values.get(key))[:80]}{rule}")

    def number(self, key: str, absent: float | None = None) -> float:
        """A positive number."""
        value = self.values.get(key)
        value = absent if value is None else value
        if value is None:
            raise UserError(f"{self.origin}: {key} is missing; copy the published file again")
        if not is_finite(value) or value <= 0:
            raise self.fault(key, "; it must be a positive number")
        return float(value)

    def integer(self, key: str, absent: int | None = None) -> int:
        value = self.number(key, absent)
        if value != int(value):
            raise self.fault(key, "; it must be a whole number")
        return int(value)

    def flag(self, key: str, absent: bool = False) -> bool:
        value = self.values.get(key)
        if value not in (None, True, False):
            raise self.fault(key, "; it must be true or false")
        return absent if value is None else bool(value)

    def of_type(self, key: str, kind: type, name: str, absent: Any = None) -> Any:
        value = self.values.get(key)
        value = absent if value is None else value
        if not isinstance(value, kind):
            raise self.fault(key, f"; it must be {name}: copy the published file again")
        return value

    def check_needs(self, needs: Mapping[str, Any], remedy: str) -> None:
        """Refuses values other than the ones that our code computes; a missing key has this value."""
        for key, needed in needs.items():
            if self.values.get(key) not in (needed, None):
                raise self.fault(key, f", but only {needed!r} is supported; {remedy}")

    def build(self, make: Callable[..., _Built], **fields: Any) -> _Built:
        """An object whose constructor refuses values, which came from the file."""
        try:
            return make(**fields)
        except ValueError as error:
            raise UserError(f"{self.origin}: {error}; copy the published file again") from error


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
    read = _Reader(_text_values(values, origin), origin)
    architecture = _architecture_named(read)
    read.check_needs({**_NEEDS_OF_ALL, **architecture.needs}, "choose a checkpoint without it")
    d_model, num_heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    if read.values.get("head_dim") is not None:
        head_dim = read.integer("head_dim")
    elif architecture.own_head_dim or d_model % num_heads:
        raise UserError(
            f"{origin}: head_dim is missing, and hidden_size {d_model} / num_attention_heads {num_heads} "
            "need not be it; add the size of one attention head"
        )
    else:
        head_dim = d_model // num_heads
    num_scores = 0
    if read.values["architectures"] != [architecture.language_model]:
        # Two labels are the default of Transformers, which it does not write.
        labels = read.of_type("id2label", dict, "an object", absent={})
        num_scores = len(labels) or read.integer("num_labels", 2)
    fields: dict[str, Any] = {
        "vocab_size": read.integer("vocab_size"),
        "num_layers": read.integer("num_hidden_layers"),
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": read.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": read.number("rms_norm_eps"),
        "tie_embeddings": read.flag("tie_word_embeddings", architecture.tied),
        "num_scores": num_scores,
        **architecture.all_traits,
    }
    for field, absent in architecture.softcaps.items():
        key = SOFTCAP_KEYS[field]
        capped = read.values.get(key, absent) not in (None, 0.0)
        fields[field] = read.number(key, absent) if capped else 0.0
    if architecture.has_query_scalar:
        scalar = read.number("query_pre_attn_scalar", _GEMMA_QUERY_SCALAR)
        fields["query_pre_attn_scalar"] = scalar
    if architecture.mixture:
        # Transformers 5 writes `num_local_experts`.
        experts = "num_experts" if "num_experts" in read.values else "num_local_experts"
        fields["d_ff"] = read.integer("moe_intermediate_size")
        fields["num_experts"] = read.integer(experts)
        fields["experts_per_token"] = read.integer("num_experts_per_tok")
        fields["normalize_experts"] = read.flag("norm_topk_prob")
    else:
        fields["d_ff"] = read.integer("intermediate_size")
    fields |= _rotary_fields(read, architecture) | _window_fields(read, architecture)
    return read.build(ModelConfig, **fields)


def _architecture_named(read: _Reader) -> Architecture:
    names = read.values.get("architectures")
    by_name = {a.language_model: a for a in ARCHITECTURES}
    by_name |= {a.score_model: a for a in ARCHITECTURES}
    # Compare whole lists, since the elements of an untrusted list may not be hashable.
    if names not in [[name] for name in by_name]:
        supported = ", ".join((*by_name, _GEMMA3_WITH_IMAGES))
        raise read.fault(
            "architectures",
            f", but supported is one of {supported} (text only); choose a checkpoint of one of these",
        )
    return by_name[names[0]]


def _window_fields(read: _Reader, architecture: Architecture) -> dict[str, Any]:
    """`sliding_window` and `layer_pattern`. Many files name a window that no layer uses: 0 here."""
    num_layers = read.integer("num_hidden_layers")
    if num_layers > MAX_LAYERS:  # before lists of this length are made
        raise read.fault(
            "num_hidden_layers", f", above {MAX_LAYERS:,}; copy the published file again"
        )
    kinds = read.of_type("layer_types", list, "a list", absent=[])
    if others := {str(kind) for kind in kinds} - _LAYER_TYPES.keys():
        raise UserError(
            f"{read.origin}: layer_types has {', '.join(sorted(others))[:80]}, but only "
            f"{' and '.join(_LAYER_TYPES)} are supported; choose a checkpoint without it"
        )
    if kinds and len(kinds) != num_layers:
        raise UserError(
            f"{read.origin}: layer_types names {len(kinds)} layers of num_hidden_layers {num_layers}; copy "
            "the published config.json"
        )
    listed = [_LAYER_TYPES[kind] for kind in kinds]
    # Null turns the window of Mistral off; a missing key means the default.
    is_mistral = architecture.windows is WindowKeys.NUMBER
    default_window = _MISTRAL_WINDOW if is_mistral else None
    if is_mistral:
        switched_on = read.values.get("sliding_window", default_window) is not None
    else:
        switched_on = read.flag("use_sliding_window")
    if architecture.windows is WindowKeys.LAYER_TYPES:
        period = read.integer("sliding_window_pattern", architecture.window_pattern)
        sliding = listed or [bool((i + 1) % period) for i in range(num_layers)]
    elif architecture.windows is WindowKeys.NONE and switched_on:
        raise UserError(
            f"{read.origin}: use_sliding_window is true, but {architecture.language_model} attends to the "
            "whole past; write false there"
        )
    elif architecture.windows is WindowKeys.SWITCH and switched_on:
        whole = read.of_type("max_window_layers", int, "a number of layers", _QWEN_WHOLE_LAYERS)
        sliding = listed or [i >= whole for i in range(num_layers)]
    else:
        sliding = [switched_on] * num_layers
        if listed and listed != sliding:
            raise UserError(
                f"{read.origin}: layer_types has {kinds[listed.index(not switched_on)]}, but "
                "use_sliding_window and sliding_window say otherwise; copy the published config.json"
            )
    if not any(sliding):
        return {"sliding_window": 0, "layer_pattern": ("full",)}
    # The shortest pattern that repeats over all layers.
    length = next(
        n
        for n in range(1, num_layers + 1)
        if all(sliding[i] == sliding[i % n] for i in range(num_layers))
    )
    return {
        "sliding_window": read.integer("sliding_window", default_window),
        "layer_pattern": tuple("sliding" if slides else "full" for slides in sliding[:length]),
    }


def _rotary_fields(read: _Reader, architecture: Architecture) -> dict[str, Any]:
    """The bases of the rotary wavelengths, and their scaling."""
    by_type = read.values.get("rope_parameters")
    if not architecture.has_local_rope:
        return _rope(read, architecture.rope_theta)
    if not isinstance(by_type, dict) or read.values.get("rope_scaling"):
        local = read.number("rope_local_base_freq", _LOCAL_ROPE_THETA)
        return {**_rope(read, architecture.rope_theta), "rope_local_theta": local}
    if others := by_type.keys() - _LAYER_TYPES.keys():
        raise UserError(
            f"{read.origin}: rope_parameters has {', '.join(map(repr, others))[:80]}, but only "
            f"{' and '.join(_LAYER_TYPES)} are supported; copy the published config.json"
        )
    whole, sliding = (
        _Reader({"rope_parameters": by_type.get(kind)}, f"{read.origin}: {kind} of rope_parameters")
        for kind in _LAYER_TYPES
    )
    local = _rope(sliding, _LOCAL_ROPE_THETA)
    if (scaling := local["rope_scaling"]) is not None:
        raise UserError(
            f"{sliding.origin} has rope_type {scaling.kind!r}, but only 'default' is supported there; choose "
            "a checkpoint without it"
        )
    return {**_rope(whole, architecture.rope_theta), "rope_local_theta": local["rope_theta"]}


def _rope(read: _Reader, absent_theta: float) -> dict[str, Any]:
    # If both forms are present, Transformers uses the older one.
    key = "rope_scaling" if read.values.get("rope_scaling") else "rope_parameters"
    settings = read.of_type(key, dict, "an object or null", absent={})
    nested = _Reader(settings, f"{read.origin}: {key}")
    theta = (nested if "rope_theta" in settings else read).number("rope_theta", absent_theta)
    kind = settings.get("rope_type", settings.get("type", "default"))
    # Compare with a tuple, since the value of an untrusted file may not be hashable.
    if kind not in tuple(_ROPE_KINDS):
        raise UserError(
            f"{nested.origin} has rope_type {repr(kind)[:80]}, but only {', '.join(_ROPE_KINDS)} are "
            "supported; choose a checkpoint with one of these, or remove the scaling for texts of the "
            "original length"
        )
    keys = dict(list(_ROPE_KEYS.items())[: _ROPE_KINDS[kind]])
    # Another key could change the numbers.
    nested.check_needs({"partial_rotary_factor": 1}, "choose a checkpoint without it")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *keys.values()}
    if unknown := sorted(settings.keys() - known):
        raise UserError(
            f"{nested.origin} has {', '.join(unknown)}, which rope_type {kind!r} does not know; choose a "
            "checkpoint without it"
        )
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    numbers: dict[str, Any] = {
        field: nested.integer(k) if field == "original_max_positions" else nested.number(k)
        for field, k in keys.items()
    }
    return {"rope_theta": theta, "rope_scaling": nested.build(RopeScaling, **numbers, kind=kind)}


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
    base = _WITHOUT_BASE if base is None else _text_values(base, "config.json")
    architecture = _architecture_of(config, base.get("model_type"))
    kept = {k: v for k, v in base.items() if k not in _REPLACED}
    scores = [f"LABEL_{i}" for i in range(config.num_scores)]
    scaling = None
    if (rope := config.rope_scaling) is not None:
        fields = list(_ROPE_KEYS.items())[: _ROPE_KINDS[rope.kind]]
        scaling = {"rope_type": rope.kind, **{key: getattr(rope, field) for field, key in fields}}
    values = {
        **kept,
        **architecture.needs,
        "architectures": [architecture.score_model if scores else architecture.language_model],
        "model_type": architecture.model_type,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
    }
    if config.num_experts:
        # The model has no dense layers, but the class requires a number for their width.
        values["intermediate_size"] = kept.get("intermediate_size", config.d_ff)
        values["moe_intermediate_size"] = config.d_ff
        values["num_experts"] = config.num_experts
        values["num_experts_per_tok"] = config.experts_per_token
        values["norm_topk_prob"] = config.normalize_experts
    values |= {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        **{SOFTCAP_KEYS[field]: getattr(config, field) or None for field in architecture.softcaps},
    }
    if architecture.has_query_scalar:
        scalar = config.query_pre_attn_scalar or config.head_dim
        # The class requires an int if the number is whole.
        values["query_pre_attn_scalar"] = int(scalar) if scalar == int(scalar) else scalar
    if architecture.has_local_rope:
        values["rope_local_base_freq"] = config.rope_local_theta
    values["rms_norm_eps"] = config.rms_norm_eps
    values["tie_word_embeddings"] = config.tie_embeddings
    values |= _window_values(config, architecture.windows)
    if scores:
        # Transformers derives the number of scores from the labels.
        values["id2label"] = {str(i): label for i, label in enumerate(scores)}
        values["label2id"] = {label: i for i, label in enumerate(scores)}
    return values


def _window_values(config: ModelConfig, keys: WindowKeys) -> dict[str, Any]:
    """The keys of a config.json that give the layers of `config` their windows."""
    sliding, window = config.sliding_layers, config.sliding_window or None
    types = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    match keys:
        case WindowKeys.NUMBER:
            return {"sliding_window": window}
        case WindowKeys.LAYER_TYPES:
            # The older key: the n for which exactly every n-th layer has full attention.
            period = next(
                (
                    n
                    for n in range(1, len(sliding) + 2)
                    if all(slides == bool((i + 1) % n) for i, slides in enumerate(sliding))
                ),
                None,
            )
            older = {"sliding_window_pattern": period} if period else {}
            return {"sliding_window": window, "layer_types": types, **older}
        case WindowKeys.SWITCH if window:
            first = sliding.index(True)
            older = {"max_window_layers": first} if all(sliding[first:]) else {}
            on = {"use_sliding_window": True, "sliding_window": window}
            return {**on, "layer_types": types, **older}
        case WindowKeys.SWITCH_FOR_ALL if window:
            return {"use_sliding_window": True, "sliding_window": window}
        case _:
            return {"use_sliding_window": False}


def _architecture_of(config: ModelConfig, model_type: str | None) -> Architecture:
    """The architecture to write: that of `model_type` if it can express `config`, else the first that can."""
    fitting = [a for a in ARCHITECTURES if a.spells(config)]
    if not fitting:
        plain = ModelConfig(qkv_bias=False)
        names = [*ARCHITECTURES[0].all_traits, *SOFTCAP_KEYS, "num_experts"]
        names += ["query_pre_attn_scalar", "rope_local_theta", "layer_pattern"]
        unusual = [
            f"{name}={getattr(config, name)}"
            for name in names
            if getattr(config, name) != getattr(plain, name)
        ]
        raise UserError(
            f"no architecture of Transformers has {' together with '.join(unusual)}; train a model that is "
            f"one of {', '.join(a.model_type for a in ARCHITECTURES)} in all of these"
        )
    architecture = next((a for a in fitting if a.model_type == model_type), fitting[0])
    if architecture.divides and config.d_model % config.num_heads:
        raise UserError(
            f"d_model {config.d_model} is not a multiple of num_heads {config.num_heads}, which the "
            f"{architecture.language_model} of Transformers demands though head_dim is set apart; change "
            "d_model"
        )
    return architecture


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
    values = read_config_json(directory, "adapter_config.json")
    read = _Reader(values, str(pathlib.Path(directory) / "adapter_config.json"))
    # An empty object, an empty list or false says the same as null.
    switched = {key: value for key, value in values.items() if value}
    needs = {"peft_type": "LORA", "bias": "none", **dict.fromkeys(_ADAPTER_SWITCHES)}
    _Reader(switched, read.origin).check_needs(
        needs, "merge the adapter into its base model with PEFT and start from that"
    )
    modules = read.of_type("target_modules", list, "a list of names")
    if not all(isinstance(name, str) for name in modules):
        raise read.fault("target_modules", "; it must be a list of names")
    return read.build(
        LoraConfig,
        rank=read.integer("r"),
        alpha=read.number("lora_alpha"),
        targets=tuple(sorted(name.removesuffix("_proj") for name in modules)),
    )
