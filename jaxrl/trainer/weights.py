"""Where weights come from: a checkpoint's directory or a seed; and how they reach every role.

config.weights (+ adapter), or random -> [supervised learning, if the config asks for it] -> policy
policy -> reference (a copy), critics (its trunk and a new head, unless they have weights of their own)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.config.schema import Config
from jaxrl.mesh.hosts import put
from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.mesh.sharding_strategies import state_rules
from jaxrl.models import lora
from jaxrl.models.decoder import Params, decoder_graph, init_params
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.weight_loading import load_adapter, load_params
from jaxrl.roles.packed_model import PackedModel
from jaxrl.roles.value import Critic
from jaxrl.trainer.context import RunContext
from jaxrl.trainer.role_models import weights_of
from jaxrl.trainer.roles import Roles


def load_or_init(run: RunContext) -> Params:
    """The weights that a run begins with, in the actor's training layout.

    They come from the checkpoint that the config names, with its adapters if there are any, or from the seed;
    fresh adapters are added where the model has some and the checkpoint none.
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
    """Gives frozen models and the judge the weights of their directories."""
    for name, role in roles.frozen.items():
        if directory := weights_of(name, run.config):
            role.load(load_params(directory, role.model, role.train_shardings))
    if roles.judge is not None:
        model, backend = run.models.by_role["judge"], roles.judge.backend
        _, shapes, axes = decoder_graph(model)
        where = shardings(axes, shapes, GENERATE_RULES, backend.mesh)
        directory = weights_of("judge", run.config)
        backend.load(load_params(directory, model, where, dtype=backend.dtype))


def start_from(roles: Roles, params: Params, run: RunContext) -> None:
    """Gives every learner and the reference their first weights: `params`, which the actor takes over."""
    keep_reference(roles, params)
    for critic in roles.critics.values():
        critic.start_from(_first_of_critic(critic, params, run.config))
    roles.actor.start_from(params)


def keep_reference(roles: Roles, params: Params) -> None:
    """Gives the reference, if there is one, a copy of the weights that training starts from."""
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
    # Adapters are the policy's own way to learn: a critic starts from what is below them.
    trunk = lora.split(params)[1] if config.model.lora.rank else params
    trunk = {name: leaf for name, leaf in trunk.items() if name != "unembedding"}
    where = {name: critic.train_shardings[name] for name in trunk}
    return copied(trunk, where)


def copied(params: Params, shardings: Any) -> Params:
    """The same values in buffers of their own, on another mesh or on the same one."""
    return jax.tree.map(lambda x, where: put(jnp.copy(x), where), params, shardings)
