"""The decoder against Transformers: logits, gradients, sampled tokens, and the way back."""

import copy
import dataclasses
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from closeness import assert_close
from extras import import_extra
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jaxrl.algos.logprobs import token_logprobs
from jaxrl.errors import UserError
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.models import lora
from jaxrl.models.attention import TreeSegments, attention
from jaxrl.models.compute import Compute
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.model_files import ADAPTER_FILE
from jaxrl.models.huggingface.weight_export import (
    save_adapter,
    save_checkpoint,
    table_of_adapter,
)
from jaxrl.models.huggingface.weight_loading import check_params, load_params
from jaxrl.models.model_config import LoraConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import Prompts

torch = import_extra("parity", "torch")
transformers = import_extra("parity", "transformers")

SIZES = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10_000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    # Short, so that wavelengths on both sides and between are met within a test's texts.
    original_max_position_embeddings=32,
)
PLAIN = dict(rope_type="default", rope_theta=1e6)
YARN = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=8.0,
    original_max_position_embeddings=32,
    # Closer than the defaults, so that some wavelengths of so few lie between.
    beta_fast=8.0,
    beta_slow=0.5,
)
# No dimension is a power of two, and two devices divide the heads.
ODD = dict(
    vocab_size=48,
    hidden_size=40,
    intermediate_size=52,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
EXPERTS = dict(
    moe_intermediate_size=28,
    n_routed_experts=12,
    n_shared_experts=2,
    num_experts_per_tok=3,
    n_group=3,
    topk_group=2,
    routed_scaling_factor=1.8,
)
INDEXED = dict(
    **{**ODD, "num_key_value_heads": 4},
    **{k: v for k, v in EXPERTS.items() if "group" not in k},
    first_k_dense_replace=2,
    q_lora_rank=20,
    kv_lora_rank=18,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    index_topk=128,
    index_n_heads=6,
    index_head_dim=14,
)
FAMILIES = {
    "qwen2": lambda **kw: transformers.Qwen2Config(**SIZES, rope_parameters=dict(PLAIN), **kw),
    # Heads are not hidden_size / num_attention_heads wide.
    "qwen3": lambda **kw: transformers.Qwen3Config(
        **SIZES, head_dim=16, rope_parameters=dict(PLAIN), **kw
    ),
    "qwen3_moe": lambda **kw: transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rope_parameters=dict(PLAIN),
        **kw,
    ),
    "llama": lambda **kw: transformers.LlamaConfig(
        **SIZES, rms_norm_eps=1e-5, rope_parameters=dict(LLAMA3), **kw
    ),
    # Windows are shorter than the texts.
    "mistral": lambda **kw: transformers.MistralConfig(
        **SIZES, sliding_window=10, rms_norm_eps=1e-5, rope_parameters=dict(PLAIN), **kw
    ),
    "gemma3": lambda **kw: transformers.Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=10,
        layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=5.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        **kw,
    ),
    "gemma2": lambda **kw: transformers.Gemma2Config(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=10,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        rope_parameters=dict(PLAIN),
        **kw,
    ),
    "qwen2_windows": lambda **kw: transformers.Qwen2Config(
        **ODD,
        use_sliding_window=True,
        sliding_window=10,
        max_window_layers=3,
        rope_parameters=dict(PLAIN),
        **kw,
    ),
    "qwen2_yarn": lambda **kw: transformers.Qwen2Config(**ODD, rope_parameters=dict(YARN), **kw),
    "qwen3_yarn": lambda **kw: transformers.Qwen3Config(
        **ODD,
        head_dim=14,
        rope_parameters={**YARN, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5},
        **kw,
    ),
    "smollm3": lambda **kw: transformers.SmolLM3Config(
        **ODD, no_rope_layers=[1, 0, 1, 1], pad_token_id=None, rope_parameters=dict(PLAIN), **kw
    ),
    # Six of the ten dimensions of a head are rotated.
    "phi4": lambda **kw: transformers.Phi3Config(
        **ODD, pad_token_id=None, rope_parameters={**PLAIN, "partial_rotary_factor": 0.6}, **kw
    ),
    "phi4_mini": lambda **kw: transformers.Phi3Config(
        **ODD,
        pad_token_id=None,
        original_max_position_embeddings=128,
        partial_rotary_factor=0.6,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=1e4,
            short_factor=[1.0, 1.25, 1.5],
            long_factor=[1.0, 4.0, 16.0],
        ),
        **kw,
    ),
    # Heads are wider than their share of the model.
    "mistral_small3": lambda **kw: transformers.MistralConfig(
        **ODD, head_dim=14, sliding_window=None, rope_parameters=dict(PLAIN), **kw
    ),
    "ministral3": lambda **kw: transformers.Ministral3Config(
        **ODD,
        head_dim=14,
        pad_token_id=None,
        rope_parameters={
            **YARN,
            "original_max_position_embeddings": 16,
            "factor": 16.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        **kw,
    ),
    # Biases of such size that some gates are beyond their bounds.
    "gpt_oss": lambda **kw: transformers.GptOssConfig(
        **{**ODD, "intermediate_size": 28},
        head_dim=14,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=10,
        rope_parameters={**YARN, "truncate": False},
        **kw,
    ),
    # Two dense layers, and experts in three groups, two of which a token takes.
    "glm4_moe": lambda **kw: transformers.Glm4MoeConfig(
        **ODD,
        head_dim=12,
        attention_bias=True,
        use_qk_norm=True,
        first_k_dense_replace=2,
        **EXPERTS,
        rope_parameters=dict(PLAIN),
        **kw,
    ),
    # Values are narrower than keys here, and wider in the next.
    "deepseek_v3": lambda **kw: transformers.DeepseekV3Config(
        **{**ODD, "num_key_value_heads": 4},
        **{**EXPERTS, "n_shared_experts": 1},
        first_k_dense_replace=2,
        q_lora_rank=20,
        kv_lora_rank=18,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=12,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        **kw,
    ),
    "glm4_moe_lite": lambda **kw: transformers.Glm4MoeLiteConfig(
        **{**ODD, "num_key_value_heads": 4},
        **EXPERTS,
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        q_lora_rank=None,
        kv_lora_rank=18,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=14,
        rope_interleave=False,
        rope_parameters=dict(PLAIN),
        **kw,
    ),
    # The longest texts here have fewer tokens than indexers choose.
    "deepseek_v32": lambda **kw: transformers.DeepseekV32Config(
        **INDEXED,
        n_group=3,
        topk_group=2,
        v_head_dim=12,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        **kw,
    ),
    "glm_moe_dsa": lambda **kw: transformers.GlmMoeDsaConfig(
        **INDEXED,
        n_group=1,
        topk_group=1,
        v_head_dim=18,
        indexer_types=["full", "shared", "full", "shared"],
        rope_parameters=dict(PLAIN),
        **kw,
    ),
    "olmo3": lambda **kw: transformers.Olmo3Config(
        **ODD,
        sliding_window=10,
        pad_token_id=None,
        eos_token_id=None,
        rope_parameters={
            "full_attention": {**YARN, "rope_theta": 500_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
        },
        **kw,
    ),
}


# Two periods of a delta net and attention; heads of keys and values differ in number and size.
DELTA = dict(
    **ODD,
    head_dim=16,
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    # Of few dimensions some heads would be nearly 0, and their norms would enlarge what is rounded: with the
    # usual epsilon of 1e-6 one ulp in the weights moves a token by 1.4e-5 of the largest, with this by 3e-6.
    linear_key_head_dim=22,
    linear_value_head_dim=26,
    rms_norm_eps=1e-2,
)
DELTA_MOE = dict(
    **DELTA,
    num_experts=6,
    num_experts_per_tok=3,
    moe_intermediate_size=28,
    shared_expert_intermediate_size=22,
)


def gemma4(**kw):
    """Heads of 10 and of 14 dimensions; three of the seven pairs of the latter turn."""
    sizes = dict(
        **ODD,
        head_dim=10,
        global_head_dim=14,
        hidden_size_per_layer_input=0,
        sliding_window=10,
        layer_types=["sliding_attention", "full_attention"] * 2,
        final_logit_softcapping=5.0,
        pad_token_id=None,
        eos_token_id=None,
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.45,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    )
    return transformers.Gemma4TextConfig(**{**sizes, **kw})


FAMILIES |= {
    "qwen3_5": lambda **kw: transformers.Qwen3_5TextConfig(
        **DELTA, rope_parameters=dict(PLAIN), **kw
    ),
    "qwen3_5_moe": lambda **kw: transformers.Qwen3_5MoeTextConfig(
        **DELTA_MOE, rope_parameters=dict(PLAIN), **kw
    ),
    "qwen3_next": lambda **kw: transformers.Qwen3NextConfig(
        **DELTA_MOE, norm_topk_prob=True, rope_parameters=dict(PLAIN), **kw
    ),
    "gemma4": gemma4,
    # Two periods with keys and values, and one without. The sizes are such that the two float32 models are
    # both as close to Transformers in float64: gates before a norm enlarge rounding where they are nearly 0.
    "gemma4_e2b": lambda **kw: gemma4(
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        head_dim=6,
        global_head_dim=8,
        hidden_size_per_layer_input=26,
        vocab_size_per_layer_input=48,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        **kw,
    ),
    "gemma4_moe": lambda **kw: gemma4(
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=3,
        moe_intermediate_size=28,
        **kw,
    ),
}
BOTH = ("qwen2", "qwen3", "qwen3_moe", "llama")
# Of the others only the kind of unembedding that published models have; the code is the same for all.
PUBLISHED = {"mistral": False, "gemma3": True, "gemma2": True}
TIED = ("qwen2_yarn", "smollm3", "phi4_mini", "ministral3", "gemma4", "gemma4_e2b", "gemma4_moe")
LATER = {name: name in TIED for name in FAMILIES if name not in (*BOTH, *PUBLISHED)}
ONCE = [*PUBLISHED.items(), *(pytest.param(*row, marks=pytest.mark.long) for row in LATER.items())]
FAMILY_AND_TIE = [*((family, tie) for family in BOTH for tie in (True, False)), *ONCE]
COMPUTE = Compute()
# All batches have one shape, so that one program per model is compiled.
B, T = 3, 64


@dataclasses.dataclass(frozen=True)
class Pair:
    """One model twice: Transformers' own, and ours loaded from what it saved."""

    theirs: object
    graph: object
    params: object
    config: object
    directory: object


def with_random_weights(model, family):
    model = model.float().eval()
    with torch.no_grad():
        # Buffers that are saved too, such as Gemma 4's factors of layers.
        for parameter in filter(torch.is_floating_point, model.state_dict().values()):
            # Norm scales and biases too, or a forgotten one could not be seen.
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            # Gemma's (but Gemma 4's) and Qwen3.5's are scales less 1.
            less_1 = family in ("gemma2", "gemma3", "qwen3_5", "qwen3_5_moe", "qwen3_next")
            centre = float(parameter.ndim == 1 and not less_1)
            parameter.copy_(centre + scale * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory):
    @functools.cache
    def make(family, tie):
        torch.manual_seed(0)
        config = FAMILIES[family](tie_word_embeddings=tie)
        theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        theirs = with_random_weights(theirs, family)
        directory = tmp_path_factory.mktemp(f"{family.replace(' ', '-')}-{tie}")
        theirs.save_pretrained(directory)
        config = read_config(directory)
        return Pair(theirs, decoder_graph(config)[0], load(directory, config), config, directory)

    return make


def load(directory, config):
    device = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: device, decoder_graph(config)[1])
    return load_params(directory, config, shardings)


