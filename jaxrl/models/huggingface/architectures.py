"""The architectures of Transformers whose checkpoints are read and written, each in our terms.

An architecture says what its code does without asking config.json, and how it spells what it does ask for.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Mapping
from typing import Any

from jaxrl.models.model_config import ModelConfig


class WindowKeys(enum.Enum):
    """How a config.json says which layers have a sliding window."""

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
      language_model, score_model: names of the classes for language models, and for those that give scores in
        the place of logits.
      model_type: its name in config.json.
      traits: the fields of ModelConfig that its code decides, where they differ from `PLAIN`.
      needs: value each of its own switches must have, since our decoder has no other side.
      windows: see `WindowKeys`.
      window_pattern: what stands for a missing `sliding_window_pattern`.
      mixture: its layers are mixtures of experts.
      softcaps: fields of ModelConfig that config.json gives it, with what stands for a missing key.
      has_query_scalar: config.json has a `query_pre_attn_scalar`.
      has_local_rope: layers with a sliding window rotate by a base of their own.
      rope_theta: what stands for a missing base.
      own_head_dim: the size of heads has nothing to do with the width of the model.
      divides: its code wants a width that is a multiple of the number of heads all the same.
      tied: what stands for a missing `tie_word_embeddings`.
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
        """Every field of ModelConfig that some architecture's code decides, with its value here."""
        return {**PLAIN, **self.traits}

    def spells(self, config: ModelConfig) -> bool:
        """Whether its classes and its config.json can say all of `config`."""
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

# Of those that can say the same, the first is written if nothing speaks for another.
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
        # Read by its class, and then not used.
        needs={**_GEMMA_NEEDS, "attn_logit_softcapping": None},
        window_pattern=6,
        softcaps={"logits_softcap": 0.0},
        has_local_rope=True,
        rope_theta=1_000_000.0,
        **_GEMMA,
    ),
)
