"""Gated delta net (arXiv 2412.06464): a layer whose past is one matrix for each head, of any length of text.

    B sequences   T tokens   D width   N key heads   U value heads of a key head   X, Y sizes of their heads
    W taps of the convolution   C tokens of a chunk

Queries, keys and values pass a causal convolution and silu; queries and keys have length 1. Then, for every
value head with its state S [X, Y], a decay 0 < d <= 1 and a step 0 <= b <= 1 of each token:

    S <- d S        e = b (v - k S)        S <- S + k e^T        o = q S

Over many tokens this is done chunk by chunk (`_chunked`), which is the same but for rounding, for one token
as it stands. State and sums are float32. A token with decay 1 and step 0 leaves the state as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.compute import Compute
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.modules import Projection, RMSNorm, constant, normal

# As in Transformers.
_CHUNK = 64


class DeltaInputs(NamedTuple):
    """What tokens bring to a layer.

    Attributes:
      qkv: q and k [B, T, N, X] and v [B, T, N, U, Y], before the convolution.
      taps: float32 weights of the convolution, of each of these: [N, X, W], [N, X, W], [N, U, Y, W]; the
        last is that of the token itself.
      log_decay, step: float32 [B, T, N, U]; both 0 for padding.
      live: bool [B, T], False for padding.
    """

    qkv: tuple[jax.Array, jax.Array, jax.Array]
    taps: tuple[jax.Array, jax.Array, jax.Array]
    log_decay: jax.Array
    step: jax.Array
    live: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaState:
    """The past of sequences, of one layer or, with a leading dimension, of several.

    Attributes:
      matrix: float32 [B, N, U, X, Y].
      q, k, v: those of the last W - 1 tokens before the convolution, [B, W - 1, ...]; 0 before the first
        token.
    """

    matrix: Any
    q: Any
    k: Any
    v: Any


# (inputs, layer_in, row_in) -> (out_BTNUY, layer_out), as in `decoder.Attend`
Recur: TypeAlias = Callable[[DeltaInputs, Any, Any], tuple[jax.Array, Any]]


class DeltaNet(nnx.Module):
    """Projects, runs the recurrence, normalises and gates its output, and projects back."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width = ("embed", config.d_model)
        of_group = ("heads", config.delta_key_heads), (None, config.delta_group)
        keys = (of_group[0], ("head_dim", config.delta_key_dim))
        values = (*of_group, ("head_dim", config.delta_value_dim))
        options: Any = {"lora": config.lora, "rngs": rngs}
        self.q = Projection("q", (width,), keys, **options)
        self.k = Projection("k", (width,), keys, **options)
        self.v = Projection("v", (width,), values, **options)
        self.z = Projection("z", (width,), values, **options)
        self.a = Projection("a", (width,), of_group, **options)
        self.b = Projection("b", (width,), of_group, **options)
        self.o = Projection("o", values, (width,), **options)
        num_taps = config.delta_taps
        taps = (None, num_taps)
        self.q_taps = normal(rngs.params(), (*keys, taps), num_taps)
        self.k_taps = normal(rngs.params(), (*keys, taps), num_taps)
        self.v_taps = normal(rngs.params(), (*values, taps), num_taps)
        # exp(a_log) is the decay rate; in Transformers it starts uniform in 0 to 16.
        self.a_log = constant(0.0, of_group, exact=True)
        self.a_bias = constant(1.0, of_group, exact=True)
        self.norm = RMSNorm(values[-1:], config.rms_norm_eps)

    def __call__(
        self,
        x_BTD: jax.Array,
        recur: Callable[[DeltaInputs], tuple[jax.Array, Any]],
        live_BT: jax.Array,
        compute: Compute,
    ) -> tuple[jax.Array, Any]:
        """Returns [B, T, D] and the second result of `recur`."""
        of_heads = ("batch", "length", "heads", None, None)
        qkv = tuple(project(x_BTD, compute) for project in (self.q, self.k, self.v))
        qkv = tuple(compute.constrain(x, of_heads[: x.ndim]) for x in qkv)
        qkv: Any = tuple(checkpoint_name(x, "qkv") for x in qkv)
        a, b = (project(x_BTD, compute).astype(jnp.float32) for project in (self.a, self.b))
        rate_NU = jnp.exp(self.a_log[...].astype(jnp.float32))
        log_decay = -rate_NU[None, None] * jax.nn.softplus(a + self.a_bias[...][None, None])
        live = live_BT[..., None, None]
        taps = (self.q_taps, self.k_taps, self.v_taps)
        inputs = DeltaInputs(
            qkv,
            tuple(weight[...].astype(jnp.float32) for weight in taps),  # pyright: ignore
            jnp.where(live, log_decay, 0.0),
            jnp.where(live, jax.nn.sigmoid(b), 0.0),
            live_BT,
        )
        out_BTNUY, layer_out = recur(inputs)
        out_BTNUY = compute.constrain(out_BTNUY, of_heads)
        gate = jax.nn.silu(self.z(x_BTD, compute).astype(jnp.float32))
        mixed = (self.norm(out_BTNUY) * gate).astype(compute.dtype)
        return checkpoint_name(self.o(mixed, compute), "attention_out"), layer_out