def hidden_states(graph, params, tokens_BT, positions_BT, segment_ids_BT):
    def attend(q, k, v, kind, *_):
        return attention(q, k, v, segment_ids_BT, kind), None

    model = nnx.merge(graph, params)
    return model(tokens_BT, positions_BT, attend, compute=COMPUTE, per_row=segment_ids_BT)[0]


@functools.partial(jax.jit, static_argnums=0)
def jitted_logits(graph, params, tokens_BT, positions_BT, segment_ids_BT):
    hidden = hidden_states(graph, params, tokens_BT, positions_BT, segment_ids_BT)
    return nnx.merge(graph, params).logits(hidden, compute=COMPUTE)


def our_logits(pair, *batch):
    return np.asarray(jitted_logits(pair.graph, pair.params, *batch))


def their_logits(model, tokens_BT, **kwargs):
    with torch.no_grad():
        return model(torch.from_numpy(tokens_BT.astype(np.int64)), **kwargs).logits.numpy()


def random_tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 48, shape).astype(np.int32)


def counting():
    return np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))


def pack(sequences):
    """One row with all sequences: tokens, positions, segment ids, and where each lies."""
    tokens, positions, segments = (np.zeros((1, T), np.int32) for _ in range(3))
    places, begin = [], 0
    for i, sequence in enumerate(sequences, start=1):
        place = slice(begin, begin + len(sequence))
        tokens[0, place], positions[0, place] = sequence, np.arange(len(sequence))
        segments[0, place] = i
        places.append(place)
        begin = place.stop
    return tokens, positions, segments, places


