"""What the planner predicts, beside what compilers and clocks say.

    python benchmarks/predictions.py --part memory --topology v5p:2x2x2
    python benchmarks/predictions.py --part memory --topology h100:1x8
    taskset -c 3 python benchmarks/predictions.py --part measure --config configs/grpo_tiny.py \
        --config.run.num_steps=8 --config.run.output=RUNS
    taskset -c 3 python benchmarks/predictions.py --part seconds --runs RUNS/grpo_tiny RUNS/ppo_tiny
    python benchmarks/predictions.py --part layers --layers 6 --model DIRECTORY --out SHALLOW

    memory      peak of the actor's update: predicted by the search's simulator, compiled for the topology
    measure     trains on one core; the run's timers count seconds of the processor
    seconds     phases of measured runs, after this machine was calibrated on the first of them
    layers      writes the first layers of a model, whose run calibrates the machine for the whole model

Memory is of configs/dapo_qwen7b.py in five layouts of eight devices. Bytes of reshardings are compared in
tests/extensions/planner/layouts/test_predicted_resharding.py. Calibration takes three numbers from
the first run: the shares of the measured rate of matmuls that its update and its forward pass reach, and what
a step of decoding takes beside its work. Mean lengths and batches of dynamic sampling are those of
the runs; the spread of lengths is assumed. On one core the processor's seconds are those of a quiet machine,
whatever else runs on it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import statistics
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence

# XLA complains of every host that is not there.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import calibrate
import jax
from safetensors.numpy import load_file, save_file

from jaxrl import cli
from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.rollout.engine_sizes import bucket_sizes, round_up
from jaxrl.tracking import metrics as run_metrics
from jaxrl.trainer.resolved import resolve
from jaxrl_planner.compiled.ahead import compile_program
from jaxrl_planner.hardware.cluster import Cluster, Topology, read_topology
from jaxrl_planner.make_plan import roles_on
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.simulate_generation import GenerationSimulator
from jaxrl_planner.simulation.simulate_passes import PassSimulator
from jaxrl_planner.simulation.workload import (
    LengthDistribution,
    Workload,
    train_name,
)
from jaxrl_planner.step_load import assumptions_of, load_of
from jaxrl_report.report_command import read_runs

# Of the logarithm of lengths: sums of three numbers have answers that differ little.
_SPREAD = 0.2
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Of eight devices; `rows` of a microbatch over all of them, `tokens` of a row."""

    sizes: ParallelLayout
    rows: int
    tokens: int = 10_240


LAYOUTS = (
    Layout(ParallelLayout(1, 1, 8, 1, 1, 8), 8),
    Layout(ParallelLayout(1, 2, 4, 1, 2, 4), 4),
    Layout(ParallelLayout(1, 4, 2, 1, 4, 2), 2),
    Layout(ParallelLayout(2, 2, 2, 1, 2, 2), 4),
    Layout(ParallelLayout(1, 4, 2, 1, 4), 2, 20_480),
)


def recipe_in(layout: Layout) -> Config:
    """The 7B recipe in a layout."""
    config = load_config(Config, str(CONFIGS / "dapo_qwen7b.py"), {})
    train, generate = layout.sizes.name.split(" / ")
    changes = {
        "mesh": {
            "train": train,
            "generate": generate,
            "fsdp": layout.sizes.fsdp,
        },
        "train": {"rows": layout.rows, "row_tokens": layout.tokens},
        "rollout": {
            "max_response_tokens": layout.tokens - config.data.max_prompt_tokens,
            "slots": 512,
        },
    }
    parts = {
        name: dataclasses.replace(getattr(config, name), **values)
        for name, values in changes.items()
    }
    # The shape stands in the recipe; weights need not be here.
    return dataclasses.replace(config, weights="", **parts)


def memory(topology: Topology) -> Iterator[tuple[str, float, float]]:
    """(layout, predicted, compiled) peak bytes of a device."""
    cluster = Cluster.parse(topology.name)
    for layout in LAYOUTS:
        config = recipe_in(layout)
        simulator = PassSimulator(
            cluster, load_of(config).work, assumptions_of(config, cluster.accelerator)
        )
        terms = simulator.training(config.model, layout.sizes)
        roles = roles_on(config, topology)
        (pool,) = roles.pools
        (update,) = (
            (program, mesh)
            for role, program, mesh in roles.programs(load_of(config))
            if (role, program.name) == ("actor", "update")
        )
        found = compile_program(
            *(update[0], topology, roles.resident_buffers(pool)),
            mesh=update[1],
            dtype=config.train.dtype,
        )
        yield (
            f"{train_name(layout.sizes)}, {layout.rows} x {layout.tokens:,} tokens",
            terms.resident_bytes + terms.transient_bytes,
            found.peak,
        )


