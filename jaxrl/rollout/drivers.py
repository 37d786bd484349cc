"""Rollout backends by name: what `rollout.driver` of a config may say.

A further one needs a file of its own and a row here; or no row, if the config names it as
"package.module:function", a function of the arguments of `Build`.
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
    """A way to build a backend, and what it cannot do.

    Attributes:
      build: makes one.
      cannot: settings that it has to refuse.
      package: that has to be installed for it, "" for none.
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
    """The driver of a name, or the function that "package.module:function" names.

    Raises:
      UserError: there is none.
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
    """Raises UserError for a driver that is not known, or cannot do what is wanted of it.

    Args:
      name: of the driver.
      wanted: which of `PARTIAL`, `ENVIRONMENT` and `SEVERAL_PROCESSES` a run asks for.
    """
    for setting in sorted(wanted & lookup_driver(name).cannot):
        raise UserError(
            f"rollout.driver {name!r} cannot do {setting}; use rollout.driver='offline', which can"
        )


def build_backend(
    driver: str, model: ModelConfig, mesh: Mesh, config: EngineConfig, decode_text: DecodeText
) -> RolloutBackend:
    """The backend of a driver's name; it has no weights yet.

    Args:
      driver: a name of `DRIVERS`, or "package.module:function".
      model, mesh: what samples, where.
      config: how.
      decode_text: token ids to text.

    Raises:
      UserError: there is no such driver, or its extra is not installed.
    """
    return lookup_driver(driver).build(model, mesh, config, decode_text)
