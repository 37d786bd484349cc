"""Two evaluations of the same prompts under the same noise: is one better, and where do their answers part?

An answer is determined by the seed, its prompt, its number and the weights. So two checkpoints give many
equal answers, and prompts that are hard for one are hard for the other. The mean of the prompts' differences
is known better than the two accuracies are.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl.errors import UserError
from jaxrl.files import read_json_object
from jaxrl.tracking.run_folder import EvaluationFolder, parse_config
from jaxrl_proofs.parting import kept_rows, sample_difference

# Of a normal distribution, 95% lies within so many standard deviations.
_Z = 1.96


def settings_of(folder: EvaluationFolder) -> dict[str, str]:
    """The text of each setting of an evaluation, without the path and the digest of its weights."""
    lines = read_json_object(folder.results, absent="restore it").get("settings", [])
    return parse_config(
        "\n".join(line for line in lines if " = " in line and line[:8] != "model = ")
    )


def compared_answers(*folders: EvaluationFolder) -> Iterator[str]:
    """Lines on the difference of two evaluations; none if all answers are equal.

    Raises:
      UserError: they answered other prompts.
    """
    old, new = ({_key(row): row for row in kept_rows(each.samples)} for each in folders)
    if old.keys() != new.keys():
        raise UserError(
            f"{folders[0]} and {folders[1]} answered other prompts, or another number of times; evaluate "
            "both with the same problems and --n"
        )
    parted = {key: found for key in old if (found := sample_difference(old[key], new[key]))}
    if not parted:
        return
    for source in dict.fromkeys(row["source"] for row in old.values()):
        keys = [key for key in old if key[0] == source]
        yield f"{source}: {_accuracies([old[key] for key in keys], [new[key] for key in keys])}"
    places = [found.at for found in parted.values() if found.at is not None]
    if places:
        yield (
            f"{len(old) - len(places)} of {len(old)} answers are equal, the others part at token "
            f"{statistics.median_low(places)} (median)"
        )
    first = min(parted.values(), key=lambda found: found.where != "answers")
    yield f"first: {first.line}"


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["source"], row["prompt_id"], row["sample"]


def _accuracies(old: Sequence[Any], new: Sequence[Any]) -> str:
    """The accuracies of rows in the same order, and 95% intervals of their difference."""
    right: tuple[Any, Any] = (defaultdict(list), defaultdict(list))
    for pair in zip(old, new, strict=True):
        # An agent that failed has no verdict.
        if None not in (pair[0]["correct"], pair[1]["correct"]):
            for of_prompt, row in zip(right, pair, strict=True):
                of_prompt[row["prompt_id"]].append(row["correct"])
    means = [[statistics.fmean(each) for each in of_prompt.values()] for of_prompt in right]
    if len(means[0]) < 2:
        return "fewer than two prompts have verdicts"
    before, now = map(statistics.fmean, means)
    differences = [b - a for a, b in zip(*means, strict=True)]
    number = len(differences)
    paired = _Z * (statistics.variance(differences) / number) ** 0.5
    apart = _Z * (sum(map(statistics.variance, means)) / number) ** 0.5
    return (
        f"{before:.1%} -> {now:.1%}, {now - before:+.1%} ± {paired:.1%} paired over {number} prompts "
        f"(± {apart:.1%} if each had prompts of its own)"
    )
