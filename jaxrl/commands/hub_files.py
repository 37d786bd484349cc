"""Replaces names on the hub and in buckets in a config by the paths of the fetched files, before a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.config.config_tree import flatten_config, from_config_dict, to_config_dict
from jaxrl.config.schema import Config
from jaxrl.hub.local_paths import EVALUATION, TRAINING, store_of
from jaxrl.mesh import hosts
from jaxrl.mesh.pools import take_devices
from jaxrl.rollout.rollout_config import FROZEN_ROLE
from jaxrl.trainer.findings import Faults
from jaxrl.trainer.resolved import resolve
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


def with_hub_files(config: Config, devices: Sequence[Any] = (), *, weights: bool = True) -> Config:
    """Fetches what a config names on the hub or in buckets. Collective.

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
    # By the setting of each name: what asks the hub for it, and what returns its path here.
    wanted: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    roles = [row.setting for row in ROLES.values() if row.setting]
    models = ("tokenizer.path", *((*_MODELS, *roles) if weights else ()))
    for setting, text in flatten_config(config).items():
        group, _, field = setting.rpartition(".")
        splits = _ROWS.get(setting)
        if field == "path" and splits is None:
            splits = _GROUPS.get(group.rpartition(".")[0])
        is_model = setting in models or (weights and setting.startswith(FROZEN_ROLE))
        found = store_of(text) if splits or is_model else None
        if found is None:
            continue
        (hub, name), bind = found, functools.partial
        if splits:
            wanted[setting] = bind(hub.check_rows, name, splits), bind(hub.rows, name, splits)
        else:
            only = {"tokenizer_only": setting == "tokenizer.path"}
            wanted[setting] = bind(hub.check_model, name, **only), bind(hub.model, name, **only)
    if not wanted:
        return config
    faults = Faults()
    # Missing devices are reported with missing files, so that one start finds both.
    if devices:
        faults("devices", lambda: take_devices(resolve(config).pools, devices))
    for setting, (check, _) in wanted.items():
        faults(setting, check)
    faults.check(has_plan=bool(devices))
    tree = to_config_dict(config)
    for setting, (_, fetch) in wanted.items():
        # Processes that share a cache find the files there after the first has fetched them.
        hosts.on_first(fetch)
        tree.update_from_flattened_dict({setting: str(fetch())})
    return from_config_dict(Config, tree)