def batch_of(rows):
    """Tokens, positions and segment ids of rows of sequences, and where each sequence lies."""
    *arrays, places = zip(*(pack(row) for row in rows), strict=True)
    return *(np.concatenate(array) for array in arrays), places


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("family", "tie"), FAMILY_AND_TIE)
def test_logits_of_a_padded_batch(pair_of, family, tie, side):
    pair = pair_of(family, tie)
    tokens_BT = random_tokens(B, T)
    real_BT = counting() < np.array([T, 40, 7])[:, None]
    if side == "left":
        real_BT = real_BT[:, ::-1].copy()
    positions_BT = np.maximum(np.cumsum(real_BT, 1) - 1, 0).astype(np.int32)
    found = our_logits(pair, tokens_BT, positions_BT, real_BT.astype(np.int32))
    expected = their_logits(
        pair.theirs,
        tokens_BT,
        attention_mask=torch.from_numpy(real_BT.astype(np.int64)),
        position_ids=torch.from_numpy(positions_BT.astype(np.int64)),
    )
    assert expected.std() > 0.5  # large enough that the tolerance means something
    assert_close(found[real_BT], expected[real_BT])


@pytest.mark.parametrize(("family", "tie"), FAMILY_AND_TIE)
def test_logits_of_packed_sequences(pair_of, family, tie):
    pair = pair_of(family, tie)
    rows = [[random_tokens(n, seed=n) for n in lengths] for lengths in ((31, 5, 9), (7, 50), (64,))]
    tokens_BT, positions_BT, segment_ids_BT, places = batch_of(rows)
    found = our_logits(pair, tokens_BT, positions_BT, segment_ids_BT)
    for b, row in enumerate(rows):
        for sequence, place in zip(row, places[b], strict=True):
            expected = their_logits(pair.theirs, sequence[None])[0]
            assert_close(found[b, place], expected)


