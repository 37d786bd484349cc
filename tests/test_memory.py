import functools
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest
from memory import drop_compiled_programs


@functools.cache
def kept(n: int) -> tuple[jax.stages.Wrapped, jax.stages.Compiled]:
    """A program by call, which JAX's caches keep, and one ahead of time, which only this one keeps."""
    x = jnp.arange(n + 3)
    by_call = jax.jit(lambda x: x * n - x.sum())
    by_call(x)
    return by_call, jax.jit(lambda x: x * n + x.sum()).lower(x).compile()


def mappings() -> int:
    return len(pathlib.Path("/proc/self/maps").read_text().splitlines())


def test_the_programs_of_a_file_are_dropped_with_their_memory():
    if not pathlib.Path("/proc/self/maps").exists():
        pytest.skip("memory mappings are counted on Linux only")
    drop_compiled_programs(types.ModuleType("nothing"), most_mappings=0)
    before = mappings()
    first, _ = kept(0)
    for n in range(30):
        kept(n)
    compiled = mappings()
    assert compiled > before + 60 and first._cache_size() == 1
    module = types.ModuleType("test_file")
    module.kept = kept
    drop_compiled_programs(module, most_mappings=0)
    assert kept.cache_info().currsize == first._cache_size() == 0
    assert mappings() < before + (compiled - before) / 4


@pytest.mark.parametrize(("most_bytes", "left"), [(2**50, 1), (0, 0)])
def test_programs_that_many_files_share_stay_while_there_is_room(most_bytes, left):
    shared = jax.jit(lambda x: x + 1)
    shared(jnp.zeros(2))
    nothing = types.ModuleType("nothing")
    drop_compiled_programs(nothing, most_mappings=2**30, most_bytes=most_bytes)
    assert shared._cache_size() == (left if pathlib.Path("/proc/self").exists() else 0)
