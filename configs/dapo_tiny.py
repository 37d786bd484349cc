"""DAPO on two CPU cores: a model of 0.6 million parameters learns to work out integer sums.

    python launch/train.py --config configs/dapo_tiny.py

Hardware: any two cores, 2 GB of memory, no accelerator; about three minutes. Score to expect: held-out
accuracy (avg@8, temperature 1) from 40 to 50% after SFT to 80% and more; benchmarks/results/
has the record of three seeds.
"""

from jaxrl.config.config_tree import to_config_dict
from jaxrl.config.schema import Config


def get_config():
    config = to_config_dict(Config())
    config.name = "dapo_tiny"

    # Sums of three one-digit numbers, for instance "5 + 9 - 7 =": two written steps.
    for split, seed, size in ((config.data.train, 1, 20_000), (config.data.evaluation, 2, 128)):
        split.path = "shared/worked_sums.py:make"
        split.source = "chain_sum"
        split.seed = seed
        split.size = size
        split.options = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    config.data.template = "{prompt}\n"
    config.data.max_prompt_tokens = 32

    # Qwen2's architecture, 0.6 million parameters.
    config.model.vocab_size = 320
    config.model.num_layers = 3
    config.model.d_model = 128
    config.model.d_ff = 384
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_dim = 32

    # Muon needs a third of AdamW's examples. configs/shared/worked_sums.py writes the solutions.
    config.sft.num_steps = 1250
    config.sft.examples_per_step = 12
    config.sft.save_every = 250
    config.sft.optim.kind = "muon"
    config.sft.optim.lr = 2e-3
    config.sft.optim.lr_warmup_steps = 20
    config.sft.optim.lr_decay_steps = config.sft.get_ref("num_steps")
    config.sft.optim.lr_final = 0.1
    config.sft.optim.weight_decay = 0.01

    # Dynamic sampling: 40 prompts at a time until 24 groups of 8 have both right and wrong answers.
    config.rollout.num_prompts = 24
    config.rollout.num_samples = 8
    config.rollout.generation_prompts = 40
    # Towards the end most prompts are answered all right, and mixed groups are rare.
    config.rollout.max_generation_batches = 20
    config.rollout.max_response_tokens = 48
    # Soft overlong punishment: from 33 tokens on, fully at 48.
    config.reward.overlong_buffer_tokens = 16
    # Clip-higher.
    config.algorithm.loss_options.clip_low = 0.2
    config.algorithm.loss_options.clip_high = 0.28
    config.algorithm.updates_per_step = 4
    config.train.rows = 4
    config.train.row_tokens = 112

    config.optim.lr = 3e-4
    config.optim.lr_warmup_steps = 5
    config.optim.betas = (0.9, 0.98)
    config.optim.weight_decay = 0.01

    config.evaluation.every = 10
    config.evaluation.num_samples = 8
    config.run.num_steps = 40
    config.run.save_every = 10
    return config.lock()