@functools.partial(jax.jit, static_argnums=0)
def our_gradient(graph, params, tokens_BT, positions_BT, segment_ids_BT):
    def loss(params):
        model = nnx.merge(graph, params)
        hidden = hidden_states(graph, params, tokens_BT, positions_BT, segment_ids_BT)
        logprob_BT, _ = token_logprobs(
            functools.partial(model.logits, compute=COMPUTE),
            hidden,
            tokens_BT,
            segment_ids_BT,
            temperature=1.0,
            chunk_tokens=24,
        )
        return -logprob_BT.sum()

    return jax.value_and_grad(loss)(params)


def their_gradient(pair, sequences, directory):
    """Their loss, and their gradients brought into our tree by way of a checkpoint of them."""
    pair.theirs.zero_grad()
    total = 0.0
    for sequence in sequences:
        tokens = torch.from_numpy(sequence.astype(np.int64))[None]
        logits = pair.theirs(tokens).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
        loss.backward()
        total += loss.item()
    # Saved as the weights of a model of its kind, since that is where names and layouts are known.
    holder = copy.deepcopy(pair.theirs)
    gradients = dict(pair.theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in holder.named_parameters():
            # Indexers have none.
            grad = gradients[name].grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    holder.save_pretrained(directory)
    return total, load(directory, pair.config)


@pytest.mark.parametrize(
    ("family", "tie"),
    [
        # Half of them: the logits above cover both kinds of unembedding for every family.
        *(
            pytest.param(family, tie, marks=pytest.mark.slow if tie != (i % 2 == 0) else ())
            for i, family in enumerate(BOTH)
            for tie in (True, False)
        ),
        *ONCE,
    ],
)
def test_gradients_of_padded_and_packed_batches(pair_of, tmp_path, family, tie):
    pair = pair_of(family, tie)
    first, second, third = sequences = [random_tokens(n, seed=n) for n in (40, 8, 15)]
    their_loss, expected = their_gradient(pair, sequences, tmp_path)
    for rows in ([[first], [second], [third]], [[first], [second, third], []]):
        loss, found = our_gradient(pair.graph, pair.params, *batch_of(rows)[:3])
        np.testing.assert_allclose(loss, their_loss, rtol=1e-5)
        # A sum of forty losses, through layers and back.
        found, expected = (lora.split_trained(tree)[0] for tree in (found, expected))
        assert_close(found, expected, rtol=1e-4)


@pytest.mark.parametrize(("family", "tie"), FAMILY_AND_TIE)
def test_what_we_export_transformers_loads(pair_of, tmp_path, family, tie):
    pair = pair_of(family, tie)
    # Other weights than those of the source, lest its files be what is read.
    params = jax.tree.map(lambda leaf: leaf * 0.9, pair.params)
    save_checkpoint(
        params,
        pair.config,
        tmp_path / "out",
        dtype="float32",
        max_shard_bytes=20_000,
        source=pair.directory,
    )
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values())
    assert theirs.config.architectures == pair.theirs.config.architectures
    # The older spelling of the kind may stand beside the newer one.
    theirs.config.rope_parameters.pop("type", None)
    assert theirs.config.rope_parameters == pair.theirs.config.rope_parameters
    tokens_BT = random_tokens(B, T)
    changed = dataclasses.replace(pair, params=params)
    found = our_logits(changed, tokens_BT, counting(), np.ones_like(tokens_BT))
    expected = their_logits(theirs, tokens_BT)
    assert_close(expected, found)
    assert not np.allclose(expected, their_logits(pair.theirs, tokens_BT), atol=0.1)


