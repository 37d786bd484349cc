"""Loads a model directory into an engine with sequence limits that fit its devices."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.data.model_directory import (
    SHORTEST_CONTEXT,
    ModelDirectory,
    check_is_directory,
    generation_shardings,
    is_run_folder,
    read_model,
)
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.hub.local_paths import local_model
from jaxrl.mesh.devices import build_generation_mesh, dtype_on, memory_bytes
from jaxrl.mesh.rules import GENERATE_RULES, check_divides, with_shardings
from jaxrl.models.decoder import Params, decoder_graph
from jaxrl.models.huggingface.weight_loading import load_params
from jaxrl.rollout.cache_choice import warn_of_pages_on_cpu
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig
from jaxrl_serving.serve_config import ServeConfig

# Fraction of a device's memory for weights and caches; the rest is for temporaries of programs.
_MEMORY_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model that is ready to sample."""

    engine: Engine
    params: Params
    tokenizer: Tokenizer


def load(config: ServeConfig) -> Loaded:
    """Loads a model onto its devices.

    Raises:
      UserError: a file is missing or broken, or the model does not fit.
    """
    directory = model_directory(config.model)
    found = read_model(directory, chat_template=config.chat_template)
    mesh = build_generation_mesh(config.mesh)
    config = dataclasses.replace(config, dtype=dtype_on(mesh, config.dtype))
    warn_of_pages_on_cpu(config.cache, mesh)
    engine = build_engine(config, found, mesh, stop_ids=found.tokenizer.stop_ids)
    where = generation_shardings(found.model, mesh)
    params = load_params(directory, found.model, where, dtype=config.dtype)
    return Loaded(engine, params, found.tokenizer)


def model_directory(name: str) -> pathlib.Path:
    """The directory of a model to serve, from a path or a hub name.

    Raises:
      UserError: it is none.
    """
    directory = pathlib.Path(local_model(name))
    check_is_directory(directory)
    if is_run_folder(directory):
        raise UserError(
            f"{directory} is the folder of a run; export it first: jaxrl convert "
            f"--path {directory} --out DIR, and serve DIR"
        )
    return directory


def build_engine(
    config: ServeConfig,
    found: ModelDirectory,
    mesh: Mesh,
    *,
    stop_ids: Sequence[int],
    other_bytes: int = 0,
    adapter_places: int = 0,
) -> Engine:
    """Builds the engine of a model, with sequence limits that fit.

    Args:
      config: settings of the server, with a resolved dtype.
      found: the model.
      mesh: its devices.
      stop_ids: token ids that end a response.
      other_bytes: memory of each device that something else takes.
      adapter_places: as in `EngineConfig`.

    Raises:
      UserError: the settings do not fit the mesh or the model.
    """
    check_divides("--slots", config.slots, "batch", GENERATE_RULES, mesh)
    check_divides("--prefill_prompts", config.prefill_prompts, "batch", GENERATE_RULES, mesh)

    def engine_of(lengths: TokenLimits) -> Engine:
        chunk = min(config.prefill_chunk_tokens, lengths.context)
        sizes = EngineConfig(
            **config.engine_settings(prefill_chunk_tokens=chunk),
            max_prompt_tokens=lengths.prompt,
            max_response_tokens=lengths.response,
            context_tokens=lengths.context,
            stop_ids=tuple(stop_ids),
            # Servers often have few requests, and somebody waits for the last one; so small buckets pay off.
            smallest_bucket=8,
            adapter_places=adapter_places,
        )
        # Some models rotate by other factors in long contexts.
        model = found.model.for_texts_of(lengths.context)
        return Engine(model, decoder_graph(model)[0], mesh, sizes)

    def fitting_tokens() -> int:
        """Tokens per slot that fit beside the weights; not positive if the weights do not fit."""
        _, shapes, _ = decoder_graph(found.model)
        weights = with_shardings(shapes, generation_shardings(found.model, mesh))
        # Bytes for each token are the same at any length, so the shortest engine tells them.
        state = engine_of(TokenLimits(1, 1, 2)).abstract_decode_state()
        free = int(_MEMORY_SHARE * memory_bytes(mesh.devices.flat[0])) - other_bytes
        free -= device_bytes(weights, config.dtype)
        # A cache, and its predecessor while it grows.
        return free * state.capacity // (2 * device_bytes(state.context.cache))

    return engine_of(lengths_of(config, found.context_tokens, fitting_tokens))


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
        context = min(context, max(fitting(), SHORTEST_CONTEXT))
        return TokenLimits(max(context - 1, 1), max(context - 1, 1), context)
    prompt = prompt or context - response
    response = response or context - prompt
    if min(prompt, response) < 1 or prompt + response > context:
        limits = {
            name: getattr(config, name) for name in ("max_prompt_tokens", "max_response_tokens")
        }
        given = " and ".join(f"--{name} {limit}" for name, limit in limits.items() if limit)
        raise UserError(
            f"{given}: the model has {context} positions for a prompt and its response "
            "(max_position_embeddings of its config.json); lower them, or leave them out"
        )
    return TokenLimits(prompt, response, prompt + response)


def device_bytes(tree: Any, dtype: Any = None) -> int:
    """Memory of each device for a tree of shapes with shardings, in the type of the shapes or another one."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(dtype or x.dtype).itemsize
        for x in jax.tree.leaves(tree)
    )
