"""Settings of the engine: what a user chooses, and what the caller adds to it."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import jax.numpy as jnp

from jaxrl.checks import (
    MAX_LAYERS,
    MAX_VOCABULARY,
    at_least,
    between,
    check_fields,
    count,
    token_count,
)

# What "auto" stands for.
_UNROLLED_LAYERS = 8
_SHORT_RESPONSE = 64
_SMALLEST_BUCKET = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of an engine that a user chooses. Configs that have an engine inherit these settings.

    Attributes:
      slots: S, samples decoded side by side at most.
      smallest_bucket: fewest slots that a decode program is compiled for, however few are in use. The more,
        the fewer programs are compiled, and the slower the last samples of a batch are decoded. "auto" is all
        slots where responses have at most 64 tokens, else 32.
      prefill_prompts: P, prompts of one prefill.
      prefill_chunk_tokens: prompts are prefilled so many tokens at a time; 0 is all at once.
      tokens_per_dispatch: W, tokens decoded between two looks of the host.
      dtype: of weights and activations.
      kv_dtype: of the cache of keys and values; "" is `dtype`, int8 has a scale per token and head.
      unroll: layers per iteration of the layer scan. With all of them decoding has no scan, and every layer
        its own arrays, its cache for good and its weights for a dispatch: on CPU, where a scan copies both to
        use them, that is twice as fast. "auto" is all of up to 8 layers on CPU, else 1.
      decode_attention: to the past, "auto" or one of `models.kernels.paged_attention.IMPLEMENTATIONS`.
    """

    slots: Annotated[int, count(1)] = 256
    smallest_bucket: Annotated[int, count(1)] | Literal["auto"] = "auto"
    prefill_prompts: Annotated[int, count(1)] = 32
    prefill_chunk_tokens: Annotated[int, token_count(0)] = 0
    tokens_per_dispatch: Annotated[int, between(1, 65_536)] = 16
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_dtype: Literal["", "float32", "bfloat16", "int8"] = ""
    unroll: Annotated[int, at_least(1, at_most=MAX_LAYERS)] | Literal["auto"] = "auto"
    decode_attention: Literal["auto", "xla", "paged_tpu", "paged_gpu"] = "auto"

    def __post_init__(self):
        check_fields(self)

    def engine_settings(self, **changes: Any) -> dict[str, Any]:
        """These settings alone, with the given ones changed, whatever a config has besides them."""
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(EngineSettings)}
        return settings | changes


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineSettings):
    """Everything that the compiled programs depend on, besides the model and its mesh.

    Example: `EngineConfig(**config.rollout.engine_settings(), max_prompt_tokens=..., ...)`.

    Attributes:
      max_prompt_tokens: T.
      max_response_tokens: R, end-of-sequence included.
      context_tokens: of a prompt and its response together; 0 is T + R.
      stop_ids: ids that end a response.
      attention: of prefill, "auto" or one of `models.attention.IMPLEMENTATIONS`.
    """

    max_prompt_tokens: Annotated[int, token_count(1)]
    max_response_tokens: Annotated[int, token_count(1)]
    stop_ids: tuple[Annotated[int, at_least(0, at_most=MAX_VOCABULARY)], ...]
    context_tokens: Annotated[int, token_count(0)] = 0
    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"

    def layers_per_iteration(self, num_layers: int, platform: str | None) -> int:
        """`unroll`, resolved for a model and the platform of its mesh."""
        if self.unroll != "auto":
            return self.unroll
        # Programs grow with their layers, and so does the time to compile them.
        return num_layers if platform == "cpu" and num_layers <= _UNROLLED_LAYERS else 1

    @property
    def fewest_slots(self) -> int:
        """`smallest_bucket`, resolved for the length of the responses."""
        if self.smallest_bucket != "auto":
            return self.smallest_bucket
        # To compile programs for the few slots of a tail takes longer than the tails of short responses.
        return self.slots if self.max_response_tokens <= _SHORT_RESPONSE else _SMALLEST_BUCKET

    @property
    def cache_dtype(self) -> Any:
        """Type of the cache."""
        return jnp.dtype(self.kv_dtype or self.dtype)

    @property
    def max_context_tokens(self) -> int:
        """The longest sequence."""
        return self.context_tokens or self.max_prompt_tokens + self.max_response_tokens

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of one prefill program."""
        return self.prefill_chunk_tokens or self.max_context_tokens
