"""Settings of the engine: those of the user, and those that the calling code adds."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jaxrl.checks import (
    MAX_LAYERS,
    MAX_VOCABULARY,
    at_least,
    between,
    count,
    settings,
    token_count,
)

# Values that "auto" resolves to.
_UNROLLED_LAYERS = 8
_SHORT_RESPONSE = 64
_SMALLEST_BUCKET = 16


@settings
class EngineSettings:
    """Settings of an engine that a user chooses. Configs with an engine inherit them."""

    slots: Annotated[int, count(1)] = 256
    """Maximum number of samples decoded at the same time."""
    prefill_prompts: Annotated[int, count(1)] = 32
    """Number of prompts per prefill. A run takes the next multiple of the replicas that sample."""
    tokens_per_dispatch: Annotated[int, between(1, 65_536)] = 16
    """Number of tokens decoded before the host checks the slots again."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights and activations."""
    weights_dtype: Literal["", "int8"] = ""
    """"int8" stores the weights inside layers in 8 bits, with a scale per output; "" means
    `dtype`. Embeddings and the unembedding stay in `dtype`.
    """
    kv_dtype: Literal["", "float32", "bfloat16", "int8"] = ""
    """Data type of the KV cache; "" means `dtype`. int8 has a scale per token and head."""
    cache: Literal["contiguous", "paged"] = "contiguous"
    """"contiguous" gives every slot room for the longest sequence. "paged" gives it pages as
    its sequence grows, so that more samples fit into the same memory.
    """
    cache_tokens: Annotated[int, at_least(0)] = 0
    """Number of tokens that a paged cache holds, over all replicas; 0 means the longest
    sequence in every slot. More keep known beginnings. With more agents than slots 0 means the
    conversations of all agents, or as many as fit into `memory_fraction`.
    """
    deterministic: bool = False
    """Whether samples are the same on every mesh, in bfloat16 too (see docs/numerics.md). Sums
    that devices share are made in a fixed order, which takes more communication. It needs two
    slots or more on each replica.
    """
    speculate: Annotated[int, between(0, 64)] = 0
    """Number of tokens drafted from earlier text and verified in one forward pass, while few
    samples are left; 0 does not draft. Samples stay the same up to rounding. It has no effect
    on CPU.
    """

    def __post_init__(self):
        if self.speculate >= self.tokens_per_dispatch:
            raise ValueError(
                f"speculate {self.speculate} decodes up to {self.speculate + 1} tokens in a round, and "
                f"tokens_per_dispatch {self.tokens_per_dispatch} has no room for a round; raise it to "
                f"{4 * self.speculate} or more, or lower speculate"
            )
        if self.speculate and self.deterministic:
            raise ValueError(
                f"speculate {self.speculate} changes the rounding of logits, so samples would depend on when "
                "it drafts; set speculate to 0, or deterministic to False"
            )
        if self.cache_tokens and self.cache != "paged":
            raise ValueError(
                f"cache_tokens {self.cache_tokens} is the size of a paged cache, and cache is "
                f"{self.cache!r}; set cache to paged, or cache_tokens to 0"
            )

    def engine_settings(self, **changes: Any) -> dict[str, Any]:
        """The settings of this class alone, with `changes` applied, without those of subclasses."""
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(EngineSettings)}
        return settings | changes


def fewest_slots(slots: int, max_response_tokens: int) -> int:
    """The smallest number of slots to compile a decode program for, on all shards."""
    # With short responses, compiling programs for few slots takes longer than they save.
    return slots if max_response_tokens <= _SHORT_RESPONSE else min(slots, _SMALLEST_BUCKET)


@settings
class EngineConfig(EngineSettings):
    """All settings that the compiled programs depend on, besides the model and its mesh.

    Example: `EngineConfig(**config.rollout.engine_settings(), max_prompt_tokens=..., ...)`.
    """

    max_prompt_tokens: Annotated[int, token_count(1)]
    """Maximum number of prompt tokens, T."""
    max_response_tokens: Annotated[int, token_count(1)]
    """Maximum number of response tokens, R, end-of-sequence included."""
    stop_ids: tuple[Annotated[int, at_least(0, at_most=MAX_VOCABULARY)], ...]
    """Token ids that end a response."""
    context_tokens: Annotated[int, token_count(0)] = 0
    """Maximum number of tokens of a prompt and its response together; 0 means T + R."""
    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    """Attention of prefill, "auto" or one of `models.attention.IMPLEMENTATIONS`."""
    prefill_chunk_tokens: Annotated[int, token_count(0)] = 0
    """Maximum number of prompt tokens per prefill program; longer prompts are prefilled in
    chunks. 0 prefills each prompt at once.
    """
    decode_attention: Literal["auto", "xla", "paged_tpu", "paged_gpu"] = "auto"
    """Kernel for attention to the cache, "auto" or one of
    `models.kernels.paged_attention.IMPLEMENTATIONS`.
    """
    smallest_bucket: Annotated[int, count(1)] | Literal["auto"] = "auto"
    """Smallest number of slots that a decode program is compiled for. A larger value compiles
    fewer programs, but the last samples of a batch decode more slowly. "auto" is all slots if
    responses have at most 64 tokens, else 16.
    """
    adapter_places: Annotated[int, at_least(0)] = 0
    """Number of places in the stack of adapters that samples choose from (`samples.Start`); 0 without one."""
    replicas_apart: bool = True
    """Whether processes with whole replicas sample a batch without the others (`mesh.replica_groups`)."""
    keeps_routes: bool = False
    """Keep the experts that every token of a mixture takes, for `Sample.routes`."""
    unroll: Annotated[int, at_least(1, at_most=MAX_LAYERS)] | Literal["auto"] = "auto"
    """Number of layers per iteration of the layer scan. If it covers all layers, decoding has
    no scan and each layer has separate arrays. That is faster on CPU, where a scan copies
    weights and cache. "auto" is all layers for models of up to 8 layers on CPU, else 1.
    """

    def layers_per_iteration(self, num_layers: int, platform: str | None) -> int:
        """The value of `unroll` for a model and the platform of its mesh."""
        if self.unroll != "auto":
            return self.unroll
        # An unrolled program takes longer to compile for each layer.
        return num_layers if platform == "cpu" and num_layers <= _UNROLLED_LAYERS else 1

    @property
    def fewest_slots(self) -> int:
        """The value of `smallest_bucket` for the length of the responses."""
        if self.smallest_bucket != "auto":
            return self.smallest_bucket
        return fewest_slots(self.slots, self.max_response_tokens)

    @property
    def max_context_tokens(self) -> int:
        """The maximum length of a sequence."""
        return self.context_tokens or self.max_prompt_tokens + self.max_response_tokens

    @property
    def chunk_tokens(self) -> int:
        """The maximum number of tokens of one prefill program."""
        return self.prefill_chunk_tokens or self.max_context_tokens
