"""A model that travels in parts: they are joined where all have arrived, and damage is told."""

import json
import pathlib
import subprocess
import sys

import carried_lm
import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "carried_lm.py"


@pytest.fixture
def parts(tmp_path):
    """A "wheel" of ten bytes in two parts."""
    content = b"0123456789"
    (tmp_path / "whole").write_bytes(content)
    names = []
    for number, (start, stop) in enumerate(carried_lm.cut(10, first=4, rest=6)):
        folder = tmp_path / "parts" / str(number)
        folder.mkdir(parents=True)
        path = folder / f"weights.{number}"
        path.write_bytes(content[start:stop])
        names.append({"name": path.name, "sha256": carried_lm.sha256(path)})
    whole = carried_lm.sha256(tmp_path / "whole")
    for folder in (tmp_path / "parts").iterdir():
        manifest = {"wheel": "model.whl", "sha256": whole, "parts": names}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path / "parts"


@pytest.mark.parametrize(
    ("size", "expected"),
    [(3, [(0, 3)]), (4, [(0, 4)]), (5, [(0, 4), (4, 5)]), (11, [(0, 4), (4, 10), (10, 11)])],
)
def test_parts_cover_the_whole(size, expected):
    assert carried_lm.cut(size, first=4, rest=6) == expected


def test_parts_are_kept_until_all_are_there(parts, tmp_path):
    keep = tmp_path / "keep"
    assert carried_lm.collect(parts / "1", keep) == {"ok": True, "missing": ["weights.0"]}
    assert carried_lm.collect(None, keep)["missing"] == ["weights.0"]
    found = carried_lm.collect(parts / "0", keep)
    assert found == {"ok": True, "wheel": str(keep / "model.whl"), "bytes": 10}
    assert (keep / "model.whl").read_bytes() == b"0123456789"
    assert carried_lm.collect(None, keep) == found


def test_damaged_parts_are_told(parts, tmp_path):
    keep = tmp_path / "keep"
    carried_lm.collect(parts / "1", keep)
    (parts / "0" / "weights.0").write_bytes(b"012x")
    found = carried_lm.collect(parts / "0", keep)
    assert not found["ok"] and "weights.0 arrived damaged" in found["error"]
    (parts / "0" / "weights.0").write_bytes(b"0123")
    assert carried_lm.collect(parts / "0", keep)["ok"]
    (keep / "model.whl").write_bytes(b"another")
    assert "another checksum" in carried_lm.collect(None, keep)["error"]


def test_nothing_but_python_is_imported_before_packages_are_installed():
    script = f"""
import runpy, sys
for name in ("jax", "numpy", "jaxrl", "flax", "pydantic"):
    sys.modules[name] = None
sys.argv = [{str(SCRIPT)!r}, "run", "--keep", "/nonexistent/keep"]
runpy.run_path(sys.argv[0])
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_figures_leave_out_the_step_that_compiles_and_skipped_updates():
    def row(step, seconds, **further):
        return {
            "step": step,
            "timing_s/step": seconds,
            "timing_s/gen": seconds / 2,
            "timing_s/update_actor": seconds / 4,
            "perf/response_num_tokens": 100.0,
            "perf/total_num_tokens": 300.0,
            "critic/score/mean": 0.5,
            **further,
        }

    name = "val-core/words/acc/mean@2"
    rows = [
        {"step": 0, name: 0.1},
        row(1, 60.0, **{"perf/mfu": 0.01}),
        row(2, 2.0, **{"perf/mfu": 0.4, name: 0.25}),
        row(3, 2.0, **{"train/num_responses_left_out": 64}),
    ]
    found = carried_lm.figures(rows)
    assert (found["steps"], found["first_step_s"], found["step_s"]) == (3, 60.0, 2.0)
    assert (found["sampled_tokens_per_s"], found["learned_tokens_per_s"]) == (100, 600)
    assert (found["mfu"], found["left_out"]) == (0.4, [0, 0, 64])
    assert found["accuracy"] == {name: {0: 0.1, 2: 0.25}}
    assert carried_lm.figures([])["step_s"] is None
