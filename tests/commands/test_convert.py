"""`convert` as a user runs it."""

import json
import pathlib
import shutil
import subprocess
import sys

import hub_server
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl import cli
from jaxrl.hub import local_paths
from jaxrl.hub.downloads import Hub
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.model_config import ModelConfig

SCRIPT = pathlib.Path(__file__).parents[2] / "launch" / "convert.py"
TINY = ModelConfig(
    vocab_size=24, num_layers=2, d_model=16, d_ff=24, num_heads=2, num_kv_heads=1, head_dim=8
)


def convert(**options) -> int:
    arguments = [part for k, v in options.items() for part in (f"--{k}", str(v))]
    return cli.main(["jaxrl", "convert", *arguments])


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def source(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    (directory / "tokenizer").mkdir()
    (directory / "tokenizer/tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "tokenizer/chat_template.jinja").write_text("{{ messages }}")
    (directory / "tokenizer/config.json").write_text('{"eos_token_id": 5}')
    rng = np.random.default_rng(0)
    shapes = decoder_graph(TINY)[1]
    save_checkpoint(
        jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shapes),
        TINY,
        directory / "hf",
        dtype=request.param,
        source=directory / "tokenizer",
    )
    return directory / "hf"


def tensors_of(directory):
    return {n: t for file in directory.glob("*.safetensors") for n, t in load_file(file).items()}


def test_there_and_back_gives_equal_tensors_and_files(tmp_path, source):
    assert convert(**{"from": "hf", "path": source, "to": "orbax", "out": tmp_path / "orbax"}) == 0
    back = {"from": "orbax", "path": tmp_path / "orbax", "to": "hf", "out": tmp_path / "hf"}
    assert convert(**back, max_shard_bytes=4000) == 0
    found, expected = tensors_of(tmp_path / "hf"), tensors_of(source)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes()
    written, original = (
        json.loads((d / "config.json").read_text()) for d in (tmp_path / "hf", source)
    )
    assert written == original
    assert written["eos_token_id"] == 5
    # Weights are not in the Orbax directory twice, nor anything half written.
    names = {path.name for path in (tmp_path / "orbax").iterdir()}
    assert names == {"params", "config.json", "tokenizer.json", "chat_template.jinja"}
    assert {path.name for path in tmp_path.iterdir()} == {"orbax", "hf"}


def test_a_model_comes_from_the_hub_and_goes_there(tmp_path, source, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    with hub_server.serving() as server:
        hub = Hub(endpoint=server.url, cache_dir=tmp_path / "cache")
        monkeypatch.setattr(local_paths, "open_hub", lambda: hub)
        monkeypatch.setattr("jaxrl.commands.convert.open_hub", lambda: hub)
        server.repos["models", "me/tiny"] = {
            file.name: file.read_bytes() for file in source.iterdir() if file.is_file()
        }
        out = tmp_path / "orbax"
        assert convert(**{"from": "hf", "path": "me/tiny", "to": "orbax", "out": out}) == 0
        back = {"from": "orbax", "path": out, "to": "hf", "out": tmp_path / "hf"}
        assert convert(**back, push="me/again") == 0
        assert capsys.readouterr().out.endswith(f"{server.url}/me/again\n")
        pushed = server.repos["models", "me/again"]
    assert pushed.keys() == {file.name for file in (tmp_path / "hf").iterdir()}
    assert pushed["config.json"] == (tmp_path / "hf" / "config.json").read_bytes()


def test_the_type_can_be_chosen(tmp_path, source):
    assert convert(**{"from": "hf", "path": source, "to": "orbax", "out": tmp_path / "orbax"}) == 0
    back = {"from": "orbax", "path": tmp_path / "orbax", "to": "hf", "out": tmp_path / "hf"}
    assert convert(**back, dtype="bfloat16") == 0
    for name, tensor in tensors_of(source).items():
        found = tensors_of(tmp_path / "hf")[name]
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, tensor.astype(jnp.bfloat16))


def test_mistakes_are_one_line_and_leave_nothing(tmp_path, source, capsys):
    out = tmp_path / "out"

    def complaint(**options):
        assert convert(**{"from": "hf", "path": source, "to": "orbax", "out": out, **options}) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert not list(tmp_path.iterdir())
        return error

    assert f"{source} exists and is not" in complaint(out=source)
    assert "--from hf --to hf converts nothing" in complaint(to="hf")
    assert "config.json does not exist" in complaint(path=tmp_path / "nowhere")
    assert "params does not exist" in complaint(**{"from": "orbax", "to": "hf"})
    assert "max_shard_bytes -1 is below 1" in complaint(max_shard_bytes=-1)
    assert "max_shard_bytes 0 is below 1" in complaint(max_shard_bytes=0)
    assert "config.json does not exist, since" in complaint(path=source / "config.json")
    assert "is no name on the hub; write OWNER/NAME" in complaint(
        **{"from": "orbax", "to": "hf", "push": "mine"}
    )
    assert "--push takes what --to hf writes" in complaint(push="me/mine")
    assert "out cannot be made" in complaint(out=source / "config.json" / "out")


def test_params_that_do_not_fit_their_config_are_refused(tmp_path, source, capsys):
    orbax = tmp_path / "orbax"
    assert convert(**{"from": "hf", "path": source, "to": "orbax", "out": orbax}) == 0
    values = json.loads((orbax / "config.json").read_text())
    for change in ({"num_hidden_layers": 3}, {"tie_word_embeddings": False}):
        (orbax / "config.json").write_text(json.dumps({**values, **change}))
        options = {"from": "orbax", "path": orbax, "to": "hf", "out": tmp_path / "hf"}
        assert convert(**options) == 2
        assert "params does not hold the model that" in capsys.readouterr().err
        assert not (tmp_path / "hf").exists()


def test_a_directory_without_a_checkpoint_is_refused(tmp_path, source, capsys):
    (tmp_path / "params").mkdir()
    shutil.copy(source / "config.json", tmp_path)
    options = {"from": "orbax", "path": tmp_path, "to": "hf", "out": tmp_path / "hf"}
    assert convert(**options) == 2
    assert "params holds no Orbax checkpoint" in capsys.readouterr().err


def test_the_script_runs(tmp_path):
    command = [sys.executable, SCRIPT, "--from", "hf", "--path", tmp_path, "--to", "orbax"]
    done = subprocess.run([*command, "--out", tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and "config.json does not exist" in done.stderr
