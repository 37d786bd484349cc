"""Refuses settings whose product needs more memory than the devices or the host can have.

    train.rows 1000 x train.row_tokens 1,000,000 x 128 values x 4 layers x 4 bytes = 2 TB

Each estimate counts one group of arrays that must exist at the same time, spread over all devices. It is a
lower bound, so a run that would fit is never refused. `jaxrl plan` predicts whether everything fits together.
Answers to evaluation problems are checked when the problems have been read (`evaluation.evaluation_metrics`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.config.model_shape import is_here, with_stored_shape
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.devices import host_memory_bytes, memory_bytes
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout import samples

ANY_DEVICE_BYTES = 2**40
"""Memory of a device if none is known: more than any device has."""

ANY_HOST_BYTES = 2**44
"""Memory of a host if none is known: more than any host has."""

# Per token of a training example: the token, its mask and its position in the row.
_TOKEN_BYTES = 20
_FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class Need:
    """Memory that one group of arrays needs.

    Attributes:
      settings: factors of the product, with their values.
      what: description of the arrays.
      nbytes: bytes of all arrays, on all devices or on one host.
      remedy: setting to change.
      on_host: whether the arrays are in host memory instead of device memory.
    """

    settings: str
    what: str
    nbytes: float
    remedy: str
    on_host: bool = False


def check_memory(
    config: Config,
    model: ModelConfig,
    *,
    num_devices: int,
    device_bytes: int = ANY_DEVICE_BYTES,
    host_bytes: int = ANY_HOST_BYTES,
) -> None:
    """Raises UserError if one group of arrays alone exceeds the memory of all devices, or of a host.

    Args:
      config: config of the run.
      model: model of the policy; its shape may come from the files of its weights.
      num_devices: number of devices of the run.
      device_bytes, host_bytes: memory of one device, and of one host.
    """
    for need in _needs(config, model):
        there = host_bytes if need.on_host else device_bytes * num_devices
        if need.nbytes > there:
            where = (
                "a host" if need.on_host else f"{num_devices} x {_size(device_bytes)} of devices"
            )
            limit = f"{where} with {_size(there)}" if need.on_host else where
            raise UserError(
                f"{need.settings}: {need.what} take {_size(need.nbytes)}, more than {limit}; {need.remedy}"
            )


def check_memory_here(config: Config, devices: Sequence[Any]) -> None:
    """Runs `check_memory` with the memory of these devices and of this machine.

    It checks nothing if the model's files are not here, because the run is refused for that.

    Args:
      config: config of the run.
      devices: devices of the run, of all processes.
    """
    if config.weights and not is_here(config.weights):
        return
    check_memory(
        config,
        with_stored_shape(config).model,
        num_devices=len(devices),
        device_bytes=memory_bytes(jax.local_devices()[0]),
        host_bytes=host_memory_bytes(),
    )


def _needs(config: Config, model: ModelConfig) -> Iterator[Need]:
    yield from _of_weights(config, model)
    yield from _of_learning(config, model)
    yield from _of_sampling(config, model)
    yield from _of_hosts(config)


def _of_weights(config: Config, model: ModelConfig) -> Iterator[Need]:
    nbytes = model.num_params * _FLOAT32
    if model.lora.rank:
        nbytes = model.num_params * _bytes_of(config.train.dtype)
    yield Need(
        f"the model has {model.num_params:,} parameters (model.num_layers {model.num_layers:,}, d_model "
        f"{model.d_model:,}, d_ff {model.d_ff:,}, num_heads {model.num_heads:,}, head_dim "
        f"{model.head_dim:,}, vocab_size {model.vocab_size:,})",
        "its weights",
        nbytes,
        "make the model smaller, or use more devices",
    )


def _of_learning(config: Config, model: ModelConfig) -> Iterator[Need]:
    rows, tokens = config.train.rows, config.row_tokens
    # The backward pass keeps the input of every layer, whatever train.remat is.
    per_token = model.num_layers * model.d_model * _bytes_of(config.train.dtype)
    yield Need(
        f"train.rows {rows:,} x train.row_tokens {tokens:,}",
        f"the inputs of {model.num_layers} layers for {rows * tokens:,} tokens of one microbatch",
        rows * tokens * per_token,
        "lower train.rows or train.row_tokens",
    )
    if config.train.logprob_chunk_tokens == "auto":
        return
    chunk = min(config.train.logprob_chunk_tokens, rows * tokens)
    yield Need(
        f"train.logprob_chunk_tokens {chunk:,}",
        f"logits of {model.vocab_size:,} tokens",
        chunk * model.vocab_size * _FLOAT32,
        "lower train.logprob_chunk_tokens, or set it to auto",
    )


def _of_sampling(config: Config, model: ModelConfig) -> Iterator[Need]:
    rollout = config.rollout
    token_bytes = model.kv_bytes_per_token(_bytes_of(rollout.kv_dtype or rollout.dtype))
    samples = max(rollout.num_prompts, rollout.generation_prompts) * rollout.num_samples
    if rollout.cache_tokens:
        yield Need(
            f"rollout.cache_tokens {rollout.cache_tokens:,}",
            f"the keys and values of as many tokens (model.head_dim {model.head_dim:,})",
            rollout.cache_tokens * token_bytes,
            "lower rollout.cache_tokens",
        )
    elif rollout.slots != "auto":
        slots = min(rollout.slots, samples)
        yield Need(
            f"rollout.slots {rollout.slots:,} x {config.longest_sequence:,} tokens (data.max_prompt_tokens + "
            "rollout.max_response_tokens)",
            f"keys and values of {slots:,} samples (model.head_dim {model.head_dim:,})",
            slots * config.longest_sequence * token_bytes,
            "lower rollout.slots or the lengths",
        )
    chunk = min(
        rollout.prefill_chunk_tokens or config.longest_sequence, config.data.max_prompt_tokens
    )
    prompts = min(rollout.prefill_prompts, samples)
    yield Need(
        f"rollout.prefill_prompts {rollout.prefill_prompts:,} x {chunk:,} tokens",
        "the activations of one layer",
        prompts * chunk * max(model.d_model, model.d_ff) * _bytes_of(rollout.dtype),
        "lower rollout.prefill_prompts, or set rollout.prefill_chunk_tokens",
    )


def _of_hosts(config: Config) -> Iterator[Need]:
    rollout, length = config.rollout, config.rollout.max_response_tokens
    for name, prompts in (
        ("num_prompts", rollout.num_prompts),
        ("generation_prompts", rollout.generation_prompts),
    ):
        yield Need(
            f"rollout.{name} {prompts:,} x rollout.num_samples {rollout.num_samples:,} x "
            f"rollout.max_response_tokens {length:,}",
            f"{prompts * rollout.num_samples:,} samples of a step",
            samples.host_bytes(prompts * rollout.num_samples, length),
            f"lower rollout.{name} or rollout.num_samples",
            on_host=True,
        )
    tokens = config.row_tokens
    for name, examples in (
        ("sft.examples_per_step", config.sft.examples_per_step),
        # The answers of a pair share a row, so each has at most half of it.
        ("preference.pairs_per_step", config.preference.pairs_per_step),
        ("preference.evaluation_pairs", config.preference.evaluation_pairs),
    ):
        yield Need(
            f"{name} {examples:,} x train.row_tokens {tokens:,}",
            "the tokens of one batch",
            examples * tokens * _TOKEN_BYTES,
            f"lower {name} or train.row_tokens",
            on_host=True,
        )


def _bytes_of(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def _size(nbytes: float) -> str:
    unit, name = (1e12, "TB") if nbytes >= 1e12 else (1e9, "GB")
    return f"{nbytes / unit:,.1f} {name}"
