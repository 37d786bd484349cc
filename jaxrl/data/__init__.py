"""Prompts: where problems come from, how they become tokens, in what order they are met."""

from jaxrl.data.chat import ChatTemplate
from jaxrl.data.records import JsonlRecords, ReasoningGymRecords, Record, disjoint
from jaxrl.data.stream import (
    Example,
    Overlong,
    PromptStream,
    SupervisedStream,
    held_out_prompts,
    render_prompt,
)
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "ChatTemplate",
    "Example",
    "JsonlRecords",
    "Overlong",
    "PromptStream",
    "ReasoningGymRecords",
    "Record",
    "SupervisedStream",
    "Tokenizer",
    "disjoint",
    "held_out_prompts",
    "load_tokenizer",
    "render_prompt",
    "train_tokenizer",
]
