"""A folder belongs to the run that it was made for: another one is refused, in one line."""

import os

import pytest

from jaxrl.config.command_line import load_config, load_recipe
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.trainer.identity import check_sft_stage, contents_of, run_settings, sft_settings
from jaxrl.trainer.run_files import check_folder

REWARDS = "import its_lengths\n\ndef f(responses):\n    return its_lengths.of(responses)\n"
MADE_WITH = {
    "run.num_steps": 4,
    "optim.lr_decay_steps": 4,
    "data.train.path": "rows.jsonl",
    "reward.functions": {"f": {"path": "rewards.py:f", "weight": 1.0}},
    "rollout.agent": "my_agents.player:play",
    "weights": "model",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with all that the run names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    files = {
        "rows.jsonl": '{"problem": "1", "answer": "2"}\n',
        "rewards.py": REWARDS,
        "its_lengths.py": "def of(responses):\n    return responses.lengths\n",
        "my_agents/__init__.py": "",
        "my_agents/player.py": "from . import moves\n",
        "my_agents/moves.py": "FIRST = 1\n",
        "model/config.json": "{}",
        "model/model.safetensors": "weights",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def made(**changes) -> Config:
    settings = {**MADE_WITH, **{name.replace("__", "."): value for name, value in changes.items()}}
    return load_config(Config, load_recipe("grpo_tiny"), settings)


def begin(config: Config) -> None:
    """Writes what a run writes before its first step."""
    config.run_folder.path.mkdir(parents=True, exist_ok=True)
    config.run_folder.config.write_text(run_settings(config, contents_of(config)))


F, G = ({"path": f"rewards.py:{name}", "weight": 1.0} for name in "fg")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"reward__functions": {}}, "reward.functions.f.path: 'rewards.py:f' -> none"),
        (
            {"reward__functions": {"f": F, "g": G}},
            "reward.functions.g.path: none -> 'rewards.py:g'",
        ),
        ({"reward__functions": {"g": F}}, "reward.functions.g.path: none"),
        (
            {"reward__functions": {"f": {**F, "weight": 0.5}}},
            "reward.functions.f.weight: 1.0 -> 0.5",
        ),
        ({"reward__grader_weight": 0.5}, "reward.grader_weight: 1.0 -> 0.5"),
        ({"rollout__agent": ""}, "rollout.agent"),
        ({"weights": ""}, "weights: 'model' -> ''"),
        ({"data__train__path": "others.jsonl"}, "data.train.path: 'rows.jsonl' -> 'others.jsonl'"),
        ({"data__sources__more__path": "rows.jsonl"}, "data.sources.more.path: none"),
        ({"data__evaluation__path": "rows.jsonl"}, "data.evaluation.path"),
        ({"evaluation__num_samples": 3}, "evaluation.num_samples"),
        ({"rollout__num_samples": 4}, "rollout.num_samples: 8 -> 4"),
        ({"optim__lr": 2e-3}, "optim.lr: "),
        ({"optim__lr_decay_steps": 9}, "optim.lr_decay_steps: 4 -> 9"),
        ({"sft__num_steps": 3}, "sft.num_steps"),
        ({"algorithm__loss_options__clip_low": 0.1}, "algorithm.loss_options.clip_low"),
        ({"train__dtype": "bfloat16"}, "train.dtype"),
    ],
)
def test_what_changes_the_training_makes_another_run(here, changes, told):
    begin(made())
    with pytest.raises(UserError) as caught:
        check_folder(made(**changes))
    text = str(caught.value)
    assert "dapo_tiny" not in text and "runs/grpo_tiny/seed0 holds a run that was made with" in text
    assert told in text and "another `name`" in text and "\n" not in text
    # Said in so many words, the run goes on.
    check_folder(made(**changes, run__resume="accept_other_settings"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"run__num_steps": 5},
        {"run__num_steps": 8, "optim__lr_decay_steps": 8},
        {"run__num_steps": 2, "optim__lr_decay_steps": 2},
        {"run__save_every": 1, "run__loggers": (), "run__rollouts_every": 0},
        {"evaluation__every": 1},
        {"mesh__train": "1-1-2", "mesh__sharding": "ZeRO-1"},
        {"placement": {"one": {"roles": ("actor", "reference")}}},
        {"hosts__lost_after_s": 90.0},
        {"rollout__slots": 8, "rollout__cache": "paged", "train__rows": 24, "train__remat": "full"},
        {"reward__grader_timeout_s": 9.0},
        {"weights": "./model", "data__train__path": "./rows.jsonl"},
    ],
)
def test_what_leaves_the_training_alone_may_change(here, changes):
    begin(made())
    check_folder(made(**changes))


