import dataclasses
import errno
import json
import os
import pathlib
import re
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from jaxrl.data.model_directory import generation_shardings
from jaxrl.errors import UserError
from jaxrl.mesh import rules as mesh_rules
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shardings
from jaxrl.models import lora
from jaxrl.models.decoder import decoder_graph, split_layers
from jaxrl.models.huggingface import weight_loading
from jaxrl.models.huggingface.config_json import config_json, read_config
from jaxrl.models.huggingface.model_files import INDEX_FILE, SINGLE_FILE
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.huggingface.weight_loading import load_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.shapes import SHAPES

TINY = ModelConfig(
    vocab_size=24, num_layers=2, d_model=16, d_ff=24, num_heads=4, num_kv_heads=2, head_dim=8
)
FAMILIES = {
    "qwen2": TINY,
    "qwen3": dataclasses.replace(TINY, qkv_bias=False, qk_norm=True),
    "llama": dataclasses.replace(TINY, qkv_bias=False, tie_embeddings=False),
}


def random_tensors(config, dtype=np.float32, seed=0):
    """A checkpoint of `config`, its shapes written out by hand."""
    D, F, H, V = config.d_model, config.d_ff, config.head_dim, config.vocab_size
    q, k = config.num_heads * H, config.num_kv_heads * H
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(config.num_layers):
        layer = {
            "input_layernorm.weight": (D,),
            "post_attention_layernorm.weight": (D,),
            "self_attn.q_proj.weight": (q, D),
            "self_attn.k_proj.weight": (k, D),
            "self_attn.v_proj.weight": (k, D),
            "self_attn.o_proj.weight": (D, q),
            "mlp.gate_proj.weight": (F, D),
            "mlp.up_proj.weight": (F, D),
            "mlp.down_proj.weight": (D, F),
        }
        if config.qkv_bias:
            layer |= {f"self_attn.{n}_proj.bias": (s,) for n, s in (("q", q), ("k", k), ("v", k))}
        if config.qk_norm:
            layer |= {f"self_attn.{n}_norm.weight": (H,) for n in "qk"}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (V, D)
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def random_params(config):
    """Weights by NumPy, for which nothing is compiled."""
    rng, shapes = np.random.default_rng(0), decoder_graph(config)[1]
    return jax.device_put(jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f"), shapes))


def write_checkpoint(directory, config, tensors, *, num_files=1):
    """A directory as it is published; tensors go to the files in turn, so layers are torn apart."""
    directory.mkdir(parents=True)
    values = config_json(config, dtype="float32")
    (directory / "config.json").write_text(json.dumps(values))
    if num_files == 1:
        save_file(tensors, directory / SINGLE_FILE)
        return directory
    file_of = {
        name: f"model-{i % num_files + 1:05d}-of-{num_files:05d}.safetensors"
        for i, name in enumerate(tensors)
    }
    for file in set(file_of.values()):
        save_file({n: t for n, t in tensors.items() if file_of[n] == file}, directory / file)
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": file_of}))
    return directory


def on_one_device(config):
    device = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda _: device, decoder_graph(config)[1])


def on_mesh(config, *, rules=TRAIN_RULES, **layout):
    layout = ParallelLayout.from_config(LayoutConfig(**layout))
    mesh = build_mesh(layout, jax.devices()[: layout.num_devices])
    _, shapes, axes = decoder_graph(config)
    return shardings(axes, shapes, rules, mesh)


def load(directory, **kwargs):
    config = read_config(directory)
    return load_params(directory, config, on_one_device(config), **kwargs)


def stack(tensors, config, name):
    return np.stack([tensors[f"model.layers.{i}.{name}"] for i in range(config.num_layers)])


