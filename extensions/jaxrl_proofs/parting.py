"""Where two runs of one recipe part: the first step, and the first thing in the flow of that step.

    prompts --> answers --> verdicts --> log-probabilities --> learning rate --> update

Samples have the answers token by token, at the steps whose samples both runs keep; rows of metrics have every
step. Numbers are compared as they were written, to the last bit; a kept log-probability has four decimals.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from jaxrl.files import read_bytes
from jaxrl.tracking.metrics import without_timings
from jaxrl.tracking.readable import number, visible
from jaxrl.tracking.sample_rows import TOKEN_STRINGS
from jaxrl_proofs.stored_run import STAGES, StoredRun

# Names of metrics begin with one of these, in the order in which a step computes them.
_FLOW = {
    "prompts": ("prompt_length/", "data/"),
    "answers": ("response_length/", "rollout/", "agent/"),
    "verdicts": ("critic/score", "critic/rewards", "reward/", "train/", "batch/"),
    "log-probabilities": ("training/", "critic/advantages", "critic/values"),
    "learning rate": ("actor/lr", "critic/lr", "sft/lr"),
    "update": ("",),
}
# Largest difference of a log-probability that rounding explains, in float32 on another mesh or machine; in
# bfloat16 it is a hundred times as large, and tokens change.
_ROUNDING = 1e-3
# Numbers of a step that a line shows.
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Parting:
    """The first difference of two runs.

    Attributes:
      stage: "sft", "preference" or "rl".
      step: the first step that differs.
      where: what differs first in the flow of that step, a key of `_FLOW`.
      lines: what differs, one line for samples and one for metrics, as far as they differ.
      by_rounding: whether all tokens and verdicts are equal, and no number differs by more than rounding.
    """

    stage: str
    step: int
    where: str
    lines: tuple[str, ...]
    by_rounding: bool


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs, compared.

    Attributes:
      steps: how many steps were compared, and are equal, up to the parting.
      numbers, tokens: how many of these were equal.
      parting: the first difference; None if there is none.
    """

    steps: int
    numbers: int
    tokens: int
    parting: Parting | None


