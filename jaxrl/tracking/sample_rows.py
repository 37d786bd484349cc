"""Samples as rows of JSONL: prompt, response, grade and log-probabilities.

    {"step": 20, "source": "chain_sum", "prompt_id": 812,
     "problem_key": "5b1f3c0a9d2e7f64", "sample": 3,
     "prompt": "5 + 9 - 7 =\\n", "answer": "7", "completion": "14 - 7 = 7; Answer: 7",
     "prediction": "7", "correct": true, "failure": null, "score": 1.0, "shaping": 0.0, "reward": 1.0,
     "reward_parts": {"grader": 1.0}, "length": 14, "truncated": false, "stop_reason": "stop_token",
     "entropy": 0.11, "token_pieces": {"text": ["14", " -", ...], "rollout_logprob": [-0.01, ...],
     "old_logprob": [-0.01, ...], "given": [5, 6]}}

`prompt_id` is another one in every epoch, `problem_key` is the same wherever the problem is sampled. If
grading failed, `failure` has the reason, {"kind": "timeout", "message": "..."}, and the response counts as
wrong. A reward that abstained is null in `reward_parts`; if all have, so are `score` and `reward`.

The `prompt` of an agent's sample is what the policy saw first, with system message and tools; the text of its
problem is `problem`. If the agent failed, `failure` is {"kind": "agent", "message": "LookupError: no tool
(my_agent.py:12)", "traceback": "..."}; verdict and rewards are null, `stop_reason` is "failed", and the
completion is what was said before.

`token_pieces` is the last key, so that lists of samples can skip parsing it: `text` has the string of
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
from typing import Any, NamedTuple

import numpy as np

from jaxrl.data.tokenizer import TextStream, Tokenizer
from jaxrl.roles.packing import Packing
from jaxrl.types import AgentFailure, Branch, GraderFailure, Scored

# The last key of a row.
TOKEN_STRINGS = "token_pieces"
_BEFORE_TOKEN_STRINGS = f',"{TOKEN_STRINGS}":'.encode()
# Decimals of a log-probability. Rounding to 4 takes a third of the bytes of full precision.
_DIGITS = 4


def sample_rows(
    scored: Scored,
    token_strings: TokenStrings,
    *,
    stop_ids: Collection[int],
    terms: Sequence[str] = ("grader",),
    step: int | None = None,
    old_logprob: Mapping[int, np.ndarray] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields a row for each response, group after group.

    Args:
      scored: the responses.
      token_strings: converts tokens to strings.
      stop_ids: tokens that end a response.
      terms: names of the rewards whose weighted sum is the score.
      step: step of the run; None leaves it out.
      old_logprob: the trainer's log-probabilities: response index -> [R].
    """
    completions = scored.completions
    prompts, G = completions.prompts, completions.num_samples
    agents = completions.of_agents
    newest = max((int(v.max(initial=0)) for v in completions.version), default=0)

    def of_tokens(text: Sequence[str], row: Branch) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "text": text,
            "rollout_logprob": list(map(_number, row.logprob)),
        }
        if given := np.flatnonzero(row.mask == 0).tolist():
            fields["given"] = given
        if (row.version[row.mask > 0] < newest).any():
            fields["version"] = row.version.tolist()
        return fields

    key = ""
    for b in range(len(completions)):
        n, said = b // G, _said(scored, b)
        # Its fields may be large.
        key = key if b % G else prompts.problem_key(n)
        tokens, failure = said.main.tokens, scored.failures[b] or said.failure
        text = completions.texts[b] if said.failure is None else token_strings.text(tokens)
        row: dict[str, Any] = {} if step is None else {"step": step}
        row |= {
            "source": prompts.sources[n],
            "prompt_id": int(prompts.ids_N[n]),
            "problem_key": key,
            "sample": b % G,
            "prompt": prompts.texts[n],
            "answer": prompts.answers[n],
            "completion": text,
            "prediction": scored.predictions[b],
            "correct": bool(scored.correct_B[b]),
            "failure": failure and _failure(failure),
            "score": _number(scored.score_B[b]),
            "shaping": _number(scored.shaping_B[b]),
            "reward": _number(scored.reward_B[b]),
            "reward_parts": {
                name: _number(x) for name, x in zip(terms, scored.term_BK[b], strict=True)
            },
            "length": len(tokens),
            "truncated": said.main.truncated,
            "stop_reason": _stop_reason(said.main, stop_ids),
            "entropy": _number(said.main.entropy[said.main.mask > 0].mean())
            if said.main.mask.any()
            else None,
        }
        if agents is not None:
            row["problem"] = prompts.texts[n]
            # Without a conversation there is only the problem.
            row["prompt"] = "".join(token_strings(said.prompt)) or prompts.texts[n]
        if said.failure is not None:
            nothing = dict.fromkeys(("correct", "score", "shaping", "reward"))
            row |= nothing | {"stop_reason": "failed", "reward_parts": dict.fromkeys(terms)}
        fields = of_tokens(token_strings(tokens, text), said.main)
        if (of_trainer := (old_logprob or {}).get(b)) is not None and said.failure is None:
            fields["old_logprob"] = list(map(_number, of_trainer))
        if said.further:
            fields["branches"] = [of_tokens(token_strings(x.tokens), x) for x in said.further]
        row[TOKEN_STRINGS] = fields
        yield row


class _Said(NamedTuple):
    """What was said in a sample.

    Attributes:
      prompt: tokens before the response, int32.
      main: the response.
      further: further conversations of an agent.
      failure: why the agent failed; None if it did not.
    """

    prompt: np.ndarray
    main: Branch
    further: tuple[Branch, ...] = ()
    failure: AgentFailure | None = None


def _said(scored: Scored, b: int) -> _Said:
    completions, agents = scored.completions, scored.completions.of_agents
    prompt = completions.prompts.tokens[b // completions.num_samples]
    if agents is None:
        return _Said(prompt, completions.branch(b))
    if (failure := agents.failures[b]) is None:
        # Without tokens its conversations have no prompt in common with those of its group.
        own = prompt if len(completions.tokens[b]) else prompt[:0]
        return _Said(own, completions.branch(b), agents.branches[b])
    if not failure.said:
        return _Said(prompt[:0], completions.branch(b), (), failure)
    main, *further = failure.said
    first = int(np.argmax(main.mask)) if main.mask.any() else len(main.tokens)
    rest = Branch(*main[first:].arrays, main.mask[first:], main.truncated)
    return _Said(main.tokens[:first], rest, tuple(further), failure)


def _failure(failure: GraderFailure | AgentFailure) -> dict[str, str]:
    if isinstance(failure, GraderFailure):
        return dataclasses.asdict(failure)
    return {"kind": "agent", "message": failure.message, "traceback": failure.traceback}


def _stop_reason(response: Branch, stop_ids: Collection[int]) -> str:
    if response.truncated:
        return "length"
    tokens = response.tokens
    return "stop_token" if len(tokens) and int(tokens[-1]) in stop_ids else "stop_string"


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

    def text(self, tokens: np.ndarray) -> str:
        """The text of tokens, without special tokens."""
        return self._tokenizer.decode(tokens.tolist())

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
