"""Dry runs to look at: of a model of four layers, and of the recipe for 128 devices."""

import functools
import pathlib

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.data.packing import PackedShape
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.batch_flow import BatchFlow
from jaxrl.planner.dry_run import dry_run
from jaxrl.planner.memory import Holding
from jaxrl.planner.tables import DryRun
from jaxrl.roles.losses import policy
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import TrainConfig
from jaxrl.rollout.settings import EngineConfig

RECIPE = pathlib.Path(__file__).parents[1] / "configs/dapo_qwen32b.py"
LOSS = policy("clipped", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0})

TINY = ModelConfig(
    vocab_size=64, num_layers=4, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=8
)
TINY_LAYOUT = LayoutConfig(train="1-4-2", generate="1-2-2-2", fsdp=2)
TINY_TRAIN = TrainConfig(rows=4, row_tokens=16, logprob_chunk_tokens=8, remat="full")
TINY_ENGINE = EngineConfig(
    slots=8,
    prefill_prompts=4,
    max_prompt_tokens=6,
    max_response_tokens=10,
    tokens_per_dispatch=4,
    stop_ids=(1,),
)
# As many updates as layers: one loop must not be taken for the other.
TINY_FLOW = BatchFlow(12, 10, 8, 4, PackedShape(4, 2, 4, 16))


@functools.cache
def plan_tiny(model: ModelConfig = TINY, **changes) -> DryRun:
    arguments = {
        "layout": ParallelLayout.from_config(TINY_LAYOUT),
        "train": TINY_TRAIN,
        "optim": OptimConfig(),
        "engine": TINY_ENGINE,
        "temperature": 1.0,
        "objective": LOSS,
        "flow": TINY_FLOW,
        **changes,
    }
    return dry_run("tiny", model, **arguments)


@functools.cache
def plan_32b() -> DryRun:
    return plan_recipe(load_config(Config, str(RECIPE), {}))


def plan_recipe(config: Config) -> DryRun:
    rollout = config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    return dry_run(
        config.name,
        config.model,
        ParallelLayout.from_config(config.mesh),
        train=config.train,
        optim=config.optim,
        engine=EngineConfig(
            **rollout.engine_settings(),
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=rollout.max_response_tokens,
            stop_ids=(0,),
        ),
        temperature=rollout.temperature,
        objective=LOSS,
        flow=BatchFlow(
            generation_prompts=rollout.generation_prompts,
            max_generation_batches=rollout.max_generation_batches,
            num_prompts=rollout.num_prompts,
            num_samples=rollout.num_samples,
            shape=PackedShape.for_sequences(
                rollout.num_prompts * rollout.num_samples,
                longest=longest,
                minibatches=config.algorithm.updates_per_step,
                rows=config.train.rows,
                tokens=config.train.row_tokens,
            ),
            keeps_mixed_groups=True,
        ),
    )


def holding(plan: DryRun, name: str) -> Holding:
    (found,) = [h for h in plan.holdings if h.name == name]
    return found
