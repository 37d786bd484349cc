"""Reads what a client asks of a sampler: the JSON of `asample`.

N tokens of a prompt   K targets of a place

Not covered: images, which are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxrl.errors import UserError
from jaxrl.rollout.sampling import SamplingOptions, truncation_of
from jaxrl.rollout.settings import EngineConfig
from jaxrl.serving.openai.calls import LOWEST_TEMPERATURE

_MAX_SAMPLES = 1024
_MAX_TOP_K = 100


@dataclasses.dataclass(frozen=True)
class SampleCall:
    """A request to sample, checked.

    Attributes:
      prompt: int32 [N].
      num_samples, max_tokens: number of samples, and of tokens of each.
      seed: what its noise depends on, besides the index of the sample.
      options: how tokens are drawn, of one sample.
      stop_ids: token ids that end a sample.
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
    stop_ids: frozenset[int]
    prompt_logprobs: int = 0
    topk_prompt: int = 0
    topk_sample: int = 0
    targets: np.ndarray | None = None
    is_sparse: bool = False
    draws: int = 0


def read_call(
    body: Mapping[str, Any], sizes: EngineConfig, vocabulary: int, default_seed: bytes
) -> SampleCall:
    """A SampleCall from the JSON of `asample`, for a model with so many tokens.

    Raises:
      UserError: something does not fit, or is not served.
    """
    if body.get("record_stability_info"):
        raise UserError(
            "record_stability_info belongs to stable_reinforce, which is not served; train with "
            "loss_fn=importance_sampling"
        )
    params = _object(body, "sampling_params")
    prompt = _tokens(_object(body, "prompt"), vocabulary)
    room = min(sizes.max_response_tokens, sizes.max_context_tokens - len(prompt))
    if len(prompt) > sizes.max_prompt_tokens or room < 1:
        raise UserError(
            f"the prompt has {len(prompt)} tokens; this server takes {sizes.max_prompt_tokens} at most, and "
            f"{sizes.max_context_tokens} together with a sample: shorten it"
        )
    max_tokens = _number(params, "max_tokens", room, 1)
    if max_tokens > room:
        raise UserError(
            f"max_tokens {max_tokens} after a prompt of {len(prompt)}: this server has room for {room}; ask "
            "for as many"
        )
    temperature = _number(params, "temperature", 1.0, 0, 100)
    truncation = truncation_of(
        # -1 is all in the SDK, 0 is all here.
        top_k=max(_number(params, "top_k", -1, -1, vocabulary), 0),
        top_p=_number(params, "top_p", 1.0, 1e-6, 1),
    )
    stop_ids, stop_strings = _stops(params.get("stop"), sizes.stop_ids)
    options = SamplingOptions(
        # A division by less would overflow float32.
        temperature=0.0 if temperature < LOWEST_TEMPERATURE else temperature,
        truncation=truncation,
        stop_strings=stop_strings,
    )
    seed = params.get("seed")
    N, most = len(prompt), min(_MAX_TOP_K, vocabulary)
    wanted = 0
    if body.get("prompt_logprobs"):
        wanted = _number(body, "prompt_logprobs_last_n", N, 1, max(1, N - 1))
    elif body.get("prompt_logprobs_last_n") is not None:
        raise UserError("prompt_logprobs_last_n needs prompt_logprobs; set it to true")
    targets = body.get("target_prompt_logprobs")
    return SampleCall(
        prompt,
        _number(body, "num_samples", 1, 1, _MAX_SAMPLES),
        max_tokens,
        # Without a seed a repeated call gets its samples again. The prefix keeps a given seed from equaling a
        # default.
        default_seed if seed is None else b"seed %d" % _number(params, "seed", 0),
        options,
        stop_ids,
        prompt_logprobs=wanted,
        topk_prompt=_number(body, "topk_prompt_logprobs", 0, 0, most),
        topk_sample=_number(body, "topk_sample_logprobs", 0, 0, most),
        targets=None if targets is None else _targets(targets, N, vocabulary),
        is_sparse=isinstance(targets, dict) and targets.get("sparse_crow_indices") is not None,
        draws=_number(body, "prompt_alt_tokens_k", 0, 0, _MAX_TOP_K),
    )


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if not isinstance(value, dict):
        raise UserError(f"{name} is {type(value).__name__}; send a JSON object")
    return value


Number = TypeVar("Number", int, float)


def _number(
    body: Mapping[str, Any], name: str, default: Number, low: float = -(2**63), high: float = 2**63
) -> Number:
    """A field of the default's type, or the default."""
    value, kind = body.get(name), type(default)
    if value is None:
        return default
    # Not `isinstance`: True is an int.
    if type(value) not in (int, kind) or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        raise UserError(f"{name} is {value!r}; send {what} from {low} to {high}")
    return kind(value)


def _tokens(prompt: Mapping[str, Any], vocabulary: int) -> np.ndarray:
    chunks = prompt.get("chunks")
    if not isinstance(chunks, list):
        raise UserError("the prompt has no chunks; send {chunks: [{type: encoded_text, tokens}]}")
    tokens: list[Any] = []
    for chunk in chunks:
        kind = chunk.get("type") if isinstance(chunk, dict) else None
        if kind != "encoded_text" or not isinstance(chunk.get("tokens"), list):
            raise UserError(
                f"a chunk of the prompt is of type {kind!r}; this model reads encoded_text"
            )
        tokens += chunk["tokens"]
    if not tokens:
        raise UserError("the prompt is empty; write one")
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise UserError(
            f"the prompt has tokens that are no ids of this model, which go from 0 to "
            f"{vocabulary - 1}; use its own tokenizer"
        )
    return np.array(tokens, np.int32)


def _stops(stop: Any, default: Sequence[int]) -> tuple[frozenset[int], tuple[str, ...]]:
    """Stop ids and strings; None for the model's own, an empty list for none at all."""
    if stop is None:
        return frozenset(default), ()
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list) and len(stops) <= 64:
        ids = [each for each in stops if type(each) is int]
        if len(ids) == len(stops):
            return frozenset(ids), ()
        if all(isinstance(each, str) and 0 < len(each) <= 1000 for each in stops):
            return frozenset(), tuple(stops)
    raise UserError("stop takes a text, up to 64 texts, or up to 64 token ids; none may be empty")


def _targets(tensor: Any, length: int, vocabulary: int) -> np.ndarray:
    """Int64 [N - 1, K] from a tensor in JSON; -1 where nothing is asked."""
    what = f"target_prompt_logprobs must be an int64 tensor [{length - 1}, K]"
    try:
        shape, data = tuple(tensor["shape"]), np.array(tensor["data"], np.int64).reshape(-1)
        if len(shape) != 2 or shape[0] != length - 1 or not 1 <= shape[1] <= 1000:
            raise UserError(
                f"{what}, K up to 1,000; it has shape {list(shape)}: send one row per token"
            )
        if tensor.get("sparse_crow_indices") is None:
            targets = data.reshape(shape)
        else:
            counts = np.diff(np.array(tensor["sparse_crow_indices"], np.int64))
            targets = np.full(shape, -1, np.int64)
            rows = np.repeat(np.arange(len(counts)), counts)
            targets[rows, np.array(tensor["sparse_col_indices"], np.int64)] = data
    except (TypeError, KeyError, ValueError, IndexError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{what} ({error}); send it as tinker 0.38 does") from error
    if targets.size and (targets.min() < -1 or targets.max() >= vocabulary):
        raise UserError(f"{what} of ids below {vocabulary}, or -1; it has others")
    return targets
