"""The supported architectures of Transformers, described in terms of ModelConfig.

An architecture has fixed traits, which its code decides without config.json, and its own keys and defaults
for the values in config.json.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Mapping
from typing import Any

from jaxrl.models.model_config import ModelConfig


class WindowKeys(enum.Enum):
    """The keys of a config.json that determine the layers with a sliding window."""

    NONE = "the architecture has none"
    # `use_sliding_window`; then `layer_types`, or all from the layer `max_window_layers` on.
    SWITCH = "a switch, and which layers"
    # `use_sliding_window`.
    SWITCH_FOR_ALL = "a switch for all layers"
    # `sliding_window`.
    NUMBER = "a number or null for all layers"
    # `layer_types`, or every layer but each `sliding_window_pattern`-th.
    LAYER_TYPES = "which layers"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A family of classes of Transformers.

    Attributes:
      language_model, score_model: class names of language models, and of models with scores instead of
        logits.
      model_type: name of the family in config.json.
      traits: fields of ModelConfig that the code of the family fixes, where they differ from `PLAIN`.
      needs: required values of switches in config.json; our decoder does not support other values.
      windows: see `WindowKeys`.
      window_pattern: default of a missing `sliding_window_pattern`.
      mixture: True if its layers are mixtures of experts.
      softcaps: score caps in config.json by field of ModelConfig, with the default of a missing key.
      has_query_scalar: True if config.json has `query_pre_attn_scalar`.
      has_local_rope: True if layers with a sliding window have their own rotary base.
      rope_theta: default of a missing rotary base.
      own_head_dim: True if the head size does not follow from the width of the model.
      divides: True if its code requires a width that is a multiple of the number of heads.
      tied: default of a missing `tie_word_embeddings`.
    """

    language_model: str
    score_model: str
    model_type: str
    traits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"hidden_act": "silu"})
    windows: WindowKeys = WindowKeys.NONE
    window_pattern: int = 1
    mixture: bool = False
    softcaps: Mapping[str, float] = dataclasses.field(default_factory=dict)
    has_query_scalar: bool = False
    has_local_rope: bool = False
    rope_theta: float = 10_000.0
    own_head_dim: bool = False
    divides: bool = False
    tied: bool = False

    @property
    def all_traits(self) -> dict[str, Any]:
        """All fields of ModelConfig that the code of an architecture may fix, with their values here."""
        return {**PLAIN, **self.traits}

    def spells(self, config: ModelConfig) -> bool:
        """Whether the architecture can express all of `config`."""
        traits = all(getattr(config, name) == value for name, value in self.all_traits.items())
        capped = [
            name for name in SOFTCAP_KEYS if getattr(config, name) and name not in self.softcaps
        ]
        plain_queries = config.query_pre_attn_scalar in (0, config.head_dim)
        return (
            traits
            and not capped
            and self.mixture == bool(config.num_experts)
            and (self.has_query_scalar or plain_queries)
            and self.has_local_rope == bool(config.rope_local_theta)
            and self._spells_windows(config.sliding_layers)
        )

    def _spells_windows(self, sliding: tuple[bool, ...]) -> bool:
        if not any(sliding):
            return True
        if self.windows in (WindowKeys.NUMBER, WindowKeys.SWITCH_FOR_ALL):
            return all(sliding)
        return self.windows is not WindowKeys.NONE


PLAIN: Mapping[str, Any] = types.MappingProxyType(
    {
        "qkv_bias": False,
        "qk_norm": False,
        "activation": "silu",
        "post_norms": False,
        "zero_centered_norms": False,
        "scale_embeddings": False,
    }
)

# Keys of config.json for the caps of ModelConfig.
SOFTCAP_KEYS: Mapping[str, str] = types.MappingProxyType(
    {"attention_softcap": "attn_logit_softcapping", "logits_softcap": "final_logit_softcapping"}
)

_SILU = {"hidden_act": "silu"}
_GEMMA: dict[str, Any] = dict(
    windows=WindowKeys.LAYER_TYPES,
    has_query_scalar=True,
    own_head_dim=True,
    divides=True,
    tied=True,
)
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

# If several architectures can express a model, export writes the first, unless the model came from another
# one.
ARCHITECTURES = (
    Architecture(
        "Qwen2ForCausalLM",
        "Qwen2ForSequenceClassification",
        "qwen2",
        traits={"qkv_bias": True},
        windows=WindowKeys.SWITCH,
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "Qwen3ForSequenceClassification",
        "qwen3",
        traits={"qk_norm": True},
        needs={**_SILU, "attention_bias": False},
        windows=WindowKeys.SWITCH,
        own_head_dim=True,
    ),
    Architecture(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeForSequenceClassification",
        "qwen3_moe",
        traits={"qk_norm": True},
        needs={
            **_SILU,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        windows=WindowKeys.SWITCH_FOR_ALL,
        mixture=True,
        own_head_dim=True,
    ),
    Architecture(
        "LlamaForCausalLM",
        "LlamaForSequenceClassification",
        "llama",
        needs={**_SILU, "attention_bias": False, "mlp_bias": False},
        divides=True,
    ),
    Architecture(
        "MistralForCausalLM",
        "MistralForSequenceClassification",
        "mistral",
        windows=WindowKeys.NUMBER,
    ),
    Architecture(
        "Gemma2ForCausalLM",
        "Gemma2ForSequenceClassification",
        "gemma2",
        traits=_GEMMA_TRAITS,
        needs=_GEMMA_NEEDS,
        window_pattern=2,
        softcaps={"attention_softcap": 50.0, "logits_softcap": 30.0},
        **_GEMMA,
    ),
    Architecture(
        "Gemma3ForCausalLM",
        "Gemma3TextForSequenceClassification",
        "gemma3_text",
        traits={**_GEMMA_TRAITS, "qk_norm": True},
        # The class reads `attn_logit_softcapping` but does not use it.
        needs={**_GEMMA_NEEDS, "attn_logit_softcapping": None},
        window_pattern=6,
        softcaps={"logits_softcap": 0.0},
        has_local_rope=True,
        rope_theta=1_000_000.0,
        **_GEMMA,
    ),
)
