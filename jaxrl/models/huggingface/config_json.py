"""config.json of a Hugging Face directory to a ModelConfig, and back.

Each supported family of Transformers is one row of `architectures.ARCHITECTURES`, which is read both ways.
Values are read from the file and never guessed from the name of a model. Both forms of the rotary settings
are read: `rope_theta` with `rope_scaling`, and the `rope_parameters` of Transformers 5. The first form is
written, since every version reads it.

What a family's code does not know is refused with the name of the key: another gate, partial rotation of
heads or a rotary scaling that it does not have, biases on a dense feed-forward network, quantised weights but
gpt-oss's. Of a model with images only the text model is read. Other keys are ignored: no supported class
computes anything with them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxrl.checks import is_finite
from jaxrl.errors import UserError
from jaxrl.files import read_json_object
from jaxrl.hub.hub_names import fetch_hint
from jaxrl.models.huggingface.architectures import ARCHITECTURES, PLAIN, SOFTCAPS, Architecture
from jaxrl.models.model_config import LoraConfig, ModelConfig, RopeScaling

_Built = TypeVar("_Built")

# Keys of a base config that are not kept: `config_json` writes their content under another name, or they
# describe other weights.
_REPLACED = frozenset(
    {
        "dtype",
        "rope_parameters",
        "layer_types",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "per_layer_config",
        "quantization_config",
        "num_local_experts",
    }
)

# Values that do not follow from the weights, for a model without a base config. The ids are null, because the
# Llama class of Transformers would otherwise use ids 1 and 2 for begin and end.
_WITHOUT_BASE = {"max_position_embeddings": 32_768, "bos_token_id": None, "eos_token_id": None}

# Keys beside `text_config` that hold for the text model too.
_OF_BOTH = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
    *("tie_word_embeddings", "quantization_config"),
)

_OFF_BY_ZERO = (
    *(*SOFTCAPS, "first_dense_layers", "full_kv_heads", "q_latent"),
    *("layer_inputs", "sharing_layers"),
)

# Settings of PEFT that change what an adapter computes, each off or absent here.
_ADAPTER_SWITCHES = (
    *("fan_in_fan_out", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"),
    *("modules_to_save", "layers_to_transform", "target_parameters"),
)

# Modules of latent attention with an adapter, by `LoraConfig.targets`; of queries without a latent "q_proj".
_OF_LATENTS: Mapping[str, tuple[str, ...]] = {
    "q": ("q_a_proj", "q_b_proj"),
    "k": ("kv_a_proj_with_mqa",),
    "v": ("kv_b_proj",),
}

# The module of a delta net whose adapter goes with that of the output projection of attention.
_OF_DELTA = "out_proj"

_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}
_DELTA_TYPES = {"full_attention": "full", "linear_attention": "delta"}
_INDEXER_TYPES = {"full": True, "shared": False, "F": True, "S": False}

# Key and type of the fields of RopeScaling.
_ROPE_KEYS = {
    "factor": ("factor", float),
    "low_freq_factor": ("low_freq_factor", float),
    "high_freq_factor": ("high_freq_factor", float),
    "original_max_positions": ("original_max_position_embeddings", int),
    "beta_fast": ("beta_fast", float),
    "beta_slow": ("beta_slow", float),
    "truncate": ("truncate", bool),
    "attention_factor": ("attention_factor", float),
    "mscale": ("mscale", float),
    "mscale_all_dim": ("mscale_all_dim", float),
    "query_beta": ("llama_4_scaling_beta", float),
    "short_factors": ("short_factor", list),
    "long_factors": ("long_factor", list),
    "rotated": ("partial_rotary_factor", float),
}
# The fields that each kind of scaling needs, and those that may be missing.
_ROPE_KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (tuple(_ROPE_KEYS)[:4], ()),
    "yarn": (("factor", "original_max_positions"), tuple(_ROPE_KEYS)[4:-3]),
    "longrope": (
        ("short_factors", "long_factors", "original_max_positions"),
        ("factor", "attention_factor"),
    ),
    "proportional": ((), ("rotated",)),
}


def read_config_json(directory: str | pathlib.Path, name: str = "config.json") -> dict[str, Any]:
    """Reads the config.json of a directory, or another JSON object in it.

    Of a model with images only the values of its text model are returned; see `_text_values`.

    Raises:
      UserError: the file is missing or not a JSON object; see `files.read_json_object`.
    """
    path = pathlib.Path(directory) / name
    absent = f"name a directory with {name} beside the weights, as published models and save_pretrained have"
    absent += fetch_hint(str(directory))
    return _text_values(read_json_object(path, absent=absent), origin=str(path))


def _text_values(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The values of the text model in a config.json with `text_config`; other files unchanged."""
    families = {
        a.model_type: a for a in ARCHITECTURES if [a.with_images] == values.get("architectures")
    }
    if not families:
        return dict(values)
    text = _Reader(values, origin).get("text_config", dict)
    # A list, since the value of an untrusted file may not be hashable.
    if text.get("model_type") not in [*families]:
        raise _Reader(text, f"{origin}: text_config").fault(
            "model_type",
            f", but supported is one of {', '.join(families)}; choose another checkpoint",
        )
    family = families[text["model_type"]]
    return {
        **family.text_absent,
        **text,
        **{key: values[key] for key in _OF_BOTH if values.get(key) is not None},
        **family.text_fixed,
        "architectures": [family.language_model],
    }


