import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside import of_extension
from closeness import BFLOAT16, assert_close
from extras import import_extra
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import AxisType, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxrl.errors import UserError
from jaxrl.models.attention import TreeSegments, attention, pick_implementation
from jaxrl.models.attention_kind import FULL, AttentionKind
from jaxrl.models.cache.cached_attention import cached_attention
from jaxrl.models.cache.kv_cache import KVCache
from jaxrl.models.kernels import cudnn_attention as cudnn
from jaxrl.models.kernels.cudnn_attention import cudnn_attention, segment_offsets
from jaxrl.models.kernels.splash_attention import splash_attention
from jaxrl.models.xla_attention import needed_tiles

read_topology = of_extension("jaxrl_planner.hardware.cluster:read_topology")

# Nine tokens are a row of one block, of three whole blocks, or of two and a padded one.
BLOCK_TOKENS = pytest.mark.parametrize("block_tokens", [512, 3, 4])
KINDS = {
    "full": FULL,
    "window": AttentionKind(window=3),
    # As scanned layers have it, of which some slide.
    "slides": AttentionKind(window=3, slides=np.array(True)),
    "does not slide": AttentionKind(window=3, slides=np.array(False)),
    "window, capped": AttentionKind(window=4, softcap=0.7),
}


def normal(rng, *shape) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def attention_twin(
    q_BTQH, k_BTKH, v_BTKH, segment_ids_BT, d_out_BTQH=None, kind=FULL
) -> list[np.ndarray]:
    """Output, 0 at padding, and gradients for a cotangent of it; one query at a time, in float64."""
    slides = kind.window and (kind.slides is None or bool(kind.slides))
    window = kind.window if slides else q_BTQH.shape[1]
    B, T, Q, H = q_BTQH.shape
    group = Q // k_BTKH.shape[2]
    q, k, v = (a.astype(np.float64) for a in (q_BTQH, k_BTKH, v_BTKH))
    d_out = np.zeros_like(q) if d_out_BTQH is None else d_out_BTQH
    out, d_q, d_k, d_v = (np.zeros_like(a) for a in (q, q, k, v))
    for b, t, n in np.ndindex(B, T, Q):
        if not segment_ids_BT[b, t]:
            continue
        near = range(max(0, t + 1 - window), t + 1)
        seen = [s for s in near if segment_ids_BT[b, s] == segment_ids_BT[b, t]]
        at = (b, seen, n // group)
        scores = k[at] @ q[b, t, n] / np.sqrt(H)
        slope = np.ones_like(scores)
        if kind.softcap:
            slope = 1 / np.cosh(scores / kind.softcap) ** 2
            scores = kind.softcap * np.tanh(scores / kind.softcap)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, t, n] = weights @ v[at]
        d_weights = v[at] @ d_out[b, t, n]
        d_scores = weights * (d_weights - weights @ d_weights) * slope / np.sqrt(H)
        d_q[b, t, n] = d_scores @ k[at]
        d_k[at] += np.outer(d_scores, q[b, t, n])
        d_v[at] += np.outer(weights, d_out[b, t, n])
    return [out, d_q, d_k, d_v]


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(attend, q, k, v, ids, d_out):
    """Outputs, 0 at padding, where they mean nothing, and gradients."""
    own = ids.segment_ids_BT if isinstance(ids, TreeSegments) else ids
    real = (own > 0)[..., None, None]
    out, pull_back = jax.vjp(lambda q, k, v: jnp.where(real, attend(q, k, v, ids), 0), q, k, v)
    return out, *pull_back(d_out)


def temp_bytes(attend, T: int) -> int:
    """Scratch memory of the compiled forward and backward pass over one row."""
    q, k = (jax.ShapeDtypeStruct((1, T, heads, 8), jnp.float32) for heads in (2, 1))
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
    compiled = with_gradients.lower(attend, q, k, k, ids, q).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.fixture
