"""DAPO on Qwen2.5-32B: the recipe of the paper (arXiv 2503.14476), as verl runs it.

    python launch/train.py --config configs/dapo_qwen32b.py
    python launch/train.py --config configs/dapo_qwen32b.py --dry_run   # on a laptop: what does it take?
    python launch/plan.py --config configs/dapo_qwen32b.py --topology v5p:4x4x8    # does it fit?

Hardware: one of these. Name it after the file, as in configs/dapo_qwen32b.py:h100-128. The default is the
first.

    v5p-128    TPU v5p:4x4x8, 128 chips of 95 GB
    v6e-256    TPU v6e:16x16, 256 chips of 32 GB
    h100-128   16 hosts x 8 H100 of 80 GB
    h200-64    8 hosts x 8 H200 of 141 GB

The rows of the paper's Table 1 are there too, alone or with the hardware and a comma, as in
configs/dapo_qwen32b.py:h100-128,naive-grpo. Each has the techniques of those above it. The score is the
paper's on AIME 2024:

    naive-grpo                  30   bounds of .2 and .2, mean over answers, no shaping, every group
    overlong-filtering          36   truncated answers are left out of the loss
    clip-higher                 38   an upper bound of .28
    overlong-punishment         41   the soft punishment, in place of the filtering
    without-dynamic-sampling    42   token-level loss, the mean over tokens
    (none of these)             50   dynamic sampling: DAPO

docs/planning.md has the memory of each, compiled ahead of time. On GPUs start with
XLA_PYTHON_CLIENT_MEM_FRACTION=.95, because JAX takes three quarters of the memory by default. Hours: not
known.

Model and data are fetched from the Hugging Face hub (docs/models.md): the base model Qwen/Qwen2.5-32B,
BytedTsinghua-SIA/DAPO-Math-17k, BytedTsinghua-SIA/AIME-2024. Files of your own need the fields "problem"
and "answer" (docs/data.md).

Score to expect: the paper reports 50 on AIME 2024 (avg@32), with half the training steps of
DeepSeek-R1-Zero-Qwen-32B, which has 47; verl reports 52. WE HAVE NOT RUN THIS; these are their numbers.

Settings of verl's script without an equal in jaxrl:

    gpu_memory_utilization .8     rollout.memory_fraction .9; rollout.slots "auto" takes as many as fit
    chunked prefill               only jaxrl serve has it: prompts are short here
    parameter, optimizer offload  mesh.offload_training_state, not set: both are split, 3 GB per device
    ulysses sequence parallel 8   mesh.context is the counterpart; rows fit without it
    dynamic batch sizes           rows of a fixed length are packed instead, so nothing compiles twice
    remove_padding                the same packing
    total_epochs 1                run.num_steps; its 400 are our choice, the paper has no number. verl's file
                                  repeats every problem 100 times, so its epoch is longer than the run

The paper warms up over 20 rollout steps. verl and this recipe use 10, and here the first step already
trains, at a tenth of the rate. Dual clip, weight decay and gradient clip are verl's, not the paper's.
"""

from jaxrl.config.config_tree import to_config_dict
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.models.shapes import model_shapes

_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    '{prompt}\n\nRemember to put your answer on its own line after "Answer:".'
)


# Devices, and number of replicas d of t_g = 8 devices.
_LAYOUTS = {
    "v5p-128": 16,  # TPU v5p:4x4x8, 128 chips of 95 GB
    "v6e-256": 32,  # TPU v6e:16x16, 256 chips of 32 GB
    "h100-128": 16,  # 16 hosts x 8 H100 of 80 GB
    "h200-64": 8,  # 8 hosts x 8 H200 of 141 GB
}
# What each row of Table 1 leaves out besides the rows before it here, from DAPO to naive GRPO.
_LEFT_OUT = {
    "without-dynamic-sampling": {"algorithm.dataflow": "grpo"},
    "overlong-punishment": {"algorithm.aggregation": "seq-mean-token-mean"},
    "clip-higher": {"reward.overlong_buffer_tokens": 0, "reward.mask_truncated": True},
    "overlong-filtering": {"algorithm.loss_options.clip_high": 0.2},
    "naive-grpo": {"reward.mask_truncated": False},
}


def get_config(layout: str = "v5p-128"):
    words = layout.split(",")
    hardware, rows = ([word for word in words if word in names] for names in (_LAYOUTS, _LEFT_OUT))
    if max(len(hardware), len(rows)) > 1 or len(hardware) + len(rows) < len(words):
        raise UserError(
            f"layout {layout!r} is not one of {', '.join(_LAYOUTS)}, nor one of {', '.join(_LEFT_OUT)}, nor "
            "one of each with a comma between them"
        )
    d = _LAYOUTS[hardware[0] if hardware else "v5p-128"]
    config = to_config_dict(Config())
    # Runs of several rows have folders of their own.
    config.name = "_".join(["dapo_qwen32b", *rows]).replace("-", "_")
    config.weights = "Qwen/Qwen2.5-32B"
    config.tokenizer.path = "Qwen/Qwen2.5-32B"

    config.data.train.source = "math_dapo"
    config.data.train.path = "BytedTsinghua-SIA/DAPO-Math-17k"
    config.data.evaluation.source = "aime_2024"
    config.data.evaluation.path = "BytedTsinghua-SIA/AIME-2024"
    config.data.template = _TEMPLATE
    config.data.chat = True
    config.data.max_prompt_tokens = 2048
    config.data.overlong = "left"

    # The checkpoint and the tokenizer have both values; these allow planning without them.
    config.model = model_shapes("qwen2.5-32b")
    config.model.num_tokens = 151_665

    # Weights and moments in float32 over t x fsdp = all devices: 3 GB each of 128. Generation in bfloat16
    # over t_g = 8: 8 GB and one kv head, which leaves more for the cache than t_g = 4 with 16 GB.
    config.mesh.train = f"1-8-{d}"
    config.mesh.generate = f"1-8-1-{d}"
    config.mesh.fsdp = d

    config.rollout.num_prompts = 512
    config.rollout.num_samples = 16
    config.rollout.generation_prompts = 3 * 512
    config.rollout.max_generation_batches = 10
    # Lmax 16384 and Lcache 4096 in the paper.
    config.rollout.max_response_tokens = 16_384 + 4096
    config.rollout.temperature = 1.0
    # Room for a sequence of full length takes .74 GB of a device; pages let three samples share it.
    config.rollout.cache = "paged"
    config.rollout.slots = "auto"
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

    # One row for each of the d replicas, as long as the longest sequence.
    config.train.rows = d
    config.train.row_tokens = 2048 + 16_384 + 4096
    # With 16 rows a minibatch is 7 to 8 microbatches. This fills 99% of their places instead of 94%.
    config.train.fill_minibatches = True
    config.train.logprob_chunk_tokens = 2048
    config.train.dtype = "bfloat16"
    config.train.remat = "full"

    config.optim.lr = 1e-6
    config.optim.lr_warmup_steps = 10
    config.optim.lr_decay_steps = 0
    config.optim.betas = (0.9, 0.999)
    config.optim.weight_decay = 0.1
    config.optim.grad_clip = 1.0

    config.evaluation.every = 5
    config.evaluation.num_samples = 32
    config.evaluation.temperature = 1.0
    config.evaluation.top_p = 0.7

    config.run.num_steps = 400
    config.run.save_every = 5

    less = [*_LEFT_OUT]
    for name in less[: less.index(rows[0]) + 1 if rows else 0]:
        config.update_from_flattened_dict(_LEFT_OUT[name])
    return config.lock()
