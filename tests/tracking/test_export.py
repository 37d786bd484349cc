"""Exports checkpoints of runs for Transformers and PEFT."""

import dataclasses
import json
import types

import hub_server
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxrl import cli
from jaxrl.commands.convert import main as convert
from jaxrl.config.schema import Config
from jaxrl.data.problems import Problems
from jaxrl.errors import UserError
from jaxrl.mesh.pools import take_devices
from jaxrl.models import lora
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.config_json import adapter_config_json, config_json, read_config
from jaxrl.models.huggingface.model_files import write_json
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.huggingface.weight_loading import load_adapter, load_params
from jaxrl.models.model_config import LoraConfig, ModelConfig
from jaxrl.roles.learner import TrainState
from jaxrl.tracking.checkpoints import Checkpoints, StoredCheckpoints
from jaxrl.tracking.durable import run_lock
from jaxrl.tracking.run_weights import export_run, newest_weights
from jaxrl.trainer.context import RunContext
from jaxrl.trainer.findings import check_weights
from jaxrl.trainer.resolved import resolve
from jaxrl.trainer.roles import role_models
from jaxrl.trainer.supervised import load_or_init
from jaxrl_hub.downloads import Hub

TINY = ModelConfig(
    vocab_size=24, num_layers=2, d_model=16, d_ff=24, num_heads=2, num_kv_heads=1, head_dim=8
)
ADAPTED = dataclasses.replace(TINY, lora=LoraConfig(rank=2, targets=("q", "up")))


def random_params(config, seed):
    rng = np.random.default_rng(seed)
    shapes = decoder_graph(config)[1]
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), jnp.float32), shapes)


def finished_run(folder, config, stages):
    """Writes the folder of a finished run. `stages` has the weights of each stage by step."""
    model = folder / "model"
    model.mkdir(parents=True)
    write_json(model / "config.json", config_json(config, dtype="float32"))
    write_json(model / "tokenizer.json", {"version": "1.0"})
    if config.lora.rank:
        values = adapter_config_json(config, base="models/base")
        write_json(model / "adapter_config.json", values)
    for stage, steps in stages.items():
        checkpoints = Checkpoints(folder / stage / "checkpoints", keep=2)
        checkpoints.prepare(None)
        for step, params in steps.items():
            opt_state = {"moments": jnp.zeros(3)}
            checkpoints.save(step, {"actor": TrainState(params, opt_state, jnp.int32(step))}, {})
            checkpoints.commit()
        checkpoints.close()
    return folder


def shardings(config):
    device = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda _: device, decoder_graph(config)[1])


def export(run, out, **options):
    options = {"dtype": "float32", "max_shard_bytes": 5_000_000_000} | options
    return export_run(run, out, **options)


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_newest_weights_of_the_last_stage(tmp_path):
    params = {step: random_params(TINY, seed=step) for step in (1, 3, 60)}
    stages = {"sft": {60: params[60]}, "rl": {1: params[1], 3: params[3]}}
    run = finished_run(tmp_path / "run", TINY, stages)
    assert export(run, tmp_path / "hf") == 3
    assert read_config(tmp_path / "hf") == TINY
    assert_equal(load_params(tmp_path / "hf", TINY, shardings(TINY)), params[3])
    assert (tmp_path / "hf" / "tokenizer.json").exists()


def test_the_weights_of_a_step(tmp_path):
    params = {step: random_params(TINY, seed=step) for step in (1, 3)}
    run = finished_run(tmp_path / "run", TINY, {"rl": params})
    assert newest_weights(run, 1).step == 1 and newest_weights(run).step == 3
    with pytest.raises(UserError, match="no intact checkpoint of step 2; choose one of 1, 3 "):
        newest_weights(run, 2)


