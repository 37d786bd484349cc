"""DAPO on Qwen2.5-1.5B and DAPO-Math-17k: the paper's recipe on one accelerator.

    python launch/train.py --config configs/dapo_qwen15b_math.py
    python launch/train.py --config configs/dapo_qwen15b_math.py --dry_run   # what does it take?

Hardware: one accelerator of 80 GB or more (A100, H100, H200, TPU v5p). Compiled ahead of time for a
TPU, sampling takes 46.7 GB and learning, if layers are computed again (train.remat "full"), 41.2
(benchmarks/results/2026-11-22-compile_ahead.md). On one H200 a step of GRPO in this layout, with 131,000
sampled tokens and random weights, took 11.8 s (benchmarks/results/2026-11-26-h200.md). Hours of the whole
run: not measured. Score to expect: not run by us, and there is no published score at these lengths.

Model and data are fetched from the Hugging Face hub (docs/models.md): Qwen/Qwen2.5-1.5B,
BytedTsinghua-SIA/DAPO-Math-17k, BytedTsinghua-SIA/AIME-2024.

Differences from configs/dapo_qwen32b.py: responses of 4,096 tokens, 64 prompts with 8 answers each, and 2
updates per step. So a step takes minutes on one device.
"""

from jaxrl.config.config_tree import to_config_dict
from jaxrl.config.schema import Config
from jaxrl.models.shapes import model_shapes


def get_config():
    config = to_config_dict(Config())
    config.name = "dapo_qwen15b_math"
    config.weights = "Qwen/Qwen2.5-1.5B"
    config.model = model_shapes("qwen2.5-1.5b")
    config.tokenizer.path = "Qwen/Qwen2.5-1.5B"

    config.data.train.path = "BytedTsinghua-SIA/DAPO-Math-17k"
    config.data.evaluation.path = "BytedTsinghua-SIA/AIME-2024"
    config.data.chat = True
    config.data.max_prompt_tokens = 1024
    config.reward.grader = "answer"

    # Dynamic sampling, clip-higher, token-level mean, soft overlong punishment: the defaults are DAPO's.
    config.rollout.num_prompts = 64
    config.rollout.num_samples = 8
    config.rollout.generation_prompts = 96
    config.rollout.max_generation_batches = 10
    config.rollout.max_response_tokens = 4096
    config.rollout.slots = 160
    config.rollout.tokens_per_dispatch = 64
    config.rollout.dtype = "bfloat16"
    config.reward.overlong_buffer_tokens = 1024
    config.algorithm.updates_per_step = 2

    config.train.rows = 1
    config.train.row_tokens = 8192
    config.train.logprob_chunk_tokens = 1024
    config.train.dtype = "bfloat16"
    config.optim.lr = 1e-6
    config.optim.lr_warmup_steps = 10

    config.evaluation.every = 20
    config.evaluation.num_samples = 32
    config.evaluation.top_p = 0.7
    config.run.num_steps = 300
    config.run.save_every = 10
    return config.lock()
