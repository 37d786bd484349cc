"""DAPO on Qwen3-30B-A3B: each layer has 128 experts and uses 8 of them per token.

    python launch/train.py --config configs/dapo_qwen3_30b_a3b.py
    python launch/plan.py --config configs/dapo_qwen3_30b_a3b.py --topology h100:4x8    # does it fit?

Hardware: 32 accelerators of 80 GB (h100:4x8). Compiled ahead of time, sampling takes 76 of 85 GB, the
update 32. Hours: not measured. Score to expect: not run by us. Model and data are fetched from the hub
(docs/models.md), as for configs/dapo_qwen32b.py.
"""

import pathlib

from jaxrl.config.command_line import load_recipe
from jaxrl.models.shapes import model_shapes


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "dapo_qwen32b.py")
    config.name = "dapo_qwen3_30b_a3b"
    config.weights = "Qwen/Qwen3-30B-A3B"
    config.tokenizer.path = "Qwen/Qwen3-30B-A3B"
    config.model = model_shapes("qwen3-30b-a3b")
    config.model.num_tokens = 151_669

    # The experts over expert x t, everything else over fsdp x t; four kv heads.
    config.mesh.train = "1-4-8"
    config.mesh.generate = "1-4-1-8"
    config.mesh.fsdp = 2
    config.mesh.expert = 4
    config.rollout.max_response_tokens = 8192
    config.reward.overlong_buffer_tokens = 2048
    config.train.rows = 8
    config.train.row_tokens = 2048 + 8192
    config.train.load_balancing_coef = 0.001
    return config
