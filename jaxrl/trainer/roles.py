"""Builds the roles of a run without weights, each on its mesh.

    config, meshes, models --> build_roles --> Roles --> RoleKind.load, supervised.start_from

A mesh may be abstract, so a plan has the same roles as the run that it predicts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jaxrl.config.schema import Config
from jaxrl.config.shapes import (
    check_sampling_batches,
    engine_config,
    is_here,
    model_of,
    stop_ids_of,
)
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.dataflows.algorithm_config import TrustRegionConfig
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, check_divides, shards_of
from jaxrl.mesh.sharding_strategies import state_rules
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.generative_judge import GenerativeJudge
from jaxrl.roles.learner import Learner
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import Frozen
from jaxrl.roles.policy import Actor, Reference
from jaxrl.roles.scores import ActorCritic, Critic
from jaxrl.roles.trust_region import TrustRegionActor
from jaxrl.rollout.cache_choice import warn_of_pages_on_cpu
from jaxrl.rollout.drivers import build_backend, with_agent
from jaxrl.trainer.resolved import Resolved
from jaxrl.trainer.role_table import ROLES, BuildParts


class _NoTokenizer:
    """The tokenizer of a plan, which builds shapes only. No shape depends on the tokens."""

    stop_ids = (0,)
    chat_template = None
    ids_named_by = staticmethod(lambda stop_strings: ())
    # A backend keeps it and never calls it: a plan decodes nothing.
    decode_batch = None


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
        return self.by_role["actor"]

    def with_tokenizers(self, policy: Tokenizer, own: Mapping[str, Tokenizer]) -> RoleModels:
        """The same models, each limited to the tokens of its tokenizer.

        Args:
          policy: the policy's tokenizer.
          own: tokenizer of each role that has its own.
        """
        # `check_vocabulary` refuses a model that is too small for the policy's tokens.
        sized = {
            role: dataclasses.replace(
                model, num_tokens=min(model.vocab_size, own.get(role, policy).vocab_size)
            )
            for role, model in self.by_role.items()
        }
        return dataclasses.replace(self, by_role=sized, tokenizer=policy, own_tokenizers=own)


def role_models(resolved: Resolved, roles: Sequence[str] = ()) -> RoleModels:
    """The models of roles, or of all. If the checkpoint of one is not here, it is assumed to be the actor's.

    Raises:
      UserError: the settings contradict a checkpoint, or the policy has neither a checkpoint nor a shape.
    """
    config = resolved.config
    actor, origin = model_of(config, resolved.model_in)
    found, assumed = {}, []
    for role in roles or resolved.roles:
        if role == "rollout":
            continue
        if role == "actor" or role not in ROLES:
            found[role] = actor
            continue
        directory, stored = ROLES[role].weights(config), None
        if directory and is_here(directory):
            stored = resolved.model_in(directory).for_texts_of(config.longest_sequence)
        elif directory:
            why = (
                f"counted as large as the actor: {directory} is not here, so its shape is not known"
            )
            assumed.append((role, why))
        found[role] = ROLES[role].shape(actor, stored)
    return RoleModels(found, origin, tuple(assumed))


Meshes = Mapping[str, Mesh]
"""The mesh of each role of a run, and of "rollout" if the actor samples on other devices."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """The roles of a run.

    Attributes:
      actor: the policy.
      others: the other roles of the run, by their names in `role_table.ROLES`.
    """

    actor: Actor
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def reference(self) -> Reference | None:
        """The policy that training started from; None for a run without one."""
        return self.others.get("reference")

    @property
    def compared(self) -> Reference | None:
        """The policy that the actor's loss may have the KL to; None for a run without one."""
        return next((role for name, role in self.others.items() if ROLES[name].compared), None)

    @property
    def judge(self) -> GenerativeJudge | None:
        """The generative judge; None for a run without one."""
        return self.others.get("judge")

    @property
    def critics(self) -> dict[str, Critic]:
        """The roles that learn values."""
        return {name: role for name, role in self.others.items() if isinstance(role, Critic)}

    @property
    def learners(self) -> dict[str, Learner]:
        """The roles whose states a checkpoint holds."""
        return {"actor": self.actor, **self.critics}

    @property
    def frozen(self) -> dict[str, Frozen]:
        """Models of log-probabilities or scores whose weights never change."""
        return {name: role for name, role in self.others.items() if isinstance(role, Frozen)}


