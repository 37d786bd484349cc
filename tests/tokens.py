"""Prompts and answers of tokens, without texts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.types import Completions, Prompts


def prompts_of(*tokens, ids=None) -> Prompts:
    """Prompts of these tokens."""
    blank = ("",) * len(tokens)
    ids_N = np.arange(len(tokens)) if ids is None else np.array(ids)
    return Prompts(ids_N, tuple(np.array(t, np.int32) for t in tokens), blank, blank, blank)


def answers_of(
    prompts: Prompts, tokens: Sequence[np.ndarray], logprobs: Sequence[np.ndarray], **others: Any
) -> Completions:
    """Answers to the prompts, equally many to each; entropies are 1, and all have ended."""
    given = {
        "entropy": tuple(np.ones(len(t), np.float32) for t in tokens),
        "truncated_B": np.zeros(len(tokens), bool),
        "texts": ("",) * len(tokens),
    }
    G = len(tokens) // len(prompts)
    logprobs = tuple(logprob.astype(np.float32) for logprob in logprobs)
    return Completions(prompts, G, tuple(tokens), logprobs, **(given | others))
