"""How close the learning step is to the hardware: figures of one process on CPU, each a ratio of one run.

    python benchmarks/learning_step.py [--only update packing memory compiling prompts unrolling] [--rounds 3]

    update      seconds that its operations would take at the rate of its matmuls, over seconds it takes
    packing     samples a second of packed rows over those of a row for each sample, lengths 20 : 1
    memory      peak of the update at 16k tokens and a vocabulary of 151,936, over one array of all logits
    compiling   seconds to trace and compile the update of 64 layers, over those of 4
    unrolling   seconds of an update of SmolLM2-135M with its layers scanned, over unrolled
    prompts     tokens a second where answers share their prompt, by prompt : answer

What is compared takes turns, and medians of the rounds count. Processor time beside time on the clock: a busy
machine stretches the clock far more. The whole takes some five minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from step_vs_peers import MODEL

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.shapes import model_shapes
from jaxrl.roles import packed_model
from jaxrl.roles.flops import training_flops
from jaxrl.roles.losses import policy
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packing import PackedShape, PrefixGroups, RowLimits, plan_packing
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig
from jaxrl.types import PackedBatch, TrainBatch
from jaxrl_planner.compiled.programs import abstract_batch

LOSS = policy(
    "clipped", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}, shares_forward=True
)


@dataclasses.dataclass(frozen=True)
class Seconds:
    """What a call took.

    Attributes:
      cpu: of the process, all threads together.
      clock: on the clock.
    """

    cpu: float
    clock: float

    def over(self, other: Seconds) -> Seconds:
        """Both as shares of another's."""
        return Seconds(self.cpu / other.cpu, self.clock / other.clock)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A ratio and what it is made of.

    Attributes:
      name, details: what was measured, of what.
      cpu, clock: the ratio in processor time and on the clock; equal where no time is in it.
      wanted: the bound, in words.
    """

    name: str
    details: str
    cpu: float
    clock: float
    wanted: str


def timed(call: Callable[[], Any]) -> Seconds:
    """One call, waited for."""
    cpu, clock = time.process_time(), time.perf_counter()
    jax.block_until_ready(call())
    return Seconds(time.process_time() - cpu, time.perf_counter() - clock)


def in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Seconds]:
    """Medians of some rounds in which all are called once; first calls compile, and are not counted."""
    for call in calls.values():
        jax.block_until_ready(call())
    taken = [{name: timed(call) for name, call in calls.items()} for _ in range(rounds)]
    return {
        name: Seconds(
            statistics.median(row[name].cpu for row in taken),
            statistics.median(row[name].clock for row in taken),
        )
        for name in calls
    }


def actor_of(model: ModelConfig, shape: PackedShape, **train: Any) -> Actor:
    """An actor on one device, with random weights where `init` is called."""
    return Actor(
        model,
        build_mesh(ParallelLayout(1, 1, 1, 1, 1), jax.devices()[:1]),
        train=TrainConfig(rows=shape.rows, row_tokens=shape.tokens, **train),
        optim=OptimConfig(),
        temperature=1.0,
        seed=0,
    )


def batch_of(
    lengths: Sequence[int], shape: PackedShape, vocab_size: int, *, shared: int = 0
) -> TrainBatch:
    """Random sequences of these lengths, an eighth of each a prompt, with advantages of either sign.

    With `shared`, each eight in a row have so many first tokens in common.
    """
    rng = np.random.default_rng(0)
    groups = None
    if shared:
        groups = PrefixGroups(np.arange(len(lengths)) // 8, np.full(len(lengths), shared))
    packing = plan_packing(lengths, shape, prefix_groups=groups)
    pack = packing.pack
    packed = PackedBatch(
        tokens=pack([rng.integers(0, vocab_size, n) for n in lengths], np.int32),
        loss_mask=pack([(np.arange(n) >= n // 8).astype(np.float32) for n in lengths], np.float32),
        **packing.fields(),
    )
    advantages = pack([np.full(n, rng.choice([-1.0, 1.0])) for n in lengths], np.float32)
    return TrainBatch.of(packed, advantage=advantages)


def shape_for(lengths: Sequence[int], *, rows: int, tokens: int) -> PackedShape:
    """One minibatch of as many microbatches as these sequences may need."""
    return RowLimits(rows, tokens, max(lengths)).shape(len(lengths), minibatches=1)


def updating(
    model: ModelConfig,
    lengths: Sequence[int],
    *,
    rows: int,
    tokens: int,
    shared: int = 0,
    **train: Any,
) -> Callable[[], Any]:
    """A call that does one update."""
    shape = shape_for(lengths, rows=rows, tokens=tokens)
    actor = actor_of(model, shape, share_prompts=shared > 0, **train)
    actor.init()
    batch = actor.place(batch_of(lengths, shape, model.vocab_size, shared=shared))

    def update() -> Any:
        metrics = actor.update(batch, LOSS)
        return metrics, actor.state

    return update


# The figures


def measure_update(rounds: int) -> Iterator[Figure]:
    """The update against a chain of matmuls of the sizes it has, forward and backward."""
    rows, tokens, layers = 8, 256, 6
    lengths = [tokens] * 64
    operations = float(training_flops(MODEL, np.array(lengths)).sum())
    chain, operations_of_chain = matmul_chain(MODEL, rows * tokens, layers)
    options = {"rows": rows, "tokens": tokens}
    taken = in_turns({"update": updating(MODEL, lengths, **options), "matmuls": chain}, rounds)
    scale = operations / operations_of_chain
    ideal = Seconds(taken["matmuls"].cpu * scale, taken["matmuls"].clock * scale)
    share = ideal.over(taken["update"])
    yield Figure(
        "update, share of the rate of matmuls",
        f"{operations / 1e9:.0f} GFLOP in {taken['update'].clock:.2f} s; matmuls at "
        f"{operations_of_chain / taken['matmuls'].clock / 1e9:.0f} GFLOP/s on the clock",
        share.cpu,
        share.clock,
        "at least 0.70",
    )


def matmul_chain(
    model: ModelConfig, num_tokens: int, layers: int
) -> tuple[Callable[[], jax.Array], float]:
    """Products of the model's sizes, one after another, with their gradients; and their operations.

    Each is followed by one back to the model's width, of the same size.
    """
    width = model.d_model
    heads, kv_heads = (n * model.head_dim for n in (model.num_heads, model.num_kv_heads))
    sizes = [heads, kv_heads, model.d_ff, model.d_ff] * layers
    keys = iter(jax.random.split(jax.random.key(0), 2 * len(sizes) + 1))
    weights = [
        jax.random.normal(next(keys), shape) * shape[0] ** -0.5
        for size in sizes
        for shape in ((width, size), (size, width))
    ]
    x = jax.random.normal(next(keys), (num_tokens, width))

    @jax.jit
    def gradients(x: jax.Array, weights: list[jax.Array]) -> Any:
        def loss(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
            for weight in weights:
                x = x @ weight
            return jnp.square(x).sum()

        return jax.grad(loss, (0, 1))(x, weights)

    return lambda: gradients(x, weights), 6.0 * num_tokens * sum(w.size for w in weights)


def measure_packing(rounds: int) -> Iterator[Figure]:
    """Rows of several samples against a row for each, as long as the longest."""
    longest = 640
    lengths = ragged_lengths(64, longest, spread=20)
    padded = dataclasses.replace(
        shape_for(lengths, rows=8, tokens=longest), microbatches=len(lengths) // 8
    )
    calls = {
        "packed": updating(MODEL, lengths, rows=8, tokens=longest),
        "padded": padded_update(lengths, padded),
    }
    taken = in_turns(calls, rounds)
    ratio = taken["padded"].over(taken["packed"])
    yield Figure(
        "packed rows over padded ones",
        f"{len(lengths)} samples of {min(lengths)} to {longest} tokens, mean {np.mean(lengths):.0f}: "
        f"{taken['packed'].clock:.2f} and {taken['padded'].clock:.2f} s",
        ratio.cpu,
        ratio.clock,
        "at least 2.5",
    )


def ragged_lengths(num: int, longest: int, *, spread: int) -> list[int]:
    """Log-normal lengths: the longest is `spread` times the shortest, each two standard deviations out."""
    quantiles = (np.arange(num) + 0.5) / num
    normal = statistics.NormalDist()
    standard = np.clip([normal.inv_cdf(q) / 2 for q in quantiles], -1, 1)
    logs = math.log(longest) - (1 - standard) / 2 * math.log(spread)
    lengths = np.exp(logs).round().astype(int)
    lengths[[0, -1]] = longest // spread, longest
    return np.random.default_rng(0).permutation(lengths).tolist()


def padded_update(lengths: Sequence[int], shape: PackedShape) -> Callable[[], Any]:
    """An update whose rows hold one sample each: to the packer, all are as long as a row."""
    batch = batch_of([shape.tokens] * len(lengths), shape, MODEL.vocab_size)
    # One sample a row, so its sequence's number says which length it has.
    length = np.array([*lengths, 0])[batch.sequence]
    live = batch.positions < length
    batch = batch.replace(
        segment_ids=np.where(live, batch.segment_ids, 0),
        sequence=np.where(live, batch.sequence, -1),
        loss_mask=np.where(live, batch.positions >= length // 8, False).astype(np.float32),
    )
    actor = actor_of(MODEL, shape)
    actor.init()
    placed = actor.place(batch)
    return lambda: (actor.update(placed, LOSS), actor.state)


def measure_memory(rounds: int) -> Iterator[Figure]:
    """What the compiler says the update takes, all arguments counted, against the logits of all tokens."""
    del rounds
    tokens, vocab_size = 16_384, 151_936
    model = ModelConfig(
        vocab_size=vocab_size,
        num_layers=2,
        d_model=64,
        d_ff=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )
    memory = compiled_update(model, PackedShape(1, 1, 1, tokens), remat="full").memory_analysis()
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    logits = 4 * tokens * vocab_size
    yield Figure(
        "peak of the update over all logits",
        f"{peak / 1e9:.2f} GB, of which {memory.argument_size_in_bytes / 1e9:.2f} weights and moments; "
        f"{tokens:,} x {vocab_size:,} float32 logits {logits / 1e9:.2f} GB, once",
        peak / logits,
        peak / logits,
        "below 0.15",
    )


def compiled_update(model: ModelConfig, shape: PackedShape, **train: Any) -> Any:
    """The update's program, of shapes alone."""
    actor = actor_of(model, shape, **train)
    update = actor.update_program((LOSS,))
    batches = (abstract_batch(actor, shape),)
    return update.lower(actor.abstract_state(), batches, None, actor.schedule).compile()


