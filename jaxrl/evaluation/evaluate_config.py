"""Settings of an evaluation without a training config."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jaxrl.checks import NAME, PATH, PROSE, SEED, at_least, between, count, token_count
from jaxrl.data.data_config import MAX_ROWS
from jaxrl.errors import UserError
from jaxrl.mesh.hosts import HostsConfig
from jaxrl.rewards.reward_config import MAX_GRADER_WORKERS
from jaxrl.rewards.sandbox import SandboxChoice
from jaxrl.rollout.sampling import GREEDY_OR_TEMPERATURE, MIN_P, TOP_K, TOP_P
from jaxrl.rollout.settings import EngineSettings

NO_ENVIRONMENT = "none"
"""As `environment`: none, though a run was trained with one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(EngineSettings):
    """An evaluation; its engine's further settings are those of `EngineSettings`.

    Attributes:
      model: Hugging Face directory, or the folder of a run.
      sets: files of problems in any format and layout of docs/data.md; each is called by its name without the
        ending.
      out: folder of samples and results; "" makes a name of the model and of what is asked of it.
      n: answers to each problem.
      temperature: 0 is greedy.
      top_p, top_k, min_p: which tokens may be drawn, as of `rollout.sampling.Truncation`.
      seed: of the samples.
      grader, grader_options, grader_workers, code_sandbox: as of `reward` in a training config.
      template: text around a problem, which stands for "{prompt}"; "" is that of the file's layout or the
        problem alone, and of a run the template that it was trained with.
      chat: send the prompt through the tokenizer's chat template; a run does if it was trained so.
      prompt_field, answer_field: of the files; "" recognises them.
      limit: only the first so many problems of each set; 0 takes all.
      max_prompt_tokens: longest prompt; 0 is the longest there is.
      max_response_tokens: longest response; 0 is what the model's context leaves, up to 8,192.
      stop_strings: texts that end an answer, or a turn of it; of a run by default those it was trained with.
      environment: what answers a finished turn, as of `rollout` in a training config; "" is none, and of a
        run the one it was trained with, unless this is `NO_ENVIRONMENT`.
      dtype: of weights and activations; "auto" is of a run the type that it sampled in, else float32 on CPUs,
        which are slower in bfloat16, and bfloat16 on accelerators.
      overlong: what happens to prompts that are too long, as of `data.overlong`.
      tokens: keep what every token was, with its log-probability.
      mesh: "p-t-d" of the devices, the first of those that are here; of several processes all of them.
      hosts: the processes of the evaluation, as in a training config.
    """

    model: Annotated[str, PATH]
    sets: tuple[Annotated[str, PATH], ...]
    out: Annotated[str, PATH] = ""
    n: Annotated[int, count(1)] = 1
    temperature: Annotated[float, GREEDY_OR_TEMPERATURE] = 1.0
    top_p: Annotated[float, TOP_P] = 1.0
    top_k: Annotated[int, TOP_K] = 0
    min_p: Annotated[float, MIN_P] = 0.0
    seed: Annotated[int, SEED] = 0
    grader: Annotated[str, PATH] = "answer"
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
    # Wider than the engine's own, which is made when model and devices are known.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # pyright: ignore
    mesh: str = "1-1-1"
    stop_strings: tuple[Annotated[str, PROSE], ...] = ()
    environment: Annotated[str, PATH] = ""
    hosts: HostsConfig = dataclasses.field(default_factory=HostsConfig)

    def __post_init__(self):
        super().__post_init__()
        if "" in self.stop_strings:
            raise UserError("a --stop is empty, which would end every answer at once; drop it")
