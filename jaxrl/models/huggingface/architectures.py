"""The families of Transformers that can be read and written: the rows of `architectures.yaml`.

A family of known parts and tensor names is a row there and nothing else; other tensor names are rules in
`weight_table`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import yaml

from jaxrl.models.model_config import ModelConfig

_TABLE: Mapping[str, Any] = yaml.safe_load(
    pathlib.Path(__file__).with_suffix(".yaml").read_text("utf-8")
)
_KINDS = {"int": int, "float": float, "bool": bool}
# Key in config.json, and its type, of fields of ModelConfig: of all families, and of those that name them.
_KEYS, _OWN_KEYS = (
    {field: (key, _KINDS[kind]) for field, (key, kind) in _TABLE[name].items()}
    for name in ("keys", "own_keys")
)
PLAIN: Mapping[str, Any] = _TABLE["plain"]
"""Fields that the code of a family fixes, with their values in a family that does not name them."""
SOFTCAPS = ("attention_softcap", "logits_softcap")

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
      switched: True if windows count only with `use_sliding_window`. Of "types" then the layers from number
        `max_window_layers` on have one, if `layer_types` is missing.
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
    needs: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"hidden_act": "silu"})
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    windows: Literal["", "number", "types", "delta"] = ""
    window_pattern: int = 1
    window: int | None = None
    switched: bool = False
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
        keys: dict[str, tuple[str, type]] = _KEYS | {f: _OWN_KEYS[f] for f in self.own}
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


ARCHITECTURES = tuple(Architecture(**row) for row in _TABLE["architectures"])
