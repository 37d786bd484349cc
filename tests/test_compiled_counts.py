"""The script that counts kernels of programs for accelerators which are not here."""

import importlib.util
import json

import compiled_counts
import pytest

from jaxrl.models import experts
from jaxrl.models.model_config import ModelConfig

TINY = ModelConfig(
    vocab_size=512, num_layers=2, d_model=256, d_ff=512, num_heads=2, num_kv_heads=2, head_dim=128
)


@pytest.mark.tpu
def test_a_token_of_a_tiny_model_on_a_tpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled_counts, "model_shapes", lambda name: TINY)
    compiled_counts.main(["--topology", "v5p:2x2x1", "--rows", "8", "--json"])
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["program"], line["rows"], line["layers"]) == ("generate", 8, 2)
    # A TPU's loops are on the device, and its products read slices of the stack.
    assert line["host_visits"] == line["weight_bytes_copied"] == 0
    # More than the matmuls of a layer, and most of the two layers and the sampler's together.
    assert 10 < line["kernels_a_layer"] < line["kernels"] / 2
    assert line["logits_passes"] >= 2


@pytest.mark.tpu
def test_a_tpu_copies_no_experts(monkeypatch, capsys, tmp_path):
    """For `ragged_dot` XLA copies a layer's experts out of their stack, 1.2 GB here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [
        "--model",
        "qwen3-30b-a3b",
        "--topology",
        "v6e:2x2",
        "--layers",
        "2",
        "--rows",
        "64",
        "--json",
    ]
    copied = []
    for most in (experts.MOST_TOKENS_TO_ALL["tpu"], 0):
        monkeypatch.setitem(experts.MOST_TOKENS_TO_ALL, "tpu", most)
        compiled_counts.main(command)
        copied.append(json.loads(capsys.readouterr().out)["weight_bytes_copied"])
    assert copied[0] == 0
    assert copied[1] > 1e9


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="compiles for GPUs"
)
def test_without_the_plugin_a_line_names_the_extra():
    with pytest.raises(SystemExit, match=r"^compiling for h200 .* install the extra aot-gpu, .*$"):
        compiled_counts.main(["--topology", "h200:1x1"])


def test_more_shards_than_devices_are_refused(monkeypatch):
    monkeypatch.setattr(compiled_counts, "model_shapes", lambda name: TINY)
    with pytest.raises(SystemExit, match="4 devices, fewer than --tensor 8"):
        compiled_counts.main(["--topology", "v5p:2x2x1", "--tensor", "8"])
