"""Closeness of computed numbers: relative to the largest of what is compared.

Bit for bit is right only for what one program computes on one machine. The same sum of float32 terms in
another program, on another mesh or by another processor adds its terms in another order, with vectors of
another width and with or without fused multiply-adds, and each addition rounds to half an ulp (6e-8) of the
partial sum. So the error goes with the size and the number of the terms, and an element that is small
because large terms cancel carries their error: it is compared with the largest element, not with itself.
"""

from typing import Any

import jax
import numpy as np

# 84 ulps of float32: what a few layers of sums of up to thousands of terms give, of which tests see a tenth
# at most. A wrong term is wrong by a thousand times as much.
FLOAT32 = 1e-5
# 8 ulps: it rounds to 2**-9 of every value, and layers see each other's.
BFLOAT16 = 2.0**-5


def assert_close(
    found: Any, expected: Any, rtol: float = FLOAT32, *, scale: float = 0.0, err_msg: str = ""
) -> None:
    """Leaf by leaf, no element of `found` is further from `expected` than `rtol` of the largest in the leaf.

    Args:
      found, expected: numbers, arrays, or trees of one structure.
      rtol: for float32, or what the coarsest type on the way allows.
      scale: how large the terms are where they may cancel to less in all of a leaf: 1 for log-probabilities,
        as differences of logits, and for weights after an update, whose gradients may be 0 but for rounding.
      err_msg: shown on failure, before the path of the leaf.
    """

    def check(path, a, b):
        b = np.asarray(b)
        largest = max(scale, np.abs(b).max(initial=0.0))
        np.testing.assert_allclose(
            a, b, rtol=0, atol=rtol * largest, err_msg=err_msg + jax.tree_util.keystr(path)
        )

    jax.tree_util.tree_map_with_path(check, found, expected)
