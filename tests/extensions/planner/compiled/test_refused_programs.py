"""A program that the compiler refuses for its memory has the bytes of the compiler's message."""

import types

import jax
import pytest

from jaxrl_planner.compiled.ahead import peak_here
from jaxrl_planner.compiled.programs import Piece, Program

MESSAGES = {
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 35.41G of 31.25G hbm.": 35.41,
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for "
    "HLO temporaries (269.44G) exceeds available HBM (95.73G). HLO module: jit_generate.": 269.44,
}


class Refused:
    """A jitted function whose compiler refuses it."""

    def __init__(self, message: str):
        self._message = message

    def lower(self) -> "Refused":
        return self

    def compile(self) -> None:
        raise jax.errors.JaxRuntimeError(self._message)


def program_of(message: str) -> Program:
    return Program("actor", "generate", "sampling", (Piece(Refused(message), ()),), frozenset(), 0)


@pytest.mark.parametrize(("message", "gib"), MESSAGES.items(), ids=["program", "temporaries"])
def test_the_bytes_are_those_of_the_message(message, gib):
    assert peak_here(program_of(message)) == int(gib * 2**30)


def test_other_errors_are_raised():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        peak_here(program_of("INTERNAL: no"))


def test_buffers_of_the_host_are_no_memory_of_a_device():
    """What the compiler says of 8B's update with rows of a million tokens, whose inputs are on the host."""
    figures = types.SimpleNamespace(
        argument_size_in_bytes=12_623_089_696,
        temp_size_in_bytes=60_242_478_304,
        output_size_in_bytes=12_321_100_324,
        alias_size_in_bytes=12_287_545_352,
        peak_memory_in_bytes=167_275_467_582,
    )
    compiled = types.SimpleNamespace(memory_analysis=lambda: figures)
    function = types.SimpleNamespace(lower=lambda: types.SimpleNamespace(compile=lambda: compiled))
    program = Program("actor", "update", "learning", (Piece(function, ()),), frozenset(), 0)
    assert peak_here(program) == pytest.approx(72.9e9, rel=1e-3)
