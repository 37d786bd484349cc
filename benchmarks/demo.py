"""The demo's promises, measured: minutes to the first DAPO step and to the end, accuracy, entropy, by seed.

    python benchmarks/demo.py --seeds 0 1 2 --record benchmarks/results/2026-11-21-demo.md \
        --figure docs/images/demo.svg

Each seed is one run of `launch/train.py --config configs/dapo_tiny.py` in a process of its own, timed from
outside. Run it on a quiet machine; with --record the table is written to a file.
"""

import argparse
import datetime
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
CONFIG = "configs/dapo_tiny.py"
ACCURACY = "val-core/chain_sum/acc/mean@8"


def run_seed(seed: int, output: str) -> dict[str, float]:
    """One run from nothing to its report; figures by name."""
    command = [sys.executable, "launch/train.py", "--config", CONFIG]
    command += [f"--config.seed={seed}", f"--config.run.output={output}"]
    folder = pathlib.Path(output) / "dapo_tiny" / f"seed{seed}"
    if folder.exists():
        raise SystemExit(f"{folder} exists; a timed run starts from nothing: remove it")
    start_s, start_unix_s = time.perf_counter(), time.time()
    subprocess.run(command, cwd=ROOT, check=True)
    minutes = (time.perf_counter() - start_s) / 60
    rows = read_metrics(ROOT / folder / "rl" / "metrics.jsonl")
    steps = [row for row in rows if row["step"] > 0]
    accuracy = [row[ACCURACY] for row in rows if ACCURACY in row]
    return {
        "minutes to first DAPO step": (steps[0]["time_s"] - start_unix_s) / 60,
        "minutes in all": minutes,
        "accuracy before": accuracy[0],
        "accuracy after": accuracy[-1],
        "points gained": 100 * (accuracy[-1] - accuracy[0]),
        "entropy, first step": steps[0]["actor/entropy"],
        "entropy, mean of last 10": sum(r["actor/entropy"] for r in steps[-10:]) / 10,
        "response tokens, first step": steps[0]["response_length/mean"],
        "response tokens, last step": steps[-1]["response_length/mean"],
        "median step, seconds": sorted(r["timing_s/step"] for r in steps)[len(steps) // 2],
    }


def draw(folders: dict[int, pathlib.Path], path: pathlib.Path) -> None:
    """Held-out accuracy, response length and entropy over DAPO steps, a line per seed."""
    panels = (
        (ACCURACY, "held-out accuracy, avg@8", 0.0),
        ("response_length/mean", "response length, tokens", 0.0),
        ("actor/entropy", "entropy, nats per token", 0.0),
    )
    matplotlib.rcParams["svg.hashsalt"] = "jaxrl"
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3), layout="constrained")
    for axis, (key, title, floor) in zip(axes, panels, strict=True):
        for seed, folder in folders.items():
            rows = [row for row in read_metrics(folder / "rl" / "metrics.jsonl") if key in row]
            axis.plot([r["step"] for r in rows], [r[key] for r in rows], label=f"seed {seed}")
        axis.set(title=title, xlabel="DAPO step", ylim=(floor, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", default="runs/benchmark")
    parser.add_argument("--record", help="Markdown file to write the table to")
    parser.add_argument("--figure", help="SVG file to draw the curves to")
    args = parser.parse_args()
    matplotlib.use("svg")
    results = {seed: run_seed(seed, args.output) for seed in args.seeds}
    text = table(results)
    print(text)
    if args.figure:
        folders = {s: ROOT / args.output / "dapo_tiny" / f"seed{s}" for s in args.seeds}
        draw(folders, pathlib.Path(args.figure))
    if args.record:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        header = (
            f"# The demo, {datetime.date.today()}\n\n{os.cpu_count()} cores ({platform.machine()}), "
            f"Python {platform.python_version()}, commit {commit}\n\n"
            f"    python benchmarks/demo.py --seeds {' '.join(map(str, args.seeds))}\n\n"
        )
        pathlib.Path(args.record).write_text(header + text + "\n")


if __name__ == "__main__":
    main()
