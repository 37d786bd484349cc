"""Settings of sampling training data; those of the engine are in `settings.py`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxrl.checks import (
    MAX_VOCABULARY,
    PATH,
    PROSE,
    at_least,
    between,
    coefficient,
    count,
    positive,
    token_count,
)
from jaxrl.errors import UserError
from jaxrl.rollout.sampling import MIN_P, REPETITION_PENALTY, TEMPERATURE, TOP_K, TOP_P
from jaxrl.rollout.settings import EngineSettings


@dataclasses.dataclass(frozen=True)
class RolloutConfig(EngineSettings):
    """Sampling of training data, and the engine that does it, whose settings come first.

    Attributes:
      slots: as of `EngineSettings`; "auto" takes as many as fit into `memory_fraction`.
      memory_fraction: share of a device's memory that sampling may take, weights of all roles included.
      num_prompts: prompts of a step.
      num_samples: G, answers to each.
      generation_prompts: prompts of one generation batch; more than `num_prompts` over-samples.
      max_generation_batches: how many of these a step may take to find enough groups; 0 as many as it takes.
      keep_groups: what dynamic sampling keeps, groups with right and wrong answers ("correctness") or whose
        scores differ ("score"), as rewards without right and wrong need it.
      min_spread: of the latter, how far apart a group's best and worst score must be, and more.
      if_too_few: after the last of these batches, end the run ("error") or complete the step with groups that
        were dropped ("fill").
      max_response_tokens: limit of a response, end-of-sequence included.
      temperature: divides the logits, in sampling and in training.
      top_k, top_p, min_p, min_response_tokens, repetition_penalty: which tokens may be drawn, as of
        `rollout.sampling.Truncation`. Training keeps the probabilities of the whole distribution.
      stop_ids: tokens that end a response besides the tokenizer's own.
      stop_strings: texts that do.
      environment: "path/to/file.py:function" or "package.module:function", called with a
        `rollout.environment.Turn` and the tokenizer whenever a response ends by itself; it returns token ids
        to append, or None. "" has none.
      partial: a step ends once its buffer of groups is full; what is unfinished goes on in the next.
      driver: a name of `rollout.drivers.DRIVERS`: "offline", or "jetstream" for that package's orchestrator
        (extra `jetstream`; one process); or a function that builds a backend, "package.module:function".
    """

    # Wider than the engine's own, which is made when the number is known.
    slots: Annotated[int, count(1)] | Literal["auto"] = 256  # pyright: ignore
    memory_fraction: Annotated[float, positive(at_most=1)] = 0.9
    num_prompts: Annotated[int, count(1)] = 32
    num_samples: Annotated[int, count(1)] = 8
    generation_prompts: Annotated[int, count(1)] = 48
    max_generation_batches: Annotated[int, between(0, 10_000)] = 10
    keep_groups: Literal["correctness", "score"] = "correctness"
    min_spread: Annotated[float, coefficient()] = 0.0
    if_too_few: Literal["error", "fill"] = "error"
    max_response_tokens: Annotated[int, token_count(1)] = 64
    temperature: Annotated[float, TEMPERATURE] = 1.0
    top_k: Annotated[int, TOP_K] = 0
    top_p: Annotated[float, TOP_P] = 1.0
    min_p: Annotated[float, MIN_P] = 0.0
    min_response_tokens: Annotated[int, token_count(0)] = 0
    repetition_penalty: Annotated[float, REPETITION_PENALTY] = 1.0
    stop_ids: tuple[Annotated[int, at_least(0, at_most=MAX_VOCABULARY)], ...] = ()
    stop_strings: tuple[Annotated[str, PROSE], ...] = ()
    environment: Annotated[str, PATH] = ""
    partial: bool = False
    driver: Annotated[str, PATH] = "offline"

    def __post_init__(self):
        super().__post_init__()
        if self.min_response_tokens >= self.max_response_tokens:
            raise ValueError(
                f"min_response_tokens {self.min_response_tokens} leaves no room below max_response_tokens "
                f"{self.max_response_tokens}, and every response would be cut; make it smaller"
            )
        if not self.max_generation_batches and self.if_too_few == "fill":
            raise ValueError(
                "if_too_few 'fill' completes a step after its last generation batch, and "
                "max_generation_batches 0 says that there is no last one; set it to 1 or more, or if_too_few "
                "to error"
            )
        if "" in self.stop_strings:
            raise ValueError(
                "a stop string is empty, which would end every response at once; drop it"
            )

    def check_partial(self, dataflow: str, *, dynamic_sampling: bool, one_step_off: bool) -> None:
        """Raises UserError if steps that end early have nothing to end on, or another way to overlap.

        Args:
          dataflow: its name.
          dynamic_sampling: its steps are full when enough groups are mixed.
          one_step_off: it samples the next step while this one learns.
        """
        if self.partial and not dynamic_sampling:
            raise UserError(
                f"rollout.partial ends a step when it has enough groups, and dataflow {dataflow!r} takes "
                "what it gets; use dataflow dapo, or rollout.partial=False"
            )
        if self.partial and one_step_off:
            raise UserError(
                "rollout.partial and algorithm.one_step_off are two ways to keep the devices busy while long "
                "samples end, and do not go together; choose one"
            )
