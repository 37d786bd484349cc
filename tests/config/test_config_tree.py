"""The config door: defaults out as a ConfigDict, checked dataclasses back in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from ml_collections import config_dict as ml_config_dict

from jaxrl.checks import settings
from jaxrl.config import config_tree
from jaxrl.errors import UserError


@settings
class Optim:
    lr: float = 1e-6
    lr_warmup_steps: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Literal["constant", "cosine"] = "constant"

    def __post_init__(self):
        if self.lr <= 0:
            raise ValueError(f"lr {self.lr} is not positive; use 1e-6 or so")


@settings
class Model:
    width: int = 8
    optim: Optim = Optim()


@settings
class Pool:
    devices: int = 1


@settings
class Config:
    seed: int = 0
    fast: bool = False
    scale: float = 1
    name: str | None = None
    limit: int | None = None
    ratio: float | None = 2
    depth: int | Literal["auto"] = "auto"
    axes: tuple[str, ...] = ("data", "fsdp")
    actor: Model = Model()
    critic: Model | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    weights: dict[str, float] | None = None
    extra: Any = None
    pools: Mapping[str, Pool] = dataclasses.field(default_factory=lambda: {"main": Pool(devices=8)})


def changed(**settings: Any) -> ml_config_dict.ConfigDict:
    """Defaults with dotted settings (a__b for a.b) changed as a recipe would."""
    tree = config_tree.to_config_dict(Config())
    for path, value in settings.items():
        *groups, last = path.split("__")
        node = tree
        for group in groups:
            node = node[group]
        node[last] = value
    return tree


def read(**settings: Any) -> Config:
    return config_tree.from_config_dict(Config, changed(**settings))


def test_there_and_back_is_the_identity():
    config = Config(
        name="a",
        limit=3,
        depth=4,
        axes=(),
        critic=Model(width=2),
        options={"a": 1, "deep": {"b": (1, 2)}},
        weights={"x": 0.5},
        extra={"y": [1]},
        pools={"one": Pool(devices=1), "two": Pool(devices=2)},
    )
    assert config_tree.from_config_dict(Config, config_tree.to_config_dict(config)) == config
    assert read() == Config()


def test_a_recipe_changes_what_it_names_and_nothing_else():
    config = read(seed=7, actor__optim__lr=0.5, limit=3, name="x", axes=["data"], depth=2)
    model = Model(optim=Optim(lr=0.5))
    assert config == Config(seed=7, actor=model, limit=3, name="x", axes=("data",), depth=2)
    assert read(ratio=None, actor__optim__schedule="cosine").ratio is None
    assert read(weights={"x": 1}, extra="any") == Config(weights={"x": 1.0}, extra="any")
    # An integer default of a float setting takes floats, and integers become floats.
    assert read(scale=0.25).scale == 0.25 and type(read(scale=3).scale) is float
    assert read(actor={"width": 3}) == Config(actor=Model(width=3))


def test_the_tree_is_locked_except_for_free_form_dicts():
    tree = config_tree.to_config_dict(Config(options={"level": 1}))
    with pytest.raises(AttributeError):
        tree.sead = 1
    with pytest.raises(AttributeError):
        tree.actor.optim.lrr = 1
    tree.options.digits = 3
    tree.options.level = "hard"
    tree.pools.extra = config_tree.to_config_dict(Pool(devices=4))
    config = config_tree.from_config_dict(Config, tree)
    assert config.options == {"level": "hard", "digits": 3}
    assert config.pools == {"main": Pool(devices=8), "extra": Pool(devices=4)}


def test_an_override_of_a_derived_setting_stays_there():
    tree = config_tree.to_config_dict(Config())
    tree.limit = tree.get_ref("seed")
    tree.seed = 24
    assert tree.limit == 24
    tree.limit = 6
    config = config_tree.from_config_dict(Config, tree)
    assert (config.seed, config.limit) == (24, 6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": True}, "limit = True: "),
        ({"axes": ("data", len)}, r"axes\[1\] = <built-in function len>: "),
        ({"actor__optim__betas": (0.9,)}, r"actor.optim.betas\[1\]: "),
        ({"actor__optim__schedule": "cosin"}, "actor.optim.schedule = 'cosin': "),
        ({"actor": None}, "actor = None: "),
        ({"pools__main": 3}, "pools.main = 3: "),
    ],
)
def test_a_wrong_type_is_named_with_path_and_value(settings, message):
    with pytest.raises(UserError, match=f"^{message}"):
        read(**settings)


def test_an_optional_group_is_a_setting_before_its_own():
    names = list(config_tree.leaf_types(Config))
    assert "actor" not in names and names.index("critic") + 1 == names.index("critic.width")


def test_the_printed_config_is_one_line_a_setting_and_stable():
    config = read(options={"b": "x\ny", "a": (1,)})
    assert config_tree.format_config(config).splitlines() == [
        "seed = 0",
        "fast = False",
        "scale = 1.0",
        "name = None",
        "limit = None",
        "ratio = 2.0",
        "depth = 'auto'",
        "axes = ('data', 'fsdp')",
        "actor.width = 8",
        "actor.optim.lr = 1e-06",
        "actor.optim.lr_warmup_steps = 10",
        "actor.optim.betas = (0.9, 0.95)",
        "actor.optim.schedule = 'constant'",
        "critic = None",
        "options.a = (1,)",
        "options.b = 'x\\ny'",
        "weights = None",
        "extra = None",
        "pools.main.devices = 8",
    ]


def test_an_entry_of_settings_may_name_some_of_them_only():
    tree = config_tree.to_config_dict(Config())
    tree.pools.extra = {}
    tree.pools.more = Pool(devices=4)
    tree.pools.more.devices = 5
    config = config_tree.from_config_dict(Config, tree)
    assert config.pools == {"main": Pool(devices=8), "extra": Pool(), "more": Pool(devices=5)}
    tree.pools.extra = {"devcies": 3}
    with pytest.raises(UserError, match=r'unknown setting "pools\.extra\.devcies"'):
        config_tree.from_config_dict(Config, tree)
