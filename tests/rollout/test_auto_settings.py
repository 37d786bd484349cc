"""What "auto" stands for, in the engine and in the learning step."""

from __future__ import annotations

import pytest

from jaxrl.roles.packed_model import layers_per_iteration
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.settings import EngineConfig

LENGTHS = {"max_prompt_tokens": 16, "stop_ids": (0,)}


@pytest.mark.parametrize(
    ("unroll", "num_layers", "platform", "resolved"),
    [
        ("auto", 4, "cpu", 4),
        ("auto", 8, "cpu", 8),
        ("auto", 9, "cpu", 1),
        ("auto", 4, "tpu", 1),
        ("auto", 4, None, 1),
        (2, 4, "cpu", 2),
    ],
)
def test_decoding_has_no_scan_over_few_layers_on_cpu(unroll, num_layers, platform, resolved):
    config = EngineConfig(**LENGTHS, max_response_tokens=8, unroll=unroll)
    assert config.layers_per_iteration(num_layers, platform) == resolved


@pytest.mark.parametrize(
    ("settings", "fewest"),
    [
        ({"max_response_tokens": 64}, 256),
        ({"max_response_tokens": 65}, 16),
        ({"max_response_tokens": 64, "smallest_bucket": 8}, 8),
    ],
)
def test_short_responses_are_decoded_in_one_program(settings, fewest):
    assert EngineConfig(**LENGTHS, slots=256, **settings).fewest_slots == fewest


@pytest.mark.parametrize(
    ("d_model", "platform", "resolved"), [(256, "cpu", 4), (128, "cpu", 1), (256, "gpu", 1)]
)
def test_learning_has_no_scan_over_few_wide_layers_on_cpu(d_model, platform, resolved):
    assert layers_per_iteration(4, d_model, platform) == resolved


@pytest.mark.parametrize(
    ("changes", "asked", "kept"),
    [
        ({}, "auto", "auto"),
        ({}, True, True),
        ({"num_samples": 1}, "auto", False),
        ({"platform": "tpu"}, "auto", False),
        ({"platform": "tpu"}, True, True),
        ({"allowed": False}, "auto", False),
    ],
)
def test_prompts_may_be_shared_where_attention_knows_branches(changes, asked, kept):
    settings = {"platform": "cpu", "num_samples": 8, "allowed": True, **changes}
    assert TrainConfig(share_prompts=asked).with_shared_prompts(**settings).share_prompts == kept
    filled = TrainConfig(fill_minibatches=True).with_shared_prompts(**settings)
    assert filled.share_prompts is False


@pytest.mark.parametrize(
    ("asked", "vocab_size", "platform", "of_device", "positions"),
    [
        ("auto", 151_936, "cpu", 4096, 69),
        ("auto", 151_936, "tpu", 4096, 441),
        ("auto", 151_936, "gpu", 8192, 1766),
        # Two rows of 192 tokens of SmolLM2: 213 positions would be two chunks, and all are one.
        ("auto", 49_152, "cpu", 384, 384),
        ("auto", 49_152, "cpu", 427, 213),
        (100, 49_152, "cpu", 150, 100),
    ],
)
def test_chunks_of_logits_have_equal_bytes(asked, vocab_size, platform, of_device, positions):
    train = TrainConfig(logprob_chunk_tokens=asked)
    assert train.positions_of_logits(vocab_size, platform, of_device=of_device) == positions
