"""What a run will ask for late is looked up before it trains anything, and told all at once."""

import dataclasses
import importlib
import json
import re

import jax
import pytest
from beside import needs
from tiny_runs import shape_of, tiny_config

from jaxrl.commands.run_commands import check_for_plan
from jaxrl.config.schema import Config
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.errors import UserError
from jaxrl.models.decoder import init_params, score_config
from jaxrl.models.huggingface import config_json
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.model_config import ModelConfig
from jaxrl.trainer import program
from jaxrl.trainer.context import build_context
from jaxrl.trainer.findings import REINFORCEMENT

MODEL = ModelConfig(
    vocab_size=288, num_layers=1, d_model=16, d_ff=16, num_heads=2, num_kv_heads=1, head_dim=8
)
SMALL = dataclasses.replace(MODEL, vocab_size=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Problems, models and code of a user's: some healthy, some not."""
    folder = tmp_path_factory.mktemp("needs")
    for name, numbers in (("train", range(100, 140)), ("evaluation", range(400, 410))):
        rows = [{"problem": f"repeat {n}", "answer": n, "solution": f"{n}"} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_tokenizer(["1 + 1"], vocab_size=258)
    for name, model in (
        ("scores", score_config(MODEL)),
        ("few_words", score_config(SMALL)),
        ("language", MODEL),
        ("few_words_language", SMALL),
    ):
        params = init_params(model, jax.random.key(0))
        save_checkpoint(params, model, folder / name, dtype="float32")
        tokenizer.save(folder / name)
    damaged = folder / "damaged"
    damaged.mkdir()
    for file in (folder / "scores").iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    (folder / "rewards.py").write_text(
        "def good(responses):\n    return [0.0] * len(responses)\ndef alone():\n    return 0\n"
    )
    (folder / "broken.py").write_text("import no_such_package\n")
    (folder / "talks.jsonl").write_text('{"prompt": "1", "response": "1"}\n')
    (folder / "pairs.jsonl").write_text('{"prompt": "1", "chosen": "1", "rejected": "2"}\n')
    return folder


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    """Starts a run of some kind that must not come to training; returns what it says."""
    monkeypatch.chdir(folder)

    def never(*args, **kwargs):
        raise AssertionError("training has started")

    monkeypatch.setattr("jaxrl.trainer.program.reinforce", never)
    monkeypatch.setattr("jaxrl.trainer.program.fine_tuned", never)
    monkeypatch.setattr("jaxrl.trainer.preference_training.starting_params", never)

    def start(**changes) -> str:
        with pytest.raises(UserError) as error:
            program.train(make_config(tmp_path, **changes), devices=jax.devices()[:1])
        assert "\n" not in str(error.value)
        return str(error.value)

    return start


def make_config(output, **changes) -> Config:
    settings = {
        "data.train.path": "train.jsonl",
        "data.evaluation.path": "evaluation.jsonl",
        "sft.num_steps": 1000,
    }
    return tiny_config(output, shape_of(MODEL), settings, **changes)


def function(path: str) -> dict:
    return {"mine": {"path": path, "weight": 1.0}}


SAFE = {"algorithm__dataflow": "safe_rlhf", "algorithm__advantage": "gae"}
PPO = {"algorithm__dataflow": "ppo", "algorithm__advantage": "gae"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward__functions": function("absent.py:f")}, "absent.py does not exist"),
        ({"reward__functions": function("rewards.py:goood")}, "has no 'goood'; it has good, alone"),
        ({"data__train__path": "nowhere.jsonl"}, "data.train: nowhere.jsonl does not exist"),
        ({"data__train__path": "rewards.py:rows"}, "has no 'rows'"),
        ({"data__evaluation__path": "data/nowhere.parquet"}, "data/nowhere.parquet does not exist"),
        ({"sft__path": "nowhere.jsonl"}, "sft.path: nowhere.jsonl does not exist"),
        (
            {"data__train__fields": {"prompt": "problm"}},
            "no field 'problm' (did you mean 'problem'?)",
        ),
        (
            {"data__evaluation__fields": {"answer": "truth"}},
            "data.evaluation: evaluation.jsonl has no",
        ),
        ({"sft__path": "train.jsonl"}, "sft.path: train.jsonl:1: no field 'response'"),
        ({"data__train__path": "rewards.py"}, "data.train: rewards.py:1: no valid JSON"),
        ({"run__loggers": ("wandb:mine",)}, "run.loggers: the package wandb is not installed"),
        ({"run__loggers": ("tensorboard", "trackio")}, "pip install trackio"),
        ({"weights": "nowhere"}, ""),
        ({"run__loggers": ("tensorboard",)}, ""),
        ({"data__train__path": "owner/name:main"}, ""),
    ],
)
def test_a_dry_run_looks_for_files_and_functions_but_not_for_weights(run, changes, message):
    config = make_config("out", **changes)
    if not message:
        return check_for_plan(config)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        check_for_plan(config)
    assert "dry_run" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward__functions": function("absent.py:f")}, "absent.py does not exist"),
        ({"reward__functions": function("broken.py:f")}, "No module named 'no_such_package'"),
        ({"reward__functions": function("rewards.py:goood")}, "has no 'goood'; it has good, alone"),
        ({"reward__functions": function("rewards.py:alone")}, "cannot be called with (responses)"),
        ({"reward__model": "nowhere"}, "nowhere/config.json does not exist"),
        ({"reward__model": "language"}, "is a language model; it must be a"),
        ({"reward__model": "damaged"}, "damaged/model.safetensors is cut short"),
        ({"reward__model": "few_words"}, "the model in few_words 200; it reads the tokens"),
        ({**SAFE, "cost__model": "nowhere"}, "nowhere/config.json does not exist"),
        ({**SAFE, "cost__model": "few_words"}, "the model in few_words 200"),
        ({**PPO, "critic__weights": "nowhere"}, "nowhere/config.json does not exist"),
        ({**PPO, "critic__weights": "few_words"}, "the model in few_words 200"),
        ({"reward__judge__model": "nowhere"}, "nowhere/config.json does not exist"),
        ({"reward__judge__model": "scores"}, "which says nothing in words"),
        (
            {"reward__judge__model": "few_words_language"},
            "the tokenizer has 258 tokens, the model in few_words_language 200",
        ),
        ({"reward__grader": "choice"}, "train.jsonl:1: ground truth"),
        ({"data__train__grader": "no such"}, "no grader is called 'no such'"),
        ({"reward__grader_options": {"part": 1}}, "has no option 'part'"),
        ({"data__evaluation__path": "reasoning-gym:chain_some"}, "did you mean chain_sum"),
        ({"sft__path": "nowhere.jsonl"}, "nowhere.jsonl does not exist"),
        (
            {"run__loggers": ("tensorboard", "wandb")},
            "the package wandb is not installed; run pip install wandb",
        ),
        ({"run__loggers": ("trackio:mine",)}, "pip install trackio"),
    ],
)
def test_what_comes_late_is_looked_up_first(run, changes, message, monkeypatch):
    monkeypatch.setattr("jaxrl.trainer.findings.importlib.util.find_spec", lambda name: None)
    assert message in run(**changes)


