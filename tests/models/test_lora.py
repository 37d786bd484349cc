"""Adapters: fresh ones change nothing, merged ones compute the same, and PEFT reads what we save."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from extras import import_extra
from flax import nnx
from jax.sharding import SingleDeviceSharding
from model_sizes import sized_model
from safetensors.numpy import load_file

from jaxrl.errors import UserError
from jaxrl.models import lora
from jaxrl.models.attention import attention
from jaxrl.models.compute import Compute
from jaxrl.models.decoder import decoder_graph, init_params
from jaxrl.models.huggingface.weight_export import save_adapter, save_checkpoint
from jaxrl.models.huggingface.weight_loading import load_adapter
from jaxrl.models.huggingface.weight_table import adapter_table
from jaxrl.models.model_config import LoraConfig

DENSE = sized_model(24, 2, 16, 24, 4, 2, 8, lora=LoraConfig(rank=3, alpha=6.0))
MIXTURE = dataclasses.replace(
    DENSE, qkv_bias=False, qk_norm=True, num_experts=4, experts_per_token=2
)
GEMMA = dataclasses.replace(
    DENSE,
    qkv_bias=False,
    qk_norm=True,
    sliding_window=4,
    layer_pattern=("sliding", "full"),
    rope_local_theta=100.0,
    query_pre_attn_scalar=8.0,
    activation="gelu_tanh",
    post_norms=True,
    zero_centered_norms=True,
    scale_embeddings=True,
)
MODELS = {"dense": DENSE, "mixture": MIXTURE, "gemma": GEMMA}
LATENTS = dataclasses.replace(
    MIXTURE,
    num_layers=3,
    num_kv_heads=4,
    qk_norm=False,
    kv_latent=6,
    q_latent=5,
    rope_dim=4,
    value_dim=7,
    sigmoid_routing=True,
    first_dense_layers=1,
    dense_d_ff=20,
    shared_d_ff=24,
    lora=LoraConfig(rank=3, alpha=6.0, targets=("q", "k", "v", "o")),
)
OF_FILES = {**MODELS, "latents": LATENTS}
TOKENS = np.random.default_rng(0).integers(0, 24, (2, 12)).astype(np.int32)


@functools.cache
def trained(config):
    """Weights whose adapters have learned something."""
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))
    adapters, rest = lora.split(params)
    rng = np.random.default_rng(1)
    moved = lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(np.float32)  # noqa: E731
    return lora.join(jax.device_put(jax.tree.map(moved, adapters)), rest)


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, tokens_BT=TOKENS):
    model = nnx.merge(decoder_graph(config)[0], params)
    segments = jnp.ones_like(tokens_BT)
    positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    attend = lambda q, k, v, kind, *_: (attention(q, k, v, segments, kind), None)  # noqa: E731
    hidden, *_ = model(tokens_BT, positions, attend, compute=Compute())
    return model.logits(hidden, compute=Compute())


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_fresh_adapters_change_nothing(config):
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))
    _, rest = lora.split(params)
    np.testing.assert_array_equal(logits(config, params), logits(lora.base_config(config), rest))


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_merged_weights_compute_the_same(config):
    params = trained(config)
    base = lora.base_config(config)
    with_adapters = logits(config, params)
    assert_close(logits(base, lora.merge(params, config)), with_adapters)
    without = logits(base, lora.split(params)[1])
    assert np.abs(with_adapters - without).max() > 0.1


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"rank": -1}, "rank = -1: must be at least 0"),
        (
            {"rank": 4, "targets": ("q", "query")},
            "'query': is not one of q, k, v, o, gate, up, down",
        ),
    ],
)
def test_what_is_no_adapter_is_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        LoraConfig(**settings)


def without_experts(config):
    """The model with adapters of attention alone, if PEFT has none of the others."""
    targets = ("q", "k", "v", "o") if config.num_experts else config.lora.targets
    return dataclasses.replace(config, lora=dataclasses.replace(config.lora, targets=targets))


@pytest.mark.parametrize("targets", [("q", "gate"), ("up",), ("down", "o")])
def test_adapters_of_experts_are_not_saved_for_peft(tmp_path, targets):
    config = next(config for config in MODELS.values() if config.num_experts)
    config = dataclasses.replace(config, lora=dataclasses.replace(config.lora, targets=targets))
    names = ", ".join(set(targets) & {"gate", "up", "down"})
    with pytest.raises(
        UserError, match=f"no adapters for single experts .* merge .* leave {names}"
    ):
        save_adapter({}, config, tmp_path / "out", dtype="float32", base="models/base")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("config", OF_FILES.values(), ids=OF_FILES)
def test_adapters_come_back_as_they_were_saved(tmp_path, config):
    config = without_experts(config)
    params = trained(config)
    save_adapter(params, config, tmp_path / "out", dtype="float32", base="models/base")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    rows = adapter_table(config)
    assert {name: t.shape for name, t in tensors.items()} == {
        row.tensor_name(at): row.tensor_shape for row in rows for at in row.positions()
    }
    values = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"]) == (3, 6.0)
    assert values["base_model_name_or_path"] == "models/base"
    device = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: device, params)
    loaded = load_adapter(tmp_path / "out", config, shardings)
    jax.tree.map(np.testing.assert_array_equal, loaded, lora.split(params)[0])


def test_a_model_without_adapters_has_none_to_save(tmp_path):
    base = lora.base_config(DENSE)
    with pytest.raises(UserError, match="no adapters to save"):
        save_adapter({}, base, tmp_path / "out", dtype="float32", base="")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_rank_is_refused(tmp_path):
    save_adapter(trained(DENSE), DENSE, tmp_path / "out", dtype="float32", base="")
    other = dataclasses.replace(DENSE, lora=LoraConfig(rank=5))
    with pytest.raises(UserError, match=r"lora_A.weight .* shape \[3, 16\], .* says \[5, 16\]"):
        load_adapter(tmp_path / "out", other, {})


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("config", OF_FILES.values(), ids=OF_FILES)
def test_peft_loads_the_adapter_onto_the_base_model(tmp_path, config):
    peft = import_extra("parity", "peft")
    torch = import_extra("parity", "torch")
    transformers = import_extra("parity", "transformers")
    config = without_experts(config)
    params = trained(config)
    base = lora.base_config(config)
    save_checkpoint(lora.split(params)[1], base, tmp_path / "base", dtype="float32")
    save_adapter(params, config, tmp_path / "adapter", dtype="float32", base=str(tmp_path / "base"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS.astype(np.int64))).logits.numpy()
    assert_close(logits(config, params), expected)