def measure_compiling(rounds: int) -> Iterator[Figure]:
    """Deep against shallow, from nothing: no program or trace is kept from one to the next."""
    shape = PackedShape(2, 4, 4, 256)

    def compiling(num_layers: int) -> Callable[[], Any]:
        model = dataclasses.replace(MODEL, num_layers=num_layers)

        def once() -> None:
            jax.clear_caches()
            compiled_update(model, shape, remat="full")

        return once

    taken = in_turns({"4": compiling(4), "64": compiling(64)}, min(rounds, 2))
    ratio = taken["64"].over(taken["4"])
    yield Figure(
        "compiling 64 layers over 4",
        f"{taken['64'].clock:.1f} and {taken['4'].clock:.1f} s on the clock",
        ratio.cpu,
        ratio.clock,
        "at most 1.3",
    )


def measure_prompts(rounds: int) -> Iterator[Figure]:
    """Tokens a second of 4 prompts with 8 answers each, the prompt once a row and with each answer."""
    for prompt, answer in ((64, 448), (256, 256), (448, 64)):
        lengths = [prompt + answer] * 32
        # Rows with room for a prompt and several answers.
        options = {"rows": 2, "tokens": 2048}
        calls = {
            name: updating(MODEL, lengths, **options, shared=shared)
            for name, shared in (("with each answer", 0), ("once a row", prompt - 1))
        }
        taken = in_turns(calls, rounds)
        first = next(iter(taken.values()))
        for name, seconds in taken.items():
            ratio = first.over(seconds)
            yield Figure(
                f"prompt : answer {prompt} : {answer}, {name}",
                f"{sum(lengths) / seconds.clock:,.0f} tokens/s on the clock",
                ratio.cpu,
                ratio.clock,
                "",
            )