@pytest.mark.long
@pytest.mark.parametrize("family", LATER)
def test_adapters_and_shared_prompts(pair_of, family):
    """Merged adapters compute the same, and answers beside a shared prompt what each alone does."""
    pair = pair_of(family, LATER[family])
    config = lora.with_adapters(pair.config, LoraConfig(rank=3))
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(
        lambda leaf: 0.05 * rng.normal(size=leaf.shape).astype(np.float32),
        lora.split(decoder_graph(config)[1])[0],
    )
    params = lora.join(adapters, pair.params)
    tokens_BT = random_tokens(B, T)
    whole = (tokens_BT, counting(), np.ones_like(tokens_BT))
    found = jitted_logits(decoder_graph(config)[0], params, *whole)
    merged = jitted_logits(pair.graph, lora.merge(params, config), *whole)
    assert_close(found, merged)
    assert not np.allclose(found, our_logits(pair, *whole), atol=0.01)

    if pair.config.has_state:
        return  # refused by `PackedModel`
    prompt, answers = random_tokens(20), [random_tokens(n, seed=n) for n in (9, 30)]
    tokens_1T, positions_1T, *ids = (np.zeros((1, T), np.int32) for _ in range(4))
    segments = TreeSegments(*ids, positions_1T)
    begin = 0
    for i, (text, first, prefix) in enumerate(
        [(prompt, 0, 0), *((answer, len(prompt), 1) for answer in answers)], start=1
    ):
        place = slice(begin, begin := begin + len(text))
        tokens_1T[0, place], positions_1T[0, place] = text, first + np.arange(len(text))
        segments.segment_ids_BT[0, place], segments.prefix_ids_BT[0, place] = i, prefix
        if prefix:
            answers[i - 2] = (place, np.concatenate([prompt, text]))
    found = our_logits(pair, tokens_1T, positions_1T, segments)
    for place, text in answers:
        assert_close(found[0, place], their_logits(pair.theirs, text[None])[0, len(prompt) :])


def test_layers_have_the_heads_that_transformers_numbers(tmp_path):
    """Its numbers have as many digits as the last one."""
    kinds = ["sliding_attention", "full_attention"] * 6
    gemma4(num_hidden_layers=12, layer_types=kinds).save_pretrained(tmp_path)
    assert "01" in json.loads((tmp_path / "config.json").read_text())["per_layer_config"]
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json")
        .read_text()
        .replace('"model_type"', '"architectures": ["Gemma4ForCausalLM"], "model_type"')
    )
    config = read_config(tmp_path)
    assert (config.head_dim, config.full_head_dim, config.full_kv_heads) == (10, 14, 0)
    assert config.layer_pattern == ("sliding", "full")


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("window", "more"),
    [
        *(
            (10, {"layer_types": types})
            for types in ([SLIDING, FULL], [FULL, SLIDING], [SLIDING] * 2)
        ),
        *((10, {"layer_types": None, "max_window_layers": n}) for n in (0, 1, 2)),
        (10, {"layer_types": [FULL, FULL], "max_window_layers": 0}),
        # These have all positions in them.
        *(
            (n, {"layer_types": types})
            for n in (256, 300)
            for types in ([SLIDING] * 2, [FULL, SLIDING])
        ),
        *((n, {"layer_types": None, "max_window_layers": 0}) for n in (256, 300)),
        (None, {"layer_types": [FULL, FULL]}),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_qwen_are_those_of_transformers(pair_of, tmp_path, family, window, more):
    pair = pair_of(family, True)
    directory = shutil.copytree(pair.directory, tmp_path / "windows")
    values = json.loads((directory / "config.json").read_text())
    values |= {"use_sliding_window": True, "sliding_window": window, **more}
    (directory / "config.json").write_text(json.dumps(values))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager"
    )
    config = read_config(directory)
    ours = Pair(theirs, decoder_graph(config)[0], load(directory, config), config, directory)
    tokens_BT = random_tokens(B, T)
    expected = their_logits(theirs, tokens_BT)
    assert_close(our_logits(ours, tokens_BT, counting(), np.ones_like(tokens_BT)), expected)
    whole = their_logits(pair.theirs, tokens_BT)
    assert np.allclose(expected, whole, atol=1e-3) == (not any(config.sliding_layers))


