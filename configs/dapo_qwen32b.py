"""DAPO on Qwen2.5-32B: the recipe of the paper (arXiv 2503.14476), as verl runs it.

    python launch/train.py --config configs/dapo_qwen32b.py
    python launch/train.py --config configs/dapo_qwen32b.py --dry_run   # on any laptop: what would it take?

Hardware: 128 devices of 80 GB or more, such as 16 x 8 H100 or a TPU v5p-256 (128 chips of 95 GB). Compiled
ahead of time for that TPU, its programs need at most 40 GB of a device in learning and 56 GB in sampling;
nothing was compiled for 128 GPUs. Hours: not known.

Files, relative to where the command is run:

    models/Qwen2.5-32B/        of the base model: config.json, *.safetensors (with their index),
                               tokenizer.json, tokenizer_config.json
    data/dapo_math_17k.jsonl   DAPO-Math-17k, a line {"problem": "In triangle ...", "answer": "34"} for each
                               problem, without a prompt template; or as published, with
                               --config.data.train.path=data/dapo-math-17k.parquet
    data/aime_2024.jsonl       AIME 2024, 30 lines of the same fields; published Parquet does as well

Score to expect: the paper has 50 on AIME 2024 (avg@32), with half the training steps of
DeepSeek-R1-Zero-Qwen-32B, which has 47; verl reports 52. WE HAVE NOT RUN THIS; these are their numbers.

What verl's script sets and jaxrl has no setting for, or a different one:

    gpu_memory_utilization .8     rollout.slots, whose cache is as long as the longest running sample
    chunked prefill               rollout.prefill_chunk_tokens, not set: prompts are short
    parameter, optimizer offload  mesh.offload_training_state, not set: both are spread out, 3 GB a device
    ulysses sequence parallel 8   mesh.context would be the counterpart; rows fit without
    dynamic batch sizes           rows of a fixed length are packed instead, so nothing compiles twice
    remove_padding                the same packing
    total_epochs 1                run.num_steps; its 400 are our choice, the paper has no number. verl's file
                                  repeats every problem 100 times, so its epoch is longer than the run

The paper warms up over 20 rollout steps, verl over 10 as here; here the first step already trains, at a
tenth of the rate. Dual clip, weight decay and gradient clip are verl's, not the paper's.
"""

from jaxrl.config.config_tree import to_config_dict
from jaxrl.config.schema import Config
from jaxrl.models.shapes import model_shapes

_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    '{prompt}\n\nRemember to put your answer on its own line after "Answer:".'
)


def get_config():
    config = to_config_dict(Config())
    config.name = "dapo_qwen32b"
    config.hardware = "128 devices of 80 GB or more: 16 x 8 H100, or TPU v5p-256"
    config.weights = "models/Qwen2.5-32B"
    config.tokenizer.path = "models/Qwen2.5-32B"

    config.data.train.source = "math_dapo"
    config.data.train.path = "data/dapo_math_17k.jsonl"
    config.data.evaluation.source = "aime_2024"
    config.data.evaluation.path = "data/aime_2024.jsonl"
    config.data.template = _TEMPLATE
    config.data.chat = True
    config.data.max_prompt_tokens = 2048
    config.data.overlong = "left"

    # The checkpoint and the tokenizer say both; these are for planning without them.
    config.model = model_shapes("qwen2.5-32b")
    config.model.num_tokens = 151_665

    # Weights and moments in float32 over t x fsdp = 128 devices: 3 GB each. Generation in bfloat16 over
    # t_g = 4: 16 GB, which leaves more for the cache than t_g = 2 with 33 GB would.
    config.mesh.train = "1-8-16"
    config.mesh.generate = "1-4-2-16"
    config.mesh.fsdp = 16

    config.rollout.num_prompts = 512
    config.rollout.num_samples = 16
    config.rollout.generation_prompts = 3 * 512
    config.rollout.max_generation_batches = 10
    # Lmax 16384 and Lcache 4096 in the paper.
    config.rollout.max_response_tokens = 16_384 + 4096
    config.rollout.temperature = 1.0
    # 12 slots on each of the 32 replicas: 1.5 GB of cache for one of full length, and moving to a longer
    # cache holds both for a moment.
    config.rollout.slots = 32 * 12
    config.rollout.prefill_prompts = 32
    config.rollout.tokens_per_dispatch = 64
    config.rollout.dtype = "bfloat16"

    config.reward.grader = "answer"
    config.reward.overlong_buffer_tokens = 4096
    config.reward.overlong_penalty = 1.0

    config.algorithm.loss_options.clip_low = 0.2
    config.algorithm.loss_options.clip_high = 0.28
    config.algorithm.loss_options.dual_clip = 10.0
    config.algorithm.advantage_options.normalize_std = True
    config.algorithm.updates_per_step = 16

    # One row for each of the 16 replicas, as long as the longest sequence.
    config.train.rows = 16
    config.train.row_tokens = 2048 + 16_384 + 4096
    # A minibatch is 7 to 8 microbatches: in order 94% of their places would be used, so 99%.
    config.train.fill_minibatches = True
    config.train.logprob_chunk_tokens = 2048
    config.train.dtype = "bfloat16"
    config.train.remat = "full"

    config.optim.lr = 1e-6
    config.optim.lr_warmup_steps = 10
    config.optim.lr_decay_steps = 0
    config.optim.beta1 = 0.9
    config.optim.beta2 = 0.999
    config.optim.weight_decay = 0.1
    config.optim.grad_clip = 1.0

    config.evaluation.every = 5
    config.evaluation.num_samples = 32
    config.evaluation.temperature = 1.0
    config.evaluation.top_p = 0.7

    config.run.num_steps = 400
    config.run.save_every = 5
    return config.lock()
