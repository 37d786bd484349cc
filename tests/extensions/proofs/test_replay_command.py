"""`jaxrl replay` and `jaxrl diff` on a run that trains in seconds, and on damaged copies of it."""

import json
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from digits import write_problems
from tiny_runs import problems_in, tiny_config

from jaxrl import cli
from jaxrl.errors import EXIT_USER_ERROR
from jaxrl.tracking.run_folder import RunFolder
from jaxrl.trainer import program
from jaxrl_proofs.parting import kept_rows
from jaxrl_proofs.replay_command import weights_apart
from jaxrl_proofs.stored_run import StoredRun

REWARD = "def score(responses):\n    return [{} * len(text) for text in responses.texts]\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> pathlib.Path:
    """The folder of a run of four steps with checkpoints of steps 2 and 4; beside it its data and reward."""
    folder = tmp_path_factory.mktemp("made")
    write_problems(folder)
    (folder / "reward.py").write_text(REWARD.format(1.0))
    config = tiny_config(
        folder / "runs",
        problems_in(folder),
        {"reward.functions": {"long": {"path": f"{folder / 'reward.py'}:score", "weight": 0.1}}},
        run__num_steps=4,
        run__save_every=2,
        run__rollouts_every=1,
        evaluation__every=0,
        algorithm__dataflow="grpo",
        mesh__train="1-2-4",
    )
    assert program.train(config) == 0
    return config.run_folder.path


@pytest.fixture
def copy(made, tmp_path) -> pathlib.Path:
    """Another run with the same name in a folder of its own, with the data and the reward where they were."""
    copied = tmp_path / "runs" / made.parent.name / made.name
    shutil.copytree(made, copied)
    return copied


def said(capsys, *arguments) -> tuple[int, str]:
    status = cli.run(arguments[0], [f"jaxrl {arguments[0]}", *map(str, arguments[1:])])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def set_in(folder: pathlib.Path, name: str, value: str) -> None:
    path = folder / "config.txt"
    lines = path.read_text().splitlines()
    assert sum(line.startswith(f"{name} = ") for line in lines) == 1
    new = [f"{name} = {value}" if line.startswith(f"{name} = ") else line for line in lines]
    path.write_text("\n".join(new) + "\n")


@pytest.mark.parametrize(
    ("step", "start"),
    [(4, "the checkpoint of step 2"), pytest.param(2, "the start", marks=pytest.mark.long)],
)
def test_a_step_made_again_is_equal_to_the_bit(made, step, start, capsys):
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    status, text = said(capsys, "replay", made, "--step", step)
    assert status == 0 and f"step {step} of {made}, from {start}" in text, text
    assert f"actor after step {step}: " in text and "arrays are equal" in text
    assert "equal: 2 rows, " in text and "made with" not in text and "setting" not in text
    # The run itself is only read.
    after = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.long
def test_on_another_mesh_tokens_are_equal(made, capsys):
    status, text = said(capsys, "replay", made, "--step", 4, "--config.mesh.train=1-1-2")
    assert status == EXIT_USER_ERROR and "needs 2, found 8" in text
    status, text = said(capsys, "replay", made, "--step", 3, "--config.mesh.train=1-4-2")
    assert "setting" not in text
    assert status == 0 or "parts, by rounding alone" in text, text


@pytest.mark.long
def test_a_changed_setting_is_found_by_what_it_does(copy, capsys, tmp_path):
    set_in(copy, "optim.lr", "0.002")
    status, text = said(capsys, "replay", copy, "--step", 3, "--out", tmp_path / "again")
    assert status == 1 and "rl step 3 parts, first in its learning rate" in text, text
    assert "actor/lr 0.00100000005 -> 0.00200000009" in text
    assert (tmp_path / "again" / copy.parent.name / "seed0" / "rl" / "metrics.jsonl").exists()


