"""Padding, imbalance and rates of small batches, by hand."""

import jax
import numpy as np
import pytest
from meshes import mesh_of

from jaxrl.dataflows import step_metrics as module
from jaxrl.dataflows.experience import Experience
from jaxrl.dataflows.learning import ActorPhase
from jaxrl.dataflows.step_metrics import work_metrics, work_rates
from jaxrl.dataflows.step_timer import NoTimer
from jaxrl.mesh.hardware import Roof
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.batches import pack_examples
from jaxrl.roles.flops import attention_flops, token_flops, training_flops
from jaxrl.roles.losses import CorrectionConfig, policy
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import PackedModel
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig

MODEL = ModelConfig(
    vocab_size=16, num_layers=2, d_model=16, d_ff=16, num_heads=2, num_kv_heads=2, head_dim=8
)


def model_on(devices: int) -> PackedModel:
    return PackedModel(MODEL, mesh_of(f"1-1-{devices}"), train=TrainConfig(rows=2, row_tokens=8))


def packed(lengths: list[int], shape: PackedShape, shards: int = 1):
    """A batch of examples, and their packing."""
    examples = [
        (np.zeros(n - 1, np.int32), np.zeros(1, np.int32), np.ones(1, np.float32)) for n in lengths
    ]
    return pack_examples(examples, shape, shards=shards)


def test_padding_is_of_the_microbatches_that_run():
    # Rows 8 and 3 + 2, then 8 + nothing: 2 x 2 x 8 places; a third microbatch is not run.
    _, packing = packed([8, 8, 3, 2], PackedShape(1, 3, 2, 8))
    assert work_metrics(model_on(1), packing)["perf/padding"] == pytest.approx(1 - 21 / 32)


def test_two_devices_wait_for_the_one_with_the_longer_sequences():
    _, packing = packed([8, 2, 2, 2, 2], PackedShape(1, 1, 2, 8), shards=2)
    found = work_metrics(model_on(2), packing)
    row = 8 * token_flops(MODEL).training
    one = row + 3 * attention_flops(MODEL, np.array([8])).sum()
    four = row + 3 * 4 * attention_flops(MODEL, np.array([2])).sum()
    assert found["perf/imbalance"] == pytest.approx(one / ((one + four) / 2))
    assert found["perf/padding"] == 0
    assert work_metrics(model_on(1), packing)["perf/imbalance"] == 1


def test_operations_are_of_one_device():
    lengths = [8, 5, 3, 8]
    _, packing = packed(lengths, PackedShape(2, 2, 2, 8))
    whole = training_flops(MODEL, np.array(lengths)).sum() / 1e12
    for devices in (1, 2):
        found = work_metrics(model_on(devices), packing)["perf/update_tflop"]
        assert found == pytest.approx(whole / devices)


def test_a_step_without_a_signal_computes_nothing():
    """All advantages are 0, so there is no update: neither of the weights nor of the rate."""
    actor = Actor(
        MODEL,
        mesh_of(),
        train=TrainConfig(rows=2, row_tokens=8),
        optim=OptimConfig(lr=1.0, lr_warmup_steps=0, weight_decay=0.5),
        temperature=1.0,
        seed=0,
    )
    actor.init()
    before = jax.device_get(actor.state.params)
    objective = policy("policy_gradient", {})
    phase = ActorPhase(actor, objective, CorrectionConfig(), NoTimer(), needs_signal=True)
    for advantage, has_signal in ((0.0, False), (1.0, True)):
        batch, packing = packed([8, 5], PackedShape(1, 1, 2, 8))
        batch = batch.replace(advantage=np.full_like(batch.advantage, advantage))
        metrics = work_metrics(actor, packing)
        metrics |= phase.update(Experience(None, actor.place(batch), {}, None))
        changed = jax.tree.map(lambda a, b: (a != b).any(), actor.state.params, before)
        assert any(jax.tree.leaves(changed)) == has_signal
        rates = work_rates(metrics | {"timing_s/update_actor": 1e-3})
        assert (rates["perf/tflops_per_device"] > 0) == has_signal


def test_a_known_device_has_a_share_of_its_roof(monkeypatch):
    _, packing = packed([8], PackedShape(1, 1, 2, 8))
    assert "perf/roof_tflops" not in work_metrics(model_on(1), packing)
    monkeypatch.setattr(module, "roof_of", lambda kind: Roof(900, 400, 3000))
    assert work_metrics(model_on(1), packing)["perf/roof_tflops"] == 400


@pytest.mark.parametrize("phase", ["update_actor", "update"])
def test_rates_are_those_of_the_update(phase):
    metrics = {"perf/update_tflop": 600.0, f"timing_s/{phase}": 2.0, "timing_s/step": 10.0}
    assert work_rates(metrics) == {"perf/tflops_per_device": 300}
    known = work_rates(metrics | {"perf/roof_tflops": 1000.0})
    assert known == {"perf/tflops_per_device": 300, "perf/mfu": 0.3}
    # A step whose actor waits for its critic has no update.
    assert work_rates({"perf/update_tflop": 600.0, "timing_s/step": 1.0}) == {}
    assert work_rates({f"timing_s/{phase}": 2.0}) == {}
