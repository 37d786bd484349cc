"""DAPO on Qwen2.5-7B: configs/dapo_qwen32b.py at a quarter of its size, on one host of GPUs.

    python launch/train.py --config configs/dapo_qwen7b.py
    python launch/plan.py --config configs/dapo_qwen7b.py --topology h100:1x8    # does it fit?

Hardware: 8 accelerators of 80 GB or more (h100:1x8, v5p:2x2x2). Hours: not measured. Score to expect: not
run by us. Model and data are fetched from the hub (docs/models.md), as for configs/dapo_qwen32b.py.
"""

import pathlib

from jaxrl.config.command_line import load_recipe
from jaxrl.models.shapes import model_shapes


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "dapo_qwen32b.py")
    config.name = "dapo_qwen7b"
    config.weights = "Qwen/Qwen2.5-7B"
    config.tokenizer.path = "Qwen/Qwen2.5-7B"
    config.model = model_shapes("qwen2.5-7b")
    config.model.num_tokens = 151_665

    # Four kv heads: t_g = 4 gives each device one.
    config.mesh.train = "1-4-2"
    config.mesh.generate = "1-4-1-2"
    config.mesh.fsdp = 2
    config.rollout.num_prompts = 128
    config.rollout.generation_prompts = 3 * 128
    config.rollout.max_response_tokens = 8192
    config.rollout.prefill_prompts = 16
    config.reward.overlong_buffer_tokens = 2048
    config.train.rows = 2
    # They follow the lengths and the layout.
    config.train.row_tokens = "auto"
    config.train.logprob_chunk_tokens = "auto"
    return config
