"""jaxrl from Python: `jaxrl.train` and `jaxrl.open_run`.

    metrics = jaxrl.train("grpo_smollm2", data=rows, reward=shortest, num_steps=20)

Objects stand where settings have paths. They are kept in `inputs/` of the run's folder, under a name that
changes with their content: rows as JSON lines, functions as pickles. Processes of graders and of reward
functions load these.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import decimal
import functools
import hashlib
import itertools
import json
import os
import pathlib
import reprlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import jax
import numpy as np
import pyarrow as pa
from ml_collections.config_dict import ConfigDict

from jaxrl import extensions
from jaxrl.checks import quoted, shown
from jaxrl.commands.run_commands import prepared, train_or_plan
from jaxrl.config.command_line import load_config, load_recipe
from jaxrl.config.config_tree import (
    UnknownSetting,
    complete,
    leaf_types,
    near_settings,
    to_config_dict,
)
from jaxrl.config.schema import Config
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.dataflows.step import Step
from jaxrl.dataflows.step_timer import NoTimer
from jaxrl.errors import UserError, must_return
from jaxrl.function_identity import function_digest
from jaxrl.mesh.interrupt import StopSignal
from jaxrl.models import lora
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.tracking.durable import write_atomically
from jaxrl.tracking.metrics import read_metrics
from jaxrl.tracking.run_folder import RunFolder
from jaxrl.tracking.run_weights import files_of_run
from jaxrl.trainer.context import RunContext, build_context
from jaxrl.trainer.findings import REINFORCEMENT
from jaxrl.trainer.open_settings import resolved
from jaxrl.trainer.program import claimed, training_of
from jaxrl.trainer.rl import RlStage
from jaxrl.trainer.roles import Roles, build_roles
from jaxrl.trainer.run_files import keep_run_files
from jaxrl.trainer.supervised import starting_params

Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
Recipe = str | pathlib.Path | ConfigDict | Config
Reward = Callable[..., Any] | str
Rewards = Reward | Sequence[Reward]
Agent = Callable[..., Any] | str


def train(
    recipe: Recipe,
    *,
    model: str | os.PathLike[str] | None = None,
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
      data: problems to train on: path, hub name, list or generator of dicts, `datasets.Dataset`, frame of
        pandas or polars, or pyarrow table; None keeps the recipe's. A generator is read to its end.
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
    config, inputs = _call(
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
    with inputs.kept():
        status = train_or_plan(config, dry_run=False)
    if status:
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
    def serve(self) -> Iterator[Any]:
        """Serves the policy with its current weights inside a `with` block, in which no step may run.

        Yields:
          A `jaxrl_agents.served.Served`: URL, key and name of the model.

        Raises:
          UserError: the `with` block of the run has ended, or the extension for agents is not installed.
        """
        self._check_open()
        with extensions.lookup("OpenRun.serve")(self.roles.actor, self.context.tokenizer) as found:
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

    An SFT stage of the recipe is trained first, if its folder does not hold it. Steps save nothing, but the
    folder is this run's from then on, as with `train`.

    Args:
      recipe: as for `train`.
      **changes: the other arguments of `train`.

    Raises:
      UserError: as `train`.
    """
    config, inputs = _call(recipe, **changes)
    timer, closed = NoTimer(), threading.Event()
    with contextlib.ExitStack() as opened:
        with inputs.kept():
            config = resolved(prepared(config), jax.devices(), kind=REINFORCEMENT)
            opened.enter_context(must_return())
            found = opened.enter_context(claimed(config))
            config = found.config
            stop = opened.enter_context(StopSignal(within_s=config.run.stop_within_s))
            run = build_context(found, kind=REINFORCEMENT)
            # `OpenRun.save_model` copies those of the model.
            keep_run_files(run)
        roles = build_roles(run.resolved, run.meshes, run.models)
        starting = functools.partial(starting_params, run, stop)
        with contextlib.closing(RlStage(run, roles, timer, starting)) as stage:
            stage.begin(None)
            try:
                yield OpenRun(config, run, roles, stage.parts, stage.prompts, stage, timer, closed)
            finally:
                closed.set()


def build_config(recipe: Recipe, **changes: Any) -> Config:
    """Returns the config of a call of `train`, and keeps its objects in the run's folder.

    Args:
      recipe, **changes: as for `train`.

    Raises:
      UserError: as `train`.
    """
    config, inputs = _call(recipe, **changes)
    inputs.write()
    return config


