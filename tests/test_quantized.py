import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.quantized import Quantized, StoredType, quantize, stored_types


def test_int8_by_hand():
    x = np.array([[0.0, 1.4, -127.0], [2.54, 0.009, 1.271]], np.float32)
    narrow = quantize(x, (1,))
    assert narrow.values.dtype == jnp.int8
    np.testing.assert_array_equal(narrow.values, [[0, 1, -127], [127, 0, 64]])
    np.testing.assert_allclose(narrow.scale, [[1.0], [0.02]], rtol=1e-6)
    np.testing.assert_allclose(
        narrow.astype(jnp.float32), [[0, 1, -127], [2.54, 0, 1.28]], rtol=1e-6
    )


@pytest.mark.parametrize("dims", [(0,), (1, 2), (0, 1, 2)])
def test_no_entry_is_wrong_by_more_than_half_a_step_and_none_is_infinite(dims):
    sizes = 10.0 ** np.random.default_rng(1).uniform(-30, 30, (7, 5, 3))
    x = (sizes * np.random.default_rng(0).normal(size=sizes.shape)).astype(np.float32)
    largest = np.abs(x).max(dims, keepdims=True)
    wide = np.asarray(quantize(jnp.asarray(x), dims).astype(jnp.float32))
    assert np.isfinite(wide).all()
    assert (np.abs(wide - x) <= 1.0001 * 0.5 / 127 * largest).all()
    # The largest entry is exact but for the rounding of its scale.
    at_top = np.abs(x) == largest
    np.testing.assert_allclose(wide[at_top], x[at_top], rtol=1e-6)


def test_a_stored_type_knows_its_arrays_and_their_bytes():
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    where = jax.NamedSharding(mesh, jax.P(None, "a", "b"))
    stored = StoredType(jnp.dtype("int8"), (1,))
    shapes = stored.abstract((4, 6, 8), where)
    assert isinstance(shapes, Quantized)
    assert (shapes.values.shape, shapes.scale.shape) == ((4, 6, 8), (4, 1, 8))
    # The dimension that shares a scale is whole, the other one is split like its channels.
    assert shapes.values.sharding == where
    assert shapes.scale.sharding.spec == jax.P(None, None, "b")
    assert stored.nbytes((4, 6, 8)) == 4 * 6 * 8 + 4 * 4 * 8
    plain = StoredType(jnp.dtype("bfloat16"))
    assert plain.abstract((4, 6, 8), where).sharding == where
    assert plain.nbytes((4, 6, 8)) == 2 * 4 * 6 * 8


def test_one_type_stands_for_all_leaves_and_a_tree_for_itself():
    tree = {"a": np.ones(2), "b": [np.ones(3)]}
    types = stored_types("bfloat16", tree)
    assert jax.tree.leaves(types) == [StoredType(jnp.dtype("bfloat16"))] * 2
    assert stored_types(types, tree) is types
