"""Every setting meets what cannot be meant, through the door that recipes and command lines go through.

Each is refused in one line before anything is compiled, or named here as meant. A new setting is found by
reflection: it declares its range, or the tests fail.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import typing
from typing import Annotated, Any

import pytest
from ml_collections import config_dict as ml_config_dict

from jaxrl import checks
from jaxrl.algos.advantages import ADVANTAGES
from jaxrl.algos.aggregation import AGGREGATIONS
from jaxrl.algos.covariance import SELECTIONS
from jaxrl.algos.policy_losses import POLICY_LOSSES
from jaxrl.algos.preference_losses import PREFERENCE_LOSSES
from jaxrl.algos.registry import check_options
from jaxrl.config import command_line
from jaxrl.config.config_tree import (
    accepts_none,
    flatten_config,
    from_config_dict,
    group_class,
    leaf_types,
    to_config_dict,
)
from jaxrl.config.schema import Config
from jaxrl.data.records import ReasoningGymRecords
from jaxrl.errors import UserError
from jaxrl.evaluation.evaluate_config import EvaluateConfig
from jaxrl.mesh.groupings import ZERO
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.models.model_config import RopeScaling
from jaxrl.rewards.judge import JudgeTemplate
from jaxrl.rollout.settings import EngineConfig
from jaxrl.serving.serve_config import ServeConfig
from jaxrl.trainer.cross_checks import check_algorithm

HOSTILE = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "-1": -1,
    "0": 0,
    "10^12": 10**12,
    "text": "no such",
    "list": [1],
    "None": None,
}

OFF = "0 turns it off, or is the default"
SIGNED = "a weight or a score may have either sign"
NO_LIMIT = "infinity is no limit"
# What is accepted of the numbers above, and why. Nothing accepts NaN or 10^12.
MEANT = {
    "inf": {"algorithm.loss_options.dual_clip": NO_LIMIT, "critic.clip": NO_LIMIT}
    | {"algorithm.correction.highest": NO_LIMIT}
    | {
        f"{stage}optim.grad_clip": NO_LIMIT
        for stage in ("", "critic.", "preference.", "warm_start.")
    },
    "-1": dict.fromkeys(
        (
            "cost.limit",
            "reward.functions.brevity.weight",
            "reward.grader_weight",
            "reward.judge.failed_score",
            "reward.judge.low",
            "reward.judge.weight",
            "reward.model_weight",
        ),
        SIGNED,
    ),
    "0": dict.fromkeys(
        (
            "algorithm.correction.lowest",
            "algorithm.correction.veto",
            "algorithm.entropy_coef",
            "algorithm.kl.loss_coef",
            "algorithm.kl.reward_coef",
            "algorithm.kl.target",
            "algorithm.loss_options.clip_high",
            "algorithm.loss_options.clip_low",
            "cost.limit",
            "cost.multiplier_lr",
            "cost.pretrain_coef",
            "critic.warmup_steps",
            "data.curriculum.decay",
            "data.evaluation.limit",
            "data.evaluation.seed",
            "data.shuffle_seed",
            "data.train.limit",
            "data.train.seed",
            "evaluation.min_p",
            "evaluation.temperature",
            "evaluation.top_k",
            "hosts.process_id",
            "mesh.simulated_devices",
            "model.attention_softcap",
            "model.experts_per_token",
            "model.logits_softcap",
            "model.lora.rank",
            "model.num_experts",
            "model.num_scores",
            "model.num_tokens",
            "model.query_pre_attn_scalar",
            "model.rope_local_theta",
            "model.sliding_window",
            "preference.options.center_coef",
            "reward.functions.brevity.weight",
            "reward.grader_weight",
            "reward.grader_workers",
            "reward.judge.failed_score",
            "reward.judge.low",
            "reward.judge.weight",
            "reward.model_weight",
            "reward.overlong_buffer_tokens",
            "reward.overlong_penalty",
            "rollout.max_generation_batches",
            "run.collapse.reward_loss",
            "rollout.min_p",
            "rollout.min_response_tokens",
            "rollout.min_spread",
            "rollout.prefill_chunk_tokens",
            "rollout.top_k",
            "run.collapse.reward_loss",
            "run.report_samples",
            "run.rollouts_every",
            "run.rollouts_prompts",
            "seed",
            "train.load_balancing_coef",
            "train.pipeline_microbatches",
            "warm_start.num_steps",
            "data.evaluation.size",  # of a file, which has its own
            "data.train.size",
        ),
        OFF,
    )
    | {
        f"{stage}optim.{name}": OFF
        for stage in ("", "critic.", "preference.", "warm_start.")
        for name in (
            "beta1",
            "beta2",
            "lr",
            "lr_decay_steps",
            "lr_final",
            "lr_stable_steps",
            "lr_warmup_steps",
            "weight_decay",
        )
    },
}
# Words of the user's own: names, places, fields of files. What they name is looked up before training.
OWN_WORDS = {
    "name",
    "weights",
    "hardware",
    "mesh.hardware",
    "tokenizer.path",
    "data.system_prompt",
    "data.answer_prefix",
    "rollout.environment",
    "reward.model",
    "reward.judge.model",
    "reward.functions.brevity.path",
    "cost.model",
    "critic.weights",
    "warm_start.path",
    "warm_start.prompt_field",
    "warm_start.response_field",
    "warm_start.messages_field",
    "warm_start.run",
    "preference.path",
    "preference.margin_field",
    "run.output",
    "run.wandb_project",
} | {
    f"data.{split}.{name}"
    for split in ("train", "evaluation")
    for name in ("source", "path", "prompt_field", "answer_field", "solution_field")
}


def recipe() -> ml_config_dict.ConfigDict:
    """The demo, with everything filled that may be empty, and no setting derived from another."""
    tree = command_line.load_recipe("configs/dapo_tiny.py")
    tree.model.rope_scaling = to_config_dict(RopeScaling())
    with tree.unlocked():
        tree.reward.functions = {"brevity": {"path": "rewards.py:brevity", "weight": 1.0}}
        tree.algorithm.advantage_options = {"normalize_std": True, "epsilon": 1e-6}
        tree.preference.options = {"center_coef": 0.01}
    return to_config_dict(from_config_dict(Config, tree))


RECIPE = recipe()
KINDS = leaf_types(Config)
SETTINGS = sorted({*KINDS, *flatten_config(from_config_dict(Config, RECIPE))})


def checked(tree: ml_config_dict.ConfigDict) -> None:
    """What a command does with a recipe before it asks for devices."""
    config = from_config_dict(Config, tree)
    check_algorithm(config)
    for split in (config.data.train, config.data.evaluation):
        if not split.path:
            ReasoningGymRecords(split.task, size=1, seed=0, **split.options)


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
        checked(with_value(setting, value))
    except UserError as error:
        return str(error)
    return None


def is_meant(setting: str, hostile: str) -> bool:
    kind = KINDS.get(setting, Any)
    if hostile == "None":
        return kind is not Any and accepts_none(kind)
    if hostile == "text":
        return setting in OWN_WORDS
    if hostile == "list":
        return setting == "rollout.stop_ids"
    return setting in MEANT.get(hostile, {})


def test_the_recipe_itself_is_accepted():
    checked(RECIPE)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_every_setting_refuses_what_cannot_be_meant(hostile):
    wrong = []
    for setting in SETTINGS:
        line = refusal(setting, HOSTILE[hostile])
        leaf = setting.rsplit(".", 1)[-1]
        if (line is None) != is_meant(setting, hostile):
            wrong.append(f"{setting} = {HOSTILE[hostile]!r}: {line or 'accepted'}")
        elif line is not None and (leaf not in line or "\n" in line):
            wrong.append(f"{setting} = {HOSTILE[hostile]!r} is refused by {line!r}")
    assert not wrong, "\n".join(wrong)


def test_the_command_line_refuses_them_alike():
    # One text each: the words are read by the type of the setting, which the test above has walked.
    for setting, kind in KINDS.items():
        if group_class(kind) or not {int, float} & set(typing.get_args(kind) or (kind,)):
            continue
        tree = copy.deepcopy(RECIPE)
        with pytest.raises(UserError, match=setting.rsplit(".", 1)[-1]):
            command_line._apply_override(tree, KINDS, setting, "1000000000000")
            checked(tree)


def settings_classes(cls: type) -> set[type]:
    groups = (group_class(kind) for kind in typing.get_type_hints(cls).values())
    return {cls}.union(*(settings_classes(group) for group in groups if group is not None))


def undeclared(annotation: Any) -> bool:
    """Whether a number may stand there, and no rule says which."""
    if typing.get_origin(annotation) is Annotated:
        kind, *rules = typing.get_args(annotation)
        return undeclared(kind) and not any(isinstance(rule, checks.Range) for rule in rules)
    if annotation in (int, float):
        return True
    return typing.get_origin(annotation) is not typing.Literal and any(
        map(undeclared, typing.get_args(annotation))
    )


@pytest.mark.parametrize(
    "root", [Config, ServeConfig, EvaluateConfig, EngineConfig, JudgeTemplate, RopeScaling]
)
def test_every_number_of_the_settings_declares_its_range(root):
    missing = [
        f"{cls.__name__}.{name}"
        for cls in settings_classes(root)
        for name, annotation in checks.annotations_of(cls).items()
        if undeclared(annotation)
    ]
    assert not missing, "annotate with a range of jaxrl.checks: " + ", ".join(sorted(missing))


@pytest.mark.parametrize("cls", sorted(settings_classes(Config), key=lambda cls: cls.__name__))
def test_every_group_checks_its_fields_by_itself(cls):
    """Not the door alone: a dataclass that is made in Python refuses them too."""
    numbers = [
        field.name
        for field in dataclasses.fields(cls)
        if field.type is not Any and typing.get_type_hints(cls)[field.name] in (int, float)
    ]
    for name in numbers:
        for value in (math.nan, 10**12, "text", None, [1]):
            with pytest.raises(ValueError, match=name):
                cls(**{name: value})


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
        ("algorithm.correction.lowest", 3.0, "0 <= lowest < highest"),
        ("model.rope_scaling.high_freq_factor", 1.0, "not above low_freq_factor"),
        ("model.lora.targets", ("q", "qq"), "model.lora.targets[1] 'qq' is not one of q, k, v"),
        ("algorithm.loss_options.clip_low", "wide", "option clip_low = 'wide': expected a n"),
        ("algorithm.loss_options", {"clip": 0.2}, "has no option clip"),
        ("data.train.options", {"min_terms": "three"}, "min_terms = 'three': expected a whole"),
        ("data.train.options", {"min_term": 3}, "has no setting 'min_term'"),
        ("placement", {"all": 3}, "placement.all = 3: expected dict[str, Any]"),
        ("placement", {"all": {}}, "placement.all.roles is None; name the roles"),
        ("placement", {"all": {"train": "1-1-1"}}, "placement.all.roles is None; name the roles"),
        ("placement", {"all": {"roles": 1}}, "placement.all.roles is 1; name the roles"),
        ("placement", {"all": {"roles": [1]}}, "placement.all.roles is [1]; name the roles"),
        (
            "placement",
            {"all": {"roles": ["actor"], "fsdp": -1}},
            "placement.all.fsdp -1 is below 1",
        ),
        (
            "placement",
            {"all": {"roles": ["actor"], "train": 3}},
            "placement.all.train = 3: expected",
        ),
        ("mesh.train", "1-1-1000000000000", "numbers from 1 to 1,000,000 joined by dashes"),
        ("mesh.train", "1-1-²", "numbers from 1 to 1,000,000 joined by dashes"),
        ("mesh.generate", "1-1-0-1", "numbers from 1 to 1,000,000 joined by dashes"),
        ("reward.functions", {"brevity": {"path": 1, "weight": 1.0}}, "functions.brevity.path = 1"),
        ("seed", 10**400, "is above 2,147,483,647"),
    ],
)
def test_what_does_not_go_together_is_one_line(setting, value, message):
    line = refusal(setting, value)
    assert line is not None and message in line and "\n" not in line


def test_the_names_of_shardings_are_those_there_are():
    kinds = typing.get_args(typing.get_type_hints(LayoutConfig)["sharding"])
    assert set(kinds) == set(ZERO)
