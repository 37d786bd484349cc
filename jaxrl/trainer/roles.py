"""The roles of a run without weights, each on its mesh: the one builder.

    config, meshes, models --> build_roles --> Roles --> weights.load_frozen, weights.start_from

A mesh may be abstract: a plan has the same roles as the run that it predicts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from jaxrl.config.schema import Config
from jaxrl.mesh.pools import read_placement
from jaxrl.mesh.sharding_strategies import state_rules
from jaxrl.roles.frozen import Frozen
from jaxrl.roles.generative_judge import GenerativeJudge
from jaxrl.roles.learner import Learner
from jaxrl.roles.optim_config import OptimConfig
from jaxrl.roles.policy import Actor, Reference
from jaxrl.roles.reward_model import RewardModel
from jaxrl.roles.value import Critic
from jaxrl.rollout.backend import RolloutBackend
from jaxrl.rollout.drivers import build_backend
from jaxrl.trainer.batch_shapes import engine_config, judge_engine_config
from jaxrl.trainer.role_models import RoleModels
from jaxrl.trainer.role_table import ROLES

Meshes = Mapping[str, Mesh]
"""The mesh of each role of a run, and of "rollout" where the actor samples elsewhere."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """The roles of a run.

    Attributes:
      actor: the policy.
      others: roles of `role_table.ROLES` that the run has, by name.
      judge: the generative judge; None without one.
    """

    actor: Actor
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    judge: GenerativeJudge | None = None

    @property
    def reference(self) -> Reference | None:
        """The policy that training started from; None for a run without one."""
        return self.others.get("reference")

    @property
    def compared(self) -> Reference | None:
        """The policy that the actor's loss may have the KL to; None for a run without one."""
        return next((role for name, role in self.others.items() if ROLES[name].compared), None)

    @property
    def reward(self) -> RewardModel | None:
        """The reward model; None for a run without one."""
        return self.others.get("reward")

    @property
    def critics(self) -> dict[str, Critic]:
        """Those that learn values."""
        return {name: role for name, role in self.others.items() if isinstance(role, Critic)}

    @property
    def learners(self) -> dict[str, Learner]:
        """Roles whose state changes: what a checkpoint holds."""
        return {"actor": self.actor, **self.critics}

    @property
    def frozen(self) -> dict[str, Frozen]:
        """Models whose weights stay as they are."""
        return {name: role for name, role in self.others.items() if isinstance(role, Frozen)}


class RoleBuilder:
    """Builds the roles of a config one by one."""

    def __init__(self, config: Config, meshes: Meshes, models: RoleModels):
        """Args: the config, and the mesh and the model of each role."""
        self._config = config
        self._meshes = meshes
        self._models = models
        pools = read_placement(config.placement, config.mesh, tuple(meshes))
        self._layouts = {role: pool.config_of(role) for pool in pools for role in pool.roles}

    def actor(
        self, *, optim: OptimConfig, samples: bool = True, compared: Reference | None = None
    ) -> Actor:
        """The actor with the optimiser of one training stage; without `samples` it only learns."""
        return Actor(
            self._models.actor,
            **self._common("actor"),
            optim=optim,
            temperature=self._config.rollout.temperature,
            seed=self._config.seed,
            backend=self._backend() if samples else None,
            compared=compared,
        )

    def other(self, role: str) -> Any:
        """A role of `role_table.ROLES`."""
        return ROLES[role].build(self._models.by_role[role], self._common(role), self._config)

    def reference_with(self, role: str) -> Reference:
        """A reference policy on the mesh of another role."""
        build = ROLES["reference"].build
        return build(self._models.actor, self._common(role), self._config)

    def judge(self) -> GenerativeJudge:
        """The generative judge, which samples with an engine of its own."""
        options, tokenizer = self._config.reward.judge, self._models.judge_tokenizer
        # Not `rollout.driver`, which is the policy's.
        backend = build_backend(
            "offline",
            self._models.by_role["judge"],
            self._meshes["judge"],
            judge_engine_config(self._config, tokenizer.stop_ids),
            tokenizer.decode,
        )
        return GenerativeJudge(
            backend, tokenizer, max_prompt_tokens=options.max_prompt_tokens, chat=options.chat
        )

    def _backend(self) -> RolloutBackend:
        """What the actor samples with: where it learns, or where the role "rollout" is."""
        tokenizer, options = self._models.tokenizer, self._config.rollout
        return build_backend(
            options.driver,
            self._models.actor,
            self._meshes.get("rollout", self._meshes["actor"]),
            engine_config(self._config, (*tokenizer.stop_ids, *options.stop_ids)),
            tokenizer.decode,
        )

    def _common(self, role: str) -> dict[str, Any]:
        """What every constructor takes of a role's place in the placement."""
        layout = self._layouts[role]
        return {
            "mesh": self._meshes[role],
            "train": self._config.train,
            "state_rules": state_rules(layout.sharding),
            "offload": layout.offload_training_state,
        }


def build_roles(config: Config, meshes: Meshes, models: RoleModels) -> Roles:
    """All roles that have a mesh; none has weights yet.

    Args:
      config: of the run.
      meshes: by role, on devices or abstract.
      models: of the roles, as of `role_models`.

    Raises:
      UserError: something does not divide over a mesh, or the rollout backend cannot be built.
    """
    build = RoleBuilder(config, meshes, models)
    others = {role: build.other(role) for role in ROLES if role in meshes}
    compared = next((role for name, role in others.items() if ROLES[name].compared), None)
    return Roles(
        actor=build.actor(optim=config.optim, compared=compared),
        others=others,
        judge=build.judge() if "judge" in meshes else None,
    )
