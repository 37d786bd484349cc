"""A program that the compiler refuses for its memory has the bytes of the compiler's message."""

import jax
import pytest

from jaxrl.planner.compiled.ahead import peak_here
from jaxrl.planner.compiled.programs import Piece, Program

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
