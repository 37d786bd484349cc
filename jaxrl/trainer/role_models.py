"""The model of every role of a run, before any role is built.

actor, reference        config.weights, or config.model
others                  weights of their own (`role_table.ROLES`), else the actor's trunk
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.config.model_shape import is_here, model_of
from jaxrl.config.schema import Config
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.model_config import ModelConfig
from jaxrl.trainer.role_table import ROLES


class _NoTokenizer:
    """The tokenizer of a plan, which builds shapes only. No shape depends on the tokens."""

    stop_ids = (0,)

    def decode_batch(self, sequences: Sequence[np.ndarray]) -> list[str]:
        """Never called, because a plan decodes nothing."""
        raise AssertionError(
            f"{len(sequences)} texts of a role that was built for its shapes alone"
        )


SHAPES_ONLY: Any = _NoTokenizer()


@dataclasses.dataclass(frozen=True)
class RoleModels:
    """The models and tokenizers of the roles.

    Attributes:
      by_role: model of each role; "rollout" has no entry, because it samples with the actor's.
      origin: description of the source of the actor's shape.
      assumed: (role, reason) of each role whose shape is unknown and assumed to be the actor's.
      tokenizer: the policy's tokenizer; `SHAPES_ONLY` in a plan.
      own_tokenizers: tokenizer of each role that has its own; empty in a plan.
    """

    by_role: Mapping[str, ModelConfig]
    origin: str
    assumed: tuple[tuple[str, str], ...] = ()
    tokenizer: Tokenizer = SHAPES_ONLY
    own_tokenizers: Mapping[str, Tokenizer] = dataclasses.field(default_factory=dict)

    @property
    def actor(self) -> ModelConfig:
        """The policy's model."""
        return self.by_role["actor"]

    def tokenizer_of(self, role: str) -> Tokenizer:
        """The tokenizer of a role: its own, else the policy's."""
        return self.own_tokenizers.get(role, self.tokenizer)

    def with_tokenizers(self, policy: Tokenizer, own: Mapping[str, Tokenizer]) -> RoleModels:
        """The same models, each limited to the tokens of its tokenizer.

        Args:
          policy: the policy's tokenizer.
          own: tokenizer of each role that has its own.
        """
        found = dataclasses.replace(self, tokenizer=policy, own_tokenizers=own)
        # `check_vocabulary` refuses a model that is too small for the policy's tokens.
        sized = {
            role: dataclasses.replace(
                model, num_tokens=min(model.vocab_size, found.tokenizer_of(role).vocab_size)
            )
            for role, model in self.by_role.items()
        }
        return dataclasses.replace(found, by_role=sized)


def role_models(config: Config, roles: Sequence[str]) -> RoleModels:
    """The models of roles. If the checkpoint of a role is not here, its shape is assumed to be the actor's.

    Raises:
      UserError: the settings contradict a checkpoint, or the policy has neither a checkpoint nor a shape.
    """
    actor, origin = model_of(config)
    found, assumed = {}, []
    for role in roles:
        if role == "rollout":
            continue
        if role == "actor" or role not in ROLES:
            found[role] = actor
            continue
        directory, stored = ROLES[role].weights(config), None
        if directory and is_here(directory):
            stored = read_config(directory)
        elif directory:
            why = (
                f"counted as large as the actor: {directory} is not here, so its shape is not known"
            )
            assumed.append((role, why))
        found[role] = ROLES[role].shape(actor, stored)
    return RoleModels(found, origin, tuple(assumed))