@pytest.mark.long
def test_longer_texts_have_other_rotary_factors(pair_of, tmp_path):
    pair = pair_of("phi4_mini", True)
    shutil.copytree(pair.directory, tmp_path / "short")
    values = json.loads((tmp_path / "short" / "config.json").read_text())
    values["original_max_position_embeddings"] = 16
    values["rope_parameters"]["original_max_position_embeddings"] = 16
    (tmp_path / "short" / "config.json").write_text(json.dumps(values))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "short", attn_implementation="eager"
    )
    config = read_config(tmp_path / "short")
    assert config.for_texts_of(16) == config
    config = config.for_texts_of(T)
    changed = dataclasses.replace(pair, graph=decoder_graph(config)[0])
    tokens_BT = random_tokens(B, T)
    found = our_logits(changed, tokens_BT, counting(), np.ones_like(tokens_BT))
    assert_close(found, their_logits(theirs, tokens_BT))


ATTENTION, NETWORK = ("q", "k", "v", "o"), ("gate", "up", "down")
# Families by the projections of which PEFT can have no adapters: parts of one tensor, or experts.
OF_MIXTURES = {
    *("qwen3_moe", "glm4_moe", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"),
    *("gpt_oss", "qwen3_5_moe", "qwen3_next", "gemma4_moe"),
}
WITHOUT_PEFT = {
    **dict.fromkeys(OF_MIXTURES, NETWORK),
    **dict.fromkeys(("phi4", "phi4_mini", "qwen3_next"), (*ATTENTION, *NETWORK)),
    "qwen3_5": ("q", "k", "v"),
    "qwen3_5_moe": ("q", "k", "v", *NETWORK),
}


def with_adapters(pair, targets):
    """The model with adapters that have learned something, and their shape."""
    config = lora.with_adapters(pair.config, LoraConfig(rank=3, alpha=6.0, targets=targets))
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(
        lambda leaf: jnp.asarray(0.05 * rng.normal(size=leaf.shape), jnp.float32),
        lora.split(decoder_graph(config)[1])[0],
    )
    return config, lora.join(adapters, pair.params)


def loaded_by_peft(pair, directory):
    peft = import_extra("parity", "peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        pair.directory, attn_implementation="eager"
    )
    return peft.PeftModel.from_pretrained(base, directory).eval()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(("family", "tie"), FAMILY_AND_TIE)
def test_peft_computes_the_same_with_an_adapter_or_it_is_refused(pair_of, tmp_path, family, tie):
    pair, refused = pair_of(family, tie), WITHOUT_PEFT.get(family, ())
    for target in refused:
        config = lora.with_adapters(pair.config, LoraConfig(rank=3, targets=(target,)))
        with pytest.raises(UserError, match=r"PEFT has .*merge the adapters"):
            table_of_adapter(config, str(pair.directory))
    targets = tuple(name for name in (*ATTENTION, *NETWORK) if name not in refused)
    if not targets:
        return
    config, params = with_adapters(pair, targets)
    save_adapter(params, config, tmp_path / "out", dtype="float32", base=str(pair.directory))
    tokens_BT = random_tokens(B, T)
    whole = (tokens_BT, counting(), np.ones_like(tokens_BT))
    expected = their_logits(loaded_by_peft(pair, tmp_path / "out"), tokens_BT)
    assert_close(jitted_logits(decoder_graph(config)[0], params, *whole), expected)
    assert not np.allclose(our_logits(pair, *whole), expected, atol=0.01)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_takes_every_tensor_of_an_adapter_of_one_projection(pair_of, tmp_path, family):
    pair = pair_of(family, family in TIED)
    for target in (*ATTENTION, *NETWORK):
        if target in WITHOUT_PEFT.get(family, ()):
            continue
        config, params = with_adapters(pair, (target,))
        out = tmp_path / target
        save_adapter(params, config, out, dtype="float32", base=str(pair.directory))
        saved = safetensors.numpy.load_file(out / ADAPTER_FILE)
        theirs = loaded_by_peft(pair, out)
        found = {
            name.replace(".default", ""): value.numpy()
            for name, value in theirs.state_dict().items()
            if ".lora_" in name
        }
        assert found.keys() == saved.keys() and saved
        for name, value in saved.items():
            np.testing.assert_array_equal(found[name], value)


GREEDY = 64
ENGINE = EngineConfig(
    slots=8,
    smallest_bucket=8,
    prefill_prompts=2,
    max_prompt_tokens=40,
    max_response_tokens=GREEDY,
    tokens_per_dispatch=16,
    stop_ids=(),
)
# How the tokens are sampled: settings of the engine, and the layout of its devices.
WAYS = {
    "contiguous": ({}, {}),
    "paged and in chunks, over heads and replicas": (
        dict(cache="paged", prefill_chunk_tokens=16),
        dict(train="1-4-2", generate="1-2-2-2", fsdp=2),
    ),
    "stages": ({}, dict(train="2-2-2", generate="2-2-1-2")),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", LATER)
def test_greedy_tokens_are_theirs(pair_of, family):
    pair = pair_of(family, LATER[family])
    texts = [random_tokens(n, seed=n) for n in (3, 17, 38)]
    expected = []
    for text in texts:
        for _ in range(GREEDY):
            last = their_logits(pair.theirs, text[None])[0, -1]
            text = np.append(text, last.argmax().astype(np.int32))
        expected.append(text[-GREEDY:].tolist())
    blank = ("",) * len(texts)
    prompts = Prompts(np.arange(len(texts)), tuple(texts), blank, blank, blank)
    for way, (changes, layout) in WAYS.items():
        layout = ParallelLayout.from_config(LayoutConfig(**layout))
        mesh = build_mesh(layout, jax.devices()[: layout.num_devices])
        if pair.config.sharing_layers and layout.p_g > 1:
            with pytest.raises(UserError, match="2 pipeline stages, but layers of the model"):
                pair.config.check_stages(layout.p_g)
            continue
        engine = Engine(pair.config, pair.graph, mesh, dataclasses.replace(ENGINE, **changes))
        backend = OfflineBackend(engine, functools.partial(map, str))
        _, shapes, axes = decoder_graph(pair.config)
        backend.load(jax.device_put(pair.params, shardings(axes, shapes, GENERATE_RULES, mesh)))
        found = backend.generate(prompts, SamplingOptions(temperature=0.0))
        assert [tokens.tolist() for tokens in found.tokens] == expected, way


@pytest.mark.long
@pytest.mark.parametrize("family", LATER)
def test_export_has_the_bits_of_the_source(pair_of, tmp_path, family):
    pair = pair_of(family, LATER[family])
    save_checkpoint(
        pair.params, pair.config, tmp_path / "out", dtype="float32", source=pair.directory
    )
    tensors = [
        safetensors.numpy.load_file(path / "model.safetensors")
        for path in (pair.directory, tmp_path / "out")
    ]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        np.testing.assert_array_equal(tensors[1][name], tensor, err_msg=name)
    assert read_config(tmp_path / "out") == pair.config


VISION = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
# The text model, its class alone, and the config of the model with images.
WITH_IMAGES = {
    "gemma3": (
        lambda: FAMILIES["gemma3"](),
        "Gemma3ForCausalLM",
        lambda **kw: transformers.Gemma3Config(vision_config=VISION, mm_tokens_per_image=4, **kw),
    ),
    "mistral3": (
        lambda: FAMILIES["mistral_small3"](),
        "MistralForCausalLM",
        lambda **kw: transformers.Mistral3Config(
            vision_config=dict(VISION, model_type="pixtral", head_dim=8),
            tie_word_embeddings=False,
            **kw,
        ),
    ),
}


@pytest.fixture(scope="module", params=["gemma3", pytest.param("mistral3", marks=pytest.mark.long)])
def with_images(request, tmp_path_factory):
    """A model with images, the directory of its files, and the class of its text model."""
    torch.manual_seed(0)
    text, alone, whole = WITH_IMAGES[request.param]
    config = whole(text_config=text().to_dict(), eos_token_id=[1, 7])
    model = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    )
    model = with_random_weights(model, request.param)
    directory = tmp_path_factory.mktemp("with-images")
    model.save_pretrained(directory)
    return model, directory, alone


@pytest.mark.parametrize("newer_names", [False, True])
def test_the_text_model_of_a_model_with_images(with_images, tmp_path, newer_names, caplog):
    theirs, directory, alone = with_images
    if newer_names:
        source, directory = directory, tmp_path / "newer"
        shutil.copytree(source, directory)
        tensors = safetensors.numpy.load_file(source / "model.safetensors")
        renamed = {
            name.replace("language_model.model.", "model.language_model.").replace(
                "language_model.lm_head.", "lm_head."
            )
            if name.startswith("language_model.")
            else f"model.{name}": tensor
            for name, tensor in tensors.items()
        }
        if "language_model.lm_head.weight" not in tensors:
            renamed["lm_head.weight"] = renamed["model.language_model.embed_tokens.weight"]
        safetensors.numpy.save_file(renamed, directory / "model.safetensors")
    config = read_config(directory)
    assert config.vocab_size == 48
    with caplog.at_level("INFO"):
        check_params(directory, config)
    assert "multi_modal_projector, vision_tower is not read" in caplog.text
    pair = Pair(theirs, decoder_graph(config)[0], load(directory, config), config, directory)
    tokens_BT = random_tokens(B, T)
    found = our_logits(pair, tokens_BT, counting(), np.ones_like(tokens_BT))
    expected = their_logits(theirs, tokens_BT)
    assert expected.std() > 0.5
    assert_close(found, expected)

    save_checkpoint(pair.params, config, tmp_path / "out", dtype="float32", source=directory)
    exported, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values())
    assert exported.config.architectures == [alone]
    assert exported.config.eos_token_id == [1, 7]
    assert_close(their_logits(exported, tokens_BT), found)


