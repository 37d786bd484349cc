"""Training a model with delta layers on meshes, and with adapters."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from closeness import assert_close
from meshes import mesh_of
from small import MODEL, actor_on
from test_policy import CLIPPED, FOUR_ROWS, GRADIENT_SHOWS, PACKED, TRAIN, packed, sequences

from jaxrl.errors import UserError
from jaxrl.models.decoder import fitted
from jaxrl.models.model_config import LoraConfig
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig

DELTA = dataclasses.replace(
    MODEL,
    num_layers=4,
    layer_pattern=("delta", "full"),
    gated_attention=True,
    delta_key_heads=4,
    delta_value_heads=8,
    # Of few dimensions some keys would be nearly 0, and their length of 1 would enlarge what is rounded.
    delta_key_dim=16,
    delta_value_dim=6,
)


def update(batch, layout=("1-1-1", "", 1), model=DELTA, train=TRAIN, context=1):
    """Weights before and after an update, on the host, and its metrics."""
    train_layout, generate, fsdp = layout
    mesh = mesh_of(train_layout, generate, fsdp=fsdp, context=context)
    options = {"train": train, "optim": GRADIENT_SHOWS, "temperature": 0.9, "seed": 0}
    actor = Actor(model, mesh, backend=None, **options)
    actor.init()
    before = jax.device_get(actor.state.params)
    metrics = actor.update(actor.place(batch), CLIPPED)
    return before, jax.device_get(actor.state.params), float(metrics["grad_norm"])


@functools.cache
def reference():
    return update(packed(sequences(), FOUR_ROWS))


@pytest.mark.long
def test_packing_does_not_change_an_update():
    before, after, _ = reference()
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, after)
    assert min(jax.tree.leaves(moved)) > 1e-8
    batch = packed(sequences(), PACKED)
    assert batch.segment_ids.max() == 3
    assert_close(update(batch)[1], after, scale=1)


@pytest.mark.long
@pytest.mark.parametrize("layout", [("1-4-2", "1-2-2-2", 2), ("2-2-2", "1-2-2-2", 2)])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_meshes_and_rematerialising_do_not_change_an_update(layout, remat):
    """Over heads, replicas and shards of weights, and over two stages of a period each."""
    train = dataclasses.replace(TRAIN, remat=remat)
    _, after, norm = update(packed(sequences(), FOUR_ROWS), layout, train=train)
    assert_close(after, reference()[1], scale=1)
    assert norm == pytest.approx(reference()[2], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("train", "context", "model"),
    [
        ("1-2-4", 2, DELTA),
        ("2-1-4", 4, DELTA),
        # Two query heads of two devices go through a ring, in an order of tokens that the state undoes.
        ("1-1-4", 4, dataclasses.replace(DELTA, num_heads=2)),
    ],
)
def test_devices_that_share_rows_do_not_change_an_update(train, context, model):
    batch = packed(sequences(), PACKED)
    (_, alone, norm), (_, shared, shared_norm) = (
        update(batch, ("1-1-1", "", 1), model),
        update(batch, (train, "", 1), model, context=context),
    )
    assert_close(shared, alone, scale=1)
    assert shared_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.long
def test_stages_may_have_different_numbers_of_periods():
    model = dataclasses.replace(DELTA, num_layers=6)
    batch = packed(sequences(), FOUR_ROWS)
    (_, alone, norm), (_, staged, staged_norm) = (
        update(batch, layout, model) for layout in (("1-1-1", "", 1), ("2-2-2", "1-2-2-2", 2))
    )
    # Six layers round a little more than four.
    assert_close(fitted(staged, alone), alone, 3e-5, scale=1)
    assert staged_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.long
def test_adapters_of_every_kind_of_layer_train_alone():
    model = dataclasses.replace(DELTA, lora=LoraConfig(rank=2))
    before, after, _ = update(packed(sequences(), FOUR_ROWS), model=model)
    moved = jax.tree_util.tree_leaves_with_path(
        jax.tree.map(lambda a, b: np.abs(a - b).max(), before, after)
    )
    names = {jax.tree_util.keystr(path) for path, change in moved if change > 0}
    assert all("lora_b" in name for name in names)
    assert {"['layers']['place0']['delta']['v']['lora_b']"} <= names
    assert {"['layers']['place1']['attention']['q_gate']['lora_b']"} <= names


@pytest.mark.parametrize(
    ("layout", "context", "train", "message"),
    [
        ("1-1-2", 1, TrainConfig(share_prompts=True), "train.share_prompts puts the answers"),
        ("4-1-1", 1, TRAIN, "4 pipeline stages for 2 periods of 2 layers, 1 each"),
        (
            "1-4-2",
            2,
            TRAIN,
            "mesh.context 2 x t=4 of mesh.train do not divide model.delta_key_heads 4",
        ),
    ],
)
def test_what_would_cut_a_state_is_refused(layout, context, train, message):
    with pytest.raises(UserError, match=message):
        actor_on(mesh_of(layout, context=context), model=DELTA, train=train)
