from jaxrl.rewards.answer_reader.answer_markup import (
    BOX,
    closing_brace,
    spelled,
    undressed,
    without_spacing,
)
from jaxrl.rewards.answer_reader.answer_tokens import MAX_CHARS, SCIENTIFIC, UNITS

__all__ = [
    "BOX",
    "MAX_CHARS",
    "SCIENTIFIC",
    "UNITS",
    "closing_brace",
    "spelled",
    "undressed",
    "without_spacing",
]