def delta_of_rows(inputs: DeltaInputs, _: Any, segment_ids_BT: jax.Array) -> tuple[jax.Array, None]:
    """The recurrence over packed rows: each segment begins without a past. A `Recur`."""
    return _mixed(inputs, None, segment_ids_BT)[0], None


def delta_after(inputs: DeltaInputs, state: DeltaState) -> tuple[jax.Array, DeltaState]:
    """The recurrence over sequences with a past, padded on the right; returns their state after the last."""
    return _mixed(inputs, state, None)


def no_past(config: ModelConfig, leading: tuple[int, ...], dtype: Any) -> DeltaState:
    """The state of sequences without a token, with leading dimensions (B,) or (L, B)."""
    N, U = config.delta_key_heads, config.delta_group
    X, Y, tail = config.delta_key_dim, config.delta_value_dim, config.delta_taps - 1
    shapes = (N, X), (N, X), (N, U, Y)
    tails = (jnp.zeros((*leading, tail, *shape), dtype) for shape in shapes)
    return DeltaState(jnp.zeros((*leading, N, U, X, Y)), *tails)


def _mixed(
    inputs: DeltaInputs, state: DeltaState | None, segment_ids_BT: jax.Array | None
) -> tuple[jax.Array, Any]:
    """Outputs [B, T, N, U, Y] in float32, and the state after the last live token."""
    B, T = inputs.live.shape
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones((B, T), jnp.int32)
    tails = (None,) * 3 if state is None else (state.q, state.k, state.v)
    pairs = [
        _convolved(x, taps, tail, segment_ids_BT, inputs.live)
        for x, taps, tail in zip(inputs.qkv, inputs.taps, tails, strict=True)
    ]
    (q, k, v), tails = zip(*pairs, strict=True)
    # Length 1; the constant is that of Transformers.
    q, k = (x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    if state is None:
        matrix = jnp.zeros((B, *v.shape[2:4], k.shape[-1], v.shape[-1]))
        # The id of no segment: no token has a past.
        first_B = jnp.full((B,), -1)
    else:
        matrix, first_B = state.matrix, segment_ids_BT[:, 0]
    arrays = (q, k, v, inputs.log_decay, inputs.step)
    # On accelerators float32 matmuls are rounded otherwise, and here errors would add up over a text.
    with jax.default_matmul_precision("highest"):
        if T == 1 and state is not None:
            of_token = (matrix, *(x[:, 0] for x in arrays))
            out, matrix = jax.lax.platform_dependent(
                *of_token, cuda=one_token_in_place, default=one_token
            )
            out = out[:, None]
        else:
            out, matrix = _chunked(matrix, first_B, *arrays, segment_ids_BT)
    return out, DeltaState(matrix, *tails)


def _convolved(
    x_BT: jax.Array,
    taps_W: jax.Array,
    tail: jax.Array | None,
    segment_ids_BT: jax.Array,
    live_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """silu of the causal convolution within segments, in float32, and the next tail."""
    T, W = x_BT.shape[1], taps_W.shape[-1]
    # What precedes a row belongs to no segment.
    ids = jnp.pad(segment_ids_BT, ((0, 0), (W - 1, 0)), constant_values=-1)
    if tail is None:
        tail = jnp.zeros((len(x_BT), W - 1, *x_BT.shape[2:]), x_BT.dtype)
    else:
        # The tail belongs to the sequence, whose row is one segment.
        ids = ids.at[:, : W - 1].set(segment_ids_BT[:, :1])
    whole = jnp.concatenate([tail.astype(x_BT.dtype), x_BT], axis=1)
    total = jnp.zeros(x_BT.shape)
    for w in range(W):
        same_BT = ids[:, w : w + T] == segment_ids_BT
        seen = jnp.where(jnp.expand_dims(same_BT, range(2, x_BT.ndim)), whole[:, w : w + T], 0)
        # Not `taps[..., w]`, for the reason in `compute.scan_layers`.
        tap = jax.lax.dynamic_index_in_dim(taps_W, w, -1, keepdims=False)
        total += seen.astype(jnp.float32) * tap[None, None]
    # The tail stands before the row, so the last W - 1 live tokens begin at the number of live ones.
    cut = jax.vmap(lambda row, begin: jax.lax.dynamic_slice_in_dim(row, begin, W - 1))
    return jax.nn.silu(total), cut(whole, live_BT.sum(1))


def one_token(S: jax.Array, q_BNX, k_BNX, v_BNUY, log_decay_BNU, step_BNU):
    """The four lines of the recurrence: outputs [B, N, U, Y] and the next S [B, N, U, X, Y]."""
    S = jnp.exp(log_decay_BNU)[..., None, None] * S
    error = step_BNU[..., None] * (v_BNUY - jnp.einsum("bnx,bnuxy->bnuy", k_BNX, S))
    S = S + jnp.einsum("bnx,bnuy->bnuxy", k_BNX, error)
    return jnp.einsum("bnx,bnuxy->bnuy", q_BNX, S), S


def one_token_in_place(S: jax.Array, q_BNX, k_BNX, v_BNUY, log_decay_BNU, step_BNU):
    """`one_token`, with all products of S before it is written: both in one pass, and then a barrier.

    Else XLA for GPUs makes one kernel of all, which cannot write where it reads, and copies every S.
    """
    k, q = (x_BNX[:, :, None, :, None] for x_BNX in (k_BNX, q_BNX))
    add = lambda one, other: tuple(map(jnp.add, one, other))  # noqa: E731
    none = jnp.zeros((), S.dtype)
    products = jax.lax.reduce((k * S, q * S), (none, none), add, (3,))
    by_k_BNUY, by_q_BNUY = jax.lax.optimization_barrier(products)
    decay_BNU1 = jnp.exp(log_decay_BNU)[..., None]
    error_BNUY = step_BNU[..., None] * (v_BNUY - decay_BNU1 * by_k_BNUY)
    out_BNUY = decay_BNU1 * by_q_BNUY + (q_BNX * k_BNX).sum(2)[..., None, None] * error_BNUY
    return out_BNUY, decay_BNU1[..., None] * S + k * error_BNUY[..., None, :]


def _chunked(S, first_B, q_BTNX, k_BTNX, v_BTNUY, log_decay_BTNU, step_BTNU, segment_ids_BT):
    """The recurrence chunk by chunk: outputs [B, T, N, U, Y] and the last S.

    With G the sum of the logarithms of decays in a chunk so far, and M_ij = exp(G_i - G_j) for j <= i of the
    same segment, the errors E of a chunk solve a triangular system, and the rest are matmuls:

        (I + b K K^T * M below the diagonal) E = b (V - exp(G) K S)
        O = exp(G) Q S + (Q K^T * M) E        S <- exp(G_C) S + (exp(G_C - G) K)^T E

    Terms with S only count for tokens of its segment, which is `first_B` before the first chunk.
    """
    T = q_BTNX.shape[1]
    C = min(_CHUNK, T)

    def chunks(x: jax.Array, **mode: Any) -> jax.Array:
        """[B, T, ...] -> [T / C, B, C, ...]; behind the text nothing happens, in its last segment."""
        x = jnp.pad(x, ((0, 0), (0, -T % C), *[(0, 0)] * (x.ndim - 2)), **mode)
        return x.reshape(x.shape[0], -1, C, *x.shape[2:]).swapaxes(0, 1)

    causal_CC = jnp.tril(jnp.ones((C, C), bool))
    below_CC = jnp.tril(jnp.ones((C, C), bool), -1)
    # Masked before exp, lest a large one become inf, and NaN in the backward pass.
    exp_if = lambda mask, x: jnp.exp(jnp.where(mask, x, -jnp.inf))  # noqa: E731
    of_heads = lambda mask: mask[:, None, None]  # noqa: E731

    def chunk(carry, xs):
        S, before_B = carry
        q, k, v, log_decay, step, ids = xs
        q, k = (x.swapaxes(1, 2) for x in (q, k))  # [B, N, C, X]
        v = v.transpose(0, 2, 3, 1, 4)  # [B, N, U, C, Y]
        log_decay, step = (x.transpose(0, 2, 3, 1) for x in (log_decay, step))  # [B, N, U, C]
        G = jnp.cumsum(log_decay, -1)
        last = G[..., -1:]
        same = ids[:, :, None] == ids[:, None]
        M = exp_if(of_heads(same & causal_CC[None]), G[..., :, None] - G[..., None, :])
        # A mask, not a decay of almost 0 where a segment begins, which would cost G its digits.
        of_before = exp_if(of_heads(ids == before_B[:, None]), G)[..., None]
        of_after = exp_if(of_heads(ids == ids[:, -1:]), last - G)[..., None]
        kept = exp_if(of_heads(ids[:, -1:] == before_B[:, None]), last)[..., None]
        products = jnp.einsum("bnix,bnjx->bnij", k, k)[:, :, None] * M
        system = jnp.where(below_CC[None, None, None], step[..., None] * products, 0.0)
        right = step[..., None] * (v - of_before * jnp.einsum("bncx,bnuxy->bnucy", k, S))
        E = jax.scipy.linalg.solve_triangular(system, right, lower=True, unit_diagonal=True)
        scores = jnp.einsum("bnix,bnjx->bnij", q, k)[:, :, None] * M
        out = of_before * jnp.einsum("bncx,bnuxy->bnucy", q, S) + scores @ E
        S = kept * S + jnp.einsum("bncx,bnucy->bnuxy", k, of_after * E)
        return (S, ids[:, -1]), out.transpose(0, 3, 1, 2, 4)

    xs = [chunks(x) for x in (q_BTNX, k_BTNX, v_BTNUY, log_decay_BTNU, step_BTNU)]
    xs.append(chunks(segment_ids_BT, mode="edge"))
    # Without the checkpoint all chunks would keep their [C, C] arrays for the backward pass.
    step = jax.checkpoint(chunk, prevent_cse=False)
    (S, _), out = jax.lax.scan(step, (S, first_B), tuple(xs))
    out = out.swapaxes(0, 1)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :T], S