class _Reader:
    """Typed values of an untrusted JSON object."""

    RULES: Mapping[type, str] = {
        int: "a positive number, and whole",
        float: "a positive number",
        bool: "true or false",
        dict: "an object",
        list: "a list",
    }

    def __init__(self, values: Mapping[str, Any], origin: str):
        self.values, self.origin = values, origin

    def fault(self, key: str, rule: str) -> UserError:
        # Cut the value: an untrusted file may hold a very long one.
        return UserError(f"{self.origin}: {key} is {repr(self.values.get(key))[:80]}{rule}")

    def get(self, key: str, kind: type, absent: Any = None) -> Any:
        """The value of a key. One that is missing or null gives `absent`, and is refused if that is None."""
        value = self.values.get(key)
        value = absent if value is None else value
        if value is None:
            raise UserError(f"{self.origin}: {key} is missing; copy the published file again")
        is_number = kind in (int, float)
        fits = (
            is_finite(value) and 0 < value == kind(value) if is_number else isinstance(value, kind)
        )
        if not fits:
            raise self.fault(key, f"; it must be {self.RULES[kind]}: copy the published file again")
        return kind(value) if is_number else value

    def check_needs(self, needs: Mapping[str, Any], remedy: str) -> None:
        """Refuses values other than the ones that our code computes; a missing key has this value."""
        if (key := self.unmet(needs)) is not None:
            raise self.fault(key, f", but only {needs[key]!r} is supported; {remedy}")

    def unmet(self, needs: Mapping[str, Any]) -> str | None:
        """The first key with another value; None if there is none."""
        return next((k for k, v in needs.items() if self.values.get(k) not in (v, None)), None)

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
    values = _text_values(values, origin)
    # Transformers 5 writes `num_local_experts`.
    values.setdefault("num_experts", values.get("num_local_experts"))
    read = _Reader(values, origin)
    if types := read.get("mlp_layer_types", list, []):
        dense = types.count("dense")
        if types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
            raise read.fault(
                "mlp_layer_types", ", but only first layers can be dense; choose another model"
            )
        values["first_k_dense_replace"] = dense
    names = values.get("architectures")
    # Compare whole lists, since the elements of an untrusted list may not be hashable.
    found = [a for a in ARCHITECTURES if names in ([a.language_model], [a.score_model or None])]
    if not found:
        known = dict.fromkeys(a.language_model for a in ARCHITECTURES)
        raise read.fault(
            "architectures",
            f", but supported are {', '.join(known)}, most of the same "
            "..ForSequenceClassification, and the text models of "
            f"{', '.join(sorted({a.with_images for a in ARCHITECTURES} - {''}))}; choose a checkpoint of "
            "one of these",
        )
    architecture = next((a for a in found if read.unmet(a.needs) is None), found[0])
    read.check_needs(architecture.needs, "choose a checkpoint without it")
    stored = read.get("quantization_config", dict, {})
    if stored and not (
        architecture.quantized and stored.get("quant_method") == architecture.quantized
    ):
        raise read.fault(
            "quantization_config",
            f", but only {architecture.quantized or None!r} is supported; choose a checkpoint without it",
        )
    fields: dict[str, Any] = {**PLAIN, **architecture.traits}
    if names != [architecture.language_model]:
        # Two labels are the default of Transformers, which it does not write.
        fields["num_scores"] = len(read.get("id2label", dict, {})) or read.get("num_labels", int, 2)
    d_model, num_heads = read.get("hidden_size", int), read.get("num_attention_heads", int)
    absent = {"num_kv_heads": num_heads, "tie_embeddings": architecture.tied, **architecture.own}
    if not architecture.own_head_dim and d_model % num_heads == 0:
        absent["head_dim"] = d_model // num_heads
    for field, (key, kind) in architecture.keys.items():
        if field in _OFF_BY_ZERO and values.get(key, absent[field]) in (None, 0):
            fields[field] = kind(0)  # null turns a field off, where a missing key means the default
        else:
            fields[field] = read.get(key, kind, absent.get(field))
    fields["head_dim"] += fields.get("rope_dim", 0)
    if architecture.counts_shared:
        fields["shared_d_ff"] *= fields["d_ff"]
    if not fields.get("first_dense_layers", 1):
        fields["dense_d_ff"] = 0
    fields |= _rotary_fields(read, architecture)
    # Checks the number of layers, before lists of this length are made.
    later = [field for field in fields if field.startswith("delta_") and field.endswith("heads")]
    later += [field for field in fields if field.startswith("index_")]
    later += [field for field in ("sharing_layers", "layer_inputs") if field in fields]
    if fields.get("layer_inputs"):
        rows = {"vocab_size_per_layer_input": fields["vocab_size"]}
        read.check_needs(rows, "choose a checkpoint with as many rows in both embeddings")
    config = read.build(ModelConfig, **{**fields, **dict.fromkeys(later, 0)})
    kinds = _kind_fields(read, architecture, config.num_layers)
    kinds |= {field: fields[field] for field in later}
    if "index_topk" in fields:
        kinds["indexer_pattern"] = _indexer_pattern(read, config.num_layers)
    return read.build(functools.partial(dataclasses.replace, config), **kinds)