def assert_trees_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_tensors_come_to_their_places(tmp_path, config, num_files):
    tensors = random_tensors(config)
    directory = write_checkpoint(tmp_path / "hf", config, tensors, num_files=num_files)
    assert read_config(directory) == config
    params = load(directory)
    L, D, H = config.num_layers, config.d_model, config.head_dim
    attention, mlp = params["layers"]["attention"], params["layers"]["mlp"]

    def heads(name, count):
        """[L, count * H, D] as [L, D, count, H]."""
        return stack(tensors, config, name).reshape(L, count, H, D).transpose(0, 3, 1, 2)

    expected = {
        "q": {"weight": heads("self_attn.q_proj.weight", config.num_heads)},
        "k": {"weight": heads("self_attn.k_proj.weight", config.num_kv_heads)},
        "v": {"weight": heads("self_attn.v_proj.weight", config.num_kv_heads)},
        # [L, D, Q * H] as [L, Q, H, D].
        "o": {
            "weight": stack(tensors, config, "self_attn.o_proj.weight")
            .transpose(0, 2, 1)
            .reshape(L, config.num_heads, H, D)
        },
    }
    if config.qkv_bias:
        for n in "qkv":
            bias = stack(tensors, config, f"self_attn.{n}_proj.bias")
            expected[n]["bias"] = bias.reshape(L, -1, H)
    if config.qk_norm:
        for n in "qk":
            expected[f"{n}_norm"] = {"scale": stack(tensors, config, f"self_attn.{n}_norm.weight")}
    assert_trees_equal(attention, expected)
    for n in ("gate", "up", "down"):
        stored = stack(tensors, config, f"mlp.{n}_proj.weight")
        np.testing.assert_array_equal(mlp[n]["weight"], stored.transpose(0, 2, 1))
    np.testing.assert_array_equal(params["embedding"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["final_norm"]["scale"], tensors["model.norm.weight"])
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    for ours, theirs in norms.items():
        scale = params["layers"][ours]["scale"]
        np.testing.assert_array_equal(scale, stack(tensors, config, f"{theirs}.weight"))
    if not config.tie_embeddings:
        np.testing.assert_array_equal(params["unembedding"], tensors["lm_head.weight"].T)


@pytest.mark.parametrize(
    ("stored", "wanted"), [("f8", "f"), ("f", "bfloat16"), ("f2", "bfloat16"), ("bfloat16", "f")]
)
def test_the_caller_chooses_the_type(tmp_path, stored, wanted):
    tensors = random_tensors(TINY, stored)
    directory = write_checkpoint(tmp_path / "hf", TINY, tensors)
    params = load(directory, dtype=wanted)
    expected = tensors["model.norm.weight"].astype(np.float32).astype(wanted)
    np.testing.assert_array_equal(params["final_norm"]["scale"], expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(wanted)}


@pytest.mark.parametrize("rules", [TRAIN_RULES, GENERATE_RULES], ids=["train", "generate"])
def test_weights_are_born_where_they_belong(tmp_path, rules):
    config = FAMILIES["llama"]
    directory = write_checkpoint(tmp_path / "hf", config, random_tensors(config), num_files=3)
    wanted = on_mesh(config, rules=rules, train="2-2-2", generate="1-2-2-2", fsdp=2)
    params = load_params(directory, config, wanted)
    assert_trees_equal(params, load(directory))
    jax.tree.map(lambda leaf, sharding: assert_placed(leaf, sharding), params, wanted)


def test_layers_are_loaded_into_a_list_of_arrays(tmp_path, monkeypatch):
    """As generation on GPUs has them; no stack is made."""
    monkeypatch.setattr(mesh_rules, "lists_layers", lambda mesh: True)
    config = dataclasses.replace(FAMILIES["llama"], num_layers=3)
    directory = write_checkpoint(tmp_path / "hf", config, random_tensors(config))
    layout = ParallelLayout.from_config(LayoutConfig(train="1-2-2", fsdp=2))
    wanted = generation_shardings(config, build_mesh(layout, jax.devices()[:4]))
    params, expected = load_params(directory, config, wanted), load(directory)
    assert_trees_equal(params, split_layers(expected))
    jax.tree.map(lambda leaf, sharding: assert_placed(leaf, sharding), params, wanted)
    up = wanted["layers"]["mlp"]["up"]["weight"]
    assert [s.spec for s in up] == [P(None, "tensor_gen")] * 3


def assert_placed(leaf, sharding):
    assert leaf.sharding == sharding
    for shard in leaf.addressable_shards:
        assert shard.data.shape == sharding.shard_shape(leaf.shape)


# Families with several leaves in one tensor.
TORN = {
    "phi3": dataclasses.replace(FAMILIES["llama"], num_kv_heads=2, num_heads=4, head_dim=4),
    "gpt_oss": dataclasses.replace(
        SHAPES["gpt-oss-20b"],
        **{name: getattr(TINY, name) for name in ("vocab_size", "num_layers", "d_model", "d_ff")},
        **{name: getattr(TINY, name) for name in ("num_heads", "num_kv_heads", "head_dim")},
        num_experts=4,
        experts_per_token=2,
    ),
}


GLM = dataclasses.replace(
    TINY,
    num_layers=3,
    qkv_bias=True,
    tie_embeddings=False,
    rotary_fraction=0.5,
    num_experts=4,
    experts_per_token=2,
    sigmoid_routing=True,
    routed_scale=1.5,
    shared_d_ff=2 * TINY.d_ff,
    first_dense_layers=1,
    dense_d_ff=28,
)


@pytest.mark.parametrize("family", TORN)
def test_parts_of_a_tensor_come_to_their_shards_and_back(tmp_path, family):
    config = TORN[family]
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": family}))
    params = random_params(config)
    options = dict(dtype="float32", source=tmp_path / "base")
    save_checkpoint(params, config, tmp_path / "one", **options)
    assert read_config(tmp_path / "one") == config
    wanted = on_mesh(config, train="1-2-2", fsdp=2)
    sharded = load_params(tmp_path / "one", config, wanted)
    assert_trees_equal(sharded, params)
    save_checkpoint(sharded, config, tmp_path / "four", **options)
    tensors = load_file(tmp_path / "four" / SINGLE_FILE)
    assert_trees_equal(tensors, load_file(tmp_path / "one" / SINGLE_FILE))
    fused = {"phi3": ("qkv_proj.weight", (32, 16)), "gpt_oss": ("gate_up_proj", (4, 16, 48))}
    name, shape = fused[family]
    assert {t.shape for n, t in tensors.items() if n.endswith(name)} == {shape}


def test_each_device_reads_its_own_part_alone(tmp_path, monkeypatch):
    """Four devices, one tensor-parallel split: every value of a matrix is read once, not four times."""
    directory = write_checkpoint(tmp_path / "hf", TINY, random_tensors(TINY))
    wanted = on_mesh(TINY, train="1-2-2")
    read, preadv = 0, os.preadv

    def counting(*args):
        nonlocal read
        read += (count := preadv(*args))
        return count

    monkeypatch.setattr(os, "preadv", counting)
    load_params(directory, TINY, wanted)
    assert read == TINY.num_params * 4


def test_the_host_holds_a_piece_of_one_tensor(tmp_path):
    """A leaf of all layers is larger than two files, and never on the host as a whole."""
    config = dataclasses.replace(TINY, num_layers=24, d_model=128, d_ff=512)
    tensors = random_tensors(config)
    directory = write_checkpoint(tmp_path / "hf", config, tensors, num_files=16)
    del tensors
    file_bytes = max(path.stat().st_size for path in directory.glob("*.safetensors"))
    tensor_bytes = config.d_model * config.d_ff * 4
    shardings = on_one_device(config)
    load_params(directory, config, shardings)  # compiles, which takes memory of its own
    tracemalloc.start()
    try:
        params = load_params(directory, config, shardings)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert params["layers"]["mlp"]["up"]["weight"].nbytes > 2 * file_bytes
    assert peak_bytes < 2 * file_bytes
    assert peak_bytes < 4 * tensor_bytes


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_export_gives_back_the_tensors(tmp_path, config):
    tensors = random_tensors(config)
    params = load(write_checkpoint(tmp_path / "hf", config, tensors))
    save_checkpoint(params, config, tmp_path / "out", dtype="float32")
    assert_trees_equal(load_file(tmp_path / "out" / SINGLE_FILE), tensors)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", SINGLE_FILE}
    assert read_config(tmp_path / "out") == config
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    with safetensors.safe_open(tmp_path / "out" / SINGLE_FILE, "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_export_from_a_mesh_into_several_files(tmp_path):
    tensors = random_tensors(TINY)
    directory = write_checkpoint(tmp_path / "hf", TINY, tensors)
    params = load_params(directory, TINY, on_mesh(TINY, train="2-2-1"))
    largest = 24 * 16 * 4
    save_checkpoint(params, TINY, tmp_path / "out", dtype="float32", max_shard_bytes=2 * largest)
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    assert len(files) > 3
    assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    found = {}
    for file in files:
        content = load_file(file)
        assert {name: file.name for name in content}.items() <= index["weight_map"].items()
        assert sum(tensor.nbytes for tensor in content.values()) <= 2 * largest
        found |= content
    assert_trees_equal(found, tensors)
    assert index["metadata"]["total_size"] == TINY.num_params * 4
    assert_trees_equal(load(tmp_path / "out"), load(directory))


def test_a_tensor_larger_than_a_file_has_one_of_its_own(tmp_path):
    params = load(write_checkpoint(tmp_path / "hf", TINY, random_tensors(TINY)))
    save_checkpoint(params, TINY, tmp_path / "out", dtype="float32", max_shard_bytes=1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(random_tensors(TINY))


def test_export_rounds_to_bfloat16(tmp_path):
    tensors = random_tensors(TINY)
    params = load(write_checkpoint(tmp_path / "hf", TINY, tensors))
    save_checkpoint(params, TINY, tmp_path / "out", dtype=jnp.bfloat16)
    expected = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    assert_trees_equal(load_file(tmp_path / "out" / SINGLE_FILE), expected)
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_export_takes_tokenizer_and_special_ids_from_the_source(tmp_path):
    source = write_checkpoint(tmp_path / "hf", TINY, random_tensors(TINY))
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**values, "eos_token_id": 7}))
    (source / "tokenizer.json").write_text("{}")
    (source / "modeling_custom.py").write_text("raise SystemExit")
    (source / "training_args.bin").write_bytes(b"\x80")
    save_checkpoint(load(source), TINY, tmp_path / "out", dtype="float32", source=source)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", SINGLE_FILE, "tokenizer.json"}
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 7


