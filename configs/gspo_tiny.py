"""GSPO on two CPU cores: GRPO with one ratio per sequence.

    python launch/train.py --config configs/gspo_tiny.py

Hardware: any two cores; about three minutes after the demo's SFT stage. Scores: docs/algorithms.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "shared/tiny.py")
    config.name = "gspo_tiny"
    config.algorithm.dataflow = "grpo"
    config.algorithm.loss = "gspo"
    # Ten times the paper's bounds: its sequences are a hundred times as long.
    config.algorithm.loss_options = {"clip_low": 3e-3, "clip_high": 4e-3}
    config.algorithm.aggregation = "seq-mean-token-mean"
    return config
