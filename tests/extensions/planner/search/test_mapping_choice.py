"""What the mapping search finds, as the settings of a run."""

import dataclasses
import json
import pathlib

import jax
import pytest
from slow_values import mostly_slow
from toy_clusters import split

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.devices import abstract_mesh
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.mesh.pools import take_devices, takes_all
from jaxrl.models.shapes import model_shapes
from jaxrl.trainer.resolved import resolve
from jaxrl.trainer.roles import check_role_batches, role_models
from jaxrl_planner.hardware.accelerators import accelerator
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.make_plan import trace_plan
from jaxrl_planner.search.mapping import ColocatedSet, Mapping
from jaxrl_planner.search.mapping_choice import (
    propose,
    search_for,
    setting_lines,
    with_mapping,
    with_searched_layout,
)
from jaxrl_planner.simulation.simulate_passes import PassSimulator
from jaxrl_planner.simulation.step_costs import StepCosts
from jaxrl_planner.simulation.step_simulator import RoleMapping
from jaxrl_planner.step_load import assumptions_of, load_of


def recipe(**algorithm) -> Config:
    return Config(
        model=model_shapes("qwen2.5-1.5b"),
        algorithm=dataclasses.replace(Config().algorithm, **algorithm),
        mesh=LayoutConfig(layout="auto"),
    )


def recipe_file(name: str) -> Config:
    return load_config(Config, str(pathlib.Path(__file__).parents[4] / f"configs/{name}.py"), {})


PAIRS = {
    f"{name} {cluster}": (name, cluster)
    for name in ("dapo_qwen7b", "dapo_qwen3_30b_a3b", "ppo_llama8b", "grpo_qwen3_8b")
    for cluster in ("a100:2x8", "h100:2x8", "h100:16x8", "v5p:2x2x4", "v5e:8x16")
}
FAST = ("dapo_qwen7b h100:2x8",)


@pytest.mark.parametrize("pair", mostly_slow(PAIRS, fast=FAST))
def test_a_proposal_passes_the_checks_of_a_run(pair):
    name, cluster = pair
    found, proposed = propose(recipe_file(name), Cluster.parse(cluster))
    pools = resolve(proposed).pools
    assert {pool.layout_of("actor") for pool in pools if "actor" in pool.roles} == {
        found.roles["actor"].layout
    }
    check_role_batches(
        proposed,
        {role: abstract_mesh(pool.layout_of(role)) for pool in pools for role in pool.roles},
    )


def test_a_proposal_is_printed_as_settings():
    config = recipe_file("dapo_qwen7b")
    _, proposed = propose(config, Cluster.parse("a100:2x8"))
    lines = setting_lines(config, proposed)
    # Weights lie whole on 16 devices in training; in generation two share them.
    assert "config.mesh.train = '1-1-16'" in lines and "config.train.rows = 16" in lines
    assert "config.mesh.generate = '1-2-1-8'" in lines and "config.mesh.fsdp = 16" in lines
    assert setting_lines(config, config) == []


@pytest.mark.slow
def test_a_proposal_for_a_paged_cache_has_more_slots_and_the_pages_for_them():
    config, cluster = recipe_file("dapo_qwen32b"), Cluster.parse("h100:16x8")
    paged = dataclasses.replace(config.rollout, cache="paged", cache_tokens=10**6)
    found, proposed = propose(dataclasses.replace(config, rollout=paged), cluster)
    whole = dataclasses.replace(config.rollout, cache="contiguous")
    contiguous, unpaged = propose(dataclasses.replace(config, rollout=whole), cluster)
    generation = found.roles["actor"]
    replicas = 128 // (generation.layout.p_g * generation.layout.t_g)
    # Half of 2,048 and a quarter of 20,480 tokens each.
    assert generation.cache_tokens == generation.slots * 6144
    assert proposed.rollout.cache_tokens == generation.cache_tokens * replicas
    # Of all replicas: the layouts of generation differ.
    assert proposed.rollout.slots > 2 * unpaged.rollout.slots
    paged_s, whole_s = (m.breakdown.stage_s("generation") for m in (found, contiguous))
    assert paged_s < 0.8 * whole_s
    assert all(found.peak_bytes(i) <= pool.budget_bytes for i, pool in enumerate(found.pools))


