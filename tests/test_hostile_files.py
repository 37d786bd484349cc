"""Files of strangers: whatever is wrong with one, its reader says so in one line that names it."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import socket

import jax
import pyarrow
import pyarrow.parquet
import pytest

from jaxrl.config.command_line import load_recipe
from jaxrl.data.data_config import SourceConfig
from jaxrl.data.demonstrations import read_demonstrations
from jaxrl.data.preferences import read_preferences
from jaxrl.data.problems import read_source
from jaxrl.data.rows import parse_rows
from jaxrl.data.tokenizer import load_tokenizer, train_tokenizer
from jaxrl.errors import UserError
from jaxrl.files import read_bytes, read_json_object, read_text
from jaxrl.models.decoder import init_params
from jaxrl.models.huggingface.config_json import read_adapter_config, read_config
from jaxrl.models.huggingface.weight_export import save_adapter, save_checkpoint
from jaxrl.models.huggingface.weight_loading import check_adapter, check_params
from jaxrl.models.model_config import LoraConfig, ModelConfig
from jaxrl.tracking.checkpoints import _ROWS
from jaxrl.tracking.durable import AppendedFile, take_lock, write_atomically
from jaxrl.tracking.metrics import MetricsWriter, read_metrics
from jaxrl.tracking.run_folder import StageFolder
from jaxrl.tracking.stage_checkpoints import lost_rows
from jaxrl.user_code import load_function
from jaxrl_browse.browse_app import SampleFile

MODEL = ModelConfig(
    vocab_size=288, num_layers=1, d_model=16, d_ff=16, num_heads=2, num_kv_heads=1, head_dim=8
)
ADAPTED = dataclasses.replace(MODEL, lora=LoraConfig(rank=2, alpha=4.0))
DEEP = b"[" * 100_000 + b"]" * 100_000
DEEP_OBJECT = b'{"a": ' * 100_000 + b"1" + b"}" * 100_000
NOT_UTF8 = b'{"a": "\xff\xfe"}'
# Too long for a float, and for Python to read as a number at all.
LONG, ENDLESS = b"9" * 400, b"9" * 5000


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> pathlib.Path:
    """A model, its tokenizer and an adapter in one directory, and files of problems beside them."""
    folder = tmp_path_factory.mktemp("files") / "model"
    params = init_params(MODEL, jax.random.key(0))
    save_checkpoint(params, MODEL, folder, dtype="float32", max_shard_bytes=10_000)
    train_tokenizer(["1 + 1"], vocab_size=258).save(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    adapted = init_params(ADAPTED, jax.random.key(0))
    adapter = folder.with_name("adapter")
    save_adapter(adapted, ADAPTED, adapter, dtype="float32", base="model")
    for file in adapter.iterdir():
        shutil.copy(file, folder)
    rows = {
        "problems.jsonl": {"problem": "1 + 1", "answer": 2},
        "talks.jsonl": {"prompt": "1 + 1", "response": "2"},
        "pairs.jsonl": {"prompt": "1 + 1", "chosen": "2", "rejected": "3", "margin": 1},
    }
    for name, row in rows.items():
        (folder / name).write_text(json.dumps(row) + "\n")
    return folder


TALK = [{"role": "user", "content": "Hello."}]
READERS = {
    "config.json": read_config,
    "tokenizer.json": load_tokenizer,
    "tokenizer_config.json": load_tokenizer,
    # A template is read when a chat is rendered, and nowhere else.
    "chat_template.jinja": lambda folder: load_tokenizer(folder).render_chat(TALK),
    "generation_config.json": load_tokenizer,
    "adapter_config.json": read_adapter_config,
    "model.safetensors.index.json": lambda folder: check_params(folder, MODEL),
    "model-00001-of-00002.safetensors": lambda folder: check_params(folder, MODEL),
    "adapter_model.safetensors": lambda folder: check_adapter(folder, ADAPTED),
    "problems.jsonl": lambda folder: read_source(
        SourceConfig(path=str(folder / "problems.jsonl")), "data.train"
    ),
    "talks.jsonl": lambda folder: read_demonstrations(folder / "talks.jsonl", source="s"),
    "pairs.jsonl": lambda folder: read_preferences(folder / "pairs.jsonl", source="s"),
}
JSON = [name for name in READERS if name.endswith(".json")]
JSONL = [name for name in READERS if name.endswith(".jsonl")]

CASES = [
    *[(name, content) for name in JSON for content in (b"", b"[]", b"1", b"{", NOT_UTF8)],
    *[(name, content) for name in JSON for content in (DEEP, DEEP_OBJECT, ENDLESS, b"\0")],
    *[(name, content) for name in JSONL for content in (b"", b"[]", b"1", b"{", NOT_UTF8, b"\0")],
    *[(name, content) for name in JSONL for content in (DEEP, DEEP_OBJECT, ENDLESS)],
    ("chat_template.jinja", b"\xff\xfe"),
    ("chat_template.jinja", b"{{ " + b"(" * 100_000 + b")" * 100_000 + b" }}"),
    ("chat_template.jinja", b"{% for m in messages %}" * 30 + b"{% endfor %}" * 30),
    ("model-00001-of-00002.safetensors", b""),
    ("model-00001-of-00002.safetensors", b"\xff" * 64),
    ("model-00001-of-00002.safetensors", (10**12).to_bytes(8, "little") + b"{}"),
    ("adapter_model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
    ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}'),
]

# Of an object that is healthy otherwise, keys set to what cannot be meant.
ODD = [None, True, -1, 0, 1.5, 10**12, 10**400, float("nan"), float("inf"), "no such", [], [[]], {}]
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
NO_TEXTS = (None, 1, [], {}, "")
VALUES = [
    ("config.json", ("architectures", *SIZES, "vocab_size", "rms_norm_eps"), ODD),
    ("config.json", ("num_key_value_heads", "head_dim"), ODD[1:]),
    ("config.json", ("rope_theta",), (0, -1, "x", [], 10**400, 10**12, float("nan"))),
    ("config.json", ("rope_scaling",), (1, "x", [1], {"rope_type": []}, {"rope_type": {}})),
    ("config.json", ("layer_types",), (1, "x", {}, [1], [[]])),
    ("config.json", ("tie_word_embeddings",), ("x", [], {}, 2)),
    ("config.json", ("architectures",), ([["Qwen2ForCausalLM"]], [{}])),
    ("tokenizer_config.json", ("eos_token",), (None, 1, [], {}, "no such", {"content": 1})),
    ("adapter_config.json", ("r",), ODD),
    ("adapter_config.json", ("lora_alpha",), [x for x in ODD if x != 1.5 and x is not True]),
    ("adapter_config.json", ("target_modules",), (None, 1, "q_proj", {}, [1], [[]], ["x"])),
    ("adapter_config.json", ("use_dora",), (True, 1, "x", [1])),
    ("model.safetensors.index.json", ("weight_map",), (None, 1, "x", [], ["a"], {"a": 1})),
    (
        "model.safetensors.index.json",
        ("weight_map",),
        ({"a": "../../elsewhere.safetensors"}, {"a": "absent.safetensors"}),
    ),
    ("problems.jsonl", ("problem", "answer"), (None, True, [], {}, "")),
    ("problems.jsonl", ("answer",), (float("nan"),)),
    ("problems.jsonl", ("problem",), ("\ud800",)),
    ("talks.jsonl", ("prompt", "response"), NO_TEXTS),
    ("talks.jsonl", ("messages",), (None, 1, [], [1], [{}], [{"role": 1}], {"role": "user"})),
    ("pairs.jsonl", ("chosen", "rejected"), NO_TEXTS),
    ("pairs.jsonl", ("margin",), (None, True, -1, "1", [], 10**400, float("inf"))),
]
KEYS = [(name, key, x) for name, keys, odd in VALUES for key in keys for x in odd]


def named_in_one_line(folder: pathlib.Path, name: str) -> None:
    with pytest.raises(UserError) as error:
        READERS[name](folder)
    line = str(error.value)
    assert name in line and "\n" not in line and len(line) < 1000


@pytest.fixture
def folder(healthy, tmp_path):
    shutil.copytree(healthy, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", READERS)
def test_the_healthy_files_are_read(healthy, name):
    READERS[name](healthy)


@pytest.mark.parametrize(("name", "content"), CASES, ids=lambda x: str(x)[:30])
def test_a_broken_file_is_named(folder, name, content):
    (folder / name).write_bytes(content)
    named_in_one_line(folder, name)


@pytest.mark.parametrize(("name", "key", "value"), KEYS, ids=lambda x: str(x)[:30])
def test_an_odd_value_is_named_with_its_file(folder, name, key, value):
    path = folder / name
    row = json.loads(path.read_text())
    path.write_text(json.dumps(row | {key: value}) + "\n")
    named_in_one_line(folder, name)


@pytest.mark.parametrize("name", READERS)
def test_a_directory_in_the_place_of_a_file_is_named(folder, name):
    path = folder / name
    path.unlink(missing_ok=True)
    path.mkdir()
    named_in_one_line(folder, name)


def make_socket(path):
    # A socket's path has at most 107 characters.
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


def link_to_itself(path):
    path.symlink_to(path)


ODD_FILES = {
    "pipe": os.mkfifo,
    "folder": pathlib.Path.mkdir,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "pipe behind a link": lambda path: (
        os.mkfifo(path.with_name(f"{path.name}.pipe")),
        path.symlink_to(path.with_name(f"{path.name}.pipe")),
    ),
    "link to nothing": lambda path: path.symlink_to(path.with_name("nothing")),
    "link to itself": link_to_itself,
}
NEEDED = {
    *("config.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json"),
    *("adapter_model.safetensors", "model-00001-of-00002.safetensors", *JSONL),
}


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("name", READERS)
def test_nothing_waits_for_what_is_no_file(folder, name, kind):
    path = folder / name
    path.unlink(missing_ok=True)
    ODD_FILES[kind](path)
    if name in NEEDED or not kind.startswith("link"):
        named_in_one_line(folder, name)


TABLES = {
    "rows.parquet": lambda path: parse_rows(path, dict, example=""),
    "rows.arrow": lambda path: parse_rows(path, dict, example=""),
    "rows.json": lambda path: parse_rows(path, dict, example=""),
    "second of a folder.parquet": lambda path: parse_rows(path.parent, dict, example=""),
    "recipe.py": load_recipe,
    "rewards.py": lambda path: load_function(f"{path}:reward", "reward.functions", takes=("x",)),
    "template.jinja": lambda path: read_text(path, absent="name a template"),
    "metrics.jsonl": read_metrics,
    "samples.jsonl": SampleFile,
    "run/metrics.jsonl": lambda path: AppendedFile(path),
    "lock": take_lock,
}


@pytest.mark.parametrize("kind", [k for k in ODD_FILES if not k.startswith("link")])
@pytest.mark.parametrize("name", TABLES)
def test_no_reader_or_writer_of_a_run_waits(tmp_path, name, kind):
    path = tmp_path / "files" / name
    path.parent.mkdir(parents=True)
    if name.startswith("second"):
        pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), path.with_name("first.parquet"))
    ODD_FILES[kind](path)
    with pytest.raises(UserError) as error:
        TABLES[name](path)
    assert "\n" not in str(error.value) and path.name in str(error.value)


@pytest.mark.parametrize("kind", ODD_FILES)
def test_a_file_that_is_replaced_may_have_been_anything_but_a_folder(tmp_path, kind):
    path = tmp_path / "config.txt"
    ODD_FILES[kind](path)
    if kind != "folder":
        # An earlier run may have left the file beside it, too.
        ODD_FILES[kind](tmp_path / ".config.txt.tmp")
    if kind == "folder":
        with pytest.raises(UserError, match="is a folder"):
            write_atomically(path, b"1")
        assert path.is_dir() and len([*tmp_path.iterdir()]) == 1
    else:
        write_atomically(path, b"1")
        assert path.read_bytes() == b"1" and not path.is_symlink()


@pytest.mark.parametrize("kind", [k for k in ODD_FILES if not k.startswith("link")])
def test_the_rows_of_a_run_are_compared_without_waiting(tmp_path, kind):
    folder = StageFolder(tmp_path)
    folder.checkpoints.manifests.mkdir(parents=True)
    ODD_FILES[kind](folder.metrics)
    with MetricsWriter(tmp_path / "other") as writer:
        writer.write(1, {"a": 1.0})
    manifest = folder.checkpoints.manifest(1)
    manifest.write_text(json.dumps({_ROWS: list(writer.checksum)}))
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read"):
        lost_rows(folder)


@pytest.mark.parametrize("read", [read_config, load_tokenizer, read_adapter_config])
def test_a_file_in_the_place_of_a_directory_is_said(tmp_path, read):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        read(file)


@pytest.mark.parametrize("read", [read_bytes, read_text, read_json_object])
def test_a_missing_file_says_what_to_put_there(tmp_path, read):
    with pytest.raises(UserError, match=r"nowhere\.json does not exist; put one there"):
        read(tmp_path / "nowhere.json", absent="put one there")


def test_a_header_of_a_million_tensors_is_refused_early(folder):
    name = "model-00001-of-00002.safetensors"
    entry = '"%x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(entry % i for i in range(1_500_000)) + "}").encode()
    (folder / name).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match=rf"{name}.*headers of 8"):
        READERS[name](folder)
