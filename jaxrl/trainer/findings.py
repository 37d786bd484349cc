"""Builds everything that a run reads from outside, before it compiles or trains anything.

An SFT stage can take hours, and a reward function that is missing afterwards wastes them. So a run declares
its kind at the start. The devices, weights, data, functions and models of this kind are built, and `Faults`
collects the errors, so that a newcomer who starts a large recipe on a laptop learns at once what is missing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxrl.config.schema import Config
from jaxrl.config.shapes import model_of, tokenizer_directory
from jaxrl.data.curriculum import load_sampler
from jaxrl.data.demonstrations import Demonstration, read_demonstrations
from jaxrl.data.preferences import Preference, read_preferences
from jaxrl.data.problems import ProblemReader
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl.errors import UserError
from jaxrl.mesh.pools import Placement, take_devices
from jaxrl.models.huggingface.weight_loading import check_adapter, check_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.rewards.user import reward_function
from jaxrl.rollout.drivers import lookup_driver
from jaxrl.rollout.rollout_config import FROZEN_ROLE, START
from jaxrl.tracking.run_folder import split_logger
from jaxrl.trainer.resolved import Resolved
from jaxrl.trainer.role_table import ROLES, RoleKind
from jaxrl.trainer.run_rewards import graders_of, needs_truths
from jaxrl.user_code import bundled_file, load_agent, load_function

T = TypeVar("T")


class Faults:
    """Collects the errors of building several things.

    faults = Faults()
    pairs = faults("preference.path", lambda: read_preferences(path))
    faults.check()    # raises, naming all that could not be built
    """

    def __init__(self):
        self.found: list[str] = []

    def __call__(self, setting: str, build: Callable[[], T]) -> T | None:
        """Returns the result of `build`; if it raises UserError, keeps the message and returns None."""
        try:
            return build()
        except UserError as error:
            self.found.append(f"{setting}: {error}")
            return None

    def check(self, *, has_plan: bool = False) -> None:
        """Raises one UserError with all messages; returns if there are none.

        Args:
          has_plan: whether --dry_run would show a plan, which the message then says.
        """
        if not self.found:
            return
        count = len(self.found)
        things = "one thing" if count == 1 else f"{count} things"
        listed = " ".join(f"({i}) {fault}." for i, fault in enumerate(self.found, start=1))
        raise UserError(
            f"this run lacks {things}: {listed} Paths are relative to {pathlib.Path.cwd()}"
            + has_plan * "; --dry_run shows the plan without devices and weights"
        )


@dataclasses.dataclass(frozen=True)
class RunKind:
    """The needs of a kind of run.

    Attributes:
      rewards: whether it samples answers to training problems, with reward functions and models.
      grades: whether graders judge its answers, in training or in an evaluation.
      pairs: whether it trains on preference pairs.
      needs_problems: whether its config must name problems, for training or evaluation.
    """

    rewards: bool = False
    grades: bool = False
    pairs: bool = False
    needs_problems: bool = True


REINFORCEMENT = RunKind(rewards=True, grades=True)
PREFERENCES = RunKind(pairs=True)


def fine_tuning(config: Config) -> RunKind:
    """The kind of supervised fine-tuning alone. It is evaluated if the config names evaluation problems."""
    evaluates = bool(config.data.evaluation_sources)
    return RunKind(grades=evaluates, needs_problems=not config.sft.path)


@dataclasses.dataclass(frozen=True)
class Findings:
    """The results of `find_everything`.

    Attributes:
      placement: devices of each role.
      problems: reader of the config's problems; it reads each source once.
      tokenizer: the policy's; None for one that is trained on the problems.
      demonstrations: examples from the file of SFT; empty without a file.
      pairs: preference pairs of each file.
      own_tokenizers: tokenizer of each role that has its own.
    """

    placement: Placement
    problems: ProblemReader
    tokenizer: Tokenizer | None
    demonstrations: tuple[Demonstration, ...]
    pairs: Mapping[str, tuple[Preference, ...]]
    own_tokenizers: Mapping[str, Tokenizer]


def find_everything(resolved: Resolved, kind: RunKind, devices: Sequence[Any]) -> Findings:
    """Finds everything that a run needs.

    Args:
      resolved: config of the run, with its pools.
      kind: kind of run.
      devices: devices that the run may use.

    Raises:
      UserError: something is missing or broken. One message names all such things.
    """
    config, faults = resolved.config, Faults()
    placement = faults("devices", lambda: take_devices(resolved.pools, devices))
    faults("weights", lambda: check_weights(resolved))
    directory, tokenizer = tokenizer_directory(config), None
    if directory:
        template = bundled_file(config.tokenizer.chat_template)
        files = {"chat_template": template, "model": config.weights}
        tokenizer = faults("tokenizer", lambda: load_tokenizer(directory, **files))
    # Training problems need no ground truth if no reward reads it.
    problems = ProblemReader(config.data, needs_truths=not kind.rewards or needs_truths(config))
    # A reader keeps what it has read, so this is no extra work.
    for name, read in problems.readers.items():
        faults(name, read)
    find_packages(config, faults)
    if path := config.rollout.agent:
        faults("rollout.agent", functools.partial(load_agent, path))
    for role, name in config.rollout.frozen_roles.items():
        faults(FROZEN_ROLE + role, functools.partial(_check_frozen, resolved, name))
    demonstrations, pairs, own_tokenizers = None, {}, {}
    if config.sft.num_steps and config.sft.path:
        read_file = functools.partial(read_demonstrations, config.sft.path, source=config.sft.path)
        demonstrations = faults("sft.path", read_file)
    if kind.grades:
        sources = config.data.training_sources | config.data.evaluation_sources
        # Only built: processes of graders start at their first use.
        faults("reward.grader", lambda: graders_of(config, sources))
    if kind.rewards:
        for name, function in config.reward.functions.items():
            path = function["path"]
            faults(f"reward.functions.{name}", functools.partial(reward_function, path))
        if config.data.sampler:
            faults("data.sampler", functools.partial(load_sampler, config.data.sampler))
        own_tokenizers = _check_roles(resolved, faults)
    if kind.pairs:
        pairs = _pairs(config, faults)
    faults.check(has_plan=kind.rewards)
    assert placement is not None, "`check` has raised otherwise"
    return Findings(placement, problems, tokenizer, demonstrations or (), pairs, own_tokenizers)


def check_weights(resolved: Resolved) -> None:
    """Checks the run's model against the files of its checkpoint and its adapter.

    Raises:
      UserError: the settings contradict the checkpoint or its adapter, or files are missing or damaged.
    """
    config = resolved.config
    model, _ = model_of(config, resolved.model_in)
    if config.weights:
        check_params(config.weights, model)
    if config.adapter:
        check_adapter(config.adapter, model)


def _check_frozen(resolved: Resolved, directory: str) -> None:
    """Raises UserError if the files of a frozen role are missing, damaged, or of another model."""
    if directory != START:
        config = resolved.config
        model = resolved.model_in(directory).for_texts_of(config.longest_sequence)
        check_same_model(directory, model_of(config, resolved.model_in)[0], model)
        check_params(directory, model)


def check_same_model(directory: str, ours: ModelConfig, model: ModelConfig) -> None:
    """Raises UserError if the model of a frozen role differs from `ours`, the policy's."""
    # The others are settings of a run.
    names = sorted(vars(ours).keys() - {"num_tokens", "lora"})
    for name in names:
        there, here = getattr(model, name), getattr(ours, name)
        if there != here:
            raise UserError(
                f"{directory} has model.{name} {there}, and the policy {here}; weights of a frozen role run "
                "in the policy's programs: name a checkpoint of the same model, or serve this one by `jaxrl "
                "serve` and ask it there (docs/agents.md)"
            )


