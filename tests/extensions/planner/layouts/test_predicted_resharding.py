"""Bytes that the simulator says a resharding receives, beside those of its compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_clusters import split, toy, toy_work

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.resharding import Resharding
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shardings
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.shapes import model_shapes
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.resharding_costs import of_resharding
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.simulate_generation import GenerationSimulator

MODEL = model_shapes("qwen2.5-0.5b")
# In no order.
LAYOUTS = [
    split(1, 2, 4, t_g=1),
    split(1, 1, 8, 8),
    split(1, 2, 4, 2),
    split(1, 2, 4, 2, t_g=1),
    split(1, 2, 4, 4),
]
# A byte takes as long as it is large.
RATES = Assumptions(link_rate=1.0, latency_scale=0.0)


def predicted(layout: ParallelLayout) -> float:
    cluster = Cluster(toy(per_host=8, link_gbs=4.0), (1, 8))
    simulator = GenerationSimulator(cluster, toy_work(), RATES)
    return simulator.resharding_s(MODEL, layout) * 4e9


def compiled(layout: ParallelLayout) -> int:
    mesh = build_mesh(layout)
    _, shapes, axes = decoder_graph(MODEL)
    half = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float16), shapes)
    train, generate = (
        shardings(axes, half, rules, mesh) for rules in (TRAIN_RULES, GENERATE_RULES)
    )
    return int(of_resharding(Resharding(half, train, generate, jnp.float16)).costs.received)


def test_five_layouts_rank_as_their_compiled_programs_do():
    told = [predicted(layout) for layout in LAYOUTS]
    read = [compiled(layout) for layout in LAYOUTS]
    assert np.argsort(told).tolist() == np.argsort(read).tolist()
    assert told == pytest.approx(read, rel=0.001)
