"""8-bit matmuls of activations and weights, forward and backward, with qwix (the extra `qwix`).

    x [..., *summed]   weight [*summed, *outs]   g [..., *outs], gradient of the output

    matmul       computes          scales                              int8        fp8
    x · weight   output            per token; per output               int8        e4m3
    g · weight'  input gradient    per token; those of the weight      int8        e4m3
                                   multiply g before it is rounded
    x' · g       weight gradient   per output; those of x multiply g   unrounded   e4m3, g in e5m2

The weight gradient is a sum over tokens whose gradients differ by orders of magnitude. As 8-bit integers, all
gradients below 1/256 of the largest would become 0: more than half of them, if their logarithm has a standard
deviation of 2. This would remove a part of the training signal. So with int8 the weight gradient is computed
in the type of the activations. e5m2 spans over ten orders of magnitude and needs no exception.

A scale is the largest absolute value, computed anew for each matmul, so there is no state. Rounding is to the
nearest. Not covered: the grouped matmuls of experts, attention scores and values, logits, routers, adapters
and scores, which keep full precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl.errors import UserError

MatmulKind = Literal["full", "int8", "fp8"]

# (x [..., *summed], weight [*summed, *outs], num_summed) -> [..., *outs], in the type of x.
Product = Callable[[jax.Array, jax.Array, int], jax.Array]


def matmul_in(kind: MatmulKind) -> Product | None:
    """The 8-bit matmul of a projection; None for "full".

    Raises:
      UserError: qwix is not installed.
    """
    if kind == "full":
        return None
    try:
        import qwix  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise UserError(
            f"train.matmuls {kind!r} takes the package qwix, which is not installed; run "
            "pip install 'qwix<0.2', or set train.matmuls to 'full'"
        ) from error
    return functools.partial(_product, qwix, kind)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 4))
def _product(
    qwix: Any, kind: MatmulKind, x: jax.Array, weight: jax.Array, num_summed: int
) -> jax.Array:
    return _forward(qwix, kind, x, weight, num_summed)[0]


def _forward(qwix: Any, kind: MatmulKind, x: jax.Array, weight: jax.Array, num_summed: int):
    lead = x.ndim - num_summed
    in_type = jnp.int8 if kind == "int8" else jnp.float8_e4m3fn
    q_x = _quantized(qwix, x, in_type, range(lead))
    q_weight = _quantized(qwix, weight, in_type, range(num_summed, weight.ndim))
    summed = (tuple(range(lead, x.ndim)), tuple(range(num_summed)))
    out = _dot_general(qwix, q_x, q_weight, summed).astype(x.dtype)
    return out, (q_x, q_weight, jnp.zeros((), weight.dtype))


def _backward(qwix: Any, kind: MatmulKind, num_summed: int, kept: Any, g: jax.Array):
    q_x, q_weight, like_weight = kept
    dx = _input_gradient(qwix, q_weight, g, num_summed)
    sum_tokens = _weight_gradient_full if kind == "int8" else _weight_gradient_fp8
    dweight = sum_tokens(qwix, q_x, g, num_summed)
    return dx.astype(g.dtype), dweight.astype(like_weight.dtype)


_product.defvjp(_forward, _backward)


def _input_gradient(qwix: Any, q_weight: Any, g: jax.Array, num_summed: int) -> jax.Array:
    """[..., *summed], float32."""
    num_outs = q_weight.qvalue.ndim - num_summed
    lead = g.ndim - num_outs
    # The sum runs over outputs, and each output has its own scale. Such a scale cannot be factored out of the
    # sum, so it multiplies the gradient first.
    scale = q_weight.scale.reshape((1,) * lead + q_weight.scale.shape[num_summed:])
    q_g = _quantized(qwix, g.astype(jnp.float32) * scale, q_weight.qvalue.dtype, range(lead))
    summed = (tuple(range(lead, g.ndim)), tuple(range(num_summed, q_weight.qvalue.ndim)))
    return _dot_general(qwix, q_g, q_weight.qvalue, summed)


def _weight_gradient_full(qwix: Any, q_x: Any, g: jax.Array, num_summed: int) -> jax.Array:
    """[*summed, *outs], in the type of `g`."""
    tokens = tuple(range(q_x.qvalue.ndim - num_summed))
    x = qwix.dequantize(q_x).astype(g.dtype)
    return jax.lax.dot_general(x, g, ((tokens, tokens), ((), ())))


def _weight_gradient_fp8(qwix: Any, q_x: Any, g: jax.Array, num_summed: int) -> jax.Array:
    """[*summed, *outs], float32."""
    lead = q_x.qvalue.ndim - num_summed
    tokens = tuple(range(lead))
    scale = q_x.scale.reshape(q_x.scale.shape[:lead] + (1,) * (g.ndim - lead))
    scaled = g.astype(jnp.float32) * scale
    q_g = _quantized(qwix, scaled, jnp.float8_e5m2, range(lead, g.ndim))
    return _dot_general(qwix, q_x.qvalue, q_g, (tokens, tokens))


def _quantized(qwix: Any, x: jax.Array, dtype: Any, axes: range) -> Any:
    """Values in `dtype` with a float32 scale for each index of `axes`."""
    return qwix.quantize(x.astype(jnp.float32), dtype, channelwise_axes=tuple(axes))


def _dot_general(qwix: Any, a: Any, b: Any, summed: Any) -> jax.Array:
    """Summed in int32 or float32, then scaled; float32."""
    # qwix multiplies int32 by float32 and relies on implicit promotion, which jaxrl otherwise forbids.
    with jax.numpy_dtype_promotion("standard"):
        return qwix.dot_general(a, b, (summed, ((), ())), preferred_element_type=jnp.float32)
