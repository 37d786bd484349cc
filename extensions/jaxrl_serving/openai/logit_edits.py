"""Edits of logits, made on the host from the tokens of a sample: bias, penalties by count, JSON schemas.

All of them are one row of values that is added to the logits of a slot before temperature and truncation
(`rollout.sampling.SampleEdits`). Log-probabilities stay those of the model without edits. JSON schemas are
compiled by llguidance to a grammar over the tokens.

    V vocabulary
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl_serving.call_formats import CallFormat

# Added to the logits of tokens that a grammar forbids. It is finite, as in `sampling`, and lower than what
# `min_tokens` gives to stop ids: at the end of a grammar nothing else is left.
_NEVER = -1e32
# Between two tokens of JSON. Models that may write any amount of white space sometimes write nothing else.
_WHITE_SPACE = r"[ \t\r\n]{0,32}"
# Schemas and tokenizers that are kept compiled. A tokenizer takes about a second.
_KEPT_SCHEMAS, _KEPT_TOKENIZERS = 64, 2


# A matcher of llguidance, an optional package: a grammar, and the tokens that have been read.
Grammar: TypeAlias = Any


@dataclasses.dataclass(frozen=True, eq=False)
class LogitEdits:
    """The edits of a request's samples.

    Attributes:
      bias: value added to the logit of each of these token ids.
      presence_penalty: value subtracted from the logits of all tokens that the sample has; not of those that
        only its prompt has.
      frequency_penalty: the same for each time that the sample has the token.
      grammar: matcher of all texts that a sample may be, with nothing read; None for any text.
      grammar_after: token id after which the grammar begins; None if it begins at once.
      min_tokens: number of first tokens that are none of `stop_ids`.
      stop_ids: token ids that end the samples of this request alone.
    """

    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar: Grammar | None = None
    grammar_after: int | None = None
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()

    def begin(self) -> _SampleEdits:
        """The edits of a sample without tokens."""
        return _SampleEdits(self)


class _SampleEdits:
    """The edits of one sample; see `rollout.sampling.SampleEdits`."""

    def __init__(self, edits: LogitEdits):
        self._edits = edits
        # A matcher remembers what it has read, and all samples of a request begin with the same one.
        self._grammar = None if edits.grammar is None else edits.grammar.deep_copy()
        self._after = edits.grammar_after
        self._counts: collections.Counter[int] = collections.Counter()
        penalty = edits.presence_penalty or edits.frequency_penalty
        self._always = bool(penalty or self._grammar is not None)
        self.error = ""

    @property
    def change(self) -> bool:
        """Whether the values change with every token."""
        return self._always or self._counts.total() < self._edits.min_tokens

    def add(self, tokens: np.ndarray) -> None:
        """Reads the next tokens of the sample, int32 [R]."""
        read = tokens.tolist()
        self._counts.update(read)
        if self._after in read:
            read = read[read.index(self._after) + 1 :]
            self._after = None
        if self._grammar is not None and self._after is None:
            for token in read:
                self._grammar.consume_token(token)
            self._note_error(self._grammar)

    def fill(self, row_V: np.ndarray) -> None:
        """Writes the values for the next token into a row of zeros, float32."""
        edits = self._edits
        row_V[list(edits.bias)] += np.array(list(edits.bias.values()), np.float32)
        if self._counts:
            tokens, counts = np.array(list(self._counts.items())).T
            row_V[tokens] -= edits.presence_penalty + edits.frequency_penalty * counts
        if self._counts.total() < edits.min_tokens:
            row_V[[token for token in edits.stop_ids if token < len(row_V)]] = _NEVER
        if self._grammar is not None and self._after is None and not self.error:
            allowed = np.frombuffer(self._grammar.compute_logit_bias(), np.uint8) != 0
            self._note_error(self._grammar)
            # A model may have more rows than its tokenizer has tokens.
            row_V[: len(allowed)][~allowed] = _NEVER
            row_V[len(allowed) :] = _NEVER

    def _note_error(self, grammar: Grammar) -> None:
        if fault := grammar.get_error():
            self.error = f"the grammar of the answer failed: {fault.splitlines()[0][:200]}"


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of the JSON texts that a schema allows."""
    return f"start: {_json(schema)}"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITE_SPACE}})


