"""The demos' promises, measured, and DAPO's Table 1 in miniature on a task of long answers.

    python benchmarks/demo.py --cores 0,1 --record DATE-demo.md --figure docs/images/demo.svg
    python benchmarks/demo.py --part demo-lm --seeds 0 1 2
    python benchmarks/demo.py --part techniques --seeds 0 1 2 3 4 --figure docs/images/ablations.svg
    python benchmarks/demo.py --part sampling --steps 30

    demo, demo-lm   the two make targets: minutes, processor time, memory, accuracy, entropy, by seed
    techniques      naive GRPO and one technique of DAPO after the other, each row with those before it
    sampling        batches to their end, slots kept full, and free running

Each seed is one run of `launch/train.py` in a process of its own, timed from outside; one that --output holds
already is not run again, so several calls may share the seeds out. Run it on a quiet machine; on a busy one
processor time is the fair figure. All runs of a seed of the last two parts begin with one SFT stage, that of
`long_answers_tiny` or of `dapo_tiny`. Intervals are of 95%, by Student's t over the seeds.
"""

import argparse
import csv
import datetime
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import matplotlib
import matplotlib.pyplot as plt
from scipy.stats import t as student

from jaxrl.tracking.metrics import read_metrics

ROOT = pathlib.Path(__file__).resolve().parents[1]
Rows = list[dict]
Settings = dict[str, object]

# Recipe and metric of its evaluation.
DEMOS = {
    "demo": ("dapo_tiny", "val-core/chain_sum/acc/mean@8"),
    "demo-lm": ("grpo_smollm2", "val-core/word_problems/acc/mean@2"),
}
COMPARED = {
    "techniques": ("long_answers_tiny", "val-core/repeated_sums/acc/mean@4"),
    "sampling": DEMOS["demo"],
}
# Each row keeps what the rows before it set.
TECHNIQUES: dict[str, Settings] = {
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
        "reward.overlong_buffer_tokens": 24,
    },
    "+ token-level loss": {"algorithm.aggregation": "token-mean"},
    "+ dynamic sampling (DAPO)": {"algorithm.dataflow": "dapo"},
}
# What each technique is for, with the factor that a table shows it by.
QUANTITIES = {
    "response_length/clip_ratio": ("cut off, %", 100),
    "actor/entropy": ("entropy, nats", 1),
    "useful_groups": ("useful groups, %", 100),
    "actor/pg_clipfrac_high": ("clipped above, ‰", 1000),
    "actor/pg_clipfrac_low": ("below, ‰", 1000),
}
CORRECTED: Settings = {"algorithm.correction.weights": "token"}
SAMPLING: dict[str, Settings] = {
    "batches to their end": CORRECTED,
    "slots kept full": CORRECTED | {"rollout.max_staleness": 8},
    "free running": CORRECTED
    | {
        "rollout.max_staleness": 2,
        "mesh.simulated_devices": 2,
        "placement": {"learn": {"roles": ("actor",)}, "sample": {"roles": ("rollout",)}},
    },
}


def compared(part: str) -> dict[str, Settings]:
    """The settings of each row of a part that compares."""
    if part == "sampling":
        return SAMPLING
    settings, rows = {}, {}
    for name, changes in TECHNIQUES.items():
        settings = settings | changes
        rows[name] = settings
    return rows


def run(recipe: str, name: str, seed: int, settings: Settings, args) -> pathlib.Path:
    """The folder of a run from nothing to its report; resources.json in it has what it took."""
    folder = ROOT / args.output / name / f"seed{seed}"
    if (folder / "resources.json").exists():
        return folder
    if folder.exists():
        raise SystemExit(f"{folder} exists; a timed run starts from nothing: remove it")
    command = ["taskset", "-c", args.cores] if args.cores else []
    command += [sys.executable, "launch/train.py", "--config", f"configs/{recipe}.py"]
    settings = {"name": name, "seed": seed, "run.output": args.output} | settings
    if args.steps:
        settings["run.num_steps"] = args.steps
    command += [f"--config.{key}={value}" for key, value in settings.items()]
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
    return folder


def rows_of(folder: pathlib.Path) -> Rows:
    """The metrics of a run; `useful_groups` is the share of sampled groups with right and wrong answers."""
    rows = read_metrics(folder / "rl" / "metrics.jsonl")
    for row in rows:
        groups = "training/filter_groups"
        if f"{groups}/all_correct" in row:
            # Dynamic sampling, which trains on useful ones alone.
            row["useful_groups"] = 1 - row[f"{groups}/all_correct"] - row[f"{groups}/all_wrong"]
        elif "train/mixed_groups" in row:
            row["useful_groups"] = row["train/mixed_groups"]
    return rows


