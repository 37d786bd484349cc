"""The tokens of a dispatch join a cache, by one scatter on GPUs and a loop elsewhere, as by a NumPy twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.models.cache import kv_cache, paged_cache
from jaxrl.models.cache.cache_kind import CacheKind
from jaxrl.models.cache.kv_cache import CacheShape, PagedSlots
from jaxrl.rollout.decode_state import Prefix
from jaxrl.rollout.slot_programs import SlotLayout, SlotPrograms

n, C, W, PAGE, PAGES = 4, 12, 3, 4, 9
SHAPES = {
    "keys last": CacheShape(2, 2, 3, jnp.float32),
    "head last": CacheShape(2, 2, 3, jnp.bfloat16, "head_dim"),
    "int8": CacheShape(2, 2, 3, jnp.int8, "head_dim"),
    "latent": CacheShape(2, 1, 5, jnp.float32, "head_dim", latent=True),
    "routes": CacheShape(2, 2, 3, jnp.float32, "head_dim", routes=(2, 2)),
}
KINDS = {name: CacheKind(shape) for name, shape in SHAPES.items()} | {
    "per layer": CacheKind(SHAPES["head last"], unrolled=True)
}
# Beginnings anywhere; the last slot is not live, and its start means nothing.
START, LIVE = np.array([0, 5, 9, 100], np.int32), np.array([True, True, True, False])
TABLE = np.array([[3, 7, 0], [8, 2, 0], [1, 4, 6], [5, 0, 0]], np.int32)


def filled(kind, *sizes, seed):
    rng, shapes = np.random.default_rng(seed), jax.eval_shape(lambda: kind.empty(*sizes))
    return jax.tree.map(lambda x: rng.integers(1, 100, x.shape).astype(x.dtype), shapes)


def twin(leaf, names, new, place_of):
    """Token by token; `place_of(slot, w)` is the entry and place of a token, None for a lost one."""
    batch, length = names.index("batch"), names.index("length")
    out = np.array(np.moveaxis(leaf, (batch, length), (0, 1)))
    new = np.moveaxis(np.asarray(new), (batch, length), (0, 1))
    for slot in range(n):
        for w in range(W):
            place = place_of(slot, w) if LIVE[slot] else None
            if place is not None:
                out[place] = new[slot, w]
    return np.moveaxis(out, (0, 1), (batch, length))


def in_slots(slot, w):
    return slot, START[slot] + w


def in_pages(slot, w):
    number, place = divmod(START[slot] + w, PAGE)
    page = TABLE[slot, number] if number < TABLE.shape[1] else 0
    return (page, place) if page else None


def assert_written(kind, got, tree, new, place_of, *, skip=0):
    want = jax.tree.map(
        lambda leaf, names, x: twin(leaf, names, x, place_of), tree, kind.axes(tree), new
    )
    for path, leaf in jax.tree.leaves_with_path(got):
        names = dict(jax.tree.leaves_with_path(kind.axes(tree), is_leaf=_is_axes))[path]
        other = dict(jax.tree.leaves_with_path(want))[path]
        # The scratch page holds anything.
        rest = np.arange(skip, leaf.shape[names.index("batch")])
        one, other = (np.take(np.asarray(x), rest, names.index("batch")) for x in (leaf, other))
        np.testing.assert_array_equal(one, other)


def _is_axes(x):
    return isinstance(x, tuple) and all(a is None or isinstance(a, str) for a in x)


@pytest.fixture(params=["loop", "scatter"])
def way(request, monkeypatch):
    if request.param == "scatter":
        for module in (kv_cache, paged_cache):
            at_once = lambda tree, new, axes, _, places: kv_cache.scattered(tree, new, axes, places)  # noqa: E731
            monkeypatch.setattr(module, "written", at_once)
    return request.param


@pytest.mark.parametrize("name", KINDS)
def test_new_tokens_follow_those_of_live_slots(way, name):
    kind = KINDS[name]
    tree, new = filled(kind, n, C, seed=0), filled(kind, n, W, seed=1)
    got = jax.jit(kind.write)(tree, new, START, LIVE)
    assert_written(kind, got, tree, new, in_slots)


@pytest.mark.parametrize("name", KINDS)
def test_new_tokens_go_to_the_pages_of_live_slots(way, name):
    """Across pages; what is beyond the pages of a slot is lost."""
    kind = KINDS[name]
    pool, new = filled(kind, PAGES, PAGE, seed=0), filled(kind, n, W, seed=1)
    slots = PagedSlots(pool, TABLE, np.zeros(n, np.int32))
    axes = kind.axes(pool)

    @jax.jit
    def write(slots, new):
        return paged_cache.written_to_pages(slots, axes, new, jnp.asarray(START), jnp.asarray(LIVE))

    assert_written(kind, write(slots, new).pool, pool, new, in_pages, skip=1)


def test_a_cache_of_more_rows_than_int32_counts_is_traced():
    """As a plan does, for the pages of all devices of a pod: 64 x 2**18 x 128 rows are 2**31."""
    kind = CacheKind(CacheShape(64, 1, 128, jnp.bfloat16, "head_dim"))
    pool, new = (jax.eval_shape(lambda s=s: kind.empty(*s)) for s in ((2**18, 128), (n, W)))

    def write(pool, new):
        slots = PagedSlots(pool, jnp.asarray(TABLE), jnp.zeros(n, jnp.int32))
        return paged_cache.written_to_pages(
            slots, kind.axes(pool), new, jnp.asarray(START), jnp.asarray(LIVE)
        )

    assert jax.eval_shape(write, pool, new).pool.k.shape == (64, 2**18, 1, 128, 128)


def test_states_of_live_slots_are_replaced(way):
    tree = np.arange(24, dtype=np.float32).reshape(2, n, 3)
    new = -np.ones_like(tree)
    got = jax.jit(kv_cache.write_slots, static_argnums=1)(
        tree, ("layers", "batch", None), new, START, LIVE
    )
    np.testing.assert_array_equal(got, np.where(LIVE[None, :, None], new, tree))


def test_devices_write_their_own_slots_and_heads(way):
    """Two replicas with two kv heads apart, as on one device; no device hears of another."""
    kind = KINDS["head last"]
    new = filled(kind, n, W, seed=1)
    tokens, length = np.arange(n * W, dtype=np.int32).reshape(n, W), np.minimum(START, C - W)
    context = Prefix(filled(kind, n, C, seed=0), np.zeros((n, C), np.int32), length, length)
    results = []
    for layout, devices in (("1-1-1", 1), ("1-2-2", 4)):
        mesh = build_mesh(
            ParallelLayout.from_config(LayoutConfig(train=layout)), jax.devices()[:devices]
        )
        programs = SlotPrograms(kind, SlotLayout(mesh, kind), W)
        program = jax.jit(programs.append)
        arguments = programs.layout.place(context), new, tokens, jnp.asarray(LIVE)
        text = program.lower(*arguments).compile().as_text()
        assert not {c for c in ("all-reduce", "all-to-all", "permute") if f" {c}(" in text}
        results.append(program(*arguments))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_gpu_has_no_loop_over_slots():
    """A TPU has one: its scatters go row by row."""
    kind = KINDS["head last"]
    tree, new = kind.empty(n, C), kind.empty(n, W)
    traced = jax.jit(kind.write).trace(tree, new, START, LIVE)
    gpu, tpu = (traced.lower(lowering_platforms=(p,)).as_text() for p in ("cuda", "tpu"))
    assert ("stablehlo.scatter" in gpu, "stablehlo.while" in gpu) == (True, False)
    assert ("stablehlo.scatter" in tpu, "stablehlo.while" in tpu) == (False, True)