def _call(recipe: Recipe, **changes: Any) -> tuple[Config, _Inputs]:
    """The config of a call, and its objects, which are not written yet."""
    try:
        return _config_of(recipe, **changes)
    except UnknownSetting as error:
        if error.name not in {key.replace("__", ".") for key in changes}:
            raise  # the recipe's
        near = near_settings(error.name, {*error.near, *_KEYWORDS.values(), "name"})
        keywords = (_KEYWORDS.get(name, name.replace(".", "__")) for name in near)
        hint = ", ".join(f"{keyword}=" for keyword in dict.fromkeys(keywords))
        raise UserError(
            f"unknown keyword {quoted(error.name.replace('.', '__'))}; "
            + (f"near: {hint}" if near else "none is near; jaxrl train --help lists all settings")
        ) from error


# Settings that have a keyword of their own.
_KEYWORDS = {
    "weights": "model",
    "data.train.path": "data",
    "data.evaluation.path": "evaluation",
    "reward.functions": "reward",
    "rollout.agent": "agent",
    "run.num_steps": "num_steps",
}


def _config_of(
    recipe: Recipe,
    *,
    model: str | os.PathLike[str] | None = None,
    data: Rows | None = None,
    evaluation: Rows | None = None,
    reward: Rewards | None = None,
    agent: Agent | None = None,
    name: str | None = None,
    **overrides: Any,
) -> tuple[Config, _Inputs]:
    tree: Any = _tree(recipe)  # ml_collections types no entries
    if "num_steps" in overrides:
        if "run__num_steps" in overrides:
            raise UserError(
                "num_steps is short for run__num_steps, and both are given; leave one out"
            )
        overrides["run__num_steps"] = overrides.pop("num_steps")
    settings: dict[str, Any] = {
        key.replace("__", "."): value.item() if isinstance(value, np.generic) else value
        for key, value in overrides.items()
    }
    if name is not None:
        settings["name"] = name
    if agent is not None:
        if not (isinstance(agent, str) or callable(agent)):
            raise UserError(f"agent = {shown(agent)}: expected a function, or its path")
        settings["rollout.agent"] = agent
    if model is not None:
        # Training starts from this model, not from what an SFT stage would make of the recipe's.
        path = os.fspath(model) if isinstance(model, os.PathLike) else model
        settings |= {"weights": path, "tokenizer.path": path, "sft.num_steps": 0, "sft.run": ""}
    if data is not None:
        # A stage that the recipe shares with other runs learns from the rows of the recipe.
        settings.setdefault("sft.run", "")
    mesh = tree["mesh"]
    if isinstance(mesh, ConfigDict) and mesh["simulated_devices"] == "auto":
        # JAX may have its devices already.
        settings.setdefault("mesh.simulated_devices", 0)
    functions = {key: settings.pop(key) for key in [*settings] if callable(settings[key])}
    # The objects go into the folder that the settings name.
    inputs = _Inputs(load_config(Config, tree, settings).run_folder)
    kept: dict[str, Any] = {key: inputs.function(key, each) for key, each in functions.items()}
    for keyword, rows in {"data": data, "evaluation": evaluation}.items():
        # Rows of text or bytes are letters. Lazy frames and tables of pyarrow are no iterables.
        kinds = str, os.PathLike, Iterable, pa.Table, pa.RecordBatch, type(None)
        is_known = isinstance(rows, kinds) or hasattr(rows, "collect_schema")
        if not is_known or isinstance(rows, bytes | Mapping):
            raise UserError(
                f"{keyword} = {shown(rows)}: expected a path, or rows as dicts, such as a list or a frame"
            )
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
    return load_config(Config, tree, kept), inputs


def _tree(recipe: Recipe) -> ConfigDict:
    """The settings of a recipe, all of them, which the caller may change."""
    if isinstance(recipe, Config):
        return to_config_dict(recipe)
    if isinstance(recipe, ConfigDict):
        # With its references, so that a setting that follows another one still does.
        return complete(Config(), copy.deepcopy(recipe))
    if not isinstance(recipe, str | os.PathLike):
        raise UserError(
            f"recipe {shown(recipe)} is no recipe; give the name of one, a file, a ConfigDict or a Config"
        )
    tree = load_recipe(os.fspath(recipe), known=list(leaf_types(Config)))
    return complete(Config(), tree)


