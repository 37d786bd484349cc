"""TRPO on two CPU cores: the demo's task with steps of a given KL instead of a learning rate.

    python launch/train.py --config configs/trpo_tiny.py

Hardware: any two cores; an update has about twenty times the operations of vpg_tiny.py's.
Scores: docs/algorithms.md.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "vpg_tiny.py")
    config.name = "trpo_tiny"
    config.algorithm.dataflow = "trpo"
    # The paper's surrogate, without the penalty of its successors.
    config.algorithm.loss = "trpo"
    config.algorithm.loss_options = {"kl_coef": 0.0}
    config.algorithm.trust_region.max_kl = 0.01
    return config
