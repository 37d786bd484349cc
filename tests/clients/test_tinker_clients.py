"""tinker's SDK and the cookbook's loops, unmodified, against `jaxrl serve --tinker`."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tokenizers
from byte_engine import random_weights
from environments import python_of
from processes import free_port, started

from jaxrl.hub.hub_names import fetched_folder
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.model_config import ModelConfig

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

ROOT = pathlib.Path(__file__).parents[2]
KEY = {"TINKER_API_KEY": "tml-local"}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Tokens that the cookbook's renderer for Qwen3 looks up.
OTHERS = [f"<{end}{name}>" for name in ("think", "tool_call", "tool_response") for end in ("", "/")]
ROWS = [{"question": f"What is {i} + {i}?", "answer": f"It is.\n#### {2 * i}"} for i in range(64)]


def write_tokenizer(folder: pathlib.Path) -> None:
    """A byte-level tokenizer with the tokens of ChatML, trained on the spot."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([row["question"] + row["answer"] for row in ROWS], trainer)
    tokenizer.add_tokens(OTHERS)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """Where the loops run: a tokenizer and data sets under their hub names, and a random model."""
    root = tmp_path_factory.mktemp("clients")
    write_tokenizer(root / "Qwen" / "Qwen3-8B")
    model = ModelConfig(
        vocab_size=512, num_layers=2, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=8
    )
    params = jax.device_put(random_weights(model, 0.1))
    source = root / "Qwen" / "Qwen3-8B"
    save_checkpoint(params, model, root / "model", dtype="float32", source=source)
    # Adapters leave everything as it is: this has features, and an embedding that can say something.
    params = jax.tree.map(lambda x: 3 * x, params) | {"embedding": 10 * params["embedding"]}
    save_checkpoint(params, model, root / "decided", dtype="float32", source=source)
    conversations = [
        {
            "prompt": row["question"],
            "prompt_id": str(i),
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ],
            "category": "sums",
        }
        for i, row in enumerate(ROWS)
    ]
    for name, rows in (("HuggingFaceH4/no_robots", conversations), ("openai/gsm8k/main", ROWS)):
        (root / name).mkdir(parents=True)
        for split in ("train", "test"):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (root / name / f"{split}.jsonl").write_text(lines)
    (root / "openai" / "gsm8k" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n"
        "  - split: test\n    path: main/test.jsonl\n---\n"
    )
    return root


@contextlib.contextmanager
def serving(
    folder: pathlib.Path, *switches, model: str = "model", saved: str = "saved", port: int = 0
):
    """The address of `jaxrl serve --tinker`, in a process of its own that is killed in the end."""
    command = [sys.executable, "-m", "jaxrl", "serve", "--tinker", "--model", folder / model]
    command += switches
    flags = {
        "name": "Qwen/Qwen3-8B",
        "folder": folder / saved,
        "port": port,
        "slots": 8,
        "max_prompt_tokens": 448,
        "max_response_tokens": 64,
        "train_tokens": 512,
        "train_microbatches": 16,
        # Loops that just end leave their model behind.
        "lease_s": 5,
    }
    for name, value in flags.items():
        command += [f"--{name}", value]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with started([list(map(str, command))], cwd=ROOT, env=environment) as (server,):
        for line in server.stdout:
            if found := re.search(r"TINKER_BASE_URL=(\S+),", line):
                break
        else:
            raise AssertionError("the server has not started")
        yield found[1]


@pytest.fixture(scope="module")
def url(folder):
    with serving(folder) as url:
        yield url


