"""A step of GRPO on conversations of agents: the trainer computes what the sampler did, wherever it runs."""

import json
import os
import pathlib
import signal
import sys
import time

import pytest
from agent_runs import AGENT
from chats import chat_tokenizer
from closeness import assert_close
from processes import started
from recipe_files import write_recipe_file
from test_agent_backend import conversations, said
from test_multiprocess import ROOT, rows_of
from test_multiprocess import run as run_processes
from tiny_runs import SETTINGS, problems_in

import jaxrl
from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.tracking.metrics import read_metrics, without_timings
from jaxrl.trainer import program

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
}


# One device of eight.
ONE = {"placement": {"one": {"roles": ("actor",), "train": "1-1-1", "devices": "0-0"}}}


def settings_of(folder: pathlib.Path, further: dict | None = None, **changes) -> dict:
    """A run of agents, with further fields in the rows of its problems."""
    folder.mkdir(exist_ok=True)
    rows = [
        {"problem": f"{n} and", "answer": "4", "nap_s": 0.05, **(further or {})} for n in range(40)
    ]
    for n, row in enumerate(rows):
        row.setdefault("kind", ("talk", "threads")[n % 2])
    for name in ("train", "evaluation"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat_tokenizer().save(folder / "tokenizer")
    output = {"run.output": str(folder / "runs"), "tokenizer.path": str(folder / "tokenizer")}
    return SETTINGS | problems_in(folder) | output | MORE | changes


def step_of(folder: pathlib.Path, further: dict | None = None, **changes):
    """The metrics of a step, and the completions that it learned from."""
    recipe = write_recipe_file(folder, settings_of(folder, further, **changes))
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


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return step_of(tmp_path_factory.mktemp("one"), **ONE)


@pytest.mark.long
def test_trainer_and_sampler_agree_on_turns_and_branches(one):
    metrics, done = one
    assert metrics["agent/further_conversations"] > 0 and metrics["agent/failed"] == 0
    assert metrics["num_turns/max"] >= 4
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert metrics["training/same_token_fraction"] == 1
    tokens = sum(x.mask.sum() for b in range(len(done)) for x in conversations(done, b))
    # The agents have counted what they were given.
    assert metrics["train/num_trained_tokens"] == tokens == sum(done.of_agents.score_B)


def test_a_recorded_run_is_repeated_to_the_bit_whenever_its_agents_ask(tmp_path):
    """Their naps differ, and with them which requests share a batch, which rounds differently."""
    more = {"run.num_steps": 2, "run.rollouts_every": 1, **ONE}
    made = []
    for name, schedule in (("first", ""), ("again", str(tmp_path / "runs" / "first" / "seed0"))):
        changes = {"name": name, "rollout.schedule": schedule}
        settings = settings_of(tmp_path, {"kind": "talk"}, **more, **changes)
        config = load_config(Config, str(write_recipe_file(tmp_path, settings)), {})
        assert program.train(config) == 0
        made.append(config.run_folder)
    files = [[folder.rl.schedule, *sorted(folder.rollouts.path.iterdir())] for folder in made]
    contents = [[path.read_text() for path in paths] for paths in files]
    assert contents[0] == contents[1] and len(files[0]) == 3
    first, again = (read_metrics(folder.rl.metrics) for folder in made)
    assert [*map(without_timings, first)] == [*map(without_timings, again)]
    assert len(json.loads(contents[0][0].splitlines()[1])["asked"]) > 3


LEARNED = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/rewards/mean")


@pytest.mark.long
def test_eight_devices_sample_and_learn_the_same(one, tmp_path):
    spread = {"mesh.train": "1-2-4", "mesh.generate": "1-1-2-4", "mesh.fsdp": 2}
    metrics, done = step_of(tmp_path, **spread)
    assert said(done) == said(one[1])
    assert metrics["training/same_token_fraction"] == 1
    for name in LEARNED:
        assert_close(metrics[name], one[0][name], rtol=1e-5, scale=1, err_msg=name)


@pytest.mark.long
def test_two_processes_sample_and_learn_the_same(one, tmp_path):
    recipe = write_recipe_file(tmp_path, settings_of(tmp_path, **{"mesh.train": "1-2-2"}))
    run_processes([recipe, recipe])
    row = rows_of(tmp_path, "rl")[-1]
    for name in LEARNED:
        assert_close(row[name], one[0][name], rtol=1e-5, scale=1, err_msg=name)


@pytest.mark.long
def test_two_processes_repeat_what_two_have_recorded(tmp_path):
    """The first process has the agents, and both hold a dispatch until their requests are there."""
    made = []
    for name, schedule in (("first", ""), ("again", str(tmp_path / "runs" / "first" / "seed0"))):
        changes = {"name": name, "rollout.schedule": schedule, "mesh.train": "1-2-2"}
        recipe = write_recipe_file(tmp_path, settings_of(tmp_path, {"kind": "talk"}, **changes))
        run_processes([recipe, recipe])
        rl = tmp_path / "runs" / name / "seed0" / "rl"
        rows = [*map(without_timings, read_metrics(rl / "metrics.jsonl"))]
        made.append((rows, (rl / "schedule.jsonl").read_text()))
    assert made[0] == made[1] and json.loads(made[0][1])["asked"]


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_a_step_goes_on_to_the_same_rows(tmp_path):
    """The program, its workers and its agents; kill -9 leaves none of them."""
    changes = ONE | {"run.num_steps": 4, "run.save_every": 1, "optim.lr": 1e-2}

    def train(folder, *, kill):
        recipe = write_recipe_file(folder, settings_of(folder, {"nap_s": 0.5}, **changes))
        command = [sys.executable, ROOT / "launch/train.py", f"--config={recipe}"]
        log = folder / "runs/tiny/seed0/rl/metrics.jsonl"
        with started([command], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as (run,):
            while kill and not (log.exists() and len(read_metrics(log)) >= 2):
                assert run.poll() is None, run.communicate()
                time.sleep(0.02)
            if kill:
                # Agents of the step after that are at work.
                time.sleep(0.3)
                run.kill()
            # Workers have its pipes, too.
            _, errors = run.communicate(timeout=300)
        assert run.returncode == (-signal.SIGKILL if kill else 0), errors
        return rows_of(folder, "rl")

    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    expected = train(tmp_path / "undisturbed", kill=False)
    before = train(tmp_path / "killed", kill=True)
    assert 2 <= len(before) < len(expected) == 4
    rows = train(tmp_path / "killed", kill=False)
    assert len(rows) == 4
    for ours, theirs in zip(rows, expected, strict=True):
        assert ours.keys() == theirs.keys()
        # Pages that are known, and naps, follow the clock.
        for name in theirs.keys() - {"agent/prompt_share_from_pages"}:
            if not name.startswith("agent/seconds/"):
                assert_close(ours[name], theirs[name], rtol=1e-5, scale=1, err_msg=name)
