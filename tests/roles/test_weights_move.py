"""Between sampling and learning: which copies of the weights exist, and where the rest waits."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import small
from meshes import mesh_of
from small import ENGINE, actor_on, whole_rows
from tokens import prompts_of

from jaxrl.errors import UserError
from jaxrl.roles.losses import SUPERVISED
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.policy import Actor
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.drivers import build_backend
from jaxrl.rollout.settings import EngineConfig

MODEL = dataclasses.replace(small.MODEL, num_kv_heads=4)
LAYOUT = {"train": "1-4-2", "generate": "1-2-2-2", "fsdp": 2}


def engine_of(dtype) -> EngineConfig:
    return dataclasses.replace(ENGINE, slots=8, prefill_prompts=8, dtype=dtype)


def actor_of(dtype, *, offload=False, **layout) -> Actor:
    mesh = mesh_of(**layout or LAYOUT)
    actor = actor_on(mesh, model=MODEL, engine=engine_of(dtype), offload=offload)
    actor.init()
    return actor


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), expected)


def gone(old, new) -> list[bool]:
    """For each leaf of `old`: it is deleted, or `new` uses it itself."""
    leaves = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return [a is b or a.is_deleted() for a, b in leaves]


def test_weights_of_one_type_are_never_held_twice():
    actor = actor_of("float32")
    before, trained = jax.device_get(actor.state), actor.state.params
    actor.for_sampling()
    sampled = actor.backend.params
    assert all(gone(trained, sampled))
    assert_same(sampled, before.params)
    assert_same(actor.for_training(), before)
    assert all(gone(sampled, actor.state.params))
    assert not actor.can_sample


def test_wider_master_weights_stay():
    actor = actor_of("bfloat16")
    before, trained = jax.device_get(actor.state), actor.state.params
    actor.for_sampling()
    assert not any(gone(trained, actor.backend.params))
    assert_same(actor.state, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_training_state_waits_in_host_memory(dtype):
    actor = actor_of(dtype, offload=True)
    before = jax.device_get(actor.state)
    actor.for_sampling()
    waiting = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(actor._state)}
    assert waiting == {"pinned_host"}
    actor.for_sampling()
    with pytest.raises(AssertionError, match="call for_training"):
        actor.state  # noqa: B018
    assert_same(actor.for_training(), before)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(actor.state)}
    assert "pinned_host" not in kinds
    # Looked at between two batches that the same weights sample, it goes back for the second.
    actor.for_sampling()
    actor.for_training()
    actor.for_sampling()
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(actor._state)} == waiting


def test_one_device_shares_what_needs_no_move():
    actor = actor_of("float32", train="1-1-1")
    leaf = actor.state.params["embedding"]
    actor.for_sampling()
    assert actor.for_training().params["embedding"] is leaf


# Sampling beside learning


ONE_PROMPT = prompts_of([2])
OPTIONS = SamplingOptions(num_samples=1, seed=0, step=0, temperature=0.0)


def apart() -> Actor:
    """An actor that learns on one device and samples on another one."""
    learns, samples = (mesh_of(first=number) for number in range(2))
    engine = dataclasses.replace(engine_of("float32"), tokens_per_dispatch=1, stop_ids=())
    backend = build_backend("offline", MODEL, samples, engine, functools.partial(map, str))
    optim = OptimConfig(lr=0.1, lr_warmup_steps=0)
    actor = actor_on(learns, model=MODEL, optim=optim, backend=backend)
    actor.init()
    return actor


def test_the_actor_learns_while_its_former_weights_sample():
    actor = apart()
    actor.for_sampling()
    before = np.array(actor.backend.params["embedding"])
    drawn = iter([ONE_PROMPT])
    rollout = actor.continuous(OPTIONS)
    draw = lambda places, unfinished: next(drawn, ONE_PROMPT.take([]))  # noqa: E731
    # The token of a dispatch in progress has the weights that the dispatch began with.
    assert rollout.dispatch(OPTIONS, draw) and rollout.dispatch(OPTIONS, draw)
    actor.update(actor.place(whole_rows()), SUPERVISED)
    np.testing.assert_array_equal(actor.backend.params["embedding"], before)
    assert not actor.can_sample
    actor.for_sampling()
    assert (actor.backend.params["embedding"] != before).any()
    later = OPTIONS.replace(step=1)
    while rollout.dispatch(later, draw):
        pass
    (group,) = rollout.take_finished()
    (sample,) = group.samples.samples
    assert sample.sampled.version.tolist() == [0, 0, 1, 1]
    assert group.oldest_version == 0 and group.completions.num_stale(1) == 2
    assert group.completions.tokens[0] is sample.tokens, "two dispatches have brought one array"
    actor.close()


def test_a_sample_in_its_slot_goes_on_as_if_nothing_was_if_the_weights_are_the_same():
    actor = apart()
    actor.for_sampling()
    whole = actor.generate(ONE_PROMPT, OPTIONS)
    rollout = actor.continuous(OPTIONS)
    drawn = iter([ONE_PROMPT])
    draw = lambda places, unfinished: next(drawn, ONE_PROMPT.take([]))  # noqa: E731
    step = 0
    while rollout.dispatch(OPTIONS.replace(step=step), draw):
        step += 1
        actor.backend.load(actor.backend.unload())
    (group,) = rollout.take_finished()
    np.testing.assert_array_equal(group.completions.tokens[0], whole.tokens[0])
    np.testing.assert_array_equal(group.completions.rollout_logprob[0], whole.rollout_logprob[0])
    assert group.samples.samples[0].sampled.version.tolist() == [0, 1, 2, 3]
    actor.close()


def test_a_prompt_that_cannot_be_sampled_ends_the_call():
    actor = apart()
    actor.for_sampling()
    long = dataclasses.replace(ONE_PROMPT, tokens=(np.zeros(5, np.int32),))
    with pytest.raises(UserError, match="prompt 0 has 5 tokens"):
        actor.continuous(OPTIONS).dispatch(OPTIONS, lambda places, unfinished: long)
    assert len(actor.generate(ONE_PROMPT, OPTIONS).tokens[0]) == 4
    actor.close()