def _kind_fields(read: _Reader, architecture: Architecture, num_layers: int) -> dict[str, Any]:
    """`sliding_window` and `layer_pattern`. Many files name a window that no layer uses: 0 here."""
    of_layers = _layer_settings(read, num_layers)
    two_sizes = "full_head_dim" in architecture.own
    if others := {key for values in of_layers for key in values} - (_HEADS if two_sizes else set()):
        raise read.fault(
            "per_layer_config",
            f"; {', '.join(sorted(others))[:80]} must be the same in all layers of {architecture.model_type}",
        )
    listed = read.get("layer_types", list, [])
    known = _DELTA_TYPES if architecture.windows == "delta" else _LAYER_TYPES
    if "index_topk" in architecture.own:
        known = {"indexed_attention": False}
    if others := {str(kind) for kind in listed} - known.keys():
        raise UserError(
            f"{read.origin}: layer_types has {', '.join(sorted(others))[:80]}, but only "
            f"{' and '.join(known)} are supported; choose a checkpoint without it"
        )
    if listed and len(listed) != num_layers:
        raise UserError(
            f"{read.origin}: layer_types names {len(listed)} layers of num_hidden_layers {num_layers}; copy "
            "the published config.json"
        )
    if architecture.windows == "delta":
        every = read.get("full_attention_interval", int, architecture.window_pattern)
        pattern = [_DELTA_TYPES[kind] for kind in listed] or [
            "delta" if (i + 1) % every else "full" for i in range(num_layers)
        ]
        return {"layer_pattern": _shortest(pattern, whole=True)}
    # Null turns the window of Mistral and Qwen off; a missing key means the default.
    window = None
    if architecture.windows and (
        not architecture.switched or read.get("use_sliding_window", bool, False)
    ):
        window = read.values.get("sliding_window", architecture.window)
    if architecture.windows == "types" and not architecture.switched:
        period = read.get("sliding_window_pattern", int, architecture.window_pattern)
        sliding = [bool((i + 1) % period) for i in range(num_layers)]
    else:
        longest = read.values.get("max_position_embeddings")
        if all(map(is_finite, (window, longest))) and window >= longest:  # pyright: ignore
            # All positions are in the window of any layer.
            window, listed = None, []
        first = 0
        if architecture.windows == "types" and read.values.get("max_window_layers") != 0:
            first = read.get("max_window_layers", int, 28)
        sliding = [window is not None and i >= first for i in range(num_layers)]
    kinds = [known[kind] for kind in listed] or sliding
    fixed = architecture.windows != "types" or (architecture.switched and window is None)
    if kinds != sliding and fixed:
        deciding = "use_sliding_window and " * architecture.switched
        raise UserError(
            f"{read.origin}: layer_types has {listed[kinds.index(not sliding[0])]}, but only {deciding}"
            f"sliding_window decides in {architecture.language_model}; copy the published config.json"
        )
    if two_sizes:
        kinds[-1] = False  # as the class has it, whatever the file says
    rotates = [True] * num_layers
    if architecture.unrotated_every:
        every = read.get("no_rope_layer_interval", int, architecture.unrotated_every)
        # 1 is a layer with rotary positions.
        rotates = read.get("no_rope_layers", list, [(i + 1) % every for i in range(num_layers)])
        if len(rotates) < num_layers:
            raise read.fault("no_rope_layers", f", but there are {num_layers} layers")
    pattern = tuple(
        "sliding" if slides else "full" if rotated else "unrotated"
        for slides, rotated in zip(kinds, rotates, strict=False)
    )
    window = read.get("sliding_window", int, architecture.window) if any(kinds) else 0
    fields = {"sliding_window": window}
    if two_sizes:
        fields |= _full_heads(read, pattern, of_layers)
    return {**fields, "layer_pattern": _shortest(pattern, whole=two_sizes)}


