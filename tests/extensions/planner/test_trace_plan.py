"""The dry run of a config: roles, adapters and flow of its own recipe, and every gap named."""

import dataclasses
import functools
import io
import json
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.models.decoder import init_params
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl_planner import plan_output
from jaxrl_planner.compiled.traffic import collectives
from jaxrl_planner.make_plan import trace_plan
from jaxrl_planner.memory import ResidentBuffers
from jaxrl_planner.plan import Plan, describe_flow, size_text
from jaxrl_planner.planned_roles import (
    PlannedRoles,
    meshes_on,
    planned_roles,
    roles_without_devices,
)
from jaxrl_planner.step_load import load_of

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
TINY = {
    "model.num_layers": "2",
    "model.d_model": "32",
    "model.d_ff": "48",
    "model.num_heads": "2",
    "model.num_kv_heads": "1",
    "model.head_dim": "16",
}


def config_of(recipe: str, **changes) -> Config:
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return load_config(Config, str(CONFIGS / f"{recipe}.py"), TINY | changes)


@functools.cache
def plan_of(recipe: str, **changes) -> Plan:
    return trace_plan(config_of(recipe, **changes))


def sizes(found: Plan | PlannedRoles) -> dict[str, int]:
    return {h.name: h.num_values for h in buffers(found)}


def buffers(found: Plan | PlannedRoles) -> Sequence[ResidentBuffers]:
    """Of one pool; roles have no temporaries of updates."""
    if isinstance(found, PlannedRoles):
        (placed,) = found.pools
        return found.resident_buffers(placed)
    (pool,) = found.pools
    return pool.resident_buffers


def planned(config: Config) -> PlannedRoles:
    """The roles of a plan, without the seconds of tracing their programs."""
    return roles_without_devices(config)


def test_dapo_alone_keeps_mixed_groups():
    flow = dict(describe_flow(planned(config_of("dapo_tiny"))))
    assert "with right and wrong answers" in flow["groups kept"]
    assert "at most 20 batches a step" in flow["generation batch"]
    for recipe in ("ppo_tiny", "remax_tiny"):
        flow = dict(describe_flow(planned(config_of(recipe))))
        assert "all of them" in flow["groups kept"], recipe
        assert "batches a step" not in flow["generation batch"], recipe
    assert flow["generation batch"].startswith("192 prompts x 1 samples = 192 responses")
    assert flow["generation batch"].endswith("and 192 greedy ones")


def test_weights_for_a_pool_of_the_sampler_are_counted():
    pools = {
        "learn": {"roles": ("actor",), "train": "1-2-2"},
        "sample": {"roles": ("rollout",), "train": "1-2-1"},
    }
    config = config_of("dapo_tiny", placement=str(pools))
    roles = planned(config)
    # A device of the sampler receives what it then holds.
    (sampler,) = (b for b in roles.resident_buffers(roles.pool_of("rollout")) if "frozen" in b.name)
    shown = size_text(sampler.bytes_per_device)
    told = dict(describe_flow(roles))["hand-over"]
    assert told == f"{shown} of weights to each device of the sampler, in 1 programs"
    # On devices it is a program, which both pools run.
    placed = planned_roles(roles.resolved, meshes_on(roles.pools, jax.devices()))
    role, program, mesh = next(iter(placed.programs(load_of(config))))
    assert (role, program.name, mesh.size) == ("rollout", "hand_over", 6)
    (piece,) = program.pieces
    text = piece.function.lower(*piece.arguments).compile().as_text() or ""
    received = sum((each.received(6) for each in collectives(text, 6)), np.zeros(6))
    assert sorted(set(received)) == [0, sampler.bytes_per_device]


def test_weights_and_slots_of_frozen_roles_are_counted():
    start = {"rollout__frozen_roles__checker": "start"}
    both = planned(config_of("solver_checker_tiny", **start))
    found, alone = sizes(both), sizes(planned(config_of("solver_checker_tiny")))
    assert found["roles of start, frozen"] == found["actor in generation"]
    assert found["roles of start, cache and slots"] == found["KV cache and slots"] > 0
    assert found.keys() - alone.keys() == {
        "roles of start, frozen",
        "roles of start, cache and slots",
    }


def test_roles_on_the_same_devices_are_counted():
    model = config_of("ppo_tiny").model
    found = sizes(plan_of("ppo_tiny"))
    assert found["reference, frozen"] == found["actor in training"] == model.num_params
    # A head of one score in the place of the tied unembedding.
    assert found["critic in training"] == model.num_params + model.d_model
    # Adam's two moments, and the number of steps.
    assert found["critic, optimiser state"] == 2 * found["critic in training"] + 1
    # Its update has gradients and activations of its own, at its turn.
    turns = {h.turn for h in buffers(plan_of("ppo_tiny"))}
    assert turns == {"", "actor", "critic"}
    assert found["critic, gradients"] == found["critic in training"]
    alone = sizes(planned(config_of("dapo_tiny")))
    assert not any("critic" in name or "reference" in name for name in alone)