def test_the_command_prints_the_dtype(tmp_path, capsys):
    run = finished_run(tmp_path / "run", TINY, {"rl": {3: random_params(TINY, seed=3)}})
    command = ["convert", "--path", str(run), "--out"]
    assert convert([*command, str(tmp_path / "short")]) == 0
    assert "step 3 in bfloat16; --dtype float32 writes" in capsys.readouterr().out
    assert convert([*command, str(tmp_path / "long"), "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.endswith("step 3 in float32\n")


def test_a_value_head_stays_in_the_checkpoint(tmp_path, capsys):
    params = random_params(TINY, seed=3)
    both = params | {"score_head": jnp.ones((TINY.d_model, 1))}
    run, out = finished_run(tmp_path / "run", TINY, {"rl": {3: both}}), tmp_path / "hf"
    assert convert(["convert", "--path", str(run), "--out", str(out), "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.endswith("step 3 in float32; the value head is left out\n")
    assert_equal(load_params(out, TINY, shardings(TINY)), params)


def test_the_command_pushes_to_the_hub(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    run = finished_run(tmp_path / "run", TINY, {"rl": {3: random_params(TINY, seed=3)}})
    out = tmp_path / "hf"
    with hub_server.serving() as server:
        hub = Hub(endpoint=server.url, cache_dir=tmp_path / "cache")
        monkeypatch.setattr("jaxrl.commands.convert.open_hub", lambda: hub)
        assert convert(["convert", "--path", str(run), "--out", str(out), "--push=me/mine"]) == 0
        assert capsys.readouterr().out.endswith(f"{server.url}/me/mine\n")
        pushed = server.repos["models", "me/mine"]
    assert pushed.keys() == {file.name for file in out.iterdir()}
    assert pushed["config.json"] == (out / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max_shard_bytes=0",), "max_shard_bytes = 0: must be at least 1"),
        (("--push=mine",), "is no name on the hub; write OWNER/NAME"),
        ((), "name the folder of a run"),
    ],
)
def test_mistakes_of_the_command_are_one_line(tmp_path, capsys, options, message):
    paths = ["--path", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]
    assert cli.main(["jaxrl", "convert", *paths, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_export_of_a_running_job_changes_nothing(tmp_path):
    params = {step: random_params(TINY, seed=step) for step in (1, 2, 3)}
    run = finished_run(tmp_path / "run", TINY, {"rl": {1: params[1], 2: params[2]}})
    checkpoints = Checkpoints(run / "rl" / "checkpoints", keep=2)
    with run_lock(run):
        # Orbax has written it, the run is about to write its manifest.
        checkpoints.save(3, {"actor": TrainState(params[3], {"m": jnp.zeros(3)}, jnp.int32(3))}, {})
        checkpoints._open().wait_until_finished()
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        assert export(run, tmp_path / "hf") == 2
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
        checkpoints.commit()
        checkpoints.close()
    assert export(run, tmp_path / "next") == 3


def test_an_export_whose_checkpoint_is_removed_meanwhile_takes_the_newer_one(tmp_path, monkeypatch):
    params = {step: random_params(TINY, seed=step) for step in (1, 2)}
    run = finished_run(tmp_path / "run", TINY, {"rl": {1: params[1]}})
    restore = StoredCheckpoints.restore_params

    def run_continues(stored, step, role, like):
        if step == 1:
            checkpoints = Checkpoints(stored.paths.path, keep=1)
            state = TrainState(params[2], {"m": jnp.zeros(3)}, jnp.int32(2))
            checkpoints.save(2, {"actor": state}, {})
            checkpoints.commit()
            checkpoints.close()
        return restore(stored, step, role, like)

    monkeypatch.setattr(StoredCheckpoints, "restore_params", run_continues)
    assert export(run, tmp_path / "hf") == 2


def test_a_run_with_sft_only(tmp_path):
    params = random_params(TINY, seed=0)
    run = finished_run(tmp_path / "run", TINY, {"sft": {60: params}})
    assert export(run, tmp_path / "hf") == 60


def test_adapters_are_merged_or_alone(tmp_path):
    params = random_params(ADAPTED, seed=0)
    run = finished_run(tmp_path / "run", ADAPTED, {"rl": {2: params}})
    assert export(run, tmp_path / "merged") == 2
    assert_equal(
        load_params(tmp_path / "merged", TINY, shardings(TINY)), lora.merge(params, ADAPTED)
    )
    assert export(run, tmp_path / "adapter", adapter_only=True) == 2
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert_equal(
        load_adapter(tmp_path / "adapter", ADAPTED, shardings(ADAPTED)), lora.split(params)[0]
    )
    values = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == "models/base"


def test_errors_of_an_export(tmp_path):
    run = finished_run(tmp_path / "run", TINY, {})
    with pytest.raises(UserError, match="has no finished checkpoint"):
        export(run, tmp_path / "out")
    with pytest.raises(UserError, match="model does not exist; name the folder of a run"):
        export(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="exists and is not overwritten"):
        export(run, run)
    one_layer = dataclasses.replace(TINY, num_layers=1)
    other = finished_run(tmp_path / "other", one_layer, {"rl": {1: random_params(TINY, 0)}})
    with pytest.raises(UserError, match="does not hold the model that the run's files"):
        export(other, tmp_path / "out")
    full = finished_run(tmp_path / "full", TINY, {"rl": {1: random_params(TINY, 0)}})
    with pytest.raises(UserError, match="no adapters to save"):
        export(full, tmp_path / "out", adapter_only=True)
    assert not (tmp_path / "out").exists()


def test_training_continues_from_an_exported_adapter(tmp_path):
    """A run that starts from the exported base and adapters has the weights of the exported run."""
    params = random_params(ADAPTED, seed=0)
    run = finished_run(tmp_path / "run", ADAPTED, {"rl": {2: params}})
    export(run, tmp_path / "adapter", adapter_only=True)
    base = lora.split(params)[1]
    save_checkpoint(base, TINY, tmp_path / "base", dtype="float32")
    config = Config(
        model=ADAPTED, weights=str(tmp_path / "base"), adapter=str(tmp_path / "adapter")
    )
    tokenizer = types.SimpleNamespace(vocab_size=24, stop_ids=(1,))
    resolved = resolve(config)
    models = role_models(resolved, ("actor",)).with_tokenizers(tokenizer, {})
    run = RunContext(
        resolved,
        models,
        take_devices(resolved.pools, jax.devices()[:1]),
        problems=Problems(),
        evaluation_prompts=None,
    )
    actor = run.roles.actor(optim=config.optim, samples=False)
    actor.start_from(load_or_init(run))
    assert_equal(actor.state.params, params)

    other = dataclasses.replace(ADAPTED, lora=LoraConfig(rank=3, targets=("q",)))
    with pytest.raises(UserError, match=r"model\.lora is rank 3, .* has 2, 32.0, q, up"):
        check_weights(resolve(dataclasses.replace(config, model=other)))
    with pytest.raises(ValueError, match=r"set weights and model\.lora\.rank"):
        Config(adapter="somewhere")
