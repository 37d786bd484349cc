"""Answers of a run's checkpoints to the same prompts under the same noise: what do two of them share?

    python benchmarks/old_answers.py runs/dapo_tiny/seed0 runs/dapo_tiny/seed1 --steps 10 20 40

For each pair of steps it prints

    again     tokens of the newer answers that an older answer to the prompt has from its beginning on, as a
              share: what a draft would save, since the newer weights draw them with the same noise
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

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.commands.evaluate import EvaluationInputs, evaluation_config, read_inputs
from jaxrl.config.shapes import engine_config
from jaxrl.data import model_directory
from jaxrl.dataflows.rewarding import Grading
from jaxrl.mesh.rules import GENERATE_RULES, lists_layers, shardings, shards_of, with_shardings
from jaxrl.models.decoder import decoder_graph, split_layers
from jaxrl.rewards.evaluation_metrics import EVALUATION_STEP
from jaxrl.rollout.drivers import build_backend
from jaxrl.tracking.checkpoints import StoredCheckpoints
from jaxrl.tracking.run_folder import RunFolder
from jaxrl.trainer.evaluation import answered
from jaxrl.types import Scored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=pathlib.Path)
    parser.add_argument("--steps", type=int, nargs="+", required=True)
    parser.add_argument("--n", type=int, default=8, help="answers to each prompt")
    args = parser.parse_args()
    pairs = list(itertools.combinations(sorted(args.steps), 2))
    print(
        f"{'run':24}{'steps':>9}{'again':>8}{'tokens':>8}{'difference':>12}"
        f"{'two sets':>10}{'prompts':>9}{'noise':>8}{'verdicts':>10}"
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
        backend.load(weights(inputs, step, backend.dtype))
        for results, seed in zip(found, (config.seed, config.seed + 1000 + step), strict=True):
            with_seed = dataclasses.replace(options, seed=seed)
            results[step] = answered(backend, inputs.prompts, with_seed, grading)
    backend.close()
    inputs.graders.close()
    return found


def weights(inputs: EvaluationInputs, step: int, dtype: Any) -> Any:
    """The policy of a checkpoint in the generation layout."""
    _, shapes, axes = decoder_graph(inputs.model)
    like = with_shardings(shapes, shardings(axes, shapes, GENERATE_RULES, inputs.mesh))
    stored = StoredCheckpoints(RunFolder(inputs.path).rl.checkpoints.path)
    params = stored.restore_params(step, "actor", like)
    where = model_directory.generation_shardings(inputs.model, inputs.mesh)
    if lists_layers(inputs.mesh):
        params = split_layers(params)
    return jax.device_put(jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), params), where)


def shared(old: np.ndarray, new: np.ndarray) -> int:
    """Tokens of two answers before the first that differs."""
    length = min(len(old), len(new))
    return int(np.append(old[:length] != new[:length], True).argmax())


def show(run: str, old: int, new: int, same: dict[int, Scored], other: dict[int, Scored]) -> None:
    before, now = same[old].completions.tokens, same[new].completions.tokens
    again = sum(map(shared, before, now))
    length = sum(map(len, now))
    right = [same[step].correct_NG.astype(float) for step in (old, new)]
    apart = [other[step].correct_NG.astype(float) for step in (old, new)]
    verdicts = np.corrcoef(*(x.ravel() for x in right))[0, 1]
    difference = right[1].mean() - right[0].mean()
    print(
        f"{run:24}{f'{old}-{new}':>9}{again / length:8.1%}{length / len(now):8.1f}{difference:12.2%}"
        f"{two_sets(right):10.2%}{paired(apart):9.2%}{paired(right):8.2%}{verdicts:10.2f}",
        flush=True,
    )


def two_sets(right: list[np.ndarray]) -> float:
    """Standard error of the difference of two accuracies whose prompts are independent."""
    return float(np.sqrt(sum(x.mean(1).var(ddof=1) / len(x) for x in right)))


def paired(right: list[np.ndarray]) -> float:
    """Standard error of the mean of the prompts' differences."""
    difference_N = right[1].mean(1) - right[0].mean(1)
    return float(difference_N.std(ddof=1) / np.sqrt(len(difference_N)))


if __name__ == "__main__":
    main()
