"""PPO on two CPU cores: the demo's task with a critic, GAE and the KL penalty.

    python launch/train.py --config configs/ppo_tiny.py

Hardware: any two cores; about three minutes after the demo's SFT stage. Scores: docs/algorithms.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "shared/tiny.py")
    config.name = "ppo_tiny"
    config.algorithm.dataflow = "ppo"
    # One answer to each of many prompts: the critic is the baseline.
    config.rollout.num_prompts = 192
    config.rollout.num_samples = 1
    config.algorithm.advantage = "gae"
    config.algorithm.advantage_options = {"gamma": 1.0, "lam": 0.95}
    config.algorithm.whiten = True
    config.algorithm.kl.reward_coef = 0.001
    config.critic.lr = 1e-3
    config.critic.warmup_steps = 2
    return config
