"""Each private name of another library, used as the program does: an upgrade that breaks one fails here."""

import ast
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from extras import import_extra, needs_extra
from processes import free_port

from jaxrl import private

ROOT = pathlib.Path(__file__).parents[1]


def test_no_other_file_imports_private_modules():
    found = set()
    for path in [*(ROOT / "jaxrl").rglob("*.py"), *(ROOT / "extensions").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(part.startswith("_") for name in names for part in name.split(".")[1:]):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == {"jaxrl/private.py"}


def test_a_single_process_has_no_service():
    assert private.coordination_client() is None and private.coordinator_address() == ""


SERVICE = """
import sys
import jax
from jaxrl import private
jax.distributed.initialize(sys.argv[1], 1, 0)
private.coordination_client().key_value_set_bytes("name", b"value")
print(private.coordination_client().blocking_key_value_get_bytes("name", 1000))
print(private.coordinator_address() == sys.argv[1])
"""


def test_the_service_of_several_processes_is_found():
    command = [sys.executable, "-c", SERVICE, f"localhost:{free_port()}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["b'value'", "True"], done.stderr


# A process with another number writes, and the number stays as it is.
WRITES = """
import pathlib, sys
import jax, jax.numpy as jnp
from jax._src import distributed
from jaxrl import private
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
distributed.global_state.process_id = 1
def kept(n):
    jax.jit(lambda x: jnp.sin(x) * n)(jnp.zeros(5)).block_until_ready()
    return len(list(pathlib.Path(sys.argv[1]).glob("jit__lambda*-cache")))
print(kept(1))
private.keep_what_this_process_compiles()
print(kept(2), distributed.global_state.process_id)
"""


def test_another_process_than_the_first_writes_programs(tmp_path):
    command = [sys.executable, "-c", WRITES, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "1", "1"], done.stderr


def test_options_of_jit_are_told():
    options = {"xla_cpu_enable_fast_math": True}
    function = jax.jit(jnp.sin, compiler_options=options)
    assert dict(private.compiler_options(function.lower(1.0))) == options


def test_cudnn_takes_offsets_of_segments():
    """Traced, without a GPU: [B, T, N, H] with M segments of each row."""
    shape = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    lengths, offsets = (jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (4, 5))

    def attention(q, k, v, lengths, offsets):
        return private.cudnn_attention.dot_product_attention(
            *(q, k, v),
            q_seqlen=lengths,
            kv_seqlen=lengths,
            q_offsets=offsets,
            kv_offsets=offsets,
            scale=0.125,
            mask_type=private.cudnn_attention.MaskType.PADDING_CAUSAL,
        )

    with pytest.MonkeyPatch.context() as patch:
        # As `compile_kernels_for` has it for an H100.
        patch.setattr(private.cudnn_attention, "check_compute_capability", lambda _: True)
        patch.setattr(private.cudnn_attention, "check_cudnn_version", lambda: 91200)
        out = jax.eval_shape(attention, shape, shape, shape, lengths, offsets)
    assert out.shape == shape.shape and out.dtype == shape.dtype


class H100:
    compute_capability = "9.0"
    device_kind = "NVIDIA H100 80GB HBM3"


def test_kernels_are_chosen_for_a_gpu_that_is_not_here(monkeypatch):
    fused = private.cudnn_attention
    monkeypatch.setattr(fused, "check_compute_capability", fused.check_compute_capability)
    private.compile_kernels_for(H100)
    assert fused.check_compute_capability("8.0") and not fused.check_compute_capability("10.0")


@needs_extra("tokamax", "tokamax")
def test_tokamax_takes_sizes_of_tiles():
    import_extra("tokamax", "tokamax")
    sizes = {"block_m": 128, "block_n": 64, "block_k": 128, "num_stages": 4, "split_k": 1}
    assert private.gpu_ragged_dot(**sizes).config.block_m == 128