def _by_name(reward: Rewards) -> dict[str, Reward]:
    """Rewards by the names of their terms: their functions' names; "reward" for a single one."""
    if isinstance(reward, str) or callable(reward):
        return {"reward": reward}
    # Not of any iterable: that of a frame has the names of its columns.
    several = isinstance(reward, Sequence) and not isinstance(reward, bytes)
    rewards = list(reward) if several else []
    if not rewards or not all(isinstance(one, str) or callable(one) for one in rewards):
        raise UserError(
            f"reward = {shown(reward)}: expected a function, its path, or a list of these; leave it out to "
            "keep the recipe's"
        )
    named: dict[str, Reward] = {}
    for one in rewards:
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
    """Objects of a call, as files in `inputs/` of the run's folder."""

    def __init__(self, run: RunFolder):
        self._run = run
        self._content: dict[pathlib.Path, bytes] = {}

    def rows(self, name: str, rows: Rows) -> str:
        """Keeps rows as JSON lines; a path or hub name stays as it is."""
        if isinstance(rows, str | os.PathLike):
            return os.fspath(rows)
        lines, digest = [], hashlib.sha256()
        for index, row in enumerate(_rows_of(rows)):
            if not isinstance(row, Mapping):
                raise UserError(f"row {index} of {name} is {type(row).__name__}; give dicts")
            try:
                plain = _plain(row)
                lines.append(json.dumps(plain, ensure_ascii=False) + "\n")
                # The order of its fields makes no other row.
                digest.update(json.dumps(plain, sort_keys=True).encode())
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(
                    f"row {index} of {name} has a value that is no JSON: {error}; leave its field out, or "
                    "make it a text, a number or a list"
                ) from error
        if not lines:
            raise UserError(f"{name} has no rows; give dicts")
        return str(self._keep(name, digest, ".jsonl", "".join(lines).encode()))

    def function(self, name: str, function: Callable[..., Any]) -> str:
        """Keeps a function, with what it needs of the program it was written in."""
        try:
            content = cloudpickle.dumps(function)
            # Of what the function is, not of its pickle, which differs when a notebook's cell runs again.
            digest = hashlib.sha256(function_digest(function).encode())
        except Exception as error:  # what a function holds may refuse in any way
            raise UserError(
                f"{name} cannot be taken to another process ({error}); let it open or build what it needs "
                "inside, or write it into a file and name that: my_functions.py:reward"
            ) from error
        return f"{self._keep(name, digest, '.pkl', content)}:function"

    def _keep(self, name: str, digest: Any, suffix: str, content: bytes) -> pathlib.Path:
        # A name of Python may be longer than one of a file.
        path = self._run.inputs / f"{name[:99]}-{digest.hexdigest()[:12]}{suffix}"
        self._content[path] = content
        return path

    def write(self) -> list[pathlib.Path]:
        """Writes the files that are not there yet; returns their paths."""
        new = [path for path in self._content if not path.exists()]
        for path in new:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, self._content[path])
        return new

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Writes the files; a call that is refused inside the block takes its own away again."""
        new = self.write()
        try:
            yield
        except UserError:
            # A run that has started names them, and goes on with them.
            named = self._run.config.read_text() if self._run.config.is_file() else ""
            for path in new:
                if path.name not in named:
                    path.unlink(missing_ok=True)
            raise


def _rows_of(rows: Any) -> Iterable[Any]:
    """The rows of a table, whose own iterator gives columns or their names; other rows as they are."""
    if hasattr(rows, "iterrows"):  # a frame of pandas
        return rows.to_dict("records")
    if hasattr(rows, "collect_schema"):  # polars, whose lazy frames are collected first
        return rows.lazy().collect().iter_rows(named=True)
    if isinstance(rows, pa.Table | pa.RecordBatch):
        return rows.to_pylist()
    return rows


def _plain(value: Any) -> Any:
    """The value in JSON's types: missing ones (NaN, NaT, NA) are null, times and decimals are texts.

    Raises:
      TypeError: it is something else, such as bytes.
    """
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # Python's times have no nanoseconds.
    if isinstance(value, np.datetime64 | np.timedelta64):
        unit = f"{'datetime64' if isinstance(value, np.datetime64) else 'timedelta64'}[us]"
        return _plain(value.astype(unit).item())
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "mM":
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # arrays and scalars of NumPy, series of pandas, tensors
        return _plain(value.tolist())
    # No missing value is equal to itself; of pandas' own one that is not even said.
    if type(value).__name__ == "NAType" or value != value:
        return None
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    if isinstance(value, float):
        return value
    raise TypeError(f"{type(value).__name__} {reprlib.repr(value)}")