def run(python: pathlib.Path, *arguments, cwd: pathlib.Path) -> str:
    done = subprocess.run(
        [str(python), "-W", "ignore", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd), **KEY},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def loop(recipe: str, folder: pathlib.Path, url: str, *settings, name: str = "") -> list[dict]:
    """Runs a recipe of the cookbook; returns its metrics, a row per step."""
    log = folder / f"log-{name or recipe}"
    given = [f"base_url={url}", "model_name=Qwen/Qwen3-8B", "lora_rank=4", f"log_path={log}"]
    module = f"tinker_cookbook.recipes.{recipe}"
    run(python_of("cookbook"), "-m", module, *given, *settings, cwd=folder)
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_a_script_of_the_sdk(folder, url):
    script = pathlib.Path(__file__).with_name("sdk_script.py")
    found = json.loads(run(python_of("tinker"), script, url, cwd=folder).splitlines()[-1])
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["samples"] == [8] * 4 and found["outputs"] == 1025
    assert "importance_sampling" in found["refused"]
    assert max(found["differences"].values()) < 1e-5, found["differences"]


def test_the_sdk_goes_on_when_its_server_is_killed(folder):
    script = pathlib.Path(__file__).with_name("killed_script.py")
    log = folder / "killed" / "log.jsonl"

    def client(port: int) -> str:
        found = run(python_of("tinker"), script, f"http://127.0.0.1:{port}", cwd=folder)
        return found.splitlines()[-1]

    port = free_port()
    with serving(folder, saved="undisturbed", port=port):
        expected = client(port)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = None
        for results in (6, 17, 28):
            with serving(folder, saved="killed", port=port):
                running = running or pool.submit(client, port)
                while log.read_bytes().count(b'"kind": "result"') < results:
                    assert not running.done(), running.exception()
                    time.sleep(0.01)
        with serving(folder, saved="killed", port=port):
            assert running.result() == expected


def test_a_custom_loss_of_the_sdk(folder, url):
    script = pathlib.Path(__file__).with_name("custom_loss.py")
    losses = json.loads(run(python_of("cookbook"), script, url, cwd=folder).splitlines()[-1])
    # At first each of the 58 log-probabilities is about log(1 / 409), 2 from what is wanted.
    assert losses[0] > losses[1] > losses[2]
    np.testing.assert_allclose(losses[0], 58 * (np.log(409) - 4) ** 2, rtol=0.1)


@pytest.mark.parametrize(("model", "switches"), [("decided", ()), ("model", ("--full",))])
def test_sl_loop_learns(folder, model, switches):
    settings = ("batch_size=4", "max_length=256", "max_steps=16", "learning_rate=5e-2")
    with serving(folder, *switches, model=model, saved=f"saved-{model}") as url:
        rows = loop("sl_loop", folder, url, *settings, name=model)
    nll = [row["train_mean_nll"] for row in rows]
    assert len(nll) == 16 and nll[-1] < 0.5 * nll[0]


def test_rl_loop_and_math_rl_run_to_their_end(folder, url):
    settings = ("loss_fn=importance_sampling", "max_steps=2", "max_tokens=16")
    assert len(loop("rl_loop", folder, url, *settings, "batch_size=2", "group_size=4")) == 2
    groups = ("env=arithmetic", "renderer_name=qwen3", "groups_per_batch=2", "save_every=1")
    rows = loop("math_rl.train", folder, url, *settings, *groups)
    name = "optim/kl_sample_train_v1"
    compared = [row[name] for row in rows if name in row]
    assert compared and max(map(abs, compared)) < 1e-4


@pytest.mark.slow
def test_the_cookbooks_loops_teach_smollm2_sums(tmp_path, monkeypatch):
    # Where `jaxrl fetch` puts it, not where tests keep theirs.
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("XLA_FLAGS")
    if not fetched_folder().exists():
        pytest.skip("needs SmolLM2-135M-Instruct; jaxrl fetch makes it")
    script = [ROOT / "benchmarks" / "cookbook.py", "--folder", tmp_path]
    python = pathlib.Path(sys.executable)
    printed = run(python, *script, "--python", python_of("cookbook"), cwd=ROOT)
    nll, reward = ([*map(float, line.split()[2:])] for line in printed.splitlines()[-2:])
    assert nll[-1] < 0.5 * nll[0]
    assert np.mean(reward[-3:]) > reward[0] + 0.3