def _indexer_pattern(read: _Reader, num_layers: int) -> tuple[bool, ...]:
    """`indexer_pattern`, from the first of the ways in which the class reads it."""
    every = read.get("index_topk_freq", int, 1)
    first = read.get("index_skip_topk_offset", int, 2)
    types = ["SF"[max(i - first + 1, 0) % every == 0] for i in range(num_layers)]
    for key in ("index_topk_pattern", "indexer_types"):
        if isinstance(listed := read.values.get(key), str | list):
            types = [*listed]
        if {str(kind) for kind in types} - _INDEXER_TYPES.keys() or len(types) != num_layers:
            raise read.fault(key, f"; it must be full or shared for each of {num_layers} layers")
    return _shortest([_INDEXER_TYPES[kind] for kind in types])


def _layer_settings(read: _Reader, num_layers: int) -> list[dict[str, Any]]:
    """What `per_layer_config` gives each layer that the model's own keys do not say."""
    found: list[dict[str, Any]] = [{} for _ in range(num_layers)]
    for key, values in read.get("per_layer_config", dict, {}).items():
        # Transformers pads the numbers with zeros.
        number = int(key) if key.isdecimal() and len(key) < 10 else num_layers
        if number >= num_layers or not isinstance(values, dict):
            raise read.fault(
                "per_layer_config",
                f"; it must be an object for some of layers 0 to {num_layers - 1}",
            )
        found[number] = {
            name: value
            for name, value in values.items()
            if value != read.values.get(name) and (name, value) != ("skip", [])
        }
    return found


_HEADS = {"head_dim", "num_key_value_heads"}


def _full_heads(
    read: _Reader, pattern: Sequence[str], of_layers: Sequence[Mapping[str, Any]]
) -> dict[str, int]:
    """Sizes and numbers of heads, by the kind of layer, if `per_layer_config` gives them."""
    if "per_layer_config" not in read.values:
        # Else it has no effect.
        return {} if read.values.get("attention_k_eq_v") else {"full_kv_heads": 0}
    both: dict[str, tuple[int, int]] = {}
    for kind, values in zip(pattern, of_layers, strict=True):
        layer = _Reader({**read.values, **values}, f"{read.origin}: per_layer_config")
        heads = layer.get("num_attention_heads", int)
        found = layer.get("head_dim", int), layer.get("num_key_value_heads", int, heads)
        if both.setdefault(kind, found) != found:
            raise read.fault(
                "per_layer_config",
                "; supported are heads of one size in all layers of full attention and of one in the others",
            )
    (full_dim, full_heads), (dim, heads) = both["full"], both.get("sliding", both["full"])
    return {
        "head_dim": dim,
        "num_kv_heads": heads,
        "full_head_dim": full_dim,
        "full_kv_heads": full_heads if full_heads != heads else 0,
    }


