"""How long each pool waits for the other: free running against drained sampling, on two processes.

    python benchmarks/free_running.py [--steps 13] [--record benchmarks/results/2026-11-26-free_running.md]

Process 0 learns and process 1 samples (`hosts.pools_apart`). The policy is random and stays so: any of
eight ids ends an answer, so lengths are geometric, 36 tokens on average and 192 at most. All else is a run of
`jaxrl train`.

Seconds are processor seconds, because a machine that others use stretches all others. Each process is given
a core of its own in thought, with a clock that runs by its processor time; `Clocks` moves a clock on
where the program makes its process wait for the other. Whether the sampler makes another dispatch while the
learner works is asked of these clocks too. So the two processes may take turns in fact. Not counted: latency
between processes, and the grader's processes.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import pathlib
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.dataflows.free_running import FreeRunning
from jaxrl.dataflows.samplers import Sampling
from jaxrl.mesh import hosts
from jaxrl.trainer import program
from jaxrl.trainer.rl import RlStage

ROOT = pathlib.Path(__file__).resolve().parents[1]
LEARNER, SAMPLER = 0, 1
# Steps that compile programs.
WARM_UP = 9
SETTINGS: dict[str, Any] = {
    "name": "free",
    # One wide layer: little to compile.
    "model.num_layers": 1,
    "model.d_model": 256,
    "model.d_ff": 768,
    "sft.num_steps": 0,
    "data.train.size": 4000,
    "data.evaluation.size": 24,
    "algorithm.dataflow": "grpo",
    "algorithm.correction.weights": "token",
    "algorithm.updates_per_step": 1,
    # No answer is right. Long ones are punished, so that there is something to learn from.
    "reward.overlong_buffer_tokens": 160,
    "optim.lr": 1e-9,
    "rollout.num_prompts": 24,
    "rollout.num_samples": 8,
    "rollout.slots": 96,
    "rollout.tokens_per_dispatch": 16,
    "rollout.stop_ids": tuple(range(100, 108)),
    "rollout.max_response_tokens": 192,
    "train.rows": 4,
    "train.row_tokens": 256,
    "evaluation.every": 4,
    "evaluation.num_samples": 4,
    "run.save_every": 1000,
    "hosts.num_processes": 2,
    "hosts.pools_apart": True,
    "hosts.lost_after_s": 600.0,
    "mesh.simulated_devices": 2,
    "placement": {
        "learn": {"roles": ("actor",), "train": "1-1-1"},
        "sample": {"roles": ("rollout",), "train": "1-1-1"},
    },
}
STOPS = "free, two steps off, stops for evaluations"
KINDS: dict[str, dict[str, Any]] = {
    "drained": {"rollout.max_staleness": 0},
    "free, one step off": {"rollout.max_staleness": 1},
    "free, two steps off": {"rollout.max_staleness": 2},
    STOPS: {"rollout.max_staleness": 2},
}


class Clocks:
    """The clocks of both processes, the same in each of them.

    Attributes:
      now_s: seconds of learner and sampler.
      waited_s: those of them in which it waited.
    """

    def __init__(self):
        self.now_s, self.waited_s = [0.0, 0.0], [0.0, 0.0]
        self._last = time.process_time(), time.thread_time()

    def spent(self) -> list[list[float]]:
        """Seconds of each process since the last call: of all threads, and of this one. Collective."""
        now, last = (time.process_time(), time.thread_time()), self._last
        self._last = now
        return hosts.gather(lambda: [now[0] - last[0], now[1] - last[1]])

    def wait(self, who: int, until_s: float) -> None:
        """One process waits until a time, if it is still to come."""
        missing = max(0.0, until_s - self.now_s[who])
        self.now_s[who] += missing
        self.waited_s[who] += missing

    def meet(self) -> None:
        """Both wait for the one that is behind."""
        latest = max(self.now_s)
        for who in (LEARNER, SAMPLER):
            self.wait(who, latest)

    def work(self) -> None:
        """Both have worked since the last call, each for itself."""
        for who, (process_s, _) in enumerate(self.spent()):
            self.now_s[who] += process_s

    def sampling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function for which the learner waits, after both have met for the weights."""

        @functools.wraps(function)
        def phase(*args, **further):
            self.work()
            self.meet()
            result = function(*args, **further)
            self.now_s[SAMPLER] += self.spent()[SAMPLER][0]
            self.meet()
            return result

        return phase

    def meanwhile(self, sampler: FreeRunning, results: Any) -> None:
        """`FreeRunning.meanwhile` by these clocks."""
        begin_s = self.now_s[LEARNER]
        # The sampler's process has none of them.
        if hosts.is_first():
            jax.block_until_ready(results)
        (learner_s, host_s), (sampler_s, _) = self.spent()
        self.now_s[SAMPLER] += sampler_s
        self.now_s[LEARNER] = end_s = begin_s + learner_s
        # The learner's host prepares its programs before it asks for dispatches.
        self.wait(SAMPLER, begin_s + host_s)
        while self.now_s[SAMPLER] < end_s:
            if not sampler._dispatch():
                self.wait(SAMPLER, end_s)
                break
            self.now_s[SAMPLER] += self.spent()[SAMPLER][0]
        # It looks again when a dispatch is done.
        self.wait(LEARNER, self.now_s[SAMPLER])


