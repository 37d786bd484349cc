"""What logits in chunks cost: the memory of a large vocabulary, and the unembedding on several devices."""

import functools

import jax
import numpy as np
import pytest
from beside import of_extension
from meshes import mesh_of
from model_sizes import sized_model
from small import actor_on, whole_rows

from jaxrl.roles.losses import SUPERVISED
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig

abstract_batch = of_extension("jaxrl_planner.compiled.programs:abstract_batch")
counted_collectives = of_extension("jaxrl_planner.compiled.traffic:counted_collectives")


def compiled_update(actor: Actor, rows: int) -> jax.stages.Compiled:
    """Of one microbatch of rows of 256 tokens."""
    batches = (abstract_batch(actor, PackedShape(1, 1, rows, 256)),)
    update = actor.update_program((SUPERVISED,))
    return update.lower(actor.abstract_state(), batches, None, actor.schedule).compile()


def peak_bytes(vocab_size: int) -> int:
    """Of an update of 16 rows of 256 tokens, by the compiler."""
    model = sized_model(vocab_size, 1, 256, 1024, 8, 4, 32, tie_embeddings=True)
    compiled = compiled_update(actor_on(mesh_of(), model=model, train=TrainConfig(rows=16)), 16)
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def test_a_vocabulary_of_152k_takes_a_gigabyte_more():
    """Float32 weights and two moments of 151,936 x 256 alone are .47 GB, and their gradient .16.

    It is less than a gigabyte with jax 0.10, and 1.03 with 0.12, whose compiler for CPUs keeps more.
    """
    most = 1.0e9 if jax.__version_info__ < (0, 11) else 1.05e9
    assert peak_bytes(151_936) - peak_bytes(1024) < most


def actor_in_chunks(train: str, dtype: str, *, copies_head=False, **layout) -> Actor:
    """With several chunks of logits on a device."""
    actor = actor_on(
        mesh_of(train=train, **layout),
        model=sized_model(512, 2, 256, 256, 4, 4, 64, tie_embeddings=False),
        train=TrainConfig(rows=8, dtype=dtype, logprob_chunk_tokens=16),
        # With an epsilon as large as this a step of Adam has the scale of the gradient.
        optim=OptimConfig(
            lr=1.0, epsilon=1.0, lr_warmup_steps=0, weight_decay=0.0, grad_clip=np.inf
        ),
    )
    assert not actor.copies_head
    actor.copies_head = copies_head
    return actor


def casts(*given, **options) -> int:
    """How often the text of the update casts the unembedding."""
    actor = actor_in_chunks(*given, **options)
    batches = (abstract_batch(actor, PackedShape(1, 1, 8, 64)),)
    update = actor.update_program((SUPERVISED,))
    text = update.lower(actor.abstract_state(), batches, None, actor.schedule).as_text()
    return text.count("(tensor<256x512xf32>) -> tensor<256x512xbf16>")


@functools.cache
def stepped(*given, **options):
    """The loss of a step and how it changes the unembedding."""
    actor = actor_in_chunks(*given, **options)
    actor.init()
    before = jax.device_get(actor.state.params["unembedding"])
    loss = float(actor.update(actor.place(whole_rows(tokens=64)), SUPERVISED)["loss"])
    return loss, jax.device_get(actor.state.params["unembedding"]) - before


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("1-1-8", {"fsdp": 4}), marks=pytest.mark.long),
        ("2-1-4", {"context": 2, "fsdp": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "rtol"), [pytest.param("float32", 1e-5, marks=pytest.mark.long), ("bfloat16", 2e-2)]
)
def test_copies_of_the_unembedding_change_no_step(layout, dtype, rtol):
    """Against one device, which has no copies."""
    loss, change = stepped(layout[0], dtype, **layout[1])
    expected_loss, expected = stepped("1-1-1", dtype)
    assert loss == pytest.approx(expected_loss, rel=rtol)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(change, expected, atol=rtol * np.abs(expected).max())


def test_on_an_accelerator_one_device_casts_the_unembedding_once():
    """On CPU every chunk casts it, forward and backward; the step is the same."""
    loss, change = stepped("1-1-1", "bfloat16")
    assert casts("1-1-1", "bfloat16") > 1
    found = stepped("1-1-1", "bfloat16", copies_head=True)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(found[1], change, atol=2e-2 * np.abs(change).max())
    assert casts("1-1-1", "bfloat16", copies_head=True) == 1


@pytest.mark.parametrize("layout", [{"fsdp": 2, "context": 4}, {}])
def test_the_unembedding_travels_once_for_all_chunks(layout):
    """Sixteen chunks on each of eight devices. Its gradient and the embedding's have V x D values."""
    model = sized_model(4096, 1, 64, 64, 4, 4, 16, tie_embeddings=False)
    train = TrainConfig(rows=8, logprob_chunk_tokens=16)
    actor = actor_on(mesh_of(train="1-1-8", **layout), model=model, train=train)
    text = compiled_update(actor, 8).as_text()
    large = [
        (each.kind, times, round(each.result_bytes / (4096 * 64 * 4)))
        for times, each in counted_collectives(text, 8)
        if each.result_bytes >= 4096 * 64 * 4 // 8 and len(each.groups[0]) > 1
    ]
    assert {times for _, times, _ in large} == {1}
    # Summed are embedding and unembedding; all layers together have a tenth of one.
    assert sum(tables for kind, _, tables in large if kind == "all-reduce") >= 2
