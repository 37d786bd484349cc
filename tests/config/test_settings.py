"""Every setting meets what cannot be meant, through the door that recipes and command lines go through.

Each is refused in one line before anything is compiled, or named here as meant. A new setting is found by
reflection: it declares its range, or the tests fail.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import math
import typing
from typing import Annotated, Any

import pytest
from ml_collections import config_dict as ml_config_dict
from pydantic import AfterValidator

from jaxrl import checks
from jaxrl.algos.advantages import ADVANTAGES
from jaxrl.algos.aggregation import AGGREGATIONS
from jaxrl.algos.covariance import SELECTIONS
from jaxrl.algos.policy_losses import POLICY_LOSSES
from jaxrl.algos.preference_losses import PREFERENCE_LOSSES
from jaxrl.algos.registry import check_options
from jaxrl.config import command_line
from jaxrl.config.config_tree import (
    flatten_config,
    from_config_dict,
    group_class,
    is_dict,
    leaf_types,
    to_config_dict,
)
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.mesh.sharding_strategies import ZERO
from jaxrl.models.model_config import RopeScaling
from jaxrl.rollout.settings import EngineConfig
from jaxrl.trainer.resolved import resolve

# What no setting means, of each kind.
NEVER = {
    "nan": math.nan,
    "-inf": -math.inf,
    "-1": -1,
    "10^12": 10**12,
    "5e-324": 5e-324,
    "NUL": "a\0b",
    "nested": [[1]],
}
SIGNED = {  # a weight or a score may have either sign, and -1 steps are those before the first one
    "cost.limit",
    "evaluation.every",
    "reward.functions.brevity.weight",
    "reward.grader_weight",
    "reward.judge.weight",
    "reward.model_weight",
}


def recipe() -> ml_config_dict.ConfigDict:
    """The demo, with everything filled that may be empty, and no setting derived from another."""
    tree = command_line.load_recipe("configs/dapo_tiny.py")
    tree.model.rope_scaling = to_config_dict(RopeScaling())
    with tree.unlocked():
        tree.reward.functions = {"brevity": {"path": "rewards.py:brevity", "weight": 1.0}}
        tree.algorithm.advantage_options = {"normalize_std": True, "epsilon": 1e-6}
        tree.preference.loss = "bradley_terry"
        tree.preference.options = {"center_coef": 0.01}
    return to_config_dict(from_config_dict(Config, tree))


RECIPE = recipe()
KINDS = leaf_types(Config)
# Without the options of functions that generate data, which check them themselves.
SETTINGS = sorted(
    name
    for name in {*KINDS, *flatten_config(from_config_dict(Config, RECIPE))}
    if not name.startswith(("data.train.options.", "data.evaluation.options."))
)


def checked(tree: ml_config_dict.ConfigDict) -> None:
    """What a command does with a recipe before it asks for devices."""
    config = from_config_dict(Config, tree)
    resolve(config)


def with_value(setting: str, value: Any) -> ml_config_dict.ConfigDict:
    """The recipe with a value that the ConfigDict itself would not have let in."""
    *groups, name = setting.split(".")
    tree = copy.deepcopy(RECIPE)
    node = tree
    for group in groups:
        node = node[group]
    node.unlock()
    with node.ignore_type():
        node[name] = value
    return tree


def refusal(setting: str, value: Any) -> str | None:
    """The line that refuses a value; None if it is accepted."""
    try:
        if setting in KINDS and not is_dict(KINDS[setting]):
            # The door begins with this. It is fast, and most values come no further.
            checks.check_value(setting, value, KINDS[setting])
        checked(with_value(setting, value))
    except UserError as error:
        return str(error)
    except (TypeError, OverflowError) as error:  # of the assignment, with the line of the recipe
        return command_line._recipe_failure("recipe.py", error, ())
    return None


def test_the_recipe_itself_is_accepted():
    checked(RECIPE)


def says(line: str, leaf: str) -> bool:
    # Of a table it is the entry that is named; of an assignment that fails the line of the recipe.
    return leaf in line or "recipe.py" in line or " option" in line or "no setting 'a'" in line


@pytest.mark.parametrize("value", NEVER.values(), ids=NEVER)
def test_every_setting_refuses_what_cannot_be_meant(value):
    wrong = []
    for setting in SETTINGS:
        if value == -1 and setting in SIGNED:
            continue
        line = refusal(setting, value)
        named = line is not None and says(line, setting.rsplit(".", 1)[-1])
        if not named or "\n" in line or len(line) > 600:
            wrong.append(f"{setting} = {value!r}: {line!a}")
    assert not wrong, "\n".join(wrong)


def settings_classes(cls: type) -> set[type]:
    groups = (group_class(kind) for kind in typing.get_type_hints(cls).values())
    return {cls}.union(*(settings_classes(group) for group in groups if group is not None))


def undeclared(annotation: Any) -> bool:
    """Whether a number may stand there, and no rule says which."""
    if typing.get_origin(annotation) is Annotated:
        kind, *rules = typing.get_args(annotation)
        return undeclared(kind) and not any(isinstance(rule, AfterValidator) for rule in rules)
    if annotation in (int, float):
        return True
    return typing.get_origin(annotation) is not typing.Literal and any(
        map(undeclared, typing.get_args(annotation))
    )


# Those of a server only if it is here.
SERVERS = (
    [importlib.import_module("jaxrl_serving.serve_config").ServeConfig]
    if importlib.util.find_spec("jaxrl_serving")
    else []
)


@pytest.mark.parametrize("root", [Config, EngineConfig, RopeScaling, *SERVERS])
def test_every_number_of_the_settings_declares_its_range(root):
    missing = [
        f"{cls.__name__}.{name}"
        for cls in settings_classes(root)
        for name, annotation in typing.get_type_hints(cls, include_extras=True).items()
        if undeclared(annotation)
    ]
    assert not missing, "annotate with a range of jaxrl.checks: " + ", ".join(sorted(missing))


# Options: the keywords of what a config may name.

OPTIONS = [
    (table, name, parameter)
    for table in (ADVANTAGES, AGGREGATIONS, POLICY_LOSSES, PREFERENCE_LOSSES, SELECTIONS)
    for name, function in table.items()
    for parameter in inspect.signature(function, eval_str=True).parameters.values()
    # What the program fills in itself is no option.
    if parameter.kind is parameter.KEYWORD_ONLY
    and parameter.name not in ("num_groups", "importance_weight_BT", "selected")
]


@pytest.mark.parametrize(
    ("table", "name", "parameter"), OPTIONS, ids=[f"{name}-{p.name}" for _, name, p in OPTIONS]
)
def test_options_declare_their_range_and_keep_it(table, name, parameter):
    assert not undeclared(parameter.annotation), "annotate with a range of jaxrl.checks"
    for value in (math.nan, -math.inf, -1e12, 10**12, "text", [1]):
        with pytest.raises(UserError, match=f"^loss: option {parameter.name}"):
            check_options(_only(table[name], parameter.name), {parameter.name: value}, "loss")


def _only(function, name: str):
    """A function with that one option, so that no other need be given."""
    signature = inspect.signature(function, eval_str=True)

    def stub(**options):
        return function(**options)

    stub.__signature__ = signature.replace(parameters=[signature.parameters[name]])
    return stub


# What two settings mean together, and tables.


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("rollout.min_response_tokens", 100_000, "leaves no room below max_response_tokens 48"),
        ("algorithm.correction.bounds", (3.0, 2.0), "write the lower one first"),
        ("model.rope_scaling.high_freq_factor", 1.0, "not above low_freq_factor"),
        ("model.lora.targets", ("q", "qq"), "model.lora.targets[1] = 'qq': is not one of q, k, v"),
        ("algorithm.loss_options.clip_low", "wide", "option clip_low = 'wide': "),
        ("algorithm.loss_options", {"clip": 0.2}, "has no option clip"),
        *(
            (setting, value, f"{setting} = {value!r}: leads to another folder; write a name")
            for setting in ("name", "sft.run")
            for value in ("../x", "/tmp/x", "..", ".", "a/b")
        ),
        ("placement", {"all": 3}, "placement.all = 3: "),
        ("placement", {"all": {}}, "placement.all.roles: "),
        ("placement", {"all": {"roles": [1]}}, "placement.all.roles = [1]: "),
        *(
            ("placement", {"all": {"roles": ["actor"]} | changes}, f"placement.all.{line}")
            for changes, line in (
                ({"fsdp": 0}, "fsdp = 0: must be at least 1"),
                ({"devices": "0-3-"}, "devices = '0-3-': "),
                ({"tensor": 2}, 'tensor"; near: '),
                ({"layouts": {"actor": "1-4-1"}}, "layouts.actor = '1-4-1': "),
                ({"layouts": {"actor": {"devices": "0-3"}}}, 'layouts.actor.devices"; near: '),
            )
        ),
        ("mesh.train", "1-1-1000000000000", "numbers from 1 to 1,000,000 joined by dashes"),
        ("mesh.train", "1-1-²", "numbers from 1 to 1,000,000 joined by dashes"),
        ("mesh.generate", "1-1-0-1", "numbers from 1 to 1,000,000 joined by dashes"),
        ("reward.functions", {"brevity": {"path": 1, "weight": 1.0}}, "functions.brevity.path = 1"),
        ("reward.functions", {"brevity": {"weight": 1.0}}, "functions.brevity.path: "),
        (
            "reward.functions",
            {"brevity": {"path": "a.py:f", "wieght": 1.0}},
            'unknown setting "reward.functions.brevity.wieght"; near: reward.functions.brevity.w',
        ),
        ("seed", 10**400, "must be at least 0 and at most 2,147,483,647"),
    ],
)
def test_what_does_not_go_together_is_one_line(setting, value, message):
    line = refusal(setting, value)
    assert line is not None and message in line and "\n" not in line


def test_the_names_of_shardings_are_those_there_are():
    kinds = typing.get_args(typing.get_type_hints(LayoutConfig)["sharding"])
    assert set(kinds) == set(ZERO)
