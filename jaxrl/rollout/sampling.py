"""Sampling of one token per sequence, with noise that is the same on any hardware and in any order.

A token is drawn by Gumbel-max: argmax(logits / temperature + noise). The noise depends only on (seed, step,
prompt id, sample index, position, token id). It does not depend on slot, batch, mesh or restart. The logits
do depend on these, by rounding. In float32 that changes a token only where two candidates nearly tie; in
bfloat16 it changes many samples (docs/numerics.md).

    S slots   V vocabulary
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algos.logprobs import join_sums
from jaxrl.algos.truncation import Truncation, as_rows, least_before_top_p, total
from jaxrl.checks import MAX_VOCABULARY, at_least, between, check_value, token_count

# Bounds of the temperature: below, logits / temperature overflows float32; above, the draw is uniform.
TEMPERATURE = between(0.01, 100)
GREEDY_OR_TEMPERATURE = between(0.01, 100, or_zero=True)

# Allowed ranges of the fields of `Truncation`.
TOP_K = at_least(0, at_most=MAX_VOCABULARY)
TOP_P = between(0, 1, has_low=False)
MIN_P = between(0, 1, has_high=False)
MIN_TOKENS = token_count(0)
REPETITION_PENALTY = between(0.01, 100)

MOST_TOP_LOGPROBS = 20
"""Number of most probable tokens that a program finds, if any are asked for. It is OpenAI's limit."""

# The logit of a forbidden token. It is finite, because -inf plus noise could become NaN.
_NEVER = -1e30
# Number of candidates tried before the vocabulary is scanned again.
_TRIES = 8


# Most requests to a server have the same limits, and checking them takes a fifth of reading one. Typed, since
# True equals 1 as a key, but is no top_k.
@functools.lru_cache(256, typed=True)
def truncation_of(
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    min_tokens: int = 0,
    repetition_penalty: float = 1.0,
    renormalized: bool = False,
) -> Truncation:
    """Makes one truncation for all slots, by default one that allows every token; scalars on the host.

    Raises:
      UserError: a limit is out of its range.
    """
    check_value("top_k", top_k, Annotated[int, TOP_K])
    check_value("top_p", top_p, Annotated[float, TOP_P])
    check_value("min_p", min_p, Annotated[float, MIN_P])
    check_value("min_tokens", min_tokens, Annotated[int, MIN_TOKENS])
    check_value("repetition_penalty", repetition_penalty, Annotated[float, REPETITION_PENALTY])
    # NumPy scalars, not arrays: options are keys, since samples with equal ones are inserted together.
    scalars: Any = (
        np.int32(top_k),
        np.float32(top_p),
        np.float32(min_p),
        np.int32(min_tokens),
        np.float32(repetition_penalty),
        np.bool_(renormalized),
    )
    return Truncation(*scalars)


class SampleEdits(Protocol):
    """Changes of one sample's logits, made on the host from its tokens; see `SamplingOptions.edits`.

    Attributes:
      error: reason why the sample cannot go on; "" if it can.
    """

    error: str

    @property
    def change(self) -> bool:
        """Whether they change with the next token, so that dispatches decode one."""
        ...

    def add(self, tokens: np.ndarray) -> None:
        """Reads the next tokens of the sample, int32 [R]."""
        ...

    def fill(self, row_V: np.ndarray) -> None:
        """Writes what is added to the logits of the next token into zeros, float32; finite values."""
        ...


