"""Random recipes and topologies, and whether what the search proposes for them runs."""

import dataclasses
import pathlib
import random

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.hardware import ACCELERATORS
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.search.mapping_choice import propose, setting_lines
from jaxrl.planner.trace_plan import trace_plan
from jaxrl.trainer.algorithm import algorithm_of

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
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


def random_pair(seed: int) -> Pair:
    """A recipe whose batches are changed at random, within its own checks, and devices up to 64."""
    draw = random.Random(seed)
    recipe = draw.choice(RECIPES)
    kind = draw.choice([k for k in ACCELERATORS.values() if k.memory_gb > 20])
    shapes = [s for s in kind.growing_shapes() if kind.num_devices(s) <= 64]
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
        algorithm_of(pair.config)
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
        assert task.expected.total_s >= task.at_least_s > 0, (task.stage, task.role)


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
