"""Grouped matmuls by tokamax, in bfloat16: each group of rows has a matrix.

    M rows   G groups   K, N widths

On GPUs XLA's own `ragged_dot` computes every group on every row. These kernels read each row and each matrix
where they are. The package tokamax is an extra of jaxrl that needs Python 3.12. It takes seconds to import,
so it is imported when a kernel is traced. Only Hopper GPUs (H100, H200) have these kernels with gradients.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from typing import Any

import jax

from jaxrl.private import gpu_ragged_dot

# Versions that have the private names used here: the first, and the first that has not been tried.
_OLDEST, _UNTRIED = (0, 0, 17), (0, 0, 18)
# Name of the jitted kernels; the planner counts their operations by it.
GROUPED_MATMUL = "grouped_matmul"
# The widths K and N are multiples of this.
WIDTH_MULTIPLE = 64
# Of 116 shapes that tokamax was tuned for on an H100, most were fastest with these sizes of tiles: 428 of 990
# TFLOP/s for 131,072 rows of Qwen3-30B-A3B. By default other shapes get smaller tiles.
_TILES = {"block_m": 128, "block_n": 64, "block_k": 128, "num_stages": 4, "split_k": 1}
_OF_ROWS = _TILES | {"persistent": True, "grid_minor_dim": 1, "grid_tile_width": 8}


def runs_on(device: Any) -> bool:
    """Whether tokamax is installed and has kernels for a device; None is no device."""
    is_hopper = getattr(device, "platform", "") == "gpu" and device.compute_capability == "9.0"
    return is_hopper and _is_installed()


@functools.cache
def _is_installed() -> bool:
    try:
        version = importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:
        return False
    return _OLDEST <= tuple(map(int, version.split(".")[:3])) < _UNTRIED


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(
    x_MK: jax.Array,
    weight_GKN: jax.Array,
    rows_G: jax.Array,
    device: Any,
    implementation: str = "mosaic_gpu",
) -> jax.Array:
    """Multiplies the first `rows_G[0]` rows with matrix 0, the next with matrix 1, and so on.

    Rows behind the last group must be finite, and so must be the gradients of their results. These results,
    and the gradients of the rows, may be anything.

    Args:
      x_MK, weight_GKN: factors, for the kernel in bfloat16, K and N multiples of `WIDTH_MULTIPLE`.
      rows_G: int32, number of rows of each group.
      device: device that the kernel is compiled for.
      implementation: "mosaic_gpu", or for tests "xla", which runs on any device and without tokamax.

    Returns:
      [M, N] in the type of `x_MK`; sums are float32.
    """
    numbers = (((1,), (1,)), (0,), (0,))
    return _product(x_MK, weight_GKN, rows_G, device, implementation, numbers)


def _backward(device, implementation, saved, d_out_MN):
    x_MK, weight_GKN, rows_G = saved
    product = functools.partial(_product, rows=rows_G, device=device, implementation=implementation)
    return (
        product(d_out_MN, weight_GKN, numbers=(((1,), (2,)), (0,), (0,))),
        # One matrix for each group of rows.
        product(x_MK, d_out_MN, numbers=(((0,), (0,)), (0,), ())),
        None,
    )


def _forward(x_MK, weight_GKN, rows_G, device, implementation):
    out_MN = grouped_matmul(x_MK, weight_GKN, rows_G, device, implementation)
    return out_MN, (x_MK, weight_GKN, rows_G)


grouped_matmul.defvjp(_forward, _backward)


def _product(
    left: jax.Array,
    right: jax.Array,
    rows: jax.Array,
    device: Any,
    implementation: str,
    numbers: tuple[Any, ...],
) -> jax.Array:
    """A product; `numbers` are the summed, ragged and group dimensions of `jax.lax.ragged_dot_general`."""
    summed, ragged, group = numbers
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(summed, ((), ())),
        lhs_ragged_dimensions=ragged,
        rhs_group_dimensions=group,
    )
    if implementation == "xla":
        return jax.lax.ragged_dot_general(left, right, rows, dimensions)

    import tokamax  # pyright: ignore

    # The settings of rows are for products with one result for each row; a gradient of the matrices has one
    # for each group.
    kernel = gpu_ragged_dot(**(_OF_ROWS if group else _TILES))

    def grouped_matmul(left: jax.Array, right: jax.Array, rows: jax.Array) -> jax.Array:
        # tokamax takes the kind of GPU from the default device. When one compiles for a GPU that is not
        # here, the default device is another. Its table of measured sizes warns about every shape that is
        # not in it; without it tiles are chosen by shapes alone.
        is_here = jax.devices()[0].device_kind == device.device_kind
        chosen = contextlib.nullcontext() if is_here else jax.default_device(device)
        with chosen, tokamax.config.ignore_autotuning_cache(True):  # pyright: ignore
            return kernel(
                *(left, right),
                group_sizes=rows,
                ragged_dot_dimension_numbers=dimensions,
                preferred_element_type=left.dtype,
            )

    grouped_matmul.__name__ = GROUPED_MATMUL
    return jax.jit(grouped_matmul)(left, right, rows)
