"""jaxrl from Python: `jaxrl.train` and `jaxrl.open_run`.

    metrics = jaxrl.train("grpo_tiny", data=rows, reward=shortest, num_steps=20)

Objects stand where settings have paths. They are kept in `inputs/` of the run's folder, under a name that
changes with their content: rows as JSON lines, functions as pickles. Processes of graders and of reward
functions load these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import jax
import pyarrow as pa
from ml_collections.config_dict import ConfigDict

from jaxrl.commands.run_commands import prepared, train_or_plan
from jaxrl.config.command_line import load_config, load_recipe
from jaxrl.config.config_tree import leaf_types, to_config_dict
from jaxrl.config.schema import Config
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.dataflows.step import Step
from jaxrl.dataflows.step_timer import NoTimer
from jaxrl.errors import UserError
from jaxrl.mesh.interrupt import StopSignal
from jaxrl.models import lora
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.planner.resolve import resolved
from jaxrl.tracking.durable import write_atomically
from jaxrl.tracking.metrics import read_metrics
from jaxrl.tracking.run_weights import files_of_run
from jaxrl.trainer.context import RunContext, build_context
from jaxrl.trainer.findings import REINFORCEMENT
from jaxrl.trainer.program import claimed, training_of
from jaxrl.trainer.rl import RlStage
from jaxrl.trainer.roles import Roles, build_roles
from jaxrl.trainer.run_files import keep_model_files
from jaxrl.trainer.supervised import starting_params

if TYPE_CHECKING:
    from jaxrl.agents.served import Served

Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
Recipe = str | pathlib.Path | ConfigDict | Config
Reward = Callable[..., Any] | str
Rewards = Reward | Sequence[Reward]
Agent = Callable[..., Any] | str


def train(
    recipe: Recipe,
    *,
    model: str | None = None,
    data: Rows | None = None,
    evaluation: Rows | None = None,
    reward: Rewards | None = None,
    agent: Agent | None = None,
    name: str | None = None,
    **overrides: Any,
) -> pa.Table:
    """Trains a recipe and returns its metrics.

    The same call goes on where an interrupted one has stopped, and returns at once if the run is finished.

    Args:
      recipe: name of a recipe of the package, a recipe file, or settings.
      model: directory or hub name of the policy's weights and tokenizer; None keeps the recipe's.
      data: problems to train on: path, hub name, list or generator of dicts, `datasets.Dataset` or pandas
        frame; None keeps the recipe's. A generator is read to its end.
      evaluation: problems to evaluate with. None keeps the recipe's, or has none if `data` is given.
      reward: function of docs/rewards.md, or its path; it replaces the recipe's grader. Of a list, scores are
        added up, and each function is reported under its name. None keeps the recipe's rewards.
      agent: function of docs/agents.md, or its path; None keeps the recipe's.
      name: name of the run; None keeps the recipe's.
      **overrides: settings, with "__" for the dot: `optim__lr=1e-5`. `num_steps` is short for
        `run__num_steps`. A function may stand where a setting has the path of one.

    Returns:
      One row per step, one column per metric; null where a step has no such metric. `to_pandas()` makes a
      pandas frame. The schema's metadata has the run's folder.

    Raises:
      UserError: a setting is wrong, something is missing, or the folder holds a run with other inputs.
      KeyboardInterrupt: the run was interrupted; it is saved.
    """
    config = build_config(
        recipe,
        model=model,
        data=data,
        evaluation=evaluation,
        reward=reward,
        agent=agent,
        name=name,
        **overrides,
    )
    # Any other status is that of an interrupted run: errors are raised.
    if train_or_plan(config, dry_run=False):
        raise KeyboardInterrupt(
            f"stopped and saved in {config.run_folder}; the same call goes on from there"
        )
    return metrics_of(config)


def metrics_of(config: Config) -> pa.Table:
    """Returns the metrics that a run of a config has written, as `train` does."""
    rows = read_metrics(training_of(config).folder.metrics)
    # Steps differ in their metrics; those of an evaluation are in some.
    columns = dict.fromkeys(itertools.chain.from_iterable(rows))
    table = pa.table({column: [row.get(column) for row in rows] for column in columns})
    return table.replace_schema_metadata({"folder": str(config.run_folder)})


@dataclasses.dataclass(frozen=True)
class OpenRun:
    """The parts of a run, for a loop of one's own.

    Attributes:
      config: settings of the run.
      context: tokenizer, problems, meshes and models.
      roles: actor, critic, reference and the others, with their weights.
      parts: what a dataflow gets: sampling, packing, log-probabilities, advantages, updates.
      prompts: problems in the order of training; `next_prompts` draws some.
    """

    config: Config
    context: RunContext
    roles: Roles
    parts: Step
    prompts: PromptSource
    _stage: RlStage
    _timer: NoTimer
    _closed: threading.Event

    def step(self, dataflow: Callable[[Step, PromptSource], Any] | None = None) -> dict[str, float]:
        """Runs one step and returns its metrics.

        Args:
          dataflow: function of `parts` and `prompts`, like those in `dataflows`; None is the recipe's.

        Raises:
          UserError: the `with` block has ended.
        """
        self._check_open()
        metrics = self._stage.step() if dataflow is None else dataflow(self.parts, self.prompts)
        # Sampling keys depend on it.
        self._timer.step += 1
        return {key: float(value) for key, value in jax.device_get(dict(metrics)).items()}

    def evaluate(self) -> dict[str, float]:
        """Returns the accuracy on the evaluation problems, by name of the metric.

        Raises:
          UserError: the `with` block has ended.
        """
        self._check_open()
        return {k: float(v) for k, v in self._stage.evaluate("now").items()}

    @contextlib.contextmanager
    def serve(self) -> Iterator[Served]:
        """Serves the policy with its current weights inside a `with` block, in which no step may run.

        Raises:
          UserError: the `with` block of the run has ended.
        """
        from jaxrl.agents.served import served

        self._check_open()
        with served(self.roles.actor, self.context.tokenizer) as found:
            yield found

    def save_model(self, folder: str | os.PathLike[str], *, dtype: str = "float32") -> None:
        """Writes the policy as a Hugging Face directory, adapters merged. Works after the `with` block too.

        Raises:
          UserError: the folder exists.
        """
        model = self.context.model
        save_checkpoint(
            jax.jit(lora.merge, static_argnums=1)(self.roles.actor.for_training().params, model),
            lora.base_config(model),
            pathlib.Path(folder),
            dtype=dtype,
            source=files_of_run(self.config.run_folder.path),
        )

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise UserError(
                "this run is closed, since its `with` block has ended; call step and evaluate inside it"
            )


@contextlib.contextmanager
def open_run(recipe: Recipe, **changes: Any) -> Iterator[OpenRun]:
    """Opens the roles and the step of a run, with the weights that training starts from.

    An SFT stage of the recipe is trained first, if its folder does not hold it. Steps save nothing.

    Args:
      recipe: as for `train`.
      **changes: the other arguments of `train`.

    Raises:
      UserError: as `train`.
    """
    config = prepared(build_config(recipe, **changes))
    config = resolved(config, jax.devices(), kind=REINFORCEMENT)
    timer, closed = NoTimer(), threading.Event()
    with claimed(config) as config, StopSignal(within_s=config.run.stop_within_s) as stop:
        run = build_context(config, kind=REINFORCEMENT)
        # `OpenRun.save_model` copies them.
        keep_model_files(run)
        roles = build_roles(config, run.meshes, run.models)
        starting = functools.partial(starting_params, run, stop)
        with contextlib.closing(RlStage(run, roles, timer, starting)) as stage:
            stage.begin(None)
            try:
                yield OpenRun(config, run, roles, stage.parts, stage.prompts, stage, timer, closed)
            finally:
                closed.set()


def build_config(
    recipe: Recipe,
    *,
    model: str | None = None,
    data: Rows | None = None,
    evaluation: Rows | None = None,
    reward: Rewards | None = None,
    agent: Agent | None = None,
    name: str | None = None,
    **overrides: Any,
) -> Config:
    """Returns the config of a call of `train`, and keeps its objects in the run's folder.

    Raises:
      UserError: as `train`.
    """
    tree: Any  # ml_collections types no entries
    if isinstance(recipe, Config):
        tree = to_config_dict(recipe)
    else:
        if not isinstance(recipe, ConfigDict):
            recipe = load_recipe(recipe, known=list(leaf_types(Config)))
        tree = recipe.copy_and_resolve_references()
    if "num_steps" in overrides:
        overrides["run__num_steps"] = overrides.pop("num_steps")
    settings: dict[str, Any] = {key.replace("__", "."): value for key, value in overrides.items()}
    if name is not None:
        settings["name"] = name
    if agent is not None:
        settings["rollout.agent"] = agent
    if model is not None:
        # Training starts from this model, not from what an SFT stage would make of the recipe's.
        settings |= {"weights": model, "tokenizer.path": model, "sft.num_steps": 0, "sft.run": ""}
    if tree["mesh"]["simulated_devices"] == "auto":
        # JAX may have its devices already.
        settings.setdefault("mesh.simulated_devices", 0)
    functions = {key: settings.pop(key) for key in [*settings] if callable(settings[key])}
    # Checked before any object is kept: they go into the folder that the settings name.
    inputs = _Inputs(load_config(Config, tree, settings).run_folder.path / "inputs")
    kept: dict[str, Any] = {key: inputs.function(key, each) for key, each in functions.items()}
    if data is not None:
        # The recipe's further sources would be mixed into these problems.
        kept |= _source("data.train", inputs.rows("train", data)) | {"data.sources": {}}
    if data is not None or evaluation is not None:
        path = "" if evaluation is None else inputs.rows("evaluation", evaluation)
        kept |= _source("data.evaluation", path) | {"data.evaluations": {}}
    if reward is not None:
        terms = {
            name: {
                "path": one if isinstance(one, str) else inputs.function(name, one),
                "weight": 1.0,
            }
            for name, one in _by_name(reward).items()
        }
        kept |= {"reward.functions": terms, "reward.grader_weight": 0.0}
    return load_config(Config, tree, kept)


def _by_name(reward: Rewards) -> dict[str, Reward]:
    """Rewards by the names of their terms: their functions' names; "reward" for a single one."""
    if isinstance(reward, str) or callable(reward):
        return {"reward": reward}
    named: dict[str, Reward] = {}
    for one in reward:
        name = one.rpartition(":")[2] if isinstance(one, str) else getattr(one, "__name__", "")
        if not name.isidentifier() or name in named:
            raise UserError(
                f"reward {name or one!r} of the list has no name of its own; give each a function by "
                "`def` with another name, since metrics are reported under it"
            )
        named[name] = one
    return named


