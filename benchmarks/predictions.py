"""What the planner predicts, beside what compilers and clocks say.

    python benchmarks/predictions.py --part memory --topology v5p:2x2x2
    python benchmarks/predictions.py --part memory --topology h100:1x8
    python benchmarks/predictions.py --part seconds --runs runs/grpo_tiny runs/ppo_tiny runs/dapo_tiny

    memory      peak of the actor's update: predicted by the search's simulator, compiled for the topology
    seconds     phases of runs on this machine's processor, after it was calibrated on the first of them

Memory is of configs/dapo_qwen7b.py in five layouts of eight devices. Bytes of reshardings are compared in
tests/planner/test_predicted_resharding.py. Calibration takes two numbers from the first run: the share of the
rate of products that its update reaches, and what a step of decoding takes beside its work. Mean lengths,
padding and batches of dynamic sampling are those of the runs; the spread of lengths is assumed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence

# XLA complains of every host that is not there.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.dataflows.algorithm_parts import shares_forward
from jaxrl.dataflows.lookup import find_dataflow
from jaxrl.planner.compile_plan import roles_on
from jaxrl.planner.compiled.ahead import compile_program
from jaxrl.planner.hardware.calibration import calibrate
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.hardware.topologies import Topology, read_topology
from jaxrl.planner.simulation.assumptions import Assumptions
from jaxrl.planner.simulation.simulate_generation import GenerationSimulator
from jaxrl.planner.simulation.simulate_passes import PassSimulator
from jaxrl.planner.simulation.workload import (
    GenerationStrategy,
    LengthDistribution,
    Strategy,
    Workload,
)
from jaxrl.planner.step_load import assumptions_of, load_of
from jaxrl.planner.step_programs import programs_of
from jaxrl.tracking.metrics import read_metrics

# Of the logarithm of lengths: sums of three numbers have answers that differ little.
_SPREAD = 0.2
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Of eight devices; `rows` of a microbatch over all of them, `tokens` of a row."""

    strategy: Strategy
    rows: int
    tokens: int = 10_240

    @property
    def generate(self) -> str:
        """The kv heads of Qwen2.5-7B are four."""
        p, t, d = self.strategy.p, self.strategy.t, self.strategy.d
        return f"1-{t}-{p}-{d}"


LAYOUTS = (
    Layout(Strategy(1, 1, 8, 8), 8),
    Layout(Strategy(1, 2, 4, 4), 4),
    Layout(Strategy(1, 4, 2, 2), 2),
    Layout(Strategy(2, 2, 2, 2), 4),
    Layout(Strategy(1, 4, 2, 1), 2, 20_480),
)


