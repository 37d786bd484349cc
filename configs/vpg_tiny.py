"""Vanilla policy gradient on two CPU cores: the demo's task with a learned baseline, one update per step.

    python launch/train.py --config configs/vpg_tiny.py

Hardware: any two cores; about three minutes after the demo's SFT stage. Scores: docs/algorithms.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "ppo_tiny.py")
    config.name = "vpg_tiny"
    config.algorithm.dataflow = "vpg"
    # The reward to go less the critic's value, without bootstrapping.
    config.algorithm.advantage_options = {"gamma": 1.0, "lam": 1.0}
    config.algorithm.loss = "policy_gradient"
    config.algorithm.loss_options = {}
    config.algorithm.kl.reward_coef = 0.0
    config.algorithm.updates_per_step = 1
    config.optim.lr = 4e-4
    # A plain regression, several passes over the batch.
    config.critic.clip = float("inf")
    config.critic.epochs = 4
    return config
