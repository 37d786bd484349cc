"""Products of activations and weights in 8 bits, forward and backward, by qwix (the extra `qwix`).

    x [..., *summed]   weight [*summed, *outs]   g [..., *outs], gradient of the product

    product      of          scales                          in int8     in fp8
    x · weight   x, weight   one a token, one an output      int8        e4m3
    g · weight'  g, weight   one a token; the weight's       int8        e4m3
                             go into g before it is rounded
    x' · g       x, g        one an output; x's go into g    as given    e4m3, g in e5m2

The last is the weight's gradient, a sum over tokens whose gradients differ by orders of magnitude. In 8-bit
integers all those below 1/256 of the largest would be 0 (more than half of them where their logarithm has a
standard deviation of 2), and round away in one direction what trains; so it is summed in the type of the
activations. e5m2 reaches over ten orders of magnitude.

Scales are the largest absolute value, taken anew for each product, so there is no state. Rounding is to the
nearest. Not covered: grouped products of a mixture's experts, attention itself, and logits, routers, adapters
and scores, which stay as they are.
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
    """The product of a projection in 8 bits; None for "full".

    Raises:
      UserError: qwix is not installed.
    """
    if kind == "full":
        return None
    try:
        import qwix  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise UserError(
            f"train.products {kind!r} takes the package qwix, which is not installed; run "
            "pip install 'jaxrl[qwix]', or set train.products to 'full'"
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
    # A scale of what is summed over cannot be taken out of the sum: into the other factor with it.
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
    # It multiplies int32 with float32: qwix relies on promotion.
    with jax.numpy_dtype_promotion("standard"):
        return qwix.dot_general(a, b, (summed, ((), ())), preferred_element_type=jnp.float32)
