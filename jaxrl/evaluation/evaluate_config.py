"""Settings of an evaluation without a training config."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jaxrl.checks import NAME, PATH, PROSE, SEED, at_least, between, count, settings, token_count
from jaxrl.data.data_config import MAX_ROWS
from jaxrl.data.records import MAX_TASK_SEED
from jaxrl.errors import UserError
from jaxrl.mesh.hosts import HostsConfig
from jaxrl.rewards.reward_config import MAX_GRADER_WORKERS
from jaxrl.rewards.sandbox import SandboxChoice
from jaxrl.rollout.sampling import GREEDY_OR_TEMPERATURE, MIN_P, TOP_K, TOP_P
from jaxrl.rollout.settings import EngineSettings

NO_ENVIRONMENT = "none"
"""The value of `environment` that disables the environment of a run."""


@settings
class EvaluateConfig(EngineSettings):
    """Settings of an evaluation. Those of the engine are inherited from `EngineSettings`."""

    model: Annotated[str, PATH]
    """Hugging Face directory, or folder of a run."""
    sets: tuple[Annotated[str, PATH], ...] = ()
    """Files of problems, in any format of docs/data.md. A set has the name of its file without
    the extension.
    """
    tasks: tuple[Annotated[str, PATH], ...] = ()
    """Names of generated tasks: data sets of reasoning-gym ("countdown"), or functions that
    make problems ("file.py:make"). A set has the name of its task.
    """
    task_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the tasks, such as {"max_terms": 3}. A task that a run was evaluated on has
    the run's options by default. Without sets and tasks a run answers its own evaluation
    problems.
    """
    task_seed: Annotated[int, between(0, MAX_TASK_SEED)] = 2
    """Seed of the tasks. The recipes here train on seed 1 and evaluate on seed 2."""
    out: Annotated[str, PATH] = ""
    """Folder of samples and results; "" derives evaluations/<name> from the model and the
    settings.
    """
    n: Annotated[int, count(1)] = 1
    """Number of answers per problem."""
    temperature: Annotated[float, GREEDY_OR_TEMPERATURE] = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, TOP_P] = 1.0
    top_k: Annotated[int, TOP_K] = 0
    min_p: Annotated[float, MIN_P] = 0.0
    """Limits of the tokens to sample from, as in `rollout.sampling.Truncation`."""
    seed: Annotated[int, SEED] = 0
    """Seed of the samples."""
    grader: Annotated[str, PATH] = ""
    grader_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Grader of the answers, as in `reward` of a training config. "" uses that of a run's
    training, else "answer".
    """
    grader_workers: Annotated[int, between(0, MAX_GRADER_WORKERS)] = 0
    """Grading, as in `reward` of a training config."""
    template: Annotated[str, PROSE] = ""
    """Text around each problem, with "{prompt}" in place of the problem. "" uses the template
    that a run was trained with, else that of the file, else the problem alone.
    """
    code_sandbox: SandboxChoice = "auto"
    """Grading, as in `reward` of a training config."""
    chat: bool = False
    """Whether to apply the tokenizer's chat template. It is always applied for a run that was
    trained with it.
    """
    prompt_field: Annotated[str, NAME] = ""
    answer_field: Annotated[str, NAME] = ""
    """Field names in the files; "" detects them."""
    limit: Annotated[int, at_least(0, at_most=MAX_ROWS)] = 0
    """Number of problems per set, from the beginning; 0 takes all problems of a file, 100 of a
    task, and as many of a run's own problems as it evaluates.
    """
    max_prompt_tokens: Annotated[int, token_count(0)] = 0
    """Maximum length of a prompt; 0 means the longest prompt."""
    max_response_tokens: Annotated[int, token_count(0)] = 0
    """Maximum length of a response; 0 means the rest of the model's context, at most 8,192, or
    for a run the length that it was trained with.
    """
    overlong: Literal["error", "drop", "left", "right", "middle"] = "error"
    """Treatment of prompts that are too long, as in `data.overlong`."""
    tokens: bool = False
    """Whether to save each token with its log-probability."""
    slots: Annotated[int, count(1)] = 64
    prefill_prompts: Annotated[int, count(1)] = 8
    prefill_chunk_tokens: Annotated[int, token_count(0)] = 2048
    # Wider than the type in EngineSettings: "auto" is resolved when model and devices are known.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # pyright: ignore
    """Data type of weights and activations. "auto" uses the sampling type of a run, else
    float32 on CPU (where bfloat16 is slower) and bfloat16 on accelerators.
    """
    mesh: str = "1-1-1"
    """Layout "p-t-d" on the first devices; with several processes it must use all devices."""
    stop_strings: tuple[Annotated[str, PROSE], ...] = ()
    """Texts that end an answer or a turn. A run uses those of its training by default."""
    environment: Annotated[str, PATH] = ""
    """Environment that answers a finished turn, as in `rollout` of a training config. "" uses
    that of a run's training, "none" disables it.
    """
    hosts: HostsConfig = dataclasses.field(default_factory=HostsConfig)
    """Processes of the evaluation, as in a training config."""

    def __post_init__(self):
        super().__post_init__()
        if "" in self.stop_strings:
            raise UserError("a --stop is empty, which would end every answer at once; drop it")
