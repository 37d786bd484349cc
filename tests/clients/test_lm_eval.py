"""lm-eval, as its users start it, scores continuations through the server of a model."""

import json
import pathlib
import subprocess

import jax
import numpy as np
import pytest
from byte_engine import random_weights
from closeness import assert_close
from environments import python_of

from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.live_loop import Request
from jaxrl.rollout.sampling import SamplingOptions
from jaxrl_serving.model_loading import load
from jaxrl_serving.serve_config import ServeConfig
from jaxrl_serving.server import running

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

HERE = pathlib.Path(__file__).parent
DOCS = [
    {"query": "one two", "choices": [" three", " four", " 12 + 30 = 42"], "gold": 0},
    {"query": "12 + 30 =", "choices": [" 42", " 7", " one two three"], "gold": 0},
]
TASK = """
task: continuations
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{query}}}}"
doc_to_target: gold
doc_to_choice: choices
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def scores_of(driver, tokenizer, query: str, choice: str) -> tuple[float, bool]:
    """The sum over the tokens of a choice, each asked for alone, and whether all are the most probable."""
    begin, whole = tokenizer.encode(query).tolist(), tokenizer.encode(query + choice).tolist()
    assert whole[: len(begin)] == begin, "the choice begins with a token of its own"
    total, greedy = 0.0, True
    for t in range(len(begin), len(whole)):
        heard = []
        options = SamplingOptions(temperature=0.0, top_logprobs=1, scores_prompt=True)
        ticket = Request(np.array(whole[: t + 1], np.int32), 1, 0, options)
        driver.submit(ticket, heard.append)
        while not heard:
            pass
        total += float(heard[0].prompt.logprob[-1])
        greedy &= int(heard[0].prompt.rank[-1]) == 1
    return total, greedy


def test_loglikelihoods_of_a_task_are_the_models(tmp_path):
    python = python_of("lm_eval")
    tokenizer = train_tokenizer(["one two three four: 12 + 30 = 42"] * 4, vocab_size=280)
    tokenizer.save(tmp_path / "tokenizer")
    model = ModelConfig(
        vocab_size=288, num_layers=2, d_model=32, d_ff=48, num_heads=2, num_kv_heads=1, head_dim=16
    )
    directory = tmp_path / "tiny"
    params = jax.device_put(random_weights(model))
    save_checkpoint(params, model, directory, dtype="float32", source=tmp_path / "tokenizer")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    (tasks / "task.yaml").write_text(TASK.format(file=tasks / "docs.jsonl"))
    # Its tokenizer is Transformers', which needs to know the class.
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    served = ServeConfig(
        model=str(directory), http_port=0, slots=8, max_prompt_tokens=80, max_response_tokens=16
    )
    loaded = load(served)
    with running(served, loaded) as server:
        url = f"http://127.0.0.1:{server.http_port}"
        script = [python, "-P", HERE / "loglikelihood_task.py", url, "tiny", directory, tasks]
        done = subprocess.run(
            list(map(str, script)), capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        for doc, likelihoods, greedy in zip(
            DOCS, found["loglikelihoods"], found["greedy"], strict=True
        ):
            expected = [
                scores_of(server.driver, tokenizer, doc["query"], choice)
                for choice in doc["choices"]
            ]
            assert_close(np.array(likelihoods), np.array([total for total, _ in expected]), scale=1)
            assert greedy == [is_greedy for _, is_greedy in expected]
