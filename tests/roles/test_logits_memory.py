"""What a large vocabulary adds to the memory of an update."""

import jax
from meshes import mesh_of
from small import actor_on

from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.compiled.programs import abstract_batch
from jaxrl.roles.losses import SUPERVISED
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.train_config import TrainConfig


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
    actor = actor_on(mesh_of(), model=model, train=TrainConfig(rows=16))
    batches = (abstract_batch(actor, PackedShape(1, 1, 16, 256)),)
    update = actor.update_program((SUPERVISED,))
    compiled = update.lower(actor.abstract_state(), batches, None, actor.schedule).compile()
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def test_a_vocabulary_of_152k_takes_a_gigabyte_more():
    """Float32 weights and two moments of 151,936 x 256 alone are .47 GB, and their gradient .16.

    It is less than a gigabyte with jax 0.10, and 1.03 with 0.12, whose compiler for CPUs keeps more.
    """
    most = 1.0e9 if jax.__version_info__ < (0, 11) else 1.05e9
    assert peak_bytes(151_936) - peak_bytes(1024) < most
