"""Kernels of accelerators on trial: before one is first used it is compiled alone, and compared with XLA.

    Trial --> compiled and run on a device, in `LIMIT_S` --> largest difference <= `TOLERANCE`: it is used
          \\-> an error, the limit, a difference --------> XLA is used, and one line says why

Nothing is tried on CPU, nor for devices that are not here (programs that are compiled ahead of time). Not
covered: a kernel that ends the process or stops its device, and one that is wrong only for other lengths.

    B sequences   T tokens   Q query heads   K kv heads   H head size   M rows   D, F widths
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.attention import attention
from jaxrl.models.attention_kind import AttentionKind
from jaxrl.models.cache.cached_attention import cached_attention
from jaxrl.models.cache.kv_cache import PagedSlots, cache_of, put_token
from jaxrl.models.kernels.grouped_matmul import WIDTH_MULTIPLE, grouped_matmul, runs_on
from jaxrl.models.kernels.paged_attention import KERNELS
from jaxrl.models.model_config import ModelConfig

logger = logging.getLogger(__name__)

# Seconds of a trial, compiling included.
LIMIT_S = 60.0
# Of the largest value of a result. Two results that differ by two roundings of bfloat16 are within .008.
TOLERANCE = 0.02

Gather = Callable[[Callable[[], str]], list[str]]
"""A function -> its results in all processes of the run, as `mesh.hosts.gather`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A kernel and what it must agree with.

    Attributes:
      what: kernel, sizes and types, for messages.
      kernel, plain: functions of the same arguments with results of the same shapes, the second by XLA.
      make: makes the arguments.
    """

    what: str
    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]


def stands(trial: Trial, device: Any, gather: Gather) -> bool:
    """Whether a kernel may be used on the devices of a mesh, of which `device` is one. Collective.

    Each process tries it on a device of its own, and it stands if it does in all.

    Args:
      trial: the kernel; from one of the functions below, so that it is tried once.
      device: one of the devices.
      gather: `mesh.hosts.gather`.
    """
    if getattr(device, "platform", "cpu") == "cpu" or device not in jax.devices():
        return True
    return _tried(trial, gather)


@functools.cache
def _tried(trial: Trial, gather: Gather) -> bool:
    start_s = time.perf_counter()
    faults = [fault for fault in gather(lambda: fault_of(trial)) if fault]
    if faults:
        logger.warning("%s is not used, and XLA in its place: %s", trial.what, faults[0])
    else:
        logger.info("%s agrees with XLA, %.1f s", trial.what, time.perf_counter() - start_s)
    return not faults


def fault_of(trial: Trial, *, limit_s: float = LIMIT_S, tolerance: float = TOLERANCE) -> str:
    """What is wrong with a kernel on this process's first device; "" if nothing is."""
    result: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def compare() -> None:
        try:
            with jax.default_device(jax.local_devices()[0]):
                arguments = trial.make()
                both = [jax.jit(run)(*arguments) for run in (trial.kernel, trial.plain)]
            result.set_result(
                [[np.asarray(x, np.float32) for x in jax.tree.leaves(each)] for each in both]
            )
        except Exception as error:  # of a compiler or a device: told below
            result.set_exception(error)

    # Not waited for in the end: a compiler cannot be interrupted.
    threading.Thread(target=compare, daemon=True).start()
    try:
        found, wanted = result.result(limit_s)
    except TimeoutError:
        return f"no result after {limit_s:g} s"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    apart = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, wanted, strict=True)]
    # NaN is within no tolerance.
    if all(each <= tolerance for each in apart):
        return ""
    return f"a result is {max(apart):.2g} of its largest value away, more than {tolerance:g}"


