import dataclasses
import json
import pathlib

import jax
import pytest

from jaxrl.errors import UserError
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.config_json import (
    adapter_config_json,
    config_json,
    parse_config,
    read_adapter_config,
)
from jaxrl.models.model_config import LoraConfig, ModelConfig, RopeScaling
from jaxrl.models.shapes import SHAPES
from jaxrl.roles.flops import token_flops

# The config.json of a published model of each family, without keys that no reader needs. Gemma-3-4b leaves
# out defaults; DeepSeek-V3 is published in fp8, which is refused: this is the file of one in bfloat16.
# Gemma 4 and GLM with indexers are small ones of our own.
PUBLISHED = json.loads(pathlib.Path(__file__).with_name("published_configs.json").read_text())
_NAMES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma3", "gemma4", "deepseek_v3")
QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL, GEMMA3, GEMMA4, DEEPSEEK_V3 = map(PUBLISHED.get, _NAMES)
LLAMA3_SCALING = LLAMA["rope_scaling"]
# A family, what is changed in its file, and the error.
_LINES = pathlib.Path(__file__).with_name("refused_configs.tsv").read_text().splitlines()
REFUSED = [line.split("\t") for line in _LINES]


TEXT_MODELS = {
    "gemma3_4b": "Gemma3ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}


def without(values, *keys):
    return {k: v for k, v in values.items() if k not in keys}


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("mistral", "mistral-7b-v0.1"),
        ("gemma3", "gemma-3-1b"),
        ("smollm3", "smollm3-3b"),
        ("olmo3", "olmo-3-7b"),
        ("glm4_moe", "glm-4.5-air"),
        ("deepseek_v3", "deepseek-v3"),
        ("qwen2", "qwen2.5-0.5b"),
        ("qwen3", "qwen3-0.6b"),
        ("qwen3_moe", "qwen3-30b-a3b"),
        ("llama", "llama-3.1-8b"),
        ("ministral3", "ministral-3-3b"),
        ("qwen3_5_moe", "qwen3.5-35b-a3b"),
        ("qwen3_next", "qwen3-next-80b-a3b"),
    ],
)
def test_the_shapes_known_by_name_are_those_of_the_files(family, shape):
    assert parse_config(PUBLISHED[family]) == SHAPES[shape]


