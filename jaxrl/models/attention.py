"""Attention over whole sequences. For attention to a cache see `cache/cached_attention.py`.

    B sequences   T tokens   Q query heads   K kv heads   H head size

Covered: causal grouped-query attention within packed segments, full or with a sliding window, with or without
capped scores and sinks. One function has three implementations; only "xla" has sinks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.attention_kind import FULL, AttentionKind, picked
from jaxrl.models.kernels.cudnn_attention import cudnn_attention, takes_offsets
from jaxrl.models.kernels.splash_attention import splash_attention
from jaxrl.models.xla_attention import Ring, TreeSegments, xla_attention

IMPLEMENTATIONS = ("xla", "cudnn", "splash")

# Largest heads for "cudnn", and on GPUs before Hopper.
_LARGEST_HEAD, _LARGEST_BEFORE_HOPPER = 256, 128

# Longest rows for "cudnn" with a mask, which has 2 T^2 bytes a row, and as much again in the backward pass.
MOST_MASKED_TOKENS = 32_768
# Longest rows for "splash". It looks at every tile of a row before it compiles: about a minute for so many
# tokens, more than an hour for a million.
MOST_SPLASH_TOKENS = 131_072


def attention(
    q_BTQH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments: jax.Array | TreeSegments,
    kind: AttentionKind = FULL,
    *,
    implementation: str = "xla",
    block_tokens: int = 512,
    device: Any = None,
    **ring: Any,
) -> jax.Array:
    """Causal attention inside each segment of a packed row.

    Args:
      q_BTQH, k_BTKH, v_BTKH: rotated queries and keys, and values, of one type; Q is a multiple of K.
      segments: int32 [B, T]; a token sees itself and the earlier tokens of its segment. 0 is padding, whose
        outputs are finite and meaningless. With `TreeSegments` ("xla" only) a token also sees a whole prefix
        segment. For "cudnn" the tokens of a segment are neighbours.
      kind: window, score cap and sinks of the layer; a window is counted in places of the row, with
        `TreeSegments` in positions.
      implementation: one of `IMPLEMENTATIONS`, from `pick_implementation`. "splash" cannot be
        partitioned by the compiler: on a mesh call it under `shard_map`, on whole rows.
      block_tokens: tile size of "xla" and "splash", from `pick_block_tokens`; a multiple of 128 for "splash".
        "cudnn" chooses its own.
      device: one of the devices; for "cudnn".
      ring: fields of `xla_attention.Ring`, if the arrays are a part of the rows ("xla" only).

    Returns:
      [B, T, Q, H], in the type of `q_BTQH`; softmax is taken in float32.
    """
    assert implementation in IMPLEMENTATIONS, f"{implementation} is not from pick_implementation"
    if implementation == "xla":
        around = Ring(**ring) if ring else None
        return xla_attention(
            q_BTQH, k_BTKH, v_BTKH, segments, kind, block_tokens=block_tokens, ring=around
        )
    assert not ring, f"{implementation} attends to whole rows"
    assert not isinstance(segments, TreeSegments), f"{implementation} has no tree attention"
    assert kind.sinks is None, f"{implementation} has no sinks"
    arrays = (q_BTQH, k_BTKH, v_BTKH, segments, kind)
    if implementation == "splash":
        return splash_attention(*arrays, block_tokens=block_tokens)
    return cudnn_attention(*arrays, device=device)


def pick_implementation(
    platform: str | None,
    dtype: Any,
    requested: str = "auto",
    *,
    device: Any = None,
    softcap: float = 0.0,
    windows: bool = False,
    sinks: bool = False,
    head_dim: int = 0,
    tree: bool = False,
    tokens: int = 0,
) -> str:
    """The implementation of `attention` for a kind of device and a type of activations.

    Args:
      platform: platform of the devices, as in `jax.Device.platform`; None if only shapes are computed, which
        do not depend on the implementation.
      dtype: type of queries, keys and values.
      requested: one of `IMPLEMENTATIONS`, or "auto": "splash" on TPUs, in 16 bits "cudnn" on NVIDIA GPUs, for
        rows without a mask or whose mask fits, "xla" elsewhere.
      device: one of the devices, which says the generation of a GPU; None if it is not known.
      softcap: score cap of the model; 0 for none.
      windows: whether any layer has a sliding window.
      sinks: whether the model has sinks.
      head_dim: largest head size of the model, if it is known.
      tree: the implementation must support `TreeSegments`.
      tokens: T, if it is known.

    Raises:
      UserError: `requested` is unknown or cannot run there.
    """
    dtype, largest = jnp.dtype(dtype), _LARGEST_HEAD
    # That of AMD's devices is a name.
    capability = getattr(device, "compute_capability", "")
    if capability[:1].isdigit() and float(capability) < 9:
        largest = _LARGEST_BEFORE_HOPPER
    # JAX calls GPUs of NVIDIA and of AMD "gpu". On a GPU without cuDNN compilation fails with a clear error.
    is_plain = dtype in (jnp.bfloat16, jnp.float16) and not (sinks or tree)
    is_plain &= head_dim <= largest
    runs = {
        "splash": platform == "tpu" and not (sinks or tree or tokens > MOST_SPLASH_TOKENS),
        "cudnn": platform in ("gpu", "cuda")
        and is_plain
        and not softcap
        and (tokens <= MOST_MASKED_TOKENS or takes_offsets(device, windows=windows)),
        "xla": True,
    }
    rules = {
        "splash": f"TPUs in rows of up to {MOST_SPLASH_TOKENS:,} tokens",
        "cudnn": "NVIDIA GPUs in bfloat16 or float16, without capped scores, with heads of up to "
        f"{_LARGEST_HEAD} ({_LARGEST_BEFORE_HOPPER} before Hopper), in rows of up to "
        f"{MOST_MASKED_TOKENS:,} tokens, or of any length without windows on Hopper and newer",
    }
    asked = f"in {dtype.name}" + (" with capped scores" if softcap else "")
    asked += f" with heads of {head_dim}" if head_dim > largest else ""
    if sinks:
        asked += " with attention sinks"
        rules = {name: f"{rule} without sinks," for name, rule in rules.items()}
    if tree:
        asked += " with shared prompts (train.share_prompts)"
        rules = {name: f"{rule} without them," for name, rule in rules.items()}
    return picked("attention implementation", requested, platform, runs, rules, asked)


def pick_block_tokens(platform: str | None, *, tree: bool = False) -> int:
    """The tile size of `attention` for a platform."""
    if platform != "cpu":
        return 512
    # On CPU the scores of a tile should stay in the cache of a core. Answers to a shared prompt begin
    # anywhere in a row, so large tiles would compute many masked pairs: an even update took 8.1 s with tiles
    # of 32 and 9.3 s with 64 (docs/learning.md).
    return 32 if tree else 128
