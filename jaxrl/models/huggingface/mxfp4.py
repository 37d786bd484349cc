"""Weights of experts in MXFP4, as gpt-oss is published: blocks of 32 values of 4 bits with one scale.

NAME_blocks   uint8 [E, N, K / 32, 16]   two values a byte, the first in the low half
NAME_scales   uint8 [E, N, K / 32]       exponent of the block's power of two, plus 127
NAME          bfloat16 [E, K, N]         what they stand for: input dimension first
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

_BLOCK = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor:
    """Slices of a tensor in MXFP4, which are read when it is indexed.

    Attributes:
      blocks, scales: slices of the two stored tensors, in the sense of safetensors.
    """

    blocks: Any
    scales: Any

    def __getitem__(self, at: tuple[slice, slice, slice]) -> np.ndarray:
        """The values at ranges of [E, K, N], bfloat16. All of them are exact."""
        experts, ins, outs = at
        first, last = ins.start // _BLOCK, -(-ins.stop // _BLOCK)
        packed = self.blocks[experts, outs, first:last]
        exponents = self.scales[experts, outs, first:last].astype(np.int32) - 127
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], _BLOCK)
        values = np.ldexp(_VALUES[codes], exponents[..., None]).astype(ml_dtypes.bfloat16)
        values = values.reshape(*values.shape[:2], -1)
        begin = ins.start - first * _BLOCK
        return values[..., begin : begin + ins.stop - ins.start].swapaxes(1, 2)


def mxfp4_shape(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of the tensor that blocks and scales of these shapes stand for; None if they do not fit."""
    if len(blocks) != 4 or blocks[3] * 2 != _BLOCK or blocks[:3] != scales:
        return None
    return blocks[0], blocks[2] * _BLOCK, blocks[1]
