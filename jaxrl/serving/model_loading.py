"""Loads a model directory into an engine, with sequence limits that fit the memory of its devices."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.hub.local_paths import local_model
from jaxrl.mesh.devices import build_generation_mesh, dtype_on, memory_bytes
from jaxrl.mesh.rules import GENERATE_RULES, check_divides
from jaxrl.models.decoder import Params, decoder_graph
from jaxrl.models.huggingface.weight_loading import load_params
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig
from jaxrl.serving import model_directory
from jaxrl.serving.serve_config import ServeConfig

# Fraction of a device's memory for weights and caches; the rest is for temporaries of programs.
_MEMORY_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model that is ready to sample."""

    engine: Engine
    params: Params
    tokenizer: Tokenizer


def load(config: ServeConfig, *, devices: Sequence[Any] | None = None) -> Loaded:
    """Loads a model onto its devices.

    Args:
      config: settings of the server.
      devices: devices to choose from; None means all.

    Raises:
      UserError: a file is missing or broken, or the model does not fit.
    """
    directory = pathlib.Path(local_model(config.model))
    model_directory.check_is_directory(directory)
    if model_directory.is_run_folder(directory):
        raise UserError(
            f"{directory} is the folder of a run; export it first: python launch/convert.py "
            f"--path {directory} --out DIR, and serve DIR"
        )
    found = model_directory.read_model(directory)
    model, tokenizer = found.model, found.tokenizer
    mesh = build_generation_mesh(config.mesh, devices)
    config = dataclasses.replace(config, dtype=dtype_on(mesh, config.dtype))
    check_divides("--slots", config.slots, "batch", GENERATE_RULES, mesh)
    check_divides("--prefill_prompts", config.prefill_prompts, "batch", GENERATE_RULES, mesh)
    graph, shapes, _ = decoder_graph(model)
    where = model_directory.generation_shardings(model, mesh)

    def engine_of(lengths: TokenLimits) -> Engine:
        chunk = min(config.prefill_chunk_tokens, lengths.context)
        sizes = EngineConfig(
            **config.engine_settings(prefill_chunk_tokens=chunk),
            max_prompt_tokens=lengths.prompt,
            max_response_tokens=lengths.response,
            context_tokens=lengths.context,
            stop_ids=tokenizer.stop_ids,
            # Servers often have few requests, and somebody waits for the last one; so small buckets pay off.
            smallest_bucket=8,
        )
        return Engine(model, graph, mesh, sizes)

    limits = lengths_of(
        config,
        found.context_tokens,
        lambda: _fitting_tokens(config, engine_of(TokenLimits(1, 1, 2)), shapes, where),
    )
    engine = engine_of(limits)
    params = load_params(directory, model, where, dtype=config.dtype)
    return Loaded(engine, params, tokenizer)


class TokenLimits(NamedTuple):
    """Maximum numbers of tokens of a prompt, of a response, and of both together."""

    prompt: int
    response: int
    context: int


def lengths_of(config: ServeConfig, context: int, fitting: Callable[[], int]) -> TokenLimits:
    """Determines the sequence limits of a server.

    Args:
      config: settings of the server. Its limits are used as given; without them a prompt and its response
        share the context.
      context: number of tokens that the model has positions for.
      fitting: function that returns how many tokens per slot fit into memory if all slots are full. It is
        called only if no limit is given.

    Raises:
      UserError: the limits exceed the model's context.
    """
    prompt, response = config.max_prompt_tokens, config.max_response_tokens
    if not prompt and not response:
        context = min(context, max(fitting(), model_directory.SHORTEST_CONTEXT))
        return TokenLimits(max(context - 1, 1), max(context - 1, 1), context)
    prompt = prompt or context - response
    response = response or context - prompt
    if min(prompt, response) < 1 or prompt + response > context:
        raise UserError(
            f"--max_prompt_tokens {config.max_prompt_tokens} and --max_response_tokens "
            f"{config.max_response_tokens} do not fit into the {context} positions of the model "
            "(max_position_embeddings of its config.json); lower them, or leave them out"
        )
    return TokenLimits(prompt, response, prompt + response)


def _fitting_tokens(config: ServeConfig, engine: Engine, shapes: Any, where: Any) -> int:
    """Number of tokens per slot that fit beside the weights; not positive if the weights do not fit.

    Args:
      config: settings of the server.
      engine: engine of the model, with any sequence limits.
      shapes, where: shapes and shardings of the weights.
    """
    weights = sum(
        math.prod(place.shard_shape(leaf.shape)) * jnp.dtype(config.dtype).itemsize
        for leaf, place in zip(jax.tree.leaves(shapes), jax.tree.leaves(where), strict=True)
    )
    state = engine.abstract_decode_state()
    cache = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state.context.cache)
    )
    free = int(_MEMORY_SHARE * memory_bytes(engine.mesh.devices.flat[0])) - weights
    # A cache, and its predecessor while it grows.
    return free * state.capacity // (2 * cache)