def test_what_does_not_go_with_a_mapping_is_refused_before_it_is_shown():
    config = recipe()
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model,
            layer_pattern=("delta", "full"),
            delta_key_heads=2,
            delta_value_heads=4,
            delta_key_dim=64,
            delta_value_dim=64,
        ),
        train=dataclasses.replace(config.train, fill_minibatches=False, share_prompts=True),
    )
    with pytest.raises(
        UserError, match="fastest mapping for h100:1x8 does not go with this recipe"
    ):
        propose(config, Cluster.parse("h100:1x8"))


@pytest.mark.slow
def test_all_roles_are_simulated_with_the_rows_that_a_run_has():
    # By itself the reference of this recipe would have sixteen times the actor's rows.
    found = search_for(recipe_file("ppo_llama8b"), Cluster.parse("h100:16x8"))
    config = with_mapping(recipe_file("ppo_llama8b"), found)
    work = load_of(config).work
    assert work.microbatch_rows == config.train.rows
    cluster = Cluster.parse("h100:16x8")
    passes = PassSimulator(cluster, work, assumptions_of(config, cluster.accelerator))
    tasks = {task.role: task for task in found.breakdown.of_stage("training")}
    models = role_models(resolve(config)).by_role
    for role in ("actor", "critic"):
        simulated = passes.training(models[role], found.roles[role].layout)
        assert tasks[role].costs.transient_bytes >= simulated.transient_bytes


def test_the_search_assumes_what_the_recipe_says():
    config = recipe()
    narrow = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, dtype="bfloat16", remat="offload"),
        rollout=dataclasses.replace(config.rollout, kv_dtype="int8", weights_dtype="int8"),
        optim=dataclasses.replace(config.optim, moments="bfloat16"),
    )
    found = assumptions_of(narrow, accelerator("h100"))
    assert (found.dtype, found.compute_bytes, found.cache_bytes) == ("bfloat16", 2, 1)
    assert (found.sampled_bytes, assumptions_of(config, accelerator("h100")).sampled_bytes) == (
        1,
        4,
    )
    assert (found.moments_bytes, found.remat) == (4, "full")
    assert found.logits_tokens == 2**30 // (4 * config.model.vocab_size)
    assert assumptions_of(config, accelerator("h100")).compute_bytes == 4


@pytest.mark.parametrize(
    ("kind", "dtype", "attention"),
    [("h100", "bfloat16", "cudnn"), ("h100", "float32", "xla"), ("v5p", "bfloat16", "splash")],
)
def test_pairs_of_packed_texts_are_those_that_the_devices_kernel_computes(kind, dtype, attention):
    config = recipe()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, dtype=dtype))
    assert assumptions_of(config, accelerator(kind)).attention == attention


def mapping_of(layouts, devices=8):
    """One pool of roles with these layouts, on 8 devices; the actor samples with p_g = 1 and t_g = 2."""
    layouts |= {"actor": dataclasses.replace(layouts["actor"], p_g=1, t_g=2)}
    roles = {
        name: RoleMapping(name, 0, layout, 16 if name == "actor" else 0)
        for name, layout in layouts.items()
    }
    pools = (ColocatedSet(tuple(roles), 0, devices, "h100:1x8", 0.0),)
    return Mapping("ppo", "h100:1x8", 8, pools, roles, StepCosts(()), ())


