"""The script for a borrowed accelerator works before there is one, with no more than it says it needs."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# What a machine with jax, flax, optax and numpy alone does not have.
WITHOUT = """
import runpy, sys
for name in ("grain", "ml_collections", "tokenizers", "jinja2", "safetensors", "jetstream"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
CHECKS = {
    "A": {
        "versions",
        "roofs",
        "attention_kernels",
        "attention_speed",
        "decode_attention",
        "decode_blocks",
        "experts",
        "same_tokens",
        "tf32",
    },
    "B": {"executable", "demo"},
    "C": {"decode_blocks", "decode", "update", "step", "experts_alone", "demo_lm"},
}


@pytest.mark.long
@pytest.mark.parametrize("part", CHECKS)
def test_every_check_of_a_part(part):
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT, "benchmarks/accelerator.py", "--part", part, "--small"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert all(line["ok"] for line in lines), lines
    assert {line["check"] for line in lines} == CHECKS[part]
    by_check = {line["check"]: line for line in lines}
    if part == "A":
        assert by_check["same_tokens"]["same"] == 1
        assert by_check["tf32"]["max"] < 1e-4
        assert all(line["error"] < 1e-5 for line in lines if "error" in line)
    elif part == "B":
        assert by_check["demo"]["left_out"] == "needs grain, ml_collections, tokenizers"
    else:
        assert len([line for line in lines if line["check"] == "update"]) == 3
        assert by_check["step"]["update_seconds"] < by_check["step"]["step_seconds"]
        assert by_check["experts_alone"]["ended"] == 0 and by_check["demo_lm"]["left_out"]
