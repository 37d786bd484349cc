import jax
import pytest

from jaxrl.errors import UserError
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.shapes import SHAPES, model_shapes

# Parameters and those that a token meets, as published.
PARAMETERS = {
    "qwen2.5-0.5b": (494_032_768, 494_032_768),
    "qwen2.5-1.5b": (1_543_714_304, 1_543_714_304),
    "qwen2.5-3b": (3_085_938_688, 3_085_938_688),
    "qwen2.5-7b": (7_615_616_512, 7_615_616_512),
    "qwen2.5-14b": (14_770_033_664, 14_770_033_664),
    "qwen2.5-32b": (32_763_876_352, 32_763_876_352),
    "qwen3-0.6b": (596_049_920, 596_049_920),
    "qwen3-1.7b": (1_720_574_976, 1_720_574_976),
    "qwen3-4b": (4_022_468_096, 4_022_468_096),
    "qwen3-8b": (8_190_735_360, 8_190_735_360),
    "qwen3-14b": (14_768_307_200, 14_768_307_200),
    "qwen3-32b": (32_762_123_264, 32_762_123_264),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    # Text models alone, without towers for images and layers for the token after the next. By hand, 0.8b:
    # 18 delta layers of 1024 * (6144 + 2048 + 32 + 2048) + 4 * 6144 + 32 + 128, 6 of attention with
    # 1024 * 256 * 28 + 512; 24 times 3 * 1024 * 3584 + 2048; 248_320 * 1024 + 1024.
    "qwen3.5-0.8b": (752_393_024, 752_393_024),
    "qwen3.5-4b": (4_205_751_296, 4_205_751_296),
    "qwen3.5-9b": (8_953_803_264, 8_953_803_264),
    "qwen3.5-27b": (26_895_998_464, 26_895_998_464),
    # 30 delta layers of 2048 * (3 * 4096 + 4096 + 64) + 4 * 8192 + 64 + 128, 10 of attention with
    # 2048 * 256 * 52 + 512; 40 times 256 experts of 3 * 2048 * 512, a shared one, 2048 * 257 for router and
    # gate, and 4096; 2 * 248_320 * 2048 + 2048.
    "qwen3.5-35b-a3b": (34_660_610_688, 3_454_988_928),
    "qwen3-next-80b-a3b": (79_674_391_296, 3_874_929_408),
    "llama-3-8b": (8_030_261_248, 8_030_261_248),
    "llama-3-70b": (70_553_706_496, 70_553_706_496),
    "llama-3.1-8b": (8_030_261_248, 8_030_261_248),
    "mistral-7b-v0.1": (7_241_732_096, 7_241_732_096),
    "mistral-7b-v0.3": (7_248_023_552, 7_248_023_552),
    "smollm2-135m": (134_515_008, 134_515_008),
    "smollm3-3b": (3_075_098_624, 3_075_098_624),
    "gemma-3-1b": (999_885_952, 999_885_952),
    "phi-4-mini": (3_836_021_760, 3_836_021_760),
    "phi-4": (14_659_507_200, 14_659_507_200),
    # Published is 3.4 billion. Layers of 2 * 3072 * (4096 + 1024) + 3 * 3072 * 9216 + 2 * 3072.
    "ministral-3-3b": (26 * 116_398_080 + 131_072 * 3072 + 3072,) * 2,
    # The published 3.6 and 5.1 billion of a token leave out its embedding, and count the unembedding.
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
    # 46 layers of 4096 * 128 * 208 + 112 * 128 + 2 * 4096; one of 3 * 4096 * 10944, 45 of 129 * 3 * 4096 *
    # 1408 + 4097 * 128; 2 * 151_552 * 4096 + 4096.
    "glm-4.5-air": (106_852_251_264, 13_424_129_664),
    "glm-4.5": (352_797_829_024, 33_632_266_144),
    "glm-4.7-flash": (29_943_393_920, 3_896_766_080),
    # Without the biases of the routers, 58 * 256, the published 671_026_404_352.
    "deepseek-v3": (671_026_419_200, 37_552_297_472),
    # 61 indexers of 1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128 more.
    "deepseek-v3.2": (671_877_944_064, 37_552_297_472),
    # Published as 744 billion, 40 of them active.
    "glm-5": (743_911_218_432, 41_053_720_320),
    "moonlight-16b-a3b": (15_960_110_208, 2_914_776_192),
    "olmo-3-7b": (7_298_011_136, 7_298_011_136),
}


def test_every_model_has_as_many_parameters_as_published():
    assert {n: (c.num_params, c.num_active_params) for n, c in SHAPES.items()} == PARAMETERS


@pytest.mark.parametrize(
    "name",
    [
        "qwen2.5-7b",
        "qwen3-30b-a3b",
        "gemma-3-1b",
        "olmo-3-7b",
        "gpt-oss-20b",
        "qwen3.5-35b-a3b",
        "glm-4.5",
        "deepseek-v3",
        "glm-5",
    ],
)
def test_the_decoder_has_as_many_parameters_as_its_shape_says(name):
    shapes = decoder_graph(model_shapes(name))[1]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == PARAMETERS[name][0]


@pytest.mark.parametrize(("name", "near"), [("qwen2.5-8b", "qwen2.5-"), ("Qwen3-8B", "qwen3-8b")])
def test_an_unknown_model_is_refused_with_near_names(name, near):
    with pytest.raises(UserError, match=rf"{name}.*did you mean {near}.*config\.json"):
        model_shapes(name)
