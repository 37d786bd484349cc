"""RLOO on two CPU cores: each answer against the mean of the others, one update per step.

    python launch/train.py --config configs/rloo_tiny.py

Hardware: any two cores; about three minutes after the demo's SFT stage. Scores: docs/algorithms.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "shared/tiny.py")
    config.name = "rloo_tiny"
    config.algorithm.dataflow = "grpo"
    config.algorithm.advantage = "rloo"
    config.algorithm.loss = "policy_gradient"
    config.algorithm.loss_options = {}
    config.algorithm.updates_per_step = 1
    config.optim.lr = 1e-3
    return config
