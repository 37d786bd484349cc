"""The assumed work of a step of a config, before any step has run."""

from __future__ import annotations

from jaxrl.config.schema import Config
from jaxrl.dataflows.lookup import find_dataflow
from jaxrl.planner.compiled.programs import StepLoad

# In DAPO's run the mean answer grew to a fifth of the limit.
RESPONSE_SHARE = 0.2
_PROMPT_SHARE = 0.15


def load_of(config: Config, response_tokens: float = 0.0) -> StepLoad:
    """Estimates the work of a step of a config.

    Args:
      config: config of the run.
      response_tokens: mean length of an answer; 0 assumes a fifth of the limit.
    """
    rollout, dataflow = config.rollout, find_dataflow(config.algorithm.dataflow)
    return StepLoad(
        prompts=rollout.generation_prompts if dataflow.dynamic_sampling else rollout.num_prompts,
        samples=rollout.num_samples + dataflow.greedy_baseline,
        kept=rollout.num_prompts * rollout.num_samples,
        prompt_tokens=max(1.0, _PROMPT_SHARE * config.data.max_prompt_tokens),
        response_tokens=response_tokens
        or max(1.0, RESPONSE_SHARE * config.rollout.max_response_tokens),
        truncated=bool(rollout.top_k or rollout.min_p or rollout.top_p < 1)
        or rollout.repetition_penalty != 1,
    )
