"""Training a model whose last layers share keys and values, and whose layers have inputs of their own."""

import dataclasses

import jax
import numpy as np
import pytest
from closeness import assert_close
from meshes import mesh_of
from small import MODEL, actor_on
from test_delta_layers import update
from test_policy import FOUR_ROWS, PACKED, TRAIN, packed, sequences

from jaxrl.errors import UserError

SHARING = dataclasses.replace(
    MODEL,
    num_layers=6,
    layer_pattern=("sliding", "full"),
    sliding_window=4,
    full_head_dim=12,
    activation="gelu_tanh",
    layer_inputs=8,
    sharing_layers=2,
    double_wide_sharing=True,
)


@pytest.mark.long
def test_packing_meshes_and_rematerialising_do_not_change_an_update():
    before, after, norm = update(packed(sequences(), FOUR_ROWS), model=SHARING)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, after)
    assert min(jax.tree.leaves(moved)) > 1e-8
    assert_close(update(packed(sequences(), PACKED), model=SHARING)[1], after, scale=1)
    for remat in ("none", "full"):
        train = dataclasses.replace(TRAIN, remat=remat)
        # Over heads, the vocabulary of the table, replicas and shards of weights.
        layout = ("1-4-2", "1-2-2-2", 2)
        found = update(packed(sequences(), FOUR_ROWS), layout, SHARING, train)
        assert_close(found[1], after, scale=1)
        assert found[2] == pytest.approx(norm, rel=1e-4)


@pytest.mark.long
def test_devices_that_share_rows_do_not_change_an_update():
    batch = packed(sequences(), PACKED)
    (_, alone, norm), (_, shared, shared_norm) = (
        update(batch, (train, "", 1), SHARING, context=context)
        for train, context in (("1-1-1", 1), ("1-2-4", 2))
    )
    assert_close(shared, alone, scale=1)
    assert shared_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("sharing", [2, 0])
def test_stages_of_a_pipeline_are_refused(sharing):
    model = dataclasses.replace(SHARING, sharing_layers=sharing, double_wide_sharing=False)
    with pytest.raises(UserError, match=r"2 pipeline stages, but layers .*; choose p = 1"):
        actor_on(mesh_of("2-1-1"), model=model)
