"""Two stages for three layers: training, sampling, checkpoints and files are those of one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import small
from closeness import assert_close
from meshes import mesh_of
from small import MODEL, actor_on, whole_rows
from tokens import prompts_of

from jaxrl.errors import UserError
from jaxrl.models.decoder import fitted, init_params
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.huggingface.weight_loading import load_params
from jaxrl.models.model_config import LoraConfig
from jaxrl.roles.losses import SUPERVISED
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.tracking.checkpoints import Checkpoints
from jaxrl.trainer.supervised import copied

THREE = dataclasses.replace(MODEL, num_layers=3)
MIXTURE = dataclasses.replace(THREE, num_experts=4, experts_per_token=2)
LAYOUT = {"train": "2-2-2", "generate": "1-2-2-2", "fsdp": 2}
ENGINE = dataclasses.replace(small.ENGINE, slots=8, prefill_prompts=8, dtype="float32")
# With a small epsilon Adam would enlarge gradients that are 0 but for rounding.
OPTIM = OptimConfig(lr=0.01, lr_warmup_steps=0, weight_decay=0.1, epsilon=1e-2)


@functools.cache
def start(model):
    plain = dataclasses.replace(model, lora=LoraConfig())
    return jax.device_get(jax.jit(init_params, static_argnums=0)(plain, jax.random.key(1)))


def actor_of(model=THREE, optim=OPTIM, layout=None, **options):
    """An actor that goes on from `start`."""
    actor = actor_on(
        mesh_of(**(LAYOUT if layout is None else layout)), model=model, optim=optim, **options
    )
    base = start(model)
    # Adapters are drawn when training starts.
    where = {name: actor.train_shardings[name] for name in base}
    if not model.lora.rank:
        actor.start_from(jax.device_put(fitted(base, actor.shapes), where))
    else:
        actor.init()
    return actor


def updates(actor, first, last):
    """The norms of the gradients of some updates."""
    norms = []
    for seed in range(first, last):
        metrics = actor.update(actor.place(whole_rows(seed)), SUPERVISED)
        norms.append(float(metrics["grad_norm"]))
    return norms


def absent(tree):
    """The values of the fourth layer."""
    stacks = [
        leaf[3:]
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
        if "layers" in jax.tree_util.keystr(path) and leaf.ndim and leaf.shape[0] == 4
    ]
    assert stacks
    return np.concatenate([stack.ravel() for stack in stacks])


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "optim"),
    [
        (THREE, {}),
        (MIXTURE, {}),
        (THREE, {"kind": "muon"}),
        (dataclasses.replace(THREE, lora=LoraConfig(rank=2)), {}),
    ],
    ids=["adamw", "mixture", "muon", "adapters"],
)
def test_updates_are_those_of_one_device(model, optim):
    optim = dataclasses.replace(OPTIM, **optim)
    staged, alone = (actor_of(model, optim, layout) for layout in (None, {}))
    norms = updates(staged, 0, 3)
    assert norms == pytest.approx(updates(alone, 0, 3), rel=1e-5)
    found = fitted(jax.device_get(staged.state.params), alone.shapes)
    assert_close(found, jax.device_get(alone.state.params), scale=1)
    assert not absent((staged.state.params, staged.state.opt_state)).any()


def test_sampling_gets_the_layers_of_the_model():
    staged, alone = (actor_of(engine=ENGINE, layout=layout) for layout in (None, {}))
    before = jax.device_get(staged.state)
    prompts = prompts_of([2, 3], [4, 5, 6], [7], [8])
    texts = [
        actor.generate(prompts, SamplingOptions(temperature=0.0, num_samples=1, seed=0)).tokens
        for actor in (staged, alone)
    ]
    jax.tree.map(np.testing.assert_array_equal, *texts)
    jax.tree.map(np.testing.assert_array_equal, staged.backend.params, start(THREE))
    jax.tree.map(np.testing.assert_array_equal, staged.for_training(), before)


@pytest.mark.parametrize("moments", ["float32", pytest.param("int8", marks=pytest.mark.long)])
def test_checkpoints_fit_other_stages(moments, tmp_path):
    optim = dataclasses.replace(OPTIM, moments=moments)
    model = dataclasses.replace(THREE, d_model=64, d_ff=64)
    staged = actor_of(model, optim)
    updates(staged, 0, 2)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.prepare(None)
    layers = {"actor": 3}

    def saved(step, actor):
        checkpoints.save(step, {"actor": actor.state}, {}, layers=layers)
        checkpoints.commit()
        checkpoints.wait()

    def restored(step, layout):
        actor = actor_of(model, optim, layout)
        like = {"actor": actor.abstract_state()}
        actor.state = checkpoints.restore(step, like, layers=layers)["actor"]
        return actor

    saved(2, staged)
    alone = restored(2, {})
    wanted = jax.tree.map(
        lambda x, like: fitted(x, like) if x.ndim else x,
        jax.device_get(staged.state),
        alone.abstract_state(),
    )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(alone.state), wanted)
    saved(3, alone)
    again = restored(3, None)
    jax.tree.map(np.testing.assert_array_equal, again.state, jax.device_get(staged.state))
    # Only the weights, as an export reads them.
    params = checkpoints.stored.restore_params(2, "actor", alone.abstract_state().params)
    jax.tree.map(np.testing.assert_array_equal, params, wanted.params)
    checkpoints.close()


def test_files_have_the_layers_of_the_model(tmp_path):
    actor = actor_of(layout={"train": "2-1-1"})
    whole = jax.device_put(start(THREE), jax.devices()[0])
    save_checkpoint(whole, THREE, tmp_path / "whole", dtype="float32")
    save_checkpoint(actor.state.params, THREE, tmp_path / "stages", dtype="float32")
    whole, stages = (tmp_path / name / "model.safetensors" for name in ("whole", "stages"))
    assert whole.read_bytes() == stages.read_bytes()
    loaded = load_params(whole.parent, THREE, actor.train_shardings)
    jax.tree.map(np.testing.assert_array_equal, loaded, jax.device_get(actor.state.params))


def test_stages_that_sample_divide_the_layers():
    rule = "p_g=2 pipeline stages of mesh.generate do not divide 3 layers .*; choose p_g = 1"
    with pytest.raises(UserError, match=rule):
        actor_on(mesh_of("2-2-2"), model=THREE, engine=ENGINE)


def test_a_reference_on_other_stages_gets_a_copy():
    """From two stages of two layers to three stages of one, of other devices."""
    actor = actor_on(mesh_of("2-1-1"), model=THREE)
    actor.init()
    train = TrainConfig(rows=3, row_tokens=8)
    other = actor_on(mesh_of("3-1-1", first=2), model=THREE, train=train)
    copy = copied(actor.state.params, other)
    jax.tree.map(
        np.testing.assert_array_equal,
        copy,
        fitted(jax.device_get(actor.state.params), other.shapes),
    )