def test_adapters_are_named_and_alone_have_an_optimiser():
    changes = {"model__lora__rank": "4", "algorithm__kl__loss_coef": "0.01"}
    plan = planned(config_of("grpo_tiny", **changes))
    found = sizes(plan)
    adapters = found["actor in training"] - config_of("grpo_tiny").model.num_params
    assert adapters > 0 and found["optimiser state"] == 2 * adapters + 1
    assert buffers(plan)[0].layout.endswith("adapters of rank 4 in float32 included")
    # The model below them is the reference.
    assert "reference, frozen" not in found


def test_every_role_is_counted_and_what_is_assumed_is_said():
    found = plan_of(
        "safe_rlhf_tiny",
        cost__model="nowhere/cost",
        cost__pretrain_coef="0.5",
        reward__judge__model="nowhere/judge",
    )
    counted, actor = sizes(found), config_of("safe_rlhf_tiny").model
    names = ("critic in training", "cost critic in training", "cost, frozen", "judge, frozen")
    assert all(counted[name] >= actor.num_params for name in names)
    assert counted["judge, cache and slots"] > 0
    notes = dict(found.notes)
    assert notes["cost"].startswith("counted as large as the actor: nowhere/cost is not here")
    assert "nowhere/judge" in notes["judge"] and "SFT" in notes
    out = io.StringIO()
    plan_output.show(found, Console(file=out))
    assert "not counted: cost.pretrain_coef" in out.getvalue() and "may fit" not in out.getvalue()


@pytest.mark.long
def test_pools_of_a_placement_are_counted_each():
    config = dataclasses.replace(
        config_of("ppo_tiny"),
        placement={
            "policy": {"roles": ("actor",), "train": "1-2-2", "generate": "1-1-2-2"},
            "rest": {"roles": ("critic", "reference"), "train": "1-1-2"},
        },
    )
    found = trace_plan(config)
    policy, rest = found.pools
    assert (policy.num_devices, rest.num_devices) == (4, 2)
    assert not any("critic" in h.name for h in policy.resident_buffers)
    assert {"critic in training", "reference, frozen"} <= {h.name for h in rest.resident_buffers}
    out = io.StringIO()
    plan_output.show(found, Console(file=out))
    assert "pool rest, 2 devices" in out.getvalue()
    assert "pool rest, learning, before temporaries" in out.getvalue()


def test_what_waits_in_host_memory_is_not_counted_while_sampling():
    here, offloaded = (
        planned(config_of("ppo_tiny", mesh__offload_training_state=str(offload)))
        for offload in (False, True)
    )

    def spared(phase: str) -> set[str]:
        each = [
            {h.name for h in buffers(found) if getattr(h, phase)} for found in (here, offloaded)
        ]
        return each[0] - each[1]

    assert spared("sampling") == {"actor in training", "optimiser state", "reference, frozen"}
    assert spared("learning") == {"reference, frozen"}


def test_the_shape_is_that_of_the_weights_if_they_are_here(tmp_path):
    weights = tmp_path / "weights"
    config = config_of("dapo_tiny", weights=str(weights))
    origin = planned(config).models.origin
    assert origin == f"config.model; {weights} is not here to compare it with"
    params = init_params(config.model, jax.random.key(0))
    save_checkpoint(params, config.model, weights, dtype="float32")
    assert planned(config).models.origin == str(weights)
    stored = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps(stored | {"intermediate_size": 56}))
    with pytest.raises(UserError, match=r"model.d_ff = 48, but 56 in the checkpoint"):
        planned(config)


def test_a_reward_model_that_is_here_is_counted(tmp_path):
    config = config_of("dapo_tiny", reward__model=str(tmp_path / "reward"))
    model = dataclasses.replace(config.model, num_scores=1)
    params = init_params(model, jax.random.key(0))
    save_checkpoint(params, model, tmp_path / "reward", dtype="float32")
    assert sizes(planned(config))["reward, frozen"] == model.num_params


def test_a_critic_on_the_actors_trunk_is_a_head_and_no_other_model():
    changes = {"critic__warmup_steps": "0", "critic__trunk_coef": "0.1"}
    apart, one = (planned(config_of("ppo_tiny", **more)) for more in ({}, changes))
    ours, theirs = sizes(one), sizes(apart)
    # One weight for each of 32 numbers of the hidden state.
    assert ours["actor in training"] == theirs["actor in training"] + 32
    assert "critic in training" in theirs and not [name for name in ours if "critic" in name]
    load = load_of(one.config)
    of_actor = [program for role, program, _ in one.programs(load) if role == "actor"]
    assert [program.name for program in of_actor] == ["logprobs", "update"]
    for piece in (piece for program in of_actor for piece in program.pieces):
        assert piece.function.trace(*piece.arguments, **piece.keywords)
