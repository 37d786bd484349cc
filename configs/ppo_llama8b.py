"""PPO on Llama-3.1-8B-Instruct and GSM8K: actor, critic and reference of eight billion parameters each.

    python launch/train.py --config configs/ppo_llama8b.py
    python launch/train.py --config configs/ppo_llama8b.py --dry_run   # what does it take?

Hardware: one host of 8 accelerators of 80 GB or more (8 x A100 or H100, TPU v5p-16). Compiled ahead of time
for 8 chips of a TPU v5p, sampling takes 52.9 GB of each and learning 56.4; the critic's update was not
compiled (benchmarks/results/2026-11-22-compile_ahead.md). Two models in training take 16 bytes per
parameter, 257 GB, so one accelerator is too small for full weights; configs/grpo_qwen7b_lora.py fits one.
Hours: not measured. Score to expect: not run by us.

Model and data are fetched from the Hugging Face hub (docs/models.md): meta-llama/Llama-3.1-8B-Instruct, whose
licence must be accepted on its page, and openai/gsm8k:main.
"""

import pathlib

from jaxrl.config.command_line import load_recipe
from jaxrl.models.shapes import model_shapes


def get_config():
    config = load_recipe(pathlib.Path(__file__).parent / "grpo_qwen05b_gsm8k.py")
    config.name = "ppo_llama8b"
    config.weights = "meta-llama/Llama-3.1-8B-Instruct"
    config.model = model_shapes("llama-3.1-8b")
    config.tokenizer.path = "meta-llama/Llama-3.1-8B-Instruct"

    config.mesh.train = "1-1-8"
    config.mesh.generate = "1-1-1-8"
    config.mesh.fsdp = 8

    # One answer to each prompt: the critic is the baseline.
    config.algorithm.dataflow = "ppo"
    config.algorithm.advantage = "gae"
    config.algorithm.advantage_options = {"gamma": 1.0, "lam": 1.0}
    config.algorithm.whiten = True
    config.algorithm.updates_per_step = 4
    config.algorithm.kl.loss_coef = 0.0
    config.algorithm.kl.reward_coef = 0.001
    config.rollout.num_prompts = 1024
    config.rollout.num_samples = 1
    config.rollout.slots = 512
    config.critic.lr = 1e-5
    config.critic.warmup_steps = 0
    config.train.rows = 8
    return config
