"""A path that is too long for the system ends every command in one line with status 2."""

import json
import shutil

import jax
import pytest

from jaxrl import cli, extensions
from jaxrl.config.config_tree import format_config
from jaxrl.config.schema import Config
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.errors import EXIT_USER_ERROR
from jaxrl.models.decoder import init_params
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.model_config import ModelConfig

MODEL = ModelConfig(
    vocab_size=288, num_layers=1, d_model=16, d_ff=16, num_heads=2, num_kv_heads=1, head_dim=8
)
# Names have 255 bytes at most and paths 4,096.
LONG = {
    "name": "a" * 300,
    "path": "a/" * 2500,
    "absolute": "/tmp/" + "a/" * 2500 + "b",
    "both": "a" * 5000,
    "letters": "ö" * 200,
}
RECIPE = "--config dapo_tiny"
COMMANDS = [
    "train --config @",
    "train --dry_run --config @.py",
    *(f"train --dry_run {RECIPE} --config.{name}=@" for name in ("run.output", "weights")),
    f"train --dry_run {RECIPE} --config.reward.functions.mine.path=@.py:f",
    "evaluate --model @",
    "evaluate --model MODEL --config @",
    "evaluate --model MODEL --set @",
    "evaluate --model MODEL --set PROBLEMS --out @",
    "browse @",
    "report @",
    "report RUN --out @",
    "serve --model @",
    "serve --model MODEL --chat_template @",
    "serve --tinker --model @",
    "serve --tinker --model MODEL --folder @",
    "convert --path @ --out x",
    "convert --path RUN --out @",
    "fetch --wheel @",
    "data @",
    "data --config @",
    "data PROBLEMS --tokenizer @",
    "data PROBLEMS --to @",
    "data PROBLEMS --to @.jsonl",
    "data PROBLEMS --to @.parquet",
    "data PROBLEMS --grader @.py:f",
    "plan --config @",
    f"plan {RECIPE} --topology @.json:1x8",
    "data PROBLEMS --pass_rate @ --to x.jsonl",
    "data PROBLEMS --pass_rate MODEL --to @.jsonl",
    "data PROBLEMS --rewrite_answers http://127.0.0.1:9/v1 --prompt @ --to x.jsonl",
    "replay @ --step 1",
    "replay @ --step 1 --sample 0",
    "certify --config @",
    f"train {RECIPE} --config.run.certificate=@ --config.run.output=RUNS",
    "diff @ RUN",
    "diff RUN @",
    "doctor --config @",
    "rehearse --config @",
    f"rehearse {RECIPE} --out @",
    "new @",
    "import-verl @",
    "import-verl VERL --out @",
    "mesh --train 1-1-1 --model @",
]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """Files and folders that are all right."""
    root = tmp_path_factory.mktemp("places")
    model, run = root / "model", root / "run"
    save_checkpoint(init_params(MODEL, jax.random.key(0)), MODEL, model, dtype="float32")
    train_tokenizer(["1 + 1"], vocab_size=258).save(model)
    shutil.copytree(model, run / "model")
    (run / "config.txt").write_text(format_config(Config()))
    (root / "problems.jsonl").write_text(json.dumps({"problem": "1 + 1", "answer": "2"}) + "\n")
    (root / "verl.yaml").write_text("algorithm: {adv_estimator: grpo}\n")
    return {
        "MODEL": str(model),
        "RUN": str(run),
        "PROBLEMS": str(root / "problems.jsonl"),
        "VERL": str(root / "verl.yaml"),
        "CACHE": str(root / "cache"),
    }


def test_all_commands_are_tried():
    assert {command.split()[0] for command in COMMANDS} == cli.COMMANDS.keys()


@pytest.mark.parametrize("long", LONG)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_is_too_long_is_told(places, monkeypatch, tmp_path, capsys, command, long):
    name, *words = command.split()
    if not (cli.COMMANDS[name].function or extensions.is_installed(name)):
        pytest.skip(f"the extension of {name} was removed")
    monkeypatch.chdir(tmp_path)
    # Else a model that was fetched before is found.
    monkeypatch.setenv("XDG_CACHE_HOME", places["CACHE"])
    words = [places.get(word, word.replace("@", LONG[long])) for word in words]
    assert cli.main(["jaxrl", name, *words]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and len(error) < 1500
    assert not [*tmp_path.iterdir()]
