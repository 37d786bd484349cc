"""How many of the sampler's tokens the trainer would have drawn, from its own logits and the same noise.

The sampler draws argmax(logits / temperature + noise), and the noise depends only on the key of the sample,
or of an agent's turn, and the position in it (`rollout.sampling`). So the draw can be repeated with the
logits of the trainer. Both agree on all tokens if both compute the same logits; each disagreement is a token
where rounding, or a difference of weights, changed the draw:

    token           17    4     9     23
    sampler drew    17    4     9     23
    trainer draws   17    4     31    23      3 of 4 tokens are the same

B samples   K turns   R rows   T tokens of a row   G devices   C positions of a chunk   V vocabulary
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algos.logprobs import from_past
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.sampling import Truncation, draw, gumbel_noise, sample_keys, turn_seed
from jaxrl.types import Completions, PackedBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """How the sampler drew the tokens of a step: in turns, each with a key. A plain response is one turn.

    Attributes:
      key_K2: uint32, sampling key of each turn.
      sequence_K: int32, `PackedBatch.sequence` of each turn, ascending.
      start_K: int32, number of tokens before each turn, ascending within a sequence.
      truncation: limits on the tokens that could be drawn, as scalars.
    """

    key_K2: jax.Array
    sequence_K: jax.Array
    start_K: jax.Array
    truncation: Truncation


class _Turn(NamedTuple):
    """A row of the arrays of `Draws`, and what its key is made of; see `sample_keys`."""

    sequence: int
    start: int
    step: int
    prompt_id: int
    sample: int


def draws_of(completions: Completions, options: SamplingOptions) -> Draws | None:
    """The draws of a step's completions, sampled with `options`; None with a repetition penalty.

    The penalty needs the tokens before each position, which a packed row does not have at hand.
    """
    if options.truncation.repetition_penalty != 1:
        return None
    prompts, G = completions.prompts, completions.num_samples
    if completions.of_agents is None:
        began = enumerate(zip(completions.prompt_index_B, completions.started_B, strict=True))
        turns = [
            _Turn(b, len(prompts.tokens[n]), int(step), int(prompts.ids_N[n]), b % G)
            for b, (n, step) in began
        ]
    else:
        turns = _of_agents(completions)
    # Plain arrays on the host: every process of a run hands the same ones to its devices.
    sequence_K, start_K, *parts = np.array(turns, np.int32).reshape(-1, len(_Turn._fields)).T
    key_K2 = np.asarray(_keys(options.seed, *parts))
    arrays: Any = {"key_K2": key_K2, "sequence_K": sequence_K, "start_K": start_K}
    return Draws(**arrays, truncation=options.truncation)


def _of_agents(completions: Completions) -> list[_Turn]:
    """The turns of conversations; their number is rounded up, so that few programs are compiled."""
    prompts, agents, B = completions.prompts, completions.of_agents, len(completions)
    assert agents is not None, "only agents have turns"
    rows: list[tuple[int, np.ndarray, np.ndarray]] = []
    for b, n in enumerate(completions.prompt_index_B):
        prompt = prompts.tokens[n]
        mask = np.append(np.zeros(len(prompt)), completions.mask[b])
        rows.append((b, np.append(prompt, completions.tokens[b]), mask))
        rows += [(b + j * B, x.tokens, x.mask) for j, x in enumerate(agents.branches[b], 1)]
    turns = []
    for number, tokens, mask in sorted(rows, key=lambda row: row[0]):
        b = number % B
        prompt_id = int(prompts.ids_N[b // completions.num_samples])
        for start in np.flatnonzero(np.diff(mask, prepend=0) > 0).tolist():
            # As when the turn was sampled: its key follows from the tokens before it.
            seed = turn_seed(prompt_id, b % completions.num_samples, tokens[:start])
            turns.append(_Turn(number, start, int(completions.started_B[b]), seed, 0))
    # They sort behind the turns of every sequence, so the search for a token's turn never ends at one.
    rest = _Turn(np.iinfo(np.int32).max, 0, 0, 0, 0)
    return turns + [rest] * (2 ** len(turns).bit_length() - len(turns))


@jax.jit
def _keys(seed, step_K, prompt_id_K, sample_K) -> jax.Array:
    """Sampling keys, uint32 [K, 2]; samples of one batch may have started in different steps."""
    return jax.vmap(lambda step, *of_sample: sample_keys(seed, step, *of_sample)[0])(
        step_K, prompt_id_K[:, None], sample_K[:, None]
    )


def same_token_fraction(
    logits_of: Callable[[jax.Array, jax.Array], jax.Array],
    hidden_RTD: jax.Array,
    micro: PackedBatch,
    draws: Draws,
    *,
    temperature: float,
    chunk_tokens: int,
    shards: tuple[int, int],
) -> jax.Array:
    """Fraction of the counted tokens (`counted_tokens`) of a microbatch that are drawn again.

    Args:
      logits_of, chunk_tokens, shards: as for `algos.logprobs.token_logprobs`.
      hidden_RTD: last hidden states.
      micro: the microbatch, [R, T] per field, with at least one such token.
      draws: see `Draws`.
      temperature: sampling temperature.
    """
    turn_RT = _turns(draws, micro)
    place_RT = micro.positions - draws.start_K[turn_RT]
    counts_RT = counted_tokens(micro, draws)
    # `from_past` hands a token the hidden state before it, so the token's own noise moves one place back.
    noise_before = (
        jnp.roll(draws.key_K2[turn_RT], -1, axis=1),
        jnp.roll(place_RT, -1, axis=1)[..., None],
    )

    def chunk(past, tokens_GC: jax.Array, needed: jax.Array) -> jax.Array:
        hidden_GCD, (key_GC2, place_GC1) = past
        logits = logits_of(hidden_GCD, needed).astype(jnp.float32) / temperature
        flat_SV = logits.reshape(-1, logits.shape[-1])
        place_S = place_GC1.reshape(-1)
        limits = jax.tree.map(lambda x: jnp.broadcast_to(x, place_S.shape), draws.truncation)
        noise_SV = gumbel_noise(key_GC2.reshape(-1, 2), place_S, flat_SV.shape[-1])
        token_S = draw(flat_SV, noise_SV, limits)
        return (token_S.reshape(tokens_GC.shape) == tokens_GC).astype(jnp.float32)

    same_RT = from_past(
        chunk,
        (hidden_RTD, noise_before),
        micro.tokens,
        micro.segment_ids,
        chunk_tokens=chunk_tokens,
        trained_BT=counts_RT,
        shards=shards,
    )
    return jnp.mean(same_RT, where=counts_RT)


def counted_tokens(batch: PackedBatch, draws: Draws) -> jax.Array:
    """Which tokens are drawn again: the trained ones, bool [.., T].

    Tokens before `Truncation.min_tokens` do not count, because the sampler forbade stop ids there.
    """
    place = batch.positions - draws.start_K[_turns(draws, batch)]
    return (batch.loss_mask > 0) & (place >= draws.truncation.min_tokens)


def _turns(draws: Draws, micro: PackedBatch) -> jax.Array:
    """The turn of every token, int32 [.., T]: the last that begins at or before it; 0 before the first."""
    # Bisection by pairs, because sequence and position together may not fit into 32 bits.
    turn_RT = jnp.zeros_like(micro.sequence)
    for k in reversed(range(len(draws.start_K).bit_length())):
        further = jnp.minimum(turn_RT + 2**k, len(draws.start_K) - 1)
        sequence, start = draws.sequence_K[further], draws.start_K[further]
        same = (sequence == micro.sequence) & (start <= micro.positions)
        turn_RT = jnp.where((sequence < micro.sequence) | same, further, turn_RT)
    return turn_RT
