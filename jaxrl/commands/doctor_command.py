"""Looks whether this machine is ready: devices, packages, caches, and one tiny training step.

    jaxrl doctor [--no_step]

Prints a line for each thing, and exits with status 1 if one of them fails.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import jax

from jaxrl.flags import command_parser
from jaxrl.mesh.compilation_cache import cache_folder
from jaxrl.user_code import bundled_recipes

_STEP_LIMIT_S = 600
# One step of the smallest recipe, from random weights.
_TINY = {
    "sft.num_steps": 0,
    "sft.run": "",
    "run.num_steps": 1,
    "run.save_every": 1,
    "evaluation.every": 1,
    "evaluation.num_samples": 1,
    "rollout.num_prompts": 2,
    "rollout.generation_prompts": 2,
    "rollout.num_samples": 4,
    "data.train.size": 16,
    "data.evaluation.size": 2,
}


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    program, *arguments = argv
    parser = command_parser(program, __doc__)
    parser.add_argument("--no_step", action="store_true", help="leave the training step out")
    args = parser.parse_args(arguments)
    good = True
    for fine, line in _findings(step=not args.no_step):
        good = good and fine
        print(f"{'ok  ' if fine else 'FAIL'}  {line}", flush=True)
    return 0 if good else 1


def _findings(*, step: bool) -> Iterator[tuple[bool, str]]:
    yield True, f"Python {platform.python_version()} on {platform.platform()}"
    for name in ("jaxrl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint"):
        yield _package(name)
    yield from _extras()
    yield _folder("compiled programs", cache_folder())
    yield _folder("Hugging Face cache", _hugging_face_home())
    if step:
        yield _tiny_step()
    # Last: a process that has looked at an accelerator keeps its memory from the one that trains.
    yield _devices()


def _package(name: str) -> tuple[bool, str]:
    try:
        return True, f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return False, f"{name} is not installed; run pip install {name}"


def _extras() -> Iterator[tuple[bool, str]]:
    """Which extras are complete. None is an error: each is for those who use it.

    `jax[tpu]` and its like are left out; the devices tell whether they are there.
    """
    try:
        required = importlib.metadata.requires("jaxrl") or []
    except importlib.metadata.PackageNotFoundError:
        return
    packages: dict[str, list[str]] = {}
    for requirement in required:
        found = re.match(r"""([\w.-]+)(?!\S*\[).*extra == ['"]([\w-]+)['"]""", requirement)
        if found:
            packages.setdefault(found[2], []).append(found[1])
    for extra, names in sorted(packages.items()):
        missing = [name for name in names if not _package(name)[0]]
        state = f"not installed ({', '.join(missing)})" if missing else "installed"
        yield True, f"extra {extra}: {state}"


def _devices() -> tuple[bool, str]:
    try:
        devices = jax.devices()
    except RuntimeError as error:
        return False, f"devices: {str(error).splitlines()[0]}"
    stats = devices[0].memory_stats() or {}
    memory = stats.get("bytes_limit")
    each = f" of {memory / 1e9:.0f} GB" if memory else ""
    return True, f"devices: {len(devices)} x {devices[0].device_kind}{each}"


def _hugging_face_home() -> pathlib.Path:
    default = pathlib.Path("~/.cache/huggingface").expanduser()
    return pathlib.Path(os.environ.get("HF_HOME", default))


def _folder(what: str, path: pathlib.Path | None) -> tuple[bool, str]:
    if path is None:
        return True, f"{what}: not kept"
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not os.access(there, os.W_OK):
        return False, f"{what}: {path} cannot be written; make it writable, or set another"
    files = [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    size = sum(file.stat().st_size for file in files)
    return True, f"{what}: {path}, {len(files)} files, {size / 1e6:.0f} MB"


def _tiny_step() -> tuple[bool, str]:
    """Trains one step in a process of its own, as a user would."""
    recipe = bundled_recipes() / "grpo_tiny.py"
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        settings = _TINY | {"run.output": folder}
        overrides = [f"--config.{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "jaxrl", "train", "--config", str(recipe), *overrides]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=_STEP_LIMIT_S)
        except subprocess.TimeoutExpired:
            return False, f"one tiny step took longer than {_STEP_LIMIT_S} s"
    if ran.returncode:
        last = (ran.stderr.strip() or "no message").splitlines()[-1]
        return False, f"one tiny step ended with status {ran.returncode}: {last}"
    return True, f"one tiny step: {time.monotonic() - start:.0f} s, compilation included"
