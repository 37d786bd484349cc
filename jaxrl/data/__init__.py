"""Reads problems, demonstrations and preferences, tokenises them, and streams them in a shuffled order."""

from jaxrl.data.chat import ChatTemplate
from jaxrl.data.demonstrations import (
    Demonstration,
    DemonstrationStream,
    MaskedExample,
    read_demonstrations,
    solutions_of,
)
from jaxrl.data.messages import PromptFormat, render_context
from jaxrl.data.preferences import (
    Preference,
    PreferencePair,
    PreferenceStream,
    read_preferences,
)
from jaxrl.data.prompt_encoding import (
    EncodedPrompts,
    Overlong,
    encode_prompts,
    evaluation_prompts,
)
from jaxrl.data.records import Record, disjoint, reasoning_gym_records
from jaxrl.data.row_files import open_rows
from jaxrl.data.source_reader import read_source
from jaxrl.data.sources import Source
from jaxrl.data.stream import PromptStream
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "ChatTemplate",
    "Demonstration",
    "DemonstrationStream",
    "EncodedPrompts",
    "MaskedExample",
    "Overlong",
    "Preference",
    "PreferencePair",
    "PreferenceStream",
    "PromptFormat",
    "PromptStream",
    "Record",
    "Source",
    "Tokenizer",
    "disjoint",
    "encode_prompts",
    "evaluation_prompts",
    "load_tokenizer",
    "open_rows",
    "read_demonstrations",
    "read_preferences",
    "read_source",
    "reasoning_gym_records",
    "render_context",
    "solutions_of",
    "train_tokenizer",
]
