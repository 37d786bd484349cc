"""launch/mesh.py as a user runs it; it simulates devices, so each run is a process of its own."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxrl import cli

SCRIPT = pathlib.Path(__file__).parents[4] / "launch" / "mesh.py"
# JAX sets the last in the process that runs the tests.
_DROPPED = ("XLA_FLAGS", "FORCE_COLOR", "TF_CPP_MIN_LOG_LEVEL")
TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def run(*args: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in _DROPPED}
    return subprocess.run(
        [sys.executable, SCRIPT, *args],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"PYTHONPATH": str(SCRIPT.parents[1])},
    )


def row(text: str, field: str, source: str) -> list[float]:
    """Shares of M in one row of the table, one for each grouping."""
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    rows = [c for c in cells if len(c) > 3]
    first = next(i for i, c in enumerate(rows) if c[1] == field)
    found = next(c for c in rows[first:] if c[2] == source)
    return [float(cell.split()[-2]) for cell in found[3:-1]]


def test_groups_bytes_and_collectives(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    done = run(
        *("--train", "1-4-2", "--generate", "1-2-2-2"), *("--model", str(tmp_path / "config.json"))
    )
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    assert "generation tensor      [G1,G3] [G2,G4] [G5,G7] [G6,G8]" in text
    assert "x all-gather" in text and "in [G1,G2] [G3,G4] [G5,G6] [G7,G8]" in text
    # Norms, a hundredth of this model, are whole on every device and do not move.
    assert row(text, "received", "Table 2") == [0.875, 0.75, 0.25]
    assert row(text, "received", "compiled: as in the paper") == pytest.approx(
        [0.875, 0.75, 0.25], rel=0.02
    )
    exact, compiled = (
        row(text, "received", source) for source in ("specs, at least", "compiled: from two tables")
    )
    assert exact[2] == compiled[2]
    assert row(text, "redundant", "compiled: as in the paper")[2] == 0


@pytest.mark.tpu
def test_a_tpu_slice_that_is_not_here():
    done = run(
        *("--train", "1-8-16", "--generate", "1-4-2-16", "--model", "qwen2.5-32b"),
        *("--topology", "v5p:4x4x8", "--grouping", "hybrid"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "128 TPU v5 devices" in done.stdout
    for source in ("Table 2", "specs, at least", "compiled: from two tables"):
        assert row(done.stdout, "received", source) == [0.125]
    assert row(done.stdout, "peak", "compiled: from two tables")[0] < 0.25 + 0.03


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--train", "1-4-2", "--generate", "1-3-1-2"), "t_g=3 does not divide t=4"),
        (("--train", "1-4-2", "--model", "qwen2.5-8b"), "did you mean qwen2.5-"),
        (("--train", "1-8-1", "--model", "qwen2.5-7b"), "heads of size 28 does not divide"),
        (("--train", "1-4-2", "--fsdp", "3"), "mesh.fsdp=3"),
        (("--train", "1-4-2", "--model", "/nowhere/config.json"), "/nowhere"),
    ],
)
def test_what_the_user_can_mend_is_one_line(args, message, capsys):
    assert cli.main(["jaxrl", "mesh", *args]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5p:4x4x8", "p*t*d = 8 devices, --topology v5p:4x4x8 has 128"),
        ("v99:1x1", "chip 'v99' is not one of v4, v5e"),
    ],
)
def test_a_topology_that_does_not_fit(topology, message):
    done = run("--train", "1-4-2", "--topology", topology)
    assert done.returncode == 2
    assert message in done.stderr
