"""Supervised fine-tuning on two CPU cores: the demo's small model on worked solutions.

    python launch/train.py --config configs/sft_tiny.py

Hardware: any two cores; two minutes. Score to expect: 48 to 50% of the held-out sums right. This is the
demo's SFT stage alone.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).with_name("dapo_tiny.py"))
    config.name = "sft_tiny"
    config.run.num_steps = 0
    return config
