"""DAPO's Table 1 in miniature: naive GRPO and one technique after the other, on the demo's task.

    python benchmarks/ablations.py --seeds 0 1 2 --record benchmarks/results/2026-11-21-ablations.md \
        --figure docs/images/ablations.svg
    python benchmarks/ablations.py --table sampling

The second table compares ways to sample: batches to their end, slots kept full, and free running. All runs
of a seed begin with the demo's SFT stage of that seed. A run that is there already is not repeated.
"""

import argparse
import datetime
import os
import pathlib
import platform
import statistics
import subprocess
import sys

import matplotlib
import matplotlib.pyplot as plt

from jaxrl.tracking.metrics import read_metrics

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIG = "configs/dapo_tiny.py"
ACCURACY = "val-core/chain_sum/acc/mean@8"
TOKENS = "perf/total_num_tokens"
# Each row keeps what the rows before it set.
TECHNIQUES: dict[str, dict[str, object]] = {
    "naive GRPO": {
        "algorithm.dataflow": "grpo",
        "algorithm.aggregation": "seq-mean-token-mean",
        "algorithm.loss_options.clip_high": 0.2,
        "reward.overlong_buffer_tokens": 0,
    },
    "+ overlong filtering": {"reward.mask_truncated": True},
    "+ clip-higher": {"algorithm.loss_options.clip_high": 0.28},
    # It takes the place of filtering, as in the paper's final recipe.
    "+ soft overlong punishment": {
        "reward.mask_truncated": False,
        "reward.overlong_buffer_tokens": 16,
    },
    "+ token-level loss": {"algorithm.aggregation": "token-mean"},
    "+ dynamic sampling (DAPO)": {"algorithm.dataflow": "dapo"},
}
# Each row adds to `CORRECTED`.
CORRECTED: dict[str, object] = {"algorithm.correction.weights": "token"}
SAMPLING: dict[str, dict[str, object]] = {
    "batches to their end": {},
    "slots kept full": {"rollout.max_staleness": 8},
    "free running": {
        "rollout.max_staleness": 2,
        "mesh.simulated_devices": 2,
        "placement": {"learn": {"roles": ("actor",)}, "sample": {"roles": ("rollout",)}},
    },
}


def settings_of(table: str) -> dict[str, dict[str, object]]:
    """The settings of each row of a table."""
    if table == "sampling":
        return {name: CORRECTED | row for name, row in SAMPLING.items()}
    settings, rows = {}, {}
    for name, changes in TECHNIQUES.items():
        settings = settings | changes
        rows[name] = settings
    return rows


def run(name: str, settings: dict[str, object], seed: int, args: argparse.Namespace) -> list[dict]:
    """The log of one run, which is made if it is not there."""
    folder = pathlib.Path(args.output) / name / f"seed{seed}"
    command = [sys.executable, "launch/train.py", "--config", CONFIG, f"--config.seed={seed}"]
    command += [f"--config.name={name}", "--config.sft.run=dapo_tiny"]
    command += [f"--config.run.output={args.output}", f"--config.run.num_steps={args.steps}"]
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    subprocess.run(command, cwd=ROOT, check=True)
    return read_metrics(ROOT / folder / "rl" / "metrics.jsonl")


def curve(rows: list[dict], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric."""
    rows = [row for row in rows if key in row]
    return [row["step"] for row in rows], [row[key] for row in rows]


def table(logs: dict[str, list[list[dict]]]) -> str:
    """Markdown: a row for each technique, means over seeds and the seeds' own accuracies."""
    lines = [
        "| | held-out accuracy, by seed | mean | mean after 10 steps | entropy, last 10 steps "
        "| response tokens, last 10 | tokens trained on |",
        "|---|---|---|---|---|---|---|",
    ]
    before = [curve(rows, ACCURACY)[1][0] for rows in next(iter(logs.values()))]
    lines.append(f"| SFT | {_percent(before)} | {100 * statistics.mean(before):.1f} | | | | |")
    for name, seeds in logs.items():
        after = [curve(rows, ACCURACY)[1][-1] for rows in seeds]
        early = statistics.mean(curve(rows, ACCURACY)[1][1] for rows in seeds)
        trained = statistics.mean(sum(curve(rows, TOKENS)[1]) for rows in seeds)
        entropy, length = (
            statistics.mean(statistics.mean(curve(rows, key)[1][-10:]) for rows in seeds)
            for key in ("actor/entropy", "response_length/mean")
        )
        lines.append(
            f"| {name} | {_percent(after)} | {100 * statistics.mean(after):.1f} | {100 * early:.1f} "
            f"| {entropy:.3f} | {length:.1f} | {trained:,.0f} |"
        )
    return "\n".join(lines)


def _percent(values: list[float]) -> str:
    return ", ".join(f"{100 * value:.1f}" for value in values)


def draw(logs: dict[str, list[list[dict]]], path: pathlib.Path) -> None:
    """Accuracy, entropy and length over steps: a thin line for each seed, a thick one for their mean."""
    panels = {
        ACCURACY: "held-out accuracy, avg@8",
        "actor/entropy": "entropy, nats per token",
        "response_length/mean": "response length, tokens",
    }
    matplotlib.rcParams["svg.hashsalt"] = "jaxrl"
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 3.6), layout="constrained")
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for i, (name, seeds) in enumerate(logs.items()):
            curves = [curve(rows, key) for rows in seeds]
            for steps, values in curves:
                axis.plot(steps, values, color=f"C{i}", lw=0.6, alpha=0.25)
            means = [
                statistics.mean(values) for values in zip(*(c[1] for c in curves), strict=True)
            ]
            axis.plot(curves[0][0], means, color=f"C{i}", lw=1.8, label=name)
        axis.set(title=title, xlabel="step", ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=("techniques", "sampling"), default="techniques")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default="runs")
    parser.add_argument("--record", help="Markdown file to write the table to")
    parser.add_argument("--figure", help="SVG file to draw the curves to")
    args = parser.parse_args()
    matplotlib.use("svg")
    kind = "ablation" if args.table == "techniques" else args.table
    rows = enumerate(settings_of(args.table).items())
    logs = {
        name: [run(f"{kind}{i}", settings, seed, args) for seed in args.seeds]
        for i, (name, settings) in rows
    }
    text = table(logs)
    print(text)
    if args.figure:
        draw(logs, pathlib.Path(args.figure))
    if args.record:
        seeds = " ".join(map(str, args.seeds))
        header = (
            f"# {args.table.capitalize()} on the demo's task, {datetime.date.today()}\n\n"
            f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}\n\n"
            f"    python benchmarks/ablations.py --table {args.table} --seeds {seeds} "
            f"--steps {args.steps}\n\n"
        )
        pathlib.Path(args.record).write_text(header + text + "\n")


if __name__ == "__main__":
    main()
