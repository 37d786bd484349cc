"""What logits in chunks cost: the memory of a large vocabulary, and the unembedding on several devices."""

import jax
import pytest
from meshes import mesh_of
from small import actor_on

from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.compiled.programs import abstract_batch
from jaxrl.planner.compiled.traffic import counted_collectives
from jaxrl.roles.losses import SUPERVISED
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig


def compiled_update(actor: Actor, rows: int) -> jax.stages.Compiled:
    """Of one microbatch of rows of 256 tokens."""
    batches = (abstract_batch(actor, PackedShape(1, 1, rows, 256)),)
    update = actor.update_program((SUPERVISED,))
    return update.lower(actor.abstract_state(), batches, None, actor.schedule).compile()


def peak_bytes(vocab_size: int) -> int:
    """Of an update of 16 rows of 256 tokens, by the compiler."""
    model = ModelConfig(
        vocab_size=vocab_size,
        num_layers=1,
        d_model=256,
        d_ff=1024,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        tie_embeddings=True,
    )
    compiled = compiled_update(actor_on(mesh_of(), model=model, train=TrainConfig(rows=16)), 16)
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def test_a_vocabulary_of_152k_takes_a_gigabyte_more():
    """Float32 weights and two moments of 151,936 x 256 alone are .47 GB, and their gradient .16.

    It is less than a gigabyte with jax 0.10, and 1.03 with 0.12, whose compiler for CPUs keeps more.
    """
    most = 1.0e9 if jax.__version_info__ < (0, 11) else 1.05e9
    assert peak_bytes(151_936) - peak_bytes(1024) < most


@pytest.mark.parametrize("layout", [{"fsdp": 8}, {"fsdp": 2, "context": 4}, {}])
def test_the_unembedding_travels_once_for_all_chunks(layout):
    """Sixteen chunks on each of eight devices. Its gradient and the embedding's have V x D values."""
    model = ModelConfig(
        vocab_size=4096,
        num_layers=1,
        d_model=64,
        d_ff=64,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
    )
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
