"""rollout.slots "auto": as many as fit, by shapes and by what the compiler says."""

import pathlib

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.trainer.resolved import resolve
from jaxrl_planner.compiled.ahead import co_resident_bytes, peak_here
from jaxrl_planner.planned_roles import abstract_meshes, meshes_on
from jaxrl_planner.slot_choice import most_that_fit, with_slots

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
# Of the 32B recipe on 128 devices.
REPLICAS = 16
# Of a device that holds some slots of the tiny recipe.
MEMORY = 50_000_000


def config_of(name: str, **changes: object) -> Config:
    settings = {"rollout.slots": "auto"} | {key.replace("__", "."): v for key, v in changes.items()}
    return load_config(Config, str(CONFIGS / name), {k: str(v) for k, v in settings.items()})


def on_shapes(config):
    """What the choice is given of a config without devices."""
    resolved = resolve(config)
    return resolved, abstract_meshes(resolved.pools)


def counted(memory: float, fraction: float = 0.9) -> int:
    config = config_of(
        "dapo_qwen32b.py", rollout__memory_fraction=fraction, rollout__cache="contiguous"
    )
    return with_slots(*on_shapes(config), int(memory)).config.rollout.slots


def test_by_shapes_they_are_as_many_as_fit():
    # 16 replicas; of 95 GB nine tenths, less 11.3 of weights and moments and 3.2 of an insertion.
    assert counted(95e9) == REPLICAS * 95
    assert counted(84.93e9) > REPLICAS * 80
    assert counted(95e9, 0.5) < counted(95e9) < counted(141e9)
    with pytest.raises(UserError, match="raise t_g of"):
        counted(12e9)


def test_a_paged_cache_has_more_slots_in_the_same_memory():
    """Prompts of 2,048 and responses of 20,480: a slot of full length is shared by three."""
    slots = counted(95e9)
    config = config_of("dapo_qwen32b.py")
    paged = with_slots(*on_shapes(config), int(95e9)).config.rollout
    longest = paged.cache_tokens / (paged.slots / 3)
    assert 0 <= longest - (2048 + 20_480 + paged.tokens_per_dispatch) < 512
    # What else a slot takes is little.
    assert 2.7 * slots < paged.slots <= 3 * slots
    given = config_of("dapo_qwen32b.py", rollout__cache_tokens=10**6)
    with pytest.raises(UserError, match=r"rollout\.cache_tokens is 1,000,000; set it to 0"):
        with_slots(*on_shapes(given), int(95e9))


def test_a_number_that_is_given_stays():
    config = config_of("dapo_qwen32b.py", rollout__slots=320)
    assert with_slots(*on_shapes(config), 1).config is config
    assert with_slots(*on_shapes(config), 1, lambda *_: 0).config is config


def test_more_agents_than_slots_have_pages_for_as_many_conversations_as_fit():
    def chosen(memory: float, **changes: object):
        config = config_of("guess_tiny.py", rollout__slots=8, **changes)
        return config, with_slots(*on_shapes(config), int(memory)).config.rollout

    config, roomy = chosen(1e12)
    agents = config.rollout.generation_prompts * config.rollout.num_samples
    longest = config.longest_sequence + config.rollout.tokens_per_dispatch
    assert (roomy.slots, roomy.cache, roomy.cache_tokens) == (8, "paged", agents * longest)
    # Without memory to spare there is what the slots need.
    assert chosen(1e6)[1].cache_tokens == 0
    some = chosen(MEMORY)[1]
    assert 8 * longest < some.cache_tokens < roomy.cache_tokens
    # Counted from an engine of two slots, whose page that no slot has is half as much for each.
    deterministic = chosen(MEMORY, rollout__deterministic=True)[1]
    assert some.cache_tokens < deterministic.cache_tokens < roomy.cache_tokens
    for changes in ({"rollout__slots": agents}, {"rollout__agent": ""}):
        config = config_of("guess_tiny.py", **({"rollout__slots": 8} | changes))
        assert with_slots(*on_shapes(config), int(1e12)).config is config


@hypothesis.given(
    first=st.integers(1, 300),
    most=st.integers(1, 300),
    constant=st.floats(0, 120),
    each=st.floats(1, 1.5),
    stair=st.floats(0, 2),
)
def test_the_compilers_own_figures_decide(first, most, constant, each, stair):
    """Of programs that grow by more than the cache, and in stairs."""
    tried = []

    def bytes_with(slots):
        tried.append(slots)
        return constant + each * slots + stair * (slots // 16)

    found = most_that_fit(bytes_with, 100, first=first, most=most, slot=1.0)
    assert found <= most and len(tried) <= 6
    if not found:
        assert constant + each > 100 - 2 * each - 2 * stair
        return
    assert found in tried and bytes_with(found) <= 100
    # No more than two slots and a stair are left unused.
    assert found == most or bytes_with(found + 2) > 100 - stair


def test_slots_leave_room_for_those_of_frozen_roles():
    frozen = {"rollout__frozen_roles__checker": "start"}
    configs = (config_of("solver_checker_tiny.py", **more) for more in ({}, frozen))
    alone, both = (with_slots(*on_shapes(x), MEMORY).config.rollout.slots for x in configs)
    assert 0 < both < alone / 2 + 2


def test_rows_that_do_not_divide_are_refused_before_anything_is_compiled():
    def never(*args):
        raise AssertionError("slots are compiled")

    config = config_of("dapo_qwen32b.py", train__rows=24)
    with pytest.raises(UserError, match=r"train.rows=24 does not divide over .*use 16 or 32"):
        with_slots(*on_shapes(config), int(95e9), never)


def test_a_compiler_that_fits_none_is_an_error():
    with pytest.raises(UserError, match="none does"):
        config = config_of("dapo_qwen32b.py")
        with_slots(*on_shapes(config), int(95e9), lambda *_: int(1e15))


def cache_of(buffers):
    """Slots of a device, and their bytes."""
    (cache,) = [held for held in buffers if " slots" in held.layout]
    return int(cache.layout.split(" slots")[0].replace(",", "")), cache.bytes_per_device


@pytest.mark.slow
def test_programs_compiled_here_fit_and_leave_less_than_two_slots():
    config = config_of("dapo_tiny.py", rollout__generation_prompts=64)
    seen, sizes = {}, set()

    def compiler(program, mesh, buffers):
        slots, size = cache_of(buffers)
        sizes.add(size / slots)
        seen[slots] = max(
            seen.get(slots, 0), peak_here(program) + co_resident_bytes(program, buffers)
        )
        return seen[slots]

    resolved = resolve(config)
    meshes = meshes_on(resolved.pools, jax.devices()[:1])
    found = with_slots(resolved, meshes, MEMORY, compiler).config.rollout.slots
    assert 1 < found < 64 * config.rollout.num_samples
    assert 0 <= 0.9 * MEMORY - seen[found] < 2 * max(sizes)