def test_buffers_of_old_versions_and_the_head_of_a_tied_model_are_ignored(tmp_path):
    tensors = random_tensors(TINY)
    expected = load(write_checkpoint(tmp_path / "plain", TINY, tensors))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    tensors["model.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert_trees_equal(load(write_checkpoint(tmp_path / "more", TINY, tensors)), expected)


HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


def one_value_off(table):
    table = table.copy()
    table[-1, -1] = np.nextafter(table[-1, -1], np.float32(9), dtype=np.float32)
    return table


HEADS = {
    "another": lambda table: table + 1,
    "one value": one_value_off,
    "rounded": lambda table: table.astype(ml_dtypes.bfloat16),
    "more rows": lambda table: np.concatenate([table, table[:8]]),
    "fewer rows": lambda table: table[:8],
    "turned": lambda table: np.ascontiguousarray(table.T),
    "integers": lambda table: table.astype(np.int8),
    "zeros": np.zeros_like,
    "nothing": lambda table: table[:0],
    "nan": lambda table: np.full_like(table, np.nan),
}


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("head", HEADS)
def test_another_head_of_a_tied_model_is_refused(tmp_path, num_files, head):
    """No reader can know which of two models was trained: others disagree."""
    tensors = random_tensors(TINY)
    tensors[HEAD] = HEADS[head](tensors[EMBEDDING])
    directory = write_checkpoint(tmp_path / "hf", TINY, tensors, num_files=num_files)
    with pytest.raises(UserError, match=r"lm_head.weight .*differs.* set that to false"):
        weight_loading.check_params(directory, TINY)


def test_a_head_of_another_type_may_be_the_embedding(tmp_path):
    tensors = random_tensors(TINY)
    tensors[EMBEDDING] = tensors[EMBEDDING].astype(ml_dtypes.bfloat16).astype(np.float32)
    tensors[EMBEDDING][0, :2] = -0.0, np.nan
    expected = load(write_checkpoint(tmp_path / "plain", TINY, tensors))
    for i, dtype in enumerate((ml_dtypes.bfloat16, np.float64, np.float32)):
        tensors[HEAD] = tensors[EMBEDDING].astype(dtype)
        tensors[HEAD][0, 0] = 0.0
        assert_trees_equal(load(write_checkpoint(tmp_path / f"{i}", TINY, tensors)), expected)


def test_the_head_alone_of_a_tied_model_is_its_embedding(tmp_path):
    tensors = random_tensors(TINY)
    expected = load(write_checkpoint(tmp_path / "plain", TINY, tensors))
    tensors[HEAD] = tensors.pop(EMBEDDING)
    assert_trees_equal(load(write_checkpoint(tmp_path / "hf", TINY, tensors)), expected)


def test_large_heads_are_compared_in_steps_and_once(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_loading, "_COMPARED_AT_ONCE", 5 * TINY.d_model)
    tensors = random_tensors(TINY)
    tensors[HEAD] = tensors[EMBEDDING]
    directory = write_checkpoint(tmp_path / "hf", TINY, tensors)
    sizes, preadv = [], os.preadv

    def counting(fd, parts, at):
        sizes.append(len(parts[0]))
        return preadv(fd, parts, at)

    monkeypatch.setattr(os, "preadv", counting)
    for _ in range(3):
        weight_loading.check_params(directory, TINY)
    # 24 rows of both: 5 + 5 + 5 + 5 + 4.
    assert sizes == [5 * 64] * 8 + [4 * 64] * 2
    tensors[HEAD] = one_value_off(tensors[EMBEDDING])
    save_file(tensors, directory / SINGLE_FILE)
    with pytest.raises(UserError, match="differs"):
        weight_loading.check_params(directory, TINY)


SCORED = dataclasses.replace(TINY, num_scores=1)


@pytest.mark.parametrize(
    ("config", "name", "tensor", "message"),
    [
        (SCORED, HEAD, lambda t: t[EMBEDDING] + 1, "differs"),
        (
            dataclasses.replace(SCORED, tie_embeddings=False),
            HEAD,
            lambda t: t[EMBEDDING],
            "has lm_",
        ),
        (TINY, "score.weight", lambda t: t[EMBEDDING][:1], "has score.weight in"),
        (TINY, "lm_head.bias", lambda t: t[EMBEDDING][:, 0], "has lm_head.bias in"),
        (TINY, "v_head.summary.weight", lambda t: t[EMBEDDING][:1], "has v_head.summary.weight in"),
        (TINY, "model.layers.1.eh_proj.weight", lambda t: t[NORM], "has model.layers.1.eh_proj"),
        (TINY, "model.layers.2.mlp.up_proj.weight", lambda t: t[NORM], "has model.layers.2.mlp"),
        (TINY, "model.layers.1.self_attn.q_norm.weight", lambda t: t[NORM], "has model.*q_norm"),
        (TINY, "embed_tokens.weight", lambda t: t[EMBEDDING], "has embed_tokens.weight in"),
        (TINY, "mtp_head.weight", lambda t: t[NORM], "has mtp_head.weight in"),
    ],
)
def test_no_tensor_is_dropped_in_silence(tmp_path, config, name, tensor, message):
    tensors = random_tensors(config)
    tensors.pop(HEAD, None)
    if config.num_scores:
        tensors["score.weight"] = np.ones((1, TINY.d_model), np.float32)
    weight_loading.check_params(write_checkpoint(tmp_path / "plain", config, tensors), config)
    tensors[name] = tensor(tensors)
    directory = write_checkpoint(tmp_path / "hf", config, tensors)
    with pytest.raises(UserError, match=message):
        weight_loading.check_params(directory, config)


@pytest.mark.parametrize("listed", [True, False])
def test_a_tensor_in_two_files_is_the_same_in_both(tmp_path, listed):
    tensors = random_tensors(TINY)
    directory = write_checkpoint(tmp_path / "hf", TINY, tensors, num_files=3)
    expected = load(directory)
    index = json.loads((directory / INDEX_FILE).read_text())["weight_map"]
    other = next(directory / file for file in index.values() if file != index[NORM])
    of_other = load_file(other)
    save_file({**of_other, NORM: tensors[NORM]}, other)
    if listed:
        (directory / INDEX_FILE).write_text(json.dumps({"weight_map": {**index, NORM: other.name}}))
    assert_trees_equal(load(directory), expected)
    save_file({**of_other, NORM: tensors[NORM] + 1}, other)
    with pytest.raises(UserError, match=r"have different tensors model\.norm\.weight"):
        load(directory)


def test_a_tensor_that_the_index_does_not_name_is_read_or_refused(tmp_path):
    tensors = random_tensors(TINY)
    expected = load(write_checkpoint(tmp_path / "plain", TINY, tensors))
    directory = write_checkpoint(tmp_path / "hf", TINY, tensors, num_files=3)
    index = json.loads((directory / INDEX_FILE).read_text())["weight_map"]
    file = directory / index.pop(NORM)
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    assert_trees_equal(load(directory), expected)
    save_file({**load_file(file), "extra.weight": tensors[NORM]}, file)
    with pytest.raises(UserError, match=rf"has extra\.weight in {file.name}"):
        load(directory)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vision_tower.a.weight", None),
        ("model.visual.blocks.0.weight", None),
        ("multi_modal_projector.weight", None),
        ("model.embed_audio.weight", None),
        ("mtp.layers.0.weight", None),
        ("model.norm.weight", "has both"),
        ("score.weight", r"has score\.weight in"),
        ("model.layers.0.mlp.up_proj.weight", "has both"),
        ("language_model.score.weight", r"has language_model\.score\.weight in"),
        ("value_head.weight", r"has value_head\.weight in"),
    ],
)
def test_beside_a_text_model_only_other_senses_are_left_out(tmp_path, name, message):
    tensors = random_tensors(TINY)
    inside = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    inside[name] = tensors[NORM] + 1
    directory = write_checkpoint(tmp_path / "hf", TINY, inside)
    if message is None:
        names = weight_loading.check_params(directory, TINY)
        assert names.keys() == tensors.keys()
    else:
        with pytest.raises(UserError, match=message):
            weight_loading.check_params(directory, TINY)