@pytest.mark.parametrize(
    ("file", "setting"),
    [
        ("rows.jsonl", "data.train.path"),
        ("rewards.py", "reward.functions.f.path"),
        ("its_lengths.py", "reward.functions.f.path"),
        ("my_agents/player.py", "rollout.agent"),
        ("my_agents/moves.py", "rollout.agent"),
        ("model/model.safetensors", "weights"),
    ],
)
def test_a_file_with_other_content_makes_another_run(here, file, setting):
    begin(made())
    text = (here / file).read_text()
    # Of the same length.
    (here / file).write_text(text.replace(text[-4], "#", 1))
    with pytest.raises(UserError, match=f"{setting} .* has other content"):
        check_folder(made())
    # The same content at another time is the same.
    (here / file).write_text(text)
    os.utime(here / file, (1, 1))
    check_folder(made())


def test_other_weights_of_a_frozen_role_make_another_run(here):
    config = made(rollout__agent_roles=("a", "b"), rollout__frozen_roles__b="model", weights="")
    begin(config)
    (here / "model/model.safetensors").write_text("wEights")
    with pytest.raises(UserError, match=r"rollout.frozen_roles.b .* has other content"):
        check_folder(config)


@pytest.mark.parametrize(
    "file", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
)
def test_other_templates_make_another_run(here, file):
    begin(made())
    path = here / "model" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("{{ messages }}")
    with pytest.raises(UserError, match=r"weights .* has other content"):
        check_folder(made())


def test_a_file_that_the_run_does_not_read_may_change(here):
    begin(made())
    (here / "model" / "README.md").write_text("a note")
    (here / "unrelated.py").write_text("")
    # A folder that has the name of a grader is none of the run's.
    (here / made().reward.grader).mkdir()
    check_folder(made())


def test_a_folder_that_is_moved_holds_the_same_run(here):
    begin(made())
    (here / "elsewhere").mkdir()
    (here / "runs").rename(here / "elsewhere" / "runs")
    check_folder(made(run__output="elsewhere/runs"))


def test_a_run_with_a_setting_that_is_gone_is_another(here):
    config = made()
    config.run_folder.path.mkdir(parents=True)
    config.run_folder.config.write_text(run_settings(config, {}) + "optim.gone = 3\n")
    with pytest.raises(UserError, match=r"settings \(optim\.gone: 3 -> none\);"):
        check_folder(config)
    check_folder(made(run__resume="accept_other_settings"))


def test_fewer_steps_than_are_done_are_refused(here):
    begin(made())
    folder = made().run_folder.rl
    folder.path.mkdir()
    folder.metrics.write_text("".join(f'{{"step": {n}, "time_s": 1.0}}\n' for n in range(4)))
    check_folder(made(run__num_steps=3))
    with pytest.raises(UserError, match=r"has done 3 steps, and run\.num_steps is 2; set it to 3"):
        check_folder(made(run__num_steps=2))
    # Rows without settings are of nobody knows which run.
    made().run_folder.config.unlink()
    with pytest.raises(
        UserError, match=r"config\.txt does not exist; restore it, or give this run"
    ):
        check_folder(made())
    check_folder(made(run__resume="accept_other_settings"))


def test_a_recipe_without_a_change_is_the_run_of_its_settings(here):
    begin(made())
    settings = load_recipe("grpo_tiny").copy_and_resolve_references()
    check_folder(load_config(Config, settings, MADE_WITH))


def test_a_long_value_is_cut(here):
    begin(made())
    with pytest.raises(UserError) as caught:
        check_folder(made(data__template="{prompt}" + "x" * 5000))
    assert len(str(caught.value)) < 1000


def test_a_setting_that_did_not_exist_had_its_default(here):
    """Runs and SFT stages that an earlier version of jaxrl has begun go on."""
    begin(config := made())
    path = config.run_folder.config
    absent = ("critic.trunk_coef", "model.value_head", "rollout.agent_roles")
    kept = [line for line in path.read_text().splitlines() if not line.startswith(absent)]
    path.write_text("\n".join(kept) + "\n")
    check_folder(config)
    before = {k: x for k, x in sft_settings(config, {}).items() if k != "model.value_head"}
    check_sft_stage(config, before, {})
    with pytest.raises(UserError, match=r"critic\.trunk_coef: 0\.0 -> 0\.5"):
        check_folder(made(critic__trunk_coef=0.5))
