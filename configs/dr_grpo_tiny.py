"""Dr. GRPO on two CPU cores: GRPO without division by the standard deviation or the length.

    python launch/train.py --config configs/dr_grpo_tiny.py

Hardware: any two cores; about three minutes after the demo's SFT stage. Scores: docs/algorithms.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "shared/tiny.py")
    config.name = "dr_grpo_tiny"
    config.algorithm.dataflow = "grpo"
    config.algorithm.advantage_options = {"normalize_std": False}
    config.algorithm.aggregation = "seq-mean-token-sum-norm"
    config.algorithm.aggregation_options = {"scale": 24.0}
    return config
