"""From hidden states to log-probabilities of tokens, without ever holding [B, T, V], and scores of segments.

B sequences   T tokens   D width   V vocabulary   G devices   N positions of a device   C positions of a chunk
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl.algos.truncation import LEAST_KEPT, Truncation, kept_tokens

Values = TypeVar("Values")
# The name of what chunks keep of the sums over the vocabulary for their backward pass.
SUMS = "softmax_sums"


def log_softmax_entropy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities [..., V] and their entropy [...] in nats.

    The definition of a token's probability. `rollout.sampling.draw_whole` has the same sums in one pass.
    """
    # In float32: bfloat16 has not even three digits, and losses take differences of log-probabilities.
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return logprobs, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)


def by_one_reduction(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`log_softmax_entropy` in one pass over the logits; JAX has no derivative of it."""
    logits = logits.astype(jnp.float32)
    operands = (logits, jnp.ones_like(logits), jnp.zeros_like(logits))
    # Finite, since the distance of two infinities is NaN.
    start = tuple(jnp.float32(x) for x in (jnp.finfo(jnp.float32).min, 0.0, 0.0))
    sums = jax.lax.reduce(operands, start, join_sums, (logits.ndim - 1,))
    largest, total, below = (x[..., None] for x in checkpoint_name(sums, SUMS))
    log_total = jnp.log(total)
    return logits - largest - log_total, (log_total - below / total)[..., 0]


def join_sums(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The sums over two parts of a vocabulary from those of each part.

    They are the largest logit, the sum of weights exp(logit - largest), and that of weights times
    (logit - largest).
    """
    largest = jnp.maximum(a[0], b[0])
    keep_a, keep_b = jnp.exp(a[0] - largest), jnp.exp(b[0] - largest)
    below_a, below_b = (part[2] + part[1] * (part[0] - largest) for part in (a, b))
    return largest, a[1] * keep_a + b[1] * keep_b, below_a * keep_a + below_b * keep_b


def _in_few_passes(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    # XLA on CPU computes a reduction of several arrays serially. Elsewhere several reductions read the logits
    # several times.
    return jax.lax.platform_dependent(logits, cpu=log_softmax_entropy, default=by_one_reduction)


@jax.custom_jvp
def logprob_entropy(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of `tokens` [...] and entropies [...], of logits [..., V].

    To be differentiated once: `log_softmax_entropy` has second derivatives.
    """
    logprobs, entropy = _in_few_passes(logits)
    return of_tokens(logprobs, tokens), entropy


@logprob_entropy.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, Any]):
    # By hand, since JAX's own gradient of picking a token scatters into one more array of the logits' size:
    # twice the memory on TPU. Transposed, this is d logprob / d logit = [v is the token] - p.
    (logits, tokens), d_logits = primals, tangents[0].astype(jnp.float32)
    logprobs, entropy = _in_few_passes(logits)
    p = jnp.exp(logprobs)
    d_logprob = jnp.sum((jax.nn.one_hot(tokens, p.shape[-1]) - p) * d_logits, axis=-1)
    d_entropy = -jnp.sum(p * (logprobs + entropy[..., None]) * d_logits, axis=-1)
    return (of_tokens(logprobs, tokens), entropy), (d_logprob, d_entropy)


def token_logprobs(
    logits_of: Callable[[jax.Array, jax.Array], jax.Array],
    hidden_BTD: jax.Array,
    tokens_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
    trained_BT: jax.Array | None = None,
    shards: tuple[int, ...] = (1, 1),
    statistic: Callable[[jax.Array], jax.Array] | None = None,
    truncation: Truncation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy of every trained token given the tokens of its segment before it.

    Entry t of the result is about token t; see `from_past`.

    Args:
      logits_of: ([G, C, D], number of first entries that are needed) -> [G, C, V], logits before temperature.
      hidden_BTD: last hidden states.
      tokens_BT, segment_ids_BT: int32; segment 0 is padding.
      temperature: divides the logits.
      chunk_tokens, trained_BT, shards: as for `from_past`.
      statistic: function from log-probabilities [G, C, V] to [G, C], such as `squared_probabilities`, that
        replaces the entropy; None for the entropy.
      truncation: limits; log-probabilities are those among the tokens that it keeps, and -inf for other
        tokens. The entropy stays that of the whole vocabulary. None for no limits.

    Returns:
      (logprob_BT, entropy_BT), float32.
    """

    def chunk(past_GCD: jax.Array, tokens_GC: jax.Array, needed: jax.Array):
        logits_GCV = logits_of(past_GCD, needed) / temperature
        if statistic is None and truncation is None:
            return logprob_entropy(logits_GCV, tokens_GC)
        logprobs_GCV, entropy_GC = log_softmax_entropy(logits_GCV)
        logprob_GC, logprobs_GCV = renormalized(logprobs_GCV, tokens_GC, truncation)
        return logprob_GC, entropy_GC if statistic is None else statistic(logprobs_GCV)

    return from_past(
        chunk,
        hidden_BTD,
        tokens_BT,
        segment_ids_BT,
        chunk_tokens=chunk_tokens,
        trained_BT=trained_BT,
        shards=shards,
    )


def renormalized(
    logprobs_GCV: jax.Array, tokens_GC: jax.Array, truncation: Truncation | None
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of the tokens [G, C] and of the vocabulary [G, C, V] among the kept tokens.

    Those of other tokens are -inf. Without a truncation nothing changes.
    """
    logprob_GC = of_tokens(logprobs_GCV, tokens_GC)
    if truncation is None:
        return logprob_GC, logprobs_GCV
    kept = kept_tokens(logprobs_GCV, truncation)
    return kept.renormalized(logprob_GC[..., None])[..., 0], kept.renormalized(logprobs_GCV)


def squared_probabilities(logprobs: jax.Array) -> jax.Array:
    """The sum over the vocabulary of the squared probabilities, [...] of log-probabilities [..., V]."""
    return jnp.exp(2.0 * logprobs).sum(axis=-1)


def from_past(
    function: Callable[[Any, jax.Array, jax.Array], Values],
    hidden: Any,
    tokens_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    chunk_tokens: int,
    trained_BT: jax.Array | None = None,
    shards: tuple[int, ...] = (1, 1),
) -> Values:
    """Applies a function to each trained token and the hidden state before it, chunk by chunk.

    This is the only place where hidden states and tokens are shifted against each other. Entry t of the
    result is about token t and comes from hidden state t - 1. The first token of a segment has no past. Its
    entries are 0, and so are those of tokens that are not trained:

        tokens        a  b  c  d        e  f         two segments in a row
        hidden used   -  ha hb hc       -  he

    The N positions of each device are sorted, those with a result first. So whole chunks are left out, and of
    the last one `Compute.product_of_first` leaves out what no device needs. Shapes stay fixed.

    Args:
      function: (hidden states [G, C, D], the tokens [G, C] after them, how many of C are needed) -> pytree of
        values [G, C]. Of its intermediate [G, C, V] arrays only those named "logits" are stored for the
        backward pass, and only if one chunk holds all positions.
      hidden: pytree of [B, T, D].
      tokens_BT, segment_ids_BT: int32; segment 0 is padding.
      chunk_tokens: C, number of positions of a device that are computed at once.
      trained_BT: whether a token has a result; None for all with a past.
      shards: numbers of devices that B and T are split over, two; G is their product.

    Returns:
      The values, [B, T] each.
    """
    has_past_BT = (segment_ids_BT > 0) & (segment_ids_BT == jnp.roll(segment_ids_BT, 1, axis=1))
    # The roll has brought the end of a row to its beginning.
    has_past_BT = has_past_BT.at[:, 0].set(False)
    needed_BT = has_past_BT if trained_BT is None else has_past_BT & trained_BT
    # A pad, not a roll: no state crosses from the end of a row to its beginning, nor its gradient back.
    past = jax.tree.map(lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0))), hidden)
    return at_places(function, past, tokens_BT, needed_BT, chunk_tokens=chunk_tokens, shards=shards)


def at_places(
    function: Callable[[Any, jax.Array, jax.Array], Values],
    hidden: Any,
    tokens_BT: jax.Array,
    needed_BT: jax.Array,
    *,
    chunk_tokens: int,
    shards: tuple[int, ...] = (1, 1),
) -> Values:
    """Applies a function to the hidden state and the tokens of every needed place, chunk by chunk.

    Nothing is shifted: entry t of the result comes from hidden state t and tokens t.

    Args:
      function, hidden, chunk_tokens, shards: as for `from_past`. Values may have further dimensions.
      tokens_BT: int32, or [B, T, K] for K tokens of every place.
      needed_BT: bool, the places that have a result.

    Returns:
      The values, [B, T, ...] each, 0 elsewhere.
    """
    needed_GN = _grouped(needed_BT, shards)
    G, N = needed_GN.shape
    # Stable: neighbours stay neighbours, and equal inputs give equal chunks on every device.
    order_GN = jnp.argsort(~needed_GN, axis=1, stable=True)
    # For the way back, and for the gradient of the way there (`_permuted`).
    inverse_GN = jnp.argsort(order_GN, axis=1)
    # One number for all devices: they run one program, so a chunk is left out only where no device needs it.
    most_needed = needed_GN.sum(axis=1).max()
    inputs = (
        jax.tree.map(lambda x: _permuted(_grouped(x, shards), order_GN, inverse_GN), hidden),
        _gathered(_grouped(tokens_BT, shards), order_GN),
    )
    C = min(chunk_tokens, N)
    if C == N:
        # `chunk_tokens` allows the logits of all positions at once, so they may be stored for the backward
        # pass.
        keep = jax.checkpoint_policies.save_only_these_names("logits", LEAST_KEPT, SUMS)
        values = jax.checkpoint(function, policy=keep)(*inputs, most_needed)
    else:
        firsts = jnp.arange(0, N, C)

        def chunked(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, 0), (0, -N % C), *((0, 0),) * (x.ndim - 2)))
            return x.reshape(G, len(firsts), C, *x.shape[2:]).swapaxes(0, 1)

        def of_chunk(_, chunk: tuple[tuple[Any, jax.Array], jax.Array]):
            inputs, first = chunk
            return None, function(*inputs, jnp.clip(most_needed - first, 0, C))

        # Without the checkpoint the scan would stack the logits of all chunks for the backward pass.
        keep = jax.checkpoint_policies.save_only_these_names(LEAST_KEPT, SUMS)
        _, values = jax.lax.scan(
            jax.checkpoint(of_chunk, policy=keep), None, (jax.tree.map(chunked, inputs), firsts)
        )
        values = jax.tree.map(
            lambda x: x.swapaxes(0, 1).reshape(G, -1, *x.shape[3:])[:, :N], values
        )

    def placed(x_GN: jax.Array) -> jax.Array:
        (B, T), (r, p), others = needed_BT.shape, shards, x_GN.shape[2:]
        x_GN = _permuted(x_GN, inverse_GN, order_GN)
        x_BT = x_GN.reshape(r, p, B // r, T // p, *others).swapaxes(1, 2)  # as `_grouped`
        needed = needed_BT.reshape(B, T, *(1,) * len(others))
        return jnp.where(needed, x_BT.reshape(B, T, *others), jnp.zeros((), x_BT.dtype))

    return jax.tree.map(placed, values)


def _grouped(x: jax.Array, shards: tuple[int, ...]) -> jax.Array:
    """[B, T, ...] as [G, N, ...], the N positions of each device."""
    (B, T, *others), (r, p) = x.shape, shards
    x = x.reshape(r, B // r, p, T // p, *others).swapaxes(1, 2)
    return x.reshape(r * p, -1, *others)


def _gathered(x: jax.Array, order_GN: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, order_GN.reshape(*order_GN.shape, *(1,) * (x.ndim - 2)), axis=1)


@jax.custom_vjp
def _permuted(x: jax.Array, order_GN: jax.Array, inverse_GN: jax.Array) -> jax.Array:
    """`x` [G, N, ...] in another order."""
    # With a gradient by hand, a gather too: that of JAX would scatter, which XLA does serially on CPU.
    del inverse_GN
    return _gathered(x, order_GN)


_permuted.defvjp(
    lambda x, order_GN, inverse_GN: (_gathered(x, order_GN), inverse_GN),
    lambda inverse_GN, g: (_gathered(g, inverse_GN), None, None),
)


def of_tokens(logprobs_GCV: jax.Array, tokens_GC: jax.Array) -> jax.Array:
    """The log-probability of each token, [G, C]."""
    return jnp.take_along_axis(logprobs_GCV, tokens_GC[..., None], axis=-1)[..., 0]


def last_scores(scores_BTS: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """The scores at the last token of every segment, 0 elsewhere: the scores of whole sequences.

    Args:
      scores_BTS: scores of every token.
      segment_ids_BT: int32; 0 is padding.

    Returns:
      [B, T, S]; entry t holds the scores of the sequence that ends with token t.
    """
    # After the end of a row comes padding, so its last token ends its segment.
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
