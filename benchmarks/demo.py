"""The demos' promises, measured: minutes, processor time, memory, accuracy and entropy, by seed.

    python benchmarks/demo.py --seeds 0 1 2 --record benchmarks/results/2026-11-21-demo.md \
        --figure docs/images/demo.svg
    python benchmarks/demo.py --recipe grpo_smollm2 --seeds 0 1 2 --cores 0,1 \
        --record benchmarks/results/2026-11-23-demo-lm.md --figure docs/images/demo-lm.svg

Each seed is one run of `launch/train.py` in a process of its own, timed from outside. Run it on a quiet
machine; on a busy one processor time is the fair figure. With --record the table is written to a file, and
with --data the drawn curves to a CSV file. A seed that --output holds already is not run again.
"""

import argparse
import csv
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

import matplotlib
import matplotlib.pyplot as plt

from jaxrl.tracking.metrics import read_metrics

ROOT = pathlib.Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Demo:
    """What a recipe's runs are drawn by.

    Attributes:
      accuracy: metric of the evaluation.
      evaluated: its name in the figure.
      step: name of a step.
    """

    accuracy: str
    evaluated: str
    step: str


DEMOS = {
    "dapo_tiny": Demo("val-core/chain_sum/acc/mean@8", "held-out accuracy, avg@8", "DAPO step"),
    "grpo_smollm2": Demo(
        "val-core/word_problems/acc/mean@2", "held-out accuracy, avg@2", "GRPO step"
    ),
}


def run_seed(recipe: str, folder: pathlib.Path, seed: int, output: str, cores: str) -> None:
    """Runs a seed from nothing to its report, and writes what it took into resources.json."""
    if (folder / "resources.json").exists():
        return
    if folder.exists():
        raise SystemExit(f"{folder} exists; a timed run starts from nothing: remove it")
    command = ["taskset", "-c", cores] if cores else []
    command += [sys.executable, "launch/train.py", "--config", f"configs/{recipe}.py"]
    command += [f"--config.seed={seed}", f"--config.run.output={output}"]
    begun_unix_s = time.time()
    process = subprocess.Popen(command, cwd=ROOT)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"seed {seed} failed with status {os.waitstatus_to_exitcode(status)}")
    resources = {
        "begun_unix_s": begun_unix_s,
        "wall_s": time.time() - begun_unix_s,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_bytes": used.ru_maxrss * 1024,
    }
    (folder / "resources.json").write_text(json.dumps(resources) + "\n")


def figures(demo: Demo, folder: pathlib.Path) -> dict[str, float]:
    """Figures of a finished run, by name."""
    used = json.loads((folder / "resources.json").read_text())
    rows = read_metrics(folder / "rl" / "metrics.jsonl")
    steps = [row for row in rows if row["step"] > 0]
    evaluated = [row for row in rows if demo.accuracy in row]
    before, after = evaluated[0][demo.accuracy], evaluated[-1][demo.accuracy]
    stderr = demo.accuracy.replace("val-core", "val-aux") + "/stderr"
    return {
        "minutes to the end of the first step": (steps[0]["time_s"] - used["begun_unix_s"]) / 60,
        "minutes in all": used["wall_s"] / 60,
        "processor minutes in all": used["cpu_s"] / 60,
        "peak memory, GB": used["peak_bytes"] / 1e9,
        "accuracy before": before,
        "accuracy after": after,
        "its standard error": evaluated[-1][stderr],
        "points gained": 100 * (after - before),
        "entropy, first step": steps[0]["actor/entropy"],
        "entropy, mean of last 10": sum(r["actor/entropy"] for r in steps[-10:]) / 10,
        "response tokens, first step": steps[0]["response_length/mean"],
        "response tokens, last step": steps[-1]["response_length/mean"],
        "median step, seconds": sorted(r["timing_s/step"] for r in steps)[len(steps) // 2],
    }


def panels_of(demo: Demo) -> dict[str, str]:
    """Metrics that are drawn, with their titles."""
    return {
        demo.accuracy: demo.evaluated,
        "critic/score/mean": "training score, -1 to 1",
        "response_length/mean": "response length, tokens",
        "actor/entropy": "entropy, nats per token",
    }


def draw(demo: Demo, folders: dict[int, pathlib.Path], path: pathlib.Path) -> None:
    """Draws accuracy, score, response length and entropy over steps, a line per seed."""
    matplotlib.rcParams["svg.hashsalt"] = "jaxrl"
    panels = panels_of(demo)
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 3), layout="constrained")
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for seed, folder in folders.items():
            rows = [row for row in read_metrics(folder / "rl" / "metrics.jsonl") if key in row]
            axis.plot([r["step"] for r in rows], [r[key] for r in rows], label=f"seed {seed}")
        floor = -1.0 if key == "critic/score/mean" else 0.0
        axis.set(title=title, xlabel=demo.step, ylim=(floor, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def write_data(demo: Demo, folders: dict[int, pathlib.Path], path: pathlib.Path) -> None:
    """Writes the drawn curves as CSV: a row per seed and step, empty where a metric was not measured."""
    columns = list(panels_of(demo))
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["seed", "step", *columns])
        for seed, folder in folders.items():
            for row in read_metrics(folder / "rl" / "metrics.jsonl"):
                values = [f"{row[key]:.4g}" if key in row else "" for key in columns]
                writer.writerow([seed, int(row["step"]), *values])


def table(results: dict[int, dict[str, float]]) -> str:
    """Markdown, a row per figure and a column per seed."""
    seeds = list(results)
    lines = [
        "| | " + " | ".join(f"seed {s}" for s in seeds) + " |",
        "|---" * (len(seeds) + 1) + "|",
    ]
    for name in results[seeds[0]]:
        lines.append(f"| {name} | " + " | ".join(f"{results[s][name]:.3g}" for s in seeds) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=DEMOS, default="dapo_tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", default="runs/benchmark")
    parser.add_argument("--cores", default="", help="processor cores of a run, such as 0,1")
    parser.add_argument("--record", type=pathlib.Path, help="Markdown file to write the table to")
    parser.add_argument("--figure", type=pathlib.Path, help="SVG file to draw the curves to")
    parser.add_argument("--data", type=pathlib.Path, help="CSV file to write the curves to")
    args = parser.parse_args()
    matplotlib.use("svg")
    demo = DEMOS[args.recipe]
    folders = {s: ROOT / args.output / args.recipe / f"seed{s}" for s in args.seeds}
    for seed, folder in folders.items():
        run_seed(args.recipe, folder, seed, args.output, args.cores)
    text = table({seed: figures(demo, folder) for seed, folder in folders.items()})
    print(text)
    if args.figure:
        draw(demo, folders, args.figure)
    if args.data:
        write_data(demo, folders, args.data)
    if args.record:
        args.record.write_text(_header(args) + text + "\n")


def _header(args: argparse.Namespace) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    seeds = " ".join(map(str, args.seeds))
    cores = f" --cores {args.cores}" if args.cores else ""
    return (
        f"# The demo {args.recipe}, {datetime.date.today()}\n\n{os.cpu_count()} cores "
        f"({platform.machine()}), Python {platform.python_version()}, commit {commit}\n\n"
        f"    python benchmarks/demo.py --recipe {args.recipe} --seeds {seeds}{cores}\n\n"
    )


if __name__ == "__main__":
    main()