def packed():
    """Rows of nine tokens: three segments, one with padding behind it, ids that rise and fall."""
    rng = np.random.default_rng(0)
    segment_ids_BT = np.array(
        [[1, 1, 1, 2, 2, 2, 2, 3, 3], [1, 1, 1, 1, 1, 0, 0, 0, 0], [2, 2, 0, 1, 1, 2, 7, 1, 0]],
        np.int32,
    )
    qkv = (normal(rng, 3, 9, 4, 8), normal(rng, 3, 9, 2, 8), normal(rng, 3, 9, 2, 8))
    return *qkv, segment_ids_BT


# Plain XLA


@BLOCK_TOKENS
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_values_and_gradients_equal_their_numpy_twin(packed, block_tokens, kind):
    """Padding, which is a segment of its own, included: nothing is seen later or elsewhere."""
    d_out = normal(np.random.default_rng(1), 3, 9, 4, 8)
    attend = functools.partial(attention, kind=kind, block_tokens=block_tokens)
    twins = attention_twin(*packed, d_out, kind)
    for ours, twin in zip(with_gradients(attend, *packed, d_out), twins, strict=True):
        assert_close(ours, twin)


@BLOCK_TOKENS
@pytest.mark.parametrize("window", [0, 3, 6])
def test_tree_segments_see_their_prefix(block_tokens, window):
    """As if each were alone with it: outputs, gradients and the sum of what the shared part gets."""
    rng = np.random.default_rng(0)
    shared, ends = 4, (7, 9, 13)
    arrays = [normal(rng, 1, 15, heads, 8) for heads in (4, 2, 2, 4)]
    ids_T = np.array([1] * 4 + [2] * 3 + [3] * 2 + [4] * 4 + [0] * 2, np.int32)
    prefix_T = np.array([0] * 4 + [1] * 9 + [0] * 2, np.int32)
    positions_T = np.array([*range(4), *range(4, 7), 4, 5, *range(4, 8), 0, 0], np.int32)
    segments = TreeSegments(ids_T[None], prefix_T[None], positions_T[None])
    *qkv, d_out = arrays
    kind = AttentionKind(window)
    attend = functools.partial(attention, kind=kind, block_tokens=block_tokens)
    out, *grads = with_gradients(attend, *qkv, segments, d_out)
    expected = [np.zeros_like(x) for x in (d_out, *qkv)]
    for number, (begin, end) in enumerate(itertools.pairwise((shared, *ends))):
        line = [*range(shared), *range(begin, end)]
        here = [x[:, line] for x in arrays]
        if number:
            # The shared part's own outputs count once.
            here[3] = here[3] * (np.arange(len(line)) >= shared)[None, :, None, None]
        twins = attention_twin(*here[:3], np.ones((1, len(line)), np.int32), here[3], kind)
        expected[0][:, line] = twins[0]
        for total, twin in zip(expected[1:], twins[1:], strict=True):
            total[:, line] += twin
    live = ids_T > 0
    for ours, twin in zip((out, *grads), expected, strict=True):
        assert_close(np.asarray(ours)[:, live], twin[:, live])


@pytest.mark.parametrize("block_tokens", [512, 4])
def test_bfloat16_stays_bfloat16_and_close(packed, block_tokens):
    d_out = normal(np.random.default_rng(1), 3, 9, 4, 8)
    low = [a.astype(jnp.bfloat16) for a in (*packed[:3], d_out)]
    attend = functools.partial(attention, block_tokens=block_tokens)
    ours = with_gradients(attend, *low[:3], packed[3], low[3])
    for a, twin in zip(ours, attention_twin(*packed, d_out), strict=True):
        assert a.dtype == jnp.bfloat16
        assert_close(np.asarray(a, np.float32), twin, rtol=BFLOAT16)


def test_blocks_without_a_common_segment_and_blocks_of_the_future_are_never_computed():
    rng = np.random.default_rng(2)
    q, k, v = normal(rng, 2, 16, 2, 8), normal(rng, 2, 16, 1, 8), normal(rng, 2, 16, 1, 8)
    ids = np.repeat(np.array([[1, 1, 2, 2], [1, 2, 3, 0]], np.int32), 4, axis=1)
    attend = jax.jit(functools.partial(attention, block_tokens=4))
    clean = np.asarray(attend(q, k, v, ids))
    # Computed and masked, it would show: 0 * nan is nan.
    v[:, :4] = v[:, 12:] = np.nan
    poisoned = np.asarray(attend(q, k, v, ids))
    np.testing.assert_array_equal(poisoned[:, 8:12], clean[:, 8:12])


