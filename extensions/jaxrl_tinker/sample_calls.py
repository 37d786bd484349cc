"""Reads what a client asks of a sampler: the JSON of `asample`.

N tokens of a prompt   K targets of a place

Not covered: images, which are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.rollout.sampling import SamplingOptions, truncation_of
from jaxrl.rollout.settings import EngineConfig
from jaxrl_serving.openai.calls import LOWEST_TEMPERATURE
from jaxrl_tinker.bodies import Body

_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
# Reports only the first wrong item of a long list.
_Int64s = Annotated[list[_Int64], Field(fail_fast=True)]
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_listed = BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)
_Stops = Annotated[list[_Stop | _Int64], _listed, Field(max_length=64)]
_Top = Annotated[int, Field(ge=0, le=100)]


@dataclasses.dataclass(frozen=True)
class SampleCall:
    """A request to sample, checked.

    Attributes:
      prompt: int32 [N].
      num_samples, max_tokens: number of samples, and of tokens of each.
      seed: what its noise depends on, besides the index of the sample.
      options: how tokens are drawn, of one sample.
      prompt_logprobs: number of last prompt tokens whose log-probability is wanted; 0 for none.
      topk_prompt, topk_sample: number of most probable tokens to return at each place.
      targets: int64 [N - 1, K], tokens whose log-probability is wanted, -1 for none; None without any.
      is_sparse: whether the answer about targets is sparse, as the question was.
      draws: number of tokens to draw at each place of the prompt, at the call's temperature.
    """

    prompt: np.ndarray
    num_samples: int
    max_tokens: int
    seed: bytes
    options: SamplingOptions
    prompt_logprobs: int = 0
    topk_prompt: int = 0
    topk_sample: int = 0
    targets: np.ndarray | None = None
    is_sparse: bool = False
    draws: int = 0


class _Chunk(Body):
    type: Literal["encoded_text"]
    tokens: _Int64s


class _Prompt(Body):
    chunks: list[_Chunk]


class _SamplingParams(Body):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    # -1 is all.
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    seed: int | None = None
    # The model's own if it is missing, and none at all if it is empty.
    stop: _Stops | None = None


class _Tensor(Body):
    data: _Int64s
    shape: _Int64s
    sparse_crow_indices: _Int64s | None = None
    sparse_col_indices: _Int64s = Field(default_factory=list)


class _Sample(Body):
    prompt: _Prompt
    sampling_params: _SamplingParams
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_prompt_logprobs: _Top = 0
    topk_sample_logprobs: _Top = 0
    target_prompt_logprobs: _Tensor | None = None
    prompt_alt_tokens_k: _Top = 0
    record_stability_info: bool = False


def read_call(
    body: Mapping[str, Any],
    sizes: EngineConfig,
    tokenizer: Tokenizer,
    vocabulary: int,
    default_seed: bytes,
) -> SampleCall:
    """A SampleCall from the JSON of `asample`, for a model with so many tokens and its tokenizer.

    Raises:
      UserError: something does not fit, or is not served.
    """
    asked = _Sample.of(body)
    params, targets = asked.sampling_params, asked.target_prompt_logprobs
    if asked.record_stability_info:
        raise UserError(
            "record_stability_info belongs to stable_reinforce, which is not served; train with "
            "loss_fn=importance_sampling"
        )
    prompt = _tokens(asked.prompt, vocabulary)
    room = min(sizes.max_response_tokens, sizes.max_context_tokens - len(prompt))
    if len(prompt) > sizes.max_prompt_tokens or room < 1:
        raise UserError(
            f"the prompt has {len(prompt)} tokens; this server takes {sizes.max_prompt_tokens} at most, and "
            f"{sizes.max_context_tokens} together with a sample: shorten it"
        )
    max_tokens = params.max_tokens or room
    if max_tokens > room:
        raise UserError(
            f"max_tokens {max_tokens} after a prompt of {len(prompt)}: this server has room for {room}; ask "
            "for as many"
        )
    if asked.prompt_logprobs_last_n is not None and not asked.prompt_logprobs:
        raise UserError("prompt_logprobs_last_n needs prompt_logprobs; set it to true")
    texts = [each for each in params.stop or () if isinstance(each, str)]
    ids = [each for each in params.stop or () if isinstance(each, int)]
    ids += tokenizer.stop_ids if params.stop is None else tokenizer.ids_named_by(texts)
    options = SamplingOptions(
        # A division by less would overflow float32.
        temperature=0.0 if params.temperature < LOWEST_TEMPERATURE else params.temperature,
        truncation=truncation_of(
            # 0 is all here.
            top_k=max(min(params.top_k, vocabulary), 0),
            top_p=params.top_p,
        ),
        stop_strings=tuple(texts),
        # The engine knows none, for they differ from call to call.
        stop_ids=tuple(ids),
    )
    last = min(asked.prompt_logprobs_last_n or len(prompt), len(prompt))
    return SampleCall(
        prompt,
        asked.num_samples,
        max_tokens,
        # Without a seed a repeated call gets its samples again. The prefix keeps a given seed from equaling a
        # default.
        default_seed if params.seed is None else b"seed %d" % params.seed,
        options,
        prompt_logprobs=last if asked.prompt_logprobs else 0,
        topk_prompt=min(asked.topk_prompt_logprobs, vocabulary),
        topk_sample=min(asked.topk_sample_logprobs, vocabulary),
        targets=None if targets is None else _targets(targets, len(prompt), vocabulary),
        is_sparse=targets is not None and targets.sparse_crow_indices is not None,
        draws=asked.prompt_alt_tokens_k,
    )


def _tokens(prompt: _Prompt, vocabulary: int) -> np.ndarray:
    tokens = np.array([token for chunk in prompt.chunks for token in chunk.tokens], np.int64)
    if not tokens.size:
        raise UserError("the prompt is empty; write one")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise UserError(
            f"the prompt has tokens that are no ids of this model, which go from 0 to "
            f"{vocabulary - 1}; use its own tokenizer"
        )
    return tokens.astype(np.int32)


def _targets(tensor: _Tensor, length: int, vocabulary: int) -> np.ndarray:
    """Int64 [N - 1, K] from a tensor in JSON; -1 where nothing is asked."""
    what = f"target_prompt_logprobs must be an int64 tensor [{length - 1}, K]"
    shape, data = tuple(tensor.shape), np.array(tensor.data, np.int64)
    if len(shape) != 2 or shape[0] != length - 1 or not 1 <= shape[1] <= 1000:
        raise UserError(
            f"{what}, K up to 1,000; it has shape {list(shape)}: send one row per token"
        )
    try:
        if tensor.sparse_crow_indices is None:
            targets = data.reshape(shape)
        else:
            counts = np.diff(np.array(tensor.sparse_crow_indices, np.int64))
            targets = np.full(shape, -1, np.int64)
            rows = np.repeat(np.arange(len(counts)), counts)
            targets[rows, np.array(tensor.sparse_col_indices, np.int64)] = data
    except (ValueError, IndexError) as error:
        raise UserError(f"{what} ({error}); send it as tinker 0.38 does") from error
    if targets.size and (targets.min() < -1 or targets.max() >= vocabulary):
        raise UserError(f"{what} of ids below {vocabulary}, or -1; it has others")
    return targets