def proven_attention(
    implementation: str, model: ModelConfig, device: Any, *, parts: int, dtype: Any, gather: Gather
) -> str:
    """An implementation of `attention` for a part of a model's heads, or "xla" if it does not stand."""
    heads = [max(1, number // parts) for number in (model.num_heads, model.num_kv_heads)]
    kinds = tuple(kind[:3] for kind in kinds_of(model))
    sizes = (heads[0], heads[1], model.largest_head, jnp.dtype(dtype).name)
    if implementation == "xla" or stands(
        attention_trial(implementation, sizes, kinds), device, gather
    ):
        return implementation
    return "xla"


@functools.cache
def attention_trial(
    implementation: str,
    sizes: tuple[int, int, int, str],
    kinds: tuple[tuple[int, float, bool | None], ...],
    *,
    tokens: int = 4096,
    kernel: Any = attention,
) -> Trial:
    """`attention` to a row of 4 and a row of 18 segments, forward and backward.

    Args:
      implementation: its argument.
      sizes: (Q, K, H, type).
      kinds: the first fields of `AttentionKind` of every kind of layer.
      tokens: T.
      kernel: what stands in its place.
    """
    Q, K, H, dtype = sizes
    # Arrays of NumPy: where a run picks its kernels, JAX may be tracing.
    place_T, live_T = np.arange(tokens), np.arange(tokens) < tokens * 7 // 8
    few_T = np.digitize(place_T, [tokens // 50, tokens // 7, tokens // 2])
    rows = [np.where(live_T, ids_T + 1, 0) for ids_T in (few_T, place_T * 20 // tokens)]

    def by(attend: Any, implementation: str) -> Callable[..., Any]:
        def live(ids_T: np.ndarray, kind: Any, *qkv: jax.Array) -> jax.Array:
            window, softcap, slides = kind
            kind = AttentionKind(window, softcap, None if slides is None else jnp.array(slides))
            where = {"implementation": implementation, "device": jax.local_devices()[0]}
            out_BTQH = attend(*qkv, jnp.asarray(ids_T)[None], kind, **where)
            return jnp.where(live_T[:, None, None], out_BTQH, 0)

        # One row after the other: a kernel is chosen for the row with most segments.
        each = [functools.partial(live, ids_T, kind) for ids_T in rows for kind in kinds]
        return lambda *qkv: [_with_gradients(run)(*qkv) for run in each]

    return Trial(
        f"{implementation} attention with {Q} and {K} heads of {H} in {dtype}",
        by(kernel, implementation),
        by(attention, "xla"),
        lambda: tuple(_normal(n, (1, tokens, (Q, K, K)[n], H), dtype) for n in range(3)),
    )


def proven_experts(model: ModelConfig, device: Any, *, dtype: Any, gather: Gather) -> bool:
    """Whether the experts of a model may use `grouped_matmul` where it runs."""
    if not (model.num_experts and runs_on(device) and jnp.dtype(dtype) == jnp.bfloat16):
        return True
    widths = model.d_model, model.d_ff
    return any(w % WIDTH_MULTIPLE for w in widths) or stands(experts_trial(*widths), device, gather)


@functools.cache
def experts_trial(D: int, F: int, *, kernel: Any = grouped_matmul) -> Trial:
    """Two products of four experts, one of them without rows, forward and backward."""
    rows_G, live_M1 = np.array([100, 0, 212, 150], np.int32), np.arange(512)[:, None] < 462

    def by(multiply: Any, *implementation: str) -> Callable[..., Any]:
        def mlp(x_MD: jax.Array, *weights: jax.Array) -> jax.Array:
            for weight in weights:
                where = jax.local_devices()[0], *implementation
                out_MD = multiply(x_MD, weight, jnp.asarray(rows_G), *where)
                x_MD = jnp.where(live_M1, out_MD, 0)
            return x_MD

        return _with_gradients(mlp)

    def make() -> tuple[Any, ...]:
        sizes = (512, D), (4, D, F), (4, F, D)
        # Sums of D and of F products have about the size of one.
        return tuple(
            _normal(n, size, "bfloat16") * jnp.bfloat16(size[-2] ** -0.5 if n else 1)
            for n, size in enumerate(sizes)
        )

    return Trial(
        f"grouped matmul of {D} x {F} in bfloat16", by(kernel), by(grouped_matmul, "xla"), make
    )


Kinds = tuple[tuple[int, float, bool | None, bool], ...]
"""Window, cap and sliding of every kind of layer, as in `AttentionKind`, and whether it has sinks."""


def kinds_of(model: ModelConfig) -> Kinds:
    """The kinds of a model's layers."""
    slides = dict.fromkeys(model.sliding_layers) if len({*model.sliding_layers}) > 1 else [None]
    rest = model.attention_softcap, model.attention_sinks
    return tuple((model.sliding_window, rest[0], each, rest[1]) for each in slides)


@functools.cache
def decoding_trial(
    implementation: str,
    sizes: tuple[int, int, int, str, str],
    page: int,
    kinds: Kinds = ((0, 0.0, None, False),),
    *,
    capacity: int = 1024,
    kernel: Any = None,
) -> Trial:
    """A token of rows of 0, 1, C / 2 + 1 and C tokens, to the second of two layers of a cache and a buffer.

    Args:
      implementation: a key of `KERNELS`.
      sizes: (Q, K, H, type of the queries, of the cache).
      page: tokens of a page, which divide C; 0 for a contiguous cache.
      kinds: the kinds of layers.
      capacity: C.
      kernel: what stands in its place.
    """
    Q, K, H, dtype, kv_dtype = sizes
    length_B, used_B = np.array([0, 1, capacity // 2 + 1, capacity], np.int32), np.full(4, 5)
    pages = capacity // page if page else 1
    # Page 0 belongs to nobody.
    table_BP = 1 + np.arange(4 * pages, dtype=np.int32)[::-1].reshape(4, pages)
    attend, writes = kernel or KERNELS[implementation], implementation == "paged_gpu"

    def all_kinds(sinks_Q: jax.Array) -> list[AttentionKind]:
        flag = lambda slides: None if slides is None else jnp.array(slides)  # noqa: E731
        return [
            AttentionKind(window, softcap, flag(slides), sinks_Q if sunk else None)
            for window, softcap, slides, sunk in kinds
        ]

    def by_kernel(cache: Any, buffer: Any, sinks_Q: Any, q: Any, k: Any, v: Any) -> Any:
        slots = PagedSlots(cache, jnp.asarray(table_BP), jnp.zeros(4, jnp.int32)) if page else cache
        given = q, slots, jnp.int32(1), jnp.asarray(length_B)
        if not writes:
            buffer = jax.tree.map(lambda x: jnp.stack([jnp.zeros_like(x), x]), buffer)
        newest = buffer, jnp.asarray(used_B, jnp.int32)
        return [attend(*given, k, v, *newest, kind) for kind in all_kinds(sinks_Q)]

    def by_xla(cache: Any, buffer: Any, sinks_Q: Any, q: Any, k: Any, v: Any) -> Any:
        def rows(x: jax.Array) -> jax.Array:
            in_order = x[1][table_BP].swapaxes(1, 2) if page else x[1]
            return in_order.reshape(4, K, capacity, *x.shape[4:])

        past = jax.tree.map(rows, cache), jnp.asarray(length_B)
        caches = [past, (buffer, jnp.asarray(used_B))]
        out = [cached_attention(q, k, v, caches, kind=kind) for kind in all_kinds(sinks_Q)]
        if not writes:
            return out
        new = cache_of(k[:, None], v[:, None], jnp.dtype(kv_dtype), "head_dim")
        return [(each, put_token(buffer, new, jnp.int32(used_B[0]))) for each in out]

    def make() -> tuple[Any, ...]:
        lead = (2, 4 * pages + 1, page) if page else (2, 4, capacity)

        def stored(seed: int, *of: int) -> Any:
            keys, values = (_normal(seed + n, (*of, K, H), "float32") for n in range(2))
            return cache_of(keys, values, jnp.dtype(kv_dtype), "head_dim")

        qkv = (_normal(n, (4, (Q, K, K)[n], H), dtype) for n in range(3))
        return stored(3, *lead), stored(5, 4, 16), jnp.arange(Q) / Q, *qkv

    what = f"{implementation} attention with {Q} and {K} heads of {H} in {dtype} to a cache in {kv_dtype}"
    return Trial(what + (f", pages of {page}" if page else ""), by_kernel, by_xla, make)


def _normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def _with_gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    # The result, and the gradients of half the sum of its squares.
    def both(*arrays: jax.Array) -> Any:
        out, pull = jax.vjp(function, *arrays)
        return out, pull(out)

    return both
