"""An agent with a tool on two CPU cores: SmolLM2-135M-Instruct learns to use a calculator.

    python launch/train.py --config configs/calculator_smollm2.py

The agent is configs/shared/calculator.py, written with the openai client. The model's own chat template has
no tools, so configs/shared/chatml_tools.jinja takes its place. Hardware: any two cores, 6 GB of memory, no
accelerator; 15 processor minutes. Score to expect: held-out accuracy (avg@2, temperature 1) from 18-31% to
94% or more after four steps; docs/agents.md has three seeds.
"""

import pathlib

from jaxrl.config.command_line import load_recipe


def get_config():
    config = load_recipe(pathlib.Path(__file__).with_name("grpo_smollm2.py"))
    config.name = "calculator_smollm2"
    config.tokenizer.chat_template = "shared/chatml_tools.jinja"
    for split in (config.data.train, config.data.evaluation):
        split.path = "shared/calculator.py:make"
        split.source = "calculator"
    # The agent writes the messages.
    config.data.chat = False
    config.data.system_prompt = ""
    config.data.max_prompt_tokens = 224
    config.rollout.agent = "shared/calculator.py:agent"
    config.rollout.stop_strings = ()
    config.rollout.max_response_tokens = 96
    # A call has 25 tokens. Pages are copied for every dispatch on CPU, and all prompts begin alike.
    config.rollout.tokens_per_dispatch = 8
    config.rollout.cache = "paged"
    config.rollout.cache_tokens = 10_240
    config.rollout.num_prompts = 4
    config.evaluation.every = 4
    config.run.num_steps = 12
    config.train.rows = 2
    config.train.row_tokens = 768
    return config