def find_packages(config: Config, faults: Faults) -> None:
    """Looks for the packages of loggers, driver and agent, and imports none: only the run needs them."""
    loggers = [split_logger(entry)[0] for entry in config.run.loggers]
    packages = {name: "run.loggers" for name in loggers if name != "tensorboard"}
    packages |= {lookup_driver(config.rollout.driver).package: "rollout.driver"}
    if config.rollout.agent:
        # Agents talk to the policy over HTTP.
        needed = ("httptools", "openai", "pydantic", "starlette", "uvicorn")
        packages |= dict.fromkeys(needed, "rollout.agent")
    for package, setting in packages.items():
        if package and importlib.util.find_spec(package) is None:
            faults.found.append(
                f"{setting}: the package {package} is not installed; run pip install {package}, or do "
                "without it"
            )


def _check_roles(resolved: Resolved, faults: Faults) -> dict[str, Tokenizer]:
    """Checks the models of roles with weights of their own; returns their own tokenizers."""
    # Both critics have the same setting, which is checked once.
    by_setting = {kind.setting: role for role, kind in ROLES.items() if role in resolved.roles}
    checked = {
        role: faults(setting, functools.partial(_check_role, resolved, ROLES[role]))
        for setting, role in by_setting.items()
        if ROLES[role].weights(resolved.config)
    }
    return {role: own for role, own in checked.items() if own is not None}


def _check_role(resolved: Resolved, kind: RoleKind) -> Tokenizer | None:
    directory = kind.weights(resolved.config)
    model = resolved.model_in(directory)
    tokenizer = kind.check(model, directory)
    check_params(directory, model)
    return tokenizer


def _pairs(config: Config, faults: Faults) -> dict[str, Any]:
    options, found = config.preference, {}
    files = {"path": options.path, "evaluation_path": options.evaluation_path}
    if options.makes_pairs:
        function, name = files.pop("path"), "preference.path"
        # Only loaded: it needs the problems, which are read later.
        faults(name, lambda: load_function(function, name, takes=["records"]))
    for name, path in files.items():
        if path:
            read = functools.partial(read_preferences, path, source=path)
            found[path] = faults(f"preference.{name}", read)
    return found
