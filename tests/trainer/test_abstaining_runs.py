"""Whole steps with a reward function that abstains from samples."""

import json
import math

import jax
import numpy as np
import pytest
from digits import write_problems
from recipe_files import write_recipe_file
from test_empty_batches import one
from tiny_runs import SETTINGS, problems_in

import jaxrl

RULES = """
def some(responses):
    sums = [int(tokens.sum()) for tokens in responses.tokens]
    return [None if x % 3 == 0 else float(x % 5) for x in sums]


def nothing(responses):
    return [None] * len(responses)
"""
RUNS = {
    "grpo": {"algorithm.dataflow": "grpo", "algorithm.updates_per_step": 2},
    "dapo": {
        "algorithm.dataflow": "dapo",
        "rollout.keep_groups": "score",
        "rollout.max_generation_batches": 1,
        "rollout.on_shortage": "fill",
    },
    "ppo": {
        **one("critic", "reference"),
        "algorithm.dataflow": "ppo",
        "algorithm.advantage": "gae",
        "algorithm.kl.reward_coef": 0.1,
        "algorithm.kl.target": 0.1,
    },
    "remax": {"algorithm.dataflow": "remax", "algorithm.advantage": "remax"},
    "gdpo": {
        "algorithm.dataflow": "grpo",
        "algorithm.advantage": "gdpo",
        "algorithm.advantage_options": {},
    },
}


def run_of(folder, function: str, **changes):
    """The metrics of two steps, the samples of the second, and whether any weight has moved."""
    write_problems(folder)
    (folder / "rules.py").write_text(RULES)
    functions = {function: {"path": f"{folder}/rules.py:{function}", "weight": 0.5}}
    if changes.get("algorithm.advantage") == "gdpo":
        functions["again"] = {"path": f"{folder}/rules.py:{function}", "weight": 1.0}
    settings = SETTINGS | problems_in(folder) | one() | changes
    settings |= {
        "run.output": str(folder / "runs"),
        "reward.functions": functions,
        "reward.grader_weight": 0.0,
        "rollout.generation_prompts": 8,
        "run.num_steps": 2,
        "run.rollouts_every": 1,
        "name": "tiny",
    }
    with jaxrl.open_run(str(write_recipe_file(folder, settings))) as run:
        actor = run.roles.actor
        before = jax.tree.map(np.asarray, actor.for_training().params)
        metrics = [run.step() for _ in range(2)]
        after = jax.tree.map(np.asarray, actor.for_training().params)
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), before, after)
    kept = folder / "runs/tiny/seed0/rollouts/step_2.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    return metrics, rows, any(jax.tree.leaves(moved))


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_on_the_samples_that_have_a_score(name, tmp_path):
    (_, metrics), rows, moved = run_of(tmp_path, "some", **RUNS[name])
    assert moved and [k for k, x in metrics.items() if not math.isfinite(x)] == []
    scored = [row for row in rows if row["reward"] is not None]
    assert 0 < metrics["reward/abstained"] == len(rows) - len(scored) < len(rows)
    assert metrics["reward/some/abstained"] == metrics["reward/abstained"]
    assert metrics["train/num_trained_tokens"] == sum(row["length"] for row in scored)
    mean = np.mean([row["reward"] for row in scored])
    assert metrics["critic/rewards/mean"] == pytest.approx(mean, abs=1e-5)
    assert all(row["reward_parts"]["some"] is None for row in rows if row["reward"] is None)


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_step_without_any_score_goes_on_without_an_update(name, tmp_path):
    metrics, rows, moved = run_of(tmp_path, "nothing", **RUNS[name])
    assert not moved and not [row for row in rows if row["reward"] is not None]
    for of_step in metrics:
        assert [k for k, x in of_step.items() if not math.isfinite(x)] == []
        assert of_step["reward/abstained"] == len(rows) and "critic/score/mean" not in of_step
        assert of_step["train/num_trained_tokens"] == of_step["actor/pg_loss"] == 0
