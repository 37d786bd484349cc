"""Prompts, demonstrations, preferences: their files, their tokens, the order in which they are met."""

from jaxrl.data.chat import ChatTemplate
from jaxrl.data.demonstrations import (
    Demonstration,
    DemonstrationStream,
    MaskedExample,
    read_demonstrations,
    solutions_of,
)
from jaxrl.data.messages import render_prompt
from jaxrl.data.preferences import (
    Preference,
    PreferencePair,
    PreferenceStream,
    read_preferences,
)
from jaxrl.data.records import JsonlRecords, ReasoningGymRecords, Record, disjoint
from jaxrl.data.stream import (
    Overlong,
    PromptStream,
    evaluation_prompts,
)
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "ChatTemplate",
    "Demonstration",
    "DemonstrationStream",
    "JsonlRecords",
    "MaskedExample",
    "Overlong",
    "Preference",
    "PreferencePair",
    "PreferenceStream",
    "PromptStream",
    "ReasoningGymRecords",
    "Record",
    "Tokenizer",
    "disjoint",
    "evaluation_prompts",
    "load_tokenizer",
    "read_demonstrations",
    "read_preferences",
    "render_prompt",
    "solutions_of",
    "train_tokenizer",
]
