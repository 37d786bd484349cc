"""GRPO on Qwen3.5-9B and GSM8K: three layers of gated delta nets for each with attention.

    python launch/train.py --config configs/grpo_qwen35_9b.py
    python launch/plan.py --config configs/grpo_qwen35_9b.py --topology h100:1x8    # does it fit?

Hardware: 8 accelerators of 80 GB or more. Hours: not measured. Score to expect: not run by us. Model and data
are fetched from the hub (docs/models.md), as for configs/grpo_qwen05b_gsm8k.py.
"""

import pathlib

from jaxrl.config.command_line import load_recipe
from jaxrl.models.shapes import model_shapes


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "grpo_qwen3_8b.py")
    config.name = "grpo_qwen35_9b"
    config.weights = "Qwen/Qwen3.5-9B"
    config.model = model_shapes("qwen3.5-9b")
    config.tokenizer.path = "Qwen/Qwen3.5-9B"
    return config