def test_keys_of_layers_that_share_others_are_not_read(tmp_path):
    model = dataclasses.replace(
        TINY,
        num_layers=6,
        qkv_bias=False,
        qk_norm=True,
        value_norm=True,
        query_pre_attn_scalar=1.0,
        activation="gelu_tanh",
        post_norms=True,
        scale_embeddings=True,
        scaled_layers=True,
        tie_embeddings=True,
        full_head_dim=2 * TINY.head_dim,
        sliding_window=4,
        layer_pattern=("sliding", "full"),
        rope_local_theta=100.0,
        layer_inputs=6,
        sharing_layers=2,
        double_wide_sharing=True,
    )
    params = random_params(model)
    save_checkpoint(params, model, tmp_path / "out", dtype="float32")
    assert read_config(tmp_path / "out") == model
    path = tmp_path / "out" / SINGLE_FILE
    tensors = load_file(path)
    layers_with_keys = {int(n.split(".")[2]) for n in tensors if "self_attn.k_" in n}
    assert layers_with_keys == {0, 1, 2, 3}
    # As published files have them.
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.5.self_attn.{name}.weight"] = np.ones((2, 2), np.float32)
    save_file(tensors, path)
    assert_trees_equal(load(tmp_path / "out"), params)
    tensors["model.layers.5.self_attn.sinks"] = np.ones(2, np.float32)
    save_file(tensors, path)
    with pytest.raises(UserError, match="sinks"):
        load(tmp_path / "out")


