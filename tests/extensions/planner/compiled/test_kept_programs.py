"""The figures of a compiled program are kept, and read again only for the same program and options."""

import jax
import jax.numpy as jnp

from jaxrl_planner.compiled.ahead import compile_piece
from jaxrl_planner.hardware.accelerators import ACCELERATORS
from jaxrl_planner.hardware.cluster import Topology


def kept(**options: bool) -> bool:
    """Whether the figures of a program come from the cache."""
    lowered = jax.jit(lambda x: x + 1, compiler_options=options or None).lower(jnp.ones(3))
    here = Topology("here", ACCELERATORS["h100"], tuple(jax.devices()), 8)
    return compile_piece(lowered, here).cached


def test_another_compiler_option_is_another_program(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [kept(), kept()] == [False, True]
    options = {"xla_allow_excess_precision": False}
    assert [kept(**options), kept(**options)] == [False, True]
    assert kept()