def _shortest(kinds: Sequence[Any], *, whole: bool = False) -> tuple[Any, ...]:
    """The shortest pattern that repeats over all layers, with `whole` a whole number of times."""
    length = next(
        n
        for n in range(1, len(kinds) + 1)
        if all(kind == kinds[i % n] for i, kind in enumerate(kinds))
        and not (whole and len(kinds) % n)
    )
    return tuple(kinds[:length])


def _rotary_fields(read: _Reader, architecture: Architecture) -> dict[str, Any]:
    """The bases of the rotary wavelengths, and their scaling."""
    if architecture.rope_by_type:
        by_type = read.get("rope_parameters", dict)
    else:
        by_type = read.values.get("rope_parameters")
        by_type = {} if read.values.get("rope_scaling") else by_type
    if not architecture.has_local_theta or not isinstance(by_type, dict) or not by_type:
        return _rope(read, architecture)
    if others := by_type.keys() - _LAYER_TYPES.keys():
        raise UserError(
            f"{read.origin}: rope_parameters has {', '.join(map(repr, others))[:80]}, but only "
            f"{' and '.join(_LAYER_TYPES)} are supported; copy the published config.json"
        )
    others = {k: v for k, v in read.values.items() if k not in ("rope_theta", "rope_scaling")}
    whole, sliding = (
        _Reader(
            {**others, "rope_parameters": by_type.get(kind)},
            f"{read.origin}: {kind} of rope_parameters",
        )
        for kind in _LAYER_TYPES
    )
    local_theta = {**architecture.own, **architecture.traits}["rope_local_theta"]
    local = _rope(sliding, dataclasses.replace(architecture, rope_theta=local_theta))
    if (scaling := local["rope_scaling"]) is not None:
        raise UserError(
            f"{sliding.origin} has rope_type {scaling.kind!r}, but only 'default' is supported there; choose "
            "a checkpoint without it"
        )
    return {**_rope(whole, architecture), "rope_local_theta": local["rope_theta"]}


