"""Answers of a run's checkpoints to the same prompts under the same noise: what do two of them share?

    python benchmarks/old_answers.py runs/dapo_tiny/seed0 runs/dapo_tiny/seed1 --steps 10 20 40

For each pair of steps it prints

    again     tokens of the newer answers that an older answer to the prompt has from its beginning on, as a
              share: what a draft would save, since the newer weights draw them with the same noise
    parting   how often two answers part at a token, of those at which they have not yet parted
    accuracy  difference of the accuracies, and its standard error three ways: of two independent sets of
              prompts, of the same prompts with independent noise, of the same prompts with the same noise

The runs keep all checkpoints (`run.keep_checkpoints=0`). benchmarks/results/ has what it found.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
from typing import Any

import numpy as np

from jaxrl.commands.evaluate import evaluation_config, load_policy, read_inputs
from jaxrl.config.shapes import engine_config
from jaxrl.dataflows.rewarding import Grading
from jaxrl.mesh.rules import GENERATE_RULES, shards_of
from jaxrl.rewards.evaluation_metrics import EVALUATION_STEP
from jaxrl.rollout.drivers import build_backend
from jaxrl.trainer.evaluation import answered
from jaxrl.types import Scored


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=pathlib.Path)
    parser.add_argument("--steps", type=int, nargs="+", required=True)
    parser.add_argument("--n", type=int, default=8, help="answers to each prompt")
    args = parser.parse_args()
    pairs = list(itertools.combinations(sorted(args.steps), 2))
    line(
        *("run", "steps", "again", "parting", "tokens"),
        *("difference", "two sets", "prompts", "noise", "verdicts"),
    )
    for run in args.runs:
        same, other = answers_of(run, args.steps, args.n)
        for old, new in pairs:
            show(str(run)[-24:], old, new, same, other)


def answers_of(
    run: pathlib.Path, steps: list[int], n: int
) -> tuple[dict[int, Scored], dict[int, Scored]]:
    """The graded answers of each checkpoint under the noise of evaluations, and under noise of its own."""
    config, path, chosen = evaluation_config(str(run), None, (), {"evaluation.num_samples": str(n)})
    inputs = read_inputs(config, path, chosen=chosen)
    config = inputs.config
    options = config.evaluation.sampling(config.rollout.sampling(config.seed), step=EVALUATION_STEP)
    engine = engine_config(
        config,
        inputs.stop_ids,
        prompts_per_batch=config.rollout.num_prompts,
        replicas=shards_of("batch", GENERATE_RULES, inputs.mesh),
    )
    backend: Any = build_backend(
        config.rollout.driver, inputs.model, inputs.mesh, engine, inputs.tokenizer.decode_batch
    )
    grading = Grading(inputs.graders)
    found: tuple[dict[int, Scored], dict[int, Scored]] = ({}, {})
    for step in steps:
        backend.load(load_policy(path, inputs.model, inputs.mesh, backend.dtype, step))
        for results, seed in zip(found, (config.seed, config.seed + 1000 + step), strict=True):
            with_seed = dataclasses.replace(options, seed=seed)
            results[step] = answered(backend, inputs.prompts, with_seed, grading)
    backend.close()
    inputs.graders.close()
    return found


def shared(old: np.ndarray, new: np.ndarray) -> int:
    """Tokens of two answers before the first that differs."""
    length = min(len(old), len(new))
    return int(np.append(old[:length] != new[:length], True).argmax())


def show(run: str, old: int, new: int, same: dict[int, Scored], other: dict[int, Scored]) -> None:
    before, now = same[old].completions.tokens, same[new].completions.tokens
    common = list(map(shared, before, now))
    again, length = sum(common), sum(map(len, now))
    parted = sum(n < max(len(x), len(y)) for n, x, y in zip(common, before, now, strict=True))
    right = [same[step].correct_NG.astype(float) for step in (old, new)]
    apart = [other[step].correct_NG.astype(float) for step in (old, new)]
    verdicts = np.corrcoef(right[0].ravel(), right[1].ravel())[0, 1]
    difference = right[1].mean() - right[0].mean()
    figures = [
        f"{again / length:.1%}",
        f"{parted / (again + parted):.2%}",
        f"{length / len(now):.1f}",
    ]
    errors = difference, two_sets(right), paired(apart), paired(right)
    line(run, f"{old}-{new}", *figures, *(f"{x:.2%}" for x in errors), f"{verdicts:.2f}")


def line(run: str, *cells: str) -> None:
    print(f"{run:24}" + "".join(f"{cell:>11}" for cell in cells), flush=True)


def two_sets(right: list[np.ndarray]) -> float:
    """Standard error of the difference of two accuracies whose prompts are independent."""
    return float(np.sqrt(sum(x.mean(1).var(ddof=1) / len(x) for x in right)))


def paired(right: list[np.ndarray]) -> float:
    """Standard error of the mean of the prompts' differences."""
    difference_N = right[1].mean(1) - right[0].mean(1)
    return float(difference_N.std(ddof=1) / np.sqrt(len(difference_N)))


if __name__ == "__main__":
    main()
