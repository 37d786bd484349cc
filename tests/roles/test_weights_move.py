"""Between sampling and learning: which copies of the weights exist, and where the rest waits."""

import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

from jaxrl.errors import UserError
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.losses import SUPERVISED
from jaxrl.roles.optim_config import OptimConfig
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.drivers import build_backend
from jaxrl.rollout.settings import EngineConfig
from jaxrl.testing.arithmetic_backend import ArithmeticBackend
from jaxrl.types import PackedBatch, Prompts, TrainBatch

MODEL = ModelConfig(
    vocab_size=16, num_layers=2, d_model=16, d_ff=16, num_heads=4, num_kv_heads=4, head_dim=8
)
LAYOUT = {"train": "1-4-2", "generate": "1-2-2-2", "fsdp": 2}


def engine_of(dtype) -> EngineConfig:
    return EngineConfig(
        slots=8,
        prefill_prompts=8,
        max_prompt_tokens=4,
        max_response_tokens=4,
        tokens_per_dispatch=4,
        stop_ids=(1,),
        dtype=dtype,
    )


def actor_of(dtype, *, offload=False, **layout) -> Actor:
    sizes = ParallelLayout.from_config(LayoutConfig(**layout or LAYOUT))
    mesh = build_mesh(sizes, jax.devices()[: sizes.num_devices])
    actor = Actor(
        MODEL,
        mesh,
        train=TrainConfig(rows=8, row_tokens=8),
        optim=OptimConfig(),
        temperature=1.0,
        seed=0,
        backend=build_backend(
            "offline", MODEL, mesh, engine_of(dtype), functools.partial(map, str)
        ),
        offload=offload,
    )
    actor.init()
    return actor


def sequences(model: ModelConfig, rows: int = 8, tokens: int = 8) -> TrainBatch:
    """Rows of one sequence each, all but the first token trained on."""
    token_RT = np.random.default_rng(0).integers(0, model.vocab_size, (rows, tokens))
    position_RT = np.broadcast_to(np.arange(tokens, dtype=np.int32), token_RT.shape)
    fields = {
        "tokens": token_RT.astype(np.int32),
        "positions": position_RT,
        "segment_ids": np.ones_like(position_RT),
        "sequence": np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], token_RT.shape),
        "loss_mask": (position_RT > 0).astype(np.float32),
    }
    stacked = {name: np.array(x)[None, None] for name, x in fields.items()}
    return TrainBatch.of(PackedBatch(**stacked, num_micro_U=np.ones(1, np.int32)))


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


class Gate:
    """Responses that wait until they may come; it notes with which weights."""

    def __init__(self):
        self.begun, self.opened = threading.Event(), threading.Event()
        self.embeddings = []

    def backend_on(self, device) -> ArithmeticBackend:
        mesh = build_mesh(ParallelLayout(1, 1, 1, 1, 1), [device])

        def respond(prompt, index):
            self.begun.set()
            assert self.opened.wait(timeout=60)
            assert backend.weights is not None
            self.embeddings.append(np.array(backend.weights["embedding"]))
            return np.array([1], np.int32)

        backend = ArithmeticBackend(
            mesh, engine_of("float32"), functools.partial(map, str), respond
        )
        return backend


def gated_actor(sampling_device) -> tuple[Actor, Gate]:
    gate = Gate()
    actor = Actor(
        MODEL,
        build_mesh(ParallelLayout(1, 1, 1, 1, 1), jax.devices()[:1]),
        train=TrainConfig(rows=8, row_tokens=8),
        optim=OptimConfig(lr=0.1, lr_warmup_steps=0),
        temperature=1.0,
        seed=0,
        backend=gate.backend_on(sampling_device),
    )
    actor.init()
    return actor, gate


ONE_PROMPT = Prompts(np.arange(1), (np.array([2], np.int32),), *(("",) for _ in range(3)))
OPTIONS = SamplingOptions(num_samples=1, seed=0, step=0, temperature=1.0)


def test_the_actor_learns_while_its_former_weights_sample():
    actor, gate = gated_actor(jax.devices()[1])
    before = np.array(actor.state.params["embedding"])
    started = actor.start_generating(ONE_PROMPT, OPTIONS)
    assert gate.begun.wait(timeout=60)
    actor.update(actor.place(sequences(MODEL)), SUPERVISED)
    assert int(actor.state.step) == 1 and not started.done() and not actor.can_sample
    gate.opened.set()
    assert started.result(timeout=60).tokens[0].tolist() == [1]
    np.testing.assert_array_equal(gate.embeddings[0], before)
    actor.generate(ONE_PROMPT, OPTIONS)
    np.testing.assert_array_equal(gate.embeddings[1], actor.state.params["embedding"])
    assert (gate.embeddings[1] != before).any()
    actor.close()


@pytest.mark.parametrize("needs", ["for_training", "generate"])
def test_what_needs_the_samplers_devices_waits_for_it(needs):
    actor, gate = gated_actor(jax.devices()[0])
    started = actor.start_generating(ONE_PROMPT, OPTIONS)
    assert gate.begun.wait(timeout=60)
    threading.Timer(0.1, gate.opened.set).start()
    if needs == "generate":
        actor.generate(ONE_PROMPT, OPTIONS)
    else:
        actor.for_training()
    assert started.done()
    actor.close()


def test_a_sampler_that_fails_tells_whoever_waits_for_it():
    actor, gate = gated_actor(jax.devices()[1])
    gate.opened.set()
    long = dataclasses.replace(ONE_PROMPT, tokens=(np.zeros(5, np.int32),))
    started = actor.start_generating(long, OPTIONS)
    with pytest.raises(UserError, match="prompt 0 has 5 tokens"):
        started.result(timeout=60)
    assert actor.generate(ONE_PROMPT, OPTIONS).tokens[0].tolist() == [1]
    actor.close()
