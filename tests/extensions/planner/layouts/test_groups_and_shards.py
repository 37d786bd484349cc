"""Device groups of a layout, as text."""

import jax

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.sharding_strategies import GATHER_ALL, HYBRID, VANILLA
from jaxrl_planner.mesh_command import in_words, phase_groups


def layout_of(train: str, generate: str, **shares: int) -> ParallelLayout:
    return ParallelLayout.from_config(LayoutConfig(train=train, generate=generate, **shares))


def words(grouping, layout):
    return phase_groups(
        grouping, build_mesh(layout, jax.devices()[: layout.num_devices], grouping.axes)
    )


def test_figure_8():
    layout = layout_of("1-4-2", "1-2-2-2")
    training = {"training tensor": "[G1,G2,G3,G4] [G5,G6,G7,G8]"}
    assert words(HYBRID, layout) == training | {
        "generation tensor": "[G1,G3] [G2,G4] [G5,G7] [G6,G8]",
        "generation micro data": "[G1,G2] [G3,G4] [G5,G6] [G7,G8]",
    }
    assert words(VANILLA, layout) == training | {
        "generation tensor": "[G1,G2] [G3,G4] [G5,G6] [G7,G8]",
        "generation micro data": "[G1,G3] [G2,G4] [G5,G7] [G6,G8]",
    }
    assert words(GATHER_ALL, layout)["training ZeRO-3"] == "[G1,G2,G3,G4,G5,G6,G7,G8]"


def test_figure_7():
    assert words(HYBRID, layout_of("1-2-2", "1-1-2-2")) == {
        "training tensor": "[G1,G2] [G3,G4]",
        "generation micro data": "[G1,G2] [G3,G4]",
    }


def test_many_groups_and_large_groups_are_shortened():
    assert in_words([(2 * i, 2 * i + 1) for i in range(64)]).endswith("[G15,G16] ... 64 in all")
    assert in_words([tuple(range(0, 128, 2))]) == "[G1..G127 by 2]"
