"""The update as it is compiled for a slice that is not here."""

import re

import pytest
from beside import of_extension
from jax.sharding import Mesh

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.losses import policy
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig

compile_piece = of_extension("jaxrl_planner.compiled.ahead:compile_piece")
abstract_batch = of_extension("jaxrl_planner.compiled.programs:abstract_batch")
read_topology = of_extension("jaxrl_planner.hardware.cluster:read_topology")

MODEL = ModelConfig(
    vocab_size=512, num_layers=4, d_model=256, d_ff=1024, num_heads=4, num_kv_heads=2, head_dim=64
)
CLIPPED = policy("clipped", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0})
ARRAY = re.compile(r"f32\[([\d,]+)\]\S* copy\(")


@pytest.mark.tpu
def test_the_loop_over_minibatches_takes_no_copy_of_the_state(tmp_path, monkeypatch):
    """Weights and moments stay as they came in: no array of the feed-forward networks is laid out anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    topology = read_topology("v5p:2x2x2")
    layout = ParallelLayout.from_config(LayoutConfig(train="2-2-2", generate="1-2-2-2", fsdp=2))
    mesh: Mesh = build_mesh(layout, topology.devices)
    train = TrainConfig(dtype="bfloat16", remat="full", rows=4, row_tokens=512)
    actor = Actor(MODEL, mesh, train=train, optim=OptimConfig(), temperature=1.0, seed=0)
    batch = abstract_batch(actor, PackedShape(minibatches=2, microbatches=2, rows=4, tokens=512))
    update = actor.update_program((CLIPPED,))
    piece = compile_piece(
        update.lower(actor.abstract_state(), (batch,), None, actor.schedule), topology
    )
    entry = piece.text[piece.text.index("\nENTRY") :]
    copied = [tuple(map(int, dims.split(","))) for dims in ARRAY.findall(entry)]
    assert not [dims for dims in copied if len(dims) == 3 and max(dims) >= MODEL.d_ff // 2]