@pytest.mark.long
def test_a_changed_grader_and_changed_data_are_named(made, copy, capsys):
    data = made.parents[2] / "train.jsonl"
    reward = made.parents[2] / "reward.py"
    rows, source = data.read_text(), reward.read_text()
    try:
        reward.write_text(REWARD.format(2.0))
        status, text = said(capsys, "replay", copy, "--step", 4)
        assert status == 1 and "reward.functions.long.path" in text and "other content" in text
        assert "rl step 3 parts, first in its verdicts" in text, text
        reward.write_text(source)
        changed = [json.loads(line) for line in rows.splitlines()]
        for row in changed:
            row["problem"] = row["problem"].replace("repeat", "repeats")
        data.write_text("".join(json.dumps(row) + "\n" for row in changed))
        status, text = said(capsys, "replay", copy, "--step", 3)
        assert status == EXIT_USER_ERROR and "data.train.path" in text, text
        assert "has other content" in text and "is in other data" in text
    finally:
        reward.write_text(source)
        data.write_text(rows)


@pytest.mark.long
def test_a_damaged_checkpoint_is_passed_over(copy, capsys):
    (largest,) = sorted(
        (copy / "rl/checkpoints/2/actor").rglob("*"), key=lambda path: path.stat().st_size
    )[-1:]
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    status, text = said(capsys, "replay", copy, "--step", 3)
    assert status == 0 and f"step 3 of {copy}, from the start; in" in text, text


def test_code_and_versions_that_differ_are_named(copy, made, capsys):
    set_in(copy, "content of jax", "'0.9.0'")
    set_in(copy, "content of jaxrl", "'0123456789abcdef'")
    status, text = said(capsys, "diff", copy, made)
    assert status == 0 and "made with jax: '0.9.0' -> " in text
    assert "made with jaxrl: '0123456789abcdef' -> " in text
    assert "equal: 4 rows, " in text


def test_two_runs_part_where_a_row_does(copy, made, capsys):
    path = copy / "rl/metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[2]["actor/grad_norm"] += 1e-9
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    set_in(copy, "seed", "1")
    status, text = said(capsys, "diff", made, copy)
    assert status == 1 and "setting seed: 0 -> 1" in text
    assert "rl step 3 parts, by rounding alone, first in its update" in text
    assert "rows: rl 4 -> rl 3" in text


def edit_rows(path: pathlib.Path, change, *, at: int = 0) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows[at])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def of_sample(**changes):
    """A change of the first kept sample of step 3; a function changes what was there."""

    def damage(folder: pathlib.Path) -> None:
        def change(row: dict) -> None:
            pieces = row["token_pieces"]
            for name, new in changes.items():
                of = pieces if name in pieces else row
                of[name] = new(of[name])

        edit_rows(folder / "rollouts/step_3.jsonl", change)

    return damage


def of_row(name: str, new: float):
    return lambda folder: edit_rows(
        folder / "rl/metrics.jsonl", lambda row: row.update({name: new}), at=2
    )


def of_setting(name: str, value: str):
    return lambda folder: set_in(folder, name, value)


def without_a_row(folder: pathlib.Path) -> None:
    path = folder / "rl/metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))