def test_roles_of_a_pool_keep_the_strategies_that_were_found():
    ppo = recipe(dataflow="ppo", advantage="gae", whiten=True)
    alike = {"actor": split(1, 4, 2, 2), "critic": split(1, 4, 2, 2)}
    config = with_mapping(ppo, mapping_of(alike))
    assert config.placement == {} and config.mesh.train == "1-4-2"

    config = with_mapping(ppo, mapping_of(alike | {"critic": split(2, 1, 4, 4)}))
    (pool,) = resolve(config).pools
    assert pool.layout_of("actor").name == "1-4-2 / 1-2-2-2"
    critic = pool.layout_of("critic")
    assert (critic.name, critic.fsdp) == ("2-1-4 / 2-1-1-4", 4)
    meshes = take_devices((pool,), jax.devices()[:8]).pools[0]
    assert meshes.mesh_of("actor").size == meshes.mesh_of("critic").size == 8


def test_each_role_has_the_sharding_that_was_found():
    ppo = recipe(dataflow="ppo", advantage="gae", whiten=True)
    long = dataclasses.replace(split(1, 4, 2, 1, 1, 2), sharding="ZeRO-3")
    alike = with_mapping(ppo, mapping_of({"actor": long, "critic": long}))
    assert alike.mesh.sharding == "ZeRO-3" and alike.placement == {}
    mixed = with_mapping(ppo, mapping_of({"actor": long, "critic": split(1, 4, 2, 2)}))
    (pool,) = resolve(mixed).pools
    assert [pool.config_of(role).sharding for role in pool.roles] == ["ZeRO-3", "FSDP"]


def test_devices_that_divide_badly_stay_idle():
    config = with_mapping(recipe(), mapping_of({"actor": split(1, 2, 3)}, devices=6))
    pools = resolve(config).pools
    assert not takes_all(pools)
    assert len(take_devices(pools, jax.devices()[:8]).pool_of("actor").devices) == 6


def test_pools_apart_become_a_placement():
    apart = mapping_of({"actor": split(1, 4, 1), "critic": split(1, 2, 2)}, devices=4)
    roles = {
        name: dataclasses.replace(r, pool=i) for i, (name, r) in enumerate(apart.roles.items())
    }
    pools = tuple(ColocatedSet((name,), 4 * i, 4, "h100:1x8", 0.0) for i, name in enumerate(roles))
    found = dataclasses.replace(apart, pools=pools, roles=roles)
    config = with_mapping(recipe(dataflow="ppo", advantage="gae", whiten=True), found)
    pools = {pool.roles: pool for pool in resolve(config).pools}
    assert set(pools) == {("actor",), ("critic",)}
    assert take_devices(tuple(pools.values()), jax.devices()[:8]).pool_of("critic").devices


def test_a_run_takes_what_is_found_for_its_devices(tmp_path, capsys):
    here = tmp_path / "here.json"
    kind = dataclasses.replace(accelerator("h100"), name="here")
    here.write_text(json.dumps(dataclasses.asdict(kind)))
    config = recipe()
    config = dataclasses.replace(config, mesh=LayoutConfig(layout=str(here)))
    chosen = with_searched_layout(config, jax.devices()[:8])
    assert sum(pool.layout.num_devices for pool in resolve(chosen).pools) <= 8
    shards = resolve(chosen).pools[0].layout_of("actor").d
    assert chosen.train.rows % shards == 0
    assert chosen.rollout.slots > 0 and "predicted" in capsys.readouterr().out
    assert with_searched_layout(chosen, jax.devices()[:8]) is chosen


def test_devices_that_nobody_knows_are_to_be_measured():
    with pytest.raises(
        UserError, match=r"kind 'cpu' .*, in a checkout, with `python benchmarks/calibrate.py --out"
    ):
        with_searched_layout(recipe(), jax.devices())


def test_what_the_search_does_not_cover_is_named():
    with pytest.raises(UserError, match=r"covers dapo, .* this recipe has dataflow 'jaxrl"):
        search_for(
            recipe(dataflow="jaxrl.dataflows.grpo:grpo"), Cluster(accelerator("h100"), (1, 8))
        )


def test_a_dry_run_has_no_devices_to_search_for():
    with pytest.raises(UserError, match=r"jaxrl plan --config RECIPE --search --topology"):
        trace_plan(recipe())
