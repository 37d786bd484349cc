"""DAPO on long answers: a limit cuts a fifth of them, and few groups have right and wrong ones.

    python launch/train.py --config configs/long_answers_tiny.py
    python benchmarks/demo.py --part techniques     # naive GRPO on it, and one technique after the other

Hardware: any CPU core, 2 GB of memory, no accelerator. configs/shared/repeated_sums.py has the problems.
Score to expect: held-out accuracy (avg@4, temperature 1) from 46 to 57% after SFT to 65 to 73%; the table of
techniques is in docs/algorithms.md.
"""

from jaxrl.config.config_tree import to_config_dict
from jaxrl.config.schema import Config


def get_config():
    config = to_config_dict(Config())
    config.name = "long_answers_tiny"
    for split, seed, size in ((config.data.train, 1, 20_000), (config.data.evaluation, 2, 128)):
        split.path = "shared/repeated_sums.py:make"
        split.source = "repeated_sums"
        split.seed = seed
        split.size = size
    config.data.template = "{prompt}\n"
    config.data.max_prompt_tokens = 32

    # Qwen2's architecture, 0.2 million parameters.
    config.model.vocab_size = 320
    config.model.num_layers = 3
    config.model.d_model = 64
    config.model.d_ff = 192
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_dim = 16

    # Solutions beyond the limit of answers are learnt too, up to a row: answers are cut off in their middle.
    config.sft.num_steps = 800
    config.sft.examples_per_step = 12
    config.sft.save_every = 400
    config.sft.optim.kind = "muon"
    config.sft.optim.lr = 4e-3
    config.sft.optim.lr_warmup_steps = 20
    config.sft.optim.lr_decay_steps = config.sft.get_ref("num_steps")
    config.sft.optim.lr_final = 0.1
    config.sft.optim.weight_decay = 0.01

    # Dynamic sampling: 16 prompts at a time until 12 groups of 8 have both right and wrong answers.
    config.rollout.num_prompts = 12
    config.rollout.num_samples = 8
    config.rollout.generation_prompts = 16
    config.rollout.max_generation_batches = 20
    config.rollout.max_response_tokens = 192
    # Soft overlong punishment: from 169 tokens on, fully at 192.
    config.reward.overlong_buffer_tokens = 24
    # Clip-higher.
    config.algorithm.loss_options.clip_low = 0.2
    config.algorithm.loss_options.clip_high = 0.28
    config.algorithm.updates_per_step = 8
    config.train.rows = 3
    config.train.row_tokens = 384

    config.optim.lr = 2e-4
    config.optim.lr_warmup_steps = 5
    config.optim.betas = (0.9, 0.98)
    config.optim.weight_decay = 0.01

    config.evaluation.every = 10
    config.evaluation.num_samples = 4
    config.run.num_steps = 30
    config.run.save_every = 30
    return config.lock()
