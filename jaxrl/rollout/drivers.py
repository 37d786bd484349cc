"""The rollout backends by name, for the setting `rollout.driver`.

To add a backend, write a file for it and add a row here. No row is needed if the setting names a function as
"package.module:function"; the function takes the arguments of `Build`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from jax.sharding import Mesh

from jaxrl import extensions
from jaxrl.errors import UserError
from jaxrl.mesh.replica_groups import replica_groups
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.backend import DecodeTexts, RolloutBackend
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.rollout.settings import EngineConfig
from jaxrl.user_code import load_function

Build: TypeAlias = Callable[[ModelConfig, Mesh, EngineConfig, DecodeTexts], RolloutBackend]


@dataclasses.dataclass(frozen=True)
class Driver:
    """How to build a backend, and the features it does not support.

    Attributes:
      build: function that returns the backend.
      cannot: names of the unsupported features.
      package: package that must be installed; "" for none.
    """

    build: Build
    cannot: frozenset[str] = frozenset()
    package: str = ""


PARTIAL = "rollout.max_staleness"
PAGED = "rollout.cache='paged'"
SPECULATE = "rollout.speculate"
REPLAY = "train.replay_routes"
SEVERAL_PROCESSES = "hosts.num_processes above 1"


def _offline(
    model: ModelConfig, mesh: Mesh, config: EngineConfig, decode_texts: DecodeTexts
) -> RolloutBackend:
    graph = decoder_graph(model)[0]
    groups = replica_groups(mesh) if config.replicas_apart else None
    return OfflineBackend(Engine(model, graph, mesh, config), decode_texts, groups)


def _named(path: str) -> Build:
    """The function at `path`, "package.module:function", which builds a backend."""
    return load_function(path, "rollout.driver", takes=("model", "mesh", "config", "decode_texts"))


DRIVERS = {
    "offline": Driver(_offline),
    # By its path, because it stands on this package: nothing here imports it.
    "jetstream": Driver(
        lambda *given: _named("jaxrl.jetstream.jetstream_backend:build")(*given),
        frozenset({PARTIAL, PAGED, SPECULATE, REPLAY, SEVERAL_PROCESSES}),
        package="jetstream",
    ),
}


def lookup_driver(name: str) -> Driver:
    """Returns the driver for a name of `DRIVERS`, or for a function "package.module:function".

    Raises:
      UserError: the driver does not exist.
    """
    if ":" in name:
        return Driver(_named(name))
    if name not in DRIVERS:
        raise UserError(
            f"rollout.driver {name!r} is not one of {', '.join(DRIVERS)}; name one of these, or a function "
            "that builds a backend as package.module:function"
        )
    return DRIVERS[name]


def check_driver(name: str, wanted: frozenset[str]) -> None:
    """Raises UserError if a driver is unknown or lacks a feature that the run needs.

    Args:
      name: name of the driver.
      wanted: the features that the run uses, of `PARTIAL`, `PAGED`, `SPECULATE`, `REPLAY` and
        `SEVERAL_PROCESSES`.
    """
    # Sorted: a set of texts has another order in each process.
    for setting in sorted(wanted & lookup_driver(name).cannot):
        raise UserError(
            f"rollout.driver {name!r} cannot do {setting}; use rollout.driver='offline', which can"
        )


def build_backend(
    driver: str, model: ModelConfig, mesh: Mesh, config: EngineConfig, decode_texts: DecodeTexts
) -> RolloutBackend:
    """Builds the backend of a driver; it has no weights yet.

    Args:
      driver: name of `DRIVERS`, or "package.module:function".
      model, mesh: the model, and the devices laid out for generation.
      config: sizes and data types of the engine.
      decode_texts: function that turns sequences of token ids into texts, on any thread.

    Raises:
      UserError: the driver does not exist, or its extra is not installed.
    """
    return lookup_driver(driver).build(model, mesh, config, decode_texts)


def with_agent(backend: RolloutBackend, settings: RolloutConfig, tokenizer: Any) -> RolloutBackend:
    """The backend that runs `rollout.agent` with answers of `backend`; `backend` itself without an agent.

    Raises:
      UserError: the tokenizer has no chat template, or the extension for agents is not installed.
    """
    if not settings.agent:
        return backend
    return extensions.lookup("rollout.agent")(backend, settings, tokenizer)
