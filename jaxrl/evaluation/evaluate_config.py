"""Settings of an evaluation without a training config."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jaxrl.checks import NAME, PATH, PROSE, SEED, at_least, between, count, settings, token_count
from jaxrl.data.data_config import MAX_ROWS
from jaxrl.data.records import MAX_TASK_SEED
from jaxrl.errors import UserError
from jaxrl.mesh.hosts import HostsConfig
from jaxrl.rewards.reward_config import MAX_GRADER_WORKERS, SandboxChoice
from jaxrl.rollout.sampling import GREEDY_OR_TEMPERATURE, MIN_P, TOP_K, TOP_P
from jaxrl.rollout.settings import EngineSettings

NO_ENVIRONMENT = "none"
"""The value of `environment` that disables the environment of a run."""


@settings
class EvaluateConfig(EngineSettings):
    """Settings of an evaluation. Those of the engine are inherited from `EngineSettings`.

    Attributes:
      model: Hugging Face directory, or folder of a run.
      sets: files of problems, in any format of docs/data.md. A set has the name of its file without the
        extension.
      tasks: names of generated tasks: data sets of reasoning-gym ("countdown"), or functions that make
        problems ("file.py:make"). A set has the name of its task.
      task_options: options of the tasks, such as {"max_terms": 3}. A task that a run was evaluated on has the
        run's options by default. Without sets and tasks a run answers its own evaluation problems.
      task_seed: seed of the tasks. The recipes here train on seed 1 and evaluate on seed 2.
      out: folder of samples and results; "" derives evaluations/<name> from the model and the settings.
      n: number of answers per problem.
      temperature: sampling temperature; 0 is greedy.
      top_p, top_k, min_p: limits of the tokens to sample from, as in `rollout.sampling.Truncation`.
      seed: seed of the samples.
      grader, grader_options: grader of the answers, as in `reward` of a training config. "" uses that of a
        run's training, else "answer".
      grader_workers, code_sandbox: grading, as in `reward` of a training config.
      template: text around each problem, with "{prompt}" in place of the problem. "" uses the template that a
        run was trained with, else that of the file, else the problem alone.
      chat: whether to apply the tokenizer's chat template. It is always applied for a run that was trained
        with it.
      prompt_field, answer_field: field names in the files; "" detects them.
      limit: number of problems per set, from the beginning; 0 takes all problems of
        a file, 100 of a task, and as many of a run's own problems as it evaluates.
      max_prompt_tokens: maximum length of a prompt; 0 means the longest prompt.
      max_response_tokens: maximum length of a response; 0 means the rest of the model's context, at most
        8,192, or for a run the length that it was trained with.
      stop_strings: texts that end an answer or a turn. A run uses those of its training by default.
      environment: environment that answers a finished turn, as in `rollout` of a training config. "" uses
        that of a run's training, "none" disables it.
      dtype: data type of weights and activations. "auto" uses the sampling type of a run, else float32 on CPU
        (where bfloat16 is slower) and bfloat16 on accelerators.
      overlong: treatment of prompts that are too long, as in `data.overlong`.
      tokens: whether to save each token with its log-probability.
      mesh: layout "p-t-d" on the first devices; with several processes it must use all devices.
      hosts: processes of the evaluation, as in a training config.
    """

    model: Annotated[str, PATH]
    sets: tuple[Annotated[str, PATH], ...] = ()
    tasks: tuple[Annotated[str, PATH], ...] = ()
    task_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    task_seed: Annotated[int, between(0, MAX_TASK_SEED)] = 2
    out: Annotated[str, PATH] = ""
    n: Annotated[int, count(1)] = 1
    temperature: Annotated[float, GREEDY_OR_TEMPERATURE] = 1.0
    top_p: Annotated[float, TOP_P] = 1.0
    top_k: Annotated[int, TOP_K] = 0
    min_p: Annotated[float, MIN_P] = 0.0
    seed: Annotated[int, SEED] = 0
    grader: Annotated[str, PATH] = ""
    grader_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    grader_workers: Annotated[int, between(0, MAX_GRADER_WORKERS)] = 0
    template: Annotated[str, PROSE] = ""
    code_sandbox: SandboxChoice = "auto"
    chat: bool = False
    prompt_field: Annotated[str, NAME] = ""
    answer_field: Annotated[str, NAME] = ""
    limit: Annotated[int, at_least(0, at_most=MAX_ROWS)] = 0
    max_prompt_tokens: Annotated[int, token_count(0)] = 0
    max_response_tokens: Annotated[int, token_count(0)] = 0
    overlong: Literal["error", "drop", "left", "right", "middle"] = "error"
    tokens: bool = False
    slots: Annotated[int, count(1)] = 64
    prefill_prompts: Annotated[int, count(1)] = 8
    prefill_chunk_tokens: Annotated[int, token_count(0)] = 2048
    # Wider than the type in EngineSettings: "auto" is resolved when model and devices are known.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # pyright: ignore
    mesh: str = "1-1-1"
    stop_strings: tuple[Annotated[str, PROSE], ...] = ()
    environment: Annotated[str, PATH] = ""
    hosts: HostsConfig = dataclasses.field(default_factory=HostsConfig)

    def __post_init__(self):
        super().__post_init__()
        if "" in self.stop_strings:
            raise UserError("a --stop is empty, which would end every answer at once; drop it")
