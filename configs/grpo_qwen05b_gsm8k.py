"""GRPO on Qwen2.5-0.5B-Instruct and GSM8K: a first real run on one accelerator.

    python launch/train.py --config configs/grpo_qwen05b_gsm8k.py
    python launch/train.py --config configs/grpo_qwen05b_gsm8k.py --dry_run   # what does it take?

Hardware: one accelerator of 24 GB or more (L4, RTX 4090, A100, TPU v6e). Compiled ahead of time for
a TPU, sampling takes 15.6 GB and learning, if layers are computed again (train.remat "full"), 15.0
(benchmarks/results/2026-11-22-compile_ahead.md). Hours and score: not run by us.

Model and data are fetched from the Hugging Face hub (docs/models.md): Qwen/Qwen2.5-0.5B-Instruct, and
openai/gsm8k:main with its splits train and test.
"""

from jaxrl.config.config_tree import to_config_dict
from jaxrl.config.schema import Config
from jaxrl.models.shapes import model_shapes


def get_config():
    config = to_config_dict(Config())
    config.name = "grpo_qwen05b_gsm8k"
    config.weights = "Qwen/Qwen2.5-0.5B-Instruct"
    config.model = model_shapes("qwen2.5-0.5b")
    config.tokenizer.path = "Qwen/Qwen2.5-0.5B-Instruct"

    config.data.train.path = "openai/gsm8k:main"
    config.data.evaluation.path = "openai/gsm8k:main"
    config.data.chat = True
    config.data.template = (
        '{prompt}\nLet\'s think step by step and output the final answer after "####".'
    )
    config.data.max_prompt_tokens = 320
    config.reward.grader = "answer"

    # 64 prompts, 8 answers each, one update of 512 sequences: strictly on policy.
    config.algorithm.dataflow = "grpo"
    config.algorithm.updates_per_step = 1
    config.algorithm.kl.loss_coef = 0.001
    config.algorithm.loss_options.clip_high = 0.2
    config.algorithm.loss_options.dual_clip = 3.0
    config.rollout.num_prompts = 64
    config.rollout.num_samples = 8
    config.rollout.max_response_tokens = 512
    config.rollout.slots = 256
    config.rollout.dtype = "bfloat16"
    config.reward.overlong_buffer_tokens = 0

    config.train.rows = 4
    config.train.row_tokens = 2048
    config.train.logprob_chunk_tokens = 512
    config.train.dtype = "bfloat16"
    config.optim.lr = 1e-6
    config.optim.betas = (0.9, 0.95)
    config.optim.weight_decay = 0.01

    config.evaluation.every = 20
    config.evaluation.num_samples = 1
    config.evaluation.temperature = 0.0
    config.run.num_steps = 200
    config.run.save_every = 20
    return config.lock()