@needs("reward.grader='code'")
@pytest.mark.parametrize("setting", ["reward__grader", "data__train__grader"])
def test_code_without_a_sandbox_is_refused_first(run, setting, monkeypatch):
    sandbox = importlib.import_module("jaxrl_code.sandbox")

    class Absent:
        def check(self):
            raise sandbox.SandboxUnavailable("is not installed")

    Absent.name = "bubblewrap"
    monkeypatch.setattr(sandbox, "SANDBOXES", {"bubblewrap": Absent})
    sandbox.logged_choice.cache_clear()
    line = run(**{setting: "code"})
    assert "no sandbox for them works on this machine" in line
    assert "bubblewrap: is not installed; install bubblewrap, or set reward.code_sandbox" in line


def test_a_laptop_hears_everything_at_once(run):
    line = run(
        mesh__train="1-8-16",
        weights="models/none",
        tokenizer__path="models/none",
        reward__functions=function("absent.py:f"),
        reward__model="nowhere",
        data__train__path="gone.jsonl",
    )
    assert line.startswith("this run lacks 6 things: (1) devices: layout 1-8-16")
    assert "needs 128, found 1 cpu; run on as many" in line
    assert "weights: models/none/" in line or "weights: " in line
    assert "tokenizer: models/none/tokenizer.json" in line
    assert "data.train: gone.jsonl does not exist" in line
    for setting in ("reward.functions.mine: ", "reward.model: "):
        assert setting in line
    assert "Paths are relative to " in line and "; --dry_run shows the plan" in line


def test_a_fine_tuning_asks_for_what_its_evaluation_needs(run):
    assert "is called 'absent'" in run(run__num_steps=0, reward__grader="absent")
    # And not for what only rewards need.
    line = run(run__num_steps=0, sft__path="gone.jsonl", reward__model="nowhere")
    assert "sft.path: gone.jsonl" in line and "nowhere" not in line
    # A dry run plans reinforcement learning alone.
    assert "dry_run" not in line


@pytest.mark.parametrize(("loss", "options"), [("bradley_terry", {}), ("dpo", {"beta": 0.1})])
def test_pairs_are_looked_up_before_sft(run, loss, options):
    files = {"preference__path": "pairs.jsonl", "preference__evaluation_path": "gone.jsonl"}
    line = run(preference__loss=loss, preference__options=options, **files)
    assert "preference.evaluation_path: gone.jsonl does not exist" in line


def test_weights_of_the_policy_are_looked_through(run):
    assert "damaged/model.safetensors is cut short" in run(
        weights="damaged", tokenizer__path="damaged", model__num_scores=1
    )


def test_a_run_reads_the_model_of_a_folder_once(folder, tmp_path, monkeypatch):
    """Of the policy and its judge, and of three roles of scores."""
    monkeypatch.chdir(folder)
    parse, read = config_json.parse_config, []

    def parse_and_note(values, *, origin):
        read.append(origin)
        return parse(values, origin=origin)

    monkeypatch.setattr(config_json, "parse_config", parse_and_note)
    models = {"weights": "language", "reward__judge__model": "language", "reward__model": "scores"}
    models |= {"cost__model": "scores", "critic__weights": "scores"}
    config = make_config(tmp_path, **SAFE, **models, reward__judge__template="{response}")
    with program.claimed(config) as found:
        run = build_context(found, jax.devices()[:1], kind=REINFORCEMENT)
    assert {"critic", "cost_critic", "reward", "cost", "judge"} < {*run.models.by_role}
    assert sorted(read) == ["language/config.json", "scores/config.json"]