def test_padding_costs_one_tile_a_block():
    """Texts of six and four tokens in blocks of four: five tiles, and one for each block of padding."""
    ids = np.array([[1] * 6 + [2] * 4 + [0] * 14], np.int32)
    blocks = ids.reshape(1, 6, 4).swapaxes(0, 1)
    needed = needed_tiles(blocks, None, None, xp=np)
    assert np.argwhere(needed).tolist() == [
        [0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [3, 3], [4, 4], [5, 5]
    ]  # fmt: skip
    # With a prompt shared by the second text, its blocks see the first one, too.
    prefix = np.where(ids == 2, 1, 0).reshape(1, 6, 4).swapaxes(0, 1)
    needed = needed_tiles(blocks, prefix, None, xp=np)
    assert needed[2].tolist() == [True, True, True, False, False, False]
    assert not needed[3:, :3].any() and needed[3:].sum() == 3


@pytest.mark.parametrize("kind", [AttentionKind(4), AttentionKind(4, slides=np.array(True))])
def test_of_a_window_only_the_blocks_it_reaches_are_computed(kind):
    """Two blocks of keys for each block of queries, however long the row: a cost linear in the length."""
    rng = np.random.default_rng(2)
    q, k, v = normal(rng, 1, 64, 2, 8), normal(rng, 1, 64, 1, 8), normal(rng, 1, 64, 1, 8)
    ids = np.ones((1, 64), np.int32)
    attend = functools.partial(
        with_gradients, functools.partial(attention, kind=kind, block_tokens=4)
    )
    out, d_q, *_ = jax.device_get(attend(q, k, v, ids, q))
    for begin in (16, 60):
        far = [x.copy() for x in (k, v)]
        for x in far:
            # Computed and masked, it would show: 0 * nan is nan.
            x[:, : begin - 4] = np.nan
        poisoned, d_q_poisoned, *_ = jax.device_get(attend(q, *far, ids, q))
        np.testing.assert_array_equal(poisoned[:, begin:], out[:, begin:])
        np.testing.assert_array_equal(d_q_poisoned[:, begin:], d_q[:, begin:])


def test_memory_is_linear_in_the_length():
    attend = functools.partial(attention, block_tokens=64)
    assert temp_bytes(attend, 2048) < 2.1 * temp_bytes(attend, 1024)
    # The yardstick can tell: at once, the scores are quadratic.
    assert temp_bytes(functools.partial(attention, block_tokens=2048), 2048) > 10 * temp_bytes(
        attend, 2048
    )


def test_a_mesh_changes_nothing(packed):
    q, k, v, ids = (a[:2] for a in packed)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    attend = functools.partial(attention, block_tokens=4)
    heads = P("data", None, "tensor")
    sharded = jax.shard_map(
        attend, mesh=mesh, in_specs=(heads, heads, heads, P("data")), out_specs=heads
    )
    for ours, whole in zip(
        with_gradients(sharded, q, k, v, ids, q),
        with_gradients(attend, q, k, v, ids, q),
        strict=True,
    ):
        assert_close(ours, whole)


@BLOCK_TOKENS
def test_a_sink_is_a_key_without_a_value(packed, block_tokens):
    """A row with one more token, which all others see: its scores are the sinks, its value is 0."""
    q, k, v, _ = packed
    H, sinks = q.shape[-1], np.array([0.5, -1.0, 2.0, 7.0], np.float32)
    # Of one dimension of their own, keys of other tokens have nothing and the sink all.
    wide = lambda x: np.pad(x, ((0, 0), (1, 0), (0, 0), (0, 1)))  # noqa: E731
    q_wide, k_wide, v_wide = wide(q), wide(k), wide(v)
    q_wide[..., -1] = sinks * np.sqrt(H + 1)
    q_wide[..., :-1] *= np.sqrt((H + 1) / H)
    k_wide[:, 0, :, -1] = 1
    along = normal(np.random.default_rng(1), *q.shape)
    out, d_q, *_ = attention_twin(q_wide, k_wide, v_wide, np.ones((3, 10), np.int32), wide(along))
    ones = np.ones((3, 9), np.int32)

    def loss(sinks):
        kind = AttentionKind(sinks=sinks)
        found = attention(q, k, v, ones, kind, block_tokens=block_tokens)
        return (found * along).sum(), found

    slope, found = jax.jit(jax.grad(loss, has_aux=True))(sinks)
    assert_close(found, out[:, 1:, :, :H])
    assert_close(slope, d_q[..., -1].sum((0, 1)) * np.sqrt(H + 1))


# Kernels


@pytest.mark.parametrize(
    ("head_dim", "kind"),
    [
        (64, FULL),
        (128, FULL),
        (64, AttentionKind(window=30, softcap=0.7)),
        pytest.param(64, AttentionKind(150, slides=np.array(True)), marks=pytest.mark.slow),
        pytest.param(64, AttentionKind(150, slides=np.array(False)), marks=pytest.mark.slow),
    ],
)
def test_splash_interpreted_agrees_with_xla(head_dim, kind):
    rng = np.random.default_rng(3)
    # 200 tokens are two blocks of 128, padded.
    q, d_out = normal(rng, 2, 200, 4, head_dim), normal(rng, 2, 200, 4, head_dim)
    k, v = normal(rng, 2, 200, 2, head_dim), normal(rng, 2, 200, 2, head_dim)
    ids = np.ones((2, 200), np.int32)
    ids[0, 90:], ids[1, 140:] = 2, 0
    splash = functools.partial(splash_attention, kind=kind, block_tokens=128, interpret=True)
    by_xla = functools.partial(attention, kind=kind)
    for ours, xla in zip(
        with_gradients(splash, q, k, v, ids, d_out),
        with_gradients(by_xla, q, k, v, ids, d_out),
        strict=True,
    ):
        assert_close(ours, xla)


def test_splash_refuses_blocks_that_tpus_do_not_have(packed):
    with pytest.raises(UserError, match=r"blocks of 200 tokens.*multiple of 128; use 256"):
        attention(*packed, implementation="splash", block_tokens=200)


@pytest.mark.parametrize("name", [name for name in KINDS if "capped" not in name])
def test_cudnn_is_asked_for_the_same_thing(packed, name):
    kind = KINDS[name]

    def as_xla(q, k, v, ids):
        return cudnn_attention(q, k, v, ids, kind, implementation="xla")

    d_out = normal(np.random.default_rng(4), 3, 9, 4, 8)
    for ours, twin in zip(
        with_gradients(as_xla, *packed, d_out), attention_twin(*packed, d_out, kind), strict=True
    ):
        assert_close(ours, twin)
    # The kernel's gradient takes an even number of tokens only.
    assert "[3,1,10,10]" in str(jax.make_jaxpr(as_xla)(*packed))


HOPPER = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
# The first JAX whose cuDNN attention has the offsets of keys right.
has_offsets = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="needs jax 0.11.2")


