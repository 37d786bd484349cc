"""GRPO on gpt-oss-20b and GSM8K: 32 experts, sinks, layers with and without a window of 128 tokens.

    python launch/train.py --config configs/grpo_gpt_oss_20b.py
    python launch/plan.py --config configs/grpo_gpt_oss_20b.py --topology h100:2x8    # does it fit?

Hardware: 16 accelerators of 80 GB or more. Hours: not measured. Score to expect: not run by us. Model and
data are fetched from the hub (docs/models.md), as for configs/grpo_qwen05b_gsm8k.py.
"""

import pathlib

from jaxrl.config.command_line import load_recipe
from jaxrl.models.shapes import model_shapes


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "grpo_qwen3_8b.py")
    config.name = "grpo_gpt_oss_20b"
    config.weights = "openai/gpt-oss-20b"
    config.model = model_shapes("gpt-oss-20b")
    config.tokenizer.path = "openai/gpt-oss-20b"
    # A replica has 4 of the 32 experts.
    config.mesh.train = "1-1-16"
    config.mesh.generate = "1-1-1-16"
    config.mesh.expert = 8
    config.mesh.fsdp = 2
    config.rollout.slots = 16 * 64
    config.train.rows = 16
    return config
