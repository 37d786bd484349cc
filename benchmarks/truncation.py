"""What top-p costs when sampling from a vocabulary of 151,936, through the engine.

    python benchmarks/truncation.py [--rounds 7] [--top_p 0.7] [--renormalized]

A small decoder with a large vocabulary, so that what happens per token of the vocabulary is most of a step,
which is the worst case for a limit. The same compiled programs sample with and without the limit, in turns
in one process; medians of the rounds count. Logits are normal with each of some standard deviations: random
weights make nearly flat ones, where half of the vocabulary is inside the limit; trained models are peaked,
which scaled embeddings stand for.

With `--renormalized` log-probabilities are those among the kept tokens, as in training.

CPU time is the figure to go by where others use the machine.
"""

import argparse
import functools
import statistics
import time

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.models.decoder import decoder_graph, init_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.sampling import truncation_of
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import Prompts

MODEL = ModelConfig(
    vocab_size=151_936,
    num_layers=2,
    d_model=64,
    d_ff=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_embeddings=True,
)
SLOTS, PROMPT, RESPONSE = 16, 16, 32
# Standard deviation of the logits, by what it resembles.
SPREADS = {
    "nearly flat": 0.1,
    "random weights": 1.0,
    "in between": 2.5,
    "peaked": 4.0,
    "one token": 30.0,
}


def backend_of() -> OfflineBackend:
    mesh = build_mesh(ParallelLayout.from_config(LayoutConfig()), jax.devices()[:1])
    config = EngineConfig(
        slots=SLOTS,
        smallest_bucket=SLOTS,
        prefill_prompts=SLOTS,
        max_prompt_tokens=PROMPT,
        max_response_tokens=RESPONSE,
        tokens_per_dispatch=RESPONSE,
        stop_ids=(),
        unroll=MODEL.num_layers,
    )
    return OfflineBackend(
        Engine(MODEL, decoder_graph(MODEL)[0], mesh, config), functools.partial(map, lambda _: "")
    )


def params_of(spread: float):
    """Random weights whose logits have this standard deviation; the last hidden state is normed."""
    params = init_params(MODEL, jax.random.key(0))
    table = params["embedding"]
    scale = spread / (float(np.std(table)) * MODEL.d_model**0.5)
    params["embedding"] = table * scale
    return params


def prompts() -> Prompts:
    rows = np.random.default_rng(0).integers(0, MODEL.vocab_size, (SLOTS, PROMPT))
    blank = ("",) * SLOTS
    return Prompts(np.arange(SLOTS), tuple(rows.astype(np.int32)), blank, blank, blank)


def options(top_p: float, step: int, renormalized: bool) -> SamplingOptions:
    limit = truncation_of(top_k=0, top_p=top_p, min_p=0.0, renormalized=renormalized)
    return SamplingOptions(num_samples=1, seed=0, step=step, temperature=1.0, truncation=limit)


def seconds(
    backend: OfflineBackend, top_p: float, step: int, renormalized: bool
) -> tuple[float, float]:
    """(wall, CPU) of one batch, per token of all slots."""
    wall, cpu = time.perf_counter(), time.process_time()
    backend.generate(prompts(), options(top_p, step, renormalized))
    return (time.perf_counter() - wall) / RESPONSE, (time.process_time() - cpu) / RESPONSE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--top_p", type=float, default=0.7)
    parser.add_argument("--renormalized", action="store_true")
    args = parser.parse_args()
    table = Table(title=f"{SLOTS} slots, vocabulary {MODEL.vocab_size:,}, float32: ms per step")
    for column in (
        "logits",
        "CPU",
        f"CPU, top-p {args.top_p}",
        "ratio",
        "wall",
        f"wall, top-p {args.top_p}",
        "ratio",
    ):
        table.add_column(column, justify="left" if column == "logits" else "right")
    backend = backend_of()
    for name, spread in SPREADS.items():
        backend.load(params_of(spread))
        # Each of the two compiles, or at least allocates, on its first call.
        measured = [
            [seconds(backend, p, step, args.renormalized) for p in (1.0, args.top_p)]
            for step in range(args.rounds + 1)
        ][1:]
        wall, cpu = (
            [[round[p][kind] for round in measured] for p in range(2)] for kind in range(2)
        )
        cells = []
        for kind in (cpu, wall):
            without, limited = (1e3 * statistics.median(times) for times in kind)
            cells += [f"{without:.1f}", f"{limited:.1f}", f"{limited / without:.2f}"]
        table.add_row(f"{name} ({spread})", *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
