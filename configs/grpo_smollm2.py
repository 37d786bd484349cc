"""GRPO on two CPU cores: SmolLM2-135M-Instruct, a real chat model, learns to answer word problems.

    make demo-lm
    python launch/train.py --config configs/grpo_smollm2.py
"""

from jaxrl.config.config_tree import to_config_dict
from jaxrl.config.schema import Config

PROBLEMS = "jaxrl.data.word_problems:make"


def get_config():
    config = to_config_dict(Config())
    config.name = "grpo_smollm2"
    config.hardware = "two CPU cores, 6 GB of memory"
    config.weights = "/tmp/lm/hf"

    config.data.train.path = PROBLEMS
    config.data.train.seed = 1
    config.data.train.source = "word_problems"
    config.data.evaluation.path = PROBLEMS
    config.data.evaluation.seed = 2
    config.data.evaluation.size = 64
    config.data.evaluation.source = "word_problems"
    config.data.chat = True
    config.data.system_prompt = "Reply with the number only."
    config.data.max_prompt_tokens = 64
    config.reward.grader = "regex"
    config.reward.grader_options = {"pattern": r"-?\d+"}
    config.reward.grader_workers = 1
    config.reward.overlong_buffer_tokens = 0

    config.algorithm.dataflow = "grpo"
    config.algorithm.updates_per_step = 1
    config.rollout.num_prompts = 8
    config.rollout.num_samples = 8
    config.rollout.max_response_tokens = 12
    config.rollout.slots = 64
    config.rollout.prefill_prompts = 8
    config.rollout.tokens_per_dispatch = 4

    config.train.rows = 2
    config.train.row_tokens = 160
    config.train.logprob_chunk_tokens = 160
    config.optim.lr = 1e-5
    config.optim.lr_warmup_steps = 3
    config.optim.weight_decay = 0.0

    config.evaluation.every = 10
    config.evaluation.num_samples = 4
    config.run.num_steps = 30
    config.run.save_every = 30
    config.run.rollouts_every = 10
    return config.lock()