def test_segments_are_told_by_their_begins_and_lengths():
    """Padding is a segment too; behind the last one stands -1."""
    ids = np.array([[4, 4, 4, 2, 2, 7, 0, 0], [1] * 8], np.int32)
    lengths, offsets = jax.jit(segment_offsets, static_argnums=1)(ids, 4)
    np.testing.assert_array_equal(lengths, [[3, 2, 1, 2], [8, -1, -1, -1]])
    np.testing.assert_array_equal(offsets, [[0, 3, 5, 6, -1], [0, -1, -1, -1, -1]])


def attention_by_offsets(q, k, v, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type):
    """What JAX documents of its cuDNN attention with offsets, one token after the other."""
    assert mask_type.name == "PADDING_CAUSAL"
    assert q_seqlen is kv_seqlen
    assert q_offsets is kv_offsets
    place_11T = jnp.arange(q.shape[1])[None, None]
    begin_BM1 = q_offsets[:, :-1, None]
    inside_BMT = (place_11T >= begin_BM1) & (begin_BM1 >= 0)
    inside_BMT &= place_11T < begin_BM1 + q_seqlen[..., None]
    seen_BTT = (inside_BMT[..., None] & inside_BMT[:, :, None]).any(1)
    seen_BTT &= place_11T.mT >= place_11T
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btqh,bsqh->bqts", q, k) * scale
    return jnp.einsum(
        "bqts,bsqh->btqh", jax.nn.softmax(jnp.where(seen_BTT[:, None], scores, -1e30)), v
    )