def test_indexers_are_kept_and_their_small_tensors_wide(tmp_path):
    sizes = {"kv_latent": 6, "q_latent": 5, "rope_dim": 4, "value_dim": 6}
    indexer = {"indexer_pattern": (True, False), "index_topk": 8, "index_heads": 4}
    attention = {"num_kv_heads": GLM.num_heads, "qkv_bias": False, "qk_norm": False}
    model = dataclasses.replace(
        GLM,
        **sizes,
        **indexer,
        index_dim=6,
        interleaved_rotary=True,
        **attention,
        rotary_fraction=1.0,
    )
    params = random_params(model)
    save_checkpoint(params, model, tmp_path / "out", dtype="bfloat16")
    assert read_config(tmp_path / "out") == model
    tensors = load_file(tmp_path / "out" / SINGLE_FILE)
    of_indexers = {n: t.dtype for n, t in tensors.items() if ".self_attn.indexer." in n}
    assert len(of_indexers) == 2 * 5 and {n.split(".")[2] for n in of_indexers} == {"0", "2"}
    wide = {n for n, dtype in of_indexers.items() if dtype == np.float32}
    assert {n.split("indexer.")[1] for n in wide} == {
        "k_norm.weight",
        "k_norm.bias",
        "weights_proj.weight",
    }
    found = load(tmp_path / "out")["indexers"]
    assert lora.split_trained(params)[1].keys() >= {"indexers"}
    for name, leaf in found.items():
        expected = params["indexers"][name]
        if name in ("q", "k"):
            expected = expected.astype(jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_array_equal(leaf, expected)


def test_the_correction_bias_keeps_its_type_and_layers_of_further_tokens_are_ignored(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"num_nextn_predict_layers": 1}')
    params = random_params(GLM)
    save_checkpoint(params, GLM, tmp_path / "out", dtype="bfloat16", source=tmp_path / "base")
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert read_config(tmp_path / "out") == GLM
    path = tmp_path / "out" / SINGLE_FILE
    tensors = load_file(path)
    assert [n for n, t in tensors.items() if t.dtype == np.float32] == [
        f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2)
    ]
    for name in ("eh_proj.weight", "enorm.weight", "mlp.up_proj.weight"):
        tensors[f"model.layers.3.{name}"] = np.ones(2, np.float32)
    save_file(tensors, path)
    found = load(tmp_path / "out", dtype=jnp.bfloat16)["layers"]["mlp"]
    assert (found["correction_bias"] == params["layers"]["mlp"]["correction_bias"]).all()
    assert found["router"].dtype == jnp.bfloat16
    tensors["model.layers.4.mlp.up_proj.weight"] = np.ones(2, np.float32)
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"has model.layers.4.mlp.up_proj.weight"):
        load(tmp_path / "out")


