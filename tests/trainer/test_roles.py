"""One builder of roles: on devices and on abstract meshes; and a stage of training that is built whole."""

import contextlib
import functools

import jax
import pytest
from beside import of_extension

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.dataflows.step_timer import NoTimer
from jaxrl.trainer.context import build_context
from jaxrl.trainer.findings import REINFORCEMENT
from jaxrl.trainer.resolved import resolve
from jaxrl.trainer.rl import RlStage
from jaxrl.trainer.roles import build_roles, role_models
from jaxrl.trainer.supervised import load_or_init

describe_flow = of_extension("jaxrl_planner.plan:describe_flow")
abstract_meshes = of_extension("jaxrl_planner.planned_roles:abstract_meshes")
meshes_on = of_extension("jaxrl_planner.planned_roles:meshes_on")
roles_without_devices = of_extension("jaxrl_planner.planned_roles:roles_without_devices")

SMALL = {
    "model.num_layers": "2",
    "model.d_model": "32",
    "model.d_ff": "48",
    "model.num_heads": "2",
    "model.num_kv_heads": "1",
    "model.head_dim": "16",
    "data.train.size": "40",
    "data.evaluation.size": "10",
    "sft.num_steps": "0",
    "sft.run": "",
    "mesh.simulated_devices": "0",
}


def config_of(recipe: str, **changes: str) -> Config:
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return load_config(Config, f"configs/{recipe}.py", SMALL | changes)


def shapes_and_specs(tree) -> list:
    return [(leaf.shape, leaf.dtype, leaf.sharding.spec) for leaf in jax.tree.leaves(tree)]


EIGHT = {"mesh__train": "1-1-8", "train__rows": "8"}
DYNAMIC = {"algorithm__dataflow": "dapo", "algorithm__kl__loss_coef": "0"}


@pytest.mark.parametrize(
    ("changes", "slots"),
    [
        # 16 prompts x 4 answers are 64 samples; the recipe has 256 slots.
        ({}, 64),
        ({"rollout__slots": "48"}, 48),
        # 60 samples over 8 replicas are 7 or 8 on each.
        ({"rollout__num_prompts": "15", **EIGHT}, 64),
        ({"rollout__num_prompts": "2", **EIGHT}, 8),
        ({"rollout__num_prompts": "2", "rollout__deterministic": "True", **EIGHT}, 16),
        # A generation batch of dynamic sampling has 24 prompts, also if they are drawn one by one.
        (DYNAMIC, 96),
        ({"rollout__max_staleness": "8", **DYNAMIC}, 96),
    ],
)
def test_the_engine_has_no_more_slots_than_samples_can_be_alive(changes, slots):
    given = {
        "rollout__num_prompts": "16",
        "rollout__num_samples": "4",
        "rollout__generation_prompts": "24",
        "algorithm__updates_per_step": "1",
    }
    config = config_of("grpo_tiny", **(given | changes))
    assert config.rollout.slots in (48, 256)
    roles = roles_without_devices(config)
    assert roles.engine.config.slots == slots
    assert roles.engine.slot_sizes[-1] == slots
    idle = f"; rollout.slots {config.rollout.slots} are more than its samples"
    assert dict(describe_flow(roles))["decoding"].endswith(idle) == (slots != 48)


def test_a_plan_has_the_roles_of_the_run():
    settings = {"mesh__train": "1-1-4", "mesh__fsdp": "2", "train__rows": "8"}
    # An abstract mesh has no platform. On CPU decoding has no scan over up to 8 layers, and other caches.
    config = config_of("ppo_tiny", **settings, model__num_layers="9")
    resolved = resolve(config)
    pools, models = resolved.pools, role_models(resolved)
    real, planned = (
        build_roles(resolved, meshes, models)
        for meshes in (meshes_on(pools, jax.devices()[:4]), abstract_meshes(pools))
    )
    assert set(real.learners) == {"actor", "critic"} and set(real.frozen) == {"reference"}
    for name, role in real.learners.items():
        expected = shapes_and_specs(planned.learners[name].abstract_state())
        assert shapes_and_specs(role.abstract_state()) == expected
    slots = (roles.actor.backend.engine.abstract_decode_state() for roles in (real, planned))
    assert len({str(shapes_and_specs(each)) for each in slots}) == 1


def test_a_stage_is_built_whole(tmp_path):
    config = config_of("ppo_tiny", run__output=str(tmp_path))
    run = build_context(resolve(config), jax.devices()[:1], kind=REINFORCEMENT)
    roles = build_roles(run.resolved, run.meshes, run.models)
    starting = functools.partial(load_or_init, run)
    with contextlib.closing(RlStage(run, roles, NoTimer(), starting)) as stage:
        before = dict(vars(stage))
        assert None not in before.values()
        stage.begin(None)
        assert vars(stage) == before


def test_every_role_of_a_config_has_a_model_and_a_mesh(tmp_path):
    config = config_of(
        "safe_rlhf_tiny", cost__model="nowhere", reward__judge__model=str(tmp_path / "judge")
    )
    resolved = resolve(config)
    models = role_models(resolved)
    assert {role for role, _ in models.assumed} == {"cost", "judge"}
    assert set(models.by_role) == set(resolved.roles)
    assert set(resolved.roles) == set(abstract_meshes(resolved.pools))
    assert models.by_role["cost"].num_scores == 1 and not models.by_role["judge"].num_scores