@has_offsets
@pytest.mark.parametrize(("segments", "used"), [(3, 16), (18, 21), (30, None)])
def test_cudnn_gets_segments_by_offsets_on_hopper(monkeypatch, segments, used):
    """Rows of 41 tokens, padded to 42, for kernels with room for 16 and 21 segments, and the way for more."""
    rooms = set()

    def kernel(*arrays, q_seqlen, **options):
        jax.debug.callback(functools.partial(rooms.add, q_seqlen.shape[1]))
        return attention_by_offsets(*arrays, q_seqlen=q_seqlen, **options)

    monkeypatch.setattr(fused, "dot_product_attention", kernel)
    monkeypatch.setattr(cudnn, "_TOKENS_OF_A_SEGMENT", 2)
    rng = np.random.default_rng(0)
    q, d_out = normal(rng, 2, 41, 4, 8), normal(rng, 2, 41, 4, 8)
    k, v = normal(rng, 2, 41, 2, 8), normal(rng, 2, 41, 2, 8)
    # The first row has as many segments as that, padding included.
    ids = np.sort(np.arange(41)[None] % np.array([[segments - 1], [2]]) + 1, axis=1).astype(
        np.int32
    )
    ids[0, -1:] = 0

    def ours(q, k, v, ids):
        return attention(q, k, v, ids, implementation="cudnn", device=HOPPER)

    for got, twin in zip(
        with_gradients(ours, q, k, v, ids, d_out),
        attention_twin(q, k, v, ids, d_out, FULL),
        strict=True,
    ):
        assert_close(got, twin)
    jax.effects_barrier()
    assert rooms == {used} - {None}


