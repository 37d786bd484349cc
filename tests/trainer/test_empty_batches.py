"""A step without a trained token: no NaN, and no update."""

import math

import jax
import numpy as np
import pytest
from digits import write_problems
from recipe_files import write_recipe_file
from tiny_runs import SETTINGS, problems_in

import jaxrl

# With this seed the random model ends none of its answers within so few tokens.
CUT = {
    "seed": 1,
    "reward.mask_truncated": True,
    "rollout.max_response_tokens": 4,
    "rollout.generation_prompts": 8,
    "reward.overlong_buffer_tokens": 2,
    "train.rows": 4,
    "run.num_steps": 2,
    "run.save_every": 2,
    "name": "tiny",
}


# One device of eight.
def one(*roles: str) -> dict:
    roles = ("actor", *roles)
    return {"placement": {"one": {"roles": roles, "train": "1-1-1", "devices": "0-0"}}}


RUNS = {
    "grpo": {"algorithm.dataflow": "grpo", "algorithm.updates_per_step": 2},
    "epochs": {
        **one("reference"),
        "algorithm.dataflow": "grpo",
        "algorithm.epochs": 2,
        "algorithm.updates_per_step": 2,
        "algorithm.kl.loss_coef": 0.1,
        "algorithm.entropy_coef": 0.01,
    },
    "ppo": {
        **one("critic", "reference"),
        "algorithm.dataflow": "ppo",
        "algorithm.advantage": "gae",
        "algorithm.kl.reward_coef": 0.1,
        "algorithm.kl.target": 0.1,
    },
    "dapo": {
        "algorithm.dataflow": "dapo",
        "rollout.max_generation_batches": 1,
        "rollout.on_shortage": "fill",
    },
    "correction": {
        "algorithm.dataflow": "grpo",
        "algorithm.correction.weights": "token",
        "algorithm.correction.normalize": True,
        "algorithm.correction.reject": {"seq_mean_k3": 0.1},
    },
    "devices": {
        "algorithm.dataflow": "grpo",
        "mesh.train": "2-1-4",
        "mesh.generate": "1-1-2-4",
        "train.rows": 8,
    },
    "bypass": {
        "algorithm.dataflow": "grpo",
        "algorithm.correction.bypass": True,
        "algorithm.correction.reject": {"token_k3": 0.1},
    },
}


def run_of(folder, **changes):
    """The metrics of two steps in which every answer is cut, and whether any weight has moved."""
    write_problems(folder)
    settings = SETTINGS | problems_in(folder) | CUT | {"run.output": str(folder / "runs")}
    settings |= changes if "mesh.train" in changes else one() | changes
    recipe = write_recipe_file(folder, settings)
    with jaxrl.open_run(str(recipe)) as run:
        actor = run.roles.actor
        before = jax.tree.map(np.asarray, actor.for_training().params)
        rows = [run.step() for _ in range(2)]
        after = jax.tree.map(np.asarray, actor.for_training().params)
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), before, after)
    return rows, any(jax.tree.leaves(moved))


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_a_step_whose_answers_are_all_cut_goes_on_without_an_update(name, tmp_path):
    rows, moved = run_of(tmp_path, **RUNS[name])
    for metrics in rows:
        assert metrics["response_length/clip_ratio"] == 1
        assert metrics["train/num_trained_tokens"] == 0 and metrics["actor/skipped_updates"] == 1
        assert "training/same_token_fraction" not in metrics
        assert [k for k, x in metrics.items() if not math.isfinite(x)] == []
        assert metrics["actor/pg_loss"] == metrics["actor/grad_norm"] == 0
    assert not moved
