"""GRPO on two CPU cores: the demo's task with sequence-level averaging and the KL loss.

    python launch/train.py --config configs/grpo_tiny.py

Hardware: any two cores; about three minutes after the demo's SFT stage. Scores: docs/algorithms.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "shared/tiny.py")
    config.name = "grpo_tiny"
    config.algorithm.dataflow = "grpo"
    config.algorithm.aggregation = "seq-mean-token-mean"
    config.algorithm.kl.loss_coef = 0.001
    return config
