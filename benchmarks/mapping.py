"""The mapping search: its findings beside those of the HybridFlow paper, and its times.

    python benchmarks/mapping.py [--part placements|scaling|tensor|times] [--as hybridflow-2024]

Every second of a step here is predicted; the times of the search are measured. The paper's cluster (section
8.1): up to 16 hosts of 8 A100-80GB, NVLink of 600 GB/s, 200 Gbps from each host to the others, Llama models,
prompts and responses of 1,024 tokens, 1,024 of them a step, PPO with one epoch of 8 updates; bfloat16 weights
with float32 gradients and Adam states. Where the paper is silent, the planner's assumptions stand
(docs/planning.md). Placements, scaling and tensor have our fixed costs and those of the paper's
system in turn; --as names one of them. docs/planning.md gives the source of each fixed cost.
"""

import argparse
import dataclasses
import time

from jaxrl.errors import UserError
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.shapes import model_shapes
from jaxrl_planner.hardware.accelerators import accelerator
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.search.mapping import SearchLimits, placement_name
from jaxrl_planner.search.search import search_mapping
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.simulate_generation import GenerationSimulator
from jaxrl_planner.simulation.simulate_passes import PassSimulator
from jaxrl_planner.simulation.step_simulator import TASKS
from jaxrl_planner.simulation.workload import LengthDistribution, Workload

# 200 Gbps leave a host, shared by its eight devices.
A100 = dataclasses.replace(accelerator("a100"), host_gbs=25.0)

# bfloat16 weights beside float32 ones and two moments; gradients in float32, summed once an update.
PAPER = Assumptions(
    master_bytes=6,
    moments_bytes=8,
    gradient_bytes=4,
    frozen_bytes=2,
    reduce_each_microbatch=False,
)
WORK = Workload(
    prompts=1024,
    prompt_lengths=LengthDistribution.exactly(1024),
    response_lengths=LengthDistribution.exactly(1024),
    updates=8,
    pipeline_microbatches=8,
)


@dataclasses.dataclass(frozen=True)
class System:
    """A training system: fields of `Assumptions` that differ, and tokens between visits of the host."""

    name: str
    costs: dict[str, float]
    tokens_per_dispatch: int = WORK.tokens_per_dispatch

    @property
    def assumptions(self) -> Assumptions:
        return dataclasses.replace(PAPER, **self.costs)

    @property
    def work(self) -> Workload:
        return dataclasses.replace(WORK, tokens_per_dispatch=self.tokens_per_dispatch)


SYSTEMS = {
    "jaxrl": System("jaxrl", {}),
    # Ray, Megatron-core 0.6.0, vLLM 0.3.1.
    "hybridflow-2024": System(
        "hybridflow-2024",
        {
            # The host schedules each sequence after each token: 29% of vLLM's time, beside 38% on the GPU
            # (blog post of v0.6.0: Llama 3 8B on an H100). 40 us for each of 256 sequences is 29/38 of 13 ms,
            # our estimate of a decoding step there.
            "slot_host_s": 40e-6,
            # A guess: Python starts each kernel of a step, and messages go between Ray's workers.
            "step_s": 5e-3,
            # A guess: Ray's remote calls with batches as objects, and kernels started from Python.
            "pass_s": 0.5,
            # Part of the three above.
            "call_s": 0.0,
            "host_s": 0.0,
        },
        tokens_per_dispatch=1,
    ),
}

# Generation returns the log-probabilities, so the actor has no pass of its own in preparation.
PPO = tuple(dataclasses.replace(r, forwards=0) if r.generates else r for r in TASKS["ppo"])

COLOCATE = (("actor", "critic", "reference", "reward"),)
SPLIT = (("actor", "reference"), ("critic", "reward"))
STANDALONE = (("actor",), ("critic",), ("reference",), ("reward",))
PLACEMENTS = {"colocate": COLOCATE, "split": SPLIT, "standalone": STANDALONE}

# Section 8.3, Figures 12 and 13: (actor and reference, critic and reward) -> devices -> the fastest.
FOUND_BY_PAPER = {
    ("7B", "7B"): {16: "colocate", 32: "colocate", 64: "colocate"},
    ("13B", "13B"): {
        16: "colocate",
        32: "colocate",
        64: "colocate",
        96: "split",
        128: "standalone",
    },
    ("34B", "34B"): {32: "colocate", 64: "colocate", 96: "split", 128: "split"},
    ("13B", "70B"): {64: "colocate", 96: "split", 128: "actor + reference + reward, critic"},
}


def llama(layers, width, heads, kv_heads, inner):
    return ModelConfig(
        vocab_size=32_000,
        num_layers=layers,
        d_model=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        d_ff=inner,
        tie_embeddings=False,
        qkv_bias=False,
    )


