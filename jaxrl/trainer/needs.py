"""What a run will need is looked up here, before it trains anything.

A warm start can take hours, and a missing reward function after it costs them all. Each kind of run lists
what it will ask for later, as functions that find it or raise UserError; `trainer.requirements` calls them
together with its own checks of devices, weights and data, and tells everything at once. What has to fit the
tokenizer is held against it as soon as there is one.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping

from jaxrl.config.schema import Config
from jaxrl.data.data_config import SourceConfig
from jaxrl.data.demonstrations import Demonstration, read_demonstrations
from jaxrl.data.preferences import Preference, read_preferences
from jaxrl.data.sources import FaultOf
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl.errors import UserError
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.weight_loading import check_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.rewards.graders import GraderChoice, Graders
from jaxrl.rewards.grading import Row
from jaxrl.rewards.user import user_reward
from jaxrl.rollout.drivers import lookup_driver
from jaxrl.rollout.environment import load_environment
from jaxrl.trainer.cross_checks import roles_of
from jaxrl.trainer.requirements import Lookup
from jaxrl.trainer.run_graders import choices_of, graders_of

Needs = Callable[[Config], list[Lookup]]
"""What one kind of run will ask for."""


def of_reinforcement(config: Config) -> list[Lookup]:
    """A run with rewards: what scores responses, and the models of roles that come with weights."""
    lookups = of_evaluation(config)
    for name, function in config.reward.functions.items():
        lookups.append(
            Lookup(f"reward.functions.{name}", functools.partial(user_reward, function["path"]))
        )
    for setting, directory in _score_models(config).items():
        lookups.append(Lookup(setting, functools.partial(score_model, setting, directory)))
    if config.critic.weights:
        critic = functools.partial(critic_model, config.critic.weights)
        lookups.append(Lookup("critic.weights", critic))
    if config.reward.judge.model:
        lookups.append(Lookup("reward.judge.model", functools.partial(judge_model, config)))
    return lookups


def of_evaluation(config: Config) -> list[Lookup]:
    """A run that answers problems: who grades, and who answers its turns."""
    lookups = of_training(config)
    sources = config.data.training_sources | config.data.evaluation_sources
    lookups.append(Lookup("reward.grader", functools.partial(graders_of, config, sources)))
    path = config.rollout.environment
    if path:
        lookups.append(Lookup("rollout.environment", functools.partial(load_environment, path)))
    return lookups


def of_fine_tuning(config: Config) -> list[Lookup]:
    """Supervised fine-tuning alone, which is evaluated where the config names evaluation problems."""
    evaluates = any(source.is_named for source in config.data.evaluation_sources.values())
    return of_evaluation(config) if evaluates else of_training(config)


def of_preferences(config: Config) -> list[Lookup]:
    """A run on pairs of answers: its files."""
    lookups = of_training(config)
    options = config.preference
    for setting, path in (
        ("preference.path", options.path),
        ("preference.evaluation_path", options.evaluation_path),
    ):
        if path:
            lookups.append(Lookup(setting, functools.partial(pairs_of, config, path)))
    return lookups


def of_training(config: Config) -> list[Lookup]:
    """Every run: packages that it asks for, and what its warm start imitates."""
    lookups = []
    for setting, package in (
        ("run.wandb_project", "wandb" if config.run.wandb_project else ""),
        ("rollout.driver", lookup_driver(config.rollout.driver).package),
    ):
        if package:
            lookups.append(Lookup(setting, functools.partial(_package, package)))
    if config.warm_start.num_steps and config.warm_start.path:
        look = functools.partial(demonstrations_of, config)
        lookups.append(Lookup("warm_start.path", look))
    return lookups


def check_fits(config: Config, tokenizer: Tokenizer, needs: Needs) -> None:
    """Raises UserError if a model that reads the policy's tokens does not have all of them."""
    found = {lookup.setting for lookup in needs(config)}
    for setting, directory in _score_models(config).items():
        if setting in found:
            check_vocabulary(read_config(directory), tokenizer, directory)
    if "critic.weights" in found:
        directory = config.critic.weights
        check_vocabulary(read_config(directory), tokenizer, directory)


def truth_faults(default: GraderChoice, settings: Mapping[str, SourceConfig]) -> FaultOf:
    """Lets the grader of each data set read ground truths, before there is a response to any.

    Args:
      default: grader of data sets without one of their own, and its options.
      settings: of each data set, by the name that its problems carry.
    """
    graders = Graders(default, choices_of(settings))
    return lambda answer, extra, source: graders.fault_of(Row(answer, extra, source))


# Roles that come with weights of their own


def score_model(setting: str, directory: str) -> ModelConfig:
    """The shape of a reward or cost model, its files looked through.

    Raises:
      UserError: a file is missing or broken, or the model gives no scores.
    """
    model = read_config(directory)
    if not model.num_scores:
        raise UserError(
            f"{setting} {directory} is a language model; it must be a ...ForSequenceClassification, "
            "with a head of scores, such as launch/reward_model.py trains"
        )
    check_params(directory, model)
    return model


def critic_model(directory: str) -> ModelConfig:
    """The shape of the model that a critic starts from, its files looked through; UserError likewise."""
    model = read_config(directory)
    check_params(directory, model)
    return model


def judge_model(config: Config) -> tuple[ModelConfig, Tokenizer]:
    """The generative judge's model and its tokenizer, its files looked through.

    Raises:
      UserError: a file is missing or broken, the model says nothing in words, its tokenizer is another
        model's, or it has no chat template though it is to be asked through one.
    """
    options = config.reward.judge
    model = read_config(options.model)
    if model.num_scores:
        raise UserError(
            f"reward.judge.model {options.model} is a model of scores, which says nothing in words; set "
            "reward.model to it, or name a language model"
        )
    check_params(options.model, model)
    tokenizer = load_tokenizer(options.model)
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer of {options.model} has {tokenizer.vocab_size} tokens, the model's embedding "
            f"{model.vocab_size} rows; put two files of one model there"
        )
    if options.chat and tokenizer.chat_template is None:
        raise UserError(
            f"{options.model} has no chat template; set reward.judge.chat to False, or put a "
            "chat_template.jinja there"
        )
    return dataclasses.replace(model, num_tokens=tokenizer.vocab_size), tokenizer


def check_vocabulary(model: ModelConfig, tokenizer: Tokenizer, directory: str) -> None:
    """Raises UserError unless a model can read the policy's tokens."""
    if model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model in {directory} "
            f"{model.vocab_size}; it reads the policy's tokens as they are, so use one with the same "
            "tokenizer"
        )


def _score_models(config: Config) -> dict[str, str]:
    """Directories of the models that give scores, by setting."""
    directories = {"reward.model": config.reward.model}
    if "cost" in roles_of(config):
        directories["cost.model"] = config.cost.model
    return {setting: directory for setting, directory in directories.items() if directory}


# Files


def demonstrations_of(config: Config) -> tuple[Demonstration, ...]:
    """What the warm start's file has to imitate."""
    options = config.warm_start
    return read_demonstrations(
        options.path,
        source=options.path,
        prompt_field=options.prompt_field,
        response_field=options.response_field,
        messages_field=options.messages_field,
    )


def pairs_of(config: Config, path: str) -> tuple[Preference, ...]:
    """The preference pairs of a file."""
    options = config.preference
    return read_preferences(
        path,
        source=path,
        margin_field=options.margin_field or None,
        harm_fields=options.harm_fields or None,  # pyright: ignore[reportArgumentType]
    )


def _package(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise UserError(
            f"the package {name} is not installed; run pip install 'jaxrl[{name}]', or do without it"
        )
