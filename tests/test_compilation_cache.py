"""The cache that compiled programs are kept in between runs of the tests, which a killed run may damage."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture
def cache(tmp_path):
    """An empty one that keeps every program."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}

    def use(settings):
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    use(settings)
    yield tmp_path
    use(before)


def test_half_written_entries_are_compiled_again(cache):
    """What is left of an entry when its process is killed, or seen by another while it is written."""

    def result():
        jax.clear_caches()
        return float(jax.jit(lambda x: (x * 3).sum())(jnp.ones(5)))

    assert result() == 15
    entries = list(cache.glob("*-cache"))
    assert entries
    for entry in entries:
        whole = entry.read_bytes()
        entry.write_bytes(whole[: len(whole) // 2])
    with warnings.catch_warnings(record=True) as caught:
        assert result() == 15
    assert "Error reading persistent compilation cache entry" in str(caught[0].message)
