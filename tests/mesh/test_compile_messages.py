"""Long compilations are told at their start and end."""

import time

import jax
import jax.numpy as jnp
import pytest

from jaxrl.mesh import compile_messages
from jaxrl.mesh.compilation_cache import compiled_programs_not_kept


@pytest.fixture
def announcing(monkeypatch):
    """The messages of everything that takes longer than a moment."""
    monkeypatch.setattr(compile_messages, "_SHORTEST_S", 0.05)
    # Tests have them off (conftest.py).
    monkeypatch.setattr(compile_messages, "_announcing", False)
    compile_messages.announce_compilations()
    compile_messages.announce_compilations()
    # A program of an earlier run of the tests would be read from the cache.
    with compiled_programs_not_kept():
        yield
    jax.monitoring.unregister_scalar_listener(compile_messages._begin)
    jax.monitoring.unregister_event_duration_listener(compile_messages._end)


def slow_program():
    def slow(x):
        for i in range(400):
            x = jnp.sin(x @ x) + i
        return x

    return jax.jit(slow)


def test_a_long_compilation_is_told_once_at_both_ends(announcing, capsys):
    program = slow_program()
    program(jnp.ones((8, 8)))
    told = capsys.readouterr().out.splitlines()
    begun, ended, *rest = [line for line in told if "slow" in line]
    assert begun == "compiling slow ..." and not rest
    assert ended.startswith("compiled slow in ") and ended.endswith(" s")
    program(jnp.ones((8, 8)))
    assert "slow" not in capsys.readouterr().out


def test_a_short_compilation_is_not_told(announcing, capsys, monkeypatch):
    monkeypatch.setattr(compile_messages, "_SHORTEST_S", 100.0)
    slow_program()(jnp.ones((8, 8)))
    time.sleep(0.1)
    assert capsys.readouterr().out == ""
    assert not compile_messages._running