def recipe_in(layout: Layout) -> Config:
    """The 7B recipe in a layout."""
    config = load_config(Config, str(CONFIGS / "dapo_qwen7b.py"), {})
    s = layout.strategy
    changes = {
        "mesh": {
            "train": f"{s.p}-{s.t}-{s.d}",
            "generate": layout.generate,
            "fsdp": s.fsdp,
        },
        "train": {"rows": layout.rows, "row_tokens": layout.tokens},
        "rollout": {"max_response_tokens": layout.tokens - config.data.max_prompt_tokens},
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
        terms = simulator.training(config.model, layout.strategy)
        roles = roles_on(config, topology)
        (pool,) = roles.pools.values()
        (update,) = (
            (program, mesh)
            for role, program, mesh in programs_of(roles, load_of(config))
            if (role, program.name) == ("actor", "update")
        )
        found = compile_program(update[0], topology, roles.resident_buffers(pool), mesh=update[1])
        yield (
            f"{layout.strategy.name}, {layout.rows} x {layout.tokens:,} tokens",
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


@dataclasses.dataclass(frozen=True)
class Ran:
    """A run of a recipe named as its folder: medians of its steps."""

    config: Config
    medians: Mapping[str, float]

    @staticmethod
    def read(folder: pathlib.Path) -> Ran:
        """From `<folder>/seed0`."""
        config = load_config(Config, str(CONFIGS / f"{folder.name}.py"), {})
        rows = read_metrics(folder / "seed0" / "rl" / "metrics.jsonl")
        # The first steps compile.
        steps = [row for row in rows if row["step"] > 5]
        names = {name for row in steps for name in row}
        return Ran(
            config,
            {n: statistics.median(row[n] for row in steps if n in row) for n in names},
        )

    @property
    def work(self) -> Workload:
        """Of a step, with the lengths that it had."""
        config, medians = self.config, self.medians
        prompt, response = (medians[f"{name}_length/mean"] for name in ("prompt", "response"))
        return dataclasses.replace(
            load_of(config).work,
            prompt_lengths=LengthDistribution(prompt, config.data.max_prompt_tokens),
            response_lengths=LengthDistribution(
                response, config.rollout.max_response_tokens, "log-normal", sigma=_SPREAD
            ),
            sampled_per_kept=1.0,
        )

    def predicted(self, cluster: Cluster, assume: Assumptions) -> dict[str, float]:
        """Seconds by phase."""
        config, work = self.config, self.work
        one, full = Strategy(1, 1, 1), 1 / (1 - self.medians["perf/padding"])
        passes = PassSimulator(cluster, work, assume)
        # Dynamic sampling takes one batch after the other.
        batches = self.medians.get("train/num_gen_batches", 1.0)
        dynamic = find_dataflow(config.algorithm.dataflow).dynamic_sampling
        prompts = config.rollout.generation_prompts if dynamic else config.rollout.num_prompts
        sampled = dataclasses.replace(work, prompts=prompts)
        engine = GenerationSimulator(cluster, sampled, assume)
        critic = dataclasses.replace(config.model, num_scores=1)
        forward = passes.inference(config.model, one).total_s * full
        # The first minibatch gets its log-probabilities from the update.
        shared = (
            1
            - shares_forward(config.algorithm, config.train.load_balancing_coef)
            / config.algorithm.updates_per_step
        )
        slots = GenerationStrategy(1, 1, config.rollout.slots)
        found = {
            "gen": batches * engine.generation(config.model, one, slots).total_s,
            "old_log_prob": forward * shared,
            "ref": forward,
            # Values are asked for before, and waited for here.
            "update_critic": full
            * (passes.inference(critic, one).total_s + passes.training(critic, one).total_s),
            "update_actor": passes.training(config.model, one).total_s * full,
        }
        return {name: s for name, s in found.items() if self.measured(name) > 1e-3}

    def measured(self, phase: str) -> float:
        """Seconds."""
        return self.medians.get(f"timing_s/{phase}", 0.0)


def calibrated(run: Ran, cluster: Cluster) -> Assumptions:
    """What a run says of this machine: a rate of products, and seconds of a decoding step."""
    plain = dataclasses.replace(
        assumptions_of(run.config, cluster.accelerator).for_measured_rates(),
        hosts_step_s=0.0,
        call_s=0.0,
    )
    share = run.predicted(cluster, plain)["update_actor"] / run.measured("update_actor")
    plain = dataclasses.replace(plain, flops_rate=min(1.0, share))
    work = run.predicted(cluster, plain)["gen"]
    slower = dataclasses.replace(plain, hosts_step_s=1.0)
    steps = run.predicted(cluster, slower)["gen"] - work
    return dataclasses.replace(plain, hosts_step_s=max(0.0, run.measured("gen") - work) / steps)


def show_seconds(folders: Sequence[pathlib.Path]) -> None:
    """Prints what each run took beside what the first one's calibration predicts."""
    here = calibrate("here")
    cluster = Cluster(dataclasses.replace(here, devices_per_host=1), (1, 1))
    runs = [Ran.read(folder) for folder in folders]
    assume = calibrated(runs[0], cluster)
    print(
        f"{here.float32_tflops * 1e3:.0f} GFLOP/s, {here.memory_gbs:.1f} GB/s; from {folders[0].name}: "
        f"{assume.flops_rate:.2f} of the products, {assume.hosts_step_s * 1e3:.2f} ms a decoding step"
    )
    print("run, phase: predicted, measured (s), off by")
    for folder, run in zip(folders, runs, strict=True):
        for phase, predicted in run.predicted(cluster, assume).items():
            measured = run.measured(phase)
            off = predicted / measured - 1
            print(
                f"{folder.name:12} {PHASES[phase]:24} {predicted:7.3f} {measured:7.3f} {off:+7.1%}"
            )


def main() -> None:
    """Runs a part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("memory", "seconds"), required=True)
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--runs", type=pathlib.Path, nargs="+", default=[])
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if args.part == "memory":
        show_memory(read_topology(args.topology))
    elif args.runs:
        show_seconds(args.runs)
    else:
        parser.error("--part seconds compares runs that are there; name their folders with --runs")


if __name__ == "__main__":
    main()
