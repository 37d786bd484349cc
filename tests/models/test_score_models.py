"""Score heads: a critic from an actor, verdicts at the ends of sequences, reward models of Transformers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from extras import import_extra
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jaxrl.algos.logprobs import last_scores
from jaxrl.models.attention import attention
from jaxrl.models.compute import Compute
from jaxrl.models.decoder import decoder_graph, init_params, score_config, score_params
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.huggingface.weight_loading import load_params
from jaxrl.models.model_config import ModelConfig

ACTOR = ModelConfig(
    vocab_size=24, num_layers=2, d_model=16, d_ff=24, num_heads=4, num_kv_heads=2, head_dim=8
)
B, T = 3, 9


@functools.partial(jax.jit, static_argnums=0)
def hidden_and_scores(config, params, tokens_BT, segment_ids_BT):
    model = nnx.merge(decoder_graph(config)[0], params)
    positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    attend = lambda q, k, v, *_: (attention(q, k, v, segment_ids_BT), None)  # noqa: E731
    hidden, *_ = model(tokens_BT, positions, attend, compute=Compute())
    return hidden, model.scores(hidden, compute=Compute()) if config.num_scores else None


def tokens():
    return np.random.default_rng(0).integers(0, 24, (B, T)).astype(np.int32)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_a_critic_starts_from_an_actor(tie_embeddings):
    actor = dataclasses.replace(ACTOR, tie_embeddings=tie_embeddings)
    params = jax.jit(init_params, static_argnums=0)(actor, jax.random.key(0))
    critic = score_config(actor)
    value_params = score_params(params, critic)
    shapes = decoder_graph(critic)[1]
    assert jax.tree.map(jnp.shape, value_params) == jax.tree.map(jnp.shape, shapes)
    ones = np.ones((B, T), np.int32)
    hidden, values = hidden_and_scores(critic, value_params, tokens(), ones)
    np.testing.assert_array_equal(hidden, hidden_and_scores(actor, params, tokens(), ones)[0])
    assert values.shape == (B, T, 1)
    assert (np.asarray(values) == 0).all()


def test_a_fresh_critic_learns():
    params = jax.jit(init_params, static_argnums=0)(ACTOR, jax.random.key(0))
    critic = score_config(ACTOR)

    def loss(params):
        ones = np.ones((B, T), np.int32)
        return jnp.mean((hidden_and_scores(critic, params, tokens(), ones)[1] - 1.0) ** 2)

    params = jax.device_get(score_params(params, critic))
    before, gradient = jax.device_get(jax.jit(jax.value_and_grad(loss))(params))
    assert np.abs(gradient["score_head"]).max() > 0
    step = jax.tree.map(lambda p, g: p - np.float32(1e-3) * g, params, gradient)
    assert loss(step) < before


def test_scores_count_at_the_last_token_of_a_sequence():
    scores = np.arange(1, 13, dtype=np.float32).reshape(2, 6, 1)
    segments = np.array([[1, 1, 2, 3, 3, 0], [1, 1, 1, 1, 1, 1]], np.int32)
    found = np.asarray(jax.jit(last_scores)(scores, segments))[..., 0]
    np.testing.assert_array_equal(found, [[0, 2, 3, 0, 5, 0], [0, 0, 0, 0, 0, 12]])


@pytest.mark.parametrize("num_scores", [1, 3])
@pytest.mark.parametrize("family", ["Qwen2", "Llama", "Qwen3Moe"])
def test_reward_models_of_transformers(tmp_path, family, num_scores):
    """Their verdict on a right-padded batch is our score at the last real token, both ways."""
    torch = import_extra("parity", "torch")
    transformers = import_extra("parity", "transformers")
    sizes = dict(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        pad_token_id=0,
        num_labels=num_scores,
    )
    if family == "Qwen3Moe":
        sizes |= dict(moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForSequenceClassification")(
        getattr(transformers, f"{family}Config")(**sizes)
    ).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    config = read_config(tmp_path / "theirs")
    assert config.num_scores == num_scores
    device = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: device, decoder_graph(config)[1])
    params = load_params(tmp_path / "theirs", config, shardings)

    lengths = np.array([T, 4, 6])
    live = np.arange(T)[None] < lengths[:, None]
    padded = np.where(live, np.maximum(tokens(), 1), 0).astype(np.int32)
    segments = live.astype(np.int32)
    scores = hidden_and_scores(config, params, padded, segments)[1]
    found = np.asarray(jax.jit(last_scores)(scores, segments))[np.arange(B), lengths - 1]

    def verdict(model):
        with torch.no_grad():
            mask = torch.from_numpy(live.astype(np.int64))
            return model(torch.from_numpy(padded.astype(np.int64)), mask).logits.numpy()

    assert_close(found, verdict(theirs))
    save_checkpoint(params, config, tmp_path / "ours", dtype="float32", source=tmp_path / "theirs")
    back = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert_close(found, verdict(back))
