"""Everything that a run reads from outside, found before it builds or trains anything.

An SFT stage can take hours, and a missing reward function after it costs them all. So a run says at its start
which kind it is. Devices, weights, data, functions and models of that kind are looked for; all that is
missing is told at once; what was read is kept for later.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config.schema import Config
from jaxrl.data.demonstrations import Demonstration, read_demonstrations
from jaxrl.data.preferences import Preference, read_preferences
from jaxrl.data.problems import ProblemReader
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.mesh.pools import Pool
from jaxrl.rewards.user import user_reward
from jaxrl.rollout.drivers import lookup_driver
from jaxrl.rollout.environment import load_environment
from jaxrl.trainer.model_shape import tokenizer_directory
from jaxrl.trainer.requirements import Finder
from jaxrl.trainer.role_models import load_judge_tokenizer
from jaxrl.trainer.role_table import ROLES
from jaxrl.trainer.run_rewards import graders_of, needs_truths


@dataclasses.dataclass(frozen=True)
class RunKind:
    """What a kind of run asks for.

    Attributes:
      rewards: it samples answers to the problems that it trains on, and has reward functions and models.
      grades: it answers problems that graders judge, in training or in an evaluation.
      pairs: it trains on preference pairs.
      needs_problems: its config names problems, to train on or to evaluate with.
    """

    rewards: bool = False
    grades: bool = False
    pairs: bool = False
    needs_problems: bool = True


REINFORCEMENT = RunKind(rewards=True, grades=True)
PREFERENCES = RunKind(pairs=True)


def fine_tuning(config: Config) -> RunKind:
    """Supervised fine-tuning alone: evaluated where the config names problems for that."""
    evaluates = bool(config.data.evaluation_sources)
    return RunKind(grades=evaluates, needs_problems=not config.sft.path)


@dataclasses.dataclass(frozen=True)
class Findings:
    """What was read from outside.

    Attributes:
      problems: reads the config's problems, each source once.
      demonstrations: of SFT's file, if it has one.
      pairs: the preference pairs of each file.
      judge_tokenizer: of the generative judge, if there is one.
    """

    problems: ProblemReader
    demonstrations: tuple[Demonstration, ...]
    pairs: Mapping[str, tuple[Preference, ...]]
    judge_tokenizer: Tokenizer | None


def find_everything(
    config: Config, kind: RunKind, pools: Sequence[Pool], devices: Sequence[Any]
) -> Findings:
    """Looks for everything that a run of a kind needs.

    Args:
      config: of the run.
      kind: of run.
      pools: of the config's placement.
      devices: that the run may use.

    Raises:
      UserError: names all that is missing or broken.
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
    demonstrations, pairs, judge_tokenizer = None, {}, None
    if config.sft.num_steps and config.sft.path:
        demonstrations = find("sft.path", functools.partial(_demonstrations, config))
    if kind.grades:
        sources = config.data.training_sources | config.data.evaluation_sources
        find("reward.grader", functools.partial(graders_of, config, sources))
        if path := config.rollout.environment:
            find("rollout.environment", functools.partial(load_environment, path))
    if kind.rewards:
        judge_tokenizer = _find_rewards(config, {r for pool in pools for r in pool.roles}, find)
    if kind.pairs:
        pairs = _find_pairs(config, find)
    find.check()
    return Findings(problems, demonstrations or (), pairs, judge_tokenizer)


def _needs_chat_template(config: Config) -> bool:
    data = config.data
    sources = (*data.training_sources.values(), *data.evaluation_sources.values())
    return any(data.format_of(source).chat for source in sources)


def _find_packages(config: Config, find: Finder) -> None:
    wandb = "wandb" if config.run.wandb_project else ""
    packages = {
        "run.wandb_project": wandb,
        "rollout.driver": lookup_driver(config.rollout.driver).package,
    }
    for setting, package in packages.items():
        if package:
            find(setting, functools.partial(_check_installed, package))


def _find_rewards(config: Config, roles: set[str], find: Finder) -> Tokenizer | None:
    """Reward functions and the models that come with weights; returns the tokenizer of the judge."""
    for name, function in config.reward.functions.items():
        find(f"reward.functions.{name}", functools.partial(user_reward, function["path"]))
    # Roles of one setting, the critics, have the same weights.
    rows = {row.setting: row for role, row in ROLES.items() if role in roles}
    for setting, row in rows.items():
        if directory := row.weights(config):
            find(setting, functools.partial(row.check, setting, directory))
    if not config.reward.judge.model:
        return None
    return find("reward.judge.model", functools.partial(load_judge_tokenizer, config))


def _find_pairs(config: Config, find: Finder) -> dict[str, tuple[Preference, ...]]:
    options, found = config.preference, {}
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
            f"the package {package} is not installed; run pip install 'jaxrl[{package}]', or do without it"
        )
