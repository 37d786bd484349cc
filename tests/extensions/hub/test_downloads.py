"""Models and data sets by their hub name, from a server on loopback with real repository layouts."""

import gc
import io
import json
import os
import subprocess
import sys
import threading
import time
import warnings

import hub_server
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from jaxrl.data.rows import open_rows
from jaxrl.errors import UserError
from jaxrl.hub.hub_names import HubName, hub_name
from jaxrl_hub import downloads
from jaxrl_hub.downloads import Hub
from jaxrl_hub.splits import inferred_splits

SLEEP = time.sleep
WEIGHTS = bytes(range(256)) * 4000
TINY = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}


def parquet(*answers: int) -> bytes:
    file = io.BytesIO()
    rows = {
        "question": [f"What is {a}?" for a in answers],
        "answer": [f"#### {a}" for a in answers],
    }
    pq.write_table(pa.table(rows), file)
    return file.getvalue()


GSM8K = {
    "README.md": b"",
    "main/train-00000-of-00002.parquet": parquet(1, 2),
    "main/train-00001-of-00002.parquet": parquet(3),
    "main/test-00000-of-00001.parquet": parquet(4),
    "socratic/train-00000-of-00001.parquet": parquet(5),
}


@pytest.fixture(scope="module")
def server():
    with hub_server.serving() as server:
        yield server


