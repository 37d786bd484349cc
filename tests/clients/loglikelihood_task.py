"""Scores sentences of a task with lm-eval through `local-completions`; prints what it found as JSON.

loglikelihood_task.py URL MODEL TOKENIZER TASKS
"""

import json
import sys

import lm_eval
from lm_eval.tasks import TaskManager

url, model, tokenizer, tasks = sys.argv[1:]
results = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={
        "model": model,
        "base_url": f"{url}/v1/completions",
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
        "max_length": 96,
    },
    tasks=["continuations"],
    task_manager=TaskManager(include_path=tasks),
    log_samples=True,
    bootstrap_iters=0,
)
samples = sorted(results["samples"]["continuations"], key=lambda each: each["doc_id"])
found = [[resp[0] for resp in each["filtered_resps"]] for each in samples]
greedy = [[resp[1] for resp in each["filtered_resps"]] for each in samples]
print(json.dumps({"loglikelihoods": found, "greedy": greedy}))