def no_data_is_read(monkeypatch):
    def refuse(*_):
        raise AssertionError("data was read before all headers were checked")

    monkeypatch.setattr("jaxrl.models.huggingface.weight_loading._load_table", refuse)


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (DOWN, None, f"lacks {re.escape(DOWN)}"),
        (
            "model.layers.2.mlp.up_proj.weight",
            np.ones((24, 16), np.float32),
            r"has model\.layers\.2\.mlp\.up_proj\.weight in model.*safetensors",
        ),
        (DOWN, np.ones((24, 16), np.float32), r"down_proj.*shape \[24, 16\], .* \[16, 24\]"),
        (DOWN, np.ones((16, 24), np.int8), f"{re.escape(DOWN)} in .*model.* has type I8"),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_wrong_tensors_are_named_before_data_is_read(
    tmp_path, monkeypatch, num_files, name, tensor, message
):
    tensors = random_tensors(TINY)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    directory = write_checkpoint(tmp_path / "hf", TINY, tensors, num_files=num_files)
    no_data_is_read(monkeypatch)
    with pytest.raises(UserError, match=message):
        load(directory)


@pytest.mark.parametrize("keep_bytes", [0, 5, 100, -1])
@pytest.mark.parametrize("num_files", [1, 3])
def test_a_file_that_is_cut_short_is_named(tmp_path, monkeypatch, num_files, keep_bytes):
    directory = write_checkpoint(tmp_path / "hf", TINY, random_tensors(TINY), num_files=num_files)
    file = sorted(directory.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:keep_bytes])
    no_data_is_read(monkeypatch)
    with pytest.raises(UserError, match=f"{file.name} is cut short or no safetensors file"):
        load(directory)