@pytest.fixture(autouse=True)
def repositories(server, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    server.repos = {("models", "me/tiny"): dict(TINY), ("datasets", "openai/gsm8k"): dict(GSM8K)}
    server.revisions, server.cards = {}, {}
    server.gated, server.cut_off, server.damaged = set(), set(), set()
    server.headers, server.odd, server.about = {}, {}, {}
    server.most_bytes, server.ranges = 0, True
    server.requests.clear()


@pytest.fixture
def left(server, monkeypatch):
    """For tests that leave a hub: what still reads from it ends with the test."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with warnings.catch_warnings():
        # The session is closed below threads that read from it.
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        server.odd, server.most_bytes = {}, 0
        server.over.set()
        for thread in threading.enumerate():
            if thread.name == "hub":
                thread.join()
        gc.collect()
        server.over = threading.Event()


@pytest.fixture
def hub(server, tmp_path):
    return Hub(endpoint=server.url, cache_dir=tmp_path / "cache")


def named(text: str) -> HubName:
    name = hub_name(text)
    assert name is not None
    return name


def downloaded(server) -> list[str]:
    return [path for method, path in server.requests if method == "GET" and "/resolve/" in path]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B", HubName("Qwen/Qwen2.5-0.5B")),
        ("Qwen/Qwen2.5-0.5B@refs/pr/1", HubName("Qwen/Qwen2.5-0.5B", revision="refs/pr/1")),
        ("openai/gsm8k:main", HubName("openai/gsm8k", "main")),
        ("openai/gsm8k:main:test@v1", HubName("openai/gsm8k", "main", "test", "v1")),
        ("", None),
        ("gpt2", None),
        ("data/train.jsonl", None),
        ("rewards/mine.py:score", None),
        ("my.module:rows", None),
        ("/models/Qwen/Qwen2.5", None),
        ("../Qwen", None),
        ("a/b/c", None),
    ],
)
def test_what_is_a_name(text, expected):
    assert hub_name(text) == expected


def test_a_path_that_is_there_is_no_name(tmp_path, monkeypatch):
    (tmp_path / "me" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name("me/tiny") is None and hub_name("me/tiny2") is not None


def test_a_model_has_its_safetensors_and_nothing_with_code(server, hub):
    server.repos["models", "me/tiny"] |= {
        "pytorch_model.bin": b"pickle",
        "modeling_tiny.py": b"raise SystemExit",
        "original/consolidated.safetensors": b"other",
        "chat_template.jinja": b"{{ messages }}",
    }
    folder = hub.model(named("me/tiny"))
    assert sorted(os.listdir(folder)) == sorted([*TINY, "chat_template.jinja"])
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert folder.name == "tiny"


def test_a_second_run_downloads_nothing(server, hub):
    first = hub.model(named("me/tiny"))
    server.requests.clear()
    assert hub.model(named("me/tiny")) == first
    assert not downloaded(server)


def test_a_tokenizer_comes_without_weights(hub):
    folder = hub.model(named("me/tiny"), tokenizer_only=True)
    assert sorted(os.listdir(folder)) == ["config.json", "tokenizer.json"]


def test_without_a_network_the_cache_is_used(server, hub, tmp_path):
    folder = hub.model(named("me/tiny"))
    rows = hub.rows(named("openai/gsm8k:main"), ("train",))
    away = Hub(endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "cache")
    assert away.model(named("me/tiny")) == folder
    assert away.rows(named("openai/gsm8k:main"), ("train",)) == rows
    with pytest.raises(
        UserError, match=r"me/other is no directory here, .* cannot be reached.*HF_HOME"
    ):
        away.model(named("me/other"))


def test_a_download_cut_off_half_way_goes_on(server, hub):
    server.cut_off = {"model.safetensors"}
    folder = hub.model(named("me/tiny"))
    assert not server.cut_off, "the server has cut it off once"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.usefixtures("left")
def test_transfers_that_always_break_end(server, hub, monkeypatch):
    """The retries are bounded, but for those that bring something."""
    server.most_bytes = len(WEIGHTS) // 20
    with pytest.raises(
        UserError, match=r"me/tiny could not be fetched .*run the command again"
    ) as caught:
        hub.model(named("me/tiny"))
    assert "\n" not in str(caught.value)
    # Less than one transfer brings, so that each is progress: 20 go on where the one before has broken.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", server.most_bytes // 4)
    assert (hub.model(named("me/tiny")) / "model.safetensors").read_bytes() == WEIGHTS
    assert sum(path.endswith("model.safetensors") for path in downloaded(server)) >= 20


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize(
    ("stall_s", "retry_s", "fault"),
    [
        (2.0, 0.05, "sent nothing new of me/tiny for 2 s"),
        (600.0, 0.0, "breaks off each transfer of a file of me/tiny"),
    ],
    ids=["no growth", "too many"],
)
def test_transfers_that_begin_anew_each_time_end(stall_s, retry_s, fault, server, hub, monkeypatch):
    """Each brings something, and none more than the first: `huggingface_hub` does not count them."""
    monkeypatch.setattr(downloads, "STALL_S", stall_s)
    monkeypatch.setattr(time, "sleep", lambda _: SLEEP(retry_s))
    server.most_bytes, server.ranges = len(WEIGHTS) // 2, False
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", server.most_bytes // 4)
    with pytest.raises(UserError, match=fault) as caught:
        hub.model(named("me/tiny"))
    assert "\n" not in str(caught.value)


def test_files_that_do_not_fit_on_the_disk_are_not_fetched(server, hub, tmp_path):
    """The hub tells 10^18 bytes, more than any disk has."""
    server.about = {"siblings": [{"rfilename": "model.safetensors", "size": 10**18}]}
    with pytest.raises(
        UserError, match=r"me/tiny needs 1,000,000,000,000,000,000 bytes in .* set HF_HOME"
    ):
        hub.model(named("me/tiny"))
    assert not downloaded(server)


@pytest.mark.parametrize(
    "name", ["a\\b.parquet", "..\\..\\x.parquet", "C:\\x.parquet", "a\0b.parquet", "a\nb.parquet"]
)
def test_names_that_no_file_of_the_hub_has_are_refused(server, hub, name):
    server.repos["datasets", "me/data"] = {"a.parquet": parquet(1)}
    server.about = {"siblings": [{"rfilename": name}]}
    with pytest.raises(UserError, match="which is no name of a file") as caught:
        hub.rows(named("me/data"), ("train",))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["models", "datasets"])
def test_files_of_another_commit_are_no_path_to_nothing(server, hub, kind):
    server.repos["datasets", "me/data"] = {"a.parquet": parquet(1)}
    server.headers = {"X-Repo-Commit": "f" * 40}
    with pytest.raises(UserError, match=r"of another commit of me/.* run the command again"):
        if kind == "models":
            hub.model(named("me/tiny"))
        else:
            hub.rows(named("me/data"), ("train",))


def test_a_damaged_file_is_removed_and_fetched_again(server, hub):
    server.damaged = {"model.safetensors"}
    with pytest.raises(
        UserError, match=r"model\.safetensors arrived damaged .* run the command again"
    ):
        hub.model(named("me/tiny"))
    server.damaged = set()
    assert (hub.model(named("me/tiny")) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_revision(server, hub):
    server.revisions["models", "me/tiny", "v2"] = TINY | {"model.safetensors": b"newer"}
    folder = hub.model(named("me/tiny@v2"))
    assert (folder / "model.safetensors").read_bytes() == b"newer"
    with pytest.raises(UserError, match="me/tiny has no revision 'v3'"):
        hub.model(named("me/tiny@v3"))


def test_models_that_cannot_be_had(server, hub):
    server.repos["models", "me/old"] = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    server.gated = {"me/tiny"}
    for name, told in (
        ("me/none", "me/none is no path here, and .* has no such model"),
        ("me/old", r"me/old has only pytorch_model\.bin; jaxrl reads safetensors"),
        ("me/tiny", "me/tiny needs an account that accepted its terms; accept them on"),
    ):
        for ask in (hub.check_model, hub.model):
            with pytest.raises(UserError, match=told) as caught:
                ask(named(name))
            assert "\n" not in str(caught.value)
    assert not downloaded(server)


def answers(folder) -> list[str]:
    return [row["answer"] for _, row in open_rows(folder) if isinstance(row, dict)]


@pytest.mark.parametrize(
    ("name", "splits", "expected"),
    [
        ("openai/gsm8k:main", ("train",), ["#### 1", "#### 2", "#### 3"]),
        ("openai/gsm8k:main", ("test", "validation"), ["#### 4"]),
        ("openai/gsm8k:main:test", ("train",), ["#### 4"]),
        # Its only split, whatever was wanted.
        ("openai/gsm8k:socratic", ("test",), ["#### 5"]),
    ],
)
def test_a_split_is_its_files(hub, name, splits, expected):
    folder = hub.rows(named(name), splits)
    assert answers(folder) == expected
    # The name that metrics of these problems are kept under.
    assert folder.name == "gsm8k"


def test_splits_of_the_card_come_first(server, hub):
    server.repos["datasets", "me/data"] = {"a.parquet": parquet(1), "b.parquet": parquet(2)}
    files = [{"split": "train", "path": "b.*"}, {"split": "test", "path": ["a.parquet"]}]
    server.cards["me/data"] = {"configs": [{"config_name": "default", "data_files": files}]}
    assert answers(hub.rows(named("me/data"), ("train",))) == ["#### 2"]
    assert answers(hub.rows(named("me/data"), ("test",))) == ["#### 1"]


CARDS = {
    "a number": 5,
    "configs a text": {"configs": "main"},
    "configs of numbers": {"configs": [5]},
    "files true": {"configs": [{"data_files": True}]},
    "path of tables": {"configs": [{"data_files": [{"path": [{}]}]}]},
}


@pytest.mark.parametrize("card", CARDS)
def test_a_card_of_another_form_is_one_line(server, hub, card):
    server.repos["datasets", "me/data"] = {"a.parquet": parquet(1)}
    server.cards["me/data"] = CARDS[card]
    with pytest.raises(UserError, match="the card of data set me/data does not list") as caught:
        hub.rows(named("me/data"), ("train",))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "about",
    [
        {"siblings": 5},
        {"siblings": [{"rfilename": "../../a.parquet"}]},
        {"sha": "../../x"},
        {"gated": [], "lastModified": "yesterday"},
    ],
)
def test_an_answer_of_another_form_is_one_line(server, hub, about):
    server.repos["datasets", "me/data"] = {"a.parquet": parquet(1)}
    server.about = about
    with pytest.raises(
        UserError, match=r"answers about me/data|which is no name of a file"
    ) as caught:
        hub.rows(named("me/data"), ("train",))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["../../../x", "/tmp/x", "..", "a/b"])
def test_a_commit_that_names_another_folder_is_one_line(server, hub, tmp_path, value):
    server.headers = {"X-Repo-Commit": value}
    with pytest.raises(UserError, match=r"could not be fetched|of another commit") as caught:
        hub.model(named("me/tiny"))
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["cache"]


def silent(handler):
    handler.server.over.wait()


def dripping(beginning):
    def answer(handler):
        over = handler.server.over
        handler.wfile.write(beginning)
        while not over.wait(0.1):
            handler.wfile.write(b"x")

    return answer


def endless(handler):
    over = handler.server.over
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n[")
    # Not as fast as it can: an answer that is no file is bounded by its time alone.
    while not over.wait(0.01):
        handler.wfile.write(b" " * 1_000_000)


HEADERS, BODY = b"HTTP/1.1 200 OK\r\nX-Name: ", b"HTTP/1.1 200 OK\r\n\r\n"
RUDE = {
    "silent": silent,
    "dripping headers": dripping(HEADERS),
    "dripping": dripping(BODY),
    "endless": endless,
}


def rude_to_files(kind):
    """The headers of a file come as they should; the file does not."""

    def answer(handler):
        if handler.command == "HEAD" and kind != "dripping headers":
            # As it says: a client may send the next request on this connection.
            handler.close_connection = False
            name = handler.path.split("/")[-1]
            return handler._file("models", "me/tiny", "main", name, body=False)
        return RUDE[kind](handler)

    return answer


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("path", ["/api/models/me/tiny", "/resolve/"])
@pytest.mark.parametrize("kind", RUDE)
def test_a_hub_that_does_not_end_its_answer_is_left(server, hub, monkeypatch, kind, path):
    """The hub goes on until the end of the tests: a client that waits for it would wait with it."""
    # Short only where the hub is rude: a machine under load is no rude hub.
    if path != "/resolve/":
        monkeypatch.setattr(downloads, "ANSWER_S", 1.0)
    elif kind != "endless":
        monkeypatch.setattr(downloads, "STALL_S", 1.0)
    # An endless file is left for its size: it comes in 10 pieces.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    server.odd = {path: rude_to_files(kind) if path == "/resolve/" else RUDE[kind]}
    with pytest.raises(UserError) as caught:
        hub.model(named("me/tiny"))
    assert "\n" not in str(caught.value)
    told = "sent nothing new of me/tiny for 1 s"
    if path != "/resolve/":
        told = "has not answered about me/tiny within 1 s"
    elif kind == "endless":
        told = "sent more bytes of a file of me/tiny than it told"
    assert told in str(caught.value)


def test_a_process_that_leaves_a_hub_ends(server, tmp_path):
    server.odd = {"/resolve/": rude_to_files("dripping")}
    program = (
        "from jaxrl.hub import hub_names\n"
        "from jaxrl_hub import downloads\n"
        "downloads.STALL_S = 1.0\n"
        f"hub = downloads.Hub(endpoint={server.url!r}, cache_dir={str(tmp_path)!r})\n"
        "hub.model(hub_names.HubName('me/tiny'))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 1 and "sent nothing new of me/tiny for 1 s" in ran.stderr


def test_a_data_set_of_another_format_comes_converted(server, hub):
    server.repos["datasets", "me/csv"] = {"train.csv": b"a,b"}
    server.revisions["datasets", "me/csv", "refs/convert/parquet"] = {
        "default/train/0000.parquet": parquet(7)
    }
    assert answers(hub.rows(named("me/csv"), ("train",))) == ["#### 7"]


def test_data_that_cannot_be_had(server, hub):
    server.repos["datasets", "me/csv"] = {"train.csv": b"a,b"}
    for name, told in (
        ("me/none", "me/none is no path here, and .* has no such dataset"),
        ("me/csv", r"data set me/csv has no .parquet.* file; it has train.csv"),
        (
            "openai/gsm8k",
            "has several subsets; write one of openai/gsm8k:main, openai/gsm8k:socratic",
        ),
        ("openai/gsm8k:mian", "has no subset 'mian'; write one of openai/gsm8k:main"),
        ("openai/gsm8k:main:dev", "has no split 'dev'; write one of openai/gsm8k:main:t"),
    ):
        for ask in (hub.check_rows, hub.rows):
            with pytest.raises(UserError, match=told):
                ask(named(name), ("train",))
    assert not downloaded(server)


def test_splits_by_the_names_of_files():
    names = ["data/train-00000-of-00001.parquet", "data/val.jsonl", "dataset_infos.json", "x.csv"]
    assert inferred_splits(names) == {
        ("data", "train"): names[:1],
        ("data", "validation"): names[1:2],
    }
    assert inferred_splits(["questions.parquet"]) == {("", "train"): ["questions.parquet"]}
    assert inferred_splits(["main/test/0000.parquet"]) == {
        ("main", "test"): ["main/test/0000.parquet"]
    }


def test_a_push_needs_a_token(server, hub, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"did not take me/new.*hf auth login"):
        hub.push_model(folder, named("me/new"), private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert hub.push_model(folder, named("me/new"), private=True) == f"{server.url}/me/new"
    assert server.repos["models", "me/new"]["config.json"] == b"{}"


def test_a_command_takes_names(server, tmp_path):
    environment = os.environ | {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "jaxrl", "data", "openai/gsm8k:main", "--to", "out.jsonl"]
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["answer"] for line in lines] == ["1", "2", "3"]


def test_downloads_may_use_xet(hub):
    assert not constants.HF_HUB_DISABLE_XET
