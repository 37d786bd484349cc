"""Refuses requests that an engine can never serve, before they are queued."""

from __future__ import annotations

import numpy as np

from jaxrl.errors import UserError
from jaxrl.rollout.engine import Engine


def check_request(engine: Engine, prompt: np.ndarray, max_tokens: int) -> None:
    """Raises UserError unless the engine can continue a prompt by `max_tokens` tokens.

    Args:
      engine: the engine.
      prompt: token ids, int [T].
      max_tokens: maximum number of response tokens.
    """
    config, model = engine.config, engine.model
    longest, most = config.max_prompt_tokens, config.max_response_tokens
    vocabulary = model.num_tokens or model.vocab_size
    if not 0 < len(prompt) <= longest:
        raise UserError(
            f"the prompt has {len(prompt)} tokens; this server takes 1 to {longest}: "
            f"{'shorten it' if len(prompt) else 'write one'}"
        )
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        raise UserError(
            f"the prompt has token ids from {prompt.min()} to {prompt.max()}; this model's go from 0 to "
            f"{vocabulary - 1}: use its own tokenizer"
        )
    if not 0 < max_tokens <= most:
        raise UserError(f"max_tokens {max_tokens}: this server gives 1 to {most}; ask for as many")
    if len(prompt) + max_tokens > config.max_context_tokens:
        raise UserError(
            f"{len(prompt)} tokens of the prompt and max_tokens {max_tokens}: this server has room for "
            f"{config.max_context_tokens} together; shorten one of them"
        )
