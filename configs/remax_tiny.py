"""ReMax on two CPU cores: the greedy answer's reward as the baseline, no critic.

    python launch/train.py --config configs/remax_tiny.py

Hardware: any two cores; about three minutes after the demo's SFT stage. Scores: docs/algorithms.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "shared/tiny.py")
    config.name = "remax_tiny"
    config.algorithm.dataflow = "remax"
    config.rollout.num_prompts = 192
    config.rollout.num_samples = 1
    config.algorithm.advantage = "remax"
    config.algorithm.kl.reward_coef = 0.001
    return config
