"""Plans to look at: of a model of four layers, and of the recipe for 128 devices."""

import dataclasses
import functools
import pathlib

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.train_config import TrainConfig
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.make_plan import trace_plan
from jaxrl_planner.memory import ResidentBuffers
from jaxrl_planner.plan import Plan
from jaxrl_planner.planned_roles import PlannedRoles, roles_without_devices

RECIPE = pathlib.Path(__file__).parents[1] / "configs/dapo_qwen32b.py"

TINY = ModelConfig(
    vocab_size=64, num_layers=4, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=8
)
TINY_LAYOUT = LayoutConfig(train="1-4-2", generate="1-2-2-2", fsdp=2)
TINY_TRAIN = TrainConfig(rows=4, row_tokens=16, logprob_chunk_tokens=8, remat="full")
_DEFAULT = Config()
# As many updates as layers: one loop must not be taken for the other.
TINY_CONFIG = dataclasses.replace(
    _DEFAULT,
    model=TINY,
    mesh=TINY_LAYOUT,
    train=TINY_TRAIN,
    data=dataclasses.replace(_DEFAULT.data, max_prompt_tokens=6),
    rollout=dataclasses.replace(
        _DEFAULT.rollout,
        slots=8,
        prefill_prompts=4,
        max_response_tokens=10,
        tokens_per_dispatch=4,
        num_prompts=8,
        num_samples=4,
    ),
    algorithm=dataclasses.replace(_DEFAULT.algorithm, updates_per_step=4),
    reward=dataclasses.replace(_DEFAULT.reward, overlong_buffer_tokens=0),
)


def tiny_config(model: ModelConfig = TINY, **changes) -> Config:
    """Changes of groups of settings, or of single ones as rollout__slots."""
    config = dataclasses.replace(TINY_CONFIG, model=model)
    for name, value in changes.items():
        group, _, setting = name.partition("__")
        if setting:
            value = dataclasses.replace(getattr(config, group), **{setting: value})
        config = dataclasses.replace(config, **{group: value})
    return config


@functools.cache
def plan_tiny(model: ModelConfig = TINY, **changes) -> Plan:
    return trace_plan(tiny_config(model, **changes))


@functools.cache
def plan_32b() -> Plan:
    return trace_plan(load_config(Config, str(RECIPE), {}))


@functools.cache
def pod_plan() -> Plan:
    """The recipe traced on 128 H100, with predicted seconds."""
    return trace_plan(load_config(Config, f"{RECIPE}:h100-128", {}), Cluster.parse("h100:16x8"))


def roles_planned(config: Config) -> PlannedRoles:
    """The roles of a plan, without the seconds of tracing their programs."""
    return roles_without_devices(config)


def buffers_named(plan: Plan | PlannedRoles, name: str) -> ResidentBuffers:
    if isinstance(plan, PlannedRoles):
        (placed,) = plan.pools
        held = plan.resident_buffers(placed)
    else:
        held = plan.pools[0].resident_buffers
    (found,) = [h for h in held if h.name == name]
    return found