def show_memory(topology: Topology) -> None:
    """Prints a row for each layout as soon as it is compiled."""
    print(f"peak of the update of dapo_qwen7b on {topology.name}: predicted, compiled (GB), off by")
    for name, predicted, compiled in memory(topology):
        off = predicted / compiled - 1
        print(f"{name:40} {predicted / 1e9:7.2f} {compiled / 1e9:7.2f} {off:+7.1%}", flush=True)


PHASES = {
    "gen": "sampling",
    "old_log_prob": "log-probabilities",
    "ref": "of the reference",
    "update_critic": "values, update of critic",
    "update_actor": "update of the actor",
}
# The first steps compile.
_FIRST_STEPS = 3
# A phase that took less was not there.
_SMALLEST_S = 1e-3
# Smaller weights stay in the caches of a core while it samples.
_CACHED_BYTES = 32e6
# The shortest that the engine prefills (`rollout.engine_sizes`).
_SHORTEST_PROMPT = 64


def measure(arguments: Sequence[str]) -> int:
    """Trains as `jaxrl train` with timers that count seconds of the processor; returns the exit status."""
    run_metrics.time = types.SimpleNamespace(perf_counter=time.process_time, time=time.time)
    return cli.run("train", ["predictions.py", *arguments])


def keep_layers(source: pathlib.Path, layers: int, folder: pathlib.Path) -> None:
    """Copies a Hugging Face directory with the first `layers` layers of its weights."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    kept = {
        name: value
        for name, value in weights.items()
        if not (found := re.search(r"\.layers\.(\d+)\.", name)) or int(found[1]) < layers
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"num_hidden_layers": layers}))


@dataclasses.dataclass(frozen=True)
class Rates:
    """What this machine reaches: matmuls differ between forward passes and updates."""

    forward: Assumptions
    update: Assumptions


@dataclasses.dataclass(frozen=True)
class Ran:
    """A run of a recipe of `configs`, and the metrics of its steps."""

    name: str
    config: Config
    steps: Sequence[Mapping[str, float]]

    @staticmethod
    def read(folder: pathlib.Path) -> Ran:
        """From `<folder>/seed0`; the folder has the name of the recipe."""
        (run,) = read_runs([folder / "seed0"])
        layers = {"model.num_layers": run.settings["model.num_layers"], "weights": ""}
        config = load_config(Config, str(CONFIGS / f"{folder.name}.py"), layers)
        train = config.train.with_shared_prompts(
            platform="cpu",
            num_samples=config.rollout.num_samples,
            allowed=True,
        )
        return Ran(
            f"{folder.name}, {config.model.num_layers} layers",
            dataclasses.replace(config, train=train),
            [row for row in run.stages["rl"] if row["step"] > _FIRST_STEPS],
        )

    def work(self, step: Mapping[str, float]) -> Workload:
        """Of a step, with the lengths that it had."""
        config = self.config
        prompt, response = (step[f"{name}_length/mean"] for name in ("prompt", "response"))
        return dataclasses.replace(
            load_of(config).work,
            prompt_lengths=LengthDistribution(prompt, config.data.max_prompt_tokens),
            response_lengths=LengthDistribution(
                response, config.rollout.max_response_tokens, "log-normal", sigma=_SPREAD
            ),
            sampled_per_kept=1.0,
        )

    def measured(self, phase: str) -> float:
        """Median of the seconds of a phase; 0 if it was not timed."""
        found = [s for step in self.steps if (s := step.get(f"timing_s/{phase}")) is not None]
        return statistics.median(found) if found else 0.0

    def off_by(self, phase: str, cluster: Cluster, rates: Rates) -> float:
        """Median over the steps of predicted over measured seconds, less 1.

        Dynamic sampling takes one batch or two, and a few steps compile a program of another size.
        """
        ratios = [
            self._predicted(step, cluster, rates)[phase] / seconds
            for step in self.steps
            if (seconds := step.get(f"timing_s/{phase}")) is not None
        ]
        return statistics.median(ratios) - 1

    def _predicted(
        self, step: Mapping[str, float], cluster: Cluster, rates: Rates
    ) -> dict[str, float]:
        config, work = self.config, self.work(step)
        one = ParallelLayout(1, 1, 1, 1, 1)
        forward = PassSimulator(cluster, work, rates.forward)
        update = PassSimulator(cluster, work, rates.update)
        critic = dataclasses.replace(config.model, num_scores=1)
        values = forward.inference(critic, one).total_s + update.training(critic, one).total_s
        logprobs = forward.inference(config.model, one).total_s
        # The first minibatch gets its log-probabilities from the update.
        shared = 1 - resolve(config).shares_forward / config.algorithm.updates_per_step
        return {
            "gen": self._sampling_s(step, cluster, rates),
            "old_log_prob": logprobs * shared,
            "ref": logprobs,
            # Values are asked for before, and waited for here.
            "update_critic": values,
            "update_actor": update.training(config.model, one).total_s,
        }

    def _sampling_s(self, step: Mapping[str, float], cluster: Cluster, rates: Rates) -> float:
        config = self.config
        # Dynamic sampling takes one batch after the other.
        batches = step.get("train/num_gen_batches", 1.0)
        prompts = config.prompts_per_batch
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        padded = bucket_sizes(longest, _SHORTEST_PROMPT)
        length = round_up(padded, math.ceil(step["prompt_length/mean"]))
        sampled = dataclasses.replace(
            self.work(step), prompts=prompts, prompt_lengths=LengthDistribution.exactly(length)
        )
        engine = GenerationSimulator(cluster, sampled, rates.forward)
        assert isinstance(config.rollout.slots, int)
        one = ParallelLayout(1, 1, 1, 1, 1)
        return batches * engine.generation(config.model, one, config.rollout.slots).total_s


def calibrated(run: Ran, cluster: Cluster) -> Rates:
    """Three numbers from a run: rates of matmuls of its updates and of its reference, and one of decoding.

    Without a reference both rates are that of the updates. The number of decoding is the overhead of a step
    for a model that caches hold, and else the rate at which weights are read: a CPU copies those of each
    layer before it multiplies them.
    """
    plain = dataclasses.replace(assumptions_of(run.config, cluster.accelerator), step_s=0.0)

    def solved(rates: Rates, name: str, phase: str, low: float, high: float) -> Rates:
        """The rates with the value for which a phase takes its measured seconds, by bisection."""

        def with_value(value: float) -> Rates:
            changed = {name: value}
            return Rates(
                dataclasses.replace(rates.forward, **changed),
                rates.update
                if phase != "update_actor"
                else dataclasses.replace(rates.update, **changed),
            )

        def off_by(value: float) -> float:
            return run.off_by(phase, cluster, with_value(value))

        falls = off_by(low) > off_by(high)
        for _ in range(30):
            middle = (low + high) / 2
            is_slow = off_by(middle) > 0
            low, high = (middle, high) if is_slow == falls else (low, middle)
        return with_value((low + high) / 2)

    rates = solved(Rates(plain, plain), "flops_rate", "update_actor", 1e-3, 1.0)
    if run.measured("ref") > _SMALLEST_S:
        rates = solved(rates, "flops_rate", "ref", 1e-3, 1.0)
    if run.config.model.num_params * plain.compute_bytes < _CACHED_BYTES:
        return solved(rates, "step_s", "gen", 0.0, 1.0)
    return solved(rates, "weights_rate", "gen", 1e-3, 1.0)


def show_seconds(folders: Sequence[pathlib.Path]) -> None:
    """Prints what each run took beside what the first one's calibration predicts."""
    calibrate.time = types.SimpleNamespace(perf_counter=time.process_time)
    runs = [Ran.read(folder) for folder in folders]
    here = calibrate.calibrate("here")
    cluster = Cluster(dataclasses.replace(here, devices_per_host=1), (1, 1))
    rates = calibrated(runs[0], cluster)
    print(
        f"{here.float32_tflops * 1e3:.0f} GFLOP/s, {here.memory_gbs:.1f} GB/s; from {runs[0].name}: "
        f"{rates.update.flops_rate:.2f} of the matmuls in updates, {rates.forward.flops_rate:.2f} forward, "
        f"{rates.forward.weights_rate:.2f} of the memory for weights, "
        f"{rates.forward.step_s * 1e3:.2f} ms a decoding step"
    )
    print("run, phase: processor seconds of a step, median; prediction off by, median of the steps")
    for run in runs:
        for phase, title in PHASES.items():
            if (measured := run.measured(phase)) > _SMALLEST_S:
                off = run.off_by(phase, cluster, rates)
                print(f"{run.name:24} {title:24} {measured:7.3f} {off:+7.1%}")


def main() -> None:
    """Runs a part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("memory", "measure", "seconds", "layers")
    parser.add_argument("--part", choices=parts, required=True)
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--runs", type=pathlib.Path, nargs="+", default=[])
    for name in ("--model", "--out"):
        parser.add_argument(name, type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=6)
    args, of_training = parser.parse_known_args()
    if args.part in ("measure", "seconds") and len(os.sched_getaffinity(0)) > 1:
        parser.error(
            f"--part {args.part} counts seconds of one core; put `taskset -c 0` before python"
        )
    if args.part == "measure":
        sys.exit(measure(of_training))
    if of_training:
        parser.error(f"{of_training[0]} is for --part measure")
    jax.config.update("jax_platforms", "cpu")
    if args.part == "memory":
        show_memory(read_topology(args.topology))
    elif args.part == "layers" and args.model and args.out:
        keep_layers(args.model, args.layers, args.out)
    elif args.part == "seconds" and args.runs:
        show_seconds(args.runs)
    else:
        parser.error("--part seconds needs --runs, and --part layers needs --model and --out")


if __name__ == "__main__":
    main()
