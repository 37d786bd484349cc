"""Random recipes and topologies, and whether what the search proposes for them runs."""

import dataclasses
import itertools
import pathlib
import random
import types

import numpy as np

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.devices import device_grid
from jaxrl.mesh.hardware import CHIPS
from jaxrl.mesh.layout import AXES, ParallelLayout
from jaxrl.mesh.pools import Pool, take_devices
from jaxrl.mesh.rules import TRAIN_RULES
from jaxrl.trainer.resolved import resolve
from jaxrl_planner.hardware.accelerators import ACCELERATORS
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.make_plan import trace_plan
from jaxrl_planner.search.mapping_choice import propose, setting_lines
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.collective_times import Collectives

CONFIGS = pathlib.Path(__file__).parents[4] / "configs"
# Of every covered dataflow, small and large, dense and with experts.
RECIPES = (
    *("grpo_tiny", "ppo_tiny", "dapo_tiny", "remax_tiny", "safe_rlhf_tiny"),
    *("dapo_qwen7b", "ppo_llama8b", "grpo_qwen3_8b", "safe_rlhf_llama8b", "dapo_qwen3_30b_a3b"),
)
# Reasons not to propose anything, all of them right: see `proposal`.
REFUSALS = ("does not hold", "holds the models only if", "the mapping search covers")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A recipe with overrides, and a topology."""

    recipe: str
    overrides: dict[str, str]
    topology: str

    @property
    def config(self) -> Config:
        return load_config(Config, str(CONFIGS / f"{self.recipe}.py"), self.overrides)

    @property
    def cluster(self) -> Cluster:
        return Cluster.parse(self.topology)


def random_pair(seed: int, *, least_hosts: int = 1) -> Pair:
    """A recipe whose batches are changed at random, within its own checks, and devices up to 64."""
    draw = random.Random(seed)
    recipe = draw.choice(RECIPES)
    kind = draw.choice([k for k in ACCELERATORS.values() if k.memory_gb > 20])
    shapes = [
        shape
        for shape in kind.growing_shapes()
        if kind.num_devices(shape) <= 64 and Cluster(kind, shape).num_hosts >= least_hosts
    ]
    topology = f"{kind.name}:{'x'.join(map(str, draw.choice(shapes)))}"
    while True:
        overrides = {
            "rollout.prefill_prompts": str(draw.choice([1, 3, 8, 12, 32])),
            "rollout.num_prompts": str(draw.choice([4, 6, 16, 24, 50])),
            "rollout.num_samples": str(draw.choice([2, 3, 8])),
            "rollout.slots": draw.choice(["auto", "24", "100"]),
            "algorithm.updates_per_step": str(draw.choice([1, 2, 3, 4])),
            "train.remat": draw.choice(["full", "none"]),
            "train.rows": str(draw.choice([1, 4, 6])),
            "train.pipeline_microbatches": str(draw.choice([0, 2])),
            "train.share_prompts": draw.choice(["True", "False"]),
            "train.fill_minibatches": draw.choice(["True", "False"]),
            "mesh.sharding": draw.choice(["replicated", "ZeRO-1", "ZeRO-3"]),
            "mesh.offload_training_state": "True",
            "mesh.layout": "auto",
            "optim.moments": draw.choice(["float32", "int8"]),
            "model.lora.rank": "8",
            "rollout.kv_dtype": "int8",
        }
        pair = Pair(recipe, dict(draw.sample(sorted(overrides.items()), 5)), topology)
        if _is_valid(pair):
            return pair


def _is_valid(pair: Pair) -> bool:
    try:
        resolve(pair.config)
    except UserError:
        return False
    return True


def proposal(pair: Pair, folder: pathlib.Path) -> str:
    """Proposes a mapping and makes its dry run, as somebody would who copies the printed lines.

    Args:
      pair: recipe and topology.
      folder: folder for a recipe with the printed lines.

    Returns:
      "" if it runs, or why nothing was proposed.

    Raises:
      UserError: what was proposed does not run.
    """
    try:
        _, proposed = propose(pair.config, pair.cluster)
    except UserError as error:
        if any(words in str(error) for words in REFUSALS):
            return str(error)
        raise
    check_devices(proposed, pair.cluster)
    copied = _with_lines(pair, setting_lines(pair.config, proposed), folder)
    assert copied == proposed
    check_bounds(copied, pair.cluster)
    # Three quarters of the rows of a microbatch are padding in many of these.
    rows = dataclasses.replace(copied.train, rows=4 * copied.train.rows)
    check_bounds(dataclasses.replace(copied, train=rows), pair.cluster)
    return ""


def check_bounds(config: Config, cluster: Cluster) -> None:
    """Makes a dry run, and checks that no phase of a role is expected to take less than its lower bound."""
    times = trace_plan(config, cluster).times
    assert times is not None and times.step_s > times.at_least_s > 0
    for task in times.tasks:
        assert task.costs.total_s >= task.at_least_s > 0, (task.stage, task.role)


def _with_lines(pair: Pair, lines: list[str], folder: pathlib.Path) -> Config:
    """The recipe of a pair with these lines at its end."""
    path = folder / "proposed.py"
    path.write_text(
        "import runpy\n\n\ndef get_config():\n"
        f"    config = runpy.run_path({str(CONFIGS / pair.recipe) + '.py'!r})['get_config']()\n"
        + "".join(f"    {line}\n" for line in lines)
        + "    return config\n"
    )
    # Overrides of the command line would win over the lines.
    set_here = {line.split(" = ")[0].removeprefix("config.") for line in lines}
    others = {name: value for name, value in pair.overrides.items() if name not in set_here}
    return load_config(Config, str(path), others)


def check_devices(config: Config, cluster: Cluster) -> None:
    """Checks the pools of a run with a process on each host: their meshes, and what crosses hosts there."""
    for pool in take_devices(resolve(config).pools, _devices_of(cluster)).pools:
        assert len({d.process_index for d in pool.devices}) == cluster.num_hosts
        for layout in set(pool.layouts.values()):
            _check_mesh(pool, layout, cluster)


def _check_mesh(pool: Pool, layout: ParallelLayout, cluster: Cluster) -> None:
    grid = device_grid(layout.axis_sizes, pool.devices)
    if cluster.accelerator.arrangement == "torus":
        # Its mesh follows the torus, and the simulation knows no distances there.
        return
    hosts = np.vectorize(lambda device: device.process_index)(grid)
    collectives = Collectives(cluster, Assumptions())
    for axes in (*zip(AXES, strict=True), ("stage_gen", "stage_micro"), TRAIN_RULES["heads"]):
        places = [AXES.index(axis) for axis in axes]
        groups = np.moveaxis(hosts, places, range(-len(axes), 0))
        groups = groups.reshape(-1, collectives.ring(layout, *axes).members)
        crossings = (np.diff(groups, axis=1) != 0).sum(axis=1).max(initial=0)
        assert collectives.ring(layout, *axes).far == crossings


def _devices_of(cluster: Cluster) -> list:
    """The devices of a cluster as JAX lists them in a run with a process on each host."""
    kind, shape = cluster.accelerator, cluster.shape
    if kind.arrangement == "hosts":
        return [
            types.SimpleNamespace(
                id=n, process_index=h, slice_index=h, platform="gpu", device_kind="imagined"
            )
            for n, h in cluster.devices
        ]
    sides = (*shape, 1)[:3]
    block = tuple(min(2, side) for side in sides[:2])
    hosts = itertools.product(*(range(0, s, b) for s, b in zip(sides, (*block, 1), strict=True)))
    chips = [
        (x + i, y + j, z) for x, y, z in hosts for j in range(block[1]) for i in range(block[0])
    ]
    cores = itertools.product(chips, range(kind.devices_per_chip))
    return [
        types.SimpleNamespace(
            id=device.id,
            process_index=device.process_index,
            platform="tpu",
            device_kind=CHIPS[kind.name][0][0],
            coords=chip,
            core_on_chip=core,
        )
        for device, (chip, core) in zip(cluster.devices, cores, strict=True)
    ]
