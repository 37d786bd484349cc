"""A step of the demo's recipe, small, traced and told."""

import io

import jax
import pytest
from rich.console import Console

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.planner import profiling
from jaxrl.planner.compiled.profile_reading import Profile, Sum
from jaxrl.planner.hardware.calibration import measured_roof

SMALL = {
    "model.num_layers": "2",
    "model.d_model": "32",
    "model.d_ff": "48",
    "model.num_heads": "2",
    "model.num_kv_heads": "1",
    "model.head_dim": "16",
    "rollout.num_prompts": "4",
    "rollout.generation_prompts": "4",
    "rollout.num_samples": "4",
    "rollout.max_response_tokens": "12",
    "reward.overlong_buffer_tokens": "0",
    "algorithm.updates_per_step": "2",
    "data.train.size": "100",
    "data.evaluation.size": "10",
}


def test_a_step_is_traced_and_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: jax.local_devices()[:1])
    config = load_config(Config, "configs/dapo_tiny.py", SMALL | {"run.output": str(tmp_path)})
    assert profiling.profile(config) == 0
    told = capsys.readouterr().out
    for phase in ("gen", "reward", "old_log_prob", "adv", "update_actor"):
        assert f"│ {phase}" in told
    for kind in ("dot", "attention", "elementwise", "copy/transpose"):
        assert f"│ {kind}" in told
    folder = config.run_folder.profile
    assert f"trace: {folder}" in told.replace("\n", "")
    assert list(folder.rglob("*.trace.json.gz")) and list(folder.rglob("*.xplane.pb"))
    # A run would begin as if nothing had been.
    assert {path.name for path in config.run_folder.path.iterdir()} == {"lock", "profile"}


def test_shares_of_the_roof_by_hand():
    done = {
        ("gen", "dot"): Sum(seconds=4.0, flops=6e12, nbytes=2e9),
        ("update_actor", "attention"): Sum(seconds=2.0, flops=8e12, nbytes=1e9),
        ("", "dot"): Sum(seconds=2.0, flops=2e12, nbytes=0.0),
    }
    out = io.StringIO()
    profiling.show(
        Profile({"gen": 4.0, "update_actor": 1.0}, done),
        peak_tflops=4.0,
        peak_gb_s=1.0,
        num_devices=2,
        console=Console(file=out, width=100),
    )
    rows = [line.split("│")[1:-1] for line in out.getvalue().splitlines() if "│" in line]
    table = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows}
    # Two devices for 4 s could do 32 TFLOP and 8 GB.
    assert table["gen"] == ["4.000", "50%", "6,000.00", "2.00", "18.8%", "25.0%"]
    assert table["update_actor"] == ["1.000", "100%", "8,000.00", "1.00", "100.0%", "50.0%"]
    assert table["dot"] == ["3.000", "75%", "8,000.00", "2.00", "33.3%", "33.3%"]
    assert table["attention"][:2] == ["1.000", "25%"]


def test_a_pool_of_one_device_has_a_roof():
    from_table = measured_roof("float32")
    assert from_table.bfloat16 > 0 and from_table.memory > 0


@pytest.mark.parametrize("setting", ["sft", "rollout", "run"])
def test_what_would_take_long_is_left_out(setting):
    before = load_config(Config, "configs/dapo_tiny.py", {})
    after = profiling._for_one_step(before)
    assert getattr(after, setting) != getattr(before, setting)
    assert after.sft.num_steps == 0 and after.rollout.on_shortage == "fill"