def cut_short(path):
    os.truncate(path, path.stat().st_size // 2)


def written_over(path):
    path.write_bytes(path.read_bytes()[::-1])


def replaced_by_a_longer_one(path):
    path.with_name("new").write_bytes(path.read_bytes() + b"0")
    path.with_name("new").replace(path)


CHANGES = {
    cut_short: r"has been cut short",
    written_over: r"has changed while it was read",
    replaced_by_a_longer_one: None,
    pathlib.Path.unlink: None,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("after", [0, 3])
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, monkeypatch, change, after):
    """An open file stays what it was if its name is given to another one, or to none."""
    tensors = random_tensors(TINY)
    directory = write_checkpoint(tmp_path / "hf", TINY, tensors, num_files=3)
    file, count, preadv = sorted(directory.glob("*.safetensors"))[-1], 0, os.preadv
    os.utime(file, (1, 1))  # the clock of a file system may be coarse

    def changing(*args):
        nonlocal count
        count += 1
        if count == after + 1:
            change(file)
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", changing)
    if CHANGES[change] is None:
        params = load_params(directory, TINY, on_one_device(TINY))
        assert_trees_equal(params["embedding"], tensors["model.embed_tokens.weight"])
    else:
        with pytest.raises(UserError, match=rf"{file.name} {CHANGES[change]}; another program"):
            load_params(directory, TINY, on_one_device(TINY))


@pytest.mark.parametrize(
    "change", [cut_short, written_over, replaced_by_a_longer_one, pathlib.Path.unlink]
)
def test_a_file_that_changes_after_its_header_is_named(tmp_path, monkeypatch, change):
    directory = write_checkpoint(tmp_path / "hf", TINY, random_tensors(TINY))
    os.utime(directory / SINGLE_FILE, (1, 1))
    load_table = weight_loading._load_table

    def later(*args):
        change(directory / SINGLE_FILE)
        return load_table(*args)

    monkeypatch.setattr(weight_loading, "_load_table", later)
    with pytest.raises(UserError, match=rf"{SINGLE_FILE} .*; another program changes it"):
        load(directory)


def test_a_disk_that_fails_is_said(tmp_path, monkeypatch):
    directory = write_checkpoint(tmp_path / "hf", TINY, random_tensors(TINY))

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(UserError, match=rf"{SINGLE_FILE} cannot be read \(Input/output error\)"):
        load(directory)


def test_what_a_call_reads_less_is_read_by_the_next(tmp_path, monkeypatch):
    tensors = random_tensors(TINY)
    directory = write_checkpoint(tmp_path / "hf", TINY, tensors)
    expected, preadv = load(directory), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:100]], at))
    assert_trees_equal(load(directory), expected)


