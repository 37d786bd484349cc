"""Compiles a JSON schema to a grammar over a tokenizer's tokens, by llguidance."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from jaxrl.errors import UserError
from jaxrl.rollout.logit_edits import Grammar
from jaxrl.serving.openai.chat_prompts import RequestTokenizer

# Between two tokens of JSON. Models that may write any amount of white space sometimes write nothing else.
_WHITE_SPACE = r"[ \t\r\n]{0,32}"
# Schemas and tokenizers that are kept compiled. A tokenizer takes about a second.
_KEPT_SCHEMAS, _KEPT_TOKENIZERS = 64, 2


def json_grammar(
    tokenizer: RequestTokenizer, stop_ids: tuple[int, ...], schema: Mapping[str, Any]
) -> Grammar:
    """A matcher of the JSON texts that a schema allows, each followed by a stop id.

    Raises:
      UserError: llguidance is not installed, or does not know something in the schema.
    """
    return _compiled(tokenizer, stop_ids, json.dumps(schema))


@functools.lru_cache(_KEPT_SCHEMAS)
def _compiled(tokenizer: RequestTokenizer, stop_ids: tuple[int, ...], schema: str) -> Grammar:
    tokens, llguidance = _tokens(tokenizer, stop_ids)
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_pattern": _WHITE_SPACE}
        )
    except ValueError as error:
        raise UserError(f"response_format has no JSON schema ({error}); correct it") from error
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
    if fault := matcher.get_error():
        raise UserError(
            f"response_format has a schema that cannot be enforced ({fault.splitlines()[0][:200]}); change "
            "or leave out that part of it"
        )
    return matcher


@functools.lru_cache(_KEPT_TOKENIZERS)
def _tokens(tokenizer: RequestTokenizer, stop_ids: tuple[int, ...]) -> tuple[Any, Any]:
    """The tokenizer as llguidance has it, and the package."""
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise UserError(
            "response_format needs the package llguidance, which this server lacks; run pip install "
            "llguidance there, or leave response_format out"
        ) from error
    tokens = llguidance.LLTokenizer(tokenizer.backend.to_str(), eos_token=list(stop_ids))
    return tokens, llguidance