def measure_unrolling(rounds: int) -> Iterator[Figure]:
    """An update of SmolLM2-135M, its 30 layers scanned and unrolled; and what either takes to compile."""
    model = model_shapes("smollm2-135m")
    calls, compiling = {}, {}
    for name, layers in (("scanned", 1), ("unrolled", model.num_layers)):
        with mock.patch.object(packed_model, "layers_per_iteration", lambda *_, n=layers: n):
            calls[name] = updating(model, [50] * 32, rows=2, tokens=400)
        compiling[name] = timed(calls[name])
    taken = in_turns(calls, rounds)
    for what, of in (("an update", taken), ("compiling it", compiling)):
        ratio = of["scanned"].over(of["unrolled"])
        yield Figure(
            f"30 layers of 135M scanned over unrolled, {what}",
            f"{of['scanned'].cpu:.1f} and {of['unrolled'].cpu:.1f} s of processor time",
            ratio.cpu,
            ratio.clock,
            "",
        )


FIGURES: dict[str, Callable[[int], Iterator[Figure]]] = {
    "update": measure_update,
    "packing": measure_packing,
    "memory": measure_memory,
    "compiling": measure_compiling,
    "prompts": measure_prompts,
    "unrolling": measure_unrolling,
}


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Programs are compiled anew, whatever the cache on disk has."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def main() -> None:
    """Prints a table, a row a figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    table = Table(title="the learning step")
    for column in ("figure", "of processor time", "on the clock", "wanted", "from"):
        table.add_column(column, justify="right" if column.startswith("o") else "left")
    start = time.perf_counter()
    with nothing_kept():
        for name in args.only:
            for figure in FIGURES[name](args.rounds):
                ratios = (f"{figure.cpu:.3f}", f"{figure.clock:.3f}")
                table.add_row(figure.name, *ratios, figure.wanted, figure.details)
                print(figure.name, *ratios, figure.wanted, figure.details, sep=" | ", flush=True)
    Console().print(table)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
