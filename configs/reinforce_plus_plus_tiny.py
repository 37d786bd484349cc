"""REINFORCE++ on two CPU cores: PPO's clip and KL reward, and the batch as the baseline.

    python launch/train.py --config configs/reinforce_plus_plus_tiny.py

Hardware: any two cores; about three minutes after the demo's SFT stage. Scores: docs/algorithms.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "shared/tiny.py")
    config.name = "reinforce_plus_plus_tiny"
    config.algorithm.dataflow = "grpo"
    config.rollout.num_prompts = 192
    config.rollout.num_samples = 1
    config.algorithm.advantage = "reinforce_plus_plus"
    config.algorithm.kl.reward_coef = 0.001
    return config
