"""What the compiler makes of the rollout programs for accelerators that are not here."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from beside import of_extension
from extras import import_extra, needs_extra

from jaxrl.mesh import rules
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import replicated
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig

sampler_shapes = of_extension("jaxrl_planner.compiled.programs:sampler_shapes")
read_topology = of_extension("jaxrl_planner.hardware.cluster:read_topology")

# Run apart, as libtpu reads its environment when it is loaded.
MODEL_ON_TPU = """
import json
import sys
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

topology = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1])
layout = ParallelLayout.from_config(LayoutConfig(train="1-2-2", generate="1-2-1-2"))
mesh = build_mesh(layout, list(topology.devices)[:4])
model = ModelConfig(vocab_size=1024, num_layers=4, d_model=512, d_ff=1024, num_heads=8, head_dim=128)
graph, shapes, axes = decoder_graph(model)
def engine_of(kv_dtype, **changes):
    return Engine(model, graph, mesh, EngineConfig(
        slots=64, smallest_bucket=8, prefill_prompts=8, max_prompt_tokens=512, max_response_tokens=3584,
        tokens_per_dispatch=64, stop_ids=(1,), dtype="bfloat16", kv_dtype=kv_dtype, **changes,
    ))

params = jax.tree.map(
    lambda s, where: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16, sharding=where),
    shapes, shardings(axes, shapes, GENERATE_RULES, mesh),
)
def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(mesh))

def cache_bytes(state):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.context.cache)) // 4
"""

CONTIGUOUS = """
def found(kv_dtype):
    engine = engine_of(kv_dtype)
    state = engine.abstract_decode_state()
    programs = {
        "generate": engine.generate.lower(params, state, ints()).compile(),
        "resize": engine.resize.lower(state, ints(32), capacity=2048).compile(),
    }
    resize = programs["resize"].as_text()
    return {
        "cache": cache_bytes(state),
        "temporary": {n: p.memory_analysis().temp_size_in_bytes for n, p in programs.items()},
        "collectives": any(word in resize for word in ("all-", "collective-")),
        "kernels": programs["generate"].as_text().count("tpu_custom_call"),
    }

print(json.dumps({name: found(name) for name in ("bfloat16", "int8")}))
"""


PAGED = """
from jaxrl.rollout.decode_state import Assignment
from jaxrl.rollout.sampling import truncation_of