def figures(accuracy: str, folder: pathlib.Path) -> dict[str, float]:
    """Figures of a finished run, by name."""
    used = json.loads((folder / "resources.json").read_text())
    rows = rows_of(folder)
    steps = [row for row in rows if row["step"] > 0]
    evaluated = [row for row in rows if accuracy in row]
    before, after = evaluated[0][accuracy], evaluated[-1][accuracy]
    stderr = accuracy.replace("val-core", "val-aux") + "/stderr"
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
        "entropy, mean of last 10": statistics.mean(r["actor/entropy"] for r in steps[-10:]),
        "response tokens, first step": steps[0]["response_length/mean"],
        "response tokens, last step": steps[-1]["response_length/mean"],
        "median step, seconds": sorted(r["timing_s/step"] for r in steps)[len(steps) // 2],
    }


def table_of_seeds(results: dict[int, dict[str, float]]) -> str:
    """Markdown, a row per figure and a column per seed."""
    lines = [f"| | {' | '.join(f'seed {s}' for s in results)} |", "|---" * (len(results) + 1) + "|"]
    for name in next(iter(results.values())):
        lines.append(f"| {name} | {' | '.join(f'{r[name]:.3g}' for r in results.values())} |")
    return "\n".join(lines)


def curve(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric."""
    rows = [row for row in rows if key in row]
    return [row["step"] for row in rows], [row[key] for row in rows]


def table_of_rows(accuracy: str, logs: dict[str, list[Rows]]) -> str:
    """Markdown: a row for each technique, means over seeds and the seeds' own accuracies."""
    lines = [
        "| | held-out accuracy, by seed | mean | mean after 10 steps | entropy, last 10 steps "
        "| response tokens, last 10 | tokens trained on |",
        "|---|---|---|---|---|---|---|",
    ]
    before = [curve(rows, accuracy)[1][0] for rows in next(iter(logs.values()))]
    lines.append(f"| SFT | {_percent(before)} | {100 * statistics.mean(before):.1f} | | | | |")
    for name, seeds in logs.items():
        after = [curve(rows, accuracy)[1][-1] for rows in seeds]
        early = statistics.mean(curve(rows, accuracy)[1][1] for rows in seeds)
        trained = statistics.mean(sum(curve(rows, "perf/total_num_tokens")[1]) for rows in seeds)
        entropy, length = (
            statistics.mean(statistics.mean(curve(rows, key)[1][-10:]) for rows in seeds)
            for key in ("actor/entropy", "response_length/mean")
        )
        lines.append(
            f"| {name} | {_percent(after)} | {100 * statistics.mean(after):.1f} | {100 * early:.1f} "
            f"| {entropy:.3f} | {length:.1f} | {trained:,.0f} |"
        )
    return "\n".join(lines)


def table_of_techniques(accuracy: str, logs: dict[str, list[Rows]]) -> str:
    """Markdown: a row for each technique, with intervals over seeds and what each technique is for."""
    heads = ["", "held-out accuracy, %", "to the row before, points", "by seed"]
    heads += [title for title, _ in QUANTITIES.values()]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    naive = next(iter(logs.values()))
    before = None
    for name, seeds in {"warm start": naive, **logs}.items():
        # The warm start is the first evaluation and the first step, before any update.
        at, over = (0, slice(1)) if before is None else (-1, slice(-10, None))
        after = [100 * curve(rows, accuracy)[1][at] for rows in seeds]
        gained = (
            with_interval([a - b for a, b in zip(after, before, strict=True)]) if before else ""
        )
        cells = [name, with_interval(after), gained, ", ".join(f"{value:.1f}" for value in after)]
        for key, (_, factor) in QUANTITIES.items():
            means = [statistics.mean(curve(rows, key)[1][over]) for rows in seeds]
            cells.append(f"{factor * statistics.mean(means):.3g}")
        lines.append(f"| {' | '.join(cells)} |")
        before = after
    return "\n".join(lines)


def with_interval(values: list[float]) -> str:
    """The mean with half its 95% interval; one value has none."""
    mean, n = statistics.mean(values), len(values)
    if n == 1:
        return f"{mean:.1f}"
    half = student.ppf(0.975, n - 1) * statistics.stdev(values) / math.sqrt(n)
    return f"{mean:.1f} ± {half:.1f}"


def _percent(values: list[float]) -> str:
    return ", ".join(f"{100 * value:.1f}" for value in values)


def panels_of(part: str, accuracy: str) -> dict[str, str]:
    """Metrics that are drawn, with their titles."""
    if part == "techniques":
        return {
            accuracy: "held-out accuracy",
            "response_length/clip_ratio": "share cut off",
            "actor/entropy": "entropy, nats per token",
            "useful_groups": "share of useful groups",
        }
    return {
        accuracy: f"held-out accuracy, avg@{accuracy.rpartition('@')[2]}",
        "critic/score/mean": "training score, -1 to 1",
        "response_length/mean": "response length, tokens",
        "actor/entropy": "entropy, nats per token",
    }


def draw(panels: dict[str, str], logs: dict[str, list[Rows]], path: pathlib.Path) -> None:
    """Draws metrics over steps: a thin line for each seed, a thick one for the mean of a label."""
    matplotlib.rcParams["svg.hashsalt"] = "jaxrl"
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 3.6), layout="constrained")
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for i, (name, seeds) in enumerate(logs.items()):
            curves = [curve(rows, key) for rows in seeds]
            for steps, values in curves:
                axis.plot(steps, values, color=f"C{i}", lw=0.6, alpha=0.25)
            # A step without a useful group has no update, and no entropy.
            values_at = [dict(zip(*c, strict=True)) for c in curves]
            shared = [step for step in curves[0][0] if all(step in at for at in values_at)]
            means = [statistics.mean(at[step] for at in values_at) for step in shared]
            axis.plot(shared, means, color=f"C{i}", lw=1.8, label=name)
        floor = -1.0 if key == "critic/score/mean" else 0.0
        axis.set(title=title, xlabel="step", ylim=(floor, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def write_data(columns: list[str], logs: dict[str, list[Rows]], path: pathlib.Path) -> None:
    """Writes the drawn curves as CSV: a row per run and step, empty where a metric was not measured."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "step", *columns])
        for name, row in ((name, row) for name, seeds in logs.items() for s in seeds for row in s):
            values = [f"{row[key]:.4g}" if key in row else "" for key in columns]
            writer.writerow([name, int(row["step"]), *values])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=(*DEMOS, *COMPARED), default="demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="steps of a run; 0 is the recipe's")
    parser.add_argument("--output", default="runs/benchmark")
    parser.add_argument("--cores", default="", help="processor cores of a run, such as 0,1")
    parser.add_argument("--record", type=pathlib.Path, help="Markdown file to write the table to")
    parser.add_argument("--figure", type=pathlib.Path, help="SVG file to draw the curves to")
    parser.add_argument("--data", type=pathlib.Path, help="CSV file to write the curves to")
    args = parser.parse_args()
    matplotlib.use("svg")
    recipe, accuracy = (DEMOS | COMPARED)[args.part]
    panels = panels_of(args.part, accuracy)
    if args.part in DEMOS:
        folders = {seed: run(recipe, recipe, seed, {}, args) for seed in args.seeds}
        logs = {f"seed {seed}": [rows_of(folder)] for seed, folder in folders.items()}
        text = table_of_seeds({seed: figures(accuracy, f) for seed, f in folders.items()})
    else:
        logs = {
            name: [
                rows_of(run(recipe, f"{args.part}{i}", seed, {"sft.run": recipe} | row, args))
                for seed in args.seeds
            ]
            for i, (name, row) in enumerate(compared(args.part).items())
        }
        table = table_of_techniques if args.part == "techniques" else table_of_rows
        text = table(accuracy, logs)
    print(text)
    if args.figure:
        draw(panels, logs, args.figure)
    if args.data:
        write_data(list(panels), logs, args.data)
    if args.record:
        args.record.write_text(_header(args) + text + "\n")


def _header(args: argparse.Namespace) -> str:
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True)
    options = f"--part {args.part} --seeds {' '.join(map(str, args.seeds))}"
    options += f" --steps {args.steps}" if args.steps else ""
    options += f" --cores {args.cores}" if args.cores else ""
    return (
        f"# Part {args.part} of the demo, {datetime.date.today()}\n\n{os.cpu_count()} cores "
        f"({platform.machine()}), Python {platform.python_version()}, commit {commit.strip()}\n\n"
        f"    python benchmarks/demo.py {options}\n\n"
    )


if __name__ == "__main__":
    main()
