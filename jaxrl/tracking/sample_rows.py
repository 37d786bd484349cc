"""Samples as rows of JSONL: prompt, response, grade and log-probabilities.

    {"step": 20, "source": "chain_sum", "prompt_id": 812, "sample": 3,
     "prompt": "5 + 9 - 7 =\\n", "answer": "7", "completion": "14 - 7 = 7; Answer: 7",
     "prediction": "7", "correct": true, "failure": null, "score": 1.0, "shaping": 0.0, "reward": 1.0,
     "reward_parts": {"grader": 1.0}, "length": 14, "truncated": false, "stop_reason": "stop_token",
     "entropy": 0.11, "token_pieces": {"text": ["14", " -", ...], "rollout_logprob": [-0.01, ...],
     "old_logprob": [-0.01, ...], "given": [5, 6]}}

If grading failed, `failure` has the reason, {"kind": "timeout", "message": "..."}, and the response counts as
wrong. `token_pieces` is the last key, so that lists of samples can skip parsing it: `text` has the string of
each token, `rollout_logprob` its log-probability under the sampler, `old_logprob` that under the trainer (if
known), and `given` the indices of tokens that were not sampled, or are trained elsewhere. A response with
tokens of older weights than the step's newest has `version`, that of each token's weights. Further
conversations of an agent's sample are in `branches`, a list of such objects. Prompts and completions are
untrusted.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.tokenizer import TextStream, Tokenizer
from jaxrl.roles.packing import Packing
from jaxrl.types import Branch, Scored

# The last key of a row.
TOKEN_STRINGS = "token_pieces"
_BEFORE_TOKEN_STRINGS = f',"{TOKEN_STRINGS}":'.encode()
# Decimals of a log-probability. Rounding to 4 takes a third of the bytes of full precision.
_DIGITS = 4


def sample_rows(
    scored: Scored,
    token_strings: TokenStrings | None,
    *,
    stop_ids: Collection[int],
    terms: Sequence[str] = ("grader",),
    step: int | None = None,
    old_logprob: Mapping[int, np.ndarray] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields a row for each response, group after group.

    Args:
      scored: the responses.
      token_strings: converts tokens to strings; None leaves `token_pieces` out.
      stop_ids: tokens that end a response.
      terms: names of the rewards whose weighted sum is the score.
      step: step of the run; None leaves it out.
      old_logprob: the trainer's log-probabilities: response index -> [R].
    """
    completions = scored.completions
    prompts, G = completions.prompts, completions.num_samples
    newest = max((int(v.max(initial=0)) for v in completions.version), default=0)

    def of_tokens(text: Sequence[str], row: Branch) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "text": text,
            "rollout_logprob": list(map(_number, row.rollout_logprob)),
        }
        if given := np.flatnonzero(row.mask == 0).tolist():
            fields["given"] = given
        if (row.version[row.mask > 0] < newest).any():
            fields["version"] = row.version.tolist()
        return fields

    for b in range(len(completions)):
        n = b // G
        tokens, failure = completions.tokens[b], scored.failures[b]
        stopped = len(tokens) and int(tokens[-1]) in stop_ids
        reason = "stop_token" if stopped else "stop_string"
        if completions.truncated_B[b]:
            reason = "length"
        row: dict[str, Any] = {} if step is None else {"step": step}
        row |= {
            "source": prompts.sources[n],
            "prompt_id": int(prompts.ids_N[n]),
            "sample": b % G,
            "prompt": prompts.texts[n],
            "answer": prompts.answers[n],
            "completion": completions.texts[b],
            "prediction": scored.predictions[b],
            "correct": bool(scored.correct_B[b]),
            "failure": failure and dataclasses.asdict(failure),
            "score": _number(scored.score_B[b]),
            "shaping": _number(scored.shaping_B[b]),
            "reward": _number(scored.reward_B[b]),
            "reward_parts": {
                name: _number(x) for name, x in zip(terms, scored.term_BK[b], strict=True)
            },
            "length": len(tokens),
            "truncated": bool(completions.truncated_B[b]),
            "stop_reason": reason,
            "entropy": _number(completions.entropy[b].mean()) if len(tokens) else None,
        }
        if token_strings is not None:
            fields = of_tokens(token_strings(tokens, completions.texts[b]), completions.branch(b))
            if (of_trainer := (old_logprob or {}).get(b)) is not None:
                fields["old_logprob"] = list(map(_number, of_trainer))
            if (agents := completions.of_agents) is not None and agents.branches[b]:
                fields["branches"] = [
                    of_tokens(token_strings(x.tokens), x) for x in agents.branches[b]
                ]
            row[TOKEN_STRINGS] = fields
        yield row


def to_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Rows as the content of a JSONL file, in ASCII because lone surrogates cannot be encoded as UTF-8."""
    dump = functools.partial(json.dumps, allow_nan=False, separators=(",", ":"))
    return b"".join(dump(row).encode() + b"\n" for row in rows)


def read_head(line: bytes) -> dict[str, Any]:
    """Parses a row without its tokens, which are most of its bytes."""
    # Quotes inside a text are escaped, so the first match is the key.
    head, found, _ = line.partition(_BEFORE_TOKEN_STRINGS)
    return json.loads(head + b"}" if found else line)


class TokenStrings:
    """Converts tokens to strings, special tokens to their names. Results are cached."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = {
            number: str(token)
            for number, token in tokenizer.backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._strings: dict[int, str] = {}

    def __call__(self, tokens: np.ndarray, text: str | None = None) -> list[str]:
        """The string that each token adds to the text; "" for a token that begins a character.

        Args:
          tokens: int32 [R].
          text: text of all tokens, without special tokens; None decodes them.
        """
        ids = tokens.tolist()
        text = self._tokenizer.decode(ids) if text is None else text
        for i in set(ids) - self._strings.keys():
            self._strings[i] = self._tokenizer.decode([i])
        # Most tokens are text by themselves; only if they do not join to the text they are decoded in turn.
        strings = [self._strings[i] for i in ids]
        if "".join(strings) != text:
            # A character has several tokens, or the tokenizer adds spaces only between words.
            stream = TextStream(self._tokenizer.decode)
            strings = list(stream.add(ids)[0])
            if strings:
                strings[-1] += stream.end()
        return [string or self._special.get(i, "") for i, string in zip(ids, strings, strict=True)]


def logprobs_by_response(
    packing: Packing, row_of_K: np.ndarray, lengths: Sequence[int]
) -> dict[int, np.ndarray]:
    """Extracts the log-probabilities of the first K responses from their rows.

    Args:
      packing: places of all sequences.
      row_of_K: [K, T], log-probabilities of the tokens of the row of each.
      lengths: K numbers of tokens of the responses.

    Returns:
      Sequence index -> float32 [R].
    """
    # The response is at the end of its sequence.
    ends = packing.starts % packing.shape.tokens + packing.lengths - packing.shared
    ends = ends[: len(lengths)].tolist()
    return {b: row_of_K[b, end - lengths[b] : end] for b, end in enumerate(ends)}


def _number(value: Any) -> float | None:
    # The rounded value; None for NaN and infinity, which JSON does not have.
    return round(float(value), _DIGITS) if math.isfinite(value) else None