# Pages for half of the slots at full length.
engine = engine_of("bfloat16", cache="paged", cache_tokens=64 * 4096 // 2)
state, P = engine.abstract_decode_state(), engine.batch_sizes[-1]
prefix = engine.layout.abstract(jax.eval_shape(engine.prefill, params, ints(P, 512), ints(P)))
def scalar(dtype):
    return jax.ShapeDtypeStruct((), dtype, sharding=replicated(mesh))

settings = [scalar(dtype) for dtype in (jnp.uint32, jnp.int32, jnp.float32, jnp.bool_)]
limits = jax.tree.map(lambda x: scalar(jnp.asarray(x).dtype), truncation_of())
slots = Assignment(*[ints(state.num_slots)] * 5)
programs = {
    "generate": engine.generate.lower(params, state, ints()).compile(),
    "insert": engine.insert.lower(prefix, state, slots, *settings, limits).compile(),
    "reuse": engine.reuse.lower(state, ints(P, 4), ints(P, 512), ints(P), ints(P)).compile(),
}
memory = {name: program.memory_analysis() for name, program in programs.items()}
print(json.dumps({
    "cache": cache_bytes(state),
    "temporary": {name: m.temp_size_in_bytes for name, m in memory.items()},
    "aliased": {name: m.alias_size_in_bytes for name, m in memory.items()},
    "kernels": programs["generate"].as_text().count("tpu_custom_call"),
}))
"""

WEIGHTS = """
from jaxrl_planner.compiled.programs import sampler_shapes

def found(weights_dtype):
    engine = engine_of("bfloat16", weights_dtype=weights_dtype)
    sampler = sampler_shapes(engine, shapes, axes)
    program = engine.generate.lower(sampler.params, sampler.slots, ints()).compile()
    weights = [x.size * x.dtype.itemsize for x in jax.tree.leaves(sampler.params["layers"])]
    return {
        "weights": sum(weights) // 2,
        "temporary": program.memory_analysis().temp_size_in_bytes,
    }

print(json.dumps({name: found(name) for name in ("", "int8")}))
"""


SCRATCH = """
import sys
import jax
import jax.numpy as jnp
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import replicated
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.shapes import model_shapes
from jaxrl_planner.compiled.programs import bytes_of, sampler_shapes
from jaxrl_planner.hardware.cluster import read_topology
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig

topology, slots, cache_tokens = sys.argv[1], *map(int, sys.argv[2:])
mesh = build_mesh(
    ParallelLayout.from_config(LayoutConfig(train="1-8-1")), read_topology(topology).devices
)
model = model_shapes("qwen2.5-32b")
graph, shapes, axes = decoder_graph(model)
engine = Engine(model, graph, mesh, EngineConfig(
    slots=slots, prefill_prompts=8, max_prompt_tokens=2048, max_response_tokens=20_480, stop_ids=(1,),
    tokens_per_dispatch=16, dtype="bfloat16", cache="paged", cache_tokens=cache_tokens,
))
sampler = sampler_shapes(engine, shapes, axes)
least = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
memory = engine.generate.lower(sampler.params, sampler.slots, least).compile().memory_analysis()
cache = bytes_of(sampler.slots.context.cache)
assert memory.alias_size_in_bytes > cache
print(memory.temp_size_in_bytes / cache)
"""


def compiled(script: str, topology: str) -> dict:
    return json.loads(last_line(MODEL_ON_TPU + script, topology))


def last_line(script: str, *arguments: str) -> str:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.tpu
@needs_extra("aot", "libtpu")
def test_no_program_copies_the_cache_and_slots_move_without_communication():
    by_type = compiled(CONTIGUOUS, "v5p:2x2x1")
    for kv_dtype, found in by_type.items():
        assert not found["collectives"]
        for program, size in found["temporary"].items():
            assert size < found["cache"] / 8, (kv_dtype, program)
    # One, in the loop over layers; there is none for int8.
    assert {kv_dtype: found["kernels"] for kv_dtype, found in by_type.items()} == {
        "bfloat16": 1,
        "int8": 0,
    }


@pytest.mark.tpu
@needs_extra("aot", "libtpu")
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_weights_in_8_bits_are_widened_within_a_layer_only(topology):
    """A copy of all layers in bfloat16 would take more memory than 8 bits save."""
    by_type = compiled(WEIGHTS, topology)
    wide = by_type.pop("")
    for found in by_type.values():
        assert found["weights"] < 0.51 * wide["weights"]
        assert found["temporary"] < wide["temporary"] + wide["weights"] / 4


@pytest.mark.tpu
@needs_extra("aot", "libtpu")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_no_program_copies_the_pages(topology):
    found = compiled(PAGED, topology)
    # The kernel follows the table in the loop over layers.
    assert found["kernels"] == 1
    for program in ("generate", "insert"):
        assert found["aliased"][program] > found["cache"], program
    # A copy of keys or values would be half of it.
    for program, size in found["temporary"].items():
        assert size < found["cache"] / 10, program


@pytest.mark.tpu
@needs_extra("aot", "libtpu")
@pytest.mark.parametrize(
    ("topology", "slots", "cache_tokens"),
    [
        ("v5e:2x4", 32, 100_000),
        ("v6e:2x4", 128, 500_000),
        ("v5p:2x2x2", 256, 1_900_000),
        ("7x:2x2x1", 256, 2_000_000),
        pytest.param(
            *("h100:1x8", 256, 1_400_000), marks=needs_extra("aot-gpu", "jax_cuda13_plugin")
        ),
    ],
)
def test_the_scratch_of_a_large_model_is_small_beside_its_pages(topology, slots, cache_tokens):
    """No weight is laid out anew, and no device gathers the logits of others."""
    scratch = float(last_line(SCRATCH, topology, str(slots), str(cache_tokens)))
    assert scratch < 0.013


@pytest.mark.slow
def test_on_a_gpu_no_layer_is_copied_for_a_token(monkeypatch):
    """The compiler's text has copies of layers with a stack, and none with a list of layers.

    Nor does prefill stack the list again: its temporaries are less than the layers.
    """
    import_extra("aot-gpu", "jax_plugins.xla_cuda13")
    mesh = build_mesh(
        ParallelLayout.from_config(LayoutConfig(train="1-1-1")), read_topology("h100:1x1").devices
    )
    sizes = {"num_layers": 4, "d_model": 768, "d_ff": 1280, "num_heads": 6, "num_kv_heads": 2}
    model = ModelConfig(vocab_size=1024, head_dim=128, **sizes)
    graph, shapes, axes = decoder_graph(model)
    config = EngineConfig(
        **{"slots": 64, "prefill_prompts": 8, "max_prompt_tokens": 64, "stop_ids": (1,)},
        **{"max_response_tokens": 64, "dtype": "bfloat16", "cache": "paged"},
    )
    engine = Engine(model, graph, mesh, config)

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(mesh))

    def copies():
        found = sampler_shapes(engine, shapes, axes)
        text = engine.generate.lower(found.params, found.slots, ints()).compile().as_text()
        # As a slice has it: with a dimension of 1 for the layer.
        return text.count("bf16[1,768,1280]"), text.count("bf16[1,1280,768]")

    assert copies() == (0, 0)
    params = sampler_shapes(engine, shapes, axes).params
    prefill = engine.prefill.lower(params, ints(8, 64), ints(8)).compile()
    assert prefill.memory_analysis().temp_size_in_bytes < 2 * 4 * 3 * 768 * 1280
    monkeypatch.setattr(rules, "lists_layers", lambda mesh: False)
    assert min(copies()) > 0
