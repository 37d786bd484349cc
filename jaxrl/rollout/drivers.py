"""Rollout backends by name, for `rollout.driver` of a config.

Another backend needs a file of its own and a row here. It needs no row if the config names it as
"package.module:function", a function with the arguments of `Build`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from jax.sharding import Mesh

from jaxrl.errors import UserError
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.backend import DecodeText, RolloutBackend
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig
from jaxrl.user_code import load_function

Build: TypeAlias = Callable[[ModelConfig, Mesh, EngineConfig, DecodeText], RolloutBackend]


@dataclasses.dataclass(frozen=True)
class Driver:
    """How to build a backend, and what it does not support.

    Attributes:
      build: returns a backend.
      cannot: settings that it refuses.
      package: the package that must be installed for it; "" for none.
    """

    build: Build
    cannot: frozenset[str] = frozenset()
    package: str = ""


PARTIAL, ENVIRONMENT = "rollout.partial", "rollout.environment"
SEVERAL_PROCESSES = "hosts.num_processes above 1"


def _offline(
    model: ModelConfig, mesh: Mesh, config: EngineConfig, decode_text: DecodeText
) -> RolloutBackend:
    return OfflineBackend(Engine(model, decoder_graph(model)[0], mesh, config), decode_text)


def _jetstream(
    model: ModelConfig, mesh: Mesh, config: EngineConfig, decode_text: DecodeText
) -> RolloutBackend:
    from jaxrl.rollout.jetstream.jetstream_backend import JetStreamBackend

    return JetStreamBackend(Engine(model, decoder_graph(model)[0], mesh, config), decode_text)


DRIVERS = {
    "offline": Driver(_offline),
    "jetstream": Driver(
        _jetstream, frozenset({PARTIAL, ENVIRONMENT, SEVERAL_PROCESSES}), package="jetstream"
    ),
}


def lookup_driver(name: str) -> Driver:
    """The driver of a name of `DRIVERS`, or of a function "package.module:function".

    Raises:
      UserError: there is no such driver.
    """
    if ":" in name:
        return Driver(
            load_function(name, "rollout.driver", takes=("model", "mesh", "config", "decode_text"))
        )
    if name not in DRIVERS:
        raise UserError(
            f"rollout.driver {name!r} is not one of {', '.join(DRIVERS)}; name one of these, or a function "
            "that builds a backend as package.module:function"
        )
    return DRIVERS[name]


def check_driver(name: str, wanted: frozenset[str]) -> None:
    """Raises UserError if a driver is unknown or does not support a setting of the run.

    Args:
      name: the driver's name.
      wanted: those of `PARTIAL`, `ENVIRONMENT` and `SEVERAL_PROCESSES` that the run uses.
    """
    for setting in sorted(wanted & lookup_driver(name).cannot):
        raise UserError(
            f"rollout.driver {name!r} cannot do {setting}; use rollout.driver='offline', which can"
        )


def build_backend(
    driver: str, model: ModelConfig, mesh: Mesh, config: EngineConfig, decode_text: DecodeText
) -> RolloutBackend:
    """Builds the backend that a driver's name stands for; it has no weights yet.

    Args:
      driver: a name of `DRIVERS`, or "package.module:function".
      model, mesh: the model, and the devices laid out for generation.
      config: sizes and types of the engine.
      decode_text: token ids to text.

    Raises:
      UserError: there is no such driver, or its extra is not installed.
    """
    return lookup_driver(driver).build(model, mesh, config, decode_text)