def process(args: argparse.Namespace) -> None:
    """One of the two processes; the first one writes what the clocks say after each step."""
    settings = SETTINGS | KINDS[args.kind] | json.loads(args.settings)
    settings |= {"run.output": args.output, "run.num_steps": WARM_UP + args.steps}
    settings |= {"hosts.coordinator": f"localhost:{args.port}", "hosts.process_id": args.process}
    config = load_config(Config, str(ROOT / "configs/dapo_tiny.py"), settings)
    program.start(config)
    clocks, rows = Clocks(), []
    evaluate, record = RlStage.evaluate, RlStage.record

    if args.kind == STOPS:
        RlStage._beside = None  # pyright: ignore[reportAttributeAccessIssue]

    def evaluated(stage, when):
        alone = when != "during" or stage._beside is None
        return (clocks.sampling(evaluate) if alone else evaluate)(stage, when)

    def recorded(stage):
        rows.append((*clocks.now_s, *clocks.waited_s))
        return record(stage)

    for owner, name, function in (
        (Sampling, "sample", clocks.sampling(Sampling.sample)),
        (FreeRunning, "sample", clocks.sampling(FreeRunning.sample)),
        (FreeRunning, "finish_evaluation", clocks.sampling(FreeRunning.finish_evaluation)),
        (FreeRunning, "meanwhile", lambda sampler, results: clocks.meanwhile(sampler, results)),
        (RlStage, "evaluate", evaluated),
        (RlStage, "record", recorded),
    ):
        setattr(owner, name, function)
    program.train(config)
    if hosts.is_first():
        pathlib.Path(args.output, "clocks.json").write_text(json.dumps(rows))


def run(kind: str, args: argparse.Namespace) -> list[list[float]]:
    """The clocks after each step of one run."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="free_running") as output:
        common = [sys.executable, __file__, "--kind", kind, "--output", output]
        common += ["--port", str(port), "--steps", str(args.steps), "--settings", args.settings]
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        }
        children = [
            subprocess.Popen([*common, "--process", str(i)], env=env, stdout=subprocess.DEVNULL)
            for i in (LEARNER, SAMPLER)
        ]
        if any([child.wait() for child in children]):
            raise SystemExit(f"{kind}: a process failed")
        return json.loads(pathlib.Path(output, "clocks.json").read_text())


def row_of(kind: str, clocks: list[list[float]]) -> str:
    """A line of the table, for `clocks` after each step."""
    # Not the last step, after which the sampler evaluates alone.
    steps = np.diff(np.array(clocks[WARM_UP:-1]), axis=0)
    mean, median = steps.mean(axis=0), np.median(steps, axis=0)
    cells = [f"{mean[0]:.2f}", *(f"{mean[who] - mean[2 + who]:.2f}" for who in (LEARNER, SAMPLER))]
    cells += [f"{x[2 + who] / x[0]:.0%}" for x in (mean, median) for who in (LEARNER, SAMPLER)]
    return f"| {kind} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--record", type=pathlib.Path)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--settings", default="{}", help="further settings as JSON")
    for hidden, kind in (("kind", str), ("process", int), ("port", int), ("output", str)):
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        return process(args)
    lines = [
        "| | seconds a step | learner's work | sampler's | learner waits | sampler waits "
        "| in the median step: learner | sampler |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in args.kinds:
        lines.append(row_of(kind, run(kind, args)))
        print(lines[-1], f"load {os.getloadavg()[0]:.0f}", flush=True)
    if args.record:
        head = (
            f"# Waits of free-running pools, {datetime.date.today()}\n\n{os.cpu_count()} cores "
            f"({platform.machine()}), Python {platform.python_version()}, jax {jax.__version__}\n\n"
        )
        args.record.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