class LogitEdits(Protocol):
    """The edits of a request; `bias` has values for some token ids."""

    @property
    def bias(self) -> Mapping[int, float]: ...

    def begin(self) -> SampleEdits:
        """The edits of a sample without tokens."""
        ...


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How samples are drawn. Samples with equal options are inserted in one call.

    Attributes:
      num_samples: number of samples per prompt, G.
      seed, step: parts of the sampling key. With the prompt's id and the sample's index they determine the
        noise of each sample.
      temperature: sampling temperature; 0 is greedy.
      truncation: limits on the tokens that can be drawn, as scalars, and whether log-probabilities are
        renormalised over these tokens.
      stop_strings: texts that end a sample, as a stop id does. Tokens after the stop string are removed.
        Special tokens have no text: `Tokenizer.ids_named_by` finds those that are meant for `stop_ids`.
      stop_ids: token ids that end a sample, besides those of the engine. They are searched on the host, so
        they cost as much as stop strings, and `min_tokens` does not forbid them.
      ignores_stop_ids: whether the stop ids of the engine do not end a sample.
      scores_prompt: whether a live loop reports the log-probabilities of the prompt's tokens.
      budget_tokens: maximum number of tokens that one call adds to a sample, which is then left unfinished; 0
        means no limit.
      edits: further changes of the logits, made on the host; None for none.
      top_logprobs: number of most probable tokens that a live loop reports at each place, up to
        `MOST_TOP_LOGPROBS`.
      keeps_routes: whether samples get `Sample.routes`, if the engine keeps them.
    """

    num_samples: int = 1
    seed: int = 0
    step: int = 0
    temperature: float = 1.0
    truncation: Truncation = dataclasses.field(default_factory=truncation_of)
    stop_strings: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignores_stop_ids: bool = False
    scores_prompt: bool = False
    budget_tokens: int = 0
    edits: LogitEdits | None = None
    top_logprobs: int = 0
    keeps_routes: bool = True

    def replace(self, **changes: Any) -> SamplingOptions:
        return dataclasses.replace(self, **changes)


def sample_keys(
    seed: jax.Array | int, step: jax.Array, prompt_ids: jax.Array, sample_indices: jax.Array
) -> jax.Array:
    """Derives one key per sample, uint32 [S, 2].

    Args:
      seed: seed of the run.
      step: int32 scalar.
      prompt_ids, sample_indices: int32 [S].
    """
    step_key = jax.random.fold_in(jax.random.key(seed), step)

    def one(prompt_id, sample_index):
        key = jax.random.fold_in(jax.random.fold_in(step_key, prompt_id), sample_index)
        return jax.random.key_data(key)

    return jax.vmap(one)(prompt_ids, sample_indices)


def turn_seed(prompt_id: int, sample: int, context: np.ndarray) -> int:
    """The number that takes the prompt's id in the sampling key of an agent's turn, below 2**31.

    The same context has the same noise, in whatever order the turns of a step arrive.

    Args:
      prompt_id, sample: number of the prompt, and of the sample among those of the prompt.
      context: int32 [T], all tokens before the turn.
    """
    own = np.array([prompt_id, sample], np.int64).tobytes()
    # Ids of prompts are int32 in the key.
    return zlib.crc32(context.astype(np.int32).tobytes(), zlib.crc32(own)) >> 1


def gumbel_noise(keys_S2: jax.Array, position_S: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise, float32 [S, V], for one position of each sample."""
    # Threefry makes one key per (sample, position). A cheap integer hash of that key and the token id covers
    # the vocabulary, because threefry over V would cost more than the model of a small run.
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys_S2), position_S)
    words_S2 = jax.random.key_data(keys)
    token_V = jnp.arange(vocab_size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    bits_SV = _mix(token_V[None] ^ words_S2[:, :1])
    bits_SV = _mix(bits_SV ^ words_S2[:, 1:])
    # v is uniform in (0, 1) and exact near 0. So -log1p(-v) is exact where the Gumbel variable is large, and
    # the large values decide the argmax. The upper end is kept below 1.
    v_SV = (bits_SV.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    v_SV = jnp.minimum(v_SV, jnp.float32(1.0 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-v_SV))


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every input bit flips each output bit about half of the time."""
    # The constants of Chris Wellons' `lowbias32`.
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def sample_tokens(scaled_logits_SV: jax.Array, noise_SV: jax.Array) -> jax.Array:
    """Int32 [S]: a draw from softmax(scaled_logits), or its argmax where the noise is zero."""
    # XLA's argmax on CPU is serial, and fusion would compute the noise serially too. This form is 6 times
    # faster at 152k tokens. If a logit is NaN, no comparison is true and the last token is taken.
    # Not by the cumulative distribution, where a rounding difference can change a token at every boundary
    # between two tokens.
    V = scaled_logits_SV.shape[-1]
    sum_SV = jax.lax.optimization_barrier(scaled_logits_SV + noise_SV)
    is_largest_SV = sum_SV == sum_SV.max(axis=-1, keepdims=True)
    token_V = jnp.arange(V, dtype=jnp.int32)
    return jnp.where(is_largest_SV, token_V, V - 1).min(axis=-1)


class Drawn(NamedTuple):
    """A token of each slot and the sums over the vocabulary that its log-probability is made of, [S] each.

    Attributes:
      token: int32, the drawn token.
      logit: scaled logit of this token.
      largest: largest scaled logit.
      log_total: log of the sum of exp(scaled logit - largest).
      entropy: entropy of softmax(scaled logits), nats.
    """

    token: jax.Array
    logit: jax.Array
    largest: jax.Array
    log_total: jax.Array
    entropy: jax.Array

    @property
    def logprob(self) -> jax.Array:
        """Log-probability of the token without truncation."""
        return self.logit - self.largest - self.log_total


def draw_whole(
    scaled_logits_SV: jax.Array,
    choice: Callable[[], jax.Array],
    noise: Callable[[], jax.Array],
    needs_tokens: jax.Array | bool = True,
) -> Drawn:
    """Draws from the whole vocabulary, the tokens of `sample_tokens`.

    Args:
      scaled_logits_SV: logits that log-probabilities and entropies are of.
      choice, noise: functions that return [S, V], the logits that tokens are drawn by and their noise.
      needs_tokens: whether tokens and their logits are used.
    """
    # XLA on CPU computes a reduction of several arrays serially. Elsewhere several reductions read the logits
    # several times: 16 times on a GPU, noise and log-probabilities written among them.
    return jax.lax.platform_dependent(
        scaled_logits_SV,
        cpu=lambda x_SV: by_reductions(x_SV, choice, noise, needs_tokens),
        default=lambda x_SV: by_one_reduction(x_SV, choice(), noise()),
    )


def by_reductions(
    x_SV: jax.Array,
    choice: Callable[[], jax.Array],
    noise: Callable[[], jax.Array],
    needs_tokens: jax.Array | bool,
) -> Drawn:
    """`draw_whole` for CPU."""
    # Noise costs as much as all sums.
    token_S = jax.lax.cond(
        needs_tokens,
        lambda: sample_tokens(choice(), noise()),
        lambda: jnp.zeros(len(x_SV), jnp.int32),
    )
    top_S1 = x_SV.max(axis=-1, keepdims=True)
    below_SV = x_SV - top_S1
    weight_SV = jnp.exp(below_SV)
    sum_S, sum_below_S = total(weight_SV)[:, 0], total(weight_SV * below_SV)[:, 0]
    logit_S = jnp.take_along_axis(x_SV, token_S[:, None], axis=-1)[:, 0]
    log_S = jnp.log(sum_S)
    return Drawn(token_S, logit_S, top_S1[:, 0], log_S, log_S - sum_below_S / sum_S)


def by_one_reduction(x_SV: jax.Array, choice_SV: jax.Array, noise_SV: jax.Array) -> Drawn:
    """`draw_whole` in one pass over the logits."""

    def join(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = (a[3] > b[3]) | ((a[3] == b[3]) & (a[4] < b[4]))
        chosen = (jnp.where(first, of_a, of_b) for of_a, of_b in zip(a[3:], b[3:], strict=True))
        return *join_sums(a[:3], b[:3]), *chosen

    V = x_SV.shape[-1]
    token_SV = jax.lax.broadcasted_iota(jnp.int32, x_SV.shape, 1)
    ones = jnp.ones_like(x_SV)
    operands = (x_SV, ones, jnp.zeros_like(x_SV), choice_SV + noise_SV, token_SV, x_SV)
    # Finite, since the distance of two infinities is NaN.
    lowest = jnp.finfo(jnp.float32).min
    start = (lowest, 0.0, 0.0, -jnp.inf, V, jnp.nan)
    types = (x.dtype for x in operands)
    start = tuple(jnp.array(x, dtype) for x, dtype in zip(start, types, strict=True))
    top_S, sum_S, sum_below_S, _, token_S, logit_S = jax.lax.reduce(operands, start, join, (1,))
    # No comparison with NaN is true.
    token_S = jnp.where(jnp.isnan(top_S), V - 1, jnp.minimum(token_S, V - 1))
    log_S = jnp.log(sum_S)
    return Drawn(token_S, logit_S, top_S, log_S, log_S - sum_below_S / sum_S)


def penalize(
    scaled_logits_SV: jax.Array, truncation: Truncation, seen: Callable[[], jax.Array]
) -> jax.Array:
    """Applies the repetition penalty to logits [S, V]; calls `seen` (bool [S, V]) only if there is one."""
    # The penalty preserves signs, so it may follow the division by the temperature.
    x_SV, penalty_S1 = scaled_logits_SV, truncation.repetition_penalty[:, None]
    # Only the tokens come out of the conditional: logits would be copied.
    seen_SV = jax.lax.cond(
        (truncation.repetition_penalty != 1).any(), seen, lambda: jnp.zeros(x_SV.shape, bool)
    )
    return jnp.where(seen_SV, jnp.where(x_SV > 0, x_SV / penalty_S1, x_SV * penalty_S1), x_SV)


def forbid(
    logits_SV: jax.Array, truncation: Truncation, position_S: jax.Array, stop_ids: Sequence[int]
) -> jax.Array:
    """Logits [S, V] with stop ids forbidden at positions before `min_tokens`."""
    is_stop_V = jnp.isin(jnp.arange(logits_SV.shape[-1]), jnp.array(stop_ids, jnp.int32))
    early_S = position_S < truncation.min_tokens
    return jnp.where(early_S[:, None] & is_stop_V[None], _NEVER, logits_SV)


def draw(logits_SV: jax.Array, noise_SV: jax.Array, truncation: Truncation) -> jax.Array:
    """Int32 [S]: draws with `sample_tokens` among the tokens inside the truncation.

    Which ones these are, `algos.truncation.least_kept` says.
    """
    limits = jax.tree.map(lambda x: x[:, None], truncation)
    return jax.lax.cond(
        truncation.keeps_some.any(),
        lambda: _draw_inside(logits_SV, noise_SV, limits),
        lambda: sample_tokens(logits_SV, noise_SV),
    )


class _Draw(NamedTuple):
    """Progress of the search for the token of each slot.

    Attributes:
      token_S1: int32, the newest candidate.
      outside_S1: probability at or below which tokens are known to be outside.
      found_S1: whether the candidate is inside the truncation.
    """

    token_S1: jax.Array
    outside_S1: jax.Array
    found_S1: jax.Array


def _draw_inside(logits_SV: jax.Array, noise_SV: jax.Array, limits: Truncation) -> jax.Array:
    """`draw` by rejection: tries tokens in the order of logit + noise until one is inside."""
    # The test of a token against top-p needs one sum over V, of the more probable tokens. Finding the
    # boundary would need some 30 sums. A first candidate is inside with probability at least `top_p`.
    # After a rejected candidate only the more probable tokens remain.
    p_SV = jax.nn.softmax(logits_SV, axis=-1)
    sum_SV = jax.lax.optimization_barrier(logits_SV + noise_SV)
    least_S1, mass_S1 = least_before_top_p(p_SV, limits)

    def among(token_SK: jax.Array, draw: _Draw) -> _Draw:
        p_SK = jnp.take_along_axis(p_SV, token_SK, axis=-1)

        def left(draw: _Draw) -> jax.Array:
            return ~draw.found_S1 & (p_SK > draw.outside_S1) & (p_SK >= least_S1)

        def look(draw: _Draw) -> _Draw:
            left_SK = left(draw)
            first_S1 = left_SK.argmax(axis=-1, keepdims=True)
            token_S1, p_S1 = (jnp.take_along_axis(x, first_S1, axis=-1) for x in (token_SK, p_SK))
            above_S1 = total(jnp.where(p_SV > p_S1, p_SV, 0.0))
            # The most probable token is always inside, however small top_p is.
            inside_S1 = (limits.top_p >= 1) | (above_S1 == 0) | (above_S1 < limits.top_p * mass_S1)
            any_S1 = left_SK.any(axis=-1, keepdims=True)
            return _Draw(
                jnp.where(any_S1, token_S1, draw.token_S1),
                jnp.where(any_S1 & ~inside_S1, p_S1, draw.outside_S1),
                draw.found_S1 | (any_S1 & inside_S1),
            )

        return jax.lax.while_loop(lambda draw: left(draw).any(), look, draw)

    def again(draw: _Draw) -> _Draw:
        left_SV = (p_SV > draw.outside_S1) & (p_SV >= least_S1)
        return among(largest(jnp.where(left_SV, sum_SV, -jnp.inf), _TRIES), draw)

    # If a logit is NaN, no token is inside and the last one is taken, as in `sample_tokens`.
    is_nan_S1 = jnp.isnan(p_SV[:, :1])
    last_S1 = jnp.full(is_nan_S1.shape, p_SV.shape[-1] - 1)
    draw = among(
        largest(sum_SV, _TRIES), _Draw(last_S1, jnp.full(is_nan_S1.shape, -1.0), is_nan_S1)
    )
    return jax.lax.while_loop(lambda draw: ~draw.found_S1.all(), again, draw).token_S1[:, 0]


def largest(x_SV: jax.Array, count: int) -> jax.Array:
    """Indices of the `count` largest values, or of all, largest first, int32 [S, K]."""
    # Searches only the K columns of `as_rows` with the largest maxima: it costs little more than a maximum.
    # `top_k` over a vocabulary of 152k costs 10 times as much.
    S, V = x_SV.shape
    x_SRC = as_rows(x_SV, -jnp.inf)
    C = x_SRC.shape[2]
    _, column_SK = jax.lax.top_k(x_SRC.max(axis=1), min(count, C))
    # In ascending order, so that the first of equal values comes first.
    column_SK = jnp.sort(column_SK, axis=-1)
    found_SN = jnp.take_along_axis(x_SRC, column_SK[:, None], axis=2).reshape(S, -1)
    _, index_SK = jax.lax.top_k(found_SN, min(count, V))
    row_SK, index_SK = jnp.divmod(index_SK, column_SK.shape[1])
    return row_SK * C + jnp.take_along_axis(column_SK, index_SK, axis=-1)
