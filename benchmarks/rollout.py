"""Tokens per second of jaxrl's rollout, of Transformers' `generate` and of Tunix's sampler, on one problem.

    python benchmarks/rollout.py [--tunix-python PATH] [--rounds 3] [--case even|ragged|lm|sizes|precision]

    even        no response stops before the limit
    ragged      each token is a stop with probability 10 / 512: responses of 50 tokens on average
    lm          16 samples of a model of SmolLM2-135M's shape, in float32, bfloat16 and 8 bits
    sizes       8 samples in an engine of 256 slots, under growing limits of length
    precision   how far the sampler's log-probabilities are from a float32 trainer's

All systems are alive at once and take turns, so that all see one machine; the median of the rounds counts.
Each round has prompts of its own. Before the first one the peers run once, which compiles what they compile;
jaxrl runs every round once, since other lengths ask for programs of other sizes: what is timed is a run that
has gone on for a while. A peer that is not installed is left out with a line that says so. The floor is what
the matmuls and the reads of the cache would take by themselves, at the rates that this machine
reaches in the same run.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.models.cache.cache_kind import cache_bytes
from jaxrl.models.decoder import decoder_graph, init_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.batches import pack_completions
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packing import RowLimits
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import Prompts

SYSTEMS = pathlib.Path(__file__).with_name("rollout_systems.py")
OURS = ("jaxrl", "jaxrl, bfloat16 cache", "jaxrl, int8 cache")
TRANSFORMERS = ("Transformers", "Transformers, static cache")
OF_LM = (
    "jaxrl",
    "jaxrl, bfloat16",
    "jaxrl, int8 weights",
    "Transformers",
    "Transformers, bfloat16",
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The problem. `stops` of the `vocab` ids end a response.

    `devices` is the number of simulated devices that a run of jaxrl with this model has by default on a CPU.
    """

    layers: int = 4
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1024
    vocab: int = 512
    prompt: int = 64
    response: int = 192
    prompts: int = 16
    samples: int = 8
    stops: int = 0
    devices: int = 2

    @property
    def model(self):
        return ModelConfig(
            vocab_size=self.vocab,
            num_layers=self.layers,
            d_model=self.width,
            d_ff=self.ffn,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.width // self.heads,
            qkv_bias=False,
            qk_norm=True,
        )


LM = Shape(
    layers=30,
    width=576,
    heads=9,
    kv_heads=3,
    ffn=1536,
    vocab=49_152,
    prompt=32,
    response=96,
    prompts=16,
    samples=1,
    devices=1,
)


