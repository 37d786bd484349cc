"""A step of GRPO on conversations of agents: the trainer computes what the sampler did, wherever it runs."""

import json
import pathlib

from agent_runs import AGENT
from recipe_files import write_recipe_file
from test_multiprocess import rows_of
from test_multiprocess import run as run_processes
from tiny_runs import SETTINGS, problems_in

import jaxrl

MORE = {
    "name": "tiny",
    "algorithm.dataflow": "grpo",
    "algorithm.updates_per_step": 1,
    "data.template": "{prompt}",
    "data.evaluation.path": "",
    "data.max_prompt_tokens": 64,
    "rollout.agent": AGENT,
    "rollout.num_prompts": 4,
    "rollout.num_samples": 4,
    "rollout.slots": 8,
    "rollout.max_response_tokens": 64,
    "reward.overlong_buffer_tokens": 0,
    "train.row_tokens": 128,
    "run.num_steps": 1,
    "evaluation.every": 0,
}


def settings_of(folder: pathlib.Path, **changes) -> dict:
    folder.mkdir(exist_ok=True)
    rows = [{"problem": f"{n} and", "answer": "4", "kind": "naps"} for n in range(40)]
    for name in ("train", "evaluation"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = {"run.output": str(folder / "runs")}
    return SETTINGS | problems_in(folder) | output | MORE | changes


def step_of(folder: pathlib.Path, **changes):
    """The metrics of a step, and the completions that it learned from."""
    recipe = write_recipe_file(folder, settings_of(folder, **changes))
    done = []
    with jaxrl.open_run(str(recipe)) as run:
        backend = run.roles.actor.backend
        generate = backend.generate

        def watched(*args, **options):
            done.append(generate(*args, **options))
            return done[-1]

        backend.generate = watched
        metrics = run.step()
    return metrics, done[0]


def test_trainer_and_sampler_agree_on_turns_and_branches(tmp_path):
    metrics, done = step_of(tmp_path)
    print({k: v for k, v in metrics.items() if not k.startswith(("timing", "perf"))})
    assert metrics["agent/further_conversations"] > 0 and metrics["agent/failed"] == 0
    assert metrics["num_turns/max"] >= 4
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert metrics["training/same_token_fraction"] == 1
