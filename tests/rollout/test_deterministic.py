"""`deterministic`: in bfloat16 too, the samples are the same on every mesh."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from slow_values import mostly_slow
from test_engine import BASE, MODEL, actor_of, make_prompts, sample

from jaxrl.errors import UserError
from jaxrl.models.model_config import LoraConfig

WIDE = dataclasses.replace(
    MODEL,
    vocab_size=512,
    num_tokens=512,
    d_model=64,
    d_ff=256,
    num_heads=8,
    num_kv_heads=8,
    head_dim=16,
)
PLAIN = dataclasses.replace(
    BASE, dtype="bfloat16", max_response_tokens=24, slots=32, smallest_bucket=32
)
ORDERED = dataclasses.replace(PLAIN, deterministic=True)
# In models of this size a device has sums of more than 4,096 values, on one device and not on eight.
DEEP = dataclasses.replace(WIDE, num_layers=4, d_model=256, d_ff=1024, head_dim=32)
GROUPED = dataclasses.replace(DEEP, num_kv_heads=4, head_dim=64, tie_embeddings=True)
DEEP_MODELS = {
    "plain": DEEP,
    "norms": dataclasses.replace(DEEP, qk_norm=True),
    "narrow": dataclasses.replace(DEEP, d_model=64, d_ff=256, head_dim=8, qk_norm=True),
    "grouped": dataclasses.replace(GROUPED, qkv_bias=True),
    "grouped_norms": dataclasses.replace(GROUPED, qk_norm=True),
}
EXPERTS = dataclasses.replace(DEEP, d_ff=256, num_experts=16, experts_per_token=4)
MIXTURES = {
    "experts": EXPERTS,
    # As GLM-4.5 and DeepSeek-V3 are made.
    "shared": dataclasses.replace(
        EXPERTS,
        num_layers=5,
        sigmoid_routing=True,
        expert_groups=4,
        groups_per_token=2,
        routed_scale=1.5,
        shared_d_ff=512,
        first_dense_layers=1,
        dense_d_ff=1024,
    ),
    "gated": dataclasses.replace(EXPERTS, qk_norm=True, shared_d_ff=256, shared_gate=True),
    "biased": dataclasses.replace(
        EXPERTS, expert_biases=True, output_bias=True, activation="clamped_silu"
    ),
}
# Answers of more than 64 tokens have fewer slots towards the end, unless samples must be alike.
LONG = dataclasses.replace(ORDERED, max_response_tokens=72, smallest_bucket="auto")
# Training layout p-t-d, generation layout p_g-t_g-d_g-d, FSDP.
LAYOUTS = [
    ("1-8-1", "1-2-4-1", 1),
    ("1-8-1", "1-4-2-1", 1),
    ("1-8-1",),
    ("1-1-8",),
    ("1-4-2", "1-2-2-2", 2),
    ("2-2-2", "1-2-2-2", 1),
    ("2-2-2", "2-2-1-2", 1),
]


# Experts over tensor shards, over replicas, and over both; `expert` comes after FSDP.
MIXTURE_LAYOUTS = [
    ("1-8-1",),
    ("1-2-4", "1-2-1-4", 1, 4),
    ("1-4-2", "1-2-2-2", 2),
    ("1-1-8", "", 1, 8),
    ("1-4-2", "1-4-1-2", 1, 2),
    ("2-2-2", "2-2-1-2", 1, 2),
]


def tokens_of(layout=(), *, config=ORDERED, model=WIDE, num_prompts=16) -> list[np.ndarray]:
    actor = actor_of(*layout, config=config, model=model)
    return list(sample(actor, make_prompts(range(num_prompts)), temperature=1.0).tokens)


def num_different(a, b) -> int:
    return sum(not np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def on_one_device():
    return tokens_of()


@pytest.mark.parametrize(
    "layout", mostly_slow(LAYOUTS, fast=(), long=LAYOUTS[4:5]), ids=lambda x: "_".join(map(str, x))
)
def test_all_samples_are_alike_on_eight_devices_and_on_one(layout, on_one_device):
    assert len(on_one_device) == 48 and sum(map(len, on_one_device)) > 600
    assert num_different(tokens_of(layout), on_one_device) == 0


DEEP_CASES = [
    ("grouped_norms", LAYOUTS[0]),
    *((name, layout) for name in DEEP_MODELS for layout in (LAYOUTS[0], LAYOUTS[4])),
    ("plain", LAYOUTS[2]),
    ("norms", LAYOUTS[2]),
    ("narrow", LAYOUTS[3]),
    ("grouped_norms", LAYOUTS[6]),
]


@pytest.mark.parametrize(
    "case",
    mostly_slow(list(dict.fromkeys(DEEP_CASES)), fast=(), long=DEEP_CASES[:1]),
    ids=lambda case: "_".join(map(str, (case[0], *case[1]))),
)
def test_samples_of_deep_models_are_alike(case):
    """Before XLA made all sums itself, 2 to 11 of 96 samples differed."""
    name, layout = case
    given = {"config": LONG, "model": DEEP_MODELS[name], "num_prompts": 32}
    alone = tokens_of(**given)
    assert len(alone) == 96 and sum(map(len, alone)) > 4_000
    assert num_different(tokens_of(layout, **given), alone) == 0


MIXTURE_CASES = [(name, layout) for name in MIXTURES for layout in MIXTURE_LAYOUTS]


@pytest.mark.parametrize(
    "case",
    mostly_slow(MIXTURE_CASES, fast=(), long=MIXTURE_CASES[7:8]),
    ids=lambda case: "_".join(map(str, (case[0], *case[1]))),
)
def test_samples_of_mixtures_are_alike(case):
    name, layout = case
    given = {"config": LONG, "model": MIXTURES[name], "num_prompts": 32}
    alone = tokens_of(**given)
    assert len(alone) == 96 and sum(map(len, alone)) > 4_000
    assert num_different(tokens_of(layout, **given), alone) == 0


def test_samples_of_a_wide_model_are_alike():
    """The quickest case of the above that differs without `deterministic`."""
    model = dataclasses.replace(DEEP_MODELS["grouped_norms"], num_layers=1)
    given = {"config": ORDERED, "model": model, "num_prompts": 16}
    alone = tokens_of(**given)
    assert len(alone) == 48 and sum(map(len, alone)) > 600
    assert num_different(tokens_of(LAYOUTS[0], **given), alone) == 0


@pytest.mark.slow
def test_samples_are_alike_as_the_compiler_optimises_by_default():
    """The settings of the suite turn most of it off, so another process samples."""
    tests = pathlib.Path(__file__).parents[1]
    program = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from test_deterministic import DEEP_MODELS, LAYOUTS, LONG, num_different, tokens_of
given = {"config": LONG, "model": DEEP_MODELS["norms"], "num_prompts": 32}
assert num_different(tokens_of(LAYOUTS[0], **given), tokens_of(**given)) == 0
print("alike")
"""
    path = os.pathsep.join(map(str, (tests.parent, tests, tests / "rollout")))
    env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == "alike\n", done.stderr


