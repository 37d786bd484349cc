"""Samples as rows of JSONL: what a model was asked, what it wrote, and what was thought of it.

    {"step": 20, "source": "chain_sum", "prompt_id": 812, "sample": 3,
     "prompt": "5 + 9 - 7 =\\n", "answer": "7", "completion": "14 - 7 = 7; Answer: 7",
     "prediction": "7", "correct": true, "failure": null, "score": 1.0, "shaping": 0.0, "reward": 1.0,
     "reward_parts": {"grader": 1.0}, "length": 14, "truncated": false, "stop_reason": "stop_token",
     "entropy": 0.11, "token_pieces": {"text": ["14", " -", ...], "rollout_logprob": [-0.01, ...],
     "old_logprob": [-0.01, ...], "given": [5, 6]}}

Where the grader gave no verdict `failure` says why, {"kind": "timeout", "message": "..."}; the response then
counts as wrong. `token_pieces` comes last, so that a reader who lists samples need not parse it. In it
`rollout_logprob` is what the sampler said and `old_logprob`, where it is known, what the trainer said of the
same token; `given` are the places of tokens that an environment inserted. Prompts and completions are text of
strangers.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.rollout.text_stream import TextStream
from jaxrl.types import Completions, PackedBatch, Scored

# The key that is last in a row.
PIECES = "token_pieces"
_BEFORE_PIECES = f',"{PIECES}":'.encode()
# Digits of a log-probability: enough to see, a third of the bytes.
_DIGITS = 4


def sample_rows(
    scored: Scored,
    pieces: TokenPieces | None,
    *,
    stop_ids: Collection[int],
    terms: Sequence[str] = ("grader",),
    step: int | None = None,
    old_logprob: Mapping[int, np.ndarray] | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for every response, group after group.

    Args:
      scored: the responses.
      pieces: spells single tokens; None leaves them out.
      stop_ids: tokens that end a response.
      terms: names of the rewards that the score is the sum of.
      step: of the run.
      old_logprob: the trainer's log-probabilities, by response.
    """
    completions = scored.completions
    prompts, G = completions.prompts, completions.num_samples
    for b in range(len(completions)):
        n = b // G
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
            "failure": _failure_of(scored, b),
            "score": _number(scored.score_B[b]),
            "shaping": _number(scored.shaping_B[b]),
            "reward": _number(scored.reward_B[b]),
            "reward_parts": {
                name: _number(x) for name, x in zip(terms, scored.term_BK[b], strict=True)
            },
            "length": len(completions.tokens[b]),
            "truncated": bool(completions.truncated_B[b]),
            "stop_reason": _stop_reason(completions, b, stop_ids),
            "entropy": _mean(completions.entropy[b]),
        }
        if pieces is not None:
            row[PIECES] = _pieces_of(completions, b, pieces, (old_logprob or {}).get(b))
        yield row


def to_line(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSONL. It is ASCII: half a surrogate pair has no UTF-8."""
    return json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def to_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Rows as a file of JSONL."""
    return b"".join(map(to_line, rows))


def read_head(line: bytes) -> dict[str, Any]:
    """A row without its pieces, which are most of it.

    Raises:
      ValueError: it is no JSON object.
    """
    # Within a text the quotes would be escaped, so that this is the key itself.
    head, found, _ = line.partition(_BEFORE_PIECES)
    try:
        try:
            row = json.loads(head + b"}" if found else line)
        except ValueError:  # somebody else's row, with the key elsewhere
            row = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    row.pop(PIECES, None)
    return row


class TokenPieces:
    """Spells single tokens, special ones by their names. What it has spelled it keeps."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = {
            number: str(token)
            for number, token in tokenizer.backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._spelled: dict[int, str] = {}

    def __call__(self, tokens: np.ndarray, text: str) -> list[str]:
        """What each token adds to the text of all; "" where a character is only begun.

        Args:
          tokens: int32 [R].
          text: of all, without special tokens.
        """
        ids = tokens.tolist()
        for i in set(ids) - self._spelled.keys():
            self._spelled[i] = self._tokenizer.decode([i])
        pieces = [self._spelled[i] for i in ids]
        if "".join(pieces) != text:
            # Characters of several tokens, or spaces that only come between words.
            pieces = self._in_order(tokens)
        return [piece or self._special.get(i, "") for i, piece in zip(ids, pieces, strict=True)]

    def _in_order(self, tokens: np.ndarray) -> list[str]:
        stream = TextStream(self._tokenizer.decode)
        pieces = list(stream.add(tokens.tolist())[0])
        if pieces:
            pieces[-1] += stream.end()
        return pieces


def logprobs_by_response(
    packed: PackedBatch, logprob: np.ndarray, lengths: Sequence[int]
) -> dict[int, np.ndarray]:
    """What packed rows say of the response tokens of the first sequences.

    Args:
      packed: on the host.
      logprob: [U, M, R, T] over the same rows.
      lengths: of the first responses; those of others are left out.

    Returns:
      Float32 arrays as long as the responses, by sequence.
    """
    sequence, position = (np.asarray(x).reshape(-1) for x in (packed.sequence, packed.positions))
    places = np.flatnonzero((sequence >= 0) & (sequence < len(lengths)))
    places = places[np.lexsort((position[places], sequence[places]))]
    value = np.asarray(logprob).reshape(-1)[places]
    ends = np.cumsum(np.bincount(sequence[places], minlength=len(lengths)))
    # A sequence is its prompt and then its response.
    return {b: value[end - lengths[b] : end] for b, end in enumerate(ends.tolist())}


def _pieces_of(
    completions: Completions, b: int, pieces: TokenPieces, old_logprob: np.ndarray | None
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": pieces(completions.tokens[b], completions.texts[b]),
        "rollout_logprob": _rounded(completions.rollout_logprob[b]),
    }
    if old_logprob is not None:
        found["old_logprob"] = _rounded(old_logprob)
    given = np.flatnonzero(completions.mask[b] == 0).tolist()
    return found | ({"given": given} if given else {})


def _failure_of(scored: Scored, b: int) -> dict[str, str] | None:
    failure = scored.failures[b]
    return None if failure is None else dataclasses.asdict(failure)


def _stop_reason(completions: Completions, b: int, stop_ids: Collection[int]) -> str:
    if completions.truncated_B[b]:
        return "length"
    tokens = completions.tokens[b]
    return "stop_token" if len(tokens) and int(tokens[-1]) in stop_ids else "stop_string"


def _mean(values: np.ndarray) -> float | None:
    return _number(values.mean()) if len(values) else None


def _rounded(values: np.ndarray) -> list[float | None]:
    return [_number(x) for x in values]


def _number(value: Any) -> float | None:
    """Rounded; None for what JSON cannot say."""
    return round(float(value), _DIGITS) if math.isfinite(value) else None
