"""Weights of experts in 4 bits, as gpt-oss is published."""

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_weight_loading import load, random_params

from jaxrl.errors import UserError
from jaxrl.models.huggingface.config_json import config_json, read_config
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.huggingface.weight_loading import Mxfp4Tensor
from jaxrl.models.shapes import SHAPES

# Input dimensions are whole blocks of 32 values.
TINY = dataclasses.replace(
    SHAPES["gpt-oss-20b"],
    vocab_size=24,
    num_layers=2,
    d_model=64,
    d_ff=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=3,
    experts_per_token=2,
)
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_values_by_hand():
    # One expert, one output, one block: codes 0 to 15 twice, two a byte, times 2**(126 - 127).
    codes = np.arange(32) % 16
    blocks = (codes[0::2] | codes[1::2] << 4).astype(np.uint8).reshape(1, 1, 1, 16)
    tensor = Mxfp4Tensor(blocks, np.full((1, 1, 1), 126, np.uint8))
    found = tensor[slice(0, 1), slice(0, 32), slice(0, 1)]
    assert found.dtype == ml_dtypes.bfloat16 and found.shape == (1, 32, 1)
    np.testing.assert_array_equal(found[0, :, 0], np.array(VALUES * 2) / 2)
    np.testing.assert_array_equal(tensor[slice(0, 1), slice(3, 7), slice(0, 1)], found[:, 3:7])


@pytest.fixture
def published(tmp_path):
    """A directory as gpt-oss is published, and the values of its experts, one by one."""
    save_checkpoint(random_params(TINY), TINY, tmp_path / "wide", dtype="bfloat16")
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    rng, expected = np.random.default_rng(0), {}
    for name, tensor in [*tensors.items()]:
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, ins, outs = tensor.shape
        blocks = rng.integers(0, 256, (experts, outs, ins // 32, 16)).astype(np.uint8)
        scales = rng.integers(117, 130, blocks.shape[:-1]).astype(np.uint8)
        value = np.zeros(tensor.shape, np.float32)
        for e, i, o in np.ndindex(*tensor.shape):
            byte = int(blocks[e, o, i // 32, i % 32 // 2])
            code = byte >> 4 if i % 2 else byte % 16
            value[e, i, o] = VALUES[code] * 2.0 ** (int(scales[e, o, i // 32]) - 127)
        expected[name] = value
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    directory = tmp_path / "published"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    values = config_json(TINY, dtype="bfloat16")
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}
    (directory / "config.json").write_text(json.dumps(values))
    return directory, expected


def test_published_weights_are_read_and_written_in_bfloat16(published, tmp_path):
    directory, expected = published
    params = load(directory, dtype=jnp.bfloat16)
    experts = params["layers"]["mlp"]
    for i in range(2):
        gate_up = expected[f"model.layers.{i}.mlp.experts.gate_up_proj"]
        np.testing.assert_array_equal(experts["gate"]["weight"][i], gate_up[..., ::2])
        np.testing.assert_array_equal(experts["up"]["weight"][i], gate_up[..., 1::2])
        down = expected[f"model.layers.{i}.mlp.experts.down_proj"]
        np.testing.assert_array_equal(experts["down"]["weight"][i], down)
    config = read_config(directory)
    save_checkpoint(params, config, tmp_path / "out", dtype="bfloat16", source=directory)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in expected.items():
        np.testing.assert_array_equal(written[name].astype(np.float32), value)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in values and values["num_local_experts"] == 3


def test_blocks_of_another_shape_are_refused(published):
    directory, _ = published
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name][..., :8].copy()
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"down_proj_blocks in .*, 8\].* is not MXFP4"):
        load(directory)


def test_weights_in_both_forms_are_refused(published):
    directory, _ = published
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj"] = tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"has .*down_proj_blocks, and .*are the same weights"):
        load(directory)