@pytest.mark.slow
def test_samples_are_alike_with_adapters():
    model = dataclasses.replace(WIDE, lora=LoraConfig(rank=4))
    assert num_different(tokens_of(("1-8-1",), model=model), tokens_of(model=model)) == 0


@pytest.mark.slow
def test_without_it_some_samples_differ():
    """Else the test above would say nothing."""
    for model in (WIDE, EXPERTS):
        given = {"config": PLAIN, "model": model}
        alone = tokens_of(**given)
        assert sum(num_different(tokens_of(x, **given), alone) for x in LAYOUTS[:3]) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 4}, "4 key-value heads and 256 neurons in 4 parts, .* over 8 devices"),
        ({"num_experts": 4, "experts_per_token": 2}, "4 experts do not divide over 8 devices"),
    ],
)
def test_models_and_layouts_that_it_does_not_cover_are_refused(changes, message):
    model = dataclasses.replace(WIDE, **changes)
    with pytest.raises(UserError, match=message):
        tokens_of(("1-8-1",), model=model)


def test_a_replica_with_one_slot_is_refused():
    config = dataclasses.replace(ORDERED, slots=8, prefill_prompts=8)
    with pytest.raises(UserError, match="slots 8 over 8 replicas are fewer; use 16 slots or more"):
        tokens_of(("1-1-8",), config=config)
