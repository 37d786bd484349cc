"""How much faster speculation samples, over all tokens and over the last tenth of a batch.

    python benchmarks/speculation.py [--rounds 3] [--drafted 4] [--task copy|table|story] [--tokens 500]
                                     [--temperature 0.5] [--dtype float32|bfloat16]

    copy     "Repeat this list ..."                      answers repeat the prompt
    table    "Write the multiplication table of 7 ..."   answers repeat themselves
    story    "Write a short story about a lighthouse"    answers do not

SmolLM2-135M-Instruct (`jaxrl fetch smollm2-135m-instruct`), 2 prompts with 8 answers each. Three
systems take turns in each round, whose noise is its own: plain decoding; speculation, which drafts from a
sample's own text and from answers to the same prompt that have ended; and speculation that also has the
answers of an earlier call. Each round runs once before, which compiles. The ratios are medians over rounds of
plain seconds over seconds, in wall time and in processor time of the process. The last tenth begins when nine
tenths of the tokens of the batch are decoded. "Equal" counts samples that are those of plain decoding, and
the share of tokens before the first that is another one.
"""

import argparse
import os
import statistics
import time
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.hub.smollm2 import SMOLLM2
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.weight_loading import load_params
from jaxrl.models.shapes import model_shapes
from jaxrl.rollout.decode_loop import DecodeLoop
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.sample_task import SampleTask, StartSequence
from jaxrl.rollout.samples import Sample
from jaxrl.rollout.settings import EngineConfig
from jaxrl.rollout.slots import DrawSettings
from jaxrl.rollout.speculation import AnswerTexts
from jaxrl.rollout.stop_strings import StopSearch

_LISTS = [
    "\n".join(f"{i}. {name} sold {i * n % 90 + 10} boxes in {town}." for i in range(1, 16))
    for n, name, town in ((37, "Anna", "Rome"), (53, "Ben", "Oslo"))
]
TASKS = {
    "copy": [f"Repeat this list word for word:\n{text}" for text in _LISTS],
    "table": [
        f"Write the multiplication table of {n}, from {n} x 1 to {n} x 30, one line each."
        for n in (7, 12)
    ],
    "story": [f"Write a short story about {x}." for x in ("a lighthouse", "two foxes")],
}
SAMPLES = 8
SYSTEMS = ("plain", "speculation", "speculation, earlier answers")


class Run(NamedTuple):
    """Seconds at the end of each dispatch and tokens until then, from the start; the samples."""

    wall_s: np.ndarray
    cpu_s: np.ndarray
    tokens: np.ndarray
    answers: list[list[int]]
    metrics: dict[str, float]

    def seconds(self, kind, since=0.0):
        """Seconds after this share of the tokens."""
        times = getattr(self, kind)
        return times[-1] - np.interp(since * self.tokens[-1], self.tokens, times)