@pytest.mark.slow
@has_offsets
def test_attention_by_offsets_compiles_for_a_gpu_that_is_not_here():
    """Memory is linear in the length."""
    import_extra("aot-gpu", "jax_plugins.xla_cuda13")
    device = read_topology("h100:1x1").devices[0]
    here = SingleDeviceSharding(device)

    def scratch(tokens):
        shaped = lambda *shape: jax.ShapeDtypeStruct(shape, "bfloat16", sharding=here)  # noqa: E731
        ids = jax.ShapeDtypeStruct((1, tokens), "int32", sharding=here)

        def total(q, k, v, ids):
            out = attention(q, k, v, ids, implementation="cudnn", device=device)
            return out.astype(jnp.float32).sum()

        gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
        key = shaped(1, tokens, 1, 128)
        compiled = gradient.lower(shaped(1, tokens, 2, 128), key, key, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert scratch(131_072) < 4.5 * scratch(32_768)


OLDER = types.SimpleNamespace(platform="gpu", compute_capability="8.0")
BLACKWELL = types.SimpleNamespace(platform="gpu", compute_capability="10.3")
LONG = dict(tokens=131_072)


@pytest.mark.parametrize(
    ("platform", "dtype", "picked", "needs"),
    [
        ("tpu", "bfloat16", "splash", {}),
        ("tpu", "float32", "splash", {}),
        ("gpu", "bfloat16", "cudnn", {}),
        ("cuda", "float16", "cudnn", {}),
        ("gpu", "float32", "xla", {}),
        ("rocm", "bfloat16", "xla", {}),
        ("cpu", "bfloat16", "xla", {}),
        # Large heads, which before Hopper are those of 256 already.
        ("gpu", "bfloat16", "cudnn", dict(head_dim=256)),
        ("gpu", "bfloat16", "xla", dict(head_dim=512)),
        ("tpu", "bfloat16", "splash", dict(head_dim=512)),
        ("gpu", "bfloat16", "xla", dict(head_dim=256, device=OLDER)),
        ("gpu", "bfloat16", "cudnn", dict(head_dim=128, device=OLDER)),
        ("gpu", "bfloat16", "cudnn", dict(head_dim=256, device=BLACKWELL)),
        ("gpu", "bfloat16", "xla", dict(softcap=50.0)),
        ("tpu", "bfloat16", "splash", dict(softcap=50.0)),
        ("gpu", "bfloat16", "xla", dict(sinks=True)),
        ("tpu", "bfloat16", "xla", dict(sinks=True)),
        # A mask of a long row, 2 T^2 bytes, is never made: of 128k tokens it has 34 GB.
        ("gpu", "bfloat16", "cudnn", dict(tokens=32_768)),
        ("gpu", "bfloat16", "xla", LONG),
        ("tpu", "bfloat16", "splash", LONG),
        ("tpu", "bfloat16", "xla", dict(tokens=131_073)),
        pytest.param("gpu", "bfloat16", "cudnn", LONG | dict(device=HOPPER), marks=has_offsets),
        ("gpu", "bfloat16", "xla", LONG | dict(device=HOPPER, windows=True)),
        ("gpu", "bfloat16", "xla", LONG | dict(device=HOPPER, softcap=50.0)),
        ("gpu", "bfloat16", "xla", LONG | dict(device=OLDER)),
    ],
)
def test_the_device_the_type_and_the_row_pick_the_implementation(platform, dtype, picked, needs):
    assert pick_implementation(platform, dtype, **needs) == picked
    assert pick_implementation(platform, dtype, picked, **needs) == picked
    assert pick_implementation(platform, dtype, "xla", **needs) == "xla"


@pytest.mark.parametrize(
    ("requested", "platform", "dtype", "needs", "message"),
    [
        ("splash", "gpu", "bfloat16", {}, "TPUs in rows of up to 131,072 tokens only; use auto"),
        ("cudnn", "cpu", "bfloat16", {}, "'cudnn' on cpu in bfloat16: it runs on NVIDIA GPUs in"),
        ("cudnn", "gpu", "float32", {}, "'cudnn' on gpu in float32: it runs on NVIDIA GPUs in"),
        ("flash", "gpu", "bfloat16", {}, "unknown attention implementation 'flash'; use auto or"),
        ("cudnn", "gpu", "bfloat16", {"head_dim": 512}, "of 512.*with heads of up to 256"),
        ("cudnn", "gpu", "bfloat16", {"softcap": 50.0}, "with capped scores.*use auto or xla"),
        ("splash", "tpu", "bfloat16", {"sinks": True}, "with attention sinks.*without sinks"),
    ],
)
def test_an_implementation_that_cannot_run_is_refused(requested, platform, dtype, needs, message):
    with pytest.raises(UserError, match=message):
        pick_implementation(platform, dtype, requested, **needs)


# One token against the cache


@pytest.mark.parametrize("length", [0, 1, 6])
@pytest.mark.parametrize(
    "kind", [FULL, AttentionKind(sinks=np.array([0.5, -1, 2, 7], np.float32))], ids=["", "sinks"]
)
def test_a_token_against_the_cache_is_the_last_token_of_the_whole_sequence(length, kind):
    rng = np.random.default_rng(2)
    q, k, v = normal(rng, 1, 7, 4, 8), normal(rng, 1, 7, 2, 8), normal(rng, 1, 7, 2, 8)
    whole = jax.jit(attention)(q, k, v, np.ones((1, 7), np.int32), kind)[:, length]

    # What a previous owner of the slot left behind the real tokens is large, and must not show.
    cache_k, cache_v = 100 * normal(rng, 1, 2, 8, 10), 100 * normal(rng, 1, 2, 10, 8)
    cache_k[..., :length] = k[:, :length].transpose(0, 2, 3, 1)
    cache_v[:, :, :length] = v[:, :length].transpose(0, 2, 1, 3)
    cached = jax.jit(cached_attention)(
        q[:, length],
        k[:, length],
        v[:, length],
        [(KVCache(cache_k, cache_v), np.array([length], np.int32))],
        kind=kind,
    )
    assert_close(cached, whole)
