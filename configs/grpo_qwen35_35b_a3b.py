"""GRPO on Qwen3.5-35B-A3B and GSM8K: gated delta nets, and 256 experts of which a token uses 8.

    python launch/train.py --config configs/grpo_qwen35_35b_a3b.py
    python launch/plan.py --config configs/grpo_qwen35_35b_a3b.py --topology h100:2x8    # does it fit?

Hardware: 16 accelerators of 80 GB or more. Hours: not measured. Score to expect: not run by us. Model and
data are fetched from the hub (docs/models.md), as for configs/grpo_qwen05b_gsm8k.py.
"""

import pathlib

from jaxrl.config.command_line import load_recipe
from jaxrl.models.shapes import model_shapes


def get_config():
    # Its experts lie as those of gpt-oss: a replica has 32 of the 256.
    config = load_recipe(pathlib.Path(__file__).parent / "grpo_gpt_oss_20b.py")
    config.name = "grpo_qwen35_35b_a3b"
    config.weights = "Qwen/Qwen3.5-35B-A3B"
    config.model = model_shapes("qwen3.5-35b-a3b")
    config.tokenizer.path = "Qwen/Qwen3.5-35B-A3B"
    return config