def test_a_directory_without_safetensors_is_described(tmp_path):
    directory = write_checkpoint(tmp_path / "hf", TINY, random_tensors(TINY))
    (directory / SINGLE_FILE).unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor .*; it has config\.json"):
        load(directory)
    (directory / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(
        UserError, match=r"pytorch_model\.bin; .*pickled weights can run any program"
    ):
        load(directory)
    with pytest.raises(UserError, match=r"nowhere has neither .* it has nothing"):
        load_params(tmp_path / "nowhere", TINY, on_one_device(TINY))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d, index: (d / index[DOWN]).unlink(), "00003.safetensors does not exist"),
        (lambda d, index: index.update({"extra": index[DOWN]}), "has no tensor extra, but"),
        (lambda d, index: index.update({DOWN: "../other.safetensors"}), "names '../other"),
        (lambda d, index: index.update({DOWN: "weights.bin"}), r"names 'weights\.bin'"),
        (lambda d, index: index.update({DOWN: 3}), "has no weight_map of names"),
    ],
    ids=["missing file", "missing tensor", "path", "pickle", "number"],
)
def test_a_wrong_index_is_named(tmp_path, damage, message):
    directory = write_checkpoint(tmp_path / "hf", TINY, random_tensors(TINY), num_files=3)
    index = json.loads((directory / INDEX_FILE).read_text())["weight_map"]
    damage(directory, index)
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(UserError, match=message):
        load(directory)
    (directory / INDEX_FILE).write_text("{")
    with pytest.raises(UserError, match=r"index\.json is no JSON"):
        load(directory)


def test_export_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    params = load(write_checkpoint(tmp_path / "hf", TINY, random_tensors(TINY)))
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out exists and is not overwritten"):
        save_checkpoint(params, TINY, tmp_path / "out", dtype="float32")

    def fail(*_, **__):
        assert list(tmp_path.glob(".new.*.partial"))
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(params, TINY, tmp_path / "new", dtype="float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_an_export_in_another_type_is_refused(tmp_path):
    with pytest.raises(UserError, match="dtype int8 cannot be exported"):
        save_checkpoint({}, TINY, tmp_path / "out", dtype="int8")
