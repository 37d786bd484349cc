"""Products in 8 bits: as close as their format allows, gradients too, and only where projections are."""

import builtins
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from extras import import_extra
from flax import nnx

from jaxrl.errors import UserError
from jaxrl.models.compute import Compute
from jaxrl.models.low_precision import matmul_in
from jaxrl.models.model_config import LoraConfig
from jaxrl.models.modules import Projection

import_extra("qwix", "qwix")

# Of the size of the result, with terms of random signs. A value is rounded to 1/254 of the largest of its
# row, three to four times the others, or to 1/16 of itself at most, 1/48 on average, in e4m3; e5m2, which the
# gradient of an fp8 weight is made of, has steps twice as wide.
ERROR = {"int8": 0.02, "fp8": 0.06}
# (x, weight, summed dimensions): one output dimension, heads, and heads that are summed over.
SHAPES = {
    "flat": ((256, 64), (64, 48), 1),
    "to heads": ((4, 64, 64), (64, 4, 16), 1),
    "from heads": ((4, 64, 4, 16), (4, 16, 32), 2),
}


def arrays(shape: str, dtype=jnp.float32):
    """x, weight and a gradient of tokens that differ by orders of magnitude."""
    x_shape, weight_shape, num_summed = SHAPES[shape]
    rng = np.random.default_rng(0)
    lead, outs = x_shape[: len(x_shape) - num_summed], weight_shape[num_summed:]
    x = rng.standard_normal(x_shape)
    weight = rng.standard_normal(weight_shape) / 8
    sizes = np.exp(2 * rng.standard_normal(lead)) * 1e-6
    g = rng.standard_normal((*lead, *outs)) * sizes.reshape(*lead, *[1] * len(outs))
    return jnp.asarray(x, dtype), jnp.asarray(weight, jnp.float32), jnp.asarray(g, dtype)


def distance(found: jax.Array, expected: jax.Array) -> float:
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@functools.partial(jax.jit, static_argnums=(0, 1))
def with_gradients(compute: Compute, num_summed: int, x, weight, g):
    """(product, gradients of x and weight)."""
    project = functools.partial(compute.projection, num_summed=num_summed)
    out, back = jax.vjp(project, x, weight)
    return out, *back(g)


@pytest.mark.parametrize("flat", [False, True], ids=["", "tokens in one dimension"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ERROR)
def test_product_and_gradients_are_those_of_full_precision_up_to_the_format(kind, shape, flat):
    *inputs, num_summed = *arrays(shape), SHAPES[shape][2]
    exact = with_gradients(Compute(flat=flat), num_summed, *inputs)
    narrow = with_gradients(Compute(flat=flat, in_8_bits=matmul_in(kind)), num_summed, *inputs)
    for found, expected in zip(narrow, exact, strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype == jnp.float32
        assert 0 < distance(found, expected) < ERROR[kind]


@pytest.mark.parametrize("kind", ERROR)
def test_types_are_those_of_the_activations_and_of_the_weight(kind):
    *inputs, num_summed = *arrays("to heads", jnp.bfloat16), 1
    compute = Compute(dtype=jnp.bfloat16, in_8_bits=matmul_in(kind))
    out, dx, dweight = with_gradients(compute, num_summed, *inputs)
    assert (out.dtype, dx.dtype, dweight.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact = with_gradients(Compute(dtype=jnp.bfloat16), num_summed, *inputs)
    for found, expected in zip((out, dx, dweight), exact, strict=True):
        assert distance(found, expected) < ERROR[kind]


@pytest.mark.parametrize("kind", ERROR)
def test_tokens_of_small_gradients_are_not_lost_to_the_weight(kind):
    """One token has a gradient 2,000 times that of the others, who agree on theirs."""
    x = jnp.ones((512, 8)).at[0].set(0.0)
    g = jnp.full((512, 4), 1e-6).at[0].set(2e-3)
    _, _, dweight = with_gradients(Compute(in_8_bits=matmul_in(kind)), 1, x, jnp.ones((8, 4)), g)
    np.testing.assert_allclose(dweight, 511e-6, rtol=0.13)


@pytest.mark.parametrize("kind", ERROR)
def test_what_is_zero_stays_zero_and_has_a_gradient(kind):
    compute = Compute(in_8_bits=matmul_in(kind))
    out, dx, dweight = with_gradients(
        compute, 1, jnp.zeros((4, 8)), jnp.zeros((8, 4)), jnp.zeros((4, 4))
    )
    for array in (out, dx, dweight):
        np.testing.assert_array_equal(array, 0)


def test_products_are_of_8_bits_forward_and_backward():
    *inputs, num_summed = *arrays("flat"), 1
    for kind, narrow in (("int8", 2), ("fp8", 3)):
        compute = Compute(in_8_bits=matmul_in(kind))
        jaxpr = jax.make_jaxpr(functools.partial(with_gradients, compute, num_summed))(*inputs)
        dots = [e for e in jaxpr.jaxpr.eqns[0].params["jaxpr"].eqns if "dot" in str(e.primitive)]
        found = [all(v.aval.dtype.itemsize == 1 for v in dot.invars) for dot in dots]
        assert (sum(found), len(found)) == (narrow, 3)


def test_a_frozen_weight_costs_no_product_for_its_gradient():
    compute = Compute(in_8_bits=matmul_in("int8"))

    def loss(x, weights):
        layer = lambda x, weight: (compute.projection(x, weight, num_summed=1), None)  # noqa: E731
        return jnp.square(jax.lax.scan(layer, x, weights)[0]).sum()

    def num_products(trained) -> int:
        inputs = jnp.ones((32, 16)), jnp.ones((3, 16, 16))
        return jax.jit(jax.grad(loss, trained)).lower(*inputs).compile().as_text().count(" dot(")

    assert (num_products(0), num_products((0, 1))) == (2, 3)


def test_adapters_stay_in_full_precision():
    projection = Projection(
        "q",
        (("embed", 64),),
        (("heads", 4), ("head_dim", 16)),
        lora=LoraConfig(rank=4, alpha=8.0),
        rngs=nnx.Rngs(0),
    )
    projection.lora_b[...] = jax.random.normal(jax.random.key(1), projection.lora_b.shape)
    weight = projection.weight[...]
    x, *_ = arrays("to heads")
    without = {}
    for name, in_8_bits in (("full", None), ("int8", matmul_in("int8"))):
        compute = Compute(in_8_bits=in_8_bits)
        base = compute.projection(x, weight, num_summed=1)
        without[name] = projection(x, compute) - base
    np.testing.assert_allclose(without["int8"], without["full"], atol=1e-5)


def test_without_qwix_the_setting_says_how_to_get_it(monkeypatch):
    real = builtins.__import__

    def without_qwix(name, *args, **kwargs):
        if name == "qwix":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_qwix)
    assert matmul_in("full") is None
    with pytest.raises(UserError, match=r"train.matmuls 'int8' .* pip install 'qwix<0.2', or set"):
        matmul_in("int8")
