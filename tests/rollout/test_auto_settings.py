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


# Four prompts with their eight answers, as benchmarks/step_vs_peers.py has them.
EVEN = {"platform": "cpu", "max_prompt_tokens": 64, "max_response_tokens": 192, "num_samples": 8}


@pytest.mark.parametrize(
    ("changes", "row_tokens", "shares"),
    [
        ({}, 1664, True),
        ({}, 512, False),  # room for two answers
        ({"num_samples": 2}, 512, True),
        ({"num_samples": 1}, 1664, False),
        ({"platform": "tpu"}, 1664, False),
        ({"max_prompt_tokens": 32}, 1664, False),  # a small share of the tokens
        ({"allowed": False}, 1664, False),
    ],
)
def test_prompts_are_shared_where_it_pays(changes, row_tokens, shares):
    settings = {"allowed": True, **EVEN, **changes}
    for asked, resolved in (("auto", shares), (True, True), (False, False)):
        train = TrainConfig(row_tokens=row_tokens, share_prompts=asked)
        assert train.with_shared_prompts(**settings).shares_prompts is resolved
    other = TrainConfig(row_tokens=row_tokens, fill_minibatches=True)
    assert not other.with_shared_prompts(**settings).shares_prompts
