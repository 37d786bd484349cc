"""Reads problems, demonstrations and preferences, tokenises them, and streams them in a shuffled order."""

from jaxrl.data.chat import ChatTemplate, PromptFormat
from jaxrl.data.demonstrations import Demonstration, DemonstrationStream, read_demonstrations
from jaxrl.data.preferences import Preference, PreferenceStream, read_preferences
from jaxrl.data.problems import Source, read_source
from jaxrl.data.prompt_encoding import EncodedPrompts, encode_prompts
from jaxrl.data.row_layouts import Record
from jaxrl.data.rows import open_rows
from jaxrl.data.stream import PromptStream
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "ChatTemplate",
    "Demonstration",
    "DemonstrationStream",
    "EncodedPrompts",
    "Preference",
    "PreferenceStream",
    "PromptFormat",
    "PromptStream",
    "Record",
    "Source",
    "Tokenizer",
    "encode_prompts",
    "load_tokenizer",
    "open_rows",
    "read_demonstrations",
    "read_preferences",
    "read_source",
    "train_tokenizer",
]