def compared(
    before: StoredRun,
    now: StoredRun,
    *,
    steps: Collection[int] | None = None,
    ignored: tuple[str, ...] = (),
) -> Comparison:
    """Compares the rows and samples of two runs in the order of their steps.

    Args:
      before, now: the runs.
      steps: steps of reinforcement learning, to compare no other stage; None means all that both have.
      ignored: beginnings of names of metrics that are not compared.
    """
    num_steps = numbers = tokens = 0
    for stage in ("rl",) if steps is not None else STAGES:
        rows = before.rows(stage), now.rows(stage)
        # Row 0 is an evaluation.
        for step in sorted(rows[0].keys() & rows[1].keys()):
            if steps is not None and step not in steps:
                continue
            found, same_tokens, seen = [], 0, None
            if stage == "rl":
                seen, same_tokens = _samples(before, now, step)
            metrics, same_numbers = _metrics(rows[0][step], rows[1][step], ignored)
            found = [each for each in (seen, metrics) if each]
            if found:
                where = min((each.where for each in found), key=list(_FLOW).index)
                lines = tuple(each.line for each in found)
                close = all(each.by_rounding for each in found)
                parting = Parting(stage, step, where, lines, close)
                return Comparison(num_steps, numbers, tokens, parting)
            num_steps, numbers, tokens = num_steps + 1, numbers + same_numbers, tokens + same_tokens
    return Comparison(num_steps, numbers, tokens, None)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A part of the flow of a step, and a line on what differs there."""

    where: str
    line: str
    by_rounding: bool = False
    at: int | None = None
    """Token at which two answers part."""


def _metrics(
    before: Mapping[str, Any], now: Mapping[str, Any], ignored: tuple[str, ...]
) -> tuple[Difference | None, int]:
    """The difference of two rows in the metrics of both, and how many numbers were compared."""
    old, new = without_timings(before), without_timings(now)
    # "perf/" says how the work was shared out among devices.
    both = [name for name in old if name in new and not name.startswith(("perf/", *ignored))]
    names = [name for name in both if not _equal(old[name], new[name])]
    if not names:
        return None, len(both)
    where = min(map(_part_of, names), key=list(_FLOW).index)
    first = [name for name in names if _part_of(name) == where]
    first.sort(key=lambda name: -abs(new[name] - old[name]) / (abs(old[name]) or 1.0))
    shown = "; ".join(f"{name} {old[name]:.9g} -> {new[name]:.9g}" for name in first[:_SHOWN])
    line = f"{where}: {shown}; {len(names)} of {len(both)} metrics differ"
    close = all(
        math.isclose(old[name], new[name], rel_tol=_ROUNDING, abs_tol=_ROUNDING) for name in names
    )
    return Difference(where, line, close), len(both)


def _part_of(name: str) -> str:
    return next(part for part, starts in _FLOW.items() if name.startswith(starts))


def _equal(old: float, new: float) -> bool:
    return old == new or (old != old and new != new)


def _samples(before: StoredRun, now: StoredRun, step: int) -> tuple[Difference | None, int]:
    """The first difference among the kept samples of a step, and how many tokens were compared."""
    files = [run.folder.rollouts.step(step) for run in (before, now)]
    if not all(file.exists() for file in files):
        return None, 0
    old, new = map(kept_rows, files)
    if (keys := list(map(_key, old))) != list(map(_key, new)):
        place = next((i for i, key in enumerate(map(_key, new)) if keys[i : i + 1] != [key]), 0)
        line = f"prompts: sample {place} is of another problem, or is in one of the runs alone"
        return Difference("prompts", line), 0
    tokens = 0
    differences = []
    for a, b in zip(old, new, strict=True):
        difference = sample_difference(a, b)
        differences += [difference] if difference else []
        tokens += len(a[TOKEN_STRINGS]["text"])
    if not differences:
        return None, tokens
    # Of all samples what differs first in the flow; those that differ by rounding alone come last.
    first = min(differences, key=lambda each: list(_FLOW).index(each.where))
    line = f"{first.line}; {len(differences)} of {len(old)} kept samples differ"
    return Difference(first.where, line, all(each.by_rounding for each in differences)), tokens


def kept_rows(path: pathlib.Path, *, absent: str = "restore it") -> list[dict[str, Any]]:
    """The kept samples of a step; arguments and errors as of `read_bytes`."""
    return [json.loads(line) for line in read_bytes(path, absent=absent).splitlines()]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("source", "prompt_id", "sample"))


def sample_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Difference | None:
    """What differs first between two rows of samples; None if nothing does."""
    name = f"sample {old['sample']} of prompt {old['prompt_id']}"
    for field in ("prompt", "problem", "answer", "problem_key"):
        if old.get(field) != new.get(field):
            texts = (visible(str(row.get(field)))[:80] for row in (old, new))
            return Difference("prompts", f"prompts: {name}, {field}: {' -> '.join(texts)}")
    pieces = old[TOKEN_STRINGS], new[TOKEN_STRINGS]
    texts = [each["text"] for each in pieces]
    scores = [[x or 0.0 for x in each["rollout_logprob"]] for each in pieces]
    # Tokens up to the first that differs, and how far their log-probabilities are apart.
    length = min(map(len, texts))
    at = next((i for i in range(length) if texts[0][i] != texts[1][i]), length)
    gaps = [abs(x - y) for x, y in zip(*(row[:at] for row in scores), strict=True)]
    largest = max(gaps, default=0.0)
    if texts[0] != texts[1]:
        drawn = [
            f"{visible(row[at])!r} ({of[at]:.4f})" if at < len(row) else "the end"
            for row, of in zip(texts, scores, strict=True)
        ]
        line = f"answers: {name}, token {at}: {' -> '.join(drawn)}"
        before = "equal" if not largest else f"up to {number(largest)} apart"
        return Difference("answers", f"{line}; log-probabilities before it are {before}", at=at)
    if pieces[0].get("version") != pieces[1].get("version"):
        return Difference("answers", f"answers: {name} has tokens of other versions of the weights")
    if pieces[0].get("branches") != pieces[1].get("branches"):
        return Difference("answers", f"answers: {name} has other branches")
    for field in ("prediction", "correct", "failure", "score", "shaping", "reward", "reward_parts"):
        if old.get(field) != new.get(field):
            said = (visible(str(row.get(field)))[:80] for row in (old, new))
            return Difference("verdicts", f"verdicts: {name}, {field}: {' -> '.join(said)}")
    if largest:
        line = f"log-probabilities: {name}: up to {number(largest)} apart under the sampler"
        return Difference("log-probabilities", line, largest <= _ROUNDING)
    trainer = [[x or 0.0 for x in each.get("old_logprob", ())] for each in pieces]
    apart = max((abs(x - y) for x, y in zip(*trainer, strict=False)), default=0.0)
    if apart or len(trainer[0]) != len(trainer[1]):
        line = f"log-probabilities: {name}: up to {number(apart)} apart under the trainer"
        return Difference("log-probabilities", line, apart <= _ROUNDING)
    return None
