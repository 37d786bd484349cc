"""A small model, prompts and batches for the roles' tests."""

import numpy as np

from jaxrl.models.model_config import ModelConfig
from jaxrl.types import PackedBatch, Prompts, TrainBatch

MODEL = ModelConfig(
    vocab_size=16, num_layers=2, d_model=16, d_ff=16, num_heads=4, num_kv_heads=2, head_dim=8
)


def prompts_of(*tokens, ids=None) -> Prompts:
    """Prompts of these tokens, without texts."""
    blank = ("",) * len(tokens)
    ids_N = np.arange(len(tokens)) if ids is None else np.array(ids)
    return Prompts(ids_N, tuple(np.array(t, np.int32) for t in tokens), blank, blank, blank)


def whole_rows(
    seed: int = 0, *, microbatches: int = 1, rows: int = 8, tokens: int = 8
) -> TrainBatch:
    """Rows of one sequence each, all but the first token trained on."""
    shape = (1, microbatches, rows, tokens)
    token = np.random.default_rng(seed).integers(0, MODEL.vocab_size, shape).astype(np.int32)
    ones = np.ones_like(token)
    positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), shape).copy()
    mask = (positions > 0).astype(np.float32)
    num_micro_U = np.full(1, microbatches, np.int32)
    return TrainBatch.of(PackedBatch(token, positions, ones, ones, mask, num_micro_U=num_micro_U))