def _source(group: str, path: str) -> dict[str, Any]:
    """Settings of a source that reads a path."""
    empty = {"fields": {}, "options": {}, "size": 0, "source": ""}
    return {f"{group}.{leaf}": value for leaf, value in ({"path": path} | empty).items()}


class _Inputs:
    """Objects of a call, as files in a folder of the run."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    def rows(self, name: str, rows: Rows) -> str:
        """Keeps rows as JSON lines; a path or hub name stays as it is."""
        if isinstance(rows, str | os.PathLike):
            return os.fspath(rows)
        # A pandas frame, whose own iterator gives the names of its columns, is recognised by its `iloc`.
        frame: Any = rows if hasattr(rows, "iloc") else None
        lines = []
        for index, row in enumerate(rows if frame is None else frame.to_dict("records")):
            if not isinstance(row, Mapping):
                raise UserError(f"row {index} of {name} is {type(row).__name__}; give dicts")
            try:
                lines.append(json.dumps(dict(row), ensure_ascii=False))
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"row {index} of {name} has a value that is no JSON: {error}"
                ) from error
        content = "".join(f"{line}\n" for line in lines).encode()
        return str(self._keep(name, hashlib.sha256(content), ".jsonl", content))

    def function(self, name: str, function: Callable[..., Any]) -> str:
        """Keeps a function, with what it needs of the program it was written in."""
        try:
            content = cloudpickle.dumps(function)
        except Exception as error:  # what a function holds may refuse in any way
            raise UserError(
                f"{name} cannot be taken to another process ({error}); let it open or build what it needs "
                "inside, or write it into a file and name that: my_functions.py:reward"
            ) from error
        # Its source and the constants that it uses identify it: both stay when a notebook's cell runs again,
        # and the pickle does not.
        identity = content
        with contextlib.suppress(OSError, TypeError, ValueError):
            text, outside = inspect.getsource(function), inspect.getclosurevars(function)
            used = {**outside.globals, **outside.nonlocals}
            plain = {k: repr(v) for k, v in used.items() if isinstance(v, bool | int | float | str)}
            identity = f"{text}{sorted(plain.items())}".encode()
        return f"{self._keep(name, hashlib.sha256(identity), '.pkl', content)}:function"

    def _keep(self, name: str, digest: Any, suffix: str, content: bytes) -> pathlib.Path:
        path = self._folder / f"{name}-{digest.hexdigest()[:12]}{suffix}"
        if path.exists():
            return path
        # A run that goes on must have the inputs that it began with.
        if others := list(self._folder.glob(f"{name}-*{suffix}")):
            raise UserError(
                f"{self._folder.parent} holds a run with another {name} ({others[0].name}); give this run a "
                "name of its own: name=..., or remove the folder"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
        return path