DAMAGES = {
    "key": (of_setting("seed", "7"), "setting seed: 0 -> 7"),
    "template": (of_setting("data.template", "'{prompt}'"), "setting data.template"),
    "rate": (of_setting("optim.lr", "0.5"), "setting optim.lr: 0.001 -> 0.5"),
    "code": (of_setting("content of jaxrl", "'00'"), "made with jaxrl: "),
    "version of jax": (of_setting("content of jax", "'0.1'"), "made with jax: "),
    "data": (of_setting("content of data.train.path", "'00'"), "has other content"),
    "metric": (of_row("actor/grad_norm", 7.0), "rl step 3 parts, first in its update"),
    "rate of a step": (of_row("actor/lr", 7.0), "rl step 3 parts, first in its learning rate"),
    "score": (of_row("critic/score/mean", 7.0), "rl step 3 parts, first in its verdicts"),
    "row": (without_a_row, "rows: rl 4 -> rl 3"),
    "prompt": (of_sample(prompt=lambda text: text + "!"), "first in its prompts"),
    "token": (of_sample(text=lambda text: ["?", *text[1:]]), "token 0: "),
    "cut answer": (of_sample(text=lambda text: text[:-1]), "-> the end"),
    "verdict": (of_sample(correct=lambda right: not right), "first in its verdicts"),
    "reward": (of_sample(reward=lambda reward: reward + 1), "first in its verdicts"),
    "log-probability": (
        of_sample(rollout_logprob=lambda x: [-9.0, *x[1:]]),
        "first in its log-probabilities",
    ),
    "trainer": (of_sample(old_logprob=lambda x: [*x[:-1], -9.0]), "under the trainer"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_damaged_by_hand_is_told_by_what_was_changed(name, copy, made, capsys):
    damage, says = DAMAGES[name]
    damage(copy)
    _, text = said(capsys, "diff", made, copy)
    assert says in text, text
    # Nothing else is found.
    assert ("parts" in text) == says.startswith(("rl step", "first in", "token", "-> the", "under"))
    assert text.count("setting ") + text.count("made with") == (
        says.startswith(("setting", "made with", "has other"))
    )


@pytest.mark.long
def test_a_changed_weight_is_named(copy, capsys):
    folder = copy / "rl/checkpoints/4/actor"
    tree = ocp.PyTreeCheckpointHandler().metadata(folder).tree
    kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    with ocp.PyTreeCheckpointer() as keeper:
        state = keeper.restore(folder, restore_args=kinds)
        state["params"]["embedding"] = state["params"]["embedding"].copy()
        state["params"]["embedding"][3, 5] += 0.5
        shutil.rmtree(folder)
        keeper.save(folder, state)
    status, text = said(capsys, "replay", copy, "--step", 4)
    assert status == 1 and "equal: 2 rows" in text
    assert "arrays differ, most ['params']['embedding'], by 0.5" in text and ": 1 of " in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "start"), [(1, "the start"), (3, "the checkpoint of step 2")], ids=str
)
def test_a_sample_is_made_again_without_its_batch(made, step, start, capsys):
    rows = kept_rows(RunFolder(made).rollouts.step(step))
    # The second sample of the second prompt.
    assert [row["sample"] for row in rows[:6]] == [0, 1, 2, 3, 0, 1]
    status, text = said(capsys, "replay", made, "--step", step, "--sample", 5)
    length = len(rows[5]["token_pieces"]["text"])
    assert status == 0 and f"from {start}; in" in text, text
    assert (
        f"equal: sample 1 of prompt {rows[5]['prompt_id']}, {length} tokens with their" in text
        or "by rounding alone: tokens and verdict are equal" in text
    )


@pytest.mark.long
def test_a_damaged_sample_is_named(copy, capsys, tmp_path):
    of_sample(text=lambda text: ["?", *text[1:]])(copy)
    given = "replay", copy, "--step", 3, "--sample"
    status, text = said(capsys, *given, 0, "--out", tmp_path / "again")
    assert status == 1 and "answers: sample 0 of prompt " in text and "token 0: '?'" in text, text
    edit_rows(copy / "rollouts/step_3.jsonl", lambda row: row.update(correct=None), at=1)
    status, text = said(capsys, *given, 1)
    assert status == 1 and "verdicts: sample 1 of prompt " in text and "correct: None" in text


def test_a_sample_that_cannot_be_made_alone_is_told(copy, capsys):
    def fails(*arguments) -> str:
        status, text = said(capsys, "replay", copy, *arguments)
        assert status == EXIT_USER_ERROR and len(text.strip().splitlines()) == 1, text
        return text

    assert "needs the weights after step 3, and the newest checkpoint before is of step 2" in fails(
        "--step", 4, "--sample", 0
    )
    assert "step 3 kept the samples 0 to 31" in fails("--step", 3, "--sample", 32)
    (copy / "rollouts/step_3.jsonl").unlink()
    assert "kept no samples of this step" in fails("--step", 3, "--sample", 0)
    shutil.rmtree(copy / "rl/checkpoints/2")
    assert "newest checkpoint before is of step 0; take a sample of step 1" in fails(
        "--step", 3, "--sample", 0
    )
    for name, value in (("agent", "'a.py:play'"), ("max_staleness", "1")):
        set_in(copy, f"rollout.{name}", value)
        assert f"with rollout.{name} " in fails("--step", 3, "--sample", 0)
        set_in(copy, f"rollout.{name}", "''" if name == "agent" else "0")


