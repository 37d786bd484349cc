"""Settings that cannot work are refused where they are written, with their full names."""

import pytest

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.trainer.cross_checks import check_algorithm


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("algorithm.updates_per_step", "0", "algorithm.updates_per_step 0 is below 1"),
        ("algorithm.updates_per_step", "7", "192 sequences do not divide into"),
        ("algorithm.loss_options.dual_clip", "1.0", "dual_clip 1.0 is not above 1"),
        ("algorithm.loss_options.clip_low", "-0.5", "clip_low -0.5 is below 0"),
        ("rollout.max_generation_batches", "0", "max_generation_batches 0 is below 1"),
        ("rollout.num_samples", "0", "num_samples 0 is below 1"),
        ("rollout.temperature", "0.0", "temperature 0.0 is below 0.01"),
        ("train.row_tokens", "64", "cannot hold the longest sequence"),
        ("train.remat", "some", "'some': expected 'full', 'projections', 'offload' or 'none'"),
        ("train.rows", "0", "train.rows 0 is below 1"),
        ("reward.overlong_buffer_tokens", "48", "leaves nothing unpunished"),
        ("run.num_steps", "0", "run.num_steps 0 is below 1"),
        ("optim.lrr", "1", "near: optim.lr"),
        ("optim.lr", "fast", "optim.lr"),
        ("model.head_dim", "31", "head_dim 31 is odd"),
        ("model.num_kv_heads", "3", "not a multiple of num_kv_heads 3"),
    ],
)
def test_refused(setting, value, message):
    with pytest.raises(UserError) as error:
        check_algorithm(load_config(Config, "configs/dapo_tiny.py", {setting: value}))
    assert message in str(error.value)
