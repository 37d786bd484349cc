"""GRPO on Qwen2.5-7B-Instruct and GSM8K with low-rank adapters, on one accelerator.

    python launch/train.py --config configs/grpo_qwen7b_lora.py
    python launch/train.py --config configs/grpo_qwen7b_lora.py --dry_run   # what does it take?

Hardware: one accelerator of 40 GB or more (A100, H100, TPU v5p). Compiled ahead of time for a TPU, sampling
takes 24.3 GB and learning 19.9 (benchmarks/results/2026-11-22-compile_ahead.md). Hours: not measured. Score
to expect: not run by us. Training and sampling share one copy of the 15 GB of frozen weights, in bfloat16.
Without the adapters these weights are the reference.

Model and data are fetched from the Hugging Face hub (docs/models.md): Qwen/Qwen2.5-7B-Instruct,
openai/gsm8k:main.
"""

import pathlib

from jaxrl.config.command_line import load_recipe
from jaxrl.models.shapes import model_shapes


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "grpo_qwen05b_gsm8k.py")
    config.name = "grpo_qwen7b_lora"
    config.weights = "Qwen/Qwen2.5-7B-Instruct"
    config.model = model_shapes("qwen2.5-7b")
    config.model.lora.rank = 32
    config.model.lora.alpha = 64.0
    config.tokenizer.path = "Qwen/Qwen2.5-7B-Instruct"
    config.rollout.slots = 128
    config.train.rows = 2
    config.optim.lr = 1e-5
    config.optim.weight_decay = 0.0
    return config
