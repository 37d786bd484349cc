from jaxrl.rewards.answer_reader.answer_markup import closing_brace, spelled, undressed
from jaxrl.rewards.answer_reader.answer_tokens import MAX_CHARS

__all__ = ["MAX_CHARS", "closing_brace", "spelled", "undressed"]
