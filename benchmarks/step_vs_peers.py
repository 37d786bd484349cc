"""Seconds of a whole GRPO step through `launch/train.py`, beside other systems on the same problem.

    python benchmarks/step_vs_peers.py [--case even|ragged] [--peer NAME=COMMAND ...] [--rounds 2]

16 prompts of about 60 tokens, 8 answers to each of up to 192 tokens, one update; 4 layers of 256, 8 heads and
4 of keys, 512 tokens of vocabulary, random weights, float32. The reward is a hash of the text, so every group
has a signal and every step an update; a step without one ends the benchmark.

    even      no answer ends before 192 tokens
    ragged    some tokens end an answer. How long answers get depends on the random weights. The benchmark
              ends with an error if one system's answers have a quarter more tokens than another's

jaxrl runs twice: with its defaults (two cores are two devices, each with half of the batch), and tuned, with
rows that somebody chose for these lengths.

A peer is a command that runs some steps of this problem and prints one line of JSON with `step_s`, and
`generate_s` and `train_s` where it tells them apart: medians of its own steps, without the first, which
compile. Systems take turns round by round, each alone on the machine; the median of the rounds counts. The
peers' scripts of earlier results take these shapes as flags; for ragged lengths their probability is .02.
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
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxrl.config.command_line import load_recipe
from jaxrl.models.model_config import ModelConfig
from jaxrl.rewards import Responses

ROOT = pathlib.Path(__file__).parents[1]
MODEL = ModelConfig(
    vocab_size=512,
    num_layers=4,
    d_model=256,
    d_ff=1024,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    qk_norm=True,
    qkv_bias=False,
    tie_embeddings=True,
)
# The first steps compile: a batch of other lengths may ask for programs of another size.
WARM_UP, TIMED = 5, 3
SETTINGS = {
    "name": "step_vs_peers",
    "algorithm.dataflow": "grpo",
    "algorithm.kl.loss_coef": 0.0,
    "algorithm.updates_per_step": 1,
    # So small that the lengths of answers stay as they are.
    "optim.lr": 1e-6,
    "data.max_prompt_tokens": 64,
    "rollout.num_prompts": 16,
    "rollout.num_samples": 8,
    "rollout.generation_prompts": 16,
    "rollout.slots": 128,
    "rollout.max_response_tokens": 192,
    # The recipe's rows suit its own lengths; these are the defaults.
    "train.rows": 8,
    "train.row_tokens": "auto",
    "reward.overlong_buffer_tokens": 0,
    "reward.grader_weight": 0.0,
    "reward.functions": str({"hash": {"path": f"{__file__}:hashed", "weight": 1.0}}),
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
    # What ends an answer is not drawn before the last token.
    "even": {"rollout.min_response_tokens": 191},
    # 6 of 512 tokens of a model that knows nothing yet: answers of 47 tokens, shorter than their prompts.
    "ragged": {"rollout.stop_ids": str(tuple(range(260, 266)))},
}
TUNED = {
    # A row holds a prompt and its eight answers.
    "even": {"train.rows": 4, "train.row_tokens": 1664, "train.share_prompts": True},
    "ragged": {"train.rows": 4, "train.row_tokens": 256, "train.share_prompts": True},
}
PHASES = {
    "generate_s": "timing_s/gen",
    "train_s": "timing_s/update_actor",
    "step_s": "timing_s/step",
}


def get_config() -> Any:
    """The recipe of the problem, to which `SETTINGS` are added."""
    config: Any = load_recipe("grpo_tiny")
    config.model = MODEL
    return config


def hashed(responses: Responses) -> list[float]:
    """A reward between 0 and 1 that no two answers share."""
    return [zlib.crc32(text.encode()) / 2**32 for text in responses.texts]


def ours(settings: Mapping[str, Any]) -> dict[str, float]:
    """Medians of the timed steps of a run with some settings."""
    command = [sys.executable, "launch/train.py", "--config", __file__]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    with tempfile.TemporaryDirectory() as folder:
        run_alone([*command, f"--config.run.output={folder}"])
        (path,) = pathlib.Path(folder).rglob("metrics.jsonl")
        # The first row is the evaluation before training.
        rows = [json.loads(line) for line in path.read_text().splitlines()][1:]
    return medians(rows[WARM_UP : WARM_UP + TIMED])


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds and response tokens of the middle step.

    Raises:
      SystemExit: a step had no update, so its seconds are not those of learning.
    """
    for step in steps:
        if step["actor/skipped_updates"] or not step["actor/grad_norm"] > 0:
            sys.exit(
                f"step {step['step']:.0f} had no update: its seconds say nothing about learning"
            )
    keys = PHASES | {"tokens": "perf/response_num_tokens"}
    return {name: statistics.median(step[key] for step in steps) for name, key in keys.items()}


def peer(command: str) -> dict[str, float]:
    """What a peer prints."""
    printed = json.loads(run_alone(shlex.split(command)).splitlines()[-1])
    return {"tokens": printed.get("resp_tokens", float("nan"))} | printed


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
    settings = SETTINGS | CASES[args.case]
    systems = {
        "jaxrl": lambda: ours(settings),
        "jaxrl, tuned": lambda: ours(settings | TUNED[args.case]),
    }
    for name, command in (given.split("=", 1) for given in args.peer):
        systems[name] = lambda command=command: peer(command)
    rounds = [{name: run() for name, run in systems.items()} for _ in range(args.rounds)]
    table = Table(title=f"one GRPO step, {args.case} lengths: seconds")
    for column in ("system", "sampling", "learning", "step", "against jaxrl", "tokens"):
        table.add_column(column, justify="left" if column == "system" else "right")
    middle = {
        name: {
            key: statistics.median(r[name].get(key, float("nan")) for r in rounds)
            for key in (*PHASES, "tokens")
        }
        for name in systems
    }
    tokens = [row["tokens"] for row in middle.values()]
    if max(tokens) > 1.25 * min(tokens):
        counts = ", ".join(f"{name} {row['tokens']:,.0f}" for name, row in middle.items())
        sys.exit(
            f"the systems answered with unlike numbers of tokens ({counts}); choose other stop ids"
        )
    for name, row in middle.items():
        ratio = row["step_s"] / middle["jaxrl"]["step_s"]
        seconds = (f"{row[key]:.2f}" for key in PHASES)
        table.add_row(name, *seconds, f"{ratio:.2f}", f"{row['tokens']:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
