"""GRPO on Qwen3-8B and GSM8K; all weights are trained.

    python launch/train.py --config configs/grpo_qwen3_8b.py
    python launch/plan.py --config configs/grpo_qwen3_8b.py --topology h100:1x8    # does it fit?

Hardware: 8 accelerators of 80 GB or more (h100:1x8, v5p:2x2x2). Hours: not measured. Score to expect: not
run by us. Model and data are fetched from the hub (docs/models.md), as for configs/grpo_qwen05b_gsm8k.py.
"""

import pathlib

from jaxrl.config.command_line import load_recipe
from jaxrl.models.shapes import model_shapes


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "grpo_qwen05b_gsm8k.py")
    config.name = "grpo_qwen3_8b"
    config.weights = "Qwen/Qwen3-8B"
    config.model = model_shapes("qwen3-8b")
    config.tokenizer.path = "Qwen/Qwen3-8B"

    config.mesh.train = "1-1-8"
    config.mesh.generate = "1-1-1-8"
    config.mesh.fsdp = 8
    config.rollout.num_prompts = 128
    config.rollout.slots = 8 * 128
    config.train.rows = 8
    return config
