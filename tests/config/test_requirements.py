"""What a run lacks is told all at once."""

import functools
import json
import pathlib

import pytest

from jaxrl.config.requirements import Finder
from jaxrl.data.data_config import SourceConfig
from jaxrl.data.problems import read_source
from jaxrl.errors import UserError
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.mesh.pools import EVERYTHING, Pool

SHARED = pathlib.Path(__file__).parents[2] / "../shared/data"


def look(*, problems=(), pools, num_devices, device_kind, **files) -> Finder:
    """Looks for devices, files of the policy and files of problems to train on."""
    find = Finder()
    find.devices(pools, num_devices, device_kind)
    find.files(**files)
    for path in problems:
        source = SourceConfig(path=str(path))
        read = functools.partial(read_source, source, "data.train", refuse_bad_rows=True)
        find("data.train", read)
    return find


def missing(**arguments) -> list[str]:
    return look(**arguments).missing


def require(**arguments) -> None:
    look(**arguments).check()


@pytest.fixture
def complete(tmp_path, monkeypatch):
    """Arguments of a run that lacks nothing; its files lie in the working folder."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "a.safetensors", "b.safetensors"):
        (model / name).write_text("{}")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}})
    )
    (tmp_path / "train.jsonl").write_text('{"problem": "1 + 1", "answer": 2}\n')
    return {
        "pools": [Pool(EVERYTHING, ("actor",), LayoutConfig(train="1-8-16"))],
        "num_devices": 128,
        "device_kind": "TPU v5",
        "weights": "model",
        "tokenizer": "model",
        "needs_chat_template": True,
        "problems": ["train.jsonl"],
    }


def test_nothing_is_missing(complete):
    assert missing(**complete) == []
    require(**complete)


def test_a_laptop_hears_everything_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        require(
            pools=[Pool(EVERYTHING, ("actor",), LayoutConfig(train="1-8-16"))],
            num_devices=1,
            device_kind="cpu",
            weights="models/Qwen2.5-32B",
            tokenizer="models/Qwen2.5-32B",
            needs_chat_template=True,
            problems=["data/dapo_math_17k.jsonl", "data/aime_2024.jsonl"],
        )
    message = str(caught.value)
    assert message.startswith("this run lacks 5 things: (1) devices")
    assert "needs 128, found 1 cpu" in message
    assert "models/Qwen2.5-32B/ has no config.json and no *.safetensors" in message
    assert "has no tokenizer.json and no tokenizer_config.json" in message
    assert "data/dapo_math_17k.jsonl does not exist" in message
    assert (
        'data/aime_2024.jsonl does not exist; put one JSON object a line, such as {"problem"'
        in (message)
    )
    assert str(tmp_path) in message


def test_random_weights_and_an_own_tokenizer_need_no_files(complete, tmp_path):
    complete |= {"weights": "", "tokenizer": "", "needs_chat_template": False, "problems": []}
    assert missing(**complete) == []


@pytest.mark.parametrize(
    ("removed", "fault"),
    [
        ("model/config.json", "weights: model/ has no config.json;"),
        ("model/b.safetensors", "weights: model/ has no b.safetensors of the 2 files"),
        ("model/tokenizer.json", "tokenizer: model/ has no tokenizer.json;"),
        ("train.jsonl", "data.train: train.jsonl does not exist"),
    ],
)
def test_each_file_is_missed(complete, tmp_path, removed, fault):
    (tmp_path / removed).unlink()
    (found,) = missing(**complete)
    assert found.startswith(fault)


def test_weights_without_an_index_are_any_safetensors(complete, tmp_path):
    (tmp_path / "model/model.safetensors.index.json").unlink()
    assert missing(**complete) == []
    for name in ("a", "b"):
        (tmp_path / f"model/{name}.safetensors").unlink()
    assert missing(**complete)[0].startswith("weights: model/ has no *.safetensors")


def test_a_chat_template_is_missed_only_if_needed(complete, tmp_path):
    (tmp_path / "model/tokenizer_config.json").write_text("{}")
    assert "chat_template.jinja" in missing(**complete)[0]
    assert missing(**complete | {"needs_chat_template": False}) == []
    (tmp_path / "model/chat_template.jinja").write_text("{{ messages }}")
    assert missing(**complete) == []


def test_a_broken_row_is_told_with_its_line(complete, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"problem": "1 + 1", "answer": 2}\n{"problem": "2"}\n')
    (fault,) = missing(**complete)
    assert fault == "data.train: train.jsonl:2: no field 'answer'; the row has 'problem' (text)"


def test_broken_json_beside_the_weights_is_left_to_its_reader(complete, tmp_path):
    (tmp_path / "model/model.safetensors.index.json").write_text("[")
    assert missing(**complete) == []


@pytest.mark.skipif(not SHARED.is_dir(), reason="the developers' data is not here")
def test_the_published_files_have_the_fields():
    files = [SHARED / name for name in ("dapo_math_17k.jsonl", "aime_2024.jsonl")]
    assert (
        missing(
            pools=[Pool(EVERYTHING, ("actor",), LayoutConfig())],
            num_devices=1,
            device_kind="cpu",
            weights="",
            tokenizer=str(SHARED / "tokenizers/qwen2.5"),
            needs_chat_template=True,
            problems=files,
        )
        == []
    )