def tool_grammar(
    tokenizer: Tokenizer,
    stop_ids: tuple[int, ...],
    form: CallFormat,
    tools: Sequence[Mapping[str, Any]],
    start: str,
) -> str:
    """The grammar of answers whose calls are of these tools, and keep to the schemas of strict ones.

    Args:
      tokenizer, stop_ids: the model's.
      form: format of calls.
      tools: tools as the template reads them.
      start: beginning of a call that the prompt ends with; then the answer is the rest of it, and further
        calls if the format has several in a row. "" for an answer that is text, calls, or both.

    Raises:
      UserError: llguidance is not installed.
    """
    tokens, _ = _tokens(tokenizer, stop_ids)
    # Texts of a grammar match no special tokens, and llguidance takes all of the form <..> for special.
    added = tokenizer.backend.get_added_tokens_decoder().items()
    special = {token.content: i for i, token in added if tokens.is_special_token(i)}
    shown = [i for i, token in added if token.content in special and not token.special]
    split = re.compile(f"({'|'.join(map(re.escape, special)) or '(?!)'})")

    def terms(text: str) -> str:
        parts = filter(None, split.split(text))
        return " ".join(f"<[{special[x]}]>" if x in special else json.dumps(x) for x in parts)

    opening = "" if form.bare else form.opening
    # Of each tool that may be called: a call after `opening`, and the rest of the one that has started.
    calls, begun = [], []
    for function in (tool["function"] for tool in tools):
        head = f"{form.begin(function['name'])} "
        schema = function.get("parameters") if function.get("strict") else None
        if head.startswith(start):
            tail = f"{_json(schema or {'type': 'object'})} {terms(form.closing)}"
            calls.append(f"{terms(head.removeprefix(opening))} {tail}")
            begun.append(f"{terms(head.removeprefix(start))} {tail}")
    rules = ["call: " + " | ".join(calls), r"TEXT: /(.|\n)*/", "said: TEXT"]
    if others := [str(i) for i in shown if i != special.get(opening)]:
        rules[-1] += f" (<[{','.join(others)}]> TEXT)*"
    if start:
        rules.append("begun: " + " | ".join(begun))
        more = f'("\\n" {terms(opening)} call)*' if form.repeats else ""
        rules.append(f"start: begun {more}")
    elif form.bare:
        rules += [r"FIRST: /[^{\s]/", "start: call | FIRST said"]
    elif opening in special:
        rules.append(f"start: (said {terms(opening)} call)* said")
    else:
        # It ends with the first opening that comes.
        rules += [f"open[lazy]: TEXT {json.dumps(opening)}", "start: (open call)* TEXT"]
    return "\n".join(rules)


@functools.lru_cache(_KEPT_SCHEMAS)
def matcher_of(
    tokenizer: Tokenizer, stop_ids: tuple[int, ...], grammar: str, field: str
) -> Grammar:
    """A matcher of the texts of a grammar, each followed by a stop id.

    Raises:
      UserError: llguidance is not installed, or does not know something in a schema of the field.
    """
    tokens, llguidance = _tokens(tokenizer, stop_ids)
    grammar = llguidance.LLMatcher.grammar_from_lark(grammar)
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
    if fault := matcher.get_error():
        # Without the place in the grammar, which the user has not seen.
        fault = fault.splitlines()[0].rpartition("failed to compile JSON schema: ")[2]
        raise UserError(
            f"{field} has a schema that cannot be enforced ({fault[:200]}); change or leave out that part "
            "of it"
        )
    return matcher


@functools.lru_cache(_KEPT_TOKENIZERS)
def _tokens(tokenizer: Tokenizer, stop_ids: tuple[int, ...]) -> tuple[Any, Any]:
    """The tokenizer as llguidance has it, and the package."""
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise UserError(
            "response_format, strict tools and a tool_choice that demands a call need the extra json, which "
            "this server lacks; run pip install llguidance there, or leave them out"
        ) from error
    tokens = llguidance.LLTokenizer(tokenizer.backend.to_str(), eos_token=list(stop_ids))
    return tokens, llguidance