def test_agents_of_a_sampler_beside_the_learner_are_not_made_again(copy, capsys):
    set_in(copy, "rollout.agent", "'a.py:play'")
    set_in(copy, "rollout.max_staleness", "1")
    (copy / "rl/schedule.jsonl").touch()
    status, text = said(capsys, "replay", copy, "--step", 3)
    assert status == EXIT_USER_ERROR and len(text.strip().splitlines()) == 1, text
    assert "nothing repeats when they ask" in text


@pytest.mark.long
def test_what_is_missing_is_told(made, copy, capsys):
    """A grader that is not here, a mesh of more devices, a setting of another version."""
    reward = made.parents[2] / "reward.py"
    reward.rename(reward.with_suffix(".gone"))
    try:
        status, text = said(capsys, "replay", copy, "--step", 3)
        assert status == EXIT_USER_ERROR and "reward.py" in text.splitlines()[-1], text
    finally:
        reward.with_suffix(".gone").rename(reward)
    status, text = said(capsys, "replay", copy, "--step", 3, "--config.mesh.train=1-2-8")
    assert status == EXIT_USER_ERROR and "needs 16, found 8" in text.splitlines()[-1]
    with (copy / "config.txt").open("a") as file:
        file.write("rollout.of_another_time = 3\n")
    status, text = said(capsys, "replay", copy, "--step", 3)
    assert status == EXIT_USER_ERROR and len(text.strip().splitlines()) == 1
    assert "rollout.of_another_time" in text and "take the version of jaxrl that made" in text


@pytest.mark.long
def test_two_checkpoints_are_compared_on_the_same_prompts(made, tmp_path, capsys):
    folders = [tmp_path / f"at{step}" for step in (2, 4)]
    for step, folder in zip((2, 4), folders, strict=True):
        status, text = said(capsys, "evaluate", "--model", made, "--step", step, "--out", folder)
        assert status == 0 and f"rl step {step}, " in text
    status, text = said(capsys, "diff", *folders)
    assert status == 1 and "repeat: " in text and "paired over 24 prompts" in text
    assert "setting" not in text
    assert said(capsys, "diff", folders[0], folders[0]) == (0, "equal: all answers\n")
    status, text = said(capsys, "evaluate", "--model", made, "--step", 3)
    assert (
        status == EXIT_USER_ERROR and "no intact checkpoint of step 3; choose one of 2, 4" in text
    )


def test_states_are_compared_array_by_array(tmp_path):
    """A partial rollout's unfinished groups have other shapes in every run."""
    same = {"a": np.arange(3.0), "b": np.zeros((2, 2), ml_dtypes.bfloat16)}
    other = {"a": np.array([0.0, 1.0, 2.25]), "b": np.zeros((2, 2), ml_dtypes.bfloat16)}
    longer = {"a": np.arange(4.0), "c": np.zeros(1)}
    runs = {}
    for name, tree in (("same", same), ("again", same), ("other", other), ("longer", longer)):
        runs[name] = StoredRun(RunFolder(tmp_path / name))
        with ocp.PyTreeCheckpointer() as writer:
            writer.save(runs[name].folder.rl.checkpoints.step(4) / "actor", tree)

    def told(name: str) -> list[str]:
        return list(weights_apart(runs["same"], runs[name], 4))

    assert told("again") == ["actor after step 4: 2 arrays are equal"]
    assert told("other") == ["actor after step 4: 1 of 2 arrays differ, most ['a'], by 0.25"]
    # Another shape, one that is gone, and a new one.
    (line,) = told("longer")
    assert line.startswith("actor after step 4: 3 of 3 arrays differ, most ['a'], by inf")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("replay", "{run}", "--step", "9"), "has the steps 1 to 4"),
        (("replay", "{run}", "--step", "0"), "has the steps 1 to 4"),
        (("replay", "{run}/rl", "--step", "1"), "name the folder of a run"),
        (("diff", "{run}", "/no/such/run"), "name the folder of a run"),
        (("replay", "{run}", "--step", "3", "--out", "{run}"), "is not empty"),
    ],
)
def test_what_cannot_be_compared_ends_in_a_line(made, arguments, says, capsys):
    status, text = said(capsys, *(text.format(run=made) for text in arguments))
    assert status == EXIT_USER_ERROR and says in text
    assert len(text.strip().splitlines()) == 1
