"""REINFORCE on two CPU cores: plain policy gradient on the reward, whitened over the batch.

    python launch/train.py --config configs/reinforce_tiny.py

Hardware: any two cores; about three minutes after the demo's SFT stage. Scores: docs/algorithms.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "shared/tiny.py")
    config.name = "reinforce_tiny"
    config.algorithm.dataflow = "grpo"
    config.rollout.num_prompts = 192
    config.rollout.num_samples = 1
    config.algorithm.advantage = "reinforce_plus_plus"
    config.algorithm.loss = "policy_gradient"
    config.algorithm.loss_options = {}
    config.algorithm.updates_per_step = 1
    config.optim.lr = 1e-3
    return config
