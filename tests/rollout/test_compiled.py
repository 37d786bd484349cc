"""What the compiler makes of the rollout programs for a TPU that is not here."""

import json
import os
import subprocess
import sys

import pytest
from extras import needs_extra

# Run apart, as libtpu reads its environment when it is loaded.
COMPILE_FOR_TPU = """
import json
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, replicated, shardings
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.decoder import decoder_graph
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig

topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1")
layout = ParallelLayout.from_config(LayoutConfig(train="1-2-2", generate="1-2-1-2"))
mesh = build_mesh(layout, list(topology.devices))
model = ModelConfig(vocab_size=1024, num_layers=4, d_model=512, d_ff=1024, num_heads=8, head_dim=128)
graph, shapes, axes = decoder_graph(model)
def engine_of(kv_dtype):
    return Engine(model, graph, mesh, EngineConfig(
        slots=64, smallest_bucket=8, prefill_prompts=8, max_prompt_tokens=512, max_response_tokens=3584,
        tokens_per_dispatch=64, stop_ids=(1,), dtype="bfloat16", kv_dtype=kv_dtype,
    ))

params = jax.tree.map(
    lambda s, where: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16, sharding=where),
    shapes, shardings(axes, shapes, GENERATE_RULES, mesh),
)
def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(mesh))

def found(kv_dtype):
    engine = engine_of(kv_dtype)
    state = engine.abstract_decode_state()
    programs = {
        "generate": engine.generate.lower(params, state, ints()).compile(),
        "resize": engine.resize.lower(state, ints(32), capacity=2048).compile(),
    }
    resize = programs["resize"].as_text()
    return {
        "cache": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.context.cache)) // 4,
        "temporary": {n: p.memory_analysis().temp_size_in_bytes for n, p in programs.items()},
        "collectives": any(word in resize for word in ("all-", "collective-")),
        "kernels": programs["generate"].as_text().count("tpu_custom_call"),
    }

print(json.dumps({name: found(name) for name in ("bfloat16", "int8")}))
"""


@pytest.mark.tpu
@needs_extra("aot", "libtpu")
def test_no_program_copies_the_cache_and_slots_move_without_communication():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_FOR_TPU],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    by_type = json.loads(done.stdout.splitlines()[-1])
    for kv_dtype, found in by_type.items():
        assert not found["collectives"]
        for program, size in found["temporary"].items():
            assert size < found["cache"] / 8, (kv_dtype, program)
    # One, in the loop over layers; there is none for int8.
    assert {kv_dtype: found["kernels"] for kv_dtype, found in by_type.items()} == {
        "bfloat16": 1,
        "int8": 0,
    }
