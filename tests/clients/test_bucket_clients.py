"""gcsfs and s3fs fetch from servers of other people on this machine: gcp-storage-emulator and moto."""

import contextlib
import json
import os
import pathlib
import subprocess
import time
import urllib.request

import pytest
from environments import python_of
from processes import free_port, started

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
FILES = {
    "models/qwen/config.json": b"{}",
    "models/qwen/tokenizer.json": b"[]",
    "models/qwen/model.safetensors": bytes(20_000_000),
    "models/qwen/pytorch_model.bin": b"code",
    "data/train.jsonl": b'{"problem": "1 + 1", "answer": "2"}\n',
}
# In the words of each client.
PUT = """
import fsspec, pathlib, sys
system, folder, bucket = fsspec.filesystem(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
system.mkdir(bucket)
for path in folder.rglob("*"):
    if path.is_file():
        system.put_file(str(path), f"{bucket}/{path.relative_to(folder)}")
"""


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_models_and_rows_come_from_a_bucket(scheme, tmp_path):
    python, port = python_of("buckets"), free_port()
    for name, content in FILES.items():
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_bytes(content)
    url = f"http://127.0.0.1:{port}"
    server = {
        "gs": [
            python.with_name("gcp-storage-emulator"),
            "start",
            "--host=127.0.0.1",
            f"--port={port}",
            "--in-memory",
        ],
        "s3": [python.with_name("moto_server"), "-H", "127.0.0.1", "-p", str(port)],
    }[scheme]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'extensions'}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "STORAGE_EMULATOR_HOST": url,
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }

    def run(*arguments) -> str:
        command = [str(python), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    with started([list(map(str, server))], cwd=tmp_path, env=environment):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url)
                break
            time.sleep(0.2)
        run("-c", PUT, {"gs": "gcs"}.get(scheme, scheme), tmp_path / "files", "weights")
        found = json.loads(run(HERE / "fetch_script.py", scheme, "weights").splitlines()[-1])
    assert found["sizes"] == {
        "config.json": 2,
        "tokenizer.json": 2,
        "model.safetensors": 20_000_000,
    }
    assert found["rows"] == FILES["data/train.jsonl"].decode() and found["again"]
    assert "nothing is there" in found["faults"][0]
    assert found["faults"][1].startswith(f"{scheme}://no-such-bucket/x")
    assert all("\n" not in fault for fault in found["faults"])