def test_what_gemma_3_files_of_other_versions_say_means_the_same():
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(26)]
    listed = {**without(GEMMA3, "sliding_window_pattern"), "layer_types": kinds}
    assert parse_config(listed) == parse_config(GEMMA3)
    nested = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    bare = without(listed, "rope_theta", "rope_scaling", "rope_local_base_freq")
    assert parse_config({**bare, "rope_parameters": nested}) == parse_config(GEMMA3)
    # What the class takes where a file says nothing.
    sparse = without(GEMMA3, "sliding_window_pattern", "rope_theta", "rope_local_base_freq")
    assert parse_config(without(sparse, "query_pre_attn_scalar")) == parse_config(GEMMA3)
    scaled = parse_config({**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert scaled.rope_scaling == RopeScaling(factor=8.0, kind="linear")


def test_the_text_model_of_a_gemma_3_with_images():
    values = PUBLISHED["gemma3_4b"]
    config = parse_config(values)
    # Embeddings and final norm; per layer q and o, k and v, feed-forward, four norms and two of heads.
    layer = 2 * 2560 * 2048 + 2 * 2560 * 1024 + 3 * 2560 * 10240 + 4 * 2560 + 2 * 256
    assert config.num_params == 262_208 * 2560 + 2560 + 34 * layer == 3_880_263_168
    assert config.rope_scaling == RopeScaling(factor=8.0, kind="linear")
    assert (config.rope_theta, config.rope_local_theta) == (1e6, 1e4)
    assert config.sliding_window == 1024 and config.layer_pattern == ("sliding",) * 5 + ("full",)
    assert config.tie_embeddings and config.query_pre_attn_scalar == 256
    written = config_json(config, dtype="bfloat16", base=values)
    assert "vision_config" not in written
    assert written["eos_token_id"] == [1, 106] and written["max_position_embeddings"] == 131072


def test_the_architecture_of_the_source_is_written_where_it_can_say_the_same():
    config = parse_config({**MISTRAL, "sliding_window": None})
    assert config_json(config, dtype="float32")["architectures"] == ["LlamaForCausalLM"]
    of_base = config_json(config, dtype="float32", base=MISTRAL)
    assert (of_base["architectures"], of_base["sliding_window"]) == (["MistralForCausalLM"], None)
    # A window is more than Llama can say.
    windowed = config_json(parse_config(MISTRAL), dtype="float32", base=LLAMA)
    assert windowed["architectures"] == ["MistralForCausalLM"]


def test_a_mixture_is_read():
    config = parse_config(QWEN3_MOE)
    assert (config.num_experts, config.experts_per_token, config.d_ff) == (128, 8, 768)
    assert config.normalize_experts
    # A3B: what one token meets.
    assert config.num_active_params == 3_353_032_704
    newer = {**without(QWEN3_MOE, "num_experts"), "num_local_experts": 128}
    assert parse_config(newer) == config
    assert not parse_config({**QWEN3_MOE, "norm_topk_prob": False}).normalize_experts
    back = config_json(config, dtype="bfloat16", base=QWEN3_MOE)
    assert QWEN3_MOE.items() <= back.items()


@pytest.mark.parametrize(
    ("change", "num_scores"), [({"id2label": {"0": "LABEL_0"}}, 1), ({"num_labels": 3}, 3), ({}, 2)]
)
def test_a_reward_model_is_read(change, num_scores):
    values = {**QWEN2, "architectures": ["Qwen2ForSequenceClassification"], **change}
    config = parse_config(values)
    assert config.num_scores == num_scores
    assert not config.has_unembedding
    back = config_json(config, dtype="float32")
    assert back["architectures"] == ["Qwen2ForSequenceClassification"]
    assert parse_config(back) == config


def test_both_spellings_of_the_rotary_settings_mean_the_same():
    old = parse_config(LLAMA)
    new = without(LLAMA, "rope_scaling", "rope_theta")
    parameters = {**LLAMA3_SCALING, "rope_theta": 500000.0}
    assert parse_config({**new, "rope_parameters": parameters}) == old
    older = {"type": "llama3", **without(LLAMA3_SCALING, "rope_type")}
    assert parse_config({**LLAMA, "rope_scaling": older}) == old
    # The base beside the object, as half converted files have it.
    beside = {**new, "rope_parameters": LLAMA3_SCALING, "rope_theta": 500000.0}
    assert parse_config(beside) == old
    plain = {"rope_type": "default", "rope_theta": 1e6}
    assert parse_config({**without(QWEN3, "rope_theta"), "rope_parameters": plain}) == parse_config(
        QWEN3
    )


def test_yarn_is_read_as_users_add_it_to_the_files_of_qwen():
    added = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for values in (QWEN2, QWEN3):
        # Qwen3 has 40,960 positions: fewer than the factor allows is no contradiction.
        config = parse_config({**values, "rope_scaling": added})
        expected = RopeScaling(kind="yarn", factor=4.0, original_max_positions=32768)
        assert config.rope_scaling == expected
        assert config.rope_scaling.magnitude == pytest.approx(1 + 0.1 * 1.3862944)
    whole = {**added, "mscale": 1.0, "mscale_all_dim": 2.0, "truncate": False, "beta_slow": 0.5}
    config = parse_config({**QWEN3, "rope_scaling": whole})
    assert config.rope_scaling.magnitude == pytest.approx(1.13862944 / 1.27725887)
    written = config_json(config, dtype="float32")["rope_scaling"]
    assert written == {**without(whole, "type"), "rope_type": "yarn"}


def test_a_gpt_oss():
    values = config_json(SHAPES["gpt-oss-20b"], dtype="bfloat16")
    assert (values["num_local_experts"], values["intermediate_size"]) == (32, 2880)
    published = {
        "quantization_config": {"quant_method": "mxfp4"},
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
    }
    config = parse_config({**without(values, "swiglu_alpha"), **published})
    assert config == SHAPES["gpt-oss-20b"] and config.normalize_experts
    for change, message in (
        ({"quantization_config": {"quant_method": "fp8"}}, "but only 'mxfp4' is supported"),
        ({"swiglu_limit": 6.0}, "swiglu_limit is 6.0, but only 7.0"),
    ):
        with pytest.raises(UserError, match=message):
            parse_config({**values, **change})


def test_layers_without_rotary_positions_are_read():
    listed = {**PUBLISHED["smollm3"], "no_rope_layers": [1, 1, 1, 0] * 9}
    assert parse_config(listed) == parse_config(PUBLISHED["smollm3"])
    other = parse_config({**PUBLISHED["smollm3"], "no_rope_layers": [0, 1] * 18})
    assert other.layer_pattern == ("unrotated", "full")
    assert config_json(other, dtype="float32")["no_rope_layers"] == [0, 1] * 18


def test_rotary_factors_of_short_and_long_texts():
    values = PUBLISHED["phi4_mini"]
    config = parse_config(values)
    rope = config.rope_scaling
    # 131,072 positions over 4,096.
    assert (config.rotary_dims, rope.factor, rope.long) == (96, 32.0, False)
    assert rope.magnitude == pytest.approx((1 + 5 / 12) ** 0.5)
    assert config.for_texts_of(4096) == config
    assert config.for_texts_of(4097).rope_scaling.long
    # A window of all positions is none.
    assert parse_config({**values, "sliding_window": 262144}) == config
    assert parse_config({**values, "sliding_window": 2047}).layer_pattern == ("sliding",)


def test_layers_with_an_indexer_are_read_and_longer_texts_than_it_takes_refused():
    values = PUBLISHED["glm_moe_dsa"]
    every = parse_config(values)
    assert every.indexer_pattern == (True,) and every.indexed_layers == tuple(range(6))
    assert (every.index_topk, every.index_heads, every.index_dim) == (2048, 32, 128)
    # The first two, and from there every third: the class counts from the offset less 1.
    third = parse_config({**values, "index_topk_freq": 3})
    assert third.indexed_layers == (0, 1, 4)
    assert parse_config({**values, "index_topk_pattern": "FFSSFS"}) == third
    types = ["full", "full", "shared", "shared", "full", "shared"]
    assert parse_config({**values, "indexer_types": types}) == third
    written = config_json(third, dtype="bfloat16", base=values)
    assert written["indexer_types"] == types and parse_config(written) == third
    older = {**values, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    listed = parse_config({**older, "layer_types": ["indexed_attention"] * 6})
    assert listed == every
    assert config_json(listed, dtype="bfloat16", base=older)["model_type"] == "deepseek_v32"
    assert third.for_texts_of(2048) == third
    with pytest.raises(UserError, match=r"up to 2049 tokens, .* exceed index_topk 2048 .*; lower"):
        third.for_texts_of(2049)


def test_gemma_4_with_and_without_experts():
    config = parse_config(GEMMA4)
    assert config.layer_pattern == ("sliding",) * 5 + ("full",) and config.num_periods == 2
    assert (config.full_head_dim, config.full_kv_heads, config.keys_as_values) == (512, 1, True)
    assert config.rope_scaling == RopeScaling(kind="proportional", rotated=0.25)
    assert (config.rope_theta, config.rope_local_theta) == (1e6, 1e4)
    assert config.logits_softcap == 30 and config.tie_embeddings and not config.num_experts
    # What Transformers writes for the same.
    by_layer = {
        "per_layer_config": {i: {"head_dim": 512, "num_key_value_heads": 1} for i in ("5", "11")}
    }
    theirs = without(GEMMA4, "global_head_dim", "num_global_key_value_heads")
    assert parse_config({**theirs, **by_layer}) == config
    written = config_json(config, dtype="bfloat16", base={**theirs, **by_layer})
    assert parse_config(written) == config
    assert written["rope_parameters"] == GEMMA4["rope_parameters"]
    assert not {"per_layer_config", "rope_scaling", "rope_theta"} & written.keys()
    # Without the switch the number has no effect.
    own_values = parse_config({**GEMMA4, "attention_k_eq_v": False})
    assert (own_values.full_kv_heads, own_values.keys_as_values) == (0, False)
    experts = {"num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 28}
    mixture = parse_config({**GEMMA4, "enable_moe_block": True, **experts})
    assert (mixture.d_ff, mixture.shared_d_ff, mixture.experts_per_token) == (28, 52, 3)
    assert mixture.expert_norms and parse_config(config_json(mixture, dtype="float32")) == mixture


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize("numbers", [("5", "11"), ("05", "11"), ("005", "011")])
@pytest.mark.parametrize("present", [{}, {"global_head_dim": 96}])
def test_layers_of_a_gemma_4_are_numbered_with_or_without_zeros(numbers, present):
    theirs = without(GEMMA4, "global_head_dim", "num_global_key_value_heads") | present
    by_layer = {i: {"head_dim": 512, "num_key_value_heads": 1} for i in numbers}
    assert parse_config({**theirs, "per_layer_config": by_layer}) == parse_config(GEMMA4)


@pytest.mark.parametrize(
    ("by_layer", "sizes"),
    [
        # head_dim, num_kv_heads, full_head_dim, full_kv_heads
        ({}, (256, 2, 256, 0)),
        (None, (256, 2, 256, 0)),
        ({"05": {"head_dim": 256}, "11": {}}, (256, 2, 256, 0)),
        ({"5": {"head_dim": 512}, "11": {"head_dim": 512}}, (256, 2, 512, 0)),
        ({"5": {"num_key_value_heads": 1}, "11": {"num_key_value_heads": 1}}, (256, 2, 256, 1)),
        # What says the same as the model has no effect.
        (
            {str(i): {"head_dim": 512 if i in (5, 11) else 256, "skip": []} for i in range(12)},
            (256, 2, 512, 0),
        ),
        # The layers that slide are the others.
        (
            {str(i): {"head_dim": 64, "num_key_value_heads": 4} for i in range(12) if i % 6 != 5},
            (64, 4, 256, 2),
        ),
    ],
)
def test_sizes_of_heads_by_layer(by_layer, sizes):
    theirs = without(GEMMA4, "global_head_dim", "num_global_key_value_heads")
    assert (theirs["head_dim"], theirs["num_key_value_heads"]) == (256, 2)
    config = parse_config({**theirs, "per_layer_config": by_layer})
    found = (config.head_dim, config.num_kv_heads, config.full_head_dim, config.full_kv_heads)
    assert found == sizes
    written = config_json(config, dtype="bfloat16", base={**theirs, "per_layer_config": by_layer})
    assert parse_config(written) == config


@pytest.mark.parametrize(
    ("family", "by_layer", "message"),
    [
        ("gemma4", {"05": {"head_dim": 512}}, "supported are heads of one size"),
        ("gemma4", {"5": {"sliding_window": 7}}, "sliding_window must be the same in all layers"),
        ("gemma4", {"0": {"skip": ["mlp"]}}, "skip must be the same"),
        ("gemma4", {"12": {"head_dim": 512}}, "for some of layers 0 to 11"),
        ("gemma4", {"-1": {"head_dim": 512}}, "for some of layers 0 to 11"),
        ("gemma4", {"9" * 5000: {}}, "for some of layers 0 to 11"),
        ("gemma4", {"full_attention": {"head_dim": 512}}, "for some of layers 0 to 11"),
        ("gemma4", {"5": 512}, "for some of layers 0 to 11"),
        ("gemma4", {"5": {"head_dim": "x"}, "11": {"head_dim": "x"}}, "head_dim is 'x'"),
        ("gemma4", ["head_dim"], "must be an object"),
        ("qwen2", {"3": {"rms_norm_eps": 0.5}}, "rms_norm_eps must be the same in all layers"),
        ("qwen3_moe", {"00": {"num_experts_per_tok": 1}}, "num_experts_per_tok must be the same"),
        ("mistral", {"1": {"sliding_window": None}}, "sliding_window must be the same"),
        ("deepseek_v3", {"1": {"kv_lora_rank": 3}}, "kv_lora_rank must be the same"),
        ("qwen3_5_moe", {"1": {"head_dim": 3}}, "head_dim must be the same"),
    ],
)
def test_layers_that_differ_are_refused(family, by_layer, message):
    values = {**PUBLISHED[family], "per_layer_config": by_layer}
    if "text_config" in values:
        values["text_config"] = {**values["text_config"], "per_layer_config": by_layer}
    with pytest.raises(UserError, match=f"per_layer_config.*{message}|{message}.*per_layer_config"):
        parse_config(values)


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma4"])
def test_layers_that_say_what_the_model_says_are_no_obstacle(family):
    values = PUBLISHED[family]
    same = {"0": {"rms_norm_eps": values["rms_norm_eps"]}, "1": {}}
    base = {**values, "per_layer_config": {}}
    assert parse_config({**values, "per_layer_config": same}) == parse_config(base)


@pytest.mark.parametrize("listed", [True, False])
def test_the_last_layer_of_a_gemma_4_is_full_whatever_its_file_says(listed):
    kinds = {"layer_types": [SLIDING] * 12} if listed else {"num_hidden_layers": 10}
    config = parse_config({**without(GEMMA4, "layer_types"), **kinds})
    last = config.num_layers - 1
    full = [i for i, slides in enumerate(config.sliding_layers) if not slides]
    assert full == ([last] if listed else [5, last])


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 20}


@pytest.mark.parametrize(
    ("change", "sliding"),
    [
        ({}, range(20, 24)),
        ({"max_window_layers": 0}, range(24)),
        ({"max_window_layers": 24}, ()),
        ({"max_window_layers": 99}, ()),
        ({"max_window_layers": None}, ()),  # the default of 28
        ({"use_sliding_window": False}, ()),
        ({"use_sliding_window": None}, ()),
        ({"sliding_window": None}, ()),
        ({"max_position_embeddings": 100}, ()),
        ({"max_position_embeddings": 100, "layer_types": [SLIDING] * 24}, ()),
        ({"layer_types": [FULL] * 24}, ()),
        ({"layer_types": [SLIDING] * 24}, range(24)),
        ({"layer_types": [SLIDING, FULL] * 12}, range(0, 24, 2)),
        ({"layer_types": [FULL] * 20 + [SLIDING] * 4, "max_window_layers": 3}, range(20, 24)),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_qwen(family, change, sliding):
    values = {**PUBLISHED[family], "num_hidden_layers": 24, **QWEN_WINDOW, **change}
    config = parse_config(values)
    assert [i for i, slides in enumerate(config.sliding_layers) if slides] == [*sliding]
    assert config.sliding_window == (100 if sliding else 0)
    written = config_json(config, dtype="bfloat16", base=values)
    assert written["use_sliding_window"] == bool(sliding) and parse_config(written) == config
    assert parse_config(config_json(config, dtype="bfloat16")) == config


def test_a_window_of_an_absent_size_is_the_default_of_qwen():
    values = {**without(QWEN2, "sliding_window"), "use_sliding_window": True}
    assert parse_config({**values, "max_window_layers": 3}).sliding_window == 4096


def test_the_window_of_a_qwen_3_mixture_is_of_all_layers():
    on = {**QWEN3_MOE, **QWEN_WINDOW}
    config = parse_config(on)
    assert all(config.sliding_layers) and config.sliding_window == 100
    written = config_json(config, dtype="bfloat16", base=on)
    assert written["use_sliding_window"] is True and parse_config(written) == config
    off = parse_config({**on, "use_sliding_window": False})
    assert off == parse_config(QWEN3_MOE) and not off.sliding_window


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'; it must be true"),
        ("qwen2", {"sliding_window": "x"}, "sliding_window is 'x'"),
        ("qwen3", {"max_window_layers": -1}, "max_window_layers is -1"),
        ("qwen3", {"max_window_layers": 1.5}, r"max_window_layers is 1\.5"),
        ("qwen3", {"sliding_window": None, "layer_types": [SLIDING] * 24}, "but only use_sliding"),
        ("qwen3_moe", {"layer_types": [FULL] * 24}, "layer_types has full_attention, but only use"),
    ],
)
def test_malformed_windows_of_qwen_are_refused(family, change, message):
    with pytest.raises(UserError, match=message):
        parse_config({**PUBLISHED[family], "num_hidden_layers": 24, **QWEN_WINDOW, **change})


def test_a_gemma_4_with_inputs_of_layers_and_shared_keys_by_hand():
    """Sizes of E2B as recalled: 35 layers, every fifth full, of which the last 20 share."""
    kinds = ["full_attention" if i % 5 == 4 else "sliding_attention" for i in range(35)]
    values = {
        **without(GEMMA4, "num_global_key_value_heads"),
        **{"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35},
        **{"num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 262_144},
        **{"attention_k_eq_v": False, "layer_types": kinds, "use_double_wide_mlp": True},
        **{"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20},
    }
    config = parse_config(values)
    assert (config.num_periods, config.layer_inputs, config.sharing_layers) == (3, 256, 20)
    D, L, p = 1536, 35, 256
    outside = 262_144 * (D + L * p) + D * L * p + p + D
    every = L * (2 * D * p + D + 4 * D + 1) + 3 * D * 6144 * (15 + 2 * 20)
    queries = 28 * (2 * D * 8 * 256 + 256) + 7 * (2 * D * 8 * 512 + 512)
    keys_and_values = 12 * (2 * D * 256 + 256) + 3 * (2 * D * 512 + 512)
    assert config.num_params == outside + every + queries + keys_and_values
    shapes = decoder_graph(config)[1]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == config.num_params
    assert config.kv_bytes_per_token(2) == 2 * 2 * (12 * 256 + 3 * 512)
    written = config_json(config, dtype="bfloat16", base=values)
    assert parse_config(written) == config and written["vocab_size_per_layer_input"] == 262_144
    # Matmuls with all of these but the tables and norms, and the unembedding once more.
    tables, norms = 262_144 * (D + L * p), p + D + L * (5 * D + 1) + 40 * 256 + 10 * 512
    matmuls = config.num_params - tables - norms + 262_144 * D
    assert token_flops(config).weights == 2 * matmuls
    config.check_stages(1)
    with pytest.raises(UserError, match=r"2 pipeline stages, but layers .*; choose p = 1"):
        config.check_stages(2)


def test_what_early_files_leave_out_is_filled_as_transformers_does():
    early = without(LLAMA, "rope_theta", "rope_scaling", "num_key_value_heads", "attention_bias")
    config = parse_config(without(early, "tie_word_embeddings", "hidden_act", "mlp_bias"))
    assert (config.rope_theta, config.num_kv_heads) == (10_000.0, 32)
    assert not config.tie_embeddings
    assert parse_config({**QWEN2, "head_dim": None}) == parse_config(QWEN2)


def test_a_window_that_is_named_but_off_is_no_obstacle():
    assert parse_config({**QWEN2, "sliding_window": 4096}) == parse_config(QWEN2)
    whole = {**QWEN2, "layer_types": ["full_attention"] * 24}
    assert parse_config(whole) == parse_config(QWEN2)


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_the_decoder_does_not_have_is_refused_with_its_key(family, change, message):
    with pytest.raises(UserError, match=f"somewhere: .*{message}"):
        parse_config({**PUBLISHED[family], **json.loads(change)}, origin="somewhere")


@pytest.mark.parametrize("family", PUBLISHED)
def test_written_values_read_back_and_keep_what_the_shape_does_not_say(family):
    values = PUBLISHED[family]
    config = parse_config(values)
    written = config_json(config, dtype="bfloat16", base=values)
    assert parse_config(written) == config
    assert written["torch_dtype"] == "bfloat16"
    assert parse_config(config_json(config, dtype="float32")) == config
    if "text_config" in values:  # The text model alone is written.
        assert written["architectures"] == [TEXT_MODELS[family]] and "text_config" not in written
        return
    # The layers for the token after the next are not kept.
    kept = {"tie_word_embeddings": True} | without(
        values, "torch_dtype", "num_nextn_predict_layers"
    )
    assert {k: written[k] for k in kept} == kept


def test_one_spelling_is_written_even_where_the_source_has_the_other():
    parameters = {**LLAMA3_SCALING, "rope_theta": 500000.0}
    base = {**without(LLAMA, "rope_scaling", "rope_theta"), "rope_parameters": parameters}
    written = config_json(parse_config(base), dtype="float32", base={**base, "dtype": "bfloat16"})
    assert not {"rope_parameters", "dtype"} & written.keys()
    assert (written["rope_theta"], written["rope_scaling"]) == (500_000.0, LLAMA3_SCALING)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(qkv_bias=True, qk_norm=True), "qkv_bias=True together with qk_norm=True"),
        (ModelConfig(activation="gelu_tanh"), "qkv_bias=True together with activation=gelu_tanh"),
        (
            ModelConfig(
                qkv_bias=False,
                qk_norm=True,
                logits_softcap=30.0,
                sliding_window=8,
                layer_pattern=("full", "sliding"),
            ),
            "qk_norm=True together with logits_softcap=30.0 together with layer_pattern",
        ),
        (
            dataclasses.replace(parse_config(GEMMA4), num_scores=1),
            r"no architecture of Transformers .*num_scores=1",
        ),
        (ModelConfig(qkv_bias=False, d_model=130), "d_model 130 is not a multiple of num_heads 4"),
    ],
)
def test_a_shape_that_no_architecture_has_is_not_written(config, message):
    with pytest.raises(UserError, match=message):
        config_json(config, dtype="float32")


# Adapters of PEFT


def peft_values(**changes):
    return {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["v_proj", "q_proj", "down_proj"],
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "rank_pattern": {},
        "modules_to_save": None,
        **changes,
    }


def test_adapters_of_peft_are_read(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft_values()))
    assert read_adapter_config(tmp_path) == LoraConfig(
        rank=8, alpha=16.0, targets=("down", "q", "v")
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', but only 'LORA'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
        ({"target_modules": "all-linear"}, "target_modules is 'all-linear'; it must be a list"),
        ({"target_modules": ["lm_head"]}, "'lm_head': is not one of q, k"),
        ({"r": 0}, "r is 0; it must be a positive number"),
    ],
)
def test_adapters_we_cannot_have_are_refused(tmp_path, change, complaint):
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft_values(**change)))
    with pytest.raises(UserError, match=complaint):
        read_adapter_config(tmp_path)


@pytest.mark.parametrize(("q_latent", "queries"), [(0, {"q_proj"}), (5, {"q_a_proj", "q_b_proj"})])
def test_adapters_on_latents_have_the_names_of_transformers(tmp_path, q_latent, queries):
    sizes = {"kv_latent": 6, "q_latent": q_latent, "rope_dim": 4, "value_dim": 6}
    lora = LoraConfig(rank=4, alpha=8.0, targets=("k", "o", "q", "v"))
    config = ModelConfig(num_kv_heads=4, qkv_bias=False, lora=lora, **sizes)
    values = adapter_config_json(config, base="models/base")
    of_keys = {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    assert set(values["target_modules"]) == queries | of_keys
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    assert read_adapter_config(tmp_path) == lora
