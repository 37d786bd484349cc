"""Seconds of a whole GRPO step through `launch/train.py`, beside other systems on the same problem.

    python benchmarks/step_vs_peers.py [--case even|ragged] [--peer NAME=COMMAND ...] [--rounds 2]

16 prompts of about 60 tokens, 8 answers to each of up to 192 tokens, one update; 4 layers of 256, 8 heads and
4 of keys, 512 tokens of vocabulary, random weights, float32. jaxrl's settings are its defaults: two cores
are two devices, each with half of the batch.

    even      no answer ends before 192 tokens
    ragged    each token ends the answer with probability 1/50

A peer is a command that runs some steps of this problem and prints one line of JSON with `step_s`, and
`generate_s` and `train_s` where it tells them apart: medians of its own steps, without the first, which
compile. Systems take turns round by round, each alone on the machine; the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile

from rich.console import Console
from rich.table import Table

ROOT = pathlib.Path(__file__).parents[1]
# The first steps compile: a batch of other lengths may ask for programs of another size.
WARM_UP, TIMED = 5, 3
SETTINGS = {
    "name": "step_vs_peers",
    "algorithm.dataflow": "grpo",
    "algorithm.kl.loss_coef": 0.0,
    "algorithm.updates_per_step": 1,
    "model.vocab_size": 512,
    "model.num_layers": 4,
    "model.d_model": 256,
    "model.d_ff": 1024,
    "model.num_heads": 8,
    "model.num_kv_heads": 4,
    "model.head_dim": 32,
    "model.qk_norm": True,
    "model.qkv_bias": False,
    "model.tie_embeddings": True,
    "tokenizer.vocab_size": 512,
    "data.max_prompt_tokens": 64,
    "rollout.num_prompts": 16,
    "rollout.num_samples": 8,
    "rollout.generation_prompts": 16,
    "rollout.slots": 128,
    "rollout.max_response_tokens": 192,
    "reward.overlong_buffer_tokens": 0,
    "sft.run": "",
    "sft.num_steps": 0,
    # Sums of some terms are prompts of 50 to 64 characters.
    "data.train.options.min_terms": 14,
    "data.train.options.max_terms": 14,
    "data.evaluation.options.min_terms": 14,
    "data.evaluation.options.max_terms": 14,
    # The last one evaluates besides.
    "run.num_steps": WARM_UP + TIMED + 1,
    "run.save_every": 1000,
    "run.rollouts_every": 0,
    "evaluation.every": 1000,
    "evaluation.num_samples": 1,
}
CASES = {
    # What ends an answer is not drawn before the last token. A row holds a prompt and its eight answers.
    "even": {
        "rollout.min_response_tokens": 191,
        "train.rows": 4,
        "train.row_tokens": 1664,
    },
    # Ten of 512 tokens of a model that knows nothing yet. Prompts are longer than answers.
    "ragged": {
        "rollout.stop_ids": str(tuple(range(100, 110))),
        "train.rows": 4,
        "train.row_tokens": 256,
        # Answers are shorter than their limit, by which "auto" goes.
        "train.share_prompts": True,
    },
}
PHASES = {
    "generate_s": "timing_s/gen",
    "train_s": "timing_s/update_actor",
    "step_s": "timing_s/step",
}


def ours(case: str) -> dict[str, float]:
    """Medians of the timed steps of a run."""
    settings = SETTINGS | CASES[case]
    command = [sys.executable, "launch/train.py", "--config", "configs/grpo_tiny.py"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    with tempfile.TemporaryDirectory() as folder:
        run_alone([*command, f"--config.run.output={folder}"])
        (path,) = pathlib.Path(folder).rglob("metrics.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    timed = rows[WARM_UP : WARM_UP + TIMED]
    medians = {name: statistics.median(row[key] for row in timed) for name, key in PHASES.items()}
    return medians | {"tokens": statistics.median(row["perf/response_num_tokens"] for row in timed)}


def peer(command: str) -> dict[str, float]:
    """What a peer prints."""
    return json.loads(run_alone(shlex.split(command)).splitlines()[-1])


def run_alone(command: list[str]) -> str:
    """The output of a command; its error ends the benchmark."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(
            f"{shlex.join(command[:3])} ... ended with {ran.returncode}:\n{ran.stderr[-2000:]}"
        )
    return ran.stdout


def main() -> None:
    """Runs all systems in turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=sorted(CASES), default="even")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    systems = {"jaxrl": lambda: ours(args.case)}
    for name, command in (given.split("=", 1) for given in args.peer):
        systems[name] = lambda command=command: peer(command)
    rounds = [{name: run() for name, run in systems.items()} for _ in range(args.rounds)]
    table = Table(title=f"one GRPO step, {args.case} lengths: seconds")
    for column in ("system", "sampling", "learning", "step", "against jaxrl"):
        table.add_column(column, justify="left" if column == "system" else "right")
    middle = {
        name: {
            key: statistics.median(r[name].get(key, float("nan")) for r in rounds) for key in PHASES
        }
        for name in systems
    }
    for name, row in middle.items():
        ratio = row["step_s"] / middle["jaxrl"]["step_s"]
        table.add_row(name, *(f"{row[key]:.2f}" for key in PHASES), f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
