"""Score heads in place of the unembedding: scores of reward and cost models, values of critics."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl.models.decoder import Params
from jaxrl.models.model_config import ModelConfig


def score_config(config: ModelConfig, *, num_scores: int = 1) -> ModelConfig:
    """The model of `config` with scores instead of logits."""
    return dataclasses.replace(config, num_scores=num_scores)


def score_params(params: Params, config: ModelConfig) -> Params:
    """Weights of a critic or reward model, initialised from a language model.

    The trunk is taken over, and the head is 0. So a fresh critic predicts 0 everywhere, and its first
    gradient reaches only the head.

    Args:
      params: weights of a language model, such as an actor's.
      config: config of the new model, see `score_config`.
    """
    trunk = {name: leaf for name, leaf in params.items() if name != "unembedding"}
    return trunk | {"score_head": jnp.zeros((config.d_model, config.num_scores), jnp.float32)}


def last_scores(scores_BTS: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """The scores at the last token of every segment, 0 elsewhere: the scores of whole sequences.

    Args:
      scores_BTS: scores of every token.
      segment_ids_BT: int32; 0 is padding.

    Returns:
      [B, T, S]; entry t holds the scores of the sequence that ends with token t.
    """
    after_BT = jnp.pad(segment_ids_BT[:, 1:], ((0, 0), (0, 1)))
    last_BT = (segment_ids_BT > 0) & (segment_ids_BT != after_BT)
    return jnp.where(last_BT[..., None], scores_BTS, 0.0)


def values_before(value_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Shifts scores to values of the state before each token: entry t is the score after token t - 1.

    Example, one segment of four tokens: scores [a b c d] become values [0 a b c].

    Args:
      value_BT: score after every token.
      segment_ids_BT: int32; 0 is padding.

    Returns:
      [B, T]; 0 at a segment's first token and on padding.
    """
    before_BT = jnp.pad(segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
    shifted_BT = jnp.pad(value_BT[:, :-1], ((0, 0), (1, 0)))
    return jnp.where((segment_ids_BT > 0) & (segment_ids_BT == before_BT), shifted_BT, 0.0)
