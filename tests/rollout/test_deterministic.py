"""`deterministic`: in bfloat16 too, the samples are the same on every mesh."""

import dataclasses

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


def tokens_of(layout=(), *, config=ORDERED, model=WIDE) -> list[np.ndarray]:
    actor = actor_of(*layout, config=config, model=model)
    return list(sample(actor, make_prompts(range(16)), temperature=1.0).tokens)


def num_different(a, b) -> int:
    return sum(not np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def on_one_device():
    return tokens_of()


@pytest.mark.parametrize(
    "layout", mostly_slow(LAYOUTS, fast=LAYOUTS[3:6]), ids=lambda x: "_".join(map(str, x))
)
def test_all_samples_are_alike_on_eight_devices_and_on_one(layout, on_one_device):
    assert len(on_one_device) == 48 and sum(map(len, on_one_device)) > 600
    assert num_different(tokens_of(layout), on_one_device) == 0


def test_samples_are_alike_with_adapters():
    model = dataclasses.replace(WIDE, lora=LoraConfig(rank=4))
    assert num_different(tokens_of(("1-8-1",), model=model), tokens_of(model=model)) == 0


@pytest.mark.slow
def test_without_it_some_samples_differ():
    """Else the test above would say nothing."""
    alone = tokens_of(config=PLAIN)
    assert sum(num_different(tokens_of(x, config=PLAIN), alone) for x in LAYOUTS[:3]) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 4}, "4 key-value heads and 256 neurons in 4 parts, .* over 8 devices"),
        ({"num_experts": 4, "experts_per_token": 2}, "dense models, and this one has 4 experts"),
    ],
)
def test_models_and_layouts_that_it_does_not_cover_are_refused(changes, message):
    model = dataclasses.replace(WIDE, **changes)
    with pytest.raises(UserError, match=message):
        tokens_of(("1-8-1",), model=model)
