"""Settings that cannot work are refused where they are written, with their full names."""

import dataclasses

import pytest

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.config.shapes import engine_config, step_shape
from jaxrl.data.data_config import DataConfig
from jaxrl.dataflows.algorithm_config import AlgorithmConfig
from jaxrl.errors import UserError
from jaxrl.mesh.devices import abstract_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.trainer.resolved import resolve


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("algorithm.updates_per_step", "7", "192 sequences do not divide into"),
        ("rollout.on_shortage", "fill", "there is no last one; set it to 1 or more"),
        ("rollout.temperature", "0.0", "temperature = 0.0: must be at least 0.01"),
        ("train.row_tokens", "64", "cannot hold the longest sequence"),
        ("reward.overlong_buffer_tokens", "48", "leaves nothing unpunished"),
        ("model.head_dim", "31", "head_dim 31 is odd"),
        ("model.num_kv_heads", "3", "not a multiple of num_kv_heads 3"),
        # The chat template would render its prompts twice.
        ("rollout.agent", "my_agent.py:agent", "set data.chat to False"),
    ],
)
def test_refused(setting, value, message):
    also = {
        "rollout.on_shortage": {"rollout.max_generation_batches": "0"},
        "rollout.agent": {"data.chat": "True"},
    }.get(setting, {})
    with pytest.raises(UserError) as error:
        resolve(load_config(Config, "configs/dapo_tiny.py", {setting: value, **also}))
    assert message in str(error.value)


def step_shape_of(devices: int, *, config: Config, **layout) -> tuple[int, ...]:
    mesh = abstract_mesh(ParallelLayout.from_config(LayoutConfig(train=f"1-1-{devices}", **layout)))
    return dataclasses.astuple(step_shape(config, [mesh]))


def test_auto_rows_hold_a_prompt_with_its_answers():
    """63 + 8 x (1 + 192) tokens are 1,607: of eight rows of 256 a device gets one, of 1,024 or twice that."""
    config = Config(
        data=DataConfig(max_prompt_tokens=64),
        rollout=RolloutConfig(max_response_tokens=192, num_prompts=16, num_samples=8),
        algorithm=AlgorithmConfig(updates_per_step=1),
        train=TrainConfig(),
    )
    assert config.row_tokens == 256
    assert dataclasses.astuple(step_shape(config)) == (1, 16, 8, 256)
    assert step_shape_of(2, config=config) == (1, 11, 2, 1664)
    assert step_shape_of(1, config=config) == (1, 16, 1, 2048)
    assert step_shape_of(4, config=config) == (1, 16, 4, 512)
    apart = dataclasses.replace(config, train=TrainConfig(share_prompts=False))
    assert step_shape_of(2, config=apart) == (1, 16, 8, 256)
    given = dataclasses.replace(config, train=TrainConfig(row_tokens=512))
    assert step_shape_of(2, config=given) == (1, 8, 8, 512)
    # Two roles with other numbers of devices, and stages: every device has a row, stages keep theirs.
    meshes = [
        abstract_mesh(ParallelLayout.from_config(LayoutConfig(train=train)))
        for train in ("1-1-2", "1-1-4", "2-1-1")
    ]
    assert step_shape(config, meshes[:2]).rows == 4
    assert step_shape(config, meshes).rows == 8


def test_auto_rows_hold_the_longest_sequence():
    config = Config(
        data=DataConfig(max_prompt_tokens=1000), rollout=RolloutConfig(max_response_tokens=3100)
    )
    assert config.row_tokens == 4160
    assert step_shape_of(1, config=config)[2:] == (8, 4160)


@pytest.mark.parametrize(("replicas", "prompts"), [(1, 32), (3, 33), (32, 32), (224, 224)])
def test_a_prefill_has_a_multiple_of_the_replicas(replicas, prompts):
    config = Config(rollout=RolloutConfig(slots=448, prefill_prompts=32))
    sizes = engine_config(config, (1,), prompts_per_batch=512, replicas=replicas)
    assert sizes.prefill_prompts == prompts
