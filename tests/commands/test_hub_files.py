"""Names on the hub in a config become paths before a run; all that is missing is told before a download."""

import dataclasses
import pathlib

import hub_server
import jax
import pytest

from jaxrl.commands.hub_files import with_hub_files
from jaxrl.config.schema import Config
from jaxrl.data.data_config import DataConfig, EvaluationSourceConfig, SourceConfig, TokenizerConfig
from jaxrl.errors import UserError
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.rewards.reward_config import RewardConfig
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl_hub.downloads import Hub

ROWS = b'{"problem": "1+1", "answer": "2"}\n'


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.serving() as server:
        hub = Hub(endpoint=server.url, cache_dir=tmp_path)
        monkeypatch.setattr("jaxrl.hub.local_paths.open_hub", lambda: hub)
        server.repos = {
            ("models", "me/tiny"): {
                "config.json": b"{}",
                "tokenizer.json": b"{}",
                "model.safetensors": b"weights",
            },
            ("datasets", "me/sums"): {"train.jsonl": ROWS, "test.jsonl": ROWS},
        }
        yield server


CONFIG = Config(
    weights="me/tiny",
    tokenizer=TokenizerConfig(path="me/tiny"),
    data=DataConfig(
        train=SourceConfig(path="me/sums"),
        evaluation=EvaluationSourceConfig(path="me/sums"),
        sources={"more": SourceConfig(path="me/sums:default:test")},
    ),
)


def names(path: str) -> set[str]:
    return {file.name for file in pathlib.Path(path).iterdir()}


def test_names_become_paths(server):
    server.repos["datasets", "me/sums"] = {"default/train.jsonl": ROWS, "default/test.jsonl": ROWS}
    found = with_hub_files(CONFIG, jax.devices()[:1])
    assert names(found.weights) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert found.tokenizer.path == found.weights
    assert names(found.data.train.path) == {"default-train.jsonl"}
    assert (
        names(found.data.evaluation.path)
        == names(found.data.sources["more"].path)
        == {"default-test.jsonl"}
    )
    # Nothing else changes, and there is nothing left to fetch.
    assert dataclasses.replace(found, weights="", data=CONFIG.data, tokenizer=CONFIG.tokenizer) == (
        dataclasses.replace(CONFIG, weights="")
    )
    assert with_hub_files(found, jax.devices()[:1]) is found


def test_weights_of_frozen_roles_become_paths(server):
    frozen = {"b": "me/tiny", "c": "start"}
    rollout = RolloutConfig(agent="a.py:a", agent_roles=("a", "b", "c"), frozen_roles=frozen)
    found = with_hub_files(Config(rollout=rollout)).rollout.frozen_roles
    assert found["c"] == "start" and "model.safetensors" in names(found["b"])


def test_all_that_is_missing_is_told_before_any_download(server):
    del server.repos["datasets", "me/sums"]
    config = dataclasses.replace(
        CONFIG, mesh=LayoutConfig(train="1-1-4096", fsdp=4096), reward=RewardConfig(model="me/none")
    )
    with pytest.raises(UserError) as caught:
        with_hub_files(config, jax.devices())
    message = str(caught.value)
    for told in (
        "needs 4096, found 8",
        "reward.model: me/none is no path here",
        "data.train.path: me/sums is no path here",
        "data.sources.more.path: me/sums",
    ):
        assert told in message
    assert not [path for _, path in server.requests if "/resolve/" in path]


def test_data_without_weights(server):
    found = with_hub_files(
        dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, sources={})),
        weights=False,
    )
    assert found.weights == "me/tiny"
    assert names(found.tokenizer.path) == {"config.json", "tokenizer.json"}
