"""A certificate of `jaxrl certify`: what it is about, and what it requires. A run reads it at its start.

{"subject": {"model.d_model": "5120", ..}, "rows": [{"type": "float32", "differ": 0, ..}, ..], ..}
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from jaxrl.config.schema import Config
from jaxrl.config.shapes import model_of
from jaxrl.errors import UserError
from jaxrl.files import read_json_object
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.trainer.identity import made_with
from jaxrl.trainer.resolved import resolve

# What a step samples and learns with, besides the model.
_TYPES = ("dtype", "weights_dtype", "kv_dtype", "cache", "deterministic")
_MESH = ("train", "generate", "fsdp", "expert", "context", "sharding")


def layouts_of(config: Config) -> list[LayoutConfig]:
    """The layout of the actor, and that of sampling if it has a pool of its own.

    Raises:
      UserError: the recipe leaves its layout open.
    """
    if config.mesh.searched:
        raise UserError(
            f"mesh.layout {config.mesh.layout!r} is open, and a certificate is of layouts; write those of "
            "jaxrl plan --search into the recipe"
        )
    homes = {role: pool for pool in resolve(config).pools for role in pool.roles}
    return [homes[role].config_of(role) for role in ("actor", "rollout") if role in homes]


def subject_of(config: Config) -> dict[str, str]:
    """What a certificate is about, as texts by the names of settings."""
    model, _ = model_of(config)
    found: dict[str, Any] = {f"model.{name}": value for name, value in vars(model).items()}
    # The tokenizer decides it.
    del found["model.num_tokens"]
    found |= {f"rollout.{name}": getattr(config.rollout, name) for name in _TYPES}
    found["train.dtype"] = config.train.dtype
    for role, layout in zip(("mesh", "mesh of sampling"), layouts_of(config), strict=False):
        found |= {f"{role}.{name}": getattr(layout, name) for name in _MESH}
    code = made_with()
    found |= {"the code of jaxrl": code["jaxrl"], "jax": code["jax"]}
    return {name: repr(value) for name, value in found.items()}


def faults(certificate: Mapping[str, Any]) -> list[str]:
    """What a certificate requires and did not hold, a line each: tokens in float32 and with `deterministic`
    are equal in all layouts, and log-probabilities on average within a bound."""
    found = []
    for row in certificate["rows"]:
        if "error" in row:
            continue
        name = row["type"] + (", deterministic" if row["deterministic"] else "")
        alike = row["deterministic"] or row["type"] == "float32"
        if alike and row["differ"]:
            found.append(
                f"{name}: {row['differ']} of {row['samples']} samples differ by the layout"
            )
        if not row["mean"] <= row["bound"]:
            found.append(
                f"{name}: log-probabilities of sampler and trainer are {row['mean']:.3g} apart, more than "
                f"{row['bound']:g}"
            )
    return found


def check(config: Config) -> None:
    """Checks that `run.certificate` is about this run, and that what it requires held.

    Raises:
      UserError: it is not, or did not; names the first difference.
    """
    path = pathlib.Path(config.run.certificate)
    remedy = (
        f"make it again: jaxrl certify --config RECIPE --out {path}, or leave run.certificate out"
    )
    certificate = read_json_object(path, absent="make it by jaxrl certify --config RECIPE")
    try:
        subject, wrong = dict(certificate["subject"]), faults(certificate)
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"run.certificate {path} is no certificate ({error!r}); {remedy}"
        ) from error
    for name, value in subject_of(config).items():
        if subject.get(name) != value:
            raise UserError(
                f"run.certificate {path} is of {name} {subject.get(name, 'none')}, and this run has {value}; "
                f"{remedy}"
            )
    if wrong:
        raise UserError(f"run.certificate {path} did not hold: {'; '.join(wrong)}; {remedy}")
