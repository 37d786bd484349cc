"""Loads or initialises the weights of every role.

config.weights (+ adapter), or random -> [supervised learning, if the config asks for it] -> policy
policy -> reference (a copy), critics (the policy's trunk and a new head, or weights of their own)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.config.schema import Config
from jaxrl.mesh.hosts import put
from jaxrl.mesh.sharding_strategies import state_rules
from jaxrl.models import lora
from jaxrl.models.decoder import Params, init_params
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.weight_loading import load_adapter, load_params
from jaxrl.roles.packed_model import PackedModel
from jaxrl.roles.scores import Critic
from jaxrl.trainer.context import RunContext
from jaxrl.trainer.role_table import ROLES
from jaxrl.trainer.roles import Roles


def load_or_init(run: RunContext) -> Params:
    """The initial weights of the policy, in the actor's training layout.

    They come from the checkpoint that the config names, or from the seed. A model with adapters gets those of
    `config.adapter`, or new ones.
    """
    config, model = run.config, run.model
    layout = run.placement.pool_of("actor").pool.config_of("actor")
    rules = state_rules(layout.sharding)
    packed = PackedModel(model, run.meshes["actor"], train=config.train, state_rules=rules)
    where = packed.train_shardings
    key = jax.random.key(config.seed)
    if not config.weights:
        return jax.jit(init_params, static_argnums=0, out_shardings=where)(model, key)
    params = load_params(config.weights, model, where, dtype=packed.frozen_dtype)
    if config.adapter:
        return lora.join(load_adapter(config.adapter, model, where), params)
    if model.lora.rank:
        adapters, _ = lora.split(where)
        fresh = jax.jit(lora.fresh_adapters, static_argnums=0, out_shardings=adapters)
        return lora.join(fresh(model, key), params)
    return params


def load_frozen(roles: Roles, run: RunContext) -> None:
    """Gives every frozen role the weights of its directory."""
    for name, role in roles.others.items():
        if directory := ROLES[name].weights(run.config):
            ROLES[name].load(role, run.models.by_role[name], directory)


def start_from(roles: Roles, params: Params, run: RunContext) -> None:
    """Gives every learner and the reference their first weights. The actor takes `params` over."""
    keep_reference(roles, params)
    for critic in roles.critics.values():
        critic.start_from(_first_of_critic(critic, params, run.config))
    roles.actor.start_from(params)


def keep_reference(roles: Roles, params: Params) -> None:
    """Gives the reference, if there is one, a copy of the initial weights of training."""
    if roles.reference is not None:
        roles.reference.load(copied(params, roles.reference.train_shardings))


def _first_of_critic(critic: Critic, params: Params, config: Config) -> Params:
    directory = config.critic.weights
    if directory:
        # The files of a language model hold no score head.
        num_scores = read_config(directory).num_scores
        stored = dataclasses.replace(critic.model, num_scores=num_scores)
        loaded = PackedModel(
            stored, critic.mesh, train=critic.train, state_rules=critic.state_rules
        )
        return load_params(directory, stored, loaded.train_shardings)
    # A critic trains all of its weights, so it starts from the base model without the policy's adapters.
    trunk = lora.split(params)[1] if config.model.lora.rank else params
    trunk = {name: leaf for name, leaf in trunk.items() if name != "unembedding"}
    where = {name: critic.train_shardings[name] for name in trunk}
    return copied(trunk, where)


def copied(params: Params, shardings: Any) -> Params:
    """A copy of weights in new buffers, on the same mesh or another one."""
    return jax.tree.map(lambda x, where: put(jnp.copy(x), where), params, shardings)
