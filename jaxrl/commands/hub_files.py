"""Replaces names on the Hugging Face hub in a config by the paths of the fetched files, before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxrl.config.config_tree import from_config_dict, to_config_dict
from jaxrl.config.schema import Config
from jaxrl.hub.hub_names import HubName, hub_name
from jaxrl.hub.local_paths import EVALUATION, TRAINING, open_hub
from jaxrl.mesh import hosts
from jaxrl.mesh.pools import take_devices
from jaxrl.trainer.algorithm import pools_of
from jaxrl.trainer.findings import Faults
from jaxrl.trainer.role_table import ROLES

# Besides the weights of the roles in `ROLES`.
_MODELS = ("weights", "adapter", "reward.judge.model")
_ROWS = {
    "data.train.path": TRAINING,
    "data.evaluation.path": EVALUATION,
    "sft.path": TRAINING,
    "preference.path": TRAINING,
    "preference.evaluation_path": EVALUATION,
}
_GROUPS = {"data.sources": TRAINING, "data.evaluations": EVALUATION}


class _Wanted(NamedTuple):
    """A name in a setting: `check` asks the hub for it, `fetch` returns its path here."""

    setting: str
    check: Callable[[], Any]
    fetch: Callable[[], str]


def with_hub_files(config: Config, devices: Sequence[Any] = (), *, weights: bool = True) -> Config:
    """Fetches what a config names on the hub. Collective.

    Nothing is fetched before everything named was found there and the devices are enough.

    Args:
      config: config of a run.
      devices: devices of the run; () if none are needed.
      weights: whether weights are fetched, or data and tokenizer only.

    Returns:
      The config with paths in place of the names.

    Raises:
      UserError: something cannot be fetched; all such things are named, and missing devices beside them.
    """
    wanted = list(_wanted(config, weights=weights))
    if not wanted:
        return config
    faults = Faults()
    # Missing devices are told with missing files, so that one start finds both.
    if devices:
        faults("devices", lambda: take_devices(pools_of(config), devices))
    for name in wanted:
        faults(name.setting, name.check)
    faults.check()
    tree = to_config_dict(config)
    for name in wanted:
        # Processes that share a cache find the files there after the first has fetched them.
        hosts.on_first(name.fetch)
        tree.update_from_flattened_dict({name.setting: name.fetch()})
    return from_config_dict(Config, tree)


def _wanted(config: Config, *, weights: bool) -> Iterator[_Wanted]:
    tree = to_config_dict(config)
    named = {}
    roles = [row.setting for row in ROLES.values() if row.setting]
    for setting in (*((*_MODELS, *roles) if weights else ()), "tokenizer.path", *_ROWS):
        named[setting] = _value(tree, setting)
    splits = dict(_ROWS)
    for group, of_group in _GROUPS.items():
        for key in _value(tree, group):
            setting = f"{group}.{key}.path"
            named[setting], splits[setting] = _value(tree, setting), of_group
    for setting, text in named.items():
        name = hub_name(text)
        if name is not None:
            yield _ask(setting, name, splits.get(setting))


def _ask(setting: str, name: HubName, splits: Sequence[str] | None) -> _Wanted:
    hub = open_hub()
    if splits is not None:
        return _Wanted(
            setting, lambda: hub.check_rows(name, splits), lambda: str(hub.rows(name, splits))
        )
    only = setting == "tokenizer.path"
    return _Wanted(
        setting,
        lambda: hub.check_model(name, tokenizer_only=only),
        lambda: str(hub.model(name, tokenizer_only=only)),
    )


def _value(tree: Any, setting: str) -> Any:
    for part in setting.split("."):
        tree = tree[part]
    return tree