class RoleBuilder:
    """Builds the roles of a config one by one."""

    def __init__(self, resolved: Resolved, meshes: Meshes, models: RoleModels):
        """Args: the config with its pools, and the mesh and the model of each role."""
        self._config = resolved.config
        self._meshes = meshes
        self._models = models
        self._layouts = {r: pool.config_of(r) for pool in resolved.pools for r in pool.roles}

    def actor(
        self,
        *,
        optim: OptimConfig,
        samples: bool = True,
        compared: Reference | None = None,
        trust_region: TrustRegionConfig | None = None,
        has_values: bool = False,
    ) -> Actor:
        """The actor with the optimiser of one training stage, or with a trust region or a value head.

        Without `samples` it only learns.
        """
        config, rollout = self._config, self._config.rollout
        backend = None
        model = dataclasses.replace(self._models.actor, value_head=has_values)
        if samples:
            tokenizer = self._models.tokenizer
            mesh = self._meshes.get("rollout", self._meshes["actor"])
            sizes = engine_config(
                config,
                stop_ids_of(rollout, tokenizer),
                prompts_per_batch=config.prompts_per_batch,
                replicas=shards_of("batch", GENERATE_RULES, mesh),
            )
            warn_of_pages_on_cpu(rollout.cache, mesh, rollout.agent)
            backend = build_backend(rollout.driver, model, mesh, sizes, tokenizer.decode_batch)
            # A plan runs no agents.
            if tokenizer is not SHAPES_ONLY:
                backend = with_agent(backend, rollout, tokenizer)
        # A stage that only learns has no sampler whose limits could count.
        truncates = samples and config.truncates_logprobs
        options = self._common("actor") | {
            "optim": optim,
            "temperature": rollout.temperature,
            "truncation": rollout.truncation() if truncates else None,
            "seed": config.seed,
            "backend": backend,
            "compared": compared,
        }
        if trust_region is None:
            return (ActorCritic if has_values else Actor)(model, **options)
        return TrustRegionActor(model, max_kl=trust_region.max_kl, **options)

    def other(self, role: str, *, like: str = "") -> Any:
        """A role of `role_table.ROLES`, with its own model and mesh or, by `like`, those of another role."""
        like = like or role
        tokenizer = self._models.own_tokenizers.get(like, self._models.tokenizer)
        model = self._models.by_role[like]
        return ROLES[role].build(BuildParts(self._config, model, self._common(like), tokenizer))

    def _common(self, role: str) -> dict[str, Any]:
        """Keyword arguments of every constructor that follow from the placement."""
        layout = self._layouts[role]
        return {
            "mesh": self._meshes[role],
            "train": self._config.train,
            "state_rules": state_rules(layout.sharding),
            "offload": layout.offload_training_state,
        }


def build_roles(resolved: Resolved, meshes: Meshes, models: RoleModels) -> Roles:
    """Builds all roles that have a mesh, without weights.

    Args:
      resolved: config of the run, with its pools.
      meshes: mesh of each role, on devices or abstract.
      models: result of `role_models`.

    Raises:
      UserError: something does not divide over a mesh, or the rollout backend cannot be built.
    """
    config, build = resolved.config, RoleBuilder(resolved, meshes, models)
    # Before the actor, whose loss may compare with one of them.
    others = {role: build.other(role) for role in ROLES if role in meshes}
    compared = next((role for name, role in others.items() if ROLES[name].compared), None)
    actor = build.actor(
        optim=config.optim,
        compared=compared,
        trust_region=config.algorithm.trust_region if resolved.dataflow.trust_region else None,
        has_values=config.critic.trunk_coef > 0,
    )
    return Roles(actor, others)


def check_role_batches(config: Config, meshes: Mapping[str, Mesh | AbstractMesh]) -> None:
    """Raises UserError for a batch size that the mesh of a role does not divide.

    Args:
      config: config of the run.
      meshes: mesh of each role.
    """
    for role, mesh in meshes.items():
        if role not in ROLES or ROLES[role].packs:
            check_divides("train.rows", config.train.rows, "batch", TRAIN_RULES, mesh)
            check_divides("train.row_tokens", config.row_tokens, "length", TRAIN_RULES, mesh)
    check_sampling_batches(config, meshes.get("rollout", meshes["actor"]))
