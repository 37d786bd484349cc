"""Every private name of another library that this program uses, each with the reason why no public one does.

tests/test_private.py has a test of each, which fails when an upgrade changes it.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

from jax._src import compiler, distributed
from jax._src.cudnn import fused_attention_stablehlo

# `jax.nn.dot_product_attention` takes no offsets of the segments of a packed row.
cudnn_attention: Any = fused_attention_stablehlo


def coordination_client() -> Any:
    """The client of JAX's service, with its key-value store and barriers; None in a single process."""
    # JAX has no public name for it; Orbax, too, takes it from here.
    return distributed.global_state.client


def coordinator_address() -> str:
    """The address:port of process 0; "" in a single process."""
    # JAX may have found it by itself: on TPU pods, under SLURM, Open MPI and Kubernetes.
    return distributed.global_state.coordinator_address or ""


def keep_what_this_process_compiles() -> None:
    """Lets this process write to the persistent cache of compiled programs: JAX lets process 0 alone."""
    # Programs of a pool without process 0 would be compiled at every start. It is still JAX's own function,
    # but this process seems to be number 0 to it, and to it alone: other threads read the number meanwhile.
    write = compiler._cache_write
    first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    compiler._cache_write = types.FunctionType(
        write.__code__, {**write.__globals__, "distributed": first}
    )


def compiler_options(lowered: Any) -> list[tuple[str, Any]]:
    """The options of `jax.jit` with which a lowered function will be compiled."""
    # Its text lacks them, and two programs that differ in them alone would share a figure in the cache.
    return list(lowered._lowering._compiler_options_kvs)


def compile_kernels_for(gpu: Any) -> None:
    """Makes JAX choose kernels for a GPU that is not here.

    Args:
      gpu: device of a topology.
    """
    # JAX asks the default device, here a CPU, what cuDNN and kernels may do on the GPU that it compiles for.
    capability = float(gpu.compute_capability)
    fused_attention_stablehlo.check_compute_capability = lambda least: capability >= float(least)
    # From jax 0.11 on.
    with contextlib.suppress(ImportError):
        from jax._src.pallas.triton import gpu_info  # pyright: ignore

        version = gpu_info.gpu_version_from_device_kind(gpu.device_kind)
        gpu_info.get_gpu_info = lambda: gpu_info.get_gpu_info_from_version(version)


def gpu_ragged_dot(**config: Any) -> Any:
    """tokamax's kernel for products of groups of rows.

    Args:
      config: sizes of tiles and stages, as tokamax names them.
    """
    # `tokamax.ragged_dot` takes no sizes of tiles, and has measured ones for few shapes.
    from tokamax._src.ops.ragged_dot.pallas_mosaic_gpu import PallasMosaicGpuRaggedDot  # pyright: ignore
    from tokamax._src.ops.ragged_dot.pallas_mosaic_gpu_common import Config  # pyright: ignore

    return PallasMosaicGpuRaggedDot(config=Config(**config))