LLAMA = {
    "7B": llama(32, 4096, 32, 32, 11_008),
    "13B": llama(40, 5120, 40, 40, 13_824),
    "34B": llama(48, 8192, 64, 8, 22_016),
    "70B": llama(80, 8192, 64, 8, 28_672),
}


def scoring(model):
    return dataclasses.replace(model, num_scores=1)


def models_of(actor, critic):
    return {
        "actor": actor,
        "critic": scoring(critic),
        "reference": actor,
        "reward": scoring(critic),
    }


def shown(placement):
    """Without the bars that end a cell of a table."""
    return placement_name(placement).replace(" | ", ", ")


def seconds_text(result):
    if result is None or result.seconds == float("inf"):
        return "does not fit"
    return f"{result.seconds:,.0f} ({'/'.join(map(str, result.devices))})"


def placements(system: System):
    """Which placement is the fastest, by size of models and cluster."""
    for fsdp in (False, True):
        print(
            f"\n### Placements, {'3D parallelism and FSDP' if fsdp else '3D parallelism alone'}, "
            f"as {system.name}\n"
        )
        print(
            "| models | devices | colocate s | split s | standalone s | best of three | paper | same "
            "| best of 15 |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for (actor, critic), by_devices in FOUND_BY_PAPER.items():
            for devices, expected in by_devices.items():
                row = placement_row(actor, critic, devices, expected, fsdp, system)
                print(row, flush=True)


def placement_row(actor, critic, devices, expected, fsdp, system):
    name = actor if actor == critic else f"{actor} / {critic}"
    try:
        found = search_mapping(
            "ppo",
            models_of(LLAMA[actor], LLAMA[critic]),
            system.work,
            Cluster(A100, (devices // 8, 8), whole_hosts=True),
            assumptions=system.assumptions,
            limits=SearchLimits(fsdp=fsdp),
            tasks=PPO,
            every_placement=True,
        )
    except UserError as error:
        return f"| {name} | {devices} | {str(error).rsplit('; ', 1)[1]} | | | | {expected} | | |"
    by_placement = {frozenset(r.placement): r for r in found.placements}
    results = {what: by_placement[frozenset(p)] for what, p in PLACEMENTS.items()}
    best = min(results, key=lambda what: results[what].seconds)
    same = shown(found.placement) if expected not in results else best
    agrees = "yes" if same == expected else "no"
    sizes = "/".join(str(pool.devices) for pool in found.pools)
    cells = " | ".join(map(seconds_text, results.values()))
    winner = f"{shown(found.placement)}: {found.seconds:,.0f} ({sizes})"
    return f"| {name} | {devices} | {cells} | {best} | {expected} | {agrees} | {winner} |"


def scaling(system: System):
    """Section 8.2: throughput on 128 devices over that on the fewest that fit, over the ratio of devices."""
    print(f"\n### Strong scaling, 3D parallelism, as {system.name} (paper: 66.8% on average)\n")
    print("| dataflow | model | fewest devices | s | on 128 s | efficiency | with no overlap |")
    print("|---|---|---|---|---|---|---|")
    efficiencies = []
    for dataflow in ("ppo", "remax", "safe_rlhf"):
        for name in LLAMA:
            both = [scaled(dataflow, name, system, overlap) for overlap in (PAPER.overlap, 0.0)]
            fewest, small, large, _ = both[0]
            shares = [efficiency for *_, efficiency in both]
            efficiencies.append(shares)
            cells = " | ".join(f"{share:.1%}" for share in shares)
            print(
                f"| {dataflow} | {name} | {fewest} | {small:,.0f} | {large:,.0f} | {cells} |",
                flush=True,
            )
    means = [sum(column) / len(column) for column in zip(*efficiencies, strict=True)]
    print("| mean | | | | | " + " | ".join(f"{mean:.1%}" for mean in means) + " |")


def scaled(dataflow, name, system, overlap):
    """(fewest devices, seconds there, seconds on 128, efficiency)."""
    model, scored = LLAMA[name], ("critic", "reward", "cost", "cost_critic")
    tasks = tuple(dataclasses.replace(r, forwards=0) if r.generates else r for r in TASKS[dataflow])
    models = {r.name: scoring(model) if r.name in scored else model for r in tasks}
    assume = dataclasses.replace(system.assumptions, overlap=overlap)
    work = system.work

    def seconds(hosts):
        cluster = Cluster(A100, (hosts, 8), whole_hosts=True)
        limits = SearchLimits(fsdp=False)
        try:
            return search_mapping(
                *(dataflow, models, work, cluster), assumptions=assume, limits=limits, tasks=tasks
            ).seconds
        except UserError:
            return None

    hosts, small = next((h, s) for h in (1, 2, 4, 8, 16) if (s := seconds(h)) is not None)
    large = seconds(16)
    return hosts * 8, small, large, small / large / (16 / hosts)


def tensor_sizes(system: System):
    """Figure 15: t_g of an actor trained as 1-8-2 on 16 devices."""
    cluster = Cluster(A100, (2, 8))
    print(
        "\n### Seconds of generation by t_g, training 1-8-2 on 16 devices (slots of a replica), "
        f"as {system.name}\n"
    )
    print("| model | t_g 1 | 2 | 4 | 8 | best | paper | best against 8 | paper |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, best, gain in (("7B", 2, "-60.3%"), ("13B", 4, "-36.4%")):
        found = generation_by_tensor(LLAMA[name], cluster, system)
        fastest = min(found, key=lambda t: found[t].total_s)
        cells = " | ".join(f"{x.total_s:.1f} ({x.slots})" for x in found.values())
        less = found[fastest].total_s / found[8].total_s - 1
        print(f"| {name} | {cells} | {fastest} | {best} | {less:+.1%} | {gain} |")


@dataclasses.dataclass
class Generated:
    total_s: float
    slots: int


def generation_by_tensor(model, cluster, system):
    """The actor's training state stays."""
    work, assume = system.work, system.assumptions
    simulator = GenerationSimulator(cluster, work, assume)
    layouts = {t_g: ParallelLayout(1, 8, 2, 1, t_g) for t_g in (1, 2, 4, 8)}
    kept = PassSimulator(cluster, work, assume).training(model, layouts[8]).resident_bytes
    budget = (A100.memory_gb * assume.memory_share - assume.scratch_gb) * 1e9 - kept
    found = {}
    for t_g, layout in layouts.items():
        groups = simulator.groups(layout)
        _, slots, _ = simulator.best_seconds(model, groups, budget=budget)
        terms = simulator.generation(model, layout, int(slots[-1]))
        found[t_g] = Generated(terms.total_s, int(slots[-1]))
    return found


REASONING = Workload(
    prompts=1536,
    samples=16,
    prompt_lengths=LengthDistribution(300, 2048),
    response_lengths=LengthDistribution(3950, 20_480, "log-normal"),
    updates=16,
    microbatch_tokens=22_528,
)


def times():
    """Seconds of a search, on this machine."""
    print("\n### Seconds of the search\n")
    print("| dataflow | roles | model | cluster | placements | seconds | of CPU | found |")
    print("|---|---|---|---|---|---|---|---|")
    cases = [
        ("ppo", "llama-3.1-8b", WORK, "h100:16x8"),
        ("ppo", "llama-3.1-8b", WORK, "h100:128x8"),
        ("ppo", "llama-3.1-8b", WORK, "v5p:8x8x16"),
        ("ppo", "llama-3-70b", WORK, "h100:128x8"),
        ("ppo", "qwen2.5-32b", REASONING, "h100:128x8"),
        ("safe_rlhf", "llama-3.1-8b", WORK, "h100:16x8"),
        ("safe_rlhf", "llama-3.1-8b", WORK, "h100:32x8"),
        ("safe_rlhf", "llama-3.1-8b", WORK, "h100:128x8"),
        ("grpo", "qwen3-8b", REASONING, "v6e:16x16"),
        ("dapo", "qwen2.5-32b", REASONING, "v5p:4x4x8"),
        ("dapo", "qwen2.5-32b", REASONING, "h100:16x8"),
        ("dapo", "qwen2.5-32b", REASONING, "h200:8x8"),
    ]
    for dataflow, name, work, cluster in cases:
        model = model_shapes(name)
        scored = ("critic", "reward", "cost", "cost_critic")
        models = {r.name: scoring(model) if r.name in scored else model for r in TASKS[dataflow]}
        if work is REASONING and dataflow in ("grpo", "dapo"):
            del models["reward"]  # a rule
        start, start_cpu = time.perf_counter(), time.process_time()
        found = search_mapping(dataflow, models, work, cluster)
        spent, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        actor = found.roles["actor"]
        what = f"{shown(found.placement)}; actor {actor.layout.name}, fsdp {actor.layout.fsdp}, "
        what += f"{actor.slots} slots"
        row = (
            dataflow,
            len(models),
            name,
            cluster,
            len(found.placements),
            f"{spent:.1f}",
            f"{cpu:.1f}",
            what,
        )
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


OF_PAPER = {"placements": placements, "scaling": scaling, "tensor": tensor_sizes}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = (*OF_PAPER, "times")
    parser.add_argument("--part", choices=parts, help="one of them; all by default")
    parser.add_argument("--as", dest="system", choices=SYSTEMS, help="one system; all by default")
    args = parser.parse_args()
    for name in parts if args.part is None else (args.part,):
        if name == "times":
            times()
            continue
        for system in SYSTEMS.values():
            if args.system in (None, system.name):
                OF_PAPER[name](system)


if __name__ == "__main__":
    main()