class System:
    """A child process that samples once whenever it is asked.

    `answers` are those of the timed rounds.
    """

    def __init__(self, name, shape, python=sys.executable):
        self.name = name
        self.first_s = float("nan")
        self.answers = []
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        self._child = subprocess.Popen(
            [python, str(SYSTEMS), name, json.dumps(dataclasses.asdict(shape))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def run(self, seed):
        """Samples once; None where the system cannot."""
        try:
            self._child.stdin.write(f"{seed}\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._child.stdout.readline()
        return json.loads(line) if line else None

    def warm_up(self, rounds):
        """Compiles; False where the system cannot run."""
        found = [self.run(seed) for seed in range(rounds if self.name.startswith("jaxrl") else 1)]
        if found[-1] is not None:
            self.first_s = found[0]["wall_s"]
        return found[-1] is not None

    def close(self):
        self._child.stdin.close()
        self._child.wait()


def rates(shape, rows):
    """(FLOP/s of the matmuls, bytes/s read by attention) that this machine reaches now, on these shapes."""
    x, up, down = (
        jnp.ones((rows, shape.width)),
        jnp.ones((shape.width, shape.ffn)),
        jnp.ones((shape.ffn, shape.width)),
    )
    matmuls = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, x: (x @ up @ down) * 1e-6, x))
    flops = 40 * 4 * rows * shape.width * shape.ffn
    # More than any cache of the processor holds.
    big, weights = jnp.ones((64, 1 << 20)), jnp.ones(64)
    mixed = jax.jit(lambda big: weights @ big)
    return flops / fastest(matmuls, x), big.nbytes / fastest(mixed, big)


def fastest(function, *args):
    """Seconds of the fastest of a few calls."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def floor_s(shape, mean_length, num_tokens):
    """Least seconds for so many tokens, prompts included, and the rates it follows from."""
    model = shape.model
    per_token = 2 * (model.num_params - shape.vocab * shape.width) + 2 * shape.vocab * shape.width
    flops = per_token * (num_tokens + shape.prompts * shape.prompt)
    # On average a token sees the prompt and half of its response; over geometric lengths that is little less
    # than the mean length, over equal ones half of it.
    seen = shape.prompt + (mean_length if shape.stops else mean_length / 2)
    read = num_tokens * seen * model.kv_bytes_per_token(4)
    flop_rate, byte_rate = rates(shape, shape.prompts * shape.samples)
    return flops / flop_rate + read / byte_rate, flop_rate, byte_rate


def available(args):
    """(name, interpreter) of the systems there are; says which are not."""
    systems = [(name, sys.executable) for name in OURS]
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
        systems += [(name, sys.executable) for name in TRANSFORMERS]
    else:
        print("Transformers is left out: pip install torch transformers")
    if args.tunix_python:
        systems.append(("Tunix", args.tunix_python))
    else:
        print("Tunix is left out: give an interpreter that has google-tunix with --tunix-python")
    return systems


def compare(title, shape, systems, args, console):
    systems = [System(name, shape, python) for name, python in systems]
    for system in list(systems):
        if not system.warm_up(args.rounds):
            print(f"{system.name} is left out: it ended; run it by itself to see why")
            systems.remove(system)
    for seed in range(args.rounds):
        for system in systems:
            system.answers.append(system.run(seed))
    table = Table(title=f"{title}: {shape}")
    for column in ("system", "tokens/s", "of floor", "x Transformers", "per CPU second"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for column in ("mean length", "first s", "programs"):
        table.add_column(column, justify="right")
    medians = {}
    for system in systems:
        rounds = system.answers
        medians[system.name] = {
            "rate": statistics.median(r["tokens"] / r["wall_s"] for r in rounds),
            "cpu_rate": statistics.median(r["tokens"] / r["cpu_s"] for r in rounds),
            "mean": statistics.mean(r["mean_length"] for r in rounds),
            "tokens": statistics.mean(r["tokens"] for r in rounds),
        }
    ours = medians["jaxrl"]
    least, flop_rate, byte_rate = floor_s(shape, ours["mean"], ours["tokens"])
    base = max((medians[n]["rate"] for n in TRANSFORMERS if n in medians), default=float("nan"))
    for system in systems:
        m = medians[system.name]
        table.add_row(
            system.name,
            f"{m['rate']:,.0f}",
            f"{m['rate'] / (ours['tokens'] / least):.0%}",
            f"{m['rate'] / base:.2f}",
            f"{m['cpu_rate']:,.0f}",
            f"{m['mean']:.1f}",
            f"{system.first_s:.1f}",
            str(system.answers[-1]["programs"] or ""),
        )
        system.close()
    console.print(table)
    console.print(
        f"floor {ours['tokens'] / least:,.0f} tokens/s: {flop_rate / 1e9:.0f} GFLOP/s of matmuls, "
        f"{byte_rate / 1e9:.1f} GB/s of reads; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


def prompts_of(shape, count):
    rng = np.random.default_rng(0)
    rows = rng.integers(1 + shape.stops, shape.vocab, (count, shape.prompt)).astype(np.int32)
    blank = ("",) * count
    return Prompts(np.arange(count), tuple(rows), blank, blank, blank)


def sizes(console):
    """8 samples in 256 slots; only the limit of length changes."""
    shape = Shape()
    table = Table(title="8 samples of 128 tokens in an engine of 256 slots")
    for column in ("longest response", "ms per token of each", "cache, MB", "if full, MB"):
        table.add_column(column, justify="right")
    mesh = build_mesh(ParallelLayout.from_config(LayoutConfig()), jax.devices()[:1])
    graph, _, _ = decoder_graph(shape.model)
    params = init_params(shape.model, jax.random.key(0))
    for longest in (256, 2048, 16384):
        config = EngineConfig(
            slots=256,
            smallest_bucket=8,
            prefill_prompts=8,
            max_prompt_tokens=shape.prompt,
            max_response_tokens=longest,
            tokens_per_dispatch=16,
            stop_ids=(),
            unroll=shape.layers,
        )
        engine = Engine(shape.model, graph, mesh, config)
        options = SamplingOptions(num_samples=1, seed=0, step=0, temperature=1.0, budget_tokens=128)
        backend = OfflineBackend(engine, functools.partial(map, lambda _: ""))
        backend.load(params)
        run = functools.partial(backend.resume, prompts_of(shape, 8), options)
        seconds = fastest(run)
        used = next(s for s in engine.cache_sizes if s >= shape.prompt + 128)
        table.add_row(
            f"{longest:,}",
            f"{1e3 * seconds / 128:.2f}",
            f"{cache_bytes(engine.cache, 8, used) / 1e6:,.0f}",
            f"{cache_bytes(engine.cache, 256, engine.cache_sizes[-1]) / 1e6:,.0f}",
        )
    console.print(table)


def precision(console):
    """Sampler against a float32 trainer, token by token."""
    shape = Shape()
    table = Table(title="log-probability of the sampler less that of a float32 trainer")
    for column in ("activations", "weights", "cache", "mean", "mean absolute", "largest"):
        table.add_column(column, justify="right")
    mesh = build_mesh(ParallelLayout.from_config(LayoutConfig()), jax.devices()[:1])
    prompts = prompts_of(shape, 8)
    longest = shape.prompt + shape.response
    packed = RowLimits(4, 1024, longest).shape(16, minibatches=1)
    for dtype, weights_dtype, kv_dtype in [
        ("float32", "", "float32"),
        ("float32", "", "bfloat16"),
        ("float32", "", "int8"),
        ("float32", "int8", "float32"),
        ("bfloat16", "", "bfloat16"),
        ("bfloat16", "", "int8"),
        ("bfloat16", "int8", "bfloat16"),
        ("bfloat16", "int8", "int8"),
    ]:
        config = EngineConfig(
            slots=16,
            smallest_bucket=8,
            prefill_prompts=8,
            max_prompt_tokens=shape.prompt,
            max_response_tokens=shape.response,
            tokens_per_dispatch=16,
            stop_ids=(),
            dtype=dtype,
            weights_dtype=weights_dtype,
            kv_dtype=kv_dtype,
        )
        engine = Engine(shape.model, decoder_graph(shape.model)[0], mesh, config)
        actor = Actor(
            shape.model,
            mesh,
            train=TrainConfig(),
            optim=OptimConfig(),
            temperature=1.0,
            seed=0,
            backend=OfflineBackend(engine, functools.partial(map, lambda _: "")),
        )
        actor.init()
        options = SamplingOptions(num_samples=2, seed=0, step=0, temperature=1.0)
        completions = actor.generate(prompts, options)
        batch, _ = pack_completions(completions, packed)
        logprob = np.asarray(actor.logprobs(actor.place(batch)))
        gap = (np.asarray(batch.rollout_logprob) - logprob)[np.asarray(batch.loss_mask) > 0]
        table.add_row(
            dtype,
            weights_dtype or dtype,
            kv_dtype,
            f"{gap.mean():+.1e}",
            f"{np.abs(gap).mean():.1e}",
            f"{np.abs(gap).max():.1e}",
        )
    console.print(table)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tunix-python", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--case", choices=("even", "ragged", "lm", "sizes", "precision"), default=""
    )
    args = parser.parse_args()
    console = Console(width=120)
    if args.case in ("", "even"):
        compare("even", Shape(), available(args), args, console)
    if args.case in ("", "ragged"):
        compare("ragged", Shape(stops=10), available(args), args, console)
    if args.case in ("", "lm"):
        compare("135M", LM, [(name, sys.executable) for name in OF_LM], args, console)
    if args.case in ("", "sizes"):
        sizes(console)
    if args.case in ("", "precision"):
        precision(console)


if __name__ == "__main__":
    main()