def _rope(read: _Reader, architecture: Architecture) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `rotary_fraction`."""
    # If both forms are present, Transformers uses the older one.
    key = "rope_scaling" if read.values.get("rope_scaling") else "rope_parameters"
    settings = read.get(key, dict, {})
    kind = settings.get("rope_type", settings.get("type", "default"))
    original = "original_max_position_embeddings"
    if kind == "longrope" and (beside := read.values.get(original)) is not None:
        settings = {original: beside, **settings}
    nested = _Reader(settings, f"{read.origin}: {key}")
    theta = (nested if "rope_theta" in settings else read).get(
        "rope_theta", float, architecture.rope_theta
    )
    # Compare with a tuple, since the value of an untrusted file may not be hashable.
    kinds = [k for k in _ROPE_KINDS if k != "proportional" or architecture.rope_by_type]
    if kind not in kinds:
        raise UserError(
            f"{nested.origin} has rope_type {repr(kind)[:80]}, but only {', '.join(kinds)} are "
            "supported; choose a checkpoint with one of these, or remove the scaling for texts of the "
            "original length"
        )
    needed, optional = _ROPE_KINDS[kind]
    keys = {field: _ROPE_KEYS[field] for field in (*needed, *optional)}
    # Another key could change the numbers.
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "max_position_embeddings"}
    if architecture.windows == "delta":
        # Positions in images; those of text are the same in all three parts of a head.
        known |= {"mrope_section", "mrope_interleaved"}
    if unknown := sorted(settings.keys() - known - {name for name, _ in keys.values()}):
        raise UserError(
            f"{nested.origin} has {', '.join(unknown)}, which rope_type {kind!r} does not know; choose a "
            "checkpoint without it"
        )
    fraction = 1.0
    of_head = nested if settings.get("partial_rotary_factor") is not None else read
    if "rotary_fraction" in architecture.own:
        absent = architecture.own["rotary_fraction"]
        fraction = of_head.get("partial_rotary_factor", float, absent)
    elif kind != "proportional":
        of_head.check_needs({"partial_rotary_factor": 1}, "choose a checkpoint without it")
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None, "rotary_fraction": fraction}
    values: dict[str, Any] = {
        field: nested.get(*key_type)
        for field, key_type in keys.items()
        if field in needed or settings.get(key_type[0]) is not None
    }
    if kind == "longrope" and "factor" not in values:
        longest = read.get("max_position_embeddings", int)
        values["factor"] = max(1.0, longest / values["original_max_positions"])
    scaling = nested.build(RopeScaling, **values, kind=kind)
    # Fewer positions are fine: who adds a scaling to Qwen's file by hand need not change their number.
    original = scaling.original_max_positions
    longest = read.get("max_position_embeddings", int, original) if kind == "yarn" else 0
    if longest > scaling.factor * original:
        raise UserError(
            f"{nested.origin} stretches original_max_position_embeddings {original} by factor "
            f"{scaling.factor:g}, which falls short of max_position_embeddings {longest}; set factor to "
            f"{longest / original:g}, or correct the lengths"
        )
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_fraction": fraction}


def fused_tensors(values: Mapping[str, Any]) -> list[str]:
    """The tensors that a model with this config.json has in place of several (`Architecture.fused`)."""
    rows = [a for a in ARCHITECTURES if a.model_type == values.get("model_type")]
    return [a.fused for a in rows if a.fused]


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
    fields = {field: getattr(config, field) for field in architecture.keys}
    # Transformers marks what is off by null, and requires an int if the scalar is whole.
    fields |= {
        field: fields[field] or None for field in (*SOFTCAPS, "full_kv_heads") if field in fields
    }
    if "query_pre_attn_scalar" in fields:
        scalar = config.query_pre_attn_scalar or config.head_dim
        fields["query_pre_attn_scalar"] = int(scalar) if scalar == int(scalar) else scalar
    fields["head_dim"] -= config.rope_dim
    if "full_head_dim" in fields:
        fields["full_head_dim"] = config.full_head_dim or config.head_dim
    if "q_latent" in fields:
        fields["q_latent"] = config.q_latent or None
    if architecture.counts_shared:
        fields["shared_d_ff"] //= config.d_ff
    if not config.dense_d_ff:
        fields.pop("dense_d_ff", None)
    scores = {str(i): f"LABEL_{i}" for i in range(config.num_scores)}
    values = {
        **kept,
        **architecture.needs,
        "architectures": [architecture.score_model if scores else architecture.language_model],
        "model_type": architecture.model_type,
        "torch_dtype": dtype,
        # Qwen3-MoE has no dense layers, but its class requires a number for their width.
        "intermediate_size": kept.get("intermediate_size", config.d_ff),
        **{architecture.keys[field][0]: value for field, value in fields.items()},
        "rope_theta": config.rope_theta,
        **_rope_values(config.rope_scaling),
        **_window_values(config, architecture),
    }
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if key in values:
            values[key] = 0  # these layers are not kept
    if first := config.first_dense_layers:
        sparse = config.num_layers - first
        values["mlp_layer_types"] = ["dense"] * first + ["sparse"] * sparse
    if config.layer_inputs:
        values["vocab_size_per_layer_input"] = config.vocab_size
    if config.index_topk:
        layers = range(config.num_layers)
        values["indexer_types"] = [
            "full" if i in config.indexed_layers else "shared" for i in layers
        ]
    if architecture.rope_by_type:
        scaling, local = values.pop("rope_scaling"), values.pop("rope_local_base_freq")
        whole = {"rope_theta": values.pop("rope_theta"), **(scaling or {"rope_type": "default"})}
        sliding = {"rope_type": "default", "rope_theta": local}
        values["rope_parameters"] = {"full_attention": whole, "sliding_attention": sliding}
    if architecture.unrotated_every:
        values["no_rope_layers"] = [int(rotated) for rotated in config.rotated_layers]
    if scores:
        # Transformers derives the number of scores from the labels.
        values |= {"id2label": scores, "label2id": {name: int(i) for i, name in scores.items()}}
    return values


def _rope_values(rope: RopeScaling | None) -> dict[str, Any]:
    """The keys of a config.json that scale the rotary wavelengths."""
    if rope is None:
        return {"rope_scaling": None}
    needed, optional = _ROPE_KINDS[rope.kind]
    plain = RopeScaling()
    told = [f for f in optional if getattr(rope, f) != getattr(plain, f)]
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    scaling |= {_ROPE_KEYS[field][0]: getattr(rope, field) for field in (*needed, *told)}
    if rope.kind != "longrope":
        return {"rope_scaling": scaling}
    # Phi3Config takes exactly these three, and has the lengths beside them.
    scaling = {"type": "longrope"} | {
        key: [*scaling[key]] for key in ("short_factor", "long_factor")
    }
    if rope.attention_factor:
        scaling["attention_factor"] = rope.attention_factor
    return {
        "rope_scaling": scaling,
        "original_max_position_embeddings": rope.original_max_positions,
        "max_position_embeddings": round(rope.factor * rope.original_max_positions),
    }


def _window_values(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """The keys of a config.json that give the layers of `config` their windows."""
    windows, sliding = architecture.windows, config.sliding_layers
    if not windows:
        return {}
    if windows == "delta":
        names = {kind: name for name, kind in _DELTA_TYPES.items()}
        repeats = config.layer_pattern * config.num_periods
        return {"layer_types": [names[kind] for kind in repeats]}
    values: dict[str, Any] = {"sliding_window": config.sliding_window or None}
    if architecture.switched:
        # Without windows the numbers of the source have no effect.
        values = {"use_sliding_window": any(sliding), **(values if any(sliding) else {})}
        if windows == "types" and any(sliding):
            values["max_window_layers"] = sliding.index(True)
    if windows == "types" and (any(sliding) or not architecture.switched):
        types = {slides: name for name, slides in _LAYER_TYPES.items()}
        values["layer_types"] = [types[slides] for slides in sliding]
    if windows == "types" and not architecture.switched:
        # The older key: the n for which exactly every n-th layer has full attention.
        for n in range(1, len(sliding) + 2):
            if all(slides == bool((i + 1) % n) for i, slides in enumerate(sliding)):
                return values | {"sliding_window_pattern": n}
    return values


def _architecture_of(config: ModelConfig, model_type: str | None) -> Architecture:
    """The architecture to write: that of `model_type` if it can express `config`, else the first that can."""
    fitting = [a for a in ARCHITECTURES if a.spells(config)]
    if not fitting:
        plain = ModelConfig(qkv_bias=False)
        names = [*PLAIN, *SOFTCAPS, "num_experts", "shared_d_ff", "expert_groups", "routed_scale"]
        names += ["num_scores", "full_head_dim", "kv_latent"]
        names += ["query_pre_attn_scalar", "rope_local_theta", "layer_pattern", "rotary_fraction"]
        unusual = [
            f"{name}={getattr(config, name)}"
            for name in names
            if getattr(config, name) != getattr(plain, name)
        ]
        raise UserError(
            f"no architecture of Transformers has {' together with '.join(unusual)}; train a model that is "
            f"one of {', '.join(dict.fromkeys(a.model_type for a in ARCHITECTURES))} in all of these"
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
    of_latents = _OF_LATENTS if config.kv_latent else {}
    if not config.q_latent:
        of_latents = {name: of_latents[name] for name in of_latents if name != "q"}
    modules = [of_latents.get(name, (f"{name}_proj",)) for name in lora.targets]
    if config.has_state and "o" in lora.targets:
        modules.append((_OF_DELTA,))
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if config.num_scores else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(itertools.chain(*modules)),
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
    modules = read.get("target_modules", list)
    own = {module: ours for ours, some in _OF_LATENTS.items() for module in some} | {_OF_DELTA: "o"}
    if not all(isinstance(name, str) for name in modules):
        raise read.fault("target_modules", "; it must be a list of names")
    return read.build(
        LoraConfig,
        rank=read.get("r", int),
        alpha=read.get("lora_alpha", float),
        targets=tuple(sorted({own.get(name) or name.removesuffix("_proj") for name in modules})),
    )