class Bench:
    """One model, and an engine for each number of drafted tokens."""

    def __init__(self, args):
        folder = SMOLLM2.folder
        self.model, self.args = model_shapes("smollm2-135m"), args
        self.tokenizer = load_tokenizer(folder)
        self.prompts = [
            self.tokenizer.encode_chat([{"role": "user", "content": text}])
            for text in TASKS[args.task]
        ]
        mesh = build_mesh(ParallelLayout.from_config(LayoutConfig()), jax.devices()[:1])
        graph, shapes, axes = decoder_graph(self.model)
        where = shardings(axes, shapes, GENERATE_RULES, mesh)
        params = load_params(folder, self.model, where)
        self.params = jax.tree.map(lambda weight: weight.astype(args.dtype), params)
        self.engines = {
            k: Engine(self.model, graph, mesh, self.config(k)) for k in (0, args.drafted)
        }

    def config(self, drafted):
        return EngineConfig(
            slots=len(self.prompts) * SAMPLES,
            smallest_bucket=4,
            prefill_prompts=len(self.prompts),
            max_prompt_tokens=max(map(len, self.prompts)),
            max_response_tokens=self.args.tokens,
            stop_ids=tuple(self.tokenizer.stop_ids),
            speculate=drafted,
            dtype=self.args.dtype,
        )

    def run(self, drafted, seed, texts=None):
        engine = self.engines[drafted]
        loop = DecodeLoop(
            engine, self.params, StopSearch(self.tokenizer.decode), streams=True, texts=texts
        )
        tasks = [
            SampleTask(
                Sample(n, i, 0),
                start,
                n,
                DrawSettings(seed, 0, self.args.temperature),
                self.args.tokens,
            )
            for n, start in enumerate(map(StartSequence, self.prompts))
            for i in range(SAMPLES)
        ]
        loop.add(tasks)
        clocks = [(time.perf_counter(), time.process_time(), 0)]
        while loop.unfinished:
            new = sum(len(result.tokens) for result in loop.dispatch())
            clocks.append((time.perf_counter(), time.process_time(), clocks[-1][2] + new))
        wall, cpu, tokens = np.array(clocks, float).T
        answers = [task.sample.tokens.tolist() for task in tasks]
        return Run(wall - wall[0], cpu - cpu[0], tokens, answers, loop.metrics())

    def run_system(self, system, seed):
        texts = AnswerTexts(self.args.tokens)
        if system == "plain":
            return self.run(0, seed)
        if "earlier" in system:
            for n, answers in enumerate(self.earlier):
                for answer in answers:
                    texts.add(n, np.array(answer, np.int32))
        return self.run(self.args.drafted, seed, texts)

    def compare(self):
        """The runs of each system, round by round."""
        answers = self.run(0, 1000).answers
        self.earlier = [answers[:SAMPLES], answers[SAMPLES:]]
        runs = {system: [] for system in SYSTEMS}
        for seed in range(self.args.rounds):
            for warm_up in (True, False):
                for system in SYSTEMS[seed % 3 :] + SYSTEMS[: seed % 3]:
                    run = self.run_system(system, seed)
                    if not warm_up:
                        runs[system].append(run)
        return runs


def ratio(runs, system, kind, since):
    pairs = zip(runs["plain"], runs[system], strict=True)
    return statistics.median(a.seconds(kind, since) / b.seconds(kind, since) for a, b in pairs)


def num_equal(answer, plain):
    """The number of tokens before the first difference."""
    shared = min(len(answer), len(plain))
    differs = np.flatnonzero(answer[:shared] != plain[:shared])
    return int(differs[0]) if len(differs) else shared


def show(args, runs):
    lengths = [len(answer) for run in runs["plain"] for answer in run.answers]
    table = Table(title=f"{args.task}: answers of {np.quantile(lengths, (0.1, 0.5, 0.9))} tokens")
    for column in ("system", "tokens/s", "all, wall", "all, CPU", "tail, wall", "tail, CPU"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for column in ("tokens a round", "in rounds", "equal samples", "equal tokens"):
        table.add_column(column, justify="right")
    for system, of_system in runs.items():
        rates = [run.tokens[-1] / run.wall_s[-1] for run in of_system]
        ratios = [
            ratio(runs, system, kind, since) for since in (0.0, 0.9) for kind in ("wall_s", "cpu_s")
        ]
        pairs = [
            (np.array(answer), np.array(plain))
            for run, of_plain in zip(of_system, runs["plain"], strict=True)
            for answer, plain in zip(run.answers, of_plain.answers, strict=True)
        ]
        equal = sum(np.array_equal(*pair) for pair in pairs)
        same = sum(num_equal(*pair) for pair in pairs) / sum(len(plain) for _, plain in pairs)
        kept = [run.metrics.get("rollout/tokens_per_round", 0.0) for run in of_system]
        fraction = [run.metrics["rollout/speculated_fraction"] for run in of_system]
        table.add_row(
            system,
            f"{statistics.median(rates):,.0f}",
            *(f"{value:.2f}" for value in ratios),
            f"{statistics.mean(kept):.2f}",
            f"{statistics.mean(fraction):.0%}",
            f"{equal} of {len(pairs)}",
            f"{same:.1%}",
        )
    console = Console(width=140)
    console.print(table)
    console.print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafted", type=int, default=4)
    parser.add_argument("--task", choices=TASKS, default="copy")
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    show(args, Bench(args).compare())


if __name__ == "__main__":
    main()
