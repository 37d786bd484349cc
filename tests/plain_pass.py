"""What a model says of a prompt and a response in one plain pass, without an engine and its cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl.models.attention import attention
from jaxrl.models.compute import Compute
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.experts import apply_experts_in_tiles
from jaxrl.models.model_config import ModelConfig


@functools.cache
def _forward(model: ModelConfig):
    graph, _, _ = decoder_graph(model)
    compute = Compute(experts=apply_experts_in_tiles)

    @jax.jit
    def run(params, tokens_1S):
        decoder = nnx.merge(graph, jax.tree.map(jnp.asarray, params))

        def attend(q, k, v, *_):
            return attention(q, k, v, jnp.ones_like(tokens_1S)), None

        positions_1S = jnp.arange(tokens_1S.shape[1])[None]
        hidden, *_ = decoder(tokens_1S, positions_1S, attend, compute=compute)
        return decoder.logits(hidden, compute=compute)[0]

    return run


def plain_logits(model: ModelConfig, params, prompt, response, *, longest: int) -> np.ndarray:
    """Logits [len(response), V], row t about response[t]; one program for texts of up to `longest` tokens."""
    padded = np.zeros((1, longest), np.int32)
    whole = np.concatenate([prompt, response])
    padded[0, : len(whole)] = whole
    return np.asarray(_forward(model)(params, padded))[len(prompt) - 1 : len(whole) - 1]


def plain_logprobs(model, params, prompt, response, *, longest: int, temperature: float):
    """Log-probability [len(response)] of each token of the response."""
    logits_TV = plain_logits(model, params, prompt, response, longest=longest) / temperature
    log_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    return log_TV[np.arange(len(response)), response]


def next_logprobs(decoder, tokens) -> jax.Array:
    """[T, V] of a sequence by the model itself, by operations that have gradients."""
    tokens_1T = jnp.asarray(tokens, jnp.int32)[None]
    ones, (_, T) = jnp.ones_like(tokens_1T), tokens_1T.shape

    def attend(q, k, v, kind, _, segments):
        return attention(q, k, v, segments, kind, implementation="xla", block_tokens=T), None

    given = {"compute": Compute(), "per_row": ones, "live_BT": ones > 0}
    found = decoder(tokens_1T, jnp.arange(T)[None], attend, **given)
    return jax.nn.log_softmax(decoder.logits(found.hidden_BTD, compute=Compute())[0])
