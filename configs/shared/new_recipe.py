"""NEW_RECIPE: GRPO on problems with answers, from an instruction-tuned model.

    jaxrl train --config NEW_RECIPE.py --dry_run     # checks it, and prints the cost of a step
    jaxrl train --config NEW_RECIPE.py

Every setting: `jaxrl train --help`, or one group of them: `jaxrl train --help rollout`.
"""

from jaxrl.config.config_tree import to_config_dict
from jaxrl.config.schema import Config
from jaxrl.models.shapes import model_shapes


def get_config():
    config = to_config_dict(Config())
    # Results go to runs/NEW_RECIPE/.
    config.name = "NEW_RECIPE"

    # The model: a directory with safetensors, or a name on the Hugging Face hub. Its shape comes with it; the
    # third line is for a dry run, which fetches nothing. Leave it out with other weights.
    config.weights = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.tokenizer.path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.model = model_shapes("smollm2-135m")

    # The problems: JSONL, Parquet or Arrow, a data set on the hub ("openai/gsm8k:main"), or a function that
    # makes them, such as these sums in words. Of a file, fields named question, problem or prompt, and answer
    # or solution, are recognised; data.train.fields names others.
    config.data.train.path = "shared/word_problems.py:make"
    config.data.train.source = "word_problems"
    config.data.train.seed = 1
    config.data.evaluation.path = "shared/word_problems.py:make"
    config.data.evaluation.source = "word_problems"
    config.data.evaluation.seed = 2
    config.data.evaluation.size = 64
    # Prompts go through the model's chat template. data.template is text of yours around "{prompt}".
    config.data.chat = True
    config.data.system_prompt = "Answer in one short sentence."
    config.data.max_prompt_tokens = 64

    # The reward: the grader's verdict, here whether the last number is the answer. docs/rewards.md lists the
    # graders and what each reads, and shows functions of your own:
    # config.reward.functions = {"short": {"path": "my_rewards.py:short", "weight": 0.5}}
    config.reward.grader = "regex"
    config.reward.grader_options = {"pattern": r"-?\d+"}
    config.reward.overlong_buffer_tokens = 0

    # A step: 8 prompts, 8 answers to each, one update.
    config.algorithm.dataflow = "grpo"
    config.algorithm.updates_per_step = 1
    config.rollout.num_prompts = 8
    config.rollout.num_samples = 8
    config.rollout.slots = 64
    config.rollout.prefill_prompts = 8
    config.rollout.max_response_tokens = 16
    # An answer ends after its first sentence.
    config.rollout.stop_strings = (".",)
    # Packed rows hold several samples; rows x row_tokens is what a forward pass takes at once.
    config.train.rows = 2
    config.train.row_tokens = 192

    # The default of 1e-6 suits 32B parameters and thousands of steps: docs/tutorial.md has a table by size.
    config.optim.lr = 3e-5
    config.optim.lr_warmup_steps = 3
    # Without a decay, accuracy on these problems falls again after step 18.
    config.optim.lr_decay_steps = 24
    config.optim.lr_final = 0.1

    # The mesh: one device needs no settings. docs/mesh.md has more.
    config.evaluation.every = 6
    config.run.num_steps = 24
    config.run.save_every = 24
    return config.lock()
