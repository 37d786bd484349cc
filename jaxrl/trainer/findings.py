"""Finds everything that a run reads from outside, before it builds or trains anything.

An SFT stage can take hours, and a reward function that is missing afterwards wastes them. So a run declares
its kind at the start. The devices, weights, data, functions and models of this kind are looked up, everything
missing is reported in one message, and the files that were read are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config.model_shape import tokenizer_directory
from jaxrl.config.requirements import Finder
from jaxrl.config.schema import Config
from jaxrl.data.demonstrations import Demonstration, read_demonstrations
from jaxrl.data.preferences import Preference, read_preferences
from jaxrl.data.problems import ProblemReader
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.hub.hub_names import hub_name
from jaxrl.mesh.pools import Pool
from jaxrl.rewards.user import user_reward
from jaxrl.rollout.drivers import lookup_driver
from jaxrl.rollout.environment import load_environment
from jaxrl.tracking.run_config import split_logger
from jaxrl.trainer.role_table import ROLES
from jaxrl.trainer.run_rewards import graders_of, needs_truths
from jaxrl.user_code import load_function, names_function


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
      problems: reader of the config's problems; it reads each source once.
      demonstrations: examples from the file of SFT; empty without a file.
      pairs: preference pairs of each file.
      own_tokenizers: tokenizer of each role that has its own.
    """

    problems: ProblemReader
    demonstrations: tuple[Demonstration, ...]
    pairs: Mapping[str, tuple[Preference, ...]]
    own_tokenizers: Mapping[str, Tokenizer]


def find_everything(
    config: Config, kind: RunKind, pools: Sequence[Pool], devices: Sequence[Any]
) -> Findings:
    """Finds everything that a run needs.

    Args:
      config: config of the run.
      kind: kind of run.
      pools: pools of the config's placement.
      devices: devices that the run may use.

    Raises:
      UserError: something is missing or broken. One message names all such things.
    """
    find = Finder()
    find.devices(pools, len(devices), devices[0].device_kind)
    find.files(
        weights=config.weights,
        tokenizer=tokenizer_directory(config),
        needs_chat_template=_needs_chat_template(config),
    )
    problems = ProblemReader(config.data, needs_truths=not kind.rewards or needs_truths(config))
    for name, read in problems.readers.items():
        find(name, read)
    _find_packages(config, find)
    demonstrations, pairs, own_tokenizers = None, {}, {}
    if config.sft.num_steps and config.sft.path:
        demonstrations = find("sft.path", functools.partial(_demonstrations, config))
    if kind.grades:
        sources = config.data.training_sources | config.data.evaluation_sources
        find("reward.grader", functools.partial(graders_of, config, sources))
        if path := config.rollout.environment:
            find("rollout.environment", functools.partial(load_environment, path))
    if kind.rewards:
        own_tokenizers = _find_rewards(config, {r for pool in pools for r in pool.roles}, find)
    if kind.pairs:
        pairs = _find_pairs(config, find)
    find.check()
    return Findings(problems, demonstrations or (), pairs, own_tokenizers)


def check_for_plan(config: Config) -> None:
    """Looks up the user's own files and functions, but no weights, devices or names on the hub.

    Raises:
      UserError: something is missing. One message names all such things.
    """
    find = Finder()
    sources = config.data.training_sources | config.data.evaluation_sources
    paths = {name: source.path for name, source in sources.items()}
    paths |= {"sft.path": config.sft.path if config.sft.num_steps else ""}
    for setting, path in paths.items():
        find(setting, functools.partial(_check_there, path))
    for name, function in config.reward.functions.items():
        find(f"reward.functions.{name}", functools.partial(user_reward, function["path"]))
    if path := config.rollout.environment:
        find("rollout.environment", functools.partial(load_environment, path))
    find.check()


def _check_there(path: str) -> None:
    if names_function(path):
        load_function(path, "data function")
    elif path and hub_name(path) is None and not os.path.exists(path):
        raise UserError(f"{path} does not exist")


def _needs_chat_template(config: Config) -> bool:
    data = config.data
    sources = (*data.training_sources.values(), *data.evaluation_sources.values())
    return any(data.format_of(source).chat for source in sources)


def _find_packages(config: Config, find: Finder) -> None:
    packages = [("rollout.driver", lookup_driver(config.rollout.driver).package)]
    loggers = [split_logger(entry)[0] for entry in config.run.loggers]
    # TensorBoard needs no extra.
    packages += [("run.loggers", logger) for logger in loggers if logger != "tensorboard"]
    for setting, package in packages:
        if package:
            find(setting, functools.partial(_check_installed, package))


def _find_rewards(config: Config, roles: set[str], find: Finder) -> dict[str, Tokenizer]:
    """Checks reward functions and models with their own weights; returns the tokenizers of their own."""
    for name, function in config.reward.functions.items():
        find(f"reward.functions.{name}", functools.partial(user_reward, function["path"]))
    # Both critics have the same setting, which is checked once.
    names = {row.setting: role for role, row in ROLES.items() if role in roles}
    tokenizers = {}
    for setting, role in names.items():
        row = ROLES[role]
        if directory := row.weights(config):
            own = find(setting, functools.partial(row.check, config, setting, directory))
            if own is not None:
                tokenizers[role] = own
    return tokenizers


def _find_pairs(config: Config, find: Finder) -> dict[str, tuple[Preference, ...]]:
    options, found = config.preference, {}
    if not options.path:
        name = "preference.pair_generator"
        find(
            name, functools.partial(load_function, options.pair_generator, name, takes=["records"])
        )
    for setting, path in (
        ("preference.path", options.path),
        ("preference.evaluation_path", options.evaluation_path),
    ):
        if path:
            found[path] = find(setting, functools.partial(_pairs, config, path))
    return found


def _demonstrations(config: Config) -> tuple[Demonstration, ...]:
    options = config.sft
    return read_demonstrations(
        options.path,
        source=options.path,
        prompt_field=options.prompt_field,
        response_field=options.response_field,
        messages_field=options.messages_field,
    )


def _pairs(config: Config, path: str) -> tuple[Preference, ...]:
    options = config.preference
    return read_preferences(
        path,
        source=path,
        margin_field=options.margin_field or None,
        harm_fields=options.harm_fields or None,  # pyright: ignore[reportArgumentType]
    )


def _check_installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"the package {package} is not installed; run pip install {package}, or do without it"
        )