# The config of the model with images around that of its text model, and the parts that are not read.
UNDER_MODEL = {
    "qwen3_5": ("Qwen3_5Config", QWEN_VISION := dict(VISION, depth=1, num_heads=2), "mtp, visual"),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", QWEN_VISION, "mtp, visual"),
    "gemma4_moe": (
        "Gemma4Config",
        dict(VISION, num_key_value_heads=2, head_dim=8),
        "embed_vision, mtp, vision_tower",
    ),
}


def with_fused_experts(tensors):
    """Gate and up of all experts in one tensor, and down in another, as Qwen3.5's mixtures are published."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*mlp\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            prefix, number, part = match.groups()
            experts.setdefault(prefix, {}).setdefault(part, {})[int(number)] = tensor
        else:
            found[name] = tensor
    for prefix, parts in experts.items():
        stacks = {part: np.stack([of[i] for i in sorted(of)]) for part, of in parts.items()}
        found[f"{prefix}.gate_up_proj"] = np.concatenate([stacks["gate"], stacks["up"]], axis=1)
        found[f"{prefix}.down_proj"] = stacks["down"]
    return found


@pytest.mark.long
@pytest.mark.parametrize("family", UNDER_MODEL)
def test_the_text_model_inside_of_model(family, tmp_path, caplog):
    """As published: with rotary positions in three parts, and a layer for the token after the next."""
    torch.manual_seed(0)
    make, vision, unread = UNDER_MODEL[family]
    text = {**FAMILIES[family]().to_dict(), "pad_token_id": 0}
    if "qwen" in family:
        vision = {**vision, "out_hidden_size": text["hidden_size"]}
        text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config = getattr(transformers, make)(text_config=text, vision_config=vision)
    theirs = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    )
    theirs = with_random_weights(theirs, family)
    theirs.save_pretrained(tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    tensors["mtp.fc.weight"] = np.zeros((2, 2), np.float32)
    tensors = with_fused_experts(tensors)
    assert any("gate_up_proj" in name for name in tensors) == ("moe" in family)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    config = read_config(tmp_path)
    with caplog.at_level("INFO"):
        check_params(tmp_path, config)
    assert f"{unread} is not read" in caplog.text
    pair = Pair(theirs, decoder_graph(config)[0], load(tmp_path, config), config, tmp_path)
    tokens_BT = random_tokens(B, T)
    found = our_logits(pair, tokens_BT, counting(), np.ones_like(tokens_BT))
    assert_close(found, their_logits(theirs, tokens_BT))
